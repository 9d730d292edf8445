"""The ports as the tests that hold for all of them take them: what they are tried with, and where they run."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import common
from common import Mask, Port, Target, Tile, port_package

from .cases import Case, load_cases
from .helpers import check_port

GPU = torch.cuda.is_available()
ADA = Target.named("ada")
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Subject:
    """A port under test.

    needs: the package it cannot do without. dtypes: those it takes. trials: dtypes and small tiles that are tried with
    masks and lengths of every kind; the first tile serves wherever one is as good as another, and is such that a
    problem of two hundred rows has several of them. interpreted: without a GPU its kernels run all the same, slowly.
    """

    name: str
    needs: str
    dtypes: tuple[torch.dtype, ...]
    trials: tuple[tuple[torch.dtype, Tile], ...]
    interpreted: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def port(self) -> Port:
        """The port itself."""
        return common.port(self.name)

    @property
    def device(self) -> str:
        """Where its tensors lie."""
        return "cuda" if GPU or not self.interpreted else "cpu"

    @property
    def tile(self) -> Tile:
        """The first of the tiles it is tried with."""
        return self.trials[0][1]

    @property
    def finest(self) -> torch.dtype:
        """Its dtype with the least rounding."""
        return torch.float32 if torch.float32 in self.dtypes else torch.float16

    @property
    def one_head(self) -> type[torch.autograd.Function]:
        """Its function of one head, `FlashAttention…`."""
        package = importlib.import_module(port_package(self.name))
        (name,) = (name for name in package.__all__ if name.startswith("FlashAttention"))
        return getattr(package, name)

    def rows(self, length: int) -> int:
        """A length for the interpreter, and three times that for a GPU, where tiles are larger."""
        return length if self.device == "cpu" else 3 * length

    @property
    def paths(self) -> Sequence[Target | None]:
        """The code paths that can be run: interpreted, they would differ in their tiles only."""
        return (ADA,) if self.device == "cpu" else (None, ADA)

    @property
    def is_missing(self) -> bool:
        """Whether the package it needs is not installed."""
        return importlib.util.find_spec(self.needs) is None

    @property
    def marks(self) -> Sequence[pytest.MarkDecorator]:
        """What its tests need of the machine."""
        marks = [] if self.interpreted else [pytest.mark.gpu]
        if self.is_missing:
            marks.append(pytest.mark.skip(reason=f"{self.needs} is not installed"))
        return marks

    def check(self, case: Case, **options: Any) -> None:
        """`helpers.check_port` of a case, by default with the first tile."""
        check_port(self.port, case.inputs(self.device), case.problem, **{"tile": self.tile} | options)


def dq_tile(block_m: int, block_n: int, warps: int, stages: int) -> tuple[tuple[str, int], ...]:
    """The extras of a tile that are the dq kernel's own tile."""
    return ("dq_block_m", block_m), ("dq_block_n", block_n), ("dq_stages", stages), ("dq_warps", warps)


TRITON = Subject(
    "triton",
    needs="triton",
    dtypes=(*HALVES, torch.float32),
    trials=tuple((dtype, Tile(32, 16)) for dtype in (*HALVES, torch.float32)),
    interpreted=True,
)
# A pipeline of one stage, of two and of three: each is other code, and has hidden mistakes of its own. So is dq by
# atomics, which only tiles of mma.sync have; a tile of one stage is one everywhere.
TILELANG = Subject(
    "tilelang",
    needs="tilelang",
    dtypes=HALVES,
    trials=tuple(
        (dtype, Tile(64, 64, 4, stages, (*atomic, *dq_tile(64, 64, 4, stages))))
        for dtype, stages, atomic in (
            (torch.float16, 2, ()),
            (torch.bfloat16, 1, (("atomic_dq", 1),)),
            (torch.bfloat16, 3, ()),
        )
    ),
)
CUTE = Subject(
    "cute",
    needs="cutlass",
    dtypes=HALVES,
    trials=tuple(
        (dtype, Tile(64, 64, 4, stages, extra))
        for dtype, stages, extra in (
            (torch.float16, 2, (("atomics", 1),)),
            (torch.bfloat16, 1, (("lazy_rescale", 1),)),
            (torch.bfloat16, 3, (("atomics", 1), ("lazy_rescale", 1), ("q_in_registers", 1))),
        )
    ),
)
REFERENCE = Subject(
    "reference", needs="torch", dtypes=TRITON.dtypes, trials=((torch.float16, Tile(16, 16)),), interpreted=True
)
SUBJECTS = (TRITON, TILELANG, CUTE)


def each(subjects: Iterable[Subject] = SUBJECTS) -> pytest.MarkDecorator:
    """Parametrizes a test by `subject`."""
    return pytest.mark.parametrize("subject", [pytest.param(one, marks=one.marks, id=one.name) for one in subjects])


def each_path() -> pytest.MarkDecorator:
    """Parametrizes a test by `subject` and `target`, None for the card's own path."""
    pairs = [(one, path) for one in SUBJECTS for path in one.paths]
    return pytest.mark.parametrize(
        ("subject", "target"),
        [pytest.param(one, path, marks=one.marks, id=f"{one}-{path_name(path)}") for one, path in pairs],
    )


def each_head_dim() -> pytest.MarkDecorator:
    """Parametrizes a test by `subject`, `target` and `head_dim`: multiples of 64 on every path, the others on one."""
    params = []
    for one, head_dim in itertools.product(SUBJECTS, range(16, 257, 8)):
        paths = one.paths if head_dim % 64 == 0 else [one.paths[head_dim // 16 % len(one.paths)]]
        for path in paths:
            name = f"{one}-{path_name(path)}-{head_dim}"
            params.append(pytest.param(one, path, head_dim, marks=one.marks, id=name))
    return pytest.mark.parametrize(("subject", "target", "head_dim"), params)


def each_trial() -> pytest.MarkDecorator:
    """Parametrizes a test by `subject`, `target`, `dtype` and `tile`."""
    every = [(one, path, *trial) for one in SUBJECTS for path, trial in itertools.product(one.paths, one.trials)]
    return pytest.mark.parametrize(
        ("subject", "target", "dtype", "tile"),
        [
            pytest.param(one, path, dtype, tile, marks=one.marks, id=f"{one}-{path_name(path)}-{name_of(dtype, tile)}")
            for one, path, dtype, tile in every
        ],
    )


def each_case() -> pytest.MarkDecorator:
    """Parametrizes a test by `subject`, `target` and `case`, every case of `cases.yaml` for every path."""
    params = []
    for one in SUBJECTS:
        small = one.device == "cpu"
        cases = load_cases(small=small, dtypes=HALVES[:1] if small else one.dtypes)
        for path, case in itertools.product(one.paths, cases):
            params.append(pytest.param(one, path, case, marks=one.marks, id=f"{one}-{path_name(path)}-{case}"))
    return pytest.mark.parametrize(("subject", "target", "case"), params)


def path_name(target: Target | None) -> str:
    """`native` or the target's name."""
    return "native" if target is None else target.name


def name_of(dtype: torch.dtype, tile: Tile) -> str:
    """A dtype and a tile's stages, for an id."""
    return f"{common.DTYPE_NAMES[dtype]}-s{tile.stages}"


def case_of(q: tuple[int, ...], kv: tuple[int, ...], dtype: torch.dtype, mask: Mask, layout: str = "packed") -> Case:
    """A case of shapes `(B, H, N, D)`, all tensors in one layout."""
    return Case("t", "t", q, kv, dtype, mask, layout=tuple((name, layout) for name in ("q", "k", "v", "do")))
