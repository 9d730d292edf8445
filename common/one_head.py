"""What the ports' `torch.autograd.Function`s of one head share: CS336 assignment 2 asks each port for one."""

from __future__ import annotations

from typing import Any

import torch

from .mask import Mask
from .ports import Port
from .problem import Problem


def forward_one_head(
    ctx: Any, port: Port, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    """`o (B, Nq, D)` by `port`, with q, k, v, o and the lse `(B, Nq)` saved in `ctx` for `backward_one_head`.

    q: `(B, Nq, D)`; k, v: `(B, Nk, D)`. is_causal: `Mask.causal()`, which aligns the last query with the last key.
    Raises TypeError/ValueError for other types and shapes, naming the argument.
    """
    problem = Problem.from_tensors(q, k, v, mask=Mask.causal() if is_causal else Mask())
    if q.dim() != 3:
        raise ValueError(f"q must be (B, N, D), got shape {tuple(q.shape)}; common.attention takes heads")
    o, lse = port.forward(q, k, v, problem)
    ctx.port, ctx.problem = port, problem
    ctx.save_for_backward(q, k, v, o, lse)
    return o


def backward_one_head(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of what `forward_one_head` took: dq, dk, dv and None for is_causal."""
    q, k, v, o, lse = ctx.saved_tensors
    return *ctx.port.backward(do, None, q, k, v, o, lse, ctx.problem), None
