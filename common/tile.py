"""Tiles, and the switches of the ladder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import check_type

RUNGS = ("naive", "tiles", "skip", "exp2", "edges", "order")
OWN = ("block_m", "block_n", "warps", "stages")  # the fields of every tile
_EXTRA = re.compile(r" ([a-z]\w*?)(\d+)(?= |$)")
_TEXT = re.compile(rf"(\d+)x(\d+) w(\d+) s(\d+)((?:{_EXTRA.pattern})*)")


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its problem: `block_m` query rows by `block_n` key rows, `warps` a block, `stages` of the loop.

    extra: what one port needs besides, as sorted `(name, value)` pairs; read with `tile.get(name, default)`.
    Raises TypeError/ValueError when a value is no positive integer, or `extra` no such pairs.
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2
    extra: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.extra, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in self.extra
        ):
            raise TypeError(f"tile extra must be a tuple of (name, value) pairs, got {self.extra!r}")
        names = [name for name, _ in self.extra]
        if names != sorted(set(names)):
            raise ValueError(f"tile extra must be sorted by name and name each once, got {', '.join(names)}")
        own = [(name, getattr(self, name)) for name in OWN]
        for name, value in (*own, *self.extra):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"tile {name} must be an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"tile {name} must be >= 1, got {value}")

    def get(self, name: str, default: int) -> int:
        """The extra value of that name."""
        return dict(self.extra).get(name, default)

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages}"
        return text + "".join(f" {name}{value}" for name, value in self.extra)

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Tile:
        """A tile from a mapping: `block_m`, `block_n`, `warps`, `stages`, and any further integers as extras."""
        extra = tuple(sorted((name, value) for name, value in entry.items() if name not in OWN))
        return cls(**{name: entry[name] for name in OWN if name in entry}, extra=extra)

    @property
    def entry(self) -> dict[str, int]:
        """The mapping that `parse` takes, its own fields first."""
        return {**{name: getattr(self, name) for name in OWN}, **dict(self.extra)}

    @classmethod
    def from_text(cls, text: str) -> Tile:
        """The tile that `str` wrote. Raises ValueError for another text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"a tile is written as in 128x64 w4 s2, got {text!r}")
        own = dict(zip(OWN, map(int, found.groups()[:4]), strict=True))
        return cls.parse(own | {name: int(value) for name, value in _EXTRA.findall(found[5])})

    def having(self, values: Mapping[str, int]) -> Tile:
        """This tile with other values of these fields, by their names; 0 leaves an extra out."""
        entry = {**self.entry, **values}
        return Tile.parse({name: value for name, value in entry.items() if value or name in OWN})


@dataclass(frozen=True)
class Switches:
    """The optimisations a learner meets one after another; compile-time constants in every kernel.

    tiles: the tile swept for the target, instead of 16×16 unpipelined.
    skip: the key loop starts and stops at the mask's edge, instead of visiting every tile.
    exp2: `scale·log2(e)` folded in once and `exp2` in the loop, instead of `exp`.
    edges: only edge tiles are masked, the interior loop has no comparison.
    order: heavy query tiles first, heads grouped so that their keys and values stay in L2.
    tf32: fp32 products in TF32 instead of IEEE fp32. No rung: it changes the rounding, so it is off unless asked for.
    Raises TypeError when one is no bool.
    """

    tiles: bool = True
    skip: bool = True
    exp2: bool = True
    edges: bool = True
    order: bool = True
    tf32: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            check_type(f"switch {one.name}", getattr(self, one.name), bool)

    @classmethod
    def rung(cls, name: str) -> Switches:
        """The switches of a rung of the ladder, cumulative: that rung and all before it on, the later ones off.

        Raises ValueError for a name that is no rung.
        """
        if name not in RUNGS:
            raise ValueError(f"rung must be one of {', '.join(RUNGS)}, got {name!r}")
        climbed = RUNGS[1 : RUNGS.index(name) + 1]
        return cls(**{rung: rung in climbed for rung in RUNGS[1:]})

    def without(self, name: str) -> Switches:
        """These switches with one rung off."""
        if name not in RUNGS[1:]:
            raise ValueError(f"switch must be one of {', '.join(RUNGS[1:])}, got {name!r}")
        return replace(self, **{name: False})

    def __str__(self) -> str:
        off = [f"-{name}" for name in RUNGS[1:] if not getattr(self, name)]
        return " ".join(off + (["+tf32"] if self.tf32 else [])) or "all"
