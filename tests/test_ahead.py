"""Kernels are compiled before a run, each once, in processes apart; one that cannot be is left to its check."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from common import Direction, Kernel, Port, Problem, Switches, Target, Tile
from harness import ahead
from harness.ahead import compile_ahead
from harness.environment import CPU, Environment
from harness.isolation import Worker
from harness.run import RunRequest
from harness.session import Session
from reference.port import ReferencePort


@dataclass(frozen=True)
class Note:
    """A kernel whose compiler writes down that it ran, and for what."""

    name: str

    def compile(self, sm: str) -> None:
        if "refused" in self.name:
            raise RuntimeError("no such instruction")
        if "crash" in self.name:
            os.kill(os.getpid(), signal.SIGSEGV)
        with (Path(os.environ["NOTES"]) / f"{self.name} {sm}").open("x") as note:  # not twice
            note.write(str(os.getpid()))


class Slow(ReferencePort):
    """A port with a kernel for each head_dim and form, and some that do not compile."""

    def _kernels(
        self,
        problem: Problem,
        target: Target,
        direction: Direction,
        tile: Tile,
        switches: Switches,
        dlse: bool,
        deterministic: bool,
    ) -> Sequence[Kernel]:
        form = "dlse" if dlse else "deterministic" if deterministic else "plain"
        kernel = Note(f"{direction} d{problem.head_dim} {form}")
        return (kernel, Note("refused"), Note("crash")) if problem.head_dim == 64 else (kernel,)


def slow(name: str) -> Port:
    return Slow()


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.setattr(Environment, "has_gpu", True)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    return tmp_path


def compiled(notes: Path, **options: object) -> tuple[int, set[str]]:
    request = RunRequest(("reference",), target="ada", **options)  # type: ignore[arg-type]
    with Session.open(request, CPU, slow) as session:
        return compile_ahead(session), {note.name for note in notes.iterdir()}


def test_each_kernel_of_a_suite_is_compiled_once_in_processes_apart(notes: Path) -> None:
    count, names = compiled(notes, only="head-dims")
    dims = {name.split()[1] for name in names}
    assert len(dims) > 3
    forms = ("forward {} plain sm_89", "backward {} dlse sm_89", "backward {} deterministic sm_89")
    assert names == {form.format(dim) for form in forms for dim in dims}
    assert count - len(names) in (0, 2)  # those that did not compile, where a head_dim of 64 is among them
    pids = {int((notes / name).read_text()) for name in names}
    assert os.getpid() not in pids


def test_what_does_not_compile_is_left_to_its_check(notes: Path) -> None:
    count, names = compiled(notes, only="gqa")
    assert count == len(names) + 2
    assert "forward d64 plain sm_89" in names


def test_a_few_kernels_are_not_worth_processes(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "WORTH_IT", 6)
    assert compiled(notes, only="gqa") == (0, set())


def test_nothing_is_compiled_ahead_without_a_gpu_or_in_the_harness_itself(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled(notes, only="gqa", isolated=False) == (0, set())
    monkeypatch.setattr(Environment, "has_gpu", False)
    assert compiled(notes, only="gqa") == (0, set())


def test_processes_that_are_there_already_compile_even_a_few_and_stay(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "WORTH_IT", 6)
    request, worker = RunRequest(("reference",), target="ada", only="gqa"), Worker()
    try:
        with Session.open(request, CPU, slow) as session:
            compile_ahead(session, workers=[worker])
        assert worker.call(os.getpid) in {int(note.read_text()) for note in notes.iterdir()}
    finally:
        worker.close()
