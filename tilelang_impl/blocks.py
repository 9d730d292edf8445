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


def tile_range(first, last, length, low, high, BLOCK, HAS_LOW, HAS_HIGH, SKIP, EDGES):
    """The other side's tiles for a tile of rows `first..last`: `begin, full_begin, full_end, end`, counted in BLOCKs.

    A row r sees the positions `r + low <= c <= r + high` of `[0, length)`. Tiles in `[begin, end)` are walked over;
    of those, the ones outside `[full_begin, full_end)` are edges and compare positions. At least one tile is walked
    over, if only to find nothing there: what a program copies before its walk is awaited inside it, and must have
    landed before the program stores its results in the same place.
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
    first_tile = T.truncdiv(begin, BLOCK)
    end_tile = T.max(T.truncdiv(end + BLOCK - 1, BLOCK), first_tile + 1)
    return first_tile, T.truncdiv(full_begin + BLOCK - 1, BLOCK), T.truncdiv(full_end, BLOCK), end_tile


def visible(row, key, len_k, low, high, HAS_LOW, HAS_HIGH):
    """Whether a query sees a key."""
    seen = key < len_k
    if HAS_LOW:
        seen = T.And(seen, key >= row + low)
    if HAS_HIGH:
        seen = T.And(seen, key <= row + high)
    return seen


def walk(count, STAGES, COPIES, STATEMENTS, ASYNC):
    """The pipelined loop of `count` iterations, whose body begins with COPIES of its STATEMENTS.

    STAGES buffers for each copy; 1 is no pipeline. With TMA a warpgroup of its own copies as far ahead as the buffers
    allow, and the compiler schedules that. With cp.async it would wait and synchronise once for every buffer, so there
    the schedule is said by hand: the copies of iteration `t + STAGES - 1` are sent off before iteration t computes.
    """
    if STAGES == 1 or ASYNC:
        return T.Pipelined(count, num_stages=0 if STAGES == 1 else STAGES)
    stage = [0] * COPIES + [STAGES - 1] * (STATEMENTS - COPIES)
    return T.Pipelined(count, order=list(range(STATEMENTS)), stage=stage)
