"""`harness run`: checks every problem of a suite, then times what passed beside SDPA."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import common
from common import Direction, Port, Problem, Switches, Target, Unsupported

from . import timing
from .baselines import SDPA_FLASH, Baseline
from .checks import NAMES, RULE, Truth
from .environment import Environment
from .errors import UsageError, one_line, one_of
from .inputs import Inputs, InputSpec, make_inputs
from .options import Directions, Format
from .provenance import provenance, sources_hash
from .records import RecordFile, check_record
from .suites import Case, Suite, load_suite
from .tables import Table, print_tables, problem_cells
from .timing import FLOP_CONVENTION, CudaStopwatch, Timing, speed_cells
from .trial import Check, Trial, Verdict

OK, FAILED, NOTHING_RAN, INTERRUPTED = 0, 1, 2, 130


EACH: dict[Directions, tuple[Direction, ...]] = {
    Directions.FORWARD: ("forward",),
    Directions.BACKWARD: ("backward",),
    Directions.BOTH: ("forward", "backward"),
}


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    impls: tuple[str, ...]
    suite: str = "quick"
    directions: Directions = Directions.BOTH
    target: str = "native"
    only: str | None = None
    seed: int = 0
    rounds: int = timing.ROUNDS
    timed: bool = True
    json: Path | None = None
    form: Format = Format.TEXT

    @property
    def each(self) -> tuple[Direction, ...]:
        """The directions asked for."""
        return EACH[self.directions]


@dataclass
class Result:
    """One cell's worth: a check and, where it passed on a GPU, a timing and what it was timed against."""

    case: Case
    check: Check
    timing: Timing | None = None
    baseline: Check | None = None
    untimed: str = ""


@dataclass
class Session:
    """What a run works with, and what it has so far."""

    request: Request
    environment: Environment
    suite: Suite
    target: Target
    ports: list[Port]
    results: list[Result] = field(default_factory=list)

    @property
    def is_timed(self) -> bool:
        """Whether timings follow the checks."""
        return self.request.timed and self.suite.timed and self.environment.has_gpu

    def of(self, port: Port, direction: Direction) -> list[Result]:
        """The results of a port and direction, in the suite's order."""
        return [r for r in self.results if r.check.port == port.name and r.check.direction == direction]

    def inputs(self, case: Case) -> Inputs:
        """The inputs of a case: the same in its check and in its timing."""
        return make_inputs(case.problem, case.inputs, seed=self.request.seed, device=self.environment.device)

    def trial(self, port: Port, case: Case, inputs: Inputs, truth: Truth) -> Trial:
        """A port on a case with the run's target; a baseline runs as it is."""
        is_baseline = isinstance(port, Baseline)
        target = self.environment.native if is_baseline else self.target
        return Trial(port, case.problem, inputs, truth, target=target, is_baseline=is_baseline)


class Recorder:
    """Writes each result once: when nothing more is to come for it, or at the end."""

    def __init__(self, session: Session, records: RecordFile | None) -> None:
        self._session, self._records = session, records
        self._written: set[int] = set()

    @cached_property
    def _facts(self) -> dict[str, Any]:
        environment = self._session.environment
        return provenance(environment.device, interpreted=not environment.has_gpu)

    @cached_property
    def _sources(self) -> dict[str, str | None]:
        return {port.name: sources_hash(port) for port in self._session.ports}

    def write(self, result: Result) -> None:
        """Writes a result that is complete."""
        if self._records is None or id(result) in self._written:
            return
        self._written.add(id(result))
        record = check_record(
            result.check,
            suite=self._session.suite.name,
            case=result.case.id,
            inputs=result.case.inputs,
            seed=self._session.request.seed,
            sources=self._sources[result.check.port],
            facts=self._facts,
            timing=result.timing,
            baseline=result.baseline,
        )
        self._records.write(record)

    def write_rest(self) -> None:
        """Writes what still waits for a timing."""
        for result in self._session.results:
            self.write(result)


def run(request: Request, here: Environment) -> int:
    """Runs the command and returns its exit status. Raises UsageError for what can be told before anything runs."""
    for name in request.impls:
        if name not in common.port_names():
            raise UsageError(one_of("--impl", common.port_names(), name))
    target = here.target(request.target)
    suite = load_suite(request.suite, small=not here.has_gpu)
    if request.only:
        suite = suite.only(request.only)
    ports = _open_ports(request.impls, here, target)
    if not ports:
        return NOTHING_RAN
    session = Session(request, here, suite, target, ports)
    try:
        with RecordFile(request.json) if request.json else nullcontext() as records:
            _run(session, Recorder(session, records))
    except KeyboardInterrupt:
        kept = f"; the records so far are in {records.partial}" if records else ""
        complain(f"interrupted{kept}")
        return INTERRUPTED
    _print_closing(session)
    return _status(session, asked=len(request.impls))


