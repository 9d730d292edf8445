"""How long a launch takes.

All contestants of a table row are timed in one process by turns: in each round, in random order, one launch each after
the L2 cache was flushed, between two device events, while the host is kept ahead so that its time does not leak in.
What is shown is the median over the rounds, and the bootstrap 95 % interval of the ratio of medians, resampled by
rounds, because contestants of a round share its clock. Clocks, power and throttle reasons are read beside each round;
a round that throttled stays in and is counted.

Host time per call is taken apart: what the call costs the CPU before it returns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from .errors import one_line

ROUNDS = 40
WARMUP_ROUNDS = 3
HOST_CALLS = 20
RESAMPLES = 2000
FLOP_CONVENTION = (
    "FLOPs: forward 4·B·H·D·(visible pairs), backward 2.5 times that; what a kernel recomputes earns no credit. "
    "Medians of device time with a cold L2; 95 % is the bootstrap interval of the ratio."
)

Launch = Callable[[], object]


@dataclass(frozen=True)
class Sensors:
    """What the card says of itself: MHz, W, °C, and why its clocks are held down; `note` when it cannot be asked."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] = ()
    note: str = ""


class Stopwatch(Protocol):
    """The device as `measure` needs it; a test brings its own."""

    def prepare(self, launches: Mapping[str, Launch]) -> dict[str, float]:
        """Called once, before the warm-up: the host time per call of each contestant, in microseconds."""

    def time_ms(self, name: str, launch: Launch) -> float:
        """Flushes the L2 and launches once: milliseconds of device time."""

    def sensors(self) -> Sensors:
        """The sensors, now."""


@dataclass(frozen=True)
class Round:
    """Milliseconds by contestant, in the order they ran, and the sensors afterwards."""

    ms: dict[str, float]
    sensors: Sensors

    @property
    def throttled(self) -> bool:
        """Whether the card held its clocks down."""
        return bool(self.sensors.throttled)


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and the bounds of its bootstrap 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """All rounds of one table row. host_us: microseconds of host time per call, by contestant."""

    rounds: tuple[Round, ...]
    host_us: dict[str, float]

    def samples(self, name: str) -> list[float]:
        """The milliseconds of a contestant, by rounds."""
        return [r.ms[name] for r in self.rounds]

    def median(self, name: str) -> float:
        """The median milliseconds of a contestant."""
        return float(np.median(self.samples(name)))

    def speed(self, name: str, baseline: str, *, seed: int = 0) -> Ratio:
        """How fast a contestant is beside the baseline: median(baseline) / median(contestant), 1 for as fast."""
        return ratio_of_medians(self.samples(baseline), self.samples(name), seed=seed)

    @property
    def throttled(self) -> int:
        """How many rounds throttled."""
        return sum(r.throttled for r in self.rounds)

    def as_record(self) -> list[dict[str, Any]]:
        """The rounds, fit for JSON."""
        return [{"ms": r.ms, "sensors": asdict(r.sensors)} for r in self.rounds]


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Ratio:
    """median(numerator) / median(denominator), with the percentile bootstrap over pairs of the same round.

    Raises ValueError when the samples are none or not paired. Source: Efron and Tibshirani 1993, chapter 13.
    """
    pairs = np.array([numerator, denominator], dtype=float)  # ragged samples raise ValueError here
    rounds = pairs.shape[-1]
    if rounds == 0:
        raise ValueError("no rounds to compare")
    drawn = np.random.default_rng(seed).integers(rounds, size=(resamples, rounds))
    medians = np.median(pairs[:, drawn], axis=-1)  # [2, resamples]
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    above, below = np.median(pairs, axis=-1)
    return Ratio(float(above / below), float(low), float(high))


def measure(launches: Mapping[str, Launch], stopwatch: Stopwatch, *, rounds: int = ROUNDS, seed: int = 0) -> Timing:
    """Times the contestants, by name, against each other."""
    order = list(launches)
    shuffle = random.Random(seed)
    host_us = stopwatch.prepare(launches)
    for _ in range(WARMUP_ROUNDS):
        for name in order:
            stopwatch.time_ms(name, launches[name])
    measured = []
    for _ in range(rounds):
        shuffle.shuffle(order)
        ms = {name: stopwatch.time_ms(name, launches[name]) for name in order}
        measured.append(Round(ms, stopwatch.sensors()))
    return Timing(tuple(measured), host_us)


def host_microseconds(launch: Launch, wait: Callable[[], object], *, calls: int = HOST_CALLS) -> float:
    """The median host time of a call that is not waited for, in microseconds. wait: blocks until the device is idle."""
    launch()
    wait()
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        launch()
        taken.append(time.perf_counter() - start)
    wait()
    return float(np.median(taken)) * 1e6


class CudaStopwatch:
    """Device events on the current stream of a CUDA device.

    Before the start event the device is put to sleep for longer than the host needs to enqueue the launch, so that
    start, launch and end lie back to back on the device.
    """

    SLEEP_CYCLES_PER_US = 3000  # no targeted card clocks above 3 GHz, so this sleeps a microsecond at least
    LEAD_US = 30.0  # what recording events and the flush itself may take the host

    def __init__(self, device: torch.device) -> None:
        self._device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(2 * l2_bytes, 32 << 20), dtype=torch.uint8, device=device)
        self._sensors = SensorReader(device)
        self._host_us: dict[str, float] = {}

    def prepare(self, launches: Mapping[str, Launch]) -> dict[str, float]:
        """Takes the host time of each contestant, which says how long the device has to sleep."""
        self._host_us = {name: host_microseconds(launch, self._wait) for name, launch in launches.items()}
        return self._host_us

    def time_ms(self, name: str, launch: Launch) -> float:
        """Flushes, sleeps, launches between two events, and waits."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(int(self.SLEEP_CYCLES_PER_US * (2 * self._host_us[name] + self.LEAD_US)))
        start.record()
        result = launch()
        end.record()
        self._wait()
        del result  # not earlier: the memory is the launch's until it is done
        return start.elapsed_time(end)

    def sensors(self) -> Sensors:
        """The sensors, now."""
        return self._sensors.read()

    def _wait(self) -> None:
        torch.cuda.synchronize(self._device)


class SensorReader:
    """Reads a card's sensors through NVML (the package nvidia-ml-py), and says so when it cannot."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self.note = ""
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml
        except ImportError:
            self.note = "clocks, power and throttling were not read: pip install nvidia-ml-py"
        except Exception as error:  # NVML refuses in containers and on MIG slices, and a timing is none the worse
            self.note = f"clocks, power and throttling could not be read: {one_line(error)}"

    def read(self) -> Sensors:
        """One reading. A sensor that the card does not have is None."""
        nvml = self._nvml
        if nvml is None:
            return Sensors(note=self.note)

        def ask(function: str, *arguments: object) -> Any:
            try:
                return getattr(nvml, function)(self._handle, *arguments)
            except Exception:  # not supported by this card or driver
                return None

        power = ask("nvmlDeviceGetPowerUsage")
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return Sensors(
            sm_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            power_w=None if power is None else power / 1000,
            temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            throttled=throttle_reasons(reasons),
        )


# nvmlClocksThrottleReasons in nvml.h: those that hold the clock below what was asked for. Idle (0x1), application
# clocks (0x2), sync boost (0x10) and display clocks (0x100) are settings, not throttling.
THROTTLE_BITS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names of the throttle reasons in an NVML bit mask."""
    return tuple(name for bit, name in THROTTLE_BITS.items() if mask & bit)
