"""Where a run happens: on a GPU, or on the CPU with Triton's interpreter."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from common import Target, Unsupported

from .errors import UsageError

INTERPRET = "TRITON_INTERPRET"


def core_count() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Environment:
    """device: where the tensors lie. native: the device's own target; where there is no GPU, the one whose path the
    interpreter walks. card: the device in words."""

    device: torch.device
    native: Target
    card: str

    @property
    def has_gpu(self) -> bool:
        """Whether anything here has a speed."""
        return self.device.type == "cuda"

    def target(self, name: str) -> Target:
        """The target of a `--target`. Raises UsageError for an unknown one, or one whose code cannot run on the card.

        Code for Ada (sm_89) runs on every later card; that for an sm with an `a` runs on that chip only.
        """
        if name == "native":
            return self.native
        try:
            target = Target.named(name)
        except ValueError as error:
            raise UsageError(str(error).replace("one of ", "one of native, ")) from error
        runs = target.runs_on(self.native)
        if self.has_gpu and not runs:
            raise UsageError(f"code for {target} does not run on {self.card}, which is {self.native}")
        return target

    def path(self, target: Target) -> str:
        """What every title says: whose code path ran where."""
        if not self.has_gpu:
            return path_title(target.name, own=False, where="the CPU")
        return path_title(target.name, own=target == self.native, where=self.card)


def path_title(target: str, *, own: bool, where: str) -> str:
    """The card (or the CPU) alone when the target is its own, else whose path runs on it."""
    return where if own else f"{target} path on {where}"


def prepare() -> Environment:
    """Chooses the device, and turns on Triton's interpreter where there is no GPU or TRITON_INTERPRET=1 asks for it.

    Has to come before triton is imported, which some corners of torch do as well, because Triton decides what a kernel
    is when the kernel is defined. Raises UsageError when that is too late, or the GPU is none of the targets.
    """
    interpreted = os.environ.get(INTERPRET, "0").lower() in ("1", "true", "yes", "on")
    if torch.cuda.is_available() and not interpreted:
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            return Environment(device, Target.detect(device), torch.cuda.get_device_name(device))
        except Unsupported as error:
            raise UsageError(f"{error}; with {INTERPRET}=1 everything runs on the CPU") from error
    if not interpreted:
        if sys.modules.get("triton") is not None:
            raise UsageError(f"triton was imported before its interpreter could be turned on: set {INTERPRET}=1")
        os.environ[INTERPRET] = "1"
    return CPU


CPU = Environment(torch.device("cpu"), Target.named("ada"), "the CPU")
