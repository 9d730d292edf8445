"""Tables as values, and as text, Markdown or CSV."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from common import DTYPE_NAMES, Problem

from .options import Format

PLAIN_WIDTH = 500  # where there is no terminal no line is wrapped


@dataclass
class Table:
    """A title, columns, rows of cells, and notes that are printed below. The first `labels` columns are words.

    problems: for each row that was added, the problem that it is about, None where it is about no single one. heat:
    cells are numbers up to 100, which a terminal colours.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    labels: int = 1
    problems: list[Problem | None] = field(default_factory=list)
    heat: bool = False

    def add(self, *cells: str, problem: Problem | None = None) -> None:
        """Adds a row, about that problem."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {self.title} has {len(self.columns)} cells, got {len(cells)}")
        self.rows.append(cells)
        self.problems.append(problem)


def problem_cells(problem: Problem) -> tuple[str, str, str, str]:
    """The cells that name a problem: `B,H,D`, the dtype, N, the mask."""
    heads = str(problem.heads_q) if problem.group == 1 else f"{problem.heads_q}/{problem.heads_kv}"
    length = str(problem.len_q) if problem.len_q == problem.len_k else f"{problem.len_q}x{problem.len_k}"
    shape = f"{problem.batch},{heads},{problem.head_dim}"
    return shape, DTYPE_NAMES[problem.dtype], length, str(problem.mask)


def print_tables(tables: Iterable[Table], form: Format) -> None:
    """Prints tables to standard output."""
    for table in tables:
        if form is Format.TEXT and sys.stdout.isatty():
            _print_text(table, Console(highlight=False))
        else:
            print({Format.TEXT: as_text, Format.MARKDOWN: as_markdown, Format.CSV: as_csv}[form](table))


def as_text(table: Table) -> str:
    """Plain text: no colours, and no line is wrapped."""
    buffer = io.StringIO()
    _print_text(table, Console(file=buffer, highlight=False, width=PLAIN_WIDTH, force_terminal=False))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _print_text(table: Table, console: Console) -> None:
    console.print(Text(table.title, style="bold"))
    text = RichTable(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2, pad_edge=False, show_edge=False)
    for i, column in enumerate(table.columns):
        text.add_column(column, justify="left" if i < table.labels else "right", overflow="fold")
    for row in table.rows:
        warm = table.labels if table.heat else len(row)
        text.add_row(*(Text(cell, _heat(cell) if i >= warm else _style(cell)) for i, cell in enumerate(row)))
    console.print(text)
    for note in table.notes:
        console.print(Text(note, style="red" if note.startswith("FAIL") else "dim"))
    if console.is_terminal:
        console.print()


def _style(cell: str) -> str:
    return "green" if cell == "pass" else "bold red" if cell.startswith("FAIL") else ""


def _heat(cell: str) -> str:
    """Green for the best, over yellow to red for half as fast; what is no number stays dim."""
    number = cell.rstrip("*")
    if not number.isdecimal():
        return _style(cell) or "dim"
    warmth = min(1.0, max(0.0, int(number) / 50 - 1))  # 0 at 50 %, 1 at 100 %
    red, green = min(1.0, 2 - 2 * warmth), min(1.0, 2 * warmth)
    return f"black on rgb({60 + round(170 * red)},{60 + round(150 * green)},60)"


def as_markdown(table: Table) -> str:
    """A Markdown table below its title in bold, its notes after it."""
    rule = ["---" if i < table.labels else "---:" for i in range(len(table.columns))]
    lines = [f"**{table.title}**", ""]
    for row in (table.columns, rule, *table.rows):
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |")
    lines += [""] + [line for note in table.notes for line in (note, "")]
    return "\n".join(lines)


def as_csv(table: Table) -> str:
    """Comma-separated values below a header; the title before them and the notes after them as # lines."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    notes = "".join(f"# {note}\n" for note in table.notes)
    return f"# {table.title}\n{buffer.getvalue()}{notes}"