def complain(text: str) -> None:
    """One line on stderr."""
    print(f"harness: {text}", file=sys.stderr)


def _run(session: Session, recorder: Recorder) -> None:
    form = session.request.form
    checked = False
    try:
        _check_all(session, recorder)
        checked = True
        print_tables(check_tables(session), form)
        if session.is_timed:
            _time_all(session, recorder)
    except KeyboardInterrupt:
        if not checked:
            print_tables(check_tables(session), form)
        raise
    finally:
        print_tables(timing_tables(session), form)
        recorder.write_rest()


def _open_ports(impls: Iterable[str], here: Environment, target: Target) -> list[Port]:
    """The ports that can run here; for the others the reason, on stderr."""
    ports = []
    for name in impls:
        try:
            port = common.port(name)
            if not here.has_gpu:
                probe(port, here, target)
        except Unsupported as error:
            complain(str(error))
        except Exception as error:  # importing a DSL may raise anything, and costs its own port only
            complain(f"the {name} port could not be imported: {one_line(error)}")
        else:
            ports.append(port)
    return ports


PROBE = Problem(batch=1, heads_q=1, heads_kv=1, len_q=16, len_k=16, head_dim=64, dtype=torch.float16)


def probe(port: Port, here: Environment, target: Target, *, strict: bool = False) -> None:
    """Runs one tile, to learn whether the port runs here at all. Raises Unsupported, naming the port, when it does not.

    Whatever else it raises is for a check to find, unless strict.
    """
    x = make_inputs(PROBE, InputSpec(), seed=0, device=here.device)
    try:
        port.forward(x.q, x.k, x.v, PROBE, target=target)
    except Unsupported as error:
        raise Unsupported(f"the {port.name} port cannot run here: {error}") from error
    except Exception:
        if strict:
            raise


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with each thing as it begins; a bar on stderr when a person is looking."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda doing: None
        return
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def begin(doing: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=doing)
            begun += 1

        yield begin


def _check_all(session: Session, recorder: Recorder) -> None:
    with _progress("checking", len(session.suite.cases)) as begin:
        for case in session.suite.cases:
            begin(f"{case.id} {case.problem.id}")
            results = _check_case(session, case)
            session.results += results
            for result in results:
                if not session.is_timed or result.check.verdict != "pass":
                    recorder.write(result)


def _check_case(session: Session, case: Case) -> list[Result]:
    """The checks of all ports on one case, and of the baseline when timings are to follow."""
    directions = session.request.each
    try:
        inputs = session.inputs(case)
        truth = Truth(case.problem, inputs)
        for direction in directions:
            truth.prepare(direction)
    except Exception as error:  # a card that is too small, or that a kernel before has left unusable
        verdict: Verdict = "unsupported" if isinstance(error, torch.OutOfMemoryError) else "fail"
        reason = f"not checked, the inputs or the oracle raised {one_line(error)}"
        about = (session.target, None, Switches(), verdict)
        return [
            Result(case, Check(port.name, case.problem, direction, *about, reason=reason))
            for port in session.ports
            for direction in directions
        ]
    results = []
    for port in session.ports:
        trial = session.trial(port, case, inputs, truth)
        results += [Result(case, trial.check(direction)) for direction in directions]
    if session.is_timed:
        trial = session.trial(SDPA_FLASH, case, inputs, truth)
        baselines = {direction: trial.check(direction) for direction in directions}
        for result in results:
            result.baseline = baselines[result.check.direction]
    return results


def _time_all(session: Session, recorder: Recorder) -> None:
    rows: dict[tuple[int, Direction], list[Result]] = {}  # all contestants of a row are timed together
    for result in session.results:
        if result.check.verdict == "pass":
            rows.setdefault((id(result.case), result.check.direction), []).append(result)
    if not rows:
        return
    stopwatch = CudaStopwatch(session.environment.device)
    with _progress("timing", len(rows)) as begin:
        for results in rows.values():
            case, direction = results[0].case, results[0].check.direction
            begin(f"{direction} {case.id} {case.problem.id}")
            try:
                timed = _time_row(session, stopwatch, results)
            except Exception as error:  # out of memory, say: it costs its own row
                for result in results:
                    result.untimed = f"not timed: {one_line(error)}"
                continue
            for result in results:
                result.timing = timed
                recorder.write(result)


