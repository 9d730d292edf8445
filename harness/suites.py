"""Suites: named lists of problems with their inputs, in YAML.

A suite has `about`, `problems`, and optionally `defaults` (fields of every problem), `cpu` (what the suite shrinks to
where there is no GPU) and `timed: false` (a suite whose shapes have no interesting speed). A problem has

    id      its name                        why       what breaks here
    batch   B                               heads     Hq, or Hq/Hkv as in 8/2
    len     Nq = Nk, or NqxNk as in 5x2     head_dim  D
    dtype   fp16, bf16 or fp32              scale     of the scores; default 1/sqrt(D)
    mask    full, causal or causal-topleft, or {left: 16, right: 0, corner: top_left}
    inputs  values and layouts, see `harness.inputs.InputSpec`
    cpu     what replaces these fields without a GPU: a value, or a mapping from the values above to smaller ones

and any of batch … mask may be a list: the problem then stands for all combinations.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from common import DTYPE_NAMES, Mask, Problem

from .errors import UsageError, one_line, one_of
from .inputs import InputSpec

FOLDER = Path(__file__).parent / "suites"
SIZE_MAX, SIZE_DIGITS, ELEMENTS_MAX = 2**31 - 1, 18, 2**48  # no machine holds more
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
MASKS = {"full": Mask(), "causal": Mask.causal(), "causal-topleft": Mask.causal("top_left")}

_SUITE_KEYS = ("about", "defaults", "cpu", "timed", "problems")
_SWEPT = ("batch", "heads", "len", "head_dim", "dtype", "scale", "mask")
_FIELDS = (*_SWEPT, "inputs")
_INPUT_KEYS = tuple(field.name for field in fields(InputSpec))
_DEFAULTS = {"batch": 1, "heads": 1, "head_dim": 64, "dtype": "bf16", "scale": None, "mask": "full", "inputs": {}}


@dataclass(frozen=True)
class Case:
    """A problem of a suite, under the suite's name for it, and how its inputs are made."""

    id: str
    problem: Problem
    inputs: InputSpec
    why: str

    def matches(self, text: str) -> bool:
        """Whether `--only text` means this case: by its name or by the problem's id."""
        return text in self.id or text in self.problem.id


@dataclass(frozen=True)
class Suite:
    """The cases of a suite. small: they are the ones that it shrinks to without a GPU."""

    name: str
    about: str
    timed: bool
    small: bool
    cases: tuple[Case, ...]

    def only(self, text: str) -> Suite:
        """The cases that match. Raises UsageError when there is none."""
        cases = tuple(case for case in self.cases if case.matches(text))
        if not cases:
            names = ", ".join(dict.fromkeys(case.id for case in self.cases))
            small = ", which is smaller without a GPU" if self.small else ""
            raise UsageError(
                f"--only {text!r} matches no problem of the suite {self.name}{small}; its cases are {names}, "
                f"and its problems have names like {self.cases[-1].problem.id}"
            )
        return replace(self, cases=cases)

    def in_dtype(self, dtype: torch.dtype) -> Suite:
        """The same cases in one dtype; those that differ in nothing else become one."""
        cases = (replace(case, problem=replace(case.problem, dtype=dtype)) for case in self.cases)
        return replace(self, cases=tuple({(case.id, case.problem, case.inputs): case for case in cases}.values()))

    def longest(self) -> Suite:
        """The cases with the most pairs of a query and a key."""
        pairs = [case.problem.len_q * case.problem.len_k for case in self.cases]
        cases = tuple(case for case, own in zip(self.cases, pairs, strict=True) if own == max(pairs))
        return replace(self, cases=cases)

    def without(self, text: str) -> Suite:
        """The cases that do not match. Raises UsageError when there is none."""
        cases = tuple(case for case in self.cases if not case.matches(text))
        if not cases:
            raise UsageError(f"--skip {text!r} matches every problem of the suite {self.name} that is left")
        return replace(self, cases=cases)


