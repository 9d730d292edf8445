"""How long each kernel of a call takes, by PyTorch's profiler: what the whole call takes is not told by it.

The calls are those that were checked. Each begins with a cold L2, as a timing does; a kernel after the first finds
there what those before it have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd import DeviceType

from common import Direction, Problem, Work

from .errors import one_line
from .jobs import Setting, Stand
from .names import own_name, switches_of
from .suites import Case
from .trial import wait

CALLS = 20
FLUSH_BYTES = 256 << 20  # twice the largest L2 of the targets' cards


@dataclass(frozen=True)
class KernelTimes:
    """ms: of each launch of the direction, by `Work.kernel`, a sample a call. others: ms a call of what else it ran, by
    the device's names. reason: why there are none."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    reason: str = ""


def launches_of(setting: Setting, name: str, problem: Problem, direction: Direction) -> tuple[Work, ...]:
    """What a contestant launches when it is timed: the backward with a gradient of lse, as in `harness.trial`."""
    port, target = setting.open_port(own_name(name)), setting.target_of(name)
    dlse = direction == "backward"
    return port.launches(problem, target, direction, switches=switches_of(name), dlse=dlse)


def kernel_times(setting: Setting, name: str, case: Case, direction: Direction) -> KernelTimes:
    """Profiles a contestant that has passed its check; called in a worker."""
    works = launches_of(setting, name, case.problem, direction)
    device = setting.environment.device
    try:
        with torch.no_grad():
            launch = Stand.of(setting, case).new_trial(name).launch(direction)
            flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
            launch()
            wait(device)
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(CALLS):
                    flush.zero_()
                    launch()
                wait(device)
        on_device = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
        on_device.sort(key=lambda event: event.time_range.start)
        return sorted_out(works, [(event.name, event.time_range.elapsed_us() / 1e3) for event in on_device])
    except Exception as error:  # the profiler may not be allowed to listen
        return KernelTimes(reason=f"the profiler raised {one_line(error)}")


def sorted_out(works: Sequence[Work], events: Sequence[tuple[str, float]]) -> KernelTimes:
    """The times of the launches from what ran on the device, name and ms: calls, each behind a flush.

    The flush is what comes first of what is none of the launches. Where a launch was not seen once in every call there
    are no times, and the reason names it.
    """
    flush = next((name for name, _ in events if match(works, name) is None), None)
    calls: list[list[tuple[str, float]]] = []
    for name, ms in events:
        if name == flush:
            calls.append([])
        elif calls:  # what came before the first flush is of a call that was not seen whole
            calls[-1].append((name, ms))
    if not calls:
        return KernelTimes(reason="the profiler saw no kernels")
    times: dict[str, list[float]] = {work.kernel: [] for work in works}
    others: dict[str, list[float]] = {}
    for call in calls:
        for name, ms in call:
            own = match(works, name)
            (others.setdefault(name, []) if own is None else times[own.kernel]).append(ms)
    lost = [name for name, ms in times.items() if len(ms) != len(calls)]
    if lost:
        seen = ", ".join(dict.fromkeys(name for call in calls for name, _ in call)) or "none"
        return KernelTimes(reason=f"the profiler did not see {', '.join(lost)} once a call; it saw {seen}")
    return KernelTimes(times, {name: sum(ms) / len(calls) for name, ms in others.items()})


def match(works: Sequence[Work], name: str) -> Work | None:
    """The launch whose kernel the device knows by this name."""
    return next((work for work in works if work.kernel in name), None)
