"""The tiled PyTorch attention as a port, so that the harness and the tests drive it as they drive a kernel."""

from __future__ import annotations

import torch

from common import Direction, Port, Problem, Switches, Target, Tile

from .tiled import tiled_backward, tiled_forward

# All heads share a loop step, so a step is cheap only when it is large; the smaller ones make more steps to look at.
_TILES = tuple(Tile(m, n, warps=1, stages=1) for m, n in ((128, 128), (64, 64), (64, 128), (128, 64), (32, 32)))


class ReferencePort(Port):
    """FlashAttention-2 in plain PyTorch: fp16, bf16 and fp32, every mask and head_dim, on any device.

    Bitwise repeatable in both directions, whether `deterministic` is asked for or not. It stands for no chip: a target
    changes nothing, every tile fits, and there is nothing to build. `warps` and `stages` of a tile mean nothing here.
    """

    name = "reference"

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        """None: there is no problem it cannot do."""
        return None

    def tiles(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        """The same few tiles for every problem."""
        return list(_TILES)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        target: Target,
        tile: Tile,
        switches: Switches,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(q.device.type, enabled=False):  # the algorithm says itself what is rounded
            return tiled_forward(q, k, v, problem, block_m=tile.block_m, block_n=tile.block_n, switches=switches)

    def _backward(
        self,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        problem: Problem,
        target: Target,
        tile: Tile,
        switches: Switches,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks = {"block_m": tile.block_m, "block_n": tile.block_n}
        with torch.autocast(q.device.type, enabled=False):
            return tiled_backward(do, dlse, q, k, v, o, lse, problem, **blocks, switches=switches)
