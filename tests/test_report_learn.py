"""The interactive parts of `harness report`: their script computes what `common` and `reference` do, and is usable."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common import Mask, Problem, TileKind
from harness.cli import main
from harness.options import Format
from harness.report.learn import lesson
from harness.tables import as_csv
from harness.trace import PLAIN_SIGNS, SIGNS, TraceRequest, bytes_table, inputs, kinds_of, plain_softmax
from reference import trace_row

from .browser import PHONE, Open, box, count
from .report_records import timed
from .test_report import Page as Parsed
from .test_report import report

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytest_plugins = ("tests.browser",)

MASKS = [
    Mask(), Mask.causal(), Mask.causal("top_left"), Mask(40, 8), Mask(0, 0), Mask(300, 2), Mask(1, 1, "top_left"),
    Mask(9, None), Mask(None, 30), Mask(500, 500),
]  # fmt: skip
SIZES = [
    (96, 96, 16, 16), (90, 150, 16, 32), (150, 90, 48, 16), (1, 512, 128, 64), (512, 1, 64, 128), (33, 17, 16, 16),
    (256, 300, 64, 64),
]  # fmt: skip
SHOWN = {  # what is chosen on the page, and the mask that it is
    "full": Mask(), "causal": Mask.causal(), "causal-topleft": Mask.causal("top_left"), "window": Mask(40, 8),
}  # fmt: skip
ROWS = [
    (1.0, 5.0, 2.0, 8.0, 3.0, 9.0, 4.0, 7.0),
    (0.0,),
    (3.5, 3.5, 3.5, 3.5, 3.5),
    (-80.25, 10.5, 9.75, -200.0, 88.0, 87.5, -1e30),
    tuple(torch.randn(64, generator=torch.Generator().manual_seed(0)).tolist()),
]


def request(mask: Mask, sizes: tuple[int, ...], scores: tuple[float, ...] | None = None, **more: Any) -> TraceRequest:
    fields = {"row": None, "values": None, "seed": 0, "form": Format.CSV} | more
    return TraceRequest(mask, sizes[0], sizes[1], 64, sizes[2], sizes[3], scores=scores, **fields)


def kinds(asked: TraceRequest) -> list[list[str]]:
    tiles = range(math.ceil(asked.len_q / asked.block_m))
    return [[kind.value for kind in kinds_of(asked, tile)] for tile in tiles]


def set_controls(part: Locator, **values: int | str) -> None:
    """Moves sliders and fills fields, as a reader would."""
    for name, value in values.items():
        control = part.locator(f"[name={name}]")
        if control.evaluate("e => e.tagName") == "SELECT":
            control.select_option(str(value))
        else:
            control.fill(str(value))


def step(part: Locator, times: int = 1) -> None:
    for _ in range(times):
        part.get_by_role("button", name="Step").click()


def said(part: Locator) -> str:
    return part.locator(".said").inner_text()


def cells(part: Locator) -> list[list[str]]:
    rows = part.locator("tbody tr").all()
    return [[text.replace("−", "-") for text in row.locator("td").all_inner_texts()] for row in rows]


def printed(capsys: pytest.CaptureFixture[str], part: Locator) -> str:
    """What the command that the page names prints, as CSV."""
    _, name, *options = shlex.split(part.locator(".command").inner_text())
    with pytest.raises(SystemExit) as ended:
        main([name, *options, "--format", "csv"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_script_finds_the_kinds_of_tiles_that_the_mask_has(open_page: Open) -> None:
    page = open_page()
    for mask, sizes in itertools.product(MASKS, SIZES):
        given = {"left": mask.left, "right": mask.right, "corner": mask.corner}
        found = page.evaluate("([mask, sizes]) => attention.tileKinds(mask, ...sizes)", [given, list(sizes)])
        assert found == kinds(request(mask, sizes)), (mask, sizes)
        len_q, len_k, block_m, _ = sizes
        for begin in range(0, len_q, block_m):
            seen = page.evaluate("given => attention.keyRange(...given)", [given, begin, begin + block_m, len_q, len_k])
            assert tuple(seen) == mask.key_range(begin, begin + block_m, len_q, len_k), (mask, sizes, begin)


@pytest.mark.parametrize("block_n", [1, 2, 3, 16])
@pytest.mark.parametrize("scores", ROWS, ids=len)
def test_the_script_takes_the_steps_of_the_reference(scores: tuple[float, ...], block_n: int, open_page: Open) -> None:
    keys = len(scores)
    values = tuple(torch.randn(keys, generator=torch.Generator().manual_seed(1)).tolist())
    asked = request(Mask(), (1, keys, 1, block_n), scores, values=values)
    problem = Problem(1, 1, 1, 1, keys, 64, torch.float32, Mask(), 1.0)
    q, k, v = inputs(problem, asked)
    wanted = list(trace_row(q, k, v, problem, row=0, block_n=block_n))
    page = open_page()
    given = [list(scores), list(values)]
    found = page.evaluate("([given, block]) => attention.softmaxSteps(...given, block)", [given, block_n])
    assert [(one["begin"], one["end"]) for one in found] == [(one.key_begin, one.key_end) for one in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        state = [ours[name] for name in ("tileMax", "rowMax", "rescale", "rowSum", "output")]
        of_reference = [theirs.tile_max, theirs.row_max, theirs.rescale, theirs.row_sum, float(theirs.output[0])]
        assert state == pytest.approx(of_reference, rel=1e-5, abs=1e-5)
    plain, _ = plain_softmax(q, k, v, problem, 0)
    assert page.evaluate("given => attention.plainSoftmax(...given)", given) == pytest.approx(float(plain[0]))


def test_steps_go_on_and_back_and_end_at_the_plain_softmax(open_page: Open, capsys: pytest.CaptureFixture[str]) -> None:
    part = open_page().locator("#softmax")
    assert said(part).startswith("Before the first of 4 tiles: row_max = −∞")
    step(part, 2)
    assert part.locator(".scores .now").inner_text().split() == ["2", "8"]
    assert said(part).startswith(
        "Tile 2 of 4, keys 2..3: row_max rises from 5 to 8, so rescale = 0.049787. row_sum = 1."
    )
    part.get_by_role("button", name="Back").click()
    assert len(cells(part)) == 1
    step(part, 3)
    part.get_by_role("button", name="Step").press("Enter")  # there is no further tile
    text = printed(capsys, part)
    for keys, scores, *state in cells(part):
        assert f"{keys},full,{scores},{','.join(state)}" in text.splitlines()
    (error,) = re.findall(r"in float64, gives 4\.6485: error (\S+); the steps are in fp32", said(part))
    assert float(error.replace("−", "-")) < 1e-6
    assert part.get_by_role("button", name="Step").get_attribute("aria-disabled") == "true"
    part.get_by_role("button", name="Reset").click()
    assert (cells(part), part.locator(".now").count()) == ([], 0)


def test_typed_and_random_numbers_are_traced_and_wrong_ones_told(
    open_page: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    part = open_page().locator("#softmax")
    set_controls(part, scores="-1, 2.5, 0.25", values="3,-4,5", block_n=1)
    step(part, 3)
    assert part.locator("[name=len_k]").input_value() == "3"
    text = printed(capsys, part)
    assert [f"{row[0]},full,{row[1]},{','.join(row[2:])}" in text for row in cells(part)] == [True] * 3
    wrong = [
        ("1,x", "", "“x” is none"), ("1,,2", "", "“” is none"), ("1e31", "", "“1e31” is none"),
        ("1,2", "3", "2 scores need as many values, not 1"), (",".join("1" * 65), "", "at most 64 numbers, not 65"),
    ]  # fmt: skip
    for scores, values, told in wrong:
        set_controls(part, values=values, scores=scores)
        assert told in part.get_by_role("alert").inner_text()
        assert part.locator("[aria-invalid=true]").count() == 1
    set_controls(part, len_k=32, block_n=2)
    rows = []
    for seed in (7, 7, 8):
        set_controls(part, seed=seed)
        part.get_by_role("button", name="Random scores").click()
        rows.append(part.locator("[name=scores]").input_value())
    assert rows[0] == rows[1] != rows[2]
    assert len(rows[0].split(",")) == 32
    assert count(part.page, "#softmax .wrong") == 0
    step(part, 16)
    assert said(part).startswith("Tile 16 of 16, keys 30..31")


@pytest.mark.parametrize("name", SHOWN)
def test_the_picture_and_its_counts_follow_mask_and_sliders(
    name: str, open_page: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    part = open_page().locator("#tiles")
    of_sign = {sign: kind.value for kind, sign in SIGNS.items()}
    for sizes in SIZES[:5]:
        set_controls(part, mask=name, **dict(zip(("len_q", "len_k", "block_m", "block_n"), sizes, strict=True)))
        wanted = kinds(request(SHOWN[name], sizes))
        options = part.locator("[role=option]")
        shown = [[of_sign[sign] for sign in one.locator(".walk").inner_text().split()] for one in options.all()]
        assert shown == wanted
        n = Counter(itertools.chain(*wanted))
        visited = f"{n['full'] + n['edge']} visited ({n['full']} full, {n['edge']} edge), {n['skip']} skipped."
        assert part.locator(".tally").inner_text() == f"{len(wanted)} × {len(wanted[0])} tiles: {visited}"
        total = f"  all,,{n['full'] + n['edge']},{n['full']},{n['edge']},{n['skip']}"
        assert total in printed(capsys, part)
    enabled = part.locator("[name=left]").is_enabled(), part.locator("[name=right]").is_enabled()
    assert enabled == (name == "window",) * 2


def test_a_query_tile_is_chosen_by_click_and_by_keys(open_page: Open) -> None:
    part = open_page().locator("#tiles")
    grid = part.get_by_role("listbox")
    assert said(part) == (
        "The query tile 32..47 sees the keys 52..115. Its walk: skip ×3 (keys 0..47), edge ×2 (keys 48..79), "
        "full (keys 80..95), edge ×2 (keys 96..127), skip ×2 (keys 128..149)."
    )
    part.locator("[role=option]").nth(1).click()
    assert said(part).startswith("The query tile 16..31 ")
    grid.focus()
    pressed = [("ArrowDown", 2), ("ArrowUp", 1), ("End", 5), ("ArrowDown", 5), ("Home", 0), ("ArrowUp", 0)]
    for key, row in pressed:
        grid.press(key)
        assert part.locator("[aria-selected=true]").get_attribute("id") == f"query-tile-{row}"
        assert grid.get_attribute("aria-activedescendant") == f"query-tile-{row}"
        assert said(part).startswith(f"The query tile {16 * row}..{min(16 * row + 15, 89)} ")
    set_controls(part, mask="causal", len_q=100, len_k=50)
    assert said(part).startswith("The query tile 0..15 sees no key: o = 0, lse = −∞. Its walk: skip ×4")


def test_bytes_are_those_of_the_shapes(open_page: Open) -> None:
    part = open_page().locator("#bytes")
    for power, head_dim in ((7, 32), (10, 64), (17, 256)):
        set_controls(part, power=power, head_dim=head_dim)
        problem = Problem(1, 1, 1, 2**power, 2**power, head_dim, torch.float32)
        _, _, tensors, square, ratio = bytes_table(problem).rows[0]
        assert part.locator(".of-tensors").inner_text().endswith(f", {tensors}")
        assert part.locator(".of-square").inner_text().endswith(f", {square}")
        assert f"S and P take {ratio} times" in said(part)
        widths = [box(part.locator(bar))["width"] for bar in (".length.tensors", ".length.square")]
        assert widths[1] / widths[0] == pytest.approx(2**power / (2 * head_dim), rel=0.02)
    set_controls(part, itemsize=2)
    assert part.locator(".of-tensors").inner_text() == "256 MiB, 268,435,456 B"


def test_all_of_it_works_by_keys_alone(open_page: Open) -> None:
    page = open_page()
    part = page.locator("#softmax")
    part.locator("[name=random]").focus()
    page.keyboard.press("Tab")
    for key in ("Enter", "Space"):
        page.keyboard.press(key)
    assert len(cells(part)) == 2
    assert part.locator("[name=step]").evaluate("e => e === document.activeElement")
    for slider in page.locator(".lab input[type=range]").all():
        before = slider.input_value()
        slider.press("ArrowRight")
        assert slider.input_value() != before
        assert slider.locator("xpath=..").locator("b").inner_text() in (
            slider.input_value(), str(2 ** int(slider.input_value()))
        )  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_tells_kinds_apart_by_more_than_colour(scheme: str, open_page: Open) -> None:
    page = open_page(viewport=PHONE, color_scheme=scheme)
    step(page.locator("#softmax"), 4)
    table = page.locator("#softmax .scroll")
    assert table.evaluate("e => e.scrollWidth <= e.clientWidth")
    set_controls(page.locator("#tiles"), len_q=512, len_k=512)
    set_controls(page.locator("#softmax"), scores=",".join(["-1.23456e-20"] * 32), block_n=16)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert box(page.locator(".walks"))["width"] < 360
    looks = {
        kind.value: page.locator(f".legend .{kind.value}").evaluate(
            "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).backgroundImage, e.textContent].join()"
        )
        for kind in TileKind
    }
    assert len(set(looks.values())) == 3
    assert "gradient" in looks["edge"]
    assert "gradient" not in looks["full"]


def test_without_javascript_the_worked_examples_stand_there(open_page: Open) -> None:
    page: Page = open_page(java_script_enabled=False)
    assert (count(page, "#worked"), count(page, ".lab")) == (1, 0)
    assert "····▒▒█▒▒·" in page.locator("#worked").inner_text()
    page = open_page()
    assert (count(page, "#worked"), count(page, ".lab")) == (0, 3)


def test_the_examples_are_what_the_commands_beside_them_print(capsys: pytest.CaptureFixture[str]) -> None:
    for part in lesson().parts:
        with pytest.raises(SystemExit):
            main(["trace", *part.command.split(), "--format", "csv"])
        text = capsys.readouterr().out
        for kind, sign in PLAIN_SIGNS.items():
            assert sign != SIGNS[kind]
        rows = as_csv(part.table).splitlines()[1 : 2 + len(part.table.rows)]
        assert "\n".join(rows) in text


def test_the_page_of_any_records_has_every_example(tmp_path: Path) -> None:
    words = Parsed(report(tmp_path, timed())).words
    for part in lesson().parts:
        assert part.table.title in words
        assert all(cell in words for row in part.table.rows for cell in row)
