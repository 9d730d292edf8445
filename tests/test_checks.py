"""The check rule: what is right passes, and what is wrong fails with its place and its name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from common import Mask, Problem, Target
from harness.checks import NAIVE_CAP, NAMES, Check, Trial, Truth, Yardstick, compare
from harness.inputs import InputSpec, make_inputs
from harness.records import RecordFile, check_record
from harness.suites import load_suite

from .fakes import KERNEL_FAULTS, FakePort

ADA = Target.named("ada")
CPU = torch.device("cpu")
PROBLEM = Problem(1, 2, 1, 70, 90, 16, torch.float16, Mask.causal())


def trial(port: FakePort, problem: Problem = PROBLEM, spec: InputSpec | None = None, seed: int = 0) -> Trial:
    inputs = make_inputs(problem, spec or InputSpec(), seed=seed, device=CPU)
    return Trial(port, problem, inputs, Truth(problem, inputs), target=ADA)


def wrong(direction: str, change: Callable) -> FakePort:
    """A port right but for what `change(outputs, inputs)` does to one direction's outputs."""

    def after(at: str, outputs: tuple, inputs: tuple) -> tuple:
        return (change(outputs, inputs) or outputs) if at == direction else outputs

    return FakePort(after=after)


def complaint(check: Check) -> str:
    assert check.verdict == "fail"
    return "\n".join(check.complaints())


def test_a_right_port_passes_every_problem_of_the_quick_suite() -> None:
    for case in load_suite("quick", small=True).cases:
        run = trial(FakePort(), case.problem, case.inputs)
        for direction in ("forward", "backward"):
            check = run.check(direction)
            assert check.verdict == "pass", (case.problem.id, check.complaints())
            assert all(t.ratio <= 1 for t in check.tensors)


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_the_quick_suite_shows_a_planted_fault(fault: str) -> None:
    port = FakePort(fault)
    for case in load_suite("quick", small=True).cases:
        run = trial(port, case.problem, case.inputs)
        if any(run.check(direction).verdict == "fail" for direction in ("forward", "backward")):
            return
    pytest.fail(f"no problem of the suite shows: {fault}")


def test_the_worst_element_is_named_with_its_tile() -> None:
    def spoil(outputs: tuple, inputs: tuple) -> None:
        outputs[0][0, 1, 40, 3] = 7

    check = trial(wrong("forward", spoil)).check("forward")
    assert (check.tensors[0].worst.index, check.tensors[0].worst.value) == ((0, 1, 40, 3), 7)
    text = complaint(check)
    assert "o: error" in text
    assert "b 0, h 1, row 40, column 3: row 8 of query tile 1 (32 rows)" in text


def test_a_wrong_key_gradient_names_the_key_tile() -> None:
    def spoil(outputs: tuple, inputs: tuple) -> None:
        outputs[1][0, 0, 65, 5] += 3

    assert "row 1 of key tile 2" in complaint(trial(wrong("backward", spoil)).check("backward"))


def test_nan_never_passes() -> None:
    def spoil(outputs: tuple, inputs: tuple) -> None:
        outputs[0][0, 0, 69, 15] = math.nan

    check = trial(wrong("forward", spoil)).check("forward")
    assert check.tensors[0].error == math.inf
    assert "nan where the oracle has" in complaint(check)


def test_zeros_do_not_pass() -> None:
    assert "o: error" in complaint(trial(wrong("forward", lambda out, _: (out[0] * 0, out[1]))).check("forward"))


def test_an_unwritten_tile_is_nan() -> None:
    text = complaint(trial(FakePort("one output tile unwritten")).check("forward"))
    assert "nan where the oracle has" in text
    assert "row 5 of query tile 2" in text


def test_the_wrong_log_base_is_a_wrong_lse_only() -> None:
    check = trial(FakePort("wrong log base of lse")).check("forward")
    assert [t.passed for t in check.tensors] == [True, False]
    assert complaint(check).startswith("lse: error")


