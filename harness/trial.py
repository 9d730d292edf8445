"""One port on one set of inputs: launched, watched, and judged by the rule of `checks`.

Beside the numbers a check holds the contract: shape, dtype and device; inputs untouched; nothing read before it was
written and nothing written outside (outputs and scratch are filled with NaN and lie between guard zones, see
`common.GuardedBuffers`, and outputs that do not lie there are a fault); the forward bitwise equal when launched again,
in memory of its own; dk and dv as well, and dq with `deterministic=True`. Before the launch that is compared comes one
on a decoy, other inputs of the same form in other memory, so that a port that keeps inputs or results of its first
launch is wrong in its second. The inputs lie among NaNs, see `harness.inputs`. The backward starts from the port's own
o and lse, with a random do, and with a random dlse in its default form and without one in its deterministic form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from common import Direction, GuardedBuffers, Port, Problem, Switches, Target, Tile, Unsupported

from .baselines import Baseline
from .baselines.protocol import Span
from .checks import NAMES, TensorCheck, Tensors, Truth, compare_all
from .errors import one_line
from .inputs import Inputs, make_decoy

Verdict = Literal["pass", "fail", "unsupported"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Check:
    """The verdict on one port, problem and direction, for the tile, switches and target it was run with.

    direction: or `both`, what `together` makes of the two. tensors: the comparisons. faults: broken promises in words,
    beside the comparisons; empty when it passed. reason: why the port does not support it, or how it raised. tile: None
    when the port has no choice of one, or the directions have one each. seconds: wall time of the first call (a port's
    is the decoy's), compilation included, and of the second.
    """

    port: str
    problem: Problem
    direction: Span
    target: Target
    tile: Tile | None
    switches: Switches
    verdict: Verdict
    tensors: tuple[TensorCheck, ...] = ()
    faults: tuple[str, ...] = ()
    reason: str = ""
    seconds: tuple[float, ...] = ()

    def complaints(self) -> list[str]:
        """What is wrong, one line each; empty for a pass."""
        if self.verdict != "fail":
            return []
        wrong = [t for t in self.tensors if not t.passed]
        lines = [
            f"{t.name}: error {t.error:.3g}, allowed {t.allowed:.3g}; {t.worst.describe(t.name, self.tile)}"
            for t in wrong
            if t.worst is not None
        ]
        return ([self.reason] if self.reason else []) + lines + list(self.faults)


def together(span: Span, checks: Sequence[Check]) -> Check:
    """The check of a launch that covers these directions: it passes when both passed."""
    if len(checks) == 1:
        return checks[0]
    verdicts = [check.verdict for check in checks]
    first = checks[0]
    worst: Verdict = next((v for v in ("fail", "unsupported") if v in verdicts), "pass")
    seconds = zip(*(check.seconds for check in checks), strict=False)
    return replace(
        first,
        direction=span,
        tile=first.tile if all(check.tile == first.tile for check in checks) else None,
        verdict=worst,
        tensors=tuple(t for check in checks for t in check.tensors),
        faults=tuple(fault for check in checks for fault in check.faults),
        reason=next((check.reason for check in checks if check.reason), ""),
        seconds=tuple(sum(both) for both in seconds),
    )


@dataclass(frozen=True)
class _Call:
    """What a launch returned, which promises about memory it broke, its seconds, and the outputs not in the guard."""

    outputs: Tensors
    faults: list[str]
    seconds: float
    unguarded: list[int]


def _call(function: Callable[[], Tensors], inputs: dict[str, torch.Tensor]) -> _Call:
    """Calls a port with poisoned and guarded buffers, and reports what it wrote that it should not have."""
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    device = next(iter(inputs.values())).device
    wait(device)
    start = time.perf_counter()
    with GuardedBuffers() as guard:
        outputs = tuple(function())
        wait(device)
    seconds = time.perf_counter() - start
    faults = guard.faults()
    faults += [f"changed its input {name}" for name, tensor in inputs.items() if not _same_bits(tensor, before[name])]
    unguarded = [i for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and not guard.holds(x)]
    return _Call(outputs, faults, seconds, unguarded)


def wait(device: torch.device) -> None:
    """Blocks until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _ill_formed(names: tuple[str, ...], outputs: Tensors, like: Tensors) -> list[str]:
    """What is wrong with the form of the outputs, so that they cannot be compared."""
    if len(outputs) != len(names):
        return [f"returned {len(outputs)} tensors, not {len(names)}"]
    faults = []
    for name, output, pattern in zip(names, outputs, like, strict=True):
        if not isinstance(output, torch.Tensor):
            faults.append(f"{name} is a {type(output).__name__}, not a tensor")
            continue
        for what in ("shape", "dtype", "device"):
            got, wanted = getattr(output, what), getattr(pattern, what)
            if got != wanted:
                faults.append(f"{name} has {what} {_plain(got)}, not {_plain(wanted)}")
    return faults


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def _not_repeated(names: tuple[str, ...], first: Tensors, second: Tensors, how: str) -> list[str]:
    faults = []
    for name, a, b in zip(names, first, second, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or not _same_bits(a, b):
            faults.append(f"{name} differs when launched again on the same inputs{how}")
        if a.numel() and a.data_ptr() == b.data_ptr():
            faults.append(f"{name} is returned in the memory of an earlier call")
    return faults


@dataclass
class _Runs:
    """The launches of one check: what the compared one and the decoy returned, and what was wrong with any of them.

    ill_formed: some outputs are of a form that cannot be compared, and no launch followed. seconds: of the first two.
    """

    outputs: Tensors = ()
    decoy: Tensors = ()
    faults: list[str] = field(default_factory=list)
    ill_formed: bool = False
    seconds: tuple[float, ...] = ()


class Trial:
    """One port on one problem's inputs: its checks, and then the launches to time, of the very same calls.

    tiles: of a direction; in others the port chooses. Of a baseline only o and its gradients are compared: its memory
    and its lse are its own, and its repeatability is not promised.
    """

    def __init__(
        self,
        port: Port | Baseline,
        problem: Problem,
        inputs: Inputs,
        truth: Truth,
        *,
        target: Target,
        tiles: Mapping[Direction, Tile] = MappingProxyType({}),
        switches: Switches | None = None,
    ) -> None:
        self._port, self._problem, self._inputs, self._truth = port, problem, inputs, truth
        self._target, self._tiles, self._switches = target, tiles, switches or Switches()
        self._forward_check: Check | None = None
        self._saved: Tensors = ()
        self._decoy: Inputs | None = None
        self._decoy_saved: Tensors = ()

    def check(self, direction: Direction) -> Check:
        """The verdict on a direction. Whatever the port raises is a verdict too."""
        if direction == "backward" and self._forward_check is None:
            self.check("forward")
        tile = None
        try:
            reason = self._port.unsupported(self._problem, self._target)
            if reason is not None:
                raise Unsupported(reason)
            if isinstance(self._port, Port):
                own = self._tiles.get(direction)
                tile = self._port.choose_tile(self._problem, self._target, direction, own, self._switches)
            check = self._check_forward(tile) if direction == "forward" else self._check_backward(tile)
        except Unsupported as error:
            check = self._verdict(direction, tile, "unsupported", reason=str(error))
        except Exception as error:  # a port may raise anything, and it costs its own cell only
            if self._is_baseline and isinstance(error, torch.OutOfMemoryError):  # what it takes makes it no wrong one
                check = self._verdict(direction, tile, "unsupported", reason="out of memory")
            else:
                check = self._verdict(direction, tile, "fail", reason=f"raised {one_line(error)}")
        if direction == "forward":
            self._forward_check = check
        return check

    def launch(self, span: Span) -> Callable[[], Tensors]:
        """What a timing launches, within `context`: the calls that were checked. For the backward, runs the forward."""
        if isinstance(self._port, Baseline):
            return self._port.launch(span, self._inputs, self._problem)
        forward = self.calls("forward")
        if span == "forward":
            return forward
        if span == "both":
            return lambda: self.calls("backward", forward())()
        return self.calls("backward", forward())

    def calls(self, direction: Direction, saved: Tensors = (), *, deterministic: bool = False) -> Callable[[], Tensors]:
        """The call of one direction. saved: what the forward returned, for the backward."""
        return self._calls(direction, self._inputs, saved, deterministic=deterministic)

    def context(self) -> AbstractContextManager:
        """What has to be entered around the launches."""
        return self._port.context() if isinstance(self._port, Baseline) else nullcontext()

    def outputs(self, direction: Direction) -> Tensors:
        """What one more launch of the call that was checked returns, in poisoned memory."""
        launch = self.launch(direction)
        with GuardedBuffers():
            return launch()

    def _calls(
        self, direction: Direction, x: Inputs, saved: Tensors = (), *, deterministic: bool = False
    ) -> Callable[[], Tensors]:
        port = self._port
        if isinstance(port, Baseline):

            def call() -> Tensors:
                with port.context():
                    return port.launch(direction, x, self._problem)()

            return call
        if direction == "forward":
            return lambda: port.forward(x.q, x.k, x.v, self._problem, **self._options(direction))
        o, lse = saved
        dlse = x.dlse if self._with_dlse(deterministic) else None
        options = self._options(direction) | {"deterministic": deterministic}
        return lambda: port.backward(x.do, dlse, x.q, x.k, x.v, o, lse, self._problem, **options)

    @property
    def _is_baseline(self) -> bool:
        return isinstance(self._port, Baseline)

    def _names(self, direction: Direction) -> tuple[str, ...]:
        """The tensors that are compared."""
        return ("o",) if self._is_baseline and direction == "forward" else NAMES[direction]

    def _with_dlse(self, deterministic: bool) -> bool:
        return not deterministic and not self._is_baseline

    def _options(self, direction: Direction) -> dict[str, Any]:
        return {"target": self._target, "tile": self._tiles.get(direction), "switches": self._switches}

    def _verdict(self, direction: Direction, tile: Tile | None, verdict: Verdict, **more: object) -> Check:
        about = (self._port.name, self._problem, direction, self._target, tile, self._switches)
        return Check(*about, verdict, **more)  # type: ignore[arg-type]

    def _check_forward(self, tile: Tile | None) -> Check:
        runs = self._launch_all("forward")
        if runs.ill_formed:
            return self._verdict("forward", tile, "fail", faults=tuple(runs.faults), seconds=runs.seconds)
        self._saved, self._decoy_saved = runs.outputs, runs.decoy
        truth = {name: self._truth.forward()[name] for name in self._names("forward")}
        tensors = compare_all(runs.outputs, truth)
        faults = runs.faults + self._unseen_rows("o", runs.outputs[0])
        return self._judge("forward", tile, tensors, faults, runs.seconds)

    def _check_backward(self, tile: Tile | None) -> Check:
        assert self._forward_check is not None
        if self._forward_check.verdict == "unsupported":
            raise Unsupported(self._forward_check.reason)
        if self._forward_check.verdict == "fail":
            return self._verdict("backward", tile, "fail", reason="not run: the forward it starts from failed")
        costs = self._truth.cost_of_delta(self._saved[0])
        faults: list[str] = []
        seconds: list[float] = []
        results: list[tuple[TensorCheck, ...]] = []
        for deterministic in (False,) if self._is_baseline else (False, True):
            runs = self._launch_all("backward", deterministic=deterministic)
            faults += runs.faults
            seconds += runs.seconds
            if runs.ill_formed:
                return self._verdict("backward", tile, "fail", faults=tuple(faults), seconds=tuple(seconds[:2]))
            truth = self._truth.backward(costs, with_dlse=self._with_dlse(deterministic))
            results.append(compare_all(runs.outputs, truth))
            faults += self._unseen_rows("dq", runs.outputs[0])
        tensors = tuple(max(both, key=lambda t: t.ratio) for both in zip(*results, strict=True))
        return self._judge("backward", tile, tensors, faults, tuple(seconds[:2]))

    def _launch_all(self, direction: Direction, *, deterministic: bool = False) -> _Runs:
        """Launches a port on the decoy, on the inputs, and on the inputs again; a baseline on the inputs twice."""
        names, x = self._names(direction), self._inputs
        like = (x.q, x.dlse)[: len(names)] if direction == "forward" else (x.q, x.k, x.v)
        runs = _Runs()

        def call(inputs: Inputs, saved: Tensors) -> _Call:
            read = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
            if direction == "backward":
                read = inputs.named() | dict(zip(self._names("forward"), saved, strict=True))
            called = _call(self._calls(direction, inputs, saved, deterministic=deterministic), read)
            ill_formed = _ill_formed(names, called.outputs, like)
            runs.seconds += (called.seconds,)
            runs.faults += called.faults + ill_formed
            runs.ill_formed |= bool(ill_formed)
            if not self._is_baseline and not ill_formed:
                runs.faults += [f"{names[i]} is not in memory from common.empty" for i in called.unguarded]
            return called

        if not self._is_baseline:
            if self._decoy is None:
                self._decoy = make_decoy(x)
            runs.decoy = call(self._decoy, self._decoy_saved).outputs
        if not runs.ill_formed:
            runs.outputs = call(x, self._saved).outputs
        if not runs.ill_formed:
            again = call(x, self._saved).outputs
            if not self._is_baseline:
                promised = slice(1 if direction == "backward" and not deterministic else 0, None)  # dq only when asked
                how = " with deterministic=True" if deterministic else ""
                runs.faults += _not_repeated(names[promised], runs.outputs[promised], again[promised], how)
        runs.seconds = runs.seconds[:2]
        return runs

    def _unseen_rows(self, name: str, output: torch.Tensor) -> list[str]:
        unseen = self._truth.forward()["lse"].oracle == -math.inf
        return [f"{name} is not 0 in rows that see no key"] if output[unseen].any() else []

    def _judge(
        self,
        direction: Direction,
        tile: Tile | None,
        tensors: tuple[TensorCheck, ...],
        faults: list[str],
        seconds: tuple[float, ...],
    ) -> Check:
        verdict: Verdict = "pass" if not faults and all(t.passed for t in tensors) else "fail"
        unique = tuple(dict.fromkeys(faults))
        return self._verdict(direction, tile, verdict, tensors=tensors, faults=unique, seconds=seconds)
