"""The command line as a user meets it: exit statuses, one-line errors, records, and plain text in a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import common
from common import Problem
from harness import cli_options, jobs, session
from harness.cli import main
from harness.environment import CPU, Environment
from harness.errors import UsageError
from harness.inputs import make_inputs
from harness.options import Format
from harness.records import RecordFile
from harness.run import RunRequest, run
from harness.schema import VERSION
from harness.tables import Table, as_csv, as_markdown, as_text
from harness.timing import Launch, Sample

from .fakes import FakePort
from .test_timing import FakeStopwatch

ROOT = Path(__file__).parent.parent
ONE_CASE = ("--suite", "quick", "--only", "scale")
MARK = re.compile(r"\x1b")
PROGRESS = r"(harness: checking 1 of 1 scale \S+(, after \d+ s)?\n)+"


def harness(*arguments: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the command in a fresh process, without a GPU, where the packages `blocked` cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))"
    return with_site(block, *arguments)


def with_site(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a fresh process, without a GPU; the code runs first in it and in its workers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(code)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "PYTHONPATH": folder}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "harness", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)


def skip_without_interpreter(said: str) -> None:
    """Skips where the installed Triton cannot interpret beside the installed NumPy, as it says itself."""
    if "the interpreter of Triton" in said:
        pytest.skip(said.strip())


def test_a_run_checks_and_says_that_the_interpreter_has_no_speed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    done = harness("run", "--impl", "triton,reference", *ONE_CASE, "--json", str(path))
    skip_without_interpreter(done.stderr)
    assert done.returncode == 0, done.stderr
    assert not MARK.search(done.stdout)
    assert re.fullmatch(PROGRESS, done.stderr)
    assert "Checks of triton, ada path on the CPU, suite quick, seed 0" in done.stdout
    assert "triton: 2 checks of 1 problems: 2 pass, 0 fail, 0 unsupported" in done.stdout
    assert "2 x min(error of PyTorch's plain attention" in done.stdout
    assert "interpreter ran the kernels, which has no speed" in done.stdout
    assert "TF/s" not in done.stdout
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["port"], r["direction"]) for r in records] == [
        ("triton", "forward"),
        ("triton", "backward"),
        ("reference", "forward"),
        ("reference", "backward"),
    ]
    for r in records:
        assert (r["schema"], r["verdict"], r["samples"], r["case"]) == (VERSION, "pass", None, "scale")
        assert set(r["errors"]) == ({"o", "lse"} if r["direction"] == "forward" else {"dq", "dk", "dv"})
        assert r["problem"]["scale"] == 0.05
        assert r["target"] == {"name": "ada", "sm": "sm_89"}
        assert r["switches"]["exp2"] is True
        assert r["tile"]["block_m"] >= 16
        assert r["provenance"]["packages"]["torch"] == torch.__version__
        assert r["provenance"]["interpreted"] is True
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", r["provenance"]["date"])
        assert len(r["sources"]) == 64
    assert records[0]["sources"] != records[2]["sources"]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("run", "--impl", "tritn"), "--impl must be one of reference, triton, tilelang, cute, got 'tritn'; did you"),
        (("run", "--imp", "triton"), "No such option"),
        (("run",), "--impl"),
        (("run", "--impl", "reference", "--suite", "qick"), "did you mean quick?"),
        (("run", "--impl", "reference", "--suite", "none/such.yaml"), "suite none/such.yaml cannot be read"),
        (("run", "--impl", "reference", "--only", "nothing"), "--only 'nothing' matches no problem"),
        (("run", "--impl", "reference", "--target", "volta"), "target must be one of native, ada, hopper"),
        (("run", "--impl", "reference", "--direction", "sideways"), "--direction"),
        (("run", "--impl", "reference", "--rounds", "0"), "--rounds"),
        (("run", "--impl", "reference", *ONE_CASE, "--json", "/nowhere/x.jsonl"), "--json /nowhere/x.jsonl cannot be"),
        *(
            (("run", "--impl", "reference", *ONE_CASE, "--json", place), text)
            for place, text in (
                (".", "--json . cannot be written: it is a directory"),
                ("", "--json . cannot be written: it is a directory"),
                ("/", "--json / cannot be written: it is a directory"),
                ("..", "--json .. cannot be written: it is a directory"),
                ("/dev/null", "--json /dev/null cannot be written: it is a device, no regular file"),
                ("x" * 400, "cannot be written: File name too long"),
                ("x" * 250, "cannot be written: File name too long"),
                ("x.jsonl.gz", "records are written as plain lines, not to x.jsonl.gz: give --json another name"),
            )
        ),
        (("doctor", "--json", "/dev/null"), "--json /dev/null cannot be written: it is a device, no regular file"),
        (("run", "--impl", "reference", "--suite", "x" * 400), "suite must be one of"),
        (("rn",), "No such command 'rn'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (2, "")
    assert err.startswith("harness: ")
    assert err.count("\n") == 1
    assert text in err


def test_a_port_that_cannot_run_is_explained_and_the_others_run() -> None:
    done = harness("run", "--impl", "triton,reference", *ONE_CASE, blocked=("triton",))
    assert done.returncode == 2
    told = re.escape("harness: the triton port needs triton, which is not installed: pip install triton\n")
    assert re.fullmatch(told + PROGRESS, done.stderr)
    assert "reference: 2 checks of 1 problems: 2 pass" in done.stdout


def test_a_package_that_crashes_when_it_is_imported_costs_its_own_port() -> None:
    crash = """
