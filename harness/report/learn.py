"""How it works: what the reader starts from in the interactive parts, and the same as tables of `harness trace`.

The tables are what the page shows without JavaScript. With it, `templates/learn.js` takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass

from common import Mask, Problem

from ..options import Format
from ..tables import Table
from ..trace import TraceRequest, bytes_table, problem_of, steps_table, walk_table

SCORES = (1.0, 5.0, 2.0, 8.0, 3.0, 9.0, 4.0, 7.0)
LEFT, RIGHT = 40, 8


@dataclass(frozen=True)
class Part:
    """One of the examples. command: the options with which `harness trace` prints the same table."""

    table: Table
    command: str


@dataclass(frozen=True)
class Lesson:
    """The examples, and what they are about.

    scores: of the row, as they are typed. row: the row of the online softmax. tiles: the mask and its tiles.
    tensors: those whose bytes are counted.
    """

    scores: str
    row: TraceRequest
    tiles: TraceRequest
    tensors: Problem
    parts: tuple[Part, ...]


def lesson() -> Lesson:
    """The examples of the page, always the same."""
    keys = len(SCORES)
    row = _request(Mask(), keys, keys, block_m=keys, block_n=2, scores=SCORES)
    tiles = _request(Mask(LEFT, RIGHT), 90, 150, block_m=16, block_n=16, row=40)
    bands = f"--mask window --left {LEFT} --right {RIGHT}"
    scores = ",".join(f"{score:g}" for score in SCORES)
    tensors = problem_of(_request(Mask(), 1024, 1024, block_m=16, block_n=16))
    parts = (
        Part(steps_table(problem_of(row), row), f"--scores {scores} --block-m {keys} --block-n 2 --mask full"),
        Part(walk_table(tiles), f"--len-q 90 --len-k 150 --row 40 {bands}"),
        Part(bytes_table(tensors), "--len-q 1024"),
    )
    return Lesson(scores, row, tiles, tensors, parts)


def _request(
    mask: Mask,
    len_q: int,
    len_k: int,
    *,
    block_m: int,
    block_n: int,
    row: int | None = None,
    scores: tuple[float, ...] | None = None,
) -> TraceRequest:
    # As CSV nothing depends on the terminal.
    return TraceRequest(mask, len_q, len_k, 64, block_m, block_n, row, scores, None, 0, Format.CSV)
