"""Curves: values against N, both in logarithms, one curve a contestant with its name at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from common import Problem

from .contestants import Contestant
from .svg import LogScale, element, line, mark, picture, text

LEFT, RIGHT, TOP, BOTTOM = 52, 252, 22, 226
HEIGHT = 262
LABEL = 12.5  # between the middles of two names
NOTHING = 9  # above the axis lies the line of what is too small for the scale, twice as much above that the scale
LOST = 13  # between what stands above the plot, for values there are none of


@dataclass(frozen=True)
class Point:
    """A value at a length. value: None for one that is not there, which `tip` explains."""

    length: int
    value: float | None
    tip: str


@dataclass(frozen=True)
class Curve:
    """The points of a contestant, by length. is_reference: drawn dashed, without marks."""

    who: Contestant
    points: tuple[Point, ...]
    is_reference: bool = False

    @property
    def known(self) -> list[tuple[int, float, str]]:
        """Lengths, values and tips, of the points that have a value."""
        return [(p.length, p.value, p.tip) for p in self.points if p.value is not None]


@dataclass(frozen=True)
class Axis:
    """What is drawn upwards. form: a value in words. least: what is no larger lies on a line of its own, `below`."""

    name: str
    form: Callable[[float], str]
    least: float = 0.0
    below: str = ""


def name_of_lengths(problems: Iterable[Problem]) -> str | None:
    """The name of the axis along which these problems lie; None where there is no such axis.

    There is one where they have different lengths, and differ in nothing else but a batch that keeps B·N.
    """
    problems = list(problems)
    lengths = {p.len_q for p in problems}
    batches, tokens = {p.batch for p in problems}, {p.batch * p.len_q for p in problems}
    if len(lengths) < 2 or len(lengths) != len(problems) or min(lengths) < 1:
        return None
    if any(p.len_q != p.len_k for p in problems) or (len(batches) > 1 and len(tokens) > 1):
        return None
    return f"N, at B {batches.pop()}" if len(batches) == 1 else f"N, at B·N {tokens.pop()}"


def curve_chart(curves: Sequence[Curve], axis: Axis, *, x_name: str, title: str) -> Markup | None:
    """The picture; None where no curve has a point. Points without a value stand above the plot, in words."""
    if not any(curve.known for curve in curves):
        return None
    lengths = sorted({p.length for curve in curves for p in curve.points})
    values = [value for curve in curves for _, value, _ in curve.known if value > axis.least]
    lost = [(curve.who, p) for curve in curves for p in curve.points if p.value is None]
    top = TOP + 6 + LOST * len({who.name for who, _ in lost})
    floor = BOTTOM - 3 * NOTHING if axis.least else BOTTOM
    y = LogScale.holding(values or [axis.least or 1.0], floor, top)
    x = LogScale(lengths[0] / 1.15, lengths[-1] * 1.15, LEFT, RIGHT)

    def height(value: float) -> float:
        return y(value) if value > axis.least else BOTTOM - NOTHING

    drawn = [_curve(curve, lengths, x, height) for curve in curves if curve.known]
    ends = [(curve.who, curve.is_reference, *_end(curve, x, height)) for curve in curves if curve.known]
    return picture(
        *_frame(x, y, axis, lengths, x_name, top),
        *drawn,
        *names_beside(ends, top),
        *_lost(lost, x),
        height=HEIGHT,
        title=title,
        description=_in_words(curves, axis),
        class_="curves",
    )


def _frame(x: LogScale, y: LogScale, axis: Axis, lengths: Sequence[int], x_name: str, top: float) -> list[Markup]:
    parts = [text(axis.name, 0, TOP - 10, class_="tick"), line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")]
    for tick in y.ticks():
        parts.append(line(LEFT, y(tick), RIGHT, y(tick), "grid"))
        parts.append(text(axis.form(tick), LEFT - 5, y(tick) + 4, class_="tick", anchor="end"))
    if axis.below:
        parts.append(line(LEFT, BOTTOM - NOTHING, RIGHT, BOTTOM - NOTHING, "grid"))
        parts.append(text(axis.below, LEFT - 5, BOTTOM - NOTHING + 4, class_="tick", anchor="end"))
    room, last = 30.0, -math.inf
    for length in lengths:
        parts.append(line(x(length), top, x(length), BOTTOM, "grid"))
        if x(length) - last >= room:  # of lengths that lie close together not all are named
            parts.append(text(str(length), x(length), BOTTOM + 15, class_="tick", anchor="middle"))
            last = x(length)
    parts.append(text(x_name, (LEFT + RIGHT) / 2, BOTTOM + 31, class_="tick", anchor="middle"))
    return parts


def _curve(curve: Curve, lengths: Sequence[int], x: LogScale, height: Callable[[float], float]) -> Markup:
    """The curve; it has a gap where it has no value at a length at which others have one."""
    pieces: list[list[str]] = [[]]
    known = {length: value for length, value, _ in curve.known}
    for length in lengths:
        if length in known:
            pieces[-1].append(f"{x(length):.2f},{height(known[length]):.2f}")
        else:
            pieces.append([])
    style = "reference" if curve.is_reference else "ours" if curve.who.is_ours else "theirs"
    paths = [element("polyline", points=" ".join(piece), class_=style) for piece in pieces if len(piece) > 1]
    marks = (
        mark(curve.who.mark, x(length), height(value), element("title", tip)) for length, value, tip in curve.known
    )
    marked = [] if curve.is_reference else list(marks)
    return element("g", *paths, *marked, class_=f"curve {curve.who.style}", data_who=curve.who.name)


def _end(curve: Curve, x: LogScale, height: Callable[[float], float]) -> tuple[float, float]:
    length, value, _ = curve.known[-1]
    return x(length), height(value)


def names_beside(ends: Sequence[tuple[Contestant, bool, float, float]], top: float) -> list[Markup]:
    """The names beside the ends of their curves, pushed apart where they would lie on each other.

    ends: who, whether that is the reference, and where its curve ends, x and y.
    """
    ends = sorted(ends, key=lambda end: end[3])
    places = apart([y for *_, y in ends], LABEL, top, BOTTOM)
    parts = []
    for (who, is_reference, x, y), place in zip(ends, places, strict=True):
        at = RIGHT + 14
        leader = line(x + 5, y, at - 4, place, "leader")
        key = line(at - 4, place, at + 4, place, "reference") if is_reference else mark(who.mark, at, place)
        name = text(who.title, at + 8, place + 4, class_="name")
        parts.append(element("g", leader, key, name, class_=f"curve {who.style}", data_who=who.name))
    return parts


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places near the wanted ones, which ascend, at least a gap apart and, where they fit, in low…high."""
    if (len(wanted) - 1) * gap > high - low:
        gap = (high - low) / (len(wanted) - 1)
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap if places else low))
    limit = high
    for i in reversed(range(len(places))):
        places[i] = limit = min(places[i], limit)
        limit -= gap
    return places


