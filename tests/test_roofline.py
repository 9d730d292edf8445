"""`harness roofline`, with a card that is none: what is counted, what holds a kernel back, and what the tables say."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import common
from common import Direction, Mask, Port, Problem, Target, Tile, Unsupported, Work
from common.work import backward_work, forward_work, tensor_bytes
from harness import ceiling_kernels, ceilings, counters, jobs, roofline
from harness.bound import bound, least_ms
from harness.ceilings import Ceilings, measure_ceilings
from harness.cli import main
from harness.counters import FORBIDDEN, Counted, Counters, metrics_for, parse, reason_of
from harness.environment import CPU, Environment
from harness.errors import UsageError
from harness.kernel_times import KernelTimes, kernel_times, launches_of, sorted_out
from harness.options import Dtype
from harness.published import with_tables
from harness.reader import read_records
from harness.roofline import RooflineRequest
from harness.roofline_records import spots_of
from harness.suites import Case, load_suite
from harness.trial import Trial

from .fakes import FakePort
from .subjects import SUBJECTS, Subject, each
from .test_bench import table
from .test_report import Page
from .test_timing import FakeStopwatch

ADA, HOPPER = Target.named("ada"), Target.named("hopper")
PROBLEM = Problem(2, 8, 2, 100, 60, 64, torch.bfloat16, Mask.causal())
CARD = Ceilings(copy_gbs=4000.0, matrix_tflops={"wgmma": 800.0, "mma.sync": 400.0}, exp_gps=4000.0)
COUNTS = Counters(
    ms=0.5,
    tensor_percent=41.5,
    warps_percent=18.0,
    dram_bytes=1e8,
    l2_bytes=5e9,
    bank_conflicts=25.0,
    wavefronts=100.0,
    stalls=(("wait", 2.5), ("long_scoreboard", 1.25)),
)


class Kernels(FakePort):
    """A fake that says it launches kernels, the names of which a device would know with something around them."""

    name = "triton"

    def _launches(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, dlse: bool, deterministic: bool
    ) -> tuple[Work, ...]:
        if direction == "forward":
            return forward_work("forward_kernel", target.instruction)
        names = "prepare_kernel", "dkdv_kernel", "dq_kernel"
        return backward_work(names, (target.instruction, "mma.sync"), adds_dq=False, dlse=dlse)


def open_port(fault: str = "") -> Callable[[str], Port]:
    def opened(name: str) -> Port:
        if name == "triton":
            return Kernels(fault)
        raise Unsupported(f"the {name} port is on holiday")

    return opened


def request(*impls: str, **options: object) -> RooflineRequest:
    usual = {"suite": "quick", "only": "d64-bf16-causal-topleft", "skip": "window", "isolated": False, "rounds": 4}
    return RooflineRequest(impls or ("triton",), **usual | options)  # type: ignore[arg-type]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is none: every kernel takes a microsecond, a direction takes four."""

    def times(setting: jobs.Setting, name: str, case: Case, direction: Direction) -> KernelTimes:
        works = launches_of(setting, name, case.problem, direction)
        return KernelTimes({work.kernel: [0.001, 0.001, 0.002] for work in works}, {"fill": 0.0005})

    def count(setting: jobs.Setting, name: str, case: Case, directions: list[Direction]) -> Counted:
        works = [w for direction in directions for w in launches_of(setting, name, case.problem, direction)]
        return Counted(tuple((f"void {work.kernel}_0", COUNTS) for work in works))

    monkeypatch.setattr(Environment, "has_gpu", True)
    monkeypatch.setattr(jobs, "_stopwatch", lambda device: FakeStopwatch({"triton": 0.004}))
    monkeypatch.setattr(roofline, "kernel_times", times)
    monkeypatch.setattr(roofline, "count", count)
    monkeypatch.setattr(roofline, "measure_ceilings", lambda setting, instructions: CARD)


