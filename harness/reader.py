"""Reading records: checked by the schema of their version, and brought to the current one."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .errors import UsageError, complain
from .schema import record_fault

Record = dict[str, Any]
# Of a check: its timing.
TIMED = ("samples", "host_us", "untimed", "baselines", "first_calls_s", "compile_s")
PACKED = b"\x1f\x8b"  # how what gzip has packed begins
Content = TypeVar("Content")


class NothingToShow(UsageError):
    """A file that can be read, and has nothing of what was asked for."""


def read_records(path: Path, kinds: Collection[str]) -> list[Record]:
    """The records of these kinds in a file of JSON lines, in the current version.

    Raises UsageError, naming the file and the line, when it cannot be read, something in it is no record by the schema
    of its version, and NothingToShow when no record is of these kinds.
    """
    return _of_kinds(path, _records(path, _lines(path)), kinds)


def read_files(paths: Sequence[Path], read: Callable[[Path], Content]) -> list[tuple[Path, Content]]:
    """What `read` gives of each file. One for which it raises NothingToShow is told on stderr and left out.

    Raises UsageError when all are such, and what else `read` raises.
    """
    found, empty = [], []
    for path in paths:
        try:
            found.append((path, read(path)))
        except NothingToShow as reason:
            empty.append(str(reason))
    if not found:
        raise UsageError("; ".join(empty))
    for line in empty:
        complain(f"{line}: it is left out")
    return found


def resumed_records(path: Path) -> tuple[list[Record], str]:
    """All records of a run that may have ended early, and a note of what is left out, or nothing.

    Its last line may be unfinished, and it may have ended before its first record. Raises UsageError for all else.
    """
    *lines, last = _lines(path)
    records, note = _records(path, lines), ""
    if last.strip():
        try:
            records += _records(path, [last], before=len(lines))
        except UsageError:
            note = f"{path} ends in an unfinished line, which is left out"
    if not records:
        return [], note or f"{path} is empty: everything is done anew"
    return records, note


def is_within(path: Path, whole: Path) -> bool:
    """Whether each record of the first file is in the second; not of a file that has none.

    A check without a timing, such as an interrupted run leaves, is also there when it was done again to the same end.
    """
    try:
        records, _ = resumed_records(path)
        others, _ = resumed_records(whole)
    except UsageError:
        return False
    known = {_text(form) for record in others for form in (record, _finding(record))}
    wanted = [record if record.get("samples") else _finding(record) for record in records]
    return bool(records) and all(_text(record) in known for record in wanted)


def _finding(record: Record) -> Record:
    """What a check has found, without when that was and what it took; any other record as it is."""
    if record["kind"] != "check":
        return record
    facts = {key: value for key, value in record["provenance"].items() if key not in ("date", "git")}
    return {key: value for key, value in record.items() if key not in TIMED} | {"provenance": facts}


def _text(record: Record) -> str:
    return json.dumps(record, sort_keys=True)


def _lines(path: Path) -> list[bytes]:
    """The lines of a file, which gzip may have packed, and what comes after the last end of a line."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(PACKED) else content).split(b"\n")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else error  # gzip's own have no strerror
        partial = path.with_name(path.name + ".partial") if path.name else path
        is_there = partial != path and os.path.isfile(partial)  # also of a name that is too long for one
        hint = f"; {partial} is there, of a run that ended early" if is_there else ""
        raise UsageError(f"records {path} cannot be read: {reason}{hint}") from error


def _records(path: Path, lines: Sequence[bytes], before: int = 0) -> list[Record]:
    """The records of some lines of a file, in the current version. before: how many lines come before these."""
    records = []
    for number, line in enumerate(lines, start=before + 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode(), parse_constant=_refuse)
            if b"\\u" in line:
                json.dumps(record, ensure_ascii=False).encode()  # half of a pair of code units is no text
        except UnicodeError as error:
            raise UsageError(f"records {path} cannot be read: line {number} is no text") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} line {number} is no JSON: {error}") from error
        wrong = record_fault(record)
        if wrong is not None:
            raise UsageError(f"{path} line {number}: {wrong}")
        records.append(upgraded(record))
    return records


def _of_kinds(path: Path, records: Sequence[Record], kinds: Collection[str]) -> list[Record]:
    found = [record for record in records if record["kind"] in kinds]
    if not found:
        raise NothingToShow(f"{path} holds no records of kind {' or '.join(kinds)}")
    return found


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
