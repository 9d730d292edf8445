"""Builds Triton kernels for targets that are not here: JSON requests on stdin, JSON answers on stdout.

A process of its own, because on a machine without a GPU the tests' process holds kernels to interpret, which do not
compile; and two processes below it, because compiling is most of the time that its tests take.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import torch

from common import DTYPE_NAMES, Direction, Mask, Problem, Switches, Target, Tile, port

ATOMICS = Tile(64, 64, extra=(("atomics", 1),))
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Request:
    """One build. tile: what `Tile.parse` takes, or None for the one that the port ships.

    edges: without it there is one loop instead of two or three of the same memory, which compiles in half the time.
    """

    target: str
    direction: Direction
    head_dim: int
    tile: dict[str, int] | None = None
    dtype: str = "bf16"
    causal: bool = False
    edges: bool = True
    shape: dict[str, int] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """One head of 256 queries and keys where `shape` does not say otherwise."""
        shape = {"batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 256, "len_k": 256} | self.shape
        mask = Mask.causal() if self.causal else Mask()
        return Problem(**shape, head_dim=self.head_dim, dtype=_DTYPES[self.dtype], mask=mask)

    def __str__(self) -> str:
        tile = "shipped" if self.tile is None else str(Tile.parse(self.tile)).replace(" ", "-")
        return f"{self.target}-{self.direction}-d{self.head_dim}-{self.dtype}-{self.problem.mask}-{tile}"


def build(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels of one request: the fields of `common.Build`, and of the PTX the line that names the target."""
    asked = Request(**request)
    built = port("triton").build(
        asked.problem,
        Target.named(asked.target),
        asked.direction,
        tile=None if asked.tile is None else Tile.parse(asked.tile),
        switches=Switches(edges=asked.edges),
    )
    return [asdict(one) | {"ptx": next(x for x in one.ptx.splitlines() if x.startswith(".target"))} for one in built]


def launch_keys(shapes: list[dict[str, int]]) -> dict[str, list[str]]:
    """What Triton makes of each kernel's arguments when it looks for a kernel already built, for each of the shapes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from triton_impl.build import plan

    backend = make_backend(GPUTarget("cuda", 89, 32))
    keys: dict[str, list[str]] = {}
    for shape in shapes:
        for direction in get_args(Direction):
            problem = Request("ada", direction, 64, causal=True, shape=shape).problem
            launches = plan(problem, Target.named("ada"), direction, Tile(64, 64), Switches())
            if direction == "backward":
                launches += plan(problem, Target.named("ada"), direction, ATOMICS, Switches())[-1:]
            for launch, dtypes in launches:
                bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
                tensors = (torch.empty(16, dtype=dtype) for dtype in dtypes)
                _, specialization, _ = bind(*tensors, *launch.numbers, **launch.constants, num_warps=4)
                keys.setdefault(launch.kernel.__name__, []).append(str(specialization))
    return keys


def main() -> None:
    """Answers `{"builds": requests, "shapes": shapes}`, the builds in the order of the requests."""
    asked = json.load(sys.stdin)
    with ProcessPoolExecutor(2) as pool:
        # The long ones are shipped backwards; begun last, one of them would be waited for alone.
        order = sorted(asked["builds"], key=lambda r: (r["direction"] == "forward", r["tile"] is not None))
        done = pool.map(build, order)
        keys = launch_keys(asked["shapes"])
        by_request = {json.dumps(request): built for request, built in zip(order, done, strict=True)}
    json.dump({"builds": [by_request[json.dumps(one)] for one in asked["builds"]], "keys": keys}, sys.stdout)


if __name__ == "__main__":
    main()
