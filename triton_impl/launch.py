"""How the kernels of this port are launched: their arguments from a problem, and the launch itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

from common import Problem, Switches, Target, Tile

INTERPRET = triton.knobs.runtime.interpret

# Kernel arguments whose value must not make a new kernel, so that a new length or stride never compiles.
RUN_TIME = (
    *(f"{tensor}_{dim}" for tensor in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for dim in "bhn"),
    *("heads_q", "heads_kv", "group", "heads", "section", "len_q", "len_k", "low", "high"),
)  # fmt: skip

# Bytes of keys and values that the programs running at one time may share: the smallest L2 of the targets' cards
# (48 MB), less what the queries and outputs stream through it.
L2_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments, in the kernel's order: the run-time ones, then the constants by name."""

    kernel: Any
    grid: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int

    def run(self, device: torch.device, target: Target) -> None:
        """Launches on the current stream of `device`, with the instructions of `target`.

        The target's architecture is a compile option, and so a part of the kernel's cache key: the lowering to
        instructions follows it, while the code is assembled for the card. One process can serve several targets.
        """
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if INTERPRET:
            self.kernel[(self.grid,)](*self.arguments, **self.constants, **options)
            return
        options["enable_fp_fusion"] = True  # Triton 3.10 would no longer fuse scale and shift into one multiply-add
        if target != Target.detect(device):
            options["arch"] = f"sm{target.capability}"
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            self.kernel[(self.grid,)](*self.arguments, **self.constants, **options)


def strides(*tensors: torch.Tensor) -> tuple[int, list[int]]:
    """`(unit, numbers)`: the strides of the three leading dimensions of each tensor, in units of `unit` elements.

    unit is 8 when all strides are multiples of 8, else 1. A dimension of size 1 has no stride worth knowing.
    """
    numbers = [
        0 if size == 1 else stride
        for tensor in tensors
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    unit = 8 if all(stride % 8 == 0 for stride in numbers) else 1
    return unit, [stride // unit for stride in numbers]


def constants(
    problem: Problem, tile: Tile, switches: Switches, unit: int, tensors: tuple[torch.Tensor, ...]
) -> dict[str, Any]:
    """The compile-time constants that the kernels with a walk share."""
    rows = max(tile.block_m, tile.block_n)
    wide = any((rows - 1) * tensor.stride(2) + problem.head_dim >= 2**31 for tensor in tensors)
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_d(problem),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "UNIT": unit,
        "WIDE": wide,
        "HAS_LOW": problem.mask.left is not None,
        "HAS_HIGH": problem.mask.right is not None,
        "SKIP": switches.skip,
        "EXP2": switches.exp2,
        "EDGES": switches.edges,
        "ORDER": switches.order,
        "PRECISION": "tf32" if switches.tf32 else "ieee",
        "INTERPRET": INTERPRET,
    }


def block_d(problem: Problem) -> int:
    """The head dimension as tiles hold it: a power of two, as Triton's tiles must be; the rest is zeros."""
    return triton.next_power_of_2(problem.head_dim)


def row_tile(problem: Problem) -> Tile:
    """The tile of the kernels that only stream rows: about 8,192 elements."""
    return Tile(block_m=max(16, min(128, 8192 // block_d(problem))), block_n=16, warps=4, stages=1)


def heads_in_l2(problem: Problem) -> int:
    """How many key heads fit in L2 together with their values; at least one."""
    head_bytes = 2 * problem.len_k * problem.head_dim * problem.dtype.itemsize
    return max(1, L2_BYTES // head_bytes)
