"""When a result counts as right.

Inputs are fresh and seeded. The truth is computed in float64 from the same rounded inputs. Every head is held by
segments of its rows, of queries for o, lse and dq and of keys for dk and dv: up to 16 of 64 rows or more, so that rows
whose values are large excuse none whose values are small. With

    error   = max |x - truth|
    allowed = 2 · min(naive, |truth|max / 32) + floor

of one segment of one head, a tensor passes when error <= allowed in all of them, where

- `naive` is the error of the plain PyTorch attention in the dtype of the tensor: the input's for o, dq, dk, dv, and
  fp32 for lse. It counts for a 32nd of the largest truth at most, also where it is not finite, so that an input that
  breaks the plain attention (scores past fp16, logits past what bf16 resolves) excuses nobody else.
- `floor` is the rounding that no FlashAttention avoids, however lucky the plain attention was. For lse: 4 units of
  fp32, which is what scores summed in fp32 carry. For the others: half a unit in the last place of the largest truth,
  and half a unit of p or ds, which are rounded for the product; the error of lse, which p = exp(s - lse) inherits as a
  relative one and which counts for a 32nd at most too (for dk and dv, that of all queries); and for dq, dk, dv twice
  what it costs, computed in float64, that delta = rowsum(do · o) reads the o that the forward rounded (and that
  passed), and is summed in fp32. And 2^16 times fp32's smallest normal number, for the terms of a sum that are smaller
  and that kernels flush to zero.

What is reported of a tensor is the segment with the largest error over allowed.

An infinite truth (lse of a row that sees no key) must be met exactly, and such a row's o and dq must be exactly 0. A
NaN never passes, and neither does infinity where the truth is finite.

`trial` launches a port and holds it to this rule, and to the rest of the contract.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from common import Direction, Problem, Tile
from reference import naive_backward, naive_forward, oracle_backward, oracle_forward

from .inputs import Inputs

NAIVE_FACTOR = 2
RELATIVE_CAP = 1 / 32  # of the largest |truth|
SEGMENTS_MOST, SEGMENT_ROWS = 16, 64
LSE_FLOOR_ULPS = 4
FP32_EPS = torch.finfo(torch.float32).eps
UNDERFLOW = 2**16 * torch.finfo(torch.float32).tiny
NAIVE_SCORES_AT_ONCE = 2**28  # above it the naive attention is computed head by head, so that it fits

Tensors = tuple[torch.Tensor, ...]

NAMES: dict[Direction, tuple[str, ...]] = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}
RULE = (
    f"For each head and each of up to {SEGMENTS_MOST} segments of {SEGMENT_ROWS} rows or more: "
    f"error = max|x - float64 oracle|; allowed = {NAIVE_FACTOR} x min(error of PyTorch's plain attention in the same "
    f"dtype, max|oracle|/{1 / RELATIVE_CAP:.0f}) + floor; floor for lse: f = {LSE_FLOOR_ULPS} x eps(fp32) x "
    f"max(1, max|lse|); for o and gradients: (eps + min(f, 1/{1 / RELATIVE_CAP:.0f})) x max|oracle| + "
    f"{UNDERFLOW:.0e}, and for gradients {NAIVE_FACTOR} x what the rounded o costs through delta. Shown: the largest "
    "error / allowed."
)


@dataclass(frozen=True)
class Worst:
    """The element furthest from the truth: where it lies, `(b, h, row[, column])`, what it is and should be."""

    index: tuple[int, ...]
    value: float
    oracle: float

    def describe(self, name: str, tile: Tile | None) -> str:
        """In words, with the row tile it lies in: of queries for o, lse and dq, of keys for dk and dv."""
        text = f"{self.value:.6g} where the oracle has {self.oracle:.6g}, at {place_in_words(self.index)}"
        if tile is None:
            return text
        return f"{text}: row {tile_in_words(name, self.index[2], tile)}"


def place_in_words(index: tuple[int, ...]) -> str:
    """An index `(b, h, row[, column])`, each number named."""
    return ", ".join(f"{axis} {i}" for axis, i in zip(("b", "h", "row", "column"), index, strict=False))


def tile_in_words(name: str, row: int, tile: Tile) -> str:
    """Where a row of the tensor of that name lies in its tile, of queries for o, lse and dq, of keys for dk and dv."""
    side, block = ("key", tile.block_n) if name in ("dk", "dv") else ("query", tile.block_m)
    return f"{row % block} of {side} tile {row // block} ({block} rows)"


@dataclass(frozen=True)
class TensorCheck:
    """One tensor against the truth: `error` beside what is `allowed`, and what that is made of.

    All of it, and the `worst` element, of the segment whose error is the largest beside its allowed one.
    """

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
class Yardstick:
    """What one tensor is compared with, the numbers by segment: `(B, H, segments)`, or `(B, segments)` without heads.

    oracle: the truth in float64. largest: its largest finite magnitude. naive: the error of the naive attention, inf
    where that is not finite. floor: the rounding that no implementation avoids.
    """

    oracle: torch.Tensor
    largest: torch.Tensor
    naive: torch.Tensor
    floor: torch.Tensor

    @property
    def allowed(self) -> torch.Tensor:
        """The largest error that passes."""
        return NAIVE_FACTOR * self._naive + self.floor

    @property
    def unit(self) -> torch.Tensor:
        """PyTorch's error as a unit to count in: that of the plain attention, but no less than the floor."""
        return torch.maximum(self._naive, self.floor)

    @property
    def _naive(self) -> torch.Tensor:
        return torch.minimum(self.naive, RELATIVE_CAP * self.largest)


