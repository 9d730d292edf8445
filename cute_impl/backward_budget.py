"""What a tile of the backward is: its extras, the shapes the kernels can do, and the shared memory they need.

block_m, block_n, warps and stages are dkdv_kernel's. The extras, all optional:

- `key_warps`: how many of the warps share the keys out, by default all, so that P and dS stay in registers;
- `parts`: in how many parts a tile of queries is taken between two barriers, by default 1, with all warps `key_warps`;
- `v_in_registers`: 1, a warp keeps its part of V, whose place in shared memory queries take;
- `atomics`: 1, dkdv_kernel adds up dq as well; a call that must be deterministic goes without;
- `blocks`: the compiler keeps dkdv_kernel's registers so few that so many blocks fit on a multiprocessor;
- `dq_block_m`, `dq_block_n`, `dq_warps`, `dq_stages`: the tile of dq_kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

from common import Problem, Target, Tile, Unsupported

from .launch import ROW_PADDING

EXTRAS = frozenset(
    {"atomics", "blocks", "dq_block_m", "dq_block_n", "dq_stages", "dq_warps", "key_warps", "parts", "v_in_registers"}
)  # fmt: skip


def backward_block_d(problem: Problem) -> int:
    """The head dimension as the backward's tiles hold it: 16, or a multiple of 32, above 128 of 64; the rest is zeros.

    So that two or four warps can share the columns of dq, dk and dv.
    """
    if problem.head_dim == 16:
        return 16
    step = 32 if problem.head_dim <= 128 else 64
    return -(-problem.head_dim // step) * step


def dq_tile(problem: Problem, tile: Tile) -> Tile:
    """The tile of dq_kernel: what the extras say, else one that fits every target; for a single warp, the same tile."""
    if tile.warps == 1:
        default = tile
    elif problem.head_dim <= 128:
        default = Tile(64, 64, 4, 2)
    else:
        default = Tile(64, 32, 4, 2 if problem.head_dim <= 192 else 1)
    return Tile(
        tile.get("dq_block_m", default.block_m),
        tile.get("dq_block_n", default.block_n),
        tile.get("dq_warps", default.warps),
        tile.get("dq_stages", default.stages),
    )


def key_warps(tile: Tile) -> int:
    """How many warps share the keys of dkdv_kernel out."""
    return tile.get("key_warps", tile.warps)


def dq_warps(problem: Problem, tile: Tile) -> int | None:
    """How many warps share out the rows of dq where dkdv_kernel adds it up; None if they cannot.

    The others share its columns. Of all ways it is the one in which the warps read least.
    """
    block_d = backward_block_d(problem)
    ways = [
        (tile.block_m // rows + block_d * rows // tile.warps, -rows)
        for rows in range(1, tile.warps + 1)
        if tile.warps % rows == 0
        and _is_power_of_two(tile.warps // rows)
        and tile.block_m % (16 * rows) == 0
        and block_d % (16 * tile.warps // rows) == 0
    ]
    return -min(ways)[1] if ways else None


def backward_memory(problem: Problem, tile: Tile) -> dict[str, Mapping[str, int]]:
    """Bytes of shared memory a block for each kernel, by what they hold: `{kernel: {part: bytes}}`.

    K and V, whose places dk and dv take in the end; `stages` buffers of Q, dO and the rows' shift and delta; dS on its
    way to the product that gives dq, or with P to those that give dk and dv.
    """
    row = backward_block_d(problem) * problem.dtype.itemsize
    scores = tile.block_m * tile.block_n * problem.dtype.itemsize
    atomics, through_memory = bool(tile.get("atomics", 0)), key_warps(tile) != tile.warps
    dkdv = {
        "K": tile.block_n * row,
        "V": 0 if tile.get("v_in_registers", 0) else tile.block_n * row,
        "Q, dO": 2 * tile.stages * tile.block_m * row,
        "shift, delta": 2 * tile.stages * tile.block_m * 4,
        "dS": scores if atomics or through_memory else 0,
        "P": scores if through_memory else 0,
    }
    dq = dq_tile(problem, tile)
    memory: dict[str, Mapping[str, int]] = {
        "dkdv_kernel": {part: size for part, size in dkdv.items() if size},
        "dq_kernel": {"Q, dO": 2 * dq.block_m * row, "K, V": 2 * dq.stages * dq.block_n * row},
    }
    if atomics:
        memory["cast_kernel"] = {"dq": tile.block_m * row}
    return memory


def check_backward(problem: Problem, target: Target, tile: Tile) -> None:
    """Raises Unsupported, with the reason, for a tile whose shape the kernels cannot do; `budget` checks the memory."""
    keys, dq = key_warps(tile), dq_tile(problem, tile)
    if tile.warps % keys:
        raise Unsupported(f"key_warps must divide warps, got tile {tile}")
    others, part = tile.warps // keys, tile.block_m // tile.get("parts", 1)
    if not _is_power_of_two(others):  # as are the panels of a tile in shared memory, whose columns they share
        raise Unsupported(f"warps / key_warps must be a power of two, got tile {tile}")
    if tile.block_m % tile.get("parts", 1) or (others > 1 and tile.get("parts", 1) > 1):
        raise Unsupported(f"parts must divide block_m, and be 1 unless all warps are key_warps, got tile {tile}")
    if ROW_PADDING % tile.block_m or ROW_PADDING % dq.block_m:
        raise Unsupported(f"backward tiles need a block_m and a dq_block_m that divide {ROW_PADDING}, got tile {tile}")
    if tile.block_n % (16 * keys) or part % (16 * others) or backward_block_d(problem) % (16 * others):
        raise Unsupported(
            f"warps take 16 keys, queries or columns at a time: block_n must be a multiple of 16·{keys}, "
            f"block_m / parts and the head dimension, padded to {backward_block_d(problem)}, of 16·{others}, "
            f"got tile {tile}"
        )
    if tile.block_m > 64 * tile.warps:
        raise Unsupported(f"block_m must be at most 64 for each warp, got tile {tile}")
    if tile.get("v_in_registers", 0) and tile.block_n > 2 * tile.stages * tile.block_m:
        raise Unsupported(
            f"with v_in_registers, V must fit where Q and dO go: block_n at most 2·stages·block_m, got tile {tile}"
        )
    if tile.get("atomics", 0) and dq_warps(problem, tile) is None:
        raise Unsupported(
            f"{tile.warps} warps cannot share out dq, {tile.block_m} rows of {backward_block_d(problem)}, 16 by 16, "
            f"got tile {tile}"
        )
    if dq.block_m % (16 * dq.warps) or dq.block_n % 16:
        raise Unsupported(
            f"a warp of dq_kernel holds whole rows of scores, 16 at a time: dq_block_m must be a multiple of 16 for "
            f"each warp and dq_block_n of 16, got {dq}"
        )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
