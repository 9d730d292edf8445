"""How far a rung of the ladder gives the same everywhere: one sentence, made of the figures by rule.

A figure is a ratio of times with its 95 % interval, above 1 where the rung helps. By `compare.outcome_of` it helps,
hurts, changes nothing (its interval lies within 2 % of 1), or is unclear. Of one place, that is one problem and
direction, the figures of all ports and paths

- are alike when all help and their intervals, taken together, span no more than 10 %;
- agree in direction when all help, by different amounts where some interval ends before another begins, or all hurt;
- agree that there is nothing when none helps or hurts;
- and else are told apart: whom the rung helps, whom it hurts, and in whom it changes nothing or is unclear.

Places of which the same is to be said share a clause. What has no figure is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .compare import outcome_of
from .options import TOLERANCE_PERCENT
from .timing import Ratio

ALIKE_PERCENT = 10.0
VERBS = {"faster": "helps", "slower": "hurts", "same": "changes nothing in", "unclear": "is unclear in"}

Item = TypeVar("Item")


@dataclass(frozen=True)
class Gain:
    """What a rung gives one port on one path in one place.

    place: the direction and the problem in words. ratio: None when there is no figure, and `why`. idle: the problem
    gives the rung nothing to do, so that it should change nothing.
    """

    port: str
    path: str
    place: str
    ratio: Ratio | None
    why: str = ""
    idle: bool = False

    @property
    def outcome(self) -> str:
        """`faster`, `slower`, `same` or `unclear`."""
        assert self.ratio is not None
        return outcome_of(self.ratio, TOLERANCE_PERCENT / 100)


def sentence(rung: str, gains: Sequence[Gain]) -> str:
    """How far the gains of a rung agree across ports and paths."""
    told = [gain for gain in gains if gain.ratio is not None]
    kinds: dict[str, list[list[Gain]]] = {}
    for members in _grouped(told, lambda gain: gain.place).values():
        kinds.setdefault(_kind(members), []).append(members)
    clauses = [_CLAUSES[kind](kinds[kind]) for kind in _CLAUSES if kind in kinds]
    ports, paths = dict.fromkeys(gain.port for gain in told), dict.fromkeys(gain.path for gain in told)
    scope = f"{rung}, in {listed(ports)} on {listed(paths)}" if told else rung
    return f"{scope}: {'; '.join(clauses + _without_figure(gains))}."


def _kind(members: Sequence[Gain]) -> str:
    """Which clause speaks of the figures of one place."""
    outcomes = {gain.outcome for gain in members}
    if outcomes == {"faster"}:
        lows, highs = zip(*((gain.ratio.low, gain.ratio.high) for gain in members if gain.ratio), strict=True)
        if len(members) > 1 and max(highs) / min(lows) <= 1 + ALIKE_PERCENT / 100:
            return "alike"
        return "apart" if min(highs) < max(lows) else "helps"
    if outcomes == {"same"}:
        return "idle" if all(gain.idle for gain in members) else "same"
    if outcomes <= {"same", "unclear"}:
        return "unclear"
    if outcomes == {"slower"}:
        return "hurts"
    return "opposed" if {"faster", "slower"} <= outcomes else "mixed"


def _together(text: str, *, named: bool = False) -> Callable[[list[list[Gain]]], str]:
    """A clause with its places and the range of their figures where `{}` stands. named: with whose they are."""
    return lambda groups: text.format(
        listed(f"{_place(members)} ({_range(members, named=named)})" for members in groups)
    )


def _apart(text: str) -> Callable[[list[list[Gain]]], str]:
    """A clause that tells everybody apart, place by place."""

    def of_place(members: list[Gain]) -> str:
        by_outcome = _grouped(members, lambda gain: gain.outcome)
        said = (
            f"{verb} {_who(by_outcome[outcome], members)} ({_range(by_outcome[outcome])})"
            for outcome, verb in VERBS.items()
            if outcome in by_outcome
        )
        return f"on {_place(members)} it {', '.join(said)}"

    return lambda groups: text.format("; ".join(map(of_place, groups)))


# In the order in which a sentence has them.
_CLAUSES: dict[str, Callable[[list[list[Gain]]], str]] = {
    "helps": _together("helps on {}"),
    "alike": _together(f"helps all alike, within {ALIKE_PERCENT:g} %, on {{}}"),
    "apart": _together("helps all, by different amounts, on {}", named=True),
    "hurts": _together("hurts on {}"),
    "mixed": _apart("does not do the same for all: {}"),
    "opposed": _apart("divides them: {}"),
    "same": _together("changes nothing on {}"),
    "idle": _together("changes nothing on {}, as it must: there is nothing for it to do"),
    "unclear": _together("makes no clear difference on {}"),
}


def _place(members: Sequence[Gain]) -> str:
    """The place; and, unless that is the clause itself, that the rung has nothing to do there."""
    idle = all(gain.idle for gain in members) and _kind(members) != "idle"
    return f"{members[0].place}, where there is nothing for it to do," if idle else members[0].place


def _range(members: Sequence[Gain], *, named: bool = False) -> str:
    """From the smallest to the largest figure."""
    ends = sorted(members, key=_value)[:: max(1, len(members) - 1)]
    texts = [f"{_value(gain):.2f}x" for gain in ends]
    if len(set(texts)) == 1:
        return texts[0]
    return " to ".join(f"{text} in {_name(gain)}" if named else text for text, gain in zip(texts, ends, strict=True))


def _value(gain: Gain) -> float:
    assert gain.ratio is not None
    return gain.ratio.value


def _name(gain: Gain) -> str:
    return f"{gain.port} on {gain.path}"


def _who(some: Sequence[Gain], members: Sequence[Gain]) -> str:
    """Some of the members by name: a port alone where it is all of that port's."""
    names = []
    for port, own in _grouped(some, lambda gain: gain.port).items():
        whole = len(own) == sum(gain.port == port for gain in members)
        names += [port] if whole else [_name(gain) for gain in own]
    return listed(names)


def _without_figure(gains: Sequence[Gain]) -> list[str]:
    missing = _grouped((g for g in gains if g.ratio is None), lambda gain: (_name(gain), gain.why))
    return [
        f"no figure of {_name(members[0])}, {listed(gain.place for gain in members)}: {members[0].why}"
        for members in missing.values()
    ]


def _grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def listed(words: Iterable[str]) -> str:
    """Words as a sentence lists them: a, b and c."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
