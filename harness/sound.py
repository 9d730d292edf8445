"""Records that can be shown: beyond their schema nothing in them contradicts itself, or is what no machine gives."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from common import Target

from .errors import UsageError, one_line
from .inputs import InputSpec
from .reader import Record, read_records
from .records import check_of, disagreement_of, problem_of
from .roofline_records import ROLES

MOST = 1e9  # no kernel takes as many ms, and no card reaches as many GB/s or TFLOP/s
LEAST_MS = 1e-6  # no launch takes less than a nanosecond


def sound_records(path: Path, kinds: Collection[str]) -> list[Record]:
    """`read_records`, of records that can be shown. Raises UsageError for one that cannot, saying why."""
    records = read_records(path, kinds)
    for record in records:
        wrong = _fault(record)
        if wrong is not None:
            raise UsageError(f"{path} holds a record that cannot be shown: {wrong}")
    return records


def _fault(record: Record) -> str | None:
    try:
        if "problem" in record:
            problem_of(record["problem"])
        if "inputs" in record:
            InputSpec(**record["inputs"])
        if "target" in record:
            Target.named(record["target"]["name"])
        if record["kind"] == "check":
            check_of(record)
            return _timing_fault(record) if record["samples"] else None
        if record["kind"] == "roofline":
            return _roofline_fault(record)
        if record["kind"] == "disagreement":
            disagreement_of(record)
        if record["kind"] == "memory":
            return _memory_fault(record)
        if record["kind"] == "model":
            return _model_fault(record)
    except (ValueError, TypeError, OverflowError) as error:
        return one_line(error)
    return None


def _memory_fault(record: Record) -> str | None:
    sizes = [record[name] for name in ("peak_bytes", "extra_bytes", "formula_bytes")]
    if record["peak_bytes"] is None:
        return None if record["reason"] else "neither bytes nor why there are none"
    if any(size is None or not -(MOST**2) < size < MOST**2 for size in sizes):
        return "bytes that no card has"
    return None


def _model_fault(record: Record) -> str | None:
    wanted = {0, record["steps"]} if record["verdict"] != "pass" else {record["steps"]}
    if len(record["losses"]) not in wanted:
        return f"{len(record['losses'])} losses of {record['steps']} steps"
    if any(not LEAST_MS <= ms <= MOST for ms in record["step_ms"]):
        return "steps that take no time, or years"
    return None


def _timing_fault(record: Record) -> str | None:
    contestants = set(record["host_us"] or ())
    if record["port"] not in contestants:
        return f"samples without {record['port']}"
    if any(set(sample["ms"]) != contestants for sample in record["samples"]):
        return "samples of which not all have a time of every contestant"
    if any(not LEAST_MS <= ms <= MOST for sample in record["samples"] for ms in sample["ms"].values()):
        return "times that no launch takes"
    if not 1 <= record["flops"] <= MOST**2:
        return "a timing of nothing, or of operations of no problem"
    return None


def _roofline_fault(record: Record) -> str | None:
    kernels, roles = record["kernels"], ROLES[record["direction"]]
    if len(kernels) not in (0, len(roles)):
        return f"{len(kernels)} kernels of a {record['direction']}"
    ceilings = record["ceilings"] or {"copy_gbs": None, "matrix_tflops": {}, "exp_gps": None}
    figures = [ceilings["copy_gbs"], *ceilings["matrix_tflops"].values(), ceilings["exp_gps"]]
    figures += [ms for kernel in kernels for ms in kernel["samples_ms"] or ()]
    if any(figure is not None and not LEAST_MS <= figure <= MOST for figure in figures):
        return "times or ceilings that no card has"
    if any(kernel["flops"] > MOST**2 or kernel["bytes"] > MOST**2 for kernel in kernels):
        return "operations or bytes of no problem"
    return _timing_fault(record) if record["samples"] else None
