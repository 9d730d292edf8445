"""Tables as the page has them: each row and column with what it can be filtered by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..baselines import BASELINES
from ..tables import Table
from .contestants import KNOWN, Contestant
from .runs import Facets, problem_facets

LONG = 28  # letters of a cell that stays on one line
# The heads of columns that are a contestant's.
OF_TITLE = {Contestant(name).title: name for name in KNOWN}


@dataclass(frozen=True)
class Column:
    """The head of a column. who: the contestant it is about, where it is about one."""

    title: str
    who: str | None
    is_label: bool


@dataclass(frozen=True)
class Row:
    """Cells, each with the class it is shown in, and by what the row can be filtered."""

    cells: list[tuple[str, str]]
    facets: Facets


@dataclass(frozen=True)
class PageTable:
    """A table of the page. facets: of all its rows."""

    title: str
    facets: Facets
    columns: list[Column]
    rows: list[Row]
    notes: list[str]


def page_table(table: Table, facets: Facets, rows: Sequence[Facets] | None = None) -> PageTable:
    """A table for the page. rows: by what each of them can be filtered, beside its problem."""
    more = rows if rows is not None else [{}] * len(table.rows)
    own = [{} if problem is None else problem_facets(problem) for problem in table.problems]
    columns = [
        Column(title, None if i < table.labels else _contestant(title), i < table.labels)
        for i, title in enumerate(table.columns)
    ]
    shown = [
        Row([(cell, style_of(cell)) for cell in cells], about | extra)
        for cells, about, extra in zip(table.rows, own, more, strict=True)
    ]
    return PageTable(table.title, facets, columns, shown, table.notes)


def _contestant(title: str) -> str | None:
    name = title.partition("#")[0]
    return title if name in OF_TITLE.values() and name not in BASELINES else OF_TITLE.get(title)


def style_of(cell: str) -> str:
    """The class of a cell: `pass` and `fail` for verdicts, `none` for a dash, `long` for what takes several lines."""
    if cell.startswith("FAIL"):
        return "fail"
    if cell == "–":
        return "none"
    if cell.startswith("pass") or cell.endswith(" pass"):
        return "pass"
    return "long" if len(cell) > LONG and " " in cell else ""
