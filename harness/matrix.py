"""`harness matrix`: every port on every problem against the oracle, and every two ports against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from common import Port

from . import jobs
from .ahead import compile_ahead
from .checks import NAMES, RULE
from .environment import Environment
from .isolation import Caller, Lost
from .matrix_tables import Row, pairs_table, places_table, verdict_cell
from .records import RecordFile, check_of, check_record, disagreement_of, disagreement_record
from .session import Request, Session, status_of
from .suites import Case
from .tables import Table, print_tables


def matrix(
    request: Request, here: Environment, *, all_asked: bool, open_port: Callable[[str], Port] = jobs.open_port
) -> int:
    """Runs the command and returns its exit status.

    all_asked: a port that cannot run is an error, and not just a note that says so. Raises UsageError for what can
    be told before anything runs.
    """
    rows: list[Row] = []
    with Session.open(request, here, open_port) as session:
        try:
            with session.record_file() as records:
                compile_ahead(session)
                for _, row in session.for_each_case("checking", lambda caller, case: _row(session, caller, case)):
                    rows.append(row)
                    if records is not None:
                        _write(session, records, row)
        finally:
            if rows:
                print_tables(matrix_tables(session, rows), request.form)
    return status_of(session, (check for row in rows for check in row.checks), all_asked=all_asked)


def _row(session: Session, caller: Caller, case: Case) -> Row:
    earlier = _earlier(session, case)
    if earlier is not None:
        return earlier
    checks = [check for name in session.ports for check in session.check(caller, name, case)]
    row = Row(case, checks)
    for direction in session.request.each:
        names = row.comparable(direction)
        if len(names) < 2:
            continue
        try:
            row.apart += caller.call(jobs.disagreements, session.setting, names, case, direction)
        except Lost as lost:
            row.lost.append(f"{direction}: {' and '.join(names)} were not compared: one {lost}")
    return row


def _earlier(session: Session, case: Case) -> Row | None:
    """The row of a case in the file to resume, unless something of it is missing there."""
    records = session.earlier(case)
    checks = {(r["port"], r["direction"]): r for r in records if r["kind"] == "check"}
    wanted = [(name, direction) for name in session.ports for direction in session.request.each]
    if not all(key in checks for key in wanted):
        return None
    row = Row(case, [check_of(checks[key]) for key in wanted])
    known = {(*r["ports"], r["tensor"]): r for r in records if r["kind"] == "disagreement"}
    pairs = [
        (a, b, tensor)
        for direction in session.request.each
        for a, b in combinations(row.comparable(direction), 2)
        for tensor in NAMES[direction]
    ]
    if not all(pair in known for pair in pairs):
        return None
    row.apart = [disagreement_of(known[pair]) for pair in pairs]
    row.records = [*(checks[key] for key in wanted), *(known[pair] for pair in pairs)]
    return row


def _write(session: Session, records: RecordFile, row: Row) -> None:
    for record in row.records:
        records.write(record)
    if row.records:
        return
    about = session.about(row.case)
    for check in row.checks:
        records.write(check_record(check, sources=session.ports[check.port], **about))
    for apart in row.apart:
        sources = {name: session.ports[name] for name in apart.ports}
        record = disagreement_record(apart, row.case.problem, session.target, sources=sources, **about)
        records.write(record)


def matrix_tables(session: Session, rows: Sequence[Row]) -> list[Table]:
    """Problems × ports, ports × ports, and where each two ports are furthest apart."""
    tables = [_verdicts(session, rows)]
    if len(session.ports) > 1:
        tables += [pairs_table(list(session.ports), rows), places_table(list(session.ports), rows)]
    return tables


def _verdicts(session: Session, rows: Sequence[Row]) -> Table:
    request = session.request
    table = Table(
        f"Ports on {session.environment.path(session.target)}, suite {session.suite.name}, seed {request.seed}: the "
        "largest error / allowed error, above 1 is wrong",
        ("case", "problem", *request.impls),
        labels=2,
    )
    for row in rows:
        cells = ("–" if name in session.missing else verdict_cell(row.of(name)) for name in request.impls)
        table.add(row.case.id, row.case.problem.id, *cells)
        table.notes += [
            f"FAIL {check.port} {row.case.id} {row.case.problem.id} {check.direction}: {line}"
            for check in row.checks
            for line in check.complaints()
        ]
    table.notes += session.missing.values()
    table.notes.append(RULE)
    return table
