"""The tables of a sweep: the candidates of each grid, those that do not fit and why, a heat map, what it came to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from .baselines import BASELINES, SDPA_FLASH
from .bench_tables import changed_notes, path_of, provenance_notes
from .candidates import Candidate, Stage, merged
from .names import grid_of, own_name
from .reader import Record
from .records import problem_of, tile_of, timing_of
from .tables import Table, problem_cells
from .timing import FLOP_CONVENTION, Timing

BLANK = "–"
SIDES = ("block_m", "block_n")  # the axes of a heat map; of the kernel of dq its own sides


def stage_tables(stage: Stage, where: str, room: int, flops: int) -> list[Table]:
    """The tables of one grid.

    where: whose code ran where, or for what it was built. room: bytes of shared memory that a block may have.
    """
    title = f"Sweep of {stage.port} {stage.direction}, {stage.grid.kernel}, {where}, {stage.problem.id}"
    fitting = [one for one in stage.candidates if not one.by_budget]
    table = Table(
        f"{title}: {len(fitting)} of {len(stage.candidates)} candidates fit",
        (
            *("tile", f"shared B of {room}", "registers", "spills B", "build s", "ms", "TF/s"),
            *(f"% of {SDPA_FLASH.title}", "% of best", "check"),
        ),
    )
    for one in sorted(fitting, key=lambda one: ms_of(stage, one) or float("inf")):
        table.add(str(one.tile), *_built_cells(stage, one), *_time_cells(stage, one, flops), _check_cell(one))
    table.notes += _notes(stage)
    tables = [table, heat_table(stage, title)]
    excluded = [one for one in stage.candidates if one.by_budget]
    if excluded:
        rows: list[tuple[str, ...]] = [(str(one.tile), one.refused) for one in excluded]
        tables.insert(1, Table(f"{title}: excluded before they were built", ("tile", "why"), rows, labels=2))
    return tables


def ms_of(stage: Stage, one: Candidate) -> float | None:
    """The median milliseconds of a candidate."""
    times = stage.timing
    return None if times is None or one.name not in times.host_us else times.median(one.name)


def best_ms(stage: Stage) -> float | None:
    """The least of all medians."""
    return min((ms for ms in (ms_of(stage, one) for one in stage.candidates) if ms is not None), default=None)


def _built_cells(stage: Stage, one: Candidate) -> tuple[str, ...]:
    build = one.of(stage.grid.kernel)
    if build is None:
        return (BLANK,) * 4
    seconds = sum(own.seconds for own in one.builds)
    cached = all(own.cached for own in one.builds)
    shown = f"({seconds:.1f})" if cached else f"{seconds:.1f}"
    return str(build.shared), str(build.registers), str(build.spills), shown


def _time_cells(stage: Stage, one: Candidate, flops: int) -> tuple[str, ...]:
    ms, best, times = ms_of(stage, one), best_ms(stage), stage.timing
    if ms is None or best is None or times is None:
        return (BLANK,) * 4
    flash = f"{100 * times.median(SDPA_FLASH.name) / ms:.1f}" if SDPA_FLASH.name in times.host_us else BLANK
    return f"{ms:.4f}", f"{flops / 1e9 / ms:.1f}", flash, f"{100 * best / ms:.1f}"


def _check_cell(one: Candidate) -> str:
    if not one.reached:
        return "not reached"
    if one.check is None:
        return one.refused or BLANK
    if one.check.verdict == "pass":
        return "pass"
    why = one.check.reason or "; ".join(one.check.complaints()[:1])
    return f"FAIL: {why}" if one.check.verdict == "fail" else why


def _notes(stage: Stage) -> list[str]:
    notes = [
        f"shared B, registers and spills B are those of {stage.grid.kernel}; build s: seconds of the compiler for all "
        f"kernels of the candidate, in brackets from its cache. All of them: {stage.compile_s:.1f} s of compilers, "
        f"{stage.build_s:.1f} s by the clock."
    ]
    if stage.grid.without:
        notes.append(f"Measured without {', '.join(stage.grid.without)}, with which this kernel is not launched.")
    if stage.unfinished:
        notes.append(f"Unfinished: {stage.unfinished}.")
    if stage.timing is not None:
        notes.append(FLOP_CONVENTION)
        if stage.timing.throttled:
            notes.append(f"{stage.timing.throttled} of {len(stage.timing.rounds)} rounds throttled.")
        late = sum(bool(r.late) for r in stage.timing.rounds)
        if late:
            notes.append(f"In {late} of {len(stage.timing.rounds)} rounds some sample may hold host time.")
    return notes + ([f"{choice_words(stage)}."] if stage.choice else [])


def choice_words(stage: Stage) -> str:
    """What a stage ends with, and how sure that is."""
    choice = stage.choice
    assert choice is not None
    start, first = stage.candidates[0], choice.first
    if choice.best is not start:
        how = "the one that is there has no time" if choice.gain is None else f"{_percent(choice.gain)} faster than it"
        return f"{start.tile} gives way to {first.tile}, {how}"
    if choice.gain is None:
        return f"{start.tile} stays: it is the fastest of those that may win"
    if choice.gain.value > 1:
        return f"{start.tile} stays: {first.tile} is faster within noise only, by {_percent(choice.gain)}"
    return f"{start.tile} stays: {first.tile}, the fastest of the others that may win, is not faster"


def _percent(ratio: object) -> str:
    value, low, high = (100 * (getattr(ratio, name) - 1) for name in ("value", "low", "high"))
    return f"{value:.1f} % ({low:.1f} to {high:.1f})"


def cell_of(stage: Stage, one: Candidate | None) -> str:
    """What a heat map says of a candidate: % of the best's speed, or in a word why not."""
    if one is None:
        return ""
    if one.by_budget:
        return "out"
    if one.refused:
        return "no build"
    if not one.reached:
        return "not reached"
    ms, best = ms_of(stage, one), best_ms(stage)
    spills = "*" if one.spills(stage.grid.kernel) else ""
    if ms is None or best is None:
        verdict = "built" if one.check is None else "FAIL" if one.check.verdict == "fail" else one.check.verdict
        return verdict + spills
    return f"{100 * best / ms:.0f}{spills}"


