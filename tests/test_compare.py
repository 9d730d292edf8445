"""`harness compare`: faster, slower, the same or unclear, and what no longer passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checks import NAMES
from harness.cli import main
from harness.compare import compare_cell, outcome_of, speed_up
from harness.errors import UsageError
from harness.published import RESULTS
from harness.reader import read_records
from harness.timing import Ratio

from .test_records import current, written

Record = dict[str, Any]


def timed(ours: float, base: float | None = 0.03, *, noise: float = 0.01, seed: int = 0, **changed: Any) -> Record:
    """A record of 40 rounds around these milliseconds, by a clock that all contestants of a round share."""
    rng, record = np.random.default_rng(seed), current()
    medians = {"triton": ours} | ({} if base is None else {"sdpa_flash": base})
    samples = []
    for clock in rng.uniform(0.99, 1.01, size=40):
        ms = {name: value * clock * rng.normal(1, noise) for name, value in medians.items()}
        samples.append(record["samples"][0] | {"ms": ms})
    errors = dict.fromkeys(NAMES[changed.get("direction", "forward")], record["errors"]["o"])
    return record | {"samples": samples, "host_us": dict.fromkeys(medians, 10.0), "errors": errors} | changed


def outcome(before: Record, after: Record, **options: Any) -> str:
    return compare_cell(before, after, **{"tolerance": 0.02, **options}).outcome


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (Ratio(1.0, 0.985, 1.015), "same"),
        (Ratio(1.01, 1.005, 1.015), "same"),
        (Ratio(1.03, 1.01, 1.05), "faster"),
        (Ratio(0.95, 0.9, 0.99), "slower"),
        (Ratio(1.0, 0.9, 1.1), "unclear"),
        (Ratio(1.04, 0.99, 1.09), "unclear"),
    ],
)
def test_the_interval_decides(ratio: Ratio, told: str) -> None:
    assert outcome_of(ratio, 0.02) == told


def test_ten_percent_are_seen_and_one_is_the_same() -> None:
    before = timed(0.020)
    assert outcome(before, timed(0.018, seed=1)) == "faster"
    assert outcome(before, timed(0.022, seed=1)) == "slower"
    assert outcome(before, timed(0.0201, seed=1, noise=0.005)) == "same"
    assert outcome(timed(0.02, noise=0.3), timed(0.0205, noise=0.3, seed=1)) == "unclear"


def test_a_slower_clock_is_not_a_slower_kernel() -> None:
    before, throttled = timed(0.02, 0.03), timed(0.024, 0.036, seed=1)
    cell = compare_cell(before, throttled, tolerance=0.02)
    assert (cell.outcome, cell.beside) == ("same", "sdpa_flash")
    assert compare_cell(before, throttled, tolerance=0.02, absolute=True).outcome == "slower"
    alone = compare_cell(before, timed(0.024, None, seed=1), tolerance=0.02)
    assert (alone.outcome, alone.beside) == ("slower", None)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        before, after = rng.normal(1.0, 0.05, size=(1, 40)), rng.normal(0.8, 0.05, size=(1, 25))
        ratio = speed_up(before.tolist(), after.tolist())
        hits += ratio.low <= 1.25 <= ratio.high
    assert 88 <= hits <= 100


def test_what_was_not_timed_is_compared_by_its_verdict() -> None:
    right, wrong = (current() | {"samples": None, "verdict": verdict} for verdict in ("pass", "fail"))
    assert compare_cell(right, right, tolerance=0.02).outcome == "untimed"
    assert compare_cell(right, wrong, tolerance=0.02).is_worse
    assert not compare_cell(wrong, right, tolerance=0.02).is_worse


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *map(str, arguments)])
    return int(stop.value.code or 0)


def test_the_command_tells_each_cell_and_fails_on_a_worse_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backward = {"direction": "backward"}
    before = written(tmp_path / "a.jsonl", timed(0.02), timed(0.05, 0.06, **backward))
    after = written(tmp_path / "b.jsonl", timed(0.02, seed=2), timed(0.04, 0.06, seed=2, **backward))
    path = tmp_path / "c.jsonl"
    assert run(before, after, "--json", path) == 0
    out = capsys.readouterr().out
    assert f"triton forward, NVIDIA H200: {after} beside {before}" in out
    assert "triton backward: 1 faster. Within 2 % is the same." in out
    records = read_records(path, ("comparison",))
    assert [r["outcome"] for r in records] == ["same", "faster"]
    assert records[1]["speed"]["low"] < 1.25 < records[1]["speed"]["high"]
    assert run(after, before) == 1
    assert run(after, before, "--tolerance", "40") == 0


def test_a_verdict_that_got_worse_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path / "a.jsonl", timed(0.02))
    after = written(tmp_path / "b.jsonl", current() | {"samples": None, "verdict": "fail"})
    assert run(before, after) == 1
    assert "FAIL: pass, now fail" in capsys.readouterr().out
    assert run(after, before) == 0


def test_cells_of_one_file_only_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path / "a.jsonl", timed(0.02), timed(0.02, direction="backward"))
    after = written(tmp_path / "b.jsonl", timed(0.02))
    assert run(before, after) == 0
    assert f"1 of 2 cells are in {before} only." in capsys.readouterr().out
    other = written(tmp_path / "c.jsonl", timed(0.02, port="sdpa_flash"))
    assert run(after, other) == 2
    assert "have no port, problem and direction in common" in capsys.readouterr().err


def test_code_paths_of_one_card_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    native, ada = RESULTS / "walkthrough-triton-h200.jsonl.gz", RESULTS / "walkthrough-triton-ada-path-h200.jsonl.gz"
    assert run(native, ada) == 1
    assert "triton forward, NVIDIA H200, then ada path on NVIDIA H200:" in capsys.readouterr().out


def test_two_targets_in_one_file_are_two_cells(tmp_path: Path) -> None:
    ada = {"target": {"name": "ada", "sm": "sm_89"}}
    both = written(tmp_path / "a.jsonl", timed(0.02), timed(0.03, **ada))
    path = tmp_path / "c.jsonl"
    assert run(both, both, "--json", path) == 0
    assert [r["targets"][0]["name"] for r in read_records(path, ("comparison",))] == ["hopper", "ada"]


def test_a_file_without_checks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"schema": 2}) + "\n")
    assert run(path, path) == 2
    with pytest.raises(UsageError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl", ("check",))
