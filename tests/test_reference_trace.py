"""The online softmax of one row, step by step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from common import Mask, Problem
from reference import oracle_forward, trace_row

from .cases import Case

CASE = Case("trace", "", (2, 4, 50, 16), (2, 2, 70, 16), torch.float32, Mask())


@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask(left=20, right=4), Mask(left=3, right=0)], ids=str)
@pytest.mark.parametrize("row", [0, 17, 49])
def test_each_step_is_the_softmax_over_the_keys_so_far(mask: Mask, row: int) -> None:
    i = CASE.inputs()
    problem = Problem.from_tensors(i.q, i.k, i.v, mask=mask)
    steps = list(trace_row(i.q, i.k, i.v, problem, batch=1, head=3, row=row, block_n=16))
    s = (i.k[1, 1] @ i.q[1, 3, row] * problem.scale).masked_fill(~mask.dense(50, 70)[row], -math.inf)
    for step in steps:
        prefix = s[: step.key_end]
        torch.testing.assert_close(step.scores, s[step.key_begin : step.key_end])
        assert step.tile_max == pytest.approx(float(s[step.key_begin : step.key_end].max()), rel=1e-6)
        assert step.row_max == pytest.approx(float(prefix.max()), rel=1e-6)
        assert step.row_sum == pytest.approx(float((prefix - prefix.max()).exp().sum()), rel=1e-5)
        torch.testing.assert_close(step.output, torch.softmax(prefix, 0) @ i.v[1, 1, : step.key_end])
    assert steps[0].rescale == 0
    for before, after in itertools.pairwise(steps):
        assert before.key_end == after.key_begin
        assert after.rescale == pytest.approx(math.exp(before.row_max - after.row_max))
    o, lse = oracle_forward(i.q, i.k, i.v, problem)
    torch.testing.assert_close(steps[-1].output.double(), o[1, 3, row], rtol=1e-5, atol=1e-6)
    assert steps[-1].lse == pytest.approx(float(lse[1, 3, row]), rel=1e-6)


def test_a_row_that_sees_no_key_has_no_steps() -> None:
    i = CASE.inputs()
    k, v = i.k[:, :, :10], i.v[:, :, :10]
    problem = Problem.from_tensors(i.q, k, v, mask=Mask.causal())
    assert list(trace_row(i.q, k, v, problem, row=39)) == []
    assert len(list(trace_row(i.q, k, v, problem, row=40))) == 1


@pytest.mark.parametrize("name", ["batch", "head", "row"])
def test_an_index_out_of_range_is_named(name: str) -> None:
    i = CASE.inputs()
    with pytest.raises(ValueError, match=f"^{name} must be from 0 to"):
        trace_row(i.q, i.k, i.v, CASE.problem, **{"row": 0, name: 99})
