"""The page of `harness report` in a headless Chromium: it opens in silence, its filters filter, it fits a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .browser import PHONE, Open, box, count
from .report_records import memory, timed
from .test_report import report

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest_plugins = ("tests.browser",)


def choose(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.locator(f"#filters select[name={name}]").select_option(value)


def test_it_opens_without_a_word_on_the_console(open_page: Open) -> None:
    page = open_page()
    assert page.title() == "FlashAttention-2 in several kernel languages"
    assert count(page, "svg") == 8 * 3 + 2
    assert page.locator("#shown").inner_text().startswith("26/26 pictures, ")
    assert count(page, ".nothing") == 0


@pytest.mark.parametrize(
    ("chosen", "cards"),
    [
        ({"direction": "backward"}, 4),
        ({"mask": "full"}, 4),
        ({"path": "ada path on NVIDIA H200"}, 4),
        ({"d": "64"}, 8),
        ({"direction": "forward", "mask": "causal", "path": "NVIDIA H200"}, 1),
    ],
)
def test_the_filters_filter_cards_tables_and_rows(chosen: dict[str, str], cards: int, open_page: Open) -> None:
    page = open_page()
    choose(page, **chosen)
    assert count(page, "#speed .card") == cards
    for name, value in chosen.items():
        shown = page.locator(f"main [data-{name}]").locator("visible=true")
        assert shown.count()
        assert {one.get_attribute(f"data-{name}") for one in shown.all()} == {value}
    choose(page, **dict.fromkeys(chosen, ""))
    assert count(page, "#speed .card") == 8


def test_the_rows_of_a_matrix_are_filtered_and_what_failed_with_them(open_page: Open) -> None:
    page = open_page()
    rows = "#verdicts .table tbody tr"
    assert count(page, rows) == 16
    assert count(page, ".failures") == 1
    choose(page, direction="forward")
    assert count(page, rows) == 8
    assert count(page, ".failures") == 0


def test_where_nothing_matches_a_section_says_so(open_page: Open) -> None:
    page = open_page()
    choose(page, mask="full")
    assert count(page, "#memory .card") == 0
    assert page.locator("#memory .nothing").inner_text() == "Nothing here matches the filters."
    page.get_by_text("Show all").click()
    page.wait_for_function("location.hash === ''")
    assert count(page, "#memory .card") == 1
    assert count(page, "#memory .nothing") == 0


def test_a_contestant_that_is_hidden_leaves_no_gap(open_page: Open) -> None:
    page = open_page()
    first = page.locator("#speed svg.bars").first
    below = first.locator("[data-who=sdpa_flash]")
    before, height = box(below)["y"], box(first)["height"]
    hide = page.locator("#filters input[value=triton]")
    hide.uncheck()
    assert count(page, "main [data-who=triton]") == 0
    assert box(below)["y"] < before - 10
    assert box(first)["height"] < height - 10
    hide.check()
    assert box(below)["y"] == pytest.approx(before, abs=1)
    assert box(first)["height"] == pytest.approx(height, abs=1)


def test_the_address_keeps_the_filters(open_page: Open) -> None:
    page = open_page()
    choose(page, direction="backward", path="ada path on NVIDIA H200")
    page.locator("#filters input[value=flex]").uncheck()
    fragment = page.url.partition("#")[2]
    again = open_page(f"#{fragment}")
    for one in (page, again):
        assert count(one, "#speed .card") == 2
        assert count(one, "main [data-who=flex]") == 0
    assert again.locator("select[name=direction]").input_value() == "backward"
    assert not again.locator("#filters input[value=flex]").is_checked()
    again.get_by_role("link", name="How fast is it?").click()
    assert again.url.endswith(fragment)
    filters = box(again.locator("#filters"))
    assert 0 < box(again.locator("#speed h2"))["y"] - filters["y"] - filters["height"] < 40
    again.evaluate("location.hash = '#direction=forward'")
    again.wait_for_function("document.querySelector('select[name=direction]').value === 'forward'")
    assert count(again, "#speed .card") == 4


def test_an_address_that_means_nothing_shows_all(open_page: Open) -> None:
    for fragment in ("#direction=sideways&d=7", "#speed", "#hide=nobody", "#%E0%A4%A", "#<script>"):
        assert count(open_page(fragment), "#speed .card") == 8


def test_without_javascript_all_is_shown(open_page: Open) -> None:
    page = open_page(java_script_enabled=False)
    assert count(page, "svg") == 26
    assert count(page, "#filters") == 0


@pytest.mark.parametrize("fragment", ["", "#direction=forward"])
def test_on_a_phone_it_is_as_wide_as_the_phone(fragment: str, open_page: Open) -> None:
    page = open_page(fragment, viewport=PHONE, device_scale_factor=2)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert not page.locator("#filters select").first.is_visible()
    page.locator("#filters summary").click()
    assert page.locator("#filters select").first.is_visible()
    for summary in page.locator("main summary").locator("visible=true").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    right_ends = "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().right)"
    widest = max(page.evaluate(right_ends))
    assert widest <= 360
    sizes = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width)")
    assert min(size for size in sizes if size) > 300


def test_pictures_follow_the_colour_scheme(open_page: Open) -> None:
    look = "e => getComputedStyle(e).fill"
    found = {}
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        bar = page.locator(".bar.who-triton rect").first.evaluate(look)
        words = page.locator(".bar .name").first.evaluate(look)
        behind = page.locator(".card").first.evaluate("e => getComputedStyle(e).backgroundColor")
        found[scheme] = (bar, words, behind)
    assert all(a != b for a, b in zip(found["light"], found["dark"], strict=True))


def test_bars_are_as_long_as_their_values(open_page: Open) -> None:
    picture = open_page().locator("#speed svg.bars").first
    lengths = [box(bar)["width"] for bar in picture.locator("rect").all()]
    values = [float((one.text_content() or "").rstrip("*")) for one in picture.locator(".value").all()]
    assert [w / max(lengths) for w in lengths] == pytest.approx([v / max(values) for v in values], rel=0.03)


def test_hostile_words_stay_words(open_page: Open, tmp_path: Path) -> None:
    evil = "</title></text></svg><script>document.title = 'taken'</script>"
    report(tmp_path, timed(suite=evil, case=evil), *(record | {"suite": evil} for record in memory()))
    page = open_page(at=(tmp_path / "page.html").as_uri())
    assert page.title() == "FlashAttention-2 in several kernel languages"
    assert evil in page.locator("#speed").inner_text()
