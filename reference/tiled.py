"""FlashAttention-2 in plain PyTorch: the algorithm of the kernels, one tile after another.

Read this before any kernel. A kernel differs in three ways only: its tiles live in shared memory and registers, the
outer loop is the grid of thread blocks, and keys past the end of a ragged tile must be masked, where a slice ends by
itself. Everything else is the same, under the same names: `shift` is what is subtracted before the exponential,
`factor` what q kᵀ is multiplied by before it. (A port's backward may take two walks for the one below: see there.)

Forward (Dao 2023, algorithm 1). The scores `s = scale · q kᵀ` of one query tile against one key tile fit on chip; the
whole row does not, and softmax needs the whole row. So each row carries a running maximum `row_max` and a running sum
`row_sum = Σ exp(s - row_max)`, and `acc = Σ exp(s - row_max) v`. When a tile raises the maximum, what was summed under
the old one is multiplied by `exp(old - new)`. At the end `o = acc / row_sum`, and one number a row is kept for the
backward pass: `lse = row_max + log(row_sum)`.

Backward (algorithm 2). The probabilities are not stored but recomputed, `p = exp(s - lse)`. The gradient through
softmax is `ds = p · (dp - delta)` with `dp = do vᵀ` and `delta = rowsum(do · o)`, one number a row, computed first. A
gradient `dlse` of lse adds `p · dlse` to ds, which is to say `delta - dlse` in the place of delta. The outer loop walks
the key tiles, so that dk and dv are summed on chip; dq is summed in memory.

Rounding is that of a kernel too: operands of a product in the input dtype, sums in fp32.

Of the switches, `skip`, `exp2`, `edges` and `order` choose what they choose in a kernel (the head order within `order`
has no meaning where all heads are one batch). `tiles` is the caller's, who gives the tile; `tf32` is ignored, because
`torch.set_float32_matmul_precision` decides that for PyTorch's own products.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from common import Problem, Switches, TileKind, empty, empty_like

LOG2_E = math.log2(math.e)


def tiled_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    *,
    block_m: int = 64,
    block_n: int = 64,
    switches: Switches | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`o (B, Hq, Nq, D)` in the input dtype and `lse (B, Hq, Nq)` in fp32, the natural logarithm.

    q: `(B, Hq, Nq, D)`; k, v: `(B, Hkv, Nk, D)`; any strides. No tensor is larger than these or than one tile of all
    heads, `B · Hq · block_m · block_n`. A row that sees no key gives `o = 0` and `lse = -inf`.
    Source: Dao 2023, "FlashAttention-2", algorithm 1.
    """
    switches = switches or Switches()
    exp, per_nat = _exponential(switches)
    factor = problem.scale * per_nat
    o = empty_like(q)
    lse = empty(q.shape[:-1], dtype=torch.float32, device=q.device)

    for rows in _query_tiles(problem, block_m, switches):
        q_tile = q[:, :, rows]  # [B, Hq, BLOCK_M, D]
        row_max = torch.full(q_tile.shape[:-1], -math.inf, dtype=torch.float32, device=q.device)  # [B, Hq, BLOCK_M]
        row_sum = torch.zeros_like(row_max)  # [B, Hq, BLOCK_M]
        acc = torch.zeros(q_tile.shape, dtype=torch.float32, device=q.device)  # [B, Hq, BLOCK_M, D]

        for keys in _key_tiles(problem, rows, block_n, switches):
            k_tile, v_tile = (_for_query_heads(x[:, :, keys], problem) for x in (k, v))  # [B, Hq, BLOCK_N, D]
            s = _dot(q_tile, k_tile.mT) * factor  # [B, Hq, BLOCK_M, BLOCK_N]
            s = _masked(s, problem, rows, keys, switches)

            new_max = torch.maximum(row_max, s.amax(dim=-1))  # [B, Hq, BLOCK_M]
            # -inf - -inf is NaN: a row that has seen no key yet subtracts 0, and its exponentials stay 0.
            shift = torch.where(new_max == -math.inf, 0.0, new_max)
            p = exp(s - shift[..., None])  # [B, Hq, BLOCK_M, BLOCK_N]
            rescale = exp(row_max - shift)  # [B, Hq, BLOCK_M]; 0 at the first tile, 1 where the maximum stays

            row_sum = row_sum * rescale + p.sum(dim=-1)
            acc = acc * rescale[..., None] + _dot(p.to(q.dtype), v_tile)
            row_max = new_max

        # The division waits until here: one a row instead of one a score (Dao 2023, section 3.1).
        o[:, :, rows] = (acc / torch.where(row_sum == 0, 1.0, row_sum)[..., None]).to(q.dtype)
        lse[:, :, rows] = row_max / per_nat + torch.log(row_sum)
    return o, lse


