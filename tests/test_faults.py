"""Faults planted in a copy of the kernels, one at a time: the harness has to see each, and where it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "reference", "triton_impl", "harness")
GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Fault:
    """One wrong line. `old` stands `times` times in `file`; `only` is a case of the suite that shows it, small enough
    for the interpreter; `wrong` are the tensors that err there, an element not written among them."""

    name: str
    file: str
    old: str
    new: str
    only: str
    wrong: frozenset[str]
    times: int = 1

    def __str__(self) -> str:
        return self.name


# The cases of the quick suite, the cheapest that show what is wrong: two tiles of queries and more of keys; four heads
# that share one key head, with more keys than queries; a tail of keys without a mask; a scale of its own.
TILES, SHARED, TAIL, SCALE = f"n{512 if GPU else 272}-d64-bf16-causal", "mqa", "tail-full", "scale"

FAULTS = [
    Fault(
        "no-rescale-of-the-accumulator",
        "forward.py",
        "acc = acc * rescale[:, None]",
        "acc = acc * 1.0",
        TILES,
        frozenset({"o"}),
    ),
    Fault(
        "mask-off-by-one",
        "blocks.py",
        "seen &= keys <= rows + high",
        "seen &= keys <= rows + high + 1",
        SHARED,
        frozenset({"o", "lse"}),
    ),
    Fault(
        "wrong-corner",
        "forward.py",
        "problem.mask.band(problem.len_q, problem.len_k)",
        "problem.mask.band(problem.len_q, problem.len_q)",
        SHARED,
        frozenset({"o", "lse"}),
    ),
    Fault(
        "wrong-base-of-the-logarithm",
        "forward.py",
        "lse = (row_max + tl.math.log2(row_sum)) * LN_2 if EXP2",
        "lse = (row_max + tl.math.log2(row_sum)) if EXP2",
        SCALE,
        frozenset({"lse"}),
    ),
    Fault(
        "scale-applied-twice",
        "forward.py",
        "factor = scale * LOG2_E if EXP2",
        "factor = scale * scale * LOG2_E if EXP2",
        SCALE,
        frozenset({"o", "lse"}),
    ),
    Fault(
        "tail-keys-unmasked",
        "blocks.py",
        "seen = keys < len_k",
        "seen = keys >= 0",
        TAIL,
        frozenset({"o", "lse"}),
    ),
    Fault(
        "delta-without-dlse",
        "backward.py",
        "delta -= tl.load(DLSE + row_base + rows, mask=inside, other=0.0)",
        "delta -= 0.0",
        SCALE,
        frozenset({"dq", "dk"}),
    ),
    Fault(
        "head-of-a-group-not-summed",
        "backward.py",
        "for member in range(group):",
        "for member in range(tl.maximum(group - 1, 1)):",
        SHARED,
        frozenset({"dk", "dv"}),
    ),
    Fault(
        "one-output-tile-unwritten",
        "forward.py",
        "grid=triton.cdiv(problem.len_q, tile.block_m) * heads,",
        "grid=triton.cdiv(problem.len_q, tile.block_m) * heads - 1,",
        TILES,
        frozenset({"o", "lse"}),
    ),
    Fault(
        "dq-not-zeroed-first",
        "backward.py",
        "dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)",
        "dq = q.to(tl.float32)",
        SCALE,
        frozenset({"dq"}),
    ),
]


def copy_of_the_packages(folder: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "results"))


def run_harness(folder: Path, only: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """`harness run` of the quick suite, from that folder: the process, and its records."""
    records = folder / "records.jsonl"
    command = [
        sys.executable,
        "-m",
        "harness",
        "run",
        "--impl",
        "triton",
        "--suite",
        "quick",
        "--no-timing",
        "--no-isolate",
    ]
    command += ["--json", str(records), "--only", only]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done, [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []


def erring(records: list[dict[str, Any]]) -> set[str]:
    """The names of the tensors that some check found wrong. JSON has no infinity: what is not finite is text there."""
    checks = [(name, x["error"], x["allowed"]) for record in records for name, x in record["errors"].items()]
    return {name for name, error, allowed in checks if not float(error) <= allowed}


@pytest.mark.parametrize("only", [TILES, SHARED, TAIL, SCALE])
def test_the_kernels_as_they_are_pass(only: str, tmp_path: Path) -> None:
    copy_of_the_packages(tmp_path)
    done, records = run_harness(tmp_path, only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {record["verdict"] for record in records} == {"pass"}
    assert not erring(records)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_seen_where_it_is(fault: Fault, tmp_path: Path) -> None:
    copy_of_the_packages(tmp_path)
    path = tmp_path / "triton_impl" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == fault.times, "the kernels have moved on: the fault needs another line"
    path.write_text(text.replace(fault.old, fault.new))
    done, records = run_harness(tmp_path, fault.only)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail" in done.stdout
    # At a GPU's sizes what errs may spoil more.
    assert erring(records) >= fault.wrong if GPU else erring(records) == fault.wrong, done.stdout
