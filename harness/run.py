"""`harness run`: checks every problem of a suite, then times what passed beside SDPA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

import torch

from common import Direction, Port

from . import jobs, timing
from .ahead import compile_ahead
from .baselines import SDPA_FLASH
from .baselines.protocol import Span, flops_of
from .checks import NAMES, RULE
from .environment import Environment
from .isolation import Caller
from .options import Format
from .reader import Record
from .records import RecordFile, check_of, check_record, timing_of
from .session import NOTHING_RAN, Request, Session, progress, status_of
from .suites import Case
from .tables import Table, print_tables, problem_cells
from .timing import FLOP_CONVENTION, Timing, speed_cells, why_throttled
from .trial import VERDICTS, Check


@dataclass(frozen=True)
class RunRequest(Request):
    """The options of the command."""

    kinds: ClassVar[tuple[str, ...]] = ("check",)
    rounds: int = timing.ROUNDS
    timed: bool = True


@dataclass
class Result:
    """One cell's worth: a check and, where it passed on a GPU, a timing and what it was timed against.

    record: what an earlier run has written of it, where nothing was added since.
    """

    case: Case
    check: Check
    timing: Timing | None = None
    baseline: Check | None = None
    untimed: str = ""
    record: Record | None = None


@dataclass
class Run:
    """A run, and what it has so far. Results are written once: when nothing more is to come for them, or at the end."""

    request: RunRequest
    session: Session
    records: RecordFile | None = None
    results: list[Result] = field(default_factory=list)
    _written: set[int] = field(default_factory=set)

    @property
    def is_timed(self) -> bool:
        """Whether timings follow the checks."""
        return self.request.timed and self.session.suite.timed and self.session.environment.has_gpu

    def of(self, port: str, direction: Direction) -> list[Result]:
        """The results of a port and direction, in the suite's order."""
        return [r for r in self.results if r.check.port == port and r.check.direction == direction]

    def write(self, result: Result) -> None:
        """Writes a result that is complete."""
        if self.records is None or id(result) in self._written:
            return
        self._written.add(id(result))
        record = result.record or check_record(
            result.check,
            sources=self.session.ports[result.check.port],
            **self.session.about(result.case),
            timing=result.timing,
            untimed=result.untimed,
            baselines=[] if result.baseline is None else [result.baseline],
        )
        self.records.write(record)


def run(request: RunRequest, here: Environment, open_port: Callable[[str], Port] = jobs.open_port) -> int:
    """Runs the command and returns its exit status.

    open_port: where ports come from, by name. Raises UsageError for what can be told before anything runs.
    """
    with Session.open(request, here, open_port) as session:
        if not session.ports:
            return NOTHING_RAN
        with session.record_file() as records:
            this = Run(request, session, records)
            compile_ahead(session)
            _run(this)
    print_closing(session, asked=request.timed)
    return status_of(session, (result.check for result in this.results))


def _run(this: Run) -> None:
    form = this.request.form
    checked = False
    try:
        _check_all(this)
        checked = True
        print_tables(check_tables(this), form)
        if this.is_timed:
            _time_all(this)
    except KeyboardInterrupt:
        if not checked:
            print_tables(check_tables(this), form)
        raise
    finally:
        for result in this.results:  # those that still wait for a timing
            this.write(result)
        print_tables(timing_tables(this), form)


def _check_all(this: Run) -> None:
    def check_case(caller: Caller, case: Case) -> list[Result]:
        """The checks of all ports on one case, and of the baseline when timings are to follow."""
        earlier = _earlier(this, case)
        if earlier:
            return earlier
        results = [
            Result(case, check) for name in this.session.ports for check in this.session.check(caller, name, case)
        ]
        if this.is_timed:
            baselines = {check.direction: check for check in this.session.check(caller, SDPA_FLASH.name, case)}
            for result in results:
                result.baseline = baselines[result.check.direction]
        return results

    for _, results in this.session.for_each_case("checking", check_case):
        this.results += results
        for result in results:
            if not this.is_timed or result.check.verdict != "pass":
                this.write(result)


