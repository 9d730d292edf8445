"""What each launch of a direction has to do, counted from the problem: operations, exponentials and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .problem import Problem

FMA = "fma"  # the instruction of products that no matrix instruction computes: those of IEEE fp32
# A number in fp32 for each query; shift is the lse as it is subtracted.
ROWS = frozenset({"lse", "dlse", "delta", "shift"})


@dataclass(frozen=True)
class Work:
    """One launch.

    kernel: part of the name that the device knows it by, and of no other launch's of its direction. products: its
    matrix products, each over all visible pairs of a query and a key. instruction: what computes these; empty where
    there are none. reads, writes: tensors, by their names in `Port.backward`, with `dq_sum`, the sum of dq in fp32.
    per_element: operations for each element of q, of a launch without products.
    """

    kernel: str
    products: int
    instruction: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    per_element: int = 0

    def flops(self, problem: Problem) -> int:
        """Floating-point operations: `2·B·Hq·D` a visible pair and product. What is done to scores is not counted."""
        products = self.products * problem.flops("forward") // 2
        return products + self.per_element * math.prod(problem.q_shape)

    def exponentials(self, problem: Problem) -> int:
        """One for each visible pair, where there are products: P is computed once in each walk over tiles."""
        return problem.flops("forward") // (4 * problem.head_dim) if self.products else 0

    def bytes(self, problem: Problem) -> int:
        """Bytes of device memory that must move: each tensor once for reading, and once for writing."""
        return sum(tensor_bytes(problem, name) for name in (*self.reads, *self.writes))


def tensor_bytes(problem: Problem, name: str) -> int:
    """Bytes of the tensor of that name in `Work`, without what a port pads it by."""
    if name in ROWS:
        return math.prod(problem.lse_shape) * 4
    shape = problem.kv_shape if name in ("k", "v", "dk", "dv") else problem.q_shape
    return math.prod(shape) * (4 if name == "dq_sum" else problem.dtype.itemsize)


def forward_work(kernel: str, instruction: str) -> tuple[Work]:
    """The one launch of a forward: S = QKᵀ and PV."""
    return (Work(kernel, 2, instruction, ("q", "k", "v"), ("o", "lse")),)


def backward_work(
    kernels: tuple[str, str, str], instructions: tuple[str, str], *, adds_dq: bool, dlse: bool
) -> tuple[Work, Work, Work]:
    """The three launches of a backward: delta, then dk and dv, then dq.

    kernels: their names. instructions: of the second, and of the third where it has products. adds_dq: the second adds
    up dq as well, five products, and the third only rounds it; else the third computes S and dP again, for three
    products beside the four of the second. dlse: the gradient of lse is given.
    """
    prepare, dkdv, last = kernels
    extra, dq_sum = ("dlse",) if dlse else (), ("dq_sum",) if adds_dq else ()
    walk = "do", "q", "k", "v", "delta", "shift"
    # Where dq is added up, the sums are set to zero by the first launch.
    first = Work(prepare, 0, "", ("do", "o", "lse", *extra), ("delta", "shift", *dq_sum), per_element=2)
    second = Work(dkdv, 5 if adds_dq else 4, instructions[0], (*walk, *dq_sum), ("dk", "dv", *dq_sum))
    if adds_dq:
        return first, second, Work(last, 0, "", dq_sum, ("dq",), per_element=1)
    return first, second, Work(last, 3, instructions[1], walk, ("dq",))
