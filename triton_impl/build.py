"""Compiling this port's kernels for a target that need not be in the machine, and reading what they take of it."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common import Build, Direction, Problem, Switches, Target, Tile, Unsupported

from .backward import adds_dq, plan_backward
from .forward import plan_forward
from .launch import INTERPRET, Launch

_POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "cp.async": r"\bcp\.async\.c[ag]",
    "ldmatrix": r"\bldmatrix",
}


def plan(
    problem: Problem,
    target: Target,
    direction: Direction,
    tile: Tile,
    switches: Switches,
    has_dlse: bool = False,
    deterministic: bool = False,
) -> list[tuple[Launch, tuple[torch.dtype, ...]]]:
    """The launches of a problem on packed tensors, each with the dtypes of its tensors."""
    q, k = (torch.empty(shape, device="meta").stride() for shape in (problem.q_shape, problem.kv_shape))
    x, lse = problem.dtype, torch.float32
    if direction == "forward":
        return [(plan_forward(problem, target, tile, switches, q, k, k, q), (x, x, x, x, lse))]
    prepare, dkdv, last = plan_backward(
        problem, target, tile, switches, has_dlse, deterministic, q, q, k, k, q, q, k, k
    )
    walk = (x, x, x, x, lse, lse)
    return [
        (prepare, (x, x, lse, lse, lse, lse, lse)),
        (dkdv, (*walk, x, x, lse)),
        (last, (lse, x) if adds_dq(tile, deterministic) else (*walk, x)),
    ]


def build(problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches) -> list[Build]:
    """Compiles the direction's kernels, to machine code. Raises Unsupported with the compiler's reason if it fails."""
    if INTERPRET:
        # An interpreting process holds no kernels that compile.
        return _in_fresh_process(problem, target, direction, tile, switches)
    return [_compile(launch, dtypes, target) for launch, dtypes in plan(problem, target, direction, tile, switches)]


def _compile(launch: Launch, dtypes: tuple[torch.dtype, ...], target: Target) -> Build:
    # As at a launch: pointers start on 16 bytes, and integers are not specialised on (RUN_TIME).
    types = [_POINTERS[dtype] for dtype in dtypes]
    types += ["fp32" if isinstance(x, float) else "i32" if x < 2**31 else "i64" for x in launch.numbers]
    types += ["constexpr"] * len(launch.constants)
    signature = dict(zip(launch.kernel.arg_names, types, strict=True))
    attributes = {(index,): [["tt.divisibility", 16]] for index in range(len(dtypes))}
    source = ASTSource(launch.kernel, signature, dict(launch.constants), attributes)
    cache_hits: list[bool] = []
    begin = time.perf_counter()
    try:
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.listener = lambda *, cache_hit, **_: cache_hits.append(cache_hit)
            compiled = triton.compile(
                source,
                target=GPUTarget("cuda", target.capability, 32),
                options={"num_warps": launch.tile.warps, "num_stages": launch.tile.stages, "enable_fp_fusion": True},
            )
    except Exception as error:  # the compiler raises many kinds
        reason = str(error).strip().splitlines()
        raise Unsupported(f"Triton cannot compile {launch.kernel.__name__} for {target}: {reason[0]}") from error
    seconds = time.perf_counter() - begin
    ptx = compiled.asm["ptx"]
    if re.search(r"^\s*trap;", ptx, re.MULTILINE):  # what Triton makes of a kernel without a word
        raise Unsupported(f"Triton finds no tensor memory for {launch.kernel.__name__}, tile {launch.tile}")
    usage = _resource_usage(compiled.asm["cubin"])
    return Build(
        kernel=launch.kernel.__name__,
        target=target.name,
        tile=launch.tile,
        shared=compiled.metadata.shared,
        registers=usage["REG"],
        spills=usage["LOCAL"] + usage["STACK"],
        instructions=tuple(name for name, pattern in _INSTRUCTIONS.items() if re.search(pattern, ptx)),
        seconds=seconds,
        cached=any(cache_hits),
        ptx=ptx,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}


def _in_fresh_process(*arguments: Any) -> list[Build]:
    root = Path(__file__).resolve().parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "triton_impl.build"],
        input=pickle.dumps(arguments),
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the compiling process failed:\n{done.stderr.decode()}")
    result = pickle.loads(done.stdout)
    if isinstance(result, str):
        raise Unsupported(result)
    return [Build(**fields) for fields in result]


def _serve() -> None:
    arguments = pickle.load(sys.stdin.buffer)
    try:
        result: object = [dataclasses.asdict(one) | {"tile": one.tile} for one in build(*arguments)]
    except Unsupported as reason:
        result = str(reason)
    sys.stdout.buffer.write(pickle.dumps(result))


if __name__ == "__main__":
    _serve()
