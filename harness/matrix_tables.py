"""How ports compare: what became of a problem, ports beside each other, and the checks of each port counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from common import Direction, Tile

from .bench_tables import changed_notes, path_of
from .checks import NAMES, place_in_words, tile_in_words
from .inputs import InputSpec
from .jobs import Disagreement
from .provenance import in_words
from .reader import Record
from .records import check_of, disagreement_of, problem_of
from .suites import Case
from .tables import Table
from .trial import VERDICTS, Check

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


def rows_of(records: Iterable[Record]) -> list[Row]:
    """The rows of the records of a matrix, or of several; without what took forward and backward in one launch."""
    rows: dict[tuple[str, str, str], Row] = {}
    for record in records:
        if record["kind"] not in ("check", "disagreement") or record["direction"] == "both":
            continue
        problem = problem_of(record["problem"])
        case = Case(record["case"], problem, InputSpec(**record["inputs"]), why="")
        row = rows.setdefault((record["suite"], record["case"], problem.id), Row(case, []))
        if record["kind"] == "check":
            row.checks.append(check_of(record))
        else:
            row.apart.append(disagreement_of(record))
    return list(rows.values())


def counted_tables(records: Iterable[Record]) -> list[Table]:
    """For each path: the checks of each port on each suite, counted, and the ports beside each other. None where no two
    ports were compared."""
    paths: dict[str, list[Record]] = {}
    for record in records:
        paths.setdefault(path_of(record), []).append(record)
    tables = []
    for path, members in paths.items():
        rows = rows_of(members)
        if any(row.apart for row in rows):
            checks = [record for record in members if record["kind"] == "check"]
            compared = (name for row in rows for apart in row.apart for name in apart.ports)
            ports = list(dict.fromkeys([*(record["port"] for record in checks), *compared]))
            tables += [*([_counts(path, checks)] if checks else []), pairs_table(ports, rows)]
    return tables


def _counts(path: str, checks: Sequence[Record]) -> Table:
    table = Table(
        f"Checks, {path}",
        ("suite", "port", "problems", *VERDICTS, "largest error / allowed", "of"),
        labels=2,
    )
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in checks:
        groups.setdefault((record["suite"], record["port"]), []).append(record)
    for (suite, port), members in groups.items():
        seen = Counter(record["verdict"] for record in members)
        problems = {(record["case"], record["problem"]["id"]) for record in members}
        tensors = [(t.ratio, t.name, r["problem"]["id"]) for r in members for t in check_of(r).tensors]
        ratio, tensor, problem = max(tensors, default=(0.0, "–", "–"))
        counts = (str(seen[verdict]) for verdict in VERDICTS)
        table.add(suite, port, str(len(problems)), *counts, f"{ratio:.2f}", f"{tensor} of {problem}")
    table.notes += [f"{in_words(checks[0]['provenance'])}.", *changed_notes(checks)]
    return table
