"""One grid of a sweep: its candidates against the budget, built in parallel, checked one by one, timed by turns.

All of it goes to the records as it comes: the builds under the candidates' names, then their checks and samples. What
a file to resume has is not done again; of a build it does not matter which machine it was on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from common import Build, Direction, Grid, Problem, Tile

from . import jobs, timing
from .ahead import PROCESSES_MOST, compile_ahead
from .baselines import SDPA_FLASH
from .baselines.protocol import flops_of
from .candidates import Candidate, Stage, choose, merged, refusals
from .compile import Item, Row, build_of, build_record
from .environment import INTERPRET, core_count
from .isolation import Caller, Here, Lost, processes
from .jobs import TimedRow
from .names import own_name, tiles_of, with_tile
from .reader import Record
from .records import RecordFile, check_of, check_record, timing_of
from .rows import rival
from .session import Request, Session, in_order, progress
from .suites import Case
from .trial import Check

MINUTES = 30.0


@dataclass(frozen=True)
class SweepRequest(Request):
    """The options of the command.

    values: what to try of a field instead of a grid's own values. minutes: after them nothing more is begun. spilling:
    a tile may win that spills more than what is there. write: into the ports' tables. picture: where heat maps are
    drawn. autotune: also tell what `@triton.autotune` costs.
    """

    kinds: ClassVar[tuple[str, ...]] = ("check", "build")
    suite: str = "fa2"
    values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rounds: int = timing.ROUNDS
    minutes: float = MINUTES
    spilling: bool = False
    write: bool = False
    picture: Path | None = None
    autotune: bool = False

    def asks_for(self, variant: str, direction: str) -> bool:
        """Whether that is a candidate, in a direction asked for."""
        return variant.startswith(f"{direction} ") and direction in self.each


@dataclass
class Sweeping:
    """A run of the command. builders: where kernels are built. deadline: when nothing more is begun. built: of each
    tile its kernels, or why there are none."""

    request: SweepRequest
    session: Session
    builders: Sequence[Caller]
    deadline: float
    file: RecordFile | None = None
    checks: list[Check] = field(default_factory=list)
    built: dict[tuple[str, Direction, Problem], dict[Tile, list[tuple[str, Build | None]]]] = field(
        default_factory=dict
    )

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record to the file, if there is one."""
        if self.file is not None:
            self.file.write(record)


@contextmanager
def builders(request: SweepRequest) -> Iterator[Sequence[Caller]]:
    """Processes that build, one a core; they end with the context."""
    if not request.isolated:
        yield [Here()]
        return
    # A process that interprets kernels holds none that compile.
    with processes(min(core_count(), PROCESSES_MOST), request.limit_s, {INTERPRET: "0"}) as workers:
        yield workers


def run_stage(
    this: Sweeping, own: str, case: Case, direction: Direction, number: int, grid: Grid, start: Tile
) -> Stage:
    """The stage, as far as there was time for it. number: of the grid. start: the tile it begins with.

    Raises Lost when the port is.
    """
    session = this.session
    tiles = grid.tiles(start)
    refused = session.callers[0].call(refusals, session.setting, own, case.problem, direction, tiles)
    candidates = [
        Candidate(with_tile(own, direction, number, tile), tile, refused.get(tile, ""), by_budget=tile in refused)
        for tile in tiles
    ]
    stage = Stage(own, direction, case.problem, grid, candidates)
    begin = time.monotonic()
    _build_all(this, stage)
    stage.build_s = time.monotonic() - begin
    behind = sum(not one.reached for one in candidates)
    if behind:
        stage.unfinished = f"{behind} of {len(candidates) - len(refused)} candidates were not built"
    elif session.environment.has_gpu:
        _measure(this, case, stage)
    return stage


