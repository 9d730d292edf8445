"""The shared memory a tile needs, as arithmetic, before anything is compiled.

What Triton keeps there, read off its builds for the four targets (the tests hold the arithmetic to them):

- the tile a program owns: Q forward; Q and dO in dq_kernel; K and V in dkdv_kernel;
- the tiles it walks over: two an iteration, for the `stages - 1` iterations in flight, or `stages` under wgmma and
  tcgen05, whose operands are still being read while the next copies land; under tcgen05 one more of each tile that two
  products read (K in dq_kernel, Q and dO in dkdv_kernel), because the later product is still reading it;
- without a pipeline, K and V one after the other in the forward; in the backward both, and in dkdv_kernel one more for
  transposing, on mma.sync;
- scores on their way into the next product, where the compiler lays the two products out differently: on mma.sync when
  the program's tile has fewer rows than columns (dq_kernel without a pipeline has room for them where Q was), and
  always in IEEE fp32, which also reduces rows across warps there;
- with atomics, dS on its way into the product that gives dq;
- under tcgen05 the barriers of its products, rounded up to where a pipelined tile may begin, and, in the forward with
  more than one warpgroup, what these tell each other about the rows they share, at most 16 bytes a thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from common import Direction, Problem, Target, Tile
from common.budget import Memory

from .launch import block_d

FORWARD, DQ, DKDV = ("Q",), ("Q", "dO"), ("K", "V")  # what a program of each kernel owns
_READ_TWICE = {FORWARD: (), DQ: ("K",), DKDV: ("Q", "dO")}


def shared_memory(problem: Problem, target: Target, direction: Direction, tile: Tile) -> Memory:
    """Bytes a block for each kernel of the direction, by what they hold: `{kernel: {part: bytes}}`."""
    if direction == "forward":
        return {"forward_kernel": _walk(problem, target, tile, tile.block_m, tile.block_n, FORWARD, ("K", "V"))}
    kernels: dict[str, Mapping[str, int]] = {}
    parts = _walk(problem, target, tile, tile.block_n, tile.block_m, DKDV, ("Q", "dO"))
    parts["lse, delta"] = 2 * 4 * tile.block_m * tile.stages
    if tile.get("atomics", 0):
        parts["dS"] = tile.block_m * tile.block_n * problem.dtype.itemsize
    kernels["dkdv_kernel"] = parts
    dq = dq_tile(tile)
    kernels["dq_kernel"] = _walk(problem, target, dq, dq.block_m, dq.block_n, DQ, ("K", "V"))
    return kernels


def dq_tile(tile: Tile) -> Tile:
    """The tile of dq_kernel: its own extras of a backward tile, by default those of dkdv_kernel."""
    return Tile(
        tile.get("dq_block_m", tile.block_m),
        tile.get("dq_block_n", tile.block_n),
        tile.get("dq_warps", tile.warps),
        tile.get("dq_stages", tile.stages),
    )


def _walk(
    problem: Problem,
    target: Target,
    tile: Tile,
    owned_rows: int,
    walked_rows: int,
    owned: tuple[str, ...],
    walked: tuple[str, ...],
) -> dict[str, int]:
    row = block_d(problem) * problem.dtype.itemsize
    # The asynchronous matrix instructions need 64 rows and a warpgroup; smaller tiles run on mma.sync everywhere.
    asynchronous = (
        target.instruction != "mma.sync" and owned_rows >= 64 and tile.warps >= 4 and problem.dtype.itemsize == 2
    )
    tcgen05 = asynchronous and target.instruction == "tcgen05"
    parts = dict.fromkeys(owned, owned_rows * row)
    if tile.stages > 1:
        for name in walked:
            in_flight = tile.stages if asynchronous else tile.stages - 1
            in_flight += tcgen05 and name in _READ_TWICE[owned]
            parts[name] = walked_rows * row * in_flight
    elif owned == FORWARD:
        parts[" or ".join(walked)] = walked_rows * row
    else:
        parts |= dict.fromkeys(walked, walked_rows * row)
        if owned == DKDV and not asynchronous:
            parts["transposed"] = walked_rows * row
    if problem.dtype.itemsize == 4:
        parts["P"] = owned_rows * walked_rows * 4
        parts["rows"] = owned_rows * 4
    elif not asynchronous and owned_rows < block_d(problem) and not (owned == DQ and tile.stages == 1):
        parts["P"] = owned_rows * walked_rows * 2
    if tcgen05:
        parts["barriers"] = 1024 if owned != FORWARD and tile.stages > 1 else 64
        if owned == FORWARD and tile.warps > 4:
            parts["rows"] = 16 * 32 * tile.warps
    return parts
