"""FlashAttention-2 forward in TileLang.

One program owns BLOCK_M queries of one head, and walks over the keys in tiles of BLOCK_N (Dao 2023, algorithm 1):

    S = Q Kᵀ                                  scores, not scaled yet, [BLOCK_M, BLOCK_N]
    S = -inf where the mask hides a key       so that its exponential is 0
    row_max', P = max(row_max, S), exp(scale · (S - row_max'))
    acc     = acc · exp(scale · (row_max - row_max')) + P V     [BLOCK_M, BLOCK_D]
    row_sum = row_sum · exp(scale · (row_max - row_max')) + rowsum(P)

and at the end `o = acc / row_sum`, `lse = scale · row_max + log(row_sum)`. The scale waits for the exponential: it is
positive, so that the maximum may come before it, and it costs nothing in the multiply-add there.

`factor` is what scores are multiplied by in the exponential: `scale`, and under EXP2 `scale · log2(e)`. `shift` is what
is subtracted there: the row's maximum times `factor`.

Shapes: q, o `(B, Hq, Nq, D)`; k, v `(B, Hkv, Nk, D)`, each packed in that order or as `(B, N, H, D)`; lse
`(B, Hq, Nq)`, fp32. Batch, heads and lengths are known at run time only, the upper-case names at compile time.

The rungs of the ladder: `tiles` is BLOCK_M × BLOCK_N, threads and stages; `skip` bounds the walk by the mask (SKIP in
`tile_range`); `exp2` folds scale·log2(e) into one multiply-add (EXP2); `edges` branches, once a tile, around the
comparisons of a tile that needs none (EDGES; Triton splits the walk into up to three, but here every walk would fill
and drain a pipeline of its own); `order` is which tile a program takes (ORDER in `claim`).

The same kernel becomes two programs: with ASYNC the compiler makes one warpgroup copy by TMA and the others compute by
wgmma; without, all warps copy by cp.async and compute by mma.sync.
"""

import tilelang.language as T
import torch

from common import Form, Problem, Switches, Target, Tile
from common.ports import Forms, Run

from .blocks import LN_2, LOG2_E, claim, rows_of, shape_of, tile_range, visible, walk
from .launch import (
    Launch,
    asynchronous,
    band,
    constants,
    heads_in_l2,
    in_memory,
    laid_out_as,
    ready,
    settle,
    settled,
)


