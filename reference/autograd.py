"""The tiled attention as a `torch.autograd.Function`, in the shape that assignment 2 of Stanford's CS336 expects."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from common import Mask, Problem

from .port import ReferencePort

_PORT = ReferencePort()


class FlashAttentionPytorch(torch.autograd.Function):
    """FlashAttention-2 of one head in plain PyTorch: `FlashAttentionPytorch.apply(q, k, v, is_causal=False)`.

    q: `(B, Nq, D)`; k, v: `(B, Nk, D)`; fp32, fp16 or bf16, D a multiple of 8 from 16 to 256. Returns o `(B, Nq, D)`.
    q, k, v, o and the lse are saved for the backward pass, and the lse is the only one of shape `(B, Nq)`.
    is_causal aligns the last query with the last key (`Mask.causal()`, the convention of FlashAttention-2), which is
    the same as aligning the first ones only when Nq = Nk.

    Raises TypeError/ValueError for other types and shapes, naming the argument. Source: Dao 2023.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
        problem = Problem.from_tensors(q, k, v, mask=Mask.causal() if is_causal else Mask())
        if q.dim() != 3:
            raise ValueError(f"q must be (B, N, D), got shape {tuple(q.shape)}; common.attention takes heads")
        o, lse = _PORT.forward(q, k, v, problem)
        ctx.problem = problem
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = _PORT.backward(do, None, q, k, v, o, lse, ctx.problem)
        return dq, dk, dv, None
