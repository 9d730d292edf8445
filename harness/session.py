"""What the commands that launch ports share: their options, the ports that can run, and the checks of a suite."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import common
from common import Direction, Port, Problem, Target

from . import jobs
from .baselines.protocol import Span
from .compilers import PACKAGES
from .environment import Environment, core_count
from .errors import UsageError, complain, one_of
from .isolation import Caller, Here, Lost, TimedOut, Worker
from .names import own_name, switches_of, variant_of
from .options import LIMIT_S, Directions, Dtype, Format
from .provenance import provenance
from .reader import Record, resumed_records
from .records import RecordFile, problem_fields, record_file, switches_fields
from .sound import check_sound
from .suites import DTYPES, Case, Suite, load_suite
from .trial import Check, Verdict

OK, FAILED, NOTHING_RAN = 0, 1, 2
GIVE_UP_AFTER = 3  # checks of one contestant that took too long, in a row, or rows of timings
TIMING = "timing"  # beside the names of contestants
WORKERS_MOST = 4  # on a CPU; each takes about 1 GB
EVERY_S = 15.0  # between two lines of progress, where there is no terminal

EACH: dict[Directions, tuple[Direction, ...]] = {
    Directions.FORWARD: ("forward",),
    Directions.BACKWARD: ("backward",),
    Directions.BOTH: ("forward", "backward"),
}

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Request:
    """The options that these commands share. limit_s: seconds that one check or one row of timings may take.

    dtype: of every problem, in place of the suite's own. kinds: of the records that the command writes, as far as it
    can resume them.
    """

    kinds: ClassVar[tuple[str, ...]] = ("check", "disagreement")
    impls: tuple[str, ...]
    suite: str = "quick"
    directions: Directions = Directions.BOTH
    target: str = "native"
    only: str | None = None
    seed: int = 0
    json: Path | None = None
    form: Format = Format.TEXT
    limit_s: float = LIMIT_S
    isolated: bool = True
    skip: str | None = None
    resume: Path | None = None
    dtype: Dtype | None = None

    @property
    def each(self) -> tuple[Direction, ...]:
        """The directions asked for."""
        return EACH[self.directions]

    def asks_for(self, variant: str, direction: str) -> bool:
        """Whether the command has contestants of that variant, by `harness.names`, in that direction."""
        return not variant and direction in self.each

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets asked for: one, unless a command takes several."""
        return (self.target,)

    def chosen(self, suite: Suite) -> Suite:
        """The suite in the dtype asked for, and of that the cases asked for. Raises UsageError when there is none."""
        if self.dtype is not None:
            suite = suite.in_dtype(DTYPES[self.dtype])
        if self.only:
            suite = suite.only(self.only)
        if self.skip:
            suite = suite.without(self.skip)
        return suite


