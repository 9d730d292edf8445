"""Compiling a launch before it, into Triton's cache on disk, in a process that need not have a GPU.

Triton compiles a kernel at its first launch, and finds it on disk afterwards only under the very same key. So it is
Triton's own launcher that compiles here, told what it would have asked the driver.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from common import Target

from .launch import Launch, compile_options


@dataclass(frozen=True)
class Code:
    """All that a kernel's code depends on: where the kernel is, the dtypes of its tensors, what kind its numbers are,
    its constants, and whose instructions it is lowered to."""

    module: str
    name: str
    dtypes: tuple[torch.dtype, ...]
    numbers: tuple[int | float, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    target: Target

    @classmethod
    def of(cls, launch: Launch, dtypes: tuple[torch.dtype, ...], target: Target) -> Code:
        """The code of a launch with tensors that start on 16 bytes."""
        # A number's value makes no difference, only how many bits it needs.
        kinds = tuple(1.0 if isinstance(x, float) else 2 if x < 2**31 else 2**31 for x in launch.numbers)
        place = launch.kernel.fn.__module__, launch.kernel.__name__
        return cls(
            *place, dtypes, kinds, tuple(launch.constants.items()), launch.tile.warps, launch.tile.stages, target
        )

    def compile(self, sm: str) -> None:
        """Compiles it for an architecture."""
        native = Target.named(sm)
        kernel = getattr(importlib.import_module(self.module), self.name)
        options = compile_options(self.warps, self.stages, self.target, native)
        with driver_of(native):
            kernel.warmup(*self.dtypes, *self.numbers, grid=(1,), **dict(self.constants), **options)


class _Driver:
    """What Triton's launcher asks a driver before it compiles."""

    def __init__(self, native: Target) -> None:
        self._target = GPUTarget("cuda", native.capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # no real device: the launcher remembers the target by it

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def driver_of(native: Target) -> Iterator[None]:
    """Triton's driver is one for that target."""
    before = driver._active  # `reset_active` would look for a GPU
    driver.set_active(_Driver(native))
    try:
        yield
    finally:
        driver.set_active(before)
