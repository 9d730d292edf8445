"""FlashAttention-2 backward in Triton.

From `do`, `lse` and the inputs, with P recomputed (Dao 2023, algorithm 2):

    P = exp(S - lse)      dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP - delta)      dK = dSᵀ Q      dQ = dS K

where `delta = rowsum(dO ∘ O) - dlse`. Three launches: prepare_kernel computes delta; dkdv_kernel, one program a tile
of keys, walks over queries; dq_kernel, one program a tile of queries, walks over keys. S and dP are computed in both,
seven products instead of five; in exchange no program adds to what another one writes, and every gradient is bitwise
repeatable without being asked to.

Adding dq in dkdv_kernel with fp32 atomics was tried at D 64 and 128. With the best tile of each it was slower; Triton
takes dS through shared memory for that product.

In dkdv_kernel the scores are computed transposed, `Sᵀ = K Qᵀ [BLOCK_N, BLOCK_M]`, so that Pᵀ and dSᵀ are the left
operands of the next products straight from registers.

`shift` is what is subtracted before the exponential, here the lse in the units of the exponential; `factor` is what
Q Kᵀ is multiplied by before it. A ∘ B is the product element by element.

Shapes: do, q, o, dq `(B, Hq, Nq, D)`; k, v, dk, dv `(B, Hkv, Nk, D)`; lse, delta, shift `(B, Hq, Nq)` in fp32.
dk and dv of a head are summed over the group of query heads that share it, in one program and in order.
The rungs are those of the forward.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from common import Form, Problem, Switches, Target, Tile
from common.ports import Forms, Run

from .blocks import dot, load_rows, row_offsets, schedule, store_rows, tile_range, visible
from .budget import dq_tile
from .forward import LOG2_E
from .launch import RUN_TIME, Launch, Layout, constants, heads_in_l2, row_tile, strides


@triton.jit(do_not_specialize=RUN_TIME)
def prepare_kernel(
    DO, OUT, LSE, DLSE, DELTA, SHIFT, do_b, do_h, do_n, o_b, o_h, o_n, heads_q, heads, len_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    EXP2: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta, and the lse as the other kernels subtract it."""
    tile, head = schedule(tl.cdiv(len_q, BLOCK_M), heads, 1, False, False)  # rows are read once: any order will do
    batch = (head // heads_q).to(tl.int64)
    head_q = (head % heads_q).to(tl.int64)
    row_begin = tile * BLOCK_M
    o_base = OUT + (batch * o_b + head_q * o_h) * UNIT
    do_base = DO + (batch * do_b + head_q * do_h) * UNIT
    o_offsets = row_offsets(o_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    do_offsets = row_offsets(do_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    o = load_rows(o_base, o_n * UNIT, row_begin, len_q, o_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    do = load_rows(do_base, do_n * UNIT, row_begin, len_q, do_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]

    rows = row_begin + tl.arange(0, BLOCK_M)
    inside = rows < len_q
    row_base = head.to(tl.int64) * len_q
    lse = tl.load(LSE + row_base + rows, mask=inside, other=float("-inf"))
    if HAS_DLSE:
        delta -= tl.load(DLSE + row_base + rows, mask=inside, other=0.0)
    # A row that saw no key: exp(S - inf) makes its P zero, and no gradient flows, whatever dlse is.
    unseen = lse == float("-inf")
    tl.store(DELTA + row_base + rows, tl.where(unseen, 0.0, delta), mask=inside)
    tl.store(SHIFT + row_base + rows, tl.where(unseen, float("inf"), lse * LOG2_E if EXP2 else lse), mask=inside)


@triton.jit
def without_unseeing(x, shift):
    """Rows that see no key as zeros: their P is 0, but what a caller put there may be NaN, and 0 · NaN is NaN."""
    return tl.where((shift == float("inf"))[:, None], 0.0, x).to(x.dtype)


@triton.jit
def walk_queries(
    dk, dv, k, v, q_base, do_base, delta_base, shift_base, q_n, do_n, q_offsets, do_offsets, begin, end,
    key_begin, len_q, len_k, low, high, factor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr,
    UNSEEING: tl.constexpr, EXP2: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The walk over the query tiles of `[begin, end)`, adding up dk and dv of one tile of keys."""
    for row_begin in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        row_begin = tl.multiple_of(row_begin, BLOCK_M)
        rows = row_begin + tl.arange(0, BLOCK_M)
        q = load_rows(q_base, q_n, row_begin, len_q, q_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        inside = rows < len_q if MASKED else None
        shift = tl.load(shift_base + rows, mask=inside, other=float("inf") if MASKED else None)
        s_t = dot(k, tl.trans(q), None, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_M]
        p_t = tl.math.exp2(s_t * factor - shift[None, :]) if EXP2 else tl.exp(s_t * factor - shift[None, :])
        if MASKED:
            keys = key_begin + tl.arange(0, BLOCK_N)
            seen = visible(rows[None, :], keys[:, None], len_k, low, high, HAS_LOW, HAS_HIGH)
            p_t = tl.where(seen, p_t, 0.0)
        do = load_rows(do_base, do_n, row_begin, len_q, do_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        if UNSEEING and MASKED:
            q, do = without_unseeing(q, shift), without_unseeing(do, shift)
        dv = dot(p_t.to(do.dtype), do, dv, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_D]
        dp_t = dot(v, tl.trans(do), None, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_M]
        delta = tl.load(delta_base + rows, mask=inside, other=0.0 if MASKED else None)
        ds_t = (p_t * (dp_t - delta[None, :])).to(q.dtype)
        dk = dot(ds_t, q, dk, PRECISION, INTERPRET)  # [BLOCK_N, BLOCK_D]
    return dk, dv


@triton.jit(do_not_specialize=RUN_TIME)
def dkdv_kernel(
    DO, Q, K, V, DELTA, SHIFT, DK, DV, do_b, do_h, do_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, heads_kv, group, heads, section, len_q, len_k, low, high, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, UNSEEING: tl.constexpr,
    SKIP: tl.constexpr, EXP2: tl.constexpr, EDGES: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dk and dv. heads: B·Hkv."""
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
    if key_begin + BLOCK_N > len_k:
        # Keys past the end score 0, and exp(0 - lse) may be infinite. Here they are in the tile that is owned, which
        # meets every tile of queries, so all of these are edges. In the forward and in dq_kernel they are in the last
        # tile of the walk, which tile_range counts among the edges.
        full_begin = begin
        full_end = begin
    factor = scale * LOG2_E if EXP2 else scale
    for member in range(group):
        head_q = head_kv * group + member
        q_base = Q + (batch * q_b + head_q * q_h) * UNIT
        do_base = DO + (batch * do_b + head_q * do_h) * UNIT
        row_base = (batch * heads_kv * group + head_q) * len_q
        # The parts are the forward's; under the transposed band it is HAS_HIGH that makes an edge at the beginning.
        for part in tl.static_range(3):
            if part == 2 or (EDGES and (part == 1 or HAS_HIGH)):
                dk, dv = walk_queries(
                    dk, dv, k, v, q_base, do_base, DELTA + row_base, SHIFT + row_base,
                    q_n * UNIT, do_n * UNIT, q_offsets, do_offsets,
                    begin if part == 0 else full_begin if part == 1 else full_end,
                    full_begin if part == 0 else full_end if part == 1 else end,
                    key_begin, len_q, len_k, low, high, factor, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, HAS_LOW,
                    HAS_HIGH, part != 1, UNSEEING, EXP2, PRECISION, INTERPRET,
                )  # fmt: skip

    dk_base = DK + (batch * dk_b + head_kv * dk_h) * UNIT
    dv_base = DV + (batch * dv_b + head_kv * dv_h) * UNIT
    dk_offsets = row_offsets(dk_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    dv_offsets = row_offsets(dv_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    store_rows(dk_base, dk_n * UNIT, key_begin, len_k, dk_offsets, dk * scale, BLOCK_N, BLOCK_D, HEAD_DIM)
    store_rows(dv_base, dv_n * UNIT, key_begin, len_k, dv_offsets, dv, BLOCK_N, BLOCK_D, HEAD_DIM)


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
        p = tl.math.exp2(s * factor - shift[:, None]) if EXP2 else tl.exp(s * factor - shift[:, None])
        if MASKED:
            rows = row_begin + tl.arange(0, BLOCK_M)
            keys = key_begin + tl.arange(0, BLOCK_N)
            p = tl.where(visible(rows[:, None], keys[None, :], len_k, low, high, HAS_LOW, HAS_HIGH), p, 0.0)
        dp = dot(do, tl.trans(v), None, PRECISION, INTERPRET)  # [BLOCK_M, BLOCK_N]
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
    row_base = head.to(tl.int64) * len_q
    shift = tl.load(SHIFT + row_base + rows, mask=rows < len_q, other=float("inf"))  # [BLOCK_M]
    delta = tl.load(DELTA + row_base + rows, mask=rows < len_q, other=0.0)  # [BLOCK_M]
    if UNSEEING:
        q, do = without_unseeing(q, shift), without_unseeing(do, shift)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

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


def plan_backward(
    problem: Problem, tile: Tile, switches: Switches, has_dlse: bool, do: Layout, q: Layout, k: Layout, v: Layout,
    o: Layout, dq: Layout, dk: Layout, dv: Layout,
) -> tuple[Launch, Launch, Launch]:  # fmt: skip
    """The launches of prepare_kernel, dkdv_kernel and dq_kernel, from the tensors' layouts.

    tile: block_m, block_n, warps and stages are dkdv_kernel's; dq_kernel's are the extras `dq_block_m`, `dq_block_n`,
    `dq_warps` and `dq_stages`, by default the same.
    """
    heads = problem.batch * problem.heads_q
    low, high = problem.mask.band(problem.len_q, problem.len_k)
    band = (problem.len_q, problem.len_k, low or 0, high or 0, problem.scale)
    like_q, like_k = problem.q_shape, problem.kv_shape

    rows = row_tile(problem)
    how, numbers = strides((do, like_q), (o, like_q))
    prepare_launch = Launch(
        prepare_kernel,
        grid=triton.cdiv(problem.len_q, rows.block_m) * heads,
        numbers=(*numbers, problem.heads_q, heads, problem.len_q),
        constants=constants(prepare_kernel, problem, rows, switches, HAS_DLSE=has_dlse, **how),
        tile=rows,
    )

    how, numbers = strides(
        (do, like_q), (q, like_q), (k, like_k), (v, like_k), (dk, like_k), (dv, like_k)
    )  # fmt: skip
    dkdv_launch = Launch(
        dkdv_kernel,
        grid=triton.cdiv(problem.len_k, tile.block_n) * problem.batch * problem.heads_kv,
        numbers=(
            *numbers,
            problem.heads_kv,
            problem.group,
            problem.batch * problem.heads_kv,
            heads_in_l2(problem),
            *band,
        ),
        constants=constants(dkdv_kernel, problem, tile, switches, **how),
        tile=replace(tile, extra=()),
    )

    own = dq_tile(tile)
    how, numbers = strides((do, like_q), (q, like_q), (k, like_k), (v, like_k), (dq, like_q))
    dq_launch = Launch(
        dq_kernel,
        grid=triton.cdiv(problem.len_q, own.block_m) * heads,
        numbers=(*numbers, problem.heads_q, problem.group, heads, heads_in_l2(problem) * problem.group, *band),
        constants=constants(dq_kernel, problem, own, switches, **how),
        tile=own,
    )
    return prepare_launch, dkdv_launch, dq_launch


def prepare_backward(forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches) -> Run:
    """What computes `dq, dk, dv`, laid out as q, k, v are, of do, dlse, q, k, v, o, lse of these forms.

    The last strides are 1; lse and dlse are packed.
    """
    device = forms["q"].device
    grads = like_dq, like_dk, like_dv = tuple(forms[name].dense for name in "qkv")
    like_lse = Form.packed(problem.lse_shape, torch.float32, device)
    layouts = (form.strides for form in (*(forms[name] for name in ("do", "q", "k", "v", "o")), *grads))
    prepare_launch, dkdv_launch, dq_launch = plan_backward(problem, tile, switches, "dlse" in forms, *layouts)

    def backward(
        do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        dq, dk, dv = like_dq.empty(), like_dk.empty(), like_dv.empty()
        delta, shift = like_lse.empty(), like_lse.empty()
        # Without a dlse the kernel has no code that reads it (HAS_DLSE), but the argument is there: any will do.
        prepare_launch.run(target, do, o, lse, lse if dlse is None else dlse, delta, shift)
        dkdv_launch.run(target, do, q, k, v, delta, shift, dk, dv)
        dq_launch.run(target, do, q, k, v, delta, shift, dq)
        return dq, dk, dv

    return backward
