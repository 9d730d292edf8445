"""The loader of `cases.yaml`."""

from __future__ import annotations

import pytest
import torch

from common import Mask

from .cases import LAYOUTS, Case, by_hand_ids, laid_out, load_cases


def test_ids_are_unique_and_every_entry_is_expanded_or_by_hand() -> None:
    cases = load_cases(dtypes=(torch.float16, torch.bfloat16, torch.float32))
    assert len({case.id for case in cases}) == len(cases)
    assert not {case.entry for case in cases} & set(by_hand_ids())
    assert {"corner-2x5-bf16-causal-topleft", "head-dims-d256-fp32-full", "tail-296-d96-fp16-full"} <= {
        case.id for case in cases
    }
    assert {"graph-capture", "smem-refusal"} <= set(by_hand_ids())


def test_small_cases_keep_what_the_case_is_about() -> None:
    for case, small in zip(load_cases(), load_cases(small=True), strict=True):
        assert (case.id, case.q_shape[3], case.mask) == (small.id, small.q_shape[3], small.mask)
        assert case.q_shape[1] * small.kv_shape[1] >= case.kv_shape[1] * small.q_shape[1], "more heads a group"
        sign = (case.q_shape[2] > case.kv_shape[2]) - (case.q_shape[2] < case.kv_shape[2])
        assert sign == (small.q_shape[2] > small.kv_shape[2]) - (small.q_shape[2] < small.kv_shape[2])
        for long, short in ((case.q_shape[2], small.q_shape[2]), (case.kv_shape[2], small.kv_shape[2])):
            assert short <= min(long, 203)
            assert (long % 16 == 0) == (short % 16 == 0) or case.entry in ("non-power-length", "constant-rows"), case.id


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_the_strides_and_not_the_values(layout: str) -> None:
    values = torch.randn(2, 3, 5, 16)
    tensor = laid_out(values, layout)
    expected = values[:, :1].expand(values.shape) if layout == "expanded" else values
    assert torch.equal(tensor, expected)
    assert (tensor.stride(-1) == 1) == (layout != "last_dim_strided")
    assert tensor.is_contiguous() == (layout in ("packed", "offset_one"))
    assert tensor.storage_offset() == (layout == "offset_one")


def test_inputs_are_the_same_each_time_and_differ_by_seed() -> None:
    case = Case("x", "x", (1, 2, 5, 16), (1, 1, 7, 16), torch.bfloat16, Mask())
    assert torch.equal(case.inputs().q, case.inputs().q)
    assert not torch.equal(case.inputs().q, case.inputs(seed=1).q)
    assert case.inputs().dlse.dtype == torch.float32


@pytest.mark.parametrize("case", load_cases(only=["planted-max-last"]), ids=str)
def test_the_planted_key_lies_80_above_all_others(case: Case) -> None:
    inputs = case.inputs()
    s = inputs.q.double() @ inputs.k.double().mT * case.problem.scale
    assert (s[..., -1] - s[..., :-1].amax(-1)).min() == pytest.approx(80, abs=1)
