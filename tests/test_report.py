"""`harness report`: what is on the page, that every figure is a record's, and that the page keeps to itself."""

from __future__ import annotations

import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cli import main
from harness.environment import CPU
from harness.matrix import matrix
from harness.provenance import folder_hash
from harness.published import KEPT, RESULTS
from harness.records import problem_fields
from harness.report.runs import read_runs
from harness.report.times import rows_of
from harness.report.verdicts import verdicts

from .report_records import MS, Record, bench, failed, memory, models, problem, provenance, timed
from .test_matrix import ports
from .test_matrix import request as matrix_request
from .test_records import written

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "harness" / "report" / "templates"


def report(folder: Path, *records: Record, status: int = 0) -> str:
    """The page that the command writes of these records."""
    out = folder / "page.html"
    with pytest.raises(SystemExit) as stop:
        main(["report", str(written(folder / "x.jsonl", *records)), "--out", str(out)])
    assert stop.value.code == status
    return out.read_text(encoding="utf-8")


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text apart from style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data: str) -> None:
        if self._within not in ("style", "script"):
            self.words += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_page_has_every_part_and_a_text_for_every_picture(tmp_path: Path) -> None:
    text = report(tmp_path, *bench(), failed(), *memory(), *models())
    page = Page(text)
    ids = ["verdicts", "speed", "memory", "rooflines", "model", "how", "origins"]
    assert [one["id"] for one in page.all("section")] == ids
    pictures = page.all("svg")
    # 2 paths × 2 directions × 2 masks, each with a picture a length and one of time; two of memory and two of a model.
    assert len(pictures) == 8 * 3 + 2 + 2
    assert all(one["role"] == "img" for one in pictures)
    assert text.count("<desc>") == text.count("<figcaption>") == len(pictures)
    # A matrix a path, the numbers of 8 cards, 4 tables across and 2 ports in each, the cute port, memory, a model's
    # runs and its losses by step, three examples of how it works and the steps that the script makes, origins.
    assert len(page.all("table")) == 2 + 8 + 4 * (1 + 2) + 1 + 1 + 2 + (3 + 1) + 1
    assert "triton: 8 checks of 4 problems: 8 pass, 0 fail, 0 unsupported" in page.words
    assert "cute: 1 checks of 1 problems: 0 pass, 1 fail, 0 unsupported" in page.words


def test_every_figure_is_the_records_own(tmp_path: Path) -> None:
    record = timed()
    text = report(tmp_path, record)
    ms = float(np.median([sample["ms"]["triton"] for sample in record["samples"]]))
    assert f"{ms:.4f}" in text
    assert f">{record['flops'] / 1e9 / ms:.1f}</text>" in text
    (row,) = rows_of([record])
    ours = next(time for time in row.times if time.who.name == "triton")
    assert ours.ms.value == pytest.approx(ms)
    assert ours.ms.low < ms < ours.ms.high
    assert ours.tflops.value == pytest.approx(record["flops"] / 1e9 / ms)
    assert ours.tflops.low == pytest.approx(record["flops"] / 1e9 / ours.ms.high)
    assert f"{ours.tflops.low:.1f}–{ours.tflops.high:.1f}" in text
    assert ours.beside is not None
    assert f"{100 * ours.beside.low:.1f}–{100 * ours.beside.high:.1f}" in text


def test_every_speed_stands_beside_its_verdict_and_where_it_was_measured(tmp_path: Path) -> None:
    text = report(tmp_path, *bench(), failed())
    values = text.count('class="value"')
    assert values == 8 * 2 * 4
    assert text.count('class="pass" text-anchor="end">pass</text>') == values
    assert "FAIL 4.00 dq" in text
    assert "NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130, triton 3.6.0" in text
    assert "commit c3e9dfa69e, 2026-01-31" in text
    assert "Not timed: FA4: FA4 needs flash_attn.cute" in text
    for path in ("NVIDIA H200", "ada path on NVIDIA H200"):
        assert f"Forward, {path}, from x.jsonl" in text


def test_memory_stands_beside_the_formula_and_out_of_memory_is_said_in_words(tmp_path: Path) -> None:
    text = report(tmp_path, *memory())
    for record in memory():
        if record["peak_bytes"] is not None:
            assert f">{record['peak_bytes'] / 1e6:.1f}</td>" in text
            assert f">{record['extra_bytes'] / 1e6:+.1f}</td>" in text
    assert ">plain attention: out of memory</text>" in text
    assert ">out of memory</td>" in text
    assert "formula" in Page(text).words


