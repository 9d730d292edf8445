"""The chips a kernel is compiled for: their budgets, and the datasheet figures of the cards that carry them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import Unsupported


@dataclass(frozen=True)
class Card:
    """A card by its datasheet: `sms` multiprocessors, dense bf16 TFLOP/s with fp32 accumulation, GB/s, MB of L2."""

    name: str
    sms: int
    dense_tflops: float
    bandwidth_gbs: float
    l2_mb: int


@dataclass(frozen=True)
class Target:
    """A compute capability and its budgets (CUDA C++ Programming Guide, "Compute Capabilities").

    name: `ada`, `hopper`, `geforce_blackwell` or `blackwell`.
    sm: what the compiler is asked for, e.g. `sm_90a`.
    smem_per_block, smem_per_sm: bytes of shared memory one block may take, and one multiprocessor has.
    registers_per_sm: 32-bit registers of one multiprocessor.
    warps_per_sm: warps resident at most.
    instruction: the matrix instruction that the kernels for it use.
    """

    name: str
    sm: str
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int
    warps_per_sm: int
    instruction: str
    cards: tuple[Card, ...]

    @property
    def capability(self) -> int:
        """89, 90, 100 or 120."""
        return int(self.sm.removeprefix("sm_").removesuffix("a"))

    def runs_on(self, native: Target) -> bool:
        """Whether a card of that target can run this one's code path: its own, or Ada's on any later card."""
        return self == native or (self.name == "ada" and native.capability > self.capability)

    def __str__(self) -> str:
        return f"{self.name} ({self.sm})"

    def __hash__(self) -> int:
        return hash(self.name)  # asked for at every launch

    @classmethod
    def named(cls, name: str) -> Target:
        """The target of that name or `sm_…`. Raises ValueError, with the names there are, for another."""
        for target in TARGETS:
            if name in (target.name, target.sm):
                return target
        raise ValueError(f"target must be one of {', '.join(t.name for t in TARGETS)}, got {name!r}")

    @classmethod
    def detect(cls, device: torch.device | int | None = None) -> Target:
        """The target of a CUDA device (default: the current one).

        Raises Unsupported when there is no CUDA device or its compute capability is none of the targets'.
        """
        if not torch.cuda.is_available():
            raise Unsupported("there is no CUDA device on this machine")
        major, minor = torch.cuda.get_device_capability(device)
        by_capability = {(8, 9): ADA, (9, 0): HOPPER, (10, 0): BLACKWELL, (12, 0): GEFORCE_BLACKWELL}
        if (major, minor) not in by_capability:
            raise Unsupported(
                f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}; "
                f"the targets are {', '.join(str(t) for t in TARGETS)}"
            )
        return by_capability[major, minor]


ADA = Target(
    name="ada",
    sm="sm_89",
    smem_per_block=101_376,
    smem_per_sm=102_400,
    registers_per_sm=65_536,
    warps_per_sm=48,
    instruction="mma.sync",
    cards=(
        Card("NVIDIA GeForce RTX 4070 SUPER", sms=56, dense_tflops=71.0, bandwidth_gbs=504, l2_mb=48),
        Card("NVIDIA GeForce RTX 4090", sms=128, dense_tflops=165.2, bandwidth_gbs=1008, l2_mb=72),
    ),
)
HOPPER = Target(
    name="hopper",
    sm="sm_90a",
    smem_per_block=232_448,
    smem_per_sm=233_472,
    registers_per_sm=65_536,
    warps_per_sm=64,
    instruction="wgmma",
    cards=(
        Card("NVIDIA H100 80GB HBM3", sms=132, dense_tflops=989.4, bandwidth_gbs=3350, l2_mb=50),
        Card("NVIDIA H200", sms=132, dense_tflops=989.4, bandwidth_gbs=4800, l2_mb=50),
    ),
)
GEFORCE_BLACKWELL = Target(
    name="geforce_blackwell",
    sm="sm_120a",
    smem_per_block=101_376,
    smem_per_sm=102_400,
    registers_per_sm=65_536,
    warps_per_sm=48,
    instruction="mma.sync",
    cards=(
        Card("NVIDIA GeForce RTX 5080", sms=84, dense_tflops=112.6, bandwidth_gbs=960, l2_mb=64),
        Card("NVIDIA GeForce RTX 5090", sms=170, dense_tflops=209.5, bandwidth_gbs=1792, l2_mb=96),
    ),
)
BLACKWELL = Target(
    name="blackwell",
    sm="sm_100a",
    smem_per_block=232_448,
    smem_per_sm=233_472,
    registers_per_sm=65_536,
    warps_per_sm=64,
    instruction="tcgen05",
    cards=(Card("NVIDIA B200", sms=148, dense_tflops=2250.0, bandwidth_gbs=8000, l2_mb=126),),
)
TARGETS = (ADA, HOPPER, GEFORCE_BLACKWELL, BLACKWELL)
