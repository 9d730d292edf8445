"""Reading records: checked by the schema of their version, and brought to the current one."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .errors import UsageError
from .schema import record_fault

Record = dict[str, Any]


def read_records(path: Path, kinds: Collection[str]) -> list[Record]:
    """The records of these kinds in a file of JSON lines, in the current version.

    Raises UsageError, naming the file and the line, when it cannot be read, something in it is no record by the schema
    of its version, or no record is of these kinds.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"records {path} cannot be read: {reason}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} line {number} is no JSON: {error}") from error
        wrong = record_fault(record)
        if wrong is not None:
            raise UsageError(f"{path} line {number}: {wrong}")
        record = upgraded(record)
        if record["kind"] in kinds:
            records.append(record)
    if not records:
        raise UsageError(f"{path} holds no records of kind {' or '.join(kinds)}")
    return records


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def upgraded(record: Record) -> Record:
    """A valid record of any version, as one of the current version."""
    if record["schema"] == 1:
        record = _from_version_1(record)
    return _from_version_2(record) if record["schema"] == 2 else record


def _from_version_1(record: Record) -> Record:
    """Version 1 had one baseline at most, and its first samples did not tell which may hold host time."""
    if record["kind"] != "run":
        return record | {"schema": 2}
    fresh = {key: value for key, value in record.items() if key != "baseline"}
    baseline, samples = record["baseline"], record["samples"]
    return fresh | {
        "schema": 2,
        "kind": "check",
        "baselines": [] if baseline is None else [baseline | {"reason": ""}],
        "samples": None if samples is None else [{"late": []} | sample for sample in samples],
        "untimed": "",
        "compile_s": None,
    }


def _from_version_2(record: Record) -> Record:
    """Version 2 did not tell when it was measured."""
    fresh = record | {"schema": 3}
    if "provenance" in record:
        fresh["provenance"] = {"date": None} | record["provenance"]
    return fresh
