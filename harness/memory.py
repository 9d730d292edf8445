"""`harness memory`: the memory that an attention takes at its height, beside the plain attention's and the formula's.

The formula is what FlashAttention-2 holds: inputs and outputs of the launch, lse, and for a backward delta, each once,
and nothing of the size of the scores. What a launch takes beyond it is its extra.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from common import Direction, Port, Problem

from . import jobs
from .baselines import BASELINES
from .baselines.protocol import SPANS, Span
from .environment import Environment
from .errors import UsageError, one_of
from .isolation import Caller, Lost
from .jobs import NAIVE, Footprint
from .memory_tables import memory_tables
from .reader import Record
from .records import RecordFile, problem_fields, record_file
from .schema import VERSION
from .session import NOTHING_RAN, Request, Session, status_of
from .suites import Case
from .tables import print_tables
from .trial import Check, together


@dataclass(frozen=True)
class MemoryRequest(Request):
    """The options of the command."""

    spans: tuple[Span, ...] = ("forward", "backward")
    baselines: tuple[str, ...] = tuple(BASELINES)

    @property
    def each(self) -> tuple[Direction, ...]:
        """The directions that have to be checked."""
        return tuple(d for d in SPANS["both"] if any(d in SPANS[span] for span in self.spans))


def held_before(problem: Problem, span: Span) -> int:
    """Bytes of what a launch is given: q, k, v; for a backward also o, do and lse, for both also do."""
    q, kv, lse = _sizes(problem)
    return {"forward": q + 2 * kv, "backward": 3 * q + 2 * kv + lse, "both": 2 * q + 2 * kv}[span]


def formula(problem: Problem, span: Span) -> int:
    """Bytes that FlashAttention-2 holds: inputs, outputs, lse, and in a backward delta, once (Dao 2023, section 3)."""
    q, kv, lse = _sizes(problem)
    return 2 * q + 2 * kv + lse if span == "forward" else 4 * q + 4 * kv + 2 * lse


def _sizes(problem: Problem) -> tuple[int, int, int]:
    q, kv = (math.prod(shape) * problem.dtype.itemsize for shape in (problem.q_shape, problem.kv_shape))
    return q, kv, math.prod(problem.lse_shape) * 4


@dataclass(frozen=True)
class Cell:
    """One contestant on one problem. check: None for the plain attention, which is what checks count errors in."""

    name: str
    case: Case
    span: Span
    check: Check | None
    footprint: Footprint

    @property
    def peak(self) -> int | None:
        """Bytes at the height of the launch, what it was given included."""
        taken = self.footprint.bytes
        return None if taken is None else held_before(self.case.problem, self.span) + taken

    @property
    def extra(self) -> int | None:
        """Bytes beyond the formula."""
        return None if self.peak is None else self.peak - formula(self.case.problem, self.span)


@dataclass
class Memory:
    """A run of the command, and what it has so far."""

    request: MemoryRequest
    session: Session
    file: RecordFile | None = None
    checks: list[Check] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


def memory(
    request: MemoryRequest,
    here: Environment,
    open_port: Callable[[str], Port] = jobs.open_port,
    *,
    all_asked: bool = True,
) -> int:
    """Runs the command and returns its exit status.

    all_asked: a port that cannot run is an error, and not just a line on stderr. open_port: where ports come
    from, by name. Raises UsageError for what can be told before anything runs.
    """
    if not here.has_gpu:
        raise UsageError("harness memory measures the memory of a GPU, and none is used here")
    for name in request.baselines:
        if name not in BASELINES:
            raise UsageError(one_of("--baseline", BASELINES, name))
    with Session.open(request, here, open_port) as session:
        if not session.ports:
            return NOTHING_RAN
        this = Memory(request, session)
        with record_file(request.json) as file:
            this.file = file
            try:
                for _ in session.for_each_case("measuring", lambda caller, case: _case(this, caller, case)):
                    pass
            finally:
                print_tables(memory_tables(this.records), request.form)
    return status_of(session, this.checks, all_asked=all_asked)


def _case(this: Memory, caller: Caller, case: Case) -> None:
    names = (*this.session.ports, *this.request.baselines)
    checks = {(c.port, c.direction): c for name in names for c in this.session.check(caller, name, case)}
    this.checks += [check for check in checks.values() if check.port in this.session.ports]
    for span in this.request.spans:
        for name in (NAIVE, *names):
            check = None if name == NAIVE else together(span, [checks[name, d] for d in SPANS[span]])
            cell = Cell(name, case, span, check, _footprint(this, caller, name, case, span, check))
            this.records.append(memory_record(this.session, cell))
            if this.file is not None:
                this.file.write(this.records[-1])


def _footprint(this: Memory, caller: Caller, name: str, case: Case, span: Span, check: Check | None) -> Footprint:
    """Measured of what passed its check."""
    if check is not None and check.verdict != "pass":
        why = check.reason or "".join(check.complaints()[:1])
        return Footprint(None, why if check.verdict == "unsupported" else f"FAIL: {why}")
    try:
        return caller.call(jobs.footprint, this.session.setting, name, case, span)
    except Lost as lost:
        return Footprint(None, f"FAIL: it {lost}")


def memory_record(session: Session, cell: Cell) -> Record:
    """The record of one cell."""
    case, check = cell.case, cell.check
    return {
        "schema": VERSION,
        "kind": "memory",
        "suite": session.suite.name,
        "case": case.id,
        "contestant": cell.name,
        "direction": cell.span,
        "problem": problem_fields(case.problem),
        "inputs": asdict(case.inputs),
        "seed": session.request.seed,
        "target": {"name": session.target.name, "sm": session.target.sm},
        "verdict": None if check is None else check.verdict,
        "reason": cell.footprint.reason,
        "peak_bytes": cell.peak,
        "extra_bytes": cell.extra,
        "formula_bytes": formula(case.problem, cell.span),
        "sources": session.ports.get(cell.name),
        "provenance": session.facts,
    }