def _time_row(session: Session, stopwatch: CudaStopwatch, results: list[Result]) -> Timing | None:
    """Times the ports that passed a row's check, and the baseline when it passed its own."""
    case, direction, baseline = results[0].case, results[0].check.direction, results[0].baseline
    if case.problem.flops(direction) == 0:
        return None
    inputs = session.inputs(case)
    truth = Truth(case.problem, inputs)
    passed = {result.check.port for result in results}
    launches: dict[str, timing.Launch] = {
        port.name: session.trial(port, case, inputs, truth).launch(direction)
        for port in session.ports
        if port.name in passed
    }
    with ExitStack() as stack:
        if baseline is not None and baseline.verdict == "pass":
            stack.enter_context(SDPA_FLASH.context())
            q, k, v, do = (x if x.dim() == 4 else x.unsqueeze(1) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
            launches[SDPA_FLASH.name] = (
                SDPA_FLASH.launch_forward(q, k, v, case.problem)
                if direction == "forward"
                else SDPA_FLASH.launch_backward(do, q, k, v, case.problem)
            )
        with torch.no_grad():
            return timing.measure(launches, stopwatch, rounds=session.request.rounds, seed=session.request.seed)


def check_tables(session: Session) -> list[Table]:
    """A table of checks for each port: error over allowed error by tensor, and the verdict."""
    directions = session.request.each
    names = [name for direction in directions for name in NAMES[direction]]
    tables = []
    for port in session.ports:
        path = session.environment.path(session.target)
        table = Table(
            f"Checks of {port.name}, {path}, suite {session.suite.name}, seed {session.request.seed}: "
            "error / allowed error, above 1 is wrong",
            ("case", "problem", *names, "verdict"),
            labels=2,
        )
        by_direction = [session.of(port, direction) for direction in directions]
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
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("pass", "fail", "unsupported"))
        table.notes.append(f"{port.name}: {counts.total()} checks of {len(table.rows)} problems: {told}")
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


def timing_tables(session: Session) -> list[Table]:
    """A table for each port and direction that has timings, beside the baseline."""
    tables = []
    for port, direction in product(session.ports, session.request.each):
        results = [r for r in session.of(port, direction) if r.timing is not None or r.untimed]
        if results:
            tables.append(_timing_table(session, port, direction, results))
    return tables


def _timing_table(session: Session, port: Port, direction: Direction, results: list[Result]) -> Table:
    ours, theirs = port.name, SDPA_FLASH.title
    path = session.environment.path(session.target)
    table = Table(
        f"{ours} {direction}, {path}, beside {theirs}, suite {session.suite.name}",
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
            table.notes.append(f"{result.case.id} {result.case.problem.id}: {result.untimed}")
        if result.timing is not None and result.timing.throttled:
            reasons = sorted({reason for r in result.timing.rounds for reason in r.sensors.throttled})
            table.notes.append(
                f"{result.case.id} {result.case.problem.id}: {result.timing.throttled} of "
                f"{len(result.timing.rounds)} rounds throttled ({', '.join(reasons)})"
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
    return *speed_cells(times, ours, theirs, check.problem.flops(check.direction)), *host, *seconds


def _print_closing(session: Session) -> None:
    note = _closing(session)
    if note:
        print(f"# {note}" if session.request.form is Format.CSV else note)


def _closing(session: Session) -> str:
    if not session.environment.has_gpu and "triton" in (port.name for port in session.ports):
        return (
            "No GPU is used here: Triton's interpreter ran the kernels, which has no speed, on the sizes that the "
            "suite shrinks to (cpu: in its file)."
        )
    if not session.environment.has_gpu:
        return "No GPU is used here: nothing was timed, and the suite shrank to smaller sizes (cpu: in its file)."
    if session.request.timed and not session.suite.timed:
        return f"The suite {session.suite.name} is checked, not timed."
    return ""


def _status(session: Session, asked: int) -> int:
    verdicts: dict[str, set[Verdict]] = {}
    for result in session.results:
        verdicts.setdefault(result.check.port, set()).add(result.check.verdict)
    if any("fail" in seen for seen in verdicts.values()):
        return FAILED
    idle = [name for name, seen in verdicts.items() if seen == {"unsupported"}]
    for name in idle:
        reason = next(r.check.reason for r in session.results if r.check.port == name)
        complain(f"the {name} port ran none of the problems: {reason}")
    return NOTHING_RAN if idle or len(session.ports) < asked else OK
