"""The CuTe DSL port as a `torch.autograd.Function`, in the shape that assignment 2 of Stanford's CS336 expects."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from common import port
from common.one_head import backward_one_head, forward_one_head


class FlashAttentionCute(torch.autograd.Function):
    """FlashAttention-2 of one head in CuTe DSL: `FlashAttentionCute.apply(q, k, v, is_causal=False)`.

    q: `(B, Nq, D)`; k, v: `(B, Nk, D)`; fp16 or bf16, D a multiple of 8 from 16 to 256. Returns o `(B, Nq, D)`.
    q, k, v, o and the lse are saved for the backward pass, and the lse is the only one of shape `(B, Nq)`.
    is_causal aligns the last query with the last key (`Mask.causal()`, the convention of FlashAttention-2), which is
    the same as aligning the first ones only when Nq = Nk.

    Raises TypeError/ValueError for other types and shapes, naming the argument. Source: Dao 2023.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
        return forward_one_head(ctx, port("cute"), q, k, v, is_causal)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return backward_one_head(ctx, do)
