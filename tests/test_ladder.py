"""`harness ladder`, with a clock of our own: who is timed beside whom, what the tables say, and where it goes on."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from common import RUNGS, Direction, Kernel, Port, Problem, Switches, Target, Tile, Unsupported
from harness import jobs, ladder_tables
from harness.ahead import kernels_of
from harness.baselines import Baseline
from harness.cli import main
from harness.environment import CPU, Environment
from harness.errors import UsageError
from harness.ladder import LadderRequest, ladder
from harness.names import LEFT_OUT, name_of, own_name, path_name, rival_of, switches_of, variant_of, without_path
from harness.published import with_tables
from harness.reader import Record, read_records
from harness.suites import load_suite
from harness.tables import Table
from harness.timing import Launch, Sample
from reference.port import ReferencePort

from .fakes import FakePort
from .test_bench import table
from .test_timing import FakeStopwatch

ADA, HOPPER = Target.named("ada"), Target.named("hopper")
CARD = replace(CPU, native=HOPPER)  # whose has_gpu the fixture `card` sets
SUITE = """
about: two problems that differ in their mask
defaults: {head_dim: 16, dtype: fp16}
problems:
  - {id: tiny, len: 36, mask: [full, causal]}
"""
# How fast each rung is: the same in every port, but for order.
STEPS = {"naive": 1.0, "tiles": 10.0, "skip": 1.8, "exp2": 1.1, "edges": 1.05, "order": 1.0}


class Clock(FakeStopwatch):
    """A card on which a rung takes what `STEPS` says, and one switch less the time of a step more."""

    def __init__(self) -> None:
        super().__init__({})

    def time(self, name: str, launch: Launch) -> Sample:
        launch()
        self.order.append(name)
        ms = 1.0 if name == "sdpa_flash" else self._ms(variant_of(name), own_name(name))
        return Sample(ms * self.clock * self.random.normal(1, 0.002))

    @staticmethod
    def _ms(variant: str, port: str) -> float:
        steps = STEPS | {"order": 1.25 if port == "triton" else 0.8}
        if variant.startswith("-"):
            return steps[variant[1:]]
        climbed = RUNGS[: RUNGS.index(variant) + 1] if variant in RUNGS else ()
        ms = 20.0
        for rung in climbed:
            ms /= steps[rung]
        return ms if climbed else 1.0


def make_card(patch: pytest.MonkeyPatch) -> Clock:
    """A card that is none; SDPA runs on the CPU."""
    clock = Clock()
    patch.setattr(Environment, "has_gpu", True)
    patch.setattr(Baseline, "unsupported", lambda self, problem, target: None)
    patch.setattr(jobs, "_stopwatch", lambda device: clock)
    return clock


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return make_card(monkeypatch)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suite") / "tiny.yaml"
    path.write_text(SUITE)
    return str(path)


class Rungs(FakePort):
    """A fake that is wrong on one rung, and notes what it was launched with."""

    def __init__(self, name: str, wrong: str = "") -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]
        self.wrong = Switches.rung(wrong) if wrong else None
        self.seen: set[tuple[str, str, str]] = set()

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, target: Target, tile: Tile,
        switches: Switches,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self.seen.add((target.name, str(switches), str(tile)))
        self.fault = "scale applied twice" if switches == self.wrong else ""
        return super()._forward(q, k, v, problem, target, tile, switches)


def ports(*of: Port) -> Callable[[str], Port]:
    def open_port(name: str) -> Port:
        for port in of:
            if port.name == name:
                return port
        raise Unsupported(f"the {name} port is on holiday")

    return open_port


def request(suite: str, *impls: str, **options: object) -> LadderRequest:
    common = {"suite": suite, "isolated": False, "rounds": 6, "target": "ada,hopper"}
    return LadderRequest(impls or ("triton", "cute"), **common | options)  # type: ignore[arg-type]


def sentences(out: str) -> dict[str, str]:
    """The sentences below the tables, by the rung."""
    lines = [line for line in out.splitlines() if line.startswith("`")]
    return {line.split("`")[1]: line for line in lines}


@dataclass
class Climb:
    """A ladder of two ports on two paths that went well: its records, its clock, and its first port."""

    records: list[Record]
    clock: Clock
    port: Rungs

    @property
    def tables(self) -> dict[str, Table]:
        """What it printed, by the titles."""
        return {one.title: one for one in ladder_tables.ladder_tables(self.records, {})}


@pytest.fixture(scope="module")
def climb(suite: str, tmp_path_factory: pytest.TempPathFactory) -> Climb:
    path, port = tmp_path_factory.mktemp("climb") / "x.jsonl", Rungs("triton")
    with pytest.MonkeyPatch.context() as patch:
        clock = make_card(patch)
        assert ladder(request(suite, json=path), CARD, ports(port, Rungs("cute"))) == 0
    return Climb(read_records(path, ("check",)), clock, port)


def test_a_name_tells_the_port_the_path_and_the_switches() -> None:
    name = name_of("triton", "skip", "ada")
    assert name == "triton@ada#skip"
    assert (own_name(name), path_name(name), variant_of(name), without_path(name)) == (
        *("triton", "ada", "skip"),
        "triton#skip",
    )
    assert switches_of(name) == Switches.rung("skip")
    assert (rival_of(name), rival_of("triton#naive"), rival_of("cute@ada#-skip")) == (
        *("triton@ada#tiles", None),
        "cute@ada#all",
    )
    assert switches_of("triton#-skip") == Switches(skip=False)
    for plain in ("triton", "triton#2", "triton#all", "triton#order"):
        assert switches_of(plain) == Switches()
        assert own_name(plain) == "triton"
        assert path_name(plain) == ""
    assert [rival_of(plain) for plain in ("triton", "triton#2", "triton#all")] == [None] * 3


def test_every_rung_is_launched_with_its_switches_on_every_path(climb: Climb) -> None:
    assert climb.port.seen == {
        (target, str(Switches.rung(rung)), "16x16 w1 s1" if rung == "naive" else "32x32 w4 s2")
        for target in ("ada", "hopper")
        for rung in RUNGS
    }


def test_all_contestants_of_a_problem_and_direction_are_timed_by_turns(climb: Climb) -> None:
    everybody = {f"{p}@{t}#{r}" for p in ("triton", "cute") for t in ("ada", "hopper") for r in RUNGS} | {"sdpa_flash"}
    order = climb.clock.order
    rounds = [set(order[i : i + 25]) for i in range(0, len(order), 25)]
    assert len(rounds) == 4 * (6 + 3)  # two problems, two directions; three rounds are warm-up
    assert all(names == everybody for names in rounds)


def test_a_record_holds_its_own_samples_and_those_it_is_compared_with(climb: Climb) -> None:
    assert len(climb.records) == 2 * 2 * 2 * 2 * 6
    by_name = {
        (r["port"], r["target"]["name"], r["direction"], r["problem"]["mask"]["right"]): r for r in climb.records
    }
    naive, skip = (by_name[f"cute#{rung}", "hopper", "backward", 0] for rung in ("naive", "skip"))
    assert set(naive["samples"][0]["ms"]) == set(naive["host_us"]) == {"cute#naive", "sdpa_flash"}
    assert set(skip["samples"][0]["ms"]) == set(skip["host_us"]) == {"cute#skip", "cute#tiles", "sdpa_flash"}
    assert (naive["tile"]["block_m"], skip["tile"]["block_m"]) == (16, 32)
    assert skip["switches"] == vars(Switches.rung("skip"))
    assert len(skip["samples"]) == 6
    assert all(r["verdict"] == "pass" and not r["untimed"] for r in climb.records)


def test_the_tables_tell_speed_gain_interval_and_verdict(climb: Climb) -> None:
    own = climb.tables["Ladder of triton backward, ada path on the CPU"]
    rows = {(cells[3], cells[4]): dict(zip(own.columns, cells, strict=True)) for cells in own.rows}
    assert list(rows) == [(mask, rung) for mask in ("full", "causal") for rung in RUNGS]
    skip = rows["causal", "skip"]
    low, high = map(float, skip["gain 95 %"].split("–"))
    assert 1.7 < low < float(skip["gain"]) < high < 1.9
    assert 80 < float(skip["% of SDPA flash"]) < 100
    assert (skip["check"], rows["full", "naive"]["gain"], rows["full", "naive"]["check"]) == ("pass", "–", "pass")
    assert "gain: how many times as fast as the rung before." in own.notes

    title = "Ladder forward, B,H,D 1,1,16, dtype fp16, N 36, mask causal"
    across = climb.tables[f"{title}: TFLOP/s, and how many times as fast as the rung before"]
    assert across.columns == ("port", "path", *RUNGS, "% of SDPA flash")
    assert [cells[:2] for cells in across.rows] == [
        (port, f"{target} path on the CPU") for target in ("ada", "hopper") for port in ("triton", "cute")
    ]
    cute = dict(zip(across.columns, across.rows[-1], strict=True))
    assert "," not in cute["naive"]
    assert cute["skip"].endswith("x")
    assert cute["order"].partition(", ")[2].startswith("0.")


def test_a_sentence_for_each_rung_follows_the_figures(climb: Climb) -> None:
    told = sentences("\n".join(list(climb.tables.values())[-1].notes))
    assert list(told) == list(RUNGS[1:])
    places = ("forward full", "backward full", "forward causal", "backward causal")
    assert told["skip"].startswith("`skip`, in triton and cute on ada and hopper: helps all alike")
    assert all(place in told["skip"] for place in places)
    assert "where there is nothing for it to do" in told["skip"]  # this clock does not know of masks
    assert told["order"].count("divides them") == 1
    assert all(f"on {place} it helps triton (1.2" in told["order"] for place in places)


def test_with_one_switch_off_the_loss_beside_all_on_is_told(
    card: Clock, suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    assert ladder(request(suite, leave_one_out=True, json=path), CARD, ports(Rungs("triton"), Rungs("cute"))) == 0
    records = read_records(path, ("check",))
    assert {variant_of(r["port"]) for r in records} == set(LEFT_OUT)
    (off,) = (r for r in records if r["port"] == "cute#-skip" and r["target"] == records[0]["target"] and
              r["direction"] == "forward" and r["problem"]["mask"]["right"] == 0)  # fmt: skip
    assert off["switches"] == vars(Switches(skip=False))
    assert set(off["samples"][0]["ms"]) == {"cute#-skip", "cute#all", "sdpa_flash"}
    loss = ladder_tables.gain_of(off)
    assert loss is not None
    assert 1.7 < loss.low < loss.value < loss.high < 1.9
    out = capsys.readouterr().out
    assert "One switch off of triton forward, ada path on the CPU" in out
    assert "loss: how many times as slow as all on." in out
    assert sentences(out)["edges"].startswith(
        "`edges`, with all others on, in triton and cute on ada and hopper: helps"
    )


def test_a_rung_that_fails_has_no_time_and_neither_has_the_next_one_a_gain(
    card: Clock, suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    asked = request(suite, json=path, target="ada")
    assert ladder(asked, CARD, ports(Rungs("triton", wrong="skip"), Rungs("cute"))) == 1
    out = capsys.readouterr().out
    records = {
        (r["port"], r["direction"]): r for r in read_records(path, ("check",)) if r["problem"]["mask"]["right"] == 0
    }
    for direction in ("forward", "backward"):
        assert records["triton#skip", direction]["verdict"] == "fail"
        assert records["triton#skip", direction]["samples"] is None
        assert ladder_tables.gain_of(records["triton#exp2", direction]) is None
        assert records["triton#exp2", direction]["samples"]
    row = table(out, "Ladder forward, B,H,D 1,1,16, dtype fp16, N 36, mask causal")["triton"]
    assert row[3] == "FAIL"
    assert "x" not in row[4]
    assert "FAIL" in out
    assert (
        "no figure of triton on ada, forward full, backward full, forward causal and backward causal: its check"
        in (sentences(out)["skip"])
    )
    assert sentences(out)["exp2"].endswith("skip has no time.")


def test_a_port_that_is_missing_is_a_line_and_an_error_only_when_it_was_named(
    card: Clock, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for all_asked, status in ((True, 2), (False, 0)):
        asked = request(suite, "triton", "tilelang", only="causal", directions="forward")
        assert ladder(asked, CARD, ports(Rungs("triton")), all_asked=all_asked) == status
        out, err = capsys.readouterr()
        assert out.count("tilelang: the tilelang port is on holiday") == 1
        assert err.splitlines() == [
            "harness: the tilelang port is on holiday",
            "harness: 6 rungs of triton, on 2 code paths, × 1 problem",
            "harness: climbing 1 of 1 tiny b1-h1-n36-d16-fp16-causal",
        ]
        assert "in triton on ada and hopper" in sentences(out)["skip"]
    assert ladder(request(suite, "tilelang"), CARD, ports(), all_asked=False) == 2


def test_a_rung_that_a_port_does_not_have_is_no_error(
    card: Clock, suite: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose_tile(self: Port, problem: Problem, target: Target, direction: Direction, *more: object) -> Tile:
        if direction == "backward" and not more[1].tiles:  # type: ignore[attr-defined]
            raise Unsupported("no backward of 16 rows")
        return choose(self, problem, target, direction, *more)  # type: ignore[arg-type]

    choose = FakePort.choose_tile
    monkeypatch.setattr(FakePort, "choose_tile", choose_tile)
    assert ladder(request(suite, "triton", target="ada"), CARD, ports(Rungs("triton"))) == 0
    out = capsys.readouterr().out
    assert table(out, "Ladder backward, B,H,D 1,1,16, dtype fp16, N 36, mask full")["triton"][1] == "unsupported"
    assert "triton, ada path on the CPU, naive: no backward of 16 rows" in out
    assert sentences(out)["tiles"].endswith(
        "no figure of triton on ada, backward full and backward causal: naive has no time."
    )


def test_it_goes_on_from_the_records_of_an_interrupted_run(
    card: Clock, suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, half, rest = tmp_path / "x.jsonl", tmp_path / "half.jsonl", tmp_path / "rest.jsonl"
    own = ports(Rungs("triton"))
    assert ladder(request(suite, "triton", json=whole), CARD, own) == 0
    before = capsys.readouterr().out
    lines = whole.read_text().splitlines(keepends=True)
    half.write_text("".join(lines[: len(lines) // 2 + 3]))
    checked = []
    check = jobs.check
    monkeypatch.setattr(jobs, "check", lambda *arguments: checked.append(arguments[2].problem.id) or check(*arguments))
    assert ladder(request(suite, "triton", json=rest, resume=half), CARD, own) == 0
    assert set(checked) == {json.loads(lines[-1])["problem"]["id"]}
    assert rest.read_text().splitlines(keepends=True)[: len(lines) // 2] == lines[: len(lines) // 2]
    assert capsys.readouterr().out.count("\n") == before.count("\n")
    # One target more: nothing that is there is enough. The other kind of ladder: nothing is of use.
    assert ladder(request(suite, "triton", json=half, target="ada"), CARD, own) == 0
    checked.clear()
    assert ladder(request(suite, "triton", resume=half), CARD, own) == 0
    assert len(set(checked)) == 2
    with pytest.raises(UsageError, match=rf"none of the {len(lines)} .* of another command or direction"):
        ladder(request(suite, "triton", resume=whole, leave_one_out=True), CARD, own)


def test_a_timing_that_is_lost_is_told_and_taken_again(
    card: Clock, suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, own = tmp_path / "x.jsonl", ports(Rungs("triton"))
    asked = {"json": path, "target": "ada", "directions": "forward", "only": "causal"}
    with monkeypatch.context() as broken:
        broken.setattr(jobs, "time_row", None)
        assert ladder(request(suite, "triton", **asked), CARD, own) == 0
    out = capsys.readouterr().out
    assert "pass, not timed: it raised TypeError" in out
    assert "`" not in out
    assert ladder(request(suite, "triton", resume=path, **asked), CARD, own) == 0
    assert list(sentences(capsys.readouterr().out)) == list(RUNGS[1:])


def test_a_text_quotes_a_ladder_of_several_files(card: Clock, suite: str, tmp_path: Path) -> None:
    own = {"triton": Rungs("triton"), "cute": Rungs("cute")}
    for name, port in own.items():
        asked = request(suite, name, json=tmp_path / f"{name}.jsonl", directions="forward")
        assert ladder(asked, CARD, ports(port)) == 0
    files = " ".join(str(tmp_path / f"{name}.jsonl") for name in own)
    text = f"<!-- ladder: {files} -->\na typed figure\n<!-- /ladder -->\n"
    fresh = with_tables(text)
    assert "a typed figure" not in fresh
    assert with_tables(fresh) == fresh
    assert fresh.count("**Ladder forward, ") == 2
    assert "Ladder of" not in fresh
    assert "`skip`, in triton and cute on ada and hopper: helps all alike" in fresh
    assert "The sources of cute or of `common` have changed since this was measured." in fresh
    whole = with_tables(text.replace("!-- ladder", "!-- records").replace("/ladder", "/records"))
    assert whole.count("**Ladder of ") == 4
    assert whole.count("have changed since") == 4 + 2
    untimed = tmp_path / "untimed.jsonl"
    lines = (tmp_path / "cute.jsonl").read_text().splitlines()
    untimed.write_text(
        "".join(json.dumps(json.loads(line) | {"samples": None, "host_us": None}) + "\n" for line in lines)
    )
    with pytest.raises(UsageError, match=r"untimed\.jsonl has no timings of a ladder"):
        with_tables(f"<!-- ladder: {untimed} -->\n<!-- /ladder -->\n")


def test_without_a_gpu_the_rungs_of_triton_are_checked_in_its_interpreter(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "ladder",
                "--impl",
                "triton,reference",
                "--suite",
                suite,
                "--only",
                "causal",
                "--no-isolate",
                "--json",
                str(path),
            ]
        )
    out, err = capsys.readouterr()
    if "the interpreter of Triton" in err:
        pytest.skip(err.strip())
    assert stop.value.code == 0, err
    rows = table(out, "Ladder backward, B,H,D 1,1,16, dtype fp16, N 36, mask causal")
    assert rows["triton"] == rows["reference"] == ["ada path on the CPU", *["pass"] * 6]
    assert not any(word in out for word in ("TF/s", "gain", "FLOPs", "`"))
    assert "interpreter ran the kernels, which has no speed" in out
    records = read_records(path, ("check",))
    assert len(records) == 2 * 2 * 6
    assert all(r["verdict"] == "pass" and r["samples"] is None and r["baselines"] == [] for r in records)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--impl", "tritn"], "--impl must be one of reference, triton, tilelang, cute, got 'tritn'"),
        (["--target", "ada,volta"], "target must be one of native, ada, hopper"),
        (["--suite", "qick"], "did you mean quick?"),
        (["--only", "nothing"], "--only 'nothing' matches no problem of the suite walkthrough"),
        (["--rounds", "1"], "--rounds"),
        (["--resume", "/nowhere/x.jsonl"], "/nowhere/x.jsonl cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["ladder", *arguments])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert text in err


def test_the_problems_are_the_longest_of_walkthrough_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LadderRequest] = []
    monkeypatch.setattr("harness.ladder.ladder", lambda request, here, *, all_asked: asked.append(request) or 0)
    for arguments in ([], ["--only", "n512"], ["--suite", "fa2"]):
        with pytest.raises(SystemExit):
            main(["ladder", *arguments])
    assert [(one.suite, one.only, one.longest) for one in asked] == [
        ("walkthrough", None, True),
        ("walkthrough", "n512", False),
        ("fa2", None, False),
    ]
    assert [case.problem.id for case in load_suite("walkthrough", small=False).longest().cases] == [
        f"b4-h8-n4096-d64-bf16-{mask}" for mask in ("full", "causal")
    ]


@dataclass(frozen=True)
class Note:
    """A kernel that is its own description."""

    about: str

    def compile(self, sm: str) -> None: ...


class Noting(ReferencePort):
    """A port whose kernels are what they would be compiled from."""

    def _kernels(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches, dlse: bool,
        deterministic: bool,
    ) -> list[Kernel]:  # fmt: skip
        return [Note(f"{target.name} {direction} {tile} {switches}")]


def test_the_kernels_of_a_rung_are_those_of_its_switches_and_path() -> None:
    setting = jobs.Setting(CPU, ADA, open_port=lambda name: Noting())
    (problem,) = (case.problem for case in load_suite("quick", small=True).only("scale").cases)
    names = ["reference@hopper#naive", "reference@hopper#skip", "reference"]
    found = kernels_of(setting, names, [problem], ["forward"])
    assert [pickle.loads(kernel).about for kernel in found] == [
        "hopper forward 16x16 w1 s1 -tiles -skip -exp2 -edges -order",
        "hopper forward 128x128 w1 s1 -exp2 -edges -order",
        "ada forward 128x128 w1 s1 all",
    ]
