"""What a baseline is.

It is checked before it is timed like everything else, but it is not ours: it allocates its own memory, so that nothing
is poisoned, and only its o and its gradients of o are compared, because lse is what most keep to themselves.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

import torch

from common import Direction, Mask, Problem, Target
from common.problem import DTYPE_NAMES

from ..inputs import Inputs

Span = Literal["forward", "backward", "both"]  # what one launch covers; both: the forward and then the backward
Launch = Callable[[], tuple[torch.Tensor, ...]]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

HALVES = (torch.float16, torch.bfloat16)


class Baseline(ABC):
    """Somebody else's attention: a differentiable function of q, k and v.

    name: for options and records. title: for tables. dtypes: those that it takes. package: what has to be importable.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = HALVES
    package: ClassVar[str] = "torch"
    install: ClassVar[str] = ""

    def absence(self) -> str | None:
        """Why it cannot run here at all, and what to do; None when it can. Looking may import packages."""
        if not torch.cuda.is_available():
            return f"{self.title} needs a CUDA device"
        if not is_importable(self.package):
            return f"{self.title} needs {self.package}, which is not installed: {self.install}"
        return None

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        """Why it cannot do the problem here, or None when it can."""
        reason = self.absence()
        if reason is not None:
            return reason
        if problem.dtype not in self.dtypes:
            taken = ", ".join(DTYPE_NAMES[dtype] for dtype in self.dtypes)
            return f"{self.title} takes {taken}; the problem is {DTYPE_NAMES[problem.dtype]}"
        return self.refusal(problem)

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot do the problem anywhere."""
        return None

    def context(self) -> AbstractContextManager:
        """What has to be entered around its launches."""
        return nullcontext()

    @abstractmethod
    def attention(self, problem: Problem, device: torch.device) -> Attend:
        """The function of `q (B, Hq, Nq, D)` and `k, v (B, Hkv, Nk, D)` that gives o; what it needs is made here."""

    def launch(self, span: Span, x: Inputs, problem: Problem) -> Launch:
        """What a timing launches, within `context` and without autograd around it.

        Forward gives `o`, backward `dq, dk, dv` by `autograd.grad` from a forward that is run here, and both gives all
        four. Gradients are taken, never accumulated.
        """
        with self.context():
            attend = self.attention(problem, x.q.device)
            q, k, v, do = (t if t.dim() == 4 else t.unsqueeze(1) for t in (x.q, x.k, x.v, x.do))
            if span == "forward":
                return _of_form(x, lambda: (attend(q, k, v),))
            leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))

            def differentiable() -> torch.Tensor:
                with torch.enable_grad():
                    return attend(*leaves)

            if span == "both":

                def both() -> tuple[torch.Tensor, ...]:
                    o = differentiable()
                    return (o, *torch.autograd.grad(o, leaves, do))

                return _of_form(x, both)
            o = differentiable()
            return _of_form(x, lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))


def _of_form(x: Inputs, launch: Launch) -> Launch:
    """The launch, its results without the head where the inputs leave it out."""
    return launch if x.q.dim() == 4 else lambda: tuple(t.squeeze(1) for t in launch())


def is_importable(package: str) -> bool:
    """Whether the package, of a dotted name, is installed; its parents are imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def causal_only(title: str, problem: Problem) -> str | None:
    """The refusal of those that know causal masks alone, and of the corners those that they compute without NaN."""
    if problem.mask.is_full:
        return None
    if problem.mask.left is not None or problem.mask.right != 0:
        return f"{title} has no window"
    if problem.mask.corner == "top_left" and problem.len_q != problem.len_k:
        return f"{title} has no top-left corner for unequal lengths"
    if problem.len_q > problem.len_k:
        return f"{title} gives NaN for rows that see no key"
    return None


def is_lower_right(problem: Problem) -> bool:
    """Whether the corner matters and is the bottom-right one."""
    return problem.mask != Mask() and problem.len_q != problem.len_k


SPANS: dict[Span, tuple[Direction, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}


def flops_of(problem: Problem, span: Span) -> int:
    """Floating-point operations of a launch, see `Problem.flops`."""
    return sum(problem.flops(direction) for direction in SPANS[span])


def bytes_of(problem: Problem, span: Span) -> int:
    """Bytes that a launch must move, see `Problem.bytes`."""
    return sum(problem.bytes(direction) for direction in SPANS[span])
