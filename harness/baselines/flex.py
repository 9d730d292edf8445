"""PyTorch's FlexAttention, compiled: a Triton kernel that PyTorch generates for the mask."""

from __future__ import annotations

import torch

from common import Problem

from .protocol import HALVES, Attend, Baseline


class Flex(Baseline):
    """Every mask of ours, as a function of the positions; its table of blocks is made before anything is timed."""

    name = "flex"
    title = "FlexAttention"
    dtypes = (*HALVES, torch.float32)

    def __init__(self) -> None:
        self._made: tuple[Problem, torch.device, Attend] | None = None

    def attention(self, problem: Problem, device: torch.device) -> Attend:
        """Compiled for this very problem; kept until the next one."""
        if self._made is None or self._made[:2] != (problem, device):
            self._made = problem, device, _compiled(problem, device)
        return self._made[2]


def _compiled(problem: Problem, device: torch.device) -> Attend:
    # Imported here because it takes seconds, and only who asks for it should wait.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Past a number of shapes a compiled function falls back to being interpreted; fullgraph makes that an error.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    block_mask = None
    if not problem.mask.is_full:
        low, high = problem.mask.band(problem.len_q, problem.len_k)
        low, high = (-problem.len_q if low is None else low), (problem.len_k if high is None else high)

        def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (j >= i + low) & (j <= i + high)

        block_mask = create_block_mask(visible, None, None, problem.len_q, problem.len_k, device=str(device))
    scale, enable_gqa = problem.scale, problem.group > 1
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)
