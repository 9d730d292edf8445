"""A row of timings: of all that were checked on a problem, who passed is timed against the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .baselines import BASELINES
from .baselines.protocol import Span, flops_of
from .isolation import Caller
from .jobs import TimedRow
from .session import Session
from .suites import Case
from .trial import Check


def time_passed(
    session: Session, caller: Caller, case: Case, span: Span, checks: Mapping[str, Check], rounds: int
) -> TimedRow:
    """The timing of those that passed, by name; none where no port did, or there is nothing to compute."""
    passed = [name for name, check in checks.items() if check.verdict == "pass"]
    if not flops_of(case.problem, span) or all(name in BASELINES for name in passed):
        return TimedRow()
    return session.time(caller, passed, case, span, rounds)


def rival(check: Check, row: TimedRow) -> Check:
    """A baseline's check, with the reason why it has no time."""
    if check.port in row.dropped:
        return replace(check, reason=f"not timed, it {row.dropped[check.port]}")
    return replace(check, reason=check.reason or "".join(check.complaints()[:1]))
