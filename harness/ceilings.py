"""What the card can do at most, measured: how fast it copies, multiplies, and takes exponentials.

The rate of products is told for each instruction: for the card's own it is cuBLAS's, by `torch.matmul`; for `mma.sync`
on a card that has a newer one, that of a plain Triton kernel compiled as for Ada, in the best of a few tilings. Each is
checked before it is timed, and all are timed by turns as the contestants of a table are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from common import Target
from common.target import ADA
from common.work import FMA

from . import ceiling_kernels
from .errors import one_line
from .jobs import Setting, by_turns
from .timing import Contestant

SIDE = 8192  # of the square matrices
COPY_BYTES = 1 << 30  # that are read, and as many written: far more than any L2 holds
EXPONENTIALS, EXP_ROUNDS = 1 << 24, 8
ROUNDS = 20
CHECKED_ROWS = 64
COPY, EXP2 = "copy", "exp2"


@dataclass(frozen=True)
class Ceilings:
    """copy_gbs: GB/s, read and written together. matrix_tflops: TFLOP/s by instruction. exp_gps: 10^9 exponentials a
    second. missing: what could not be measured, and why."""

    copy_gbs: float | None = None
    matrix_tflops: Mapping[str, float] = field(default_factory=dict)
    exp_gps: float | None = None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feat:
    """Something that a card does. amount: of bytes, operations or exponentials a launch. fault: what is wrong with what
    the last launch has left, or nothing."""

    launch: Callable[[], object]
    amount: float
    fault: Callable[[], str]


def measure_ceilings(setting: Setting, instructions: Collection[str]) -> Ceilings:
    """The card's ceilings, those of products for its own instruction and for these; called in a worker."""
    device, native = setting.environment.device, setting.environment.native
    kinds = dict.fromkeys((native.instruction, *sorted(instructions)))
    ways: dict[str, Callable[[], list[Feat]]] = {COPY: partial(_copies, device)}
    ways |= {kind: partial(_products, device, native, kind) for kind in kinds}
    ways[EXP2] = partial(_exponentials, device)
    feats: dict[str, tuple[str, Feat]] = {}
    missing: dict[str, str] = {}
    with torch.no_grad():
        for kind, way in ways.items():
            try:
                found = way()
                for i, feat in enumerate(found):
                    feat.launch()
                    wrong = feat.fault()
                    if wrong:
                        missing[kind] = wrong
                    else:
                        feats[f"{kind} {i}"] = kind, feat
            except Exception as error:  # no Triton, say, or too little memory
                missing[kind] = one_line(error)
        contestants = {name: Contestant(feat.launch) for name, (_, feat) in feats.items()}
        times = by_turns(setting, contestants, ROUNDS)
    rates: dict[str, float] = {}
    for name, (kind, feat) in feats.items():
        rates[kind] = max(rates.get(kind, 0.0), feat.amount / times.median(name))  # per ms
    return Ceilings(
        copy_gbs=rates[COPY] / 1e6 if COPY in rates else None,
        matrix_tflops={kind: rates[kind] / 1e9 for kind in kinds if kind in rates},
        exp_gps=rates[EXP2] / 1e6 if EXP2 in rates else None,
        missing=tuple(f"{kind}: {why}" for kind, why in missing.items()),
    )


def _copies(device: torch.device) -> list[Feat]:
    source = torch.arange(COPY_BYTES // 4, dtype=torch.int32, device=device)
    copy = torch.zeros_like(source)
    return [
        Feat(lambda: copy.copy_(source), 2 * source.nbytes, lambda: "" if torch.equal(copy, source) else "a wrong copy")
    ]


def _products(device: torch.device, native: Target, instruction: str) -> list[Feat]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if instruction == FMA else torch.bfloat16
    a, b = (torch.randn(SIDE, SIDE, generator=generator, device=device, dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    wanted = a[:CHECKED_ROWS].float() @ b.float()
    allowed = max(torch.finfo(dtype).eps, 1e-4) * wanted.abs().max()

    def fault() -> str:
        return "" if (c[:CHECKED_ROWS].float() - wanted).abs().max() <= allowed else "a wrong product"

    operations = 2.0 * SIDE**3
    if instruction in (native.instruction, FMA):
        return [Feat(lambda: torch.matmul(a, b, out=c), operations, fault)]
    if instruction != ADA.instruction:
        raise ValueError(f"nothing here multiplies with {instruction} on {native}")
    arch = f"sm{ADA.capability}"
    cuts = ceiling_kernels.CUTS
    return [Feat(partial(ceiling_kernels.product, a, b, c, cut, arch), operations, fault) for cut in cuts]


def _exponentials(device: torch.device) -> list[Feat]:
    x = torch.rand(EXPONENTIALS, device=device)

    def fault() -> str:
        return "" if (x - ceiling_kernels.FIXED_POINT).abs().max() < 1e-5 else "wrong exponentials"

    amount = float(x.numel() * EXP_ROUNDS * ceiling_kernels.STEPS)
    return [Feat(lambda: ceiling_kernels.exponentials(x, EXP_ROUNDS), amount, fault)]
