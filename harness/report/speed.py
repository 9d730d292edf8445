"""Speeds: for each direction, mask and head dimension a card of pictures, and the tables of `harness bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..bench_tables import SPAN_WORDS, across_tables, beside_itself, port_tables, title_of
from ..reader import Record
from ..tables import Table, problem_cells
from ..timing import FLOP_CONVENTION
from .bars import Bar, bar_chart
from .cards import Card
from .contestants import Contestant
from .curves import Axis, Curve, Point, curve_chart, name_of_lengths
from .runs import Facets, Run, facets_of, family_of, family_title, origins
from .tables import PageTable, page_table
from .times import Row, absences, baseline_of, rows_of

MARKED = "* Some of these samples were taken while the card throttled, or may hold host time: the numbers tell."
APART = (
    "Not all of these were timed by turns with each other, as harness bench does it: between those that were not, "
    "compare the % of the baseline."
)
INTERVALS = (
    "95 % beside ms and TFLOP/s: the bootstrap interval of the contestant's own median over the rounds; beside the "
    "percentage: that of the ratio to the baseline, resampled by rounds, which is what tells contestants apart. "
    f"{FLOP_CONVENTION}"
)


@dataclass(frozen=True)
class Part:
    """What was timed of one run and direction. across, ports: the tables of `harness bench`."""

    title: str
    facets: Facets
    cards: list[Card]
    across: list[PageTable]
    ports: list[PageTable]
    origins: list[str]


def speed_parts(runs: Sequence[Run]) -> list[Part]:
    """The parts of the page that tell speeds; none where nothing was timed."""
    parts = []
    for run in runs:
        by_direction: dict[str, list[Record]] = {}
        for record in run.of("check"):
            by_direction.setdefault(record["direction"], []).append(record)
        parts += [
            _part(run, records) for records in by_direction.values() if any(record["samples"] for record in records)
        ]
    return parts


def _part(run: Run, records: list[Record]) -> Part:
    direction = records[0]["direction"]
    facets = {"path": run.path, "direction": direction}
    cards = [_card(run, members) for members in _families(records) if any(record["samples"] for record in members)]
    across = [page_table(table, facets) for table in across_tables(records, {})]
    ports = [page_table(table, facets) for table in (*port_tables(records), *beside_itself(records))]
    title = f"{SPAN_WORDS[direction].capitalize()}, {run.path}, from {run.file}"
    return Part(title, facets, cards, across, ports, origins(records))


def _families(records: Sequence[Record]) -> list[list[Record]]:
    """The records by their family, and by what their speeds are relative to."""
    families: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        families.setdefault((baseline_of(record), *family_of(record)), []).append(record)
    return list(families.values())


def _card(run: Run, records: Sequence[Record]) -> Card:
    first, rows = records[0], rows_of(records)
    facets, title = facets_of(first), family_title(first)
    where = f"{SPAN_WORDS[first['direction']]}, {title}, {run.path}"
    largest = max(time.tflops.high for row in rows for time in row.times)
    pictures = []
    for row in rows:
        label = f"TFLOP/s at {_label(row, rows)}"
        pictures.append((label, bar_chart(_bars(row), largest=largest, unit="TFLOP/s", title=f"{label}, {where}")))
    latency = _latency(rows, where)
    if latency is not None:
        pictures.append(("Time of a launch against N", latency))
    notes = [MARKED] if any(time.is_marked for row in rows for time in row.times) else []
    notes += [] if all(row.is_together for row in rows) else [APART]
    notes += [f"Not timed: {line}" for line in absences(records)]
    numbers = _numbers(rows, baseline_of(first), where, facets)
    return Card(title, facets, pictures, numbers, origins(records), notes)


def _label(row: Row, rows: Sequence[Row]) -> str:
    """What tells a row from the others of its card."""
    cells = problem_cells(row.problem)
    label = f"N {cells[2]}, B {row.problem.batch}"
    alike = [other for other in rows if problem_cells(other.problem) == cells]
    return f"{label}, case {row.case}" if len(alike) > 1 else label


def _bars(row: Row) -> list[Bar]:
    timed = [Bar(time.who, time.tflops, time.verdict, str(time), is_marked=time.is_marked) for time in row.times]
    failed = [Bar(who, None, words, f"{who.title}: {words}") for who, words in row.failures]
    return sorted(timed + failed, key=lambda bar: bar.who.rank)


def _latency(rows: Sequence[Row], where: str) -> Markup | None:
    """Time against N, where the problems lie along N."""
    x_name = name_of_lengths(row.problem for row in rows if row.times)
    if x_name is None:
        return None
    points: dict[str, list[Point]] = {}
    for row in rows:
        for time in row.times:
            tip = f"N {row.problem.len_q}, {time}"
            points.setdefault(time.who.name, []).append(Point(row.problem.len_q, time.ms.value, tip))
    curves = [Curve(Contestant(name), tuple(own)) for name, own in points.items()]
    curves.sort(key=lambda curve: curve.who.rank)
    title = f"Time of a launch against N, {where}"
    return curve_chart(curves, Axis("Time", duration), x_name=x_name, title=title)


def duration(ms: float) -> str:
    """Milliseconds in the unit that suits them."""
    value, unit = (ms * 1e3, "µs") if ms < 1 else (ms, "ms") if ms < 1000 else (ms / 1e3, "s")
    return f"{value:.3g} {unit}"


def _numbers(rows: Sequence[Row], baseline: str | None, where: str, facets: Facets) -> PageTable:
    beside = "–" if baseline is None else title_of(baseline)
    table = Table(
        f"The numbers of these pictures: {where}",
        ("case", "N", "B", "contestant", "check", "ms", "95 %", "TFLOP/s", "95 %", f"% of {beside}", "95 %",
         "throttled", "with host time"),
        labels=5,
    )  # fmt: skip
    whos = []
    for row in rows:
        about = row.case, problem_cells(row.problem)[2], str(row.problem.batch)
        for time in row.times:
            figures = *time.ms.cells(4), *time.tflops.cells(1)
            ratio = ("–", "–") if time.beside is None else time.beside.cells(1, 100)
            rounds = f"{time.throttled}/{time.rounds}", f"{time.late}/{time.rounds}"
            table.add(*about, time.who.title, time.verdict, *figures, *ratio, *rounds, problem=row.problem)
            whos.append(time.who.name)
        for who, words in row.failures:
            table.add(*about, who.title, words, *["–"] * 8, problem=row.problem)
            whos.append(who.name)
    table.notes.append(INTERVALS)
    return page_table(table, facets, rows=[{"who": name} for name in whos])