def _earlier(this: Run, case: Case) -> list[Result]:
    """The results of a case in the file to resume; none unless all that is to be known of the case is there."""
    records = {(r["port"], r["direction"]): r for r in this.session.earlier(case) if r["kind"] == "check"}
    wanted = [(name, direction) for name in this.session.ports for direction in this.request.each]
    if not all(key in records and _is_of_run(records[key]) for key in wanted):
        return []
    results = [_result_of(case, records[key]) for key in wanted]
    done = all(r.timing or r.untimed for r in results if r.check.verdict == "pass") or not this.is_timed
    return results if done else []


def _is_of_run(record: Record) -> bool:
    """Whether it is not of a bench, whose contestants took turns with others as well."""
    return all(b["port"] == SDPA_FLASH.name for b in record["baselines"])


def _result_of(case: Case, record: Record) -> Result:
    check = check_of(record)
    beside = None
    for b in record["baselines"]:
        about = (check.problem, check.direction, check.target, None, check.switches)
        beside = Check(b["port"], *about, b["verdict"], reason=b["reason"])
    return Result(case, check, timing_of(record), beside, record["untimed"], record)


def _time_all(this: Run) -> None:
    rows: dict[tuple[int, Span], list[Result]] = {}  # all contestants of a row are timed together
    for result in this.results:
        if result.check.verdict == "pass" and result.timing is None:
            rows.setdefault((id(result.case), result.check.direction), []).append(result)
    with progress("timing", len(rows)) as begin:
        for results in rows.values():
            case, check, baseline = results[0].case, results[0].check, results[0].baseline
            begin(f"{check.direction} {case.id} {case.problem.id}")
            if not flops_of(case.problem, check.direction):
                continue
            ports = [result.check.port for result in results]
            rivals = [baseline.port] if baseline is not None and baseline.verdict == "pass" else []
            rounds, caller = this.request.rounds, this.session.callers[0]
            row = this.session.time(caller, [*ports, *rivals], case, check.direction, rounds)
            for result in results:
                result.timing, result.untimed = row.of(result.check.port), row.untimed(result.check.port)
                result.record = None
                this.write(result)


def check_tables(this: Run) -> list[Table]:
    """A table of checks for each port: error over allowed error by tensor, and the verdict."""
    directions = this.request.each
    names = [name for direction in directions for name in NAMES[direction]]
    tables = []
    for port in this.session.ports:
        path = this.session.environment.path(this.session.target)
        table = Table(
            f"Checks of {port}, {path}, suite {this.session.suite.name}, seed {this.request.seed}: "
            "error / allowed error, above 1 is wrong",
            ("case", "problem", *names, "verdict"),
            labels=2,
        )
        by_direction = [this.of(port, direction) for direction in directions]
        for results in zip(*by_direction, strict=True):
            case = results[0].case
            tensors = {t.name: f"{t.ratio:.2f}" for r in results for t in r.check.tensors}
            cells = (tensors.get(name, "–") for name in names)
            table.add(case.id, case.problem.id, *cells, _verdict([r.check for r in results]))
            table.notes += [
                f"FAIL {case.id} {case.problem.id} {r.check.direction}: {line}"
                for r in results
                for line in r.check.complaints()
            ]
        counts = Counter(r.check.verdict for results in by_direction for r in results)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
        table.notes.append(f"{port}: {counts.total()} checks of {len(table.rows)} problems: {told}")
        tables.append(table)
    tables[-1].notes.append(RULE)
    return tables


def _verdict(checks: list[Check]) -> str:
    failed = [check for check in checks if check.verdict == "fail"]
    if failed:
        return f"FAIL: {failed[0].reason}" if failed[0].reason else "FAIL"
    reasons = [(check.direction, check.reason) for check in checks if check.verdict == "unsupported"]
    if not reasons:
        return "pass"
    if len(reasons) == len(checks):
        return reasons[0][1]
    return "pass, " + ", ".join(f"{direction}: {reason}" for direction, reason in reasons)


