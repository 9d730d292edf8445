"""The check rule: what is right passes, and what is wrong fails with its place and its name."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

import pytest
import torch

from common import GuardedBuffers, Mask, Problem, Target, empty
from harness.checks import (
    NAMES,
    RELATIVE_CAP,
    Truth,
    Yardstick,
    _floor,
    by_segment,
    compare,
    largest_by_segment,
)
from harness.inputs import InputSpec, make_inputs
from harness.provenance import provenance
from harness.records import RecordFile, check_record
from harness.schema import VERSION
from harness.suites import load_suite
from harness.trial import Check, Trial
from reference.port import ReferencePort

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


def test_a_port_that_keeps_its_first_results_is_wrong() -> None:
    kept: dict[str, tuple] = {}

    def keep(direction: str, outputs: tuple, inputs: tuple) -> tuple:
        first = kept.setdefault(direction, tuple(x.clone() for x in outputs))
        return tuple(x.copy_(y) for x, y in zip(outputs, first, strict=True))

    run = trial(FakePort(after=keep))
    text = complaint(run.check("forward"))
    assert "o: error" in text
    assert "lse: error" in text

    def keep_gradients(direction: str, outputs: tuple, inputs: tuple) -> tuple:
        return keep(direction, outputs, inputs) if direction == "backward" else outputs

    text = complaint(trial(FakePort(after=keep_gradients)).check("backward"))
    assert all(f"{name}: error" in text for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("keeps", [{"q"}, {"k"}, {"v"}, {"q", "k"}, {"q", "k", "v"}])
def test_a_port_that_keeps_its_first_inputs_is_wrong(keeps: set[str]) -> None:
    class Keeping(FakePort):
        def _forward(self, q, k, v, *rest):  # type: ignore[no-untyped-def]
            if not hasattr(self, "kept"):
                self.kept = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
            given = {"q": q, "k": k, "v": v} | {name: self.kept[name] for name in keeps}
            return super()._forward(*given.values(), *rest)

    assert "o: error" in complaint(trial(Keeping()).check("forward"))


@pytest.mark.parametrize("position", range(5))
def test_a_backward_that_keeps_one_of_its_first_inputs_is_wrong(position: int) -> None:
    class Keeping(FakePort):
        def _backward(self, *arguments):  # type: ignore[no-untyped-def]
            if not hasattr(self, "kept"):
                self.kept = arguments[position].clone()
            with_dlse = arguments[1] is not None
            kept = [self.kept if i == position and (i != 1 or with_dlse) else x for i, x in enumerate(arguments)]
            return super()._backward(*kept)

    assert "error" in complaint(trial(Keeping()).check("backward"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_results_in_the_memory_of_an_earlier_call_are_seen(direction: str) -> None:
    kept: list[tuple] = []

    def reuse(outputs: tuple, inputs: tuple) -> tuple:
        kept.append(outputs)
        return tuple(x.copy_(y) for x, y in zip(kept[0], outputs, strict=True))

    text = complaint(trial(wrong(direction, reuse)).check(direction))  # type: ignore[arg-type]
    assert f"{NAMES[direction][0]} is not in memory from common.empty" in text  # type: ignore[index]


@pytest.mark.parametrize(("direction", "tensor"), [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 2)])
def test_a_result_in_memory_of_the_ports_own_is_seen(direction: str, tensor: int) -> None:
    def own(outputs: tuple, inputs: tuple) -> tuple:
        return tuple(x.clone() if i == tensor else x for i, x in enumerate(outputs))

    name = NAMES[direction][tensor]  # type: ignore[index]
    check = trial(wrong(direction, own)).check(direction)  # type: ignore[arg-type]
    assert check.complaints() == [f"{name} is not in memory from common.empty"]


def test_a_guard_tells_its_own_memory_from_any_other() -> None:
    with GuardedBuffers() as guard:
        mine = empty((4, 4), dtype=torch.float16, device=CPU)
    with GuardedBuffers():
        other = empty((4, 4), dtype=torch.float16, device=CPU)
    assert guard.holds(mine)
    assert guard.holds(mine[1:, ::2].mT)
    assert guard.holds(mine[:0])
    assert not guard.holds(other)
    assert not guard.holds(mine.clone())
    assert not guard.holds(mine.as_strided((4, 4), (4, 1), mine.storage_offset() + 1))


def test_the_first_seconds_are_those_of_the_decoy() -> None:
    def slow(outputs: tuple, inputs: tuple) -> None:
        time.sleep(0 if slept else 0.5)
        slept.append(True)

    slept: list[bool] = []
    check = trial(wrong("forward", slow)).check("forward")
    assert check.verdict == "pass"
    assert len(check.seconds) == 2
    assert check.seconds[0] > 0.5 > check.seconds[1]


def test_rows_past_the_end_are_nan_so_that_zero_times_them_shows() -> None:
    class Reckless(FakePort):
        def _forward(self, q, k, v, *rest):  # type: ignore[no-untyped-def]
            o, lse = super()._forward(q, k, v, *rest)
            beyond = v.as_strided(v.shape[2:], v.stride()[2:], v.storage_offset() + v[0, 0].numel())
            return o.add_((0 * beyond).sum()), lse

    assert "nan where the oracle has" in complaint(trial(Reckless()).check("forward"))


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


def test_scores_of_many_terms_may_round_as_their_sums_do() -> None:
    # With two keys the plain attention errs by a tenth of what the sum of 232 products may.
    problem = Problem(1, 9, 3, 31, 2, 232, torch.float16, Mask(0, 1, "top_left"))
    inputs = make_inputs(problem, InputSpec(), seed=7, device=CPU)
    truth = Truth(problem, inputs)
    check = Trial(ReferencePort(), problem, inputs, truth, target=ADA).check("forward")
    assert check.verdict == "pass", check.complaints()
    q_row, k_row = (x[..., :1, :].double().norm() for x in (inputs.q[:, :1], inputs.k[:, :1]))
    eps = torch.finfo(torch.float32).eps
    assert truth.forward()["lse"].floor[0, 0, 0] >= eps * q_row * k_row * problem.scale
    assert float(truth.forward()["lse"].floor.max()) < 50 * eps


def test_infinity_has_to_be_met_exactly() -> None:
    oracle = torch.tensor([[[-math.inf, 1.0]]], dtype=torch.float64)
    yardstick = Yardstick(oracle, *(torch.tensor([[[x]]]) for x in (1.0, 0.0, 1e-6)))
    assert compare("lse", torch.tensor([[[-math.inf, 1.0]]]), yardstick).passed
    assert not compare("lse", torch.tensor([[[-1e30, 1.0]]]), yardstick).passed
    assert not compare("lse", torch.tensor([[[-math.inf, -math.inf]]]), yardstick).passed


def scaled(tensor: int, rows: slice, factor: float) -> Callable:
    """What `wrong` plants: these rows of one output times a factor."""

    def change(outputs: tuple, inputs: tuple) -> None:
        outputs[tensor][..., rows, :] *= factor

    return change


@pytest.mark.parametrize(
    ("direction", "tensor", "rows"),
    [
        ("forward", 0, slice(768, None)),
        ("backward", 0, slice(768, None)),
        ("backward", 1, slice(896, None)),
        ("backward", 2, slice(896, None)),
    ],
)
def test_large_rows_do_not_excuse_small_ones(direction: str, tensor: int, rows: slice) -> None:
    problem = Problem(1, 1, 1, 1024, 1024, 64, torch.bfloat16, Mask.causal())
    inputs = make_inputs(problem, InputSpec(), seed=0, device=CPU)
    truth = Truth(problem, inputs)
    right = Trial(FakePort(), problem, inputs, truth, target=ADA)
    assert right.check(direction).verdict == "pass"  # type: ignore[arg-type]
    port = wrong(direction, scaled(tensor, rows, 0.9))
    name = NAMES[direction][tensor]  # type: ignore[index]
    check = Trial(port, problem, inputs, truth, target=ADA).check(direction)  # type: ignore[arg-type]
    assert f"{name}: error" in complaint(check)
    assert check.tensors[tensor].worst.index[2] >= rows.start  # type: ignore[union-attr]


def test_one_hot_row_excuses_no_other_head_and_no_other_segment() -> None:
    problem = Problem(1, 2, 2, 128, 128, 16, torch.bfloat16, Mask())
    inputs = make_inputs(problem, InputSpec(), seed=0, device=CPU)
    inputs.v[0, 0] *= 1000
    inputs.do[0, 0, 0] *= 1000
    truth = Truth(problem, inputs)
    assert Trial(FakePort(), problem, inputs, truth, target=ADA).check("backward").verdict == "pass"

    def spoil(outputs: tuple, inputs: tuple) -> None:
        outputs[0][0, 1] *= 0.9

    for direction, name in (("forward", "o"), ("backward", "dq")):
        check = Trial(wrong(direction, spoil), problem, inputs, truth, target=ADA).check(direction)  # type: ignore[arg-type]
        assert f"{name}: error" in complaint(check)

    def spoil_rows(outputs: tuple, inputs: tuple) -> None:
        outputs[0][0, 0, 64:] *= 0.9

    check = Trial(wrong("backward", spoil_rows), problem, inputs, truth, target=ADA).check("backward")
    assert check.tensors[0].worst.index[:2] == (0, 0)  # type: ignore[union-attr]
    assert "dq: error" in complaint(check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_logits_do_not_excuse_zeros(dtype: torch.dtype) -> None:
    problem = Problem(1, 1, 1, 64, 64, 64, dtype, Mask())
    port = wrong("forward", lambda out, _: (out[0].zero_(), out[1]))
    check = trial(port, problem, InputSpec(scale_q=1000, scale_k=1000)).check("forward")
    assert "o: error" in complaint(check)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 127, 128, 1000, 1024, 1025, 16384])
def test_segments_have_64_rows_or_more_and_are_16_at_most(length: int) -> None:
    rows = torch.arange(length).expand(2, 3, length)
    largest = by_segment("lse", rows)
    assert largest.shape[:2] == (2, 3)
    assert 1 <= largest.shape[2] <= 16
    lengths = largest[0, 0].diff(prepend=torch.tensor([-1]))
    assert length < 64 or lengths.min() >= 64
    assert length == 0 or int(largest[0, 0, -1]) == length - 1
    assert length < 1024 or largest.shape[2] == 16


@pytest.mark.parametrize("naive", [math.inf, 100.0])
def test_a_naive_attention_that_breaks_excuses_nobody(naive: float) -> None:
    oracle = torch.full((1, 1, 1, 1), 4.0, dtype=torch.float64)
    yardstick = Yardstick(oracle, *(torch.tensor([[[x]]]) for x in (4.0, naive, 0.0)))
    assert float(yardstick.allowed) == 2 * RELATIVE_CAP * 4


def test_fp16_scores_that_overflow_leave_a_usable_check() -> None:
    problem = Problem(1, 1, 1, 40, 40, 64, torch.float16, Mask())
    spec = InputSpec(scale_q=100, scale_k=100)
    inputs = make_inputs(problem, spec, seed=0, device=CPU)
    assert Truth(problem, inputs).forward()["o"].naive.isinf().all()
    assert trial(FakePort(), problem, spec).check("forward").verdict == "pass"
    assert trial(FakePort("no rescale of the accumulator"), problem, spec).check("forward").verdict == "fail"


def test_the_naive_attention_is_the_same_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(2, 4, 2, 33, 47, 16, torch.bfloat16, Mask.causal())
    inputs = make_inputs(problem, InputSpec(), seed=0, device=CPU)
    whole = Truth(problem, inputs)
    no_costs = dict.fromkeys(NAMES["backward"], torch.zeros(1))
    expected = whole.forward() | whole.backward(no_costs, with_dlse=True)
    monkeypatch.setattr("harness.checks.NAIVE_SCORES_AT_ONCE", 0)
    parts = Truth(problem, inputs)
    for name, yardstick in (parts.forward() | parts.backward(no_costs, with_dlse=True)).items():
        torch.testing.assert_close(yardstick.naive, expected[name].naive, rtol=0.5, atol=0)


def test_a_check_becomes_a_record_with_infinities_as_words(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def spoil(outputs: tuple, inputs: tuple) -> None:
        outputs[0].fill_(math.nan)

    check = trial(wrong("forward", spoil)).check("forward")
    path = tmp_path / "x.jsonl"
    with RecordFile(path) as records:
        facts = provenance(CPU, interpreted=True)
        about = {"suite": "s", "case": "c", "inputs": InputSpec(), "seed": 0, "sources": None, "facts": facts}
        records.write(check_record(check, **about))
        assert not path.exists()
    record = json.loads(path.read_text())
    assert (record["schema"], record["verdict"], record["errors"]["o"]["error"]) == (VERSION, "fail", "inf")
    assert record["tile"] == {"block_m": 32, "block_n": 32, "warps": 4, "stages": 2}


def test_an_interrupted_record_file_leaves_the_old_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "x.jsonl"
    path.write_text("old\n")
    records = RecordFile(path)
    new = {"schema": 2, "kind": "doctor", "git": {"commit": None, "dirty": None}, "installed": [], "ports": []}
    records.write(new)
    with pytest.raises(KeyboardInterrupt), records:
        raise KeyboardInterrupt
    assert path.read_text() == "old\n"
    assert json.loads(records.partial.read_text()) == new


def test_what_fp32_flushes_to_zero_is_allowed_and_nothing_larger() -> None:
    # As where one key outweighs all others by e^80: the others' gradients are sums of terms near fp32's smallest.
    oracle = torch.full((1, 1, 64, 16), 7e-35, dtype=torch.float64)
    largest = largest_by_segment("dk", oracle)
    floor = _floor(largest, torch.zeros_like(largest), torch.float32)
    yardstick = Yardstick(oracle, largest, torch.zeros_like(largest), floor)
    assert compare("dk", oracle.float() * 0.99, yardstick).passed
    larger = Yardstick(oracle * 1e6, largest * 1e6, torch.zeros_like(largest), floor)
    assert not compare("dk", oracle.float() * 1e6 * 0.99, larger).passed
