"""Causal attention by the name of its implementation: what the model of `harness.gpt2` calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import Mask, Problem, attention, port_names
from reference import naive_attention

from .jobs import NAIVE

SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, impl: str) -> torch.Tensor:
    """`o (B, H, N, D)` of `q, k, v (B, H, N, D)`: the plain attention, one of PyTorch's own, or a port's."""
    if impl == NAIVE:
        return naive_attention(q, k, v, _problem(q))
    if impl in SDPA:
        with sdpa_kernel(SDPA[impl]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    o = attention(q, k, v, causal=True, impl=impl)
    assert isinstance(o, torch.Tensor)
    return o


def _problem(q: torch.Tensor) -> Problem:
    batch, heads, length, dim = q.shape
    return Problem(batch, heads, heads, length, length, dim, q.dtype, Mask.causal())


def implementations() -> tuple[str, ...]:
    """The names that `attend` knows."""
    return (NAIVE, *SDPA, *port_names())