def suite_names() -> list[str]:
    """The suites that come with the harness."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_suite(name: str, *, small: bool) -> Suite:
    """The suite of that name, or in that file.

    small: what the suite shrinks to without a GPU. Raises UsageError, naming the file and the entry, when there is no
    such suite, it cannot be read, or something in it is unknown or not allowed.
    """
    path = FOLDER / f"{name}.yaml"
    if name not in suite_names():
        path = Path(name)
        if path.suffix not in (".yaml", ".yml") and not _exists(path):
            raise UsageError(one_of("suite", suite_names(), name) + "; or give the path of a .yaml file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"suite {path} cannot be read: {reason}") from error
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise UsageError(f"suite {path} is no valid YAML: {_in_one_line(error)}") from error
    except Exception as error:  # a value that is none of its tag, or nesting without end
        raise UsageError(f"suite {path} is no valid YAML: {one_line(error)}") from error
    try:
        return _parse_suite(path.stem, content, small)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"suite {path.name}: {_in_one_line(error)}") from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that comes twice in a mapping is an error, not the loss of the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    twice = f"the key {key.value!r} comes twice"
                    raise yaml.constructor.ConstructorError(None, None, twice, key.start_mark)
                keys.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, say
        return False


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _parse_suite(name: str, content: Any, small: bool) -> Suite:
    _check_keys("the suite", content, _SUITE_KEYS)
    for key in ("about", "problems"):
        if key not in content:
            raise ValueError(f"the suite lacks {key}")
    defaults, cpu = content.get("defaults", {}), content.get("cpu", {})
    _check_keys("defaults", defaults, _FIELDS)
    _check_keys("cpu", cpu, _FIELDS)
    if not isinstance(content["problems"], list) or not content["problems"]:
        raise ValueError("problems must be a list with at least one entry")
    timed = content.get("timed", True)
    if not isinstance(timed, bool):
        raise TypeError(f"timed must be true or false, got {_shown(timed)}")
    cases: dict[tuple[str, Problem, InputSpec], Case] = {}
    for position, entry in enumerate(content["problems"], start=1):
        label = str(entry["id"]) if isinstance(entry, Mapping) and "id" in entry else f"problem {position}"
        try:
            for case in _parse_entry(entry, _DEFAULTS | defaults, cpu, small):
                same = case.id, case.problem, case.inputs
                if same in cases:
                    raise ValueError(f"{case.problem.id} comes twice" + (" once shrunk by cpu" if small else ""))
                cases[same] = case
        except (TypeError, ValueError) as error:
            raise ValueError(f"{label}: {error}") from error
    return Suite(name, str(content["about"]), timed, small, tuple(cases.values()))


def _parse_entry(entry: Any, defaults: dict, suite_cpu: dict, small: bool) -> Iterator[Case]:
    _check_keys("the problem", entry, ("id", "why", "cpu", *_FIELDS))
    own_cpu = entry.get("cpu", {})
    _check_keys("cpu", own_cpu, _FIELDS)
    for key in ("id", "len"):
        if key not in defaults | entry:
            raise ValueError(f"the problem lacks {key}")
    full = defaults | {name: value for name, value in entry.items() if name in _FIELDS}
    for name in _SWEPT:
        if full[name] == []:
            raise ValueError(f"{name} is an empty list, which stands for no problem")
    _check_keys("inputs", full["inputs"], _INPUT_KEYS)
    swept = [full[name] if isinstance(full[name], list) else [full[name]] for name in _SWEPT]
    for combination in product(*swept):
        values = dict(zip(_SWEPT, combination, strict=True)) | {"inputs": full["inputs"]}
        if small:
            for name in _FIELDS:
                values[name] = _shrink(name, values[name], own_cpu if name in own_cpu else suite_cpu)
        yield Case(str(entry["id"]), _problem(values), _inputs(values["inputs"]), str(entry.get("why", "")))


def _shrink(name: str, value: Any, cpu: dict) -> Any:
    if name not in cpu:
        return value
    smaller = cpu[name]
    if name == "inputs":
        _check_keys("cpu inputs", smaller, _INPUT_KEYS)
        return {**value, **smaller}
    if name != "mask" and isinstance(smaller, Mapping):
        return {str(key): to for key, to in smaller.items()}.get(str(value), value)
    return smaller


def _problem(values: dict[str, Any]) -> Problem:
    heads_q, heads_kv = _pair("heads", values["heads"], "/")
    len_q, len_k = _pair("len", values["len"], "x")
    for name, size in (("batch", values["batch"]), ("heads_q", heads_q), ("heads_kv", heads_kv)):
        if isinstance(size, int) and size > SIZE_MAX:
            raise ValueError(f"{name} must be at most {SIZE_MAX}")
    problem = Problem(
        batch=values["batch"],
        heads_q=heads_q,
        heads_kv=heads_kv,
        len_q=len_q,
        len_k=len_k,
        head_dim=values["head_dim"],
        dtype=_dtype(values["dtype"]),
        mask=_mask(values["mask"]),
        scale=values["scale"],
    )
    if max(math.prod(problem.q_shape), math.prod(problem.kv_shape)) > ELEMENTS_MAX:
        raise ValueError(f"the tensors have more than {ELEMENTS_MAX} elements")
    return problem


def _pair(name: str, value: Any, sign: str) -> tuple[int, int]:
    is_size = isinstance(value, str) or (type(value) is int and value < 10**SIZE_DIGITS)
    parts = str(value).split(sign) if is_size else []
    if len(parts) not in (1, 2) or not all(part.isdecimal() and len(part) <= SIZE_DIGITS for part in parts):
        raise ValueError(f"{name} must be a number or two as in 8{sign}2, got {_shown(value)}")
    return int(parts[0]), int(parts[-1])


def _shown(value: Any) -> str:
    # A number of thousands of digits, or a list that aliases make endless, is named and not written out.
    try:
        return reprlib.repr(value)
    except ValueError:  # past the digits that Python writes
        return "more digits than that"


def _words(value: Any) -> str:
    return value if isinstance(value, str) else _shown(value)


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(one_of("dtype", DTYPES, _words(value)))
    return DTYPES[value]


def _mask(value: Any) -> Mask:
    if isinstance(value, Mapping):
        _check_keys("mask", value, tuple(field.name for field in fields(Mask)))
        return Mask(**value)
    if not isinstance(value, str) or value not in MASKS:
        raise ValueError(one_of("mask", MASKS, _words(value)) + "; or give left, right and corner")
    return MASKS[value]


def _inputs(value: Any) -> InputSpec:
    _check_keys("inputs", value, _INPUT_KEYS)
    return InputSpec(**value)


def _check_keys(what: str, mapping: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{what} must be a mapping, got {_shown(mapping)}")
    for key in mapping:
        if key not in allowed:
            close = get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{what} has the unknown key {key!r}; allowed are {', '.join(allowed)}{hint}")
