"""The kernel of dk and dv, and of dq where it is added up by atomics: one block a tile of keys.

The block keeps its K and V in shared memory and walks over the tiles of queries that see them, for all query heads that
share its key head. With a tile of queries it computes, transposed, so that P and dS are the *left* operands of the
products that need them transposed:

    Sᵀ = K Qᵀ,  dPᵀ = V dOᵀ                   [BLOCK_N, BLOCK_M]
    Pᵀ = exp(scale · Sᵀ - lse),  dSᵀ = Pᵀ ∘ (dPᵀ - delta)
    dV += Pᵀ dO,  dK += dSᵀ Q                 [BLOCK_N, BLOCK_D]; in the end dK is multiplied by the scale
    dQ  = dS K                                [BLOCK_M, BLOCK_D], ADD_DQ only; added to what other blocks find

KEY_WARPS of the warps share the keys out among them. When these are all, a warp has whole rows of Pᵀ and dSᵀ, and they
go from one product to the next in its registers. When they are not, the others share the queries of Sᵀ and dPᵀ and the
columns of dK and dV, and Pᵀ and dSᵀ pass through shared memory. dS for dQ always does: there the queries are the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from .backward_blocks import (
    QueryTiles,
    add_fragment,
    fetch_queries,
    hide_keys,
    parts_of,
    place_of,
    stats_by_column,
    write_part,
)
from .blocks import (
    LOG2_E,
    Coordinates,
    InRegisters,
    Operand,
    RowCopy,
    accumulator,
    as_matrix,
    as_operand,
    claim,
    gemm,
    load_rows,
    mma_of,
    smem_layout,
    smem_tile,
    store_rows,
    tile_range,
    transposed,
    write_accumulator,
)
from .launch import packed, rows


@dataclass(frozen=True)
class DkdvKernel:
    """The kernel of dk and dv for these constants.

    GROUPED: several query heads share a key head. KEY_WARPS: how many warps share the keys out, see above.
    V_IN_REGISTERS: a warp reads its V once and keeps it; queries take its place. ADD_DQ: dq is added up here. DQ_WARPS:
    how many warps share the rows of dQ out, the others its columns. VECTOR: how many elements of dq one atomic
    instruction adds. PARTS: a tile of queries is taken in so many parts between two barriers, so that fewer registers
    hold scores; 1 if P goes through shared memory. BLOCKS: registers are kept so few that so many blocks fit on a
    multiprocessor.
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
    GROUPED: bool
    KEY_WARPS: int
    V_IN_REGISTERS: bool
    ADD_DQ: bool
    DQ_WARPS: int
    VECTOR: int
    PARTS: int
    BLOCKS: int

    name: ClassVar[str] = "dkdv_kernel"

    def arguments(self) -> tuple[Any, ...]:
        """Stands for do, q, k, v, stats, dk, dv, dq_sum, section, low, high, scale."""
        batch, heads_q, heads_kv, len_q, len_k = (cute.sym_int32() for _ in range(5))
        padded = cute.sym_int32(divisibility=128)
        do, q = (rows(self.DTYPE, batch, heads_q, len_q, self.HEAD_DIM) for _ in range(2))
        k, v, dk, dv = (rows(self.DTYPE, batch, heads_kv, len_k, self.HEAD_DIM) for _ in range(4))
        stats = packed("fp32", batch, heads_q, 2, padded)
        # Packed, but with strides of 64 bits, so that the offset of a tile is one too.
        dq_sum = rows("fp32", batch, heads_q, padded, self.BLOCK_D) if self.ADD_DQ else stats
        return do, q, k, v, stats, dk, dv, dq_sum, Int32(0), Int32(0), Int32(0), Float32(0)

    @cute.jit
    def __call__(
        self, mDO: cute.Tensor, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mStats: cute.Tensor,
        mDK: cute.Tensor, mDV: cute.Tensor, mDQSum: cute.Tensor,
        section: Int32, low: Int32, high: Int32, scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches one block a tile of keys. section, low, high: see `claim` and `tile_range`."""
        blocks = cute.ceil_div(mK.shape[2], self.BLOCK_N) * mK.shape[0] * mK.shape[1]
        self.kernel(mDO, mQ, mK, mV, mStats, mDK, mDV, mDQSum, section, low, high, scale).launch(
            grid=[blocks, 1, 1],
            block=[self.WARPS * 32, 1, 1],
            min_blocks_per_mp=self.BLOCKS,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mDO: cute.Tensor, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mStats: cute.Tensor,
        mDK: cute.Tensor, mDV: cute.Tensor, mDQSum: cute.Tensor,
        section: Int32, low: Int32, high: Int32, scale: Float32,
    ):  # fmt: skip
        """One tile of keys."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        len_q, heads_kv, len_k = mQ.shape[2], mK.shape[1], mK.shape[2]
        group = mQ.shape[1] // heads_kv
        tiles = cute.ceil_div(len_k, self.BLOCK_N)
        tile, head = claim(block, tiles, mK.shape[0] * heads_kv, section, False, self.ORDER)
        b, h_kv = head // heads_kv, head % heads_kv
        key_begin = tile * self.BLOCK_N
        key_last = cutlass.min(key_begin + self.BLOCK_N, len_k) - 1
        # A key is seen by the queries of the transposed band.
        begin, full_begin, full_end, end = tile_range(
            key_begin, key_last, len_q, -high, -low, self.BLOCK_M, self.HAS_HIGH, self.HAS_LOW, self.SKIP, self.EDGES
        )
        # A key past the end scores 0, and exp(0 - lse) may be infinite. That spoils rows of dK and dV that nobody
        # stores, but every row of dQ. Where there are comparisons, a tile of keys with such a key is compared all along
        # its walk; where there are none, the scores of such keys start at -inf.
        MASKED = self.HAS_LOW or self.HAS_HIGH or not self.EDGES
        STARTED = self.ADD_DQ and not MASKED
        if const_expr(self.ADD_DQ):
            full_end = cutlass.select_(key_begin + self.BLOCK_N > len_k, 0, full_end)

        # P goes through shared memory unless its warp has all queries of a key.
        P_IN_REGISTERS = self.KEY_WARPS == self.WARPS
        QUERY_WARPS = self.WARPS // self.KEY_WARPS
        PART_M = self.BLOCK_M // self.PARTS
        element = mQ.element_type
        smem = SmemAllocator()
        sK = smem_tile(smem, element, self.BLOCK_N, self.BLOCK_D)
        # The tiles of queries, and behind them those of dO, [BLOCK_M, BLOCK_D, 2·STAGES].
        sQdO = smem_tile(smem, element, self.BLOCK_M, self.BLOCK_D, 2 * self.STAGES)
        if const_expr(self.V_IN_REGISTERS):
            sV = cute.make_tensor(sQdO.iterator, smem_layout(self.BLOCK_N, self.BLOCK_D))
        else:
            sV = smem_tile(smem, element, self.BLOCK_N, self.BLOCK_D)
        if const_expr(self.ADD_DQ or not P_IN_REGISTERS):
            sDS = smem_tile(smem, element, self.BLOCK_N, self.BLOCK_M)  # dSᵀ
        if const_expr(not P_IN_REGISTERS):
            sP = smem_tile(smem, element, self.BLOCK_N, self.BLOCK_M)  # Pᵀ
        stats_layout = cute.make_layout((2, self.BLOCK_M, self.STAGES), stride=(self.BLOCK_M, 1, 2 * self.BLOCK_M))
        sStats = smem.allocate_tensor(Float32, stats_layout, byte_alignment=16)  # shift and delta

        mma = mma_of(element, self.KEY_WARPS, QUERY_WARPS)
        k = Operand("A", mma, thread, sK)
        v = Operand("A", mma, thread, sV)
        sParts = parts_of(sQdO, PART_M, self.BLOCK_D)  # [PART_M, BLOCK_D, (PARTS, 2·STAGES)]
        sParts_t = parts_of(transposed(sQdO), self.BLOCK_D, PART_M)
        q = Operand("B", mma, thread, sParts)
        do = Operand("B", mma, thread, sParts)
        q_t = Operand("B", mma, thread, sParts_t, IN_COLUMNS=True)  # [BLOCK_D, PART_M]
        do_t = Operand("B", mma, thread, sParts_t, IN_COLUMNS=True)
        where = Coordinates(mma, thread, self.BLOCK_N, PART_M)
        start = [
            cutlass.select_(key_begin + where.row0 + row < len_k, Float32(0.0), -Float32.inf) for row in where.rows
        ]
        tStats = stats_by_column(mma, thread, sStats, self.BLOCK_N, PART_M)
        shift = cute.make_fragment_like(tStats[None, 0, 0])
        delta = cute.make_fragment_like(shift)
        dk = accumulator(mma, thread, self.BLOCK_N, self.BLOCK_D)
        dv = accumulator(mma, thread, self.BLOCK_N, self.BLOCK_D)
        if const_expr(self.ADD_DQ):
            mma_dq = mma_of(element, self.DQ_WARPS, self.WARPS // self.DQ_WARPS)
            ds_rows = Operand("A", mma_dq, thread, transposed(sDS), IN_COLUMNS=True)  # [BLOCK_M, BLOCK_N]
            k_t = Operand("B", mma_dq, thread, transposed(sK), IN_COLUMNS=True)  # [BLOCK_D, BLOCK_N]

        copy_k = RowCopy(element, self.BLOCK_N, self.BLOCK_D, self.WARPS * 32, thread)
        gK = cute.local_tile(mK[b, h_kv, None, None], (self.BLOCK_N, self.BLOCK_D), (tile, 0))
        gV = cute.local_tile(mV[b, h_kv, None, None], (self.BLOCK_N, self.BLOCK_D), (tile, 0))
        load_rows(copy_k, copy_k.mine(gV), copy_k.mine(sV), len_k - key_begin, self.HEAD_DIM)
        cute.arch.cp_async_commit_group()
        load_rows(copy_k, copy_k.mine(gK), copy_k.mine(sK), len_k - key_begin, self.HEAD_DIM)
        cute.arch.cp_async_commit_group()
        if const_expr(self.V_IN_REGISTERS):
            cute.arch.cp_async_wait_group(1)
            cute.arch.barrier()
            v.load_all()
            v = InRegisters(v.fragment)
            cute.arch.barrier()

        queries = QueryTiles(
            self, thread, mQ[b, None, None, None], mDO[b, None, None, None], mStats[b, None, None, None], sQdO, sStats,
            h_kv * group, begin, end, (len_q, len_k, low, high),
        )  # fmt: skip
        # The heads of a group follow one another in one walk, so that the pipeline fills once.
        steps = cutlass.max(end - begin, 0) * group
        for stage in cutlass.range_constexpr(max(1, self.STAGES - 1)):
            fetch_queries(queries, stage, steps, stage)
            cute.arch.cp_async_commit_group()

        factor = scale * LOG2_E if const_expr(self.EXP2) else scale
        exp = cute.math.exp2 if const_expr(self.EXP2) else cute.math.exp
        for step in cutlass.range(steps, unroll=1):
            h, m = place_of(queries, step)
            stage = step % self.STAGES
            # This step's tiles are here, and all warps have done with the step before it, whose buffers are free.
            cute.arch.cp_async_wait_group(max(0, self.STAGES - 2))
            cute.arch.barrier()
            if const_expr(self.STAGES > 1):
                ahead = step + (self.STAGES - 1)
                fetch_queries(queries, ahead, steps, ahead % self.STAGES)
                cute.arch.cp_async_commit_group()

            for part in cutlass.range_constexpr(self.PARTS):
                s_t = accumulator(mma, thread, self.BLOCK_N, PART_M)
                p_t = as_matrix(s_t)  # the same registers as rows and columns: scores now, P below
                if const_expr(STARTED):
                    for j in cutlass.range_constexpr(len(where.cols)):
                        for i in cutlass.range_constexpr(len(where.rows)):
                            p_t[i, j] = start[i]
                gemm(mma, s_t, k, q, stage_b=(part, stage))
                # The compiler makes selections of the branch, for every tile: of the 1143 instructions in this loop at
                # D 64, causal, on the Ada path, 212 are selections and comparisons. `walks` would be loops over the
                # tiles of each head inside one over the heads, and up to three copies of this long body: not measured.
                if const_expr(MASKED):  # noqa: SIM102 (this is known now, the next at run time)
                    if m < full_begin or m >= full_end:
                        row_begin = m * self.BLOCK_M + part * PART_M
                        hide_keys(p_t, where, key_begin, row_begin, len_k, low, high, self.HAS_LOW, self.HAS_HIGH)
                cute.autovec_copy(tStats[None, 0, (part, stage)], shift)
                cute.autovec_copy(tStats[None, 1, (part, stage)], delta)
                dp_t = accumulator(mma, thread, self.BLOCK_N, PART_M)
                ds_t = as_matrix(dp_t)  # dP becomes dS in its own registers
                for j in cutlass.range_constexpr(len(where.cols)):
                    for i in cutlass.range_constexpr(len(where.rows)):
                        p_t[i, j] = exp(p_t[i, j] * factor - shift[j], fastmath=True)
                        ds_t[i, j] = -delta[j]  # where the sum begins: the product makes it dP - delta
                gemm(mma, dp_t, v, do, stage_b=(part, self.STAGES + stage))
                dp_t.store(s_t.load() * dp_t.load())  # dS = P ∘ (dP - delta)

                if const_expr(self.ADD_DQ or not P_IN_REGISTERS):
                    write_part(mma, thread, dp_t, sDS, part)
                if const_expr(P_IN_REGISTERS):
                    p, ds = as_operand(s_t, element), as_operand(dp_t, element)
                else:
                    write_accumulator(mma, thread, s_t, sP)
                    cute.arch.barrier()
                    p, ds = Operand("A", mma, thread, sP), Operand("A", mma, thread, sDS)
                gemm(mma, dv, p, do_t, stage_b=(part, self.STAGES + stage))
                gemm(mma, dk, ds, q_t, stage_b=(part, stage))
            if const_expr(self.STAGES == 1 or (P_IN_REGISTERS and self.ADD_DQ)):
                cute.arch.barrier()
            if const_expr(self.STAGES == 1):
                fetch_queries(queries, step + 1, steps, 0)
                cute.arch.cp_async_commit_group()
            if const_expr(self.ADD_DQ):
                dq = accumulator(mma_dq, thread, self.BLOCK_M, self.BLOCK_D)
                gemm(mma_dq, dq, ds_rows, k_t)
                gDQ = cute.local_tile(mDQSum[b, h, None, None], (self.BLOCK_M, self.BLOCK_D), (m, 0))
                add_fragment(dq, gDQ, thread, self.WARPS * 32, self.VECTOR)

        # Nothing is on its way to shared memory and no warp reads K any more: dk and dv take the place of K and V.
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        dk.store(dk.load() * scale)
        write_accumulator(mma, thread, dk, sK)
        write_accumulator(mma, thread, dv, sV)
        cute.arch.barrier()
        gDK = cute.local_tile(mDK[b, h_kv, None, None], (self.BLOCK_N, self.BLOCK_D), (tile, 0))
        gDV = cute.local_tile(mDV[b, h_kv, None, None], (self.BLOCK_N, self.BLOCK_D), (tile, 0))
        store_rows(copy_k, copy_k.mine(sK), copy_k.mine(gDK), len_k - key_begin, self.HEAD_DIM)
        store_rows(copy_k, copy_k.mine(sV), copy_k.mine(gDV), len_k - key_begin, self.HEAD_DIM)