def _build_all(this: Sweeping, stage: Stage) -> None:
    """Builds what fits, each tile once; what has been built before a file was resumed is taken from its records."""
    target, setting = this.session.target, this.session.setting
    earlier: dict[Tile, list[Record]] = {}
    for record in this.session.earlier_builds(stage.problem):
        tile = tiles_of(record["port"]).get(stage.direction)
        if tile is not None and own_name(record["port"]) == stage.port:
            earlier.setdefault(tile, []).append(record)
    here = this.built.setdefault((stage.port, stage.direction, stage.problem), {})

    def build(caller: Caller, one: Candidate) -> list[Row] | None:
        if this.is_late:
            return None
        item = Item(one.name, target, stage.direction, stage.problem)
        try:
            built = caller.call(jobs.build, setting, one.name, stage.problem, target, stage.direction)
        except Lost as lost:
            return [Row(item, "fail", f"the compiler {lost}")]
        if isinstance(built, jobs.Refusal):
            return [Row(item, "unsupported" if built.by_contract else "fail", built.reason)]
        return [Row(item, "pass", build=own) for own in built]

    missing = []
    for one in (one for one in stage.candidates if not one.by_budget and one.tile not in here):
        records = earlier.get(one.tile, [])
        if any(r["build"] is None or r["build"]["kernel"] == stage.grid.kernel for r in records):
            here[one.tile] = [(r["reason"], build_of(r)) for r in records]
            for record in records:
                this.write(record)
        else:
            missing.append(one)
    with progress("building", len(missing)) as begin, in_order(this.builders, build, missing) as outcomes:
        for one, outcome in zip(missing, outcomes, strict=True):
            begin(str(one.tile))
            rows = outcome() or []
            for row in rows:
                this.write(build_record(row, sources=this.session.ports[stage.port], facts=this.session.facts))
            if rows:
                here[one.tile] = [(row.reason, row.build) for row in rows]
    for one in (one for one in stage.candidates if not one.by_budget):
        one.reached = one.tile in here
        _take(one, here.get(one.tile, []), target.smem_per_block)


def _take(one: Candidate, built: Sequence[tuple[str, Build | None]], room: int) -> None:
    """Gives a candidate what it was built to, or why it was not."""
    one.builds = tuple(build for _, build in built if build is not None)
    one.refused = next((reason for reason, build in built if build is None), "")
    for build in one.builds:
        if build.shared > room:
            one.refused = f"{build.kernel} was built with {build.shared} B of shared memory; there are {room} B"


def _measure(this: Sweeping, case: Case, stage: Stage) -> None:
    """Checks what was built, times what passed, and chooses."""
    session = this.session
    built = [one for one in stage.candidates if not one.refused]
    records = _earlier(session, case, stage.direction, built)
    if records:
        timings = [times for times in map(timing_of, records) if times is not None]
        for one, record in zip(built, records, strict=True):
            one.check = check_of(record)
            this.write(record)
        stage.timing = merged(timings) if timings else None
    else:
        _check_and_time(this, case, stage, built)
    this.checks += [replace(one.check, port=stage.port) for one in built if one.check is not None]
    if stage.timing is not None:
        stage.choice = choose(stage.timing, stage.candidates, stage.grid.kernel, spilling=this.request.spilling)


def _earlier(session: Session, case: Case, direction: Direction, built: Sequence[Candidate]) -> list[Record]:
    """The records of the candidates in the file to resume; none unless all that is to be known of them is there."""
    known = {r["port"]: r for r in session.earlier(case) if r["kind"] == "check" and r["direction"] == direction}
    records = [known[one.name] for one in built if one.name in known]
    done = len(records) == len(built) and all(r["samples"] or r["verdict"] != "pass" for r in records)
    return records if done else []


def _check_and_time(this: Sweeping, case: Case, stage: Stage, built: Sequence[Candidate]) -> None:
    session, caller, direction = this.session, this.session.callers[0], stage.direction
    names = [one.name for one in built]
    launched: tuple[Direction, ...] = ("forward", "backward") if direction == "backward" else ("forward",)
    compile_ahead(session, names, [case.problem], launched, this.deadline, this.builders)
    with progress("checking", len(built)) as begin:
        for number, one in enumerate(built):
            begin(str(one.tile))
            if this.is_late:
                stage.unfinished = f"{len(built) - number} of {len(built)} candidates were not checked"
                return
            (check,) = session.check(caller, one.name, case, (direction,))
            one.check = replace(check, port=one.name, tile=one.tile)
    (flash,) = session.check(caller, SDPA_FLASH.name, case, (direction,))
    passed = [one.name for one in built if one.check is not None and one.check.verdict == "pass"]
    if not flops_of(case.problem, direction) or not passed:
        row = TimedRow()
    elif this.is_late:
        stage.unfinished = "they were checked, and not timed"
        return
    else:
        rivals = [flash.port] if flash.verdict == "pass" else []
        row = session.time(caller, [*passed, *rivals], case, direction, this.request.rounds)
    stage.timing = row.timing
    if row.lost:
        stage.unfinished = f"they were not timed: {row.lost}"
    start = stage.candidates[0].name
    for one in built:
        times = row.of(one.name)
        kept = {name: name for name in (one.name, start, SDPA_FLASH.name)}
        assert one.check is not None
        this.write(
            check_record(
                one.check,
                sources=session.ports[stage.port],
                **session.about(case),
                timing=None if times is None else times.among(kept),
                untimed=row.untimed(one.name) if one.check.verdict == "pass" else "",
                baselines=[rival(flash, row)],
            )
        )
