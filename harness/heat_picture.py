"""The heat maps of a sweep as one picture: an SVG file that needs no page around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from .candidates import Candidate, Stage
from .report.svg import WIDTH, element, picture, text
from .sweep_tables import LEGEND, axes_of, cell_of, panels_of, sides_of

STYLE = """
svg { background: #fff; font: 9px system-ui, sans-serif; fill: #222; }
.title { font-weight: 600; }
.small { font-size: 7px; fill: #555; }
.cell { stroke: #fff; }
"""
LEFT, CELL_MOST, CELL_HEIGHT, LINE, GAP = 34, 44, 16, 12, 8
LETTERS = 62  # of a line of a title
Panel = tuple[dict[str, int], dict[tuple[int, int], Candidate]]


def heat_picture(stages: Sequence[Stage], where: str) -> Markup:
    """The heat maps of all stages below each other. where: whose code ran where, or for what it was built."""
    title = f"Tiles swept, {where}: % of the best speed"
    parts: list[Markup] = [element("style", Markup(STYLE)), text(title, 2, LINE, class_="title")]
    y = float(LINE)
    for stage in stages:
        drawn, y = _stage(stage, y + GAP)
        parts += drawn
    description = f"{LEGEND} " + " ".join(_in_words(stage) for stage in stages)
    parts.append(text(LEGEND, 2, y + LINE + GAP, class_="small"))
    return picture(*parts, height=y + LINE + 2 * GAP, title=title, description=description, class_="heat")


def _stage(stage: Stage, y: float) -> tuple[list[Markup], float]:
    """The panels of a stage, as many beside each other as there is room for, and where they end."""
    panels = panels_of(stage)
    columns, rows = sides_of(panels)
    down, across = axes_of(stage)
    title = f"{stage.port} {stage.direction}, {stage.grid.kernel}, {stage.problem.id}"
    parts = []
    for begin in range(0, len(title), LETTERS):
        y += LINE
        parts.append(text(title[begin : begin + LETTERS], 2, y, class_="title"))
    y += LINE
    parts.append(text(f"down: {down}, across: {across}", 2, y, class_="small"))
    cell = min(CELL_MOST, (WIDTH - LEFT) / len(columns))
    beside = int(WIDTH // (LEFT + cell * len(columns))) or 1
    for first in range(0, len(panels), beside):
        ends = [y]
        for i, panel in enumerate(panels[first : first + beside]):
            drawn, end = _panel(stage, panel, columns, rows, i * WIDTH / beside, y, cell)
            parts += drawn
            ends.append(end)
        y = max(ends)
    return parts, y


def _panel(
    stage: Stage, panel: Panel, columns: Sequence[int], rows: Sequence[int], x: float, y: float, width: float
) -> tuple[list[Markup], float]:
    about, cells = panel
    y += LINE + GAP / 2
    parts = [text(", ".join(f"{name} {value}" for name, value in about.items()) or "all", x + LEFT, y)]
    y += LINE - 2
    parts += [
        text(str(column), x + LEFT + width * (i + 0.5), y, class_="small", anchor="middle")
        for i, column in enumerate(columns)
    ]
    y += 3
    for row in (row for row in rows if any((row, column) in cells for column in columns)):
        parts.append(text(str(row), x + LEFT - 4, y + CELL_HEIGHT - 5, anchor="end"))
        parts += [_cell(stage, cells, row, column, x + LEFT + width * i, y, width) for i, column in enumerate(columns)]
        y += CELL_HEIGHT
    return parts, y


def _cell(
    stage: Stage, cells: Mapping[tuple[int, int], Candidate], row: int, column: int, x: float, y: float, width: float
) -> Markup:
    one = cells.get((row, column))
    words = cell_of(stage, one)
    tip = "" if one is None else f"{one.tile}: {one.refused or words}"
    box = element(
        "rect", element("title", tip), x=x, y=y, width=width, height=CELL_HEIGHT, fill=_colour(words), class_="cell"
    )
    label = text(words, x + width / 2, y + CELL_HEIGHT - 5, class_=None if words[:1].isdigit() else "small",
                 anchor="middle")  # fmt: skip
    return element("g", box, label)


def _colour(words: str) -> str:
    """Light for slow, deep for fast; grey for what has no time."""
    number = words.rstrip("*")
    if not number.isdecimal():
        return "#eee" if words else "#fff"
    warmth = min(1.0, max(0.0, int(number) / 50 - 1))  # 0 at 50 % of the best, 1 at 100 %
    return f"hsl({40 + round(100 * warmth)} {60 + round(20 * warmth)}% {88 - round(28 * warmth)}%)"


def _in_words(stage: Stage) -> str:
    told = (f"{one.tile} {cell_of(stage, one)}" for one in stage.candidates if not one.by_budget)
    return f"{stage.port} {stage.direction} {stage.grid.kernel} {stage.problem.id}: {', '.join(told)}."
