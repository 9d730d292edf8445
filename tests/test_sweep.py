"""`harness sweep`, with a port and a clock of our own: what is excluded, built, checked and timed, what wins, what is
written, and where it goes on."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import yaml

from common import (
    Build,
    Direction,
    Grid,
    Mask,
    Port,
    Problem,
    Switches,
    Target,
    Tile,
    TileTable,
    Unsupported,
    port_package,
)
from common import port as open_registered
from common.budget import check_budget
from harness import jobs
from harness.ahead import kernels_of
from harness.autotune import autotune_calls, autotuned
from harness.baselines import Baseline
from harness.candidates import Candidate, Stage
from harness.cli import main
from harness.environment import CPU, INTERPRET, Environment
from harness.errors import UsageError
from harness.isolation import Lost, Worker
from harness.names import grid_of, own_name, tiles_of, with_tile
from harness.published import record_tables
from harness.reader import read_records
from harness.report.runs import read_runs
from harness.suites import load_suite
from harness.sweep import one_of_each_class, sweep
from harness.sweep_stage import SweepRequest
from harness.tile_file import Entry, TileClass, with_entries
from harness.timing import Launch, Sample

from .fakes import FakePort
from .test_bench import table
from .test_ladder import Noting
from .test_timing import FakeStopwatch

ADA, HOPPER = Target.named("ada"), Target.named("hopper")
CARD = replace(CPU, native=HOPPER)  # whose has_gpu the fixture `clock` sets
ROOT = Path(__file__).resolve().parent.parent
SHIPPED = Tile(32, 32, 4, 2)
SUITE = """
about: two problems of one class
defaults: {head_dim: 16, dtype: fp16, mask: causal}
problems:
  - {id: tiny, len: [36, 40]}
"""
TABLE = """\
# What stands above stays.
# All of it.
- target: ada
  direction: forward
  bits: 16
  head_dim: 16
  masked: true
  tiles:
    - {block_m: 32, block_n: 32, warps: 4, stages: 2}
- target: ada
  direction: backward
  bits: 16
  head_dim: 16
  masked: true
  # a remark
  tiles:
    - {block_m: 32, block_n: 32, warps: 4, stages: 2, atomics: 1, dq_block_m: 32}
- target: hopper
  direction: forward
  bits: 16
  head_dim: 16
  masked: true
  tiles:
    - {block_m: 16, block_n: 16}
"""


PROBLEM = Problem(1, 1, 1, 36, 36, 16, torch.float16, Mask.causal())


class Clock(FakeStopwatch):
    """A card on which a launch takes what `ms` says of its tile, else 1 ms."""

    def __init__(self) -> None:
        super().__init__({})

    def time(self, name: str, launch: Launch) -> Sample:
        launch()
        self.order.append(name)
        tile = str(next(iter(tiles_of(name).values()), name))
        return Sample(self.ms.get(tile, 1.0) * self.clock * self.random.normal(1, 0.002))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A card that is none; SDPA runs on the CPU."""
    clock = Clock()
    monkeypatch.setattr(Environment, "has_gpu", True)
    monkeypatch.setattr(Baseline, "unsupported", lambda self, problem, target: None)
    monkeypatch.setattr(jobs, "_stopwatch", lambda device: clock)
    return clock


