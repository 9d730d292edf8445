"""The statistics of a timing, with a clock of our own."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from common import Mask, Problem, Switches, Target
from harness.environment import Environment
from harness.inputs import InputSpec
from harness.run import Result, Run, RunRequest, timing_tables
from harness.session import Session
from harness.suites import Case, Suite
from harness.timing import (
    ATTEMPTS,
    Attempt,
    CudaStopwatch,
    Launch,
    Round,
    Sample,
    Sensors,
    Timing,
    host_microseconds,
    in_time,
    measure,
    ratio_of_medians,
    throttle_reasons,
)
from harness.trial import Check

from .fakes import FakePort


class FakeStopwatch:
    """A device whose launches take what `ms` says, times a clock that all contestants of a round share, and noise."""

    def __init__(self, ms: dict[str, float], throttles: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.ms, self.throttles = ms, throttles
        self.random = np.random.default_rng(0)
        self.rounds, self.clock, self.order = 0, 1.0, []
        self.late: set[str] = set()

    def prepare(self, launches: Mapping[str, Launch]) -> dict[str, float]:
        return dict.fromkeys(launches, 10.0)

    def time(self, name: str, launch: Launch) -> Sample:
        launch()
        self.order.append(name)
        return Sample(self.ms[name] * self.clock * self.random.normal(1, 0.02), late=name in self.late)

    def sensors(self) -> Sensors:
        self.rounds += 1
        self.clock = self.random.uniform(0.8, 1.2)
        return Sensors(sm_mhz=1500, throttled=("power cap",) if self.rounds in self.throttles else ())


def test_the_same_kernel_twice_is_as_fast_as_itself() -> None:
    times = measure({"a": lambda: 0, "b": lambda: 0}, FakeStopwatch({"a": 1.0, "b": 1.0}), rounds=40)
    ratio = times.speed("a", "b")
    assert ratio.low <= 1 <= ratio.high
    assert ratio.high - ratio.low < 0.2


def test_ten_percent_are_seen() -> None:
    times = measure({"a": lambda: 0, "b": lambda: 0}, FakeStopwatch({"a": 1.0, "b": 1.1}), rounds=60)
    ratio = times.speed("a", "b")
    assert 1 < ratio.low < 1.1 < ratio.high
    assert times.speed("b", "a").high < 1


def test_every_contestant_runs_once_a_round_in_changing_order() -> None:
    stopwatch = FakeStopwatch({"a": 1.0, "b": 1.0, "c": 1.0})
    launched = {"a": 0, "b": 0, "c": 0}

    def launch(name: str) -> Launch:
        return lambda: launched.update({name: launched[name] + 1})

    times = measure({name: launch(name) for name in launched}, stopwatch, rounds=20)
    assert launched == {"a": 23, "b": 23, "c": 23}  # three rounds are warm-up
    measured = [tuple(stopwatch.order[i : i + 3]) for i in range(9, len(stopwatch.order), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in measured)
    assert len(set(measured)) > 2
    assert len(times.rounds) == 20
    assert times.host_us == {"a": 10.0, "b": 10.0, "c": 10.0}


def test_the_order_is_seeded() -> None:
    orders = []
    for _ in range(2):
        stopwatch = FakeStopwatch({"a": 1.0, "b": 1.0})
        measure({"a": lambda: 0, "b": lambda: 0}, stopwatch, rounds=10, seed=3)
        orders.append(stopwatch.order)
    assert orders[0] == orders[1]


def test_a_round_that_throttled_is_marked_and_kept() -> None:
    times = measure({"a": lambda: 0}, FakeStopwatch({"a": 1.0}, throttles={2, 5}), rounds=6)
    assert [r.throttled for r in times.rounds] == [False, True, False, False, True, False]
    assert times.throttled == 2
    assert times.as_record()[1]["sensors"]["throttled"] == ("power cap",)


class SleepingDevice:
    """A device whose launch takes 1 ms; the host takes what `host_us` says, call by call, the last for all others."""

    def __init__(self, *host_us: float) -> None:
        self.host_us, self.sleeps = list(host_us), []

    def attempt(self, sleep_us: float) -> Attempt:
        host_us = self.host_us[min(len(self.sleeps), len(self.host_us) - 1)]
        self.sleeps.append(sleep_us)
        waited = max(0.0, host_us - sleep_us)
        return Attempt(Sample(1.0 + waited / 1000, late=waited > 0), host_us)


def test_a_sample_that_the_host_was_late_for_is_taken_again() -> None:
    device = SleepingDevice(900, 40)
    assert in_time(device.attempt, 100) == Sample(1.0)
    assert device.sleeps == [100, 1800]


def test_a_host_in_time_costs_no_second_launch() -> None:
    device = SleepingDevice(90)
    assert in_time(device.attempt, 100) == Sample(1.0)
    assert device.sleeps == [100]


def test_a_sleep_grows_with_what_the_host_took_until_it_is_long_enough() -> None:
    device = SleepingDevice(300, 700, 1300)
    assert in_time(device.attempt, 100) == Sample(1.0)
    assert device.sleeps == [100, 600, 1400]


def test_a_call_that_is_always_late_is_kept_and_marked() -> None:
    # A launch that waits for the device takes the host as long as the device sleeps, however long that is.
    sleeps = []

    def attempt(sleep_us: float) -> Attempt:
        sleeps.append(sleep_us)
        return Attempt(Sample(1.5, late=True), sleep_us + 500)

    assert in_time(attempt, 100) == Sample(1.5, late=True)
    assert len(sleeps) == ATTEMPTS
    assert sleeps == sorted(sleeps)


def test_late_samples_are_counted_by_contestant_and_recorded() -> None:
    stopwatch = FakeStopwatch({"a": 1.0, "b": 1.0})
    stopwatch.late = {"b"}
    times = measure({"a": lambda: 0, "b": lambda: 0}, stopwatch, rounds=5)
    assert (times.late("a"), times.late("b")) == (0, 5)
    rounds = times.as_record()
    assert [r["late"] for r in rounds] == [["b"]] * 5
    assert Timing.of_record(rounds, times.host_us).late("b") == 5


@pytest.mark.gpu
def test_a_host_that_stalls_now_and_then_is_not_in_the_samples() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(1 << 20, device=device)
    calls = 0

    def stalls() -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            time.sleep(0.002)
        x.add_(1)

    times = measure({"steady": lambda: x.add_(1), "stalls": stalls}, CudaStopwatch(device), rounds=30)
    assert times.late("stalls") == 0
    assert max(times.samples("stalls")) < 1.0
    assert times.median("stalls") < 1.5 * times.median("steady")


@pytest.mark.gpu
def test_a_launch_that_waits_for_the_device_is_marked() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    times = measure({"waits": lambda: torch.cuda.synchronize(device)}, CudaStopwatch(device), rounds=5)
    assert times.late("waits") == 5


def test_rounds_are_paired() -> None:
    # A clock that halves half way: unpaired, the interval of the ratio would span a factor of two.
    slow = [1.0] * 10 + [2.0] * 10
    ratio = ratio_of_medians(slow, slow)
    assert (ratio.value, ratio.low, ratio.high) == (1, 1, 1)


def test_samples_that_are_not_paired_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inhomogeneous|shape"):
        ratio_of_medians([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no rounds"):
        ratio_of_medians([], [])


def test_throttle_bits_have_names_and_settings_are_not_throttling() -> None:
    assert throttle_reasons(0x1 | 0x2 | 0x10 | 0x100) == ()
    assert throttle_reasons(0x4 | 0x40) == ("power cap", "hardware thermal")


def test_host_time_leaves_out_the_first_call_and_the_wait() -> None:
    calls, waits = [], []
    assert host_microseconds(lambda: calls.append(1), lambda: waits.append(1), calls=5) < 1000
    assert (len(calls), len(waits)) == (6, 2)


def a_run(timing: Timing | None, baseline_verdict: str = "pass", untimed: str = "") -> Run:
    problem = Problem(4, 8, 8, 512, 512, 64, mask=Mask.causal())
    case = Case("walk", problem, InputSpec(), "")
    hopper, ada = Target.named("hopper"), Target.named("ada")
    about = (problem, "forward", ada, None, Switches())
    check = Check("fake", *about, "pass", seconds=(2.5, 0.01))  # type: ignore[arg-type]
    baseline = Check("sdpa_flash", *about, baseline_verdict, reason="it has no window")  # type: ignore[arg-type]
    card = Environment(torch.device("cuda", 0), hopper, "NVIDIA H200")
    request = RunRequest(("fake",))
    session = Session(request, card, Suite("walkthrough", "", True, False, (case,)), ada, [FakePort()])
    return Run(request, session, results=[Result(case, check, timing, baseline, untimed)])


def test_a_timing_table_names_the_path_the_backend_and_the_convention() -> None:
    late = ("sdpa_flash",)
    ms = {"fake": 0.05, "sdpa_flash": 0.04}
    rounds = tuple(Round(ms, Sensors(throttled=("power cap",)), late) for _ in range(4))
    (table,) = timing_tables(a_run(Timing(rounds, {"fake": 20.0, "sdpa_flash": 30.0})))
    assert table.title.startswith("fake forward, ada path on NVIDIA H200, beside SDPA flash")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["N"], row["mask"], row["B,H,D"], row["dtype"]) == ("512", "causal", "4,8,64", "bf16")
    assert (row["fake ms"], row["SDPA flash ms"], row["% of SDPA flash"]) == ("0.0500", "0.0400", "80.0")
    flops = 4 * 4 * 8 * 64 * 512 * 513 // 2
    assert row["fake TF/s"] == f"{flops / 0.05 / 1e9:.1f}"
    assert (row["95 %"], row["host µs"], row["first s"], row["next s"]) == ("80.0–80.0", "20", "2.50", "0.01")
    notes = "\n".join(table.notes)
    assert "4 of 4 rounds throttled (power cap)" in notes
    assert "4 of 4 samples of sdpa_flash may hold host time" in notes
    assert "FLOPs: forward 4·B·H·D" in notes
    assert "flash backend forced" in notes


def test_a_baseline_that_cannot_leaves_our_time_alone() -> None:
    rounds = (Round({"fake": 0.05}, Sensors(note="pip install nvidia-ml-py")),)
    (table,) = timing_tables(a_run(Timing(rounds, {"fake": 20.0}), "unsupported"))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["fake ms"], row["SDPA flash ms"], row["% of SDPA flash"]) == ("0.0500", "–", "–")
    assert any("SDPA flash not timed: it has no window" in note for note in table.notes)
    assert "pip install nvidia-ml-py" in table.notes


def test_what_was_not_timed_is_in_no_table() -> None:
    assert timing_tables(a_run(None)) == []
    (table,) = timing_tables(a_run(None, untimed="not timed: OutOfMemoryError"))
    assert "not timed: OutOfMemoryError" in table.notes[0]
