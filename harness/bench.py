"""`harness bench`: all ports and all baselines timed against each other, forward, backward, and both in one launch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from common import Direction, Port

from . import jobs, timing
from .ahead import compile_ahead
from .baselines import BASELINES
from .baselines.protocol import SPANS, Span
from .bench_tables import bench_tables
from .environment import Environment
from .errors import UsageError, one_of
from .isolation import Caller, Lost, Worker
from .names import own_name
from .reader import Record
from .records import RecordFile, check_of, check_record
from .rows import rival, time_passed
from .session import NOTHING_RAN, Request, Session, status_of
from .suites import Case
from .tables import print_tables
from .trial import Check, together

# Where compilers keep what they have compiled: of Triton, TileLang, our CuTe port, PyTorch's inductor and the driver.
CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "FA2_CUTE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclass(frozen=True)
class BenchRequest(Request):
    """The options of the command. impls may name a port twice, which is then timed against itself.

    baselines: the first is what speeds are relative to. compiles: also tell what compiling takes, from empty caches.
    """

    kinds: ClassVar[tuple[str, ...]] = ("check",)
    spans: tuple[Span, ...] = tuple(SPANS)
    baselines: tuple[str, ...] = tuple(BASELINES)
    rounds: int = timing.ROUNDS
    compiles: bool = True

    @property
    def each(self) -> tuple[Direction, ...]:
        """The directions that have to be checked."""
        return tuple(d for d in SPANS["both"] if any(d in SPANS[span] for span in self.spans))

    def asks_for(self, variant: str, direction: str) -> bool:
        """Whether these are a port, or one named once more, and a span asked for."""
        return (not variant or variant.isdecimal()) and direction in self.spans

    @property
    def labels(self) -> tuple[str, ...]:
        """The ports as contestants: `triton`, `triton#2` of one that is named twice."""
        named = [(name, self.impls[: i + 1].count(name)) for i, name in enumerate(self.impls)]
        return tuple(name if count == 1 else f"{name}#{count}" for name, count in named)


@dataclass
class Bench:
    """A run of the command, and the records that it has so far."""

    request: BenchRequest
    session: Session
    file: RecordFile | None = None
    warm: Worker | None = None
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Keeps a record, on disk as well."""
        self.records.append(record)
        if self.file is not None:
            self.file.write(record)

    @property
    def labels(self) -> list[str]:
        """The contestants among the ports that can run here."""
        return [label for label in self.request.labels if own_name(label) in self.session.ports]


def bench(
    request: BenchRequest,
    here: Environment,
    open_port: Callable[[str], Port] = jobs.open_port,
    *,
    all_asked: bool = True,
) -> int:
    """Runs the command and returns its exit status.

    all_asked: a port that cannot run is an error, and not just a column that says so. open_port: where ports come
    from, by name. Raises UsageError for what can be told before anything runs.
    """
    if not here.has_gpu:
        raise UsageError("harness bench times ports, which takes a GPU; without one harness run checks them")
    for name in request.baselines:
        if name not in BASELINES:
            raise UsageError(one_of("--baseline", BASELINES, name))
    unique = replace(request, impls=tuple(dict.fromkeys(request.impls)))
    with _caches(request) as variables, Session.open(unique, here, open_port, variables) as session:
        if not session.ports:
            return NOTHING_RAN
        this = Bench(request, session)
        with session.record_file() as file:
            this.file = file
            _run(this, variables)
    return status_of(session, (check_of(record) for record in this.records), all_asked=all_asked)


@contextmanager
def _caches(request: BenchRequest) -> Iterator[dict[str, str]]:
    """Variables that send every compiler to an empty cache; none where that was not asked for."""
    if not request.compiles:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="harness-caches-", ignore_cleanup_errors=True) as folder:
        yield {name: str(Path(folder) / name) for name in CACHES}


def _run(this: Bench, variables: dict[str, str]) -> None:
    if not this.request.compiles:  # else what compiling takes is measured, a check at a time
        compile_ahead(this.session)
    if variables and this.request.isolated:
        this.warm = Worker(this.request.limit_s, environment=variables)
    try:
        for _ in this.session.for_each_case("timing", lambda caller, case: _case(this, caller, case)):
            pass
    finally:
        if this.warm is not None:
            this.warm.close()
        missing = {name: this.session.missing[name] for name in this.request.impls if name in this.session.missing}
        print_tables(bench_tables(this.records, missing), this.request.form)


def _case(this: Bench, caller: Caller, case: Case) -> None:
    """Checks everybody on a case and times who passed, unless a record of each is there already."""
    session, request = this.session, this.request
    earlier = {(r["port"], r["direction"]): r for r in session.earlier(case) if r["kind"] == "check"}
    wanted = [(label, span) for span in request.spans for label in this.labels]
    if all(key in earlier and _is_complete(earlier[key], request) for key in wanted):
        for key in wanted:
            this.add(earlier[key])
        return
    names = (*session.ports, *request.baselines)
    checks = {(check.port, check.direction): check for name in names for check in session.check(caller, name, case)}
    warm = {key: _warm(this, case, check) for key, check in checks.items() if key[0] in session.ports}
    for span in request.spans:
        contestants = {
            label: together(span, [checks[own_name(label), direction] for direction in SPANS[span]])
            for label in (*this.labels, *request.baselines)
        }
        row = time_passed(session, caller, case, span, contestants, request.rounds)
        beside = [rival(contestants[name], row) for name in request.baselines]
        for label in this.labels:
            check = replace(contestants[label], port=label)
            seconds = [warm[own_name(label), direction] for direction in SPANS[span]]
            known = [s for s in seconds if s is not None]
            compile_s = None
            if len(known) == len(seconds) and check.seconds:
                compile_s = {"cold": check.seconds[0], "warm": sum(known)}
            record = check_record(
                check,
                sources=session.ports[own_name(label)],
                **session.about(case),
                timing=row.of(label),
                untimed=row.untimed(label),
                baselines=beside,
                compile_s=compile_s,
            )
            this.add(record)


def _is_complete(record: Record, request: BenchRequest) -> bool:
    """Whether nothing that was asked for is left to do."""
    rivals = [b["port"] for b in record["baselines"]]
    return rivals == list(request.baselines) and (bool(record["samples"]) or record["verdict"] != "pass")


def _warm(this: Bench, case: Case, check: Check) -> float | None:
    """Seconds of the first call in a process that finds what was compiled in a cache on disk; None when not asked."""
    if this.warm is None or check.verdict != "pass":
        return None
    try:
        return this.warm.call(jobs.first_call, this.session.setting, check.port, case, check.direction)
    except Lost:  # the check passed: what is lost is this one figure
        return None
