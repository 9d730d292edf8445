"""Records of `harness roofline`: one for each port, problem and direction, and what is read off them of each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from common import Direction, Problem, Target, Work
from common.target import TARGETS

from .bound import bound, least_ms
from .ceilings import Ceilings
from .counters import Counted, Counters
from .jobs import TimedRow
from .kernel_times import KernelTimes, match
from .reader import Record
from .records import problem_fields, problem_of, tile_fields
from .schema import VERSION
from .suites import Case
from .trial import Check

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True)
class Findings:
    """What was found of one contestant and direction. check: None where nothing was run, and then neither is there
    anything else but the launches."""

    works: Sequence[Work]
    check: Check | None = None
    row: TimedRow = field(default_factory=TimedRow)
    times: KernelTimes = field(default_factory=KernelTimes)
    counted: Counted = field(default_factory=Counted)
    ceilings: Ceilings | None = None


def roofline_record(session: Session, case: Case, name: str, direction: Direction, found: Findings) -> dict[str, Any]:
    """The record of a port on a case."""
    check, timing = found.check, found.row.of(name)
    counters: dict[str, Counters] = {}
    for kernel, figures in found.counted.kernels:
        own = match(found.works, kernel)
        if own is not None:
            counters.setdefault(own.kernel, figures)
    return {
        "schema": VERSION,
        "kind": "roofline",
        "suite": session.suite.name,
        "case": case.id,
        "port": name,
        "direction": direction,
        "problem": problem_fields(case.problem),
        "inputs": asdict(case.inputs),
        "seed": session.request.seed,
        "target": {"name": session.target.name, "sm": session.target.sm},
        "tile": None if check is None else tile_fields(check.tile),
        "verdict": None if check is None else check.verdict,
        "reason": "" if check is None else check.reason or "; ".join(check.complaints()[:1]),
        "flops": case.problem.flops(direction),
        "bytes": case.problem.bytes(direction),
        "samples": None if timing is None else timing.among({name: name}).as_record(),
        "host_us": None if timing is None else timing.among({name: name}).host_us,
        "untimed": found.row.untimed(name),
        "kernels": [_kernel(work, case.problem, found.times, counters.get(work.kernel)) for work in found.works],
        "others_ms": found.times.others,
        "unprofiled": found.times.reason,
        "uncounted": found.counted.reason,
        "ceilings": None if found.ceilings is None else asdict(found.ceilings),
        "sources": session.ports[name],
        "provenance": session.facts,
    }


def _kernel(work: Work, problem: Problem, times: KernelTimes, counters: Counters | None) -> dict[str, Any]:
    return {
        "kernel": work.kernel,
        "products": work.products,
        "instruction": work.instruction,
        "flops": work.flops(problem),
        "bytes": work.bytes(problem),
        "exponentials": work.exponentials(problem),
        "samples_ms": times.ms.get(work.kernel) or None,
        "counters": None if counters is None else counters.as_record(),
    }


def ceilings_of(record: Record) -> Ceilings:
    """The ceilings that were measured in the run of a record; none where there was no card."""
    fields = record["ceilings"] or {}
    return Ceilings(**fields | {"missing": tuple(fields.get("missing", ()))})


def native_of(record: Record) -> Target:
    """The target of the card of a record, or without one that of the record."""
    sm = record["provenance"]["sm"]
    return next((t for t in TARGETS if t.sm.removesuffix("a") == sm), Target.named(record["target"]["name"]))


@dataclass(frozen=True)
class Spot:
    """A kernel of a record, and where it stands under these ceilings. role: what it computes, the same in all ports."""

    record: Record
    role: str
    fields: dict[str, Any]
    ceilings: Ceilings

    @property
    def name(self) -> str:
        """As its port calls it."""
        return str(self.fields["kernel"])

    @property
    def instruction(self) -> str:
        """What computes its products; empty for none."""
        return str(self.fields["instruction"])

    @cached_property
    def ms(self) -> float | None:
        """The median of its milliseconds."""
        samples = self.fields["samples_ms"]
        return median(samples) if samples else None

    @property
    def intensity(self) -> float:
        """Operations for each byte that must move."""
        return float(self.fields["flops"] / self.fields["bytes"])

    @property
    def tflops(self) -> float | None:
        """10^12 operations a second."""
        return None if self.ms is None else float(self.fields["flops"] / self.ms / 1e9)

    @property
    def gbs(self) -> float | None:
        """10^9 bytes a second, of those that must move."""
        return None if self.ms is None else float(self.fields["bytes"] / self.ms / 1e6)

    @cached_property
    def counters(self) -> Counters | None:
        """What ncu counted."""
        return None if self.fields["counters"] is None else Counters.of_record(self.fields["counters"])

    @cached_property
    def least(self) -> dict[str, float]:
        """Milliseconds at least, by each ceiling."""
        return least_ms(
            self.fields["flops"], self.fields["bytes"], self.fields["exponentials"], self.instruction, self.ceilings
        )

    @property
    def roof_ms(self) -> float | None:
        """Milliseconds at least, by the ceiling that leaves it most."""
        return max(self.least.values(), default=None)

    @property
    def bound(self) -> str:
        """What holds it back."""
        return bound(self.least, self.ms, self.ceilings, self.counters)


ROLES = {"forward": ("forward",), "backward": ("delta", "dk, dv", "dq")}


def spots_of(record: Record, ceilings: Ceilings | None = None) -> list[Spot]:
    """The kernels of a record, under these ceilings or those of its own run."""
    own = ceilings_of(record) if ceilings is None else ceilings
    roles = ROLES[record["direction"]]
    return [Spot(record, roles[i], kernel, own) for i, kernel in enumerate(record["kernels"])]


def problem_key(record: Record) -> tuple[str, str, Problem]:
    """What the records of one problem share."""
    return record["suite"], record["case"], problem_of(record["problem"])
