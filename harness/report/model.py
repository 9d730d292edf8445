"""Models: the losses of a GPT-2 with each attention, and how far they are from those with PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..bench_tables import title_of
from ..model_tables import REFERENCE, Group, groups, tables_of
from ..reader import Record
from .cards import Card
from .contestants import Contestant
from .runs import Run, facets_of, origins
from .steps import Series, step_chart
from .tables import PageTable, page_table


@dataclass(frozen=True)
class ModelPart:
    """One model and text. card: its pictures and the main table. tables: losses by step, compiled runs beside eager."""

    card: Card
    tables: list[PageTable]


def model_parts(runs: Sequence[Run]) -> list[ModelPart]:
    """A part for each model, text and way of running that was recorded."""
    return [_part(run, group) for run in runs for group in groups(run.of("model"))]


def _part(run: Run, group: Group) -> ModelPart:
    first = group.records[0]
    facets = facets_of(first)
    main, *others = tables_of(group)
    numbers = page_table(main, facets, rows=[{"who": record["contestant"]} for record in group.records])
    card = Card(f"{group.title}, from {run.file}", facets, _pictures(group), numbers, origins(group.records))
    return ModelPart(card, [page_table(table, facets) for table in others])


def _pictures(group: Group) -> list[tuple[str, Markup]]:
    """Of a training: the losses, and their distance to those with PyTorch's attention."""
    trained = [r for r in group.records if r["losses"] and not r["compiled"]]
    if not (group.is_training and trained and group.records[0]["steps"] > 1):
        return []
    losses = [Series(Contestant(r["contestant"]), _losses(r)) for r in trained]
    pictures = [("Loss by step", step_chart(losses, "Loss", "{:.3g}".format, log=False, title=f"Loss, {group.title}"))]
    reference = group.one(REFERENCE)
    if reference is None:
        return pictures
    theirs = _losses(reference)
    apart = [
        Series(one.who, tuple(abs(a - b) for a, b in zip(one.values, theirs, strict=True)))
        for one in losses
        if one.who.name != REFERENCE
    ]
    if any(value > 0 for one in apart for value in one.values):
        name = f"Distance to {title_of(REFERENCE)}"
        chart = step_chart(apart, name, "{:.0e}".format, log=True, title=f"{name}, {group.title}")
        floor = "" if group.floor is None else f"; {title_of(group.floor['contestant'])} is the noise floor"
        pictures.append((f"{name}'s loss{floor}", chart))
    return pictures


def _losses(record: Record) -> tuple[float, ...]:
    return tuple(float(loss) for loss in record["losses"])
