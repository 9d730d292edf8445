"""The kernel that prepares the backward: delta, and the lse as the other kernels subtract it.

    delta = rowsum(dO ∘ O) - dlse

stats `(B, Hq, 2, rows)` in fp32 holds both, `shift` and then delta, rows being Nq rounded up to 128. A row past the end
and a row that sees no key have a shift of infinity, which makes their P zero without a comparison, and a delta of zero.
Where dkdv_kernel adds up dq by atomics, its sums are set to zero here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from .blocks import LOG2_E, VECTOR, claim
from .launch import packed, rows

THREADS = 128


@dataclass(frozen=True)
class PrepareKernel:
    """The kernel of stats for these constants. SUM_D: the width of the sums of dq to set to zero, 0 for none."""

    DTYPE: str
    HEAD_DIM: int
    EXP2: bool
    HAS_DLSE: bool
    SUM_D: int

    name: ClassVar[str] = "prepare_kernel"

    @property
    def lanes(self) -> int:
        """The threads that share a row, each with 16 bytes of it: a power of two, so that shuffles can add up."""
        return 1 << (self.HEAD_DIM // VECTOR - 1).bit_length()

    @property
    def block_m(self) -> int:
        """The rows of a block: four for each of its groups of lanes, while these divide 128."""
        return min(128, 4 * THREADS // self.lanes)

    def arguments(self) -> tuple[Any, ...]:
        """Stands for do, o, lse, dlse, stats, dq_sum."""
        batch, heads_q, len_q = (cute.sym_int32() for _ in range(3))
        padded = cute.sym_int32(divisibility=128)
        do, o = (rows(self.DTYPE, batch, heads_q, len_q, self.HEAD_DIM) for _ in range(2))
        lse, dlse = (packed("fp32", batch, heads_q, len_q, align=4) for _ in range(2))  # the caller's, read one by one
        stats = packed("fp32", batch, heads_q, 2, padded)
        # Packed, but with strides of 64 bits, so that the offset of a tile is one too.
        dq_sum = rows("fp32", batch, heads_q, padded, self.SUM_D) if self.SUM_D else stats
        return do, o, lse, dlse, stats, dq_sum

    @cute.jit
    def __call__(
        self, mDO: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor, mDLSE: cute.Tensor, mStats: cute.Tensor,
        mDQSum: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches one block for each `block_m` rows of stats."""
        blocks = cute.ceil_div(mStats.shape[3], self.block_m) * mStats.shape[0] * mStats.shape[1]
        self.kernel(mDO, mO, mLSE, mDLSE, mStats, mDQSum).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, mDO: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor, mDLSE: cute.Tensor, mStats: cute.Tensor,
        mDQSum: cute.Tensor,
    ):  # fmt: skip
        """Some rows of one head."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        heads_q, len_q = mO.shape[1], mO.shape[2]
        tiles = cute.ceil_div(mStats.shape[3], self.block_m)
        tile, head = claim(block, tiles, mO.shape[0] * heads_q, 1, False, False)
        b, h = head // heads_q, head % heads_q
        row_begin = tile * self.block_m

        load = cute.make_copy_atom(CopyUniversalOp(), mO.element_type, num_bits_per_copy=VECTOR * 16)
        threads = cute.make_layout((THREADS // self.lanes, self.lanes), stride=(self.lanes, 1))
        slices = cute.make_tiled_copy_tv(load, threads, cute.make_layout((1, VECTOR))).get_slice(thread)
        shape = self.block_m, self.lanes * VECTOR
        tDO, tO = (
            slices.partition_S(cute.local_tile(tensor[b, h, None, None], shape, (tile, 0))) for tensor in (mDO, mO)
        )  # (piece, rows, 1)
        where = slices.partition_S(cute.make_identity_tensor(shape))
        do, o = cute.make_fragment_like(tDO), cute.make_fragment_like(tO)
        do.fill(0.0)
        o.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(tO, mode=[1])):
            row, column = where[0, i, 0]
            if row_begin + row < len_q and column < self.HEAD_DIM:
                cute.copy(load, tDO[None, i, 0], do[None, i, 0])
                cute.copy(load, tO[None, i, 0], o[None, i, 0])
        unit = LOG2_E if const_expr(self.EXP2) else 1.0
        for i in cutlass.range_constexpr(cute.size(tO, mode=[1])):
            product = do[None, i, 0].load().to(Float32) * o[None, i, 0].load().to(Float32)
            delta = product.reduce(cute.ReductionOp.ADD, 0.0, 0)
            for step in range(self.lanes.bit_length() - 1):
                delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=1 << step)
            local_row, column = where[0, i, 0]
            row = row_begin + local_row
            if column == 0:
                shift = Float32.inf
                if row < len_q:
                    lse = mLSE[b, h, row]
                    if const_expr(self.HAS_DLSE):
                        delta = delta - mDLSE[b, h, row]
                    shift = cutlass.select_(lse == -Float32.inf, Float32.inf, lse * unit)
                mStats[b, h, 0, row] = shift
                # A row that saw no key: no gradient flows, whatever do, o and dlse are.
                mStats[b, h, 1, row] = cutlass.select_(shift == Float32.inf, Float32(0.0), delta)

        if const_expr(self.SUM_D > 0):
            gSum = cute.local_tile(mDQSum[b, h, None, None], (self.block_m, self.SUM_D), (tile, 0))
            sums = cute.make_tensor(gSum.iterator, cute.make_layout((4, THREADS, cute.size(gSum) // (4 * THREADS))))
            zeros = cute.make_rmem_tensor(4, Float32)
            zeros.fill(0.0)
            store = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=128)
            for i in cutlass.range_constexpr(cute.size(sums, mode=[2])):
                cute.copy(store, zeros, sums[None, thread, i])
