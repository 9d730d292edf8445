"""How long a launch takes.

All contestants of a table row are timed in one process by turns: in each round, in random order, one launch each after
the L2 cache was flushed, between two device events, while the host is kept ahead so that its time does not leak in: a
sample for which it was late is taken again, and marked when it stays late.
What is shown is the median over the rounds, and the bootstrap 95 % interval of the ratio of medians, resampled by
rounds, because contestants of a round share its clock. Clocks, power and throttle reasons are read beside each round;
a round that throttled stays in and is counted.

Host time per call is taken apart: what the call costs the CPU before it returns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from .errors import one_line

ROUNDS = 40
WARMUP_ROUNDS = 3
HOST_CALLS = 20
ATTEMPTS, SLEEP_GROWTH = 4, 2.0
RESAMPLES = 2000
FLOP_CONVENTION = (
    "FLOPs: forward 4·B·H·D·(visible pairs), backward 2.5 times that; what a kernel recomputes earns no credit. "
    "Medians of device time with a cold L2; 95 % is the bootstrap interval of the ratio."
)

Launch = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    """What is timed: a launch, and what is entered around it, whose time counts neither on the device nor the host."""

    launch: Launch
    context: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Sensors:
    """What the card says of itself: MHz, W, °C, and why its clocks are held down; `note` when it cannot be asked."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Sample:
    """One launch: milliseconds of device time. late: the device had to wait for the host, whose time is in it too."""

    ms: float
    late: bool = False


class Stopwatch(Protocol):
    """The device as `measure` needs it; a test brings its own."""

    def host_us(self, name: str, launch: Launch) -> float:
        """Called once for each contestant, before it is timed: the host time of one call, in microseconds."""

    def time(self, name: str, launch: Launch) -> Sample:
        """Flushes the L2 and launches: the device time of one launch."""

    def sensors(self) -> Sensors:
        """The sensors, now."""


@dataclass(frozen=True)
class Round:
    """Milliseconds by contestant, in the order they ran, the sensors afterwards, and whose sample is `late`."""

    ms: dict[str, float]
    sensors: Sensors
    late: tuple[str, ...] = ()

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

    def cells(self, digits: int, unit: int = 1) -> tuple[str, str]:
        """The cells of a table: the ratio and its interval, with so many digits; unit: 100 for per cent."""
        value, low, high = (f"{unit * x:.{digits}f}" for x in (self.value, self.low, self.high))
        return value, f"{low}–{high}"


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

    def rate(self, name: str, work: float) -> Ratio:
        """Work over the median milliseconds of a contestant: TFLOP/s, when the work is FLOPs / 1e9."""
        return ratio_of_medians([work] * len(self.rounds), self.samples(name))

    def among(self, names: Mapping[str, str]) -> Timing:
        """The same rounds of these contestants only, under the names that they map to."""
        rounds = tuple(
            Round(
                {names[name]: ms for name, ms in r.ms.items() if name in names},
                r.sensors,
                tuple(names[name] for name in r.late if name in names),
            )
            for r in self.rounds
        )
        return Timing(rounds, {names[name]: us for name, us in self.host_us.items() if name in names})

    @property
    def throttled(self) -> int:
        """How many rounds throttled."""
        return sum(r.throttled for r in self.rounds)

    def late(self, name: str) -> int:
        """How many samples of a contestant may hold host time."""
        return sum(name in r.late for r in self.rounds)

    def as_record(self) -> list[dict[str, Any]]:
        """The rounds, fit for JSON."""
        return [{"ms": r.ms, "sensors": asdict(r.sensors), "late": list(r.late)} for r in self.rounds]

    @classmethod
    def of_record(cls, rounds: Sequence[dict[str, Any]], host_us: dict[str, float]) -> Timing:
        """The timing whose rounds `as_record` gave."""
        return cls(tuple(Round(r["ms"], Sensors(**r["sensors"]), tuple(r["late"])) for r in rounds), host_us)


def why_throttled(timings: Iterable[Timing]) -> str:
    """Why rounds of these timings throttled, each reason once."""
    return ", ".join(sorted({reason for timing in timings for r in timing.rounds for reason in r.sensors.throttled}))


