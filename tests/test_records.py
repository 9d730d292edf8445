"""Records: what their schema allows, on writing and on reading, and how those of earlier versions are read."""

from __future__ import annotations

import copy
import gzip
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cli_options import records_file
from harness.errors import UsageError
from harness.published import KEPT, RESULTS
from harness.reader import read_records, resumed_records, upgraded
from harness.records import SHOWN, RecordFile
from harness.run import _is_of_run
from harness.schema import ANNOTATIONS, KEYWORDS, VERSION, fault, record_fault, record_schema

Record = dict[str, Any]


def kept() -> Record:
    """A record as version 1 was written, of an H200, with two of its rounds."""
    return json.loads(Path(__file__).with_name("record_version_1.json").read_text())


def second() -> Record:
    """The same record as version 2 had it."""
    record = copy.deepcopy(upgraded(kept()))
    del record["provenance"]["date"]
    return record | {"schema": 2}


def current() -> Record:
    return upgraded(kept())


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def keywords(schema: Any) -> Iterator[str]:
    """The keywords of a schema and of all schemas within it."""
    if not isinstance(schema, dict):
        return
    yield from schema
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            for inner in value.values():
                yield from keywords(inner)
        elif key in ("allOf", "anyOf"):
            for inner in value:
                yield from keywords(inner)
        elif key in ("if", "then", "items", "additionalProperties"):
            yield from keywords(value)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within a value, with every key or index of it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


def spoiled(record: Record, seed: int) -> Record:
    """The record with one value replaced, removed or added somewhere in it."""
    record, rng = copy.deepcopy(record), random.Random(seed)
    container, key = rng.choice(list(places(record)))
    others = [None, True, -1, 0, 1.0, 2.5, 10**20, "", "inf", "pass", [], [1, 2], {}, {"ms": 1}]
    change = rng.choice(["replace", "remove", "add"])
    if change == "replace":
        container[key] = rng.choice(others)
    elif change == "remove":
        del container[key]
    elif isinstance(container, dict):
        container["another"] = rng.choice(others)
    else:
        container.append(rng.choice(others))
    return record


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_schemas_are_valid_and_use_the_keywords_that_are_checked(version: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = record_schema(version)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(keywords(schema)) <= KEYWORDS | ANNOTATIONS


@pytest.mark.parametrize("record", [kept(), second(), current()], ids=["version 1", "version 2", "version 3"])
def test_the_check_agrees_with_jsonschema_on_spoiled_records(record: Record) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(record_schema(record["schema"]))
    assert validator.is_valid(record)
    refused = 0
    for seed in range(600):
        other = spoiled(record, seed)
        ours = fault(other, record_schema(record["schema"]))
        assert (ours is None) == validator.is_valid(other), (seed, ours)
        refused += ours is not None
    assert 300 < refused < 600


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"verdict": "great"}, '/verdict must be "pass" or "fail" or "unsupported", got "great"'),
        ({"flops": -1}, "/flops must be at least 0, got -1"),
        ({"seed": "0"}, '/seed must be of type integer, got "0"'),
        ({"more": 1}, "/more is not allowed"),
        ({"kind": "chck"}, "/kind must be"),
        ({"schema": 99}, "records of version 99; this harness knows up to version 3"),
        ({"schema": True}, "it is no record"),
        ({"tile": {"block_m": 0, "block_n": 16, "warps": 1, "stages": 1}}, "/tile/block_m must be at least 1, got 0"),
        ({"samples": [{"ms": {}, "late": []}]}, "/samples/0 lacks sensors"),
        ({"first_calls_s": [1, 2, 3]}, "/first_calls_s must have 0 to 2 items, got 3"),
    ],
)
def test_a_fault_is_named_with_its_place(change: Record, told: str) -> None:
    assert told in str(record_fault(current() | change))


def test_a_missing_field_is_named() -> None:
    record = current()
    del record["provenance"]["git"]["commit"]
    assert record_fault(record) == "/provenance/git lacks commit"


def test_the_kept_records_are_valid_and_so_is_what_becomes_of_them() -> None:
    for path in KEPT:
        records, note = resumed_records(path)  # which holds each to the schema of its version
        assert not note
        for record in records:
            assert record_fault(record) is None
            assert record["schema"] == VERSION


