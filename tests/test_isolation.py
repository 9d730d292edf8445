"""A kernel that faults, hangs or spoils the device costs its own cell, and the run goes on."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common import Port
from harness.environment import CPU, prepare
from harness.isolation import Lost, TimedOut, Worker
from harness.jobs import Setting, Stand
from harness.run import RunRequest, run
from harness.session import GIVE_UP_AFTER, Session
from harness.suites import Suite, load_suite

from . import unruly

ROOT = Path(__file__).parent.parent


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(limit_s=3, threads=1)
    yield worker
    worker.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int) -> bool:
    """Whether the process ends within a few seconds."""
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_alive(pid)


def test_a_worker_outlives_what_raises_and_is_replaced_when_it_dies(worker: Worker) -> None:
    assert worker.call(math.sqrt, 4.0) == 2
    first = worker.call(os.getpid)
    assert first != os.getpid()
    with pytest.raises(Lost, match="raised ValueError: "):
        worker.call(math.sqrt, -1.0)
    assert worker.call(os.getpid) == first
    with pytest.raises(Lost, match="its process died of SIGSEGV"):
        worker.call(unruly.segfault)
    with pytest.raises(Lost, match="its process ended with status 7"):
        worker.call(unruly.leave)
    with pytest.raises(Lost, match="took longer than 3 s and was stopped"):
        worker.call(unruly.hang)
    assert worker.call(os.getpid) != first


def test_a_closed_worker_is_gone_and_takes_no_calls(worker: Worker) -> None:
    pid = worker.call(os.getpid)
    worker.close()
    assert gone(pid)
    with pytest.raises(Lost):
        worker.call(os.getpid)
    with pytest.raises(Lost, match="its worker is closed"):
        worker.call(os.getpid)


def test_a_worker_ends_with_its_caller() -> None:
    program = (
        "import os, signal; from harness.isolation import Worker; w = Worker();"
        "print(w.call(os.getpid), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout))


def test_what_a_case_needs_is_made_once_for_all_calls_about_it() -> None:
    first, second = load_suite("quick", small=True).only("corners").cases[:2]
    setting = Setting(CPU, CPU.native)
    stand = Stand.of(setting, first)
    assert Stand.of(*pickle.loads(pickle.dumps((setting, first)))) is stand  # as every call brings them
    assert stand.trial("reference") is stand.trial("reference")
    assert Stand.of(setting, second) is not stand
    assert Stand.of(setting, first) is not stand


def run_unruly(open_port: Callable[[str], Port], path: Path, **options: object) -> dict[tuple[str, str], str]:
    """Runs the corners of the quick suite; what became of each, by mask and direction: a verdict or a reason."""
    here = prepare() if torch.cuda.is_available() else CPU
    request = RunRequest(("reference",), only="corners", json=path, timed=False, **options)  # type: ignore[arg-type]
    assert run(request, here, open_port) == 1
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["case"] for r in records} == {"corners"}
    return {(r["problem"]["mask"]["corner"], r["direction"]): r["reason"] or r["verdict"] for r in records}


def test_a_fault_costs_its_own_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_unruly(unruly.segfaults_in_forward, tmp_path / "x.jsonl") == {
        ("bottom_right", "forward"): "pass",
        ("bottom_right", "backward"): "pass",
        ("top_left", "forward"): "its process died of SIGSEGV",
        ("top_left", "backward"): "not run: the forward it starts from failed",
    }
    assert "| FAIL: its process died of SIGSEGV" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("open_port", "reason"),
    [
        (unruly.hangs_in_backward, "took longer than 5 s and was stopped"),
        (unruly.leaves_in_backward, "its process ended with status 7"),
    ],
)
def test_a_backward_that_is_lost_leaves_its_forward(
    open_port: Callable[[str], Port], reason: str, tmp_path: Path
) -> None:
    assert run_unruly(open_port, tmp_path / "x.jsonl", limit_s=5) == {
        ("bottom_right", "forward"): "pass",
        ("bottom_right", "backward"): "pass",
        ("top_left", "forward"): "pass",
        ("top_left", "backward"): reason,
    }


def test_a_port_that_hangs_case_after_case_is_given_up() -> None:
    class Hanging:
        calls = 0

        def call(self, *arguments: object) -> None:
            self.calls += 1
            raise TimedOut("took longer than 300 s and was stopped")

    cases = load_suite("quick", small=True).cases[: GIVE_UP_AFTER + 2]
    session = Session(RunRequest(("reference",)), CPU, Suite("quick", "", True, True, cases), CPU.native)
    hanging = Hanging()
    checks = [list(session.check(hanging, "reference", case)) for case in cases]  # type: ignore[arg-type]
    assert hanging.calls == GIVE_UP_AFTER
    assert [forward.reason for forward, _ in checks] == [
        *["took longer than 300 s and was stopped"] * GIVE_UP_AFTER,
        *["not run: the 3 checks before it took too long"] * 2,
    ]
    assert {check.verdict for both in checks for check in both} == {"fail"}
    rows = [session.time(hanging, ["reference"], case, "forward", 2).lost for case in cases]  # type: ignore[arg-type]
    assert hanging.calls == 2 * GIVE_UP_AFTER
    assert rows[-1] == "the 3 rows before it took too long"


@pytest.mark.gpu
def test_a_poisoned_context_is_left_behind(tmp_path: Path) -> None:
    found = run_unruly(unruly.poisons_in_forward, tmp_path / "x.jsonl")
    assert "device-side assert" in found.pop(("top_left", "forward"))
    assert found == {
        ("bottom_right", "forward"): "pass",
        ("bottom_right", "backward"): "pass",
        ("top_left", "backward"): "not run: the forward it starts from failed",
    }


def test_an_interrupt_ends_the_workers_whatever_they_do(tmp_path: Path) -> None:
    program = (
        "from harness.cli_options import piped; from harness.environment import CPU;"
        "from harness.run import RunRequest, run; from tests import unruly;"
        "asked = RunRequest(('reference',), only='corners');"
        "raise SystemExit(piped(lambda: run(asked, CPU, unruly.hangs_in_backward)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    children: list[int] = []
    while not children and time.monotonic() < deadline:
        time.sleep(0.2)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "harness: interrupted"
    assert children
    assert all(gone(pid) for pid in children)
