"""`harness doctor`: what is installed, what can run, and for what cannot, why and what to do."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import common
from common import Port, Unsupported

from .baselines import SDPA_FLASH
from .environment import Environment
from .errors import UsageError, one_line
from .options import Format
from .provenance import driver_version, git_commit, package_versions
from .run import PROBE, probe
from .tables import Table, print_tables

OK, NOTHING_RUNS = 0, 2


@dataclass(frozen=True)
class Finding:
    """One line of the report: what, what was found (a version, or how it runs), and what to do when that is nothing."""

    what: str
    found: str
    advice: str = ""


def doctor(json_path: Path | None, form: Format, here: Environment, trouble: str = "") -> int:
    """Runs the command and returns its exit status: 2 when no port can run.

    trouble: why a card that is there is not used. Raises UsageError when the JSON file cannot be written.
    """
    installed = _installed(here, trouble)
    ports = [_port(name, here) for name in common.port_names()] + [_baseline(here)]
    tables = [
        _table("Installed", ("what", "found", "what to do"), installed),
        _table(f"Ports on {here.card}", ("port", "runs", "why, and what to do"), ports),
    ]
    print_tables(tables, form)
    if json_path is not None:
        report = {"schema": 1, "kind": "doctor", "git": git_commit()}
        report |= {"installed": [asdict(f) for f in installed], "ports": [asdict(f) for f in ports]}
        try:
            json_path.write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {json_path} cannot be written: {error.strerror}") from error
    runs = any(finding.found in ("native", "interpreter", "CPU") for finding in ports)
    return OK if runs else NOTHING_RUNS


def _table(title: str, columns: tuple[str, str, str], findings: list[Finding]) -> Table:
    table = Table(title, columns, labels=3)
    for finding in findings:
        table.add(finding.what, finding.found, finding.advice)
    return table


def _installed(here: Environment, trouble: str) -> list[Finding]:
    versions = package_versions()

    def package(name: str, key: str, purpose: str, install: str) -> Finding:
        found = versions[key]
        return Finding(name, found or "missing", "" if found else f"{purpose}: pip install {install}")

    cuda = torch.version.cuda
    findings = [
        Finding("Python", platform.python_version(), "" if sys.version_info >= (3, 11) else "3.11 or later is needed"),
        Finding("PyTorch", torch.__version__, "" if cuda else "built without CUDA: for a GPU install a CUDA build"),
        package("Triton", "triton", "the triton port needs it", "triton"),
        package("TileLang", "tilelang", "the tilelang port needs it", "tilelang==0.1.13"),
        package("CuTe DSL", "cutlass_dsl", "the cute port needs it", "nvidia-cutlass-dsl"),
        package("NVML", "nvml", "clocks and throttling are read through it", "nvidia-ml-py"),
        Finding("CUDA of PyTorch", cuda or "none"),
    ]
    driver = driver_version()
    advice = "" if driver else "without a GPU the triton and reference ports run on the CPU, and all compile"
    findings.append(Finding("NVIDIA driver", driver or "none", advice))
    if here.has_gpu:
        findings.append(Finding("card", f"{here.card}, {here.native}"))
    else:
        found = "none usable" if torch.cuda.is_available() else "none"
        findings.append(Finding("card", found, trouble or _why_no_card(driver)))
    for tool, purpose in (
        ("nvcc", "TileLang compiles with it: install the CUDA toolkit and put it on PATH"),
        ("ncu", "hardware counters come from it: install Nsight Compute and put it on PATH"),
    ):
        path = shutil.which(tool)
        findings.append(Finding(tool, path or "missing", "" if path else purpose))
    return findings


def _why_no_card(driver: str | None) -> str:
    if torch.cuda.is_available():
        return "TRITON_INTERPRET is set, so that everything runs on the CPU: unset it to use the card"
    if driver and torch.version.cuda:
        return "there is a driver, but PyTorch sees no card: see CUDA_VISIBLE_DEVICES and the driver's version"
    return ""


def _port(name: str, here: Environment) -> Finding:
    """Imports a port and runs one tile with it."""
    try:
        port = common.port(name)
    except Unsupported as error:
        return Finding(name, "no", str(error))
    except Exception as error:  # importing a DSL may raise anything
        return Finding(name, "no", f"could not be imported: {one_line(error)}")
    try:
        probe(port, here, here.native, strict=True)
    except Unsupported as error:
        compiles = type(port).build is not Port.build
        return Finding(name, "compile only" if compiles else "no", str(error))
    except Exception as error:  # the probe is there to find out
        return Finding(name, "no", f"raised {one_line(error)} on one tile; harness run --impl {name} tells more")
    if here.has_gpu:
        return Finding(name, "native")
    return Finding(name, "interpreter") if name == "triton" else Finding(name, "CPU")


def _baseline(here: Environment) -> Finding:
    reason = SDPA_FLASH.unsupported(PROBE, here.native) if here.has_gpu else "SDPA's flash backend needs a CUDA device"
    return Finding(f"{SDPA_FLASH.name} (baseline)", "no" if reason else "native", reason or "")
