"""Faults planted in a copy of each port's kernels, one at a time: the harness has to see each, and where it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .subjects import GPU, SUBJECTS, TILELANG, Subject, each

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Edit:
    """`old`, which stands once in that file of a port's package, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """One mistake, and the line that makes it in each port. `only` is a case of the suite that shows it, small enough
    for the interpreter; `wrong` are the tensors that err there, an element not written among them; `more` those that
    err as well where the kernel of dk and dv adds up dq."""

    name: str
    only: str
    wrong: set[str]
    edits: dict[str, Edit]
    more: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return self.name


# The cases of the quick suite, the cheapest that show what is wrong: two tiles of queries and more of keys; four heads
# that share one key head, with more keys than queries; a tail of keys without a mask; a scale of its own.
TILES, SHARED, TAIL, SCALE = f"n{512 if GPU else 272}-d64-bf16-causal", "mqa", "tail-full", "scale"

FAULTS = [
    Fault(
        "no-rescale-of-the-accumulator",
        TILES,
        {"o"},
        {
            "triton": Edit("forward.py", "else acc * rescale[:, None]", "else acc * 1.0"),
            "tilelang": Edit("forward.py", "acc[i, d] *= rescale[i]", "acc[i, d] *= 1.0"),
            "cute": Edit("forward.py", "acc[i, j] = acc[i, j] * rescale", "acc[i, j] = acc[i, j] * 1.0"),
        },
    ),
    Fault(
        "mask-off-by-one",
        SHARED,
        {"o", "lse"},
        {
            "triton": Edit("blocks.py", "seen &= keys <= rows + high", "seen &= keys <= rows + high + 1"),
            "tilelang": Edit("blocks.py", "T.And(seen, key <= row + high)", "T.And(seen, key <= row + high + 1)"),
            "cute": Edit("blocks.py", "query + high + 1 - origin", "query + high + 2 - origin"),
        },
    ),
    Fault(
        "wrong-corner",
        SHARED,
        {"o", "lse"},
        {
            "triton": Edit(
                "forward.py",
                "problem.mask.band(problem.len_q, problem.len_k)",
                "problem.mask.band(problem.len_q, problem.len_q)",
            ),
            "tilelang": Edit(
                "launch.py",
                "problem.mask.band(problem.len_q, problem.len_k)",
                "problem.mask.band(problem.len_q, problem.len_q)",
            ),
            "cute": Edit(
                "launch.py",
                "problem.mask.band(problem.len_q, problem.len_k)",
                "problem.mask.band(problem.len_q, problem.len_q)",
            ),
        },
    ),
    Fault(
        "wrong-base-of-the-logarithm",
        SCALE,
        {"lse"},
        {
            "triton": Edit(
                "forward.py",
                "lse = (row_max + tl.math.log2(row_sum)) * LN_2 if EXP2",
                "lse = (row_max + tl.math.log2(row_sum)) if EXP2",
            ),
            "tilelang": Edit("forward.py", "T.log2(row_sum[i]) * LN_2", "T.log2(row_sum[i])"),
            "cute": Edit(
                "forward.py", "cute.math.log2(total, fastmath=True) * LN_2", "cute.math.log2(total, fastmath=True)"
            ),
        },
    ),
    Fault(
        "scale-applied-twice",
        SCALE,
        {"o", "lse"},
        {
            "triton": Edit("forward.py", "factor = scale * LOG2_E if EXP2", "factor = scale * scale * LOG2_E if EXP2"),
            "tilelang": Edit(
                "forward.py", "factor = scale * LOG2_E if EXP2", "factor = scale * scale * LOG2_E if EXP2"
            ),
            "cute": Edit("forward.py", "factor = scale * LOG2_E if", "factor = scale * scale * LOG2_E if"),
        },
    ),
    Fault(
        "tail-keys-unmasked",
        TAIL,
        {"o", "lse"},
        {
            "triton": Edit("blocks.py", "seen = keys < len_k", "seen = keys >= 0"),
            "tilelang": Edit("blocks.py", "seen = key < len_k", "seen = key >= 0"),
            "cute": Edit("blocks.py", "end = len_k - origin", "end = len_k"),
        },
    ),
    Fault(
        "delta-without-dlse",
        SCALE,
        {"dq", "dk"},
        {
            "triton": Edit(
                "backward.py", "delta -= tl.load(DLSE + row_base + rows, mask=inside, other=0.0)", "delta -= 0.0"
            ),
            "tilelang": Edit("backward.py", "dlse = DLSE[b, h, inside] if HAS_DLSE else 0.0", "dlse = 0.0"),
            "cute": Edit("backward_prepare.py", "delta = delta - mDLSE[b, h, row]", "delta = delta - 0.0"),
        },
    ),
    Fault(
        "head-of-a-group-not-summed",
        SHARED,
        {"dk", "dv"},
        {
            "triton": Edit(
                "backward_dkdv.py", "for member in range(group):", "for member in range(tl.maximum(group - 1, 1)):"
            ),
            "tilelang": Edit("backward.py", "tiles * group if GROUPED", "tiles * T.max(group - 1, 1) if GROUPED"),
            "cute": Edit(
                "backward_dkdv.py", "max(end - begin, 0) * group", "max(end - begin, 0) * cutlass.max(group - 1, 1)"
            ),
        },
        more={"dq"},
    ),
    Fault(
        "one-output-tile-unwritten",
        TILES,
        {"o", "lse"},
        {
            "triton": Edit(
                "forward.py",
                "grid=triton.cdiv(problem.len_q, tile.block_m) * heads,",
                "grid=triton.cdiv(problem.len_q, tile.block_m) * heads - 1,",
            ),
            "tilelang": Edit("forward.py", "* batch * heads_q, threads", "* batch * heads_q - 1, threads"),
            "cute": Edit("forward.py", "* mQ.shape[0] * mQ.shape[1]", "* mQ.shape[0] * mQ.shape[1] - 1"),
        },
    ),
    # Of TileLang's two ways to dq it is the one without atomics, which a check takes too, with deterministic=True.
    Fault(
        "dq-not-zeroed-first",
        SCALE,
        {"dq"},
        {
            "triton": Edit("backward_dq.py", "dq = hidden_zeros(q)", "dq = q.to(tl.float32)"),
            "tilelang": Edit("backward.py", "T.fill(dq, 0)", "T.fill(dq, 1)"),
            "cute": Edit("backward_prepare.py", "zeros.fill(0.0)", "zeros.fill(1.0)"),
        },
    ),
]


def copy_of_the_packages(folder: Path, port: str, fault: Fault | None = None) -> None:
    """What a run of that port needs, in a folder of its own, with the fault in it."""
    for package in ("common", "reference", f"{port}_impl", "harness"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    if fault is not None:
        edit = fault.edits[port]
        path = folder / f"{port}_impl" / edit.file
        path.write_text(path.read_text().replace(edit.old, edit.new))


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in that folder, with the project's packages from there."""
    search = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def run_harness(folder: Path, port: str, only: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """`harness run` of the quick suite, from that folder: the process, and its records."""
    records = folder / "records.jsonl"
    command = ["-m", "harness", "run", "--impl", port, "--suite", "quick", "--no-timing", "--no-isolate"]
    done = run_python(folder, *command, "--only", only, "--json", str(records))
    return done, [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []


def erring(records: list[dict[str, Any]]) -> set[str]:
    """The names of the tensors that some check found wrong. JSON has no infinity: what is not finite is text there."""
    checks = [(name, x["error"], x["allowed"]) for record in records for name, x in record["errors"].items()]
    return {name for name, error, allowed in checks if not float(error) <= allowed}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("port", [subject.name for subject in SUBJECTS])
def test_a_fault_is_one_line_of_each_port(port: str, fault: Fault) -> None:
    edit = fault.edits[port]
    text = (ROOT / f"{port}_impl" / edit.file).read_text()
    assert text.count(edit.old) == 1, "the kernels have moved on: the fault needs another line"


@each()
@pytest.mark.parametrize("only", [TILES, SHARED, TAIL, SCALE])
def test_the_kernels_as_they_are_pass(subject: Subject, only: str, tmp_path: Path) -> None:
    copy_of_the_packages(tmp_path, subject.name)
    done, records = run_harness(tmp_path, subject.name, only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {record["verdict"] for record in records} == {"pass"}
    assert not erring(records)


@each()
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_seen_where_it_is(subject: Subject, fault: Fault, tmp_path: Path) -> None:
    copy_of_the_packages(tmp_path, subject.name, fault)
    done, records = run_harness(tmp_path, subject.name, fault.only)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail" in done.stdout
    # At a GPU's sizes what errs may spoil more.
    assert erring(records) >= fault.wrong, done.stdout
    assert GPU or erring(records) <= fault.wrong | fault.more, done.stdout


# A hash of each TileLang program of a direction; those that are not among the given ones are lowered, without a GPU.
LOWER = """
import hashlib, sys
from common import Mask, Problem, Switches, Target, port
from tilelang_impl.backward import plan_backward
from tilelang_impl.build import lower
from tilelang_impl.forward import plan_forward
direction, *sound = sys.argv[1:]
hopper, problem = Target.named("hopper"), Problem(1, 4, 1, 512, 512, 64, mask=Mask.causal())
tile = port("tilelang").tiles(problem, hopper, direction)[0]
plans = {
    "forward": lambda: plan_forward(problem, hopper, tile, Switches(), ("bhnd",) * 4),
    "backward": lambda: plan_backward(problem, hopper, tile, Switches(), ("bhnd",) * 5 + ("dlse",), False),
}
for launch in plans[direction]():
    program = hashlib.sha256(launch.program(*launch.constants).script().encode()).hexdigest()
    print(program)
    if sound and program not in sound:
        lower(launch, hopper)
"""


def tilelang_programs(folder: Path, direction: str, *sound: str) -> list[str]:
    """The hashes of the programs that the port in that folder writes."""
    done = run_python(folder, "-c", LOWER, direction, *sound)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@cache
def sound_programs(direction: str) -> list[str]:
    """Those of the port as it is."""
    return tilelang_programs(ROOT, direction)


@pytest.mark.skipif(TILELANG.is_missing, reason="TileLang is not installed")
# A fault in launch.py is the host's: the kernels stay as they are.
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.edits["tilelang"].file != "launch.py"], ids=str)
def test_a_fault_in_a_tilelang_kernel_makes_another_program_which_lowers(fault: Fault, tmp_path: Path) -> None:
    direction = "backward" if fault.edits["tilelang"].file == "backward.py" else "forward"
    sound = sound_programs(direction)
    copy_of_the_packages(tmp_path, "tilelang", fault)
    programs = tilelang_programs(tmp_path, direction, *sound)
    assert sum(a != b for a, b in zip(programs, sound, strict=True)) == 1
