"""FlashAttention-2 backward in CuTe DSL, on the instructions of Ampere and Ada: `mma.sync`, `ldmatrix`, `cp.async`.

From `do`, `lse` and the inputs, with P recomputed (Dao 2023, algorithm 2):

    S = scale · Q Kᵀ      P = exp(S - lse)      dV = Pᵀ dO      dP = dO Vᵀ
    dS = P ∘ (dP - delta)      dK = scale · dSᵀ Q      dQ = scale · dS K

where `delta = rowsum(dO ∘ O) - dlse`, and A ∘ B is the product element by element. The scale of dK and dQ is applied
once, to their sums. `factor` and `shift` are the forward's: what Q Kᵀ is multiplied by in the exponential, and what is
subtracted there, which is the lse, under EXP2 times log2(e).

The kernels, in the order of their launches:

- prepare_kernel (`backward_prepare.py`): delta, and the lse as it is subtracted;
- dkdv_kernel (`backward_dkdv.py`): a block owns a tile of keys and walks over queries; dk and dv, and where the tile
  says `atomics`, dq too, added up in fp32 in memory: five products a pair of tiles;
- then cast_kernel (`backward_dq.py`) rounds dq; or, without atomics, dq_kernel computes it in a walk over keys: seven
  products, but every gradient is bitwise repeatable. `deterministic` asks for that.

Shapes: do, q, o, dq `(B, Hq, Nq, D)`; k, v, dk, dv `(B, Hkv, Nk, D)`, of any strides that keep rows on 16 bytes; lse,
dlse `(B, Hq, Nq)` in fp32. dk and dv of a head are summed over the group of query heads that share it, in one block and
in order. The rungs are those of the forward.
"""

from __future__ import annotations

import torch

from common import Form, Problem, Switches, Target, Tile
from common.ports import Forms, Run

from .backward_budget import backward_block_d, dq_tile, dq_warps, key_warps
from .backward_dkdv import DkdvKernel
from .backward_dq import CastKernel, DqKernel
from .backward_prepare import PrepareKernel
from .launch import Launch, band, constants, heads_in_l2, padded_len, ready, settle


def plan_backward(
    problem: Problem, target: Target, tile: Tile, switches: Switches, has_dlse: bool, deterministic: bool
) -> tuple[Launch, ...]:
    """The launches of prepare_kernel, dkdv_kernel, and dq_kernel or cast_kernel."""
    add_dq = bool(tile.get("atomics", 0)) and not deterministic
    block_d = backward_block_d(problem)
    heads_q, heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    query_tiles = -(-problem.len_q // tile.block_m)
    numbers = (*band(problem), problem.scale)
    # From Hopper on one instruction adds four neighbours; the Ada path adds one by one everywhere.
    vector = 4 if target.capability >= 90 else 1
    common = {**constants(problem, tile, switches), "BLOCK_D": block_d}
    shape = {name: common[name] for name in ("DTYPE", "HEAD_DIM")}
    fragments = {"DQ_WARPS": dq_warps(problem, tile) or 1, "VECTOR": vector}

    prepare = PrepareKernel(**shape, EXP2=switches.exp2, HAS_DLSE=has_dlse, SUM_D=block_d if add_dq else 0)
    dkdv = DkdvKernel(
        **common,
        GROUPED=problem.group > 1,
        KEY_WARPS=key_warps(tile),
        V_IN_REGISTERS=bool(tile.get("v_in_registers", 0)),
        ADD_DQ=add_dq,
        PARTS=tile.get("parts", 1),
        BLOCKS=tile.get("blocks", 1),
        **fragments,
    )
    launches = (
        Launch(prepare, scalars=(), blocks=padded_len(problem) // prepare.block_m * heads_q),
        Launch(
            dkdv,
            scalars=(heads_in_l2(problem), *numbers),
            blocks=-(-problem.len_k // tile.block_n) * heads_kv,
        ),
    )
    if add_dq:
        cast = CastKernel(**shape, BLOCK_D=block_d, BLOCK_M=tile.block_m, WARPS=tile.warps, **fragments)
        return (*launches, Launch(cast, scalars=(problem.scale,), blocks=query_tiles * heads_q))
    own = dq_tile(problem, tile)
    return (
        *launches,
        Launch(
            DqKernel(**{**constants(problem, own, switches), "BLOCK_D": block_d}),
            scalars=(heads_in_l2(problem) * problem.group, *numbers),
            blocks=-(-problem.len_q // own.block_m) * heads_q,
        ),
    )


def prepare_backward(
    forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches, deterministic: bool
) -> Run:
    """What computes `dq, dk, dv`, laid out as q, k, v are, of do, dlse, q, k, v, o, lse of these forms.

    The last strides are 1; lse and dlse are packed.
    """
    device = forms["q"].device
    launches = plan_backward(problem, target, tile, switches, "dlse" in forms, deterministic)
    prepare, dkdv, finish = ready(launches, device)
    like_dq, like_dk, like_dv = (forms[name].dense for name in "qkv")
    rows = padded_len(problem)
    like_stats = Form.packed((problem.batch, problem.heads_q, 2, rows), torch.float32, device)
    sum_shape = problem.batch, problem.heads_q, rows, backward_block_d(problem)
    like_sum = Form.packed(sum_shape, torch.float32, device)
    add_dq = bool(tile.get("atomics", 0)) and not deterministic

    def backward(
        do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        do, q, k, v = settle(do), settle(q), settle(k), settle(v)
        dq, dk, dv = like_dq.empty(), like_dk.empty(), like_dv.empty()
        stats = like_stats.empty()
        # Without atomics no kernel has code that touches the sums, but the argument is there; so it is with dlse.
        dq_sum = like_sum.empty() if add_dq else stats
        prepare(do, settle(o), lse, lse if dlse is None else dlse, stats, dq_sum)
        dkdv(do, q, k, v, stats, dk, dv, dq_sum)
        if add_dq:
            finish(dq_sum, dq)
        else:
            finish(do, q, k, v, stats, dq)
        return dq, dk, dv

    return backward
