"""The tables of a ladder, made of its records: one for each port, direction and path, and those across.

Across stands, for each direction and problem, what every port on every path makes of each rung, and below it for each
rung one sentence on how far its gains agree, see `harness.agreement`. A ladder that leaves out one switch at a time has
the same tables, in which a switch gains what is lost without it. Where nothing was timed they hold the verdicts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common import RUNGS

from .agreement import Gain, sentence
from .bench_tables import changed_notes, check_cell, complaints_of, path_of, provenance_notes, title_of
from .names import LEFT_OUT, own_name, rival_of, variant_of
from .reader import Record
from .records import check_of, problem_of, tile_of, timing_of
from .tables import Table, problem_cells
from .timing import Ratio

FIELDS = ("B,H,D", "dtype", "N", "mask")  # of `problem_cells`
BLANK = "–"


@dataclass(frozen=True)
class Kind:
    """A kind of ladder in words. variants: what it has of a port. whole: the one with all switches on.

    column: what a variant is. ratio: what it gains, or costs where it is a switch that is off, and `beside` what. said:
    the words before a sentence on one variant.
    """

    variants: tuple[str, ...]
    whole: str
    title: str
    column: str
    ratio: str
    beside: str
    said: str


KINDS = (
    Kind(RUNGS, RUNGS[-1], "Ladder", "rung", "gain", "as fast as the rung before", "`{}`"),
    Kind(LEFT_OUT, LEFT_OUT[0], "One switch off", "off", "loss", "as slow as all on", "`{}`, with all others on"),
)


def is_rung(record: Record) -> bool:
    """Whether a record is of a ladder."""
    return any(variant_of(record["port"]) in kind.variants for kind in KINDS)


def gain_of(record: Record) -> Ratio | None:
    """What a rung gains over the one before, and a switch that is off loses beside all on: a ratio of times.

    None for what a ladder starts from, and where one of the two has no time.
    """
    times, name, rival = timing_of(record), record["port"], rival_of(record["port"])
    if times is None or rival is None or rival not in times.host_us:
        return None
    slow, fast = (rival, name) if variant_of(name) in RUNGS else (name, rival)
    return times.speed(fast, slow)


def ladder_tables(records: Sequence[Record], missing: Mapping[str, str]) -> list[Table]:
    """All tables. missing: the reasons of the ports that could not run, by name."""
    own = [_own_table(kind, rows) for kind, found in _by_kind(records) for rows in _by_port(found).values()]
    return own + across_ladder(records, missing)


def across_ladder(records: Sequence[Record], missing: Mapping[str, str]) -> list[Table]:
    """The tables across alone. Where several records are of the same rung, the last one counts."""
    tables = []
    for kind, found in _by_kind(records):
        rows = list({(path_of(r), r["port"], r["direction"], *_problem_key(r)): r for r in found}.values())
        words = _place_words(rows)
        places: dict[str, list[Record]] = {}
        for record in rows:
            places.setdefault(f"{record['direction']} {words[_problem_key(record)]}", []).append(record)
        tables += [_across_table(kind, members) for members in places.values()]
        notes = tables[-1].notes
        notes += [f"{name}: {reason}" for name, reason in missing.items()]
        if any(record["samples"] for record in rows):
            notes += [sentence(kind.said.format(name), gains) for name, gains in _gains(kind, places).items() if gains]
            notes += dict.fromkeys(note for members in _by_port(rows).values() for note in provenance_notes(members))
            notes += changed_notes(rows)
    return tables


def _by_kind(records: Iterable[Record]) -> list[tuple[Kind, list[Record]]]:
    """The records of each kind of ladder that there is."""
    records = list(records)
    kinds = [(kind, [r for r in records if variant_of(r["port"]) in kind.variants]) for kind in KINDS]
    return [(kind, found) for kind, found in kinds if found]


def _by_port(records: Iterable[Record]) -> dict[tuple[str, str, str], list[Record]]:
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((own_name(record["port"]), record["direction"], path_of(record)), []).append(record)
    return groups


def _problem_key(record: Record) -> tuple[str, str]:
    return record["case"], record["problem"]["id"]


def _place_words(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """A few words for each case and problem: its mask, and what else it does not share with the others."""
    cells = {_problem_key(r): (*problem_cells(problem_of(r["problem"])), r["case"]) for r in records}
    fields = (*FIELDS, "case")
    differ = [
        i for i, column in enumerate(zip(*cells.values(), strict=True)) if len(set(column)) > 1 and fields[i] != "mask"
    ]
    return {key: " ".join([own[3], *(f"{fields[i]} {own[i]}" for i in differ)]) for key, own in cells.items()}


def _own_table(kind: Kind, records: Sequence[Record]) -> Table:
    """One port on one path in one direction."""
    first = records[0]
    timed = any(record["samples"] for record in records)
    figures = ("ms", "TF/s", f"% of {_flash(first)}", "95 %", kind.ratio, f"{kind.ratio} 95 %") if timed else ()
    table = Table(
        f"{kind.title} of {own_name(first['port'])} {first['direction']}, {path_of(first)}",
        (*FIELDS, kind.column, "tile", *figures, "check"),
        labels=6,
    )
    notes = []
    for record in records:
        problem, variant = problem_of(record["problem"]), variant_of(record["port"])
        cells = _figures(record)[: len(figures)]
        about = *problem_cells(problem), variant, str(tile_of(record["tile"]) or BLANK)
        table.add(*about, *cells, check_cell(record), problem=problem)
        notes += [f"FAIL {record['problem']['id']} {variant}: {line}" for line in check_of(record).complaints()]
        notes += complaints_of(record)
        notes += [f"{title_of(b['port'])}: {b['reason']}" for b in record["baselines"] if b["reason"]]
    if timed:
        notes += [f"{kind.ratio}: how many times {kind.beside}.", *provenance_notes(records), *changed_notes(records)]
    table.notes += dict.fromkeys(notes)
    return table


def _figures(record: Record) -> tuple[str, ...]:
    """The cells of ms, TFLOP/s, % of the baseline and the gain, the last two with their intervals."""
    times = timing_of(record)
    if times is None:
        return (BLANK,) * 6
    ms, gain = times.median(record["port"]), gain_of(record)
    flash = next((b["port"] for b in record["baselines"] if b["port"] in times.host_us), None)
    beside = times.speed(record["port"], flash).cells(1, 100) if flash else (BLANK, BLANK)
    return f"{ms:.4f}", f"{record['flops'] / 1e9 / ms:.1f}", *beside, *(gain.cells(3) if gain else (BLANK, BLANK))


def _flash(record: Record) -> str:
    """The baseline's name for people."""
    return title_of(record["baselines"][0]["port"]) if record["baselines"] else BLANK


