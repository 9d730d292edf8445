"""The Triton port: what it supports, which tiles it takes, and its three entry points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from common import Build, Direction, Grid, Port, Problem, Switches, Target, Tile, Unsupported, Work
from common.budget import check_budget
from common.ports import Forms, Run, dtype_reason
from common.work import backward_work, forward_work

from . import budget
from .ahead import Code
from .backward import ROW_PADDING, adds_dq, prepare_backward
from .build import build, plan
from .forward import prepare_forward
from .launch import INTERPRET, TENSOR_MEMORY, block_d, instruction, interpreter_fault

# What a tile may have besides its own: of the forward, whether acc is rescaled only where it must be; of the backward,
# whether dkdv_kernel adds up dq by atomics, and the tile of dq_kernel, which runs when it does not.
EXTRAS = frozenset({"atomics", "dq_block_m", "dq_block_n", "dq_stages", "dq_warps", "lazy_rescale"})


class TritonPort(Port):
    """FlashAttention-2 in Triton: fp16, bf16 and fp32, every target; on a CPU in Triton's interpreter."""

    name: ClassVar[str] = "triton"
    tile_table: ClassVar[Path | None] = Path(__file__).with_name("tiles.yaml")

    def __init__(self) -> None:
        self._fault = interpreter_fault() if INTERPRET else None

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        if self._fault is not None:
            return self._fault
        return dtype_reason(self.name, problem, (torch.float16, torch.bfloat16, torch.float32))

    def tiles(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        swept = self.swept(problem, target, direction)
        return self.fitting([*swept, *_candidates(problem, target, direction)], problem, target, direction)

    def grids(self, problem: Problem, target: Target, direction: Direction) -> list[Grid]:
        wide = problem.dtype.itemsize == 4
        side, warps = (16, 32, 64) if wide else (32, 64, 128), (4,) if wide else (4, 8)
        stages = (1, 2) if wide else (1, 2, 3)
        if direction == "forward":
            values = {"block_m": side[1:], "block_n": side, "warps": warps, "stages": (*stages, max(stages) + 1)}
            if not wide:
                values["lazy_rescale"] = (0, 1)
            return [Grid("forward_kernel", values)]
        own = {"block_m": side} if wide else {"block_m": (16, *side), "atomics": (0, 1)}
        dkdv = {**own, "block_n": side, "warps": warps, "stages": stages}
        dq = {"dq_block_m": side[1:], "dq_block_n": side, "dq_warps": warps, "dq_stages": (*stages, max(stages) + 1)}
        return [Grid("dkdv_kernel", dkdv), Grid("dq_kernel", dq, without=("atomics",))]

    def check_tile(self, problem: Problem, target: Target, direction: Direction, tile: Tile) -> None:
        unknown = sorted({name for name, _ in tile.extra} - EXTRAS)
        if unknown:
            raise Unsupported(f"Triton's tiles have no {', '.join(unknown)} (but {', '.join(sorted(EXTRAS))})")
        sides = [tile.block_m, tile.block_n]
        if direction == "backward":
            dq = budget.dq_tile(tile)
            sides += [dq.block_m, dq.block_n]
        for side in sides:
            if side < 16 or side & (side - 1):
                raise Unsupported(f"Triton's tiles have sides that are powers of two of at least 16, got tile {tile}")
        for warps in (tile.warps, tile.get("dq_warps", tile.warps)):
            if warps & (warps - 1) or warps > 32:
                raise Unsupported(f"Triton's blocks have a power of two of warps, at most 32, got tile {tile}")
        if tile.get("lazy_rescale", 0) and problem.dtype.itemsize == 4:
            raise Unsupported(f"lazy_rescale is for products on the tensor cores, not in fp32, got tile {tile}")
        check_budget(budget.shared_memory(problem, target, direction, tile), problem, target, tile)
        if direction == "backward":
            _check_backward(problem, target, tile)

    def _build(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches
    ) -> list[Build]:
        return build(problem, target, direction, tile, switches)

    def _launches(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, dlse: bool, deterministic: bool
    ) -> tuple[Work, ...]:
        if direction == "forward":
            return forward_work("forward_kernel", instruction(problem, target, tile, tile.block_m))
        dq, add_dq = budget.dq_tile(tile), adds_dq(tile, deterministic)
        return backward_work(
            ("prepare_kernel", "dkdv_kernel", "cast_kernel" if add_dq else "dq_kernel"),
            (instruction(problem, target, tile, tile.block_n), instruction(problem, target, dq, dq.block_m)),
            adds_dq=add_dq,
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
        if INTERPRET:
            return ()
        launches = plan(problem, target, direction, tile, switches, dlse, deterministic)
        return [Code.of(launch, dtypes, target) for launch, dtypes in launches]

    def _prepare_forward(self, forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches) -> Run:
        _check_device(forms["q"].device)
        return prepare_forward(forms, problem, target, tile, switches)

    def _prepare_backward(
        self, forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches, deterministic: bool
    ) -> Run:
        _check_device(forms["q"].device)
        return prepare_backward(forms, problem, target, tile, switches, deterministic)


def _check_device(device: torch.device) -> None:
    if INTERPRET and device.type != "cpu":
        raise Unsupported(f"this process runs Triton's interpreter (TRITON_INTERPRET=1), the tensors are on {device}")
    if not INTERPRET and device.type != "cuda":
        raise Unsupported(
            f"Triton compiles for CUDA devices, the tensors are on {device}; "
            "set TRITON_INTERPRET=1 before Python starts to run the kernels in its interpreter"
        )


def _check_backward(problem: Problem, target: Target, tile: Tile) -> None:
    if max(tile.block_m, budget.dq_tile(tile).block_m) > ROW_PADDING:
        raise Unsupported(f"backward tiles have at most {ROW_PADDING} rows of queries, got tile {tile}")
    scores, dq = (instruction(problem, target, tile, rows) for rows in (tile.block_n, tile.block_m))
    if tile.get("atomics", 0) and scores != dq:
        raise Unsupported(
            f"with atomics dq must be computed on {scores} as the scores are, not on {dq}, got tile {tile}"
        )
    width = block_d(problem)
    columns = 2 * width + tile.block_m
    if scores == "tcgen05" and columns > TENSOR_MEMORY:
        raise Unsupported(
            f"dkdv_kernel: tile {tile}, D={problem.head_dim} needs dk {width} + dv {width} + scores {tile.block_m} = "
            f"{columns} columns of tensor memory; {target.sm} has {TENSOR_MEMORY}"
        )


def _candidates(problem: Problem, target: Target, direction: Direction) -> list[Tile]:
    """Tiles to try where none was swept: the largest that registers hold first, down to what fits anywhere."""
    if problem.dtype.itemsize == 4:
        shapes = [(32, 32, 4), (16, 16, 4)] if problem.head_dim <= 64 else [(16, 16, 4)]
    elif direction == "forward":
        shapes = [(128, 64, 4)] if problem.head_dim <= 64 else [(128, 32, 4 if problem.head_dim <= 128 else 8)]
        shapes += [(64, 32, 4), (32, 32, 4), (16, 16, 1)]
    else:
        shapes = [(32, 128, 4)] if problem.head_dim <= 64 else [(64, 64, 4 if problem.head_dim <= 128 else 8)]
        shapes += [(32, 64, 4), (32, 32, 4), (16, 16, 1)]
    return [Tile(m, n, warps, stages) for m, n, warps in shapes for stages in (2, 1)]
