"""The tensors a problem is tried on: fresh, seeded, and of the values and layouts that a suite asks for."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from common import Problem

from .errors import one_of

TENSORS = ("q", "k", "v", "do")


@dataclass(frozen=True)
class InputSpec:
    """Which values and layouts the inputs have; the default is N(0, 1), packed `(B, H, N, D)`.

    scale_q, scale_k, scale_v: factors on N(0, 1); 0 makes the tensor zero.
    planted_max: by how much the logit of one key, the last, stands above all others; 0 for no such key.
    layout: of q, k, v and do, one of `LAYOUTS`. layout_do: another one for do.
    row_stride: elements between two rows, for the layout `far_rows`.
    Raises TypeError/ValueError for a value that is not allowed.
    """

    scale_q: float = 1.0
    scale_k: float = 1.0
    scale_v: float = 1.0
    planted_max: float = 0.0
    layout: str = "bhnd"
    layout_do: str | None = None
    row_stride: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("layout", "layout_do"):
                if value not in LAYOUTS and not (field.name == "layout_do" and value is None):
                    raise ValueError(one_of(f"inputs {field.name}", LAYOUTS, str(value)))
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"inputs {field.name} must be a number, got {type(value).__name__}")

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(changed) or "normal"


@dataclass(frozen=True)
class Inputs:
    """q, do `(B, Hq, Nq, D)`, k, v `(B, Hkv, Nk, D)`, dlse `(B, Hq, Nq)` in fp32; or all without the head.

    `spec` and `seed` say how they were made: the same two make the same values on every machine.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor
    spec: InputSpec
    seed: int

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors by their names."""
        return {"q": self.q, "k": self.k, "v": self.v, "do": self.do, "dlse": self.dlse}


def make_inputs(problem: Problem, spec: InputSpec, *, seed: int, device: torch.device) -> Inputs:
    """The inputs of a problem. The values depend on the problem, the spec and the seed, not on the device."""
    tensors: dict[str, Any] = {}
    for name in TENSORS:
        shape = problem.kv_shape if name in ("k", "v") else problem.q_shape
        values = _normal(problem, spec, seed, name, shape) * getattr(spec, f"scale_{name}", 1.0)
        if spec.planted_max and name in ("q", "k"):
            _plant_max(values, name, spec.planted_max / problem.scale)
        layout = spec.layout_do if name == "do" and spec.layout_do else spec.layout
        tensors[name] = LAYOUTS[layout](values.to(problem.dtype).to(device), spec)
    dlse = _normal(problem, spec, seed, "dlse", problem.lse_shape).to(device)
    tensors["dlse"] = dlse.squeeze(1) if spec.layout == "bnd" else dlse
    return Inputs(**tensors, spec=spec, seed=seed)


def _normal(problem: Problem, spec: InputSpec, seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {problem.id} {spec} {name}".encode()))
    return torch.randn(shape, generator=generator)


def _plant_max(values: torch.Tensor, name: str, raw_logit: float) -> None:
    # All queries share their first component and only the last key has it: that key's raw score is `raw_logit` for
    # every query, whatever the rest of them is, and the other scores stay N(0, D).
    common = 4.0
    values[..., 0] = common if name == "q" else 0.0
    if name == "k" and values.shape[-2]:
        values[..., -1, :] = 0.0
        values[..., -1, 0] = raw_logit / common


def _bshd(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _bnd(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    if x.shape[1] != 1:
        raise ValueError(f"inputs layout bnd has one head, the problem has {x.shape[1]}")
    return x.squeeze(1)


def _every_other_batch(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    batch, heads, length, dim = x.shape
    wide = x.new_zeros(length, 2 * batch, heads, dim)[:, ::2]
    return wide.copy_(x.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)


def _last_dim_strided(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    return x.mT.contiguous().mT


def _offset_one(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _expanded_heads(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    return x[:, :1].expand(x.shape)


def _far_rows(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    batch, heads, length, dim = x.shape
    stride = max(spec.row_stride, dim)
    raw = torch.empty(batch * heads * max(length, 1) * stride, dtype=x.dtype, device=x.device)
    return raw.as_strided(x.shape, (heads * length * stride, length * stride, stride, 1)).copy_(x)


# What a user's tensors look like in memory. Each takes a packed (B, H, N, D) tensor and gives its values another way.
LAYOUTS: dict[str, Callable[[torch.Tensor, InputSpec], torch.Tensor]] = {
    "bhnd": lambda x, spec: x,
    "bshd": _bshd,  # (B, N, H, D) seen through transpose(1, 2)
    "bnd": _bnd,  # three-dimensional, one head
    "every_other_batch": _every_other_batch,  # randn(N, 2B, H, D)[:, ::2] seen as (B, H, N, D)
    "last_dim_strided": _last_dim_strided,  # (B, H, D, N) seen through transpose(-1, -2)
    "offset_one": _offset_one,  # starts one element into its storage, so that it is aligned to one element only
    "expanded_heads": _expanded_heads,  # one head that all share by a stride of 0
    "far_rows": _far_rows,  # rows `row_stride` elements apart
}
