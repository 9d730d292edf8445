"""Compiling this port's kernels for a target that need not be in the machine, and reading what they take of it."""

from __future__ import annotations

import re
import struct
import tempfile
import time

from common import Build, Direction, Problem, Switches, Target, Tile, Unsupported

from .backward import plan_backward
from .forward import plan_forward
from .launch import Launch, compile_kernel

_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync",
    "cp.async": r"\bcp\.async\.c[ag]",
    "ldmatrix": r"\bldmatrix",
    "red": r"\b(red|atom)\.[\w.]*global",
}

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of a kernel in the section .nv.info of its machine code


def plan(problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches) -> tuple[Launch, ...]:
    """The launches of a problem; layouts in memory make no difference to them."""
    if direction == "forward":
        return plan_forward(problem, target, tile, switches)
    return plan_backward(problem, target, tile, switches, False, False)


def build(problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches) -> list[Build]:
    """Compiles the direction's kernels, to machine code. Raises Unsupported with the compiler's reason if it fails."""
    return [_compile(launch, target, tile) for launch in plan(problem, target, direction, tile, switches)]


def _compile(launch: Launch, target: Target, tile: Tile) -> Build:
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            compiled = compile_kernel(launch.kernel, target.sm, f"--keep-ptx --keep-cubin --dump-dir {folder}")
            ptx, cubin = compiled.__ptx__, compiled.__cubin__
    except Exception as error:  # the compiler raises many kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Unsupported(f"CuTe DSL cannot compile {launch.name} for {target}: {reason[0]}") from error
    attributes = _attributes(cubin)
    return Build(
        kernel=launch.name,
        target=target.name,
        tile=launch.tile or tile,
        shared=_shared(str(compiled.ir_module)),
        registers=attributes[_REGISTERS],
        spills=attributes[_FRAME],  # a thread's stack: these kernels have nothing there but what they spill
        instructions=tuple(name for name, pattern in _INSTRUCTIONS.items() if re.search(pattern, ptx)),
        seconds=time.perf_counter() - begin,
        cached=False,
        ptx=ptx,
    )


def _shared(host: str) -> int:
    """The bytes of shared memory that the host function asks for at the launch: one field of the launch's struct."""
    config = (
        r"getelementptr \S+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, !llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64"
    )
    name = re.search(config + r".*\n\s*llvm\.store (%\w+),", host)
    size = name and re.search(rf"{name[1]} = llvm\.mlir\.constant\((\d+) : i64\)", host)
    if not size:
        raise Unsupported("the compiler's host code does not tell the shared memory of the launch as it used to")
    return int(size[1])


def _attributes(cubin: bytes) -> dict[int, int]:
    """The attributes of the one kernel in a piece of machine code, an ELF file: `{attribute: number}`."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = headers[names][4]
    found: dict[int, int] = {}
    for name, _, _, _, offset, length in headers:
        if not cubin.startswith(b".nv.info\0", strings + name):
            continue
        at = offset
        while at < offset + length:
            kind, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if kind == 4:  # a list of `value` bytes follows: here the kernel's symbol and a number
                found[attribute] = struct.unpack_from("<II", cubin, at)[1] if value == 8 else value
                at += value
    return found
