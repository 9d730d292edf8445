"""`FlashAttentionPytorch`, and `attention()` over the reference port."""

from __future__ import annotations

import pytest
import torch

from common import DTYPE_NAMES, Mask, Problem, attention
from reference import FlashAttentionPytorch, naive_forward

from .cases import Case, Inputs
from .helpers import check_port


class Applied:
    """The autograd function behind the port's two methods, so that the shared checks drive it."""

    def forward(self, q, k, v, problem, **options):  # type: ignore[no-untyped-def]
        self.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        self.o = FlashAttentionPytorch.apply(*self.leaves, problem.mask == Mask.causal())
        (lse,) = (x for x in self.o.grad_fn.saved_tensors if x.shape == q.shape[:-1])
        return self.o.detach(), lse

    def backward(self, do, dlse, q, k, v, o, lse, problem, **options):  # type: ignore[no-untyped-def]
        return torch.autograd.grad(self.o, self.leaves, do)


def one_head(
    len_q: int, len_k: int, head_dim: int, dtype: torch.dtype = torch.float32, mask: Mask | None = None
) -> tuple[Inputs, Problem]:
    shapes = (2, 1, len_q, head_dim), (2, 1, len_k, head_dim)
    case = Case(f"{shapes}", "", *shapes, dtype, mask or Mask())
    i = case.inputs()
    return Inputs(*(x.squeeze(1) for x in (i.q, i.k, i.v, i.do, i.dlse))), case.problem


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(128, 128), (100, 140), (70, 40)], ids=str)
def test_function_is_the_attention_and_its_gradients(
    dtype: torch.dtype, is_causal: bool, lengths: tuple[int, int]
) -> None:
    inputs, problem = one_head(*lengths, 64, dtype, Mask.causal() if is_causal else Mask())
    check_port(Applied(), inputs, problem, dlse=[False])  # type: ignore[arg-type]


def test_function_saves_exactly_one_lse_and_its_operands() -> None:
    inputs, _ = one_head(64, 64, 32)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o = FlashAttentionPytorch.apply(q, k, v, True)
    saved = o.grad_fn.saved_tensors
    assert [tuple(x.shape) for x in saved].count((2, 64)) == 1
    assert len(saved) == 5
    for x in (q, k, v, o):
        assert any(torch.equal(x, y) for y in saved)


def test_is_causal_may_be_left_out() -> None:
    inputs, _ = one_head(20, 30, 16)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o = FlashAttentionPytorch.apply(q, k, v)
    assert torch.equal(o, FlashAttentionPytorch.apply(q, k, v, False))
    o.sum().backward()
    assert all(x.grad is not None for x in (q, k, v))


def test_function_refuses_heads() -> None:
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"^q must be \(B, N, D\)"):
        FlashAttentionPytorch.apply(q, q, q)


@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask(left=5, right=3)], ids=str)
def test_attention_differentiates_o_and_lse_by_the_reference(mask: Mask) -> None:
    inputs, problem = one_head(30, 24, 16, mask=mask)
    gradients = []
    for of in ("attention", "naive"):
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        if of == "attention":
            o, lse = attention(q, k, v, mask=mask, impl="reference", return_lse=True)
        else:
            four = (x.unsqueeze(1) for x in (q, k, v))
            o, lse = (x.squeeze(1) for x in naive_forward(*four, problem))
        seen = lse.isfinite()
        loss = (o * inputs.do).sum() + (lse[seen] * inputs.dlse[seen]).sum()
        gradients.append(torch.autograd.grad(loss, (q, k, v)))
    for ours, naive in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-5)


def test_attention_over_the_reference_compiles_without_a_graph_break() -> None:
    inputs, _ = one_head(30, 30, 16)
    tensors = [x.unsqueeze(1).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=True, impl="reference") * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    eager = torch.autograd.grad(layer(*tensors).square().sum(), tensors)
    for x, y in zip(torch.autograd.grad(compiled(*tensors).square().sum(), tensors), eager, strict=True):
        torch.testing.assert_close(x, y)
