"""Which compiler builds a port's kernels, with its version: what the recorded spills are told apart by."""

from __future__ import annotations

import re
import shutil
import subprocess

from .isolation import Caller, Lost
from .provenance import package_versions

# A port's compiler among the packages of `provenance`. That of Triton and of CuTe DSL is whole; TileLang's calls nvcc.
PACKAGES = {"triton": "triton", "tilelang": "tilelang", "cute": "cutlass_dsl"}


def compiler_by(caller: Caller, port: str) -> str:
    """The package that compiles a port's kernels, with its version, as `triton 3.9.0`; with nvcc's where it calls that.

    caller: where the package can be imported, since that may end the process.
    """
    package = PACKAGES[port]
    name = f"{package} {package_versions()[package] or 'unknown'}"
    return f"{name}, nvcc {nvcc_version(nvcc_by(caller)) or 'unknown'}" if port == "tilelang" else name


def nvcc_by(caller: Caller) -> str | None:
    """The path of the nvcc that TileLang calls, None if there is none."""
    try:
        return caller.call(_nvcc)
    except Lost:  # importing TileLang killed the process
        return shutil.which("nvcc")


def _nvcc() -> str | None:
    """The nvcc that TileLang calls; where TileLang is not installed, the one on PATH."""
    try:
        from tilelang.contrib.nvcc import get_nvcc_compiler

        return shutil.which(get_nvcc_compiler())
    except Exception:  # TileLang is missing, does not import, or knows of no place to look in
        return shutil.which("nvcc")


def nvcc_version(path: str | None) -> str | None:
    """The version that an nvcc tells, as `13.0.88`; None without one, or if it does not tell."""
    if path is None:
        return None
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\bV(\d+(\.\d+)+)", told)
    return version[1] if version else None
