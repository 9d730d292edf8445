"""What the kernels share on the device: tiles and their ranges, the mask, copies, products and sums over a row.

These are plain Python functions over CuTe's values: calling one writes its instructions into the kernel. The arithmetic
of `tile_range` is `common.Mask`'s, written once more for the device and tested against it.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warp

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

VECTOR = 8  # elements of 16 bits that one copy moves: 16 bytes


def claim(program, tiles, heads, section, HEAVY_LAST, ORDER):
    """Which tile of which (batch, head) a program owns: `(tile, head)`.

    Without ORDER the tiles of a head run one after another. With it, heads are taken in sections whose keys and
    values fit in L2 together, and inside a section all heaviest tiles go first, so that the light ones fill the gaps
    that the heavy ones leave at the end.
    """
    if not ORDER:
        return program % tiles, program // tiles
    first = program // (tiles * section) * section
    width = cutlass.min(section, heads - first)
    rest = program - first * tiles
    tile = rest // width
    return tiles - 1 - tile if HEAVY_LAST else tile, first + rest % width


def tile_range(first, last, length, low, high, BLOCK, HAS_LOW, HAS_HIGH, SKIP, EDGES):
    """The other side's tiles for a tile of rows `first..last`: `begin, full_begin, full_end, end`, counted in BLOCKs.

    A row r sees the positions `r + low <= c <= r + high` of `[0, length)`. Tiles in `[begin, end)` are walked over;
    of those, the ones outside `[full_begin, full_end)` are edges and compare positions.
    """
    begin, end, full_begin, full_end = 0, length, 0, length
    if HAS_LOW:
        begin = cutlass.max(first + low, 0)
        full_begin = cutlass.max(last + low, 0)
    if HAS_HIGH:
        end = cutlass.min(cutlass.max(last + high + 1, 0), length)
        full_end = cutlass.min(cutlass.max(first + high + 1, 0), length)
    if not SKIP:
        begin, end = 0, length
    if not EDGES:
        full_end = 0
    return begin // BLOCK, (full_begin + BLOCK - 1) // BLOCK, full_end // BLOCK, (end + BLOCK - 1) // BLOCK


def walks(begin, full_begin, full_end, end, HAS_LOW, EDGES):
    """The walk in parts, `(begin, end, MASKED)`: edge tiles that compare positions, inner ones, edge tiles again.

    A loop for each, because a branch in one loop does not last: the compiler makes selections of it, and issues them
    for every tile. In dq_kernel, causal, on the Ada path, the loop over inner tiles is 600 instructions so, and was 739
    (D 64), 489 and 553 (D 128); the price is code half as long again. dkdv_kernel keeps its branch: see there.
    """
    if not EDGES:
        return ((begin, end, True),)
    inner = cutlass.min(cutlass.max(begin, full_begin), end) if HAS_LOW else begin
    outer = cutlass.min(cutlass.max(inner, full_end), end)
    before = ((begin, inner, True),) if HAS_LOW else ()
    return (*before, (inner, outer, False), (outer, end, True))


def smem_layout(ROWS, COLS, STAGES=None):
    """How a tile `[ROWS, COLS]` of 16-bit elements lies in shared memory, or STAGES of them `[ROWS, COLS, STAGES]`.

    Panels of up to 64 columns (128 bytes, one turn around the banks) one after another. In a panel, the 16-byte pieces
    of a row change places by the row's number, so that the 8 rows that `ldmatrix` reads together lie in 8 different
    groups of banks. COLS: a multiple of 16.
    """
    width = math.gcd(COLS, 64)
    swizzle = cute.make_swizzle(int(math.log2(width // VECTOR)), 3, 3)
    panel = cute.make_composed_layout(swizzle, 0, cute.make_layout((8, width), stride=(width, 1)))
    if STAGES is None:
        return cute.tile_to_shape(panel, (ROWS, COLS), (0, 1))
    return cute.tile_to_shape(panel, (ROWS, COLS, STAGES), (0, 1, 2))


def smem_tile(smem, dtype, ROWS, COLS, STAGES=None):
    """Room for such a tile; its panels start where the exchange of pieces begins anew."""
    panel_bytes = 8 * math.gcd(COLS, 64) * dtype.width // 8
    return smem.allocate_tensor(dtype, smem_layout(ROWS, COLS, STAGES), byte_alignment=panel_bytes)


def transposed(tile):
    """The tile `[ROWS, COLS]` seen as `[COLS, ROWS]`; a mode of stages behind them stays where it is."""
    rows, cols, *stages = (cute.size(tile, mode=[i]) for i in range(cute.rank(tile)))
    layout = cute.make_layout((cols, rows, *stages), stride=(rows, 1, *(rows * cols for _ in stages)))
    return cute.composition(tile, layout)


class RowCopy:
    """Copies of tiles `[ROWS, COLS]` between global and shared memory by the threads of a block, 16 bytes a piece.

    Neighbouring threads take neighbouring pieces of a row. Where the tile has fewer pieces than the block has threads,
    the threads past the last piece do nothing.
    """

    def __init__(self, dtype, ROWS, COLS, THREADS, thread):
        pieces = math.gcd(COLS, 64) // VECTOR
        self.threads = math.gcd(THREADS, ROWS * pieces)
        self.threads &= -self.threads  # a power of two of rows a pass, as panels have them
        self.has_idle_threads = self.threads < THREADS
        self.thread = thread
        self.cols = COLS
        layout = cute.make_layout((self.threads // pieces, pieces), stride=(pieces, 1)), cute.make_layout((1, VECTOR))
        tile = cute.make_identity_tensor((ROWS, COLS))
        load = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)  # past L1: no thread reads it twice
        self.load_atom = cute.make_copy_atom(load, dtype, num_bits_per_copy=VECTOR * dtype.width)
        self.store_atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=VECTOR * dtype.width)
        copy = cute.make_tiled_copy_tv(self.load_atom, *layout)
        self.slice = copy.get_slice(thread)
        # Where in the tile this thread's pieces lie, (piece, rows, columns). A row's number is `row0` plus one known at
        # compile time: then what it is compared with is the same for all threads, and they keep a single number.
        self.coordinates = self.slice.partition_S(tile)
        self.row0 = self.coordinates[0, 0, 0][0]
        first = copy.get_slice(0).partition_S(tile)
        self.rows = [first[0, i, 0][0] for i in range(cute.size(first, mode=[1]))]

    def mine(self, tile):
        """This thread's part of a tile, (piece, rows, columns, …)."""
        return self.slice.partition_S(tile)


