"""What the three languages share: the check of their tensors, and the way into PyTorch's autograd."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class WeightedSum(torch.autograd.Function):
    """`WeightedSum.apply(x, weight, language)` is `x @ weight`, differentiable once.

    x: `(M, D)`; weight: `(D,)`; fp16, bf16 or fp32. language: the module whose `forward` and `backward` compute it,
    `triton_primer`, `tilelang_primer` or `cute_primer`. Returns y `(M,)`. Raises what `checked` does.
    Source: the weighted sum that Stanford's CS336 begins its assignment on FlashAttention-2 with.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, language: ModuleType) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.language = language
        return language.forward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *ctx.language.backward(dy, *ctx.saved_tensors), None


def checked(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor | None = None, *, interpreted: bool | None = None
) -> tuple[torch.Tensor, ...]:
    """`x (M, D)`, `weight (D,)` and, where it is given, `dy (M,)` as kernels read them: packed, from 16 bytes on.

    A tensor that lies otherwise is copied; one that autograd watches is detached, for the languages refuse it.
    Raises TypeError for another dtype than fp16, bf16 and fp32, or than that of x; ValueError for another shape, an x
    without elements, another device than that of x, or one that is not CUDA's, unless kernels are interpreted.
    interpreted: whether they are; None where the language has no interpreter.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    if x.dim() != 2 or not x.numel():
        raise ValueError(f"x must be (M, D) with at least one element, got shape {tuple(x.shape)}")
    others = [("weight", weight, x.shape[1])] + ([] if dy is None else [("dy", dy, x.shape[0])])
    for name, tensor, length in others:
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")
        if tensor.shape != (length,):
            raise ValueError(f"{name} must have the shape {(length,)}, got {tuple(tensor.shape)}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    if x.device.type != "cuda" and not interpreted:
        how = "" if interpreted is None else "; on the CPU: TRITON_INTERPRET=1 in the environment before Python starts"
        raise ValueError(f"x must be on a CUDA device, got {x.device}{how}")
    return tuple(_packed(tensor) for tensor in (x, *(tensor for _, tensor, _ in others)))


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    # A dimension of one element may still have any stride, which a kernel that was promised packed rows would refuse.
    tensor = tensor.as_strided(tensor.shape, (tensor.shape[-1], 1)[-tensor.dim() :])
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