def test_a_matrix_has_the_verdicts_and_how_far_the_ports_are_apart(tmp_path: Path) -> None:
    path, out = tmp_path / "matrix.jsonl", tmp_path / "page.html"
    asked = matrix_request("reference", "triton", json=path)
    assert matrix(asked, CPU, all_asked=True, open_port=ports()) == 0
    with pytest.raises(SystemExit):
        main(["report", str(path), "--out", str(out)])
    words = Page(out.read_text()).words
    checks = [json.loads(line) for line in path.read_text().splitlines()]
    for record in (r for r in checks if r["kind"] == "check"):
        worst = max(record["errors"].items(), key=lambda item: item[1]["ratio"])
        assert f"pass {worst[1]['ratio']:.2f} {worst[0]}" in words
    assert "reference: 2 checks of 1 problems: 2 pass, 0 fail, 0 unsupported" in words
    assert "Where each two ports are furthest apart" in words
    assert f"{max(r['units'] for r in checks if r['kind'] == 'disagreement'):.2f}" in words
    assert "ada path on the CPU" in words


def test_a_wrong_cell_names_its_worst_element(tmp_path: Path) -> None:
    words = Page(report(tmp_path, *bench(), failed())).words
    assert "cute, walkthrough, b4-h8-n1024-d64-bf16-causal, backward: dq: error 0.02, allowed 0.005" in words


@pytest.mark.parametrize(
    ("records", "missing"),
    [
        (lambda: memory(), ["matrix", "bench", "roofline", "model"]),
        (lambda: models(), ["matrix", "bench", "memory", "roofline"]),
        (lambda: [timed()], ["memory", "matrix", "roofline", "model"]),
        (lambda: [timed(samples=None, host_us=None)], ["matrix", "bench", "memory", "roofline", "model"]),
    ],
)
def test_what_there_are_no_records_of_is_a_sentence_with_the_command(
    records: Any, missing: list[str], tmp_path: Path
) -> None:
    page = Page(report(tmp_path, *records()))
    for command in missing:
        assert f"harness {command}" in page.words
    assert len([one for one in page.all("p") if one.get("class") == "missing"]) == len(missing)


def test_what_records_say_is_text_and_never_markup(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    facts = provenance() | {"card": evil, "driver": evil}
    facts["packages"] = facts["packages"] | {evil: evil}
    hostile = {"suite": evil, "case": evil, "provenance": facts}
    apart = {"verdict": "fail", "reason": evil, "faults": [evil], "samples": None, "host_us": None}
    other = timed(**hostile)
    other["baselines"] = [{"port": evil, "verdict": "fail", "reason": evil}, *other["baselines"]]
    wrong = timed(f"port {evil}", **hostile | apart)
    taken = [record | hostile | {"contestant": evil} for record in memory()]
    text_of_evil = {"source": evil, "tokenizer": evil, "sha256": evil}
    trained = [record | hostile | {"contestant": evil, "text": text_of_evil, "reason": evil} for record in models()]
    text = report(tmp_path, other, wrong, *taken, *trained)
    assert "alert(1)" in text
    page = Page(text)
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_page_loads_nothing_and_says_so_to_the_browser(tmp_path: Path) -> None:
    text = report(tmp_path, *bench(), *memory())
    page = Page(text)
    assert not re.search(r"(src|href)=\"(?!#|data:,\")", text)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    (policy,) = (one["content"] for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not any("style" in attributes for _, attributes in page.elements)


def test_the_same_records_give_the_same_page(tmp_path: Path) -> None:
    records = timed(), failed(), *memory()
    assert report(tmp_path, *records) == report(tmp_path, *records)


def test_verdicts_of_several_files_stand_side_by_side_unless_one_says_it_anew(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("a", "b", "c")]
    for path, own in zip(files, (timed(), timed("tilelang"), timed()), strict=True):
        path.write_text(json.dumps(own) + "\n")
    told = verdicts(read_runs(files))
    assert told is not None
    first, second = told.parts
    assert "from a.jsonl, b.jsonl" in first.title
    assert first.counts == [
        f"{port}: 1 checks of 1 problems: 1 pass, 0 fail, 0 unsupported" for port in ("triton", "tilelang")
    ]
    assert "from c.jsonl" in second.title


def test_a_record_of_an_earlier_version_is_of_a_date_that_is_not_known(tmp_path: Path) -> None:
    first = json.loads(Path(__file__).with_name("record_version_1.json").read_text())
    assert "of a date that was not recorded" in report(tmp_path, first)


def test_without_files_it_takes_the_kept_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit) as stop:
        main(["report", "--out", str(out)])
    assert stop.value.code == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{out}: written, from ")
    text = out.read_text()
    left_out = {path.name for path in KEPT if f"{path} holds the candidates of a sweep only" in said.err}
    assert left_out == {path.name for path in KEPT if path.name.startswith("sweep-")}
    assert {path.name for path in KEPT if path.name in text} == {path.name for path in KEPT} - left_out
    assert "2026-11-30" in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("no json", "line 1 is no JSON"),
        ("", "holds no records of kind check or disagreement or memory"),
        (json.dumps(timed() | {"target": {"name": "abacus", "sm": "sm_1"}}), "target must be one of"),
        (json.dumps(timed() | {"host_us": {"flex": 1.0}}), "samples without triton"),
        (json.dumps(timed() | {"host_us": {"triton": 1.0}}), "not all have a time of every contestant"),
        (json.dumps(timed() | {"flops": 0}), "a timing of nothing"),
        (json.dumps(timed() | {"flops": 10**400}), "of operations of no problem"),
        (json.dumps(timed() | {"problem": problem_fields(problem()) | {"heads_kv": 3}}), "heads"),
    ],
)
def test_a_bad_file_is_an_error_and_leaves_the_old_page(
    line: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "x.jsonl", tmp_path / "page.html"
    path.write_text(line + "\n")
    out.write_text("the old page")
    with pytest.raises(SystemExit) as stop:
        main(["report", str(path), "--out", str(out)])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert out.read_text() == "the old page"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "x.jsonl"]


