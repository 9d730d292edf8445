"""`harness ladder`: what each optimisation is worth, in every port and on every path, rung by rung.

All rungs of all ports on all paths are checked on a problem, and those that pass are timed by turns in one process
beside the forced flash backend of SDPA. What a rung gains is told over the one before; with one switch off at a time,
what is lost without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from common import RUNGS, Port

from . import jobs, timing
from .ahead import compile_ahead
from .baselines import SDPA_FLASH
from .environment import Environment
from .errors import complain
from .isolation import Caller
from .jobs import TimedRow
from .ladder_tables import ladder_tables
from .names import LEFT_OUT, name_of, own_name, rival_of, variant_of, without_path
from .reader import Record
from .records import RecordFile, check_of, check_record
from .rows import rival, time_passed
from .run import print_closing
from .session import NOTHING_RAN, Request, Session, status_of
from .suites import Case, load_suite
from .tables import print_tables
from .trial import Check


@dataclass(frozen=True)
class LadderRequest(Request):
    """The options of the command. target: one, or several with commas. longest: only the suite's longest problems.

    leave_one_out: all switches on and then each alone off, not one more at a time.
    """

    kinds: ClassVar[tuple[str, ...]] = ("check",)
    suite: str = "walkthrough"
    longest: bool = False
    leave_one_out: bool = False
    rounds: int = timing.ROUNDS

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets asked for."""
        return tuple(name.strip() for name in self.target.split(","))

    def asks_for(self, variant: str, direction: str) -> bool:
        """Whether that is a rung of this ladder, and a direction asked for."""
        return variant in self.variants and direction in self.each

    @property
    def variants(self) -> tuple[str, ...]:
        """What is timed of each port, by the names of `harness.names`."""
        return LEFT_OUT if self.leave_one_out else RUNGS


def ladder(
    request: LadderRequest,
    here: Environment,
    open_port: Callable[[str], Port] = jobs.open_port,
    *,
    all_asked: bool = True,
) -> int:
    """Runs the command and returns its exit status.

    all_asked: a port that cannot run is an error, and not just a line that says so. open_port: where ports come from,
    by name. Raises UsageError for what can be told before anything runs.
    """
    suite = load_suite(request.suite, small=not here.has_gpu)
    suite = suite.longest() if request.longest else suite
    records: list[Record] = []
    with Session.open(request, here, open_port, suite=suite) as session:
        if not session.ports:
            return NOTHING_RAN
        problems, paths = len(session.suite.cases), len(session.targets)
        on = f", on {paths} code paths," if paths > 1 else ""
        of = f"{problems} problem{'s' if problems > 1 else ''}"
        complain(f"{len(request.variants)} rungs of {', '.join(session.ports)}{on} × {of}")
        with session.record_file() as file:
            _run(session, request, records, file)
    print_closing(session)
    checks = (check_of(record) for record in records)
    return status_of(session, (replace(check, port=own_name(check.port)) for check in checks), all_asked=all_asked)


def _run(session: Session, request: LadderRequest, records: list[Record], file: RecordFile | None) -> None:
    names = [
        name_of(own, variant, target.name)
        for target, own, variant in product(session.targets, session.ports, request.variants)
    ]

    def climb(caller: Caller, case: Case) -> list[Record]:
        return _earlier(session, names, case) or _case(session, request, names, caller, case)

    try:
        compile_ahead(session, names)
        for _, found in session.for_each_case("climbing", climb):
            for record in found:
                records.append(record)
                if file is not None:
                    file.write(record)
    finally:
        print_tables(ladder_tables(records, session.missing), request.form)


def _case(session: Session, request: LadderRequest, names: list[str], caller: Caller, case: Case) -> list[Record]:
    """Checks everybody on a case, and times who passed."""
    everybody = [*names, SDPA_FLASH.name] if _is_timed(session) else names
    checks = {name: list(session.check(caller, name, case)) for name in everybody}
    records = []
    for i, direction in enumerate(request.each):
        own = {name: replace(found[i], port=name) for name, found in checks.items()}
        row = TimedRow()
        if _is_timed(session):
            row = time_passed(session, caller, case, direction, own, request.rounds)
        records += [_record(session, case, name, own, row) for name in names]
    return records


def _record(session: Session, case: Case, name: str, checks: Mapping[str, Check], row: TimedRow) -> Record:
    """The record of a rung, with the samples of itself, of what it gains over, and of the baseline."""
    times, flash = row.of(name), SDPA_FLASH.name
    if times is not None:
        beside = {other: without_path(other) for other in (name, rival_of(name)) if other}
        times = times.among(beside | {flash: flash})
    return check_record(
        replace(checks[name], port=without_path(name)),
        sources=session.ports[own_name(name)],
        **session.about(case),
        timing=times,
        untimed=row.untimed(name) if checks[name].verdict == "pass" else "",
        baselines=[rival(checks[flash], row)] if flash in checks else [],
    )


def _is_timed(session: Session) -> bool:
    return session.environment.has_gpu and session.suite.timed


def _earlier(session: Session, names: list[str], case: Case) -> list[Record]:
    """The records of a case in the file to resume; none unless all that is to be known of the case is there."""
    known = {
        (name_of(own_name(record["port"]), variant, record["target"]["name"]), record["direction"]): record
        for record in session.earlier(case)
        if record["kind"] == "check" and (variant := variant_of(record["port"]))
    }
    wanted = [(name, direction) for direction in session.request.each for name in names]
    if not all(key in known for key in wanted):
        return []
    records = [known[key] for key in wanted]
    done = all(r["samples"] or r["verdict"] != "pass" for r in records) or not _is_timed(session)
    return records if done else []