HERE = replace(CPU, native=HOPPER)


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
@pytest.mark.parametrize("target", [ADA, HOPPER], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_the_ports_do_what_is_credited_and_two_products_more_where_dq_has_a_walk_of_its_own(
    subject: object, target: Target, deterministic: bool
) -> None:
    if subject.is_missing:  # type: ignore[attr-defined]
        pytest.skip("its package is not installed")
    port = common.port(subject.name)  # type: ignore[attr-defined]
    if port.unsupported(PROBLEM, target):
        pytest.skip(str(port.unsupported(PROBLEM, target)))
    (forward,) = port.launches(PROBLEM, target, "forward")
    assert forward.flops(PROBLEM) == PROBLEM.flops("forward")
    assert forward.bytes(PROBLEM) == PROBLEM.bytes("forward")
    for dlse in (False, True):
        first, second, third = port.launches(PROBLEM, target, "backward", dlse=dlse, deterministic=deterministic)
        adds_dq = not third.products
        assert not (adds_dq and deterministic)
        assert first.products == 0
        done = sum(work.products for work in (first, second, third)) * PROBLEM.flops("forward") // 2
        assert done == PROBLEM.flops("backward") * (5 if adds_dq else 7) // 5
        assert ("dlse" in first.reads) == dlse
        assert {"dq", "dk", "dv"} <= {*first.writes, *second.writes, *third.writes}
        assert {second.instruction, forward.instruction} <= {target.instruction, "mma.sync"}


def test_a_port_without_kernels_and_a_problem_without_work_launch_nothing() -> None:
    assert common.port("reference").launches(PROBLEM, ADA, "forward") == ()
    assert Kernels().launches(replace(PROBLEM, len_k=0), ADA, "backward") == ()


def test_bytes_and_exponentials_are_those_of_the_problem() -> None:
    assert tensor_bytes(PROBLEM, "q") == 2 * 8 * 100 * 64 * 2
    assert tensor_bytes(PROBLEM, "dv") == 2 * 2 * 60 * 64 * 2
    assert tensor_bytes(PROBLEM, "dq_sum") == 2 * tensor_bytes(PROBLEM, "dq")
    assert tensor_bytes(PROBLEM, "delta") == 2 * 8 * 100 * 4
    first, second, third = backward_work(("a", "b", "c"), ("mma.sync", ""), adds_dq=True, dlse=False)
    pairs = 2 * 8 * PROBLEM.mask.visible_pairs(100, 60)
    assert [work.exponentials(PROBLEM) for work in (first, second, third)] == [0, pairs, 0]
    assert third.bytes(PROBLEM) == 3 * tensor_bytes(PROBLEM, "dq")
    assert third.flops(PROBLEM) == 2 * 8 * 100 * 64


def test_a_kernel_is_held_back_by_the_ceiling_it_comes_near() -> None:
    least = least_ms(8 * 10**11, 4 * 10**8, 10**9, "wgmma", CARD)
    assert least == pytest.approx({"products": 1.0, "memory": 0.1, "exponentials": 0.25})
    assert bound(least, None, CARD) == "products"
    assert bound(least, 1.2, CARD) == "products"
    assert bound(least | {"memory": 1.1}, 1.2, CARD) == "memory"
    assert bound(least, 1.45, CARD) == "products and exponentials in turn"
    assert bound(least, 3.0, CARD) == "latency"
    assert bound(least, 3.0, CARD, COUNTS) == "latency, stalled on wait, few warps"
    assert bound(least, 3.0, CARD, replace(COUNTS, warps_percent=60.0)) == "latency, stalled on wait"
    assert bound(least, 3.0, CARD, replace(COUNTS, tensor_percent=75.0)) == "the matrix unit"
    assert bound(least, 3.0, CARD, replace(COUNTS, dram_bytes=1.5e9)) == "memory, which moves more than counted"
    # A copy by ncu's clock, of the bytes that are counted, though by ours it is further from the ceiling.
    assert bound({"memory": 0.6}, 1.0, CARD, replace(COUNTS, ms=0.8, dram_bytes=2.5e9)) == "memory"
    assert bound({"memory": 0.0005}, 0.002, CARD) == "too short"
    assert bound({}, 1.0, CARD) == "–"
    # Without the ceiling of its instruction a kernel has the others.
    assert set(least_ms(1, 1, 1, "tcgen05", CARD)) == {"memory", "exponentials"}


def test_times_of_kernels_are_told_by_their_names_between_flushes() -> None:
    works = Kernels().launches(PROBLEM, HOPPER, "backward")
    call = [("flush<int>", 0.1), ("prepare_kernel", 1.0), ("dkdv_kernel_0", 2.0), ("fill", 0.5), ("dq_kernel", 3.0)]
    times = sorted_out(works, [("dq_kernel", 9.0), *call, *call])
    assert times.ms == {"prepare_kernel": [1.0] * 2, "dkdv_kernel": [2.0] * 2, "dq_kernel": [3.0] * 2}
    assert times.others == {"fill": 0.5}
    lost = sorted_out(works, [call[0], call[1], ("another", 1.0)])
    assert lost.reason == (
        "the profiler did not see dkdv_kernel, dq_kernel once a call; it saw prepare_kernel, another"
    )
    assert not lost.ms
    assert sorted_out(works, []).reason == "the profiler saw no kernels"


# What ncu 2025.2 prints: its own lines, a header, units below it, and thousands with commas.
PRINTED = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "forward_kernel" - 0: 0%....50%....100% - 9 passes
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes.sum","gpu__time_duration.sum","l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum","lts__t_bytes.sum",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","sm__warps_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","","","","","","","","","","Mbyte","us","","byte","%","%","inst","inst","inst","inst"
"0","4711","python3.12","127.0.0.1","forward_kernel","1","7","(128, 1, 1)","(1024, 1, 1)","0","9.0",\
"67.59","351.26","1,234","1,234,567,890","44.36","12.49","0.05","1.25","1.00","n/a"
"1","4711","python3.12","127.0.0.1","kernel_cutlass_kernel_DkdvKernelDTYPEbf16","1","7","(128, 1, 1)","(1024, 1, 1)",\
"0","9.0","168.80","1,351.26","0","9,234,567,890","38.00","24.90","0.75","0.25","1.00","0.50"
"""


def test_what_ncu_prints_is_read_with_its_units() -> None:
    (forward, counted), (dkdv, others) = parse(PRINTED)
    assert (forward, dkdv) == ("forward_kernel", "kernel_cutlass_kernel_DkdvKernelDTYPEbf16")
    assert counted.dram_bytes == pytest.approx(67.59e6)
    assert counted.ms == pytest.approx(0.35126)
    assert (counted.bank_conflicts, counted.l2_bytes) == (1234, 1234567890)
    assert (counted.tensor_percent, counted.warps_percent, counted.wavefronts) == (44.36, 12.49, None)
    assert counted.stalls == (("long_scoreboard", 1.25), ("barrier", 0.05))  # selected is no stall, n/a no number
    assert [name for name, _ in others.stalls] == ["barrier", "wait", "long_scoreboard"]
    assert Counters.of_record(json.loads(json.dumps(counted.as_record()))) == counted
    assert parse("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM") == []


def test_why_ncu_counts_nothing_is_one_line() -> None:
    refused = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access ...\n"
    assert reason_of(refused, "") == reason_of("", refused) == FORBIDDEN
    printed = "==PROF== x\n==ERROR== The application returned an error code (1).\nmore"
    complained = "Traceback (most recent call last):\n  File x\nRuntimeError: no memory\n"
    assert reason_of(printed, complained) == (
        "ncu counted nothing: The application returned an error code (1).; RuntimeError: no memory"
    )
    assert reason_of("", "") == "ncu counted nothing: it said nothing"


def test_ncu_is_asked_for_the_counters_that_the_card_has() -> None:
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active"
    known = ["dram__bytes", "sm__pipe_tensor_op_hmma_cycles_active", *map(stall.format, ("wait", "selected", "gmma"))]
    assert metrics_for(known) == [
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "dram__bytes.sum",
        *(f"{stall.format(name)}.ratio" for name in ("gmma", "wait")),
    ]
    assert metrics_for([])[0] == "gpu__time_duration.sum"


def test_ncu_runs_a_process_of_ours_with_the_counters_that_it_offers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool, seen = tmp_path / "ncu", tmp_path / "seen"
    tool.write_text(f"""#!/bin/sh
if [ "$1" = --query-metrics ]; then echo "dram__bytes  Counter  byte  # of bytes"; exit; fi
echo "$@" > {seen}
cat <<'END'
{PRINTED}END
""")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    case = load_suite("quick", small=True).only("scale").cases[0]
    counted = counters.count(jobs.Setting(CPU, ADA), "triton", case, ["forward"])
    assert [name for name, _ in counted.kernels] == [name for name, _ in parse(PRINTED)]
    told = seen.read_text()
    assert "--profile-from-start off --metrics dram__bytes.sum " in told
    assert "-c from harness.counters import launch_all" in told


def test_of_that_process_one_launch_of_each_direction_is_listened_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard: list[str] = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: heard.append(name))
    monkeypatch.setattr(counters.os, "dup2", lambda *descriptors: None)

    def launch(self: Trial, direction: Direction) -> Callable[[], None]:
        return lambda: heard.append(direction)

    monkeypatch.setattr(Trial, "launch", launch)
    case = load_suite("quick", small=True).only("scale").cases[0]
    path = tmp_path / "request"
    path.write_bytes(pickle.dumps((jobs.Setting(CPU, ADA), "reference", case, ("forward", "backward"))))
    counters.launch_all(str(path))
    assert heard == [word for one in ("forward", "backward") for word in (one, "start", one, "stop")]


def test_without_ncu_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "find_ncu", lambda: None)
    case = load_suite("quick", small=True).cases[0]
    assert counters.count(jobs.Setting(CPU, ADA), "triton", case, ["forward"]).reason == counters.NO_NCU


@pytest.mark.usefixtures("card")
def test_every_kernel_has_its_counts_its_rate_and_what_holds_it_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, picture = tmp_path / "x.jsonl", tmp_path / "x.svg"
    assert roofline.roofline(request(json=path, picture=picture, only="scale"), HERE, open_port()) == 0
    out = capsys.readouterr().out
    assert table(out, "Ceilings, hopper path on the CPU")["memory GB/s"][1:] == ["4000", "3350", "4800"]
    cells = [line.split(" | ") for line in out.partition("Roofline, ")[2].splitlines() if " | " in line]
    heads, *rows = [[cell.strip() for cell in line] for line in cells]
    named = [dict(zip(heads, row, strict=True)) for row in rows]
    kernels = [(row["direction"], row["kernel"], row["by"]) for row in named]
    assert kernels == [
        ("forward", "all", "–"),
        ("forward", "forward_kernel", "wgmma"),
        ("backward", "all", "–"),
        ("backward", "prepare_kernel", "–"),
        ("backward", "dkdv_kernel", "wgmma"),
        ("backward", "dq_kernel", "mma.sync"),
    ]
    assert all(row["check"] == "pass" and float(row["ms"]) > 0 for row in named)
    assert all(row["held back by"] == "too short" for row in named if row["kernel"] != "all")
    assert named[1]["matrix unit %"] == "41.5"
    assert named[1]["conflicts %"] == "25.0"
    assert named[1]["stalls (warps)"] == "wait 2.5, long_scoreboard 1.2"
    assert named[2]["held back by"] == "prepare_kernel, 33 % of its kernels' time"
    assert "its calls also ran fill 0.0005 ms" in out
    records = read_records(path, ("roofline",))
    assert [len(r["kernels"]) for r in records] == [1, 3]
    assert sum(k["products"] for k in records[1]["kernels"]) == 7
    assert all(r["ceilings"]["matrix_tflops"] == {"wgmma": 800.0, "mma.sync": 400.0} for r in records)
    drawn = ElementTree.parse(picture).getroot()
    words = [element.text or "" for element in drawn.iter() if element.tag.endswith("text")]
    assert any(word.startswith("triton dk, dv: ") for word in words)
    assert {"wgmma 800", "mma.sync 400", "copy 4000 GB/s"} <= set(words)


@pytest.mark.usefixtures("card")
def test_what_fails_its_check_has_no_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert roofline.roofline(request(json=path, only="scale"), HERE, open_port("scale applied twice")) == 1
    assert "FAIL" in capsys.readouterr().out
    for record in read_records(path, ("roofline",)):
        assert record["samples"] is None
        assert all(kernel["samples_ms"] is None and kernel["counters"] is None for kernel in record["kernels"])


@pytest.mark.usefixtures("card")
def test_a_refusal_of_ncu_is_asked_for_once_and_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def refuse(*arguments: object) -> Counted:
        asked.append(arguments)
        return Counted(reason=FORBIDDEN)

    monkeypatch.setattr(roofline, "count", refuse)
    assert roofline.roofline(request(), HERE, open_port()) == 0
    out = capsys.readouterr().out
    assert len(asked) == 1
    assert out.count(f"Without counters: {FORBIDDEN}.") == 1
    assert "matrix unit %" not in out
    assert roofline.roofline(request(counters=False), HERE, open_port()) == 0
    assert len(asked) == 1
    assert "Without counters: they were not asked for." in capsys.readouterr().out


@pytest.mark.usefixtures("card")
def test_the_page_has_a_plot_of_every_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = tmp_path / "x.jsonl", tmp_path / "page.html"
    assert roofline.roofline(request(json=path), HERE, open_port()) == 0
    problems = {record["problem"]["id"] for record in read_records(path, ("roofline",))}
    with pytest.raises(SystemExit) as stop:
        main(["report", str(path), "--out", str(out)])
    assert stop.value.code == 0
    page = Page(out.read_text(encoding="utf-8"))
    pictures = [one for one in page.all("svg") if one["class"] == "rooflines"]
    assert len(pictures) == len(problems) > 1
    assert page.words.count("TFLOP/s against FLOP/B, both in logarithms. Ceilings: copy 4000 GB/s") == len(problems)
    assert "Ceilings, hopper path on the CPU" in page.words
    capsys.readouterr()


def test_a_text_quotes_the_table_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert roofline.roofline(request(json=tmp_path / "x.jsonl"), HERE, open_port()) == 0
    printed = capsys.readouterr().out
    quoted = with_tables("<!-- records: x.jsonl -->\n<!-- /records -->", tmp_path)
    kernels = {spot.name for record in read_records(tmp_path / "x.jsonl", ("roofline",)) for spot in spots_of(record)}
    assert len(kernels) > 2
    assert all(kernel in quoted and kernel in printed for kernel in kernels)


def test_without_a_gpu_counts_stand_beside_datasheets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    asked = request("triton", suite="walkthrough", only="n4096", skip="full", target="hopper", json=path)
    asked = replace(asked, dtype=Dtype.FP16)
    assert roofline.roofline(asked, CPU, open_port()) == 0
    out = capsys.readouterr().out
    assert "Roofline by datasheet, hopper (sm_90a): nothing is timed without a GPU" in out
    assert "989.4, products" in out
    assert "memory" in table(out, "Roofline by datasheet")["4,8,64"][-1] or "memory" in out
    assert "Datasheets tell the rate of wgmma" in out  # the third launch is of mma.sync
    assert "TF/s is" not in out
    for record in read_records(path, ("roofline",)):
        assert record["problem"]["dtype"] == "fp16"
        assert record["verdict"] is record["ceilings"] is record["samples"] is None
        assert [spot.ms for spot in spots_of(record)] == [None] * len(record["kernels"])


def test_a_port_that_is_not_here_is_an_error_where_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    both = request("triton", "cute")
    assert roofline.roofline(both, CPU, open_port()) == 2
    assert roofline.roofline(both, CPU, open_port(), all_asked=False) == 0
    assert roofline.roofline(request("cute"), CPU, open_port()) == 2
    assert "cute: the cute port is on holiday" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--impl", "tritn"], "did you mean triton?"),
        (["--picture", "x.svg"], "--picture draws the rates that kernels achieve, which takes a GPU"),
        (["--only", "n4097"], "n4097"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["roofline", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("card")
def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path, "it is a directory"),
        (tmp_path / "none" / "x.svg", "there is no folder .*none$"),
        (tmp_path / "x.png", r"its name must end in \.svg, got "),
    ):
        with pytest.raises(UsageError, match=f"--picture .*{words}"):
            roofline.roofline(request(picture=path), HERE, open_port())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feats of a size that the interpreter manages, on a clock of our own."""
    monkeypatch.setattr(ceilings, "SIDE", 256)
    monkeypatch.setattr(ceilings, "COPY_BYTES", 4096)
    monkeypatch.setattr(ceilings, "EXPONENTIALS", 1024)
    monkeypatch.setattr(ceiling_kernels, "CUTS", ceiling_kernels.CUTS[1:2])
    ms = {"copy 0": 2.0, "wgmma 0": 1.0, "mma.sync 0": 4.0, "exp2 0": 1.0}
    monkeypatch.setattr(jobs, "_stopwatch", lambda device: FakeStopwatch(ms))


@pytest.mark.usefixtures("small")
def test_ceilings_are_measured_of_work_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    if jobs.open_port("triton").unsupported(PROBLEM, ADA):
        pytest.skip("Triton does not interpret here")
    monkeypatch.setattr(ceiling_kernels, "product", no_arch(ceiling_kernels.product))
    found = measure_ceilings(jobs.Setting(HERE, HOPPER), {"mma.sync", "wgmma"})
    assert found.missing == ()
    assert found.matrix_tflops["wgmma"] == pytest.approx(4 * found.matrix_tflops["mma.sync"], rel=0.4)
    assert found.copy_gbs == pytest.approx(2 * 4096 / 2.0 / 1e6, rel=0.4)
    assert found.exp_gps == pytest.approx(1024 * 8 * 64 / 1e6, rel=0.4)


def no_arch(product: Callable[..., None]) -> Callable[..., None]:
    """The same without an architecture, which an interpreter has none of."""

    def on_the_cpu(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, cut: ceiling_kernels.Cut, arch: str) -> None:
        assert arch == "sm89"
        wide = torch.empty_like(c, dtype=torch.float32)  # the interpreter computes wrong products of bf16
        product(a.float(), b.float(), wide, cut, None)
        c.copy_(wide)

    return on_the_cpu


@pytest.mark.usefixtures("small")
def test_a_wrong_ceiling_and_one_that_nothing_can_measure_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_kernels, "product", lambda a, b, c, cut, arch: c.zero_())
    monkeypatch.setattr(ceiling_kernels, "exponentials", lambda x, rounds: x.fill_(ceiling_kernels.FIXED_POINT))
    found = measure_ceilings(jobs.Setting(HERE, HOPPER), {"mma.sync", "tcgen05"})
    assert set(found.matrix_tflops) == {"wgmma"}
    assert found.missing == (
        "mma.sync: a wrong product",
        "tcgen05: ValueError: nothing here multiplies with tcgen05 on hopper (sm_90a)",
    )