def test_a_file_that_has_nothing_to_show_is_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = written(tmp_path / "good.jsonl", timed())
    (tmp_path / "empty.jsonl").write_text("")
    swept = written(tmp_path / "swept.jsonl", timed("triton#forward 1 64x64 w4 s2", samples=None, host_us=None))
    out = tmp_path / "page.html"
    others = [str(tmp_path / "empty.jsonl"), str(swept)]
    with pytest.raises(SystemExit) as stop:
        main(["report", *others, str(good), "--out", str(out)])
    assert stop.value.code == 0
    said, err = capsys.readouterr()
    assert said == f"{out}: written, from 1 records in 1 file\n"
    assert [line.endswith(": it is left out") for line in err.splitlines()] == [True, True]
    assert "empty.jsonl holds no records of kind check" in err
    assert "swept.jsonl holds the candidates of a sweep only, which harness tables shows" in err
    with pytest.raises(SystemExit) as stop:
        main(["report", *others, "--out", str(out)])
    assert stop.value.code == 2


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "x.jsonl", timed())
    before = path.read_text()
    for out, told in ((tmp_path, "a directory"), (tmp_path / "no" / "x.html", "No such file"), (path, "is read")):
        with pytest.raises(SystemExit) as stop:
            main(["report", str(path), "--out", str(out)])
        assert stop.value.code == 2
        assert told in capsys.readouterr().err
    assert path.read_text() == before


def test_a_page_that_breaks_off_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.html"
    out.write_text("the old page")

    def broken(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harness.report.os.replace", broken)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(written(tmp_path / "x.jsonl", timed())), "--out", str(out)])
    assert stop.value.code == 2
    assert out.read_text() == "the old page"


def test_where_kernels_have_changed_since_the_page_says_so(tmp_path: Path) -> None:
    told = "The sources of triton, or of common, have changed since"
    assert told in report(tmp_path, timed(sources="0" * 64))
    assert told not in report(tmp_path, timed(sources=folder_hash(ROOT / "triton_impl")))


def test_a_launch_of_both_directions_is_counted_where_they_were_not_checked_apart(tmp_path: Path) -> None:
    both, apart = timed(direction="both"), [timed(), timed(direction="backward")]
    assert "triton: 1 checks of 1 problems" in Page(report(tmp_path, both)).words
    words = Page(report(tmp_path, both, *apart)).words
    assert "triton: 2 checks of 1 problems" in words
    assert "Forward and backward in one launch, NVIDIA H200" in words


def test_of_a_cell_that_a_file_has_twice_the_later_record_counts(tmp_path: Path) -> None:
    slow = timed()
    slow["samples"] = [sample | {"ms": dict.fromkeys(MS, 123.25)} for sample in slow["samples"]]
    text = report(tmp_path, slow, timed())
    assert "123.25" not in text
    assert "123.25" in report(tmp_path, timed(), slow)


def test_ports_that_were_not_timed_by_turns_are_marked_so(tmp_path: Path) -> None:
    def alone(port: str) -> Record:
        record = timed(port)
        record["samples"] = [
            s | {"ms": {name: s["ms"][name] for name in (port, "sdpa_flash")}} for s in record["samples"]
        ]
        return record | {"host_us": {port: 1.0, "sdpa_flash": 1.0}}

    assert "not timed by turns with each other" not in report(tmp_path, *bench()).replace("\n", " ")
    assert "Not all of these were timed by turns" in report(tmp_path, alone("triton"), alone("tilelang"))


def test_an_installed_package_has_the_page_and_the_kept_records() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, folder in (("harness.report.templates", TEMPLATES), ("harness.results", RESULTS)):
        assert package in setup["packages"]  # or setuptools warns of a folder that looks like one
        shipped = {path for glob in setup["package-data"][package] for path in folder.glob(glob)}
        assert shipped
        assert set(folder.iterdir()) <= shipped
