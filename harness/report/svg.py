"""SVG as text: elements, and scales from values to places. What is not Markup is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 360  # of every picture, in its own units; on a page they are about one pixel each


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element. `stroke_width` is the attribute stroke-width, `class_` is class; None leaves an attribute out."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape(child) for child in children)
    return Markup(f"<{tag}{given}>{inner}</{tag}>")


def _plain(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def picture(*children: str, height: float, title: str, description: str, class_: str) -> Markup:
    """A whole picture, `WIDTH` wide, with the text that stands for it where it is not seen."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {_plain(float(height))}",
        class_=class_,
        role="img",
    )


def text(words: str, x: float, y: float, *, class_: str | None = None, anchor: str | None = None) -> Markup:
    """Words whose base line begins, or with `anchor` ends or has its middle, at a place."""
    return element("text", words, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def mark(shape: str, x: float, y: float, *children: str, radius: float = 3.5) -> Markup:
    """A point of a line, in one of the shapes of `contestants.MARKS`. children: its title."""
    r = radius
    corners = {
        "square": [(-r, -r), (r, -r), (r, r), (-r, r)],
        "triangle": [(0, -1.2 * r), (1.2 * r, r), (-1.2 * r, r)],
        "down": [(0, 1.2 * r), (1.2 * r, -r), (-1.2 * r, -r)],
        "diamond": [(0, -1.4 * r), (1.4 * r, 0), (0, 1.4 * r), (-1.4 * r, 0)],
        "plus": _cross(r, 0),
        "cross": _cross(r, math.pi / 4),
    }
    if shape == "circle":
        return element("circle", *children, cx=float(x), cy=float(y), r=r)
    points = " ".join(f"{_plain(float(x + dx))},{_plain(float(y + dy))}" for dx, dy in corners[shape])
    return element("polygon", *children, points=points)


def _cross(r: float, turn: float) -> list[tuple[float, float]]:
    """The twelve corners of a cross whose arms are as thick as a third of it."""
    arm, half = 1.3 * r, 0.45 * r
    corners = [(half, -arm), (half, -half), (arm, -half)]
    around = [(x, y) for x, y in corners]
    for _ in range(3):
        corners = [(-y, x) for x, y in corners]
        around += corners
    return [(x * math.cos(turn) - y * math.sin(turn), x * math.sin(turn) + y * math.cos(turn)) for x, y in around]


@dataclass(frozen=True)
class LinearScale:
    """From 0…high to start…end."""

    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + value / self.high * (self.end - self.start)

    @classmethod
    def holding(cls, largest: float, start: float, end: float) -> LinearScale:
        """A scale that ends at a round number not below the largest value."""
        step = _round_step(largest)
        return cls(step * math.ceil(largest / step - 1e-9), start, end)

    def ticks(self) -> list[float]:
        """The round numbers along it."""
        step = _round_step(self.high)
        return [step * i for i in range(round(self.high / step) + 1)]


def _round_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten: the smallest of which at most four reach the largest value."""
    power = 10.0 ** math.floor(math.log10(largest / 4))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * 4 >= largest * (1 - 1e-9))


@dataclass(frozen=True)
class LogScale:
    """From low…high, both positive, to start…end, in logarithms."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    @classmethod
    def holding(cls, values: Sequence[float], start: float, end: float) -> LogScale:
        """A scale from the 1, 2 or 5 times a power of ten below the values to the one above them."""
        low, high = min(values), max(values)
        bounds = _steps(low / 10, high * 10)
        below = max(step for step in bounds if step <= low * (1 + 1e-9))
        above = min(step for step in bounds if step >= high * (1 - 1e-9) and step > below)
        return cls(below, above, start, end)

    def ticks(self, most: int = 7) -> list[float]:
        """Powers of ten along it, and 2 and 5 times those where there is room."""
        steps = [step for step in _steps(self.low, self.high) if self.low * 0.999 <= step <= self.high * 1.001]
        tens = [step for step in steps if abs(math.log10(step) - round(math.log10(step))) < 1e-9]
        return steps if len(steps) <= most else tens


def _steps(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
