"""The walk through the kernels in the README quotes the sources as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WALK = (ROOT / "README.md").read_text().partition("## A walk through the kernels\n")[2].partition("\n## ")[0]
CODE = re.compile("`([^`]+)`")


def source(place: str) -> str:
    """The text of a file, or of all Python files of a folder."""
    path = ROOT / place
    return path.read_text() if path.is_file() else "".join(file.read_text() for file in sorted(path.glob("*.py")))


def stop(number: int) -> str:
    return WALK.partition(f"### {number}. ")[2].partition("\n### ")[0]


def is_quoted(code: str, text: str) -> bool:
    """Whether a line of the text has the code; a `…` in that stands for anything."""
    return re.search(".*".join(map(re.escape, code.split("…"))), text) is not None


def side_by_side(number: int) -> list[tuple[str, str]]:
    """The code in the first table of a stop, each with the place that the head of its column names."""
    (table, *_) = re.findall(r"(?:^\|.*\n)+", stop(number), re.M)
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    places = [CODE.fullmatch(cell) for cell in head]
    return [
        (code, place[1])
        for row in rows
        for cell, place in zip(row, places, strict=True)
        if place is not None
        for code in CODE.findall(cell)
    ]


@pytest.mark.parametrize(("code", "place"), side_by_side(1) + side_by_side(5))
def test_what_stands_side_by_side_stands_in_the_sources(code: str, place: str) -> None:
    assert is_quoted(code, source(place))


def test_the_lines_of_the_reference_are_its_own_in_their_order() -> None:
    (quoted,) = re.findall(r"```python\n# reference/tiled.py\n(.*?)```", WALK, re.S)
    lines = iter(source("reference/tiled.py").splitlines())
    for line in quoted.splitlines():
        assert line in lines, line


@pytest.mark.parametrize(("begin", "place"), [("- **naive**", "triton_impl"), ("### 6. ", "reference")])
def test_the_code_within_a_sentence_stands_in_the_sources(begin: str, place: str) -> None:
    quoted = [code for code in CODE.findall(WALK.partition(begin)[2].partition("\n### ")[0]) if " " in code]
    assert quoted
    for code in quoted:
        assert is_quoted(code, source(place)), code
