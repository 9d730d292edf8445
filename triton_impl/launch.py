"""How the kernels of this port are launched: their arguments from a problem, and the launch itself."""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime import driver

from common import Problem, Switches, Target, Tile, Unsupported
from common.work import FMA

from .blocks import counting_kernel

INTERPRET = triton.knobs.runtime.interpret

# Kernel arguments whose value must not make a new kernel, so that a new length or stride never compiles.
RUN_TIME = (
    *(f"{tensor}_{dim}" for tensor in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for dim in "bhn"),
    *("heads_q", "heads_kv", "group", "heads", "section", "len_q", "len_k", "low", "high"),
)  # fmt: skip

# Bytes of keys and values that the programs running at one time may share: the smallest L2 of the targets' cards
# (48 MB), less what the queries and outputs stream through it.
L2_BYTES = 32 * 2**20

TENSOR_MEMORY = 512  # columns of it that a block has where the products are tcgen05

BLOCK_MAX = 1024  # no tile has more rows
GRID_MAX = 2**31 - 1

# The strides of a four-dimensional tensor, in elements; the last is 1.
Layout = tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel and all it is given but its tensors: made once for a problem, its layouts, tile and switches.

    numbers: the arguments after the tensors. constants: the compile-time constants, by name in the kernel's order.
    tile: this kernel's own. compiled: what it was compiled to, by target, device and alignment of the tensors.
    """

    kernel: Any
    grid: int
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]
    tile: Tile
    compiled: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.grid > GRID_MAX:
            raise Unsupported(f"{self.kernel.__name__} needs {self.grid} blocks; a grid has at most {GRID_MAX}")

    def run(self, target: Target, *tensors: torch.Tensor) -> None:
        """Launches on the current stream of the tensors' device, with the instructions of `target`.

        The target's architecture is a compile option, and so a part of the kernel's cache key: the lowering to
        instructions follows it, while the code is assembled for the card. One process can serve several targets.
        """
        device = tensors[0].device
        if INTERPRET or device.index == torch.cuda.current_device():
            self._run(target, device, tensors)
        else:
            with torch.cuda.device(device):
                self._run(target, device, tensors)

    def _run(self, target: Target, device: torch.device, tensors: tuple[torch.Tensor, ...]) -> None:
        # Of the tensors, a compiled kernel depends on their dtypes, which are the problem's, and on their alignment.
        pointers = [tensor.data_ptr() for tensor in tensors]
        key = (target.name, device.index, *[pointer % 16 == 0 for pointer in pointers])
        compiled = self.compiled.get(key)
        if compiled is not None:
            # Past Triton's own dispatch, which looks at every argument anew, and past its hooks around a launch. Of a
            # tensor its launcher would ask the driver where it lies; a number it takes for the address.
            stream = driver.active.get_current_stream(device.index)
            about = compiled.function, compiled.packed_metadata, None, None, None
            compiled.run(self.grid, 1, 1, stream, *about, *pointers, *self.numbers, *self.constants.values())
            return
        native = target if INTERPRET else Target.detect(device)
        options = compile_options(self.tile.warps, self.tile.stages, target, native)
        compiled = self.kernel[self.grid, 1, 1](*tensors, *self.numbers, **self.constants, **options)
        if not INTERPRET:
            if compiled.metadata.shared > target.smem_per_block:
                raise Unsupported(
                    f"{self.kernel.__name__} was built with {compiled.metadata.shared} B of shared memory; "
                    f"{target.sm} gives {target.smem_per_block} B"
                )
            self.compiled[key] = compiled


def compile_options(warps: int, stages: int, target: Target, native: Target) -> dict[str, Any]:
    """Triton's options for a kernel with the instructions of `target`, that is to run on a card of `native`."""
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if not INTERPRET:
        # From Triton 3.10 on factor and shift would not be one multiply-add by default.
        options["enable_fp_fusion"] = True
        if target != native:
            options["arch"] = f"sm{target.capability}"
    return options


