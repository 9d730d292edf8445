"""Bars: one contestant a row, with its name, its value, the interval of it, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..timing import Ratio
from .contestants import Contestant
from .svg import WIDTH, LinearScale, element, line, picture, text

NAMES, VALUES = 92, 272  # where the names end and the values begin
TOP, ROW, BAR = 22, 19, 12
REASON_MOST = 46  # letters of a reason; the table below the picture has all of it


@dataclass(frozen=True)
class Bar:
    """A contestant's value and its interval, or why it has none. tip: what a pointer over it is told."""

    who: Contestant
    value: Ratio | None
    verdict: str
    tip: str
    is_marked: bool = False


def bar_chart(bars: Sequence[Bar], *, largest: float, unit: str, title: str) -> Markup:
    """The picture. largest: what the scale has to hold, the same for pictures that are compared. unit: of the values.

    Rows are groups at heights of their own, so that a page can close ranks when some are hidden.
    """
    scale = LinearScale.holding(largest, NAMES + 6, VALUES - 6)
    height = TOP + ROW * len(bars) + 4
    grid = [
        element(
            "g",
            line(scale(tick), TOP - 4, scale(tick), height, "grid"),
            text(f"{tick:g}", scale(tick), TOP - 9, class_="tick", anchor="middle"),
        )
        for tick in scale.ticks()
    ]
    rows = [
        element(
            "g",
            *_row(bar, scale),
            class_=f"bar {bar.who.style}",
            data_who=bar.who.name,
            transform=f"translate(0 {TOP + ROW * i})",
        )
        for i, bar in enumerate(bars)
    ]
    description = f"Bars of {unit}. " + "; ".join(_in_words(bar, unit) for bar in bars) + "."
    unit_label = text(unit, 0, TOP - 9, class_="tick")
    return picture(*grid, unit_label, *rows, height=height, title=title, description=description, class_="bars")


def _row(bar: Bar, scale: LinearScale) -> list[Markup]:
    middle = ROW / 2
    name = text(bar.who.title, NAMES, middle + 4, class_="name", anchor="end")
    if bar.value is None:
        reason = bar.verdict if len(bar.verdict) <= REASON_MOST else bar.verdict[: REASON_MOST - 1] + "…"
        return [element("title", bar.tip), name, text(reason, NAMES + 6, middle + 4, class_="fail")]
    begin, end = scale(0), scale(bar.value.value)
    low, high = scale(bar.value.low), scale(bar.value.high)
    body = element(
        "rect",
        x=begin,
        y=float(middle - BAR / 2),
        width=max(end - begin, 0.5),
        height=BAR,
        class_="ours" if bar.who.is_ours else "theirs",
    )
    whisker = element(
        "g",
        line(low, middle, high, middle, "whisker"),
        line(low, middle - 4, low, middle + 4, "whisker"),
        line(high, middle - 4, high, middle + 4, "whisker"),
    )
    value = f"{bar.value.value:.1f}{'*' if bar.is_marked else ''}"
    return [
        element("title", bar.tip),
        name,
        body,
        whisker,
        text(value, VALUES + 48, middle + 4, class_="value", anchor="end"),
        text(bar.verdict, WIDTH, middle + 4, class_=bar.verdict, anchor="end"),
    ]


def _in_words(bar: Bar, unit: str) -> str:
    if bar.value is None:
        return f"{bar.who.title}: {bar.verdict}"
    low, high = f"{bar.value.low:.1f}", f"{bar.value.high:.1f}"
    return f"{bar.who.title} {bar.value.value:.1f} {unit} ({low} to {high}), {bar.verdict}"
