"""The tables of the README are those of the records, and a changed kernel makes them say so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import common
from harness.cli import main
from harness.errors import UsageError
from harness.provenance import folder_hash, sources_hash
from harness.published import KEPT, KINDS, RESULTS, record_tables, summary_tables, with_tables, write_tables
from harness.reader import read_records, upgraded
from harness.records import problem_fields, problem_of
from harness.sound import sound_records
from harness.suites import load_suite

ROOT = Path(__file__).resolve().parent.parent


def record(**changed: Any) -> dict[str, Any]:
    """A record of four rounds, on Ada's path of an H200."""
    kept = read_records(RESULTS / "walkthrough-triton-h200.jsonl.gz", ("check",))[0]
    problem = kept["problem"] | {"heads_kv": 2, "mask": {"left": None, "right": 0, "corner": "bottom_right"}}
    sample = kept["samples"][0] | {"ms": {"triton": 0.02, "sdpa_flash": 0.03}}
    figures = {"flops": 4 * 10**9, "host_us": {"triton": 20.0, "sdpa_flash": 25.0}, "samples": [sample] * 4}
    target = {"name": "ada", "sm": "sm_89"}
    provenance = kept["provenance"] | {"git": {"commit": "c3e9dfa69e" * 4, "dirty": False}, "date": None}
    about = {"problem": problem, "target": target, "sources": folder_hash(ROOT / "triton_impl")}
    return kept | about | {"provenance": provenance} | figures | changed


