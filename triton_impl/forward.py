"""FlashAttention-2 forward in Triton.

One program owns BLOCK_M queries of one head, and walks over the keys in tiles of BLOCK_N (Dao 2023, algorithm 1):

    S = scale · Q Kᵀ                          scores, [BLOCK_M, BLOCK_N]
    S = -inf where the mask hides a key       so that its exponential is 0
    row_max', P = max(row_max, S), exp(S - row_max')
    acc     = acc · exp(row_max - row_max') + P V     [BLOCK_M, BLOCK_D]
    row_sum = row_sum · exp(row_max - row_max') + rowsum(P)

and at the end `o = acc / row_sum`, `lse = row_max + log(row_sum)`. The mask enters twice: `tile_range` says which tiles
are visited and which of these are edges, `visible` which pairs of an edge tile count.

`shift` is what is subtracted before the exponential, `factor` what Q Kᵀ is multiplied by before it: `scale`, and under
EXP2 `scale · log2(e)`.

Shapes: q, o `(B, Hq, Nq, D)`; k, v `(B, Hkv, Nk, D)`; lse `(B, Hq, Nq)`, fp32.

The rungs of the ladder, each a compile-time constant: `tiles` is BLOCK_M × BLOCK_N, warps and stages; `skip` bounds
the walk by the mask (SKIP in `tile_range`); `exp2` folds scale·log2(e) into one multiply-add (EXP2); `edges` splits the
walk into an interior without comparisons and its edges (EDGES); `order` is which tile a program takes (ORDER in
`schedule`).

A tile with `lazy_rescale` (LAZY_RESCALE) leaves the maximum of a row where it is until a score has outgrown it by
HEADROOM. The factor of such a row is 1, and a thread whose rows all have it leaves its part of acc alone. `lse` and `o`
are the same; P may be as large as exp(HEADROOM).
"""

import torch
import triton
import triton.language as tl

from common import Form, Problem, Switches, Target, Tile
from common.ports import Forms, Run

from .blocks import dot, hidden_zeros, load_rows, row_offsets, scaled_where, schedule, store_rows, tile_range, visible
from .launch import RUN_TIME, Launch, Layout, constants, heads_in_l2, instruction, strides

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
HEADROOM = tl.constexpr(8.0)  # in the exponent, of whichever base


