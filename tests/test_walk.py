"""The walk through the kernels in the README quotes the sources as they are, and the tiles that they ship."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common import Mask, Problem, Target

from .subjects import SUBJECTS, Subject

ROOT = Path(__file__).resolve().parent.parent
WALK = (ROOT / "README.md").read_text().partition("## A walk through the kernels\n")[2].partition("\n## ")[0]
CODE = re.compile("`([^`]+)`")
FOLDERS = {"Triton": "triton_impl", "TileLang": "tilelang_impl", "CuTe DSL": "cute_impl"}


def source(place: str) -> str:
    """The text of a file, or of all Python files of a folder."""
    path = ROOT / place
    return path.read_text() if path.is_file() else "".join(file.read_text() for file in sorted(path.glob("*.py")))


def stop(number: int) -> str:
    return WALK.partition(f"### {number}. ")[2].partition("\n### ")[0]


def is_quoted(code: str, text: str) -> bool:
    """Whether a line of the text has the code; a `…` in that stands for anything."""
    return re.search(".*".join(map(re.escape, code.split("…"))), text) is not None


def tables(number: int) -> list[tuple[list[str], list[list[str]]]]:
    """The head and the rows of each table of a stop."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", stop(number), re.M):
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        found.append((head, rows))
    return found


def side_by_side(number: int) -> list[tuple[str, str]]:
    """The code in the tables of a stop, each with the place that the head of its column names, as code or as a port."""
    found = []
    for head, rows in tables(number):
        places = [FOLDERS.get(cell) or "".join(CODE.findall(cell)) for cell in head]
        cells = [pair for row in rows for pair in zip(row, places, strict=True)]
        found += [(code, place) for cell, place in cells if place for code in CODE.findall(cell)]
    return found


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
    sentences = re.sub("^```.*?^```$", "", WALK.partition(begin)[2].partition("\n### ")[0], flags=re.M | re.S)
    quoted = [code for code in CODE.findall(sentences) if " " in code]
    assert quoted
    for code in quoted:
        assert is_quoted(code, source(place)), code


@pytest.mark.parametrize(
    "subject",
    [pytest.param(one, id=one.name, marks=pytest.mark.skipif(one.is_missing, reason=one.needs)) for one in SUBJECTS],
)
def test_the_head_dims_whose_dq_is_added_up_by_atomics_are_those_of_the_shipped_tiles(subject: Subject) -> None:
    ((_, rows),) = tables(6)
    (cells,) = (cells for name, *cells in rows if name == f"`{subject.name}_impl/`")
    for target, cell in zip(("ada", "hopper"), cells, strict=True):
        said = re.findall(r"(\d+)\.\.(\d+)( without a mask)?", cell)
        for head_dim in range(16, 257, 8):
            for mask in (Mask(), Mask.causal()):
                shape = {"batch": 4, "heads_q": 8, "heads_kv": 8, "len_q": 4096, "len_k": 4096, "head_dim": head_dim}
                tile, *_ = subject.port.tiles(Problem(**shape, mask=mask), Target.named(target), "backward")
                adds = bool(tile.get("atomics", 0) or tile.get("atomic_dq", 0))
                those = [(least, most) for least, most, bare in said if not bare or mask == Mask()]
                told = any(int(least) <= head_dim <= int(most) for least, most in those)
                assert adds == told, (target, head_dim, mask)
