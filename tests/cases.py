"""Expands `cases.yaml` into concrete cases that run against any port.

An entry's fields: `q`, `k` are the shapes `(B, H, N, D)`; `small` the shapes to use instead where every element is slow
(the Triton interpreter); `dtype` (default: those the caller asks for); `causal`, one corner or `none`, or a list;
`len` and `head_dim` lists that replace N of both and D; `scale_inputs` factors by tensor name; `plant_logit` how far
the last key's logit lies above all others; `layout` how tensors lie in memory, one for all or by name; `refused` the
argument a ValueError must name; `by_hand` a case that the port's tests write out.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from common import DTYPE_NAMES, Mask, Problem

HALVES = (torch.float16, torch.bfloat16)
TENSORS = ("q", "k", "v", "do")
LAYOUTS = ("packed", "bshd", "expanded", "every_second_batch", "last_dim_strided", "offset_one")
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Inputs:
    """q, k, v, and the gradients do of o and dlse (fp32) of lse."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One problem with its inputs. `entry` is the id in the file, `id` unique, `expect` the file's words."""

    id: str
    entry: str
    q_shape: tuple[int, ...]
    kv_shape: tuple[int, ...]
    dtype: torch.dtype
    mask: Mask
    expect: str = "oracle"
    layout: tuple[tuple[str, str], ...] = ()
    factors: tuple[tuple[str, float], ...] = ()
    plant_logit: float | None = None
    refused: str | None = None

    def __str__(self) -> str:
        return self.id

    @property
    def problem(self) -> Problem:
        """Raises ValueError where the case is one that is refused."""
        (batch, heads_q, len_q, head_dim), (_, heads_kv, len_k, _) = self.q_shape, self.kv_shape
        return Problem(batch, heads_q, heads_kv, len_q, len_k, head_dim, self.dtype, self.mask)

    def inputs(self, device: torch.device | str = "cpu", *, seed: int = 0) -> Inputs:
        """Fresh tensors, the same for the same case and seed on every device."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()) + seed)
        values = {}
        for name in TENSORS:
            shape = self.kv_shape if name in "kv" else self.q_shape
            values[name] = torch.randn(shape, generator=generator) * dict(self.factors).get(name, 1)
        if self.plant_logit is not None:
            self._plant(values["q"], values["k"])
        dlse = torch.randn(self.q_shape[:-1], generator=generator).to(device)
        tensors = {n: laid_out(x.to(device, self.dtype), dict(self.layout).get(n, "packed")) for n, x in values.items()}
        return Inputs(**tensors, dlse=dlse)

    def _plant(self, q: torch.Tensor, k: torch.Tensor) -> None:
        # The first coordinate belongs to the last key: it is 8 in every query and 0 in every other key.
        assert self.plant_logit is not None
        scale = 1 / math.sqrt(q.shape[-1])
        q[..., 0], k[..., 0], k[..., -1, :] = 8, 0, 0
        others = float((q @ k.mT).max()) * scale
        k[..., -1, 0] = (others + self.plant_logit) / (8 * scale)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values `(B, H, N, D)`, lying otherwise in memory (`expanded` repeats head 0)."""
    batch, heads, length, head_dim = tensor.shape
    if layout == "packed":
        return tensor.contiguous()
    if layout == "bshd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return tensor[:, :1].contiguous().expand(tensor.shape)
    if layout == "every_second_batch":
        wide = tensor.new_full((length, 2 * batch, heads, head_dim), math.nan)
        return wide[:, ::2].permute(1, 2, 0, 3).copy_(tensor)
    if layout == "last_dim_strided":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "offset_one":
        return tensor.new_full((tensor.numel() + 1,), math.nan)[1:].view(tensor.shape).copy_(tensor)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def load_cases(
    *, small: bool = False, dtypes: Sequence[torch.dtype] = HALVES, only: Sequence[str] | None = None
) -> list[Case]:
    """All concrete cases, in the file's order.

    small: the shapes to use where every element is slow. dtypes: those of the cases that name none.
    only: ids of entries.
    """
    entries = [e for e in _entries() if not e.get("by_hand") and (only is None or e["id"] in only)]
    return [case for entry in entries for case in _expand(entry, small, dtypes)]


def by_hand_ids() -> tuple[str, ...]:
    """The ids of the cases that are no shape but a situation."""
    return tuple(e["id"] for e in _entries() if e.get("by_hand"))


@cache
def _entries() -> list[dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())


def _expand(entry: dict[str, Any], small: bool, dtypes: Sequence[torch.dtype]) -> list[Case]:
    shapes = entry["small"] if small and "small" in entry else entry
    layout = entry.get("layout", {})
    base = Case(
        id="",
        entry=entry["id"],
        q_shape=tuple(shapes["q"]),
        kv_shape=tuple(shapes["k"]),
        dtype=torch.float32,
        mask=Mask(),
        expect=entry["expect"],
        layout=tuple((name, layout) for name in TENSORS) if isinstance(layout, str) else tuple(layout.items()),
        factors=tuple(entry.get("scale_inputs", {}).items()),
        plant_logit=entry.get("plant_logit"),
        refused=entry.get("refused"),
    )
    choices = (
        [_DTYPES[entry["dtype"]]] if "dtype" in entry else dtypes,
        _listed(entry.get("causal", "none")),
        entry.get("len", [None]),
        entry.get("head_dim", [None]),
    )
    cases = []
    for dtype, corner, length, head_dim in itertools.product(*choices):
        q_shape, kv_shape = (_resized(shape, length, head_dim) for shape in (base.q_shape, base.kv_shape))
        mask = Mask() if corner == "none" else Mask.causal(corner)
        varied = [f"n{length}"] * (length is not None) + [f"d{head_dim}"] * (head_dim is not None)
        name = "-".join([base.entry, *varied, DTYPE_NAMES[dtype], str(mask)])
        cases.append(replace(base, id=name, q_shape=q_shape, kv_shape=kv_shape, dtype=dtype, mask=mask))
    return cases


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _resized(shape: tuple[int, ...], length: int | None, head_dim: int | None) -> tuple[int, ...]:
    batch, heads, old_length, old_dim = shape
    return batch, heads, old_length if length is None else length, old_dim if head_dim is None else head_dim
