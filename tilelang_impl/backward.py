"""FlashAttention-2 backward in TileLang.

From `do`, `lse` and the inputs, with P recomputed (Dao 2023, algorithm 2):

    S = scale · Q Kᵀ      P = exp(S - lse)      dV = Pᵀ dO      dP = dO Vᵀ
    dS = P ∘ (dP - delta)      dK = scale · dSᵀ Q      dQ = scale · dS K

where `delta = rowsum(dO ∘ O) - dlse`, and A ∘ B is the product element by element. The scale of dK and dQ is applied
once, to their sums. `factor` and `shift` are the forward's: what Q Kᵀ is multiplied by in the exponential, and what is
subtracted there, which is the lse, under EXP2 times log2(e).

Three kernels: prepare computes delta; dkdv, one program a tile of keys, walks over queries; the third makes dq, in one
of two ways:

- dq, one program a tile of queries, walks over keys. S and dP are computed in both walks, seven products instead of
  five; in exchange no program adds to what another one writes, nothing is summed through memory in fp32, and every
  gradient is bitwise repeatable. With TMA and wgmma this is the faster way.
- dkdv itself computes each tile's part of dq and adds it to a sum in fp32, by atomics (ATOMIC_DQ), and scale_dq makes
  dq of that. Five products, which is faster where they are what the time goes to, on mma.sync; the order of the sum is
  not fixed, so `deterministic` takes the first way.

In the dkdv kernel the scores are computed transposed, `Sᵀ = K Qᵀ [BLOCK_N, BLOCK_M]`, so that Pᵀ and dSᵀ are the left
operands of the next products straight from registers.

Shapes: do, q, o, dq `(B, Hq, Nq, D)`; k, v, dk, dv `(B, Hkv, Nk, D)`, each packed in that order or as `(B, N, H, D)`;
lse, dlse `(B, Hq, Nq)` in fp32. stats `(B, Hq, 2, rows)` in fp32 is scratch: shift and delta, `rows` being Nq padded; a
padded row has a shift of infinity, so that its P is 0 without a comparison. dq_sum, in fp32 too, is the sum of dq in
the order of `dq_sum_at`.
dk and dv of a head are summed over the group of query heads that share it, in one program and in order.
The rungs are those of the forward, and so are the two ways the kernels are compiled.
"""

import math
from dataclasses import replace

import tilelang.language as T
import torch

from common import Form, Problem, Switches, Target, Tile
from common.ports import Forms, Run

from .blocks import LOG2_E, claim, dq_sum_at, dq_sum_shape, rows_of, shape_of, tile_range, visible, walk
from .budget import dq_tile
from .launch import (
    ROW_TILE,
    Launch,
    asynchronous,
    band,
    block_d,
    constants,
    heads_in_l2,
    in_memory,
    laid_out_as,
    padded_len,
    ready,
    settle,
    settled,
    summed_d,
)


