"""`harness matrix`: ports against the oracle, and against each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common import Port, Unsupported
from harness.cli import main
from harness.environment import CPU
from harness.errors import UsageError
from harness.jobs import Setting, Stand, disagreements
from harness.matrix import matrix
from harness.published import with_tables
from harness.session import Request
from harness.suites import load_suite
from reference.port import ReferencePort

from . import unruly
from .fakes import FakePort
from .test_doctor import rows


class Named(FakePort):
    """A fake under the name of a port there is."""

    def __init__(self, name: str, fault: str = "", after: Callable | None = None) -> None:
        super().__init__(fault, after)
        self.name = name  # type: ignore[misc]


def ports(*, triton: Port | None = None) -> Callable[[str], Port]:
    """The reference, a fake as `triton`, and nothing else."""
    fake = triton or Named("triton")
    reference = ReferencePort()

    def open_port(name: str) -> Port:
        if name not in ("triton", "reference"):
            raise Unsupported(f"the {name} port is on holiday")
        return fake if name == "triton" else reference

    return open_port


def request(*impls: str, **options: object) -> Request:
    return Request(impls, **{"only": "scale", "isolated": False, **options})  # type: ignore[arg-type]


def test_ports_that_are_right_are_within_a_few_units_of_each_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    assert matrix(request("reference", "triton", json=path), CPU, all_asked=True, open_port=ports()) == 0
    out = capsys.readouterr().out
    first, second, third = out.split("\n\n")[:3]
    assert rows(first)["scale"][0] == "b1-h1-n40-d64-bf16-full-s0.05"
    assert all(float(cell.split()[0]) < 1 for cell in rows(first)["scale"][1:])
    assert rows(second)["reference"] == ["–", rows(second)["triton"][0]]
    assert 0 < float(rows(second)["triton"][0].split()[0]) < 6
    assert [line.split("|")[1].strip() for line in third.splitlines()[3:8]] == ["o", "lse", "dq", "dk", "dv"]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["kind"] for r in records] == ["check"] * 4 + ["disagreement"] * 5
    assert records[4]["ports"] == ["reference", "triton"]
    assert records[4]["sources"]["reference"] == records[0]["sources"]


def test_records_of_a_matrix_are_counted_by_suite_and_port(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    fake = Named("triton", "delta without dlse")
    assert matrix(request("reference", "triton", json=path), CPU, all_asked=True, open_port=ports(triton=fake)) == 1
    text = with_tables(f"<!-- matrix: {path} -->\n<!-- /matrix -->")
    assert "| quick | reference | 1 | 2 | 0 | 0 | 0." in text
    assert "| quick | triton | 1 | 1 | 1 | 0 | " in text
    assert "Ports beside each other: the largest disagreement" in text
    matrix(request("reference", json=path), CPU, all_asked=True, open_port=ports())
    with pytest.raises(UsageError, match=r"x\.jsonl has no checks of several ports"):
        with_tables(f"<!-- matrix: {path} -->\n<!-- /matrix -->")


def test_a_wrong_element_is_a_fail_and_the_place_where_ports_disagree(capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(direction: str, outputs: tuple, inputs: tuple) -> tuple:
        if direction == "backward":
            outputs[1][0, 0, 37, 5] += 3
        return outputs

    fake = Named("triton", after=spoil)
    assert matrix(request("reference", "triton"), CPU, all_asked=True, open_port=ports(triton=fake)) == 1
    out = capsys.readouterr().out
    assert rows(out)["scale"][2].startswith("FAIL ")
    assert rows(out)["scale"][2].endswith(" dk")
    assert "FAIL triton scale b1-h1-n40-d64-bf16-full-s0.05 backward: dk: error" in out
    (line,) = (line for line in out.splitlines() if line.startswith("reference, triton") and "| dk " in line)
    assert "b 0, h 0, row 37, column 5" in line
    assert "reference: row 37 of key tile 0 (128 rows); triton: row 5 of key tile 1 (32 rows)" in line


def test_units_are_the_error_of_the_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = load_suite("quick", small=True).only("scale").cases
    shift = 0.5

    def spoil(direction: str, outputs: tuple, inputs: tuple) -> tuple:
        outputs[1][0, 0, 7] += shift
        return outputs

    exact, shifted = Named("triton"), Named("reference", after=spoil)
    setting = Setting(CPU, CPU.native, open_port=lambda name: exact if name == "triton" else shifted)
    _, lse = disagreements(setting, ("triton", "reference"), case, "forward")
    unit = Stand.of(setting, case).truth.of("forward")["lse"].unit
    assert (lse.tensor, lse.index) == ("lse", (0, 0, 7))
    assert lse.difference == pytest.approx(shift, rel=1e-3)
    assert lse.units == pytest.approx(shift / float(unit[0, 0, 0]), rel=1e-3)
    assert lse.values[1] - lse.values[0] == pytest.approx(shift, rel=1e-3)


def test_an_element_that_one_port_does_not_write_is_infinitely_far(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Named("triton", "one output tile unwritten")
    assert matrix(request("reference", "triton"), CPU, all_asked=True, open_port=ports(triton=fake)) == 1
    assert "inf o" in capsys.readouterr().out


def test_a_missing_port_is_an_empty_column_and_a_note_of_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for all_asked, status in ((False, 0), (True, 2)):
        assert matrix(request("reference", "cute"), CPU, all_asked=all_asked, open_port=ports()) == status
        out, err = capsys.readouterr()
        assert rows(out)["scale"][2] == "–"
        assert out.splitlines().count("the cute port is on holiday") == 1
        assert err.startswith("harness: the cute port is on holiday\n")
        assert "beside each other" not in out


def test_problems_without_elements_are_nowhere_apart(capsys: pytest.CaptureFixture[str]) -> None:
    asked = request("reference", "triton", suite="hard", only="empty-batch")
    assert matrix(asked, CPU, all_asked=True, open_port=ports()) == 0
    assert capsys.readouterr().out.count("nowhere apart") == 5


def test_what_a_port_does_not_support_is_said_and_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    class Windowless(Named):
        def unsupported(self, problem, target):  # type: ignore[no-untyped-def]
            return "no windows today" if problem.mask.left is not None else None

    asked = request("reference", "triton", only="window")
    assert matrix(asked, CPU, all_asked=True, open_port=ports(triton=Windowless("triton"))) in (0, 2)
    out = capsys.readouterr().out
    assert "no windows today" in {cell for row in out.splitlines() for cell in (c.strip() for c in row.split("|"))}


def test_a_port_that_faults_is_compared_where_it_does_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    asked = request("triton", "reference", only="corners", isolated=True, json=path)
    assert matrix(asked, CPU, all_asked=True, open_port=unruly.one_of_two_segfaults) == 1
    assert "FAIL its process died of SIGSEGV" in capsys.readouterr().out
    apart = [r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == "disagreement"]
    assert {r["problem"]["mask"]["corner"] for r in apart} == {"bottom_right"}
    assert all(r["units"] == 0 for r in apart)  # it is the reference twice


@pytest.mark.skipif(torch.cuda.is_available(), reason="every port there is would compile for the card")
def test_the_command_takes_all_ports_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["matrix", "--only", "one-by-one", "--suite", "hard", "--no-isolate"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert out.splitlines()[1].split("|")[2].strip() == "reference"
    with pytest.raises(SystemExit) as stop:
        main(["matrix", "--impl", "reference,nothing"])
    assert stop.value.code == 2


def test_it_goes_on_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, again = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    assert matrix(request("reference", "triton", json=whole), CPU, all_asked=True, open_port=ports()) == 0
    monkeypatch.setattr("harness.jobs.check", None)
    resumed = request("reference", "triton", json=again, resume=whole)
    assert matrix(resumed, CPU, all_asked=True, open_port=ports()) == 0
    assert again.read_text() == whole.read_text()
