"""`harness compile`: the shipped tiles of every port, built for every target, which takes no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import common
from common import Build, Direction, Port, Problem, Target
from common.target import TARGETS

from . import jobs
from .compilers import PACKAGES, compiler_by
from .environment import CPU, INTERPRET, core_count
from .errors import UsageError, complain, one_of
from .isolation import Caller, Here, Lost, Worker
from .names import own_name, tiles_of, variant_of
from .options import LIMIT_S, Directions, Format
from .provenance import provenance
from .reader import Record
from .records import RecordFile, problem_fields, problem_of, record_file, tile_fields, tile_of
from .schema import VERSION
from .session import EACH, FAILED, NOTHING_RAN, OK, WORKERS_MOST, in_order, progress
from .spills import PATH, SLACK, Built, Spills
from .suites import MASKS
from .tables import Table, print_tables
from .trial import Verdict

MINUTES = 10.0


@dataclass(frozen=True)
class CompileRequest:
    """The options of the command.

    limit_s: seconds that the kernels of one direction may take. minutes: after them nothing more is begun. recorded:
    where recorded spills live. record: write there what this run finds.
    """

    impls: tuple[str, ...]
    targets: tuple[str, ...] = tuple(target.name for target in TARGETS)
    directions: Directions = Directions.BOTH
    head_dims: tuple[int, ...] = (64, 128)
    masks: tuple[str, ...] = ("causal",)
    limit_s: float = LIMIT_S
    minutes: float = MINUTES
    record: bool = False
    recorded: Path = PATH
    isolated: bool = True
    json: Path | None = None
    form: Format = Format.TEXT


@dataclass(frozen=True)
class Item:
    """One thing to build: the kernels of a direction. port: its name, or that of a candidate of a sweep."""

    port: str
    target: Target
    direction: Direction
    problem: Problem

    def __str__(self) -> str:
        return f"{self.port} {self.target.name} {self.direction} d{self.problem.head_dim} {self.problem.mask}"


@dataclass(frozen=True)
class Row:
    """One kernel, or why there is none. before: its recorded spills, None when it was never built. begun: whether there
    was time to try; if not, its verdict says nothing of it."""

    item: Item
    verdict: Verdict
    reason: str = ""
    build: Build | None = None
    before: int | None = None
    begun: bool = True


@dataclass
class Compiling:
    """A run of the command, and what it has so far. compilers: of each port, as `spills.yaml` names them."""

    request: CompileRequest
    sources: dict[str, str | None] = field(default_factory=dict)
    compilers: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def compile_all(request: CompileRequest, *, all_asked: bool, open_port: Callable[[str], Port] = jobs.open_port) -> int:
    """Runs the command and returns its exit status: 1 when a kernel takes too much shared memory, spills more than
    before, or does not build; 2 when there was no time to try all.

    all_asked: a port that is not here is an error, and not just a line that says so. Raises UsageError for what can be
    told before anything is built.
    """
    problems = _problems(request)
    for name in request.impls:
        if name not in common.port_names():
            raise UsageError(one_of("--impl", common.port_names(), name))
    callers = _callers(request)
    this = Compiling(request)
    try:
        with record_file(request.json) as file:
            try:
                _build_all(this, callers, problems, open_port)
            finally:
                if file is not None:
                    _write(this, file)
                print_tables(compile_tables(this), request.form)
    finally:
        for caller in callers:
            caller.close()
    if request.record:
        Spills(request.recorded).record(_built(this, row) for row in this.rows if row.build is not None)
    return _status(this, all_asked)


def _problems(request: CompileRequest) -> list[Problem]:
    for mask in request.masks:
        if mask not in MASKS:
            raise UsageError(one_of("--mask", MASKS, mask))
    for target in request.targets:
        if target not in (names := [t.name for t in TARGETS]):
            raise UsageError(one_of("--target", names, target))
    try:
        return [
            Problem(1, 8, 8, 4096, 4096, head_dim, torch.bfloat16, MASKS[mask])
            for head_dim, mask in product(request.head_dims, request.masks)
        ]
    except ValueError as error:
        raise UsageError(f"--head-dim: {error}") from error


def _callers(request: CompileRequest) -> list[Caller]:
    if not request.isolated:
        return [Here()]
    cores = core_count()
    # A process that interprets kernels holds none that compile.
    return [Worker(request.limit_s, 1, {INTERPRET: "0"}) for _ in range(min(cores, WORKERS_MOST))]


def _build_all(
    this: Compiling, callers: Sequence[Caller], problems: Sequence[Problem], open_port: Callable[[str], Port]
) -> None:
    request = this.request
    setting = jobs.Setting(CPU, CPU.native, open_port=open_port)
    for name in request.impls:
        opened = jobs.opened(callers[0], setting, name)
        if opened.reason or not opened.compiles:
            this.missing[name] = opened.reason or f"the {name} port has no kernels to compile"
        else:
            this.sources[name] = opened.sources
            this.compilers[name] = compiler_by(callers[0], name)
    targets = [Target.named(name) for name in request.targets]
    every = product(this.sources, targets, EACH[request.directions], problems)
    items = [Item(*one) for one in every]
    # What takes long is begun first, or one of them would be waited for alone at the end.
    begun = sorted(items, key=lambda item: (item.direction == "forward", item.port == "triton"))
    deadline = time.monotonic() + 60 * request.minutes
    known = Spills(request.recorded)

    def build(caller: Caller, item: Item) -> list[Row]:
        if time.monotonic() > deadline:
            return [Row(item, "unsupported", f"not begun: {request.minutes:g} minutes were over", begun=False)]
        try:
            built = caller.call(jobs.build, setting, item.port, item.problem, item.target, item.direction)
        except Lost as lost:
            return [Row(item, "fail", f"the compiler {lost}")]
        if isinstance(built, jobs.Refusal):
            return [Row(item, "unsupported" if built.by_contract else "fail", built.reason)]
        return [_judged(this, item, one, known) for one in built]

    with progress("compiling", len(begun)) as begin, in_order(callers, build, begun) as outcomes:
        for item, outcome in zip(begun, outcomes, strict=True):
            begin(str(item))
            this.rows += outcome()
    this.rows.sort(key=lambda row: items.index(row.item))


def _judged(this: Compiling, item: Item, build: Build, known: Spills) -> Row:
    row = Row(item, "pass", build=build)
    before = known.before(_built(this, row))
    room = item.target.smem_per_block
    faults = []
    if build.shared > room:
        faults.append(f"takes {build.shared} B of shared memory; {item.target.sm} gives {room} B")
    if before is not None and build.spills > before + SLACK.get(item.port, 0):
        faults.append(f"spills {build.spills} B a thread where it was {before} B")
    return replace(row, verdict="fail" if faults else "pass", reason="; ".join(faults), before=before)


def _built(this: Compiling, row: Row) -> Built:
    assert row.build is not None
    port, problem = row.item.port, row.item.problem
    about = port, this.compilers[port], row.item.target.name, str(problem.mask), problem.head_dim
    return Built(*about, row.build.kernel, row.build.spills)


def compile_tables(this: Compiling) -> list[Table]:
    """A table for each port: a row for each kernel, in the order of targets and directions."""
    tables = []
    for port in this.sources:
        rows = [row for row in this.rows if row.item.port == port]
        table = _table(f"{port}, built by {this.compilers[port]}", rows)
        if any(row.build is not None and row.before is None for row in rows):
            table.notes.append("Where before is – nothing is recorded to compare with: harness compile --record.")
        late = sum(not row.begun for row in rows)
        if late:
            table.notes.append(f"{late} were not begun: --minutes gives more than {this.request.minutes:g}.")
        tables.append(table)
    if this.missing:
        table = Table("Not built", ("port", "why"), list(this.missing.items()), labels=2)
        tables.append(table)
    return tables


def built_tables(records: Iterable[Record]) -> list[Table]:
    """The same of the records of builds, with a table for each problem of which candidates of a sweep were built."""
    found: dict[str, list[Row]] = {}
    for record in records:
        name, problem = record["port"], problem_of(record["problem"])
        package = PACKAGES.get(own_name(name), own_name(name))
        compiler = f"built by {package} {record['provenance']['packages'].get(package) or 'unknown'}"
        swept = f"Tiles of {own_name(name)} for {problem.id}, {compiler}"
        item = Item(name, Target.named(record["target"]["name"]), record["direction"], problem)
        row = Row(item, record["verdict"], record["reason"], build_of(record), record["spills_before"])
        found.setdefault(swept if variant_of(name) else f"{name}, {compiler}", []).append(row)
    return [_table(title, rows) for title, rows in found.items()]


def _table(title: str, rows: Iterable[Row]) -> Table:
    table = Table(
        title,
        (
            *("target", "D", "mask", "kernel", "tile", "shared B", "of", "registers", "spills B", "before"),
            *("instructions", "s", "verdict"),
        ),
        labels=5,
    )
    for row in rows:
        table.add(*_cells(row))
    table.notes.append(
        "shared B: of a block, beside what the target gives. registers and spills B: a thread. s: seconds of the "
        "compiler, in brackets where its cache had the kernel."
    )
    return table


def _cells(row: Row) -> tuple[str, ...]:
    target, problem, one = row.item.target, row.item.problem, row.build
    about = target.name, str(problem.head_dim), str(problem.mask)
    if one is None:
        reason = row.reason if row.verdict == "unsupported" else f"FAIL: {row.reason}"
        tile = tiles_of(row.item.port).get(row.item.direction, "–")
        return *about, row.item.direction, str(tile), *["–"] * 7, reason
    seconds = f"({one.seconds:.1f})" if one.cached else f"{one.seconds:.1f}"
    before = "–" if row.before is None else str(row.before)
    taken = str(one.shared), str(target.smem_per_block), str(one.registers), str(one.spills), before
    verdict = f"FAIL: {row.reason}" if row.reason else "pass"
    return *about, one.kernel, str(one.tile), *taken, " ".join(one.instructions) or "–", seconds, verdict


def _status(this: Compiling, all_asked: bool) -> int:
    for reason in this.missing.values():
        if all_asked:
            complain(reason)
    if any(row.verdict == "fail" for row in this.rows):
        return FAILED
    late = sum(not row.begun for row in this.rows)
    if late:
        minutes = f"{this.request.minutes:g} minutes"
        complain(f"{late} of {len(this.rows)} builds were not begun within {minutes}: --minutes gives more")
    idle = {row.item.port for row in this.rows} - {row.item.port for row in this.rows if row.build is not None}
    return NOTHING_RAN if late or idle or not this.rows or (all_asked and this.missing) else OK


def _write(this: Compiling, file: RecordFile) -> None:
    facts = provenance(torch.device("cpu"), interpreted=False)
    for row in (row for row in this.rows if row.begun):
        file.write(build_record(row, sources=this.sources[row.item.port], facts=facts))


def build_record(row: Row, *, sources: str | None, facts: dict[str, Any]) -> dict[str, Any]:
    """The record of one kernel, or of why there is none."""
    item, one = row.item, row.build
    taken = (
        {
            "kernel": one.kernel,
            "tile": tile_fields(one.tile),
            "shared": one.shared,
            "registers": one.registers,
            "spills": one.spills,
            "instructions": list(one.instructions),
            "seconds": one.seconds,
            "cached": one.cached,
        }
        if one is not None
        else None
    )
    return {
        "schema": VERSION,
        "kind": "build",
        "port": item.port,
        "direction": item.direction,
        "problem": problem_fields(item.problem),
        "target": {"name": item.target.name, "sm": item.target.sm},
        "verdict": row.verdict,
        "reason": row.reason,
        "build": taken,
        "spills_before": row.before,
        "sources": sources,
        "provenance": facts,
    }


def build_of(record: Record) -> Build | None:
    """The build that `build_record` was given."""
    fields = record["build"]
    if fields is None:
        return None
    own = fields | {"tile": tile_of(fields["tile"]), "instructions": tuple(fields["instructions"])}
    return Build(target=record["target"]["name"], ptx="", **own)
