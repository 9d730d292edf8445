"""The words that options take, apart from PyTorch so that `--help` need not import it."""

from __future__ import annotations

from enum import StrEnum


class Directions(StrEnum):
    """What `--direction` takes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


class Format(StrEnum):
    """What `--format` takes: how tables are printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    CSV = "csv"