def _lost(lost: Sequence[tuple[Contestant, Point]], x: LogScale) -> list[Markup]:
    """A row above the plot for each contestant that has no value somewhere: a cross at the length, and why."""
    rows: dict[str, list[tuple[Contestant, Point]]] = {}
    for who, point in lost:
        rows.setdefault(who.name, []).append((who, point))
    parts = []
    for i, members in enumerate(rows.values()):
        who, first = members[0]
        y, begin, end = TOP + LOST * i, x(first.length), x(members[-1][1].length)
        crosses = [mark("cross", x(p.length), y, element("title", p.tip)) for _, p in members]
        told = f"{who.title}: {first.tip}"
        on_the_left = begin > (LEFT + RIGHT) / 2
        place = begin - 8 if on_the_left else end + 8
        words = text(told, place, y + 4, class_="lost", anchor="end" if on_the_left else "start")
        parts.append(element("g", *crosses, words, class_=f"curve {who.style}", data_who=who.name))
    return parts


def _in_words(curves: Sequence[Curve], axis: Axis) -> str:
    told = []
    for curve in curves:
        known = curve.known
        words = [f"{axis.form(value)} at N {length}" for length, value, _ in known]
        words += [f"{p.tip} at N {p.length}" for p in curve.points if p.value is None]
        told.append(f"{curve.who.title}: {', '.join(words)}")
    return f"{axis.name} against N, both in logarithms. " + "; ".join(told) + "."
