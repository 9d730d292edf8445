"""The tables that the README quotes, generated from the records in `harness/results/`.

Between `<!-- records: FILE… -->` and `<!-- /records -->` stands, in Markdown, what the records of these files say;
other words than `records` take a part of it: `summary`, only how fast the ports are beside their baseline; `across`,
only the tables of a bench that have everybody; `ladder`, only how the ports compare on a ladder; `matrix`, the checks
of each port counted, and the ports beside each other. Nobody types a figure: `harness tables --write README.md` writes
them, and a test fails when they differ. When a port's sources are no longer those that were measured, the table says
so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from .bench_tables import (
    SPAN_WORDS,
    across_tables,
    changed_notes,
    grouped,
    path_of,
    port_tables,
    provenance_notes,
    title_of,
)
from .compile import built_tables
from .errors import UsageError
from .ladder_tables import across_ladder, is_rung, ladder_tables
from .matrix_tables import counted_tables
from .memory_tables import memory_tables
from .model_tables import model_tables
from .reader import NothingToShow, Record, read_files
from .records import problem_of
from .roofline_tables import roofline_tables
from .sound import sound_records
from .sweep_tables import is_candidate, swept_tables, untimed_builds
from .tables import Table, as_markdown, problem_cells
from .timing import Timing, speed_cells, why_throttled

RESULTS = Path(__file__).with_name("results")
KEPT = sorted(RESULTS.glob("*.jsonl*"))  # plain, or packed by gzip
KINDS = ("check", "disagreement", "memory", "model", "roofline", "build")  # of the records that tables are made of
_MARKER = re.compile(r"^<!-- (?:(\w+): (\S+(?: \S+)*)|/(\w+)) -->$", re.MULTILINE)


def read_tabled(paths: Sequence[Path]) -> list[Record]:
    """The records of these files that tables are made of; a file that has nothing for one is told and left out.

    Raises UsageError for a file that cannot be read, and when none has anything.
    """

    def read(path: Path) -> list[Record]:
        records = sound_records(path, KINDS)
        if not record_tables(records):
            raise NothingToShow(f"{path} holds no timings, which come from a GPU")
        return records

    return _each_once(record for _, records in read_files(paths, read) for record in records)


def _each_once(records: Iterable[Record]) -> list[Record]:
    """The records without those that are there already, as when a resumed run is read beside what it went on from."""
    return list({json.dumps(record, sort_keys=True): record for record in records}.values())


def record_tables(records: Iterable[Record]) -> list[Table]:
    """One table for each port, direction and path of the timed records, beside the baseline they were timed with.

    Those of a bench, in which several ports or baselines took turns, tell host time, clocks and power as well, and one
    across for each direction and path has everybody. The records of a matrix, a ladder, a sweep, of memory, of
    rooflines and of models have tables of their own, and so have kernels that were built only.
    """
    records = list(records)
    of = {kind: [record for record in records if record["kind"] == kind] for kind in KINDS}
    tables = counted_tables(of["check"] + of["disagreement"])
    benched = _benched(of["check"])
    alone = [] if benched else _timed(of["check"])
    tables += [_table(rows) for rows in grouped(alone, "port").values()]
    tables += port_tables(benched) + across_tables(benched, {})
    tables += ladder_tables(_timed_ladder(of["check"]), {}) + swept_tables(of["check"]) + memory_tables(of["memory"])
    tables += roofline_tables(of["roofline"], {}) + model_tables(of["model"])
    return tables + built_tables(untimed_builds(records))


def _timed(records: Iterable[Record]) -> list[Record]:
    """The timed records of runs and benches."""
    return [record for record in records if record["samples"] and not is_rung(record) and not is_candidate(record)]


def _benched(records: Iterable[Record]) -> list[Record]:
    """The timed records, if a bench is among them; in a run no more than one port and one baseline take turns."""
    timed = _timed(records)
    return timed if any(len(record["samples"][0]["ms"]) > 2 for record in timed) else []


def _timed_ladder(records: Iterable[Record]) -> list[Record]:
    """The records of ladders, also of rungs that have no time; none where no rung has one."""
    rungs = [record for record in records if is_rung(record)]
    return rungs if any(record["samples"] for record in rungs) else []


def _table(records: list[Record]) -> Table:
    first = records[0]
    port = first["port"]
    baseline = next((b["port"] for record in records for b in record["baselines"]), None)
    theirs = title_of(baseline) if baseline else "–"
    table = Table(
        f"{port} {first['direction']}, {path_of(first)}",
        ("B,H,D", "dtype", "N", "mask", f"{port} ms", f"{theirs} ms", f"{port} TF/s", f"{theirs} TF/s",
         f"% of {theirs}", "95 %", "check"),
        labels=4,
    )  # fmt: skip
    for record in records:
        table.add(*_cells(record, port, baseline))
    table.notes += provenance_notes(records)
    timings = [_timing(record) for record in records]
    throttled = sum(timing.throttled for timing in timings)
    if throttled:
        rounds = sum(len(timing.rounds) for timing in timings)
        why = why_throttled(timings)
        table.notes.append(f"In {throttled} of {rounds} rounds the card held its clocks down ({why}).")
    for record, timing in zip(records, timings, strict=True):
        for name in (name for name in (port, baseline) if name and timing.late(name)):
            table.notes.append(
                f"{record['problem']['id']}: {timing.late(name)} of {len(timing.rounds)} samples of {name} may hold "
                "host time."
            )
    table.notes += changed_notes(records)
    return table


def _cells(record: Record, port: str, baseline: str | None) -> tuple[str, ...]:
    figures = speed_cells(_timing(record), port, baseline, record["flops"])
    return *problem_cells(problem_of(record["problem"])), *figures, record["verdict"]


def _timing(record: Record) -> Timing:
    return Timing.of_record(record["samples"], record["host_us"])


def summary_tables(records: Iterable[Record]) -> list[Table]:
    """One table a direction: how fast each port was on each path, in % of the baseline that it was timed beside.

    The card is in the title where it is the same for all, and a path is named where it is not the card's own.
    """
    timed = [record for record in records if record["samples"] and record["baselines"] and not is_rung(record)]
    tables = []
    for direction in dict.fromkeys(record["direction"] for record in timed):
        members = [record for record in timed if record["direction"] == direction]
        columns = list(dict.fromkeys((record["port"], path_of(record)) for record in members))
        rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
        for record in members:
            baseline = record["baselines"][0]["port"]
            percent = speed_cells(_timing(record), record["port"], baseline, record["flops"])[4]
            cells = rows.setdefault(problem_cells(problem_of(record["problem"])), {})
            cells[record["port"], path_of(record)] = percent
        cards = {record["provenance"]["card"] for record in members}
        card = next(iter(cards)) if len(cards) == 1 else None
        where = f" on {card}" if card else ""
        title = f"{SPAN_WORDS[direction]}{where}, in % of the speed of {title_of(members[0]['baselines'][0]['port'])}"
        heads = (port if path == card else f"{port}, {path.removesuffix(where)}" for port, path in columns)
        table = Table(title, ("B,H,D", "dtype", "N", "mask", *heads), labels=4)
        for labels, cells in rows.items():
            table.add(*labels, *(cells.get(column, "–") for column in columns))
        tables.append(table)
    if tables:
        tables[-1].notes += changed_notes(timed)
    return tables


def _across_noted(records: Iterable[Record]) -> list[Table]:
    """The same where the tables of each port, which would say whose sources have changed, do not stand beside them."""
    benched = _benched(records)
    tables = across_tables(benched, {})
    if tables:
        tables[-1].notes += changed_notes(benched)
    return tables


def _across_ladder(records: Iterable[Record]) -> list[Table]:
    return across_ladder(_timed_ladder(records), {})


# What stands between markers of each word: what makes the tables, of records of which kinds, and what is missing where
# there are none.
MADE: dict[str, tuple[Callable[[Iterable[Record]], list[Table]], tuple[str, ...], str]] = {
    "records": (record_tables, KINDS, "timings"),
    "summary": (summary_tables, ("check",), "timings beside a baseline"),
    "across": (_across_noted, ("check",), "timings of a bench"),
    "ladder": (_across_ladder, ("check",), "timings of a ladder"),
    "matrix": (counted_tables, ("check", "disagreement"), "checks of several ports"),
}
# A comment alone on its line that is a marker, or was to be one.
_MEANT = re.compile(rf"^[ \t]*<!--[ \t]*/?[ \t]*(?:{'|'.join(MADE)})\b.*-->[ \t]*$", re.MULTILINE)


def with_tables(text: str, results: Path = RESULTS) -> str:
    """The text with what stands between its markers generated anew.

    Raises UsageError for a marker of another word, or without its other one before the next, and for a file that is not
    there, or has nothing to show.
    """
    read = cache(lambda name: sound_records(results / name, KINDS))  # several words may quote a file
    parts, done = [], 0
    for opening, closing in _blocks(text):
        make, kinds, wanting = MADE[opening[1]]
        found = (record for name in opening[2].split() for record in read(name))
        tables = make(_each_once(record for record in found if record["kind"] in kinds))
        if not tables:
            raise UsageError(f"{opening[2]} has no {wanting}")
        parts += [text[done : opening.end()], "\n", "\n".join(as_markdown(table) for table in tables)]
        done = closing.start()
    return "".join(parts) + text[done:]


def _blocks(text: str) -> list[tuple[re.Match[str], re.Match[str]]]:
    """The pairs of markers, each on a line of its own."""
    blocks = []
    for meant in _MEANT.finditer(text):
        if not _MARKER.fullmatch(meant[0]):
            raise UsageError(
                f"{_place(text, meant)} is nearly a marker: they are lines like <!-- records: FILE --> or "
                "<!-- /records -->, without a blank more or less"
            )
    markers = iter(_MARKER.finditer(text))
    for opening in markers:
        word = opening[1] or opening[3]
        if word not in MADE:
            raise UsageError(f"{_place(text, opening)}: tables are quoted by the words {', '.join(MADE)}, not {word}")
        closing = next(markers, None)
        if opening[1] is None or closing is None or closing[3] != word:
            raise UsageError(
                f"{_place(text, opening)} has no marker of its own that {'closes' if opening[1] else 'opens'} it"
            )
        blocks.append((opening, closing))
    return blocks


def _place(text: str, marker: re.Match[str]) -> str:
    return f"line {text.count(chr(10), 0, marker.start()) + 1}, {marker[0]}"


def write_tables(path: Path, *, write: bool = True) -> bool:
    """Writes a file's tables anew; whether it changed, or without `write` would have. Raises UsageError for a file
    without markers, or with odd ones, which it leaves alone."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read: {reason}") from error
    if not _MARKER.search(text):
        raise UsageError(f"{path} has no lines <!-- records: FILE --> and <!-- /records --> (or {', '.join(MADE)})")
    fresh = with_tables(text)
    if write and fresh != text:
        path.write_text(fresh, encoding="utf-8", newline="\r\n" if b"\r\n" in path.read_bytes() else "\n")
    return fresh != text