def written(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_the_readme_says_what_the_records_say() -> None:
    text = (ROOT / "README.md").read_text()
    assert with_tables(text) == text, "run: harness tables --write README.md"


def test_every_kept_record_passed_its_check_on_a_named_card() -> None:
    for path in KEPT:
        records = read_records(path, KINDS)
        is_timed = any(r.get("samples") for r in records)  # unlike those of a matrix
        for r in records:
            assert r["provenance"]["card"]
            if r["kind"] == "disagreement":
                continue
            if r["kind"] == "model":
                assert r["verdict"] == "pass" or r["reason"] == "out of memory"
            elif r["kind"] == "memory":
                assert r["verdict"] in ("pass", None) or (r["verdict"] == "unsupported" and r["reason"])
            elif is_timed:
                assert r["verdict"] == "pass"
                assert r["samples"]
            else:
                assert r["verdict"] == "pass" or r["reason"].endswith("the problem is fp32")


def test_a_table_names_the_path_the_card_and_the_figures(tmp_path: Path) -> None:
    (table,) = record_tables(read_records(written(tmp_path, record()), ("check",)))
    assert table.title == "triton forward, ada path on NVIDIA H200"
    row = ("4,8/2,64", "bf16", "512", "causal", "0.0200", "0.0300", "200.0", "133.3", "150.0", "150.0–150.0", "pass")
    assert table.rows == [row]
    assert len(table.notes) == 1
    assert "commit c3e9dfa69e" in table.notes[0]


def test_a_table_says_when_it_was_measured_where_that_is_known(tmp_path: Path) -> None:
    kept = upgraded(record())
    dated = kept | {"provenance": kept["provenance"] | {"date": "2026-01-31T12:00:00Z"}}
    (table,) = record_tables(read_records(written(tmp_path, dated), ("check",)))
    assert "commit c3e9dfa69e, 2026-01-31." in table.notes[0]


def test_a_table_says_when_its_kernels_have_changed(tmp_path: Path) -> None:
    (table,) = record_tables(read_records(written(tmp_path, record(sources="0" * 64)), ("check",)))
    assert "have changed since this was measured" in table.notes[1]


def test_a_table_says_in_how_many_rounds_the_card_throttled(tmp_path: Path) -> None:
    kept = upgraded(record())
    hot = kept["samples"][0]["sensors"] | {"throttled": ["power cap"]}
    samples = [*kept["samples"][:3], kept["samples"][3] | {"sensors": hot}]
    (table,) = record_tables(read_records(written(tmp_path, kept | {"samples": samples}), ("check",)))
    assert "In 1 of 4 rounds the card held its clocks down (power cap)." in table.notes


def test_a_table_says_which_samples_may_hold_host_time(tmp_path: Path) -> None:
    kept = upgraded(record())
    samples = [sample | {"late": ["sdpa_flash"]} for sample in kept["samples"]]
    (table,) = record_tables(read_records(written(tmp_path, kept | {"samples": samples}), ("check",)))
    assert "4 of 4 samples of sdpa_flash may hold host time" in table.notes[1]


def test_a_summary_has_a_column_for_each_port_and_path_and_says_who_has_changed(tmp_path: Path) -> None:
    ada = upgraded(record(sources="0" * 64))
    ours = ada | {"target": {"name": "hopper", "sm": "sm_90a"}}
    other = ours | {"problem": ours["problem"] | {"len_q": 1024, "len_k": 1024}}
    (table,) = summary_tables(read_records(written(tmp_path, ours, ada, other), ("check",)))
    assert table.title == "forward on NVIDIA H200, in % of the speed of SDPA flash"
    assert table.columns[4:] == ("triton", "triton, ada path")
    assert [row[2:] for row in table.rows] == [("512", "causal", "150.0", "150.0"), ("1024", "causal", "150.0", "–")]
    assert table.notes == ["The sources of triton or of `common` have changed since this was measured."]
    assert summary_tables([ours | {"samples": None}]) == []
    another = ada | {"provenance": ada["provenance"] | {"card": "NVIDIA GeForce RTX 4090", "sm": "sm_89"}}
    (both,) = summary_tables([ours, another])
    assert both.title == "forward, in % of the speed of SDPA flash"
    assert both.columns[4:] == ("triton, NVIDIA H200", "triton, NVIDIA GeForce RTX 4090")


def test_a_bench_has_the_tables_across_alone_too(tmp_path: Path) -> None:
    kept = upgraded(record(sources="0" * 64))
    ms = {"triton": 0.02, "sdpa_flash": 0.03, "flex": 0.04}
    beside = [{"port": name, "verdict": "pass", "reason": ""} for name in ("sdpa_flash", "flex")]
    samples = [sample | {"ms": ms} for sample in kept["samples"]]
    path = written(tmp_path, kept | {"samples": samples, "host_us": dict.fromkeys(ms, 9.0), "baselines": beside})
    text = with_tables(f"<!-- across: {path} -->\n<!-- /across -->")
    assert text.count("| B,H,D |") == 1
    assert "| 200.0 pass | 133.3 pass | 100.0 pass |" in text
    assert "The sources of triton or of `common` have changed" in text
    (own, across) = record_tables(read_records(path, ("check",)))
    row = dict(zip(own.columns, own.rows[0], strict=True))
    assert (row["% of SDPA flash"], row["host µs"], row["throttled"]) == ("150.0", "9", "0/4")
    assert "have changed" in own.notes[-1]
    assert across.title.startswith("All forward")
    with pytest.raises(UsageError, match=r"x\.jsonl has no timings of a bench"):
        with_tables(f"<!-- across: {written(tmp_path, kept)} -->\n<!-- /across -->")


def test_the_hash_of_a_folder_is_that_of_its_port() -> None:
    for name in ("triton", "reference"):
        assert folder_hash(ROOT / common.port_package(name)) == sources_hash(common.port(name))


def test_writing_replaces_what_stands_between_the_markers_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path, record())
    text = f"before\n<!-- records: {path} -->\na typed figure\n<!-- /records -->\nafter\n"
    fresh = with_tables(text)
    assert "a typed figure" not in fresh
    assert "| 150.0 |" in fresh
    assert fresh.startswith("before\n")
    assert fresh.endswith("<!-- /records -->\nafter\n")
    assert with_tables(fresh) == fresh
    page = tmp_path / "page.md"
    page.write_text(text)
    assert write_tables(page)
    assert page.read_text() == fresh
    assert not write_tables(page)


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("<!-- records: F -->\nprose\n<!-- records: F -->\n<!-- /records -->\n", "line 1, <!-- records: F --> has no"),
        ("prose\n<!-- records: F -->\nprose\n", "line 2, <!-- records: F --> has no marker of its own that closes it"),
        ("<!-- records: F -->\n<!-- /summary -->\n", "line 1, <!-- records: F --> has no"),
        ("prose\n<!-- /records -->\n", "line 2, <!-- /records --> has no marker of its own that opens it"),
        ("<!-- records: F -->\n<!-- /records --> \n", "line 2, <!-- /records -->  is nearly a marker"),
        ("  <!-- records: F -->\n  <!-- /records -->\n", "line 1,   <!-- records: F --> is nearly a marker"),
        ("<!--summary: F-->\nold\n<!--/summary-->\n", "line 1, <!--summary: F--> is nearly a marker"),
        ("<!-- records:  F -->\nold\n<!-- /records -->\n", "line 1, <!-- records:  F --> is nearly a marker"),
        ("<!-- matrix F -->\nold\n<!-- /matrix -->\n", "line 1, <!-- matrix F --> is nearly a marker"),
        (
            "<!-- memory: F -->\n<!-- /memory -->\n",
            "quoted by the words records, summary, across, ladder, matrix, not m",
        ),
    ],
)
def test_odd_markers_are_refused_and_the_page_is_as_it_was(page: str, told: str, tmp_path: Path) -> None:
    good = f"<!-- records: {written(tmp_path, record())} -->\n<!-- /records -->\n"
    path = tmp_path / "page.md"
    path.write_text(page + good)
    with pytest.raises(UsageError, match=re.escape(told)):
        write_tables(path)
    assert path.read_text() == page + good


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"port": "julia"}, "samples without julia"),
        ({"verdict": "unsupported"}, "a timing of what is unsupported"),
        ({"faults": ["wrote outside"]}, "a pass that its errors and faults do not bear out"),
        ({"errors": {}}, "a pass that its errors and faults do not bear out"),
        ({"direction": "backward"}, "errors of lse, o, which no backward has"),
        ({"target": {"name": "turing", "sm": "sm_75"}}, "target must be one of"),
        ({"flops": 10**400}, "of operations of no problem"),
        ({"host_us": {"triton": 1.0}}, "not all have a time of every contestant"),
        ({"samples": [{"ms": {"triton": 0, "sdpa_flash": 1.0}}]}, "times that no launch takes"),
        ({"samples": [{"ms": {"triton": 10**400, "sdpa_flash": 1.0}}]}, "times that no launch takes"),
        ({"problem": {"head_dim": 7}}, "head_dim"),
        ({"problem": {"scale": 0.0}}, "scale"),
        ({"problem": {"len_q": 10**30}}, "len_q"),
    ],
)
def test_a_record_that_contradicts_itself_is_one_line_to_every_reader(
    change: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = upgraded(record())
    odd = kept | change
    if "problem" in change:
        odd["problem"] = kept["problem"] | change["problem"]
    if "samples" in change:
        odd["samples"] = [kept["samples"][0] | sample for sample in change["samples"]]
    path = str(written(tmp_path, odd))
    for arguments in (["tables", path], ["compare", path, path], ["report", path, "--out", str(tmp_path / "x.html")]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"{path} holds a record that cannot be shown: " in err
        assert told in err


def test_a_wrong_result_that_says_it_passed_is_neither_shown_nor_gone_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    only = ["matrix", "--impl", "reference", "--only", "scale", "--direction", "forward"]
    with pytest.raises(SystemExit):
        main([*only, "--json", str(path)])
    (kept,) = read_records(path, ("check",))
    worse = kept["errors"]["o"] | {"error": 5.0}
    written(tmp_path, kept | {"errors": kept["errors"] | {"o": worse}})
    for arguments, use in ((["tables", str(path)], "shown"), ([*only, "--resume", str(path)], "gone on from")):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert f"x.jsonl holds a record that cannot be {use}: a pass that its errors" in capsys.readouterr().err
    written(tmp_path, kept | {"switches": kept["switches"] | {"exp2": False}})
    with pytest.raises(SystemExit) as stop:
        main([*only, "--resume", str(path)])
    assert stop.value.code == 2
    assert "none of the 1 records of" in (told := capsys.readouterr().err)
    assert "1 of other switches" in told


def test_a_record_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    kept = upgraded(record())
    path = written(tmp_path, kept, kept)
    text = with_tables(f"<!-- records: {path} -->\n<!-- /records -->")
    assert with_tables(f"<!-- records: {path} {path} -->\n<!-- /records -->").count("pass") == text.count("pass") == 1


def test_the_ends_of_a_texts_lines_stay_as_they_are(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(f"prose\r\n<!-- records: {written(tmp_path, record())} -->\r\n<!-- /records -->\r\n".encode())
    assert write_tables(page)
    assert page.read_bytes().count(b"\n") == page.read_bytes().count(b"\r\n") > 3


def test_disagreements_without_checks_are_a_table_without_counts(tmp_path: Path) -> None:
    apart = read_records(RESULTS / "matrix-quick-h200.jsonl.gz", ("disagreement",))[:3]
    (table,) = record_tables(read_records(written(tmp_path, *apart), ("disagreement",)))
    assert table.title.startswith("Ports beside each other")
    assert {row[0] for row in table.rows} == {name for r in apart for name in r["ports"]}
    with pytest.raises(UsageError, match="a distance that is none"):
        sound_records(written(tmp_path, apart[0] | {"units": -1.0}), ("disagreement",))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"peak_bytes": -5, "extra_bytes": -5}, "bytes that no card has"),
        ({"extra_bytes": 7}, "bytes beyond the formula that are not the rest"),
    ],
)
def test_memory_that_cannot_be_is_refused(change: dict[str, int], told: str, tmp_path: Path) -> None:
    kept = read_records(RESULTS / "memory-long-h200.jsonl.gz", ("memory",))[0]
    with pytest.raises(UsageError, match=told):
        sound_records(written(tmp_path, kept | change), ("memory",))


