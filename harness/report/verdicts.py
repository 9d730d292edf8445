"""Verdicts: the matrix of problems and ports, what failed in words, and how far the ports are apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..checks import RULE
from ..matrix_tables import pairs_table, places_table, rows_of, verdict_cell
from ..reader import Record
from ..records import check_of, problem_of
from ..tables import Table
from ..trial import VERDICTS, Check
from .runs import Facets, Run, facets_of, origins
from .tables import PageTable, page_table


@dataclass(frozen=True)
class Failure:
    """A check that failed, in words."""

    facets: Facets
    words: str


@dataclass(frozen=True)
class Part:
    """The verdicts of one path. counts: a sentence for each port. apart: the tables that compare ports."""

    title: str
    facets: Facets
    counts: list[str]
    matrix: PageTable
    failures: list[Failure]
    apart: list[PageTable]
    origins: list[str]


@dataclass(frozen=True)
class Verdicts:
    """The content of the section. rule: what is allowed."""

    parts: list[Part]
    rule: str = RULE

    @property
    def is_compared(self) -> bool:
        """Whether ports were compared with each other."""
        return any(part.apart for part in self.parts)


def verdicts(runs: Sequence[Run]) -> Verdicts | None:
    """The content of the section, a part for each code path that something was checked on; None where nothing was."""
    parts = [_part(run) for run in _together(run for run in runs if run.of("check"))]
    return Verdicts(parts) if parts else None


def _together(runs: Iterable[Run]) -> list[Run]:
    """One run for each path, unless a check is in two of them: verdicts, unlike times, compare between runs."""
    found: list[Run] = []
    for run in runs:
        for i, other in enumerate(found):
            if other.path == run.path and not _cells(other) & _cells(run):
                found[i] = Run(f"{other.file}, {run.file}", run.path, other.records + run.records)
                break
        else:
            found.append(run)
    return found


def _cells(run: Run) -> set[tuple[str, ...]]:
    return {(*_row(record), record["port"]) for record in run.of("check")}


def _row(record: Record) -> tuple[str, str, str, str]:
    return record["suite"], record["case"], record["problem"]["id"], record["direction"]


def _part(run: Run) -> Part:
    checks = checks_of(run)
    ports = list(dict.fromkeys(record["port"] for record in checks))
    failures = [
        Failure(facets_of(record) | {"who": record["port"]}, f"{_about(record)}: {line}")
        for record in checks
        for line in check_of(record).complaints()
    ]
    facets = {"path": run.path}
    return Part(
        title=f"{run.path}, from {run.file}",
        facets=facets,
        counts=[_count(port, [record for record in checks if record["port"] == port]) for port in ports],
        matrix=_matrix(run, checks, ports),
        failures=failures,
        apart=[page_table(table, facets) for table in _apart(run, ports)],
        origins=origins(checks),
    )


def checks_of(run: Run) -> list[Record]:
    """The checks of a run; those of forward and backward in one launch, which repeat these two, only where it has no
    others."""
    checks = run.of("check")
    return [record for record in checks if record["direction"] != "both"] or checks


def _about(record: Record) -> str:
    return f"{record['port']}, {record['case']}, {record['problem']['id']}, {record['direction']}"


def _count(port: str, records: Sequence[Record]) -> str:
    seen = Counter(record["verdict"] for record in records)
    told = ", ".join(f"{seen[verdict]} {verdict}" for verdict in VERDICTS)
    problems = {(record["suite"], record["case"], record["problem"]["id"]) for record in records}
    return f"{port}: {len(records)} checks of {len(problems)} problems: {told}"


def _matrix(run: Run, records: Sequence[Record], ports: Sequence[str]) -> PageTable:
    table = Table(
        f"Verdicts, {run.path}: the largest error / allowed error and its tensor, above 1 is wrong",
        ("case", "problem", "direction", *ports),
        labels=3,
    )
    rows: dict[tuple[str, str, str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault(_row(record), {})[record["port"]] = record
    for (_, case, problem, direction), row in rows.items():
        cells = (_cell(check_of(row[port])) if port in row else "–" for port in ports)
        some = next(iter(row.values()))
        table.add(case, problem, direction, *cells, problem=problem_of(some["problem"]))
    return page_table(table, {"path": run.path}, rows=[{"direction": direction} for *_, direction in rows])


def _cell(check: Check) -> str:
    told = verdict_cell([check])
    return f"pass {told}".strip() if check.verdict == "pass" else told


def _apart(run: Run, ports: Sequence[str]) -> list[Table]:
    """Ports × ports, and where each two are furthest apart; none where they were not compared."""
    rows = rows_of(run.records)
    if not any(row.apart for row in rows):
        return []
    return [pairs_table(ports, rows), places_table(ports, rows)]
