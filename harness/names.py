"""What contestants are called.

A port or a baseline goes by its own name, `triton`. What else there is to say of a contestant stands behind it:
`triton#2` is triton once more; `triton#skip` is triton on that rung of its ladder, `triton#-skip` with that one switch
off, `triton#all` with none off; `triton#forward 1 64x64 w4 s2` has that tile in that direction, as a candidate of the
first grid of a sweep; and `triton@ada#skip` takes the code path of that target, and not the run's.
"""

from __future__ import annotations

from typing import get_args

from common import RUNGS, Direction, Switches, Tile

ALL = "all"
LEFT_OUT = (ALL, *(f"-{rung}" for rung in RUNGS[1:]))  # the variants of a ladder that leaves one out at a time


def name_of(own: str, variant: str, path: str = "") -> str:
    """The name of a port's variant, on the code path of a target if one is named."""
    return f"{own}@{path}#{variant}" if path else f"{own}#{variant}"


def own_name(name: str) -> str:
    """The name of the port or baseline alone."""
    return name.partition("#")[0].partition("@")[0]


def path_name(name: str) -> str:
    """The name of the target whose code path it takes; empty for the run's."""
    return name.partition("#")[0].partition("@")[2]


def variant_of(name: str) -> str:
    """What stands behind the `#`: `2`, a rung, or one of `LEFT_OUT`; empty where there is none."""
    return name.partition("#")[2]


def without_path(name: str) -> str:
    """The name as records have it, which tell the target themselves."""
    return name_of(own_name(name), variant_of(name))


def switches_of(name: str) -> Switches:
    """The switches that a contestant runs with."""
    variant = variant_of(name)
    if variant in RUNGS:
        return Switches.rung(variant)
    return Switches().without(variant[1:]) if variant.startswith("-") else Switches()


def with_tile(own: str, direction: Direction, grid: int, tile: Tile) -> str:
    """The name of a candidate: a port with that tile in one direction, and its own choice in the other.

    grid: the number of the sweep's grid, from 1.
    """
    return name_of(own, f"{direction} {grid} {tile}")


def tiles_of(name: str) -> dict[Direction, Tile]:
    """The tile that a contestant is given, by the direction it is for; empty where the port chooses."""
    direction, _, rest = variant_of(name).partition(" ")
    return {own: Tile.from_text(rest.partition(" ")[2]) for own in get_args(Direction) if own == direction}


def grid_of(name: str) -> str:
    """The direction and the number of the grid that a candidate is of; empty where it is none."""
    return variant_of(name).partition(f" {tile}")[0] if (tile := next(iter(tiles_of(name).values()), None)) else ""


def rival_of(name: str) -> str | None:
    """The contestant that the same port's gain is told from: of a rung the one before, of a switch that is off all on.

    None for `naive` and `all`, which a ladder starts from, and for what is no rung.
    """
    variant = variant_of(name)
    if variant in RUNGS[1:]:
        return name_of(own_name(name), RUNGS[RUNGS.index(variant) - 1], path_name(name))
    return name_of(own_name(name), ALL, path_name(name)) if variant.startswith("-") else None
