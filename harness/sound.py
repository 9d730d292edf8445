"""Records that can be shown or gone on from: beyond their schema nothing in them contradicts itself, or is what no
machine gives."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from common import Target

from .baselines.protocol import SPANS
from .checks import NAMES
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
    check_sound(path, records, "shown")
    return records


def check_sound(path: Path, records: Iterable[Record], use: str) -> None:
    """Raises UsageError when one of the records of a file contradicts itself. use: what cannot be done with it then."""
    for record in records:
        wrong = _fault(record)
        if wrong is not None:
            raise UsageError(f"{path} holds a record that cannot be {use}: {wrong}")


def _fault(record: Record) -> str | None:
    try:
        if "problem" in record:
            problem_of(record["problem"])
        if "inputs" in record:
            InputSpec(**record["inputs"])
        if "target" in record:
            Target.named(record["target"]["name"])
        if record["kind"] == "check":
            return _check_fault(record) or (_timing_fault(record) if record["samples"] else None)
        if record["kind"] == "roofline":
            return _roofline_fault(record)
        if record["kind"] == "disagreement" and not disagreement_of(record).units >= 0:
            return "a distance that is none"
        if record["kind"] == "memory":
            return _memory_fault(record)
        if record["kind"] == "model":
            return _model_fault(record)
    except (ValueError, TypeError, OverflowError) as error:
        return one_line(error)
    return None


def _check_fault(record: Record) -> str | None:
    tensors = {tensor.name: tensor for tensor in check_of(record).tensors}
    names = {name for direction in SPANS[record["direction"]] for name in NAMES[direction]}
    if not tensors.keys() <= names:
        return f"errors of {', '.join(sorted(tensors.keys() - names))}, which no {record['direction']} has"
    if record["verdict"] != "pass":
        return f"a timing of what is {record['verdict']}" if record["samples"] else None
    if tensors.keys() != names or record["faults"] or not all(tensor.passed for tensor in tensors.values()):
        return "a pass that its errors and faults do not bear out"
    return None


def _memory_fault(record: Record) -> str | None:
    peak, extra, formula = (record[name] for name in ("peak_bytes", "extra_bytes", "formula_bytes"))
    if peak is None:
        return None if record["reason"] else "neither bytes nor why there are none"
    if not 0 <= peak < MOST**2 or not 0 <= formula < MOST**2:
        return "bytes that no card has"
    return None if extra == peak - formula else "bytes beyond the formula that are not the rest"


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
