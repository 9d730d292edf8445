"""The words and defaults of options, apart from PyTorch so that `--help` need not import it."""

from __future__ import annotations

from enum import StrEnum

LIMIT_S = 300.0  # of one check or one row of timings; TileLang's compiler alone takes up to a minute a kernel


TOLERANCE_PERCENT = 2.0  # what `compare` calls the same: medians of one kernel differ by as much from day to day


class Directions(StrEnum):
    """What `--direction` takes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


class Dtype(StrEnum):
    """What `--dtype` takes."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class Format(StrEnum):
    """What `--format` takes: how tables are printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    CSV = "csv"