def test_a_write_outside_the_buffer_is_seen() -> None:
    def spoil(outputs: tuple, inputs: tuple) -> None:
        beyond = outputs[0].as_strided((4,), (1,), outputs[0].storage_offset() + outputs[0].numel())
        beyond.zero_()

    assert "wrote after the buffer" in complaint(trial(wrong("forward", spoil)).check("forward"))


def test_a_changed_input_is_seen() -> None:
    def spoil(outputs: tuple, inputs: tuple) -> None:
        inputs[1][0, 0, 0, 0] += 1

    assert "changed its input k" in complaint(trial(wrong("forward", spoil)).check("forward"))


def test_stale_results_are_wrong_on_fresh_inputs() -> None:
    kept: list[tuple] = []

    def keep(outputs: tuple, inputs: tuple) -> tuple:
        kept.append(tuple(x.clone() for x in outputs))
        return kept[0]

    port = wrong("forward", keep)
    first = trial(port, seed=1).check("forward")
    assert "o is returned in the memory of an earlier call" in complaint(first)
    assert "o: error" in complaint(trial(port, seed=2).check("forward"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out, _: (out[0].float(), out[1]), "o has dtype torch.float32, not torch.float16"),
        (lambda out, _: (out[0], out[1].half()), "lse has dtype torch.float16, not torch.float32"),
        (lambda out, _: (out[0][:, :1], out[1]), "o has shape (1, 1, 70, 16), not (1, 2, 70, 16)"),
        (lambda out, _: (out[0],), "raised ValueError: not enough values to unpack (expected 2, got 1)"),
        (lambda out, _: (None, out[1]), "o is a NoneType, not a tensor"),
    ],
)
def test_ill_formed_outputs_are_named(change: Callable, text: str) -> None:
    assert text in complaint(trial(wrong("forward", change)).check("forward"))


def test_a_forward_that_does_not_repeat_is_seen() -> None:
    calls = []

    def drift(outputs: tuple, inputs: tuple) -> None:
        calls.append(1)
        outputs[1].mul_(1 + len(calls) * 2**-23)

    assert "lse differs when launched again" in complaint(trial(wrong("forward", drift)).check("forward"))


def test_only_dq_may_differ_and_only_when_determinism_was_not_asked_for() -> None:
    def drifting(tensor: int, deterministic_too: bool) -> FakePort:
        port, calls = FakePort(), []

        def backward(*arguments: object) -> tuple:
            grads = FakePort._backward(port, *arguments)  # type: ignore[arg-type]
            calls.append(1)
            if deterministic_too or not arguments[-1]:
                grads[tensor].view(torch.int16)[..., 0, 0] ^= len(calls) % 2
            return grads

        port._backward = backward  # type: ignore[method-assign]
        return port

    assert trial(drifting(0, deterministic_too=False)).check("backward").verdict == "pass"
    text = complaint(trial(drifting(0, deterministic_too=True)).check("backward"))
    assert "dq differs when launched again on the same inputs with deterministic=True" in text
    text = complaint(trial(drifting(2, deterministic_too=False)).check("backward"))
    assert text == "dv differs when launched again on the same inputs"


def test_what_a_port_raises_is_a_verdict() -> None:
    def fail(outputs: tuple, inputs: tuple) -> None:
        raise RuntimeError("an illegal memory access\nand a long trace")

    forward = trial(wrong("forward", fail))
    assert forward.check("forward").reason == "raised RuntimeError: an illegal memory access"
    assert forward.check("backward").reason == "not run: the forward it starts from failed"
    assert trial(wrong("backward", fail)).check("backward").verdict == "fail"


def test_unsupported_is_no_failure() -> None:
    run = trial(FakePort("unsupported"))
    for direction in ("forward", "backward"):
        check = run.check(direction)
        assert (check.verdict, check.reason, check.complaints()) == ("unsupported", "no windows today", [])


