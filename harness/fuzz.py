"""`harness fuzz`: random problems over the whole contract, each checked like those of a suite.

A failing one is made as small and plain as it still fails, printed as a command that repeats it, and written as a suite
of one case. The same seed gives the same problems in the same order; how many depends on the minutes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import Port

from . import jobs
from .checks import RULE
from .environment import Environment
from .errors import UsageError
from .generate import as_suite, random_case, shrunk
from .isolation import Caller
from .records import RecordFile, check_record, record_file
from .session import NOTHING_RAN, Request, Session, in_order, progress, status_of
from .suites import Case, Suite
from .tables import Table, print_tables
from .trial import VERDICTS, Check

SHRUNK_MOST = 3  # failing cases of a port; the others are only counted


@dataclass(frozen=True)
class FuzzRequest(Request):
    """The options of the command. minutes: after them nothing more is begun. most: problems at most; None for as many
    as there is time for. folder: where failing cases are written."""

    minutes: float = 1.0
    most: int | None = None
    folder: Path = Path()


@dataclass
class Found:
    """A failing case, and what it was shrunk to."""

    port: str
    case: Case
    checks: list[Check]
    path: Path
    is_shrunk: bool = False


@dataclass
class Fuzz:
    """A run of the command, and what it has so far."""

    request: FuzzRequest
    session: Session
    checks: list[Check] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    problems: int = 0


def fuzz(request: FuzzRequest, here: Environment, open_port: Callable[[str], Port] = jobs.open_port) -> int:
    """Runs the command and returns its exit status.

    open_port: where ports come from, by name. Raises UsageError for what can be told before anything runs.
    """
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {request.folder} is no folder and cannot be made one: {error.strerror}") from error
    suite = Suite("fuzz", "", timed=False, small=not here.has_gpu, cases=())
    with Session.open(request, here, open_port, suite=suite) as session:
        if not session.ports:
            return NOTHING_RAN
        this = Fuzz(request, session)
        with record_file(request.json) as file:
            try:
                _run(this, file)
            finally:
                print_tables(fuzz_tables(this), request.form)
    return status_of(session, this.checks)


def _run(this: Fuzz, file: RecordFile | None) -> None:
    request, session = this.request, this.session
    rng = random.Random(request.seed)
    most = request.most if request.most is not None else 10**9
    deadline = time.monotonic() + 60 * request.minutes

    def checked(caller: Caller, case: Case) -> list[Check]:
        return [check for name in session.ports for check in session.check(caller, name, case)]

    with progress("fuzzing", None) as begin:
        while this.problems < most and time.monotonic() < deadline:
            # As many at once as there are processes, so that the order of what is found is that of the problems.
            batch = min(2 * len(session.callers), most - this.problems)
            names = [f"fuzz-{request.seed}-{this.problems + i}" for i in range(batch)]
            cases = [random_case(rng, name, small=session.suite.small) for name in names]
            with in_order(session.callers, checked, cases) as outcomes:
                for case, outcome in zip(cases, outcomes, strict=True):
                    begin(f"{case.id} {case.problem.id}")
                    _take(this, case, outcome(), file)
            this.problems += batch
            _shrink_new(this)


def _take(this: Fuzz, case: Case, checks: list[Check], file: RecordFile | None) -> None:
    this.checks += checks
    if file is not None:
        for check in checks:
            file.write(check_record(check, sources=this.session.ports[check.port], **this.session.about(case)))
    for port in this.session.ports:
        failed = [check for check in checks if check.port == port and check.verdict == "fail"]
        if failed and sum(found.port == port for found in this.found) < SHRUNK_MOST:
            path = this.request.folder / f"{case.id}-{port}.yaml"
            this.found.append(Found(port, case, failed, path))


def _shrink_new(this: Fuzz) -> None:
    """Shrinks and writes what was found since."""
    session = this.session
    for found in this.found:
        if found.is_shrunk:
            continue

        def failures(case: Case, port: str = found.port) -> list[Check]:
            return [c for c in session.check(session.callers[0], port, case) if c.verdict == "fail"]

        found.case = shrunk(found.case, lambda case: bool(failures(case)))
        found.checks = failures(found.case) or found.checks
        about = f"{found.port} failed this problem, made as small as it still fails; seed {this.request.seed}."
        found.is_shrunk = True
        found.path.write_text(as_suite(found.case, about), encoding="utf-8")


def fuzz_tables(this: Fuzz) -> list[Table]:
    """How many problems passed, with the worst of them; and the failing ones with the commands that repeat them."""
    session, request = this.session, this.request
    table = Table(
        f"{this.problems} random problems on {session.environment.path(session.target)}, seed {request.seed}",
        ("port", "checks", *VERDICTS, "largest error / allowed", "of"),
    )
    for port in session.ports:
        checks = [check for check in this.checks if check.port == port]
        counts = Counter(check.verdict for check in checks)
        tensors = [(t, check) for check in checks for t in check.tensors]
        worst, where = max(tensors, key=lambda pair: pair[0].ratio, default=(None, None))
        ratio, of = ("–", "–") if worst is None or where is None else (f"{worst.ratio:.2f}", "")
        if worst is not None and where is not None:
            of = f"{worst.name} of {where.problem.id}"
        numbers = (str(counts[verdict]) for verdict in VERDICTS)
        table.add(port, str(len(checks)), *numbers, ratio, of)
    for found in this.found:
        lines = [f"{check.direction}: {line}" for check in found.checks for line in check.complaints()[:2]]
        table.notes += [f"FAIL {found.port} {found.case.problem.id}, inputs {found.case.inputs}; {x}" for x in lines]
        table.notes.append(f"  {_command(this, found)}")
    table.notes.append(RULE)
    return [table]


def _command(this: Fuzz, found: Found) -> str:
    request = this.request
    target = "" if request.target == "native" else f" --target {request.target}"
    return f"harness run --impl {found.port} --suite {found.path} --seed {request.seed}{target} --no-timing"
