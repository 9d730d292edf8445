"""`harness doctor`: what it says of a machine without a GPU, and with packages missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import common
from common import Port, Unsupported
from harness.doctor import doctor
from harness.environment import CPU
from harness.options import Format
from harness.provenance import git_commit, package_versions, sources_hash
from harness.schema import VERSION

from .fakes import FakePort
from .test_cli import harness, skip_without_interpreter


def rows(out: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if "|" in line]
    return {line[0]: line[1:] for line in lines}


def test_it_tells_what_is_installed_and_what_can_run(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    done = harness("doctor", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    skip_without_interpreter(done.stdout)
    found = rows(done.stdout)
    assert found["PyTorch"][0] == torch.__version__
    assert found["card"][0] == "none"
    assert found["triton"][0] == "interpreter"
    assert found["reference"] == ["CPU", ""]
    assert "TRITON_INTERPRET=1" in found["triton"][1]
    assert "compiles" in found["triton"][1]
    assert found["sdpa_flash (baseline)"] == ["no", "SDPA flash needs a CUDA device"]
    report = json.loads(path.read_text())
    assert (report["schema"], report["kind"]) == (VERSION, "doctor")
    assert {finding["what"] for finding in report["ports"]} >= set(common.port_names())


def test_a_missing_package_costs_its_own_port_and_says_what_to_do() -> None:
    done = harness("doctor", blocked=("triton",))
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert found["triton"] == ["no", "the triton port needs triton, which is not installed: pip install triton"]
    assert found["reference"][0] == "CPU"


def test_a_port_that_only_compiles_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class CompileOnly(FakePort):
        name = "tilelang"

        def _build(self, *arguments: object) -> list:  # type: ignore[override]
            return []

        def _forward(self, *arguments: object) -> tuple:  # type: ignore[override]
            raise Unsupported("its kernels need a CUDA device")

    def port(name: str) -> Port:
        if name == "cute":
            raise OSError("libcuda.so.1 is missing\nand more")
        return CompileOnly()

    monkeypatch.setattr(common, "port", port)
    assert doctor(None, Format.TEXT, CPU, isolated=False) == 2
    found = rows(capsys.readouterr().out)
    assert found["tilelang"][0] == "compile only"
    assert "its kernels need a CUDA device" in found["tilelang"][1]
    assert found["cute"] == ["no", "the cute port could not be imported: OSError: libcuda.so.1 is missing"]


@pytest.mark.parametrize(("written", "advice"), [(False, "not needed yet"), (True, "pip install tilelang==0.1.13")])
def test_a_package_is_advised_only_for_a_port_that_is_written(
    written: bool, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.doctor.is_written", lambda name: written)
    monkeypatch.setattr("harness.doctor.package_versions", lambda: dict.fromkeys(package_versions()))
    doctor(None, Format.TEXT, CPU, isolated=False)
    found = rows(capsys.readouterr().out)
    assert found["TileLang"][0] == "missing"
    assert advice in found["TileLang"][1]
    assert ("nvcc" in found) == written


def test_sources_are_hashed_by_content_and_the_commit_is_known() -> None:
    assert sources_hash(common.port("reference")) == sources_hash(common.port("reference"))
    assert sources_hash(common.port("reference")) != sources_hash(FakePort())
    assert set(git_commit()) == {"commit", "dirty"}


def test_a_missing_module_of_ours_is_not_blamed_on_a_package() -> None:
    done = harness("doctor", blocked=("triton_impl.forward",))
    advice = rows(done.stdout)["triton"][1]
    assert "could not be imported" in advice
    assert "pip install" not in advice
