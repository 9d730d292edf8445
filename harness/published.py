"""The tables that the README quotes, generated from the records in `harness/results/`.

Between `<!-- records: FILE -->` and `<!-- /records -->` stands, in Markdown, what the records of that file say. Nobody
types a figure: `harness tables --write README.md` writes them, and a test fails when they differ. When a port's sources
are no longer those that were measured, the table says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common

from .baselines import BASELINES
from .environment import path_title
from .errors import UsageError
from .provenance import ROOT, folder_hash
from .records import problem_of
from .tables import Table, as_markdown, problem_cells
from .timing import FLOP_CONVENTION, Timing, speed_cells

RESULTS = Path(__file__).with_name("results")
_BLOCK = re.compile(r"(<!-- records: (\S+) -->\n).*?(<!-- /records -->)", re.DOTALL)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines. Raises UsageError when it cannot be read or holds something else."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"records {path} cannot be read: {error}") from error
    if not records or not all(isinstance(r, dict) and r.get("kind") == "run" for r in records):
        raise UsageError(f"{path} holds no records of harness run")
    return records


def record_tables(records: Iterable[dict[str, Any]]) -> list[Table]:
    """One table for each port, direction and path of the timed records, beside the baseline they were timed with."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["samples"]:
            groups.setdefault((record["port"], record["direction"], _path(record)), []).append(record)
    return [_table(*key, rows) for key, rows in groups.items()]


def _path(record: dict[str, Any]) -> str:
    card, sm = record["provenance"]["card"], record["provenance"]["sm"]
    target = record["target"]
    return path_title(target["name"], own=target["sm"].removesuffix("a") == sm, where=card)


def _table(port: str, direction: str, path: str, records: list[dict[str, Any]]) -> Table:
    baseline = next((name for name in records[0]["host_us"] if name != port), None)
    theirs = BASELINES[baseline].title if baseline in BASELINES else baseline or "–"
    table = Table(
        f"{port} {direction}, {path}",
        ("B,H,D", "dtype", "N", "mask", f"{port} ms", f"{theirs} ms", f"{port} TF/s", f"{theirs} TF/s",
         f"% of {theirs}", "95 %", "check"),
        labels=4,
    )  # fmt: skip
    for record in records:
        table.add(*_cells(record, port, baseline))
    first = records[0]
    facts, packages = first["provenance"], first["provenance"]["packages"]
    commit = (facts["git"]["commit"] or "unknown")[:10]
    table.notes.append(
        f"{facts['card']}, driver {facts['driver']}, torch {packages['torch']}, triton {packages['triton']}, "
        f"commit {commit}. {FLOP_CONVENTION}"
    )
    if any(record["sources"] != folder_hash(ROOT / common.port_package(port)) for record in records):
        table.notes.append(f"The sources of {port} or of `common` have changed since this was measured.")
    return table


def _cells(record: dict[str, Any], port: str, baseline: str | None) -> tuple[str, ...]:
    timing = Timing.of_record(record["samples"], record["host_us"])
    figures = speed_cells(timing, port, baseline, record["flops"])
    return *problem_cells(problem_of(record["problem"])), *figures, record["verdict"]


def with_tables(text: str, results: Path = RESULTS) -> str:
    """The text with what stands between its markers generated anew. Raises UsageError for a file that is not there."""

    def generate(match: re.Match[str]) -> str:
        tables = record_tables(read_records(results / match[2]))
        return match[1] + "\n".join(as_markdown(table) for table in tables) + match[3]

    return _BLOCK.sub(generate, text)


def write_tables(path: Path) -> bool:
    """Writes a file's tables anew; whether it changed. Raises UsageError for a file without markers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--write {path} cannot be read: {error}") from error
    if not _BLOCK.search(text):
        raise UsageError(f"{path} has no <!-- records: FILE --> and <!-- /records -->")
    fresh = with_tables(text)
    if fresh != text:
        path.write_text(fresh, encoding="utf-8")
    return fresh != text
