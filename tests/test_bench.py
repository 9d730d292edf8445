"""`harness bench`, with a clock of our own: who is timed, what the tables say, and what a port beside itself gives."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common import Port, Problem, Unsupported
from harness import jobs
from harness.baselines import Baseline
from harness.bench import CACHES, BenchRequest, _caches, bench
from harness.bench_tables import across_tables, bench_tables
from harness.cli import main
from harness.environment import CPU, Environment
from harness.errors import UsageError
from harness.isolation import Worker
from harness.published import record_tables
from harness.reader import read_records
from harness.session import Session
from harness.suites import load_suite
from reference.port import ReferencePort

from .fakes import FakePort
from .test_doctor import rows
from .test_timing import FakeStopwatch

MS = {"triton": 1.0, "triton#2": 1.0, "reference": 4.0, "sdpa_flash": 2.0, "sdpa_math": 8.0}


@pytest.fixture(autouse=True)
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> FakeStopwatch:
    """A card that is none: SDPA's flash and math run on the CPU, FlexAttention says that it cannot."""
    watch = FakeStopwatch(MS)

    def unsupported(self: Baseline, problem: Problem, target: object) -> str | None:
        return None if self.name.startswith("sdpa") else "no card to compile for"

    monkeypatch.setattr(Environment, "has_gpu", True)
    monkeypatch.setattr(Baseline, "unsupported", unsupported)
    monkeypatch.setattr(jobs, "_stopwatch", lambda device: watch)
    return watch


def ports(fault: str = "", after: Callable | None = None) -> Callable[[str], Port]:
    """The reference, a fake as `triton`, and nothing else."""
    fake, reference = FakePort(fault, after), ReferencePort()
    fake.name = "triton"  # type: ignore[misc]

    def open_port(name: str) -> Port:
        if name == "cute":
            raise Unsupported("the cute port is on holiday")
        return fake if name == "triton" else reference

    return open_port


def request(*impls: str, **options: object) -> BenchRequest:
    common = {"only": "scale", "isolated": False, "rounds": 8, "baselines": ("sdpa_flash", "sdpa_math", "flex")}
    return BenchRequest(impls or ("triton", "reference"), **common | options)  # type: ignore[arg-type]


def table(out: str, title: str) -> dict[str, list[str]]:
    """The rows of the table whose title begins so, by their first cell."""
    return rows(out.partition(title)[2].partition("\n\n")[0])


def test_everybody_is_timed_together_and_told_beside_their_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    assert bench(request(json=path), CPU, ports()) == 0
    out = capsys.readouterr().out
    columns, cells = table(out, "triton forward and backward in one launch")["B,H,D"], "1,2,64"
    row = dict(zip(columns, table(out, "triton forward and backward in one launch")[cells], strict=True))
    assert 150 < float(row["% of SDPA flash"]) < 260
    assert (row["host µs"], row["MHz"], row["throttled"], row["check"]) == ("10", "1500", "0/8", "pass")
    across = table(out, "All forward, ")
    assert across["B,H,D"][3:] == ["triton", "reference", "SDPA flash", "SDPA math", "FlexAttention"]
    assert [cell.split()[1] for cell in across[cells][3:7]] == ["pass"] * 4
    assert across[cells][7] == "no card to compile for"
    assert "FLOPs: forward 4·B·H·D" in out
    records = read_records(path, ("check",))
    assert [(r["port"], r["direction"]) for r in records] == [
        (port, span) for span in ("forward", "backward", "both") for port in ("triton", "reference")
    ]
    assert set(records[0]["samples"][0]["ms"]) == {"triton", "reference", "sdpa_flash", "sdpa_math"}
    assert set(records[4]["errors"]) == {"o", "lse", "dq", "dk", "dv"}
    assert records[4]["flops"] == records[0]["flops"] + records[2]["flops"]
    assert [t.title for t in record_tables(records)] == [t.title for t in bench_tables(records, {})]


def test_records_of_runs_with_other_baselines_make_one_table_across(tmp_path: Path) -> None:
    paths = {port: tmp_path / f"{port}.jsonl" for port in ("triton", "reference")}
    few = {"spans": ("forward",), "baselines": ("sdpa_flash",)}
    assert bench(request("triton", json=paths["triton"], **few), CPU, ports()) == 0
    assert bench(request("reference", json=paths["reference"], spans=("forward",)), CPU, ports()) == 0
    records = [record for path in paths.values() for record in read_records(path, ("check",))]
    (table,) = across_tables(records, {})
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert [row[name].split()[-1] for name in ("triton", "reference", "SDPA flash", "SDPA math")] == ["pass"] * 4
    assert all(row[name][0].isdigit() for name in ("triton", "reference", "SDPA flash", "SDPA math"))


def test_a_port_beside_itself_is_as_fast_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(request("triton", "triton", spans=("forward",), rounds=40), CPU, ports()) == 0
    itself = table(capsys.readouterr().out, "A port beside itself")
    assert itself["triton#2"][-1] == "yes"
    assert 90 < float(itself["triton#2"][5]) < 110


def test_what_failed_its_check_is_not_timed_and_the_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(request(spans=("backward",)), CPU, ports("delta without dlse")) == 1
    across = table(capsys.readouterr().out, "All backward, ")
    assert across["1,2,64"][3].startswith("FAIL")
    assert across["1,2,64"][4].endswith(" pass")


