"""Who is on the page: names, and the colour and mark that each has in every picture.

The colours themselves are in `templates/style.css`, one for light and one for dark pages under the same class.
"""

from __future__ import annotations

from dataclasses import dataclass

import common

from ..baselines import BASELINES
from ..bench_tables import title_of
from ..jobs import NAIVE
from ..names import own_name

FORMULA = "formula"
# In the order in which they are drawn and listed.
KNOWN = (*common.port_names(), *BASELINES, NAIVE, FORMULA)
# A second way to tell curves apart, beside the colour. After the last one they begin anew.
MARKS = ("circle", "square", "triangle", "diamond", "plus", "down")


@dataclass(frozen=True)
class Contestant:
    """A port, a baseline, the plain attention, or the formula. name: as in records, `triton#2` for one timed twice.

    style: its class in the style sheet. mark: the shape of its points. is_ours: a port, whose bars are filled.
    """

    name: str

    @property
    def title(self) -> str:
        """The name for people."""
        return "plain attention" if self.name == NAIVE else title_of(self.name)

    @property
    def style(self) -> str:
        own = own_name(self.name)
        return f"who-{own}" if own in KNOWN else "who-other"

    @property
    def mark(self) -> str:
        return MARKS[self.rank % len(MARKS)]

    @property
    def is_ours(self) -> bool:
        return own_name(self.name) in common.port_names()

    @property
    def rank(self) -> int:
        """The place in the order of the page."""
        own = own_name(self.name)
        return KNOWN.index(own) if own in KNOWN else len(KNOWN)
