"""What the commands that launch ports share: their options, the ports that can run, and the checks of a suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import common
from common import Direction, Port, Switches, Target, Unsupported

from . import jobs
from .environment import Environment
from .errors import UsageError, one_line, one_of
from .isolation import Caller, Here, Lost, Worker
from .options import LIMIT_S, Directions, Format
from .provenance import provenance, sources_hash
from .suites import Case, Suite, load_suite
from .trial import Check, Verdict

OK, FAILED, NOTHING_RAN, INTERRUPTED = 0, 1, 2, 130
WORKERS_MOST = 4  # on a CPU; each takes about 1 GB

EACH: dict[Directions, tuple[Direction, ...]] = {
    Directions.FORWARD: ("forward",),
    Directions.BACKWARD: ("backward",),
    Directions.BOTH: ("forward", "backward"),
}

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Request:
    """The options that these commands share. limit_s: seconds that one check or one row of timings may take."""

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

    @property
    def each(self) -> tuple[Direction, ...]:
        """The directions asked for."""
        return EACH[self.directions]


@dataclass
class Session:
    """What a command works with. missing: the reasons of the ports that cannot run here, by name."""

    request: Request
    environment: Environment
    suite: Suite
    target: Target
    ports: list[Port] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    callers: list[Caller] = field(default_factory=list)
    open_port: Callable[[str], Port] = jobs.open_port

    @classmethod
    @contextmanager
    def open(
        cls, request: Request, here: Environment, open_port: Callable[[str], Port] = jobs.open_port
    ) -> Iterator[Session]:
        """A session with the ports of the request that can run here; its workers end with it.

        open_port: where ports come from, by name. Raises UsageError for what can be told before anything runs.
        """
        for name in request.impls:
            if name not in common.port_names():
                raise UsageError(one_of("--impl", common.port_names(), name))
        target = here.target(request.target)
        suite = load_suite(request.suite, small=not here.has_gpu)
        if request.only:
            suite = suite.only(request.only)
        session = cls(request, here, suite, target, open_port=open_port)
        session.callers = session._make_callers()
        try:
            session._open_ports()
            yield session
        finally:
            for caller in session.callers:
                caller.close()

    @cached_property
    def setting(self) -> jobs.Setting:
        """What every call of a worker is told."""
        return jobs.Setting(self.environment, self.target, self.request.seed, self.open_port)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Where the numbers come from, for their records."""
        return provenance(self.environment.device, interpreted=not self.environment.has_gpu)

    @cached_property
    def sources(self) -> dict[str, str | None]:
        """The hash of each port's sources."""
        return {port.name: sources_hash(port) for port in self.ports}

    def about(self, case: Case) -> dict[str, Any]:
        """What the records of a case share, as the arguments of the functions in `records`."""
        shared = {"suite": self.suite.name, "seed": self.request.seed, "facts": self.facts}
        return shared | {"case": case.id, "inputs": case.inputs}

    def _make_callers(self) -> list[Caller]:
        # A GPU is for one process at a time; CPU cores are there to be shared.
        if not self.request.isolated:
            return [Here()]
        if self.environment.has_gpu:
            return [Worker(self.request.limit_s)]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = min(cores, WORKERS_MOST, len(self.suite.cases))
        return [Worker(self.request.limit_s, threads=max(1, cores // count)) for _ in range(count)]

    def _open_ports(self) -> None:
        """Finds the ports that can run here; for the others the reason, which is also said on stderr."""
        for name in self.request.impls:
            try:
                port = self.open_port(name)
                reason = "" if self.environment.has_gpu else self._probe(name)
            except Unsupported as error:
                reason = str(error)
            except Exception as error:  # importing a DSL may raise anything, and costs its own port only
                reason = f"the {name} port could not be imported: {one_line(error)}"
            if reason:
                self.missing[name] = reason
                complain(reason)
            else:
                self.ports.append(port)

    def _probe(self, name: str) -> str:
        try:
            reason = self.callers[0].call(jobs.probe, self.setting, name)
        except Lost:  # whatever it is, a check will find it
            return ""
        return reason and f"the {name} port cannot run here: {reason}"

    def check(self, caller: Caller, name: str, case: Case) -> Iterator[Check]:
        """The checks of a contestant on a case, by direction."""
        failed = False
        for direction in self.request.each:
            about = (name, case.problem, direction, self.target, None, Switches())
            if failed:
                yield Check(*about, "fail", reason="not run: the forward it starts from failed")
                continue
            try:
                yield caller.call(jobs.check, self.setting, name, case, direction)
            except Lost as lost:
                failed = True
                yield Check(*about, "fail", reason=str(lost))

    def for_each_case(self, what: str, function: Callable[[Caller, Case], Outcome]) -> Iterator[tuple[Case, Outcome]]:
        """What the function gives for each case of the suite, in the suite's order, with a progress bar."""
        cases = self.suite.cases
        with progress(what, len(cases)) as begin, _in_order(self.callers, function, cases) as outcomes:
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


def complain(text: str) -> None:
    """One line on stderr."""
    print(f"harness: {text}", file=sys.stderr)


@contextmanager
def _in_order(
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
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
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