def test_a_record_of_version_1_reads_as_one_of_today(tmp_path: Path) -> None:
    (record,) = read_records(written(tmp_path / "x.jsonl", kept()), ("check",))
    assert record["baselines"] == [{"port": "sdpa_flash", "verdict": "pass", "reason": ""}]
    assert [sample["late"] for sample in record["samples"]] == [[], []]
    assert record["provenance"] == kept()["provenance"] | {"date": None}
    same = ("problem", "errors", "host_us", "verdict")
    assert {name: record[name] for name in same} == {name: kept()[name] for name in same}
    (untimed,) = read_records(written(tmp_path / "y.jsonl", kept() | {"samples": None, "baseline": None}), ("check",))
    assert (untimed["samples"], untimed["baselines"]) == (None, [])


def test_a_record_of_version_2_has_no_date_and_is_the_same_otherwise(tmp_path: Path) -> None:
    (record,) = read_records(written(tmp_path / "x.jsonl", second()), ("check",))
    assert record == current()
    assert record["provenance"]["date"] is None


def test_records_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    doctor = {"schema": 1, "kind": "doctor", "git": {"commit": None, "dirty": None}, "installed": [], "ports": []}
    path = written(tmp_path / "x.jsonl", doctor, current())
    assert [r["kind"] for r in read_records(path, ("check",))] == ["check"]
    assert [r["schema"] for r in read_records(path, ("doctor", "check"))] == [VERSION] * 2
    with pytest.raises(UsageError, match=r"x\.jsonl holds no records of kind disagreement"):
        read_records(path, ("disagreement",))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no records of kind check"),
        ("[]\n", "line 1: it is no record"),
        ("\n\nno json\n", "line 3 is no JSON"),
        ('{"schema": NaN}\n', "line 1 is no JSON: NaN is no number of JSON"),
        ('{"schema": 3, "kind": "\\ud800"}\n', "line 1 is no text"),
        ('{"schema": 2, "kind": "check"}\n', "line 1: the record lacks suite"),
        ('{"schema": 1, "kind": "model"}\n', "line 1: /kind model exists from schema 3 on, and /schema is 1"),
        ('{"schema": 3, "kind": "run"}\n', "line 1: /kind run exists up to schema 1, and /schema is 3"),
        ('{"schema": 3, "kind": ["run"]}\n', 'line 1: /kind must be "check" or'),
        ('{"schema": 4, "kind": "check"}\n', "line 1: records of version 4; this harness knows up to version 3"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_records(path, ("check",))
    assert str(path) in str(refused.value)
    assert told in str(refused.value)


def test_what_readers_would_refuse_is_not_written(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "x.jsonl") as records:
        with pytest.raises(ValueError, match="/flops must be of type integer"):
            records.write(current() | {"flops": "many"})
        records.write(current() | {"errors": {"o": dict.fromkeys(("error", "allowed", "naive"), math.inf) | {
            "floor": 0.0, "ratio": math.nan, "worst": None,
        }}})  # fmt: skip
    (record,) = read_records(tmp_path / "x.jsonl", ("check",))
    assert (record["errors"]["o"]["error"], record["errors"]["o"]["ratio"]) == ("inf", "nan")


def test_what_an_interrupted_run_left_is_read_without_its_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.partial"
    line = json.dumps(current(), ensure_ascii=False).encode() + b"\n"
    note = f"{path} ends in an unfinished line, which is left out"
    for last, count, told in (
        (b"", 2, ""),
        (line[:-1], 3, ""),  # only the end of the line is missing
        (line[:100], 2, note),
        ("–".encode()[:2], 2, note),
    ):
        path.write_bytes(2 * line + last)
        records, said = resumed_records(path)
        assert (len(records), said) == (count, told)
    path.write_bytes(line[:100])
    assert resumed_records(path) == ([], note)
    path.write_bytes(b"")
    assert resumed_records(path) == ([], f"{path} is empty: everything is done anew")
    path.write_bytes(line[:100] + b"\n" + line)
    with pytest.raises(UsageError, match="line 1 is no JSON"):
        resumed_records(path)


def test_a_name_that_is_too_long_for_a_file_is_one_line(tmp_path: Path) -> None:
    for length in (250, 300):
        with pytest.raises(UsageError, match="cannot be read: "):
            read_records(tmp_path / ("x" * length), ("check",))


def test_a_run_does_not_take_the_timings_of_a_bench_for_its_own() -> None:
    of_run, of_bench = (
        read_records(RESULTS / name, ("check",))[0]
        for name in ("walkthrough-triton-h200.jsonl.gz", "bench-fa2-h200.jsonl.gz")
    )
    assert _is_of_run(of_run)
    assert not _is_of_run(of_bench)


def test_a_file_that_gzip_has_packed_is_read_as_it_was(tmp_path: Path) -> None:
    plain = written(tmp_path / "x.jsonl", current(), current())
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_records(packed, ("check",)) == read_records(plain, ("check",))
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"x\.jsonl\.gz cannot be read: Compressed file ended"):
        read_records(packed, ("check",))
    packed.write_bytes(b"\x1f\x8b nothing of the kind")
    with pytest.raises(UsageError, match=r"x\.jsonl\.gz cannot be read: "):
        read_records(packed, ("check",))


