"""The attention a user writes first: the whole matrix of scores, its softmax, and a product, in the input's own dtype.

It is the yardstick of the checks (a kernel may err at most twice as much) and the contestant whose memory grows with
the square of the length.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from common import Problem


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    """`o` alone, as `naive_forward` computes it: no more memory than the plain attention needs."""
    q, k, v, unseen = _operands(q, k, v, problem)
    return _output(_scores(q, k, problem, unseen), v, problem, unseen)


def naive_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor]:
    """`o (B, Hq, Nq, D)` in the input dtype and `lse (B, Hq, Nq)` in fp32; differentiable by autograd.

    q: `(B, Hq, Nq, D)`; k, v: `(B, Hkv, Nk, D)`; or all `(B, N, D)` for one head. Scores and probabilities are rounded
    to the input dtype, as plain PyTorch does; lse is the logsumexp, in fp32, of these scores.
    A row that sees no key gives `o = 0`, `lse = -inf` and gradients of 0.
    """
    q, k, v, unseen = _operands(q, k, v, problem)
    s = _scores(q, k, problem, unseen)
    lse = F.pad(torch.logsumexp(s.float(), dim=-1), unseen, value=-math.inf)
    return _output(s, v, problem, unseen), lse


def naive_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`dq`, `dk`, `dv` in the input dtype: what autograd makes of `naive_forward`."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        if dlse is None:
            dq, dk, dv = torch.autograd.grad(naive_attention(q, k, v, problem), (q, k, v), do)
        else:
            dq, dk, dv = torch.autograd.grad(naive_forward(q, k, v, problem), (q, k, v), (do, dlse))
    return dq, dk, dv


Unseen = tuple[int, int]  # how many rows, first and last, see no key


def _operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Unseen]:
    """q without the rows that see no key, and k, v with one head for each of q's.

    The rows that see a key are one range, because the mask is a band; softmax would make NaN of the others.
    """
    begin, end = problem.mask.query_range(0, problem.len_k, problem.len_q, problem.len_k)
    if problem.group > 1:
        k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    return q[..., begin:end, :], k, v, (begin, problem.len_q - end)


def _scores(q: torch.Tensor, k: torch.Tensor, problem: Problem, unseen: Unseen) -> torch.Tensor:
    s = (q @ k.mT) * problem.scale  # [B, H, Nq, Nk]
    if problem.mask.is_full:
        return s
    rows = (unseen[0], unseen[0] + q.shape[-2])
    visible = problem.mask.dense_tile(*rows, 0, problem.len_k, problem.len_q, problem.len_k, q.device)
    return s.masked_fill(~visible, -math.inf)


def _output(s: torch.Tensor, v: torch.Tensor, problem: Problem, unseen: Unseen) -> torch.Tensor:
    return F.pad(torch.softmax(s, dim=-1) @ v, (0, 0, *unseen))
