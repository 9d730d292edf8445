"""FlashAttention-2 backward in Triton.

From `do`, `lse` and the inputs, with P recomputed (Dao 2023, algorithm 2):

    P = exp(S - lse)      dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP - delta)      dK = dSᵀ Q      dQ = dS K

where `delta = rowsum(dO ∘ O) - dlse`, and A ∘ B is the product element by element. The kernels, in the order of their
launches:

- prepare_kernel (here): delta, and the lse as it is subtracted;
- dkdv_kernel (`backward_dkdv.py`): a program owns a tile of keys and walks over queries; dk and dv, and where the tile
  says `atomics`, dq too, added up in fp32 in memory: five products a pair of tiles;
- then cast_kernel (`backward_dq.py`) orders, scales and rounds dq; or, without atomics, dq_kernel computes it in a walk
  over keys: seven products, since S and dP are computed in both, but no program adds to what another one writes, so
  that every gradient is bitwise repeatable. `deterministic` asks for that.

`shift` is what is subtracted before the exponential, here the lse in the units of the exponential; `factor` is what
Q Kᵀ is multiplied by before it.

Shapes: do, q, o, dq `(B, Hq, Nq, D)`; k, v, dk, dv `(B, Hkv, Nk, D)`; lse `(B, Hq, Nq)` in fp32; delta and shift, in
fp32 too, `(B, Hq, rows)`, rows being Nq rounded up to 128: past the end the shift is infinite. dk and dv of a head are
summed over the group of query heads that share it, in one program and in order.
The rungs are those of the forward, and on rung `tiles` the tile's `atomics` comes in as well.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from common import Form, Problem, Switches, Target, Tile
from common.ports import Forms, Run

from .backward_dkdv import dkdv_kernel
from .backward_dq import cast_kernel, dq_kernel
from .blocks import load_rows, padded, row_offsets, schedule
from .budget import dq_tile
from .forward import LOG2_E
from .launch import RUN_TIME, Launch, Layout, block_d, constants, heads_in_l2, instruction, row_tile, strides

ROW_PADDING = 128  # what is stored for each query is padded to a multiple of so many (blocks.padded)


@triton.jit(do_not_specialize=RUN_TIME)
def prepare_kernel(
    DO, OUT, LSE, DLSE, DELTA, SHIFT, DQ_SUM, do_b, do_h, do_n, o_b, o_h, o_n, heads_q, heads, len_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    EXP2: tl.constexpr, HAS_DLSE: tl.constexpr, ADD_DQ: tl.constexpr,
):  # fmt: skip
    """delta, and the lse as the other kernels subtract it; with ADD_DQ also zeros, for dkdv_kernel to add dq to."""
    tiles = padded(len_q) // BLOCK_M
    tile, head = schedule(tiles, heads, 1, False, False)  # rows are read once: any order will do
    batch = (head // heads_q).to(tl.int64)
    head_q = (head % heads_q).to(tl.int64)
    row_begin = tile * BLOCK_M
    o_base = OUT + (batch * o_b + head_q * o_h) * UNIT
    do_base = DO + (batch * do_b + head_q * do_h) * UNIT
    o_offsets = row_offsets(o_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    do_offsets = row_offsets(do_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    o = load_rows(o_base, o_n * UNIT, row_begin, len_q, o_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    do = load_rows(do_base, do_n * UNIT, row_begin, len_q, do_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]

    rows = row_begin + tl.arange(0, BLOCK_M)
    inside = rows < len_q
    row_base = head.to(tl.int64) * len_q
    lse = tl.load(LSE + row_base + rows, mask=inside, other=float("-inf"))
    if HAS_DLSE:
        delta -= tl.load(DLSE + row_base + rows, mask=inside, other=0.0)
    # A row that saw no key, or is past the end: exp(S - inf) makes its P zero, and no gradient flows, whatever dlse is.
    unseen = lse == float("-inf")
    row_base = head.to(tl.int64) * padded(len_q)
    tl.store(DELTA + row_base + rows, tl.where(unseen, 0.0, delta))
    tl.store(SHIFT + row_base + rows, tl.where(unseen, float("inf"), lse * LOG2_E if EXP2 else lse))
    if ADD_DQ:
        sums = DQ_SUM + (row_base + row_begin) * BLOCK_D + tl.arange(0, BLOCK_M * BLOCK_D)
        tl.store(sums, tl.zeros([BLOCK_M * BLOCK_D], tl.float32))


def fragment_order(problem: Problem, target: Target, tile: Tile) -> dict[str, int]:
    """How the threads of dkdv_kernel hold dq as the compiler lays it out, for `to_fragments`. A wrong guess is slow.

    ROW_WARPS: how many warps share its rows. COLUMN_WARPS: how many share its columns, by turns of 8 as on mma.sync;
    GROUPS: in runs, as warpgroups do. VECTOR: how many elements an instruction adds, four on targets that have it.
    """
    width = block_d(problem)
    rows, columns, groups = 1, 1, 1
    if instruction(problem, target, tile, tile.block_m) == "mma.sync":
        while rows * columns < tile.warps:
            if rows < tile.block_m // 16 and tile.block_m // 16 // rows >= width // 8 // columns:
                rows *= 2
            else:
                columns *= 2
    else:
        rows = min(tile.warps, tile.block_m // 16)
        groups = tile.warps // rows
    columns, groups = min(columns, width // 8), min(groups, width // 8)  # more warps than columns hold the same ones
    vector = 4 if target.capability >= 90 else 1
    return {"ROW_WARPS": rows, "COLUMN_WARPS": columns, "GROUPS": groups, "VECTOR": vector}


def plan_backward(
    problem: Problem, target: Target, tile: Tile, switches: Switches, has_dlse: bool, deterministic: bool,
    do: Layout, q: Layout, k: Layout, v: Layout, o: Layout, dq: Layout, dk: Layout, dv: Layout,
) -> tuple[Launch, Launch, Launch]:  # fmt: skip
    """The launches of prepare_kernel, dkdv_kernel, and dq_kernel or cast_kernel, from the tensors' layouts.

    tile: block_m, block_n, warps and stages are dkdv_kernel's; dq_kernel's are the extras `dq_block_m`, `dq_block_n`,
    `dq_warps` and `dq_stages`, by default the same. With the extra `atomics` dkdv_kernel adds up dq, unless the call is
    to be deterministic.
    """
    add_dq = adds_dq(tile, deterministic)
    fragments = fragment_order(problem, target, tile)
    heads = problem.batch * problem.heads_q
    low, high = problem.mask.band(problem.len_q, problem.len_k)
    band = (problem.len_q, problem.len_k, low or 0, high or 0, problem.scale)
    like_q, like_k = problem.q_shape, problem.kv_shape

    rows = row_tile(problem)
    how, numbers = strides((do, like_q), (o, like_q))
    prepare_launch = Launch(
        prepare_kernel,
        grid=padded_len(problem) // rows.block_m * heads,
        numbers=(*numbers, problem.heads_q, heads, problem.len_q),
        constants=constants(prepare_kernel, problem, rows, switches, HAS_DLSE=has_dlse, ADD_DQ=add_dq, **how),
        tile=rows,
    )

    how, numbers = strides(
        (do, like_q), (q, like_q), (k, like_k), (v, like_k), (dk, like_k), (dv, like_k)
    )  # fmt: skip
    dkdv_launch = Launch(
        dkdv_kernel,
        grid=triton.cdiv(problem.len_k, tile.block_n) * problem.batch * problem.heads_kv,
        numbers=(
            *numbers,
            problem.heads_kv,
            problem.group,
            problem.batch * problem.heads_kv,
            heads_in_l2(problem),
            *band,
        ),
        constants=constants(dkdv_kernel, problem, tile, switches, ADD_DQ=add_dq, **fragments, **how),
        tile=replace(tile, extra=()),
    )

    if add_dq:
        how, numbers = strides((dq, like_q))
        cast_launch = Launch(
            cast_kernel,
            grid=triton.cdiv(problem.len_q, tile.block_m) * heads,
            numbers=(*numbers, problem.heads_q, heads, problem.len_q, problem.scale),
            constants=constants(cast_kernel, problem, tile, switches, **fragments, **how),
            tile=replace(tile, extra=()),
        )
        return prepare_launch, dkdv_launch, cast_launch

    own = dq_tile(tile)
    how, numbers = strides((do, like_q), (q, like_q), (k, like_k), (v, like_k), (dq, like_q))
    dq_launch = Launch(
        dq_kernel,
        grid=triton.cdiv(problem.len_q, own.block_m) * heads,
        numbers=(*numbers, problem.heads_q, problem.group, heads, heads_in_l2(problem) * problem.group, *band),
        constants=constants(dq_kernel, problem, own, switches, **how),
        tile=own,
    )
    return prepare_launch, dkdv_launch, dq_launch


def prepare_backward(
    forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches, deterministic: bool
) -> Run:
    """What computes `dq, dk, dv`, laid out as q, k, v are, of do, dlse, q, k, v, o, lse of these forms.

    The last strides are 1; lse and dlse are packed.
    """
    device = forms["q"].device
    grads = like_dq, like_dk, like_dv = tuple(forms[name].dense for name in "qkv")
    layouts = (form.strides for form in (*(forms[name] for name in ("do", "q", "k", "v", "o")), *grads))
    prepare, dkdv, last = plan_backward(problem, target, tile, switches, "dlse" in forms, deterministic, *layouts)
    rows = (problem.batch, problem.heads_q, padded_len(problem))
    like_delta = Form.packed(rows, torch.float32, device)
    like_sum = Form.packed((*rows, block_d(problem)), torch.float32, device)
    add_dq = adds_dq(tile, deterministic)

    def backward(
        do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        dq, dk, dv = like_dq.empty(), like_dk.empty(), like_dv.empty()
        delta, shift = like_delta.empty(), like_delta.empty()
        # Without atomics no kernel has code that touches the sums (ADD_DQ), but the argument is there: any will do.
        dq_sum = like_sum.empty() if add_dq else delta
        # So it is without a dlse (HAS_DLSE).
        prepare.run(target, do, o, lse, lse if dlse is None else dlse, delta, shift, dq_sum)
        dkdv.run(target, do, q, k, v, delta, shift, dk, dv, dq_sum)
        if add_dq:
            last.run(target, dq_sum, dq)
        else:
            last.run(target, do, q, k, v, delta, shift, dq)
        return dq, dk, dv

    return backward


def adds_dq(tile: Tile, deterministic: bool) -> bool:
    """Whether dkdv_kernel adds up dq."""
    return bool(tile.get("atomics", 0)) and not deterministic


def padded_len(problem: Problem) -> int:
    """The rows that shift, delta and the sums of dq have for each head."""
    return -(-problem.len_q // ROW_PADDING) * ROW_PADDING