@triton.jit
def attend(
    acc, row_max, row_sum, q, k_base, v_base, k_n, v_n, k_offsets, v_offsets, begin, end, row_begin, len_k, low, high,
    factor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, EXP2: tl.constexpr,
    LAZY_RESCALE: tl.constexpr, ROW_WARPS: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The walk over the key tiles of `[begin, end)`. MASKED: compare positions; else every pair is visible."""
    for key_begin in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key_begin = tl.multiple_of(key_begin, BLOCK_N)
        k = load_rows(k_base, k_n, key_begin, len_k, k_offsets, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRET)  # [BLOCK_M, BLOCK_N]
        if not EXP2:
            s *= factor
        if MASKED:
            rows = row_begin + tl.arange(0, BLOCK_M)
            keys = key_begin + tl.arange(0, BLOCK_N)
            s = tl.where(visible(rows[:, None], keys[None, :], len_k, low, high, HAS_LOW, HAS_HIGH), s, float("-inf"))

        # Under EXP2 row_max is in the units of exp2, and s waits for its factor (which is > 0, so that the maximum may
        # come first): one multiply-add before each exp2.
        tile_max = tl.max(s, 1)
        tile_max = tile_max * factor if EXP2 else tile_max  # [BLOCK_M]
        if LAZY_RESCALE:
            outgrown = tile_max > row_max + HEADROOM
            new_max = tl.where(outgrown, tile_max, row_max)
        else:
            new_max = tl.maximum(row_max, tile_max)
        # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        if EXP2:
            p = tl.math.exp2(s * factor - shift[:, None])
            rescale = tl.math.exp2(row_max - shift)
        else:
            p = tl.exp(s - shift[:, None])
            rescale = tl.exp(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = scaled_where(outgrown, acc, rescale, ROW_WARPS, INTERPRET) if LAZY_RESCALE else acc * rescale[:, None]
        row_max = new_max

        v = load_rows(v_base, v_n, key_begin, len_k, v_offsets, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        acc = dot(p.to(v.dtype), v, acc, PRECISION, INTERPRET)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=RUN_TIME)
def forward_kernel(
    Q, K, V, OUT, LSE, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads_q, group, heads, section, len_q, len_k, low, high, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, SKIP: tl.constexpr,
    EXP2: tl.constexpr, EDGES: tl.constexpr, ORDER: tl.constexpr, LAZY_RESCALE: tl.constexpr, ROW_WARPS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of queries. Strides count UNIT elements: a product with a constant 8 tells the compiler that rows start
    on 16 bytes, whatever D is. heads: B·Hq; group: Hq/Hkv; low, high: the band of `Mask.band`."""
    # section: so many heads are worked on at a time, those whose keys and values fit in L2 together.
    tile, head = schedule(tl.cdiv(len_q, BLOCK_M), heads, section, HAS_HIGH, ORDER)
    batch = (head // heads_q).to(tl.int64)
    head_q = (head % heads_q).to(tl.int64)
    head_kv = head_q // group
    row_begin = tile * BLOCK_M

    k_base = K + (batch * k_b + head_kv * k_h) * UNIT
    v_base = V + (batch * v_b + head_kv * v_h) * UNIT
    k_offsets = row_offsets(k_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    v_offsets = row_offsets(v_n * UNIT, BLOCK_N, BLOCK_D, WIDE)
    q_offsets = row_offsets(q_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    q_base = Q + (batch * q_b + head_q * q_h) * UNIT
    q = load_rows(q_base, q_n * UNIT, row_begin, len_q, q_offsets, BLOCK_M, BLOCK_D, HEAD_DIM, True)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = hidden_zeros(q)  # [BLOCK_M, BLOCK_D]
    factor = scale * LOG2_E if EXP2 else scale
    begin, full_begin, full_end, end = tile_range(
        row_begin, tl.minimum(row_begin + BLOCK_M, len_q) - 1, len_k, low, high, BLOCK_N, HAS_LOW, HAS_HIGH, SKIP, EDGES
    )
    # Part 0 is the edge before the interior, 1 the interior, 2 the edge after it. Only a lower bound makes an edge at
    # the beginning: without HAS_LOW part 0 would be empty. Without EDGES tile_range gives full_begin = full_end =
    # begin, and part 2 is the whole walk, every tile masked.
    for part in tl.static_range(3):
        if part == 2 or (EDGES and (part == 1 or HAS_LOW)):
            first = begin if part == 0 else full_begin if part == 1 else full_end
            last = full_begin if part == 0 else full_end if part == 1 else end
            if first < last:  # else its pipeline would be filled all the same
                acc, row_max, row_sum = attend(
                    acc, row_max, row_sum, q, k_base, v_base, k_n * UNIT, v_n * UNIT, k_offsets, v_offsets,
                    first, last, row_begin, len_k, low, high, factor, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                    HAS_LOW, HAS_HIGH, part != 1, EXP2, LAZY_RESCALE, ROW_WARPS, PRECISION, INTERPRET,
                )  # fmt: skip

    # A row that saw no key has row_sum = 0 and row_max = -inf: o = 0 and lse = -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    o_base = OUT + (batch * o_b + head_q * o_h) * UNIT
    o_offsets = row_offsets(o_n * UNIT, BLOCK_M, BLOCK_D, WIDE)
    store_rows(o_base, o_n * UNIT, row_begin, len_q, o_offsets, acc / row_sum[:, None], BLOCK_M, BLOCK_D, HEAD_DIM)
    lse = (row_max + tl.math.log2(row_sum)) * LN_2 if EXP2 else row_max + tl.log(row_sum)
    rows = row_begin + tl.arange(0, BLOCK_M)
    tl.store(LSE + head.to(tl.int64) * len_q + rows, lse, mask=rows < len_q)


def plan_forward(
    problem: Problem, target: Target, tile: Tile, switches: Switches, q: Layout, k: Layout, v: Layout, o: Layout
) -> Launch:  # fmt: skip
    """The launch over q, k, v, o and lse, from their layouts; lse is packed."""
    heads = problem.batch * problem.heads_q
    low, high = problem.mask.band(problem.len_q, problem.len_k)
    how, numbers = strides((q, problem.q_shape), (k, problem.kv_shape), (v, problem.kv_shape), (o, problem.q_shape))
    how["LAZY_RESCALE"] = bool(tile.get("lazy_rescale", 0))
    how["ROW_WARPS"] = row_warps(problem, target, tile) if how["LAZY_RESCALE"] else 0
    return Launch(
        forward_kernel,
        grid=triton.cdiv(problem.len_q, tile.block_m) * heads,
        numbers=(
            *numbers, problem.heads_q, problem.group, heads, heads_in_l2(problem) * problem.group,
            problem.len_q, problem.len_k, low or 0, high or 0, problem.scale,
        ),
        constants=constants(forward_kernel, problem, tile, switches, **how),
        tile=tile,
    )  # fmt: skip


def row_warps(problem: Problem, target: Target, tile: Tile) -> int:
    """How many warps the compiler deals the rows of acc out to, 16 at a time; 0 where a thread has whole rows of its
    own, as under tcgen05. A wrong guess is slow."""
    if instruction(problem, target, tile, tile.block_m) == "tcgen05":
        return 0
    return min(tile.warps, tile.block_m // 16)


def prepare_forward(forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches) -> Run:
    """What computes `o`, laid out as q is, and `lse (B, Hq, Nq)` of q, k, v of these forms, whose last stride is 1."""
    device = forms["q"].device
    like_o, like_lse = forms["q"].dense, Form.packed(problem.lse_shape, torch.float32, device)
    layouts = (form.strides for form in (forms["q"], forms["k"], forms["v"], like_o))
    launch = plan_forward(problem, target, tile, switches, *layouts)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = like_o.empty(), like_lse.empty()
        launch.run(target, q, k, v, o, lse)
        return o, lse

    return forward