def speed_cells(timing: Timing, ours: str, theirs: str | None, flops: int) -> tuple[str, str, str, str, str, str]:
    """The cells of a table row: our ms, their ms, our TFLOP/s, theirs, how fast we are in % of them, and its interval.

    Dashes stand for a contestant that was not timed.
    """
    tera = flops / 1e9  # over milliseconds: TFLOP/s

    def cells(name: str | None) -> tuple[str, str]:
        if name not in timing.rounds[0].ms:
            return "–", "–"
        ms = timing.median(name)
        return f"{ms:.4f}", f"{tera / ms:.1f}"

    (our_ms, our_speed), (their_ms, their_speed) = cells(ours), cells(theirs)
    percent, interval = "–", "–"
    if theirs in timing.rounds[0].ms:
        percent, interval = timing.speed(ours, theirs).cells(1, 100)
    return our_ms, their_ms, our_speed, their_speed, percent, interval


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
    medians = np.median(pairs[:, _draws(seed, rounds, resamples)], axis=-1)  # [2, resamples]
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    above, below = np.median(pairs, axis=-1)
    return Ratio(float(above / below), float(low), float(high))


@lru_cache(maxsize=16)
def _draws(seed: int, rounds: int, resamples: int) -> np.ndarray:
    """Which rounds each resample is made of, `[resamples, rounds]`: the same for every pair of contestants."""
    return np.random.default_rng(seed).integers(rounds, size=(resamples, rounds))


def measure(
    contestants: Mapping[str, Contestant], stopwatch: Stopwatch, *, rounds: int = ROUNDS, seed: int = 0
) -> Timing:
    """Times the contestants, by name, against each other."""
    order = list(contestants)
    shuffle = random.Random(seed)
    host_us = {}
    for name, contestant in contestants.items():
        with contestant.context():
            host_us[name] = stopwatch.host_us(name, contestant.launch)

    def sample(name: str) -> Sample:
        with contestants[name].context():
            return stopwatch.time(name, contestants[name].launch)

    for _ in range(WARMUP_ROUNDS):
        for name in order:
            sample(name)
    measured = []
    for _ in range(rounds):
        shuffle.shuffle(order)
        samples = {name: sample(name) for name in order}
        ms = {name: taken.ms for name, taken in samples.items()}
        late = tuple(name for name, taken in samples.items() if taken.late)
        measured.append(Round(ms, stopwatch.sensors(), late))
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


@dataclass(frozen=True)
class Attempt:
    """One launch behind a sleeping device. host_us: what the host took from the start event to the end event."""

    sample: Sample
    host_us: float


def in_time(attempt: Callable[[float], Attempt], sleep_us: float) -> Sample:
    """The first sample that is not late, of attempts behind longer and longer sleeps; at last one that is.

    A call that sometimes takes the host much longer, as autograd does, so costs another attempt and no wrong sample.
    attempt: launches behind a sleep of so many microseconds.
    """
    for _ in range(ATTEMPTS):
        tried = attempt(sleep_us)
        if not tried.sample.late:
            break
        sleep_us = SLEEP_GROWTH * max(sleep_us, tried.host_us)
    return tried.sample


class CudaStopwatch:
    """Device events on the current stream of a CUDA device.

    Before the start event the device is put to sleep for longer than the host needs to enqueue the launch, so that
    start, launch and end lie back to back on the device. That it still slept when the host was done is not assumed: by
    then the start event must not have happened.
    """

    SLEEP_CYCLES_PER_US = 3000  # no targeted card clocks above 3 GHz, so this sleeps a microsecond at least
    LEAD_US = 30.0  # what recording events and the flush itself may take the host

    def __init__(self, device: torch.device) -> None:
        self._device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(2 * l2_bytes, 32 << 20), dtype=torch.uint8, device=device)
        self._sensors = SensorReader(device)
        self._host_us: dict[str, float] = {}

    def host_us(self, name: str, launch: Launch) -> float:
        """The host time of a call, which says how long the device has to sleep."""
        self._host_us[name] = host_microseconds(launch, self._wait)
        return self._host_us[name]

    def time(self, name: str, launch: Launch) -> Sample:
        """Flushes, sleeps, launches between two events, and waits; again when the host was late."""
        return in_time(lambda sleep_us: self._attempt(launch, sleep_us), 2 * self._host_us[name] + self.LEAD_US)

    def _attempt(self, launch: Launch, sleep_us: float) -> Attempt:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(int(self.SLEEP_CYCLES_PER_US * sleep_us))
        start.record()
        begun = time.perf_counter()
        result = launch()
        end.record()
        late = start.query()
        host_us = (time.perf_counter() - begun) * 1e6
        self._wait()
        del result  # not earlier: the memory is the launch's until it is done
        # To the nanosecond, which is finer than the events' clock, so that records are no longer than what they say.
        return Attempt(Sample(round(start.elapsed_time(end), 6), late), host_us)

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
