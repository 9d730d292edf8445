"""Records as `harness bench` and `harness memory` write them, made up for the tests of `harness report`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from common import Mask, Problem
from harness.baselines.protocol import SPANS, flops_of
from harness.checks import NAMES
from harness.memory import formula
from harness.records import problem_fields

from .test_records import current

Record = dict[str, Any]
MS = {"triton": 0.5, "tilelang": 0.4, "sdpa_flash": 0.6, "flex": 0.8}
HOPPER, ADA = {"name": "hopper", "sm": "sm_90a"}, {"name": "ada", "sm": "sm_89"}
DATE = "2026-01-31T12:00:00Z"


def problem(length: int = 1024, *, causal: bool = True, head_dim: int = 64) -> Problem:
    return Problem(4, 8, 8, length, length, head_dim, torch.bfloat16, Mask.causal() if causal else Mask())


def provenance() -> Record:
    return copy.deepcopy(current()["provenance"]) | {"date": DATE}


def timed(port: str = "triton", of: Problem | None = None, direction: str = "forward", **changed: Any) -> Record:
    """A record of a bench: 20 rounds around `MS`, in milliseconds, by a clock that a round shares."""
    of = of or problem()
    rng, record = np.random.default_rng(of.len_q), current()
    factor = of.len_q**2 / 1024**2
    samples = [
        record["samples"][0] | {"ms": {name: ms * factor * clock * rng.normal(1, 0.01) for name, ms in MS.items()}}
        for clock in rng.uniform(0.98, 1.02, size=20)
    ]
    beside = [{"port": name, "verdict": "pass", "reason": ""} for name in ("sdpa_flash", "flex")]
    beside.append({"port": "fa4", "verdict": "unsupported", "reason": "FA4 needs flash_attn.cute"})
    names = [name for part in SPANS[direction] for name in NAMES[part]]  # type: ignore[index]
    errors = dict.fromkeys(names, record["errors"]["o"])
    figures = {"samples": samples, "host_us": dict.fromkeys(MS, 10.0), "flops": flops_of(of, direction)}
    figures["errors"] = errors
    about = {"port": port, "direction": direction, "problem": problem_fields(of), "baselines": beside}
    return record | about | figures | {"provenance": provenance()} | changed


def bench() -> list[Record]:
    """Two ports by turns, forward and backward, two lengths, causal and full, on two code paths."""
    return [
        timed(port, problem(length, causal=causal), direction, target=target)
        for target in (HOPPER, ADA)
        for direction in ("forward", "backward")
        for length in (1024, 4096)
        for causal in (True, False)
        for port in ("triton", "tilelang")
    ]


def failed() -> Record:
    """A backward of the cute port that is wrong, for a problem that the others were timed on."""
    wrong = current()["errors"]["o"] | {"error": 0.02, "allowed": 0.005, "ratio": 4.0}
    nothing = {"samples": None, "host_us": None}
    return timed("cute", problem(), "backward", verdict="fail", errors={"dq": wrong}, **nothing)


def memory() -> list[Record]:
    """The plain attention, which does not fit at the last length, and a port that takes the formula and 1 MB."""
    records = []
    for length in (1024, 4096, 16384):
        of = problem(length)
        held = formula(of, "forward")
        for who, extra in (("naive", 4 * 8 * length**2 * 6), ("triton", 10**6)):
            lost = who == "naive" and length == 16384
            sizes = {"peak_bytes": None if lost else held + extra, "extra_bytes": None if lost else extra}
            base = {name: current()[name] for name in ("schema", "suite", "case", "inputs", "seed", "target")}
            about = {"kind": "memory", "contestant": who, "direction": "forward", "problem": problem_fields(of)}
            told = {"verdict": None if who == "naive" else "pass", "reason": "out of memory" if lost else ""}
            records.append(
                base | about | told | sizes
                | {"formula_bytes": held, "sources": None, "provenance": provenance()}
            )  # fmt: skip
    return records


def models(mode: str = "train", *, steps: int = 30) -> list[Record]:
    """A GPT-2 with PyTorch's attention, with another of PyTorch's, with a port, with one that ran out of memory."""
    of = Problem(8, 12, 12, 1024, 1024, 64, torch.bfloat16, Mask.causal())
    base = {name: current()[name] for name in ("schema", "inputs", "seed")} | {"suite": "gpt2", "case": "attention"}
    base |= {"target": HOPPER, "problem": problem_fields(of), "mode": mode, "steps": steps, "compiled": False}
    sizes = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 50257, "parameters": 124_439_808}
    text = {"source": "a book", "tokenizer": "bytes", "sha256": "0" * 64}
    base |= {"model": sizes, "weights": None, "text": text, "direction": "both" if mode == "train" else "forward"}
    losses = [10.8 - 0.1 * step for step in range(steps)]
    records = []
    for who, apart, ms in (("sdpa_flash", 0.0, 80.0), ("sdpa_efficient", 1e-4, 100.0), ("triton", 2e-4, 64.0)):
        own = [loss + apart * (step + 1) / steps for step, loss in enumerate(losses)]
        norms = [4.0 + 10 * apart] * steps if mode == "train" else []
        timed = [1000.0] * 9 + [ms] * (steps - 10) if mode == "train" else [ms] * steps
        ran = {"verdict": "pass", "reason": "", "losses": own, "grad_norms": norms, "step_ms": timed}
        records.append(base | {"contestant": who, "peak_bytes": 12_340_000_000} | ran)
    lost = {"verdict": "unsupported", "reason": "out of memory", "losses": [], "grad_norms": [], "step_ms": []}
    records.append(base | {"contestant": "naive", "peak_bytes": None} | lost)
    made = {"kind": "model", "sources": None, "provenance": provenance()}
    return [copy.deepcopy(record | made) for record in records]
