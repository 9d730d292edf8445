"""The pictures of `harness report`: scales, names, words, and colours that every eye can tell apart."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from common import Problem
from harness.report.bars import Bar, bar_chart
from harness.report.contestants import KNOWN, Contestant
from harness.report.curves import apart, name_of_lengths
from harness.report.speed import duration
from harness.report.svg import LinearScale, LogScale, element
from harness.timing import Ratio

from .report_records import problem
from .test_report import TEMPLATES


def test_problems_lie_along_n_where_nothing_else_differs() -> None:
    assert name_of_lengths([problem(1024), problem(4096)]) == "N, at B 4"
    tokens = [Problem(16384 // n, 8, 8, n, n, 64, torch.bfloat16) for n in (1024, 4096)]
    assert name_of_lengths(tokens) == "N, at B·N 16384"
    assert name_of_lengths([problem(1024)]) is None
    assert name_of_lengths([problem(1024), problem(1024), problem(2048)]) is None
    assert name_of_lengths([problem(1024), Problem(3, 8, 8, 4096, 4096, 64, torch.bfloat16)]) is None
    assert name_of_lengths([Problem(1, 8, 8, 0, 0, 64, torch.bfloat16), problem(1024)]) is None


def test_scales_hold_their_values_at_round_numbers() -> None:
    scale = LinearScale.holding(391.4, 0, 100)
    assert (scale.high, scale.ticks()) == (400, [0, 100, 200, 300, 400])
    assert (scale(0), scale(200), scale(400)) == (0, 50, 100)
    log = LogScale.holding([0.013, 0.4], 100, 0)
    assert (log.low, log.high) == pytest.approx((0.01, 0.5))
    assert log(0.01) == pytest.approx(100)
    assert log(0.5) == pytest.approx(0)
    assert LogScale.holding([1.0], 0, 10).high > 1


def test_names_at_the_ends_of_curves_do_not_lie_on_each_other() -> None:
    places = apart([50, 50, 51, 90, 91], 12, 0, 100)
    assert all(after - before >= 12 - 1e-9 for before, after in pairwise(places))
    assert places[0] >= 0
    assert places[-1] <= 100
    crowded = apart([5] * 20, 12, 0, 100)
    assert crowded == sorted(crowded)
    assert crowded[-1] <= 100 + 1e-9


def test_a_picture_says_what_it_shows() -> None:
    bars = [Bar(Contestant("triton"), Ratio(200, 190, 210), "pass", "tip"), Bar(Contestant("fa4"), None, "FAIL o", "")]
    text = bar_chart(bars, largest=210, unit="TFLOP/s", title="Title & more")
    assert "<title>Title &amp; more</title>" in text
    assert "triton 200.0 TFLOP/s (190.0 to 210.0), pass; FA4: FAIL o." in text
    assert element("text", "<b>", x=1.0) == '<text x="1">&lt;b&gt;</text>'
    assert [duration(ms) for ms in (0.01425, 2.5, 1500)] == ["14.2 µs", "2.5 ms", "1.5 s"]


def colours() -> dict[str, dict[str, str]]:
    """The custom properties of the style sheet by name or class, light and dark."""
    light, dark = (TEMPLATES / "style.css").read_text().split("@media (prefers-color-scheme: dark)")
    dark = dark.split("* { box-sizing")[0]
    found = {}
    for mode, css in (("light", light), ("dark", dark)):
        own = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", css))
        for classes, colour in re.findall(r"^ *(\.who[^{]*) \{ --c: (#[0-9a-f]{6}); \}", css, re.MULTILINE):
            own |= dict.fromkeys(re.findall(r"\.who-(\w+)", classes), colour)
        found[mode] = own
    return found


def linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """The ratio of WCAG 2."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_words_and_marks_can_be_told_from_what_they_stand_on(mode: str) -> None:
    own = colours()[mode]
    for surface in ("surface", "page"):
        for words in ("ink", "soft", "link", "pass", "fail"):
            assert contrast(own[words], own[surface]) >= 4.5, (words, surface)
    assert contrast(own["ink"], own["fail-surface"]) >= 4.5
    for name in KNOWN:
        assert contrast(own[name], own["surface"]) >= 3, name


# How a colour looks to an eye without one kind of cone, in linear RGB (Machado, Oliveira and Fernandes 2009).
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_contestants_have_colours_apart_for_every_eye(mode: str, blindness: str) -> None:
    own = {name: lab(np.array(BLINDNESS[blindness]) @ linear(colours()[mode][name])) for name in KNOWN[:-1]}
    for a in own:
        for b in own:
            assert a == b or np.linalg.norm(own[a] - own[b]) >= 12, (a, b)