import os, signal, sys
class Crash:
    def find_spec(self, name, path=None, target=None):
        if name == "triton_impl.port":
            os.kill(os.getpid(), signal.SIGSEGV)
sys.meta_path.insert(0, Crash())
"""
    done = with_site(crash, "run", "--impl", "triton,reference", *ONE_CASE)
    assert done.returncode == 2
    told = "harness: the triton port could not be imported: its process died of SIGSEGV\n"
    assert re.fullmatch(told + PROGRESS, done.stderr)
    assert "reference: 2 checks of 1 problems: 2 pass" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "matrix",
        "bench",
        "ladder",
        "roofline",
        "memory",
        "compile",
        "fuzz",
        "compare",
        "tables",
        "doctor",
        "trace",
    ],
)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"  harness {command} " in out.partition("Example")[2]
    assert "Exit status" in out


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "doctor" in "".join(capsys.readouterr())


def test_the_help_and_a_typo_need_no_pytorch() -> None:
    for arguments, status in ((("run", "--help"), 0), (("run", "--imp"), 2)):
        done = harness(*arguments, blocked=("torch", "triton", "numpy"))
        assert done.returncode == status, done.stderr


def test_on_a_terminal_there_is_colour_and_a_bar() -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "harness", "run", "--impl", "reference", *ONE_CASE]
    environment = {**os.environ, "TERM": "xterm-256color", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdout=child, stderr=child, cwd=ROOT, env=environment)
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the child closed its end
            break
        if not piece:
            break
        shown += piece
    assert process.wait(timeout=60) == 0
    assert b"\x1b[" in shown
    assert b"checking" in shown


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    command = [sys.executable, "-m", "harness", "run", "--impl", "reference", "--suite", "hard", "--json", str(path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)  # type: ignore[call-overload]
    partial = tmp_path / "out.jsonl.partial"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Checks of reference" in out
    assert f"harness: interrupted; the records so far are in {partial}" in err
    assert "Traceback" not in err
    assert path.read_text() == "old\n"
    assert all(json.loads(line)["verdict"] == "pass" for line in partial.read_text().splitlines())


def test_where_there_is_no_terminal_progress_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "EVERY_S", 0.05)
    with session.progress("climbing", 2) as begin:
        begin("first")
        begin("second")
        time.sleep(0.3)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "harness: climbing 1 of 2 first"
    assert others
    assert set(others) == {"harness: climbing 2 of 2 second, after 0 s"}
    with session.progress("building", 0):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "directions"),
    [
        ("forward", "forward"),
        ("backward,", None),
        ("backward", "backward"),
        ("both", "both"),
        ("forward, backward", "both"),
        ("backward,forward", "both"),
        ("forward,both", "both"),
    ],
)
def test_directions_are_a_word_or_a_list(given: str, directions: str | None) -> None:
    if directions is None:
        with pytest.raises(UsageError, match="--direction must be one of forward, backward, both, got ''"):
            cli_options.directions(given)
    else:
        assert cli_options.directions(given) == directions


@pytest.mark.parametrize(
    "command", ["run", "matrix", "fuzz", "ladder", "sweep", "roofline", "compile", "bench", "memory"]
)
def test_every_command_takes_the_same_directions(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--impl", "reference", "--direction", "forward,both,sideways"])
    assert "--direction must be one of forward, backward, both, got 'sideways'" in capsys.readouterr().err


def test_a_pipe_that_is_closed_early_costs_no_records(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    command = [sys.executable, "-m", "harness", "run", "--impl", "reference", "--only", "scale", "--json", str(path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert done.returncode == 141
    left = tmp_path / "q.jsonl.partial"
    told = re.escape(
        f"harness: standard output was closed before the end; the records so far are in {left}; "
        f"--resume {left} goes on from there\n"
    )
    assert re.fullmatch(PROGRESS + told, done.stderr.decode())
    assert len(left.read_text().splitlines()) == 2


def test_the_version_needs_no_pytorch() -> None:
    done = harness("--version", blocked=("torch", "triton", "numpy"))
    assert (done.returncode, done.stdout) == (0, f"harness {version('fa2-ports')}\n")


@pytest.fixture
def fake_port(monkeypatch: pytest.MonkeyPatch) -> FakePort:
    """What `common.port` gives for every name."""
    port = FakePort()
    port.name = "triton"  # type: ignore[misc]
    monkeypatch.setattr(common, "port", lambda name: port)
    return port


def request(impl: str = "triton", **options: object) -> RunRequest:
    """In this process, where `fake_port` and other changes are seen."""
    return RunRequest((impl,), **{"only": "scale", "isolated": False, **options})  # type: ignore[arg-type]


def test_a_failed_check_is_status_1_and_names_the_element(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_port.fault = "scale applied twice"
    assert run(request(), CPU) == 1
    out = capsys.readouterr().out
    assert "FAIL scale b1-h1-n40-d64-bf16-full-s0.05 forward: o: error" in out
    assert "backward: not run: the forward it starts from failed" in out


def test_an_exception_is_a_cell_that_names_it(fake_port: FakePort, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(direction: str, outputs: tuple, inputs: tuple) -> tuple:
        raise RuntimeError("an illegal memory access")

    fake_port.after = fail
    assert run(request(), CPU) == 1
    assert "| FAIL: raised RuntimeError: an illegal memory access" in capsys.readouterr().out


def test_a_problem_that_is_unsupported_is_a_cell_with_its_reason(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakePort, "unsupported", lambda self, problem, target: "no windows" if problem.mask.left is not None else None
    )
    assert run(request(only="b1-h1-n"), CPU) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "n90k110-d64-bf16-causal-left40" in line)
    assert [cell.strip() for cell in line.split("|")][2:] == ["–", "–", "–", "–", "–", "no windows"]
    assert "6 unsupported" in out


def test_a_port_that_supports_nothing_asked_for_is_status_2(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_port.fault = "unsupported"
    assert run(request(), CPU) == 2
    assert "cannot run here: no windows today" in capsys.readouterr().err


def test_what_passed_is_timed_and_recorded_with_its_samples(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the baseline would run on a real card
    monkeypatch.setattr(Environment, "has_gpu", True)
    monkeypatch.setattr(jobs, "_stopwatch", lambda device: FakeStopwatch({"triton": 1.0}))
    path = tmp_path / "x.jsonl"
    assert run(request(rounds=5, json=path), CPU) == 0
    out = capsys.readouterr().out
    assert "triton forward, the CPU, beside SDPA flash, suite quick" in out
    assert "triton also takes the gradient of lse" in out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(r["samples"]) for r in records] == [5, 5]
    assert records[0]["samples"][0]["sensors"]["sm_mhz"] == 1500
    reason = "SDPA flash needs a CUDA device"
    assert records[0]["baselines"] == [{"port": "sdpa_flash", "verdict": "unsupported", "reason": reason}]


def test_a_run_goes_on_from_records(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, again = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    assert run(request(json=whole), CPU) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(jobs, "check", None)
    assert run(request(json=again, resume=whole), CPU) == 0
    assert capsys.readouterr().out == first
    assert again.read_text() == whole.read_text()


def test_records_that_do_not_fit_are_told_and_never_lost(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, before = tmp_path / "x.jsonl", tmp_path / "x.jsonl.before"
    assert run(request(json=path), CPU) == 0
    ours = [json.loads(line) for line in path.read_text().splitlines()]
    provenance = ours[0]["provenance"]
    foreign = {
        "from another card": {"provenance": provenance | {"device": "cuda", "card": "NVIDIA H200"}},
        "with another driver or CUDA": {"provenance": provenance | {"driver": "1"}},
        "with other packages": {"provenance": provenance | {"packages": {}}},
        "of other sources": {"sources": "0" * 64},
        "for another target": {"target": {"name": "hopper", "sm": "sm_90a"}},
        "of other ports": {"port": "cute"},
        "of another command or direction": {"port": "triton#skip"},
        "of other problems, inputs or another seed": {"seed": 1},
    }
    capsys.readouterr()
    for why, change in foreign.items():
        text = "".join(json.dumps(record | change) + "\n" for record in ours)
        path.write_text(text)
        with pytest.raises(UsageError, match=rf"^none of the 2 records of .* fits this run \(2 {why}\)"):
            run(request(json=path, resume=path), CPU)
        assert [one.read_text() for one in tmp_path.iterdir()] == [text]

    # Those that fit are carried over as they are, with their date; the others stay in the file beside.
    ours = [record | {"provenance": provenance | {"date": "2020-02-02T02:02:02Z"}} for record in ours]
    records = [*ours, *(record | foreign["from another card"] for record in ours)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run(request(json=path, resume=path), CPU) == 0
    assert [json.loads(line) for line in path.read_text().splitlines()] == ours
    assert [json.loads(line) for line in before.read_text().splitlines()] == records
    told = [line for line in capsys.readouterr().err.splitlines() if "checking 1 of 1" not in line]  # progress
    assert told == [
        f"harness: 2 of 4 records of {path} fit this run; the others do not: 2 from another card",
        f"harness: {path} does not have all records that there were: the earlier file is kept as {before}",
    ]


def test_a_suite_runs_in_the_dtype_that_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, other = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    alone = ["--impl", "reference", "--no-isolate", "--direction", "forward"]
    with pytest.raises(SystemExit) as stop:
        main(["run", *alone, "--only", "dtypes", "--dtype", "fp16", "--json", str(path)])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "d64-fp16-causal" in out
    assert "bf16" not in out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({r["problem"]["id"] for r in records}) == len(records)
    assert {r["problem"]["dtype"] for r in records} == {"fp16"}
    text = path.read_text()
    for command in ("run", "matrix"):  # ids are those of the dtype asked for, also for --only
        with pytest.raises(SystemExit) as stop:
            main([command, *alone, "--only", "d64-fp32-causal", "--dtype", "fp32", "--json", str(other)])
        assert stop.value.code == 0
        capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["run", *alone, "--only", "dtypes", "--dtype", "bf16", "--resume", str(path)])
    assert stop.value.code == 2
    assert "of other problems, inputs or another seed" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize("command", ["bench", "ladder", "matrix", "memory", "roofline", "run", "sweep"])
def test_a_dtype_that_there_is_not_is_wrong_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, *(["--impl", "reference"] if command == "run" else []), "--dtype", "fp8"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "'fp8' is not one of 'fp16', 'bf16', 'fp32'" in line


@pytest.mark.parametrize("command", ["run --impl reference", "trace", "model", "fuzz --impl reference", "roofline"])
def test_a_seed_that_no_generator_takes_is_wrong_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("-1", str(2**63), "9" * 23):
        with pytest.raises(SystemExit) as stop:
            main([*command.split(), "--seed", seed])
        out, err = capsys.readouterr()
        assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
        assert "--seed" in err


def test_what_failed_its_check_is_not_timed(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_port.fault = "delta without dlse"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the baseline would run on a real card
    monkeypatch.setattr(Environment, "has_gpu", True)
    monkeypatch.setattr(jobs, "_stopwatch", lambda device: FakeStopwatch({"triton": 1.0}))
    assert run(request(rounds=5), CPU) == 1
    out = capsys.readouterr().out
    assert "triton forward, the CPU, beside SDPA flash" in out
    assert "triton backward, the CPU, beside" not in out


def test_an_ada_path_is_named_and_other_code_is_refused_on_a_card() -> None:
    hopper, ada = common.Target.named("hopper"), common.Target.named("ada")
    card = Environment(torch.device("cuda", 0), hopper, "NVIDIA H200")
    assert card.path(card.target("ada")) == "ada path on NVIDIA H200"
    assert card.path(card.target("native")) == "NVIDIA H200"
    with pytest.raises(UsageError, match=r"code for blackwell \(sm_100a\) does not run on NVIDIA H200"):
        card.target("blackwell")
    small = Environment(torch.device("cuda", 0), ada, "NVIDIA GeForce RTX 4090")
    assert small.path(small.target("ada")) == "NVIDIA GeForce RTX 4090"
    assert CPU.path(CPU.target("hopper")) == "hopper path on the CPU"


def test_tables_come_as_text_markdown_and_csv() -> None:
    table = Table("A title", ("case", "ms"), [("a|b", "1.5"), ("c", "–")], ["a note"])
    assert as_text(table).splitlines() == [
        "A title",
        "case |  ms",
        "-----+----",
        "a|b  | 1.5",
        "c    |   –",
        "a note",
    ]
    assert as_markdown(table).splitlines()[2:5] == ["| case | ms |", "| --- | ---: |", "| a\\|b | 1.5 |"]
    assert as_csv(table).splitlines() == ["# A title", "case,ms", "a|b,1.5", "c,–", "# a note"]
    with pytest.raises(ValueError, match="has 2 cells"):
        table.add("x")


@pytest.mark.parametrize("form", list(Format))
def test_every_format_prints_the_checks_and_the_closing_note(form: Format, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(request("reference", form=form), CPU) == 0
    out = capsys.readouterr().out
    assert "b1-h1-n40-d64-bf16-full-s0.05" in out
    last = out.splitlines()[-1]
    assert last.startswith("# No GPU is used here" if form is Format.CSV else "No GPU is used here")


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to a device", "partial is a pipe", "folder"])
def test_records_replace_nothing_but_a_regular_file(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, pipe = tmp_path / "x.jsonl", tmp_path / "pipe"
    os.mkfifo(pipe)
    if kind == "pipe":
        path = pipe
    elif kind == "folder":
        path.mkdir()
    elif kind == "partial is a pipe":
        pipe.rename(tmp_path / "x.jsonl.partial")
    else:
        path.symlink_to(pipe if kind == "link to a pipe" else "/dev/null")
    before = sorted((p.name, p.lstat().st_mode) for p in tmp_path.iterdir())
    with pytest.raises(SystemExit) as exit_:
        main(["run", "--impl", "reference", *ONE_CASE, "--json", str(path)])
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
    assert "no regular file" in err
    assert sorted((p.name, p.lstat().st_mode) for p in tmp_path.iterdir()) == before


def test_records_replace_a_regular_file_and_a_link_to_nowhere(tmp_path: Path) -> None:
    record = {"schema": 2, "kind": "doctor", "git": {"commit": None, "dirty": None}, "installed": [], "ports": []}
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("old")
    link.symlink_to(tmp_path / "nowhere")
    for path in (old, link):
        with RecordFile(path) as records:
            records.write(record)
        assert json.loads(path.read_text()) == record


def test_a_timing_that_raises_costs_its_own_row(
    fake_port: FakePort, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(FakeStopwatch):
        def time(self, name: str, launch: Launch) -> Sample:
            if self.rounds == 0:
                self.rounds = 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().time(name, launch)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the baseline would run on a real card
    monkeypatch.setattr(Environment, "has_gpu", True)
    stopwatch = Fails({"triton": 1.0})
    monkeypatch.setattr(jobs, "_stopwatch", lambda device: stopwatch)
    assert run(request(rounds=5), CPU) == 0
    out = capsys.readouterr().out
    assert out.count("not timed: it raised OutOfMemoryError: CUDA out of memory") == 1
    assert "triton backward, the CPU, beside SDPA flash" in out


def test_inputs_that_do_not_fit_cost_their_own_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(problem: Problem, *arguments: object, **options: object) -> None:
        if problem.head_dim == 256:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 13 GiB. GPU 0 has others on it")
        return make_inputs(problem, *arguments, **options)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(jobs, "make_inputs", too_large)
    assert run(request("reference", only="head-dims"), CPU) == 0
    out = capsys.readouterr().out
    assert "the inputs or the oracle raised OutOfMemoryError: CUDA out of memory. Tried to allocate 13 GiB" in out
    assert "others on it" not in out
    assert "8 pass, 0 fail, 2 unsupported" in out
