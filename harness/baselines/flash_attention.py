"""The FlashAttention packages of its authors, where they are installed. Their tensors are `(B, N, H, D)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from common import Problem

from .protocol import Attend, Baseline


class _OfTheAuthors(Baseline):
    """What the two packages share: the function, its layout, and windows as a pair of lengths."""

    unbounded: ClassVar[int | None]

    def refusal(self, problem: Problem) -> str | None:
        """Bands are aligned at the bottom right."""
        mask = problem.mask
        if not mask.is_full and mask.corner == "top_left" and problem.len_q != problem.len_k:
            return f"{self.title} has no top-left corner for unequal lengths"
        return None

    def attention(self, problem: Problem, device: torch.device) -> Attend:
        """The public function, on views."""
        function: Callable[..., Any] = importlib.import_module(self.package).flash_attn_func
        mask = problem.mask
        causal = mask.left is None and mask.right == 0
        options: dict[str, Any] = {"softmax_scale": problem.scale, "causal": causal}
        if not causal:
            sides = (self.unbounded if side is None else side for side in (mask.left, mask.right))
            options["window_size"] = tuple(sides)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
            o = result[0] if isinstance(result, tuple) else result  # FlashAttention-4 returns a place for lse as well
            return o.transpose(1, 2)

        return attend


class FlashAttention2(_OfTheAuthors):
    """The package flash-attn, in CUDA C++."""

    name = "flash_attn"
    title = "flash-attn"
    package = "flash_attn.flash_attn_interface"
    install = "pip install flash-attn"
    unbounded = -1


class FlashAttention4(_OfTheAuthors):
    """The package flash-attn-4, in CuTe DSL."""

    name = "fa4"
    title = "FA4"
    package = "flash_attn.cute"
    install = "pip install --pre flash-attn-4"
    unbounded = None
