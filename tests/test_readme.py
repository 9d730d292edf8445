"""The programs in the README run, and what two of them print stands below them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
KERNEL = re.compile("^direction, kernel = .*$", re.M)


def section(heading: str) -> str:
    return README.partition(f"\n{heading}")[2].partition("\n##")[0]


def blocks(heading: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section(heading), re.M | re.S)
    return [text for name, text in found if name == language]


def printed(program: str, interpret: bool) -> str:
    """What a program prints in a process of its own; interpret: with Triton in its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("heading", ["## In a model\n", "### 1. The primer\n"])
def test_the_programs_run_one_after_the_other(heading: str) -> None:
    programs = blocks(heading, "python")
    assert programs
    printed("".join(programs), interpret=not torch.cuda.is_available())


@pytest.mark.skipif(not triton.__version__.startswith("3.9."), reason="the counts are those of Triton 3.9")
@pytest.mark.parametrize("heading", ["### 4. One port, rung by rung\n", "### 6. The backward\n"])
def test_the_counts_of_the_rungs_are_those_that_the_program_prints(heading: str) -> None:
    """The program stands under stop 4; the line with the kernel stands once more under stop 6."""
    (program,) = blocks("### 4. One port, rung by rung\n", "python")
    (line,) = KERNEL.findall(section(heading))
    *_, table = blocks(heading, "")
    assert printed(KERNEL.sub(line, program), interpret=False) == table
