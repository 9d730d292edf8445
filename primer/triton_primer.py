"""The weighted sum of the rows of a matrix in Triton.

Forward, with x `(M, D)`, weight `(D,)` and y `(M,)`; backward, from dy `(M,)`:

    y[m] = Σ_d x[m, d] · weight[d]
    dx[m, d] = dy[m] · weight[d]        dweight[d] = Σ_m dy[m] · x[m, d]

A kernel is written for one block, which owns BLOCK_M rows. It works on whole tiles, as PyTorch does on tensors; who of
its threads does what is the compiler's business.

- Finding its data: `tl.program_id` is the block's number, and a tile of addresses is made of a pointer and offsets.
- The edge: a load takes a mask and what stands for the elements outside, here 0, which adds nothing to a sum.
- The loop: D has any length, so a block walks over it in tiles of BLOCK_D columns and keeps its sums in `acc`, in fp32.
- Storing: again by addresses, with a mask.

Blocks run in no order and cannot wait for each other. dweight is a sum over all of them, so each one writes its own
part of it to `partial`, and PyTorch adds these up: the same result, bit for bit, every time.
"""

import torch
import triton
import triton.language as tl

from common import empty, empty_like

from .shared import checked

BLOCK_M, BLOCK_D = 16, 128  # powers of two, as all of Triton's tiles

INTERPRET = triton.knobs.runtime.interpret  # then kernels run on the CPU, in Python


@triton.jit
def forward_kernel(X, WEIGHT, Y, len_m, len_d, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """BLOCK_M values of y."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_inside = rows < len_m
    row_offsets = rows.to(tl.int64) * len_d  # a matrix may have more than 2^31 elements
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for column_begin in range(0, len_d, BLOCK_D):
        columns = column_begin + tl.arange(0, BLOCK_D)  # [BLOCK_D]
        column_inside = columns < len_d
        offsets = row_offsets[:, None] + columns[None, :]  # [BLOCK_M, BLOCK_D]
        inside = row_inside[:, None] & column_inside[None, :]
        x = tl.load(X + offsets, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
        weight = tl.load(WEIGHT + columns, mask=column_inside, other=0.0).to(tl.float32)  # [BLOCK_D]
        acc += x * weight[None, :]
    y = tl.sum(acc, 1)  # [BLOCK_M]; across threads, and so once at the end and not in the loop
    tl.store(Y + rows, y.to(Y.dtype.element_ty), mask=row_inside)


@triton.jit
def backward_kernel(DY, X, WEIGHT, DX, PARTIAL, len_m, len_d, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """BLOCK_M rows of dx, and what these rows add to dweight: one row of PARTIAL."""
    block = tl.program_id(0)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_inside = rows < len_m
    row_offsets = rows.to(tl.int64) * len_d
    dy = tl.load(DY + rows, mask=row_inside, other=0.0).to(tl.float32)  # [BLOCK_M]
    for column_begin in range(0, len_d, BLOCK_D):
        columns = column_begin + tl.arange(0, BLOCK_D)  # [BLOCK_D]
        column_inside = columns < len_d
        offsets = row_offsets[:, None] + columns[None, :]  # [BLOCK_M, BLOCK_D]
        inside = row_inside[:, None] & column_inside[None, :]
        x = tl.load(X + offsets, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
        weight = tl.load(WEIGHT + columns, mask=column_inside, other=0.0).to(tl.float32)  # [BLOCK_D]
        dx = dy[:, None] * weight[None, :]  # [BLOCK_M, BLOCK_D]
        tl.store(DX + offsets, dx.to(DX.dtype.element_ty), mask=inside)
        partial = tl.sum(dy[:, None] * x, 0)  # [BLOCK_D]
        tl.store(PARTIAL + block.to(tl.int64) * len_d + columns, partial, mask=column_inside)


def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y `(M,)` of x `(M, D)` and weight `(D,)`, all of one dtype. Raises what `checked` does."""
    x, weight = checked(x, weight, interpreted=INTERPRET)
    len_m, len_d = x.shape
    y = empty((len_m,), dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        forward_kernel[triton.cdiv(len_m, BLOCK_M),](x, weight, y, len_m, len_d, BLOCK_M, BLOCK_D)
    return y


def backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dx `(M, D)` and dweight `(D,)` of dy `(M,)`, in the dtype of x. Raises what `checked` does."""
    x, weight, dy = checked(x, weight, dy, interpreted=INTERPRET)
    len_m, len_d = x.shape
    blocks = triton.cdiv(len_m, BLOCK_M)
    dx = empty_like(x)
    partial = empty((blocks, len_d), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        backward_kernel[blocks,](dy, x, weight, dx, partial, len_m, len_d, BLOCK_M, BLOCK_D)
    return dx, partial.sum(0).to(x.dtype)
