"""The kernels that finish dq: one that computes it by itself, or one that rounds what dkdv_kernel added up.

DqKernel: one block owns BLOCK_M queries of one head and walks over the tiles of keys they see, as the forward does.

    S = Q Kᵀ,  dP = dO Vᵀ                     [BLOCK_M, BLOCK_N]
    P = exp(scale · S - lse),  dS = P ∘ (dP - delta)
    dQ += dS K                                [BLOCK_M, BLOCK_D]; in the end it is multiplied by the scale

A warp has whole rows of dS, which is the left operand of the last product straight from its registers. S and dP are
computed here a second time, after dkdv_kernel; in exchange nothing is added up through memory, and dq is bitwise
repeatable.

CastKernel: one block a tile of queries; reads the sums in the fragments in which they were added, and writes rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from .backward_blocks import read_fragment, seeing_rows
from .blocks import (
    LOG2_E,
    Coordinates,
    KeyTiles,
    Operand,
    RowCopy,
    accumulator,
    as_matrix,
    as_operand,
    claim,
    fetch,
    gemm,
    hide,
    load_rows,
    mma_of,
    smem_tile,
    store_rows,
    tile_range,
    transposed,
    walks,
    write_accumulator,
)
from .launch import packed, rows


@dataclass(frozen=True)
class DqKernel:
    """The kernel of dq for these constants."""

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

    name: ClassVar[str] = "dq_kernel"

    def arguments(self) -> tuple[Any, ...]:
        """Stands for do, q, k, v, stats, dq, section, low, high, scale."""
        batch, heads_q, heads_kv, len_q, len_k = (cute.sym_int32() for _ in range(5))
        do, q, dq = (rows(self.DTYPE, batch, heads_q, len_q, self.HEAD_DIM) for _ in range(3))
        k, v = (rows(self.DTYPE, batch, heads_kv, len_k, self.HEAD_DIM) for _ in range(2))
        stats = packed("fp32", batch, heads_q, 2, cute.sym_int32(divisibility=128))
        return do, q, k, v, stats, dq, Int32(0), Int32(0), Int32(0), Float32(0)

    @cute.jit
    def __call__(
        self, mDO: cute.Tensor, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mStats: cute.Tensor,
        mDQ: cute.Tensor, section: Int32, low: Int32, high: Int32, scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches one block a tile of queries. section, low, high: see `claim` and `tile_range`."""
        blocks = cute.ceil_div(mQ.shape[2], self.BLOCK_M) * mQ.shape[0] * mQ.shape[1]
        self.kernel(mDO, mQ, mK, mV, mStats, mDQ, section, low, high, scale).launch(
            grid=[blocks, 1, 1], block=[self.WARPS * 32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, mDO: cute.Tensor, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mStats: cute.Tensor,
        mDQ: cute.Tensor, section: Int32, low: Int32, high: Int32, scale: Float32,
    ):  # fmt: skip
        """One tile of queries."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        heads_q, len_q, len_k = mQ.shape[1], mQ.shape[2], mK.shape[2]
        tiles = cute.ceil_div(len_q, self.BLOCK_M)
        tile, head = claim(block, tiles, mQ.shape[0] * heads_q, section, self.HAS_HIGH, self.ORDER)
        b, h = head // heads_q, head % heads_q
        h_kv = h // (heads_q // mK.shape[1])
        row_begin = tile * self.BLOCK_M
        row_last = cutlass.min(row_begin + self.BLOCK_M, len_q) - 1
        begin, full_begin, full_end, end = tile_range(
            row_begin, row_last, len_k, low, high, self.BLOCK_N, self.HAS_LOW, self.HAS_HIGH, self.SKIP, self.EDGES
        )

        element = mQ.element_type
        smem = SmemAllocator()
        sQ = smem_tile(smem, element, self.BLOCK_M, self.BLOCK_D)
        sDO = smem_tile(smem, element, self.BLOCK_M, self.BLOCK_D)
        sK = smem_tile(smem, element, self.BLOCK_N, self.BLOCK_D, self.STAGES)
        sV = smem_tile(smem, element, self.BLOCK_N, self.BLOCK_D, self.STAGES)
        copy_q = RowCopy(element, self.BLOCK_M, self.BLOCK_D, self.WARPS * 32, thread)
        copy_kv = RowCopy(element, self.BLOCK_N, self.BLOCK_D, self.WARPS * 32, thread)
        keys = KeyTiles(mK[b, h_kv, None, None], sK, copy_kv, self.BLOCK_N, self.BLOCK_D, self.HEAD_DIM)
        values = KeyTiles(mV[b, h_kv, None, None], sV, copy_kv, self.BLOCK_N, self.BLOCK_D, self.HEAD_DIM)

        mma = mma_of(element, self.WARPS)
        q = Operand("A", mma, thread, sQ)
        do = Operand("A", mma, thread, sDO)
        k = Operand("B", mma, thread, sK)
        v = Operand("B", mma, thread, sV)
        k_t = Operand("B", mma, thread, transposed(sK), IN_COLUMNS=True)  # [BLOCK_D, BLOCK_N]
        where = Coordinates(mma, thread, self.BLOCK_M, self.BLOCK_N)
        dq = accumulator(mma, thread, self.BLOCK_M, self.BLOCK_D)

        first, end_row = seeing_rows(row_begin, len_q, len_k, low, high, self.HAS_LOW, self.HAS_HIGH)
        for source, target in ((mQ, sQ), (mDO, sDO)):
            tile_rows = cute.local_tile(source[b, h, None, None], (self.BLOCK_M, self.BLOCK_D), (tile, 0))
            load_rows(copy_q, copy_q.mine(tile_rows), copy_q.mine(target), end_row, self.HEAD_DIM, first)
        cute.arch.cp_async_commit_group()
        for stage in cutlass.range_constexpr(max(1, self.STAGES - 1)):
            fetch(keys, begin + stage, end, stage)
            fetch(values, begin + stage, end, stage)
            cute.arch.cp_async_commit_group()
        shift = cute.make_rmem_tensor(len(where.rows), Float32)
        delta = cute.make_rmem_tensor(len(where.rows), Float32)
        for i in cutlass.range_constexpr(len(where.rows)):
            shift[i] = mStats[b, h, 0, row_begin + where.row0 + where.rows[i]]
            delta[i] = mStats[b, h, 1, row_begin + where.row0 + where.rows[i]]

        factor = scale * LOG2_E if const_expr(self.EXP2) else scale
        exp = cute.math.exp2 if const_expr(self.EXP2) else cute.math.exp
        for first_tile, end_tile, MASKED in walks(begin, full_begin, full_end, end, self.HAS_LOW, self.EDGES):
            for n in cutlass.range(first_tile, end_tile, unroll=1):
                stage = (n - begin) % self.STAGES
                # Tile n is here, and all warps have done with the one before it, whose buffers are free.
                cute.arch.cp_async_wait_group(max(0, self.STAGES - 2))
                cute.arch.barrier()
                if const_expr(self.STAGES > 1):
                    ahead = n + (self.STAGES - 1)
                    fetch(keys, ahead, end, (ahead - begin) % self.STAGES)
                    fetch(values, ahead, end, (ahead - begin) % self.STAGES)
                    cute.arch.cp_async_commit_group()

                s = accumulator(mma, thread, self.BLOCK_M, self.BLOCK_N)
                gemm(mma, s, q, k, stage_b=stage)
                p = as_matrix(s)  # the same registers as rows and columns: scores now, P below
                if const_expr(MASKED):
                    hide(p, where, row_begin, n * self.BLOCK_N, len_k, low, high, self.HAS_LOW, self.HAS_HIGH)
                dp = accumulator(mma, thread, self.BLOCK_M, self.BLOCK_N)
                ds = as_matrix(dp)  # dP becomes dS in its own registers
                for i in cutlass.range_constexpr(len(where.rows)):
                    for j in cutlass.range_constexpr(len(where.cols)):
                        p[i, j] = exp(p[i, j] * factor - shift[i], fastmath=True)
                        ds[i, j] = -delta[i]  # where the sum begins: the product makes it dP - delta
                gemm(mma, dp, do, v, stage_b=stage)
                dp.store(s.load() * dp.load())  # dS = P ∘ (dP - delta)
                gemm(mma, dq, as_operand(dp, element), k_t, stage_b=stage)
                if const_expr(self.STAGES == 1):
                    cute.arch.barrier()
                    fetch(keys, n + 1, end, 0)
                    fetch(values, n + 1, end, 0)
                    cute.arch.cp_async_commit_group()

        # Nothing is on its way to shared memory and no warp reads Q any more: dq takes its place.
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        dq.store(dq.load() * scale)
        write_accumulator(mma, thread, dq, sQ)
        cute.arch.barrier()
        gDQ = cute.local_tile(mDQ[b, h, None, None], (self.BLOCK_M, self.BLOCK_D), (tile, 0))
        store_rows(copy_q, copy_q.mine(sQ), copy_q.mine(gDQ), len_q - row_begin, self.HEAD_DIM)


@dataclass(frozen=True)
class CastKernel:
    """The kernel that rounds the sums of dq. BLOCK_M, WARPS, DQ_WARPS, VECTOR: of the kernel that added them up."""

    DTYPE: str
    HEAD_DIM: int
    BLOCK_D: int
    BLOCK_M: int
    WARPS: int
    DQ_WARPS: int
    VECTOR: int

    name: ClassVar[str] = "cast_kernel"

    def arguments(self) -> tuple[Any, ...]:
        """Stands for dq_sum, dq, scale."""
        batch, heads_q, len_q = (cute.sym_int32() for _ in range(3))
        dq_sum = rows("fp32", batch, heads_q, cute.sym_int32(divisibility=128), self.BLOCK_D)
        return dq_sum, rows(self.DTYPE, batch, heads_q, len_q, self.HEAD_DIM), Float32(0)

    @cute.jit
    def __call__(self, mDQSum: cute.Tensor, mDQ: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        """Launches one block a tile of queries."""
        blocks = cute.ceil_div(mDQ.shape[2], self.BLOCK_M) * mDQ.shape[0] * mDQ.shape[1]
        self.kernel(mDQSum, mDQ, scale).launch(grid=[blocks, 1, 1], block=[self.WARPS * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mDQSum: cute.Tensor, mDQ: cute.Tensor, scale: Float32):
        """One tile of queries."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        heads_q, len_q = mDQ.shape[1], mDQ.shape[2]
        tiles = cute.ceil_div(len_q, self.BLOCK_M)
        tile, head = claim(block, tiles, mDQ.shape[0] * heads_q, 1, False, False)
        b, h = head // heads_q, head % heads_q
        sDQ = smem_tile(SmemAllocator(), mDQ.element_type, self.BLOCK_M, self.BLOCK_D)

        mma = mma_of(mDQ.element_type, self.DQ_WARPS, self.WARPS // self.DQ_WARPS)
        dq = accumulator(mma, thread, self.BLOCK_M, self.BLOCK_D)
        gSum = cute.local_tile(mDQSum[b, h, None, None], (self.BLOCK_M, self.BLOCK_D), (tile, 0))
        read_fragment(dq, gSum, thread, self.WARPS * 32, self.VECTOR)
        dq.store(dq.load() * scale)
        write_accumulator(mma, thread, dq, sDQ)
        cute.arch.barrier()
        copy = RowCopy(mDQ.element_type, self.BLOCK_M, self.BLOCK_D, self.WARPS * 32, thread)
        gDQ = cute.local_tile(mDQ[b, h, None, None], (self.BLOCK_M, self.BLOCK_D), (tile, 0))
        store_rows(copy, copy.mine(sDQ), copy.mine(gDQ), len_q - tile * self.BLOCK_M, self.HEAD_DIM)
