"""FlashAttention-2 forward in CuTe DSL, on the instructions of Ampere and Ada: `mma.sync`, `ldmatrix`, `cp.async`.

One block owns BLOCK_M queries of one head, and walks over the keys in tiles of BLOCK_N (Dao 2023, algorithm 1):

    S = Q Kᵀ                                  scores, not scaled yet, [BLOCK_M, BLOCK_N]
    S = -inf where the mask hides a key       so that its exponential is 0
    row_max', P = max(row_max, S), exp(scale · (S - row_max'))
    acc     = acc · exp(scale · (row_max - row_max')) + P V     [BLOCK_M, BLOCK_D]
    row_sum = row_sum · exp(scale · (row_max - row_max')) + rowsum(P)

and at the end `o = acc / row_sum`, `lse = scale · row_max + log(row_sum)`. The scale waits for the exponential: it is
positive, so that the maximum may come before it, and it costs nothing in the multiply-add there.

`factor` is what scores are multiplied by in the exponential: `scale`, and under EXP2 `scale · log2(e)`. `shift` is what
is subtracted there: the row's maximum times `factor`.

Shapes: q, o `(B, Hq, Nq, D)`; k, v `(B, Hkv, Nk, D)`, of any strides that keep rows on 16 bytes; lse `(B, Hq, Nq)`,
fp32. Shapes and strides but D are known at run time only, the upper-case names at compile time.

A warp owns whole rows of S, so that the softmax of a row is a matter of four threads, and P, once rounded, is the
operand of the second product without leaving the registers.

The rungs of the ladder: `tiles` is BLOCK_M × BLOCK_N, warps and stages; `skip` bounds the walk by the mask (SKIP in
`tile_range`); `exp2` folds scale·log2(e) into one multiply-add (EXP2); `edges` walks in three loops, of which the inner
one compares nothing (EDGES in `walks`); `order` is which tile a block takes (ORDER in `claim`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from common import Form, Problem, Switches, Target, Tile
from common.ports import Forms, Run

from .blocks import (
    LN_2,
    LOG2_E,
    Coordinates,
    InRegisters,
    KeyTiles,
    Operand,
    RowCopy,
    accumulator,
    as_matrix,
    as_operand,
    claim,
    fetch,
    fold,
    gemm,
    hide,
    load_rows,
    mma_of,
    quad_max,
    quad_sum,
    smem_tile,
    store_rows,
    tile_range,
    transposed,
    walks,
    write_accumulator,
)
from .launch import Launch, band, constants, heads_in_l2, packed, ready, rows, settle

HEADROOM = 8.0  # exponents up to it are let be: exp2(8) = 256 and exp(8) = 2981 are far from fp16's 65504


@dataclass(frozen=True)
class ForwardKernel:
    """The forward kernel for these constants.

    Q_IN_REGISTERS: a warp reads its queries once and keeps them. LAZY_RESCALE: acc keeps the maximum that it has, while
    exponentials stay below exp2(8); P is as precise, and the result the same, under any maximum that is not too small.
    """

    DTYPE: str
    HEAD_DIM: int
    BLOCK_D: int
    BLOCK_M: int
    BLOCK_N: int
    WARPS: int
    STAGES: int
    HAS_LOW: bool
    HAS_HIGH: bool
    SKIP: bool
    EXP2: bool
    EDGES: bool
    ORDER: bool
    Q_IN_REGISTERS: bool
    LAZY_RESCALE: bool

    name: ClassVar[str] = "forward_kernel"

    def arguments(self) -> tuple[Any, ...]:
        """Stands for q, k, v, o, lse, section, low, high, scale."""
        batch, heads_q, heads_kv, len_q, len_k = (cute.sym_int32() for _ in range(5))
        queries = rows(self.DTYPE, batch, heads_q, len_q, self.HEAD_DIM)
        keys = rows(self.DTYPE, batch, heads_kv, len_k, self.HEAD_DIM)
        values = rows(self.DTYPE, batch, heads_kv, len_k, self.HEAD_DIM)
        outputs = rows(self.DTYPE, batch, heads_q, len_q, self.HEAD_DIM)
        lse = packed("fp32", batch, heads_q, len_q)
        return queries, keys, values, outputs, lse, Int32(0), Int32(0), Int32(0), Float32(0)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor,
        section: Int32, low: Int32, high: Int32, scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches one block a tile of queries. section, low, high: see `claim` and `tile_range`."""
        blocks = cute.ceil_div(mQ.shape[2], self.BLOCK_M) * mQ.shape[0] * mQ.shape[1]
        self.kernel(mQ, mK, mV, mO, mLSE, section, low, high, scale).launch(
            grid=[blocks, 1, 1], block=[self.WARPS * 32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor,
        section: Int32, low: Int32, high: Int32, scale: Float32,
    ):  # fmt: skip
        """One tile of queries."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        batch, heads_q, len_q = mQ.shape[0], mQ.shape[1], mQ.shape[2]
        heads_kv, len_k = mK.shape[1], mK.shape[2]
        tiles = cute.ceil_div(len_q, self.BLOCK_M)
        tile, head = claim(block, tiles, batch * heads_q, section, self.HAS_HIGH, self.ORDER)
        b, h = head // heads_q, head % heads_q
        h_kv = h // (heads_q // heads_kv)
        row_begin = tile * self.BLOCK_M
        row_last = cutlass.min(row_begin + self.BLOCK_M, len_q) - 1
        begin, full_begin, full_end, end = tile_range(
            row_begin, row_last, len_k, low, high, self.BLOCK_N, self.HAS_LOW, self.HAS_HIGH, self.SKIP, self.EDGES
        )

        # The prefix tells where a tensor lies: m the whole of it in global memory, g a block's tile of that, s shared
        # memory, t what is one thread's part. Lower case without a prefix is in registers.
        smem = SmemAllocator()
        sQ = smem_tile(smem, mQ.element_type, self.BLOCK_M, self.BLOCK_D)
        sK = smem_tile(smem, mK.element_type, self.BLOCK_N, self.BLOCK_D, self.STAGES)
        sV = smem_tile(smem, mV.element_type, self.BLOCK_N, self.BLOCK_D, self.STAGES)
        copy_q = RowCopy(mQ.element_type, self.BLOCK_M, self.BLOCK_D, self.WARPS * 32, thread)
        copy_kv = RowCopy(mK.element_type, self.BLOCK_N, self.BLOCK_D, self.WARPS * 32, thread)
        keys = KeyTiles(mK[b, h_kv, None, None], sK, copy_kv, self.BLOCK_N, self.BLOCK_D, self.HEAD_DIM)
        values = KeyTiles(mV[b, h_kv, None, None], sV, copy_kv, self.BLOCK_N, self.BLOCK_D, self.HEAD_DIM)

        mma = mma_of(mQ.element_type, self.WARPS)
        q = Operand("A", mma, thread, sQ)
        k = Operand("B", mma, thread, sK)
        v = Operand("B", mma, thread, transposed(sV), IN_COLUMNS=True)  # [BLOCK_D, BLOCK_N]
        where = Coordinates(mma, thread, self.BLOCK_M, self.BLOCK_N)
        acc = accumulator(mma, thread, self.BLOCK_M, self.BLOCK_D)
        row_max = cute.make_rmem_tensor(len(where.rows), Float32)
        row_sum = cute.make_rmem_tensor(len(where.rows), Float32)  # of the columns that this thread holds
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        factor = scale * LOG2_E if const_expr(self.EXP2) else scale

        gQ = cute.local_tile(mQ[b, h, None, None], (self.BLOCK_M, self.BLOCK_D), (tile, 0))
        load_rows(copy_q, copy_q.mine(gQ), copy_q.mine(sQ), len_q - row_begin, self.HEAD_DIM)
        cute.arch.cp_async_commit_group()
        # With one buffer V waits for its turn; with more, all but one are filled now.
        for stage in cutlass.range_constexpr(max(1, self.STAGES - 1)):
            start_copies((keys,) if self.STAGES == 1 else (keys, values), begin + stage, end, stage)
        if const_expr(self.Q_IN_REGISTERS):
            cute.arch.cp_async_wait_group(max(1, self.STAGES - 1))
            cute.arch.barrier()
            q.load_all()
            q = InRegisters(q.fragment)

        for first, last, MASKED in walks(begin, full_begin, full_end, end, self.HAS_LOW, self.EDGES):
            for n in cutlass.range(first, last, unroll=1):
                stage = (n - begin) % self.STAGES
                ahead = n + (self.STAGES - 1)
                # Tile n is here, and all warps have done with the one before it, whose buffer the next copy takes.
                cute.arch.cp_async_wait_group(max(0, self.STAGES - 2))
                cute.arch.barrier()
                s = accumulator(mma, thread, self.BLOCK_M, self.BLOCK_N)
                walked = (values,) if const_expr(self.STAGES == 1) else (keys, values)
                copying = partial(start_copies, walked, ahead, end, (ahead - begin) % self.STAGES)
                gemm(mma, s, q, k, stage_b=stage, meanwhile=copying)
                if const_expr(self.STAGES == 1):
                    # V landed behind that product; the next K lands behind the softmax and the second product.
                    cute.arch.cp_async_wait_group(0)
                    cute.arch.barrier()
                    start_copies((keys,), n + 1, end, 0)

                scores = as_matrix(s)  # the same registers as rows and columns; `softmax_step` makes them P
                if const_expr(MASKED):
                    hide(scores, where, row_begin, n * self.BLOCK_N, len_k, low, high, self.HAS_LOW, self.HAS_HIGH)
                softmax_step(scores, as_matrix(acc), row_max, row_sum, factor, self.EXP2, self.LAZY_RESCALE, MASKED)
                gemm(mma, acc, as_operand(s, mQ.element_type), v, stage_b=stage)

        # Nothing is on its way to shared memory and no warp reads Q any more: the outputs take its place.
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        lse = normalize(as_matrix(acc), row_max, row_sum, scale)
        write_accumulator(mma, thread, acc, sQ)
        if where.col0 == 0:
            for i in cutlass.range_constexpr(len(where.rows)):
                row = row_begin + where.row0 + where.rows[i]
                if row < len_q:
                    mLSE[b, h, row] = lse[i]
        cute.arch.barrier()
        gO = cute.local_tile(mO[b, h, None, None], (self.BLOCK_M, self.BLOCK_D), (tile, 0))
        store_rows(copy_q, copy_q.mine(sQ), copy_q.mine(gO), len_q - row_begin, self.HEAD_DIM)


def start_copies(walked, n, end, stage):
    """Starts to copy tile n of K, of V or of both, as one group."""
    for tiles in walked:
        fetch(tiles, n, end, stage)
    cute.arch.cp_async_commit_group()


def softmax_step(scores, acc, row_max, row_sum, factor, EXP2, LAZY_RESCALE, MASKED):
    """Turns scores `[BLOCK_M, BLOCK_N]` into P, and brings acc, row_max and row_sum to the new maximum."""
    exp = cute.math.exp2 if EXP2 else cute.math.exp
    rows, columns = cute.size(scores, mode=[0]), cute.size(scores, mode=[1])
    new_max = [
        quad_max(cute.arch.fmax(row_max[i], fold(cute.arch.fmax, [scores[i, j] for j in range(columns)])))
        for i in range(rows)
    ]
    if LAZY_RESCALE:
        raise_rarely(acc, row_max, row_sum, new_max, factor, exp, MASKED)
    else:
        raise_max(acc, row_max, row_sum, new_max, factor, exp, MASKED)
    for i in range(rows):
        shift = finite(row_max[i], MASKED) * factor
        for j in range(columns):
            scores[i, j] = exp(scores[i, j] * factor - shift, fastmath=True)
        row_sum[i] = row_sum[i] + fold(lambda a, b: a + b, [scores[i, j] for j in range(columns)])


def finite(maximum, MASKED):
    """The maximum, or 0 where a row has seen no key yet: it is -inf then, and -inf - -inf is NaN."""
    return cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum) if MASKED else maximum


def raise_max(acc, row_max, row_sum, new_max, factor, exp, MASKED):
    """Brings acc and row_sum from the old maximum of their rows to the new one."""
    for i, value in enumerate(new_max):
        # The difference first: a maximum that stays rescales by exactly 1, however many tiles there are.
        rescale = exp((row_max[i] - finite(value, MASKED)) * factor, fastmath=True)
        row_max[i] = value
        row_sum[i] = row_sum[i] * rescale
        for j in range(cute.size(acc, mode=[1])):
            acc[i, j] = acc[i, j] * rescale


def far_behind(row_max, new_max, factor):
    """Whether some row of this warp would have exponentials beyond exp(HEADROOM) under its old maximum."""
    far = Boolean(False)
    for i, value in enumerate(new_max):
        far = far | ((value - row_max[i]) * factor > HEADROOM)
    return cute.arch.vote_any_sync(far)


@cute.jit
def raise_rarely(acc, row_max, row_sum, new_max, factor, exp, MASKED):
    """The same, but only when a row of this warp is far behind: any maximum will do that keeps exponentials finite.

    It runs once at most. As an `if` the compiler would make predicates of it, and issue every multiplication unused.
    """
    while far_behind(row_max, new_max, factor):
        raise_max(acc, row_max, row_sum, new_max, factor, exp, MASKED)


def normalize(acc, row_max, row_sum, scale):
    """Divides acc `[BLOCK_M, BLOCK_D]` by the sum of its row; returns the rows' lse."""
    lse = cute.make_rmem_tensor(cute.size(row_sum), Float32)
    for i in range(cute.size(row_sum)):
        total = quad_sum(row_sum[i])
        unseen = total == 0.0  # the row saw no key: o = 0, lse = -inf
        inverse = cutlass.select_(unseen, Float32(0.0), cute.arch.rcp_approx(total))
        log_sum = cute.math.log2(total, fastmath=True) * LN_2
        lse[i] = cutlass.select_(unseen, -Float32.inf, row_max[i] * scale + log_sum)
        for j in range(cute.size(acc, mode=[1])):
            acc[i, j] = acc[i, j] * inverse
    return lse


def plan_forward(problem: Problem, target: Target, tile: Tile, switches: Switches) -> tuple[Launch]:
    """The launch over q, k, v, o and lse."""
    kernel = ForwardKernel(
        **constants(problem, tile, switches),
        Q_IN_REGISTERS=bool(tile.get("q_in_registers", 0)),
        LAZY_RESCALE=bool(tile.get("lazy_rescale", 0)),
    )
    return (
        Launch(
            kernel,
            scalars=(heads_in_l2(problem) * problem.group, *band(problem), problem.scale),
            blocks=-(-problem.len_q // tile.block_m) * problem.batch * problem.heads_q,
        ),
    )


def prepare_forward(forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches) -> Run:
    """What computes `o`, laid out as q is, and `lse (B, Hq, Nq)` of q, k, v of these forms, whose last stride is 1."""
    device = forms["q"].device
    (kernel,) = ready(plan_forward(problem, target, tile, switches), device)
    like_o, like_lse = forms["q"].dense, Form.packed(problem.lse_shape, torch.float32, device)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = like_o.empty(), like_lse.empty()
        kernel(settle(q), settle(k), settle(v), o, lse)
        return o, lse

    return forward
