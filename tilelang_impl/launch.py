"""From a problem to a compiled kernel that is called with tensors: layouts, constants, and the cache of kernels."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import tilelang
import torch
from tilelang import PassConfigKey

from common import Form, Problem, Switches, Target, Tile, Unsupported

from .toolchain import nvcc

# Bytes of keys and values that the programs running at one time may share: the smallest L2 of the targets' cards
# (48 MB), less what the queries and outputs stream through it.
L2_BYTES = 32 * 2**20

# Rows of delta and shift are padded to a multiple of this, so that no tile of queries reaches past their end and every
# one of them starts on 16 bytes, as TMA asks.
ROW_PADDING = 128

# The tile of the kernel that only streams rows; it has no use for its block_n.
ROW_TILE = Tile(block_m=ROW_PADDING // 2, block_n=16, warps=4, stages=1)

GRID_MAX = 2**31 - 1

# Warnings and the logger, which are set aside while a kernel is compiled, are shared by all threads.
_COMPILING = threading.RLock()

T = TypeVar("T")

# How the compiler says that it could not prove all threads to reach a barrier, and how often a lowering is begun.
UNPROVEN = "Cannot lower a required shared-memory sync"
LOWERING_ATTEMPTS = 4

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Launch:
    """One kernel: the function that writes it, its compile-time constants, and its scalar arguments.

    The tensors it works on come before the scalars when it is called. blocks: how many it is launched with, which the
    kernel computes from its tensors. tile: this kernel's own. asynchronous: it is compiled to TMA and wgmma.
    Raises Unsupported when there are more blocks than a grid has.
    """

    program: Callable[..., Any]
    constants: tuple[Any, ...]
    scalars: tuple[float, ...]
    blocks: int
    tile: Tile
    asynchronous: bool

    def __post_init__(self) -> None:
        if self.blocks > GRID_MAX:
            raise Unsupported(f"{self.name} needs {self.blocks} blocks; a grid has at most {GRID_MAX}")

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @property
    def pass_configs(self) -> dict[str, Any]:
        """The compiler's options."""
        options: dict[str, Any] = {
            PassConfigKey.TL_ENABLE_FAST_MATH.value: True,
            # The kernels guard what can reach outside by themselves, and copies are cut off at their tensor's end.
            PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS.value: True,
        }
        if not self.asynchronous:
            options[PassConfigKey.TL_DISABLE_WARP_SPECIALIZED.value] = True
            options[PassConfigKey.TL_DISABLE_WGMMA.value] = True
            options[PassConfigKey.TL_DISABLE_TMA_LOWER.value] = True
        return options

    @property
    def kernel(self) -> Kernel:
        """What there is to compile."""
        return Kernel(self.program, self.constants, tuple(self.pass_configs.items()))


@dataclass(frozen=True)
class Kernel:
    """All that a kernel's code depends on: the function that writes it, its constants, and the compiler's options."""

    program: Callable[..., Any]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """What the function that it is compiled from is called."""
        return self.program.__name__.replace("program", "kernel")

    def compile(self, sm: str) -> Callable[..., None]:
        """The kernel for an architecture, from this process' cache, TileLang's on disk, or the compiler."""
        return _compiled(self, sm)


@cache
def _compiled(kernel: Kernel, sm: str) -> Callable[..., None]:
    with _COMPILING, warnings.catch_warnings(), _announced_on_stderr():
        # The option that keeps copies off TMA is announced to go; the version of TileLang that is pinned has it.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            compiled = in_a_fresh_thread(
                lambda: tilelang.compile(
                    kernel.program(*kernel.constants),
                    target={"kind": "cuda", "arch": sm},
                    execution_backend="tvm_ffi",
                    pass_configs=dict(kernel.options),
                )
            )
        except Exception as error:  # the compiler raises many kinds
            nvcc()  # where there is none, that is the reason
            raise Unsupported(f"TileLang cannot compile {kernel.name} for {sm}: {last_line(error)}") from error
    # TileLang's object would look at every argument in Python once more; what it calls in the end is this.
    executable = compiled.adapter.get_exportable_executable()
    module = executable.jit() if hasattr(executable, "jit") else executable
    return module.main


def last_line(error: Exception) -> str:
    """What an error of the compiler says in the end."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def in_a_fresh_thread(work: Callable[[], T]) -> T:
    """What `work` returns, called in a thread of its own, as every lowering has to be.

    TileLang 0.1.13 asks a prover (z3) with a bounded number of steps, whose state lives as long as its thread: what it
    can prove of a kernel would depend on what the thread lowered before, up to kernels that then do not lower at all.
    About one lowering in 300 still fails so, in a process that has lowered many, and succeeds when it is tried again.
    """
    for _ in range(LOWERING_ATTEMPTS - 1):
        try:
            return _in_a_thread(work)
        except Exception as error:  # the compiler raises many kinds
            if UNPROVEN not in str(error):
                raise
    return _in_a_thread(work)


def _in_a_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(work).result()


@contextmanager
def _announced_on_stderr() -> Iterator[None]:
    """TileLang says on standard output which kernel it compiles; that is the caller's, and may be a table."""
    logger = logging.getLogger("tilelang")
    handlers = logger.handlers
    logger.handlers = [logging.StreamHandler(sys.stderr)]
    try:
        yield
    finally:
        logger.handlers = handlers


