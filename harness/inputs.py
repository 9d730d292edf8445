"""The tensors a problem is tried on: fresh, seeded, and of the values and layouts that a suite asks for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from common import DTYPE_NAMES, Problem

from .errors import one_of

TENSORS = ("q", "k", "v", "do")
MARGIN_ROWS = 256  # of NaN before and after a tensor: what the largest tile reads past an end
MARGIN_MOST = 2**20  # elements, where rows lie far apart
DECOY_ROW_STRIDE = 4096  # elements
ROW_STRIDE_MAX = 2**31
FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class InputSpec:
    """Which values and layouts the inputs have; the default is N(0, 1), packed `(B, H, N, D)`.

    scale_q, scale_k, scale_v: factors on N(0, 1); 0 makes the tensor zero.
    planted_max: by how much the logit of one key, the last, stands above all others; 0 for no such key.
    layout: of q, k, v and do, one of `LAYOUTS`. layout_do: another one for do.
    row_stride: elements between two rows, for the layout `far_rows`, 0 to 2^31.
    Raises TypeError/ValueError, naming the field, for a value that is not allowed: a layout there is not, a number that
    is not finite in fp32, a negative `planted_max`.
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
                if not (isinstance(value, str) and value in LAYOUTS) and not (
                    field.name == "layout_do" and value is None
                ):
                    raise ValueError(one_of(f"inputs {field.name}", LAYOUTS, str(value)))
            elif field.name == "row_stride":
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"inputs row_stride must be an int, got {type(value).__name__}")
                if not 0 <= value <= ROW_STRIDE_MAX:
                    raise ValueError(f"inputs row_stride must be 0 to {ROW_STRIDE_MAX}, got {value}")
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"inputs {field.name} must be a number, got {type(value).__name__}")
            elif not -FP32_MAX <= value <= FP32_MAX:
                raise ValueError(f"inputs {field.name} must be finite in fp32, got {value}")
        if self.planted_max < 0:
            raise ValueError(f"inputs planted_max must be >= 0, got {self.planted_max}")

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
    """The inputs of a problem. The values depend on the problem, the spec and the seed, not on the device.

    Each lies among NaNs, in the gaps of its layout and before and after it, so that a kernel shows it when it reads
    what is none of its rows, even to multiply it by 0. Raises ValueError when the spec's factors overflow the dtype.
    """
    tensors: dict[str, Any] = {}
    for name in TENSORS:
        shape = problem.kv_shape if name in ("k", "v") else problem.q_shape
        values = _normal(problem, spec, seed, name, shape) * getattr(spec, f"scale_{name}", 1.0)
        if spec.planted_max and name in ("q", "k"):
            _plant_max(values, name, spec.planted_max / problem.scale)
        values = values.to(problem.dtype)
        if not values.isfinite().all():
            raise ValueError(f"inputs {spec} make a {name} that is not finite in {DTYPE_NAMES[problem.dtype]}")
        tensors[name] = _lay_out(name, values.to(device), spec)
    dlse = _normal(problem, spec, seed, "dlse", problem.lse_shape).to(device)
    return Inputs(**tensors, dlse=_lay_out("dlse", dlse, spec), spec=spec, seed=seed)


def make_decoy(inputs: Inputs) -> Inputs:
    """Other values of the same sizes in the same layouts, in memory of their own.

    A port that keeps what it saw first, or what it returned, shows it when it is launched on these before the inputs.
    Every tensor is rolled along its last dimension by another amount, or the scores would stay as they are; dlse is
    negated too, which also changes a single row.
    """
    # Rows 2^24 apart are there for the offsets of the inputs, and their memory is wanted once only.
    spec = replace(inputs.spec, row_stride=min(inputs.spec.row_stride, DECOY_ROW_STRIDE))
    tensors: dict[str, Any] = {}
    for shift, (name, x) in enumerate(inputs.named().items(), start=1):
        values = x.roll(shift, -1) if x.numel() else x
        has_heads = x.dim() == (3 if name == "dlse" else 4)
        tensors[name] = _lay_out(name, values if has_heads else values.unsqueeze(1), spec)
    tensors["dlse"].neg_()
    return Inputs(**tensors, spec=spec, seed=inputs.seed)


def _lay_out(name: str, values: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    if name == "dlse":  # (B, Hq, Nq), always packed
        column = values.unsqueeze(-1)
        dlse = _among_nans(column, _packed(*column.shape)).squeeze(-1)
        return dlse.squeeze(1) if spec.layout == "bnd" else dlse
    layout = spec.layout_do if name == "do" and spec.layout_do else spec.layout
    return LAYOUTS[layout](values, spec)


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


Strides = tuple[int, int, int, int]


def _packed(batch: int, heads: int, length: int, dim: int) -> Strides:
    return heads * length * dim, length * dim, dim, 1


def _among_nans(x: torch.Tensor, strides: Strides, offset: int = 0) -> torch.Tensor:
    """The values of x `(B, H, N, D)` in these strides, NaN between them, and before and after.

    It starts at a multiple of 512 bytes into its storage, and `offset` elements.
    """
    margin = min(MARGIN_ROWS * max(strides[2], x.shape[-1]), MARGIN_MOST)
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) if x.numel() else 0
    storage = torch.full((margin + offset + span + margin,), math.nan, dtype=x.dtype, device=x.device)
    return storage.as_strided(x.shape, strides, margin + offset).copy_(x)


def _bhnd(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    return _among_nans(x, _packed(*x.shape))


def _bshd(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    _, heads, length, dim = x.shape
    return _among_nans(x, (length * heads * dim, dim, heads * dim, 1))


def _bnd(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    if x.shape[1] != 1:
        raise ValueError(f"inputs layout bnd has one head, the problem has {x.shape[1]}")
    return _bhnd(x, spec).squeeze(1)


def _every_other_batch(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    batch, heads, _, dim = x.shape
    return _among_nans(x, (2 * heads * dim, dim, 2 * batch * heads * dim, 1))


def _last_dim_strided(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    _, heads, length, dim = x.shape
    return _among_nans(x, (heads * dim * length, dim * length, 1, length))


def _offset_one(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    return _among_nans(x, _packed(*x.shape), offset=1)


def _expanded_heads(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    return _bhnd(x[:, :1], spec).expand(x.shape)


def _far_rows(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    _, heads, length, dim = x.shape
    stride = max(spec.row_stride, dim)
    return _among_nans(x, (heads * length * stride, length * stride, stride, 1))


# What a user's tensors look like in memory. Each takes a (B, H, N, D) tensor and gives its values another way.
LAYOUTS: dict[str, Callable[[torch.Tensor, InputSpec], torch.Tensor]] = {
    "bhnd": _bhnd,  # packed
    "bshd": _bshd,  # (B, N, H, D) seen through transpose(1, 2)
    "bnd": _bnd,  # three-dimensional, one head
    "every_other_batch": _every_other_batch,  # randn(N, 2B, H, D)[:, ::2] seen as (B, H, N, D)
    "last_dim_strided": _last_dim_strided,  # (B, H, D, N) seen through transpose(-1, -2)
    "offset_one": _offset_one,  # starts one element into its storage, so that it is aligned to one element only
    "expanded_heads": _expanded_heads,  # one head that all share by a stride of 0
    "far_rows": _far_rows,  # rows `row_stride` elements apart
}
