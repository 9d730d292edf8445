"""Records: one JSON object a line for each port, problem and direction, written as it is measured."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from common import DTYPE_NAMES, Mask, Problem, Switches, Target, Tile

from .baselines.protocol import bytes_of, flops_of
from .checks import TensorCheck, Worst
from .errors import UsageError, complain
from .inputs import InputSpec
from .jobs import Disagreement
from .reader import is_within
from .schema import VERSION, record_fault
from .timing import Timing
from .trial import Check

SHOWN = "harness tables {0} and harness report {0} show them"  # of a run that ended early and cannot be resumed


class RecordFile:
    """A file of records that appears under its name when it is complete.

    Until then its lines are in `FILE.partial`, flushed one by one; a run that ends early leaves them there, and an
    earlier file of the name as it was. One that ends before its first record leaves an earlier FILE.partial too, which
    may be what it resumed. What ended it gets a note that says so. Raises UsageError when the place cannot be written
    to, what is there is no regular file, or the name ends in `.gz`: lines that are flushed one by one are plain.

    resumes: records were read to go on from, and none is to be lost. Then FILE.partial and FILE are not written over:
    they stay beside the new file, as `FILE.before`, unless that has each of their records in the end. use: what is
    said of the records of a run that ended early, with {0} for their file.
    """

    def __init__(self, path: Path, *, resumes: bool = False, use: str = "") -> None:
        self.path = path
        self._resumes, self._use = resumes, use
        self._aside: Path | None = None
        if path.suffix == ".gz":
            raise UsageError(f"records are written as plain lines, not to {path}: give --json another name")
        # Before anything is opened: a pipe would wait for a reader, and the end would replace a device by a file.
        for place in (path, path.with_name(path.name + ".partial") if path.name else path):
            check_place(path, place)
        self.partial = path.with_name(path.name + ".partial")
        self._is_empty = True
        try:
            self._file: TextIO = self.partial.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {path} cannot be written: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        """Adds one record. Raises ValueError for one that is not as its schema has it: readers would refuse it."""
        plain = _plain(record)
        wrong = record_fault(plain)
        if wrong is not None:
            raise ValueError(f"a record that its schema does not allow: {wrong}")
        self._begin()
        self._file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def _begin(self) -> None:
        """Before the first record: what an earlier run left gives way."""
        if not self._is_empty:
            return
        if self._resumes and self.partial.stat().st_size:
            self._file.close()
            self._aside = self._set_aside(self.partial)
            self._file = self.partial.open("a", encoding="utf-8")
        self._file.truncate(0)
        self._is_empty = False

    def _set_aside(self, place: Path) -> Path:
        """Moves a file to the first name of FILE.before, FILE.before2, … that is free."""
        aside = next(
            one
            for number in count(1)
            if not os.path.lexists(one := self.path.with_name(f"{self.path.name}.before{number if number > 1 else ''}"))
        )
        os.replace(place, aside)
        return aside

    def _finish(self) -> None:
        """Gives the file its name; of what it resumed only that goes which has no record besides."""
        if self._aside is not None:
            self._drop(self._aside)
        if self._resumes and self.path.exists() and self.path.stat().st_size:
            self._drop(self._set_aside(self.path))
        os.replace(self.partial, self.path)

    def _drop(self, aside: Path) -> None:
        if is_within(aside, self.partial):
            aside.unlink()
        else:
            complain(f"{self.path} does not have all records that there were: the earlier file is kept as {aside}")

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._begin()
        self._file.close()
        if error is None:
            self._finish()
        elif not self._is_empty:
            use = self._use and f"; {self._use.format(self.partial)}"
            before = "" if self._aside is None else f"; those from before are in {self._aside}"
            error.add_note(f"the records so far are in {self.partial}{use}{before}")
        elif self.partial.stat().st_size:
            error.add_note(f"{self.partial} is as it was")
        else:
            self.partial.unlink()
            error.add_note("there are no records yet")


def record_file(
    path: Path | None, *, resumes: bool = False, use: str = ""
) -> AbstractContextManager[RecordFile | None]:
    """The `RecordFile` of a command that may have been given none: then there is none in the context either."""
    return nullcontext() if path is None else RecordFile(path, resumes=resumes, use=use)


def check_place(path: Path, place: Path, option: str = "--json") -> None:
    """Raises UsageError unless the place of a file of `--json path` is free, or a regular file's (links followed)."""
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        return  # also a link to nowhere, which the file replaces
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{option} {path} cannot be written: {reason}") from error
    if not stat.S_ISREG(mode):
        kind = next((kind for test, kind in _KINDS if test(mode)), "something else")
        of = "" if place == path else f": {place.name}"
        raise UsageError(f"{option} {path} cannot be written{of}: it is {kind}, no regular file")


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def _plain(value: Any) -> Any:
    """What JSON has: lists for tuples, and for infinities and NaN the strings inf, -inf and nan."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def problem_fields(problem: Problem) -> dict[str, Any]:
    """A problem, fit for JSON."""
    mask = problem.mask
    return {
        "id": problem.id,
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "head_dim": problem.head_dim,
        "dtype": DTYPE_NAMES[problem.dtype],
        "mask": {"left": mask.left, "right": mask.right, "corner": mask.corner},
        "scale": problem.scale,
    }


def problem_of(fields: dict[str, Any]) -> Problem:
    """The problem that `problem_fields` gave."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    own = {name: value for name, value in fields.items() if name != "id"}
    return Problem(**own | {"dtype": dtypes[fields["dtype"]], "mask": Mask(**fields["mask"])})


