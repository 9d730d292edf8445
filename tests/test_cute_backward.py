"""The backward of the CuTe DSL port: budget, device arithmetic and builds without a GPU; gradients on one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from common import GuardedBuffers, Mask, Problem, Switches, Target, Tile, Unsupported, port
from harness.checks import Truth

cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed", exc_type=ImportError)

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from cute_impl.backward import plan_backward  # noqa: E402
from cute_impl.backward_blocks import fragments, hide_keys, seeing_rows, stats_by_column  # noqa: E402
from cute_impl.backward_budget import (  # noqa: E402
    backward_block_d,
    backward_memory,
    check_backward,
    dq_tile,
    dq_warps,
)
from cute_impl.backward_prepare import PrepareKernel  # noqa: E402
from cute_impl.blocks import Coordinates, accumulator, as_matrix, mma_of  # noqa: E402

from .cases import Case  # noqa: E402
from .helpers import assert_allowed  # noqa: E402

DEVICE = "cuda"
CUTE = port("cute")
ADA, HOPPER = Target.named("ada"), Target.named("hopper")
MASKS = [Mask(), Mask.causal(), Mask.causal("top_left"), Mask(20), Mask(9, 12), Mask(9, 12, "top_left")]
LENGTHS = [(100, 100), (70, 130), (130, 70), (1, 90), (90, 1)]


def tile(block_m: int, block_n: int, warps: int, stages: int, **extras: int) -> Tile:
    return Tile(block_m, block_n, warps, stages, tuple(sorted(extras.items())))


def problem_of(head_dim: int, mask: Mask | None = None, len_q: int = 256, len_k: int = 256) -> Problem:
    return Problem(1, 2, 2, len_q, len_k, head_dim, torch.bfloat16, mask or Mask())


def scalars_of(problem: Problem) -> tuple[int, int, int, int, bool, bool]:
    low, high = problem.mask.band(problem.len_q, problem.len_k)
    return problem.len_q, problem.len_k, low or 0, high or 0, low is not None, high is not None


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
def test_rows_that_are_read_are_those_that_see_a_key(mask: Mask, len_q: int, len_k: int) -> None:
    *numbers, has_low, has_high = scalars_of(problem_of(16, mask, len_q, len_k))
    sees = mask.dense(len_q, len_k).any(1).tolist()
    for row_begin in range(0, len_q, 16):
        first, end = seeing_rows(row_begin, *numbers, has_low, has_high)
        for row in range(row_begin, min(row_begin + 16, len_q)):
            assert (int(first) <= row - row_begin < int(end)) == sees[row]


@cute.jit
def numbered_fragments(tile: cute.Tensor, THREADS: cutlass.Constexpr, VECTOR: cutlass.Constexpr) -> None:
    places = fragments(tile, THREADS, VECTOR)
    for thread in range(THREADS):
        for i in cutlass.range_constexpr(cute.size(places, mode=[2])):
            for j in cutlass.range_constexpr(VECTOR):
                places[j, thread, i] = thread * 1000 + i * VECTOR + j


@pytest.mark.parametrize("vector", [1, 4])
def test_fragments_fill_a_tile_and_neighbouring_threads_add_to_neighbouring_places(vector: int) -> None:
    block_m, block_d, threads = 32, 64, 128
    numbers = torch.full((block_m, block_d), -1, dtype=torch.int32)
    numbered_fragments(from_dlpack(numbers), threads, vector)
    elements = block_m * block_d // threads
    assert sorted(numbers.flatten().tolist()) == [t * 1000 + e for t in range(threads) for e in range(elements)]
    first_addition = numbers.flatten()[: vector * threads]
    assert first_addition.tolist() == [t * 1000 + j for t in range(threads) for j in range(vector)]


@cute.jit
def visible_to_threads(
    visible: cute.Tensor, key_begin: int, row_begin: int, len_k: int, low: int, high: int,
    HAS_LOW: cutlass.Constexpr, HAS_HIGH: cutlass.Constexpr, WARPS_N: cutlass.Constexpr, WARPS_M: cutlass.Constexpr,
) -> None:  # fmt: skip
    mma = mma_of(cutlass.BFloat16, WARPS_N, WARPS_M)
    block_n, block_m = visible.shape
    for thread in range(32 * WARPS_N * WARPS_M):
        scores = accumulator(mma, thread, block_n, block_m)
        where = Coordinates(mma, thread, block_n, block_m)
        hide_keys(as_matrix(scores), where, key_begin, row_begin, len_k, low, high, HAS_LOW, HAS_HIGH)
        mine = mma.get_slice(thread).partition_C(visible)
        for i in cutlass.range_constexpr(cute.size(mine)):
            mine[i] = cutlass.Int32(scores[i] == 0.0)


@pytest.mark.parametrize("warps", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_tile_seen_from_its_keys_is_the_masks(mask: Mask, warps: tuple[int, int]) -> None:
    len_q, len_k, low, high, has_low, has_high = scalars_of(problem_of(16, mask, 64, 90))
    dense = mask.dense(len_q, len_k)
    for key_begin in range(0, len_k, 32):
        for row_begin in range(0, len_q, 32):
            visible = torch.full((32, 32), -1, dtype=torch.int32)
            numbers = key_begin, row_begin, len_k, low, high
            visible_to_threads(from_dlpack(visible), *numbers, has_low, has_high, *warps)
            expected = torch.zeros(32, 32, dtype=torch.bool)
            tile_of_mask = dense[row_begin : row_begin + 32, key_begin : key_begin + 32].T
            expected[: tile_of_mask.shape[0]] = tile_of_mask
            assert torch.equal(visible.bool(), expected)


@cute.jit
def stats_to_threads(
    stats: cute.Tensor, out: cute.Tensor, part: cutlass.Constexpr, stage: cutlass.Constexpr, WARPS: cutlass.Constexpr
) -> None:
    mma = mma_of(cutlass.BFloat16, WARPS, 1)
    block_n, part_m = out.shape
    for thread in range(32 * WARPS):
        columns = stats_by_column(mma, thread, stats, block_n, part_m)
        scores = accumulator(mma, thread, block_n, part_m)
        matrix = as_matrix(scores)
        for j in cutlass.range_constexpr(cute.size(matrix, mode=[1])):
            for i in cutlass.range_constexpr(cute.size(matrix, mode=[0])):
                matrix[i, j] = columns[j, 1, (part, stage)]
        mine = mma.get_slice(thread).partition_C(out)
        for i in cutlass.range_constexpr(cute.size(mine)):
            mine[i] = scores[i]


def test_each_thread_reads_the_stats_of_its_columns() -> None:
    block_n, part_m, parts, stages, warps = 32, 16, 3, 2, 2
    stats = torch.arange(stages * 2 * parts * part_m, dtype=torch.float32).view(stages, 2, parts * part_m)
    for part in range(parts):
        for stage in range(stages):
            out = torch.full((block_n, part_m), -1.0)
            stats_to_threads(from_dlpack(stats.permute(1, 2, 0)), from_dlpack(out), part, stage, warps)
            assert torch.equal(out, stats[stage, 1].unflatten(0, (parts, part_m))[part].expand(block_n, part_m))


def test_head_dims_are_padded_to_what_warps_share() -> None:
    padded = {d: backward_block_d(problem_of(d)) for d in (16, 24, 40, 64, 72, 128, 136, 200, 256)}
    assert padded == {16: 16, 24: 32, 40: 64, 64: 64, 72: 96, 128: 128, 136: 192, 200: 256, 256: 256}


def test_warps_share_dq_out_so_that_they_read_least() -> None:
    assert dq_warps(problem_of(64), Tile(64, 128, 8)) == 4
    assert dq_warps(problem_of(64), Tile(32, 128, 4)) == 2
    assert dq_warps(problem_of(128), Tile(64, 128, 8)) == 2
    assert dq_warps(problem_of(16), Tile(64, 64, 4)) == 4
    assert dq_warps(problem_of(96), Tile(32, 128, 8)) is None
    assert dq_warps(problem_of(96), Tile(32, 96, 6)) is None
    assert dq_warps(problem_of(96), Tile(96, 96, 6)) == 3


def test_the_tile_of_dq_is_the_extras_or_one_that_fits() -> None:
    assert dq_tile(problem_of(64), tile(64, 128, 8, 2)) == Tile(64, 64, 4, 2)
    assert dq_tile(problem_of(64), Tile(16, 16, 1, 1)) == Tile(16, 16, 1, 1)
    assert dq_tile(problem_of(64), tile(64, 128, 8, 2, dq_block_m=128, dq_warps=8)) == Tile(128, 64, 8, 2)
    for head_dim in range(16, 257, 8):
        parts = backward_memory(problem_of(head_dim), Tile(64, 64, 4))["dq_kernel"]
        assert sum(parts.values()) <= ADA.smem_per_block


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (Tile(96, 64, 4), "divide 128"),
        (Tile(64, 96, 4), "block_n must be a multiple of 16·4"),
        (tile(64, 64, 4, 2, key_warps=3), "key_warps must divide warps"),
        (tile(96, 32, 6, 1, key_warps=2), "warps / key_warps must be a power of two"),
        (tile(16, 64, 4, 2, key_warps=2), "of 16·2"),
        (Tile(128, 16, 1), "at most 64 for each warp"),
        (tile(32, 256, 4, 1, v_in_registers=1), "V must fit"),
        (tile(64, 64, 4, 2, key_warps=2, parts=2), "1 unless all warps are key_warps"),
        (tile(64, 64, 4, 2, parts=8), "block_m / parts"),
        (tile(32, 128, 8, 2, atomics=1), "cannot share out dq, 32 rows of 96"),
        (tile(64, 64, 4, 2, dq_block_m=64, dq_warps=8), "whole rows of scores"),
    ],
    ids=str,
)
def test_a_shape_that_the_kernels_cannot_do_is_refused_with_the_reason(one: Tile, reason: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(reason)):
        check_backward(problem_of(96), ADA, one)


def test_memory_is_told_part_by_part() -> None:
    parts = backward_memory(problem_of(256), tile(64, 64, 8, 2, atomics=1, key_warps=4))["dkdv_kernel"]
    assert parts == {"K": 32768, "V": 32768, "Q, dO": 131072, "shift, delta": 1024, "dS": 8192, "P": 8192}
    parts = backward_memory(problem_of(128), tile(64, 64, 4, 1, v_in_registers=1))["dkdv_kernel"]
    assert parts == {"K": 16384, "Q, dO": 32768, "shift, delta": 512}


def test_atomics_are_given_up_for_determinism() -> None:
    problem, one = problem_of(64), tile(64, 64, 4, 2, atomics=1)
    names = [launch.name for launch in plan_backward(problem, ADA, one, Switches(), False, False)]
    assert names == ["prepare_kernel", "dkdv_kernel", "cast_kernel"]
    launches = plan_backward(problem, ADA, one, Switches(), False, True)
    assert [launch.name for launch in launches] == ["prepare_kernel", "dkdv_kernel", "dq_kernel"]
    assert not launches[0].kernel.SUM_D
    assert not launches[1].kernel.ADD_DQ


def test_four_neighbours_are_added_at_once_where_the_target_can() -> None:
    one = tile(64, 64, 4, 2, atomics=1)
    for target, vector in ((ADA, 1), (HOPPER, 4)):
        _, dkdv, cast = plan_backward(problem_of(64), target, one, Switches(), False, False)
        assert {dkdv.kernel.VECTOR, cast.kernel.VECTOR} == {vector}
        assert dkdv.kernel.DQ_WARPS == cast.kernel.DQ_WARPS == 2


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_prepare_cuts_the_padded_rows_evenly(head_dim: int) -> None:
    kernel = PrepareKernel("bf16", head_dim, True, True, 0)
    assert kernel.lanes * 8 >= head_dim
    assert 32 % kernel.lanes == 0
    assert 128 % kernel.block_m == 0


BUILDS = [
    pytest.param(ADA, 16, Mask.causal(), id="ada-16-causal"),
    pytest.param(ADA, 40, Mask(9, 12), id="ada-40-window"),
    pytest.param(ADA, 64, Mask(), id="ada-64-full"),
    pytest.param(ADA, 96, Mask(9, 12), id="ada-96-window"),
    pytest.param(ADA, 128, Mask.causal(), id="ada-128-causal"),
    pytest.param(ADA, 256, Mask.causal(), id="ada-256-causal"),
    pytest.param(HOPPER, 64, Mask.causal(), id="hopper-64-causal"),
    pytest.param(HOPPER, 128, Mask(), id="hopper-128-full"),
    pytest.param(Target.named("blackwell"), 192, Mask.causal(), id="blackwell-192-causal"),
    pytest.param(Target.named("geforce_blackwell"), 64, Mask(9, 12), id="geforce-blackwell-64-window"),
]


@pytest.mark.parametrize("atomics", [True, False], ids=["atomics", "separate"])
@pytest.mark.parametrize(("target", "head_dim", "mask"), BUILDS)
def test_the_best_tiles_build_and_take_the_memory_that_was_told(
    target: Target, head_dim: int, mask: Mask, atomics: bool
) -> None:
    problem = problem_of(head_dim, mask)
    best = CUTE.tiles(problem, target, "backward")[0]
    assert best.get("atomics", 0)
    one = best if atomics else replace(best, extra=tuple(pair for pair in best.extra if pair[0] != "atomics"))
    memory = backward_memory(problem, one)
    builds = CUTE.build(problem, target, "backward", tile=one)
    last = "cast_kernel" if atomics else "dq_kernel"
    assert [build.kernel for build in builds] == ["prepare_kernel", "dkdv_kernel", last]
    for build in builds:
        assert 0 < build.registers <= 255
        assert build.shared == sum(memory.get(build.kernel, {}).values())
    ptx = builds[1].ptx
    assert "mma.sync.aligned.m16n8k16" in ptx
    assert "cp.async.cg" in ptx
    assert ("red.relaxed.gpu.global.add" in ptx) == atomics
    assert ("add.v4.f32" in ptx) == (atomics and target is not ADA)


TILES = [
    tile(64, 64, 4, 2),
    tile(64, 64, 4, 2, atomics=1),
    tile(64, 64, 4, 1, atomics=1),
    tile(32, 64, 4, 3, atomics=1),
    tile(128, 64, 4, 2, atomics=1),
    tile(64, 128, 8, 2, atomics=1),
    tile(64, 128, 8, 2, atomics=1, blocks=2, parts=4),
    tile(64, 128, 4, 2, atomics=1, parts=2),
    tile(64, 64, 4, 2, atomics=1, v_in_registers=1),
    tile(64, 64, 4, 2, atomics=1, key_warps=2),
    tile(64, 64, 8, 1, atomics=1, key_warps=4, v_in_registers=1),
    tile(64, 32, 8, 1, key_warps=2, v_in_registers=1, dq_block_m=32, dq_block_n=64, dq_warps=2, dq_stages=1),
]
GPU_TARGETS = [pytest.param(None, id="native"), pytest.param(ADA, id="ada")]


def case_of(q: tuple[int, ...], kv: tuple[int, ...], dtype: torch.dtype, mask: Mask, layout: str = "packed") -> Case:
    return Case("t", "t", q, kv, dtype, mask, layout=tuple((name, layout) for name in ("q", "k", "v", "do")))


def check_gradients(case: Case, **options: Any) -> None:
    """The gradients from the oracle's o and lse, without and with a gradient of lse, in guarded buffers."""
    inputs, problem = case.inputs(DEVICE), case.problem
    truth = Truth(problem, inputs)
    o, lse = (truth.forward()[name].oracle for name in ("o", "lse"))
    o, lse, unseen = o.to(problem.dtype), lse.float(), lse == -torch.inf
    costs = truth.cost_of_delta(o)
    for dlse in (None, inputs.dlse):
        with GuardedBuffers() as guard:
            grads = CUTE.backward(inputs.do, dlse, inputs.q, inputs.k, inputs.v, o, lse, problem, **options)
        assert_allowed(grads, truth.backward(costs, with_dlse=dlse is not None), problem.dtype)
        assert not grads[0][unseen].any()
        assert not guard.faults(), guard.faults()


