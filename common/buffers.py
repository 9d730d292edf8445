"""Where every port gets its output and scratch memory from.

Outside a check this is `torch.empty`. Inside `with GuardedBuffers()` each buffer is filled with NaN and lies between
two guard zones, so that a check sees an element that was read or returned before it was written, and a write outside.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import TracebackType

import torch


class _State(threading.local):
    guard: GuardedBuffers | None = None


_state = _State()


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous tensor."""
    guard = _state.guard
    if guard is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return guard.allocate(torch.empty(shape, dtype=dtype, device="meta"), device)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised dense tensor of the shape, dtype and order of dimensions of `tensor`, its last stride 1.

    So the output for a `(B, N, H, D)` tensor seen through `transpose(1, 2)` is such a view as well. Where the last
    dimension of `tensor` is not its innermost, the result is contiguous.
    """
    guard = _state.guard
    # A device, even the tensor's own, makes the call three times as long.
    like = torch.empty_like(tensor) if guard is None else torch.empty_like(tensor, device="meta")
    if tensor.stride(-1) != 1 or like.stride(-1) != 1:  # the second: rows that overlap have no order to go by
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device)
    return like if guard is None else guard.allocate(like, tensor.device)


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