def forward_program(
    HEAD_DIM, BLOCK_D, DTYPE, HAS_LOW, HAS_HIGH, SKIP, EXP2, EDGES, ORDER, ASYNC, BLOCK_M, BLOCK_N, THREADS, STAGES,
    LAYOUTS, LAZY_RESCALE,
):  # fmt: skip
    """The forward kernel for these constants.

    LAYOUTS: of q, k, v, o. LAZY_RESCALE: a thread whose rows have found no new maximum leaves its part of acc alone.
    """
    batch, heads_q, heads_kv = T.dynamic("batch"), T.dynamic("heads_q"), T.dynamic("heads_kv")
    len_q, len_k = T.dynamic("len_q"), T.dynamic("len_k")
    INF = T.infinity("float32")
    exp = T.exp2 if EXP2 else T.exp
    rescaling = ["forget", "look", "rescale"] if LAZY_RESCALE else ["rescale"]
    steps = ["k", "v", "s", "mask", "old_max", "row_max", "shift", "exp", "tile_sum", "row_sum", "p", *rescaling, "pv"]

    @T.prim_func
    def forward_kernel(
        Q: T.Tensor(shape_of(LAYOUTS[0], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        K: T.Tensor(shape_of(LAYOUTS[1], batch, heads_kv, len_k, HEAD_DIM), DTYPE),
        V: T.Tensor(shape_of(LAYOUTS[2], batch, heads_kv, len_k, HEAD_DIM), DTYPE),
        OUT: T.Tensor(shape_of(LAYOUTS[3], batch, heads_q, len_q, HEAD_DIM), DTYPE),
        LSE: T.Tensor((batch, heads_q, len_q), "float32"),
        section: T.int32,
        low: T.int32,
        high: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.truncdiv(len_q + BLOCK_M - 1, BLOCK_M) * batch * heads_q, threads=THREADS) as program:
            # s_…: in shared memory, while `s` alone is the scores. A fragment is spread over the threads' registers.
            s_q = T.alloc_shared([BLOCK_M, BLOCK_D], DTYPE)
            s_k = T.alloc_shared([BLOCK_N, BLOCK_D], DTYPE)
            s_v = T.alloc_shared([BLOCK_N, BLOCK_D], DTYPE)
            s = T.alloc_fragment([BLOCK_M, BLOCK_N], "float32")
            p = T.alloc_fragment([BLOCK_M, BLOCK_N], DTYPE)
            acc = T.alloc_fragment([BLOCK_M, BLOCK_D], "float32")
            row_max = T.alloc_fragment([BLOCK_M], "float32")
            old_max = T.alloc_fragment([BLOCK_M], "float32")
            shift = T.alloc_fragment([BLOCK_M], "float32")
            rescale = T.alloc_fragment([BLOCK_M], "float32")
            tile_sum = T.alloc_fragment([BLOCK_M], "float32")
            row_sum = T.alloc_fragment([BLOCK_M], "float32")

            # Variables, not expressions: the compiler writes an expression out again at each of its uses.
            b, h, row_begin = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            moved = T.alloc_var("bool")
            tiles = T.truncdiv(len_q + BLOCK_M - 1, BLOCK_M)
            tile, head = claim(program, tiles, batch * heads_q, section, HAS_HIGH, ORDER)
            b = T.truncdiv(head, heads_q)
            h = T.truncmod(head, heads_q)
            row_begin = tile * BLOCK_M
            h_kv = T.truncdiv(h, T.truncdiv(heads_q, heads_kv))
            begin, full_begin, full_end, end = tile_range(
                row_begin, T.min(row_begin + BLOCK_M, len_q) - 1, len_k, low, high, BLOCK_N,
                HAS_LOW, HAS_HIGH, SKIP, EDGES,
            )  # fmt: skip
            factor = scale * LOG2_E if EXP2 else scale

            T.copy(rows_of(Q, LAYOUTS[0], b, h, row_begin, BLOCK_M, BLOCK_D), s_q)
            T.fill(acc, 0)
            T.fill(row_sum, 0)
            T.fill(row_max, -INF)
            for t in walk(end - begin, STAGES, ASYNC, steps, {"k": "s", "v": "pv"}):
                k = begin + t
                T.copy(rows_of(K, LAYOUTS[1], b, h_kv, k * BLOCK_N, BLOCK_N, BLOCK_D), s_k)
                T.copy(rows_of(V, LAYOUTS[2], b, h_kv, k * BLOCK_N, BLOCK_N, BLOCK_D), s_v)
                T.gemm(s_q, s_k, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                if T.Or(k < full_begin, k >= full_end):
                    for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                        s[i, j] = T.if_then_else(
                            visible(row_begin + i, k * BLOCK_N + j, len_k, low, high, HAS_LOW, HAS_HIGH), s[i, j], -INF
                        )
                T.copy(row_max, old_max)
                T.reduce_max(s, row_max, dim=1, clear=False)
                for i in T.Parallel(BLOCK_M):
                    # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is NaN. Where the maximum
                    # stays, the difference is 0 and rescale 1; of the rounded products it would be 1 + ε each time.
                    shift[i] = T.if_then_else(row_max[i] == -INF, 0.0, row_max[i])
                    rescale[i] = exp((old_max[i] - shift[i]) * factor)
                    shift[i] *= factor
                for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                    s[i, j] = exp(s[i, j] * factor - shift[i])  # from here on s holds P
                T.reduce_sum(s, tile_sum, dim=1)
                for i in T.Parallel(BLOCK_M):
                    row_sum[i] = row_sum[i] * rescale[i] + tile_sum[i]
                T.copy(s, p)
                if LAZY_RESCALE:
                    moved = False
                    for i in T.Parallel(BLOCK_M):
                        if row_max[i] > old_max[i]:
                            moved = True
                # `moved` is known at run time: a branch. `True` is known as the kernel is written: no branch.
                if moved if LAZY_RESCALE else True:
                    for i, d in T.Parallel(BLOCK_M, BLOCK_D):
                        acc[i, d] *= rescale[i]
                T.gemm(p, s_v, acc, policy=T.GemmWarpPolicy.FullRow)

            # A row that saw no key has row_sum = 0: o = 0 and lse = -inf.
            for i, d in T.Parallel(BLOCK_M, BLOCK_D):
                acc[i, d] /= T.if_then_else(row_sum[i] == 0.0, 1.0, row_sum[i])
            T.copy(acc, s_q)
            T.copy(s_q, rows_of(OUT, LAYOUTS[3], b, h, row_begin, BLOCK_M, BLOCK_D))
            for i in T.Parallel(BLOCK_M):
                if row_begin + i < len_q:
                    log_sum = T.log2(row_sum[i]) * LN_2
                    row_lse = row_max[i] * scale + log_sum
                    LSE[b, h, row_begin + i] = T.if_then_else(row_sum[i] == 0.0, -INF, row_lse)

    return forward_kernel


def plan_forward(
    problem: Problem, target: Target, tile: Tile, switches: Switches, layouts: tuple[str, ...]
) -> tuple[Launch]:  # fmt: skip
    """The launch for tensors q, k, v, o in those layouts."""
    forward = Launch(
        forward_program,
        constants=(
            *constants(problem, target, tile, switches, tile.block_m, layouts),
            bool(tile.get("lazy_rescale", 0)),
        ),
        scalars=(heads_in_l2(problem) * problem.group, *band(problem), problem.scale),
        blocks=-(-problem.len_q // tile.block_m) * problem.batch * problem.heads_q,
        tile=tile,
        asynchronous=asynchronous(target, tile, tile.block_m),
    )
    return (forward,)


def prepare_forward(forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches) -> Run:
    """What computes `o`, laid out as q is, and `lse (B, Hq, Nq)` of q, k, v of these forms, whose last stride is 1."""
    device = forms["q"].device
    (settled_o, q_layout), (_, k_layout), (_, v_layout) = (settled(forms[name]) for name in "qkv")
    layouts = q_layout, k_layout, v_layout, q_layout
    (kernel,) = ready(plan_forward(problem, target, tile, switches, layouts), device)
    like_o, like_lse = forms["q"].dense, Form.packed(problem.lse_shape, torch.float32, device)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = settled_o.empty(), like_lse.empty()
        kernel(settle(q, q_layout), settle(k, k_layout), settle(v, v_layout), in_memory(o, q_layout), lse)
        return laid_out_as(like_o, o), lse

    return forward