def test_rows_that_see_no_key_have_to_be_exactly_zero() -> None:
    problem = Problem(1, 1, 1, 40, 20, 16, torch.float16, Mask.causal())

    def spoil(outputs: tuple, inputs: tuple) -> None:
        outputs[0][0, 0, 0, 0] = 1e-7

    assert trial(FakePort(), problem).check("backward").verdict == "pass"
    check = trial(wrong("forward", spoil), problem).check("forward")
    assert check.complaints() == ["o is not 0 in rows that see no key"]


def test_infinity_has_to_be_met_exactly() -> None:
    oracle = torch.tensor([[[-math.inf, 1.0]]], dtype=torch.float64)
    yardstick = Yardstick(oracle, 0.0, 1e-6)
    assert compare("lse", torch.tensor([[[-math.inf, 1.0]]]), yardstick).passed
    assert not compare("lse", torch.tensor([[[-1e30, 1.0]]]), yardstick).passed
    assert not compare("lse", torch.tensor([[[-math.inf, -math.inf]]]), yardstick).passed


@pytest.mark.parametrize("naive", [math.inf, 100.0])
def test_a_naive_attention_that_breaks_excuses_nobody(naive: float) -> None:
    yardstick = Yardstick(torch.full((1, 1, 1, 1), 4.0, dtype=torch.float64), naive, 0.0)
    assert yardstick.allowed == 2 * NAIVE_CAP * 4


def test_fp16_scores_that_overflow_leave_a_usable_check() -> None:
    problem = Problem(1, 1, 1, 40, 40, 64, torch.float16, Mask())
    spec = InputSpec(scale_q=100, scale_k=100)
    inputs = make_inputs(problem, spec, seed=0, device=CPU)
    assert Truth(problem, inputs).forward()["o"].naive == math.inf
    assert trial(FakePort(), problem, spec).check("forward").verdict == "pass"
    assert trial(FakePort("no rescale of the accumulator"), problem, spec).check("forward").verdict == "fail"


def test_the_naive_attention_is_the_same_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(2, 4, 2, 33, 47, 16, torch.bfloat16, Mask.causal())
    inputs = make_inputs(problem, InputSpec(), seed=0, device=CPU)
    whole = Truth(problem, inputs)
    no_costs = dict.fromkeys(NAMES["backward"], 0.0)
    expected = whole.forward() | whole.backward(no_costs, with_dlse=True)
    monkeypatch.setattr("harness.checks.NAIVE_SCORES_AT_ONCE", 0)
    parts = Truth(problem, inputs)
    for name, yardstick in (parts.forward() | parts.backward(no_costs, with_dlse=True)).items():
        assert yardstick.naive == pytest.approx(expected[name].naive, rel=0.5)


def test_a_check_becomes_a_record_with_infinities_as_words(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def spoil(outputs: tuple, inputs: tuple) -> None:
        outputs[0].fill_(math.nan)

    check = trial(wrong("forward", spoil)).check("forward")
    path = tmp_path / "x.jsonl"
    with RecordFile(path) as records:
        records.write(
            check_record(check, suite="s", case="c", inputs=InputSpec(), seed=0, sources=None, facts={"card": None})
        )
        assert not path.exists()
    record = json.loads(path.read_text())
    assert (record["schema"], record["verdict"], record["errors"]["o"]["error"]) == (1, "fail", "inf")
    assert record["tile"] == {"block_m": 32, "block_n": 32, "warps": 4, "stages": 2}


def test_an_interrupted_record_file_leaves_the_old_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "x.jsonl"
    path.write_text("old\n")
    records = RecordFile(path)
    records.write({"new": 1})
    with pytest.raises(KeyboardInterrupt), records:
        raise KeyboardInterrupt
    assert path.read_text() == "old\n"
    assert json.loads(records.partial.read_text()) == {"new": 1}
