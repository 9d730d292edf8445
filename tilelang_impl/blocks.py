"""What the kernels share: which tile a program owns, which tiles it walks over, what a query sees, how rows are cut.

These are plain Python functions over TileLang's expressions: calling one writes its arithmetic into the kernel. The
arithmetic of `tile_range` is `common.Mask`'s, written once more for the device and tested against it. Integers that
are known not to be negative are divided with `truncdiv`, which is C's division and needs no test of signs.
"""

import tilelang.language as T

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def shape_of(LAYOUT, batch, heads, length, head_dim):
    """The shape of a packed tensor as it lies in memory: LAYOUT is `bhnd` or `bnhd`."""
    return (batch, heads, length, head_dim) if LAYOUT == "bhnd" else (batch, length, heads, head_dim)


def rows_of(tensor, LAYOUT, batch, head, begin, ROWS, BLOCK_D):
    """Rows `begin .. begin + ROWS` of one head, `[ROWS, BLOCK_D]`: zeros past the last row and past the head's end."""
    if LAYOUT == "bhnd":
        return tensor[batch, head, begin : begin + ROWS, 0:BLOCK_D]
    return tensor[batch, begin : begin + ROWS, head, 0:BLOCK_D]


def claim(program, tiles, heads, section, HEAVY_LAST, ORDER):
    """Which tile of which (batch, head) a program owns: `(tile, head)`.

    Without ORDER the tiles of a head run one after another. With it, heads are taken in sections whose keys and
    values fit in L2 together, and inside a section all heaviest tiles go first, so that the light ones fill the gaps
    that the heavy ones leave at the end.
    """
    if not ORDER:
        return T.truncmod(program, tiles), T.truncdiv(program, tiles)
    first = T.truncdiv(program, tiles * section) * section
    width = T.min(section, heads - first)
    rest = program - first * tiles
    tile = T.truncdiv(rest, width)
    return tiles - 1 - tile if HEAVY_LAST else tile, first + T.truncmod(rest, width)


def tile_range(first, last, length, low, high, BLOCK, HAS_LOW, HAS_HIGH, SKIP, EDGES, RAGGED=True):
    """The other side's tiles for a tile of rows `first..last`: `begin, full_begin, full_end, end`, counted in BLOCKs.

    A row r sees the positions `r + low <= c <= r + high` of `[0, length)`. Tiles in `[begin, end)` are walked over;
    of those, the ones outside `[full_begin, full_end)` are edges and compare positions.

    RAGGED: positions past the length have to be compared too. Only the last tile can have any, so without HAS_HIGH it
    is taken for an edge, even when the length fills it: "the last iteration" is a condition that the compiler can take
    out of the loop, and "past the last multiple of BLOCK" is not. The other tiles then have no branch.

    At least one tile is walked over, the last if all lie before the band, if only to find nothing there: what a program
    copies before its walk is awaited inside it, and must have landed before the program stores its results in the same
    place.
    """
    begin, end, full_begin, full_end = 0, length, 0, length
    if HAS_LOW:
        begin = T.max(first + low, 0)
        full_begin = T.max(last + low, 0)
    if HAS_HIGH:
        end = T.min(T.max(last + high + 1, 0), length)
        full_end = T.min(T.max(first + high + 1, 0), length)
    if not SKIP:
        begin, end = 0, length
    if not EDGES:
        full_end = 0
    first_tile = T.truncdiv(T.min(begin, length - 1) if HAS_LOW and SKIP else begin, BLOCK)
    end_tile = T.max(T.truncdiv(end + BLOCK - 1, BLOCK), first_tile + 1)
    full_end_tile = T.truncdiv(full_end, BLOCK)
    if EDGES and not HAS_HIGH:
        full_end_tile = end_tile - 1 if RAGGED else end_tile
    return first_tile, T.truncdiv(full_begin + BLOCK - 1, BLOCK), full_end_tile, end_tile


def visible(row, key, len_k, low, high, HAS_LOW, HAS_HIGH):
    """Whether a query sees a key."""
    seen = key < len_k
    if HAS_LOW:
        seen = T.And(seen, key >= row + low)
    if HAS_HIGH:
        seen = T.And(seen, key <= row + high)
    return seen


def dq_sum_shape(batch, heads, row_blocks, BLOCK_D):
    """The shape of the sum of dq, whose rows and columns are cut into blocks of 8×8."""
    return batch, heads, row_blocks, BLOCK_D // 8, 2, 32


def dq_sum_at(batch, head, row_block, i, d):
    """Where the sum of dq's element in column d, i rows past the beginning of a block, is kept.

    In the order in which the threads of an mma.sync product hold it: the 32 elements that a warp adds at a time, those
    in the even or in the odd columns of a block, lie one after another.
    """
    return batch, head, row_block + i // 8, d // 8, d % 2, i % 8 * 4 + d % 8 // 2


def walk(count, STAGES, ASYNC, steps, last_reader):
    """The pipelined loop of `count` iterations, at least one, over a body of `steps`, named in their order.

    last_reader: for each copy, the first steps of the body, the step that reads its buffer last.
    STAGES: buffers of each copy; 0 is a plain loop, that of the naive rung. With TMA a warpgroup of its own copies as
    far ahead as the buffers allow, and the compiler schedules that. With cp.async it would wait and synchronise once
    for every buffer, so there the schedule is said by hand: the copies of iteration `t + STAGES - 1` are sent off
    before iteration t computes, or, into a single buffer, those of `t + 1` as soon as iteration t has read it.
    """
    count = T.max(
        count, 1
    )  # as it is anyhow (`tile_range`); the compiler now sees it, and guards no part of the pipeline
    if STAGES == 0 or ASYNC:
        return T.Pipelined(count, num_stages=STAGES)
    sequence = list(steps)
    if STAGES == 1:
        for copy, reader in last_reader.items():
            sequence.remove(copy)
            sequence.insert(sequence.index(reader) + 1, copy)
    order = [sequence.index(step) for step in steps]
    stage = [0 if step in last_reader else max(1, STAGES - 1) for step in steps]
    return T.Pipelined(count, order=order, stage=stage)
