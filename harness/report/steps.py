"""Values by step of a training: a line a contestant, with its name at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .contestants import Contestant
from .curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, names_beside
from .svg import LinearScale, LogScale, element, line, picture, text

TOLD = 5  # steps that the words for a picture tell of


@dataclass(frozen=True)
class Series:
    """A contestant's values, of step 1, 2 and so on; what is not finite is a gap, on a log scale also what is 0."""

    who: Contestant
    values: tuple[float, ...]


def step_chart(series: Sequence[Series], name: str, form: Callable[[float], str], *, log: bool, title: str) -> Markup:
    """The picture. name: of what is drawn upwards, from 0 or in logarithms. form: a value in words."""
    drawn = [[value if _is_shown(value, log) else None for value in one.values] for one in series]
    known = [value for values in drawn for value in values if value is not None]
    top = TOP + 6
    y = LogScale.holding(known or [1.0], BOTTOM, top) if log else LinearScale.holding(max(known or [1.0]), BOTTOM, top)
    x = LinearScale(max(len(one.values) for one in series), LEFT, RIGHT)
    lines = [_line(one.who, values, x, y) for one, values in zip(series, drawn, strict=True)]
    last = [next((value for value in reversed(values) if value is not None), None) for values in drawn]
    ends = [(one.who, False, RIGHT - 2, y(value)) for one, value in zip(series, last, strict=True) if value is not None]
    return picture(
        *_frame(x, y, name, form),
        *lines,
        *names_beside(ends, top),
        height=HEIGHT,
        title=title,
        description=_in_words(series, name, form, log),
        class_="curves",
    )


def _is_shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _frame(x: LinearScale, y: LinearScale | LogScale, name: str, form: Callable[[float], str]) -> list[Markup]:
    parts = [text(name, 0, TOP - 10, class_="tick"), line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")]
    for tick in y.ticks():
        parts.append(line(LEFT, y(tick), RIGHT, y(tick), "grid"))
        parts.append(text(form(tick), LEFT - 5, y(tick) + 4, class_="tick", anchor="end"))
    for tick in x.ticks():
        if tick <= x.high:
            parts.append(line(x(tick), TOP + 6, x(tick), BOTTOM, "grid"))
            parts.append(text(f"{tick:g}", x(tick), BOTTOM + 15, class_="tick", anchor="middle"))
    parts.append(text("step", (LEFT + RIGHT) / 2, BOTTOM + 31, class_="tick", anchor="middle"))
    return parts


def _line(who: Contestant, values: Sequence[float | None], x: LinearScale, y: LinearScale | LogScale) -> Markup:
    pieces: list[list[str]] = [[]]
    for step, value in enumerate(values, start=1):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{x(step):.2f},{y(value):.2f}")
    style = "ours" if who.is_ours else "theirs"
    lines = [element("polyline", points=" ".join(piece), class_=style) for piece in pieces if piece]
    return element("g", *lines, class_=f"curve {who.style}", data_who=who.name)


def _in_words(series: Sequence[Series], name: str, form: Callable[[float], str], log: bool) -> str:
    told = []
    for one in series:
        count = len(one.values)
        steps = sorted({round(1 + i * (count - 1) / (TOLD - 1)) for i in range(TOLD)})
        told.append(f"{one.who.title}: " + ", ".join(f"{form(one.values[s - 1])} at step {s}" for s in steps))
    return f"{name} by step{', in logarithms' if log else ''}. " + "; ".join(told) + "."
