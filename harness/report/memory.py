"""Memory: what a launch holds at its height, and beyond the formula, against N."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from ..bench_tables import SPAN_WORDS
from ..memory_tables import MEGA
from ..reader import Record
from ..records import problem_of
from ..tables import Table, problem_cells
from .cards import Card
from .contestants import FORMULA, Contestant
from .curves import Axis, Curve, Point, curve_chart, name_of_lengths
from .runs import Facets, Run, facets_of, family_of, family_title, origins
from .tables import PageTable, page_table

NOTHING = 1e4  # bytes; PyTorch's allocator rounds to 512 bytes a tensor, so that less than this says nothing
OUT = "out of memory"
NOTE = (
    "MB are 10^6 bytes of PyTorch's allocator, with what the launch is given. The formula: its inputs and outputs, "
    "lse, and for a backward delta, each once. The plain attention holds the scores; it is what checks count errors "
    "in, and has no verdict of its own."
)


def memory_cards(runs: Sequence[Run]) -> list[Card]:
    """A card for each direction, shape and mask whose memory was measured."""
    cards = []
    for run in runs:
        families: dict[tuple[object, ...], list[Record]] = {}
        for record in run.of("memory"):
            families.setdefault(family_of(record), []).append(record)
        cards += [_card(run, sorted(members, key=_length)) for members in families.values()]
    return cards


def _length(record: Record) -> int:
    return int(record["problem"]["len_q"])


def _card(run: Run, records: Sequence[Record]) -> Card:
    first, facets = records[0], facets_of(records[0])
    title = f"{SPAN_WORDS[first['direction']].capitalize()}, {run.path}, {family_title(first)}"
    pictures = []
    x_name = name_of_lengths({(r["case"], p): p for r in records for p in [problem_of(r["problem"])]}.values())
    if x_name is not None:
        for name, chart in (("At the height of a launch", _peaks), ("Beyond the formula", _extras)):
            picture = chart(records, x_name, f"Memory, {name}: {title}")
            if picture is not None:
                pictures.append((name, picture))
    return Card(f"{title}, from {run.file}", facets, pictures, _numbers(records, title, facets), origins(records))


def _peaks(records: Sequence[Record], x_name: str, title: str) -> Markup | None:
    formula = {_length(r): Point(_length(r), r["formula_bytes"], size(r["formula_bytes"])) for r in records}
    curves = [*_curves(records, "peak_bytes"), Curve(Contestant(FORMULA), tuple(formula.values()), is_reference=True)]
    return curve_chart(curves, Axis("Memory", size), x_name=x_name, title=title)


def _extras(records: Sequence[Record], x_name: str, title: str) -> Markup | None:
    axis = Axis("Extra", size, least=NOTHING, below="nothing")
    return curve_chart(_curves(records, "extra_bytes"), axis, x_name=x_name, title=title)


def _curves(records: Sequence[Record], name: str) -> list[Curve]:
    """A curve of each contestant that was measured, or ran out of memory, at some length."""
    points: dict[str, list[Point]] = {}
    for record in records:
        value, who = record[name], Contestant(record["contestant"])
        if value is None and record["reason"] != OUT:
            continue
        tip = OUT if value is None else f"{who.title}, N {_length(record)}: {size(value)}"
        points.setdefault(who.name, []).append(Point(_length(record), value, tip))
    curves = [Curve(Contestant(who), tuple(own)) for who, own in points.items()]
    return sorted(curves, key=lambda curve: curve.who.rank)


def size(count: float) -> str:
    """Bytes in the unit that suits them, of powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor * 0.9995:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _numbers(records: Sequence[Record], title: str, facets: Facets) -> PageTable:
    table = Table(
        f"Memory: {title}",
        ("N", "B", "contestant", "check", "MB at the height", "formula MB", "beyond it MB"),
        labels=4,
    )
    order = sorted(records, key=lambda record: (_length(record), Contestant(record["contestant"]).rank))
    for record in order:
        problem, who = problem_of(record["problem"]), Contestant(record["contestant"])
        peak, extra, verdict = record["peak_bytes"], record["extra_bytes"], record["verdict"] or "–"
        formula = f"{record['formula_bytes'] / MEGA:.1f}"
        figures = (record["reason"] or "–", formula, "–")
        if peak is not None and extra is not None:
            figures = (f"{peak / MEGA:.1f}", formula, f"{extra / MEGA:+.1f}")
        about = problem_cells(problem)[2], str(problem.batch)
        table.add(*about, who.title, verdict, *figures, problem=problem)
    table.notes.append(NOTE)
    return page_table(table, facets, rows=[{"who": record["contestant"]} for record in order])
