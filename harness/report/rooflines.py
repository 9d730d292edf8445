"""Rooflines: a card for each problem, with the plot and the kernels in numbers, and a table of the ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..reader import Record
from ..records import problem_of
from ..roofline_records import problem_key
from ..roofline_tables import ceiling_table, kernel_table
from .cards import Card
from .roofline_chart import roofline_chart
from .runs import Run, origins, problem_facets
from .tables import PageTable, page_table


@dataclass(frozen=True)
class Part:
    """What was found in one run. ceilings: its table."""

    cards: list[Card]
    ceilings: PageTable


def roofline_parts(runs: Sequence[Run]) -> list[Part]:
    """The parts of the page that show rooflines; of records that were made without a card there are none."""
    parts = []
    for run in runs:
        records = [record for record in run.of("roofline") if record["ceilings"] is not None]
        if records:
            by_problem: dict[object, list[Record]] = {}
            for record in records:
                by_problem.setdefault(problem_key(record), []).append(record)
            cards = [_card(run, members) for members in by_problem.values()]
            parts.append(Part(cards, page_table(ceiling_table(records[0]), {"path": run.path})))
    return parts


def _card(run: Run, records: Sequence[Record]) -> Card:
    problem = problem_of(records[0]["problem"])
    facets = {"path": run.path} | problem_facets(problem)
    # A row for the direction, and one a kernel.
    rows = [
        {"direction": record["direction"], "who": record["port"]}
        for record in records
        for _ in range(1 + len(record["kernels"]))
    ]
    chart = roofline_chart(records)
    pictures = [] if chart is None else [("TFLOP/s against FLOP/B", chart.picture)]
    numbers = page_table(kernel_table(records), facets, rows=rows)
    return Card(f"{problem.id}, {run.path}, from {run.file}", facets, pictures, numbers, origins(records))