def pieces_inside(copy, i, rows, HEAD_DIM, first=0):
    """Which pieces of a thread's row `i` lie in the rows `first .. rows` and before HEAD_DIM."""
    columns = cute.size(copy.coordinates, mode=[2])
    inside = cute.make_rmem_tensor((1, columns), Boolean)
    row_inside = copy.row0 < rows - copy.rows[i]
    if not isinstance(first, int) or first > 0:
        row_inside = row_inside & (copy.row0 >= first - copy.rows[i])
    for j in range(columns):
        inside[0, j] = row_inside
        if copy.cols > HEAD_DIM:
            inside[0, j] = row_inside & (copy.coordinates[0, i, j][1] < HEAD_DIM)
    return inside


@cute.jit
def load_rows(copy, source, target, rows, HEAD_DIM, first=0):
    """Starts to copy a thread's part of a tile from global to shared memory.

    Rows outside `first .. rows` and columns past HEAD_DIM become zeros, whatever lies there.
    """
    if not copy.has_idle_threads or copy.thread < copy.threads:
        for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
            inside = pieces_inside(copy, i, rows, HEAD_DIM, first)
            cute.copy(copy.load_atom, source[None, i, None], target[None, i, None], pred=inside)


@cute.jit
def store_rows(copy, source, target, rows, HEAD_DIM):
    """Copies a thread's part of a tile from shared to global memory, where it lies before `rows` and HEAD_DIM."""
    if not copy.has_idle_threads or copy.thread < copy.threads:
        values = cute.make_fragment_like(source)
        cute.copy(copy.store_atom, source, values)
        for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
            inside = pieces_inside(copy, i, rows, HEAD_DIM)
            cute.copy(copy.store_atom, values[None, i, None], target[None, i, None], pred=inside)


