"""The tables that the README quotes, generated from the records in `harness/results/`.

Between `<!-- records: FILE -->` and `<!-- /records -->` stands, in Markdown, what the records of that file say. Nobody
types a figure: `harness tables --write README.md` writes them, and a test fails when they differ. When a port's sources
are no longer those that were measured, the table says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import common

from .bench_tables import across_tables, grouped, path_of, title_of
from .errors import UsageError
from .jobs import own_name
from .provenance import ROOT, commit_and_date, folder_hash
from .reader import Record, read_records
from .records import problem_of
from .tables import Table, as_markdown, problem_cells
from .timing import FLOP_CONVENTION, Timing, speed_cells

RESULTS = Path(__file__).with_name("results")
_BLOCK = re.compile(r"(<!-- records: (\S+) -->\n).*?(<!-- /records -->)", re.DOTALL)


def record_tables(records: Iterable[Record]) -> list[Table]:
    """One table for each port, direction and path of the timed records, beside the baseline they were timed with.

    And of a bench, in which several ports or baselines were timed together, one across for each direction and path.
    """
    timed = [record for record in records if record["samples"]]
    tables = [_table(rows) for rows in grouped(timed, "port").values()]
    if any(len(record["samples"][0]["ms"]) > 2 for record in timed):
        tables += across_tables(timed, {})
    return tables


def _table(records: list[Record]) -> Table:
    first = records[0]
    port = first["port"]
    baseline = next((b["port"] for record in records for b in record["baselines"]), None)
    theirs = title_of(baseline) if baseline else "–"
    table = Table(
        f"{port} {first['direction']}, {path_of(first)}",
        ("B,H,D", "dtype", "N", "mask", f"{port} ms", f"{theirs} ms", f"{port} TF/s", f"{theirs} TF/s",
         f"% of {theirs}", "95 %", "check"),
        labels=4,
    )  # fmt: skip
    for record in records:
        table.add(*_cells(record, port, baseline))
    facts, packages = first["provenance"], first["provenance"]["packages"]
    table.notes.append(
        f"{facts['card']}, driver {facts['driver']}, torch {packages['torch']}, triton {packages['triton']}, "
        f"{commit_and_date(facts)}. {FLOP_CONVENTION}"
    )
    for record in records:
        timing = _timing(record)
        for name in (name for name in (port, baseline) if name and timing.late(name)):
            table.notes.append(
                f"{record['problem']['id']}: {timing.late(name)} of {len(timing.rounds)} samples of {name} may hold "
                "host time."
            )
    if any(have_changed(port, record["sources"]) for record in records):
        table.notes.append(f"The sources of {port} or of `common` have changed since this was measured.")
    return table


def have_changed(port: str, sources: str | None) -> bool:
    """Whether a port's sources, or those of `common`, are no longer the ones of this hash."""
    return sources != folder_hash(ROOT / common.port_package(own_name(port)))


def _cells(record: Record, port: str, baseline: str | None) -> tuple[str, ...]:
    figures = speed_cells(_timing(record), port, baseline, record["flops"])
    return *problem_cells(problem_of(record["problem"])), *figures, record["verdict"]


def _timing(record: Record) -> Timing:
    return Timing.of_record(record["samples"], record["host_us"])


def with_tables(text: str, results: Path = RESULTS) -> str:
    """The text with what stands between its markers generated anew. Raises UsageError for a file that is not there."""

    def generate(match: re.Match[str]) -> str:
        tables = record_tables(read_records(results / match[2], ("check",)))
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
