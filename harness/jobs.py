"""What a run asks a worker to do: the functions that launch kernels, see `harness.isolation`.

They are given names and plain values and return such, because both cross from one process to another. What several
calls need of one case, its inputs and its truth, is made once and kept until the next case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from typing import ClassVar

import torch

import common
from common import Build, Direction, Port, Problem, Target, Unsupported
from reference import naive_backward, naive_forward

from . import timing
from .baselines import BASELINES, Baseline
from .baselines.protocol import Span
from .checks import Place, Truth, by_segment, distance_to, farthest, index_of
from .environment import Environment
from .errors import one_line
from .inputs import Inputs, InputSpec, make_inputs
from .isolation import Caller, Lost
from .names import own_name, path_name, switches_of, tiles_of
from .provenance import sources_hash
from .suites import Case
from .timing import Contestant, CudaStopwatch, Timing
from .trial import Check, Trial, Verdict, wait

NAIVE = "naive"
PROBE = Problem(batch=1, heads_q=1, heads_kv=1, len_q=16, len_k=16, head_dim=64, dtype=torch.float16)


def open_port(name: str) -> Port:
    """The port of that name, from the registry."""
    return common.port(name)


@dataclass(frozen=True)
class Setting:
    """What all calls of a run share. open_port: gives a port by its name.

    Contestants are named as in `harness.names`.
    """

    environment: Environment
    target: Target
    seed: int = 0
    open_port: Callable[[str], Port] = open_port

    def contestant(self, name: str) -> Port | Baseline:
        """The port or baseline of that name."""
        own = own_name(name)
        return BASELINES[own] if own in BASELINES else self.open_port(own)

    def target_of(self, name: str) -> Target:
        """The target whose code path a contestant takes; a baseline runs as it is."""
        if own_name(name) in BASELINES:
            return self.environment.native
        path = path_name(name)
        return Target.named(path) if path else self.target


class Stand:
    """One case with its inputs and its truth, and the contestant that was tried last."""

    _kept: ClassVar[Stand | None] = None

    def __init__(self, setting: Setting, case: Case) -> None:
        self._setting, self._case = setting, case
        self.inputs: Inputs = make_inputs(
            case.problem, case.inputs, seed=setting.seed, device=setting.environment.device
        )
        self.truth = Truth(case.problem, self.inputs)
        self._tried: tuple[str, Port | Baseline] | None = None
        self._trial: Trial | None = None

    @classmethod
    def of(cls, setting: Setting, case: Case) -> Stand:
        """The stand of the case: the one that was asked for last, when it is that."""
        kept, cls._kept = cls._kept, None  # let go of the old one before the memory for the new one is taken
        if kept is None or (kept._setting, kept._case) != (setting, case):
            del kept
            kept = cls(setting, case)
        cls._kept = kept
        return kept

    @classmethod
    def forget(cls) -> None:
        """Lets go of what is kept, for a call that wants the memory for something else."""
        cls._kept = None

    def trial(self, name: str) -> Trial:
        """A contestant on the case."""
        tried = name, self._setting.contestant(name)
        if self._trial is None or self._tried != tried:
            self._trial = None  # its outputs, before the next one takes memory
            self._tried, self._trial = tried, self.new_trial(name)
        return self._trial

    def new_trial(self, name: str) -> Trial:
        """The same, with outputs of its own."""
        port, target = self._setting.contestant(name), self._setting.target_of(name)
        about = self._case.problem, self.inputs, self.truth
        return Trial(port, *about, target=target, tiles=tiles_of(name), switches=switches_of(name))


@dataclass(frozen=True)
class Opened:
    """What importing a port told: why it could not be, or the hash of its sources and whether it compiles anything."""

    reason: str = ""
    sources: str | None = None
    compiles: bool = False


def open_there(setting: Setting, name: str) -> Opened:
    """Imports a port, for what can be told of it: another process may need no DSL for that."""
    try:
        port = setting.open_port(name)
    except Unsupported as error:
        return Opened(reason=str(error))
    except Exception as error:  # importing a DSL may raise anything
        return Opened(reason=f"the {name} port could not be imported: {one_line(error)}")
    return Opened(sources=sources_hash(port), compiles=port.compiles)


def opened(caller: Caller, setting: Setting, name: str) -> Opened:
    """The same in a process where it may crash."""
    try:
        return caller.call(open_there, setting, name)
    except Lost as lost:
        return Opened(reason=f"the {name} port could not be imported: {lost}")


def probe(setting: Setting, name: str) -> str:
    """Runs one tile, to learn whether a port runs here at all: why it does not, or nothing when it does."""
    x = make_inputs(PROBE, InputSpec(), seed=0, device=setting.environment.device)
    try:
        setting.open_port(name).forward(x.q, x.k, x.v, PROBE, target=setting.target)
    except Unsupported as error:
        return str(error)
    return ""


def absence(name: str) -> str | None:
    """Why a baseline cannot run here, or None; looking imports packages."""
    return BASELINES[name].absence()


def check(setting: Setting, name: str, case: Case, direction: Direction) -> Check:
    """The verdict on a contestant, case and direction."""
    try:
        stand = Stand.of(setting, case)
        stand.truth.of(direction)
    except Exception as error:  # a card that is too small, say
        verdict: Verdict = "unsupported" if isinstance(error, torch.OutOfMemoryError) else "fail"
        reason = f"not checked, the inputs or the oracle raised {one_line(error)}"
        return blank(setting, name, case, direction, verdict, reason)
    return stand.trial(name).check(direction)


def blank(setting: Setting, name: str, case: Case, direction: Direction, verdict: Verdict, reason: str) -> Check:
    """The verdict on what came to no comparison, with the reason."""
    about = name, case.problem, direction, setting.target_of(name), None, switches_of(name)
    return Check(*about, verdict, reason=reason)


@dataclass(frozen=True)
class Disagreement:
    """Two ports' tensors of one name where they are furthest apart, in PyTorch's error (`Yardstick.unit`).

    index: `(b, h, row[, column])`, None of a tensor without elements. values: what the two have there.
    """

    direction: Direction
    tensor: str
    ports: tuple[str, str]
    units: float
    difference: float
    index: Place | None
    values: tuple[float, float]


def disagreements(setting: Setting, names: Sequence[str], case: Case, direction: Direction) -> list[Disagreement]:
    """How far the results of each two contestants are apart, each launched once more."""
    stand = Stand.of(setting, case)
    results = {name: stand.trial(name).outputs(direction) for name in names}
    found = []
    for a, b in combinations(names, 2):
        for (tensor, yardstick), x, y in zip(stand.truth.of(direction).items(), results[a], results[b], strict=True):
            distance = distance_to(x, y.double())
            if not distance.numel():
                found.append(Disagreement(direction, tensor, (a, b), 0.0, 0.0, None, (0.0, 0.0)))
                continue
            errors = by_segment(tensor, distance)
            segment, element = farthest(distance, errors, yardstick.unit)
            difference = float(errors[segment])
            units, values = difference / float(yardstick.unit[segment]), (float(x[element]), float(y[element]))
            place = index_of(tensor, element)
            found.append(Disagreement(direction, tensor, (a, b), units, difference, place, values))
    return found


@dataclass(frozen=True)
class TimedRow:
    """One table row's timing, None when there is none. dropped: who raised before it began, and how. lost: why there is
    none of anybody."""

    timing: Timing | None = None
    dropped: dict[str, str] = field(default_factory=dict)
    lost: str = ""

    def of(self, name: str) -> Timing | None:
        """The timing, if that contestant is in it."""
        return self.timing if self.timing is not None and name in self.timing.host_us else None

    def untimed(self, name: str) -> str:
        """Why a contestant that was to be in it is not; empty when it is."""
        return self.lost or (f"it {self.dropped[name]}" if name in self.dropped else "")


def time_row(setting: Setting, names: Sequence[str], case: Case, span: Span, rounds: int) -> TimedRow:
    """Times contestants that passed their checks against each other, on the inputs of those checks.

    All of them are in memory at once, and one that does not fit beside those before it is dropped.
    """
    stand = Stand.of(setting, case)
    device = setting.environment.device
    contestants: dict[str, Contestant] = {}
    dropped: dict[str, str] = {}
    with torch.no_grad():
        for name in names:
            try:
                contestants[name] = _ready(stand.new_trial(name), span, device)
            except Exception as error:  # out of memory, mostly
                dropped[name] = f"raised {one_line(error)}"
        timed = by_turns(setting, contestants, rounds) if contestants else None
    return TimedRow(timed, dropped)


def by_turns(setting: Setting, contestants: Mapping[str, Contestant], rounds: int) -> Timing:
    """Times contestants against each other, on this process' stopwatch."""
    return timing.measure(contestants, _stopwatch(setting.environment.device), rounds=rounds, seed=setting.seed)