def test_what_is_not_there_is_told_with_the_interrupted_file_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(UsageError, match=r"x\.jsonl cannot be read: No such file or directory$"):
        read_records(path, ("check",))
    partial = written(tmp_path / "x.jsonl.partial", current())
    with pytest.raises(UsageError, match=f"{re.escape(str(partial))} is there, of a run that ended early$"):
        resumed_records(path)


def test_a_run_that_resumes_replaces_no_file_whose_records_it_does_not_all_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, partial, before = (tmp_path / f"x.jsonl{end}" for end in ("", ".partial", ".before"))
    one, two, three = (current() | {"seed": seed} for seed in (1, 2, 3))

    def resume(*records: Record) -> str:
        with RecordFile(path, resumes=True) as file:
            for record in records:
                file.write(record)
        assert not partial.exists()
        assert read_records(path, ("check",)) == list(records)
        return capsys.readouterr().err

    for place in (path, partial):
        written(place, one, two)
        assert resume(three, two, one) == ""
        assert sorted(tmp_path.iterdir()) == [path]
        path.unlink()
    written(partial, one, two)
    told = f"harness: {path} does not have all records that there were: the earlier file is kept as {before}\n"
    assert resume(one, three) == told
    assert read_records(before, ("check",)) == [one, two]
    assert resume(two, three) == told.replace("before\n", "before2\n")
    assert read_records(tmp_path / "x.jsonl.before2", ("check",)) == [one, three]
    # A check that had no timing yet, and was done again with one.
    untimed = {"samples": None, "host_us": None, "untimed": "", "provenance": one["provenance"] | {"date": None}}
    for change, kept in (({}, False), ({"verdict": "fail"}, True)):
        for place in tmp_path.iterdir():
            place.unlink()
        written(partial, one | untimed | change)
        assert resume(one) == (told if kept else "")
        assert before.exists() == kept
    written(tmp_path / "x.jsonl.before2")
    path.write_text("no records, and no end of a line")
    assert "before3" in resume(one)

    # One that is interrupted in its turn leaves both.
    written(partial, one, two)
    file = RecordFile(path, resumes=True)
    file.write(one)
    with pytest.raises(KeyboardInterrupt) as stop, file:
        raise KeyboardInterrupt
    left = tmp_path / "x.jsonl.before4"
    assert stop.value.__notes__ == [f"the records so far are in {partial}; those from before are in {left}"]
    assert read_records(left, ("check",)) == [one, two]
    assert records_file(None, left) == records_file(None, partial) == path


def test_what_cannot_be_resumed_says_what_its_records_are_good_for(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "x.jsonl", use=SHOWN)
    file.write(current())
    with pytest.raises(KeyboardInterrupt) as stop, file:
        raise KeyboardInterrupt
    left = tmp_path / "x.jsonl.partial"
    told = f"the records so far are in {left}; harness tables {left} and harness report {left} show them"
    assert stop.value.__notes__ == [told]


def test_a_file_that_ends_early_says_what_is_left_of_it(tmp_path: Path) -> None:
    path, partial = tmp_path / "x.jsonl", tmp_path / "x.jsonl.partial"

    def ends(*records: Record) -> str:
        file = RecordFile(path)
        for record in records:
            file.write(record)
        with pytest.raises(KeyboardInterrupt) as stop, file:
            raise KeyboardInterrupt
        (note,) = stop.value.__notes__
        return note

    assert ends() == "there are no records yet"
    assert not partial.exists()
    assert ends(current()) == f"the records so far are in {partial}"
    assert len(read_records(partial, ("check",))) == 1
    # One that resumes it and ends before its own first record leaves it.
    assert ends() == f"{partial} is as it was"
    assert len(read_records(partial, ("check",))) == 1
    with RecordFile(path) as file:
        file.write(current())
    assert len(read_records(path, ("check",))) == 1
    assert not partial.exists()