class Tiled(FakePort):
    """A fake with tiles to sweep, whose launches and builds are noted. wrong: the tile with which it errs. spilled:
    bytes by tile."""

    def __init__(self, table: Path, wrong: str = "", spilled: dict[str, int] | None = None) -> None:
        super().__init__()
        self.name = "triton"  # type: ignore[misc]
        self.tile_table = table  # type: ignore[misc]
        self.wrong, self.spilled = wrong, spilled or {}
        self.built: list[str] = []
        self.launched: dict[str, set[str]] = {"forward": set(), "backward": set()}

    def tiles(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        return [*self.swept(problem, target, direction), SHIPPED]

    def grids(self, problem: Problem, target: Target, direction: Direction) -> list[Grid]:
        own = Grid(f"{direction}_kernel", {"block_m": (32, 64, 128), "block_n": (32, 64), "stages": (2, 3)})
        if direction == "forward":
            return [own]
        return [own, Grid("dq_kernel", {"dq_block_m": (32, 64)}, without=("atomics",))]

    def check_tile(self, problem: Problem, target: Target, direction: Direction, tile: Tile) -> None:
        memory = {"forward_kernel": {"Q": tile.block_m * 512, "K, V": tile.block_n * tile.stages * 256}}
        check_budget(memory, problem, replace(target, smem_per_block=100_000), tile)

    def _build(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches
    ) -> list[Build]:
        self.built.append(str(tile))
        if tile.get("dq_block_m", 0) == 16:
            raise Unsupported("the compiler did not like it")
        kernels = [f"{direction}_kernel"] + ["dq_kernel"] * (direction == "backward" and not tile.get("atomics", 0))
        spills = self.spilled.get(str(tile), 0)
        return [Build(kernel, target.name, tile, 4096, 64, spills, ("mma",), 0.5, False, "") for kernel in kernels]

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, target: Target, tile: Tile,
        switches: Switches,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self.launched["forward"].add(str(tile))
        self.fault = "scale applied twice" if str(tile) == self.wrong else ""
        return super()._forward(q, k, v, problem, target, tile, switches)

    def _backward(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        (tile,) = (x for x in arguments if isinstance(x, Tile))
        self.launched["backward"].add(str(tile))
        self.fault = ""
        return super()._backward(*arguments)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "tiles.yaml"
    path.write_text(TABLE)
    return path


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suite") / "tiny.yaml"
    path.write_text(SUITE)
    return str(path)


def opened(*of: Port) -> Callable[[str], Port]:
    def open_port(name: str) -> Port:
        for port in of:
            if port.name == name:
                return port
        raise Unsupported(f"the {name} port is on holiday")

    return open_port


def request(suite: str, **options: object) -> SweepRequest:
    common = {"impls": ("triton",), "suite": suite, "isolated": False, "rounds": 20, "target": "ada"}
    return SweepRequest(**common | {"directions": "forward"} | options)  # type: ignore[arg-type]


def test_what_is_faster_beyond_noise_wins_and_is_written(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = Tiled(place)
    clock.ms = {"64x64 w4 s2": 0.5, "64x32 w4 s2": 0.55}
    assert sweep(request(suite, write=True), CARD, opened(port)) == 0
    out = capsys.readouterr().out
    title = "Sweep of triton forward, forward_kernel, ada path on the CPU, b1-h1-n36-d16-fp16-causal"
    rows = table(out, f"{title}: 11 of 12 candidates fit")
    best = dict(zip(rows["tile"], rows["64x64 w4 s2"], strict=True))
    assert [best[name] for name in ("shared B of 101376", "registers", "spills B", "build s")] == [
        *("4096", "64", "0", "0.5"),
    ]
    assert (best["% of best"], best["check"]) == ("100.0", "pass")
    assert 190 < float(best["% of SDPA flash"]) < 210
    assert list(rows)[1:3] == ["64x64 w4 s2", "64x32 w4 s2"]
    assert re.search(r"32x32 w4 s2 gives way to 64x64 w4 s2, (99|100)\.\d % \(", out)
    text = place.read_text()
    assert text.startswith("# What stands above stays.\n# All of it.\n- target: ada\n")
    (entry,) = (entry for entry in yaml.safe_load(text) if "len" in entry)
    about = {key: entry[key] for key in ("bits", "head_dim", "masked", "len", "card", "problem")}
    assert about == {
        "bits": 16, "head_dim": 16, "masked": True, "len": 1024, "card": "the CPU",
        "problem": "b1-h1-n36-d16-fp16-causal",
    }  # fmt: skip
    assert 9 < float(entry["margin"].removesuffix(" %")) < 11
    assert [Tile.parse(tile) for tile in entry["tiles"]][:2] == [Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)]
    assert "    - {block_m: 64, block_n: 64, warps: 4, stages: 2}\n" in text
    for block in TABLE.split("- target: ")[1:]:
        assert block in text, "the entries of other classes stay as they were"
    fresh = TileTable(place)
    assert fresh.lookup(PROBLEM, ADA, "forward")[0] == Tile(64, 64, 4, 2)
    longer = replace(PROBLEM, len_q=2000, len_k=2000)
    assert fresh.lookup(longer, ADA, "forward") == [SHIPPED]


def test_what_was_found_before_an_interrupt_is_written(clock: Clock, suite: str, place: Path) -> None:
    class Interrupted(Tiled):
        def _build(self, problem: Problem, target: Target, direction: Direction, *rest: object) -> list[Build]:
            if direction == "backward":
                raise KeyboardInterrupt
            return super()._build(problem, target, direction, *rest)  # type: ignore[arg-type]

    clock.ms = {"64x64 w4 s2": 0.5}
    with pytest.raises(KeyboardInterrupt):
        sweep(request(suite, directions="both", write=True), CARD, opened(Interrupted(place)))
    assert TileTable(place).lookup(PROBLEM, ADA, "forward")[0] == Tile(64, 64, 4, 2)


def test_what_was_found_is_written_when_its_tables_cannot_be_printed(
    clock: Clock, suite: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*tables: object) -> None:
        raise BrokenPipeError

    clock.ms = {"64x64 w4 s2": 0.5}
    monkeypatch.setattr("harness.sweep._closing", closed)
    with pytest.raises(BrokenPipeError):
        sweep(request(suite, write=True), CARD, opened(Tiled(place)))
    assert TileTable(place).lookup(PROBLEM, ADA, "forward")[0] == Tile(64, 64, 4, 2)


def test_within_noise_what_is_there_stays_and_nothing_is_written(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.ms = {"64x64 w4 s2": 0.9999}
    assert sweep(request(suite, write=True), CARD, opened(Tiled(place))) == 0
    out = capsys.readouterr().out
    assert "unchanged: 32x32 w4 s2 stays: " in out
    assert "as it was" in out
    assert place.read_text() == TABLE


def test_without_write_the_entry_is_printed(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.ms = {"64x64 w4 s2": 0.5}
    assert sweep(request(suite), CARD, opened(Tiled(place))) == 0
    out = capsys.readouterr().out
    assert "--write would put into the ports' tiles.yaml:\n- target: ada\n  direction: forward\n" in out
    assert place.read_text() == TABLE


@pytest.mark.parametrize(("spilling", "there", "winner"), [
    (False, 0, "64x32 w4 s2"), (True, 0, "64x64 w4 s2"), (False, 8, "64x64 w4 s2"),
])  # fmt: skip
def test_what_spills_more_than_what_is_there_wins_only_when_asked(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str], spilling: bool, there: int, winner: str
) -> None:
    clock.ms = {"64x64 w4 s2": 0.5, "64x32 w4 s2": 0.7}
    port = Tiled(place, spilled={"64x64 w4 s2": 8, str(SHIPPED): there})
    assert sweep(request(suite, spilling=spilling), CARD, opened(port)) == 0
    out = capsys.readouterr().out
    assert f"32x32 w4 s2 gives way to {winner}" in out
    assert "100*" in out, "the heat map marks it"


def test_what_fails_its_check_has_no_time_and_cannot_win(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.ms = {"64x64 w4 s2": 0.1, "64x32 w4 s2": 0.5}
    assert sweep(request(suite), CARD, opened(Tiled(place, wrong="64x64 w4 s2"))) == 1
    out = capsys.readouterr().out
    rows = table(out, "Sweep of triton forward")
    assert rows["64x64 w4 s2"][4:8] == ["–"] * 4
    assert rows["64x64 w4 s2"][8].startswith("FAIL")
    assert "gives way to 64x32 w4 s2" in out
    assert not any("64x64 w4 s2" in name for name in clock.order)


def test_what_does_not_fit_is_excluded_with_its_bytes_and_never_built(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = Tiled(place)
    assert sweep(request(suite, values={"block_m": (32, 128), "block_n": (32, 64)}), CARD, opened(port)) == 0
    title = "Sweep of triton forward, forward_kernel, ada path on the CPU, b1-h1-n36-d16-fp16-causal"
    excluded = table(capsys.readouterr().out, f"{title}: excluded before they were built")
    assert excluded["128x64 w4 s3"] == [
        "forward_kernel: tile 128x64 w4 s3, D=16 needs Q 65536 + K, V 49152 = 114688 B of shared memory; "
        "sm_89 gives 100000 B"
    ]
    assert "128x64 w4 s3" not in port.built
    assert set(port.built) | set(excluded) - {"tile"} == {
        f"{m}x{n} w4 s{stages}" for m in (32, 128) for n in (32, 64) for stages in (2, 3)
    }
    assert port.launched["forward"] == set(port.built)


def test_that_nothing_fits_of_what_was_named_is_told(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = request(suite, values={"block_m": (128,), "block_n": (64,), "stages": (3,)})
    assert sweep(named, CARD, opened(Tiled(place))) == 2
    out, err = capsys.readouterr()
    assert "excluded before they were built" in out
    assert err.endswith("harness: nothing that you named fits\n")
    assert sweep(replace(named, values={"block_m": (32, 128)}), CARD, opened(Tiled(place))) == 0


def test_the_backward_is_swept_kernel_by_kernel_each_from_the_best_before(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "64x32 w4 s2 atomics1 dq_block_m32"
    clock.ms = {own: 0.5, "64x32 w4 s2 dq_block_m64": 0.8}
    port = Tiled(place)
    values = {"block_n": (32,), "stages": (2,), "dq_block_m": (16, 32, 64)}
    assert sweep(request(suite, directions="backward", values=values, write=True), CARD, opened(port)) == 0
    out = capsys.readouterr().out
    rows = table(out, "Sweep of triton backward, dq_kernel")
    assert set(rows) - {"tile"} == {f"64x32 w4 s2 dq_block_m{rows}" for rows in (16, 32, 64)}
    assert rows["64x32 w4 s2 dq_block_m16"][8] == "the compiler did not like it"
    assert "Measured without atomics" in out
    (entry,) = (entry for entry in yaml.safe_load(place.read_text()) if "len" in entry)
    assert Tile.parse(entry["tiles"][0]) == Tile.from_text("64x32 w4 s2 atomics1 dq_block_m64")
    assert len(entry["margin"].split(",")) == 2
    assert len(port.built) == len(set(port.built))
    assert port.launched["forward"] == {str(SHIPPED)}, "the forward that a backward starts from has its own tile"


def test_it_goes_on_from_what_was_built_and_from_what_was_timed(
    clock: Clock, suite: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole, builds, again = tmp_path / "x.jsonl", tmp_path / "builds.jsonl", tmp_path / "again.jsonl"
    clock.ms = {"64x64 w4 s2": 0.5}
    assert sweep(request(suite, json=whole), CARD, opened(Tiled(place))) == 0
    before = capsys.readouterr().out
    records = read_records(whole, ("check", "build"))
    assert {r["kind"] for r in records} == {"check", "build"}
    (one,) = (r for r in records if r["kind"] == "check" and r["port"] == "triton#forward 1 64x64 w4 s2")
    assert one["tile"] == {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2}
    assert set(one["samples"][0]["ms"]) == {one["port"], f"triton#forward 1 {SHIPPED}", "sdpa_flash"}

    port, clock.order = Tiled(place), []
    assert sweep(request(suite, json=again, resume=whole), CARD, opened(port)) == 0
    assert (port.built, port.launched["forward"], clock.order) == ([], set(), [])
    assert again.read_text() == whole.read_text()
    told = capsys.readouterr().out
    assert told.partition("What was swept")[0].count("\n") == before.partition("What was swept")[0].count("\n")
    assert "32x32 w4 s2 gives way to 64x64 w4 s2" in told

    (swept,) = record_tables(read_records(whole, ("check",)))
    assert swept.title == "Tiles of triton swept, ada path on the CPU"
    row = dict(zip(swept.columns, swept.rows[0], strict=True))
    assert (row["timed"], row["fastest"], row["there before"]) == ("11 of 11", "64x64 w4 s2", str(SHIPPED))
    assert 1.9 < float(row["as fast as that"]) < 2.1
    assert Tile.from_text(row["second"]) != Tile(64, 64, 4, 2)
    assert 1.9 < float(row["how many times as fast as it"]) < 2.1
    with pytest.raises(UsageError, match="holds the candidates of a sweep only"):
        read_runs([whole])

    lines = [line for line in whole.read_text().splitlines(keepends=True) if json.loads(line)["kind"] == "build"]
    builds.write_text("".join(lines[:-1]))  # as of a machine without a GPU, and one short
    assert sweep(request(suite, resume=builds), CARD, opened(port)) == 0
    assert len(port.built) == 1
    assert len(port.launched["forward"]) == 11


def test_what_there_was_no_time_for_is_told(
    clock: Clock, suite: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(request(suite, minutes=0), CARD, opened(Tiled(place))) == 2
    out, err = capsys.readouterr()
    assert "not begun: 0 minutes were over" in out
    assert "triton, ada forward D 16, 16 bits, masked, up to 1024 keys: not begun" in err
    moments = iter([0.0, 0.0, 0.0, 0.0, 0.0, *[1e6] * 999])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    port = Tiled(place)
    assert sweep(request(suite, minutes=1, write=True), CARD, opened(port)) == 2
    out, err = capsys.readouterr()
    assert f"{11 - len(port.built)} of 11 candidates were not built" in err
    assert 0 < len(port.built) < 11
    assert "not reached" in out
    assert place.read_text() == TABLE


def test_the_heat_map_has_a_row_for_each_block_m_and_a_column_for_each_block_n(
    clock: Clock, suite: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.ms = {"64x64 w4 s2": 0.5, "128x32 w4 s2": 2.0}
    picture = tmp_path / "heat.svg"
    assert sweep(request(suite, picture=picture), CARD, opened(Tiled(place))) == 0
    out = capsys.readouterr().out
    heat = out[out.index(": % of the best speed") :].partition("\n\n")[0].splitlines()
    assert [cell.strip() for cell in heat[1].split("|")] == ["stages", "block_m", "block_n 32", "block_n 64"]
    rows = [[cell.strip() for cell in line.split("|")] for line in heat[3:9]]
    assert rows[0] == ["2", "32", "50", "50"]
    assert rows[1] == ["2", "64", "50", "100"]
    assert rows[2] == ["2", "128", "25", "50"]
    assert rows[5] == ["3", "128", "50", "out"]
    svg = ElementTree.parse(picture).getroot()
    texts = ["".join(element.itertext()) for element in svg.iter()]
    assert any(t.startswith("Tiles swept, ada path on the CPU") for t in texts)
    assert svg.find("{*}desc") is not None
    assert "128x64 w4 s3: forward_kernel: tile 128x64 w4 s3, D=16 needs Q 65536" in " ".join(texts)


def test_of_one_class_of_problems_one_is_swept(suite: str) -> None:
    kept, notes = one_of_each_class(load_suite(suite, small=False))
    assert [case.problem.len_q for case in kept.cases] == [36]
    assert notes == ["b1-h1-n40-d16-fp16-causal is left out: its tiles are those of b1-h1-n36-d16-fp16-causal."]
    kept, notes = one_of_each_class(load_suite("fa2", small=False))
    assert [case.id for case in kept.cases] == [f"d{d}-{n}" for d in (64, 128) for n in ("1k", "1k", "4k", "4k")]
    assert len(notes) == 4


@pytest.mark.parametrize("name", ["triton", "tilelang", "cute"])
def test_a_table_is_written_back_as_it_was_but_for_the_entry(name: str) -> None:
    text = (ROOT / port_package(name) / "tiles.yaml").read_text()
    assert with_entries(text, []) == text
    of = TileClass("ada", "forward", 16, 64, True, 1024)
    entry = Entry(of, "NVIDIA H200", "2026-11-30", "a problem", "1.0 %", [Tile(64, 32, 4, 2, (("lazy_rescale", 1),))])
    longer = with_entries(text, [entry])
    assert longer.replace(str(entry), "") == text
    assert with_entries(longer, [entry]) == longer
    assert "  masked: true\n  len: 1024\n  card: NVIDIA H200\n" in longer
    assert "    - {block_m: 64, block_n: 32, warps: 4, stages: 2, lazy_rescale: 1}\n" in longer
    after = longer[longer.index(str(entry)) + len(str(entry)) :]
    assert after.startswith("- target: ada\n  direction: forward\n  bits: 16\n  head_dim: 64\n  masked: true\n  card")


def test_an_entry_for_a_length_is_found_up_to_it_and_the_one_without_beyond(tmp_path: Path) -> None:
    path = tmp_path / "tiles.yaml"
    of = TileClass("ada", "forward", 16, 16, True, 512)
    path.write_text(with_entries(TABLE, [Entry(of, "a card", "a day", "a problem", "none", [Tile(64, 32)])]))
    found = TileTable(path)
    tiles = {n: found.lookup(replace(PROBLEM, len_k=n), ADA, "forward") for n in (36, 512, 513)}
    assert tiles == {36: [Tile(64, 32)], 512: [Tile(64, 32)], 513: [SHIPPED]}
    assert found.lookup(replace(PROBLEM, len_q=4096), ADA, "forward") == [Tile(64, 32)]


def test_a_name_tells_the_tile_of_a_direction() -> None:
    tile = Tile(64, 128, 8, 1, (("dq_block_m", 32), ("key_warps", 4)))
    assert str(tile) == "64x128 w8 s1 dq_block_m32 key_warps4"
    assert Tile.from_text(str(tile)) == tile
    name = with_tile("cute", "backward", 2, tile)
    assert (tiles_of(name), own_name(name), grid_of(name)) == ({"backward": tile}, "cute", "backward 2")
    assert [grid_of(plain) for plain in ("cute", "cute#2", "cute#skip")] == [""] * 3
    assert tiles_of("cute") == tiles_of("cute#2") == tiles_of("cute#skip") == tiles_of("cute@ada#-skip") == {}
    for text in ("", "64", "64x64", "64x64 w4", "64x64 w4 s2 ", "64x64 w4 s2 stray", "64x64 w4 s2  a1"):
        with pytest.raises(ValueError, match="a tile is written as in 128x64 w4 s2"):
            Tile.from_text(text)
    assert tile.having({"block_m": 16, "key_warps": 0, "parts": 2}) == Tile(
        16, 128, 8, 1, (("dq_block_m", 32), ("parts", 2))
    )


def test_a_port_without_tiles_or_one_that_is_not_here_is_told(
    clock: Clock, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakePort()
    fake.name = "triton"  # type: ignore[misc]
    assert sweep(request(suite), CARD, opened(fake)) == 2
    assert capsys.readouterr() == ("", "harness: the triton port has no tiles to sweep\n")
    assert sweep(request(suite), CARD, opened()) == 2
    assert capsys.readouterr().err == "harness: the triton port is on holiday\n"


def test_two_candidates_of_triton_are_built_for_ada_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    narrow = ["--block-m", "64", "--block-n", "32,512", "--warps", "4", "--stages", "2", "--extra", "lazy_rescale=0"]
    only = ["--target", "ada", "--direction", "forward", "--only", "d64-4k", "--skip", "causal"]
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "--impl", "triton", *only, *narrow, "--json", str(path)])
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    rows = table(out, "Sweep of triton forward, forward_kernel, for ada (sm_89)")
    built = dict(zip(rows["tile"], rows["64x32 w4 s2"], strict=True))
    assert (built["shared B of 101376"], built["spills B"], built["ms"]) == ("16384", "0", "–")
    assert int(built["registers"]) > 100
    assert re.search(r"64x512 w4 s2 +\| forward_kernel: .* = \d+ B of shared memory; sm_89 gives 101376 B", out)
    assert "No GPU is used here" in out
    records = read_records(path, ("build",))
    assert {r["port"] for r in records} == {"triton#forward 1 64x32 w4 s2", f"triton#forward 1 {built_first(records)}"}
    assert all(r["verdict"] == "pass" and r["build"]["kernel"] == "forward_kernel" for r in records)
    with pytest.raises(SystemExit) as stop:
        main(["tables", str(path)])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    assert f"Tiles of triton for {records[0]['problem']['id']}, built by triton" in told
    assert re.search(r"ada +\| 64 +\| full +\| forward_kernel +\| 64x32 w4 s2 +\| +16384 +\| 101376", told)


def built_first(records: list[dict]) -> str:
    """The tile that is there, which is built first."""
    return records[0]["port"].removeprefix("triton#forward 1 ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--impl", "tritn"], "--impl must be one of reference, triton, tilelang, cute, got 'tritn'"),
        (["--target", "volta"], "target must be one of native, ada, hopper"),
        (["--suite", "qick"], "did you mean quick?"),
        (["--block-m", "x"], "--block-m must be whole numbers of at least 1, got 'x'"),
        (["--stages", "0"], "--stages must be whole numbers of at least 1, got '0'"),
        (["--extra", "lazy_rescale"], "--extra takes NAME=N[,N…] of what is no option of its own, got 'lazy_rescale'"),
        (["--extra", "warps=4"], "--extra takes NAME=N[,N…]"),
        (["--extra", " warps=4"], "--extra takes NAME=N[,N…]"),
        (["--extra", "=1"], "--extra takes NAME=N[,N…] of what is no option of its own, got '=1'"),
        (["--impl", "reference"], "the reference port has no tiles to sweep"),
        (["--extra", "lazy_rescale=-1"], "--extra lazy_rescale must be whole numbers of at least 0, got '-1'"),
        (["--impl", "tilelang", "--autotune"], "the tilelang port has no kernels that it could wrap"),
        (["--autotune"], "--autotune times kernels, which takes a GPU"),
        (["--picture", "/dev/null"], "--picture /dev/null cannot be written: it is a device"),
        (["--picture", "/nodir/x.svg"], "--picture /nodir/x.svg cannot be written: there is no folder /nodir"),
        (["--extra", "a=1", "--extra", "a=0"], "--extra has a twice: several values of it go into one, as in a=N,N"),
        (["--picture", "x.svg", "--json", "./x.svg"], "--picture x.svg is the file that the records go to"),
        (["--picture", "x.png"], "--picture draws an SVG file: its name must end in .svg, got x.png"),
        (["--resume", "/nowhere/x.jsonl"], "/nowhere/x.jsonl cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sweep", *arguments])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert text in err


def test_a_field_that_no_grid_has_is_refused(clock: Clock, suite: str, place: Path) -> None:
    with pytest.raises(UsageError, match=r"a sweep of triton has no parts; it has block_m, block_n, stages$"):
        sweep(request(suite, values={"parts": (1,)}), CARD, opened(Tiled(place)))


def test_a_candidate_is_compiled_ahead_with_its_tile_and_the_other_direction_without() -> None:
    setting = jobs.Setting(CPU, ADA, open_port=lambda name: Noting())
    name = with_tile("reference", "backward", 2, Tile(64, 64, 8, 1))
    found = [pickle.loads(kernel).about for kernel in kernels_of(setting, [name], [PROBLEM], ["forward", "backward"])]
    assert found == ["ada forward 128x128 w1 s1 all", "ada backward 64x64 w8 s1 all"]


@pytest.mark.parametrize("name", ["triton", "tilelang", "cute"])
@pytest.mark.parametrize("target", ["ada", "hopper"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_port_offers_grids_of_which_much_fits_and_that_are_no_endless_work(
    name: str, target: str, direction: Direction
) -> None:
    try:
        port = open_registered(name)
    except Unsupported as reason:
        pytest.skip(str(reason))
    chip = Target.named(target)
    for head_dim, mask in product((64, 128), (Mask(), Mask.causal())):
        problem = Problem(4, 16, 16, 4096, 4096, head_dim, torch.bfloat16, mask)
        start = port.tiles(problem, chip, direction)[0]
        for grid in port.grids(problem, chip, direction):
            tiles = grid.tiles(start)
            fitting = port.fitting(tiles, problem, chip, direction)
            assert fitting[0] == tiles[0] == grid.measured(start)
            assert 1 < len(fitting) <= 200
            assert grid.taken(start, tiles[0]) == start


def host_bench(launch: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    """Times a launch of the interpreter, as the autotuner asks for it."""
    begin = time.perf_counter()
    launch()
    return [1e3 * (time.perf_counter() - begin)] * len(quantiles)


@pytest.fixture
def interpreting() -> Iterator[Worker]:
    worker = Worker(environment={INTERPRET: "1"})
    yield worker
    worker.close()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_autotuning_wraps_the_kernels_from_outside(interpreting: Worker, suite: str, direction: Direction) -> None:
    (case, *_) = load_suite(suite, small=True).cases
    tiles = (Tile(16, 16, 1, 1), Tile(32, 16, 1, 1), Tile(16, 32, 1, 1))
    kernels = ("forward_kernel",) if direction == "forward" else ("dkdv_kernel", "dq_kernel")
    setting = jobs.Setting(CPU, ADA)
    tune = partial(autotune_calls, setting, case, direction, dict.fromkeys(kernels, tiles), host_bench)
    try:
        calls = interpreting.call(tune)
    except Lost as lost:
        if "interpreter" in str(lost):
            pytest.skip(str(lost))
        raise
    assert calls.first_s > calls.second_s > 0
    assert [re.match(r"(\w+) BLOCK_M: \d+, BLOCK_N: \d+, num_warps: 1", one)[1] for one in calls.chosen] == [*kernels]  # type: ignore[index]
    # The check's tile does without atomics: its default form takes what the tuned kernel leaves.
    name = with_tile("triton", direction, 1, Tile(16, 16, 1, 1))
    check = interpreting.call(jobs.check, setting, name, case, direction)
    assert check.verdict == "pass", "what was chosen computes the same"


def test_the_table_of_autotuning_tells_what_it_could_not_do(suite: str) -> None:
    setting = jobs.Setting(CPU, ADA)
    session = SimpleNamespace(setting=setting, request=SweepRequest(("triton",)))
    case = load_suite(suite, small=True).cases[0]
    tiles = [
        Candidate(with_tile("triton", "forward", 1, tile), tile) for tile in (Tile(16, 16, 1, 1), Tile(32, 16, 1, 1))
    ]
    stage = Stage("triton", "forward", case.problem, Grid("forward_kernel", {}), tiles)
    shown = autotuned(session, case, "forward", [stage])  # type: ignore[arg-type]
    (look_up, tuned) = shown.rows
    if "interpreter" in look_up[3]:
        pytest.skip(look_up[3])
    assert float(look_up[1]) >= float(look_up[2]) > 0
    assert re.fullmatch(r"the look-up \d+\.\d ms of the first call", look_up[3])
    if not torch.cuda.is_available():
        assert tuned[0] == "@triton.autotune"
        assert tuned[3].startswith("it raised "), "it times on a GPU only"
    assert "Autotuning tries 2 of forward_kernel, in every process anew" in shown.notes[0]