def timing_tables(this: Run) -> list[Table]:
    """A table for each port and direction that has timings, beside the baseline."""
    tables = []
    for port, direction in product(this.session.ports, this.request.each):
        results = [r for r in this.of(port, direction) if r.timing is not None or r.untimed]
        if results:
            tables.append(_timing_table(this, port, direction, results))
    return tables


def _timing_table(this: Run, port: str, direction: Direction, results: list[Result]) -> Table:
    ours, theirs = port, SDPA_FLASH.title
    path = this.session.environment.path(this.session.target)
    table = Table(
        f"{ours} {direction}, {path}, beside {theirs}, suite {this.session.suite.name}",
        (
            *("case", "B,H,D", "dtype", "N", "mask", "tile"),
            *(f"{ours} ms", f"{theirs} ms", f"{ours} TF/s", f"{theirs} TF/s", f"% of {theirs}", "95 %"),
            *("host µs", f"{theirs} host µs", "first s", "next s"),
        ),
        labels=6,
    )
    for result in results:
        table.add(*_problem_cells(result), *_time_cells(result))
        if result.untimed:
            table.notes.append(f"{result.case.id} {result.case.problem.id}: not timed: {result.untimed}")
        if result.timing is not None and result.timing.throttled:
            table.notes.append(
                f"{result.case.id} {result.case.problem.id}: {result.timing.throttled} of "
                f"{len(result.timing.rounds)} rounds throttled ({why_throttled([result.timing])})"
            )
        if result.timing is not None:
            table.notes += [
                f"{result.case.id} {result.case.problem.id}: {late} of {len(result.timing.rounds)} samples of {name} "
                "may hold host time"
                for name in result.timing.rounds[0].ms
                if (late := result.timing.late(name))
            ]
        if result.baseline is not None and result.baseline.verdict != "pass":
            why = result.baseline.reason or "; ".join(result.baseline.complaints())
            table.notes.append(f"{result.case.id} {result.case.problem.id}: {theirs} not timed: {why}")
    sensors = {r.sensors.note for x in results if x.timing is not None for r in x.timing.rounds}
    table.notes += sorted(sensors - {""})
    table.notes.append(FLOP_CONVENTION)
    table.notes.append(
        f"host µs: until the call returns. first s: the first call of this process with this problem, which compiles "
        f"unless a cache had it; next s: the second. {theirs}: torch {torch.__version__}, its flash backend forced."
    )
    if direction == "backward":
        table.notes.append(f"{ours} also takes the gradient of lse, as in its check; {theirs} has none.")
    return table


def _problem_cells(result: Result) -> tuple[str, ...]:
    p = result.case.problem
    return result.case.id, *problem_cells(p), str(result.check.tile or "–")


def _time_cells(result: Result) -> tuple[str, ...]:
    times, check = result.timing, result.check
    ours, theirs = check.port, SDPA_FLASH.name
    seconds = [f"{s:.2f}" for s in check.seconds[:2]]
    if times is None:
        return (*["–"] * 8, *seconds)
    host = (f"{times.host_us[name]:.0f}" if name in times.host_us else "–" for name in (ours, theirs))
    return *speed_cells(times, ours, theirs, flops_of(check.problem, check.direction)), *host, *seconds


def print_closing(session: Session, *, asked: bool = True) -> None:
    """Says why nothing was timed, where that is so. asked: it was to be."""
    note = _closing(session, asked)
    if note:
        print(f"# {note}" if session.request.form is Format.CSV else note)


def _closing(session: Session, asked: bool) -> str:
    if not session.environment.has_gpu and "triton" in session.ports:
        return (
            "No GPU is used here: Triton's interpreter ran the kernels, which has no speed, on the sizes that the "
            "suite shrinks to (cpu: in its file)."
        )
    if not session.environment.has_gpu:
        return "No GPU is used here: nothing was timed, and the suite shrank to smaller sizes (cpu: in its file)."
    if asked and not session.suite.timed:
        return f"The suite {session.suite.name} is checked, not timed."
    return ""
