"""When a result counts as right.

Inputs are fresh and seeded. The truth is computed in float64 from the same rounded inputs. With

    error   = max |x - truth|
    allowed = 2 · min(naive, |truth|max / 32) + floor

a tensor passes when error <= allowed, where

- `naive` is the error of the plain PyTorch attention in the dtype of the tensor: the input's for o, dq, dk, dv, and
  fp32 for lse. It counts for a 32nd of the largest truth at most, also where it is not finite, so that an input that
  breaks the plain attention (scores past fp16, logits past what bf16 resolves) excuses nobody else.
- `floor` is the rounding that no FlashAttention avoids, however lucky the plain attention was. For lse: 4 units of
  fp32, which is what scores summed in fp32 carry, and what p = exp(s - lse) inherits as a relative error. For o: half
  a unit in the last place of the largest truth, and that relative error. For dq, dk, dv: half a unit of the result and
  half a unit of p or ds, which are rounded for the product; that relative error; and twice what it costs, computed in
  float64, that delta = rowsum(do · o) reads the o that the forward rounded (and that passed), and is summed in fp32.

An infinite truth (lse of a row that sees no key) must be met exactly, and such a row's o and dq must be exactly 0. A
NaN never passes, and neither does infinity where the truth is finite.

Beside the numbers a check holds the contract: shape, dtype and device; inputs untouched; nothing read before it was
written and nothing written outside (outputs and scratch are filled with NaN and lie between guard zones, see
`common.GuardedBuffers`); the forward bitwise equal when launched again, in memory of its own; dk and dv as well, and
dq with `deterministic=True`. The backward starts from the port's own o and lse, with a random do, and with a random
dlse in its default form and without one in its deterministic form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from common import Direction, GuardedBuffers, Port, Problem, Switches, Target, Tile, Unsupported
from reference import naive_backward, naive_forward, oracle_backward, oracle_forward

from .errors import one_line
from .inputs import Inputs

NAIVE_FACTOR = 2
NAIVE_CAP = 1 / 32  # of the largest |truth|
LSE_FLOOR_ULPS = 4
FP32_EPS = torch.finfo(torch.float32).eps
NAIVE_SCORES_AT_ONCE = 2**28  # above it the naive attention is computed head by head, so that it fits

Verdict = Literal["pass", "fail", "unsupported"]
Tensors = tuple[torch.Tensor, ...]

NAMES: dict[Direction, tuple[str, ...]] = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}
RULE = (
    f"error = max|x - float64 oracle|; allowed = {NAIVE_FACTOR} x min(error of PyTorch's plain attention in the same "
    f"dtype, max|oracle|/{1 / NAIVE_CAP:.0f}) + floor; floor for lse: f = {LSE_FLOOR_ULPS} x eps(fp32) x "
    "max(1, max|lse|); for o: (eps/2 + f) x max|oracle|; for gradients: (eps + f) x max|oracle| + 2 x what the rounded "
    "o costs through delta"
)


@dataclass(frozen=True)
class Worst:
    """The element furthest from the truth: where it lies, `(b, h, row[, column])`, what it is and should be."""

    index: tuple[int, ...]
    value: float
    oracle: float

    def describe(self, name: str, tile: Tile | None) -> str:
        """In words, with the row tile it lies in: of queries for o, lse and dq, of keys for dk and dv."""
        names = ("b", "h", "row", "column")
        place = ", ".join(f"{axis} {i}" for axis, i in zip(names, self.index, strict=False))
        text = f"{self.value:.6g} where the oracle has {self.oracle:.6g}, at {place}"
        if tile is None:
            return text
        side, block = ("key", tile.block_n) if name in ("dk", "dv") else ("query", tile.block_m)
        return f"{text}: row {self.index[2] % block} of {side} tile {self.index[2] // block} ({block} rows)"


@dataclass(frozen=True)
class TensorCheck:
    """One tensor against the truth: `error` beside what is `allowed`, and what that is made of."""

    name: str
    error: float
    allowed: float
    naive: float
    floor: float
    worst: Worst | None

    @property
    def passed(self) -> bool:
        """Whether the error is allowed; a NaN is not."""
        return self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """Error over allowed error; above 1 is wrong. 0 where both are 0."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf


@dataclass(frozen=True)
class Check:
    """The verdict on one port, problem and direction, for the tile, switches and target it was run with.

    tensors: the comparisons. faults: broken promises in words, beside the comparisons; empty when it passed.
    reason: why the port does not support it, or how it raised. tile: None when the port has no choice of one.
    seconds: wall time of the first call, compilation included, and of the second.
    """

    port: str
    problem: Problem
    direction: Direction
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


