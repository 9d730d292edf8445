"""`harness doctor`: what is installed, what can run, and for what cannot, why and what to do."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import common
from common.ports import is_written

from .baselines import BASELINES
from .compilers import nvcc_by
from .environment import Environment
from .isolation import Caller, Here, Lost, Worker
from .jobs import Setting, absence, opened, probe
from .options import Format
from .provenance import driver_version, git_commit, package_versions
from .records import record_file
from .schema import VERSION
from .tables import Table, print_tables

OK, NOTHING_RUNS = 0, 2
NO_CUDA = (
    "built without CUDA; for a GPU take the pip command of a CUDA build from https://pytorch.org/get-started/locally"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report: what, what was found (a version, or how it runs), and what to do when that is nothing."""

    what: str
    found: str
    advice: str = ""


def doctor(json_path: Path | None, form: Format, here: Environment, trouble: str = "", *, isolated: bool = True) -> int:
    """Runs the command and returns its exit status: 2 when no port can run.

    trouble: why a card that is there is not used. isolated: ports are tried in a process of their own. Raises
    UsageError when the JSON file cannot be written.
    """
    with record_file(json_path) as records:
        caller = Worker() if isolated else Here()
        try:
            installed, ports = _examine(here, trouble, form, caller)
        finally:
            caller.close()
        if records is not None:
            report = {"schema": VERSION, "kind": "doctor", "git": git_commit()}
            report |= {"installed": [asdict(f) for f in installed], "ports": [asdict(f) for f in ports]}
            records.write(report)
    runs = any(finding.found in ("native", "interpreter", "CPU") for finding in ports)
    return OK if runs else NOTHING_RUNS


def _examine(here: Environment, trouble: str, form: Format, caller: Caller) -> tuple[list[Finding], list[Finding]]:
    """What is installed, and which ports run; prints both."""
    installed = _installed(here, trouble, caller)
    ports = [_port(name, here, caller) for name in common.port_names()]
    ports += [_baseline(name, caller) for name in BASELINES]
    tables = [
        _table("Installed", ("what", "found", "what to do"), installed),
        _table(f"Ports on {here.card}", ("port", "runs", "why, and what to do"), ports),
    ]
    print_tables(tables, form)
    return installed, ports


def _table(title: str, columns: tuple[str, str, str], findings: list[Finding]) -> Table:
    table = Table(title, columns, labels=3)
    for finding in findings:
        table.add(finding.what, finding.found, finding.advice)
    return table


def _installed(here: Environment, trouble: str, caller: Caller) -> list[Finding]:
    versions = package_versions()

    def package(name: str, key: str, purpose: str, install: str) -> Finding:
        found = versions[key]
        return Finding(name, found or "missing", "" if found else f"{purpose}: pip install {install}")

    def package_of(port: str, name: str, key: str, install: str) -> Finding:
        if versions[key] or is_written(port):
            return package(name, key, f"the {port} port needs it", install)
        return Finding(name, "missing", f"not needed yet: the {port} port is not written")

    cuda = torch.version.cuda
    findings = [
        Finding("Python", platform.python_version(), "" if sys.version_info >= (3, 11) else "3.11 or later is needed"),
        Finding("PyTorch", torch.__version__, "" if cuda else NO_CUDA),
        package_of("triton", "Triton", "triton", "triton"),
        package_of("tilelang", "TileLang", "tilelang", "tilelang==0.1.13"),
        package_of("cute", "CuTe DSL", "cutlass_dsl", "nvidia-cutlass-dsl apache-tvm-ffi"),
        package("NVML", "nvml", "clocks and throttling are read through it", "nvidia-ml-py"),
        Finding("CUDA of PyTorch", cuda or "none"),
    ]
    driver = driver_version()
    advice = "" if driver else "no GPU is used: the second table says what runs on the CPU"
    findings.append(Finding("NVIDIA driver", driver or "none", advice))
    if here.has_gpu:
        findings.append(Finding("card", f"{here.card}, {here.native}"))
    else:
        found = "none usable" if torch.cuda.is_available() else "none"
        findings.append(Finding("card", found, trouble or _why_no_card(driver)))
    if is_written("tilelang"):
        path = nvcc_by(caller)
        advice = "" if path else "TileLang compiles with it: install the CUDA toolkit, or pip install '.[nvcc]'"
        findings.append(Finding("nvcc", path or "missing", advice))
    return findings


def _why_no_card(driver: str | None) -> str:
    if torch.cuda.is_available():
        return "TRITON_INTERPRET is set, so that everything runs on the CPU: unset it to use the card"
    if driver and torch.version.cuda:
        return "there is a driver, but PyTorch sees no card: see CUDA_VISIBLE_DEVICES and the driver's version"
    return ""


def _port(name: str, here: Environment, caller: Caller) -> Finding:
    """Imports a port and runs one tile with it."""
    setting = Setting(here, here.native)
    port = opened(caller, setting, name)
    if port.reason:
        return Finding(name, "no", port.reason)
    try:
        reason = caller.call(probe, setting, name)
    except Lost as lost:
        return Finding(name, "no", f"one tile {lost}; harness run --impl {name} tells more")
    if reason:
        return Finding(name, "compile only" if port.compiles else "no", f"the {name} port cannot run here: {reason}")
    compiling = "compiles for every target" if port.compiles else ""
    if here.has_gpu:
        return Finding(name, "native", compiling)
    if name != "triton":
        return Finding(name, "CPU", compiling)
    advice = "the harness sets TRITON_INTERPRET=1; for your own Python set it before Python starts"
    return Finding(name, "interpreter", "; ".join(filter(None, (compiling, advice))))


def _baseline(name: str, caller: Caller) -> Finding:
    try:
        reason = caller.call(absence, name) or ""
    except Lost as lost:
        reason = str(lost)
    return Finding(f"{name} (baseline)", "no" if reason else "native", reason)
