"""Compiling this port's kernels for a target that need not be in the machine, and reading what they take of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import tilelang
from tilelang import tvm
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

from common import Build, Direction, Problem, Switches, Target, Tile, Unsupported

from .backward import plan_backward
from .forward import plan_forward
from .launch import Launch, in_a_fresh_thread, last_line
from .toolchain import nvcc

_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "cp.async": r"\bcp\.async\.c[ag]",
    "ldmatrix": r"\bldmatrix",
    "tma": r"\bcp\.async\.bulk\.tensor",
}


def plan(problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches) -> tuple[Launch, ...]:
    """The launches of a problem on packed tensors."""
    if direction == "forward":
        return plan_forward(problem, target, tile, switches, ("bhnd",) * 4)
    return plan_backward(problem, target, tile, switches, ("bhnd",) * 5, bool(tile.get("atomic_dq", 0)))


def build(problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches) -> list[Build]:
    """Compiles the direction's kernels, to machine code.

    Raises Unsupported when there is no nvcc, or with the compiler's reason if it fails.
    """
    return [_compile(launch, target) for launch in plan(problem, target, direction, tile, switches)]


def lower(launch: Launch, target: Target) -> tuple[str, int]:
    """The kernel's CUDA source for a target, and the shared memory it asks for at its launch. Needs no nvcc."""
    return in_a_fresh_thread(lambda: _lower(launch, target))


def _lower(launch: Launch, target: Target) -> tuple[str, int]:
    machine = tvm.target.Target({"kind": "cuda", "arch": target.sm})
    with (
        warnings.catch_warnings(),
        tvm.transform.PassContext(opt_level=3, config=launch.pass_configs),
        machine,
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        program = launch.program(*launch.constants)
        artifact = tilelang.lower(program, target=machine, enable_host_codegen=False, enable_device_compile=False)
    shared = 0
    for function in artifact.device_mod.functions.values():
        shared += int(function.attrs.get("dyn_shared_memory_buf", 0))
    return artifact.kernel_source, shared


def _compile(launch: Launch, target: Target) -> Build:
    compiler = nvcc()
    begin = time.perf_counter()
    try:
        source, dynamic = lower(launch, target)
    except Exception as error:  # the compiler raises many kinds
        raise Unsupported(f"TileLang cannot lower {launch.name} for {target}: {last_line(error)}") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cu"
        path.write_text(source)
        command = [
            compiler, f"-arch={target.sm}", "-cubin", "-std=c++20", "--use_fast_math", "--keep", "--keep-dir", folder,
            "-I", TILELANG_TEMPLATE_PATH, "-I", CUTLASS_INCLUDE_DIR, "-Xptxas", "-v", "-w",
            "-o", str(path.with_suffix(".cubin")), str(path),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = [line for line in done.stderr.splitlines() if "error" in line] or ["nvcc failed"]
            raise Unsupported(f"nvcc cannot compile {launch.name} for {target}: {reason[0]}")
        ptx = next(Path(folder).glob("*.ptx")).read_text()
    return Build(
        kernel=launch.name,
        target=target.name,
        tile=launch.tile,
        shared=dynamic + _number(r"(\d+) bytes smem", done.stderr),
        registers=_number(r"Used (\d+) registers", done.stderr),
        spills=_number(r"(\d+) bytes spill stores", done.stderr) + _number(r"(\d+) bytes spill loads", done.stderr),
        instructions=tuple(name for name, pattern in _INSTRUCTIONS.items() if re.search(pattern, ptx)),
        seconds=time.perf_counter() - begin,
        cached=False,
        ptx=ptx,
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