@dataclass(frozen=True)
class Yardstick:
    """What one tensor is compared with: the truth in float64, the error of the naive attention (inf where that is not
    finite) and the rounding that no implementation avoids."""

    oracle: torch.Tensor
    naive: float
    floor: float

    @property
    def allowed(self) -> float:
        """The largest error that passes."""
        return NAIVE_FACTOR * min(self.naive, NAIVE_CAP * _largest(self.oracle)) + self.floor


class Truth:
    """The yardsticks for one set of inputs, computed once for all ports."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self._problem, self._inputs = problem, inputs
        self._known: dict[tuple[Direction, bool], dict[str, Yardstick]] = {}

    def prepare(self, direction: Direction) -> None:
        """Computes a direction's truth now, so that what it raises is not blamed on a port."""
        self._once(direction, direction == "backward")

    def forward(self) -> dict[str, Yardstick]:
        """The yardsticks of o and lse."""
        return self._once("forward", False)

    def backward(self, costs: dict[str, float], *, with_dlse: bool) -> dict[str, Yardstick]:
        """The yardsticks of dq, dk and dv. costs: what `cost_of_delta` tells of the o that the backward starts from.

        with_dlse: the gradients include what flows through lse.
        """
        known = self._once("backward", with_dlse)
        return {name: replace(y, floor=y.floor + NAIVE_FACTOR * costs[name]) for name, y in known.items()}

    def _once(self, direction: Direction, with_dlse: bool) -> dict[str, Yardstick]:
        key = direction, with_dlse
        if key not in self._known:
            self._known[key] = self._forward() if direction == "forward" else self._backward(with_dlse)
        return self._known[key]

    def _forward(self) -> dict[str, Yardstick]:
        x, problem = self._inputs, self._problem
        o, lse = oracle_forward(x.q, x.k, x.v, problem)
        naive_o, _ = _by_heads(naive_forward, (x.q, x.k, x.v), problem)
        in_fp32 = replace(problem, dtype=torch.float32)
        _, naive_lse = _by_heads(naive_forward, (x.q.float(), x.k.float(), x.v.float()), in_fp32)
        return {
            "o": Yardstick(o, max_error(naive_o, o), _half_unit(o, problem.dtype) + _lse_floor(lse) * _largest(o)),
            "lse": Yardstick(lse, max_error(naive_lse, lse), _lse_floor(lse)),
        }

    def _backward(self, with_dlse: bool) -> dict[str, Yardstick]:
        x, problem = self._inputs, self._problem
        arguments = (x.do, x.dlse if with_dlse else None, x.q, x.k, x.v)
        oracle = oracle_backward(*arguments, problem)
        naive = _by_heads(naive_backward, arguments, problem)
        lse = self.forward()["lse"].oracle
        return {
            name: Yardstick(
                true, max_error(plain, true), 2 * _half_unit(true, problem.dtype) + _lse_floor(lse) * _largest(true)
            )
            for name, true, plain in zip(NAMES["backward"], oracle, naive, strict=True)
        }

    def cost_of_delta(self, o: torch.Tensor) -> dict[str, float]:
        """By how much dq, dk and dv err in a backward that is exact but for delta = rowsum(do · o) from this o."""
        x, o_true = self._inputs, self.forward()["o"].oracle
        do = x.do.double()
        sums = 2 * FP32_EPS * (do * o_true).abs().sum(-1)  # two fp32 sums that should cancel, as in ds = p (dp - delta)
        signs = torch.ones_like(sums)
        signs[..., ::2] = -1
        error = (do * (o.double() - o_true)).sum(-1) + signs * sums
        # The gradients are linear in delta, and dlse enters as -delta: so an error of delta costs what dlse would.
        costs = oracle_backward(torch.zeros_like(x.do), error, x.q, x.k, x.v, self._problem)
        return {name: _largest(cost) for name, cost in zip(NAMES["backward"], costs, strict=True)}