class Truth:
    """The yardsticks for one set of inputs, computed once for all ports."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self._problem, self._inputs = problem, inputs
        self._known: dict[tuple[Direction, bool], dict[str, Yardstick]] = {}

    def of(self, direction: Direction) -> dict[str, Yardstick]:
        """The yardsticks of a direction as it is asked of a port by default; no floor for what a rounded o costs."""
        return self._once(direction, direction == "backward")

    def forward(self) -> dict[str, Yardstick]:
        """The yardsticks of o and lse."""
        return self._once("forward", False)

    def backward(self, costs: dict[str, torch.Tensor], *, with_dlse: bool) -> dict[str, Yardstick]:
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
        largest, largest_lse = largest_by_segment("o", o), largest_by_segment("lse", lse)
        lse_floor = _lse_floor(largest_lse)
        floor = _floor(largest, lse_floor, problem.dtype)
        return {
            "o": Yardstick(o, largest, by_segment("o", distance_to(naive_o, o)), floor),
            "lse": Yardstick(lse, largest_lse, by_segment("lse", distance_to(naive_lse, lse)), lse_floor),
        }

    def _backward(self, with_dlse: bool) -> dict[str, Yardstick]:
        x, problem = self._inputs, self._problem
        arguments = (x.do, x.dlse if with_dlse else None, x.q, x.k, x.v)
        oracle = oracle_backward(*arguments, problem)
        naive = _by_heads(naive_backward, arguments, problem)
        of_queries = _lse_floor(self.forward()["lse"].largest)
        of_keys = of_queries.amax(-1, keepdim=True)  # a key is in the sums of all queries of its head's group
        if of_keys.dim() == 3:
            of_keys = of_keys.unflatten(1, (problem.heads_kv, problem.group)).amax(2)
        yardsticks = {}
        for name, true, plain in zip(NAMES["backward"], oracle, naive, strict=True):
            largest = largest_by_segment(name, true)
            floor = _floor(largest, of_queries if name == "dq" else of_keys, problem.dtype)
            yardsticks[name] = Yardstick(true, largest, by_segment(name, distance_to(plain, true)), floor)
        return yardsticks

    def cost_of_delta(self, o: torch.Tensor) -> dict[str, torch.Tensor]:
        """By how much dq, dk and dv err, by segment, in a backward that is exact but for delta = rowsum(do · o) from
        this o."""
        x, o_true = self._inputs, self.forward()["o"].oracle
        do = x.do.double()
        sums = 2 * FP32_EPS * (do * o_true).abs().sum(-1)  # two fp32 sums that should cancel, as in ds = p (dp - delta)
        signs = torch.ones_like(sums)
        signs[..., ::2] = -1
        error = (do * (o.double() - o_true)).sum(-1) + signs * sums
        # The gradients are linear in delta, and dlse enters as -delta: so an error of delta costs what dlse would.
        costs = oracle_backward(torch.zeros_like(x.do), error, x.q, x.k, x.v, self._problem)
        return {name: largest_by_segment(name, cost) for name, cost in zip(NAMES["backward"], costs, strict=True)}


def _floor(largest: torch.Tensor, lse_floor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of o and the gradients: half a unit of the result and of p or ds, what p inherits from lse, and underflow."""
    info = torch.finfo(dtype)
    rounding = 2 * (info.eps / 2) * largest.clamp(min=info.tiny)
    return rounding + lse_floor.clamp(max=RELATIVE_CAP) * largest + UNDERFLOW


