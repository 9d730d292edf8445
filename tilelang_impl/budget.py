"""The shared memory a tile needs, as arithmetic, before anything is compiled.

What the kernels keep there, read off their builds (the tests hold the arithmetic to them):

- the tile a program owns: Q forward; Q and dO in the dq kernel; K and V in the dkdv kernel; results are stored
  through the same place;
- the tiles it walks over, `stages` buffers of each; in the dkdv kernel also the rows' shift and delta;
- for TMA, the barriers that count the copies in: 1,024 bytes as the compiler aligns them.

With `atomic_dq` dS goes through shared memory as well, to be transposed. Other scores never do: a warp holds whole rows
of them.
"""

from __future__ import annotations

from common import Direction, Problem, Target, Tile
from common.budget import Memory

from .launch import asynchronous, block_d

BARRIER_BYTES = 1024


def shared_memory(problem: Problem, target: Target, direction: Direction, tile: Tile) -> Memory:
    """Bytes a block for each kernel of the direction, by what they hold: `{kernel: {part: bytes}}`."""
    if direction == "forward":
        return {"forward_kernel": _walk(problem, target, tile, tile.block_m, tile.block_n, ("Q",), ("K", "V"))}
    dkdv = _walk(problem, target, tile, tile.block_n, tile.block_m, ("K", "V"), ("Q", "dO"))
    dkdv["shift, delta"] = 2 * 4 * tile.block_m * tile.stages
    if tile.get("atomic_dq", 0):
        dkdv["dS"] = tile.block_m * tile.block_n * problem.dtype.itemsize
    dq = dq_tile(tile)
    return {
        "dkdv_kernel": dkdv,
        "dq_kernel": _walk(problem, target, dq, dq.block_m, dq.block_n, ("Q", "dO"), ("K", "V")),
    }


def dq_tile(tile: Tile) -> Tile:
    """The tile of the dq kernel: its own extras of a backward tile, by default those of the dkdv kernel.

    By default the sides are exchanged, since it owns the queries where the other owns the keys.
    """
    return Tile(
        tile.get("dq_block_m", tile.block_n),
        tile.get("dq_block_n", tile.block_m),
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
    parts = dict.fromkeys(owned, owned_rows * row)
    parts |= dict.fromkeys(walked, walked_rows * row * tile.stages)
    if asynchronous(target, tile, owned_rows):
        parts["barriers"] = BARRIER_BYTES
    return parts