def prepare_program(HEAD_DIM, BLOCK_D, DTYPE, EXP2, HAS_DLSE, LAYOUTS, SUM_D):
    """The kernel that computes stats, and clears the sum of dq. LAYOUTS: of do, o. SUM_D: its columns, 0 for none."""
    batch, heads_q = T.dynamic("batch"), T.dynamic("heads_q")
    len_q, rows, row_blocks = T.dynamic("len_q"), T.dynamic("rows"), T.dynamic("row_blocks")
    SUM = dq_sum_shape(batch, heads_q, row_blocks, SUM_D) if SUM_D else (batch, heads_q, 2, rows)
    INF = T.infinity("float32")
    BLOCK_M = ROW_TILE.block_m

    @T.prim_func
    def prepare_kernel(
        DO: T.Tensor(shape_of(LAYOUTS[0], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        OUT: T.Tensor(shape_of(LAYOUTS[1], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        LSE: T.Tensor((batch, heads_q, len_q), "float32"),
        DLSE: T.Tensor((batch, heads_q, len_q), "float32"),
        STATS: T.Tensor((batch, heads_q, 2, rows), "float32"),
        DQ_SUM: T.Tensor(SUM, "float32"),
    ):
        with T.Kernel(T.truncdiv(rows, BLOCK_M) * batch * heads_q, threads=ROW_TILE.warps * 32) as program:
            do = T.alloc_fragment([BLOCK_M, BLOCK_D], DTYPE)
            o = T.alloc_fragment([BLOCK_M, BLOCK_D], DTYPE)
            product = T.alloc_fragment([BLOCK_M, BLOCK_D], "float32")
            delta = T.alloc_fragment([BLOCK_M], "float32")
            b, h, row_begin = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            tile, head = claim(program, T.truncdiv(rows, BLOCK_M), batch * heads_q, 1, False, False)
            b = T.truncdiv(head, heads_q)
            h = T.truncmod(head, heads_q)
            row_begin = tile * BLOCK_M

            T.copy(rows_of(DO, LAYOUTS[0], b, h, row_begin, BLOCK_M, BLOCK_D), do)
            T.copy(rows_of(OUT, LAYOUTS[1], b, h, row_begin, BLOCK_M, BLOCK_D), o)
            for i, d in T.Parallel(BLOCK_M, BLOCK_D):
                product[i, d] = T.cast(do[i, d], "float32") * T.cast(o[i, d], "float32")
            T.reduce_sum(product, delta, dim=1)
            for i in T.Parallel(BLOCK_M):
                inside = T.min(row_begin + i, len_q - 1)
                lse = LSE[b, h, inside]
                dlse = DLSE[b, h, inside] if HAS_DLSE else 0.0
                # A row that saw no key: exp(S - inf) makes its P zero, and no gradient flows, whatever dlse is.
                unseen = T.Or(row_begin + i >= len_q, lse == -INF)
                STATS[b, h, 0, row_begin + i] = T.if_then_else(unseen, INF, lse * LOG2_E if EXP2 else lse)
                STATS[b, h, 1, row_begin + i] = T.if_then_else(unseen, 0.0, delta[i] - dlse)
            if SUM_D:
                block = tile * (BLOCK_M // 8)
                T.fill(DQ_SUM[b, h, block : block + BLOCK_M // 8, 0 : SUM_D // 8, 0:2, 0:32], 0)

    return prepare_kernel


def dkdv_program(
    HEAD_DIM, BLOCK_D, DTYPE, HAS_LOW, HAS_HIGH, SKIP, EXP2, EDGES, ORDER, ASYNC, BLOCK_M, BLOCK_N, THREADS, STAGES,
    LAYOUTS, GROUPED, ATOMIC_DQ,
):  # fmt: skip
    """The kernel of dk and dv, and with ATOMIC_DQ of the sum of dq.

    LAYOUTS: of do, q, k, v, dk, dv. GROUPED: several query heads share a key head.
    """
    batch, heads_q, heads_kv = T.dynamic("batch"), T.dynamic("heads_q"), T.dynamic("heads_kv")
    len_q, len_k, rows, row_blocks = T.dynamic("len_q"), T.dynamic("len_k"), T.dynamic("rows"), T.dynamic("row_blocks")
    SUM = dq_sum_shape(batch, heads_q, row_blocks, BLOCK_D) if ATOMIC_DQ else (batch, heads_q, 2, rows)
    exp = T.exp2 if EXP2 else T.exp
    # A key past the end scores 0, and exp(0 - lse) may be infinite. That spoils rows of dK and dV that nobody stores,
    # but every row of dQ. Where there are comparisons, a tile of keys with such a key is compared all along its walk;
    # where there are none, the scores of such keys start at -inf.
    MASKED = HAS_LOW or HAS_HIGH or not EDGES
    STARTED = ATOMIC_DQ and not MASKED
    steps = ["q", "do", "stats", *(["start"] if STARTED else []), "s", "dp", "exp", *(["mask"] if MASKED else [])]
    steps += ["p", "dv", "ds", "ds_cast", *(["s_ds", "dk", "dq", "dq_sum"] if ATOMIC_DQ else ["dk"])]

    @T.prim_func
    def dkdv_kernel(
        DO: T.Tensor(shape_of(LAYOUTS[0], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        Q: T.Tensor(shape_of(LAYOUTS[1], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        K: T.Tensor(shape_of(LAYOUTS[2], batch, heads_kv, len_k, HEAD_DIM), DTYPE),
        V: T.Tensor(shape_of(LAYOUTS[3], batch, heads_kv, len_k, HEAD_DIM), DTYPE),
        STATS: T.Tensor((batch, heads_q, 2, rows), "float32"),
        DK: T.Tensor(shape_of(LAYOUTS[4], batch, heads_kv, len_k, HEAD_DIM), DTYPE),
        DV: T.Tensor(shape_of(LAYOUTS[5], batch, heads_kv, len_k, HEAD_DIM), DTYPE),
        DQ_SUM: T.Tensor(SUM, "float32"),
        section: T.int32,
        low: T.int32,
        high: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.truncdiv(len_k + BLOCK_N - 1, BLOCK_N) * batch * heads_kv, threads=THREADS) as program:
            s_k = T.alloc_shared([BLOCK_N, BLOCK_D], DTYPE)
            s_v = T.alloc_shared([BLOCK_N, BLOCK_D], DTYPE)
            s_q = T.alloc_shared([BLOCK_M, BLOCK_D], DTYPE)
            s_do = T.alloc_shared([BLOCK_M, BLOCK_D], DTYPE)
            s_stats = T.alloc_shared([2, BLOCK_M], "float32")
            p_t = T.alloc_fragment([BLOCK_N, BLOCK_M], "float32")
            dp_t = T.alloc_fragment([BLOCK_N, BLOCK_M], "float32")
            p_t_cast = T.alloc_fragment([BLOCK_N, BLOCK_M], DTYPE)
            ds_t_cast = T.alloc_fragment([BLOCK_N, BLOCK_M], DTYPE)
            dk = T.alloc_fragment([BLOCK_N, BLOCK_D], "float32")
            dv = T.alloc_fragment([BLOCK_N, BLOCK_D], "float32")

            if ATOMIC_DQ:
                s_ds_t = T.alloc_shared([BLOCK_N, BLOCK_M], DTYPE)
                dq = T.alloc_fragment([BLOCK_M, BLOCK_D], "float32")
            if STARTED:
                start = T.alloc_fragment([BLOCK_N], "float32")

            b, h_kv, key_begin = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            key_tiles = T.truncdiv(len_k + BLOCK_N - 1, BLOCK_N)
            tile, head = claim(program, key_tiles, batch * heads_kv, section, False, ORDER)
            b = T.truncdiv(head, heads_kv)
            h_kv = T.truncmod(head, heads_kv)
            key_begin = tile * BLOCK_N
            # A key is seen by the queries of the transposed band. Rows past the end need no comparison (`stats`).
            begin, full_begin, full_end, end = tile_range(
                key_begin, T.min(key_begin + BLOCK_N, len_k) - 1, len_q, -high, -low, BLOCK_M,
                HAS_HIGH, HAS_LOW, SKIP, EDGES, RAGGED=False,
            )  # fmt: skip
            # A number past every tile: with `end` the compiler would keep one more value in the loop, and spill others.
            edge_until = T.if_then_else(key_begin + BLOCK_N > len_k, 1 << 30, full_begin) if ATOMIC_DQ else full_begin
            tiles = end - begin
            group = T.truncdiv(heads_q, heads_kv)
            factor = scale * LOG2_E if EXP2 else scale

            T.copy(rows_of(K, LAYOUTS[2], b, h_kv, key_begin, BLOCK_N, BLOCK_D), s_k)
            T.copy(rows_of(V, LAYOUTS[3], b, h_kv, key_begin, BLOCK_N, BLOCK_D), s_v)
            T.fill(dk, 0)
            T.fill(dv, 0)
            if STARTED:
                for j in T.Parallel(BLOCK_N):
                    start[j] = T.if_then_else(key_begin + j < len_k, 0.0, -T.infinity("float32"))
            # The heads of a group follow one another in one walk, so that the pipeline fills once.
            walked = tiles * group if GROUPED else tiles
            for t in walk(walked, STAGES, ASYNC, steps, {"q": "dk", "do": "dv", "stats": "ds"}):
                h = h_kv * group + T.truncdiv(t, tiles) if GROUPED else h_kv
                m = begin + T.truncmod(t, tiles) if GROUPED else begin + t
                T.copy(rows_of(Q, LAYOUTS[1], b, h, m * BLOCK_M, BLOCK_M, BLOCK_D), s_q)
                T.copy(rows_of(DO, LAYOUTS[0], b, h, m * BLOCK_M, BLOCK_M, BLOCK_D), s_do)
                T.copy(STATS[b, h, 0:2, m * BLOCK_M : (m + 1) * BLOCK_M], s_stats)
                if STARTED:
                    for j, i in T.Parallel(BLOCK_N, BLOCK_M):
                        p_t[j, i] = start[j]
                T.gemm(s_k, s_q, p_t, transpose_B=True, clear_accum=not STARTED, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(s_v, s_do, dp_t, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                for j, i in T.Parallel(BLOCK_N, BLOCK_M):
                    p_t[j, i] = exp(p_t[j, i] * factor - s_stats[0, i])  # until here p_t held the scores
                if MASKED:  # noqa: SIM102 (this one is decided now, the next by the kernel)
                    if T.Or(m < edge_until, m >= full_end):
                        for j, i in T.Parallel(BLOCK_N, BLOCK_M):
                            seen = visible(m * BLOCK_M + i, key_begin + j, len_k, low, high, HAS_LOW, HAS_HIGH)
                            p_t[j, i] = T.if_then_else(seen, p_t[j, i], 0.0)
                T.copy(p_t, p_t_cast)
                T.gemm(p_t_cast, s_do, dv, policy=T.GemmWarpPolicy.FullRow)
                for j, i in T.Parallel(BLOCK_N, BLOCK_M):
                    dp_t[j, i] = p_t[j, i] * (dp_t[j, i] - s_stats[1, i])  # dS from here on
                T.copy(dp_t, ds_t_cast)
                if ATOMIC_DQ:
                    T.copy(ds_t_cast, s_ds_t)
                T.gemm(ds_t_cast, s_q, dk, policy=T.GemmWarpPolicy.FullRow)
                if ATOMIC_DQ:
                    T.gemm(s_ds_t, s_k, dq, transpose_A=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, d in T.Parallel(BLOCK_M, BLOCK_D):
                        T.atomic_add(DQ_SUM[dq_sum_at(b, h, m * (BLOCK_M // 8), i, d)], dq[i, d])

            for j, d in T.Parallel(BLOCK_N, BLOCK_D):
                dk[j, d] *= scale
            T.copy(dk, s_k)
            T.copy(dv, s_v)
            T.copy(s_k, rows_of(DK, LAYOUTS[4], b, h_kv, key_begin, BLOCK_N, BLOCK_D))
            T.copy(s_v, rows_of(DV, LAYOUTS[5], b, h_kv, key_begin, BLOCK_N, BLOCK_D))

    return dkdv_kernel


def dq_program(
    HEAD_DIM, BLOCK_D, DTYPE, HAS_LOW, HAS_HIGH, SKIP, EXP2, EDGES, ORDER, ASYNC, BLOCK_M, BLOCK_N, THREADS, STAGES,
    LAYOUTS,
):  # fmt: skip
    """The kernel of dq. LAYOUTS: of do, q, k, v, dq."""
    batch, heads_q, heads_kv = T.dynamic("batch"), T.dynamic("heads_q"), T.dynamic("heads_kv")
    len_q, len_k, rows = T.dynamic("len_q"), T.dynamic("len_k"), T.dynamic("rows")
    exp = T.exp2 if EXP2 else T.exp
    steps = ["k", "v", "s", "dp", "exp", "mask", "ds", "ds_cast", "dq"]

    @T.prim_func
    def dq_kernel(
        DO: T.Tensor(shape_of(LAYOUTS[0], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        Q: T.Tensor(shape_of(LAYOUTS[1], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        K: T.Tensor(shape_of(LAYOUTS[2], batch, heads_kv, len_k, HEAD_DIM), DTYPE),
        V: T.Tensor(shape_of(LAYOUTS[3], batch, heads_kv, len_k, HEAD_DIM), DTYPE),
        STATS: T.Tensor((batch, heads_q, 2, rows), "float32"),
        DQ: T.Tensor(shape_of(LAYOUTS[4], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        section: T.int32,
        low: T.int32,
        high: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.truncdiv(len_q + BLOCK_M - 1, BLOCK_M) * batch * heads_q, threads=THREADS) as program:
            s_q = T.alloc_shared([BLOCK_M, BLOCK_D], DTYPE)
            s_do = T.alloc_shared([BLOCK_M, BLOCK_D], DTYPE)
            s_k = T.alloc_shared([BLOCK_N, BLOCK_D], DTYPE)
            s_v = T.alloc_shared([BLOCK_N, BLOCK_D], DTYPE)
            p = T.alloc_fragment([BLOCK_M, BLOCK_N], "float32")
            dp = T.alloc_fragment([BLOCK_M, BLOCK_N], "float32")
            ds_cast = T.alloc_fragment([BLOCK_M, BLOCK_N], DTYPE)
            dq = T.alloc_fragment([BLOCK_M, BLOCK_D], "float32")
            shift = T.alloc_fragment([BLOCK_M], "float32")
            delta = T.alloc_fragment([BLOCK_M], "float32")

            b, h, row_begin = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            query_tiles = T.truncdiv(len_q + BLOCK_M - 1, BLOCK_M)
            tile, head = claim(program, query_tiles, batch * heads_q, section, HAS_HIGH, ORDER)
            b = T.truncdiv(head, heads_q)
            h = T.truncmod(head, heads_q)
            row_begin = tile * BLOCK_M
            h_kv = T.truncdiv(h, T.truncdiv(heads_q, heads_kv))
            begin, full_begin, full_end, end = tile_range(
                row_begin, T.min(row_begin + BLOCK_M, len_q) - 1, len_k, low, high, BLOCK_N,
                HAS_LOW, HAS_HIGH, SKIP, EDGES,
            )  # fmt: skip
            factor = scale * LOG2_E if EXP2 else scale

            T.copy(rows_of(Q, LAYOUTS[1], b, h, row_begin, BLOCK_M, BLOCK_D), s_q)
            T.copy(rows_of(DO, LAYOUTS[0], b, h, row_begin, BLOCK_M, BLOCK_D), s_do)
            for i in T.Parallel(BLOCK_M):
                shift[i] = STATS[b, h, 0, T.min(row_begin + i, rows - 1)]
                delta[i] = STATS[b, h, 1, T.min(row_begin + i, rows - 1)]
            T.fill(dq, 0)
            for t in walk(end - begin, STAGES, ASYNC, steps, {"k": "dq", "v": "dp"}):
                k = begin + t
                T.copy(rows_of(K, LAYOUTS[2], b, h_kv, k * BLOCK_N, BLOCK_N, BLOCK_D), s_k)
                T.copy(rows_of(V, LAYOUTS[3], b, h_kv, k * BLOCK_N, BLOCK_N, BLOCK_D), s_v)
                T.gemm(s_q, s_k, p, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(s_do, s_v, dp, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                    p[i, j] = exp(p[i, j] * factor - shift[i])  # until here p held the scores
                # A key past the end scores 0, and exp(0 - lse) may be infinite.
                if T.Or(k < full_begin, k >= full_end):
                    for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                        seen = visible(row_begin + i, k * BLOCK_N + j, len_k, low, high, HAS_LOW, HAS_HIGH)
                        p[i, j] = T.if_then_else(seen, p[i, j], 0.0)
                for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                    dp[i, j] = p[i, j] * (dp[i, j] - delta[i])  # dS from here on
                T.copy(dp, ds_cast)
                T.gemm(ds_cast, s_k, dq, policy=T.GemmWarpPolicy.FullRow)

            for i, d in T.Parallel(BLOCK_M, BLOCK_D):
                dq[i, d] *= scale
            T.copy(dq, s_q)
            T.copy(s_q, rows_of(DQ, LAYOUTS[4], b, h, row_begin, BLOCK_M, BLOCK_D))

    return dq_kernel


def scale_dq_program(HEAD_DIM, BLOCK_D, DTYPE, LAYOUT):
    """The kernel that makes dq of its sum. LAYOUT: of dq."""
    batch, heads_q = T.dynamic("batch"), T.dynamic("heads_q")
    len_q, row_blocks = T.dynamic("len_q"), T.dynamic("row_blocks")
    BLOCK_M = ROW_TILE.block_m

    @T.prim_func
    def scale_dq_kernel(
        DQ_SUM: T.Tensor(dq_sum_shape(batch, heads_q, row_blocks, BLOCK_D), "float32"),
        DQ: T.Tensor(shape_of(LAYOUT, batch, heads_q, len_q, HEAD_DIM), DTYPE),
        scale: T.float32,
    ):
        with T.Kernel(T.truncdiv(row_blocks * 8, BLOCK_M) * batch * heads_q, threads=ROW_TILE.warps * 32) as program:
            dq = T.alloc_fragment([BLOCK_M, BLOCK_D], "float32")
            b, h, row_begin = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            tile, head = claim(program, T.truncdiv(row_blocks * 8, BLOCK_M), batch * heads_q, 1, False, False)
            b = T.truncdiv(head, heads_q)
            h = T.truncmod(head, heads_q)
            row_begin = tile * BLOCK_M
            for i, d in T.Parallel(BLOCK_M, BLOCK_D):
                dq[i, d] = DQ_SUM[dq_sum_at(b, h, tile * (BLOCK_M // 8), i, d)] * scale
            T.copy(dq, rows_of(DQ, LAYOUT, b, h, row_begin, BLOCK_M, BLOCK_D))

    return scale_dq_kernel


def plan_backward(
    problem: Problem, target: Target, tile: Tile, switches: Switches, layouts: tuple[str, ...], atomic_dq: bool
) -> tuple[Launch, ...]:
    """The launches prepare, dkdv and dq for tensors do, q, k, v, o in those layouts; `dlse` after them if it is given.

    With atomic_dq the third is scale_dq. dq, dk and dv lie as q, k and v do.
    """
    do, q, k, v, o, *dlse = layouts
    numbers = (*band(problem), problem.scale)
    heads = problem.batch * problem.heads_q
    head_dim, padded_dim, dtype, *_ = constants(problem, target, tile, switches, 0, ())
    row_tiles = padded_len(problem) // ROW_TILE.block_m * heads
    prepare = Launch(
        prepare_program,
        constants=(
            head_dim,
            summed_d(problem),
            dtype,
            switches.exp2,
            bool(dlse),
            (do, o),
            padded_dim if atomic_dq else 0,
        ),
        scalars=(),
        blocks=row_tiles,
        tile=ROW_TILE,
        asynchronous=False,
    )
    dkdv = Launch(
        dkdv_program,
        constants=(
            *constants(problem, target, tile, switches, tile.block_n, (do, q, k, v, k, v)),
            problem.group > 1,
            atomic_dq,
        ),
        scalars=(heads_in_l2(problem), *numbers),
        blocks=-(-problem.len_k // tile.block_n) * problem.batch * problem.heads_kv,
        tile=replace(tile, extra=()),
        asynchronous=asynchronous(target, tile, tile.block_n),
    )
    if atomic_dq:
        scale_dq = Launch(
            scale_dq_program,
            constants=(head_dim, padded_dim, dtype, q),
            scalars=(problem.scale,),
            blocks=row_tiles,
            tile=ROW_TILE,
            asynchronous=False,
        )
        return prepare, dkdv, scale_dq
    queries_tile = dq_tile(tile)
    queries = Launch(
        dq_program,
        constants=constants(problem, target, queries_tile, switches, queries_tile.block_m, (do, q, k, v, q)),
        scalars=(heads_in_l2(problem) * problem.group, *numbers),
        blocks=-(-problem.len_q // queries_tile.block_m) * heads,
        tile=queries_tile,
        asynchronous=asynchronous(target, queries_tile, queries_tile.block_m),
    )
    return prepare, dkdv, queries


def prepare_backward(
    forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches, deterministic: bool
) -> Run:
    """What computes `dq, dk, dv`, laid out as q, k, v are, of do, dlse, q, k, v, o, lse of these forms.

    The last strides are 1; lse and dlse are packed.
    """
    device = forms["q"].device
    (_, do_layout), (_, o_layout) = settled(forms["do"]), settled(forms["o"])
    (settled_dq, q_layout), (settled_dk, k_layout), (settled_dv, v_layout) = (settled(forms[name]) for name in "qkv")
    layouts = do_layout, q_layout, k_layout, v_layout, o_layout, *(("dlse",) if "dlse" in forms else ())
    atomic_dq = not deterministic and bool(tile.get("atomic_dq", 0))
    prepare, dkdv, last = ready(plan_backward(problem, target, tile, switches, layouts, atomic_dq), device)
    like_dq, like_dk, like_dv = (forms[name].dense for name in "qkv")
    heads, rows = (problem.batch, problem.heads_q), padded_len(problem)
    like_stats = Form.packed((*heads, 2, rows), torch.float32, device)
    like_sum = Form.packed(dq_sum_shape(*heads, rows // 8, block_d(problem)), torch.float32, device)
    unseeing = problem.mask.has_unseeing_rows(problem.len_q, problem.len_k)

    def backward(
        do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        do, q = settle(do, do_layout), settle(q, q_layout)
        if unseeing:
            # The P of a row that sees no key is 0, but what a caller put there may be NaN, and 0 · NaN is NaN.
            unseen = (lse == -math.inf)[..., None]
            q, do = q.masked_fill(in_memory(unseen, q_layout), 0), do.masked_fill(in_memory(unseen, do_layout), 0)
        dq, dk, dv, stats = settled_dq.empty(), settled_dk.empty(), settled_dv.empty(), like_stats.empty()
        # A kernel that makes no sum has a parameter for it all the same.
        dq_sum = like_sum.empty() if atomic_dq else stats
        inputs = do, q, settle(k, k_layout), settle(v, v_layout), stats
        prepare(do, settle(o, o_layout), lse, lse if dlse is None else dlse, stats, dq_sum)
        dkdv(*inputs, in_memory(dk, k_layout), in_memory(dv, v_layout), dq_sum)
        last(*((dq_sum,) if atomic_dq else inputs), in_memory(dq, q_layout))
        return laid_out_as(like_dq, dq), laid_out_as(like_dk, dk), laid_out_as(like_dv, dv)

    return backward
