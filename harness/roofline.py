"""`harness roofline`: where each kernel of the ports stands under what the card can do.

Ports are checked, and what passes is timed as a whole by turns; then PyTorch's profiler tells the time of each kernel,
and ncu, where it may, its counters. The ceilings are measured in the same process. Without a GPU what is counted from
the problem stands beside the datasheets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import common
from common import Direction, Port, Work

from . import jobs, timing
from .ahead import compile_ahead
from .ceilings import Ceilings, measure_ceilings
from .counters import FORBIDDEN, NO_NCU, Counted, count
from .environment import INTERPRET, Environment
from .errors import UsageError, complain, one_of
from .isolation import Caller, Here, Lost, Worker
from .kernel_times import KernelTimes, kernel_times, launches_of
from .picture_file import check_picture, write_picture
from .reader import Record
from .records import SHOWN, RecordFile, record_file
from .roofline_records import Findings, roofline_record
from .roofline_tables import roofline_tables
from .rows import time_passed
from .session import NOTHING_RAN, OK, Request, Session, status_of
from .suites import Case, load_suite
from .tables import print_tables
from .trial import Check


@dataclass(frozen=True)
class RooflineRequest(Request):
    """The options of the command. counters: ask ncu. picture: where the plot is written."""

    suite: str = "walkthrough"
    counters: bool = True
    rounds: int = timing.ROUNDS
    picture: Path | None = None


@dataclass
class Roofline:
    """A run of the command, and what it has so far. closed: why ncu is not asked any more."""

    request: RooflineRequest
    session: Session
    file: RecordFile | None = None
    ceilings: Ceilings = field(default_factory=Ceilings)
    closed: str = ""
    checks: list[Check] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Keeps a record, on disk as well."""
        self.records.append(record)
        if self.file is not None:
            self.file.write(record)


def roofline(
    request: RooflineRequest,
    here: Environment,
    open_port: Callable[[str], Port] = jobs.open_port,
    *,
    all_asked: bool = True,
) -> int:
    """Runs the command and returns its exit status.

    all_asked: a port that cannot run is an error, and not just a line that says so. open_port: where ports come from,
    by name. Raises UsageError for what can be told before anything runs.
    """
    if request.picture is not None:
        if not here.has_gpu:
            raise UsageError("--picture draws the rates that kernels achieve, which takes a GPU")
        check_picture(request.picture, request.json)
    opening = Session.open(request, here, open_port) if here.has_gpu else _without_card(request, here, open_port)
    with opening as session:
        if not session.ports:
            return NOTHING_RAN
        this = Roofline(request, session, closed="" if request.counters else "they were not asked for")
        with record_file(request.json, use=SHOWN) as file:
            this.file = file
            try:
                _run(this)
            finally:
                print_tables(roofline_tables(this.records, session.missing), request.form)
        if request.picture is not None:
            from .report.roofline_chart import standalone

            write_picture(request.picture, standalone(this.records))
    if not here.has_gpu:
        return NOTHING_RAN if all_asked and session.missing else OK
    return status_of(session, this.checks, all_asked=all_asked)


@contextmanager
def _without_card(request: RooflineRequest, here: Environment, open_port: Callable[[str], Port]) -> Iterator[Session]:
    """A session whose ports are opened, to tell what they would launch, and run nothing; on problems of full size."""
    for name in request.impls:
        if name not in common.port_names():
            raise UsageError(one_of("--impl", common.port_names(), name))
    suite = request.chosen(load_suite(request.suite, small=False))
    session = Session(request, here, suite, here.target(request.target), open_port=open_port)
    # A process that interprets kernels refuses where its interpreter does not run.
    session.callers = [Worker(request.limit_s, 1, {INTERPRET: "0"}) if request.isolated else Here()]
    try:
        for name in request.impls:
            opened = jobs.opened(session.callers[0], session.setting, name)
            if opened.reason:
                session.missing[name] = opened.reason
                complain(opened.reason)
            else:
                session.ports[name] = opened.sources
        yield session
    finally:
        for caller in session.callers:
            caller.close()


def _run(this: Roofline) -> None:
    session = this.session
    work = _count_case
    if session.environment.has_gpu:
        work = _measure_case
        compile_ahead(session)
        this.ceilings = _ceilings(this, session.callers[0])
    for _ in session.for_each_case("measuring", lambda caller, case: work(this, caller, case)):
        pass


def _ceilings(this: Roofline, caller: Caller) -> Ceilings:
    session = this.session
    instructions = {
        work.instruction
        for case in session.suite.cases
        for name in session.ports
        for direction in this.request.each
        for work in _works(session, caller, name, case, direction)[0]
    }
    try:
        return caller.call(measure_ceilings, session.setting, instructions - {""})
    except Lost as lost:
        return Ceilings(missing=(f"any: it {lost}",))


def _works(
    session: Session, caller: Caller, name: str, case: Case, direction: Direction
) -> tuple[tuple[Work, ...], str]:
    """What a port launches, or why that is not known."""
    try:
        return caller.call(launches_of, session.setting, name, case.problem, direction), ""
    except Lost as lost:
        return (), str(lost)


def _count_case(this: Roofline, caller: Caller, case: Case) -> None:
    """Counts, and runs nothing."""
    for name in this.session.ports:
        for direction in this.request.each:
            works, reason = _works(this.session, caller, name, case, direction)
            record = roofline_record(this.session, case, name, direction, Findings(works))
            this.add(record | {"reason": reason})


def _measure_case(this: Roofline, caller: Caller, case: Case) -> None:
    """Checks the ports on a case, times who passed, and looks at the kernels of each."""
    session, each = this.session, this.request.each
    checks = {name: list(session.check(caller, name, case)) for name in session.ports}
    rows = []
    for i in range(len(each)):
        own = {name: found[i] for name, found in checks.items()}
        rows.append(time_passed(session, caller, case, each[i], own, this.request.rounds))
    for name, found in checks.items():
        this.checks += found
        # What has no time has nothing to be told of either: it failed, or raised when it was to be timed.
        timed = [direction for direction, row in zip(each, rows, strict=True) if row.of(name) is not None]
        times = {direction: _times(session, caller, name, case, direction) for direction in timed}
        counted = _counted(this, caller, name, case, timed) if timed else Counted()
        for direction, check, row in zip(each, found, rows, strict=True):
            works, _ = _works(session, caller, name, case, direction)
            seen = times.get(direction, KernelTimes())
            findings = Findings(works, check, row, seen, counted, this.ceilings)
            this.add(roofline_record(session, case, name, direction, findings))


def _times(session: Session, caller: Caller, name: str, case: Case, direction: Direction) -> KernelTimes:
    try:
        return caller.call(kernel_times, session.setting, name, case, direction)
    except Lost as lost:
        return KernelTimes(reason=f"the profiled call {lost}")


def _counted(this: Roofline, caller: Caller, name: str, case: Case, directions: list[Direction]) -> Counted:
    """What ncu tells, until it turns out that it tells nothing here."""
    if this.closed:
        return Counted(reason=this.closed)
    try:
        counted = caller.call(count, this.session.setting, name, case, directions)
    except Lost as lost:
        return Counted(reason=f"ncu's run of {name} {lost}")
    if counted.reason in (NO_NCU, FORBIDDEN):
        this.closed = counted.reason
    return counted