def axes_of(stage: Stage) -> tuple[str, str]:
    """The fields on the axes of a heat map: the sides of the tile, where the grid has both."""
    prefix = "dq_" if f"dq_{SIDES[0]}" in stage.grid.values else ""
    down, across = (f"{prefix}{side}" for side in SIDES)
    return down, across


def panels_of(stage: Stage) -> list[tuple[dict[str, int], dict[tuple[int, int], Candidate]]]:
    """The candidates by what else their tiles say, and then by the two sides; those of the grid, and what is there."""
    axes = axes_of(stage)
    others = [name for name in stage.grid.values if name not in axes]
    panels: dict[tuple[int, ...], dict[tuple[int, int], Candidate]] = {}
    for one in stage.candidates:
        entry = one.tile.entry
        key = tuple(entry.get(name, 0) for name in others)
        panels.setdefault(key, {})[entry.get(axes[0], 0), entry.get(axes[1], 0)] = one
    return [(dict(zip(others, key, strict=True)), panels[key]) for key in sorted(panels)]


def heat_table(stage: Stage, title: str) -> Table:
    """The heat map as a table: a row for each of the other fields' values and block_m, a column for each block_n."""
    down, across = axes_of(stage)
    panels = panels_of(stage)
    columns, rows = sides_of(panels)
    others = tuple(panels[0][0])
    table = Table(
        f"{title}: {'what fits' if stage.timing is None else '% of the best speed'}",
        (*others, down, *(f"{across} {value}" for value in columns)),
        labels=len(others) + 1,
        heat=True,
    )
    for (about, cells), row in product(panels, rows):
        if any((row, column) in cells for column in columns):
            labels = (*(str(value) for value in about.values()), str(row))
            table.add(*labels, *(cell_of(stage, cells.get((row, column))) for column in columns))
    table.notes.append(LEGEND)
    return table


LEGEND = "out: does not fit the target; *: spills; built: nothing was timed; empty: not tried."