@pytest.mark.gpu
@each()
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_on_a_card_the_kernels_have_the_names_that_the_port_says(subject: Subject, direction: Direction) -> None:
    from harness.environment import prepare

    here = prepare()
    case = load_suite("walkthrough", small=False).only("n1024").cases[0]
    for target in (here.native, ADA):
        setting = jobs.Setting(here, target)
        times = kernel_times(setting, subject.name, case, direction)
        works = launches_of(setting, subject.name, case.problem, direction)
        assert times.reason == ""
        assert list(times.ms) == [work.kernel for work in works]
        assert all(min(ms) > 0 for ms in times.ms.values())
        assert not times.others


@pytest.mark.gpu
def test_on_a_card_the_ceilings_are_near_its_datasheet() -> None:
    from harness.environment import prepare

    here = prepare()
    found = measure_ceilings(jobs.Setting(here, here.native), {"mma.sync"})
    assert found.missing == ()
    (card,) = [card for card in here.native.cards if card.name == here.card] or [here.native.cards[0]]
    assert 0.3 * card.dense_tflops < found.matrix_tflops[here.native.instruction] < 1.1 * card.dense_tflops
    assert found.copy_gbs is not None
    assert 0.5 * card.bandwidth_gbs < found.copy_gbs < card.bandwidth_gbs


@pytest.mark.gpu
def test_on_a_card_every_kernel_has_times_and_counters_or_the_reason_why_not(tmp_path: Path) -> None:
    path, picture = tmp_path / "x.jsonl", tmp_path / "x.svg"
    options = ["--only", "n1024", "--skip", "causal", "--json", str(path), "--picture", str(picture)]
    with pytest.raises(SystemExit) as stop:
        main(["roofline", "--impl", "triton", *options])
    assert stop.value.code == 0
    for record in read_records(path, ("roofline",)):
        assert record["samples"]
        assert record["unprofiled"] == ""
        assert all(kernel["samples_ms"] for kernel in record["kernels"])
        assert all(kernel["counters"] for kernel in record["kernels"]) != bool(record["uncounted"])
    assert "triton dk, dv" in picture.read_text(encoding="utf-8")
