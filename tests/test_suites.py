"""Suites: those that come with the harness are valid, and a mistake in a user's own is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common import Mask, Problem
from harness.errors import UsageError
from harness.inputs import LAYOUTS, InputSpec, make_decoy, make_inputs
from harness.options import Dtype
from harness.suites import DTYPES, load_suite, suite_names

CPU = torch.device("cpu")


def problems(name: str, small: bool = False) -> list:
    return [case.problem for case in load_suite(name, small=small).cases]


def test_the_suites_of_the_contract_are_there() -> None:
    assert suite_names() == ["fa2", "hard", "long", "quick", "walkthrough"]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", suite_names())
def test_every_suite_parses(name: str, small: bool) -> None:
    suite = load_suite(name, small=small)
    assert suite.about
    assert len({(case.id, case.problem.id, case.inputs) for case in suite.cases}) == len(suite.cases)


@pytest.mark.parametrize("name", suite_names())
def test_a_small_suite_keeps_its_cases_and_fits_an_interpreter(name: str) -> None:
    for case, full in zip(load_suite(name, small=True).cases, load_suite(name, small=False).cases, strict=True):
        small, large = case.problem, full.problem
        assert (case.id, small.head_dim, small.dtype, small.mask) == (full.id, large.head_dim, large.dtype, large.mask)
        assert (small.group > 1) == (large.group > 1)
        assert (small.len_q > small.len_k, small.len_q < small.len_k) == (
            large.len_q > large.len_k,
            large.len_q < large.len_k,
        )
        assert small.batch * small.heads_q * small.len_q * small.len_k <= 80_000
        inputs = make_inputs(small, case.inputs, seed=0, device=CPU)
        assert inputs.do.shape == inputs.q.shape


def test_quick_has_every_feature_of_the_contract() -> None:
    for small in (True, False):
        quick = problems("quick", small)
        assert {p.head_dim for p in quick} >= {16, 40, 64, 96, 128, 256}
        assert {p.dtype for p in quick} == {torch.float16, torch.bfloat16, torch.float32}
        assert any(p.heads_kv == 1 < p.heads_q for p in quick), "MQA"
        assert any(1 < p.heads_kv < p.heads_q for p in quick), "GQA"
        unequal = [p for p in quick if p.mask.right == 0 and p.mask.left is None and p.len_q != p.len_k]
        assert {p.mask.corner for p in unequal} == {"bottom_right", "top_left"}
        assert any(p.len_q > p.len_k for p in unequal)
        assert any(p.mask.left is not None and p.mask.right is not None for p in quick)
        assert any(p.mask.is_full and p.len_k % 16 for p in quick)
        assert any(min(p.len_q, p.len_k) > 256 for p in quick)


def test_several_problems_have_a_scale_of_their_own() -> None:
    for name, least in (("quick", 4), ("hard", 2)):
        own = [p for p in problems(name) if p.scale != p.head_dim**-0.5]
        assert len({p.scale for p in own}) >= least
        assert len({p.mask for p in own}) >= 2
        if name == "quick":
            assert len({p.head_dim for p in own}) >= 4
            assert len({p.dtype for p in own}) == 3


def test_walkthrough_long_and_fa2_are_those_of_the_contract() -> None:
    walk = problems("walkthrough")
    assert {(p.batch, p.heads_q, p.head_dim, p.dtype) for p in walk} == {(4, 8, 64, torch.bfloat16)}
    assert [(p.len_q, p.mask) for p in walk] == [
        (n, mask) for n in (512, 1024, 2048, 4096) for mask in (Mask(), Mask.causal())
    ]
    assert [p.len_q for p in problems("long")] == [512 * 2**i for i in range(6)]
    assert {(p.batch * p.len_q, p.heads_q * p.head_dim) for p in problems("fa2")} == {(16384, 2048)}


GOOD = "about: x\nproblems:\n  - {id: a, len: 8, head_dim: 16}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "problms: 1\n", "the suite has the unknown key 'problms'.*did you mean problems"),
        (
            GOOD.replace("head_dim", "head_dimm"),
            "a: the problem has the unknown key 'head_dimm'.*mean head_dim",
        ),
        (GOOD.replace("head_dim: 16", "inputs: {layuot: bshd}"), "a: inputs has the unknown key 'layuot'"),
        (GOOD.replace("head_dim: 16", "inputs: {layout: bhsd}"), "inputs layout must be one of bhnd, .*did you mean"),
        (GOOD.replace("head_dim: 16", "mask: {lef: 3}"), "a: mask has the unknown key 'lef'"),
        (GOOD.replace("head_dim: 16", "mask: casual"), "mask must be one of full, causal.*did you mean causal"),
        (GOOD.replace("16", "17"), "a: head_dim must be a multiple of 8"),
        (GOOD.replace("head_dim: 16", "dtype: fp8"), "dtype must be one of fp16, bf16, fp32, got 'fp8'"),
        (GOOD.replace("len: 8", "len: 8y9"), "len must be a number or two as in 8x2, got '8y9'"),
        (GOOD.replace("len: 8, ", ""), "a: the problem lacks len"),
        (GOOD.replace("about: x\n", ""), "the suite lacks about"),
        (GOOD.replace("len: 8", "len: [8, 8]"), "comes twice"),
        ("about: x\nproblems: []\n", "problems must be a list with at least one entry"),
        ("about: x\nproblems: [3]\n", "problem 1: the problem must be a mapping, got 3"),
        ("[1, 2]\n", "the suite must be a mapping"),
        ("about: {\n", "is no valid YAML"),
        ("", "the suite must be a mapping"),
        (GOOD.replace("len: 8", "len: []"), "a: len is an empty list, which stands for no problem"),
        (GOOD.replace("head_dim: 16", "mask: []"), "a: mask is an empty list"),
        (GOOD.replace("about: x", "about: 2024-99-99"), "is no valid YAML: ValueError: month must be in 1..12"),
        (GOOD.replace("about: x", "about: !!bool maybe"), "is no valid YAML: KeyError"),
        (GOOD.replace("about: x", "about: !!timestamp maybe"), "is no valid YAML: AttributeError"),
        (GOOD.replace("about: x", "about: " + "[" * 5000), "is no valid YAML: RecursionError"),
        (GOOD.replace("about: x", "about: {[1]: 2}"), "is no valid YAML: .*unhashable key"),
        (GOOD.replace("about: x", "about: x\nabout: y"), "is no valid YAML: the key 'about' comes twice.*line 2"),
        (GOOD.replace("head_dim: 16", "inputs: {scale_q: 1, scale_q: 2}"), "the key 'scale_q' comes twice"),
        (GOOD.replace("head_dim: 16", "inputs: {row_stride: 1.5}"), "a: inputs row_stride must be an int, got float"),
        (GOOD.replace("head_dim: 16", "inputs: {row_stride: -1}"), "a: inputs row_stride must be 0 to"),
        (GOOD.replace("head_dim: 16", "inputs: {scale_q: .inf}"), "a: inputs scale_q must be finite in fp32, got inf"),
        (GOOD.replace("head_dim: 16", "inputs: {scale_v: .nan}"), "a: inputs scale_v must be finite in fp32, got nan"),
        (GOOD.replace("head_dim: 16", "inputs: {scale_k: 1.0e+39}"), "a: inputs scale_k must be finite in fp32"),
        (GOOD.replace("head_dim: 16", "inputs: {planted_max: .nan}"), "a: inputs planted_max must be finite"),
        (GOOD.replace("head_dim: 16", "inputs: {planted_max: -3}"), "a: inputs planted_max must be >= 0"),
        (GOOD.replace("head_dim: 16", "inputs: {layout: [bhnd]}"), "a: inputs layout must be one of"),
        (GOOD.replace("head_dim: 16", "inputs: 3"), "a: inputs must be a mapping, got 3"),
        (GOOD.replace("head_dim: 16", "scale: .inf"), "a: scale must be finite"),
        (GOOD.replace("head_dim: 16", "scale: 0"), "a: scale must be finite and > 0"),
        (GOOD.replace("len: 8", "len: 3000000000"), "a: len_q must be <="),
        (GOOD.replace("len: 8", "len: '" + "9" * 5000 + "'"), "a: len must be a number or two as in 8x2"),
        (GOOD.replace("len: 8", "len: 0x" + "f" * 5000), "a: len must be a number or two as in 8x2"),
        (GOOD.replace("len: 8", "len: [[8]]"), "a: len must be a number or two as in 8x2"),
        (GOOD.replace("len: 8", "len: -8"), "a: len must be a number or two as in 8x2"),
        (GOOD.replace("len: 8", "len: 8, batch: 99999999999"), "a: batch must be at most"),
        (GOOD.replace("len: 8", "len: 8, batch: 0x" + "f" * 5000), "a: batch must be at most"),
        (GOOD.replace("len: 8", "len: 8, batch: 2.5"), "a: batch must be an int"),
        (GOOD.replace("len: 8", "len: 8, heads: 4000000000"), "a: heads_q must be at most"),
        (GOOD.replace("len: 8", "len: 1000000000, batch: 1000000000"), "a: the tensors have more than"),
        (GOOD.replace("head_dim: 16", "dtype: {a: 1}"), "a: dtype must be one of"),
        (GOOD.replace("head_dim: 16", "mask: [[full]]"), "a: mask must be one of"),
        (GOOD.replace("head_dim: 16", "mask: {left: .nan}"), "a: mask left must be"),
        (GOOD.replace("id: a", 'id: "a\\nb"').replace("16", "17"), "a b: head_dim must be"),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        load_suite(str(path), small=False)
    assert "\n" not in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_an_unknown_suite_and_an_unreadable_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"suite must be one of .* did you mean quick"):
        load_suite("quik", small=False)
    with pytest.raises(UsageError, match=r"none.yaml cannot be read: No such file"):
        load_suite(str(tmp_path / "none.yaml"), small=False)
    with pytest.raises(UsageError, match="cannot be read"):
        load_suite(str(tmp_path), small=False)
    for long in ("x" * 400, "x" * 400 + ".yaml", "x/" * 3000):
        with pytest.raises(UsageError, match="suite") as error:
            load_suite(long, small=False)
        assert "\n" not in str(error.value)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="it is no text"):
        load_suite(str(binary), small=False)


def test_only_selects_by_name_and_by_problem_id() -> None:
    quick = load_suite("quick", small=True)
    assert {case.id for case in quick.only("mqa").cases} == {"mqa"}
    assert {case.problem.head_dim for case in quick.only("d256").cases} == {256}
    with pytest.raises(UsageError, match="--only 'nothing' matches no problem of the suite quick"):
        quick.only("nothing")


@pytest.mark.parametrize("name", suite_names())
def test_a_suite_in_another_dtype_keeps_its_cases_once_and_its_inputs(name: str) -> None:
    assert list(Dtype) == list(DTYPES)
    suite = load_suite(name, small=True)
    for dtype in DTYPES.values():
        cases = suite.in_dtype(dtype).cases
        assert {case.problem.dtype for case in cases} == {dtype}
        of = [(case.id, replace(case.problem, dtype=torch.float16), case.inputs) for case in suite.cases]
        assert [(case.id, replace(case.problem, dtype=torch.float16), case.inputs) for case in cases] == [
            *dict.fromkeys(of)
        ]
        for case in cases:
            make_inputs(case.problem, case.inputs, seed=0, device=CPU)


def test_inputs_are_seeded_and_fresh() -> None:
    case = load_suite("quick", small=True).cases[0]
    a, b, c = (make_inputs(case.problem, case.inputs, seed=seed, device=CPU) for seed in (0, 0, 1))
    for name, x in a.named().items():
        assert torch.equal(x, b.named()[name])
        assert not torch.equal(x, c.named()[name])
    assert not torch.equal(a.k, a.v)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("bnd", "expanded_heads")])
def test_a_layout_changes_strides_and_not_values(layout: str) -> None:
    x = torch.randn(2, 3, 5, 16)
    y = LAYOUTS[layout](x, InputSpec(row_stride=64))
    assert torch.equal(x, y)
    assert (y.stride() == x.stride()) == (layout in ("bhnd", "offset_one"))
    assert (y.stride(-1) == 1) == (layout != "last_dim_strided")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("decoy", [False, True])
def test_inputs_lie_among_nans(layout: str, decoy: bool) -> None:
    problem = Problem(1 if layout == "bhnd" else 2, 1 if layout == "bnd" else 2, 1, 9, 5, 16, torch.float16)
    inputs = make_inputs(problem, InputSpec(layout=layout, row_stride=48), seed=0, device=CPU)
    for x in (make_decoy(inputs) if decoy else inputs).named().values():
        assert x.isfinite().all()
        storage = x.as_strided((x.untyped_storage().nbytes() // x.dtype.itemsize,), (1,), 0).clone()
        assert storage[: x.storage_offset()].isnan().all()
        assert x.storage_offset() >= 256
        misaligned = layout == "offset_one" and x.dtype == torch.float16
        assert x.data_ptr() % 16 == (2 if misaligned else 0)
        within = torch.zeros_like(storage, dtype=torch.bool)
        within.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
        assert storage[~within].isnan().all()
        assert not within[-256:].any()


def test_a_decoy_has_the_form_of_the_inputs_and_other_values_elsewhere() -> None:
    for case in load_suite("quick", small=True).cases + load_suite("hard", small=True).cases:
        inputs = make_inputs(case.problem, case.inputs, seed=0, device=CPU)
        for (name, x), y in zip(inputs.named().items(), make_decoy(inputs).named().values(), strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            if x.numel():
                assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
                assert not torch.equal(x, y) or (name == "q" and case.inputs.scale_q == 0)


def test_inputs_that_overflow_their_dtype_are_refused() -> None:
    problem = Problem(1, 1, 1, 8, 8, 16, torch.float16)
    with pytest.raises(ValueError, match="make a k that is not finite in fp16"):
        make_inputs(problem, InputSpec(scale_k=1e5), seed=0, device=CPU)


def test_the_planted_key_stands_out_for_every_query() -> None:
    cases = [case for case in load_suite("hard", small=True).cases if case.id == "planted-max-last"]
    for case in cases:
        x = make_inputs(case.problem, case.inputs, seed=0, device=CPU)
        s = x.q.double() @ x.k.double().mT * case.problem.scale
        assert (s.argmax(-1) == case.problem.len_k - 1).all()
        assert s[..., -1].min() == pytest.approx(80, rel=0.01)
