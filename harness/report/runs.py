"""What a report is made of: the records of its files by code path, and by what the page can filter them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import DTYPE_NAMES, Problem

from ..bench_tables import path_of
from ..names import grid_of
from ..provenance import changed_ports, in_words
from ..reader import NothingToShow, Record, read_files
from ..records import problem_of
from ..sound import sound_records

KINDS = ("check", "disagreement", "memory", "roofline", "model")
CELL = (
    *("kind", "suite", "case", "problem", "inputs", "direction", "port", "ports", "contestant", "tensor"),
    *("compiled", "model", "weights", "text", "steps"),
)

Facets = dict[str, str]  # by the names of the page's filters: path, direction, d, mask, dtype, who


@dataclass(frozen=True)
class Run:
    """The records of one file and one code path, which is what one table or picture may hold.

    Times compare within a run, whose contestants were timed by turns; two files are two runs.
    """

    file: str
    path: str
    records: tuple[Record, ...]

    def of(self, kind: str) -> list[Record]:
        """The records of a kind."""
        return [record for record in self.records if record["kind"] == kind]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these files, in their order. Where a file has a cell twice, the later record counts.

    A file that has nothing that a report shows is told and left out. Raises UsageError when all are such, and for one
    that cannot be read or holds something else than records.
    """
    names = [path.name for path in paths]
    runs = []
    for path, found in read_files(paths, _shown):
        by_path: dict[str, dict[str, Record]] = {}
        for record in found:
            cell = json.dumps([record.get(name) for name in CELL], sort_keys=True)
            by_path.setdefault(path_of(record), {})[cell] = record
        file = path.name if names.count(path.name) == 1 else str(path)
        runs += [Run(file, where, tuple(records.values())) for where, records in by_path.items()]
    return runs


def _shown(path: Path) -> list[Record]:
    """The records of a file that a report shows; no candidates of a sweep, each a tile among fifty."""
    found = [record for record in sound_records(path, KINDS) if not grid_of(record.get("port", ""))]
    if not found:
        raise NothingToShow(f"{path} holds the candidates of a sweep only, which harness tables shows")
    return found


def facets_of(record: Record) -> Facets:
    """By what a record can be filtered."""
    about = {"path": path_of(record), "direction": record["direction"]}
    return about | problem_facets(problem_of(record["problem"]))


def problem_facets(problem: Problem) -> Facets:
    """By what a problem can be filtered."""
    return {"d": str(problem.head_dim), "mask": str(problem.mask), "dtype": DTYPE_NAMES[problem.dtype]}


def family_of(record: Record) -> tuple[object, ...]:
    """What the records of one card share: the suite, the direction, and their problem but for lengths and batch."""
    p = problem_of(record["problem"])
    fixed = p.head_dim, str(p.mask), p.dtype, p.heads_q, p.heads_kv, p.len_q == p.len_k
    return record["suite"], record["direction"], *fixed


def family_title(record: Record) -> str:
    """A family in words, without its direction."""
    p = problem_of(record["problem"])
    heads = f"{p.heads_q} heads" if p.group == 1 else f"{p.heads_q}/{p.heads_kv} heads"
    return f"D {p.head_dim}, {p.mask}, {DTYPE_NAMES[p.dtype]}, {heads}, suite {record['suite']}"


def origins(records: Sequence[Record]) -> list[str]:
    """Where these records come from, each different answer once; and whose kernels are no longer those measured."""
    told = list(dict.fromkeys(origin_of(record) for record in records))
    changed = " and ".join(sorted(changed_ports(records)))
    return told + ([f"The sources of {changed}, or of common, have changed since"] if changed else [])


def origin_of(record: Record) -> str:
    """Where a record comes from: card, driver, versions, commit, date."""
    facts = record["provenance"]
    interpreted = ", in Triton's interpreter" if facts["interpreted"] else ""
    return in_words(facts) + ("" if facts["date"] else ", of a date that was not recorded") + interpreted
