"""The weighted sum of the rows of a matrix in CuTe DSL.

Forward, with x `(M, D)`, weight `(D,)` and y `(M,)`; backward, from dy `(M,)`:

    y[m] = Σ_d x[m, d] · weight[d]
    dx[m, d] = dy[m] · weight[d]        dweight[d] = Σ_m dy[m] · x[m, d]

A kernel is written for one thread of a block, which owns BLOCK_M rows. Who does what is said, by a layout: of the
threads over a tile, and of the elements that one thread takes at a time, VECTOR neighbours, 16 bytes where D allows.
Prefixes: m a tensor in global memory, g the block's tiles of it, t the thread's part, r its registers, c coordinates.

- Finding its data: `local_tile` cuts a tensor into tiles and takes the block's; `partition_S` takes the thread's part.
- The edge: a tensor of coordinates is cut up in the same way, and tells each thread where its elements lie. A predicate
  made of it keeps a copy inside; registers that it leaves alone hold the 0 they were filled with.
- The loop: D has any length, so a block walks over it in tiles of BLOCK_D columns and keeps its sums in `acc`, in fp32.
- Storing: copies from registers with the same predicate.

Blocks run in no order and cannot wait for each other. dweight is a sum over all of them, so each one writes its own
part of it to `partial`, and PyTorch adds these up: the same result, bit for bit, every time.
"""

from functools import cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from common import empty, empty_like

from .shared import checked

BLOCK_M, THREADS, LANES = 16, 128, 32  # LANES: the threads of a warp, which can pass each other values

ELEMENTS = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16, torch.float32: Float32}


def cut(matrix, copy, tile, thread, block):
    """The thread's part of the block's rows of a matrix: (VECTOR, rows, columns, tiles)."""
    gMatrix = cute.local_tile(matrix, tile, (block, None))  # (BLOCK_M, BLOCK_D, tiles)
    return copy.get_slice(thread).partition_S(gMatrix)


def same_rows(mWeight, len_m):
    """weight `(D,)` seen as a matrix `(M, D)`: with a stride of 0, all its rows are the same memory."""
    return cute.make_tensor(mWeight.iterator, cute.make_layout((len_m, mWeight.shape[0]), stride=(0, 1)))


def tiled_copy(dtype, VECTOR, ROWS, COLUMNS):
    """Copies of tiles by ROWS × COLUMNS threads, neighbours in a row next to each other, each VECTOR elements."""
    atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=VECTOR * dtype.width)
    threads = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))


def inside(tC, shape):
    """Which vectors with the coordinates tC lie in a matrix of that shape: (1, rows, columns)."""
    rows, columns = cute.size(tC, mode=[1]), cute.size(tC, mode=[2])
    pMatrix = cute.make_rmem_tensor((1, rows, columns), Boolean)
    for i in range(rows):
        for j in range(columns):
            pMatrix[0, i, j] = cute.elem_less(tC[0, i, j], shape)
    return pMatrix


def load(copy, tMatrix, pMatrix):
    """A thread's part of a tile in fp32, (VECTOR, rows, columns): 0 where the predicate keeps the copy off."""
    rMatrix = cute.make_fragment_like(tMatrix)
    rMatrix.fill(0.0)
    cute.copy(copy, tMatrix, rMatrix, pred=pMatrix)
    values = cute.make_fragment_like(rMatrix, Float32)
    values.store(rMatrix.load().to(Float32))
    return values


