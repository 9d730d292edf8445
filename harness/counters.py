"""What the card's counters tell of each kernel, read by NVIDIA's profiler ncu (Nsight Compute) where it may.

ncu runs a process of ours, which launches each call once more after a warm-up, and replays its kernels, each with cold
caches, until all counters are read. So these are other launches than the timed ones, of the same code on the same
inputs. The names of counters differ between chips: of those wanted the ones that the card has are asked for.
"""

from __future__ import annotations

import csv
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from common import Direction

from .jobs import Setting, Stand
from .suites import Case
from .trial import wait

PLACES = ("/usr/local/cuda/bin",)  # looked into beside PATH
# Of each figure the counters that tell it; the first that the card has is taken.
WANTED = {
    "ms": ("gpu__time_duration.sum",),
    "tensor_percent": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",  # all matrix instructions
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",  # those of 16 bits
    ),
    "warps_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "dram_bytes": ("dram__bytes.sum",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!selected|not_selected)(\w+?)_per_issue_active")
STALLS_KEPT = 3
UNITS = {
    "": 1.0,
    "%": 1.0,
    "inst": 1.0,
    "warp": 1.0,
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "Tbyte": 1e12,
}
MS = {"n": 1e-6, "u": 1e-3, "m": 1.0, "": 1e3}  # of nsecond or ns, and so on
UNITS |= {prefix + unit: factor for prefix, factor in MS.items() for unit in ("s", "second")}
NO_NCU = f"there is no ncu on PATH or in {', '.join(PLACES)}: it comes with CUDA's toolkit, or as nsight-compute"
FORBIDDEN = (
    "ncu may not read the card's counters (ERR_NVGPUCTRPERM): run as root, or set the driver's option "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


@dataclass(frozen=True)
class Counters:
    """Of one kernel; None for what the card does not count.

    tensor_percent: cycles in which the matrix unit works. warps_percent: resident warps, of those that could be.
    dram_bytes, l2_bytes: read and written. bank_conflicts: of shared memory, and `wavefronts`, the passes that its
    accesses took with them. stalls: the reasons for which warps wait most, as ncu calls them, and
    how many warps do at each issue.
    """

    ms: float | None = None
    tensor_percent: float | None = None
    warps_percent: float | None = None
    dram_bytes: float | None = None
    l2_bytes: float | None = None
    bank_conflicts: float | None = None
    wavefronts: float | None = None
    stalls: tuple[tuple[str, float], ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Fit for JSON."""
        return asdict(self) | {"stalls": dict(self.stalls)}

    @classmethod
    def of_record(cls, fields: dict[str, Any]) -> Counters:
        """The counters that `as_record` gave."""
        return cls(**fields | {"stalls": tuple(fields["stalls"].items())})


@dataclass(frozen=True)
class Counted:
    """kernels: the device's names, with their counters, in the order of their launches. reason: why there are none."""

    kernels: tuple[tuple[str, Counters], ...] = ()
    reason: str = ""


def find_ncu() -> str | None:
    """The path of ncu, from PATH or beside CUDA's other tools; None where there is none."""
    return shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *PLACES]))


def count(setting: Setting, name: str, case: Case, directions: Sequence[Direction]) -> Counted:
    """The counters of a contestant that has passed its checks; called in a worker, with whose time limit ncu ends."""
    ncu = find_ncu()
    if ncu is None:
        return Counted(reason=NO_NCU)
    with tempfile.TemporaryDirectory(prefix="harness-ncu-") as folder:
        request = Path(folder) / "request"
        request.write_bytes(pickle.dumps((setting, name, case, tuple(directions))))
        ours = [sys.executable, "-P", "-c", f"from harness.counters import launch_all; launch_all({str(request)!r})"]
        command = [
            *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"),
            *("--profile-from-start", "off", "--metrics", ",".join(metrics_for(offered(ncu)))),
        ]
        done = _run([*command, *ours])
    counted = tuple(parse(done.stdout))
    return Counted(counted) if counted else Counted(reason=reason_of(done.stdout, done.stderr))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = os.environ | {"PYTHONPATH": paths, "LC_ALL": "C"}  # numbers with a point
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


@cache
def offered(ncu: str) -> frozenset[str]:
    """The counters that ncu knows of the card here, without what is made of them; empty where it does not tell."""
    words = (line.split()[:1] for line in _run([ncu, "--query-metrics"]).stdout.splitlines())
    return frozenset(word for (word,) in filter(None, words) if "__" in word)


def metrics_for(known: Iterable[str]) -> list[str]:
    """What to ask of a card that has these counters; of one that does not tell, the first choice of each."""
    known = frozenset(known)
    if not known:
        return [names[0] for names in WANTED.values()]
    found = [next((one for one in names if one.split(".")[0] in known), None) for names in WANTED.values()]
    stalls = sorted(name for name in known if STALL.fullmatch(name))
    return [name for name in found if name] + [f"{name}.ratio" for name in stalls]


def parse(printed: str) -> list[tuple[str, Counters]]:
    """The kernels in what `ncu --csv --page raw` printed: a header, a row of units, and a row a launch.

    A figure without a number, or of a unit that is not known here, is left out.
    """
    units, *rows = [*csv.DictReader(line for line in printed.splitlines() if line.startswith('"'))] or [{}]
    return [(row["Kernel Name"], _counters(row, units)) for row in rows]


def _counters(row: Mapping[str, str], units: Mapping[str, str]) -> Counters:
    figures = {name: value for name in row if (value := _figure(row[name], units.get(name, ""))) is not None}
    told = {what: next((figures[name] for name in names if name in figures), None) for what, names in WANTED.items()}
    stalls = {found[1]: value for name, value in figures.items() if (found := STALL.match(name))}
    most = sorted(stalls.items(), key=lambda item: -item[1])[:STALLS_KEPT]
    return Counters(**told, stalls=tuple(most))


def _figure(text: str | None, unit: str | None) -> float | None:
    try:
        return float((text or "").replace(",", "")) * UNITS[unit or ""]
    except (ValueError, KeyError):
        return None


def reason_of(printed: str, complained: str) -> str:
    """Why ncu gave no figures, from what it printed and what the process that it ran complained of."""
    if "ERR_NVGPUCTRPERM" in printed + complained:
        return FORBIDDEN
    errors = [line.removeprefix("==ERROR==").strip() for line in printed.splitlines() if line.startswith("==ERROR==")]
    last = [line.strip() for line in complained.splitlines() if line.strip()][-1:]
    return f"ncu counted nothing: {'; '.join([*errors[:1], *last]) or 'it said nothing'}"


def launch_all(request: str) -> None:
    """The process that ncu runs: warms each call up, and launches it once where ncu listens."""
    os.dup2(2, 1)  # standard output is ncu's
    setting, name, case, directions = pickle.loads(Path(request).read_bytes())
    device = setting.environment.device
    with torch.no_grad():
        trial = Stand.of(setting, case).new_trial(name)
        for direction in directions:
            launch = trial.launch(direction)
            launch()
            wait(device)
            torch.cuda.profiler.start()
            launch()
            wait(device)
            torch.cuda.profiler.stop()
