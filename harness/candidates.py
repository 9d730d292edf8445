"""The tiles that a sweep tries: what a port offers, what its budget refuses, what they are built to, and which wins.

The rounds of a timing are dealt out in two halves. The even ones rank the candidates, and the odd ones judge the first
of them beside the tile that it would replace: of fifty candidates one is always in front by luck, and luck in one half
is none in the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from common import Build, Direction, Grid, Problem, Switches, Tile, Unsupported

from .errors import UsageError
from .jobs import Setting
from .timing import Ratio, Timing
from .trial import Check


@dataclass(frozen=True)
class Space:
    """What a port offers for a problem and direction. shipped: the tile it takes now. swept: whether its table has it.

    table: the path of that.
    """

    shipped: Tile
    swept: bool
    grids: tuple[Grid, ...]
    table: Path


def space_of(setting: Setting, name: str, problem: Problem, direction: Direction) -> Space | str:
    """What a port offers, or why it has nothing to sweep; called in a worker."""
    port, target = setting.open_port(name), setting.target
    reason = port.unsupported(problem, target)
    if reason is not None:
        return reason
    grids = tuple(port.grids(problem, target, direction))
    if port.tile_table is None or not grids:
        return f"the {name} port has no tiles to sweep"
    shipped = port.choose_tile(problem, target, direction, None, Switches())
    return Space(shipped, bool(port.swept(problem, target, direction)), grids, port.tile_table)


def refusals(
    setting: Setting, name: str, problem: Problem, direction: Direction, tiles: Sequence[Tile]
) -> dict[Tile, str]:
    """Why tiles do not fit the target, with the arithmetic, by tile; called in a worker."""
    port, found = setting.open_port(name), {}
    for tile in tiles:
        try:
            port.check_tile(problem, setting.target, direction, tile)
        except Unsupported as reason:
            found[tile] = str(reason)
    return found


def narrowed(grids: Sequence[Grid], values: Mapping[str, tuple[int, ...]]) -> tuple[Grid, ...]:
    """The grids with these values instead of their own, in the fields that they have."""
    return tuple(
        replace(grid, values={name: values.get(name, own) for name, own in grid.values.items()}) for grid in grids
    )


def check_fields(grids: Sequence[Grid], values: Mapping[str, tuple[int, ...]], name: str) -> None:
    """Raises UsageError for a field that none of these grids has. name: whose they are."""
    known = dict.fromkeys(chain.from_iterable(grid.values for grid in grids))
    for asked in values:
        if asked not in known:
            raise UsageError(f"a sweep of {name} has no {asked}; it has {', '.join(known)}")


@dataclass
class Candidate:
    """A tile on its way. name: as a contestant. refused: why it is not checked; by_budget: it was not built either.
    reached: there was time to build it."""

    name: str
    tile: Tile
    refused: str = ""
    by_budget: bool = False
    reached: bool = True
    builds: tuple[Build, ...] = ()
    check: Check | None = None

    def of(self, kernel: str) -> Build | None:
        """What a kernel was built to."""
        return next((build for build in self.builds if build.kernel == kernel), None)

    def spills(self, kernel: str) -> int:
        """What a kernel spills, bytes a thread."""
        build = self.of(kernel)
        return 0 if build is None else build.spills


@dataclass(frozen=True)
class Choice:
    """Which tile a stage ends with. first: the one in front. best: that, or the one that is there, which stays unless
    `gain`, how much faster the first is, lies above 1 with its whole interval.

    margin: how much longer the runner-up took than the best. ranked: all that might have won, fastest first.
    """

    first: Candidate
    best: Candidate
    gain: Ratio | None
    margin: Ratio | None
    ranked: tuple[Candidate, ...]


def choose(timing: Timing, candidates: Sequence[Candidate], kernel: str, *, spilling: bool = False) -> Choice | None:
    """The choice among candidates that were timed, the first of which is what is there; None when none was.

    One that spills more than what is there may not win, unless all do, or `spilling` says so.
    """
    timed = [one for one in candidates if one.name in timing.host_us]
    whole = [one for one in timed if one.spills(kernel) <= candidates[0].spills(kernel)]
    if not timed:
        return None
    ranking, judging = (Timing(timing.rounds[half::2], timing.host_us) for half in (0, 1))
    might = timed if spilling or not whole else whole
    ranked = tuple(sorted(might, key=lambda one: ranking.median(one.name)))
    first, start = ranked[0], candidates[0]
    gain = None if start not in timed or first is start else judging.speed(first.name, start.name)
    best = first if start not in timed or (gain is not None and gain.low > 1) else start
    behind = next((one for one in ranked if one is not best), None)
    margin = None if behind is None else judging.speed(best.name, behind.name)
    return Choice(first, best, gain, margin, ranked)


@dataclass
class Stage:
    """One grid of a sweep, swept: its candidates, of which the first is what is there, and their timing.

    unfinished: why it came to no end. build_s: seconds of the clock that the builds took.
    """

    port: str
    direction: Direction
    problem: Problem
    grid: Grid
    candidates: list[Candidate]
    timing: Timing | None = None
    choice: Choice | None = None
    unfinished: str = ""
    build_s: float = 0.0

    def named(self, values: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
        """The candidates that have these values in the fields of the grid; none where it has none of the fields."""
        asked = {name: own for name, own in values.items() if name in self.grid.values}
        return [one for one in self.candidates if asked and all(one.tile.entry.get(n, 0) in asked[n] for n in asked)]

    @property
    def compile_s(self) -> float:
        """Seconds that the compilers took for all of it, cores side by side counted each."""
        return sum(build.seconds for one in self.candidates for build in one.builds)


def merged(timings: Sequence[Timing]) -> Timing:
    """One timing of what several records hold of it: the same rounds, each with other contestants."""
    rounds = []
    for same in zip(*(timing.rounds for timing in timings), strict=True):
        ms = {name: ms for one in same for name, ms in one.ms.items()}
        late = tuple(dict.fromkeys(name for one in same for name in one.late))
        rounds.append(replace(same[0], ms=ms, late=late))
    return Timing(tuple(rounds), {name: us for timing in timings for name, us in timing.host_us.items()})