def test_a_missing_port_is_a_column_of_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(request("reference", "cute", spans=("forward",)), CPU, ports()) == 2
    out, err = capsys.readouterr()
    assert table(out, "All forward")["1,2,64"][4] == "the cute port is on holiday"
    assert re.fullmatch(
        r"harness: the cute port is on holiday\n(harness: timing 1 of 1 scale \S+(, after \d+ s)?\n)+", err
    )


def test_who_does_not_fit_beside_the_others_is_dropped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = jobs._ready

    def too_large(trial: object, span: str, device: torch.device) -> object:
        if trial._port.name == "sdpa_math":  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ready(trial, span, device)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "_ready", too_large)
    assert bench(request(spans=("forward",)), CPU, ports()) == 0
    across = table(capsys.readouterr().out, "All forward")["1,2,64"]
    assert across[6] == "not timed, it raised OutOfMemoryError: CUDA out of memory"
    assert across[3].endswith(" pass")


def test_it_goes_on_from_the_records_of_an_interrupted_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, half, rest = tmp_path / "x.jsonl", tmp_path / "x.jsonl.partial", tmp_path / "rest.jsonl"
    asked = {"only": "corners", "skip": "topleft", "spans": ("forward",)}
    assert bench(request("triton", json=whole, **asked), CPU, ports()) == 0
    before = capsys.readouterr().out
    lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == 3
    half.write_text("".join(lines[:2]))
    checked = []
    check = jobs.check
    monkeypatch.setattr(jobs, "check", lambda *arguments: checked.append(arguments[2].problem.id) or check(*arguments))
    assert bench(request("triton", json=rest, resume=half, **asked), CPU, ports()) == 0
    assert set(checked) == {json.loads(lines[2])["problem"]["id"]}
    assert rest.read_text().splitlines(keepends=True)[:2] == lines[:2]
    assert capsys.readouterr().out.count("\n") == before.count("\n")
    # Another seed makes other inputs: nothing of it can be kept.
    text = whole.read_text()
    with pytest.raises(UsageError, match=r"none of the 3 .* \(3 of other problems, inputs or another seed\)"):
        bench(request("triton", json=whole, resume=whole, seed=1, **asked), CPU, ports())
    assert whole.read_text() == text


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Environment, "has_gpu", False)
    with pytest.raises(UsageError, match="takes a GPU"):
        bench(request(), CPU, ports())
    for wrong in (["--direction", "sideways"], ["--baseline", "sdpa_flsh"]):
        monkeypatch.setattr(Environment, "has_gpu", "baseline" in wrong[0])
        with pytest.raises(SystemExit) as stop:
            main(["bench", "--impl", "reference", *wrong])
        assert stop.value.code == 2
        assert wrong[0] in capsys.readouterr().err


def test_compile_seconds_are_told_where_they_are_known(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert bench(request("triton", json=path, spans=("forward",)), CPU, ports()) == 0
    (record,) = read_records(path, ("check",))
    assert record["compile_s"] is None  # there was no other process
    timed = record | {"compile_s": {"cold": 12.5, "warm": 0.25}}
    row = dict(zip(bench_tables([timed], {})[0].columns, bench_tables([timed], {})[0].rows[0], strict=True))
    assert (row["cold s"], row["warm s"]) == ("12.50", "0.25")


def test_compilers_find_their_caches_empty() -> None:
    with _caches(request()) as variables:
        worker = Worker(environment=variables)
        try:
            assert {name: worker.call(os.getenv, name) for name in CACHES} == variables
        finally:
            worker.close()
    with _caches(request(compiles=False)) as none:
        assert none == {}


def test_kernels_are_compiled_ahead_unless_that_is_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[Session] = []
    monkeypatch.setattr("harness.bench.compile_ahead", ahead.append)
    assert bench(request("triton", spans=("forward",)), CPU, ports()) == 0
    assert not ahead
    assert bench(request("triton", spans=("forward",), compiles=False), CPU, ports()) == 0
    assert [list(session.ports) for session in ahead] == [["triton"]]


def test_a_first_call_is_timed_alone() -> None:
    (case,) = load_suite("quick", small=True).only("scale").cases
    setting = jobs.Setting(CPU, CPU.native, open_port=ports())
    assert jobs.first_call(setting, "triton", case, "forward") > 0
    assert jobs.first_call(setting, "triton", case, "backward") > 0


@pytest.mark.gpu
def test_on_a_card_a_port_beside_itself_and_the_forced_backends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.undo()
    path = tmp_path / "x.jsonl"
    only = ["--suite", "walkthrough", "--only", "n1024-d64-bf16-causal", "--json", str(path)]
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--impl", "triton,triton", "--baseline", "sdpa_flash,sdpa_cudnn,sdpa_math", *only])
    assert stop.value.code == 0
    records = read_records(path, ("check",))
    assert {r["direction"] for r in records} == {"forward", "backward", "both"}
    for r in records:
        assert {"triton", "triton#2", "sdpa_flash"} <= set(r["samples"][0]["ms"])
        assert r["compile_s"] is not None
    assert "A port beside itself" in capsys.readouterr().out