def test_a_reason_of_several_lines_stays_in_its_cell(tmp_path: Path) -> None:
    kept = read_records(RESULTS / "memory-long-h200.jsonl.gz", ("memory",))[0]
    lost = {"peak_bytes": None, "extra_bytes": None, "reason": "one\n<!-- /records -->\ntwo"}
    path = written(tmp_path, kept | lost)
    text = with_tables(f"<!-- records: {path} -->\n<!-- /records -->")
    assert "| one <!-- /records --> two |" in text
    assert with_tables(text) == text


def test_the_command_prints_a_files_tables_and_refuses_a_text_without_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["tables", str(written(tmp_path, record()))])
    assert stop.value.code == 0
    assert "triton forward, ada path on NVIDIA H200" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text("nothing to write")
    untimed = tmp_path / "untimed.jsonl"
    untimed.write_text(json.dumps(record(samples=None)) + "\n")
    for arguments in (["--write", str(page)], [], ["--write", str(tmp_path / "none.md")], [str(page)], [str(untimed)]):
        with pytest.raises(SystemExit) as stop:
            main(["tables", *arguments])
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert err.count("none.md") < 2


def test_a_file_that_has_nothing_for_a_table_is_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed, untimed, empty = (tmp_path / name for name in ("timed.jsonl", "untimed.jsonl", "empty.jsonl"))
    timed.write_text(json.dumps(record()) + "\n")
    untimed.write_text(json.dumps(record(samples=None)) + "\n")
    empty.write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["tables", str(untimed), str(timed), str(empty)])
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert "triton forward, ada path on NVIDIA H200" in out
    first, second = err.splitlines()
    assert first == f"harness: {untimed} holds no timings, which come from a GPU: it is left out"
    assert second.startswith(f"harness: {empty} holds no records of kind check")
    assert second.endswith(": it is left out")
    with pytest.raises(SystemExit) as stop:
        main(["tables", str(untimed), str(empty)])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_the_command_tells_whether_a_text_is_behind_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- records: {written(tmp_path, record())} -->\n<!-- /records -->\n")
    for option, status, told in (
        ("--check", 1, "behind its records"),
        ("--write", 0, "written"),
        ("--check", 0, "as its records have it"),
    ):
        before = page.read_text()
        with pytest.raises(SystemExit) as stop:
            main(["tables", option, str(page)])
        assert (stop.value.code, capsys.readouterr().out) == (status, f"{page}: {told}\n")
        assert (page.read_text() == before) == (option == "--check")


@pytest.mark.parametrize("suite", ["quick", "fa2"])
def test_a_problem_comes_back_from_its_record(suite: str) -> None:
    for case in load_suite(suite, small=False).cases:
        assert problem_of(json.loads(json.dumps(problem_fields(case.problem)))) == case.problem
