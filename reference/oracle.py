"""Attention in float64: the truth that every port and the naive attention are measured against.

The inputs are upcast as they are, so that what is measured is the error of the computation and not that of the inputs'
rounding. Heads are taken together, or one at a time and in chunks of rows, as a budget of memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from common import Problem

BUDGET_BYTES = 2 << 30
_LIVE = 4  # float64 tensors of the size of a chunk's scores that live at once: p, dp, ds and a temporary


@torch.no_grad()
def oracle_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, *, budget_bytes: int = BUDGET_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """`o (B, Hq, Nq, D)` and `lse (B, Hq, Nq)`, both float64.

    q: `(B, Hq, Nq, D)`; k, v: `(B, Hkv, Nk, D)`; or all `(B, N, D)` for one head, and then the results leave the head
    out too. Any floating dtype, any strides, any device. Mask and scale are the problem's.
    A row that sees no key gives `o = 0` and `lse = -inf`. budget_bytes: bound on the temporaries.
    Raises ValueError when a shape is not the problem's.
    """
    q4, k3, v3 = _by_key_head(problem, q=q), _by_key_head(problem, k=k), _by_key_head(problem, v=v)
    o = torch.zeros(q4.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q4.shape[:-1], -math.inf, dtype=torch.float64, device=q.device)
    for heads, rows, keys in _chunks(problem, budget_bytes):
        p, lse[heads, :, rows] = _softmax(q4, k3, problem, heads, rows, keys)
        o[heads, :, rows] = _per_group(p @ v3[heads, keys].double(), problem)
    return o.reshape(q.shape), lse.reshape(q.shape[:-1])


@torch.no_grad()
def oracle_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    *,
    budget_bytes: int = BUDGET_BYTES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`dq`, `dk`, `dv` in float64, of the shapes of q, k, v, from the gradients `do` of o and `dlse` of lse.

    Analytic, with o and lse recomputed in float64: `dv = pᵀ do`, `ds = p · (do vᵀ - delta)` with
    `delta = rowsum(do · o) - dlse`, `dq = scale · ds k`, `dk = scale · dsᵀ q` (Dao 2023, section 3.1.2, extended by
    dlse). dk and dv of a shared head are the sums over its group. What comes in `do` and `dlse` of a row that sees no
    key, even NaN, changes nothing.
    Raises ValueError when a shape is not the problem's.
    """
    q4, k3, v3 = _by_key_head(problem, q=q), _by_key_head(problem, k=k), _by_key_head(problem, v=v)
    do4 = _by_key_head(problem, do=do)
    dlse3 = None if dlse is None else _by_key_head(problem, dlse=dlse)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q4, k3, v3))
    for heads, rows, keys in _chunks(problem, budget_bytes):
        p, _ = _softmax(q4, k3, problem, heads, rows, keys)  # [heads, group · rows, keys]
        q_rows, do_rows = (x[heads, :, rows].double().flatten(1, 2) for x in (q4, do4))  # [heads, group · rows, D]
        k_keys, v_keys = k3[heads, keys].double(), v3[heads, keys].double()  # [heads, keys, D]
        delta = (do_rows * (p @ v_keys)).sum(-1)  # [heads, group · rows]
        if dlse3 is not None:
            delta -= dlse3[heads, :, rows].double().flatten(1, 2)
        dv[heads, keys] += p.mT @ do_rows
        ds = (do_rows @ v_keys.mT).sub_(delta[..., None]).mul_(p).mul_(problem.scale)
        dk[heads, keys] += ds.mT @ q_rows
        dq[heads, :, rows] = _per_group(ds @ k_keys, problem)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _by_key_head(problem: Problem, **named: torch.Tensor) -> torch.Tensor:
    """A tensor by key heads: `(B · Hkv, Nk, D)`, and `(B · Hkv, group, Nq[, D])` what belongs to the queries."""
    ((name, tensor),) = named.items()
    shape = {"k": problem.kv_shape, "v": problem.kv_shape, "dlse": problem.lse_shape}.get(name, problem.q_shape)
    if tensor.shape != shape and not (shape[1] == 1 and tensor.shape == shape[:1] + shape[2:]):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    heads = problem.batch * problem.heads_kv
    return tensor.reshape(heads, *shape[2:]) if name in "kv" else tensor.reshape(heads, problem.group, *shape[2:])


def _chunks(problem: Problem, budget_bytes: int) -> Iterator[tuple[slice, slice, slice]]:
    """The key heads, query rows and keys to take at once; only rows that see a key, and the keys that they see."""
    len_q, len_k, heads = problem.len_q, problem.len_k, problem.batch * problem.heads_kv
    first, last = problem.mask.query_range(0, len_k, len_q, len_k)
    if first == last:
        return
    row_bytes = problem.group * len_k * 8 * _LIVE
    rows_at_once = min(last - first, max(1, budget_bytes // row_bytes))
    heads_at_once = max(1, budget_bytes // (row_bytes * (last - first)))
    for head in range(0, heads, heads_at_once):
        for row in range(first, last, rows_at_once):
            row_end = min(row + rows_at_once, last)
            keys = problem.mask.key_range(row, row_end, len_q, len_k)
            yield slice(head, min(head + heads_at_once, heads)), slice(row, row_end), slice(*keys)


def _softmax(
    q4: torch.Tensor, k3: torch.Tensor, problem: Problem, heads: slice, rows: slice, keys: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """`p (heads, group · rows, keys)` and `lse (heads, group, rows)` of one chunk, all of whose rows see a key."""
    s = q4[heads, :, rows].double().flatten(1, 2) @ k3[heads, keys].double().mT
    s = _per_group(s.mul_(problem.scale), problem)  # [heads, group, rows, keys]
    if not problem.mask.is_full:
        span = (rows.start, rows.stop, keys.start, keys.stop)
        visible = problem.mask.dense_tile(*span, problem.len_q, problem.len_k, s.device)
        s.masked_fill_(~visible, -math.inf)
    row_max = s.amax(-1, keepdim=True)
    p = s.sub_(row_max).exp_()
    row_sum = p.sum(-1, keepdim=True)
    lse = (row_max + row_sum.log()).squeeze(-1)
    return p.div_(row_sum).flatten(1, 2), lse


def _per_group(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    return x.unflatten(1, (problem.group, -1))
