"""The sentence on a rung: what it says of made-up figures, by whom it is helped and by how much."""

from __future__ import annotations

import pytest

from harness.agreement import Gain, listed, sentence
from harness.timing import Ratio

FULL, CAUSAL = "forward full", "forward causal"


def gains(place: str, /, idle: bool = False, **figures: float | tuple[float, float, float] | str) -> list[Gain]:
    """Figures by `port_path`: a value with a narrow interval, one with its bounds, or why there is none."""
    made = []
    for name, figure in figures.items():
        port, path = name.split("_")
        if isinstance(figure, str):
            made.append(Gain(port, path, place, None, figure, idle))
            continue
        value, low, high = figure if isinstance(figure, tuple) else (figure, figure - 0.004, figure + 0.004)
        made.append(Gain(port, path, place, Ratio(value, low, high), "", idle))
    return made


def said(*several: list[Gain]) -> str:
    return sentence("`skip`", [gain for some in several for gain in some])


def test_gains_that_are_close_are_alike() -> None:
    told = gains(CAUSAL, triton_ada=1.80, triton_hopper=1.82, tilelang_ada=1.85, cute_ada=1.90)
    assert said(told) == (
        "`skip`, in triton, tilelang and cute on ada and hopper: helps all alike, within 10 %, on forward causal "
        "(1.80x to 1.90x)."
    )


def test_a_tie_is_one_figure() -> None:
    assert said(gains(CAUSAL, triton_ada=1.5, cute_ada=1.5)).endswith("alike, within 10 %, on forward causal (1.50x).")


def test_it_is_the_intervals_that_are_within_ten_percent() -> None:
    near = gains(CAUSAL, triton_ada=(1.5, 1.49, 1.51), cute_ada=(1.55, 1.54, 1.56))
    wide = gains(CAUSAL, triton_ada=(1.5, 1.40, 1.60), cute_ada=(1.55, 1.50, 1.60))
    assert "alike" in said(near)
    assert said(wide).endswith(": helps on forward causal (1.50x to 1.55x).")  # how alike, they do not tell


def test_gains_of_one_direction_name_the_least_and_the_most() -> None:
    told = gains(CAUSAL, triton_ada=1.2, tilelang_ada=1.5, cute_hopper=2.1)
    assert said(told).endswith(
        "helps all, by different amounts, on forward causal (1.20x in triton on ada to 2.10x in cute on hopper)."
    )


def test_of_one_alone_no_agreement_is_told() -> None:
    assert said(gains(CAUSAL, triton_ada=1.8)) == "`skip`, in triton on ada: helps on forward causal (1.80x)."


def test_where_there_is_nothing_to_do_it_must_change_nothing() -> None:
    causal, full = gains(CAUSAL, triton_ada=1.8, cute_ada=1.85), gains(FULL, True, triton_ada=0.996, cute_ada=1.006)
    assert said(causal, full) == (
        "`skip`, in triton and cute on ada: helps all alike, within 10 %, on forward causal (1.80x to 1.85x); changes "
        "nothing on forward full (1.00x to 1.01x), as it must: there is nothing for it to do."
    )
    assert "as it must" not in said(gains(FULL, triton_ada=0.996, cute_ada=1.006))


def test_what_it_must_not_do_it_is_not_said_to_do() -> None:
    told = said(gains(FULL, True, triton_ada=1.1, cute_ada=1.0))
    assert "as it must" not in told
    assert told.partition("all: on ")[2] == (
        "forward full, where there is nothing for it to do, it helps triton (1.10x), changes nothing in cute (1.00x)."
    )


def test_a_difference_of_a_percent_or_an_interval_about_one_is_no_gain() -> None:
    assert "changes nothing on" in said(gains(FULL, triton_ada=(1.01, 1.005, 1.015), cute_ada=(1.0, 0.99, 1.01)))
    assert "makes no clear difference on forward full (1.00x to 1.03x)" in said(
        gains(FULL, triton_ada=1.0, cute_ada=(1.03, 0.98, 1.08))
    )


def test_who_is_helped_and_who_is_not_are_told_apart() -> None:
    told = gains(
        CAUSAL, triton_ada=1.1, triton_hopper=1.2, cute_ada=1.0, cute_hopper=1.15, tilelang_ada=(1.1, 0.9, 1.3)
    )
    assert said(told).partition(": ")[2] == (
        "does not do the same for all: on forward causal it helps triton and cute on hopper (1.10x to 1.20x), changes "
        "nothing in cute on ada (1.00x), is unclear in tilelang (1.10x)."
    )


def test_a_disagreement_says_who() -> None:
    told = gains(CAUSAL, triton_ada=1.1, tilelang_ada=0.9, cute_ada=0.95)
    assert said(told).partition(": ")[2] == (
        "divides them: on forward causal it helps triton (1.10x), hurts tilelang and cute (0.90x to 0.95x)."
    )


def test_what_hurts_all_is_told_as_that() -> None:
    assert said(gains(CAUSAL, triton_ada=0.8, cute_ada=0.9)).endswith(": hurts on forward causal (0.80x to 0.90x).")


def test_places_of_which_the_same_is_to_be_said_share_a_clause() -> None:
    places = [
        gains(place, triton_ada=1.5 + i, cute_ada=1.52 + i) for i, place in enumerate((CAUSAL, "backward causal"))
    ]
    assert said(*places).endswith(
        "alike, within 10 %, on forward causal (1.50x to 1.52x) and backward causal (2.50x to 2.52x)."
    )


def test_what_has_no_figure_is_named_with_the_reason() -> None:
    failed = [gains(place, triton_ada=1.5, cute_ada="its check failed") for place in (CAUSAL, FULL)]
    assert said(*failed) == (
        "`skip`, in triton on ada: helps on forward causal (1.50x) and forward full (1.50x); no figure of cute on ada, "
        "forward causal and forward full: its check failed."
    )
    assert said(gains(CAUSAL, cute_ada="naive has no time")) == (
        "`skip`: no figure of cute on ada, forward causal: naive has no time."
    )


@pytest.mark.parametrize(("words", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")])
def test_words_are_listed(words: list[str], text: str) -> None:
    assert listed(words) == text
