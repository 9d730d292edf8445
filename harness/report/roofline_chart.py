"""Rooflines as pictures: rate against operations a byte, both in logarithms, the ceilings as lines, a mark a kernel.

The colour of a mark is its port's, its shape what the kernel computes. Below the plot each has a line of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from markupsafe import Markup

from ..bench_tables import path_of
from ..ceilings import Ceilings
from ..reader import Record
from ..records import problem_of
from ..roofline_records import Spot, ceilings_of, problem_key, spots_of
from .contestants import Contestant
from .svg import WIDTH, LogScale, element, line, mark, picture, text

LEFT, RIGHT, TOP, BOTTOM = 46, 278, 22, 262
KEY, ROW = 52, 15  # from the axis to the first line of words, and from one to the next
HEADING = 42  # what a chart has above it in a file of its own
SHAPES = {"forward": "circle", "delta": "square", "dk, dv": "triangle", "dq": "diamond"}


@dataclass(frozen=True)
class Chart:
    """A picture's elements, its height, what it is of, and the text that stands for it."""

    elements: tuple[Markup, ...]
    height: float
    problem: str
    path: str
    description: str

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return f"Roofline: {self.problem}, {self.path}"

    @property
    def picture(self) -> Markup:
        """The picture by itself, for a page that has the style."""
        return picture(
            *self.elements, height=self.height, title=self.title, description=self.description, class_="rooflines"
        )


def roofline_chart(records: Sequence[Record]) -> Chart | None:
    """The chart of the records of one problem on one path; None where no kernel has a time, or no ceiling is known."""
    ceilings = ceilings_of(records[0])
    # The kernels of one table stand under one set of ceilings.
    spots = [spot for record in records for spot in spots_of(record, ceilings) if spot.tflops]
    if not spots or not ceilings.copy_gbs or not ceilings.matrix_tflops:
        return None
    slope = ceilings.copy_gbs / 1e3  # TFLOP/s for one operation a byte
    top = max(ceilings.matrix_tflops.values())
    x = LogScale.holding([*(spot.intensity for spot in spots), top / slope], LEFT, RIGHT)
    y = LogScale.holding([*(spot.tflops or top for spot in spots), top * 1.2], BOTTOM, TOP)
    words = [f"{_rate(spot)}, held back by {spot.bound}" for spot in spots]
    told = [f"copy {ceilings.copy_gbs:.0f} GB/s"]
    told += [f"{name} {rate:.0f} TFLOP/s" for name, rate in ceilings.matrix_tflops.items()]
    return Chart(
        (*_frame(x, y), *_roofs(ceilings, slope, x, y), *_marks(spots, words, x, y), *_key(spots)),
        height=BOTTOM + KEY + ROW * len(spots),
        problem=problem_of(records[0]["problem"]).id,
        path=path_of(records[0]),
        description=f"TFLOP/s against FLOP/B, both in logarithms. Ceilings: {', '.join(told)}. {'; '.join(words)}.",
    )


def _rate(spot: Spot) -> str:
    share = f", {100 * spot.roof_ms / spot.ms:.0f} % of its roof" if spot.roof_ms and spot.ms else ""
    rate = f"{spot.tflops:.3g} TFLOP/s" if spot.instruction else f"{spot.gbs:.0f} GB/s"
    return f"{spot.record['port']} {spot.role}: {rate}{share}"


def _frame(x: LogScale, y: LogScale) -> list[Markup]:
    parts = [text("TFLOP/s", 0, TOP - 10, class_="tick"), line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")]
    for tick in y.ticks():
        parts.append(line(LEFT, y(tick), RIGHT, y(tick), "grid"))
        parts.append(text(f"{tick:g}", LEFT - 5, y(tick) + 4, class_="tick", anchor="end"))
    for tick in x.ticks(most=5):
        parts.append(line(x(tick), TOP, x(tick), BOTTOM, "grid"))
        parts.append(text(f"{tick:g}", x(tick), BOTTOM + 15, class_="tick", anchor="middle"))
    parts.append(
        text("FLOP/B, of the bytes that must move", (LEFT + RIGHT) / 2, BOTTOM + 31, class_="tick", anchor="middle")
    )
    return parts


def _roofs(ceilings: Ceilings, slope: float, x: LogScale, y: LogScale) -> list[Markup]:
    """Memory's ceiling up to the highest one of products, and each of those from where it meets memory's."""
    parts = []
    for name, rate in ceilings.matrix_tflops.items():
        parts.append(line(x(rate / slope), y(rate), RIGHT, y(rate), "axis"))
        parts.append(text(f"{name} {rate:.0f}", RIGHT + 4, y(rate) + 4, class_="tick"))
    begin, end = max(x.low, y.low / slope), max(ceilings.matrix_tflops.values()) / slope
    parts.append(line(x(begin), y(begin * slope), x(end), y(end * slope), "axis"))
    middle = (begin * end) ** 0.5
    words = f"copy {ceilings.copy_gbs:.0f} GB/s"
    parts.append(text(words, x(middle) - 8, y(middle * slope) - 4, class_="tick", anchor="end"))
    return parts


def _marks(spots: Sequence[Spot], words: Sequence[str], x: LogScale, y: LogScale) -> list[Markup]:
    return [
        _of_port(spot, mark(SHAPES[spot.role], x(spot.intensity), y(spot.tflops or y.low), element("title", tip)))
        for spot, tip in zip(spots, words, strict=True)
    ]


def _key(spots: Sequence[Spot]) -> list[Markup]:
    """A line of words for each mark."""
    places = [BOTTOM + KEY + ROW * i for i in range(len(spots))]
    return [
        _of_port(spot, mark(SHAPES[spot.role], 8, y - 4), text(_rate(spot), 18, y, class_="name"))
        for spot, y in zip(spots, places, strict=True)
    ]


def _of_port(spot: Spot, *children: Markup) -> Markup:
    who = Contestant(spot.record["port"])
    return element("g", *children, class_=f"curve {who.style}", data_who=who.name)


def charts(records: Sequence[Record]) -> list[Chart]:
    """A chart for each problem, of records of one path."""
    by_problem: dict[object, list[Record]] = {}
    for record in records:
        by_problem.setdefault(problem_key(record), []).append(record)
    return [chart for members in by_problem.values() if (chart := roofline_chart(members)) is not None]


def standalone(records: Sequence[Record]) -> str:
    """The charts of these records, of one path, one above the other, as a file of its own with the page's style."""
    style = files("harness.report").joinpath("templates", "style.css").read_text(encoding="utf-8")
    drawn = charts(records)
    parts, height = [], 0.0
    for chart in drawn:
        heading = text(chart.problem, 0, 14, class_="name"), text(chart.path, 0, 30, class_="tick")
        moved = element("g", *chart.elements, transform=f"translate(0 {HEADING})")
        place = f"translate(0 {height:g})"
        parts.append(element("g", element("desc", chart.description), *heading, moved, transform=place))
        height += chart.height + HEADING
    return element(
        "svg",
        element("title", "; ".join(chart.title for chart in drawn) or "No kernel has a time"),
        element("style", Markup(style)),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"-8 -8 {WIDTH + 16} {height + 16:g}",
        class_="rooflines",
        role="img",
        font_family="system-ui, sans-serif",
    )
