"""The kernel of dk and dv: a program owns a tile of keys and walks over queries. On demand it adds up dq as well.

The scores are computed transposed, `Sᵀ = K Qᵀ [BLOCK_N, BLOCK_M]`, so that Pᵀ and dSᵀ are the left operands of the next
products straight from registers. For dQ = dS K the compiler takes dSᵀ through shared memory.

The sums of dq are `(B, Hq, rows, BLOCK_D)` in fp32, rows being Nq rounded up to 128. Each BLOCK_M rows of them are one
piece of memory, in the order of `to_fragments`.
"""

import triton
import triton.language as tl

from .blocks import dot, load_rows, padded, row_offsets, schedule, store_rows, tile_range, visible, without_unseeing
from .forward import LOG2_E
from .launch import RUN_TIME


@triton.jit
def to_fragments(x, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROW_WARPS: tl.constexpr, COLUMN_WARPS: tl.constexpr,
                 GROUPS: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """`x [BLOCK_M, BLOCK_D]`, a product, as `[BLOCK_M · BLOCK_D]`: VECTOR elements of a lane, then the next lane's.

    So a warp adds to whole sectors of memory. In the order of rows it would add to parts of many: of 16 rows and 8
    columns a lane holds two neighbours in each of two rows that are 8 apart. Nothing moves, indices are exchanged.
    """
    ROWS: tl.constexpr = BLOCK_M // 16 // ROW_WARPS
    COLUMNS: tl.constexpr = BLOCK_D // 8 // COLUMN_WARPS // GROUPS
    x = tl.reshape(x, [ROWS, ROW_WARPS, 2, 8, GROUPS, COLUMNS, COLUMN_WARPS, 4, 2])
    x = tl.permute(x, (0, 5, 4, 1, 6, 3, 7, 2, 8) if VECTOR == 4 else (0, 2, 5, 8, 4, 1, 6, 3, 7))
    return tl.reshape(x, [BLOCK_M * BLOCK_D])


@triton.jit
def walk_queries(
    dk, dv, k, v, q_base, do_base, delta_base, shift_base, dq_base, q_n, do_n, q_offsets, do_offsets, begin, end,
    key_begin, len_q, len_k, low, high, factor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr,
    UNSEEING: tl.constexpr, EXP2: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    ADD_DQ: tl.constexpr, ROW_WARPS: tl.constexpr, COLUMN_WARPS: tl.constexpr, GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """The walk over the query tiles of `[begin, end)`, adding up dk and dv of one tile of keys, and dq in memory."""
    for row_begin in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        row_begin = tl.multiple_of(row_begin, BLOCK_M)
        q = load_rows(q_base, q_n, row_begin, len_q, q_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        shift = tl.load(shift_base + row_begin + tl.arange(0, BLOCK_M))  # [BLOCK_M]
        do = load_rows(do_base, do_n, row_begin, len_q, do_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        if UNSEEING and MASKED:  # in the interior all see all
            q, do = without_unseeing(q, shift), without_unseeing(do, shift)
        s_t = dot(k, tl.trans(q), None, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_M]
        # Before the exponential, which can be computed meanwhile where products are asynchronous.
        dp_t = dot(v, tl.trans(do), None, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_M]
        p_t = tl.math.exp2(s_t * factor - shift[None, :]) if EXP2 else tl.exp(s_t * factor - shift[None, :])
        if MASKED:
            rows = row_begin + tl.arange(0, BLOCK_M)
            keys = key_begin + tl.arange(0, BLOCK_N)
            seen = visible(rows[None, :], keys[:, None], len_k, low, high, HAS_LOW, HAS_HIGH)
            p_t = tl.where(seen, p_t, 0.0)
        dv = dot(p_t.to(do.dtype), do, dv, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_D]
        delta = tl.load(delta_base + row_begin + tl.arange(0, BLOCK_M))  # [BLOCK_M]
        ds_t = (p_t * (dp_t - delta[None, :])).to(q.dtype)
        if ADD_DQ:
            # Before dk, whose product can run while dq is added.
            dq = dot(tl.trans(ds_t), k, None, PRECISION, INTERPRET)  # [BLOCK_M, BLOCK_D]
        dk = dot(ds_t, q, dk, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_D]
        if ADD_DQ:
            dq = to_fragments(dq, BLOCK_M, BLOCK_D, ROW_WARPS, COLUMN_WARPS, GROUPS, VECTOR)
            offsets = tl.arange(0, BLOCK_M * BLOCK_D)
            if VECTOR == 1:
                # Not told that neighbours follow each other, the compiler gives a thread one element at a time.
                offsets = tl.max_contiguous(offsets, 1)
            # Relaxed: sums in any order, which nobody reads before the next launch.
            tl.atomic_add(dq_base + row_begin.to(tl.int64) * BLOCK_D + offsets, dq, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=RUN_TIME)
def dkdv_kernel(
    DO, Q, K, V, DELTA, SHIFT, DK, DV, DQ_SUM, do_b, do_h, do_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, heads_kv, group, heads, section, len_q, len_k, low, high, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, UNSEEING: tl.constexpr,
    SKIP: tl.constexpr, EXP2: tl.constexpr, EDGES: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, ADD_DQ: tl.constexpr, ROW_WARPS: tl.constexpr, COLUMN_WARPS: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dk and dv, and with ADD_DQ its part of every dq. heads: B·Hkv."""
    # section: so many key heads are worked on at a time, as in the forward. The heavy tiles of keys are the first ones.
    tile, head = schedule(tl.cdiv(len_k, BLOCK_N), heads, section, False, ORDER)
    batch = (head // heads_kv).to(tl.int64)
    head_kv = (head % heads_kv).to(tl.int64)
    key_begin = tile * BLOCK_N
    k_offsets = row_offsets(k_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    v_offsets = row_offsets(v_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    q_offsets = row_offsets(q_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    do_offsets = row_offsets(do_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    k_base = K + (batch * k_b + head_kv * k_h) * UNIT
    v_base = V + (batch * v_b + head_kv * v_h) * UNIT
    k = load_rows(k_base, k_n * UNIT, key_begin, len_k, k_offsets, BLOCK_N, BLOCK_D, HEAD_DIM, True)
    v = load_rows(v_base, v_n * UNIT, key_begin, len_k, v_offsets, BLOCK_N, BLOCK_D, HEAD_DIM, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # The band transposed: i + low <= j <= i + high says of a key j that j - high <= i <= j - low. So the bounds are
    # exchanged and negated, HAS_LOW and HAS_HIGH exchanged as well.
    begin, full_begin, full_end, end = tile_range(
        key_begin, tl.minimum(key_begin + BLOCK_N, len_k) - 1, len_q, -high, -low, BLOCK_M, HAS_HIGH, HAS_LOW, SKIP,
        EDGES,
    )  # fmt: skip
    if ADD_DQ and key_begin + BLOCK_N > len_k:
        # Keys past the end score 0, and exp(0 - lse) may be infinite, which dq would have in its sums (what it
        # makes of their own dk and dv is not stored). Here they are in the tile that is owned, which meets every
        # tile of queries, so all of these are edges. In the forward and in dq_kernel they are in the last tile of
        # the walk, which tile_range counts among the edges.
        full_begin = begin
        full_end = begin
    factor = scale * LOG2_E if EXP2 else scale
    for member in range(group):
        head_q = head_kv * group + member
        q_base = Q + (batch * q_b + head_q * q_h) * UNIT
        do_base = DO + (batch * do_b + head_q * do_h) * UNIT
        row_base = (batch * heads_kv * group + head_q) * padded(len_q)
        # The parts are the forward's; under the transposed band it is HAS_HIGH that makes an edge at the beginning.
        for part in tl.static_range(3):
            if part == 2 or (EDGES and (part == 1 or HAS_HIGH)):
                dk, dv = walk_queries(
                    dk, dv, k, v, q_base, do_base, DELTA + row_base, SHIFT + row_base, DQ_SUM + row_base * BLOCK_D,
                    q_n * UNIT, do_n * UNIT, q_offsets, do_offsets,
                    begin if part == 0 else full_begin if part == 1 else full_end,
                    full_begin if part == 0 else full_end if part == 1 else end,
                    key_begin, len_q, len_k, low, high, factor, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, HAS_LOW,
                    HAS_HIGH, part != 1, UNSEEING, EXP2, PRECISION, INTERPRET, ADD_DQ, ROW_WARPS, COLUMN_WARPS,
                    GROUPS, VECTOR,
                )  # fmt: skip

    dk_base = DK + (batch * dk_b + head_kv * dk_h) * UNIT
    dv_base = DV + (batch * dv_b + head_kv * dv_h) * UNIT
    dk_offsets = row_offsets(dk_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    dv_offsets = row_offsets(dv_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    store_rows(dk_base, dk_n * UNIT, key_begin, len_k, dk_offsets, dk * scale, BLOCK_N, BLOCK_D, HEAD_DIM)
    store_rows(dv_base, dv_n * UNIT, key_begin, len_k, dv_offsets, dv, BLOCK_N, BLOCK_D, HEAD_DIM)