def _ready(trial: Trial, span: Span, device: torch.device) -> Contestant:
    """A contestant that has run once."""
    contestant = Contestant(trial.launch(span), trial.context)
    with contestant.context():
        contestant.launch()
        wait(device)
    return contestant


def first_call(setting: Setting, name: str, case: Case, direction: Direction) -> float:
    """Seconds of a port's first call on a case, which in a new process loads what a cache on disk has."""
    trial = Stand.of(setting, case).new_trial(name)
    saved = () if direction == "forward" else trial.launch("forward")()
    begin = time.perf_counter()
    trial.calls(direction, saved)()
    wait(setting.environment.device)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Refusal:
    """Why nothing was built. by_contract: the port does not do such problems; else the compiler failed."""

    reason: str
    by_contract: bool


def build(setting: Setting, name: str, problem: Problem, target: Target, direction: Direction) -> list[Build] | Refusal:
    """The kernels that a contestant has for a direction, compiled, without their code."""
    port, tile = setting.open_port(own_name(name)), tiles_of(name).get(direction)
    reason = port.unsupported(problem, target)
    if reason is not None:
        return Refusal(reason, by_contract=True)
    try:
        return [replace(one, ptx="") for one in port.build(problem, target, direction, tile=tile)]
    except Unsupported as error:
        return Refusal(str(error), by_contract=False)


