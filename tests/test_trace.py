"""`harness trace`: the numbers of the walk, the picture of the tiles, and the command around them."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import Mask, Problem
from harness.cli import main
from harness.options import Format
from harness.trace import TraceRequest, bytes_table, steps_table, walk_table

ROOT = Path(__file__).resolve().parent.parent
MASKS = [
    Mask(), Mask.causal(), Mask.causal("top_left"), Mask(20), Mask(9, 12), Mask(2, 1, "top_left"), Mask(0, 0),
    Mask(None, 30), Mask(right=10**9),
]  # fmt: skip
LENGTHS = [(96, 96), (90, 40), (40, 90), (1, 33), (33, 1), (7, 0)]


def asked(mask: Mask = MASKS[1], len_q: int = 96, len_k: int = 96, **more: object) -> TraceRequest:
    fields = {"head_dim": 16, "block_m": 16, "block_n": 8, "row": None, "scores": None, "values": None, "seed": 0}
    return TraceRequest(mask, len_q, len_k, **(fields | {"form": Format.TEXT} | more))  # type: ignore[arg-type]


def problem_of(request: TraceRequest) -> Problem:
    scale = None if request.scores is None else 1.0
    return Problem(1, 1, 1, request.len_q, request.len_k, request.head_dim, torch.float32, request.mask, scale)  # type: ignore[arg-type]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_picture_is_the_mask_seen_tile_by_tile(mask: Mask, lengths: tuple[int, int]) -> None:
    request = asked(mask, *lengths)
    seen = mask.dense(*lengths)
    table = walk_table(request)
    *rows, total = table.rows
    assert len(rows) == math.ceil(lengths[0] / 16)
    for i, (queries, picture, *counts) in enumerate(rows):
        signs = ""
        for begin in range(0, lengths[1], 8):
            tile = seen[16 * i : 16 * i + 16, begin : begin + 8]
            whole = bool(tile.all()) and begin + 8 <= lengths[1]
            signs += "·" if not tile.any() else "█" if whole else "▒"
        assert picture == signs
        assert counts == [str(sum(map(signs.count, kinds))) for kinds in ("█▒", "█", "▒", "·")]
        assert queries[2:] == f"{16 * i}..{min(16 * i + 16, lengths[0]) - 1}"
    assert [row[0][0] for row in rows] == [" "] * (len(rows) - 1) + [">"]
    assert [int(x) for x in total[2:]] == [sum(int(row[j]) for row in rows) for j in range(2, 6)]
    unseeing = any("see no key" in note for note in table.notes)
    assert unseeing == (not bool(seen.any(1).all()))


@pytest.mark.parametrize("row", [0, 17, 31, 39])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_walk_is_that_of_the_query_tile_and_ends_at_the_plain_softmax(mask: Mask, row: int) -> None:
    scores = torch.randn(60, generator=torch.Generator().manual_seed(row)) * 3
    request = asked(mask, 40, 60, row=row, scores=tuple(scores.tolist()))
    table = steps_table(problem_of(request), request)
    seen = mask.dense(40, 60)
    own = seen[row]
    spans = [tuple(map(int, cells[0].split(".."))) for cells in table.rows]
    assert [first for first, _ in spans] == [0, *(last + 1 for _, last in spans[:-1])]
    assert spans[-1][1] == 59
    for (first, last), (_, kind, shown, tile_max, row_max, rescale, row_sum, output) in zip(
        spans, table.rows, strict=True
    ):
        here = seen[row // 16 * 16 : row // 16 * 16 + 16, first : last + 1]
        assert kind.startswith("skip") == (not here.any())
        so_far = scores[: last + 1].double()[own[: last + 1]]
        if own[first : last + 1].any():
            assert shown.split() == [
                f"{x:.5g}" if own[first + j] else "-inf" for j, x in enumerate(scores[first : last + 1])
            ]
            assert tile_max == f"{float(scores[first : last + 1][own[first : last + 1]].max()):.5g}"
            before = scores[:first][own[:first]]
            old = float(before.max()) if len(before) else -math.inf
            assert float(rescale) == pytest.approx(math.exp(old - float(so_far.max())), rel=1e-4)
        else:
            assert (shown, tile_max, rescale) == ("", "", "")
        if not len(so_far):
            assert (row_max, row_sum, output) == ("-inf", "0", "0")
            continue
        assert float(row_max) == pytest.approx(float(so_far.max()), rel=1e-4)
        assert float(row_sum) == pytest.approx(float((so_far - so_far.max()).exp().sum()), rel=1e-4)
        numbers = torch.arange(last + 1, dtype=torch.float64)[own[: last + 1]]
        assert float(output) == pytest.approx(float(torch.softmax(so_far, 0) @ numbers), rel=1e-4)
    text = " ".join(table.notes)
    if own.any():
        error, of_lse = (float(x) for x in re.findall(r"error of the output (\S+), of lse ([^;]+);", text)[0])
        assert error <= 60 * 60 * torch.finfo(torch.float32).eps
        assert of_lse <= 1e-5
    else:
        assert f"Query {row} sees no key: o = 0, lse = -inf." in text


def test_tiles_visited_for_other_queries_are_told() -> None:
    request = asked(Mask(40, 8), 90, 150, row=40, block_n=16)
    table = steps_table(problem_of(request), request)
    assert any("Query 40 sees a key in 4 of the 5 visited tiles" in note for note in table.notes)
    assert [cells[1] for cells in table.rows] == ["skip x3", "edge", "edge", "full", "edge", "edge", "skip x2"]


def test_memory_is_counted_from_the_shapes() -> None:
    table = bytes_table(Problem(1, 1, 1, 100, 300, 64, torch.float32))
    assert table.rows[0] == ("100", "300", f"{2 * 400 * 64 * 4:,} B", f"{2 * 100 * 300 * 4:,} B", "1.17")
    assert table.rows[2][:2] == ("1600", "4800")
    assert table.rows[2][4] == "18.8"


def test_given_scores_and_values_are_used_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, said = run(
        capsys, "--scores", "1,5,-2,1e30", "--values", "1,2,3,4", "--mask", "full", "--block-n", "2"
    )
    assert (status, said) == (0, "")
    assert re.search(r"0\.\.1 +\| full \| 1 5 +\| +5 \| +5 \| +0 \| +1\.0183 \| +1\.982$", printed, re.M)
    assert re.search(r"2\.\.3 +\| full \| -2 1e\+30 +\| +1e\+30 \| +1e\+30 \| +0 \| +1 \| +4$", printed, re.M)


def test_a_seed_gives_the_same_text_and_another_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [run(capsys, "--seed", seed)[1] for seed in ("0", "0", "1")]
    assert texts[0] == texts[1] != texts[2]


def test_csv_and_markdown_have_the_same_cells(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--len-q", "50", "--mask", "window", "--left", "9")
    _, text, _ = run(capsys, *options, "--format", "csv")
    rows = [row for row in csv.reader(io.StringIO(text)) if row and not row[0].startswith("#")]
    _, text, _ = run(capsys, *options, "--format", "markdown")
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|") and "---" not in line]
    assert [[cell.strip() for cell in row] for row in rows] == [[cell.strip(" `") for cell in line] for line in lines]
    assert not re.search(r"^>", text, re.M)  # a note is no quotation


def test_a_picture_too_large_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, _ = run(capsys, "--len-q", "700", "--block-m", "4", "--block-n", "4", "--row", "300")
    assert status == 0
    assert re.search(r"> 300\.\.303 +\| 75 full, 1 edge, 99 skip +\| +76 \| +75 \| +1 \| +99$", printed, re.M)
    assert "The picture would be 175 x 175 tiles; here up to 160 x 160 are drawn." in printed
    assert "█" not in printed.replace("█ full", "")


def test_output_that_takes_ascii_only_gets_it() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "harness", "trace"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, check=True)
    assert "##/..." in done.stdout.decode("ascii")


def test_on_a_terminal_a_picture_does_not_wrap() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "harness", "trace", "--len-q", "800"]
    with subprocess.Popen(command, stdout=theirs, cwd=ROOT, env=environment) as process:
        os.close(theirs)
        chunks = itertools.takewhile(bool, iter(lambda: _read(ours), None))
        printed = b"".join(chunks).decode()
    os.close(ours)
    assert process.returncode == 0
    assert "here up to 40 x 160 are drawn" in printed
    assert "49 full, 1 edge" in printed


def _read(end: int) -> bytes:
    try:
        return os.read(end, 4096)
    except OSError:  # the other end is closed
        return b""


WRONG = [
    (("--scores", "1,x"), "--scores must be numbers with commas between them, got '1,x'"),
    (("--scores", "1,inf"), "--scores must be from -1e38 to 1e38, got inf"),
    (("--values", "1"), "--values takes one number for each of --scores"),
    (("--scores", "1,2", "--values", "1"), "--values takes one number for each of --scores"),
    (("--scores", "1,2", "--len-k", "3"), "--len-k is 3, but --scores has 2 keys"),
    (("--mask", "caussal"), "--mask must be one of full, causal, window, got 'caussal'; did you mean causal?"),
    (("--mask", "full", "--left", "3"), "--mask full has no --left and no --right"),
    (("--mask", "causal", "--right", "3"), "--mask causal has no --right"),
    (("--mask", "window"), "--mask window takes --left, --right or both"),
    (("--corner", "left"), "--corner must be one of bottom-right, top-left, got 'left'"),
    (("--row", "96"), "--row must be from 0 to 95, got 96"),
    (("--head-dim", "7"), "head_dim must be a multiple of 8 from 16 to 256, got 7"),
    (("--len-q", "0"), "Invalid value for '--len-q'"),
    (("--len-q", "100000", "--block-m", "1"), "625000000 tiles are more than the 262144"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda value: " ".join(value) if type(value) is tuple else ""
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    status, printed, said = run(capsys, *arguments)
    assert (status, printed) == (2, "")
    assert message in said
    assert len(said.splitlines()) == 1


def test_the_readme_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    section = (ROOT / "README.md").read_text().partition("### 2. The algorithm in numbers\n")[2].partition("\n### ")[0]
    commands = re.findall(r"harness trace ((?:--\S+ \S+ ?)+)", section.replace("`", " "))
    quoted = re.findall(r"```\n(.*?)```", section, re.S)
    assert len(commands) == len(quoted) == 2
    for command, table in zip(commands, quoted, strict=True):
        printed = iter(run(capsys, *command.split())[1].splitlines())
        for line in table.splitlines():  # some may be left out, and none are out of order
            assert line in printed, line
