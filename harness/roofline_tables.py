"""The tables of `harness roofline`, made of its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from common import Card, Target
from common.work import FMA

from .bench_tables import changed_notes, path_of
from .ceilings import Ceilings
from .provenance import in_words
from .reader import Record
from .records import problem_of, timing_of
from .roofline_records import Spot, ceilings_of, native_of, spots_of
from .tables import Table, problem_cells

ABOUT = ("B,H,D", "dtype", "N", "mask", "direction", "port", "kernel", "by")
COUNTED = ("matrix unit %", "warps %", "DRAM MB", "L2 MB", "conflicts %", "stalls (warps)")
COUNTS = ("credited GFLOP", "GFLOP", "MB", "FLOP/B")
BLANK = "–"
HOW = (
    "GFLOP and MB are counted from the problem: all that a kernel does, each tensor once for reading and once for "
    "writing. What a whole direction is credited with is the convention's (forward 4·B·H·D·pairs, backward 2.5 times "
    "that), and so are its TF/s and FLOP/B; its MB are those of its inputs and outputs."
)
HOW_TIMED = (
    "ms: of a direction the median of device time with a cold L2, by turns; of a kernel the median by PyTorch's "
    "profiler, within such calls. by: the instruction of its products. % of roof: the time that it takes at least, by "
    "the ceiling that leaves it most, over the time that it takes; of a direction, its kernels one after the other."
)
HOW_COUNTED = (
    "By ncu, of another launch, with cold caches: matrix unit: cycles in which it works; warps: resident, of those "
    "that could be; DRAM, L2: read and written; conflicts: passes through shared memory that bank conflicts add; "
    "stalls: why warps wait, and how many do at each issue."
)


def roofline_tables(records: Sequence[Record], missing: Mapping[str, str]) -> list[Table]:
    """All tables. missing: the reasons of the ports that could not run, by name."""
    by_path: dict[str, list[Record]] = {}
    for record in records:
        by_path.setdefault(path_of(record), []).append(record)
    tables = []
    for members in by_path.values():
        if members[0]["ceilings"] is None:
            tables.append(datasheet_table(members))
        else:
            tables += [ceiling_table(members[0]), kernel_table(members)]
        tables[-1].notes += [f"{name}: {reason}" for name, reason in missing.items()]
    return tables


def ceiling_table(record: Record) -> Table:
    """The ceilings of a run, beside the datasheets of the cards of that chip."""
    native, measured = native_of(record), ceilings_of(record)
    table = Table(
        f"Ceilings, {path_of(record)}",
        ("ceiling", "by", "measured", *(card.name for card in native.cards)),
        labels=2,
    )
    blanks = [BLANK] * len(native.cards)
    bandwidths = [f"{card.bandwidth_gbs:.0f}" for card in native.cards]
    table.add("memory GB/s", "a copy, bytes read and written", _number(measured.copy_gbs, 0), *bandwidths)
    for name, rate in measured.matrix_tflops.items():
        own = name == native.instruction
        how = (
            "torch.matmul, fp32"
            if name == FMA
            else "torch.matmul, bf16"
            if own
            else "a Triton kernel compiled as for Ada"
        )
        sheet = [f"{card.dense_tflops:.1f}" for card in native.cards] if own else blanks
        table.add(f"{name} TFLOP/s", how, f"{rate:.1f}", *sheet)
        if measured.copy_gbs:
            ridges = [f"{1e3 * card.dense_tflops / card.bandwidth_gbs:.0f}" for card in native.cards] if own else blanks
            table.add(f"{name} ridge FLOP/B", "the two above", f"{1e3 * rate / measured.copy_gbs:.0f}", *ridges)
    table.add("exp2 G/s", "a Triton kernel", _number(measured.exp_gps, 0), *blanks)
    table.notes += [f"not measured: {reason}" for reason in measured.missing]
    table.notes.append("The cards' columns are their datasheets: dense bf16 products with sums in fp32.")
    return table


def kernel_table(records: Sequence[Record]) -> Table:
    """A row for each port, problem and direction, and one for each of its kernels."""
    has_counters = any(kernel["counters"] for record in records for kernel in record["kernels"])
    columns = (
        *ABOUT,
        *(*COUNTS, "ms", "TF/s", "GB/s", "% of roof", "held back by"),
        *(COUNTED if has_counters else ()),
        "check",
    )
    table = Table(f"Roofline, {path_of(records[0])}", columns, labels=len(ABOUT))
    for record in records:
        problem, more = problem_of(record["problem"]), [BLANK] * (len(COUNTED) if has_counters else 0)
        about = (*problem_cells(problem), record["direction"], record["port"])
        table.add(*about, "all", BLANK, *_whole_cells(record), *more, _verdict(record), problem=problem)
        for spot in spots_of(record):
            counted = _counted_cells(spot) if has_counters else []
            cells = (*about, spot.name, spot.instruction or BLANK, *_cells(spot), *counted, record["verdict"] or BLANK)
            table.add(*cells, problem=problem)
    table.notes += dict.fromkeys(note for record in records for note in _notes(record))
    table.notes += [HOW, HOW_TIMED] + ([HOW_COUNTED] if has_counters else [])
    table.notes += dict.fromkeys(f"{in_words(record['provenance'])}." for record in records)
    table.notes += changed_notes(records)
    return table


def _verdict(record: Record) -> str:
    """The verdict, and why there is no time."""
    if record["verdict"] == "pass":
        return f"pass, not timed: {record['untimed']}" if record["untimed"] else "pass"
    why = record["reason"] or BLANK
    return f"FAIL: {why}" if record["verdict"] == "fail" else why


def _whole_ms(record: Record) -> float | None:
    """The median milliseconds of a direction as a whole."""
    times = timing_of(record)
    return None if times is None else times.median(record["port"])


def _whole_counts(record: Record) -> tuple[str, ...]:
    credited, moved = record["flops"], record["bytes"]
    done = sum(kernel["flops"] for kernel in record["kernels"])
    intensity = _intensity(credited / moved) if moved else BLANK
    return f"{credited / 1e9:.2f}", f"{done / 1e9:.2f}" if done else BLANK, f"{moved / 1e6:.1f}", intensity


def _whole_cells(record: Record) -> tuple[str, ...]:
    ms, spots = _whole_ms(record), spots_of(record)
    if ms is None:
        return *_whole_counts(record), *[BLANK] * 5
    rates = f"{record['flops'] / 1e9 / ms:.1f}", f"{record['bytes'] / 1e6 / ms:.0f}"
    roofs = [spot.roof_ms for spot in spots if spot.roof_ms is not None]
    share = f"{100 * sum(roofs) / ms:.0f}" if roofs and len(roofs) == len(spots) else BLANK
    return *_whole_counts(record), f"{ms:.4f}", *rates, share, _longest(spots)


def _longest(spots: Sequence[Spot]) -> str:
    """Which of several kernels the time goes to."""
    times = {spot.name: spot.ms for spot in spots if spot.ms is not None}
    if len(times) < 2:
        return BLANK
    name = max(times, key=lambda kernel: times[kernel])
    return f"{name}, {100 * times[name] / sum(times.values()):.0f} % of its kernels' time"


def _counts(spot: Spot) -> tuple[str, ...]:
    flops, moved = spot.fields["flops"], spot.fields["bytes"]
    return BLANK, f"{flops / 1e9:.2f}", f"{moved / 1e6:.1f}", _intensity(spot.intensity)


def _intensity(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def _cells(spot: Spot) -> tuple[str, ...]:
    if spot.ms is None:
        return *_counts(spot), *[BLANK] * 5
    share = BLANK if spot.roof_ms is None else f"{100 * spot.roof_ms / spot.ms:.0f}"
    return *_counts(spot), f"{spot.ms:.4f}", _number(spot.tflops, 1), _number(spot.gbs, 0), share, spot.bound


def _counted_cells(spot: Spot) -> list[str]:
    found = spot.counters
    if found is None:
        return [BLANK] * len(COUNTED)
    conflicts = None
    if found.bank_conflicts is not None and found.wavefronts:
        conflicts = 100 * found.bank_conflicts / found.wavefronts
    megabytes = [None if x is None else x / 1e6 for x in (found.dram_bytes, found.l2_bytes)]
    stalls = ", ".join(f"{name} {warps:.1f}" for name, warps in found.stalls) or BLANK
    numbers = [found.tensor_percent, found.warps_percent, *megabytes, conflicts]
    return [*(_number(x, 1) for x in numbers), stalls]


def _number(value: float | None, digits: int) -> str:
    return BLANK if value is None else f"{value:.{digits}f}"


def _notes(record: Record) -> Iterable[str]:
    """What is to be said of a record: what there is not, what else ran, and rounds that throttled."""
    about = f"{record['port']} {record['direction']}"
    if record["unprofiled"]:
        yield f"{about}: no times of kernels: {record['unprofiled']}"
    if record["uncounted"]:
        yield f"Without counters: {record['uncounted']}."
    if record["others_ms"]:
        told = ", ".join(f"{name[:60]} {ms:.4f} ms" for name, ms in record["others_ms"].items())
        yield f"{about}, {record['problem']['id']}: its calls also ran {told}"
    times = timing_of(record)
    if times is not None and times.throttled:
        yield f"{about}, {record['problem']['id']}: {times.throttled} of {len(times.rounds)} rounds throttled"


def datasheet_table(records: Sequence[Record]) -> Table:
    """Without a card: what is counted, and the most that the datasheets of the target's cards allow."""
    target = native_of(records[0])
    columns = (*ABOUT, *COUNTS, *(f"{card.name}: TF/s at most" for card in target.cards))
    table = Table(f"Roofline by datasheet, {target}: nothing is timed without a GPU", columns, labels=len(ABOUT))
    others = False
    for record in records:
        problem = problem_of(record["problem"])
        about = (*problem_cells(problem), record["direction"], record["port"])
        if record["reason"]:
            table.notes.append(f"{record['port']} {record['direction']}, {problem.id}: {record['reason']}")
        table.add(*about, "all", BLANK, *_whole_counts(record), *[BLANK] * len(target.cards), problem=problem)
        by_card = zip(*(spots_of(record, _datasheet(card, target)) for card in target.cards), strict=True)
        for spot, most in zip(spots_of(record), by_card, strict=True):
            others |= spot.instruction not in ("", target.instruction)
            cells = (*about, spot.name, spot.instruction or BLANK, *_counts(spot), *map(_at_most, most))
            table.add(*cells, problem=problem)
    if others:
        table.notes.append(
            f"Datasheets tell the rate of {target.instruction}; what computes by another one has no ceiling here."
        )
    ridges = (f"{card.name} {1e3 * card.dense_tflops / card.bandwidth_gbs:.0f} FLOP/B" for card in target.cards)
    table.notes += [HOW, f"Memory holds back what is left of the ridge: {', '.join(ridges)}."]
    return table


def _datasheet(card: Card, target: Target) -> Ceilings:
    return Ceilings(copy_gbs=card.bandwidth_gbs, matrix_tflops={target.instruction: card.dense_tflops})


def _at_most(spot: Spot) -> str:
    known = spot.roof_ms is not None and spot.instruction in ("", *spot.ceilings.matrix_tflops)
    return f"{spot.fields['flops'] / spot.roof_ms / 1e9:.1f}, {spot.bound}" if known and spot.roof_ms else BLANK