@cute.kernel
def forward_kernel(mX: cute.Tensor, mWeight: cute.Tensor, mY: cute.Tensor, VECTOR: cutlass.Constexpr):
    """BLOCK_M values of y: a warp shares a row, so that its threads can add up what they found of it."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    copy = tiled_copy(mX.element_type, VECTOR, THREADS // LANES, LANES)
    tile = BLOCK_M, LANES * VECTOR  # BLOCK_M, BLOCK_D
    tX = cut(mX, copy, tile, thread, block)
    tWeight = cut(same_rows(mWeight, mX.shape[0]), copy, tile, thread, block)
    tC = cut(cute.make_identity_tensor(mX.shape), copy, tile, thread, block)
    acc = cute.make_fragment_like(tX[None, None, None, 0], Float32)
    acc.fill(0.0)
    for n in range(cute.size(tX, mode=[3])):
        pX = inside(tC[None, None, None, n], mX.shape)
        x = load(copy, tX[None, None, None, n], pX)
        weight = load(copy, tWeight[None, 0, None, n], pX[None, 0, None])
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            acc[None, i, None].store(acc[None, i, None].load() + x[None, i, None].load() * weight.load())
    for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
        y = acc[None, i, None].load().reduce(cute.ReductionOp.ADD, 0.0, 0)
        for step in cutlass.range_constexpr(LANES.bit_length() - 1):
            y = y + cute.arch.shuffle_sync_bfly(y, offset=1 << step)  # afterwards every lane has the sum
        row = tC[0, i, 0, 0][0]
        if thread % LANES == 0 and row < mX.shape[0]:
            mY[row] = y.to(mY.element_type)


@cute.kernel
def backward_kernel(
    mDY: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor, mDX: cute.Tensor, mPartial: cute.Tensor,
    VECTOR: cutlass.Constexpr,
):  # fmt: skip
    """BLOCK_M rows of dx, and what these add to dweight, one row of partial: a thread adds up columns of its own."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    copy = tiled_copy(mX.element_type, VECTOR, 1, THREADS)
    tile = BLOCK_M, THREADS * VECTOR  # BLOCK_M, BLOCK_D
    tX, tDX = (cut(matrix, copy, tile, thread, block) for matrix in (mX, mDX))
    tWeight = cut(same_rows(mWeight, mX.shape[0]), copy, tile, thread, block)
    tC = cut(cute.make_identity_tensor(mX.shape), copy, tile, thread, block)
    dy = cute.make_rmem_tensor(BLOCK_M, Float32)
    dy.fill(0.0)
    for i in cutlass.range_constexpr(BLOCK_M):
        if block * BLOCK_M + i < mX.shape[0]:
            dy[i] = mDY[block * BLOCK_M + i].to(Float32)
    for n in range(cute.size(tX, mode=[3])):
        pX = inside(tC[None, None, None, n], mX.shape)
        x = load(copy, tX[None, None, None, n], pX)
        weight = load(copy, tWeight[None, 0, None, n], pX[None, 0, None])
        rDX = cute.make_fragment_like(tDX[None, None, None, n])
        partial = cute.make_fragment_like(x[None, 0, None])
        partial.fill(0.0)
        for i in cutlass.range_constexpr(BLOCK_M):
            rDX[None, i, None].store((dy[i] * weight.load()).to(mDX.element_type))
            partial.store(partial.load() + dy[i] * x[None, i, None].load())
        cute.copy(copy, rDX, tDX[None, None, None, n], pred=pX)
        if pX[0, 0, 0]:
            column = tC[0, 0, 0, n][1]
            for j in cutlass.range_constexpr(VECTOR):
                mPartial[block, column + j] = partial[j]


@cute.jit
def launch_forward(
    mX: cute.Tensor, mWeight: cute.Tensor, mY: cute.Tensor, VECTOR: cutlass.Constexpr, stream: cuda.CUstream
):
    """One block for each BLOCK_M rows."""
    blocks = cute.ceil_div(mX.shape[0], BLOCK_M)
    forward_kernel(mX, mWeight, mY, VECTOR).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def launch_backward(
    mDY: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor, mDX: cute.Tensor, mPartial: cute.Tensor,
    VECTOR: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """One block for each BLOCK_M rows, which is each row of partial."""
    grid = [mPartial.shape[0], 1, 1]
    backward_kernel(mDY, mX, mWeight, mDX, mPartial, VECTOR).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)


@cache
def compiled(direction: str, dtype: torch.dtype, VECTOR: int, options: str = ""):
    """The compiled launch for a dtype; it takes PyTorch's tensors of any M and D, on PyTorch's current stream.

    options: more of the compiler's, such as `--gpu-arch sm_89`; the default architecture is that of the GPU here.
    """
    element = ELEMENTS[dtype]
    len_m, len_d, blocks = (cute.sym_int32() for _ in range(3))
    stride = cute.sym_int64(divisibility=VECTOR)  # 64 bits: a matrix may have more than 2^31 elements
    x, dx = (make_fake_tensor(element, (len_m, len_d), (stride, 1), assumed_align=16) for _ in range(2))
    weight = make_fake_tensor(element, (len_d,), (1,), assumed_align=16)
    y = dy = make_fake_tensor(element, (len_m,), (1,), assumed_align=16)
    partial = make_fake_tensor(Float32, (blocks, len_d), (cute.sym_int64(), 1), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi {options}"
    if direction == "forward":
        return cute.compile(launch_forward, x, weight, y, VECTOR, stream, options=options)
    return cute.compile(launch_backward, dy, x, weight, dx, partial, VECTOR, stream, options=options)


def vector(x: torch.Tensor) -> int:
    """How many elements of a row one copy takes: 16 bytes where all rows start on 16, else one element."""
    VECTOR = 16 // x.element_size()
    return VECTOR if x.shape[1] % VECTOR == 0 else 1


def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y `(M,)` of x `(M, D)` and weight `(D,)`, all of one dtype. Raises what `checked` does."""
    x, weight = checked(x, weight)
    y = empty((x.shape[0],), dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        compiled("forward", x.dtype, vector(x))(x, weight, y)
    return y


def backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dx `(M, D)` and dweight `(D,)` of dy `(M,)`, in the dtype of x. Raises what `checked` does."""
    x, weight, dy = checked(x, weight, dy)
    len_m, len_d = x.shape
    dx = empty_like(x)
    blocks = -(-len_m // BLOCK_M)
    partial = empty((blocks, len_d), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        compiled("backward", x.dtype, vector(x))(dy, x, weight, dx, partial)
    return dx, partial.sum(0).to(x.dtype)