def ready(launches: Iterable[Launch], device: torch.device) -> tuple[Callable[..., None], ...]:
    """The compiled kernels of launches for a device, which take the tensors only.

    A target that is not the device's own keeps its instructions and is assembled for the device.
    """
    sm = Target.detect(device).sm
    return tuple(_bind(launch.kernel.compile(sm), launch.scalars) for launch in launches)


def _bind(function: Callable[..., None], scalars: tuple[float, ...]) -> Callable[..., None]:
    def call(*tensors: torch.Tensor) -> None:
        function(*tensors, *scalars)

    return call


def constants(
    problem: Problem, target: Target, tile: Tile, switches: Switches, owned_rows: int, layouts: tuple[str, ...]
) -> tuple[Any, ...]:
    """The compile-time constants of a kernel with a walk, in the order of its program's parameters."""
    return (
        problem.head_dim,
        block_d(problem),
        _DTYPES[problem.dtype],
        problem.mask.left is not None,
        problem.mask.right is not None,
        switches.skip,
        switches.exp2,
        switches.edges,
        switches.order,
        asynchronous(target, tile, owned_rows),
        tile.block_m,
        tile.block_n,
        tile.warps * 32,
        tile.stages if switches.tiles else 0,
        layouts,
    )


def asynchronous(target: Target, tile: Tile, owned_rows: int) -> bool:
    """Whether a kernel uses TMA and wgmma: on Hopper, with a pipeline and whole warpgroups of 64 rows or more.

    Smaller tiles, such as the naive rung's, run on the instructions of the Ada path everywhere; so does everything on
    the Blackwells, whose own matrix instruction (sm_100) accumulates in a memory that these kernels do not use.
    """
    whole_warpgroups = tile.warps % 4 == 0 and owned_rows % (tile.warps * 16) == 0
    return target.instruction == "wgmma" and tile.stages > 1 and whole_warpgroups


def block_d(problem: Problem) -> int:
    """The head dimension as tiles hold it, the rest zeros: a multiple of 32, the width of a swizzled row, or 16."""
    return 16 if problem.head_dim == 16 else (problem.head_dim + 31) // 32 * 32


def summed_d(problem: Problem) -> int:
    """The head dimension as a sum over it takes it, the rest zeros: TileLang lays sums out in powers of two only."""
    return 1 << (problem.head_dim - 1).bit_length()


def band(problem: Problem) -> tuple[int, int]:
    """The band of `Mask.band`, 0 for an open side."""
    low, high = problem.mask.band(problem.len_q, problem.len_k)
    return low or 0, high or 0


def heads_in_l2(problem: Problem) -> int:
    """How many of the problem's key heads fit in L2 together with their values; at least one."""
    head_bytes = 2 * problem.len_k * problem.head_dim * problem.dtype.itemsize
    return min(max(1, L2_BYTES // head_bytes), problem.batch * problem.heads_kv)


def padded_len(problem: Problem) -> int:
    """The rows of delta and shift."""
    return (problem.len_q + ROW_PADDING - 1) // ROW_PADDING * ROW_PADDING


def settled(form: Form) -> tuple[Form, str]:
    """How kernels take a `(B, H, N, D)` tensor of that form: packed, as its layout `bhnd` or `bnhd` says.

    Under strides known at run time only, TileLang 0.1.13 copies element by element; a packed layout keeps 16-byte
    copies.
    """
    dense = form.dense
    if dense.is_contiguous:
        return dense, "bhnd"
    in_order = dense._replace(shape=_swapped(dense.shape), strides=_swapped(dense.strides))
    return (dense, "bnhd") if in_order.is_contiguous else (Form.packed(form.shape, form.dtype, form.device), "bhnd")


def _swapped(sizes: Sequence[int]) -> tuple[int, ...]:
    batch, heads, rows, columns = sizes
    return batch, rows, heads, columns


def settle(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor as kernels take it, its dimensions in the order of the layout: itself, or a packed copy.

    It is copied too where it does not start on 16 bytes, which 16-byte copies need.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()  # a tensor that autograd watches cannot be handed over
    tensor = in_memory(tensor, layout)
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def laid_out_as(form: Form, result: torch.Tensor) -> torch.Tensor:
    """The result in that form, which a caller is to see: as settled it may lie otherwise in memory."""
    return result if result.stride() == form.strides else form.empty().copy_(result)


def in_memory(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor with its dimensions in the order of its layout."""
    return tensor if layout == "bhnd" else tensor.transpose(1, 2)
