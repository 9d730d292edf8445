"""Timings as a report shows them: of each problem, what every contestant took, how sure that is, and who failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common import Problem

from ..matrix_tables import verdict_cell
from ..reader import Record
from ..records import check_of, problem_of, timing_of
from ..timing import Ratio, Timing
from .contestants import Contestant

TERA = 1e9  # FLOPs over it and over milliseconds are TFLOP/s


@dataclass(frozen=True)
class Time:
    """What one contestant took for one problem: medians over the rounds, with their bootstrap 95 % intervals.

    beside: its speed relative to the baseline, 1 for as fast. throttled, late: how many of its rounds were taken while
    the card held its clocks down, and how many may hold host time.
    """

    who: Contestant
    verdict: str
    ms: Ratio
    tflops: Ratio
    beside: Ratio | None
    throttled: int
    late: int
    rounds: int

    @property
    def is_marked(self) -> bool:
        """Whether something is to be said of it."""
        return bool(self.throttled or self.late)

    def __str__(self) -> str:
        ms, tflops = self.ms, self.tflops
        return (
            f"{self.who.title}: {tflops.value:.1f} TFLOP/s ({tflops.low:.1f}–{tflops.high:.1f}), "
            f"{ms.value:.4f} ms ({ms.low:.4f}–{ms.high:.4f}), {self.verdict}"
        )


@dataclass(frozen=True)
class Row:
    """One problem: who was timed on it, and who failed its check, in words; in the order of the page.

    is_together: all were timed by turns with each other, as `harness bench` does.
    """

    case: str
    problem: Problem
    times: tuple[Time, ...]
    failures: tuple[tuple[Contestant, str], ...]
    is_together: bool


def baseline_of(record: Record) -> str | None:
    """What the speeds of a record are relative to."""
    return record["baselines"][0]["port"] if record["baselines"] else None


def rows_of(records: Sequence[Record]) -> list[Row]:
    """A row for each problem on which somebody was timed or failed, by length."""
    members: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        members.setdefault((record["case"], record["problem"]["id"]), []).append(record)
    rows = [_row(case, own) for (case, _), own in members.items()]
    rows = [row for row in rows if row.times or row.failures]
    return sorted(rows, key=lambda row: (row.problem.len_k, row.problem.len_q, row.problem.batch))


def _row(case: str, records: Sequence[Record]) -> Row:
    times: dict[str, Time] = {}
    failures: dict[str, str] = {}
    timed_with = set()
    for record in records:
        verdicts = _verdicts(record)
        failures |= {name: words for name, (verdict, words) in verdicts.items() if verdict == "fail"}
        timing = timing_of(record)
        if timing is None:
            continue
        timed_with.add(tuple(sorted(timing.host_us)))
        # Of a bench, each port's record holds everybody's samples; a verdict on the other ports is in theirs.
        for name, (verdict, _) in verdicts.items():
            if name in timing.host_us and name not in times:
                times[name] = _time(name, verdict, timing, baseline_of(record), record["flops"])
    order = sorted(times.values(), key=lambda time: time.who.rank)
    failed = [(Contestant(name), words) for name, words in failures.items() if name not in times]
    failed.sort(key=lambda pair: pair[0].rank)
    return Row(case, problem_of(records[0]["problem"]), tuple(order), tuple(failed), len(timed_with) <= 1)


def _verdicts(record: Record) -> dict[str, tuple[str, str]]:
    """The verdicts on a record's port and its baselines, and what is shown of those that failed."""
    told = {b["port"]: (b["verdict"], f"FAIL {b['reason']}".strip()) for b in record["baselines"]}
    return told | {record["port"]: (record["verdict"], verdict_cell([check_of(record)]))}


def absences(records: Sequence[Record]) -> list[str]:
    """Who was to be timed and was not, although no check of theirs failed, and why: a line each."""
    told: dict[str, None] = {}
    for record in records:
        own = {"port": record["port"], "verdict": record["verdict"], "reason": record["untimed"] or record["reason"]}
        for asked in (own, *record["baselines"]):
            if asked["verdict"] != "fail" and asked["reason"]:
                told[f"{Contestant(asked['port']).title}: {asked['reason']}"] = None
    return list(told)


def _time(name: str, verdict: str, timing: Timing, beside: str | None, flops: int) -> Time:
    rate = timing.rate(name, flops / TERA)
    return Time(
        who=Contestant(name),
        verdict=verdict,
        ms=Ratio(timing.median(name), flops / TERA / rate.high, flops / TERA / rate.low),
        tflops=rate,
        beside=timing.speed(name, beside) if beside in timing.host_us else None,
        throttled=timing.throttled,
        late=timing.late(name),
        rounds=len(timing.rounds),
    )