def _half_unit(oracle: torch.Tensor, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.eps / 2 * max(_largest(oracle), info.tiny)


def _lse_floor(lse: torch.Tensor) -> float:
    return LSE_FLOOR_ULPS * FP32_EPS * max(1.0, _largest(lse))


def _by_heads(function: Callable[..., Tensors], tensors: tuple[torch.Tensor | None, ...], problem: Problem) -> Tensors:
    """The function on the whole problem, or on one batch entry and key head at a time when its scores are many."""
    if math.prod(problem.q_shape[:3]) * problem.len_k <= NAIVE_SCORES_AT_ONCE:
        return function(*tensors, problem)
    part = replace(problem, batch=1, heads_q=problem.group, heads_kv=1)

    def of(tensor: torch.Tensor | None, batch: int, head: int) -> torch.Tensor | None:
        if tensor is None or problem.heads_kv == 1:  # then there may be no dimension of heads at all
            return None if tensor is None else tensor[batch : batch + 1]
        heads = tensor.shape[1] // problem.heads_kv
        return tensor[batch : batch + 1, head * heads : (head + 1) * heads]

    rows = []
    for batch in range(problem.batch):
        heads = [function(*(of(t, batch, head) for t in tensors), part) for head in range(problem.heads_kv)]
        rows.append([torch.cat(same, dim=1) if len(same) > 1 else same[0] for same in zip(*heads, strict=True)])
    return tuple(torch.cat(same, dim=0) for same in zip(*rows, strict=True))


def compare(name: str, value: torch.Tensor, yardstick: Yardstick) -> TensorCheck:
    """One tensor, in its own dtype and of the oracle's shape, by the rule at the head of this file."""
    oracle = yardstick.oracle
    distance = _distance(value, oracle)
    worst = None
    if distance.numel():
        place = [int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)]
        where = tuple(place)
        # (B, N, D) inputs leave the head out; it is head 0.
        has_head = oracle.dim() == (3 if name == "lse" else 4)
        index = where if has_head else (where[0], 0, *where[1:])
        worst = Worst(index, float(value[where]), float(oracle[where]))
    return TensorCheck(name, _max(distance), yardstick.allowed, yardstick.naive, yardstick.floor, worst)


def _compare_all(outputs: Tensors, truth: dict[str, Yardstick]) -> tuple[TensorCheck, ...]:
    return tuple(compare(name, x, yardstick) for x, (name, yardstick) in zip(outputs, truth.items(), strict=True))


