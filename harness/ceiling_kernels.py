"""Two kernels in Triton that show what a card can do: products on `mma.sync`, and exponentials.

They are written inside a function, so that the harness needs no Triton until they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Cut:
    """How the product is cut: a program's BLOCK_M × BLOCK_N of the result, BLOCK_K of the inner dimension at a time."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# The best of them is the ceiling. All fit into the shared memory of an Ada card.
CUTS = (Cut(128, 128, 32, 4, 4), Cut(128, 128, 64, 4, 4), Cut(128, 256, 32, 8, 4), Cut(128, 256, 64, 8, 3))
GROUP = 8  # rows of tiles that are worked on together, so that they share what they read
BLOCK, STEPS = 1024, 64  # of the exponentials: elements a program, and exponentials of each a round
FIXED_POINT = 0.6411857445  # of x = exp2(-x), where every start ends


@cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def product_kernel(
        A, B, C, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """One tile of C = A B, all `(N, N)`, with N a multiple of every block."""
        program, tiles_n = tl.program_id(0), N // BLOCK_N
        first = program // (GROUP * tiles_n) * GROUP
        height = tl.minimum(N // BLOCK_M - first, GROUP)
        tile_m = first + program % (GROUP * tiles_n) % height
        tile_n = program % (GROUP * tiles_n) // height
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, N, BLOCK_K, num_stages=STAGES):
            a = tl.load(A + rows[:, None] * N + k + inner[None, :])  # [BLOCK_M, BLOCK_K]
            b = tl.load(B + (k + inner[:, None]) * N + columns[None, :])  # [BLOCK_K, BLOCK_N]
            acc = tl.dot(a, b, acc)
        tl.store(C + rows[:, None] * N + columns[None, :], acc.to(C.dtype.element_ty))

    @triton.jit
    def exp2_kernel(X, rounds, BLOCK: tl.constexpr, STEPS: tl.constexpr):
        """x = exp2(-x), rounds · STEPS times, of BLOCK elements: chains that are independent of each other."""
        places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + places)
        for _ in range(rounds):
            for _ in tl.static_range(STEPS):
                x = tl.math.exp2(-x)
        tl.store(X + places, x)

    return product_kernel, exp2_kernel


def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, cut: Cut, arch: str | None) -> None:
    """c = a b, all square, with sides that are a multiple of 256. arch: as of which architecture to compile."""
    n = a.shape[0]
    options: dict[str, Any] = {"num_warps": cut.warps, "num_stages": cut.stages, "enable_fp_fusion": True}
    options |= {"arch": arch} if arch else {}
    kernel, _ = _kernels()
    programs = n // cut.block_m * (n // cut.block_n)
    kernel[programs, 1, 1](
        a, b, c, n, BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, GROUP=GROUP, STAGES=cut.stages,
        **options,
    )  # fmt: skip


def exponentials(x: torch.Tensor, rounds: int) -> None:
    """Replaces each of x, a multiple of `BLOCK` elements, by exp2(-x), rounds · `STEPS` times."""
    _, kernel = _kernels()
    kernel[x.numel() // BLOCK, 1, 1](x, rounds, BLOCK=BLOCK, STEPS=STEPS, num_warps=4, enable_fp_fusion=True)
