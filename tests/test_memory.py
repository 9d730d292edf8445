"""`harness memory`: what is counted, and that running out of memory is a cell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common import Mask, Problem
from harness import jobs
from harness.baselines import Baseline
from harness.cli import main
from harness.environment import CPU, Environment
from harness.errors import UsageError
from harness.memory import MemoryRequest, formula, held_before, memory
from harness.reader import read_records

from .test_bench import ports
from .test_doctor import rows

MB = 10**6


@pytest.fixture(autouse=True)
def _a_card_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes what it returns and a megabyte; the plain attention has only the memory for short problems."""
    monkeypatch.setattr(Environment, "has_gpu", True)
    monkeypatch.setattr(Baseline, "unsupported", lambda self, problem, target: None)
    plain = jobs.naive_launch

    def naive(problem: Problem, *arguments: object) -> object:
        if problem.len_q > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48 GiB")
        return plain(problem, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "naive_launch", naive)
    monkeypatch.setattr(jobs, "_height", lambda launch, device: sum(t.nbytes for t in launch()) + MB)


def request(*impls: str, **options: object) -> MemoryRequest:
    common = {"only": "d64-bf16-causal-topleft", "skip": "window", "isolated": False, "baselines": ("sdpa_math",)}
    return MemoryRequest(impls or ("triton",), **common | options)  # type: ignore[arg-type]


def test_peak_and_extra_stand_beside_the_formula_and_out_of_memory_is_a_cell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    assert memory(request(json=path, only="corners", skip="bf16-causal-topleft"), CPU, ports()) == 0
    records = read_records(path, ("memory",))
    assert {r["contestant"] for r in records} == {"naive", "triton", "sdpa_math"}
    ours = [r for r in records if r["contestant"] == "triton"]
    assert all(r["verdict"] == "pass" for r in ours)
    assert all(r["extra_bytes"] == MB for r in ours if r["direction"] == "forward")  # o and lse are in the formula
    naive = {r["problem"]["len_q"]: r for r in records if r["contestant"] == "naive" and r["direction"] == "forward"}
    assert (naive[113]["peak_bytes"], naive[113]["reason"]) == (None, "out of memory")
    assert naive[5]["peak_bytes"] > naive[5]["formula_bytes"]
    out = capsys.readouterr().out
    assert "Memory forward, ada path on the CPU, suite quick" in out
    assert rows(out.partition("\n\n")[0])["1,2,64"][3:6] != ["out of memory"] * 3
    assert "out of memory" in out
    assert " (+1.0) pass" in out


def test_tables_shows_the_records_as_the_command_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    memory(request(json=path, only="corners"), CPU, ports())
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["tables", str(path)])
    assert stop.value.code == 0
    assert capsys.readouterr().out == printed


def test_what_failed_its_check_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory(request(only="scale"), CPU, ports("scale applied twice")) == 1
    assert "FAIL: o: error" in capsys.readouterr().out


def test_the_formula_counts_every_tensor_once() -> None:
    problem = Problem(2, 8, 2, 100, 60, 64, torch.bfloat16, Mask.causal())
    q, kv, lse = 2 * 8 * 100 * 64 * 2, 2 * 2 * 60 * 64 * 2, 2 * 8 * 100 * 4
    assert formula(problem, "forward") == 2 * q + 2 * kv + lse
    assert formula(problem, "backward") == formula(problem, "both") == 4 * q + 4 * kv + 2 * lse
    assert held_before(problem, "forward") == q + 2 * kv
    assert held_before(problem, "backward") == 3 * q + 2 * kv + lse


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "has_gpu", False)
    with pytest.raises(UsageError, match="memory of a GPU"):
        memory(request(), CPU, ports())


@pytest.mark.gpu
def test_on_a_card_no_port_holds_the_scores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    path = tmp_path / "x.jsonl"
    arguments = ["--suite", "long", "--only", "n4096", "--baseline", "sdpa_flash", "--json", str(path)]
    with pytest.raises(SystemExit) as stop:
        main(["memory", "--impl", "triton", *arguments])
    assert stop.value.code == 0
    for r in read_records(path, ("memory",)):
        scores = 4 * 12 * 4096 * 4096 * 2
        assert (r["extra_bytes"] > scores / 2) == (r["contestant"] == "naive"), r
