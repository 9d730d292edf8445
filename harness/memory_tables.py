"""The tables of `harness memory`, made of its records: one for each direction and path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .bench_tables import SPAN_WORDS, changed_notes, grouped, path_of, title_of
from .provenance import in_words
from .reader import Record
from .records import problem_of
from .tables import Table, problem_cells

MEGA = 1e6
COUNTED = (
    "MB are 10^6 bytes of PyTorch's allocator, with what the launch is given. The formula: its inputs and outputs, "
    "lse, and for a backward delta; a baseline without an lse takes less than it. naive: the plain attention, which "
    "holds the scores."
)


def memory_tables(records: Iterable[Record]) -> list[Table]:
    """For each direction and path: the formula, and the peak of each contestant with what it takes beyond it."""
    return [_table(members) for members in grouped(records).values()]


def _table(records: Sequence[Record]) -> Table:
    first = records[0]
    names = list(dict.fromkeys(record["contestant"] for record in records))
    rows: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in records:
        about = record["suite"], record["case"], record["problem"]["id"]
        rows.setdefault(about, {})[record["contestant"]] = record
    suites = ", ".join(dict.fromkeys(record["suite"] for record in records))
    table = Table(
        f"Memory {SPAN_WORDS[first['direction']]}, {path_of(first)}, suite {suites}: MB at the height of a launch, and "
        "in brackets beyond the formula",
        ("B,H,D", "dtype", "N", "mask", "formula", *map(title_of, names)),
        labels=4,
    )
    said: dict[str, str] = {}
    for row in rows.values():
        some = next(iter(row.values()))
        shown = _once(said, [(name, memory_cell(row[name]) if name in row else "–") for name in names])
        problem = problem_of(some["problem"])
        table.add(*problem_cells(problem), f"{some['formula_bytes'] / MEGA:.1f}", *shown, problem=problem)
    table.notes += [f"{in_words(first['provenance'])}. {COUNTED}"]
    table.notes += changed_notes(records)
    return table


def memory_cell(record: Record) -> str:
    """MB at the height of the launch, those beyond the formula, and the verdict; or why there are none."""
    if record["peak_bytes"] is None:
        return record["reason"]
    verdict = "" if record["verdict"] is None else f" {record['verdict']}"
    return f"{record['peak_bytes'] / MEGA:.1f} ({record['extra_bytes'] / MEGA:+.1f}){verdict}"


def _once(said: dict[str, str], cells: Sequence[tuple[str, str]]) -> list[str]:
    """The cells of a row; a reason that stands above is not said again, except what stands for a figure."""
    shown = ["–" if said.get(name) == cell and cell != "out of memory" else cell for name, cell in cells]
    said.update((name, cell) for name, cell in cells if not cell[0].isdigit())
    return shown