@pytest.mark.gpu
@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("one", TILES, ids=str)
@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (Mask(), (140, 270)),
        (Mask.causal(), (270, 140)),
        (Mask.causal("top_left"), (140, 270)),
        (Mask(left=20), (270, 270)),
        (Mask(left=9, right=12), (170, 290)),
    ],
    ids=str,
)
def test_gradients_of_every_kind_of_tile_and_mask_with_grouped_heads(
    mask: Mask, lengths: tuple[int, int], one: Tile, target: Target | None
) -> None:
    check_gradients(
        case_of((2, 4, lengths[0], 64), (2, 2, lengths[1], 64), torch.bfloat16, mask), target=target, tile=one
    )


@pytest.mark.gpu
@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 72, 96, 128, 136, 192, 200, 256])
def test_gradients_of_every_candidate_tile(head_dim: int, target: Target | None) -> None:
    case = case_of((1, 2, 150, head_dim), (1, 1, 170, head_dim), torch.float16, Mask.causal(), "bshd")
    for one in CUTE.tiles(case.problem, target or Target.detect(), "backward"):
        check_gradients(case, target=target, tile=one)


@pytest.mark.gpu
@pytest.mark.parametrize("one", [tile(64, 64, 4, 2), tile(64, 64, 4, 2, atomics=1)], ids=str)
@pytest.mark.parametrize("mask", [Mask.causal(), Mask(left=9, corner="top_left")], ids=str)
def test_what_lies_in_rows_that_see_no_key_reaches_no_gradient(mask: Mask, one: Tile) -> None:
    lengths = (270, 140) if mask.right is not None else (170, 150)
    case = case_of((1, 2, lengths[0], 64), (1, 2, lengths[1], 64), torch.bfloat16, mask)
    inputs, problem = case.inputs(DEVICE), case.problem
    sees = mask.dense(*lengths, DEVICE).any(1)
    assert not sees.all()
    o, lse = CUTE.forward(inputs.q, inputs.k, inputs.v, problem)
    results = []
    for content in (0.0, torch.nan):
        q, do = inputs.q.clone(), inputs.do.clone()
        q[:, :, ~sees] = do[:, :, ~sees] = content
        grads = CUTE.backward(do, None, q, inputs.k, inputs.v, o, lse, problem, tile=one, deterministic=True)
        results.append(grads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("one", [tile(64, 64, 4, 2, atomics=1), tile(64, 64, 8, 2, atomics=1, key_warps=4)], ids=str)
def test_dk_and_dv_are_bitwise_repeatable_and_dq_where_it_must_be(one: Tile) -> None:
    case = case_of((8, 4, 384, 64), (8, 4, 384, 64), torch.bfloat16, Mask.causal())
    inputs, problem = case.inputs(DEVICE), case.problem
    o, lse = CUTE.forward(inputs.q, inputs.k, inputs.v, problem)

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        return CUTE.backward(
            inputs.do, inputs.dlse, inputs.q, inputs.k, inputs.v, o, lse, problem, tile=one, deterministic=deterministic
        )

    first, first_added = gradients(True), gradients(False)
    for _ in range(250):
        assert all(torch.equal(a, b) for a, b in zip(gradients(True), first, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(gradients(False)[1:], first_added[1:], strict=True))
