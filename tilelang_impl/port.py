"""The TileLang port: what it supports, which tiles it takes, and its three entry points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from common import Build, Direction, Grid, Kernel, Port, Problem, Switches, Target, Tile, Unsupported, Work
from common.budget import check_budget
from common.ports import Forms, Run, dtype_reason
from common.work import backward_work, forward_work

from . import budget
from .backward import plan_backward, prepare_backward
from .build import build
from .forward import plan_forward, prepare_forward
from .launch import ROW_PADDING, Launch, asynchronous
from .toolchain import version_fault

# What a tile may say besides its own: forward, whether acc is rescaled only when a maximum has moved; backward, whether
# dkdv_kernel adds dq up by atomics, and the tile of dq_kernel, for when it does not.
EXTRAS = frozenset({"lazy_rescale", "atomic_dq", "dq_block_m", "dq_block_n", "dq_stages", "dq_warps"})

WARPS_MAX = 32


class TilelangPort(Port):
    """FlashAttention-2 in TileLang: fp16 and bf16, every target, on CUDA devices.

    Packed `(B, H, N, D)` and `(B, N, H, D)` tensors are taken as they are; others are copied once.
    """

    name: ClassVar[str] = "tilelang"
    tile_table: ClassVar[Path | None] = Path(__file__).with_name("tiles.yaml")

    def __init__(self) -> None:
        self._fault = version_fault()

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        if self._fault is not None:
            return self._fault
        return dtype_reason(self.name, problem, (torch.float16, torch.bfloat16))

    def tiles(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        swept = self.swept(problem, target, direction)
        return self.fitting([*swept, *_candidates(problem, target, direction)], problem, target, direction)

    def grids(self, problem: Problem, target: Target, direction: Direction) -> list[Grid]:
        hopper = target.instruction == "wgmma"
        owned, warps, stages = ((128, 192), (8, 12), (2, 3)) if hopper else ((64, 128), (4, 8), (1, 2))
        walked: tuple[int, ...] = (64, 96, 128) if hopper else (32, 48, 64, 96)
        if direction == "forward":
            walked += (160,) if hopper else (128,)
            values = {"block_m": owned, "block_n": walked, "warps": warps, "stages": stages, "lazy_rescale": (0, 1)}
            return [Grid("forward_kernel", values)]
        dkdv = {"block_m": (32, 64, 128), "block_n": owned, "warps": warps, "stages": stages}
        dq = {"dq_block_m": owned, "dq_block_n": walked, "dq_warps": warps, "dq_stages": stages}
        if not hopper:
            dkdv["atomic_dq"] = (0, 1)
        return [Grid("dkdv_kernel", dkdv), Grid("dq_kernel", dq, without=("atomic_dq",))]

    def check_tile(self, problem: Problem, target: Target, direction: Direction, tile: Tile) -> None:
        unknown = sorted({name for name, _ in tile.extra} - EXTRAS)
        if unknown:
            raise Unsupported(f"TileLang's tiles have no {', '.join(unknown)} (but {', '.join(sorted(EXTRAS))})")
        if direction == "forward":
            kernels = [(tile.block_m, tile.block_n, tile)]
        else:
            dq = budget.dq_tile(tile)
            kernels = [(tile.block_n, tile.block_m, tile), (dq.block_m, dq.block_n, dq)]
            if tile.get("atomic_dq", 0) and asynchronous(target, tile, tile.block_n):
                raise Unsupported(f"atomic_dq is for mma.sync; with wgmma dq has a kernel of its own, got tile {tile}")
            if ROW_PADDING % tile.block_m:
                raise Unsupported(f"backward tiles need a block_m that divides {ROW_PADDING}, got tile {tile}")
        for owned_rows, walked_rows, part in kernels:
            if owned_rows % (16 * part.warps) or walked_rows % 16:
                raise Unsupported(
                    f"a warp holds whole rows of scores, 16 at a time: the side a block owns must be a multiple of "
                    f"16 rows for each warp and the other one of 16, got tile {tile}"
                )
            # The copies by TMA have a warpgroup of their own.
            most = WARPS_MAX - 4 if asynchronous(target, part, owned_rows) else WARPS_MAX
            if part.warps > most:
                raise Unsupported(f"a block has at most {most} warps that compute, got tile {tile}")
        check_budget(budget.shared_memory(problem, target, direction, tile), problem, target, tile)

    def _build(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches
    ) -> list[Build]:
        return build(problem, target, direction, tile, switches)

    def _launches(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, dlse: bool, deterministic: bool
    ) -> tuple[Work, ...]:
        def instruction(part: Tile, owned_rows: int) -> str:
            return target.instruction if asynchronous(target, part, owned_rows) else "mma.sync"

        if direction == "forward":
            return forward_work("forward_kernel", instruction(tile, tile.block_m))
        adds_dq, dq = not deterministic and bool(tile.get("atomic_dq", 0)), budget.dq_tile(tile)
        return backward_work(
            ("prepare_kernel", "dkdv_kernel", "scale_dq_kernel" if adds_dq else "dq_kernel"),
            (instruction(tile, tile.block_n), instruction(dq, dq.block_m)),
            adds_dq=adds_dq,
            dlse=dlse,
        )

    def _kernels(
        self,
        problem: Problem,
        target: Target,
        direction: Direction,
        tile: Tile,
        switches: Switches,
        dlse: bool,
        deterministic: bool,
    ) -> Sequence[Kernel]:
        if direction == "forward":
            launches: Sequence[Launch] = plan_forward(problem, target, tile, switches, ("bhnd",) * 4)
        else:
            layouts = ("bhnd",) * 5 + (("dlse",) if dlse else ())
            atomic_dq = not deterministic and bool(tile.get("atomic_dq", 0))
            launches = plan_backward(problem, target, tile, switches, layouts, atomic_dq)
        return [launch.kernel for launch in launches]

    def _prepare_forward(self, forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches) -> Run:
        _check_device(forms["q"].device)
        return prepare_forward(forms, problem, target, tile, switches)

    def _prepare_backward(
        self, forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches, deterministic: bool
    ) -> Run:
        _check_device(forms["q"].device)
        return prepare_backward(forms, problem, target, tile, switches, deterministic)


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unsupported(f"TileLang compiles for CUDA devices and has no interpreter; the tensors are on {device}")


def _candidates(problem: Problem, target: Target, direction: Direction) -> list[Tile]:
    """Tiles to try where none was swept: the largest that registers hold first, down to what fits anywhere."""
    wide = problem.head_dim > 128
    if target.instruction == "wgmma":
        if direction == "forward":
            return [Tile(128, 64 if wide else 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(16, 16, 1, 1)]
        narrow = Tile(32, 64, 4, 2, _dq(64, 32, 4, 2))
        shapes = [] if wide else [Tile(64, 128, 8, 2, _dq(128, 128, 8, 2))]
        return [*shapes, Tile(64, 64, 4, 2, _dq(64, 64, 4, 2)), narrow, Tile(16, 16, 1, 1)]
    if direction == "forward":
        shapes = [Tile(64, 32, 4, 2)] if wide else [Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)]
        return [*shapes, Tile(64, 32, 4, 1), Tile(16, 16, 1, 1)]
    if problem.head_dim <= 64:
        shapes = [Tile(32, 128, 4, 2, _dq(128, 64, 4, 2, atomic_dq=1))]
    else:
        shapes = [] if wide else [Tile(64, 64, 4, 1, _dq(128, 32, 4, 2, atomic_dq=1))]
    small = Tile(16, 64, 4, 1, _dq(64, 16, 4, 1))
    return [*shapes, Tile(32, 64, 4, 2, _dq(64, 32, 4, 2)), small, Tile(16, 16, 1, 1)]


def _dq(block_m: int, block_n: int, warps: int, stages: int, **more: int) -> tuple[tuple[str, int], ...]:
    """The extras of a backward tile: the tile of dq_kernel, and more."""
    own = {"dq_block_m": block_m, "dq_block_n": block_n, "dq_stages": stages, "dq_warps": warps}
    return tuple(sorted((own | more).items()))