def sides_of(panels: Iterable[tuple[object, dict[tuple[int, int], Candidate]]]) -> tuple[list[int], list[int]]:
    """The columns and the rows that panels have between them."""
    sides = [side for _, cells in panels for side in cells]
    return sorted({column for _, column in sides}), sorted({row for row, _ in sides})


def closing_table(rows: Sequence[tuple[str, ...]], notes: Sequence[str]) -> Table:
    """What the sweep came to: a row for each class of problems."""
    return Table("What was swept", ("port", "class", "problem", "tile", "outcome"), list(rows), list(notes), labels=5)


def is_candidate(record: Record) -> bool:
    """Whether a record is of a candidate of a sweep."""
    return bool(grid_of(record["port"]))


def untimed_builds(records: Iterable[Record]) -> list[Record]:
    """The records of builds, without those of candidates that were timed: of a sweep on a GPU the times are told."""

    def grid(record: Record) -> tuple[str, ...]:
        return own_name(record["port"]), grid_of(record["port"]), record["problem"]["id"], record["target"]["name"]

    records = list(records)
    timed = {grid(r) for r in records if r["kind"] == "check" and is_candidate(r) and r["samples"]}
    return [record for record in records if record["kind"] == "build" and grid(record) not in timed]


def swept_tables(records: Iterable[Record]) -> list[Table]:
    """What the records of sweeps say: a table for each port and path, with a row for each grid and problem.

    The fastest of the candidates is told beside the tile that was there; what spills is not known here.
    """
    ports: dict[tuple[str, str], dict[tuple[str, ...], list[Record]]] = {}
    for record in filter(is_candidate, records):
        key = record["case"], record["problem"]["id"], record["provenance"]["date"], grid_of(record["port"])
        ports.setdefault((own_name(record["port"]), path_of(record)), {}).setdefault(key, []).append(record)
    tables = []
    for (port, path), stages in ports.items():
        table = Table(
            f"Tiles of {port} swept, {path}",
            (
                *("direction, grid", "B,H,D", "dtype", "N", "mask", "timed", "fastest", "ms"),
                *(f"% of {SDPA_FLASH.title}", "second", "how many times as fast as it", "95 %"),
                *("there before", "as fast as that", "95 % of that"),
            ),
            labels=5,
        )
        for (*_, grid), members in stages.items():
            cells = _swept_cells(members)
            if cells is not None:
                table.add(grid, *cells)
        everyone = [record for members in stages.values() for record in members]
        table.notes.append(
            "The fastest takes the place of what was there if it is faster with the whole interval, and does not spill "
            "more unless that is asked for. Each grid of a direction starts from what the one before has chosen."
        )
        table.notes += [*provenance_notes(everyone), *changed_notes(everyone)]
        tables += [table] if table.rows else []
    return tables


def _swept_cells(members: Sequence[Record]) -> tuple[str, ...] | None:
    """The cells of one grid; None when nothing of it was timed."""
    timed = {record["port"]: times for record in members if (times := timing_of(record)) is not None}
    if not timed:
        return None
    times = merged(list(timed.values()))
    name, *others = sorted(timed, key=times.median)
    named, flash = {record["port"]: record for record in members}, SDPA_FLASH.name
    # A record has the times of its own candidate, of what was there, and of the baseline.
    there = next((other for other in timed[name].host_us if other != name and other not in BASELINES), name)
    return (
        *problem_cells(problem_of(named[name]["problem"])),
        f"{len(timed)} of {len(members)}",
        str(tile_of(named[name]["tile"])),
        f"{times.median(name):.4f}",
        f"{100 * times.median(flash) / times.median(name):.1f}" if flash in times.host_us else BLANK,
        *_beside(times, name, named[others[0]] if others else None),
        *(("the same", BLANK, BLANK) if there == name else _beside(times, name, named.get(there))),
    )


def _beside(times: Timing, name: str, other: Record | None) -> tuple[str, str, str]:
    """The tile of another candidate, and how many times as fast as it the named one is, with the interval."""
    if other is None:
        return BLANK, BLANK, BLANK
    return str(tile_of(other["tile"])), *times.speed(name, other["port"]).cells(3)
