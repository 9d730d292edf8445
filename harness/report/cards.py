"""A card: pictures, the same in numbers, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass, field

from markupsafe import Markup

from .runs import Facets
from .tables import PageTable


@dataclass(frozen=True)
class Card:
    """Problems that differ in length and batch only. pictures: with their captions. notes: what is to be said of them.

    facets: by what the card can be filtered. origins: where its records come from.
    """

    title: str
    facets: Facets
    pictures: list[tuple[str, Markup]]
    numbers: PageTable
    origins: list[str]
    notes: list[str] = field(default_factory=list)
