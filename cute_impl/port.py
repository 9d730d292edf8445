"""The CuTe DSL port: what it supports, which tiles it takes, and its three entry points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from common import Build, Direction, Grid, Port, Problem, Switches, Target, Tile, Unsupported, Work
from common.budget import check_budget
from common.ports import NAIVE_TILE, Forms, Run, dtype_reason
from common.target import ADA
from common.work import backward_work, forward_work

from . import backward_budget, budget
from .backward import plan_backward, prepare_backward
from .build import build
from .forward import plan_forward, prepare_forward
from .launch import Code, Launch

# What a tile may have besides its own; each direction reads its own extras.
EXTRAS = frozenset({"lazy_rescale", "q_in_registers"}) | backward_budget.EXTRAS


class CutePort(Port):
    """FlashAttention-2 in CuTe DSL on `mma.sync`: fp16 and bf16, every target, on CUDA devices.

    Tensors are taken as they are while their rows start on 16 bytes; others are copied once.
    """

    name: ClassVar[str] = "cute"
    tile_table: ClassVar[Path | None] = Path(__file__).with_name("tiles.yaml")

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        return dtype_reason(self.name, problem, (torch.float16, torch.bfloat16))

    def tiles(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        # The kernels are the Ada path's everywhere: where nothing was swept, so are the tiles.
        swept = self.swept(problem, target, direction) or self.swept(problem, ADA, direction)
        return self.fitting([*swept, NAIVE_TILE], problem, target, direction)

    def grids(self, problem: Problem, target: Target, direction: Direction) -> list[Grid]:
        if direction == "forward":
            values = {
                "block_m": (64, 128),
                "block_n": (32, 48, 64, 96, 128),
                "warps": (2, 4, 8),
                "stages": (1, 2),
                "lazy_rescale": (0, 1),
            }
            return [Grid("forward_kernel", values)]
        # How the warps of dkdv_kernel share the work goes with its tile; the rest of its extras come after both.
        shape = {
            "block_m": (32, 64, 128),
            "block_n": (64, 128, 256),
            "warps": (4, 8),
            "stages": (1, 2),
            "key_warps": (0, 2, 4),
            "parts": (0, 2),
            "atomics": (1,),
        }
        extras = {"parts": (0, 2, 4), "v_in_registers": (0, 1), "blocks": (0, 2), "atomics": (0, 1)}
        dq = {"dq_block_m": (64, 128), "dq_block_n": (32, 48, 64, 96), "dq_warps": (4, 8), "dq_stages": (1, 2)}
        return [
            Grid("dkdv_kernel", shape),
            Grid("dkdv_kernel", extras),
            Grid("dq_kernel", dq, without=("atomics",)),
        ]

    def check_tile(self, problem: Problem, target: Target, direction: Direction, tile: Tile) -> None:
        unknown = sorted({name for name, _ in tile.extra} - EXTRAS)
        if unknown:
            raise Unsupported(f"CuTe's tiles have no {', '.join(unknown)} (but {', '.join(sorted(EXTRAS))})")
        if direction == "backward":
            backward_budget.check_backward(problem, target, tile)
        elif tile.block_m % (16 * tile.warps) or tile.block_n % 16:
            raise Unsupported(
                f"a warp holds whole rows of scores, 16 at a time: block_m must be a multiple of 16 for each warp and "
                f"block_n of 16, got tile {tile}"
            )
        if tile.warps > 32:
            raise Unsupported(f"a block has at most 32 warps, got tile {tile}")
        check_budget(budget.shared_memory(problem, direction, tile), problem, target, tile)

    def _build(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches
    ) -> list[Build]:
        return build(problem, target, direction, tile, switches)

    def _launches(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, dlse: bool, deterministic: bool
    ) -> tuple[Work, ...]:
        # The device's name of a kernel has its class in it.
        if direction == "forward":
            return forward_work("ForwardKernel", ADA.instruction)
        adds_dq = bool(tile.get("atomics", 0)) and not deterministic
        return backward_work(
            ("PrepareKernel", "DkdvKernel", "CastKernel" if adds_dq else "DqKernel"),
            (ADA.instruction, ADA.instruction),
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
    ) -> Sequence[Code]:
        if direction == "forward":
            launches: Sequence[Launch] = plan_forward(problem, target, tile, switches)
        else:
            launches = plan_backward(problem, target, tile, switches, dlse, deterministic)
        return [launch.code for launch in launches]

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
        raise Unsupported(f"CuTe DSL compiles for CUDA devices, the tensors are on {device}")
