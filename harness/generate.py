"""Random cases over the whole contract (design §2), and simpler ones than a given one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import yaml

from common import DTYPE_NAMES, Mask, Problem
from common.problem import HEAD_DIM_MAX, HEAD_DIM_MIN, HEAD_DIM_STEP

from .inputs import LAYOUTS, InputSpec
from .suites import Case

# Where tiles begin and end, and one off.
EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129)
LONGEST, LONGEST_SMALL = 1100, 170
HEADS_MOST, HEADS_MOST_SMALL = 12, 4
SHRINK_TRIES = 80


def random_case(rng: random.Random, name: str, *, small: bool) -> Case:
    """A problem with its inputs. small: it is for an interpreter, where every element is slow."""
    heads_kv, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 1, 2, 3, 4))
    most = HEADS_MOST_SMALL if small else HEADS_MOST
    if heads_kv * group > most:
        heads_kv = 1
    batch = 0 if rng.random() < 0.02 else rng.choice((1,) if small and heads_kv * group > 1 else (1, 1, 2, 3))
    len_q = _length(rng, small)
    len_k = len_q if rng.random() < 0.4 else _length(rng, small)
    common = rng.choice((64, 128)) if rng.random() < 0.4 else 0
    head_dim = common or rng.randrange(HEAD_DIM_MIN, HEAD_DIM_MAX + 1, HEAD_DIM_STEP)
    planted = rng.random() < 0.15
    # A planted maximum is a logit: under another scale its key would be past what fp16 holds.
    scale = None if planted or rng.random() < 0.7 else round(10 ** rng.uniform(-3, 0.7), 4)
    problem = Problem(
        batch=batch,
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        len_q=len_q,
        len_k=len_k,
        head_dim=head_dim,
        dtype=rng.choice(tuple(DTYPE_NAMES)),
        mask=_mask(rng, max(len_q, len_k)),
        scale=scale,  # type: ignore[arg-type]
    )
    return Case(name, problem, _inputs(rng, problem, planted), "found by harness fuzz")


def _length(rng: random.Random, small: bool) -> int:
    if rng.random() < 0.02:
        return 0
    if rng.random() < 0.4:
        return rng.choice(EDGES)
    return rng.randint(1, LONGEST_SMALL if small else LONGEST)


def _mask(rng: random.Random, longest: int) -> Mask:
    corner = rng.choice(("bottom_right", "top_left"))
    kind = rng.random()
    if kind < 0.25:
        return Mask()
    if kind < 0.55:
        return Mask.causal(corner)  # type: ignore[arg-type]
    # Bands of every width, most of them narrow enough to end within the problem.
    left, right = (None if rng.random() < 0.25 else max(0, int(longest ** rng.uniform(0, 1.1)) - 1) for _ in range(2))
    return Mask(left, right, corner)  # type: ignore[arg-type]


def _inputs(rng: random.Random, problem: Problem, planted: bool) -> InputSpec:
    def layout() -> str:
        return rng.choice([name for name in LAYOUTS if name != "bnd"])

    values: dict[str, Any] = {"layout": "bhnd" if rng.random() < 0.3 else layout()}
    if problem.heads_q == 1 and rng.random() < 0.3:
        values["layout"] = "bnd"
    elif rng.random() < 0.3:
        values["layout_do"] = layout()
    if "far_rows" in values.values():
        values["row_stride"] = rng.choice((problem.head_dim, problem.head_dim + 8, 1000, 4096))
    if planted:
        values["planted_max"] = rng.choice((5.0, 30.0, 80.0))
    elif rng.random() < 0.4:
        values |= {f"scale_{name}": rng.choice((0.0, 0.01, 1.0, 3.0, 30.0)) for name in ("q", "k", "v")}
    return InputSpec(**values)


def shrunk(case: Case, fails: Callable[[Case], bool], tries: int = SHRINK_TRIES) -> Case:
    """A case that fails too, and of which nothing simpler that was tried does."""
    tried = {(case.problem, case.inputs)}
    improved = True
    while improved:
        improved = False
        for simpler in simpler_cases(case):
            key = simpler.problem, simpler.inputs
            if key in tried:
                continue
            if len(tried) > tries:
                return case
            tried.add(key)
            if fails(simpler):
                case, improved = simpler, True
                break
    return case


def simpler_cases(case: Case) -> Iterator[Case]:
    """Cases with one thing made smaller or plainer, the largest steps first."""
    problem, inputs = case.problem, case.inputs
    for changed in _simpler_problems(problem):
        if changed != problem:
            yield replace(case, problem=changed)
    default = InputSpec()
    if inputs != default:
        yield replace(case, inputs=default)
    for field in fields(InputSpec):
        plain = getattr(default, field.name)
        if getattr(inputs, field.name) != plain:
            yield replace(case, inputs=replace(inputs, **{field.name: plain}))


def _simpler_problems(problem: Problem) -> Iterator[Problem]:
    def but(**changed: Any) -> Problem:
        if _has_own_scale(problem):
            return replace(problem, **changed)
        return replace(problem, **{"scale": None, **changed})

    if problem.batch > 1:
        yield but(batch=1)
    if problem.heads_kv > 1:
        yield but(heads_q=problem.group, heads_kv=1)
    if problem.group > 1:
        yield but(heads_q=problem.heads_kv)
        yield but(heads_q=2 * problem.heads_kv)
    mask = problem.mask
    for simple in _simpler_masks(mask):
        yield but(mask=simple)
    for length in _smaller(min(problem.len_q, problem.len_k)):
        yield but(len_q=length, len_k=length)
    for name in ("len_q", "len_k"):
        for length in _smaller(getattr(problem, name)):
            yield but(**{name: length})
    for head_dim in (16, 64, problem.head_dim // 16 * 8, problem.head_dim - 8):
        if HEAD_DIM_MIN <= head_dim < problem.head_dim:
            yield but(head_dim=head_dim)
    if _has_own_scale(problem):
        yield replace(problem, scale=None)  # type: ignore[arg-type]


def _simpler_masks(mask: Mask) -> Iterator[Mask]:
    if mask.is_full:
        return
    yield Mask()
    if mask == Mask.causal():
        return
    yield Mask.causal()
    if mask.corner == "top_left":
        yield replace(mask, corner="bottom_right")
    if mask.left is not None and mask.right is not None:
        yield replace(mask, left=None)
        yield replace(mask, right=None)
    for side in ("left", "right"):
        bound = getattr(mask, side)
        if bound:
            yield replace(mask, **{side: bound // 2})


def _smaller(length: int) -> list[int]:
    return [size for size in dict.fromkeys((1, 16, 64, length // 2, length * 3 // 4, length - 1)) if 0 < size < length]


def _has_own_scale(problem: Problem) -> bool:
    return problem.scale != 1 / math.sqrt(problem.head_dim)


def as_suite(case: Case, about: str) -> str:
    """The case as a suite in YAML, for `--suite`."""
    problem, mask = case.problem, case.problem.mask
    default = InputSpec()
    inputs = {f.name: getattr(case.inputs, f.name) for f in fields(InputSpec)}
    entry = {
        "id": case.id,
        "why": case.why,
        "batch": problem.batch,
        "heads": f"{problem.heads_q}/{problem.heads_kv}",
        "len": f"{problem.len_q}x{problem.len_k}",
        "head_dim": problem.head_dim,
        "dtype": DTYPE_NAMES[problem.dtype],
        "mask": {"left": mask.left, "right": mask.right, "corner": mask.corner},
        "scale": problem.scale if _has_own_scale(problem) else None,
        "inputs": {name: value for name, value in inputs.items() if value != getattr(default, name)},
    }
    return yaml.safe_dump({"about": about, "timed": False, "problems": [entry]}, sort_keys=False, allow_unicode=True)
