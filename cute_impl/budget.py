"""The shared memory a tile needs, as arithmetic, before anything is compiled.

What the forward keeps there (the tests hold the arithmetic to the builds): Q, whose place the outputs take in the end,
and `stages` buffers of K and of V. P stays in registers. `backward_budget.py` says it of the backward. On top of it the
hardware takes 1,024 bytes a block, which a target's budget leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping

from common import Direction, Problem, Target, Tile, Unsupported

from .backward_budget import backward_memory
from .launch import block_d


def shared_memory(problem: Problem, direction: Direction, tile: Tile) -> Mapping[str, Mapping[str, int]]:
    """Bytes a block for each kernel of the direction, by what they hold: `{kernel: {part: bytes}}`."""
    if direction == "backward":
        return backward_memory(problem, tile)
    row = block_d(problem) * problem.dtype.itemsize
    walked = tile.block_n * row * tile.stages
    return {"forward_kernel": {"Q": tile.block_m * row, "K": walked, "V": walked}}


def refusal(problem: Problem, target: Target, direction: Direction, tile: Tile) -> str | None:
    """Why the tile does not fit the target, with the arithmetic, or None when it does."""
    for kernel, parts in shared_memory(problem, direction, tile).items():
        total = sum(parts.values())
        if total > target.smem_per_block:
            sums = " + ".join(f"{name} {size}" for name, size in parts.items())
            return (
                f"{kernel}: tile {tile}, D={problem.head_dim} needs {sums} = {total} B of shared memory; "
                f"{target.sm} gives {target.smem_per_block} B"
            )
    return None


def check(problem: Problem, target: Target, direction: Direction, tile: Tile) -> None:
    """Raises Unsupported with the arithmetic when the tile does not fit the target."""
    reason = refusal(problem, target, direction, tile)
    if reason is not None:
        raise Unsupported(reason)
