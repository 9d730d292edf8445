"""`attention()`: what a model calls, with autograd; under `torch.compile` by way of two custom operators."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from .buffers import empty_like
from .errors import check_type
from .mask import Corner, Mask
from .ports import port, unit_stride
from .problem import Problem
from .tile import Switches


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
    impl: str = "triton",
    return_lse: bool = False,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention, `softmax(scale · q kᵀ + mask) v`, by the implementation of that name.

    q: `(B, Hq, Nq, D)`; k, v: `(B, Hkv, Nk, D)` with Hq a multiple of Hkv; or all `(B, N, D)` for one head.
    Any strides; they are taken as they are while the last one is 1. fp16, bf16 or fp32.
    causal: short for `mask=Mask.causal()`, which aligns the last query with the last key.
    scale: default `1/sqrt(D)`.
    impl: one of `port_names()`. It is never replaced by another.
    return_lse: return `(o, lse)`; lse is `(B, Hq, Nq)` in fp32 and differentiable.
    deterministic: make dq bitwise repeatable too; everything else always is.

    fp32 products are IEEE fp32 unless `torch.set_float32_matmul_precision` allows TF32.
    A query that sees no key gives `o = 0`, `lse = -inf` and gradients of 0.

    Raises TypeError/ValueError for wrong arguments before anything is allocated, Unsupported (with the reason) when
    the implementation cannot do it. Source: Dao 2023, "FlashAttention-2".
    """
    for name, flag in (("causal", causal), ("return_lse", return_lse), ("deterministic", deterministic)):
        check_type(name, flag, bool)
    if mask is None:
        mask = _CAUSAL if causal else _FULL
    elif causal:
        raise ValueError("causal=True and mask are two ways to say the same: give one")
    if not torch.compiler.is_compiling() and not any(_is_traced(x) for x in (q, k, v)):
        problem = Problem.from_tensors(q, k, v, mask=mask, scale=scale)
        if _is_differentiated(q, k, v):
            o, lse = _Eager.apply(q, k, v, problem, port(impl), deterministic)
        else:  # autograd's way costs the host as much again
            o, lse = port(impl).forward(q, k, v, problem, switches=_switches(q))
    else:
        if scale is None:
            scale = 1 / math.sqrt(q.shape[-1])
        one_head = q.dim() == 3
        if one_head:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        o, lse = _forward(q, k, v, mask.left, mask.right, mask.corner, scale, impl, deterministic)
        if one_head:
            o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


def _is_traced(tensor: object) -> bool:
    # A fake tensor, or another one that stands for an operator's arguments rather than for memory.
    return isinstance(tensor, torch.Tensor) and type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _is_differentiated(*tensors: torch.Tensor) -> bool:
    # By autograd, forward or backward, or a transform of torch.func; `_Eager` refuses what it does not know.
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


_FULL, _CAUSAL = Mask(), Mask.causal()
_IEEE, _TF32 = Switches(), Switches(tf32=True)


@lru_cache(maxsize=1024)
def _mask(left: int | None, right: int | None, corner: Corner) -> Mask:
    return Mask(left, right, corner)


def _switches(q: torch.Tensor) -> Switches:
    return _TF32 if q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else _IEEE


class _Eager(torch.autograd.Function):
    """The short way: the dispatcher's way through an operator costs the host several times as much."""

    @staticmethod
    def forward(ctx, q, k, v, problem, port, deterministic):  # type: ignore[no-untyped-def]
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)  # the backward takes the same copies
        o, lse = port.forward(q, k, v, problem, switches=_switches(q))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = problem, port, deterministic
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):  # type: ignore[no-untyped-def]
        q, k, v, o, lse = ctx.saved_tensors
        problem, port, deterministic = ctx.options
        if do is None:
            do = torch.zeros_like(o)
        switches = _switches(q)
        grads = port.backward(do, dlse, q, k, v, o, lse, problem, switches=switches, deterministic=deterministic)
        return *grads, None, None, None


@torch.library.custom_op("fa2::forward", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    left: int | None,
    right: int | None,
    corner: str,
    scale: float,
    impl: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = Problem.from_tensors(q, k, v, mask=_mask(left, right, corner), scale=scale)
    return port(impl).forward(q, k, v, problem, switches=_switches(q))


@_forward.register_fake
def _(q, k, v, left, right, corner, scale, impl, deterministic):  # type: ignore[no-untyped-def]
    return empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("fa2::backward", mutates_args=())
def _backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    left: int | None,
    right: int | None,
    corner: str,
    scale: float,
    impl: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    problem = Problem.from_tensors(q, k, v, mask=_mask(left, right, corner), scale=scale)
    return port(impl).backward(do, dlse, q, k, v, o, lse, problem, switches=_switches(q), deterministic=deterministic)


@_backward.register_fake
def _(do, dlse, q, k, v, o, lse, left, right, corner, scale, impl, deterministic):  # type: ignore[no-untyped-def]
    return empty_like(q), empty_like(k), empty_like(v)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx, do, dlse):  # type: ignore[no-untyped-def]
    q, k, v, o, lse = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    dq, dk, dv = _backward(do, dlse, q, k, v, o, lse, *ctx.options)
    return dq, dk, dv, *(None for _ in ctx.options)


_forward.register_autograd(_differentiate, setup_context=_setup_context)