def _across_table(kind: Kind, records: Sequence[Record]) -> Table:
    """One direction and problem: a row for each port and path, a column for each variant."""
    first = records[0]
    timed = any(record["samples"] for record in records)
    problem = problem_of(first["problem"])
    about = ", ".join(f"{field} {cell}" for field, cell in zip(FIELDS, problem_cells(problem), strict=True))
    figures = f": TFLOP/s, and how many times {kind.beside}" if timed else ""
    table = Table(
        f"{kind.title} {first['direction']}, {about}{figures}",
        ("port", "path", *kind.variants, *((f"% of {_flash(first)}",) if timed else ())),
        labels=2,
    )
    for (port, _, path), members in _by_port(records).items():
        of = {variant_of(record["port"]): record for record in members}
        percent = (_figures(of[kind.whole])[2] if kind.whole in of else BLANK,) if timed else ()
        table.add(port, path, *(_cell(of.get(variant)) for variant in kind.variants), *percent, problem=problem)
        table.notes += [
            f"{port}, {path}, {variant}: {check_cell(record)}"
            for variant, record in of.items()
            if not record["samples"] and check_cell(record) != "pass"
        ]
    if timed:
        table.notes.append(
            "In brackets: the 95 % interval is within 2 % of 1, or has 1 in it. "
            f"% of {_flash(first)}: with all switches on."
        )
    return table


def _cell(record: Record | None) -> str:
    """TFLOP/s and the gain; without a time the verdict."""
    if record is None:
        return BLANK
    if not record["samples"]:
        return "FAIL" if record["verdict"] == "fail" else record["verdict"]
    speed, ratio = _figures(record)[1], gain_of(record)
    if ratio is None:
        return speed
    clear = Gain("", "", "", ratio).outcome in ("faster", "slower")
    return f"{speed}, {ratio.value:.2f}x" if clear else f"{speed} ({ratio.value:.2f}x)"


def _gains(kind: Kind, places: Mapping[str, Sequence[Record]]) -> dict[str, list[Gain]]:
    """What is gained by each variant in each place, under the name of the switch."""
    placed = [(place, record) for place, members in places.items() for record in members]
    one_card = len({record["provenance"]["card"] for _, record in placed}) == 1
    gains: dict[str, list[Gain]] = {variant.removeprefix("-"): [] for variant in kind.variants}
    for place, record in placed:
        if rival_of(record["port"]):
            path = record["target"]["name"] if one_card else path_of(record)
            gains[variant_of(record["port"]).removeprefix("-")].append(_gain(place, path, record))
    return gains


def _gain(place: str, path: str, record: Record) -> Gain:
    problem, ratio = problem_of(record["problem"]), gain_of(record)
    pairs = problem.mask.visible_pairs(problem.len_q, problem.len_k)
    idle = variant_of(record["port"]).removeprefix("-") == "skip" and pairs == problem.len_q * problem.len_k
    rival = variant_of(rival_of(record["port"]) or "")
    reasons = {"pass": f"{rival} has no time", "fail": "its check failed", "unsupported": record["reason"]}
    why = "" if ratio else record["untimed"] or reasons[record["verdict"]]
    return Gain(own_name(record["port"]), path, place, ratio, why, idle)
