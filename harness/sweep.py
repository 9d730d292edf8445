"""`harness sweep`: every tile that a port offers, against the budget, built, checked and timed; the fastest is kept.

A port's grids are swept one after the other, each from the best of the one before: of a backward first the tile of the
kernel of dk and dv, then that of dq. All candidates of a grid that pass their checks are timed by turns in one process,
beside the forced flash backend of SDPA. Without a GPU the budget and the builds are all there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from common import Direction, Port, Tile
from common.target import ADA

from . import jobs
from .autotune import TUNES, autotuned
from .baselines.protocol import flops_of
from .candidates import Space, Stage, check_fields, narrowed, refusals, space_of
from .environment import INTERPRET, Environment
from .errors import UsageError, complain
from .heat_picture import heat_picture
from .isolation import Lost
from .picture_file import check_picture, write_picture
from .session import FAILED, NOTHING_RAN, OK, Session
from .suites import Case, Suite, load_suite
from .sweep_stage import Sweeping, SweepRequest, builders, run_stage
from .sweep_tables import choice_words, closing_table, stage_tables
from .tables import Table, print_tables
from .tile_file import Entry, TileClass, write_entries

TILES_MOST = 3  # of an entry


@dataclass
class Swept:
    """One class of problems of one port. trouble: why nothing came of it. entry: what its table is to say now, None
    where that stays."""

    port: str
    case: Case
    of: TileClass
    space: Space | None = None
    stages: list[Stage] = field(default_factory=list)
    tile: Tile | None = None
    trouble: str = ""
    entry: Entry | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every grid came to a choice."""
        grids = 0 if self.space is None else len(self.space.grids)
        return not self.trouble and len(self.stages) == grids and all(stage.choice for stage in self.stages)


def sweep(
    request: SweepRequest,
    here: Environment,
    open_port: Callable[[str], Port] = jobs.open_port,
    *,
    all_asked: bool = True,
) -> int:
    """Runs the command and returns its exit status.

    all_asked: a port that cannot run is an error, and not just a line that says so. open_port: where ports come from,
    by name. Raises UsageError for what can be told before anything runs.
    """
    begin = time.monotonic()
    if request.autotune:
        _check_autotune(request, here)
    if request.picture is not None:
        check_picture(request.picture, request.json)
    suite = load_suite(request.suite, small=False)
    variables = {} if here.has_gpu else {INTERPRET: "0"}
    with (
        Session.open(request, here, open_port, variables, suite, launches=False) as session,
        builders(request) as workers,
    ):
        if not session.ports:
            return NOTHING_RAN
        session.suite, left = one_of_each_class(session.suite)
        spaces = _spaces(session, request)
        idle = _without_tiles(session, spaces)
        if len(idle) == len(session.ports):
            return NOTHING_RAN
        this = Sweeping(request, session, workers, begin + 60 * request.minutes)
        swept: list[Swept] = []
        with session.record_file() as file:
            this.file = file
            try:
                for case, own, direction in product(session.suite.cases, session.ports, request.each):
                    if own in idle:
                        continue
                    swept.append(Swept(own, case, TileClass.of(case.problem, session.target, direction)))
                    _sweep(this, swept[-1], spaces[own, case.id + case.problem.id, direction])
            finally:
                if request.write:  # first: neither an interrupt nor a closed pipe takes what was found
                    _write_entries(swept)
                notes = [*left, f"{time.monotonic() - begin:.1f} s in all."]
                print_tables([_closing(this, swept, notes)], request.form)
                if request.picture is not None:
                    stages = [stage for one in swept for stage in one.stages]
                    write_picture(request.picture, f"{heat_picture(stages, _where(session))}\n")
        if request.write:
            for table, entries in _entries_of(swept).items():
                print(f"{table}: {len(entries)} entries written" if entries else f"{table}: as it was")
    return _status(this, swept, all_asked and bool(idle or session.missing))


def _check_autotune(request: SweepRequest, here: Environment) -> None:
    for name in request.impls:
        if name != TUNES:
            raise UsageError(f"--autotune is @triton.autotune: the {name} port has no kernels that it could wrap")
    if not here.has_gpu:
        raise UsageError("--autotune times kernels, which takes a GPU")


def one_of_each_class(suite: Suite) -> tuple[Suite, list[str]]:
    """The suite with the first problem of each class only, and what is said of the others."""
    firsts: dict[object, Case] = {}
    notes = []
    for case in suite.cases:
        own = TileClass.of(case.problem, ADA, "forward")
        if own in firsts:
            notes.append(f"{case.problem.id} is left out: its tiles are those of {firsts[own].problem.id}.")
        firsts.setdefault(own, case)
    return replace(suite, cases=tuple(firsts.values())), notes


def _spaces(session: Session, request: SweepRequest) -> dict[tuple[str, str, Direction], Space | str]:
    """What each port offers for each problem and direction, with the values of the request in it, or why nothing."""
    found: dict[tuple[str, str, Direction], Space | str] = {}
    for own in session.ports:
        for case, direction in product(session.suite.cases, request.each):
            try:
                space = session.callers[0].call(space_of, session.setting, own, case.problem, direction)
            except Lost as lost:
                space = f"the {own} port {lost}"
            found[own, case.id + case.problem.id, direction] = space
    grids = [grid for space in found.values() if isinstance(space, Space) for grid in space.grids]
    if grids:
        check_fields(grids, request.values, " and ".join(session.ports))
    return {
        key: space if isinstance(space, str) else replace(space, grids=narrowed(space.grids, request.values))
        for key, space in found.items()
    }


