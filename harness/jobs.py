"""What a run asks a worker to do: the functions that launch kernels, see `harness.isolation`.

They are given names and plain values and return such, because both cross from one process to another. What several
calls need of one case, its inputs and its truth, is made once and kept until the next case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import ClassVar

import torch

import common
from common import Direction, Port, Problem, Switches, Target, Unsupported

from . import timing
from .baselines import BASELINES, Baseline
from .checks import Place, Truth, by_segment, distance_to, farthest, index_of
from .environment import Environment
from .errors import one_line
from .inputs import Inputs, InputSpec, make_inputs
from .suites import Case
from .timing import CudaStopwatch, Timing
from .trial import Check, Trial, Verdict

PROBE = Problem(batch=1, heads_q=1, heads_kv=1, len_q=16, len_k=16, head_dim=64, dtype=torch.float16)


def open_port(name: str) -> Port:
    """The port of that name, from the registry."""
    return common.port(name)


@dataclass(frozen=True)
class Setting:
    """What all calls of a run share. open_port: gives a port by its name."""

    environment: Environment
    target: Target
    seed: int = 0
    open_port: Callable[[str], Port] = open_port

    def contestant(self, name: str) -> Port:
        """The port or baseline of that name."""
        return BASELINES[name] if name in BASELINES else self.open_port(name)


class Stand:
    """One case with its inputs and its truth, and the contestant that was tried last."""

    _kept: ClassVar[Stand | None] = None

    def __init__(self, setting: Setting, case: Case) -> None:
        self._setting, self._case = setting, case
        self.inputs: Inputs = make_inputs(
            case.problem, case.inputs, seed=setting.seed, device=setting.environment.device
        )
        self.truth = Truth(case.problem, self.inputs)
        self._port: Port | None = None
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

    def trial(self, name: str) -> Trial:
        """A contestant on the case, with the run's target; a baseline runs as it is."""
        port = self._setting.contestant(name)
        if self._trial is None or self._port is not port:
            self._trial = None  # its outputs, before the next one takes memory
            is_baseline = isinstance(port, Baseline)
            target = self._setting.environment.native if is_baseline else self._setting.target
            of_case = self._case.problem, self.inputs, self.truth
            self._port, self._trial = port, Trial(port, *of_case, target=target, is_baseline=is_baseline)
        return self._trial


def probe(setting: Setting, name: str) -> str:
    """Runs one tile, to learn whether a port runs here at all: why it does not, or nothing when it does."""
    x = make_inputs(PROBE, InputSpec(), seed=0, device=setting.environment.device)
    try:
        setting.contestant(name).forward(x.q, x.k, x.v, PROBE, target=setting.target)
    except Unsupported as error:
        return str(error)
    return ""


def check(setting: Setting, name: str, case: Case, direction: Direction) -> Check:
    """The verdict on a contestant, case and direction."""
    try:
        stand = Stand.of(setting, case)
        stand.truth.of(direction)
    except Exception as error:  # a card that is too small, say
        verdict: Verdict = "unsupported" if isinstance(error, torch.OutOfMemoryError) else "fail"
        reason = f"not checked, the inputs or the oracle raised {one_line(error)}"
        return Check(name, case.problem, direction, setting.target, None, Switches(), verdict, reason=reason)
    return stand.trial(name).check(direction)


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


def time_row(
    setting: Setting, ports: Sequence[str], baselines: Sequence[str], case: Case, direction: Direction, rounds: int
) -> Timing:
    """Times contestants that passed their checks against each other, on the inputs of those checks."""
    stand = Stand.of(setting, case)
    x = stand.inputs
    launches: dict[str, timing.Launch] = {}
    for name in ports:
        # A trial of its own: all of them are needed at once.
        trial = Trial(setting.contestant(name), case.problem, x, stand.truth, target=setting.target)
        launches[name] = trial.launch(direction)
    with ExitStack() as stack:
        for name in baselines:
            baseline = BASELINES[name]
            stack.enter_context(baseline.context())
            q, k, v, do = (t if t.dim() == 4 else t.unsqueeze(1) for t in (x.q, x.k, x.v, x.do))
            launches[name] = (
                baseline.launch_forward(q, k, v, case.problem)
                if direction == "forward"
                else baseline.launch_backward(do, q, k, v, case.problem)
            )
        with torch.no_grad():
            stopwatch = _stopwatch(setting.environment.device)
            return timing.measure(launches, stopwatch, rounds=rounds, seed=setting.seed)


@lru_cache(maxsize=1)
def _stopwatch(device: torch.device) -> CudaStopwatch:
    return CudaStopwatch(device)
