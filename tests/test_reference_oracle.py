"""The float64 oracle and the naive attention, against a plain attention whose mask is a double loop."""

from __future__ import annotations

import math

import pytest
import torch

from common import DTYPE_NAMES, Mask, Problem
from harness.checks import max_error
from reference import naive_attention, naive_backward, naive_forward, oracle_backward, oracle_forward

from .cases import Case, Inputs, load_cases

MASKS = (
    Mask(),
    Mask.causal(),
    Mask.causal("top_left"),
    Mask(left=2, right=1),
    Mask(left=3),
    Mask(right=2, corner="top_left"),
)
# batch, query heads, key heads, queries, keys
SHAPES = ((2, 4, 2, 7, 7), (1, 3, 1, 5, 9), (2, 2, 2, 9, 5), (1, 1, 1, 1, 1), (1, 2, 1, 6, 1))


def case_of(shape: tuple[int, ...], mask: Mask, dtype: torch.dtype = torch.float32, head_dim: int = 16) -> Case:
    batch, heads_q, heads_kv, len_q, len_k = shape
    return Case(f"{shape}", "", (batch, heads_q, len_q, head_dim), (batch, heads_kv, len_k, head_dim), dtype, mask)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows one by one, each over the keys it sees; rows that see none are 0 and -inf by definition."""
    offset = problem.len_k - problem.len_q if problem.mask.corner == "bottom_right" else 0
    left, right = (math.inf if side is None else side for side in (problem.mask.left, problem.mask.right))
    o, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    for head in range(problem.heads_q):
        key_head = head // problem.group
        for i in range(problem.len_q):
            seen = [j for j in range(problem.len_k) if i + offset - left <= j <= i + offset + right]
            if seen:
                s = torch.einsum("bd,bkd->bk", q[:, head, i], k[:, key_head, seen]) * problem.scale
                o[:, head, i] = torch.einsum("bk,bkd->bd", torch.softmax(s, -1), v[:, key_head, seen])
                lse[:, head, i] = torch.logsumexp(s, -1)
    return o, lse


def plain_gradients(inputs: Inputs, problem: Problem, dlse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o, lse = plain_attention(q, k, v, problem)
    loss = (o * inputs.do.double()).sum() + 0.0 * (q.sum() + k.sum() + v.sum())
    if dlse is not None:
        seen = lse.isfinite()
        loss = loss + (lse[seen] * dlse.double()[seen]).sum()
    return torch.autograd.grad(loss, (q, k, v))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_oracle_is_the_plain_attention_and_its_autograd(shape: tuple[int, ...], mask: Mask) -> None:
    case = case_of(shape, mask)
    inputs, problem = case.inputs(), case.problem
    o, lse = oracle_forward(inputs.q, inputs.k, inputs.v, problem)
    o_plain, lse_plain = plain_attention(inputs.q.double(), inputs.k.double(), inputs.v.double(), problem)
    assert o.dtype == lse.dtype == torch.float64
    assert max_error(o, o_plain) < 1e-13
    assert max_error(lse, lse_plain) < 1e-13
    for dlse in (None, inputs.dlse):
        grads = oracle_backward(inputs.do, dlse, inputs.q, inputs.k, inputs.v, problem)
        for grad, plain in zip(grads, plain_gradients(inputs, problem, dlse), strict=True):
            assert max_error(grad, plain) < 1e-12


def test_oracle_passes_gradcheck_with_a_loss_on_lse() -> None:
    problem = Problem(1, 2, 1, 3, 4, 16, torch.float32, Mask(left=1, right=1))

    class Oracle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(q, k, v)
            return oracle_forward(q, k, v, problem)

        @staticmethod
        def backward(ctx, do, dlse):  # type: ignore[no-untyped-def]
            return oracle_backward(do, dlse, *ctx.saved_tensors, problem)

    generator = torch.Generator().manual_seed(0)
    shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape)
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)
    assert torch.autograd.gradcheck(Oracle.apply, (q, k, v))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("budget", [1, 3000, 20_000])
def test_oracle_in_chunks_is_the_oracle_at_once(mask: Mask, budget: int) -> None:
    case = case_of((2, 4, 2, 13, 11), mask)
    i, problem = case.inputs(), case.problem
    at_once = (*oracle_forward(i.q, i.k, i.v, problem), *oracle_backward(i.do, i.dlse, i.q, i.k, i.v, problem))
    small = {"budget_bytes": budget}
    chunked = (
        *oracle_forward(i.q, i.k, i.v, problem, **small),
        *oracle_backward(i.do, i.dlse, i.q, i.k, i.v, problem, **small),
    )
    for x, y in zip(chunked, at_once, strict=True):
        assert max_error(x, y) < 1e-13


def test_oracle_takes_the_inputs_as_they_were_rounded() -> None:
    case = case_of((1, 2, 1, 5, 6), Mask.causal(), torch.bfloat16)
    i, problem = case.inputs(), case.problem
    o, _ = oracle_forward(i.q, i.k, i.v, problem)
    assert torch.equal(o, oracle_forward(i.q.double(), i.k.double(), i.v.double(), problem)[0])


def test_oracle_of_one_head_leaves_the_head_out() -> None:
    case = case_of((2, 1, 1, 5, 6), Mask.causal())
    i, problem = case.inputs(), case.problem
    flat = Inputs(*(x.squeeze(1) for x in (i.q, i.k, i.v, i.do, i.dlse)))
    four = (*oracle_forward(i.q, i.k, i.v, problem), *oracle_backward(i.do, i.dlse, i.q, i.k, i.v, problem))
    three = (
        *oracle_forward(flat.q, flat.k, flat.v, problem),
        *oracle_backward(flat.do, flat.dlse, flat.q, flat.k, flat.v, problem),
    )
    for x, y in zip(three, four, strict=True):
        assert torch.equal(x, y.squeeze(1))


def test_what_comes_into_a_row_that_sees_no_key_changes_nothing() -> None:
    case = case_of((1, 2, 1, 9, 5), Mask.causal())  # the first four rows see no key
    i, problem = case.inputs(), case.problem
    expected = oracle_backward(i.do, i.dlse, i.q, i.k, i.v, problem)
    i.do[:, :, :4], i.dlse[:, :, :4] = math.nan, math.inf
    for x, y in zip(oracle_backward(i.do, i.dlse, i.q, i.k, i.v, problem), expected, strict=True):
        assert torch.equal(x, y)
    o, lse = oracle_forward(i.q, i.k, i.v, problem)
    assert not o[:, :, :4].any()
    assert (lse[:, :, :4] == -math.inf).all()
    assert lse[:, :, 4:].isfinite().all()
    assert not expected[0][:, :, :4].any()


def test_the_two_corners_differ() -> None:
    corners = load_cases(only=["corner-2x5"], dtypes=(torch.float32,))
    inputs = corners[0].inputs()
    bottom, top = (oracle_forward(inputs.q, inputs.k, inputs.v, case.problem)[0] for case in corners)
    assert max_error(bottom, top) > 0.1


@pytest.mark.parametrize("case", load_cases(only=["constant-rows"]), ids=str)
def test_constant_scores_give_the_mean_of_the_visible_values(case: Case) -> None:
    i = case.inputs()
    o, lse = oracle_forward(i.q, i.k, i.v, case.problem)
    visible = case.mask.dense(case.problem.len_q, case.problem.len_k).double()
    count = visible.sum(-1)
    assert max_error(o, visible @ i.v.double() / count[:, None]) < 1e-13
    assert max_error(lse, count.log().expand(lse.shape)) < 1e-13


@pytest.mark.parametrize("name", ["q", "k", "v", "do", "dlse"])
def test_oracle_names_the_tensor_whose_shape_is_not_the_problems(name: str) -> None:
    case = case_of((1, 2, 1, 5, 6), Mask())
    tensors = {n: getattr(case.inputs(), n) for n in ("do", "dlse", "q", "k", "v")}
    tensors[name] = tensors[name][..., :-1]
    with pytest.raises(ValueError, match=f"^{name} must have shape"):
        oracle_backward(**tensors, problem=case.problem)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_naive_is_the_oracle_within_its_dtype(shape: tuple[int, ...], mask: Mask, dtype: torch.dtype) -> None:
    case = case_of(shape, mask, dtype)
    i, problem = case.inputs(), case.problem
    o, lse = naive_forward(i.q, i.k, i.v, problem)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(o, naive_attention(i.q, i.k, i.v, problem))
    tolerance = 16 * torch.finfo(dtype).eps
    for x, truth in zip((o, lse), oracle_forward(i.q, i.k, i.v, problem), strict=True):
        assert max_error(x, truth) < tolerance
    for dlse in (None, i.dlse):
        grads = naive_backward(i.do, dlse, i.q, i.k, i.v, problem)
        truths = oracle_backward(i.do, dlse, i.q, i.k, i.v, problem)
        for grad, truth in zip(grads, truths, strict=True):
            assert grad.dtype == dtype
            assert max_error(grad, truth) < tolerance * 4


@pytest.mark.parametrize("case", load_cases(only=["empty-queries", "empty-keys", "empty-batch"]), ids=str)
def test_empty_problems_give_zeros_and_no_nan(case: Case) -> None:
    i, problem = case.inputs(), case.problem
    for forward in (oracle_forward, naive_forward):
        o, lse = forward(i.q, i.k, i.v, problem)
        assert (tuple(o.shape), tuple(lse.shape)) == (problem.q_shape, problem.lse_shape)
        assert not o.any()
        assert (lse == -math.inf).all()
    for backward in (oracle_backward, naive_backward):
        for grad, x in zip(backward(i.do, i.dlse, i.q, i.k, i.v, problem), (i.q, i.k, i.v), strict=True):
            assert grad.shape == x.shape
            assert not grad.any()
