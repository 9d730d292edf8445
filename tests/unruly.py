"""Ports that misbehave on problems with a top-left corner, beyond what an exception tells. A worker finds them here by
name, in its own process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from common import Port, Problem
from reference.port import ReferencePort

Tensors = tuple[torch.Tensor, ...]


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(600)


def leave() -> None:
    os._exit(7)


def poison_the_context() -> None:
    """An index out of range on a GPU: from then on every call of CUDA raises."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(4, device=device)[torch.tensor([99], device=device)]


class Unruly(ReferencePort):
    """The reference, but for what it does first in one direction when the mask's corner is the top-left one."""

    def __init__(self, misbehave: Callable[[], None], direction: str) -> None:
        self._misbehave, self._direction = misbehave, direction

    def _at(self, direction: str, problem: Problem) -> None:
        if direction == self._direction and problem.mask.corner == "top_left":
            self._misbehave()

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, *more: object) -> Tensors:  # type: ignore[override]
        self._at("forward", problem)
        return super()._forward(q, k, v, problem, *more)  # type: ignore[arg-type]

    def _backward(self, *arguments: object) -> Tensors:  # type: ignore[override]
        (problem,) = (x for x in arguments if isinstance(x, Problem))
        self._at("backward", problem)
        return super()._backward(*arguments)  # type: ignore[arg-type]


def segfaults_in_forward(name: str) -> Port:
    return Unruly(segfault, "forward")


def hangs_in_backward(name: str) -> Port:
    return Unruly(hang, "backward")


def leaves_in_backward(name: str) -> Port:
    return Unruly(leave, "backward")


def poisons_in_forward(name: str) -> Port:
    return Unruly(poison_the_context, "forward")


def one_of_two_segfaults(name: str) -> Port:
    port = Unruly(segfault, "forward") if name == "triton" else ReferencePort()
    port.name = name  # type: ignore[misc]
    return port
