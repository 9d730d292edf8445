"""What is the TileLang port's own: what its kernels lower to for each target, and its host side. Needs no GPU."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from common import Direction, Form, Mask, Problem, Switches, Target, Tile, TileKind, Unsupported, port
from common.ports import NAIVE_TILE

tilelang_impl = pytest.importorskip("tilelang_impl", reason="TileLang is not installed", exc_type=ImportError)

from tilelang_impl import budget, toolchain  # noqa: E402
from tilelang_impl.backward import plan_backward  # noqa: E402
from tilelang_impl.blocks import tile_range  # noqa: E402
from tilelang_impl.build import lower, plan  # noqa: E402
from tilelang_impl.launch import (  # noqa: E402
    LOWERING_ATTEMPTS,
    UNPROVEN,
    band,
    block_d,
    in_a_fresh_thread,
    in_memory,
    padded_len,
    settle,
    settled,
)

from .cases import LAYOUTS, laid_out  # noqa: E402
from .subjects import TILELANG as SUBJECT  # noqa: E402
from .subjects import case_of, dq_tile  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TILELANG = port("tilelang")
ADA, HOPPER = Target.named("ada"), Target.named("hopper")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")


@pytest.mark.gpu
def test_a_new_length_or_batch_or_number_of_heads_compiles_nothing() -> None:
    from tilelang_impl.launch import _compiled

    SUBJECT.check(case_of((1, 2, 100, 64), (1, 2, 120, 64), torch.float16, Mask.causal()))
    before = _compiled.cache_info().misses
    SUBJECT.check(case_of((3, 3, 333, 64), (3, 3, 77, 64), torch.float16, Mask.causal()))
    assert _compiled.cache_info().misses == before


VARIANTS = [
    pytest.param(ADA, "forward", Mask.causal(), 128, 1, id="ada-forward-causal"),
    pytest.param(ADA, "backward", Mask(left=9, right=12), 40, 2, id="ada-backward-window-grouped-padded"),
    pytest.param(ADA, "backward", Mask(), 256, 1, id="ada-backward-full-wide"),
    pytest.param(HOPPER, "forward", Mask(left=20), 64, 2, id="hopper-forward-left-grouped"),
    pytest.param(HOPPER, "backward", Mask.causal(), 128, 1, id="hopper-backward-causal"),
    pytest.param(Target.named("blackwell"), "forward", Mask(), 64, 1, id="blackwell-forward-full"),
    pytest.param(Target.named("geforce_blackwell"), "backward", Mask(), 64, 1, id="geforce-blackwell-backward-full"),
]


@pytest.mark.parametrize(("target", "direction", "mask", "head_dim", "group"), VARIANTS)
def test_variants_lower_to_the_targets_instructions_and_keep_to_the_budget(
    target: Target, direction: Direction, mask: Mask, head_dim: int, group: int
) -> None:
    problem = Problem(1, 2 * group, 2, 256, 256, head_dim, torch.bfloat16, mask)
    tile = TILELANG.tiles(problem, target, direction)[0]
    parts = budget.shared_memory(problem, target, direction, tile)
    for launch in plan(problem, target, direction, tile, Switches()):
        source, shared = lower(launch, target)
        if launch.name in ("prepare_kernel", "scale_dq_kernel"):
            assert shared == 0
            continue
        if launch.asynchronous:
            assert "tl::wgmma_" in source
            assert "tl::tma_load" in source
            assert "warpgroup_reg_alloc" in source
            shared += budget.BARRIER_BYTES
        else:
            assert "tl::mma_sync" in source
            assert "cp_async_gs_conditional<16>" in source
            assert not any(word in source for word in ("wgmma", "tma_load", "mbarrier"))
        assert shared == sum(parts[launch.name].values())
        # The lengths are arguments of the kernel, not numbers in its code.
        assert "int len_k" in source


@pytest.mark.parametrize(("direction", "name"), [("forward", "forward_kernel"), ("backward", "dkdv_kernel")])
def test_the_ada_path_stays_on_mma_sync_on_a_newer_card(direction: Direction, name: str) -> None:
    problem = Problem(1, 2, 2, 256, 256, 64, torch.float16, Mask.causal())
    tile = TILELANG.tiles(problem, ADA, direction)[0]
    (launch,) = (launch for launch in plan(problem, ADA, direction, tile, Switches()) if launch.name == name)
    source, _ = lower(launch, HOPPER)
    assert "tl::mma_sync" in source
    assert "cp_async_gs_conditional<16>" in source
    assert not any(word in source for word in ("wgmma", "tma_load", "mbarrier"))


# Rows of 96, 160, 192 and 224 columns are what the compiler has found no layout for; 24 and 16 are the smallest.
@pytest.mark.parametrize("head_dim", [16, 24, 72, 96, 136, 168, 200])
def test_heads_of_any_width_are_summed_over(head_dim: int) -> None:
    problem = Problem(1, 2, 2, 256, 256, head_dim, torch.float16)
    tile = TILELANG.tiles(problem, ADA, "backward")[0]
    prepare, *_ = plan(problem, ADA, "backward", tile, Switches())
    source, shared = lower(prepare, ADA)
    assert "*(uint4*)(DO +" in source  # 16 bytes at a time
    assert shared == 0


@pytest.mark.parametrize("head_dim", [136, 200])
def test_heads_padded_to_no_power_of_two_lower(head_dim: int) -> None:
    problem = Problem(1, 2, 2, 256, 256, head_dim, torch.float16)
    for direction in ("forward", "backward"):
        tile = TILELANG.tiles(problem, HOPPER, direction)[0]
        parts = budget.shared_memory(problem, HOPPER, direction, tile)
        for launch in plan(problem, HOPPER, direction, tile, Switches()):
            if launch.name in parts:
                _, shared = lower(launch, HOPPER)
                assert shared <= sum(parts[launch.name].values())


@needs_nvcc
@pytest.mark.parametrize("target", [ADA, HOPPER], ids=str)
def test_a_build_tells_what_it_takes_of_the_chip(target: Target) -> None:
    problem = Problem(1, 2, 2, 256, 256, 64)
    (build,) = TILELANG.build(problem, target, "forward")
    assert (build.kernel, build.cached) == ("forward_kernel", False)
    assert target.instruction in build.instructions
    assert build.shared == sum(budget.shared_memory(problem, target, "forward", build.tile)["forward_kernel"].values())
    assert 0 < build.registers <= 255
    assert build.spills <= (76 if target == ADA else 0)  # for Ada the fastest tile spills a little


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("target", ["ada", "hopper", "geforce_blackwell", "blackwell"])
@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_every_head_dim_has_tiles_that_fit(head_dim: int, target: str, direction: Direction) -> None:
    problem, chip = Problem(1, 2, 2, 256, 256, head_dim), Target.named(target)
    tiles = TILELANG.tiles(problem, chip, direction)
    assert len(tiles) >= 2
    for tile in tiles:
        TILELANG.check_tile(problem, chip, direction, tile)


def test_a_tile_too_large_is_refused_with_the_arithmetic() -> None:
    problem = Problem(1, 2, 2, 256, 256, 256)
    with pytest.raises(Unsupported, match=r"Q 65536 \+ K 65536 \+ V 65536 = 196608 B.*sm_89 gives 101376 B"):
        TILELANG.check_tile(problem, ADA, "forward", Tile(128, 128, warps=8, stages=1))
    q = torch.zeros(problem.q_shape, dtype=problem.dtype)
    with pytest.raises(Unsupported, match="101376"):
        TILELANG.forward(q, q, q, problem, target=ADA, tile=Tile(128, 128))


@pytest.mark.parametrize("tile", [Tile(72, 64), Tile(64, 72), Tile(64, 64, warps=8)], ids=str)
def test_a_tile_that_a_warp_cannot_hold_whole_rows_of_is_refused(tile: Tile) -> None:
    with pytest.raises(Unsupported, match="whole rows"):
        TILELANG.check_tile(Problem(1, 1, 1, 64, 64, 64), ADA, "forward", tile)


@pytest.mark.parametrize(("target", "warps", "most"), [(ADA, 33, 32), (HOPPER, 32, 28)], ids=str)
def test_more_warps_than_a_block_has_are_refused(target: Target, warps: int, most: int) -> None:
    with pytest.raises(Unsupported, match=f"at most {most} warps"):
        TILELANG.check_tile(Problem(1, 1, 1, 1024, 64, 16), target, "forward", Tile(16 * warps, 16, warps, 2))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_no_tile_has_is_refused_with_what_there_is(direction: Direction) -> None:
    tile = Tile(64, 64, extra=(("dq_block_k", 64),))
    with pytest.raises(Unsupported, match=r"no dq_block_k \(but atomic_dq, dq_block_m, .*, dq_warps, lazy_rescale\)"):
        TILELANG.check_tile(Problem(1, 1, 1, 64, 64, 64), ADA, direction, tile)


def test_a_launch_has_the_tile_of_its_kernel() -> None:
    tile = Tile(64, 128, 8, 2, dq_tile(128, 64, 8, 1))
    launches = plan(Problem(1, 1, 1, 256, 256, 64), HOPPER, "backward", tile, Switches())
    assert [launch.name for launch in launches] == ["prepare_kernel", "dkdv_kernel", "dq_kernel"]
    assert [launch.tile for launch in launches[1:]] == [Tile(64, 128, 8, 2), Tile(128, 64, 8, 1)]


def test_dq_is_summed_by_atomics_only_where_the_tile_says_so_and_nobody_minds() -> None:
    tile = Tile(32, 128, 4, 2, (("atomic_dq", 1), *dq_tile(128, 64, 4, 2)))
    problem = Problem(1, 1, 1, 256, 256, 64)
    names = [launch.name for launch in plan(problem, ADA, "backward", tile, Switches())]
    assert names == ["prepare_kernel", "dkdv_kernel", "scale_dq_kernel"]
    repeatable = plan_backward(problem, ADA, tile, Switches(), ("bhnd",) * 5, False)
    assert [launch.name for launch in repeatable] == ["prepare_kernel", "dkdv_kernel", "dq_kernel"]
    assert repeatable[1].constants != plan(problem, ADA, "backward", tile, Switches())[1].constants
    with pytest.raises(Unsupported, match="atomic_dq is for mma"):
        TILELANG.check_tile(problem, HOPPER, "backward", tile)


def test_a_tile_that_does_not_lower_is_refused_with_the_compilers_reason() -> None:
    problem, tile = Problem(1, 1, 1, 512, 512, 16), Tile(512, 64, 8, 2)
    (launch,) = plan(problem, HOPPER, "forward", tile, Switches())
    with pytest.raises(Unsupported, match=r"TileLang cannot compile forward_kernel for sm_90a: .+"):
        launch.kernel.compile("sm_90a")


@pytest.mark.gpu
def test_keys_that_nobody_sees_add_to_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    beyond, tile = 4 * 2**20, Tile(32, 64, 4, 1, (("atomic_dq", 1),))
    buffers = []

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffers.append(torch.full((math.prod(shape) + beyond,), -0.0, dtype=dtype, device=device))
        return buffers[-1][: math.prod(shape)].view(shape)

    monkeypatch.setattr("tilelang_impl.backward.empty", empty)
    q, do = (torch.randn(1, 1, 64, 16, device="cuda", dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, 1, 2**17, 16, device="cuda", dtype=torch.float16) for _ in range(2))
    problem = Problem.from_tensors(q, k, v, mask=Mask.causal("top_left"))
    o, lse = TILELANG.forward(q, k, v, problem, target=ADA)
    TILELANG.backward(do, None, q, k, v, o, lse, problem, target=ADA, tile=tile)
    assert len(buffers) == 2  # stats, and the sum of dq
    for buffer in buffers:
        assert buffer[-beyond:].signbit().all()  # -0.0 plus 0.0 is 0.0


def test_kernels_are_those_of_a_call_and_equal_for_equal_code() -> None:
    short, long = (Problem(1, 2, 2, n, n, 64, mask=Mask.causal()) for n in (100, 5000))
    assert TILELANG.kernels(short, ADA, "forward") == TILELANG.kernels(long, ADA, "forward")
    tile = TILELANG.tiles(short, ADA, "backward")[0]
    launches = plan(short, ADA, "backward", tile, Switches())
    assert TILELANG.kernels(short, ADA, "backward") == [launch.kernel for launch in launches]
    plain, with_dlse = (set(TILELANG.kernels(short, HOPPER, "backward", dlse=dlse)) for dlse in (False, True))
    assert len(plain & with_dlse) == 2
    assert len(plain | with_dlse) == 4
    naive = Switches.rung("naive")
    launches = plan(short, ADA, "backward", NAIVE_TILE, naive)
    assert TILELANG.kernels(short, ADA, "backward", switches=naive) == [launch.kernel for launch in launches]
    assert pickle.loads(pickle.dumps(plain)) == plain
    assert TILELANG.kernels(dataclasses.replace(short, dtype=torch.float32), ADA, "forward") == ()
    assert TILELANG.kernels(dataclasses.replace(short, len_k=0), ADA, "backward") == ()


def test_a_grid_past_32_bits_is_refused() -> None:
    problem = Problem(2**20, 64, 64, 1024, 16, 16, torch.float16)
    for direction in ("forward", "backward"):
        with pytest.raises(Unsupported, match="blocks; a grid has at most 2147483647"):
            plan(problem, ADA, direction, Tile(16, 16, 1, 1), Switches())


@pytest.mark.parametrize("lengths", [(12288, 1), (1, 12288), (16384, 1)])
@pytest.mark.parametrize("heads", [(128, 1), (64, 64)])
def test_the_order_of_many_tiles_over_few_keys_is_in_32_bits(lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    problem = Problem(1, *heads, *lengths, 16, torch.float16, Mask.causal())
    for direction in ("forward", "backward"):
        for launch in plan(problem, ADA, direction, Tile(16, 16, 1, 1), Switches()):
            if launch.scalars:
                section = launch.scalars[0]
                # So that tiles x section is at most the grid.
                assert 1 <= section <= (heads[1] if launch.name == "dkdv_kernel" else heads[0])


def test_fp32_is_refused_with_the_dtypes_there_are() -> None:
    with pytest.raises(Unsupported, match="fp16, bf16"):
        TILELANG.build(Problem(1, 1, 1, 64, 64, 64, torch.float32), ADA, "forward")


def test_tensors_that_are_not_on_a_cuda_device_are_refused() -> None:
    q = torch.zeros(1, 1, 16, 16, dtype=torch.float16)
    with pytest.raises(Unsupported, match="CUDA"):
        TILELANG.forward(q, q, q, Problem.from_tensors(q, q, q))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_layouts_are_taken_as_they_are_and_others_copied_once(layout: str) -> None:
    tensor = laid_out(torch.randn(2, 3, 10, 16, dtype=torch.float16), layout)
    form, name = settled(Form.of(tensor))
    assert name == ("bnhd" if layout == "bshd" else "bhnd")
    assert in_memory(form.empty(), name).is_contiguous()
    taken = settle(tensor, name)
    assert taken.is_contiguous()
    assert torch.equal(in_memory(taken, name), tensor)
    assert (taken.data_ptr() == tensor.data_ptr()) == (layout in ("packed", "bshd"))
    assert taken.data_ptr() % 16 == 0


def test_head_dims_are_padded_to_what_tiles_hold() -> None:
    padded = {d: block_d(Problem(1, 1, 1, 1, 1, d)) for d in (16, 24, 40, 64, 72, 128, 136, 256)}
    assert padded == {16: 16, 24: 32, 40: 64, 64: 64, 72: 96, 128: 128, 136: 160, 256: 256}
    assert [padded_len(Problem(1, 1, 1, n, 1, 16)) for n in (1, 128, 129)] == [128, 128, 256]


def test_a_window_wider_than_32_bits_is_as_wide_as_the_lengths() -> None:
    assert band(Problem(1, 1, 1, 10, 20, 16, mask=Mask(left=2**40, right=2**40))) == (-10, 20)
    assert band(Problem(1, 1, 1, 10, 20, 16, mask=Mask(left=3))) == (7, 0)


@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask.causal("top_left"), Mask(20), Mask(9, 12)], ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), [(100, 100), (70, 130), (130, 70), (1, 90)])
def test_the_walk_is_the_masks(mask: Mask, len_q: int, len_k: int) -> None:
    block_m, block_n = 32, 16
    low, high = band(Problem(1, 1, 1, len_q, len_k, 16, mask=mask))
    sides = mask.left is not None, mask.right is not None
    for first in range(0, len_q, block_m):
        last = min(first + block_m, len_q) - 1
        bounds = tile_range(first, last, len_k, low, high, block_n, *sides, True, True)
        begin, full_begin, full_end, end = (int(bound) for bound in bounds)
        assert 0 <= begin < end <= -(-len_k // block_n)
        for tile in range(-(-len_k // block_n)):
            kind = mask.tile_kind(first, first + block_m, tile * block_n, (tile + 1) * block_n, len_q, len_k)
            walked, full = begin <= tile < end, full_begin <= tile < full_end
            assert walked or kind is TileKind.SKIP
            if walked and mask.right is None and tile == end - 1:
                assert not full  # an edge even where it is none: the others are then known not to be
            elif walked:
                assert full == (kind is TileKind.FULL)


def test_a_launch_is_told_apart_by_its_constants_only() -> None:
    short, long = (Problem(1, 2, 2, n, n, 64, mask=Mask.causal()) for n in (100, 5000))
    tile = Tile(64, 64)
    (a,), (b,) = (plan(p, ADA, "forward", tile, Switches()) for p in (short, long))
    assert a.constants == b.constants
    (c,) = plan(dataclasses.replace(short, mask=Mask()), ADA, "forward", tile, Switches())
    assert a.constants != c.constants


def test_every_lowering_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the compiler's prover has seen in a thread decides what it can prove there later.
    threads: list[threading.Thread] = []

    def refuse(*arguments: object, **options: object) -> None:
        threads.append(threading.current_thread())
        raise RuntimeError("no")

    monkeypatch.setattr("tilelang.lower", refuse)
    monkeypatch.setattr("tilelang.compile", refuse)
    prepare, *_ = plan(Problem(1, 1, 1, 64, 64, 16), ADA, "backward", Tile(16, 16, 1, 1), Switches())
    for work in (lambda: lower(prepare, ADA), lambda: prepare.kernel.compile("sm_89")):
        for _ in range(2):
            with pytest.raises((RuntimeError, Unsupported), match="no"):
                work()
    assert len({id(thread) for thread in threads}) == len(threads) == 4
    assert threading.current_thread() not in threads


def test_without_nvcc_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for home in ("", str(tmp_path)):  # where TileLang looks; there is nothing in either
        monkeypatch.setattr("tilelang.contrib.nvcc.CUDA_HOME", home)
        with pytest.raises(Unsupported, match=r"nvcc.*neither under CUDA_HOME.*pip install '\.\[nvcc\]'"):
            TILELANG.build(Problem(1, 1, 1, 64, 64, 64), ADA, "forward")


def test_a_lowering_that_could_not_prove_something_is_tried_again_and_another_failure_is_not() -> None:
    tried: list[str] = []

    def fails(text: str, times: int) -> str:
        tried.append(text)
        if len(tried) <= times:
            raise RuntimeError(text)
        return "kernel"

    assert in_a_fresh_thread(lambda: fails(f"[ThreadSync] {UNPROVEN} inside …", 2)) == "kernel"
    assert len(tried) == 3
    for text, attempts in ((UNPROVEN, LOWERING_ATTEMPTS), ("another reason", 1)):
        tried.clear()
        with pytest.raises(RuntimeError, match=text):
            in_a_fresh_thread(lambda text=text: fails(text, 9))  # type: ignore[misc]
        assert len(tried) == attempts


def test_another_version_of_tilelang_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchain.version_fault() is None
    monkeypatch.setattr("tilelang.__version__", "0.1.15")
    unfit = type(TILELANG)()
    reason = unfit.unsupported(Problem(1, 1, 1, 64, 64, 64), ADA)
    assert reason is not None
    assert "the installed one is 0.1.15" in reason
    assert "pip install tilelang==0.1.13" in reason
    with pytest.raises(Unsupported, match=r"0\.1\.15"):
        unfit.build(Problem(1, 1, 1, 64, 64, 64), ADA, "forward")


COMPILE_ONE = """
from common import Problem, Switches, Target, Tile
from tilelang_impl.build import plan
ada = Target.named("ada")
prepare, *_ = plan(Problem(1, 1, 1, 64, 64, 16), ada, "backward", Tile(16, 16, 1, 1), Switches())
print(type(prepare.kernel.compile("sm_89")).__name__)
"""


@needs_nvcc
def test_a_compiled_kernel_is_found_again_by_a_new_process_unless_its_source_has_changed(tmp_path: Path) -> None:
    for package in ("common", "tilelang_impl"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TILELANG_CACHE_DIR": str(tmp_path / "cache")}

    def compile_one(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", COMPILE_ONE]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | more, capture_output=True, text=True, check=False
        )

    first = compile_one()
    assert first.stdout == "Function\n", first.stderr  # and nothing else: what TileLang says goes to stderr
    assert "begins to compile kernel `prepare_kernel`" in first.stderr
    without_nvcc = {"CUDA_HOME": str(tmp_path)}
    again = compile_one(**without_nvcc)
    assert again.stdout == "Function\n", again.stderr
    backward = tmp_path / "tilelang_impl" / "backward.py"
    text = backward.read_text()
    assert text.count("delta[i] - dlse") == 1
    backward.write_text(text.replace("delta[i] - dlse", "2 * delta[i] - dlse"))
    assert "nvcc, which was found neither" in compile_one(**without_nvcc).stderr
