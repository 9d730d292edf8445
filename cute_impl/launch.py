"""From a problem to a compiled kernel that is called with tensors: constants, the compiler, the caches of kernels."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
import tvm_ffi
from cutlass.cute.runtime import load_module, make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from common import DTYPE_NAMES, Problem, Switches, Target, Tile, Unsupported
from common.buffers import dense_copy

# Bytes of keys and values that the programs running at one time may share: the smallest L2 of the targets' cards
# (48 MB), less what the queries and outputs stream through it.
L2_BYTES = 32 * 2**20

# Rows of delta and shift are padded to a multiple of this, so that no tile of queries reaches past their end.
ROW_PADDING = 128

GRID_MAX = 2**31 - 1

_COMPILING = threading.RLock()  # while it compiles, CuTe DSL keeps state that all threads share

_ENTRY = "fa2_launch"  # the name of a kernel's host function in an object file
_ELEMENTS = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}


@dataclass(frozen=True)
class Launch:
    """One kernel and its scalar arguments, which follow the tensors when it is called.

    kernel: an object of a kernel class. Its fields are the compile-time constants, `arguments()` stands for what it is
    called with, and calling it inside the compiler launches it. blocks: how many it launches. tile: its own, where that
    is not the direction's.
    """

    kernel: Any
    scalars: tuple[int | float, ...]
    blocks: int
    tile: Tile | None = None

    def __post_init__(self) -> None:
        if self.blocks > GRID_MAX:
            raise Unsupported(f"{self.name} needs {self.blocks} blocks; a grid has at most {GRID_MAX}")

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @property
    def code(self) -> Code:
        """What there is to compile."""
        return Code(self.kernel)


@dataclass(frozen=True)
class Code:
    """All that a kernel's code depends on: an object of a kernel class, with its constants."""

    kernel: Any

    def compile(self, sm: str) -> Callable[..., None]:
        """The compiled kernel for an architecture, from this process' cache, the one on disk, or the compiler."""
        with _COMPILING:
            return _compiled(self.kernel, sm)


def compile_kernel(kernel: Any, sm: str, options: str = "") -> Any:
    """Compiles a kernel for an architecture, which needs no GPU; the lengths and strides are known at its call.

    It takes tensors of PyTorch by TVM-FFI, which compares them with `arguments()`, makes their device the current one
    and launches on PyTorch's current stream there.
    """
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with _COMPILING:
        return cute.compile(kernel, *kernel.arguments(), stream, options=f"--enable-tvm-ffi --gpu-arch {sm} {options}")


@cache
def _compiled(kernel: Any, sm: str) -> Callable[..., None]:
    path = cache_folder() / f"{_key(kernel, sm)}.o"
    if not path.exists():
        compiled = compile_kernel(kernel, sm)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Under another name first, so that no other process reads half a file.
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                unfinished = Path(folder) / path.name
                compiled.export_to_c(str(unfinished), function_name=_ENTRY)
                unfinished.replace(path)
        except OSError as error:
            raise Unsupported(f"compiled kernels cannot be kept: {error}; set FA2_CUTE_CACHE_DIR") from error
    return getattr(load_module(str(path), enable_tvm_ffi=True), _ENTRY)


def cache_folder() -> Path:
    """Where compiled kernels are kept: `FA2_CUTE_CACHE_DIR`, by default `~/.cache/fa2-cute`."""
    return Path(os.environ.get("FA2_CUTE_CACHE_DIR") or Path.home() / ".cache" / "fa2-cute")


def _key(kernel: Any, sm: str) -> str:
    # The constants' names and values, and everything that turns them into code.
    return hashlib.sha256(f"{kernel!r} {sm} {_sources()}".encode()).hexdigest()[:32]


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(f"{cutlass.__version__} {tvm_ffi.__version__} {platform.machine()}".encode())
    return digest.hexdigest()


def rows(dtype: str, batch: Any, heads: Any, length: Any, head_dim: int) -> Any:
    """Stands for a tensor `(B, H, N, D)` of any strides that are multiples of 16 bytes, the last one 1."""
    element = _ELEMENTS[dtype]
    strides = tuple(cute.sym_int64(divisibility=128 // element.width) for _ in range(3))
    return make_fake_tensor(element, (batch, heads, length, head_dim), (*strides, 1), assumed_align=16)


def packed(dtype: str, *shape: Any, align: int = 16) -> Any:
    """Stands for a packed tensor of that shape, which starts on `align` bytes."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(_ELEMENTS[dtype], shape, stride_order=order, assumed_align=align)


def ready(launches: Iterable[Launch], device: torch.device) -> tuple[Callable[..., None], ...]:
    """The compiled kernels of launches for a device, which take the tensors only.

    A target that is not the device's own keeps its tiles and is compiled for the device.
    """
    sm = Target.detect(device).sm
    return tuple(_bind(launch.code.compile(sm), launch.scalars) for launch in launches)


def _bind(function: Callable[..., None], scalars: tuple[int | float, ...]) -> Callable[..., None]:
    def call(*tensors: torch.Tensor) -> None:
        function(*tensors, *scalars)

    return call


def constants(problem: Problem, tile: Tile, switches: Switches) -> dict[str, Any]:
    """The compile-time constants that every kernel with a walk has, by the names of its fields."""
    return {
        "DTYPE": DTYPE_NAMES[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_d(problem),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WARPS": tile.warps,
        "STAGES": tile.stages,
        "HAS_LOW": problem.mask.left is not None,
        "HAS_HIGH": problem.mask.right is not None,
        "SKIP": switches.skip,
        "EXP2": switches.exp2,
        "EDGES": switches.edges,
        "ORDER": switches.order,
    }


def block_d(problem: Problem) -> int:
    """The head dimension as tiles hold it, the rest zeros: a multiple of 16, the inner dimension of one `mma`."""
    return (problem.head_dim + 15) // 16 * 16


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


def settle(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels take it: itself while its rows start on 16 bytes, else a copy in the same order."""
    if tensor.requires_grad:
        tensor = tensor.detach()  # a tensor that autograd watches cannot be handed over
    if tensor.data_ptr() % 16 == 0 and _starts_on_vectors(tensor.stride(), tensor.dtype.itemsize):
        return tensor
    return dense_copy(tensor)


@lru_cache(maxsize=4096)
def _starts_on_vectors(strides: tuple[int, ...], itemsize: int) -> bool:
    return all(stride * itemsize % 16 == 0 for stride in strides[:-1])
