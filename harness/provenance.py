"""Where a number comes from: versions, the card, the commit, and the sources of the port that made it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from common import port_names, port_package

from .names import own_name
from .reader import Record

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "tilelang": "tilelang",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "nvml": "nvidia-ml-py",
    "numpy": "numpy",
}
ROOT = Path(__file__).resolve().parent.parent


def package_versions() -> dict[str, str | None]:
    """The installed versions, without importing anything; None for what is not installed."""
    versions: dict[str, str | None] = {}
    for name, package in PACKAGES.items():
        try:
            versions[name] = version(package)
        except PackageNotFoundError:
            versions[name] = None
    return versions | {"torch": torch.__version__}  # which tells the build as well


def driver_version() -> str | None:
    """The version of the NVIDIA driver, or None where there is none to ask."""
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        return driver.decode() if isinstance(driver, bytes) else str(driver)
    except Exception:  # no NVML: the kernel module's own file tells as well
        pass
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    numbers = [word for word in first.split() if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else None


@cache
def git_commit() -> dict[str, Any]:
    """`commit` of the checkout and whether it is `dirty`; both None outside one.

    A copy that was sent without its history can be told the commit in the environment variable HARNESS_GIT_COMMIT.
    """
    told = os.environ.get("HARNESS_GIT_COMMIT")
    if told:
        return {"commit": told, "dirty": None}
    try:
        git = ["git", "-C", str(ROOT)]
        run = {"capture_output": True, "text": True, "check": True, "timeout": 10}
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], **run).stdout.strip()  # type: ignore[call-overload]
        if Path(top).resolve() != ROOT:  # installed somewhere inside another repository
            raise OSError
        commit = subprocess.run([*git, "rev-parse", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        status = subprocess.run([*git, "status", "--porcelain"], **run).stdout  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(status.strip())}


def sources_hash(port: object) -> str | None:
    """SHA-256 over the sources of a port's package, `common` included; None when they are not on disk as files.

    Names and contents of every .py and .yaml file count, so that a table can tell whether its kernels have changed.
    """
    module = sys.modules[type(port).__module__]
    if not getattr(module, "__file__", None):
        return None
    return folder_hash(Path(str(module.__file__)).parent)


def folder_hash(package: Path) -> str:
    """SHA-256 over the sources in the folder of a port's package, and over `common`, as `sources_hash` gives it."""
    digest = hashlib.sha256()
    for folder in (package, ROOT / "common"):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".yaml")):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def have_changed(port: str, sources: str | None) -> bool:
    """Whether the sources of the port of that name, or those of `common`, are no longer the ones of this hash.

    Of a port that is not known here nothing can be told.
    """
    return port in port_names() and sources != folder_hash(ROOT / port_package(port))


def changed_ports(records: Iterable[Record]) -> list[str]:
    """The ports of records whose sources, or those of `common`, are no longer the ones that the records were made with.

    Each is named once, in the order of the records.
    """
    made_of = dict.fromkeys(source for record in records for source in _sources(record))
    return list(dict.fromkeys(port for port, sources in made_of if have_changed(port, sources)))


def _sources(record: Record) -> Iterator[tuple[str, str]]:
    """The contestants of a record that are made of sources, with the hash of these."""
    if record["kind"] == "disagreement":
        sources = record["sources"]
    else:
        sources = {record["contestant" if "contestant" in record else "port"]: record["sources"]}
    for name, digest in sources.items():
        if digest is not None:
            yield own_name(name), digest


def provenance(device: torch.device, *, interpreted: bool) -> dict[str, Any]:
    """What every record of a run shares, fit for JSON. To be asked once, as the run begins: the date is now."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": package_versions(),
        "cuda": torch.version.cuda,
        "git": git_commit(),
        "device": device.type,
        "interpreted": interpreted,
        "card": None,
        "sm": None,
        "driver": None,
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts |= {
            "card": torch.cuda.get_device_name(device),
            "sm": f"sm_{major}{minor}",
            "driver": driver_version(),
        }
    return facts


def in_words(facts: dict[str, Any]) -> str:
    """The provenance of a record in one line: the card and its driver, versions, commit, date."""
    card = f"{facts['card']}, driver {facts['driver']}" if facts["card"] else "the CPU"
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    return f"{card}, {versions}, {commit_and_date(facts)}"


def commit_and_date(facts: dict[str, Any]) -> str:
    """Of what and when a record was made, in words, from its provenance; of when, as far as it is known."""
    commit = f"commit {(facts['git']['commit'] or 'unknown')[:10]}"
    return f"{commit}, {facts['date'][:10]}" if facts["date"] else commit