def tiled_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    *,
    block_m: int = 64,
    block_n: int = 64,
    switches: Switches | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`dq`, `dk`, `dv`, of the shapes and dtype of q, k, v.

    do, o: `(B, Hq, Nq, D)`; lse: fp32 `(B, Hq, Nq)`, as `tiled_forward` returned it; dlse: its gradient, fp32 of that
    shape, or None for zero. dk and dv of a shared head are the sums over its group of query heads.
    Source: Dao 2023, "FlashAttention-2", algorithm 2, with `delta = rowsum(do * o) - dlse`.
    """
    switches = switches or Switches()
    exp, per_nat = _exponential(switches)
    factor = problem.scale * per_nat
    dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # [B, Hq, Nq, D]: every key tile adds to it
    dq, dk, dv = (empty_like(x) for x in (q, k, v))

    unseen = lse == -math.inf  # [B, Hq, Nq]: rows that see no key
    if unseen.any():  # their p is 0, but what a caller put there may be NaN, and 0 · NaN is NaN
        q, do = (x.masked_fill(unseen[..., None], 0) for x in (q, do))
    delta = (do.float() * o.float()).sum(dim=-1)  # [B, Hq, Nq]
    if dlse is not None:
        delta = torch.where(unseen, 0.0, delta - dlse)
    shift = torch.where(unseen, 0.0, lse * per_nat)  # as in the forward pass: -inf - -inf is NaN

    for keys in _all_tiles(problem.len_k, block_n):
        k_tile, v_tile = (_for_query_heads(x[:, :, keys], problem) for x in (k, v))  # [B, Hq, BLOCK_N, D]
        dk_acc = torch.zeros(k_tile.shape, dtype=torch.float32, device=q.device)  # [B, Hq, BLOCK_N, D]
        dv_acc = torch.zeros(k_tile.shape, dtype=torch.float32, device=q.device)  # [B, Hq, BLOCK_N, D]

        for rows in _query_tiles_that_see(problem, keys, block_m, switches):
            q_tile, do_tile = q[:, :, rows], do[:, :, rows]  # [B, Hq, BLOCK_M, D]
            s = _dot(q_tile, k_tile.mT) * factor  # [B, Hq, BLOCK_M, BLOCK_N]
            s = _masked(s, problem, rows, keys, switches)
            p = exp(s - shift[:, :, rows, None])  # [B, Hq, BLOCK_M, BLOCK_N]

            dv_acc += _dot(p.to(q.dtype).mT, do_tile)
            dp = _dot(do_tile, v_tile.mT)  # [B, Hq, BLOCK_M, BLOCK_N]
            ds = (p * (dp - delta[:, :, rows, None])).to(q.dtype)  # [B, Hq, BLOCK_M, BLOCK_N]
            dk_acc += _dot(ds.mT, q_tile)
            dq_sum[:, :, rows] += _dot(ds, k_tile)

        # s = scale · q kᵀ passes its factor on to dq and dk: once a tile, not once a score.
        dk[:, :, keys] = _sum_over_group(dk_acc * problem.scale, problem).to(q.dtype)
        dv[:, :, keys] = _sum_over_group(dv_acc, problem).to(q.dtype)
    return dq.copy_(dq_sum * problem.scale), dk, dv


def _exponential(switches: Switches) -> tuple[Callable[[torch.Tensor], torch.Tensor], float]:
    """The exponential, and how much its argument grows a nat: exp(x) = exp2(x · log2(e)).

    The hardware has exp2 only; `exp(x)` costs a multiplication more for every score.
    """
    return (torch.exp2, LOG2_E) if switches.exp2 else (torch.exp, 1.0)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product as a tensor core computes it: operands in the input dtype, their products and sums in fp32."""
    return a.float() @ b.float()


def _for_query_heads(kv: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Query head h reads key head h // group."""
    return kv.repeat_interleave(problem.group, dim=1) if problem.group > 1 else kv


def _sum_over_group(grad: torch.Tensor, problem: Problem) -> torch.Tensor:
    return grad.unflatten(1, (problem.heads_kv, problem.group)).sum(dim=2) if problem.group > 1 else grad


def _masked(s: torch.Tensor, problem: Problem, rows: slice, keys: slice, switches: Switches) -> torch.Tensor:
    """Scores of keys that are not visible become -inf, so that their exponentials are 0."""
    mask, span = problem.mask, (rows.start, rows.stop, keys.start, keys.stop, problem.len_q, problem.len_k)
    if switches.edges and mask.tile_kind(*span) is TileKind.FULL:
        return s
    return s.masked_fill(~mask.dense_tile(*span, s.device), -math.inf)


def _all_tiles(length: int, block: int) -> list[slice]:
    return [slice(begin, min(begin + block, length)) for begin in range(0, length, block)]


def _query_tiles(problem: Problem, block_m: int, switches: Switches) -> list[slice]:
    """All query tiles; with `order`, those that see the most keys first, so that no thread block is late."""
    tiles = _all_tiles(problem.len_q, block_m)
    if switches.order:
        tiles.sort(key=lambda rows: -_length(problem.mask.key_range(*_ends(rows), problem.len_q, problem.len_k)))
    return tiles


def _key_tiles(problem: Problem, rows: slice, block_n: int, switches: Switches) -> list[slice]:
    """The key tiles a query tile visits: with `skip`, only those in which some row sees some key."""
    visible = (0, problem.len_k)
    if switches.skip:
        visible = problem.mask.key_range(*_ends(rows), problem.len_q, problem.len_k)
    return _tiles_of(visible, problem.len_k, block_n)


def _query_tiles_that_see(problem: Problem, keys: slice, block_m: int, switches: Switches) -> list[slice]:
    """The query tiles a key tile visits: with `skip`, only those in which some row sees some key."""
    visible = (0, problem.len_q)
    if switches.skip:
        visible = problem.mask.query_range(*_ends(keys), problem.len_q, problem.len_k)
    return _tiles_of(visible, problem.len_q, block_m)


def _tiles_of(visible: tuple[int, int], length: int, block: int) -> list[slice]:
    """The tiles that the range `[begin, end)` touches, each whole, so that tiles keep their places."""
    begin, end = visible
    return [tile for tile in _all_tiles(length, block) if tile.start < end and tile.stop > begin]


def _ends(tile: slice) -> tuple[int, int]:
    return tile.start, tile.stop


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