def tile_fields(tile: Tile | None) -> dict[str, Any] | None:
    """A tile, fit for JSON; what a port needs besides is among its fields."""
    return None if tile is None else tile.entry


def tile_of(fields: dict[str, int] | None) -> Tile | None:
    """The tile that `tile_fields` gave."""
    return None if fields is None else Tile.parse(fields)


def switches_fields(switches: Switches) -> dict[str, bool]:
    """The switches, fit for JSON."""
    return asdict(switches)


def disagreement_record(
    apart: Disagreement,
    problem: Problem,
    target: Target,
    *,
    suite: str,
    case: str,
    inputs: InputSpec,
    seed: int,
    sources: dict[str, str | None],
    facts: dict[str, Any],
) -> dict[str, Any]:
    """The record of how far two ports are apart. sources: the hashes of their sources, by name."""
    return {
        "schema": VERSION,
        "kind": "disagreement",
        "suite": suite,
        "case": case,
        "problem": problem_fields(problem),
        "inputs": asdict(inputs),
        "seed": seed,
        "target": {"name": target.name, "sm": target.sm},
        **asdict(apart),
        "sources": sources,
        "provenance": facts,
    }


def check_record(
    check: Check,
    *,
    suite: str,
    case: str,
    inputs: InputSpec,
    seed: int,
    sources: str | None,
    facts: dict[str, Any],
    timing: Timing | None = None,
    untimed: str = "",
    baselines: Sequence[Check] = (),
    compile_s: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The record of one check, and of the timing that it allowed.

    sources: the hash of the port's sources. facts: `harness.provenance.provenance`. untimed: why there is no timing
    although it was asked for. baselines: the checks of what it was to be timed beside; speeds are relative to the
    first. compile_s: seconds of the first call, `cold` with empty caches and `warm` in a process that finds them full.
    """
    return {
        "schema": VERSION,
        "kind": "check",
        "suite": suite,
        "case": case,
        "port": check.port,
        "direction": check.direction,
        "problem": problem_fields(check.problem),
        "inputs": asdict(inputs),
        "seed": seed,
        "target": {"name": check.target.name, "sm": check.target.sm},
        "tile": tile_fields(check.tile),
        "switches": switches_fields(check.switches),
        "verdict": check.verdict,
        "reason": check.reason,
        "faults": list(check.faults),
        "errors": {
            t.name: {
                "error": t.error,
                "allowed": t.allowed,
                "naive": t.naive,
                "floor": t.floor,
                "ratio": t.ratio,
                "worst": None if t.worst is None else asdict(t.worst),
            }
            for t in check.tensors
        },
        "first_calls_s": list(check.seconds),
        "compile_s": compile_s,
        "baselines": [{"port": b.port, "verdict": b.verdict, "reason": b.reason} for b in baselines],
        "samples": None if timing is None else timing.as_record(),
        "host_us": None if timing is None else timing.host_us,
        "untimed": untimed,
        "flops": flops_of(check.problem, check.direction),
        "bytes": bytes_of(check.problem, check.direction),
        "sources": sources,
        "provenance": facts,
    }


def check_of(record: dict[str, Any]) -> Check:
    """The check that `check_record` gave."""
    return Check(
        port=record["port"],
        problem=problem_of(record["problem"]),
        direction=record["direction"],
        target=Target.named(record["target"]["name"]),
        tile=tile_of(record["tile"]),
        switches=Switches(**record["switches"]),
        verdict=record["verdict"],
        tensors=tuple(_tensor_of(name, fields) for name, fields in record["errors"].items()),
        faults=tuple(record["faults"]),
        reason=record["reason"],
        seconds=tuple(record["first_calls_s"]),
    )


def _tensor_of(name: str, fields: dict[str, Any]) -> TensorCheck:
    worst = fields["worst"]
    place = None if worst is None else Worst(tuple(worst["index"]), float(worst["value"]), float(worst["oracle"]))
    error, allowed, naive, floor = (float(fields[key]) for key in ("error", "allowed", "naive", "floor"))
    return TensorCheck(name, error, allowed, naive, floor, place)


def timing_of(record: dict[str, Any]) -> Timing | None:
    """The timing of a record of a check."""
    return Timing.of_record(record["samples"], record["host_us"]) if record["samples"] else None


def disagreement_of(record: dict[str, Any]) -> Disagreement:
    """The disagreement that `disagreement_record` gave."""
    a, b = record["ports"]
    x, y = (float(value) for value in record["values"])
    place = None if record["index"] is None else tuple(record["index"])
    units, difference = float(record["units"]), float(record["difference"])
    return Disagreement(record["direction"], record["tensor"], (a, b), units, difference, place, (x, y))
