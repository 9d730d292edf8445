"""The shared memory a tile needs, as arithmetic, before anything is compiled.

What the forward keeps there (the tests hold the arithmetic to the builds): Q, whose place the outputs take in the end,
and `stages` buffers of K and of V. P stays in registers. `backward_budget.py` says it of the backward. On top of it the
hardware takes 1,024 bytes a block, which a target's budget leaves out.
"""

from __future__ import annotations

from common import Direction, Problem, Tile
from common.budget import Memory

from .backward_budget import backward_memory
from .launch import block_d


def shared_memory(problem: Problem, direction: Direction, tile: Tile) -> Memory:
    """Bytes a block for each kernel of the direction, by what they hold: `{kernel: {part: bytes}}`."""
    if direction == "backward":
        return backward_memory(problem, tile)
    row = block_d(problem) * problem.dtype.itemsize
    walked = tile.block_n * row * tile.stages
    return {"forward_kernel": {"Q": tile.block_m * row, "K": walked, "V": walked}}