def _lse_floor(largest: torch.Tensor) -> torch.Tensor:
    return LSE_FLOOR_ULPS * FP32_EPS * largest.clamp(min=1.0)


def by_segment(name: str, values: torch.Tensor) -> torch.Tensor:
    """The largest of each head's segments, `(B, H, segments)`, of values of the shape of the tensor of that name."""
    rows = values if name == "lse" else values.amax(-1)
    if not rows.shape[-1]:
        return rows.new_zeros((*rows.shape[:-1], 1))
    return torch.stack([part.amax(-1) for part in _segments(rows, dim=-1)], dim=-1)


def largest_by_segment(name: str, values: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of each segment; 0 of nothing."""
    return by_segment(name, values.abs().where(values.isfinite(), 0.0))


def _segments(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """The values split along their rows, at nearly equal lengths, and none below SEGMENT_ROWS unless all rows are."""
    return values.tensor_split(min(SEGMENTS_MOST, max(1, values.shape[dim] // SEGMENT_ROWS)), dim)


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
    distance = distance_to(value, oracle)
    if not distance.numel():
        return TensorCheck(name, 0.0, 0.0, 0.0, 0.0, None)
    errors, allowed = by_segment(name, distance), yardstick.allowed
    segment, element = farthest(distance, errors, allowed)
    worst = Worst(index_of(name, element), float(value[element]), float(oracle[element]))
    error, allow, naive, floor = (float(x[segment]) for x in (errors, allowed, yardstick.naive, yardstick.floor))
    return TensorCheck(name, error, allow, naive, floor, worst)


Place = tuple[int, ...]


def farthest(distance: torch.Tensor, errors: torch.Tensor, unit: torch.Tensor) -> tuple[Place, Place]:
    """The segment with the largest error in its own unit, and in it the element with the largest distance.

    errors: the distances by segment. The places are indices into `errors` and `distance`.
    """
    segment = _place((errors / unit).masked_fill(errors == 0, 0.0))
    head, which = segment[:-1], segment[-1]
    segments = _segments(distance[head], dim=0)
    row, *column = _place(segments[which])
    return segment, (*head, row + sum(len(before) for before in segments[:which]), *column)


def index_of(name: str, element: Place) -> Place:
    """`(b, h, row[, column])` of an element of the tensor of that name; where the head is left out it is head 0."""
    has_head = len(element) == (3 if name == "lse" else 4)
    return element if has_head else (element[0], 0, *element[1:])


def _place(values: torch.Tensor) -> Place:
    """The index of the largest."""
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape))


def compare_all(outputs: Tensors, truth: dict[str, Yardstick]) -> tuple[TensorCheck, ...]:
    """The tensors of a direction, in the order of their yardsticks."""
    return tuple(compare(name, x, yardstick) for x, (name, yardstick) in zip(outputs, truth.items(), strict=True))


def distance_to(value: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """|value - oracle| in float64, inf where value is NaN, or infinite and not equal to the oracle."""
    value = value.double()
    distance = (value - oracle).abs_()
    distance.masked_fill_(value == oracle, 0.0)  # infinities that agree
    return distance.nan_to_num_(nan=math.inf, posinf=math.inf)
