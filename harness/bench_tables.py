"""The tables of a bench, made of its records: one for each port and direction, one across, and a port beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .baselines import BASELINES
from .environment import path_title
from .names import own_name
from .provenance import changed_ports, in_words
from .reader import Record
from .records import problem_of, tile_of, timing_of
from .tables import Table, problem_cells
from .timing import FLOP_CONVENTION, why_throttled

SPAN_WORDS = {"forward": "forward", "backward": "backward", "both": "forward and backward in one launch"}


def path_of(record: Record) -> str:
    """Whose code path ran on which card."""
    card, sm = record["provenance"]["card"] or "the CPU", record["provenance"]["sm"]
    target = record["target"]
    return path_title(target["name"], own=target["sm"].removesuffix("a") == sm, where=card)


def title_of(name: str) -> str:
    """A port's or baseline's name for people."""
    return BASELINES[name].title if name in BASELINES else name


def bench_tables(records: Sequence[Record], missing: Mapping[str, str]) -> list[Table]:
    """The tables. missing: the reasons of the ports that could not run, by name."""
    return [*port_tables(records), *across_tables(records, missing), *beside_itself(records)]


def port_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each port, direction and path: time, speed beside the first baseline, host and compile time."""
    return [_port_table(rows) for rows in grouped(records, "port").values()]


