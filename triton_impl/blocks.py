"""What both directions share on the device: which tile a program owns, which tiles it visits, loads and products.

The arithmetic of `tile_range` is `common.Mask`'s, written once more for the device and tested against it.
"""

import triton
import triton.language as tl


@triton.jit
def schedule(tiles, heads, section, HEAVY_LAST: tl.constexpr, ORDER: tl.constexpr):
    """Which tile of which (batch, head) this program owns: `(tile, head)`.

    Without ORDER the tiles of a head run one after another. With it heads are taken in sections, whose keys and values
    fit in L2 together, and a section takes one tile of each of its heads, then the next of each. Under a causal mask
    tiles do not weigh the same: the heaviest go first, and the light ones fill the gaps that these leave at the end.
    """
    program = tl.program_id(0)
    if ORDER:
        first = program // (tiles * section) * section
        width = tl.minimum(section, heads - first)
        rest = program - first * tiles
        tile = rest // width
        head = first + rest % width
        if HEAVY_LAST:
            tile = tiles - 1 - tile
    else:
        tile = program % tiles
        head = program // tiles
    return tile, head


@triton.jit
def tile_range(
    first, last, length, low, high, BLOCK: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    SKIP: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """The other side's positions for a tile of rows `first..last`: `begin, full_begin, full_end, end`.

    A row r sees the positions `r + low <= c <= r + high` of `[0, length)`. Tiles of BLOCK positions in
    `[begin, full_begin)` and `[full_end, end)` are edges, those in `[full_begin, full_end)` are full, the others are
    skipped. All bounds but `end` are multiples of BLOCK where the range they open is not empty.
    """
    begin = 0
    end = length
    full_begin = 0
    full_end = length
    if HAS_LOW:
        begin = tl.maximum(first + low, 0)
        full_begin = tl.maximum(last + low, 0)
    if HAS_HIGH:
        end = tl.minimum(tl.maximum(last + high + 1, 0), length)
        full_end = tl.minimum(tl.maximum(first + high + 1, 0), length)
    if SKIP:
        begin = tl.where(begin < end, begin // BLOCK * BLOCK, end)
    else:
        begin = 0
        end = length
    if EDGES:
        full_begin = tl.minimum(tl.maximum((full_begin + BLOCK - 1) // BLOCK * BLOCK, begin), end)
        full_end = tl.maximum(tl.minimum(full_end // BLOCK * BLOCK, end), full_begin)
    else:
        full_begin = begin
        full_end = begin
    return begin, full_begin, full_end, end


@triton.jit
def visible(rows, keys, len_k, low, high, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr):
    """Which keys the rows see; `rows` and `keys` are broadcast against each other, as bool of their common shape."""
    seen = keys < len_k
    if HAS_LOW:
        seen &= keys >= rows + low
    if HAS_HIGH:
        seen &= keys <= rows + high
    return seen


@triton.jit
def load_rows(base, stride, first, length, tile_offsets, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
              HEAD_DIM: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Rows `first .. first + BLOCK` of a matrix `(length, HEAD_DIM)`, zeros outside: `[BLOCK, BLOCK_D]`.

    tile_offsets: the elements' offsets inside the tile. TAIL: the tile may reach past the last row.
    """
    pointers = base + first.to(tl.int64) * stride + tile_offsets
    if TAIL:
        inside = (first + tl.arange(0, BLOCK) < length)[:, None]
        if BLOCK_D != HEAD_DIM:
            inside &= (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    if BLOCK_D != HEAD_DIM:
        return tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_rows(base, stride, first, length, tile_offsets, values, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
               HEAD_DIM: tl.constexpr):  # fmt: skip
    """Stores the rows of `values [BLOCK, BLOCK_D]` that lie inside a matrix `(length, HEAD_DIM)`, in its dtype."""
    inside = (first + tl.arange(0, BLOCK) < length)[:, None]
    if BLOCK_D != HEAD_DIM:
        inside &= (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    pointers = base + first.to(tl.int64) * stride + tile_offsets
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def without_unseeing(x, shift):
    """Rows that see no key as zeros: their P is 0, but what a caller put there may be NaN, and 0 · NaN is NaN."""
    return tl.where((shift == float("inf"))[:, None], 0.0, x).to(x.dtype)


@triton.jit
def row_offsets(stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a tile's elements from its first one, `[BLOCK, BLOCK_D]`; WIDE: they may pass 2^31 elements."""
    rows = tl.arange(0, BLOCK)
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def hidden_zeros(x):
    """Zeros in fp32, in the shape of `x`, which the compiler does not know to be zeros: where the sum of a loop begins.

    With a sum that begins at a known constant, which also stands for the sum of a loop that is not entered, the
    assembler lets every wgmma of that loop wait for the one before it (but not in dkdv_kernel, whose walks are inside
    a loop over heads).
    """
    return tl.minimum(tl.abs(x.to(tl.float32)), 0.0)


@triton.jit
def scaled_where(wanted, acc, scale, ROW_WARPS: tl.constexpr, INTERPRET: tl.constexpr):
    """`acc [M, N]` times `scale [M]`, of which the rows that are not `wanted [M]` have a scale of 1.

    A thread that has no wanted row branches around its products: in Triton all threads of a program branch or none, and
    asking all of them costs more than the products. ROW_WARPS: how many warps share the rows out, in turns of 16; a
    lane has two rows of 16, eight apart. They are wanted together, so that it asks once. 0: a lane has one row.
    """
    if INTERPRET:
        return acc * scale[:, None]
    flags = wanted.to(tl.int32)
    if ROW_WARPS:
        ROWS: tl.constexpr = acc.shape[0] // 16 // ROW_WARPS
        by_lane = tl.reshape(flags, [ROWS, ROW_WARPS, 2, 8])
        of_lane = tl.max(tl.max(by_lane, 2), 0)[None, :, None, :]
        flags = tl.reshape(tl.broadcast_to(of_lane, [ROWS, ROW_WARPS, 2, 8]), [acc.shape[0]])
    _, scales = tl.broadcast(acc, scale[:, None])
    _, flags = tl.broadcast(acc, flags[:, None])
    return tl.inline_asm_elementwise(
        _SCALE, _SCALE_OPERANDS, [acc, scales, flags], dtype=tl.float32, is_pure=True, pack=_PACK
    )


def _scale_unless_unwanted(count: int) -> tuple[str, str]:
    """PTX that multiplies `count` registers by as many others unless all of as many flags are 0, and its operands."""
    flags = [f"${3 * count + i}" for i in range(count)]
    products = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    text = ["{", ".reg .b32 any;", ".reg .pred wanted;", f"mov.b32 any, {flags[0]};"]
    text += [f"or.b32 any, any, {flag};" for flag in flags[1:]]  # of one lane they are one register: nothing is left
    text += ["setp.ne.b32 wanted, any, 0;", "@!wanted bra DONE;", *products, "DONE:", "}"]
    in_place = [str(i) for i in range(count)]
    return "\n".join(text), ",".join(["=f"] * count + in_place + ["f"] * count + ["r"] * count)


_PACK = tl.constexpr(32)  # for less the assembler makes no branch
_SCALE, _SCALE_OPERANDS = map(tl.constexpr, _scale_unless_unwanted(32))


@triton.jit
def padded(len_q):
    """The rows of shift, delta and the sums of dq, for so many queries: a multiple of every backward tile's."""
    return (len_q + 127) // 128 * 128


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """`acc + a b` in fp32; `acc` may be None. The interpreter's product is wrong on bf16, so it gets fp32 operands."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=("steps",))
def counting_kernel(OUT, steps):
    """Counts to steps: the smallest kernel with a walk of run-time length, to try whether any runs."""
    count = 0
    for _ in tl.range(0, steps):
        count += 1
    tl.store(OUT, count)
