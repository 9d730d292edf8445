"""The online softmax of one query row, step by step: what `row_max`, `row_sum` and the rescaling do to real numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common import Problem


@dataclass(frozen=True)
class SoftmaxStep:
    """The state of one row after one key tile.

    key_begin, key_end: the tile. scores `(keys,)`: fp32, scaled, -inf where the key is not visible.
    tile_max: the largest of them. row_max: the largest of all so far. rescale: `exp(old row_max - new row_max)`, what
    the sums so far were multiplied by; 0 at the first key seen. row_sum: `Σ exp(s - row_max)` so far.
    output `(D,)`: `acc / row_sum`, the attention over the keys so far, fp32; 0 while none was seen.
    """

    key_begin: int
    key_end: int
    scores: torch.Tensor
    tile_max: float
    row_max: float
    rescale: float
    row_sum: float
    output: torch.Tensor

    @property
    def lse(self) -> float:
        """The logarithm of the sum of exponentials so far."""
        return self.row_max + math.log(self.row_sum) if self.row_sum > 0 else -math.inf


def trace_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    *,
    row: int,
    batch: int = 0,
    head: int = 0,
    block_n: int = 64,
) -> Iterator[SoftmaxStep]:
    """One step for each key tile that the query `row` of query head `head` visits, in the order of `tiled_forward`.

    q: `(B, Hq, Nq, D)`; k, v: `(B, Hkv, Nk, D)`. Nothing is yielded for a row that sees no key.
    Raises ValueError when batch, head or row is not the problem's. Source: Dao 2023, algorithm 1, lines 8 to 10.
    """
    for name, index, length in (
        ("batch", batch, problem.batch),
        ("head", head, problem.heads_q),
        ("row", row, problem.len_q),
    ):
        if not 0 <= index < length:
            raise ValueError(f"{name} must be from 0 to {length - 1}, got {index}")
    return _steps(q, k, v, problem, row, batch, head, block_n)


def _steps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, row: int, batch: int, head: int, block_n: int
) -> Iterator[SoftmaxStep]:
    query = q[batch, head, row].float()  # [D]
    keys, values = k[batch, head // problem.group].float(), v[batch, head // problem.group].float()  # [Nk, D]
    lengths = (problem.len_q, problem.len_k)
    first, last = problem.mask.key_range(row, row + 1, *lengths)
    row_max, row_sum, acc = -math.inf, 0.0, torch.zeros_like(query)
    for begin in range(first // block_n * block_n, last, block_n):
        end = min(begin + block_n, problem.len_k)
        scores = keys[begin:end] @ query * problem.scale  # [BLOCK_N]
        visible = problem.mask.dense_tile(row, row + 1, begin, end, *lengths, scores.device)[0]
        scores = scores.masked_fill(~visible, -math.inf)
        tile_max = float(scores.max())
        new_max = max(row_max, tile_max)
        rescale = math.exp(row_max - new_max)
        p = torch.exp(scores - new_max)  # [BLOCK_N]
        row_sum = row_sum * rescale + float(p.sum())
        acc = acc * rescale + p @ values[begin:end]  # [D]
        row_max = new_max
        yield SoftmaxStep(begin, end, scores, tile_max, row_max, rescale, row_sum, acc / row_sum)
