"""`harness compile`: what it builds, and what it calls a failure."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import yaml

from common import Build, Direction, Port, Problem, Switches, Target, Tile, Unsupported
from common.target import TARGETS
from harness.cli import main
from harness.compile import CompileRequest, compile_all
from harness.compilers import compiler_by, nvcc_version
from harness.environment import CPU
from harness.errors import UsageError
from harness.isolation import Here, Worker
from harness.jobs import Setting, build
from harness.options import Directions
from harness.published import record_tables
from harness.reader import read_records
from harness.spills import PATH, SLACK, Built, Spills
from harness.tables import as_text

from .fakes import FakePort
from .test_doctor import rows


class Builder(FakePort):
    """Builds one kernel a direction without a compiler."""

    def __init__(self, shared: int = 1000, spills: int = 0, refuses: str = "") -> None:
        super().__init__()
        self.shared, self.spills, self.refuses = shared, spills, refuses

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        return "no such chip" if target.name == "blackwell" else None

    def _build(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches
    ) -> list[Build]:
        if self.refuses:
            raise Unsupported(self.refuses)
        about = f"{direction}_kernel", target.name, Tile(64, 64)
        return [Build(*about, self.shared, 99, self.spills, ("mma.sync",), 1.5, False, "the code")]


def compiled(port: Port, path: Path, name: str = "triton", **options: object) -> int:
    """The status of compiling that port under a name, with the recorded spills in the folder of path."""
    about = {"targets": ("ada", "hopper"), "head_dims": (64,), "isolated": False, "json": path}
    request = CompileRequest((name,), recorded=path.with_name("spills.yaml"), **about | options)  # type: ignore[arg-type]
    return compile_all(request, all_asked=True, open_port=lambda name: port)


def test_every_target_and_direction_is_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert compiled(Builder(), path, masks=("causal", "full")) == 0
    out = capsys.readouterr().out
    records = read_records(path, ("build",))
    assert len(records) == len([line for line in out.splitlines() if line.endswith(" pass")]) == 8
    assert {(r["target"]["name"], r["direction"], r["verdict"]) for r in records} == {
        (target, direction, "pass") for target in ("ada", "hopper") for direction in ("forward", "backward")
    }
    (again,) = record_tables(records)
    assert all(line.rstrip() in out for line in as_text(again).splitlines()[1:])
    built = {"shared": 1000, "registers": 99, "spills": 0, "seconds": 1.5, "cached": False}
    assert built.items() <= records[0]["build"].items()
    assert "harness compile --record" in out


def test_too_much_shared_memory_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert compiled(Builder(shared=101_377), tmp_path / "x.jsonl") == 1
    out = capsys.readouterr().out
    assert out.count("FAIL: takes 101377 B of shared memory; sm_89 gives 101376 B") == 2  # and hopper has room


def test_more_spills_than_recorded_fail_and_are_recorded_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    assert compiled(Builder(spills=8), path) == 0  # nothing is recorded
    assert compiled(Builder(spills=8), path, record=True) == 0
    capsys.readouterr()
    assert compiled(Builder(spills=16), path) == 1
    assert capsys.readouterr().out.count("FAIL: spills 16 B a thread where it was 8 B") == 4
    assert compiled(Builder(spills=4), path) == 0
    assert {r["spills_before"] for r in read_records(path, ("build",))} == {8}


def test_what_a_port_does_not_do_is_no_failure_and_what_does_not_compile_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    assert compiled(Builder(), path, targets=("ada", "blackwell")) == 0
    assert "no such chip" in capsys.readouterr().out
    assert compiled(Builder(), path, targets=("blackwell",)) == 2
    assert compiled(Builder(refuses="nvcc says no"), path) == 1
    assert "FAIL: nvcc says no" in capsys.readouterr().out


def test_what_there_was_no_time_for_is_said_and_is_no_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    assert compiled(Builder(), path, minutes=0) == 2
    out, err = capsys.readouterr()
    assert out.count("not begun: 0 minutes were over") == 4
    assert "4 were not begun: --minutes gives more than 0." in out
    assert "FAIL" not in out
    assert err.splitlines()[-1] == "harness: 4 of 4 builds were not begun within 0 minutes: --minutes gives more"
    assert path.read_text() == ""  # nothing is known of them


def test_tilelang_has_some_slack_because_it_builds_a_kernel_in_several_ways(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for name, statuses in (("triton", (0, 1, 1)), ("tilelang", (0, 0, 1))):
        assert compiled(Builder(spills=96), path, name, record=True) == statuses[0]
        assert compiled(Builder(spills=96 + SLACK["tilelang"]), path, name) == statuses[1]
        assert compiled(Builder(spills=97 + SLACK["tilelang"]), path, name) == statuses[2]


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0", "13.0.88"),
        ("nonsense", None),
    ],
)
def test_spills_of_tilelang_are_told_apart_by_nvcc(told: str, version: str | None, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ncat <<'END'\n{told}\nEND\n")
    nvcc.chmod(0o755)
    assert nvcc_version(str(nvcc)) == version
    assert nvcc_version(None) is nvcc_version(str(tmp_path / "none")) is None
    assert ", nvcc " in compiler_by(Here(), "tilelang")
    assert "," not in compiler_by(Here(), "cute")


def test_a_port_without_kernels_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compile", "--impl", "reference"])
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert rows(out)["reference"] == ["the reference port has no kernels to compile"]
    assert err == "harness: the reference port has no kernels to compile\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"targets": ("volta",)}, "--target must be one of ada"),
        ({"masks": ("round",)}, "--mask must be one of full"),
        ({"head_dims": (12,)}, "--head-dim: head_dim must be a multiple of 8"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_built(options: dict, text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        compiled(Builder(), tmp_path / "x.jsonl", **options)


def test_spills_are_compared_with_the_same_compiler_or_else_with_the_worst(tmp_path: Path) -> None:
    path = tmp_path / "spills.yaml"
    kernel = Built("triton", "triton 3.9.0", "ada", "causal", 64, "dq_kernel", 8)
    spills = Spills(path)
    assert spills.before(kernel) is None
    other = Built(*kernel.key, 128, "dq_kernel", 32)
    spills.record([kernel, other, Built("triton", "triton 3.6.0", "ada", "causal", 64, "dq_kernel", 24)])
    again = Spills(path)
    assert again.before(kernel) == 8
    assert again.before(other) == 32
    assert again.before(Built(*kernel.key, 64, "forward_kernel", 0)) == 0  # built, and spilled nothing
    assert again.before(Built(*kernel.key, 256, "dq_kernel", 0)) is None
    assert again.before(Built("triton", "triton 4.0.0", "ada", "causal", 64, "dq_kernel", 0)) == 24
    again.record([Built(*kernel.key, 64, "dq_kernel", 0)])
    assert Spills(path).before(kernel) == 0
    assert Spills(path).before(other) == 32


def test_the_kept_spills_are_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "spills.yaml"
    path.write_text(PATH.read_text())
    Spills(path).record([])
    assert path.read_text() == PATH.read_text()
    kept = {(entry["port"], entry["target"], entry["mask"]): entry for entry in yaml.safe_load(PATH.read_text())}
    every = set(product(("triton", "tilelang", "cute"), (target.name for target in TARGETS), ("full", "causal")))
    assert set(kept) == every
    assert all({64, 128} <= set(entry["head_dims"]) for entry in kept.values())


def test_a_real_kernel_is_built_in_a_worker_without_its_code() -> None:
    worker = Worker(environment={"TRITON_INTERPRET": "0"})
    try:
        problem = Problem(1, 1, 1, 64, 64, 16)
        (built,) = worker.call(build, Setting(CPU, CPU.native), "triton", problem, Target.named("ada"), "forward")
    finally:
        worker.close()
    assert isinstance(built, Build)
    assert (built.target, built.ptx) == ("ada", "")
    assert "mma.sync" in built.instructions


def test_directions_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert compiled(Builder(), path, directions=Directions.FORWARD) == 0
    assert {r["direction"] for r in read_records(path, ("build",))} == {"forward"}
