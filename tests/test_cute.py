"""What is the CuTe DSL port's own: its builds for each target, its device arithmetic, its host side.

Needs a GPU only where a result is asked for; `test_cute_backward.py` is the same for the backward.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from common import Direction, Mask, Problem, Switches, Target, Tile, TileKind, Unsupported, port
from common.ports import NAIVE_TILE

cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed", exc_type=ImportError)

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from cute_impl import budget  # noqa: E402
from cute_impl.blocks import (  # noqa: E402
    Coordinates,
    RowCopy,
    accumulator,
    as_matrix,
    claim,
    hide,
    mma_of,
    pieces_inside,
    tile_range,
    walks,
)
from cute_impl.build import plan  # noqa: E402
from cute_impl.launch import band, block_d, cache_folder, padded_len, settle  # noqa: E402

from .cases import LAYOUTS, laid_out, load_cases  # noqa: E402
from .helpers import check_case  # noqa: E402
from .subjects import CUTE as SUBJECT  # noqa: E402
from .subjects import case_of  # noqa: E402

CUTE = port("cute")
ADA, HOPPER = Target.named("ada"), Target.named("hopper")
TARGETS = [ADA, HOPPER, Target.named("geforce_blackwell"), Target.named("blackwell")]
MASKS = [Mask(), Mask.causal(), Mask.causal("top_left"), Mask(20), Mask(9, 12), Mask(2, 1, "top_left")]
LENGTHS = [(100, 100), (70, 130), (130, 70), (1, 90), (90, 1)]
LAZY = (("lazy_rescale", 1),)


@pytest.mark.gpu
def test_a_new_length_or_batch_or_number_of_heads_compiles_nothing() -> None:
    from cute_impl.launch import _compiled

    SUBJECT.check(case_of((1, 2, 100, 64), (1, 2, 120, 64), torch.float16, Mask.causal()))
    before = _compiled.cache_info().misses
    SUBJECT.check(case_of((3, 3, 333, 64), (3, 3, 77, 64), torch.float16, Mask.causal()))
    assert _compiled.cache_info().misses == before


HOT = ["overflow-tiny", "extreme-logits", "constant-rows", "planted-max-last", "more-queries-than-keys"]


@pytest.mark.gpu
@pytest.mark.parametrize("switches", [Switches(), Switches().without("exp2")], ids=str)
@pytest.mark.parametrize("case", load_cases(only=HOT), ids=str)
def test_a_rescale_that_waits_errs_no_more(case, switches: Switches) -> None:  # type: ignore[no-untyped-def]
    check_case(case, CUTE, "cuda", tile=Tile(64, 64, 4, 2, LAZY), switches=switches, dlse=())


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [(), LAZY], ids=["", "lazy"])
def test_lse_does_not_drift_with_the_number_of_tiles(extra: tuple[tuple[str, int], ...]) -> None:
    q, k, v = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16) for n in (64, 65536, 65536))
    q[:] = 3 * k[:, :, :64]  # the maximum is in the first tile, and stays
    problem = Problem.from_tensors(q, k, v)
    _, lse = CUTE.forward(q, k, v, problem, tile=Tile(64, 16, 4, 2, extra))
    truth = (q.double() @ k.double().mT * problem.scale).logsumexp(-1)
    torch.testing.assert_close(lse.double(), truth, atol=0, rtol=32 * torch.finfo(torch.float32).eps)


VARIANTS = [
    pytest.param(ADA, Mask.causal(), 64, torch.bfloat16, Switches(), id="ada-causal"),
    pytest.param(ADA, Mask(9, 12), 40, torch.float16, Switches(), id="ada-window-padded"),
    pytest.param(ADA, Mask(20), 16, torch.float16, Switches.rung("naive"), id="ada-left-naive"),
    pytest.param(ADA, Mask(), 128, torch.bfloat16, Switches(), id="ada-wide"),
    pytest.param(ADA, Mask.causal(), 256, torch.bfloat16, Switches(), id="ada-widest"),
    pytest.param(HOPPER, Mask(), 64, torch.bfloat16, Switches().without("edges"), id="hopper-no-edges"),
    pytest.param(TARGETS[2], Mask(), 64, torch.bfloat16, Switches(), id="geforce-blackwell"),
    pytest.param(TARGETS[3], Mask(), 64, torch.bfloat16, Switches(), id="blackwell"),
]


@pytest.mark.parametrize(("target", "mask", "head_dim", "dtype", "switches"), VARIANTS)
def test_variants_are_on_ada_s_instructions_for_every_target_and_keep_to_the_budget(
    target: Target, mask: Mask, head_dim: int, dtype: torch.dtype, switches: Switches
) -> None:
    problem = Problem(1, 2, 2, 256, 256, head_dim, dtype, mask)
    (build,) = CUTE.build(problem, target, "forward", switches=switches)
    assert (build.kernel, build.target, build.cached) == ("forward_kernel", target.name, False)
    assert build.instructions == ("mma.sync", "cp.async", "ldmatrix")
    assert not re.search(r"wgmma|tcgen05|cp\.async\.bulk|mbarrier", build.ptx)
    assert build.shared == sum(budget.shared_memory(problem, "forward", build.tile)["forward_kernel"].values())
    assert 0 < build.registers <= 255
    assert build.seconds > 0


@pytest.mark.parametrize("mask", [Mask(), Mask.causal()], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_tiles_that_ada_takes_hardly_spill(head_dim: int, mask: Mask) -> None:
    (build,) = CUTE.build(Problem(1, 2, 2, 256, 256, head_dim, mask=mask), ADA, "forward")
    # What lies on the stack is of the edges and the way there; the loop over inner tiles reads none of it.
    assert build.spills <= 48


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_every_head_dim_has_tiles_that_fit(head_dim: int, target: Target, direction: Direction) -> None:
    problem = Problem(1, 2, 2, 256, 256, head_dim)
    tiles = CUTE.tiles(problem, target, direction)
    assert len(tiles) >= 2
    for tile in tiles:
        CUTE.check_tile(problem, target, direction, tile)


def test_a_tile_too_large_is_refused_with_the_arithmetic() -> None:
    problem = Problem(1, 2, 2, 256, 256, 256)
    with pytest.raises(Unsupported, match=r"Q 65536 \+ K 65536 \+ V 65536 = 196608 B.*sm_89 gives 101376 B"):
        CUTE.check_tile(problem, ADA, "forward", Tile(128, 128, warps=8, stages=1))
    q = torch.zeros(problem.q_shape, dtype=problem.dtype)
    with pytest.raises(Unsupported, match="101376"):
        CUTE.forward(q, q, q, problem, target=ADA, tile=Tile(128, 128))


@pytest.mark.parametrize("tile", [Tile(72, 64), Tile(64, 72), Tile(64, 64, warps=8)], ids=str)
def test_a_tile_that_a_warp_cannot_hold_whole_rows_of_is_refused(tile: Tile) -> None:
    with pytest.raises(Unsupported, match="whole rows"):
        CUTE.check_tile(Problem(1, 1, 1, 64, 64, 64), ADA, "forward", tile)


def test_more_warps_than_a_block_has_are_refused() -> None:
    with pytest.raises(Unsupported, match="32 warps"):
        CUTE.check_tile(Problem(1, 1, 1, 64, 64, 16), ADA, "forward", Tile(16 * 40, 16, warps=40, stages=1))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_no_tile_has_is_refused_with_what_there_is(direction: Direction) -> None:
    tile = Tile(64, 64, extra=(("dq_block_k", 64),))
    with pytest.raises(Unsupported, match=r"no dq_block_k \(but atomics, .*, lazy_rescale, .*, q_in_registers"):
        CUTE.check_tile(Problem(1, 1, 1, 64, 64, 64), ADA, direction, tile)


def test_fp32_is_refused_with_the_dtypes_there_are() -> None:
    with pytest.raises(Unsupported, match="fp16, bf16"):
        CUTE.build(Problem(1, 1, 1, 64, 64, 64, torch.float32), ADA, "forward")


def test_tensors_that_are_not_on_a_cuda_device_are_refused() -> None:
    q = torch.zeros(1, 1, 16, 16, dtype=torch.float16)
    with pytest.raises(Unsupported, match="CUDA"):
        CUTE.forward(q, q, q, Problem.from_tensors(q, q, q))


def test_a_grid_past_32_bits_is_refused() -> None:
    problem = Problem(2**20, 64, 64, 1024, 16, 16, torch.float16)
    for direction in ("forward", "backward"):
        with pytest.raises(Unsupported, match="blocks; a grid has at most 2147483647"):
            plan(problem, ADA, direction, Tile(16, 16, 1, 1), Switches())


@pytest.mark.parametrize("lengths", [(12288, 1), (1, 12288), (16384, 1)])
@pytest.mark.parametrize("heads", [(128, 1), (64, 64)])
def test_the_order_of_many_tiles_over_few_keys_is_in_32_bits(lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    problem = Problem(1, *heads, *lengths, 16, torch.float16, Mask.causal())
    (launch,) = plan(problem, ADA, "forward", Tile(16, 16, 1, 1), Switches())
    assert 1 <= launch.scalars[0] <= heads[0]  # so that tiles x section is at most the grid


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_start_on_16_bytes_are_taken_as_they_are_and_others_copied_once(layout: str) -> None:
    tensor = laid_out(torch.randn(2, 3, 10, 16, dtype=torch.float16), layout)
    taken = settle(tensor)
    assert torch.equal(taken, tensor)
    assert (taken is tensor) == (layout not in ("last_dim_strided", "offset_one"))
    assert taken.data_ptr() % 16 == 0
    assert all(stride % 8 == 0 for stride in taken.stride()[:-1])


def test_a_tensor_that_autograd_watches_is_handed_over() -> None:
    tensor = torch.randn(1, 1, 10, 16, dtype=torch.float16, requires_grad=True)
    taken = settle(tensor)
    assert not taken.requires_grad
    assert taken.data_ptr() == tensor.data_ptr()


def test_head_dims_are_padded_to_what_tiles_hold() -> None:
    padded = {d: block_d(Problem(1, 1, 1, 1, 1, d)) for d in (16, 24, 40, 64, 72, 128, 136, 256)}
    assert padded == {16: 16, 24: 32, 40: 48, 64: 64, 72: 80, 128: 128, 136: 144, 256: 256}
    assert [padded_len(Problem(1, 1, 1, n, 1, 16)) for n in (1, 128, 129)] == [128, 128, 256]


def test_a_window_wider_than_32_bits_is_as_wide_as_the_lengths() -> None:
    assert band(Problem(1, 1, 1, 10, 20, 16, mask=Mask(left=2**40, right=2**40))) == (-10, 20)
    assert band(Problem(1, 1, 1, 10, 20, 16, mask=Mask(left=3))) == (7, 0)


@pytest.mark.parametrize("edges", [True, False], ids=["edges", "no-edges"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
def test_the_walk_takes_each_tile_once_and_compares_where_the_mask_cuts(
    mask: Mask, len_q: int, len_k: int, edges: bool
) -> None:
    block_m, block_n = 32, 16
    low, high = band(Problem(1, 1, 1, len_q, len_k, 16, mask=mask))
    sides = mask.left is not None, mask.right is not None
    for first in range(0, len_q, block_m):
        last = min(first + block_m, len_q) - 1
        bounds = tile_range(first, last, len_k, low, high, block_n, *sides, True, edges)
        parts = walks(*bounds, sides[0], edges)
        walked = {n: masked for begin, end, masked in parts for n in range(int(begin), int(end))}
        assert sum(max(0, int(end) - int(begin)) for begin, end, _ in parts) == len(walked)
        for n in range(-(-len_k // block_n)):
            kind = mask.tile_kind(first, first + block_m, n * block_n, (n + 1) * block_n, len_q, len_k)
            assert n in walked or kind is TileKind.SKIP
            if n in walked and edges:
                assert walked[n] == (kind is not TileKind.FULL)
        assert edges or all(walked.values())


@pytest.mark.parametrize("heavy_last", [True, False])
@pytest.mark.parametrize("section", [1, 3, 8])
def test_every_tile_of_every_head_is_claimed_once(section: int, heavy_last: bool) -> None:
    tiles, heads = 5, 8
    for order in (True, False):
        claimed = [claim(program, tiles, heads, section, heavy_last, order) for program in range(tiles * heads)]
        pairs = [(int(tile), int(head)) for tile, head in claimed]
        assert sorted(pairs) == [(tile, head) for tile in range(tiles) for head in range(heads)]
        if order:
            assert pairs[:section] == [(tiles - 1 if heavy_last else 0, head) for head in range(section)]


@cute.jit
def visible_to_threads(
    visible: cute.Tensor, row_begin: int, key_begin: int, len_k: int, low: int, high: int,
    HAS_LOW: cutlass.Constexpr, HAS_HIGH: cutlass.Constexpr, WARPS: cutlass.Constexpr,
) -> None:  # fmt: skip
    mma = mma_of(cutlass.BFloat16, WARPS)
    block_m, block_n = visible.shape
    for thread in range(32 * WARPS):
        scores = accumulator(mma, thread, block_m, block_n)
        where = Coordinates(mma, thread, block_m, block_n)
        hide(as_matrix(scores), where, row_begin, key_begin, len_k, low, high, HAS_LOW, HAS_HIGH)
        mine = mma.get_slice(thread).partition_C(visible)
        for i in cutlass.range_constexpr(cute.size(mine)):
            mine[i] = cutlass.Int32(scores[i] == 0.0)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_threads_hide_of_a_tile_is_what_the_mask_hides(mask: Mask) -> None:
    len_q, len_k = 64, 90
    low, high = mask.band(len_q, len_k)
    dense = mask.dense(len_q, len_k)
    for row_begin in range(0, len_q, 32):
        for key_begin in range(0, len_k, 32):
            visible = torch.full((32, 32), -1, dtype=torch.int32)
            numbers = row_begin, key_begin, len_k, low or 0, high or 0
            visible_to_threads(from_dlpack(visible), *numbers, low is not None, high is not None, 2)
            expected = torch.zeros(32, 32, dtype=torch.bool)
            tile = dense[row_begin : row_begin + 32, key_begin : key_begin + 32]
            expected[: tile.shape[0], : tile.shape[1]] = tile
            assert torch.equal(visible.bool(), expected)


@cute.jit
def pieces_of_threads(
    found: cute.Tensor, first: int, rows: int, HEAD_DIM: cutlass.Constexpr, THREADS: cutlass.Constexpr
) -> None:
    block, block_d = found.shape
    for thread in range(THREADS):
        copy = RowCopy(cutlass.BFloat16, block, block_d, THREADS, thread)
        mine = copy.mine(found)
        for i in cutlass.range_constexpr(cute.size(mine, mode=[1])):
            inside = pieces_inside(copy, i, rows, HEAD_DIM, first)
            for j in cutlass.range_constexpr(cute.size(mine, mode=[2])):
                for k in cutlass.range_constexpr(cute.size(mine, mode=[0])):
                    mine[k, i, j] = cutlass.Int32(inside[0, j])


@pytest.mark.parametrize(("first", "rows"), [(0, 32), (0, 5), (7, 20), (0, -3), (0, 100)])
@pytest.mark.parametrize("head_dim", [40, 48])
def test_what_threads_copy_of_a_tile_lies_inside(head_dim: int, first: int, rows: int) -> None:
    found = torch.full((32, 48), -1, dtype=torch.int32)
    pieces_of_threads(from_dlpack(found), first, rows, head_dim, 64)
    expected = torch.zeros(32, 48, dtype=torch.bool)
    expected[max(first, 0) : max(rows, 0), :head_dim] = True
    assert torch.equal(found.bool(), expected)
    assert (found >= 0).all()


def test_a_launch_is_told_apart_by_its_constants_only() -> None:
    short, long = (Problem(1, 2, 2, n, n, 64, mask=Mask.causal()) for n in (100, 5000))
    tile = Tile(64, 64)
    (a,), (b,) = (plan(p, ADA, "forward", tile, Switches()) for p in (short, long))
    assert a.kernel == b.kernel
    (c,) = plan(dataclasses.replace(short, mask=Mask()), ADA, "forward", tile, Switches())
    (d,) = plan(short, ADA, "forward", Tile(64, 64, extra=LAZY), Switches())
    assert len({a.kernel, c.kernel, d.kernel}) == 3


def test_kernels_are_those_of_a_call_and_equal_for_equal_code() -> None:
    short, long = (Problem(1, 2, 2, n, n, 64, mask=Mask.causal()) for n in (100, 5000))
    assert CUTE.kernels(short, ADA, "forward") == CUTE.kernels(long, ADA, "forward")
    tile = CUTE.tiles(short, ADA, "backward")[0]
    launches = plan(short, ADA, "backward", tile, Switches())
    assert CUTE.kernels(short, ADA, "backward") == [launch.code for launch in launches]
    plain, with_dlse = (set(CUTE.kernels(short, HOPPER, "backward", dlse=dlse)) for dlse in (False, True))
    assert len(plain & with_dlse) == 2
    assert len(plain | with_dlse) == 4
    naive = Switches.rung("naive")
    launches = plan(short, ADA, "backward", NAIVE_TILE, naive)
    assert CUTE.kernels(short, ADA, "backward", switches=naive) == [launch.code for launch in launches]
    assert pickle.loads(pickle.dumps(plain)) == plain
    assert CUTE.kernels(dataclasses.replace(short, dtype=torch.float32), ADA, "forward") == ()
    assert CUTE.kernels(dataclasses.replace(short, len_k=0), ADA, "backward") == ()


def test_threads_compile_one_after_another() -> None:
    problems = [Problem(1, 2, 2, 64, 64, head_dim) for head_dim in (16, 24, 32, 40)]
    with ThreadPoolExecutor(4) as threads:
        built = list(
            threads.map(lambda problem: CUTE.build(problem, ADA, "forward", tile=Tile(16, 16, 1, 1)), problems)
        )
    assert [build.kernel for (build,) in built] == ["forward_kernel"] * 4


@pytest.mark.parametrize("tile", [Tile(48, 48, 3, 1), Tile(80, 64, 5, 2), Tile(96, 64, 6, 1)], ids=str)
def test_any_number_of_warps_shares_the_copies_out(tile: Tile) -> None:
    problem = Problem(1, 2, 2, 256, 256, 64)
    (build,) = CUTE.build(problem, ADA, "forward", tile=tile)
    assert build.shared == sum(budget.shared_memory(problem, "forward", tile)["forward_kernel"].values())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [Tile(48, 48, 3, 1), Tile(80, 64, 5, 2), Tile(96, 64, 6, 1)], ids=str)
def test_any_number_of_warps_gives_the_same(tile: Tile) -> None:
    SUBJECT.check(case_of((1, 2, 300, 64), (1, 1, 260, 64), torch.float16, Mask.causal()), tile=tile, dlse=())


def test_a_folder_that_holds_no_kernels_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FA2_CUTE_CACHE_DIR", str(tmp_path / "file" / "folder"))
    (launch,) = plan(Problem(1, 1, 1, 64, 64, 16), ADA, "forward", Tile(16, 16, 1, 1), Switches.rung("naive"))
    with pytest.raises(Unsupported, match=r"cannot be kept: .*set FA2_CUTE_CACHE_DIR"):
        launch.code.compile("sm_89")


def test_kernels_are_kept_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("FA2_CUTE_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("FA2_CUTE_CACHE_DIR")
    assert cache_folder().name == "fa2-cute"
