"""What the backward's kernels share on the device: walks over queries, the mask seen from a key, dq in fragments."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

from .blocks import RowCopy, load_rows

STATS_VECTOR = 4  # elements of fp32 that one copy moves: 16 bytes


def seeing_rows(row_begin, len_q, len_k, low, high, HAS_LOW, HAS_HIGH):
    """Which rows `[first, end)` of the tile at row_begin see some key; the others are read as zeros.

    Their P is 0, but what a caller put there may be NaN, and 0 · NaN is NaN. They are the first queries, where the band
    ends before the first key, and the last ones, where it begins after the last key.
    """
    first = -high - row_begin if HAS_HIGH else 0
    end = cutlass.min(len_q, len_k - low) if HAS_LOW else len_q
    return first, end - row_begin


class StatsCopy:
    """Copies of the rows' shift and delta, `[2, BLOCK_M]` in fp32, to shared memory by the first threads of a block."""

    def __init__(self, BLOCK_M, thread):
        pieces = BLOCK_M // STATS_VECTOR
        self.atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=STATS_VECTOR * 32)
        self.threads = 2 * pieces
        self.thread = thread
        layout = cute.make_layout((2, pieces), stride=(pieces, 1)), cute.make_layout((1, STATS_VECTOR))
        self.slice = cute.make_tiled_copy_tv(self.atom, *layout).get_slice(thread)

    def mine(self, tile):
        """This thread's part of a tile, (piece, 1, 1, …)."""
        return self.slice.partition_S(tile)


class QueryTiles:
    """The tiles of Q, dO and stats that a block of keys walks over, and the buffers they are copied to.

    A step of the walk is a tile of a query head; the heads of a group follow one another. kernel: gives the constants.
    sQdO: the buffers of Q, and behind them those of dO, `[BLOCK_M, BLOCK_D, 2·STAGES]`. sStats: `[2, BLOCK_M, STAGES]`.
    begin, end: the tiles of each head. band: `len_q, len_k, low, high`.
    """

    def __init__(self, kernel, thread, mQ, mDO, mStats, sQdO, sStats, first_head, begin, end, band):
        self.kernel = kernel
        self.mQ, self.mDO, self.mStats = mQ, mDO, mStats  # (heads, rows, D), (heads, 2, rows) of this batch
        self.copy = RowCopy(sQdO.element_type, kernel.BLOCK_M, kernel.BLOCK_D, kernel.WARPS * 32, thread)
        self.stats_copy = StatsCopy(kernel.BLOCK_M, thread)
        self.target = self.copy.mine(sQdO)
        self.stats_target = self.stats_copy.mine(sStats)
        self.first_head, self.begin = first_head, begin
        self.count = end - begin
        self.band = band


def place_of(tiles, step):
    """The query head and the tile of a step."""
    if not tiles.kernel.GROUPED:
        return tiles.first_head, tiles.begin + step
    return tiles.first_head + step // tiles.count, tiles.begin + step % tiles.count


@cute.jit
def fetch_queries(tiles, step, steps, stage):
    """Starts to copy a step's tiles to their buffers, if there is such a step."""
    M, D = tiles.kernel.BLOCK_M, tiles.kernel.BLOCK_D
    h, m = place_of(tiles, step)
    q = tiles.copy.mine(cute.local_tile(tiles.mQ[h, None, None], (M, D), (m, 0)))
    do = tiles.copy.mine(cute.local_tile(tiles.mDO[h, None, None], (M, D), (m, 0)))
    stats = tiles.stats_copy.mine(cute.local_tile(tiles.mStats[h, None, None], (2, M), (0, m)))
    q_buffer, do_buffer = (tiles.target[None, None, None, s] for s in (stage, tiles.kernel.STAGES + stage))
    first, rows = seeing_rows(m * M, *tiles.band, tiles.kernel.HAS_LOW, tiles.kernel.HAS_HIGH)
    if step < steps:
        load_rows(tiles.copy, q, q_buffer, rows, tiles.kernel.HEAD_DIM, first)
        load_rows(tiles.copy, do, do_buffer, rows, tiles.kernel.HEAD_DIM, first)
        if tiles.stats_copy.thread < tiles.stats_copy.threads:
            cute.copy(tiles.stats_copy.atom, stats, tiles.stats_target[None, None, None, stage])


