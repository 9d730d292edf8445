"""`harness matrix`: every port on every problem against the oracle, and every two ports against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from common import Direction, Port, Tile

from . import jobs
from .ahead import compile_ahead
from .checks import NAMES, RULE, place_in_words, tile_in_words
from .environment import Environment
from .isolation import Caller, Lost
from .jobs import Disagreement
from .reader import Record
from .records import RecordFile, check_of, check_record, disagreement_of, disagreement_record
from .session import Request, Session, status_of
from .suites import Case
from .tables import Table, print_tables
from .trial import Check

UNITS = (
    "Disagreements are counted in PyTorch's error: max|a - b| of a segment over the error of PyTorch's plain attention "
    "there, or over the rounding floor where that is larger. Where o and lse of both pass they are at most 6 apart."
)


@dataclass
class Row:
    """What became of one problem: the checks, and by how much the ports disagree. lost: why they were not compared.
    records: what an earlier run has written of it."""

    case: Case
    checks: list[Check]
    apart: list[Disagreement] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def of(self, port: str) -> list[Check]:
        """The checks of a port, by direction."""
        return [check for check in self.checks if check.port == port]

    def comparable(self, direction: Direction) -> list[str]:
        """The ports whose results are of the right form, also when they are wrong: that is where one looks."""
        return [check.port for check in self.checks if check.direction == direction and check.tensors]

    def tile(self, port: str, tensor: str) -> Tile | None:
        """The tile that the port computed a tensor with."""
        return next((check.tile for check in self.of(port) if any(t.name == tensor for t in check.tensors)), None)


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


def verdict_cell(checks: Sequence[Check]) -> str:
    """One port on one problem: the worst of these checks' tensors, or what failed, or why it was not to be checked."""
    failed = [check for check in checks if check.verdict == "fail"]
    tensors = [t for check in failed or checks for t in check.tensors]
    worst = max(tensors, key=lambda t: t.ratio, default=None)
    shown = "" if worst is None else f"{worst.ratio:.2f} {worst.name}"
    if failed:
        wrong = worst is not None and not worst.passed
        return f"FAIL {shown}" if wrong else f"FAIL {''.join(failed[0].complaints()[:1])}"
    reasons = [f"{check.direction}: {check.reason}" for check in checks if check.verdict == "unsupported"]
    if not tensors:
        return checks[0].reason
    return ", ".join([shown, *reasons])


def pairs_table(names: Sequence[str], rows: Sequence[Row]) -> Table:
    """Ports × ports: their largest disagreement over all rows."""
    table = Table("Ports beside each other: the largest disagreement, in PyTorch's error", ("port", *names))
    largest: dict[frozenset[str], Disagreement] = {}
    for row in rows:
        for apart in row.apart:
            pair = frozenset(apart.ports)
            if pair not in largest or apart.units > largest[pair].units:
                largest[pair] = apart
    for a in names:
        cells = (largest.get(frozenset((a, b))) for b in names)
        table.add(a, *("–" if apart is None else f"{apart.units:.2f} {apart.tensor}" for apart in cells))
    table.notes.append(UNITS)
    return table


def places_table(names: Sequence[str], rows: Sequence[Row]) -> Table:
    """For each two ports and each tensor, the element where they are furthest apart."""
    table = Table(
        "Where each two ports are furthest apart, by tensor",
        ("ports", "tensor", "case", "problem", "where", "tiles", "values", "in PyTorch's error"),
        labels=7,
    )
    for a, b in combinations(names, 2):
        for tensor in (*NAMES["forward"], *NAMES["backward"]):
            found = [(x, row) for row in rows for x in row.apart if x.ports == (a, b) and x.tensor == tensor]
            if not found:
                continue
            apart, row = max(found, key=lambda pair: pair[0].units)
            if apart.index is None or not apart.difference:
                table.add(f"{a}, {b}", tensor, "–", "–", "nowhere apart", "–", "–", "0.00")
                continue
            tiles = {name: row.tile(name, tensor) for name in (a, b)}
            of_row = [f"{n}: row {tile_in_words(tensor, apart.index[2], t)}" for n, t in tiles.items() if t is not None]
            values = f"{apart.values[0]:.8g}, {apart.values[1]:.8g}"
            about = row.case.id, row.case.problem.id, place_in_words(apart.index), "; ".join(of_row), values
            table.add(f"{a}, {b}", tensor, *about, f"{apart.units:.2f}")
    table.notes += [f"{row.case.id} {row.case.problem.id} {line}" for row in rows for line in row.lost]
    return table