def _without_tiles(session: Session, spaces: Mapping[tuple[str, str, Direction], Space | str]) -> set[str]:
    """The ports that have nothing to sweep for any problem; why is said once."""
    idle = set()
    for own in session.ports:
        found = [space for (port, *_), space in spaces.items() if port == own]
        if all(isinstance(space, str) for space in found):
            idle.add(own)
            for reason in dict.fromkeys(map(str, found)):
                complain(reason)
    return idle


def _where(session: Session) -> str:
    """Whose code ran where, or for what it was built."""
    here = session.environment
    return here.path(session.target) if here.has_gpu else f"for {session.target}"


def _sweep(this: Sweeping, one: Swept, space: Space | str) -> None:
    """Sweeps a class, a grid after the other, and prints each when it is done."""
    if isinstance(space, str):
        one.trouble = space
        return
    session, problem = this.session, one.case.problem
    one.space, one.tile = space, space.shipped
    for number, grid in enumerate(space.grids, start=1):
        if this.is_late:
            one.trouble = f"not begun: {this.request.minutes:g} minutes were over"
            return
        try:
            stage = run_stage(this, one.port, one.case, one.of.direction, number, grid, one.tile)
        except Lost as lost:
            one.trouble = f"the {one.port} port {lost}"
            return
        one.stages.append(stage)
        flops = flops_of(problem, one.of.direction)
        print_tables(stage_tables(stage, _where(session), session.target.smem_per_block, flops), this.request.form)
        if stage.unfinished:
            one.trouble = stage.unfinished
            return
        if stage.choice is not None:
            one.tile = grid.taken(one.tile, stage.choice.best.tile)
    if one.is_whole:
        one.entry = _entry(session, one, space)
        if this.request.autotune:
            print_tables([autotuned(session, one.case, one.of.direction, one.stages)], this.request.form)


def _entry(session: Session, one: Swept, space: Space) -> Entry | None:
    """What the table is to say: nothing new where it has the tile already, also for want of a faster one."""
    assert one.tile is not None
    if one.tile == space.shipped and space.swept:
        return None
    first = one.stages[0].choice
    assert first is not None
    others = [space.grids[0].taken(one.tile, candidate.tile) for candidate in first.ranked]
    about = one.port, one.case.problem, one.of.direction, others
    refused = session.callers[0].call(refusals, session.setting, *about)
    tiles = list(dict.fromkeys([one.tile, *(tile for tile in others if tile not in refused)]))
    margins = [stage.choice.margin for stage in one.stages if stage.choice is not None]
    return Entry(
        one.of,
        card=session.environment.card,
        date=session.facts["date"][:10],
        problem=one.case.problem.id,
        margin=", ".join("none" if m is None else f"{100 * (m.value - 1):.1f} %" for m in margins),
        tiles=tiles[:TILES_MOST],
    )


def _closing(this: Sweeping, swept: list[Swept], notes: list[str]) -> Table:
    rows = [(one.port, str(one.of), one.case.problem.id, str(one.tile or "–"), _outcome(this, one)) for one in swept]
    compilers = sum(stage.compile_s for one in swept for stage in one.stages)
    clock = sum(stage.build_s for one in swept for stage in one.stages)
    told = [f"Compilers took {compilers:.1f} s, {clock:.1f} s by the clock. {notes[-1]}", *notes[:-1]]
    entries = [one.entry for one in swept if one.entry is not None]
    if entries and not this.request.write:
        told.append("--write would put into the ports' tiles.yaml:")
        told += [line for entry in entries for line in str(entry).splitlines()]
    if not this.session.environment.has_gpu:
        told.append("No GPU is used here: tiles were held to the budget and built, and none was timed.")
    return closing_table(rows, told)


def _outcome(this: Sweeping, one: Swept) -> str:
    if one.trouble:
        return one.trouble
    if not this.session.environment.has_gpu:
        return "built"
    if not one.is_whole:
        return "no candidate has a time"
    words = "; ".join(choice_words(stage) for stage in one.stages)
    assert one.space is not None
    if one.entry is None:
        return f"unchanged: {words}"
    new = "" if one.space.swept else "new, nothing was swept before: "
    return f"{new}{words}"


def _entries_of(swept: list[Swept]) -> dict[Path, list[Entry]]:
    """What was found for the table of each port."""
    found: dict[Path, list[Entry]] = {one.space.table: [] for one in swept if one.space is not None}
    for one in swept:
        if one.entry is not None and one.space is not None:
            found[one.space.table].append(one.entry)
    return found


def _write_entries(swept: list[Swept]) -> None:
    """Puts what was found into the tables of the ports."""
    for table, entries in _entries_of(swept).items():
        if entries:
            write_entries(table, entries)


def _status(this: Sweeping, swept: list[Swept], lacks_port: bool) -> int:
    if any(check.verdict == "fail" for check in this.checks):
        return FAILED
    troubles: dict[tuple[str, str], list[Swept]] = {}
    for one in (one for one in swept if one.trouble):
        troubles.setdefault((one.port, one.trouble), []).append(one)
    for (port, trouble), those in troubles.items():
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        complain(f"{port}, {those[0].of}{more}: {trouble}")
    named = [stage.named(this.request.values) for one in swept for stage in one.stages]
    if any(named) and all(one.by_budget for those in named for one in those):
        complain("nothing that you named fits")
        return NOTHING_RAN
    done = [one for one in swept if not one.trouble]
    if this.session.environment.has_gpu:
        done = [one for one in done if one.is_whole]
    return OK if len(done) == len(swept) and not lacks_port else NOTHING_RAN