def parts_of(tile, ROWS, COLS):
    """A tile with stages cut along its rows or its columns into parts `[ROWS, COLS, (parts, stages)]`."""
    cut = cute.flat_divide(tile, (ROWS, COLS))  # [ROWS, COLS, parts, 1, stages] or [ROWS, COLS, 1, parts, stages]
    along_rows = cute.size(tile, mode=[1]) == COLS
    parts = cut[None, None, None, 0, None] if along_rows else cut[None, None, 0, None, None]
    return cute.group_modes(parts, 2, 4)


def stats_by_column(mma, thread, sStats, BLOCK_N, PART_M):
    """The shift and delta of the columns that a thread holds of `[BLOCK_N, PART_M]`: (columns, 2, (parts, stages))."""
    which, rows, stages = sStats.shape
    which_stride, row_stride, stage_stride = sStats.stride
    layout = cute.make_layout(
        (BLOCK_N, PART_M, which, (rows // PART_M, stages)),
        stride=(0, row_stride, which_stride, (PART_M * row_stride, stage_stride)),
    )
    mine = mma.get_slice(thread).partition_C(cute.make_tensor(sStats.iterator, layout))
    columns = mine[(None, 0), 0, None, None, None]  # ((values of one mma), columns, 2, stages)
    return cute.group_modes(columns, 0, 2)


def hide_keys(scores, where, key_begin, row_begin, len_k, low, high, HAS_LOW, HAS_HIGH):
    """Sets the scores `[BLOCK_N, BLOCK_M]` of pairs that the mask hides to -inf: `hide` with the keys as the rows."""
    for i, row in enumerate(where.rows):
        key = key_begin + where.row0 + row
        # Columns are counted from this thread's first one: then the comparisons are with constants.
        origin = row_begin + where.col0
        columns = where.cols[-1] + 1
        end = cutlass.min(key - low + 1 - origin, columns) if HAS_LOW else columns
        end = cutlass.select_(key < len_k, end, 0)
        for j, col in enumerate(where.cols):
            seen = col < end
            if HAS_HIGH:
                seen = seen & (col >= key - high - origin)
            scores[i, j] = cutlass.select_(seen, scores[i, j], -Float32.inf)


def write_part(mma, thread, acc, tile, part):
    """`write_accumulator` to a part of a tile's columns, the part-th of those that are as wide as the accumulator."""
    rounded = cute.make_fragment_like(acc, tile.element_type)
    rounded.store(acc.load().to(tile.element_type))
    atom = cute.make_copy_atom(CopyUniversalOp(), tile.element_type, num_bits_per_copy=2 * tile.element_type.width)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    source, target = copy.retile(rounded), copy.partition_D(tile)  # (values, rows, columns)
    # Cut after it is partitioned: CuTe DSL 4.8.1 counts the offset of a slice of a swizzled tile twice.
    parts = cute.logical_divide(target, (None, None, cute.size(source, mode=[2])))
    cute.copy(atom, source, parts[None, None, (None, part)])


def fragments(tile, THREADS, VECTOR):
    """Where a packed tile `[ROWS, COLS]` of fp32 in global memory keeps the fragments of an accumulator.

    Element e of thread t lies at `(e // VECTOR · THREADS + t) · VECTOR + e % VECTOR`, so that neighbouring threads add
    to neighbouring places, and read them again. Which element of dq that is only the layout of the product knows; the
    kernel that adds and the kernel that reads make it from the same constants. (VECTOR, threads, additions).
    """
    additions = cute.size(tile) // (VECTOR * THREADS)
    return cute.make_tensor(tile.iterator, cute.make_layout((VECTOR, THREADS, additions)))


def add_fragment(acc, tile, thread, THREADS, VECTOR):
    """Adds an accumulator to the fragments of a tile in global memory, VECTOR elements an atomic instruction."""
    targets = fragments(tile, THREADS, VECTOR)
    values = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, cute.size(acc) // VECTOR)))
    for i in range(cute.size(values, mode=[1])):
        value = values[0, i] if VECTOR == 1 else values[None, i].load().ir_value()
        pointer = targets[None, thread, i].iterator
        cute.arch.red(pointer, value, op="add", dtype=Float32, sem="relaxed", scope="gpu")


def read_fragment(acc, tile, thread, THREADS, VECTOR):
    """Reads an accumulator from the fragments of a tile in global memory."""
    sources = fragments(tile, THREADS, VECTOR)
    values = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, cute.size(acc) // VECTOR)))
    atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=32 * VECTOR)
    for i in range(cute.size(values, mode=[1])):
        cute.copy(atom, sources[None, thread, i], values[None, i])
