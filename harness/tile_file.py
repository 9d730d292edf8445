"""A port's `tiles.yaml` as text: an entry is put in its place, and all else stays as it is, comments included."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common import Direction, Problem, Target, Tile
from common.problem import LEN_MAX
from common.target import TARGETS

SHORT = 1024  # keys; problems up to it are a class of their own, whose entries say `len`
_START = "- target: "  # how every entry begins


@dataclass(frozen=True)
class TileClass:
    """The problems that share an entry of the table. length: the most keys they have, None for any number."""

    target: str
    direction: Direction
    bits: int
    head_dim: int
    masked: bool
    length: int | None

    @classmethod
    def of(cls, problem: Problem, target: Target, direction: Direction) -> TileClass:
        """The class of a problem: up to `SHORT` keys, or of any number."""
        masked, length = problem.mask.right is not None, SHORT if problem.len_k <= SHORT else None
        return cls(target.name, direction, problem.dtype.itemsize * 8, problem.head_dim, masked, length)

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> TileClass:
        """The class that an entry is for."""
        own = {name: entry[name] for name in ("target", "direction", "bits", "head_dim", "masked")}
        return cls(**own, length=entry.get("len"))

    @property
    def place(self) -> tuple[int, int, int, bool, int, bool]:
        """Its place in the order of a file."""
        order = [target.name for target in TARGETS].index(self.target)
        return order, self.bits, self.head_dim, self.masked, self.length or LEN_MAX, self.direction == "backward"

    def __str__(self) -> str:
        mask = "masked" if self.masked else "full"
        length = f", up to {self.length} keys" if self.length else ""
        return f"{self.target} {self.direction} D {self.head_dim}, {self.bits} bits, {mask}{length}"


@dataclass(frozen=True)
class Entry:
    """What a sweep found for a class: its tiles, best first, and what was measured, where and when.

    margin: how much longer the runner-up took, in words.
    """

    of: TileClass
    card: str
    date: str
    problem: str
    margin: str
    tiles: Sequence[Tile]

    def __str__(self) -> str:
        about: dict[str, object] = {
            "target": self.of.target,
            "direction": self.of.direction,
            "bits": self.of.bits,
            "head_dim": self.of.head_dim,
            "masked": str(self.of.masked).lower(),
        }
        if self.of.length is not None:
            about["len"] = self.of.length
        about |= {"card": self.card, "date": self.date, "problem": self.problem, "margin": self.margin}
        lines = [f"  {name}: {value}" for name, value in about.items()]
        tiles = [f"    - {{{', '.join(f'{name}: {value}' for name, value in t.entry.items())}}}" for t in self.tiles]
        return "\n".join(["- " + lines[0].lstrip(), *lines[1:], "  tiles:", *tiles]) + "\n"


def with_entries(text: str, entries: Sequence[Entry]) -> str:
    """The text of a `tiles.yaml` with these entries, each instead of the one of its class if there is one.

    Entries are in the order of target, bits, head_dim, masked, len, direction; what stands above the first one stays.
    """
    head, *blocks = text.split("\n" + _START) if not text.startswith(_START) else ["", *text.split(_START)[1:]]
    by_class: dict[TileClass, str] = {}
    for block in blocks:
        whole = _START + block.rstrip("\n") + "\n"
        by_class[TileClass.of_entry(yaml.safe_load(whole)[0])] = whole
    for entry in entries:
        by_class[entry.of] = str(entry)
    above = head.rstrip("\n") + "\n" if head.strip() else ""
    return above + "".join(by_class[own] for own in sorted(by_class, key=lambda own: own.place))


def write_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Puts entries into the file, which is whole at any moment."""
    fresh = with_entries(path.read_text(encoding="utf-8"), entries)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(fresh)
    os.chmod(file.name, path.stat().st_mode)
    os.replace(file.name, path)