@dataclass
class Session:
    """What a command works with. ports: the names of those that can run here, with the hashes of their sources.
    missing: the reasons of those that cannot, by name. others: the targets of the request beside the first."""

    request: Request
    environment: Environment
    suite: Suite
    target: Target
    ports: dict[str, str | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    others: tuple[Target, ...] = ()
    callers: list[Caller] = field(default_factory=list)
    open_port: Callable[[str], Port] = jobs.open_port
    variables: Mapping[str, str] = field(default_factory=dict)
    _earlier: list[Record] = field(default_factory=list)
    _hung: Counter[str] = field(default_factory=Counter)

    @classmethod
    @contextmanager
    def open(
        cls,
        request: Request,
        here: Environment,
        open_port: Callable[[str], Port] = jobs.open_port,
        variables: Mapping[str, str] = MappingProxyType({}),
        suite: Suite | None = None,
        launches: bool = True,
    ) -> Iterator[Session]:
        """A session with the ports of the request that can run here; its workers end with it.

        open_port: where ports come from, by name. variables: of the workers' environment. suite: instead of the one
        of the request. launches: a port has to run here, not only to be imported. Raises UsageError for what can be
        told before anything runs.
        """
        for name in request.impls:
            if name not in common.port_names():
                raise UsageError(one_of("--impl", common.port_names(), name))
        target, *others = dict.fromkeys(here.target(name) for name in request.target_names)
        if suite is None:
            suite = load_suite(request.suite, small=not here.has_gpu)
        suite = request.chosen(suite)
        session = cls(request, here, suite, target, others=tuple(others), open_port=open_port, variables=variables)
        if request.resume is not None:
            session._earlier, note = resumed_records(request.resume)
            check_sound(request.resume, session._earlier, "gone on from")
            if note:
                complain(note)
        session.callers = session._make_callers()
        try:
            session._open_ports(launches)
            session._keep_what_fits()
            yield session
        finally:
            for caller in session.callers:
                caller.close()

    @property
    def targets(self) -> tuple[Target, ...]:
        """All targets of the request."""
        return self.target, *self.others

    @cached_property
    def setting(self) -> jobs.Setting:
        """What every call of a worker is told."""
        return jobs.Setting(self.environment, self.target, self.request.seed, self.open_port)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Where the numbers come from, for their records."""
        return provenance(self.environment.device, interpreted=not self.environment.has_gpu)

    def about(self, case: Case) -> dict[str, Any]:
        """What the records of a case share, as the arguments of the functions in `records`."""
        shared = {"suite": self.suite.name, "seed": self.request.seed, "facts": self.facts}
        return shared | {"case": case.id, "inputs": case.inputs}

    def _make_callers(self) -> list[Caller]:
        # A GPU is for one process at a time; CPU cores are there to be shared.
        if not self.request.isolated:
            return [Here()]
        if self.environment.has_gpu:
            return [Worker(self.request.limit_s, environment=self.variables)]
        cores = core_count()
        count = min(cores, WORKERS_MOST, len(self.suite.cases) or WORKERS_MOST)
        threads = max(1, cores // count)
        return [Worker(self.request.limit_s, threads, self.variables) for _ in range(count)]

    def _open_ports(self, launches: bool) -> None:
        """Finds the ports that can run here; for the others the reason, which is also said on stderr."""
        for name in self.request.impls:
            opened = jobs.opened(self.callers[0], self.setting, name)
            reason = opened.reason
            if not reason and launches and not self.environment.has_gpu:
                reason = self._probe(name)
            if reason:
                self.missing[name] = reason
                complain(reason)
            else:
                self.ports[name] = opened.sources

    def _probe(self, name: str) -> str:
        try:
            reason = self.callers[0].call(jobs.probe, self.setting, name)
        except Lost:  # whatever it is, a check will find it
            return ""
        return reason and f"the {name} port cannot run here: {reason}"

    def check(
        self, caller: Caller, name: str, case: Case, directions: Sequence[Direction] | None = None
    ) -> Iterator[Check]:
        """The checks of a contestant on a case, by direction; default, those of the request.

        One that hangs case after case is no longer called.
        """
        failed = False
        for direction in directions or self.request.each:
            about = (self.setting, name, case, direction)
            own = own_name(name)
            if failed:
                yield jobs.blank(*about, "fail", "not run: the forward it starts from failed")
                continue
            if self._hung[own] >= GIVE_UP_AFTER:
                yield jobs.blank(*about, "fail", f"not run: the {GIVE_UP_AFTER} checks before it took too long")
                continue
            try:
                yield caller.call(jobs.check, *about)
                self._hung[own] = 0
            except Lost as lost:
                failed = True
                self._hung[own] += isinstance(lost, TimedOut)
                yield jobs.blank(*about, "fail", str(lost))

    def time(self, caller: Caller, names: Sequence[str], case: Case, span: Span, rounds: int) -> jobs.TimedRow:
        """The timing of contestants against each other; that it was lost costs its own row."""
        if self._hung[TIMING] >= GIVE_UP_AFTER:
            return jobs.TimedRow(lost=f"the {GIVE_UP_AFTER} rows before it took too long")
        try:
            row = caller.call(jobs.time_row, self.setting, names, case, span, rounds)
            self._hung[TIMING] = 0
        except Lost as lost:
            self._hung[TIMING] += isinstance(lost, TimedOut)
            return jobs.TimedRow(lost=f"it {lost}")
        return row

    def record_file(self) -> AbstractContextManager[RecordFile | None]:
        """Where the records of the request go, if it names a file."""
        return record_file(
            self.request.json, resumes=self.request.resume is not None, use="--resume {0} goes on from there"
        )

    def earlier(self, case: Case) -> list[Record]:
        """The records of the case in the file to resume, as far as they are of these ports, this card and these
        packages, made of the sources that are here."""
        return [record for record in self._earlier if record["kind"] != "build" and self._is_of(record, case)]

    def earlier_builds(self, problem: Problem) -> list[Record]:
        """The builds of a problem in the file to resume, of the sources that are here by this version of their
        compiler. On which machine that was makes no difference to what a compiler writes."""
        wanted = problem_fields(problem)
        return [record for record in self._earlier if record["kind"] == "build" and record["problem"] == wanted]

    def _keep_what_fits(self) -> None:
        """Keeps of the records to resume those that this run can use, and says why not the others.

        Raises UsageError when there are some and none is of use: the run would replace them all by its own.
        """
        if not self.ports:
            return
        misfits = [self._misfit(record) for record in self._earlier]
        kept = [record for record, misfit in zip(self._earlier, misfits, strict=True) if not misfit]
        reasons = Counter(misfit for misfit in misfits if misfit).most_common()
        if not reasons:
            return
        of, why = f"records of {self.request.resume}", ", ".join(f"{number} {reason}" for reason, number in reasons)
        if not kept:
            raise UsageError(
                f"none of the {len(misfits)} {of} fits this run ({why}): leave --resume out, with a new file for --json"
            )
        complain(f"{len(kept)} of {len(misfits)} {of} fit this run; the others do not: {why}")
        self._earlier = kept

    def _misfit(self, record: Record) -> str:
        """Why this run has no use for a record; empty for one that it can go on from."""
        if record["kind"] not in self.request.kinds:
            return "of another command"
        names = record["ports"] if record["kind"] == "disagreement" else [record["port"]]
        hashes = record["sources"] if record["kind"] == "disagreement" else {record["port"]: record["sources"]}
        packages = [facts["packages"] for facts in (record["provenance"], self.facts)]
        cases: Iterable[Case] = self.suite.cases
        if not all(self.request.asks_for(variant_of(name), record["direction"]) for name in names):
            return "of another command or direction"
        if not all(own_name(name) in self.ports for name in names):
            return "of other ports"
        if record["kind"] == "check" and record["switches"] != switches_fields(switches_of(record["port"])):
            return "of other switches"
        if record["kind"] == "build":
            compilers = [PACKAGES.get(own_name(name)) for name in names]
            packages = [{name: versions.get(name) for name in compilers} for versions in packages]
            is_of_a_case = any(record["problem"] == problem_fields(case.problem) for case in cases)
        else:
            if any(record["provenance"][key] != self.facts[key] for key in ("device", "card", "interpreted")):
                return "from another card"
            if any(record["provenance"][key] != self.facts[key] for key in ("driver", "cuda")):
                return "with another driver or CUDA"
            is_of_a_case = any(self._is_of(record, case) for case in cases)
        if packages[0] != packages[1]:
            return "with other packages"
        if not all(hashes[name] == self.ports[own_name(name)] is not None for name in names):
            return "of other sources"
        if record["target"] not in [{"name": target.name, "sm": target.sm} for target in self.targets]:
            return "for another target"
        return "" if is_of_a_case else "of other problems, inputs or another seed"

    def _is_of(self, record: Record, case: Case) -> bool:
        """Whether a check or a disagreement is of that case, with the inputs that it has in this run."""
        about = {
            "suite": self.suite.name,
            "case": case.id,
            "problem": problem_fields(case.problem),
            "inputs": asdict(case.inputs),
            "seed": self.request.seed,
        }
        return all(record[key] == value for key, value in about.items())

    def for_each_case(self, what: str, function: Callable[[Caller, Case], Outcome]) -> Iterator[tuple[Case, Outcome]]:
        """What the function gives for each case of the suite, in the suite's order, with a progress bar."""
        cases = self.suite.cases
        with progress(what, len(cases)) as begin, in_order(self.callers, function, cases) as outcomes:
            for case, outcome in zip(cases, outcomes, strict=True):
                begin(f"{case.id} {case.problem.id}")
                yield case, outcome()


def status_of(session: Session, checks: Iterable[Check], *, all_asked: bool = True) -> int:
    """The exit status after these checks: whether one failed, or else some port could do nothing of what was asked.

    all_asked: a port that cannot run here counts among those.
    """
    verdicts: dict[str, set[Verdict]] = {}
    reasons: dict[str, str] = {}
    for check in checks:
        verdicts.setdefault(check.port, set()).add(check.verdict)
        reasons.setdefault(check.port, check.reason)
    if any("fail" in seen for seen in verdicts.values()):
        return FAILED
    idle = [name for name, seen in verdicts.items() if seen == {"unsupported"}]
    for name in idle:
        complain(f"the {name} port ran none of the problems: {reasons[name]}")
    return NOTHING_RAN if idle or not verdicts or (all_asked and session.missing) else OK


@contextmanager
def in_order(
    callers: Sequence[Caller], function: Callable[[Caller, Item], Outcome], items: Iterable[Item]
) -> Iterator[Iterator[Callable[[], Outcome]]]:
    """A function for each item, which waits for that item's outcome. Several callers share the items among them."""
    if len(callers) == 1:
        yield (lambda item=item: function(callers[0], item) for item in items)  # type: ignore[misc]
        return
    idle: SimpleQueue[Caller] = SimpleQueue()
    for caller in callers:
        idle.put(caller)

    def run(item: Item) -> Outcome:
        caller = idle.get()
        try:
            return function(caller, item)
        finally:
            idle.put(caller)

    with ThreadPoolExecutor(len(callers)) as pool:
        futures = [pool.submit(run, item) for item in items]
        try:
            yield (future.result for future in futures)
        except BaseException:
            # Otherwise the pool would wait for all that is under way.
            for future in futures:
                future.cancel()
            for caller in callers:
                caller.close()
            raise


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """A function to call with each thing as it begins; on stderr a bar, or lines where no terminal is.

    total: how many there will be; None when that is not known.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        with _told(what, total) as begin:
            yield begin
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


@contextmanager
def _told(what: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """The same in lines: the first thing that begins is told at once, and then every `EVERY_S` seconds what is on."""
    of = "" if total is None else f" of {total}"
    begun, line, since = 0, "", time.monotonic()
    ended = Event()

    def begin(doing: str) -> None:
        nonlocal begun, line
        begun += 1
        line = " ".join(f"{what} {begun}{of} {doing}".split())
        if begun == 1:
            complain(line)

    def repeat() -> None:
        while not ended.wait(EVERY_S):
            if line:
                complain(f"{line}, after {time.monotonic() - since:.0f} s")

    teller = Thread(target=repeat, daemon=True)
    teller.start()
    try:
        yield begin
    finally:
        ended.set()
        teller.join()