def grouped(records: Iterable[Record], *more: str) -> dict[tuple[str, ...], list[Record]]:
    """The records by direction and path, and by these fields before."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        key = (*(record[name] for name in more), record["direction"], path_of(record))
        groups.setdefault(key, []).append(record)
    return groups


def _port_table(records: Sequence[Record]) -> Table:
    first = records[0]
    port, beside = first["port"], first["baselines"][0]["port"] if first["baselines"] else None
    theirs = title_of(beside) if beside else "–"
    table = Table(
        f"{port} {SPAN_WORDS[first['direction']]}, {path_of(first)}",
        (
            *("B,H,D", "dtype", "N", "mask", "tile", "ms", "TF/s", f"% of {theirs}", "95 %", "host µs"),
            *("cold s", "warm s", "MHz", "W", "throttled", "check"),
        ),
        labels=5,
    )
    for record in records:
        table.add(*_port_cells(record, beside), problem=problem_of(record["problem"]))
        table.notes += doubts_of(record)
    why = why_throttled(times for record in records if (times := timing_of(record)))
    if why:
        table.notes.append(f"throttled: rounds in which the card held its clocks down ({why}).")
    for baseline in first["baselines"]:
        reasons = {
            b["reason"] for r in records for b in r["baselines"] if b["port"] == baseline["port"] and b["reason"]
        }
        table.notes += [f"{title_of(baseline['port'])}: {reason}" for reason in sorted(reasons)]
    table.notes += provenance_notes(records)
    host = "host µs: until the call returns."
    if any(record["compile_s"] for record in records):
        host += (
            " cold s: the first call, compiled into empty caches; warm s: the first call of another process, which "
            "finds them full. A row whose kernels an earlier row brought shows less of both."
        )
    table.notes += [host, *changed_notes(records)]
    return table


def _port_cells(record: Record, beside: str | None) -> tuple[str, ...]:
    times, port = timing_of(record), record["port"]
    compiled = record["compile_s"]
    seconds = ("–", "–") if compiled is None else (f"{compiled['cold']:.2f}", f"{compiled['warm']:.2f}")
    about = *problem_cells(problem_of(record["problem"])), str(tile_of(record["tile"]) or "–")
    if times is None:
        return *about, *["–"] * 5, *seconds, *["–"] * 3, check_cell(record)
    ms = times.median(port)
    percent, interval = "–", "–"
    if beside in times.host_us:
        percent, interval = times.speed(port, beside).cells(1, 100)
    sensors = [r.sensors for r in times.rounds]
    clock, power = (_median(x) for x in ([s.sm_mhz for s in sensors], [s.power_w for s in sensors]))
    figures = f"{ms:.4f}", f"{record['flops'] / 1e9 / ms:.1f}", percent, interval, f"{times.host_us[port]:.0f}"
    return *about, *figures, *seconds, clock, power, f"{times.throttled}/{len(times.rounds)}", check_cell(record)


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.median(known):.0f}" if known else "–"


def check_cell(record: Record) -> str:
    """The verdict, and why there is no time."""
    if record["verdict"] == "pass":
        return f"pass, not timed: {record['untimed']}" if record["untimed"] else "pass"
    why = record["reason"] or "; ".join(record["faults"])
    if record["verdict"] == "unsupported":
        return why
    return f"FAIL: {why}" if why else "FAIL"


def complaints_of(record: Record) -> list[str]:
    """What is to be said of one row beside its figures: rounds that throttled, and the doubts."""
    times, name = timing_of(record), record["problem"]["id"]
    if times is None or not times.throttled:
        return doubts_of(record)
    throttled = f"{name}: {times.throttled} of {len(times.rounds)} rounds throttled ({why_throttled([times])})"
    return [throttled, *doubts_of(record)]


def doubts_of(record: Record) -> list[str]:
    """Of one row: samples that may hold host time, sensors that could not be read."""
    times, name = timing_of(record), record["problem"]["id"]
    if times is None:
        return []
    own = {record["port"], *(b["port"] for b in record["baselines"])} & set(times.host_us)
    notes = [
        f"{name}: {times.late(who)} of {len(times.rounds)} samples of {who} may hold host time"
        for who in sorted(own)
        if times.late(who)
    ]
    return notes + sorted({r.sensors.note for r in times.rounds} - {""})


def provenance_notes(records: Sequence[Record]) -> list[str]:
    """What is to be said of where the records come from, and of how they count."""
    return [f"{in_words(records[0]['provenance'])}. {FLOP_CONVENTION}"]


def changed_notes(records: Iterable[Record]) -> list[str]:
    """Whose sources are no longer those that were measured."""
    changed = changed_ports(records)
    return [f"The sources of {port} or of `common` have changed since this was measured." for port in changed]


def across_tables(records: Sequence[Record], missing: Mapping[str, str]) -> list[Table]:
    """One table a direction: TFLOP/s of every contestant beside its verdict; who cannot run is a column of reasons."""
    tables = []
    for (direction, path), members in grouped(records).items():
        ports = list(dict.fromkeys([*(r["port"] for r in members), *missing]))
        rivals = list(dict.fromkeys(b["port"] for r in members for b in r["baselines"]))
        rows: dict[tuple[str, str], dict[str, Record]] = {}
        for record in members:
            rows.setdefault((record["case"], record["problem"]["id"]), {})[record["port"]] = record
        table = Table(
            f"All {SPAN_WORDS[direction]}, {path}: TFLOP/s, and the verdict of the check",
            ("B,H,D", "dtype", "N", "mask", *map(title_of, (*ports, *rivals))),
            labels=4,
        )
        said: dict[str, str] = {}  # a reason is said once a column, not in each of its cells
        for row in rows.values():
            some = next(iter(row.values()))
            cells = {name: _across_cell(name, row, missing) for name in (*ports, *rivals)}
            shown = ("–" if said.get(name) == cell else cell for name, cell in cells.items())
            problem = problem_of(some["problem"])
            table.add(*problem_cells(problem), *shown, problem=problem)
            said = {name: cell for name, cell in cells.items() if not cell[0].isdigit()}
        table.notes += provenance_notes(members)
        tables.append(table)
    return tables


def _across_cell(name: str, row: Mapping[str, Record], missing: Mapping[str, str]) -> str:
    """TFLOP/s and the verdict, or why there are none."""
    if name in missing:
        return missing[name]
    some = next(iter(row.values()))
    times = next((t for t in map(timing_of, row.values()) if t is not None and name in t.host_us), None)
    if times is not None:
        return f"{some['flops'] / 1e9 / times.median(name):.1f} pass"
    if name in row:
        return check_cell(row[name])
    beside = next((b for record in row.values() for b in record["baselines"] if b["port"] == name), None)
    if beside is None:
        return "–"
    return f"FAIL: {beside['reason']}" if beside["verdict"] == "fail" else beside["reason"] or beside["verdict"]


def beside_itself(records: Sequence[Record]) -> list[Table]:
    """Of a port that was timed twice: the ratio of the two, whose interval should contain 100 %."""
    twice = [record for record in records if own_name(record["port"]) != record["port"] and record["samples"]]
    if not twice:
        return []
    table = Table(
        f"A port beside itself, {path_of(twice[0])}: the difference that is none",
        ("contestant", "direction", "B,H,D", "dtype", "N", "mask", "% of itself", "95 %", "contains 100"),
        labels=6,
    )
    inside = 0
    for record in twice:
        times, port = timing_of(record), record["port"]
        if times is None or own_name(port) not in times.host_us:
            continue
        ratio = times.speed(port, own_name(port))
        contains = ratio.low <= 1 <= ratio.high
        inside += contains
        problem = problem_of(record["problem"])
        about = port, record["direction"], *problem_cells(problem)
        table.add(
            *about, *times.speed(port, own_name(port)).cells(1, 100), "yes" if contains else "no", problem=problem
        )
    table.notes.append(f"{inside} of {len(table.rows)} intervals contain 100 %; of 95 % intervals one in 20 does not.")
    return [table]