@dataclass(frozen=True)
class Footprint:
    """Bytes of PyTorch's allocator that a launch takes at its height, beyond what was there before; or why unknown."""

    bytes: int | None
    reason: str = ""


def footprint(setting: Setting, name: str, case: Case, span: Span) -> Footprint:
    """What one launch of a contestant takes, its second, when libraries have their workspaces; `naive` is one too."""
    device = setting.environment.device
    try:
        with torch.no_grad():
            inputs = Stand.of(setting, case).inputs
            trial = None if name == NAIVE else Stand.of(setting, case).new_trial(name)
            launch = naive_launch(case.problem, inputs, span) if trial is None else trial.launch(span)
            with nullcontext() if trial is None else trial.context():
                launch()
                return Footprint(_height(launch, device))
    except torch.OutOfMemoryError:
        return Footprint(None, "out of memory")
    except Exception as error:
        return Footprint(None, f"raised {one_line(error)}")


def naive_launch(problem: Problem, x: Inputs, span: Span) -> timing.Launch:
    """The plain attention, whole: its backward computes the scores again, so that it covers both directions alone."""
    if span == "forward":
        return lambda: naive_forward(x.q, x.k, x.v, problem)
    return lambda: naive_backward(x.do, None, x.q, x.k, x.v, problem)


def _height(launch: timing.Launch, device: torch.device) -> int:
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = launch()
    wait(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


@lru_cache(maxsize=1)
def _stopwatch(device: torch.device) -> CudaStopwatch:
    return CudaStopwatch(device)
