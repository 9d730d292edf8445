"""Where every port gets its output and scratch memory from.

Outside a check this is `torch.empty`. Inside `with GuardedBuffers()` each buffer is filled with NaN and lies between
two guard zones, so that a check sees an element that was read or returned before it was written, and a write outside.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import torch


class _State(threading.local):
    guard: GuardedBuffers | None = None


_state = _State()


class Form(NamedTuple):
    """All of a tensor but its values and its place in memory; strides in elements.

    negative: it is a view that stands for the negative of what is in memory (`torch.Tensor.is_neg`).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    negative: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """The form of a strided tensor."""
        return cls(*form_key(tensor))

    @classmethod
    def packed(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Form:
        """The form of a contiguous tensor."""
        return cls(tuple(shape), torch.empty(shape, device="meta").stride(), dtype, device)

    @property
    def dense(self) -> Form:
        """The form that `empty_like` gives for a tensor of this one."""
        return self._replace(strides=_dense(self._on_meta()).stride(), negative=False)

    @property
    def is_contiguous(self) -> bool:
        """What `torch.Tensor.is_contiguous` says of it."""
        return self._on_meta().is_contiguous()

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor of this form: the shortest way to one for a caller that knows the strides."""
        guard = _state.guard
        if guard is None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return guard.allocate(self._on_meta(), self.device)

    def _on_meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def form_key(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]:
    """The fields of a tensor's form, which a look-up on the way of every launch needs no more than."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous tensor."""
    if _state.guard is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return Form.packed(shape, dtype, device).empty()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised dense tensor of the shape, dtype and order of dimensions of `tensor`, its last stride 1.

    So the output for a `(B, N, H, D)` tensor seen through `transpose(1, 2)` is such a view as well. Where the last
    dimension of `tensor` is not its innermost, the result is contiguous.
    """
    return _dense(tensor) if _state.guard is None else Form.of(tensor).dense.empty()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    like = torch.empty_like(tensor)
    if tensor.stride(-1) != 1 or like.stride(-1) != 1:  # the second: rows that overlap have no order to go by
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device)
    return like


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as `empty_like(tensor)` does."""
    copy = tensor.clone()
    return copy if tensor.stride(-1) == 1 == copy.stride(-1) else copy.contiguous()


class GuardedBuffers:
    """A context in which `empty` and `empty_like` hand out poisoned buffers between guard zones (this thread's only).

    `faults()` tells, after the launches, which buffers were written outside; `holds()`, whether a result lies in one.
    """

    GUARD_BYTES = 64 * 1024
    PATTERN = 0xA5

    def __init__(self) -> None:
        self._buffers: list[tuple[str, torch.Tensor, int]] = []
        self._outer: list[GuardedBuffers | None] = []  # one a level: the same guard may be entered again inside itself

    def __enter__(self) -> GuardedBuffers:
        self._outer.append(_state.guard)
        _state.guard = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.guard = self._outer.pop()

    def allocate(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A buffer of the shape, strides and dtype of the meta tensor `like`, poisoned and guarded."""
        size = math.prod(like.shape) * like.dtype.itemsize
        raw = torch.full((size + 2 * self.GUARD_BYTES,), self.PATTERN, dtype=torch.uint8, device=device)
        flat = raw[self.GUARD_BYTES : self.GUARD_BYTES + size].view(like.dtype)
        if like.dtype.is_floating_point:
            flat.fill_(math.nan)
        self._buffers.append((f"{tuple(like.shape)} {like.dtype}", raw, size))
        return flat.as_strided(like.shape, like.stride())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies wholly in one of these buffers; one without elements does."""
        if not tensor.numel():
            return True
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first, last = tensor.data_ptr(), tensor.data_ptr() + span * tensor.dtype.itemsize
        for _, raw, size in self._buffers:
            begin = raw.data_ptr() + self.GUARD_BYTES
            if tensor.device == raw.device and begin <= first and last <= begin + size:
                return True
        return False

    def faults(self) -> list[str]:
        """One line for each buffer that was written outside; empty when none was."""
        found = []
        for name, raw, size in self._buffers:
            for side, zone in (("before", raw[: self.GUARD_BYTES]), ("after", raw[self.GUARD_BYTES + size :])):
                touched = torch.nonzero(zone != self.PATTERN)
                if touched.numel():
                    first, last = int(touched[0]), int(touched[-1])
                    where = self.GUARD_BYTES - 1 - last if side == "before" else first
                    found.append(f"wrote {side} the buffer {name}: {touched.numel()} bytes, nearest {where} bytes away")
        return found
