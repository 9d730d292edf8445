"""`harness fuzz`: random problems over the whole contract; what fails is shrunk, written, and told as a command."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import common
from common import DTYPE_NAMES, Mask, Problem
from harness.cli import main
from harness.environment import CPU
from harness.errors import UsageError
from harness.fuzz import FuzzRequest, fuzz
from harness.generate import as_suite, random_case, shrunk, simpler_cases
from harness.inputs import LAYOUTS, InputSpec, make_inputs
from harness.reader import read_records
from harness.run import RunRequest, run
from harness.suites import Case, load_suite

from .fakes import FakePort


def cases(count: int, *, small: bool = True, seed: int = 0) -> list[Case]:
    rng = random.Random(seed)
    return [random_case(rng, f"case-{i}", small=small) for i in range(count)]


@pytest.fixture
def fake_port(monkeypatch: pytest.MonkeyPatch) -> FakePort:
    """What `common.port` gives for every name."""
    port = FakePort()
    port.name = "triton"  # type: ignore[misc]
    monkeypatch.setattr(common, "port", lambda name: port)
    return port


def test_a_seed_gives_the_same_problems() -> None:
    assert cases(30) == cases(30)
    assert cases(30) != cases(30, seed=1)


@pytest.mark.parametrize("small", [True, False])
def test_random_problems_cover_the_contract(small: bool) -> None:
    made = cases(600, small=small)
    problems = [case.problem for case in made]
    assert {p.dtype for p in problems} == set(DTYPE_NAMES)
    assert {p.head_dim for p in problems} == set(range(16, 257, 8))
    assert {case.inputs.layout for case in made} == set(LAYOUTS)
    assert {case.inputs.layout_do for case in made} >= set(LAYOUTS) - {"bnd"}
    assert {p.mask.corner for p in problems if not p.mask.is_full} == {"bottom_right", "top_left"}
    for feature in (
        lambda p: p.mask.is_full,
        lambda p: p.mask == Mask.causal(),
        lambda p: p.mask.left is not None and p.mask.right is not None,
        lambda p: p.mask.left is not None and p.mask.right is None,
        lambda p: p.mask.has_unseeing_rows(p.len_q, p.len_k),
        lambda p: p.group > 1 and p.heads_kv > 1,
        lambda p: p.heads_q > p.heads_kv == 1,
        lambda p: p.len_q > p.len_k,
        lambda p: p.len_q < p.len_k,
        lambda p: 0 in (p.batch, p.len_q, p.len_k),
        lambda p: p.scale > 1,
        lambda p: p.scale < 0.01,
    ):
        assert any(map(feature, problems))
    assert any(case.inputs.planted_max for case in made)
    assert max(p.len_q for p in problems) > (150 if small else 1000)


def test_random_inputs_can_be_made() -> None:
    for case in cases(150):
        inputs = make_inputs(case.problem, case.inputs, seed=0, device=torch.device("cpu"))
        assert inputs.q.isfinite().all()


def test_what_fails_is_shrunk_to_what_it_fails_for() -> None:
    problem = Problem(2, 6, 2, 130, 97, 136, torch.bfloat16, Mask(40, 3, "top_left"), 0.3)
    case = Case("x", problem, InputSpec(layout="bshd", scale_v=3.0), "")

    def fails(tried: Case) -> bool:
        return tried.problem.head_dim > 64 and tried.problem.group > 1 and tried.inputs.scale_v == 3

    small = shrunk(case, fails, tries=200)
    assert fails(small)
    assert not any(fails(simpler) for simpler in simpler_cases(small))
    assert small.problem == Problem(1, 2, 1, 1, 1, 72, torch.bfloat16)
    assert small.inputs == InputSpec(scale_v=3.0)


def test_shrinking_ends() -> None:
    asked = []
    shrunk(cases(1)[0], lambda case: bool(asked.append(case)) or True, tries=5)
    assert len(asked) <= 6


def test_a_case_comes_back_from_its_suite(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for case in cases(200):
        path.write_text(as_suite(case, "found"))
        for small in (True, False):
            (again,) = load_suite(str(path), small=small).cases
            assert again == case


def test_a_fault_is_found_shrunk_and_told_as_a_command_that_repeats_it(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_port.fault = "wrong corner"
    records = tmp_path / "x.jsonl"
    request = FuzzRequest(("triton",), isolated=False, most=40, minutes=5, seed=3, folder=tmp_path, json=records)
    assert fuzz(request, CPU) == 1
    out = capsys.readouterr().out
    found = sorted(tmp_path.glob("fuzz-3-*-triton.yaml"))
    assert len(found) == 3  # the others are only counted
    for path in found:
        (case,) = load_suite(str(path), small=True).cases
        assert case.problem.len_q != case.problem.len_k
        assert max(case.problem.len_q, case.problem.len_k) <= 4
        assert (case.problem.batch, case.problem.heads_q, case.problem.head_dim) == (1, 1, 16)
        assert f"harness run --impl triton --suite {path} --seed 3 --no-timing" in out
        assert run(RunRequest(("triton",), suite=str(path), seed=3, isolated=False), CPU) == 1
        assert "triton: 2 checks of 1 problems: 0 pass, 2 fail" in capsys.readouterr().out
    assert len({r["case"] for r in read_records(records, ("check",))}) == 40


def test_no_fault_is_no_find(fake_port: FakePort, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    request = FuzzRequest(("triton",), isolated=False, most=25, minutes=5, folder=tmp_path)
    assert fuzz(request, CPU) == 0
    assert "25 random problems on ada path on the CPU, seed 0" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_wrong_usage_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no folder"):
        fuzz(FuzzRequest(("reference",), folder=tmp_path / "file"), CPU)


def test_the_folder_of_failing_cases_is_made(fake_port: FakePort, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cases"
    assert fuzz(FuzzRequest(("triton",), isolated=False, most=1, folder=folder), CPU) == 0
    assert folder.is_dir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="every problem would be compiled for the card")
def test_a_minute_on_the_cpu_finds_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fuzz", "--impl", "reference,triton", "--minutes", "1", "--seed", "0", "--out", str(tmp_path)])
    told = capsys.readouterr()
    assert stop.value.code == 0, told.out + told.err
    assert " random problems on ada path on the CPU, seed 0" in told.out
