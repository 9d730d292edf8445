"""Builds Triton kernels for targets that are not here: JSON requests on stdin, JSON answers on stdout.

A process of its own, because on a machine without a GPU the tests' process holds kernels to interpret, which do not
compile; and two processes below it, because compiling is most of the time that its tests take.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from common import DTYPE_NAMES, Mask, Problem, Target, Tile, port

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MASKS = {"full": Mask(), "causal": Mask.causal()}


def problem_of(request: dict[str, Any]) -> Problem:
    """The problem of a request: one head of 256 queries and keys where it does not say otherwise."""
    shape = {"batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 256, "len_k": 256} | request.get("shape", {})
    return Problem(**shape, head_dim=request["head_dim"], dtype=_DTYPES[request["dtype"]], mask=_MASKS[request["mask"]])


def tile_of(request: dict[str, Any]) -> Tile | None:
    """The tile of a request, or None for the one that the port ships."""
    return None if request["tile"] is None else Tile.parse(request["tile"])


def build(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels of one request: their name, what they take, their matrix instructions and the launch's cache key."""
    target = Target.named(request["target"])
    built = port("triton").build(problem_of(request), target, request["direction"], tile=tile_of(request))
    return [
        {
            "kernel": one.kernel,
            "target": one.target,
            "tile": str(one.tile),
            "shared": one.shared,
            "registers": one.registers,
            "spills": one.spills,
            "instructions": one.instructions,
            "seconds": one.seconds,
            "architecture": next(line for line in one.ptx.splitlines() if line.startswith(".target")),
        }
        for one in built
    ]


def main() -> None:
    """Answers the requests in their order."""
    os.environ.pop("TRITON_INTERPRET", None)
    requests = json.load(sys.stdin)
    with ProcessPoolExecutor(2) as pool:
        json.dump(list(pool.map(build, requests)), sys.stdout)


if __name__ == "__main__":
    main()
