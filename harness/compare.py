"""`harness compare`: two files of records, cell by cell: what is faster, slower, the same or unclear, and still right.

Clocks differ from one run to the next, so where both runs timed the same baseline, each time is taken relative to it;
otherwise, and with `--absolute`, times are compared as they are. The interval is a bootstrap over the rounds of both
runs, each drawn for itself, because no round of one belongs to a round of the other. With a tolerance of 2 % a cell is

- `same` when the interval lies within 98 % and 102 %,
- `faster` or `slower` when it lies above or below 100 % and not within those,
- `unclear` otherwise: more rounds would tell.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bench_tables import path_of
from .errors import UsageError
from .options import TOLERANCE_PERCENT, Format
from .reader import Record
from .records import problem_of, record_file
from .schema import VERSION
from .sound import sound_records
from .tables import Table, print_tables, problem_cells
from .timing import RESAMPLES, Ratio, Timing

OK, WORSE = 0, 1
SEED = 0
KEY = ("port", "direction", "problem", "inputs", "switches")


@dataclass(frozen=True)
class Cell:
    """One port, problem and direction in both files.

    speed: of the second beside the first, None when one was not timed. beside: the baseline that times are relative to,
    None when they are compared as they are.
    """

    before: Record
    after: Record
    speed: Ratio | None
    beside: str | None
    outcome: str

    @property
    def is_worse(self) -> bool:
        """Whether it is slower, or was right and no longer is."""
        return self.outcome == "slower" or self.before["verdict"] == "pass" != self.after["verdict"]


def compare(
    paths: tuple[Path, Path],
    *,
    tolerance_percent: float = TOLERANCE_PERCENT,
    absolute: bool = False,
    json_path: Path | None = None,
    form: Format = Format.TEXT,
) -> int:
    """Runs the command and returns its exit status: 1 when a cell of the second file is worse.

    Where a file has a cell twice, the later record counts. Raises UsageError when a file holds no records of checks, or
    the two have no cell in common.
    """
    files = [sound_records(path, ("check",)) for path in paths]
    # Cards and code paths can be compared as well, unless a file holds several of them.
    by = KEY if all(len({r["target"]["name"] for r in records}) == 1 for records in files) else (*KEY, "target")
    before, after = ({json.dumps([r[name] for name in by], sort_keys=True): r for r in records} for records in files)
    cells = [
        compare_cell(before[key], after[key], tolerance=tolerance_percent / 100, absolute=absolute)
        for key in before
        if key in after
    ]
    if not cells:
        raise UsageError(f"{paths[0]} and {paths[1]} have no port, problem and direction in common")
    with record_file(json_path) as records:
        tables = compare_tables(cells, paths, tolerance_percent)
        for path, own, other in ((paths[0], before, after), (paths[1], after, before)):
            alone = sum(key not in other for key in own)
            if alone:
                tables[-1].notes.append(f"{alone} of {len(own)} cells are in {path} only.")
        print_tables(tables, form)
        if records is not None:
            for cell in cells:
                records.write(comparison_record(cell, paths))
    return WORSE if any(cell.is_worse for cell in cells) else OK


def compare_cell(before: Record, after: Record, *, tolerance: float, absolute: bool = False) -> Cell:
    """Two records of the same cell. tolerance: the fraction of speed that counts for nothing."""
    if not (before["samples"] and after["samples"]):
        return Cell(before, after, None, None, "untimed")
    beside = None if absolute else _shared_baseline(before, after)
    speed = speed_up(_times(before, beside), _times(after, beside))
    return Cell(before, after, speed, beside, outcome_of(speed, tolerance))


def _shared_baseline(before: Record, after: Record) -> str | None:
    """The first baseline that was timed in both."""
    timed = (set(record["samples"][0]["ms"]) for record in (before, after))
    both = set.intersection(*timed)
    return next((b["port"] for b in before["baselines"] if b["port"] in both), None)


def _times(record: Record, beside: str | None) -> list[list[float]]:
    """The milliseconds by round: of the port, and of the baseline where there is one."""
    timing = Timing.of_record(record["samples"], record["host_us"])
    return [timing.samples(name) for name in (record["port"], beside) if name is not None]


def speed_up(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> Ratio:
    """How fast the second run is beside the first, 1 for as fast, with its 95 % interval.

    Each run is the milliseconds of a port by rounds, or those and its baseline's, and then by how much it is faster
    than that is what is compared.
    """
    generator = np.random.default_rng(SEED)

    def speeds(run: Sequence[Sequence[float]]) -> np.ndarray:
        """The speed as measured, and then that of every resample."""
        times = np.array(run, dtype=float)  # [1 or 2, rounds]
        rounds = times.shape[-1]
        drawn = np.vstack([np.arange(rounds), generator.integers(rounds, size=(RESAMPLES, rounds))])
        medians = np.median(times[:, drawn], axis=-1)  # [1 or 2, 1 + RESAMPLES]
        return 1 / medians[0] if len(medians) == 1 else medians[1] / medians[0]

    ratios = speeds(after) / speeds(before)
    low, high = np.quantile(ratios[1:], (0.025, 0.975))
    return Ratio(float(ratios[0]), float(low), float(high))


def outcome_of(speed: Ratio, tolerance: float) -> str:
    """What an interval says, by the rule at the head of this file."""
    if 1 - tolerance <= speed.low and speed.high <= 1 + tolerance:
        return "same"
    return "faster" if speed.low > 1 else "slower" if speed.high < 1 else "unclear"


def compare_tables(cells: Sequence[Cell], paths: tuple[Path, Path], tolerance_percent: float) -> list[Table]:
    """A table for each port, direction and path, its rows in the order of the first file."""
    groups: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        was, now = path_of(cell.before), path_of(cell.after)
        groups.setdefault((cell.before["port"], cell.before["direction"], was, now), []).append(cell)
    tables = []
    for (port, direction, was, now), members in groups.items():
        where = was if was == now else f"{was}, then {now}"
        table = Table(
            f"{port} {direction}, {where}: {paths[1]} beside {paths[0]}",
            (
                "B,H,D",
                "dtype",
                "N",
                "mask",
                "ms before",
                "ms after",
                "% of before",
                "95 %",
                "beside",
                "check",
                "outcome",
            ),
            labels=4,
        )
        for cell in members:
            table.add(*_cells(cell))
        counts = Counter(cell.outcome for cell in members)
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        table.notes.append(f"{port} {direction}: {told}. Within {tolerance_percent:g} % is the same.")
        tables.append(table)
    tables[-1].notes.append(
        "% of before: the speed of the second file in that of the first, each relative to what it was timed beside, "
        "where that is the same."
    )
    return tables


def _cells(cell: Cell) -> tuple[str, ...]:
    times = []
    for record in (cell.before, cell.after):
        timing = record["samples"] and Timing.of_record(record["samples"], record["host_us"])
        times.append(f"{timing.median(record['port']):.4f}" if timing else "–")
    percent, interval = "–", "–"
    if cell.speed is not None:
        percent, interval = cell.speed.cells(1, 100)
    was, now = cell.before["verdict"], cell.after["verdict"]
    check = was if was == now else f"{was}, now {now}"
    if was == "pass" != now:
        check = f"FAIL: {check}"
    about = problem_cells(problem_of(cell.before["problem"]))
    return *about, *times, percent, interval, cell.beside or "–", check, cell.outcome


def comparison_record(cell: Cell, paths: tuple[Path, Path]) -> dict[str, Any]:
    """The record of one cell."""
    speed = cell.speed
    return {
        "schema": VERSION,
        "kind": "comparison",
        "files": [str(path) for path in paths],
        **{name: cell.before[name] for name in KEY},
        "targets": [cell.before["target"], cell.after["target"]],
        "verdicts": [cell.before["verdict"], cell.after["verdict"]],
        "outcome": cell.outcome,
        "speed": None if speed is None else {"value": speed.value, "low": speed.low, "high": speed.high},
        "beside": cell.beside,
    }