def _distance(value: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """|value - oracle| in float64, inf where value is NaN, or infinite and not equal to the oracle."""
    value = value.double()
    distance = (value - oracle).abs_()
    distance.masked_fill_(value == oracle, 0.0)  # infinities that agree
    return distance.nan_to_num_(nan=math.inf, posinf=math.inf)


def max_error(value: torch.Tensor, oracle: torch.Tensor) -> float:
    """max|value - oracle|; an infinity must be the oracle's, and a NaN is an error of infinity."""
    return _max(_distance(value, oracle))


def _largest(oracle: torch.Tensor) -> float:
    """The largest finite magnitude; 0 of nothing."""
    return _max(oracle.abs().where(oracle.isfinite(), 0.0))


def _max(tensor: torch.Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0


@dataclass(frozen=True)
class _Call:
    outputs: Tensors
    faults: list[str]
    seconds: float


def _call(function: Callable[[], Tensors], inputs: dict[str, torch.Tensor]) -> _Call:
    """Calls a port with poisoned and guarded buffers, and reports what it wrote that it should not have."""
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    device = next(iter(inputs.values())).device
    _wait(device)
    start = time.perf_counter()
    with GuardedBuffers() as guard:
        outputs = tuple(function())
        _wait(device)
    seconds = time.perf_counter() - start
    faults = guard.faults()
    faults += [f"changed its input {name}" for name, tensor in inputs.items() if not _same_bits(tensor, before[name])]
    return _Call(outputs, faults, seconds)


def _wait(device: torch.device) -> None:
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


class Trial:
    """One port on one problem's inputs: its checks, and then the launches to time, of the very same calls.

    tile: None lets the port choose. is_baseline: not one of ours, so only its o and gradients are compared: its
    memory is its own, its lse has no gradient and its repeatability is not promised.
    """

    def __init__(
        self,
        port: Port,
        problem: Problem,
        inputs: Inputs,
        truth: Truth,
        *,
        target: Target,
        tile: Tile | None = None,
        switches: Switches | None = None,
        is_baseline: bool = False,
    ) -> None:
        self._port, self._problem, self._inputs, self._truth = port, problem, inputs, truth
        self._target, self._tile, self._switches = target, tile, switches or Switches()
        self._is_baseline = is_baseline
        self._forward_check: Check | None = None
        self._saved: Tensors = ()

    def check(self, direction: Direction) -> Check:
        """The verdict on a direction. Whatever the port raises is a verdict too."""
        if direction == "backward" and self._forward_check is None:
            self.check("forward")
        tile = None
        try:
            reason = self._port.unsupported(self._problem, self._target)
            if reason is not None:
                raise Unsupported(reason)
            if not self._is_baseline:
                tile = self._port.choose_tile(self._problem, self._target, direction, self._tile, self._switches)
            check = self._check_forward(tile) if direction == "forward" else self._check_backward(tile)
        except Unsupported as error:
            check = self._verdict(direction, tile, "unsupported", reason=str(error))
        except Exception as error:  # a port may raise anything, and it costs its own cell only
            check = self._verdict(direction, tile, "fail", reason=f"raised {one_line(error)}")
        if direction == "forward":
            self._forward_check = check
        return check

    def launch(self, direction: Direction) -> Callable[[], Tensors]:
        """What a timing launches: the call that was checked. For the backward, runs the forward first."""
        if direction == "forward":
            return self._run_forward
        self._saved = self._run_forward()
        return self._run_backward

    def _run_forward(self) -> Tensors:
        x = self._inputs
        return self._port.forward(x.q, x.k, x.v, self._problem, **self._options())

    def _run_backward(self, *, deterministic: bool = False) -> Tensors:
        x, (o, lse) = self._inputs, self._saved
        dlse = x.dlse if self._with_dlse(deterministic) else None
        options = self._options() | {"deterministic": deterministic}
        return self._port.backward(x.do, dlse, x.q, x.k, x.v, o, lse, self._problem, **options)

    def _with_dlse(self, deterministic: bool) -> bool:
        return not deterministic and not self._is_baseline

    def _options(self) -> dict[str, Any]:
        return {"target": self._target, "tile": self._tile, "switches": self._switches}

    def _verdict(self, direction: Direction, tile: Tile | None, verdict: Verdict, **more: object) -> Check:
        about = (self._port.name, self._problem, direction, self._target, tile, self._switches)
        return Check(*about, verdict, **more)  # type: ignore[arg-type]

    def _check_forward(self, tile: Tile | None) -> Check:
        x, names = self._inputs, NAMES["forward"]
        like = (x.q, x.dlse)
        first = _call(self._run_forward, {"q": x.q, "k": x.k, "v": x.v})
        faults = first.faults + _ill_formed(names, first.outputs, like)
        if _ill_formed(names, first.outputs, like):
            return self._verdict("forward", tile, "fail", faults=tuple(faults), seconds=(first.seconds,))
        second = _call(self._run_forward, {"q": x.q, "k": x.k, "v": x.v})
        if not self._is_baseline:
            faults += _not_repeated(names, first.outputs, second.outputs, "")
        self._saved = first.outputs
        tensors = _compare_all(first.outputs, self._truth.forward())
        faults += self._unseen_rows("o", first.outputs[0])
        return self._judge("forward", tile, tensors, faults, (first.seconds, second.seconds))

    def _check_backward(self, tile: Tile | None) -> Check:
        assert self._forward_check is not None
        if self._forward_check.verdict == "unsupported":
            raise Unsupported(self._forward_check.reason)
        if self._forward_check.verdict == "fail":
            return self._verdict("backward", tile, "fail", reason="not run: the forward it starts from failed")
        x, names = self._inputs, NAMES["backward"]
        like = (x.q, x.k, x.v)
        guarded = x.named() | dict(zip(NAMES["forward"], self._saved, strict=True))
        costs = self._truth.cost_of_delta(self._saved[0])
        faults: list[str] = []
        seconds: list[float] = []
        results: list[tuple[TensorCheck, ...]] = []
        for deterministic in (False,) if self._is_baseline else (False, True):
            how = " with deterministic=True" if deterministic else ""
            first = _call(lambda: self._run_backward(deterministic=deterministic), guarded)  # noqa: B023
            ill_formed = _ill_formed(names, first.outputs, like)
            faults += first.faults + ill_formed
            seconds.append(first.seconds)
            if ill_formed:
                return self._verdict("backward", tile, "fail", faults=tuple(faults), seconds=tuple(seconds))
            truth = self._truth.backward(costs, with_dlse=self._with_dlse(deterministic))
            results.append(_compare_all(first.outputs, truth))
            faults += self._unseen_rows("dq", first.outputs[0])
            second = _call(lambda: self._run_backward(deterministic=deterministic), guarded)  # noqa: B023
            seconds.append(second.seconds)
            if not self._is_baseline:
                promised = slice(0 if deterministic else 1, None)  # dq only when it was asked for
                faults += _not_repeated(names[promised], first.outputs[promised], second.outputs[promised], how)
        tensors = tuple(max(runs, key=lambda t: t.ratio) for runs in zip(*results, strict=True))
        return self._judge("backward", tile, tensors, faults, tuple(seconds[:2]))

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
