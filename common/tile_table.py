"""What tiles there are to choose from: a port's table of swept tiles, and the grids that a sweep tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from .problem import LEN_MAX, Direction, Problem
from .target import Target
from .tile import Tile


class TileTable:
    """A port's `tiles.yaml`: a list of entries, each the tiles swept for one class of problems, best first.

    An entry has `target`, `direction`, `bits` (16 or 32: the width of the dtype), `head_dim` (the largest it is for),
    `masked` (whether the mask has an edge on the right, as causal has), optionally `len` (the most keys it is for; any
    number without), `tiles`, and what was measured and where.
    """

    def __init__(self, path: Path) -> None:
        entries = yaml.safe_load(path.read_text())
        self._tiles: dict[tuple[str, str, int, bool], list[tuple[int, int, list[Tile]]]] = {}
        for entry in entries or ():
            key = (entry["target"], entry["direction"], entry["bits"], entry["masked"])
            tiles = [Tile.parse(tile) for tile in entry["tiles"]]
            self._tiles.setdefault(key, []).append((entry["head_dim"], entry.get("len", LEN_MAX), tiles))
        for rows in self._tiles.values():
            rows.sort(key=lambda row: row[:2])

    @classmethod
    @cache
    def load(cls, path: Path) -> TileTable:
        """The table in that file, read once."""
        return cls(path)

    def lookup(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        """The tiles of the entry with the smallest `head_dim`, and then `len`, that hold the problem's; often none."""
        masked = problem.mask.right is not None
        key = (target.name, direction, problem.dtype.itemsize * 8, masked)
        for head_dim, length, tiles in self._tiles.get(key, ()):
            if problem.head_dim <= head_dim and problem.len_k <= length:
                return list(tiles)
        return []


@dataclass(frozen=True)
class Grid:
    """Values of some fields of a tile, to be tried in all combinations while its other fields stay as they are.

    kernel: the one that they are for; what it spills counts. values: by the name of the field; 0 leaves an extra out.
    without: extras that are left out while this is measured, since with them that kernel would not be launched.
    """

    kernel: str
    values: Mapping[str, tuple[int, ...]]
    without: tuple[str, ...] = ()

    def measured(self, tile: Tile) -> Tile:
        """The tile as it is measured."""
        return tile.having(dict.fromkeys(self.without, 0))

    def tiles(self, start: Tile) -> list[Tile]:
        """What is tried, as it is measured, each once: `start` first, then it with all combinations of the values.

        Raises ValueError when a value is none that a tile may have.
        """
        first = self.measured(start)
        combinations = (dict(zip(self.values, values, strict=True)) for values in product(*self.values.values()))
        return list(dict.fromkeys([first, *(first.having(values) for values in combinations)]))

    def taken(self, start: Tile, best: Tile) -> Tile:
        """`start` with those values of `best` that this grid has."""
        return start.having({name: best.entry.get(name, 0) for name in self.values})
