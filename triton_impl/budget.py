"""The shared memory a tile needs, as arithmetic, before anything is compiled.

What Triton keeps there, read off its builds for the four targets (the tests hold the arithmetic to them):

- the tile a program owns: Q forward; Q and dO in dq_kernel; K and V in dkdv_kernel;
- the tiles it walks over: two an iteration, for the `stages - 1` iterations in flight, or `stages` under wgmma and
  tcgen05, whose operands are still being read while the next copies land;
- without a pipeline, K and V one after the other in the forward; in the backward both, and one more for transposing;
- scores on their way into the next product, where the compiler lays the two products out differently: on mma.sync when
  the program's tile has fewer rows than columns, and always in IEEE fp32, which also reduces rows across warps there;
"""

from __future__ import annotations

from collections.abc import Mapping

from common import Direction, Problem, Target, Tile, Unsupported

from .launch import block_d


def shared_memory(problem: Problem, target: Target, direction: Direction, tile: Tile) -> dict[str, Mapping[str, int]]:
    """Bytes a block for each kernel of the direction, by what they hold: `{kernel: {part: bytes}}`."""
    if direction == "forward":
        return {"forward_kernel": _walk(problem, target, tile, tile.block_m, tile.block_n, ("Q",), ("K", "V"))}
    kernels: dict[str, Mapping[str, int]] = {}
    parts = _walk(problem, target, tile, tile.block_n, tile.block_m, ("K", "V"), ("Q", "dO"))
    parts["lse, delta"] = 2 * 4 * tile.block_m * tile.stages
    kernels["dkdv_kernel"] = parts
    dq = dq_tile(tile)
    kernels["dq_kernel"] = _walk(problem, target, dq, dq.block_m, dq.block_n, ("Q", "dO"), ("K", "V"))
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
    parts = dict.fromkeys(owned, owned_rows * row)
    if tile.stages > 1:
        in_flight = tile.stages if asynchronous else tile.stages - 1
        parts |= dict.fromkeys(walked, walked_rows * row * in_flight)
    elif len(owned) == 1:
        parts[" or ".join(walked)] = walked_rows * row
    else:
        parts |= dict.fromkeys((*walked, "transposed"), walked_rows * row)
    if problem.dtype.itemsize == 4:
        parts["P"] = owned_rows * walked_rows * 4
        parts["rows"] = owned_rows * 4
    elif not asynchronous and owned_rows < block_d(problem):
        parts["P"] = owned_rows * walked_rows * 2
    return parts


def refusal(problem: Problem, target: Target, direction: Direction, tile: Tile) -> str | None:
    """Why the tile does not fit the target, with the arithmetic, or None when it does."""
    for kernel, parts in shared_memory(problem, target, direction, tile).items():
        total = sum(parts.values())
        if total > target.smem_per_block:
            sums = " + ".join(f"{name} {size}" for name, size in parts.items())
            return (
                f"{kernel}: block {tile.block_m}x{tile.block_n}, D={problem.head_dim}, {tile.stages} stages needs "
                f"{sums} = {total} B of shared memory; {target.sm} gives {target.smem_per_block} B"
            )
    return None


def check(problem: Problem, target: Target, direction: Direction, tile: Tile) -> None:
    """Raises Unsupported with the arithmetic when the tile does not fit the target."""
    reason = refusal(problem, target, direction, tile)
    if reason is not None:
        raise Unsupported(reason)