class KeyTiles:
    """The tiles `[BLOCK, BLOCK_D]` of a head's keys or values, and the buffers they are copied to one after another."""

    def __init__(self, matrix, buffers, copy, BLOCK, BLOCK_D, HEAD_DIM):
        self.copy = copy
        self.length = matrix.shape[0]
        self.source = copy.mine(cute.local_tile(matrix, (BLOCK, BLOCK_D), (None, 0)))  # (piece, rows, columns, tiles)
        self.target = copy.mine(buffers)  # (piece, rows, columns, stages)
        self.block, self.head_dim = BLOCK, HEAD_DIM


def fetch(tiles, n, end, stage):
    """Starts to copy tile n to its buffer; past `end` nothing is read, and the tile becomes zeros.

    There is no branch around it, so that its arithmetic can hide behind a product.
    """
    source, target = tiles.source[None, None, None, n], tiles.target[None, None, None, stage]
    last = cutlass.min(tiles.length, end * tiles.block)
    load_rows(tiles.copy, source, target, last - n * tiles.block, tiles.head_dim)


def mma_of(dtype, WARPS_M, WARPS_N=1):
    """The product of a block: WARPS_M × WARPS_N warps, each `mma.sync` m16n8k16 with fp32 accumulation.

    A warp takes 16 columns at a time, because one `ldmatrix` brings two operands B.
    """
    instruction = warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16))
    tile = (WARPS_M * 16, WARPS_N * 16, 16)
    return cute.make_tiled_mma(instruction, (WARPS_M, WARPS_N, 1), permutation_mnk=tile)


class Operand:
    """A side of a product as a thread holds it, read from shared memory by `ldmatrix`, 16 inner places at a time.

    side: "A" for a tile `[rows, inner]`, "B" for `[columns, inner]`. IN_COLUMNS: the inner dimension is not the one
    that is contiguous in memory (a tile that came out of `transposed`).
    """

    def __init__(self, side, mma, thread, tile, IN_COLUMNS=False):
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=IN_COLUMNS, num_matrices=4), tile.element_type)
        thread_mma = mma.get_slice(thread)
        one = tile if cute.rank(tile) == 2 else tile[None, None, 0]
        if side == "A":
            self.copy = cute.make_tiled_copy_A(atom, mma)
            self.fragment = thread_mma.make_fragment_A(thread_mma.partition_A(one))
        else:
            self.copy = cute.make_tiled_copy_B(atom, mma)
            self.fragment = thread_mma.make_fragment_B(thread_mma.partition_B(one))
        thread_copy = self.copy.get_slice(thread)
        self.source = thread_copy.partition_S(tile)  # (8 × 16 bytes, rows, inner, …)
        self.target = thread_copy.retile(self.fragment)
        self.blocks = cute.size(self.fragment, mode=[2])  # of the inner dimension

    def load(self, k, stage=None):
        """Reads block k of the inner dimension into the fragment."""
        at = (None, None, k) if stage is None else (None, None, k, stage)
        cute.copy(self.copy, self.source[at], self.target[None, None, k])

    def load_all(self):
        """Reads the whole tile into the fragment."""
        for k in range(self.blocks):
            self.load(k)


class InRegisters:
    """A side of a product that is in registers already; it is given the place of an `Operand`."""

    def __init__(self, fragment):
        self.fragment = fragment
        self.blocks = cute.size(fragment, mode=[2])

    def load(self, k, stage=None):
        """Nothing is left to read."""


def gemm(mma, acc, a, b, stage_a=None, stage_b=None, meanwhile=None):
    """`acc += a b`, each block of the inner dimension read while the one before it is multiplied.

    meanwhile: what to do once the first block is being multiplied.
    """
    a.load(0, stage_a)
    b.load(0, stage_b)
    for k in range(a.blocks):
        if k + 1 < a.blocks:
            a.load(k + 1, stage_a)
            b.load(k + 1, stage_b)
        cute.gemm(mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)
        if k == 0 and meanwhile is not None:
            meanwhile()


