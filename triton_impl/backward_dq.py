"""The kernels of dq: dq_kernel computes it in a walk over keys, cast_kernel makes it of the sums of dkdv_kernel."""

import triton
import triton.language as tl

from .blocks import (
    dot,
    hidden_zeros,
    load_rows,
    padded,
    row_offsets,
    schedule,
    store_rows,
    tile_range,
    visible,
    without_unseeing,
)
from .forward import LOG2_E
from .launch import RUN_TIME


@triton.jit
def walk_keys(
    dq, q, do, shift, delta, k_base, v_base, k_n, v_n, k_offsets, v_offsets, begin, end, row_begin, len_k, low, high,
    factor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, EXP2: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The walk over the key tiles of `[begin, end)`, adding up dq of one tile of queries."""
    for key_begin in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key_begin = tl.multiple_of(key_begin, BLOCK_N)
        k = load_rows(k_base, k_n, key_begin, len_k, k_offsets, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        v = load_rows(v_base, v_n, key_begin, len_k, v_offsets, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRET)  # [BLOCK_M, BLOCK_N]
        # Before the exponential, which can be computed meanwhile where products are asynchronous.
        dp = dot(do, tl.trans(v), None, PRECISION, INTERPRET)  # [BLOCK_M, BLOCK_N]
        p = tl.math.exp2(s * factor - shift[:, None]) if EXP2 else tl.exp(s * factor - shift[:, None])
        if MASKED:
            rows = row_begin + tl.arange(0, BLOCK_M)
            keys = key_begin + tl.arange(0, BLOCK_N)
            p = tl.where(visible(rows[:, None], keys[None, :], len_k, low, high, HAS_LOW, HAS_HIGH), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq, PRECISION, INTERPRET)  # [BLOCK_M, BLOCK_D]
    return dq


@triton.jit(do_not_specialize=RUN_TIME)
def dq_kernel(
    DO, Q, K, V, DELTA, SHIFT, DQ, do_b, do_h, do_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dq_b, dq_h, dq_n,
    heads_q, group, heads, section, len_q, len_k, low, high, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, UNSEEING: tl.constexpr,
    SKIP: tl.constexpr, EXP2: tl.constexpr, EDGES: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of queries: dq. heads: B·Hq."""
    # section: so many heads are worked on at a time, as in the forward.
    tile, head = schedule(tl.cdiv(len_q, BLOCK_M), heads, section, HAS_HIGH, ORDER)
    batch = (head // heads_q).to(tl.int64)
    head_q = (head % heads_q).to(tl.int64)
    head_kv = head_q // group
    row_begin = tile * BLOCK_M
    k_base = K + (batch * k_b + head_kv * k_h) * UNIT
    v_base = V + (batch * v_b + head_kv * v_h) * UNIT
    k_offsets = row_offsets(k_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    v_offsets = row_offsets(v_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    q_base = Q + (batch * q_b + head_q * q_h) * UNIT
    do_base = DO + (batch * do_b + head_q * do_h) * UNIT
    q_offsets = row_offsets(q_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    do_offsets = row_offsets(do_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    q = load_rows(q_base, q_n * UNIT, row_begin, len_q, q_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    do = load_rows(do_base, do_n * UNIT, row_begin, len_q, do_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    rows = row_begin + tl.arange(0, BLOCK_M)
    row_base = head.to(tl.int64) * padded(len_q)
    shift = tl.load(SHIFT + row_base + rows)  # [BLOCK_M]
    delta = tl.load(DELTA + row_base + rows)  # [BLOCK_M]
    if UNSEEING:
        q, do = without_unseeing(q, shift), without_unseeing(do, shift)
    dq = hidden_zeros(q)  # [BLOCK_M, BLOCK_D]

    factor = scale * LOG2_E if EXP2 else scale
    begin, full_begin, full_end, end = tile_range(
        row_begin, tl.minimum(row_begin + BLOCK_M, len_q) - 1, len_k, low, high, BLOCK_N, HAS_LOW, HAS_HIGH, SKIP, EDGES
    )
    for part in tl.static_range(3):  # the parts are the forward's
        if part == 2 or (EDGES and (part == 1 or HAS_LOW)):
            dq = walk_keys(
                dq, q, do, shift, delta, k_base, v_base, k_n * UNIT, v_n * UNIT, k_offsets, v_offsets,
                begin if part == 0 else full_begin if part == 1 else full_end,
                full_begin if part == 0 else full_end if part == 1 else end,
                row_begin, len_k, low, high, factor, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, HAS_LOW, HAS_HIGH,
                part != 1, EXP2, PRECISION, INTERPRET,
            )  # fmt: skip
    dq_base = DQ + (batch * dq_b + head_q * dq_h) * UNIT
    dq_offsets = row_offsets(dq_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    store_rows(dq_base, dq_n * UNIT, row_begin, len_q, dq_offsets, dq * scale, BLOCK_M, BLOCK_D, HEAD_DIM)


@triton.jit
def from_fragments(x, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROW_WARPS: tl.constexpr,
                   COLUMN_WARPS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """`x` of `to_fragments` once more: `[BLOCK_M, BLOCK_D]`."""
    ROWS: tl.constexpr = BLOCK_M // 16 // ROW_WARPS
    COLUMNS: tl.constexpr = BLOCK_D // 8 // COLUMN_WARPS // GROUPS
    if VECTOR == 4:
        x = tl.reshape(x, [ROWS, COLUMNS, GROUPS, ROW_WARPS, COLUMN_WARPS, 8, 4, 2, 2])
        x = tl.permute(x, (0, 3, 7, 5, 2, 1, 4, 6, 8))
    else:
        x = tl.reshape(x, [ROWS, 2, COLUMNS, 2, GROUPS, ROW_WARPS, COLUMN_WARPS, 8, 4])
        x = tl.permute(x, (0, 5, 1, 7, 4, 2, 6, 8, 3))
    return tl.reshape(x, [BLOCK_M, BLOCK_D])


@triton.jit(do_not_specialize=RUN_TIME)
def cast_kernel(
    DQ_SUM, DQ, dq_b, dq_h, dq_n, heads_q, heads, len_q, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, ROW_WARPS: tl.constexpr,
    COLUMN_WARPS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One tile of queries, of dkdv_kernel's size: its sums of dq put in order, scaled and rounded. heads: B·Hq."""
    tile, head = schedule(tl.cdiv(len_q, BLOCK_M), heads, 1, False, False)
    batch = (head // heads_q).to(tl.int64)
    head_q = (head % heads_q).to(tl.int64)
    row_begin = tile * BLOCK_M
    sums = DQ_SUM + (head.to(tl.int64) * padded(len_q) + row_begin) * BLOCK_D
    dq = tl.load(sums + tl.arange(0, BLOCK_M * BLOCK_D))
    dq = from_fragments(dq, BLOCK_M, BLOCK_D, ROW_WARPS, COLUMN_WARPS, GROUPS, VECTOR)
    dq_base = DQ + (batch * dq_b + head_q * dq_h) * UNIT
    dq_offsets = row_offsets(dq_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    store_rows(dq_base, dq_n * UNIT, row_begin, len_q, dq_offsets, dq * scale, BLOCK_M, BLOCK_D, HEAD_DIM)
