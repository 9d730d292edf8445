"""The shared memory that a tile needs, as a port's arithmetic has it, against what a target gives."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import Unsupported
from .problem import Problem
from .target import Target
from .tile import Tile

Memory = Mapping[str, Mapping[str, int]]  # bytes a block for each kernel, by what they hold: {kernel: {part: bytes}}


def check_budget(memory: Memory, problem: Problem, target: Target, tile: Tile) -> None:
    """Raises Unsupported, with the arithmetic, when the tile does not fit the target."""
    for kernel, parts in memory.items():
        total = sum(parts.values())
        if total > target.smem_per_block:
            sums = " + ".join(f"{name} {size}" for name, size in parts.items())
            raise Unsupported(
                f"{kernel}: tile {tile}, D={problem.head_dim} needs {sums} = {total} B of shared memory; "
                f"{target.sm} gives {target.smem_per_block} B"
            )