def accumulator(mma, thread, ROWS, COLS):
    """A thread's part of fp32 sums `[ROWS, COLS]`, all zeros."""
    acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((ROWS, COLS)), Float32)
    acc.fill(0.0)
    return acc


def as_matrix(acc):
    """A thread's part of an accumulator as (rows, columns), instead of (values of one `mma`, rows, columns)."""
    (columns, rows), tiles_m, tiles_n = acc.layout.shape
    (column_stride, row_stride), stride_m, stride_n = acc.layout.stride
    layout = cute.make_layout(
        ((rows, tiles_m), (columns, tiles_n)), stride=((row_stride, stride_m), (column_stride, stride_n))
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand(acc, dtype):
    """An accumulator, rounded to 16 bits, as the operand A of the next product: its columns are the inner dimension.

    An m16n8k16 `mma` leaves two neighbouring columns a thread in each 8 and takes operand A in two such halves of 16
    columns, so that no value changes its thread.
    """
    rounded = cute.make_fragment_like(acc, dtype)
    rounded.store(acc.load().to(dtype))
    halves = cute.logical_divide(rounded.layout, (None, None, 2))  # (values, rows, (2, columns / 2))
    values, rows, (pair, columns) = halves.shape
    value_stride, row_stride, (pair_stride, column_stride) = halves.stride
    layout = cute.make_layout(
        ((values, pair), rows, columns), stride=((value_stride, pair_stride), row_stride, column_stride)
    )
    return InRegisters(cute.make_tensor(rounded.iterator, layout))


class Coordinates:
    """Where in a tile `[ROWS, COLS]` of an accumulator a thread's elements lie, as `as_matrix` counts them.

    A row's number is `row0` plus one known at compile time, a column's is `col0` plus one known at compile time.
    """

    def __init__(self, mma, thread, ROWS, COLS):
        tile = cute.make_identity_tensor((ROWS, COLS))
        mine, first = (as_matrix(mma.get_slice(t).partition_C(tile)) for t in (thread, 0))
        self.row0, self.col0 = mine[0, 0]
        self.rows = [first[i, 0][0] for i in range(cute.size(first, mode=[0]))]
        self.cols = [first[0, j][1] for j in range(cute.size(first, mode=[1]))]


def hide(scores, coordinates, row_begin, key_begin, len_k, low, high, HAS_LOW, HAS_HIGH):
    """Sets the scores `[BLOCK_M, BLOCK_N]` of pairs that the mask hides to -inf, so that their exponential is 0."""
    for i, row in enumerate(coordinates.rows):
        query = row_begin + coordinates.row0 + row
        # Columns are counted from this thread's first one: then the comparisons are with constants.
        origin = key_begin + coordinates.col0
        end = len_k - origin
        if HAS_HIGH:
            end = cutlass.min(end, query + high + 1 - origin)
        for j, col in enumerate(coordinates.cols):
            seen = col < end
            if HAS_LOW:
                seen = seen & (col >= query + low - origin)
            scores[i, j] = cutlass.select_(seen, scores[i, j], -Float32.inf)


def fold(combine, values):
    """All values combined two by two, in as few steps one after another as there can be."""
    while len(values) > 1:
        odd = values[-1:] if len(values) % 2 else []
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def quad_max(value):
    """The largest value of the four threads that share a row of an accumulator."""
    for offset in (2, 1):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def quad_sum(value):
    """The sum over the four threads that share a row of an accumulator."""
    for offset in (2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


def write_accumulator(mma, thread, acc, tile):
    """Writes a thread's part of an accumulator, rounded to the tile's dtype, to a tile in shared memory."""
    rounded = cute.make_fragment_like(acc, tile.element_type)
    rounded.store(acc.load().to(tile.element_type))
    atom = cute.make_copy_atom(CopyUniversalOp(), tile.element_type, num_bits_per_copy=2 * tile.element_type.width)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(tile))