def interpreter_fault() -> str | None:
    """Why Triton's interpreter cannot run kernels here, tried on a loop of run-time length; None when it can.

    Triton 3.6's breaks on the scalars of NumPy 2.4, which 3.9's takes. It is tried in a thread of its own, since what
    PyTorch does otherwise in this one (a default device, tensors without values while it traces) has no part in it.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try_interpreter).result()


def _try_interpreter() -> str | None:
    count = torch.zeros(1, dtype=torch.int32)
    try:
        counting_kernel[1,](count, 5)
    except Exception as error:  # whatever it raises: it does not run
        numpy = importlib.metadata.version("numpy")
        return (
            f"the interpreter of Triton {triton.__version__} does not run beside NumPy {numpy} ({error}): "
            "pip install --upgrade triton, or an older NumPy"
        )
    return None


def strides(*layouts: tuple[Layout, tuple[int, ...]]) -> tuple[dict[str, Any], list[int]]:
    """The three leading strides of each `(layout, shape)` pair, and how the kernel is to take them, UNIT and WIDE.

    WIDE: offsets inside a tile may pass 2^31 elements. UNIT: how many elements a number counts, 8 when all strides are
    multiples of 8 (and not WIDE, where a product with 8 may itself pass 32 bits), else 1. A dimension of size 1 has no
    stride worth knowing.
    """
    numbers = [
        0 if size == 1 else stride
        for layout, shape in layouts
        for size, stride in zip(shape[:3], layout[:3], strict=True)
    ]
    wide = any(stride * BLOCK_MAX >= 2**31 for stride in numbers[2::3])
    unit = 8 if not wide and all(stride % 8 == 0 for stride in numbers) else 1
    return {"UNIT": unit, "WIDE": wide}, [stride // unit for stride in numbers]


def constants(kernel: Any, problem: Problem, tile: Tile, switches: Switches, **more: Any) -> dict[str, Any]:
    """The compile-time constants that `kernel` has, in its order; `more` are those that are the launch's own."""
    values = {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_d(problem),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "HAS_LOW": problem.mask.left is not None,
        "HAS_HIGH": problem.mask.right is not None,
        "UNSEEING": problem.mask.has_unseeing_rows(problem.len_q, problem.len_k),
        "SKIP": switches.skip,
        "EXP2": switches.exp2,
        "EDGES": switches.edges,
        "ORDER": switches.order,
        "PRECISION": "tf32" if switches.tf32 else "ieee",
        "INTERPRET": INTERPRET,
        **more,
    }
    return {name: values[name] for name in kernel.arg_names if name in values}


def instruction(problem: Problem, target: Target, tile: Tile, owned_rows: int) -> str:
    """What the compiler makes the products of a kernel of, whose program owns so many rows (`common.Work`).

    The asynchronous instructions of Hopper and Blackwell take whole warpgroups and 64 rows; less is left to `mma.sync`.
    """
    if problem.dtype == torch.float32:
        return FMA
    return target.instruction if tile.warps % 4 == 0 and owned_rows >= 64 else "mma.sync"


def block_d(problem: Problem) -> int:
    """The head dimension as tiles hold it: a power of two, as Triton's tiles must be; the rest is zeros."""
    return triton.next_power_of_2(problem.head_dim)


def row_tile(problem: Problem) -> Tile:
    """The tile of the kernels that only stream rows: about 8,192 elements; they have no use for its block_n."""
    return Tile(block_m=max(16, min(128, 8192 // block_d(problem))), block_n=16, warps=4, stages=1)


def heads_in_l2(problem: Problem) -> int:
    """How many of the problem's key heads fit in L2 together with their values; at least one."""
    head_bytes = 2 * problem.len_k * problem.head_dim * problem.dtype.itemsize
    return min(max(1, L2_BYTES // head_bytes), problem.batch * problem.heads_kv)
