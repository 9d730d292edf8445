"""The contract every port is written against: problems, masks, targets, tiles, ports and `attention()`."""

from .attention import attention
from .buffers import Form, GuardedBuffers, empty, empty_like
from .mask import Corner, Mask, TileKind
from .ports import Build, Kernel, Port, Unsupported, port, port_names, port_package
from .problem import DTYPE_NAMES, Direction, Problem
from .target import Card, Target
from .tile import RUNGS, Switches, Tile
from .tile_table import Grid, TileTable
from .work import Work

__all__ = [
    "DTYPE_NAMES",
    "RUNGS",
    "Build",
    "Card",
    "Corner",
    "Direction",
    "Form",
    "Grid",
    "GuardedBuffers",
    "Kernel",
    "Mask",
    "Port",
    "Problem",
    "Switches",
    "Target",
    "Tile",
    "TileKind",
    "TileTable",
    "Unsupported",
    "Work",
    "attention",
    "empty",
    "empty_like",
    "port",
    "port_names",
    "port_package",
]
