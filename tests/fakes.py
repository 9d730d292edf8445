"""A small attention with planted faults: what the harness has to see."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from common import Direction, Mask, Port, Problem, Switches, Target, Tile, empty, empty_like

BLOCK = 32

# The faults that attention kernels have in practice; each is visible in the quick suite.
KERNEL_FAULTS = (
    "no rescale of the accumulator",
    "mask off by one",
    "wrong corner",
    "wrong log base of lse",
    "scale applied twice",
    "tail keys unmasked",
    "delta without dlse",
    "a GQA head not summed",
    "one output tile unwritten",
    "dq not zeroed first",
)


class FakePort(Port):
    """FlashAttention-2 over key tiles in fp32, with one fault, or none.

    after: what happens to the outputs before they are returned, `(name of the direction, outputs, inputs) -> outputs`.
    """

    name = "fake"

    def __init__(self, fault: str = "", after: Callable | None = None) -> None:
        self.fault, self.after = fault, after

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        return "no windows today" if self.fault == "unsupported" else None

    def tiles(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        return [Tile(BLOCK, BLOCK)]

    def _scores(self, q: torch.Tensor, k: torch.Tensor, problem: Problem, begin: int, end: int) -> torch.Tensor:
        """`(B, Hq, Nq, keys)`, in which -inf is masked."""
        k = k[:, :, begin:end].float().repeat_interleave(problem.group, 1)
        s = q.float() @ k.mT * problem.scale
        if self.fault == "scale applied twice":
            s = s * problem.scale
        if self.fault == "tail keys unmasked" and end == problem.len_k and end % BLOCK:
            s = torch.nn.functional.pad(s, (0, BLOCK - end % BLOCK))  # keys past the end score 0
        mask = problem.mask
        if self.fault == "mask off by one" and mask.right is not None:
            mask = Mask(mask.left, mask.right + 1, mask.corner)
        if self.fault == "wrong corner":
            other = "top_left" if mask.corner == "bottom_right" else "bottom_right"
            mask = Mask(mask.left, mask.right, other)
        visible = mask.dense(problem.len_q, problem.len_k)[:, begin:end]
        if s.shape[-1] != end - begin:
            visible = torch.nn.functional.pad(visible, (0, s.shape[-1] - (end - begin)), value=True)
        return s.masked_fill(~visible, -math.inf)

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
        row_max = torch.full(problem.lse_shape, -math.inf)
        row_sum = torch.zeros(problem.lse_shape)
        acc = torch.zeros(problem.q_shape)
        for begin in range(0, problem.len_k, BLOCK):
            end = min(begin + BLOCK, problem.len_k)
            s = self._scores(q, k, problem, begin, end)
            new_max = torch.maximum(row_max, s.amax(-1))
            shift = new_max.nan_to_num(neginf=0.0)
            p = torch.exp(s - shift[..., None])
            rescale = torch.exp(row_max - shift)
            row_sum = row_sum * rescale + p.sum(-1)
            if self.fault != "no rescale of the accumulator":
                acc = acc * rescale[..., None]
            acc += p[..., : end - begin] @ v[:, :, begin:end].float().repeat_interleave(problem.group, 1)
            row_max = new_max
        seen = row_sum > 0
        o, lse = empty_like(q), empty(problem.lse_shape, dtype=torch.float32, device=q.device)
        values = torch.where(seen[..., None], acc / row_sum.clamp(min=1e-30)[..., None], 0.0)
        rows = slice(0, -1) if self.fault == "one output tile unwritten" and problem.len_q > BLOCK else slice(None)
        o[:, :, rows] = values[:, :, rows].to(o.dtype)
        lse.copy_(torch.where(seen, row_max + row_sum.log(), -math.inf))
        if self.fault == "wrong log base of lse":
            lse.div_(math.log(2))
        return self.after("forward", (o, lse), (q, k, v)) if self.after else (o, lse)

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
        delta = (do.float() * o.float()).sum(-1)
        if dlse is not None and self.fault != "delta without dlse":
            delta = delta - dlse
        dq_sum = empty(problem.q_shape, dtype=torch.float32, device=q.device)
        if self.fault != "dq not zeroed first":
            dq_sum.zero_()
        dk, dv = empty_like(k), empty_like(v)
        shift = lse.masked_fill(lse == -math.inf, 0.0)[..., None]
        for begin in range(0, problem.len_k, BLOCK):
            end = min(begin + BLOCK, problem.len_k)
            p = torch.exp(self._scores(q, k, problem, begin, end) - shift)[..., : end - begin]
            keys, values = (x[:, :, begin:end].float().repeat_interleave(problem.group, 1) for x in (k, v))
            ds = p * (do.float() @ values.mT - delta[..., None]) * problem.scale
            dq_sum += ds @ keys
            for x, grad in ((dk, ds.mT @ q.float()), (dv, p.mT @ do.float())):
                by_group = grad.unflatten(1, (problem.heads_kv, problem.group))
                if self.fault == "a GQA head not summed":
                    by_group = by_group[:, :, : max(1, problem.group - 1)]
                x[:, :, begin:end] = by_group.sum(2).to(x.dtype)
        grads = (empty_like(q).copy_(dq_sum), dk, dv)
        return self.after("backward", grads, (q, k, v)) if self.after else grads
