"""The weighted sum of the rows of a matrix in TileLang.

Forward, with x `(M, D)`, weight `(D,)` and y `(M,)`; backward, from dy `(M,)`:

    y[m] = Σ_d x[m, d] · weight[d]
    dx[m, d] = dy[m] · weight[d]        dweight[d] = Σ_m dy[m] · x[m, d]

A kernel is written for one block, which owns BLOCK_M rows. It is what a Python function returns for its constants; M
and D stay open until the call. Where a tile lives is said: here in fragments, registers shared out to the threads.

- Finding its data: `T.Kernel` tells the block's number, and a tile is named by its first element in a tensor.
- The edge: `T.copy` is cut off where the tensor ends, and what lies outside becomes 0, which adds nothing to a sum.
- The loop: D has any length, so a block walks over it in tiles of BLOCK_D columns and keeps its sums in `acc`, in fp32.
  Arithmetic is on elements, in a `T.Parallel` loop that the threads share; a sum of a tile is `T.reduce_sum`.
- Storing: `T.copy` again, which also rounds to the dtype of its target, and is cut off as well.

Blocks run in no order and cannot wait for each other. dweight is a sum over all of them, so each one writes its own
part of it to `partial`, and PyTorch adds these up: the same result, bit for bit, every time.
"""

from functools import cache

import tilelang
import tilelang.language as T
import torch

from common import empty, empty_like

from .shared import checked

BLOCK_M, BLOCK_D, THREADS = 16, 128, 128


def forward_program(DTYPE):
    """The kernel that makes BLOCK_M values of y a block."""
    len_m, len_d = T.dynamic("len_m"), T.dynamic("len_d")

    @T.prim_func
    def forward_kernel(
        X: T.Tensor((len_m, len_d), DTYPE), WEIGHT: T.Tensor((len_d,), DTYPE), Y: T.Tensor((len_m,), DTYPE)
    ):
        with T.Kernel(T.ceildiv(len_m, BLOCK_M), threads=THREADS) as block:
            x = T.alloc_fragment([BLOCK_M, BLOCK_D], DTYPE)
            weight = T.alloc_fragment([BLOCK_D], DTYPE)
            acc = T.alloc_fragment([BLOCK_M, BLOCK_D], "float32")
            y = T.alloc_fragment([BLOCK_M], "float32")
            row_begin = block * BLOCK_M
            T.fill(acc, 0)
            for tile in T.serial(T.ceildiv(len_d, BLOCK_D)):
                column_begin = tile * BLOCK_D
                T.copy(X[row_begin, column_begin], x)
                T.copy(WEIGHT[column_begin], weight)
                for i, d in T.Parallel(BLOCK_M, BLOCK_D):
                    acc[i, d] += T.cast(x[i, d], "float32") * T.cast(weight[d], "float32")
            T.reduce_sum(acc, y, dim=1)  # across threads, and so once at the end and not in the loop
            T.copy(y, Y[row_begin])

    return forward_kernel


def backward_program(DTYPE):
    """The kernel that makes BLOCK_M rows of dx a block, and what these add to dweight: one row of PARTIAL."""
    len_m, len_d, blocks = T.dynamic("len_m"), T.dynamic("len_d"), T.dynamic("blocks")

    @T.prim_func
    def backward_kernel(
        DY: T.Tensor((len_m,), DTYPE),
        X: T.Tensor((len_m, len_d), DTYPE),
        WEIGHT: T.Tensor((len_d,), DTYPE),
        DX: T.Tensor((len_m, len_d), DTYPE),
        PARTIAL: T.Tensor((blocks, len_d), "float32"),
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            dy = T.alloc_fragment([BLOCK_M], DTYPE)
            x = T.alloc_fragment([BLOCK_M, BLOCK_D], DTYPE)
            weight = T.alloc_fragment([BLOCK_D], DTYPE)
            dx = T.alloc_fragment([BLOCK_M, BLOCK_D], "float32")
            product = T.alloc_fragment([BLOCK_M, BLOCK_D], "float32")
            partial = T.alloc_fragment([BLOCK_D], "float32")
            row_begin = block * BLOCK_M
            T.copy(DY[row_begin], dy)
            for tile in T.serial(T.ceildiv(len_d, BLOCK_D)):
                column_begin = tile * BLOCK_D
                T.copy(X[row_begin, column_begin], x)
                T.copy(WEIGHT[column_begin], weight)
                for i, d in T.Parallel(BLOCK_M, BLOCK_D):
                    dx[i, d] = T.cast(dy[i], "float32") * T.cast(weight[d], "float32")
                    product[i, d] = T.cast(dy[i], "float32") * T.cast(x[i, d], "float32")
                T.copy(dx, DX[row_begin, column_begin])
                T.reduce_sum(product, partial, dim=0)
                T.copy(partial, PARTIAL[block, column_begin])

    return backward_kernel


@cache
def compiled(program, dtype: torch.dtype):
    """The compiled kernel of a program for a dtype; it takes any M and D."""
    return tilelang.compile(program(str(dtype).removeprefix("torch.")))


def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y `(M,)` of x `(M, D)` and weight `(D,)`, all of one dtype. Raises what `checked` does."""
    x, weight = checked(x, weight)
    y = empty((x.shape[0],), dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        compiled(forward_program, x.dtype)(x, weight, y)
    return y


def backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dx `(M, D)` and dweight `(D,)` of dy `(M,)`, in the dtype of x. Raises what `checked` does."""
    x, weight, dy = checked(x, weight, dy)
    len_m, len_d = x.shape
    dx = empty_like(x)
    blocks = -(-len_m // BLOCK_M)
    partial = empty((blocks, len_d), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        compiled(backward_program, x.dtype)(dy, x, weight, dx, partial)
    return dx, partial.sum(0).to(x.dtype)
