"""The Triton port compiled for every target, none of which has to be here, and the budget held to its builds."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from common import Build, Direction, Mask, Problem, Switches, Target, Tile, Unsupported, port
from harness.compilers import compiler_by
from harness.environment import INTERPRET
from harness.isolation import Here, Worker
from harness.spills import Built, Spills
from triton_impl import budget
from triton_impl.launch import block_d, row_tile

from .triton_builds import Request

ROOT = Path(__file__).resolve().parent.parent
DIRECTIONS = get_args(Direction)
TRITON = port("triton")


def shipped(target: str, *head_dims: int) -> list[Request]:
    return [Request(target, direction, d, causal=True) for d in head_dims for direction in DIRECTIONS]


SHIPPED = [*shipped("ada", 64, 128, 256), *shipped("hopper", 64), *shipped("geforce_blackwell", 64)]
SHIPPED += [Request("hopper", "forward", 128, causal=True), Request("blackwell", "forward", 64, causal=True)]


def cut(
    target: str,
    direction: Direction,
    d: int,
    m: int,
    n: int,
    stages: int,
    warps: int = 4,
    dtype: str = "bf16",
    **extra: int,
) -> Request:
    tile = {"block_m": m, "block_n": n, "warps": warps, "stages": stages, **extra}
    return Request(target, direction, d, tile, dtype, edges=False)


# Each for what it alone shows: one stage and several, rows fewer and more than columns, heads that are no power of two,
# IEEE fp32, tiles that are too small for the target's asynchronous products, and dq by atomics.
TILES = [
    cut("ada", "forward", 16, 128, 64, 1),
    cut("ada", "forward", 40, 64, 64, 2),
    cut("ada", "forward", 64, 16, 64, 2, warps=1),
    cut("ada", "forward", 256, 32, 32, 1),
    cut("ada", "forward", 64, 32, 32, 3, dtype="fp32"),
    cut("ada", "forward", 256, 16, 16, 1, dtype="fp32"),
    cut("ada", "backward", 16, 64, 64, 1),
    cut("ada", "backward", 128, 64, 64, 1),
    cut("ada", "backward", 64, 64, 64, 3),
    cut("ada", "backward", 32, 32, 32, 1, dtype="fp32"),
    cut("ada", "backward", 64, 16, 16, 2, dtype="fp32"),
    cut("ada", "backward", 64, 32, 128, 2, atomics=1),
    cut("ada", "backward", 128, 64, 64, 2, atomics=1),
    cut("ada", "backward", 40, 16, 32, 1, atomics=1),
    cut("ada", "backward", 32, 32, 32, 2, dtype="fp32", atomics=1),
    cut("ada", "forward", 128, 128, 32, 2, lazy_rescale=1),
    cut("hopper", "forward", 64, 128, 64, 3, warps=8, lazy_rescale=1),
    cut("blackwell", "forward", 64, 128, 64, 2, lazy_rescale=1),
    cut("geforce_blackwell", "forward", 128, 64, 64, 3),
    cut("hopper", "forward", 128, 64, 32, 2),
    cut("hopper", "backward", 64, 64, 64, 3),
    cut("hopper", "backward", 256, 32, 64, 1),
    cut("hopper", "backward", 128, 64, 128, 2, warps=8, atomics=1),
    cut("blackwell", "backward", 64, 64, 64, 2, atomics=1),
    cut("blackwell", "forward", 64, 128, 64, 1, warps=8),
    cut("blackwell", "forward", 64, 32, 32, 2),
    cut("blackwell", "backward", 64, 64, 64, 2),
    cut("blackwell", "backward", 128, 64, 64, 1),
]
REQUESTS = SHIPPED + TILES

# Batches, heads, groups and lengths of one kernel: a 1, a multiple of 16 and an odd number of each.
SHAPES = [
    {},
    {"batch": 3, "heads_q": 8, "heads_kv": 2},
    {"batch": 16, "heads_q": 16, "heads_kv": 1, "len_q": 1, "len_k": 4096},
    {"heads_q": 3, "heads_kv": 3, "len_q": 300, "len_k": 77},
    {"batch": 2, "len_q": 16, "len_k": 1},
]
UNSEEING = 3  # from this one on some rows see no key


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything this file builds, built once for all the workers of a run."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    path = shared / "triton_builds.json"
    with (shared / "triton_builds.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            done = subprocess.run(
                [sys.executable, "-m", "tests.triton_builds"],
                input=json.dumps({"builds": [dataclasses.asdict(one) for one in REQUESTS], "shapes": SHAPES}),
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=environment,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            path.write_text(done.stdout)
    return json.loads(path.read_text())


def kernels(answers: dict[str, Any], request: Request) -> list[Build]:
    built = answers["builds"][REQUESTS.index(request)]
    extras = [tuple(map(tuple, one["tile"]["extra"])) for one in built]
    return [
        Build(**(one | {"tile": Tile(**(one["tile"] | {"extra": e}))})) for one, e in zip(built, extras, strict=True)
    ]


@pytest.mark.parametrize("request_", SHIPPED, ids=str)
def test_shipped_tiles_build_with_the_targets_instructions_inside_its_shared_memory(
    answers: dict[str, Any], request_: Request
) -> None:
    target = Target.named(request_.target)
    built = kernels(answers, request_)
    best = TRITON.tiles(request_.problem, target, request_.direction)[0]
    last = "cast_kernel" if best.get("atomics", 0) else "dq_kernel"
    names = ["forward_kernel"] if request_.direction == "forward" else ["prepare_kernel", "dkdv_kernel", last]
    assert [one.kernel for one in built] == names
    tiles = {
        "forward_kernel": best,
        "dkdv_kernel": dataclasses.replace(best, extra=()),
        "cast_kernel": dataclasses.replace(best, extra=()),
        "dq_kernel": budget.dq_tile(best),
        "prepare_kernel": row_tile(request_.problem),
    }
    for one in built:
        assert (one.target, one.tile, one.ptx) == (target.name, tiles[one.kernel], f".target {target.sm}")
        assert 0 < one.registers <= 255
        assert one.shared <= target.smem_per_block
        if one.kernel not in ("prepare_kernel", "cast_kernel"):
            assert target.instruction in one.instructions
            assert not {"mma.sync", "wgmma", "tcgen05"} - {target.instruction} & set(one.instructions)
            assert ("cp.async" in one.instructions) == (one.tile.stages > 1)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_the_budget_is_what_the_build_takes_and_at_most_half_as_much_again(
    answers: dict[str, Any], request_: Request
) -> None:
    built = {one.kernel: one for one in kernels(answers, request_)}
    target = Target.named(request_.target)
    tile = TRITON.tiles(request_.problem, target, request_.direction)[0]
    if request_.tile is not None:
        tile = Tile.parse(request_.tile)
    parts = budget.shared_memory(request_.problem, target, request_.direction, tile)
    measured = set(parts) - ({"dq_kernel"} if tile.get("atomics", 0) else set())
    assert measured == set(built) - {"prepare_kernel", "cast_kernel"}
    for kernel in measured:
        sizes = parts[kernel]
        assert built[kernel].shared <= sum(sizes.values()) <= 1.5 * built[kernel].shared, (kernel, sizes)
    if "cast_kernel" in built:
        assert built["cast_kernel"].shared <= 4 * tile.block_m * block_d(request_.problem)


@pytest.mark.parametrize("request_", [one for one in TILES if one.target in ("ada", "geforce_blackwell")], ids=str)
def test_no_tile_for_a_geforce_card_leaves_mma_sync(answers: dict[str, Any], request_: Request) -> None:
    for one in kernels(answers, request_):
        assert not {"wgmma", "tcgen05"} & set(one.instructions)
        assert one.shared <= 101_376
        if one.kernel not in ("prepare_kernel", "cast_kernel"):
            # IEEE fp32 has no matrix instruction at all.
            assert ("mma.sync" in one.instructions) == (request_.dtype != "fp32")
            assert ("cp.async" in one.instructions) == (one.tile.stages > 1)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_the_instruction_that_a_launch_is_counted_by_is_in_its_code(answers: dict[str, Any], request_: Request) -> None:
    tile = None if request_.tile is None else Tile.parse(request_.tile)
    works = TRITON.launches(request_.problem, Target.named(request_.target), request_.direction, tile=tile)
    for work, built in zip(works, kernels(answers, request_), strict=True):
        assert work.kernel == built.kernel
        assert {"mma.sync", "wgmma", "tcgen05"} & set(built.instructions) == {work.instruction} - {"", "fma"}


@pytest.mark.parametrize("request_", SHIPPED, ids=str)
def test_shipped_tiles_spill_no_more_than_they_did(answers: dict[str, Any], request_: Request) -> None:
    recorded = Spills()
    for one in kernels(answers, request_):
        about = "triton", compiler_by(Here(), "triton"), request_.target, "causal", request_.head_dim, one.kernel
        before = recorded.before(Built(*about, one.spills))
        found = f"{one.kernel} D={request_.head_dim} {one.tile}: {one.registers} registers, {one.spills} B spilled"
        print(found)
        assert before is not None, f"{found}; nothing is recorded: harness compile --record"
        assert one.spills <= before, f"{found}, {before} B allowed"


def test_run_time_numbers_make_no_new_kernel(answers: dict[str, Any]) -> None:
    keys = answers["keys"]
    assert set(keys) == {"forward_kernel", "prepare_kernel", "dkdv_kernel", "dq_kernel", "cast_kernel"}
    for kernel, found in keys.items():
        assert len(found) == len(SHAPES)
        # The backward's walks are compiled once more for problems in which some row sees no key.
        parts = [found[:UNSEEING], found[UNSEEING:]] if kernel in ("dkdv_kernel", "dq_kernel") else [found]
        assert all(len(set(part)) == 1 for part in parts), kernel


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU machine the process does not interpret")
def test_an_interpreting_process_builds_in_a_fresh_one() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    problem = Problem(1, 1, 1, 64, 64, 16, torch.float16, Mask.causal())
    (built,) = TRITON.build(problem, Target.named("ada"), "forward", tile=Tile(16, 16, warps=1, stages=1))
    assert (built.kernel, built.target, built.tile) == ("forward_kernel", "ada", Tile(16, 16, warps=1, stages=1))
    assert "mma.sync" in built.instructions
    assert ".target sm_89" in built.ptx
    assert built.seconds > 0
    assert built.ptx not in repr(built)
    (again,) = TRITON.build(problem, Target.named("ada"), "forward", tile=Tile(16, 16, warps=1, stages=1))
    assert again.cached


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_build_of_a_tile_that_does_not_fit_is_refused_before_compiling(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_nothing(*arguments: Any) -> None:
        raise AssertionError("the compiler was reached")

    monkeypatch.setattr("triton_impl.port.build", compile_nothing)
    problem = Problem(1, 1, 1, 256, 256, 256)
    with pytest.raises(Unsupported, match="sm_89 gives 101376 B"):
        TRITON.build(problem, Target.named("ada"), direction, tile=Tile(128, 128))


def test_the_refusal_of_a_tile_of_dq_names_that_tile() -> None:
    problem = Problem(1, 1, 1, 256, 256, 256)
    large = Tile(32, 32, stages=2, extra=(("dq_block_m", 64), ("dq_block_n", 128), ("dq_stages", 3)))
    with pytest.raises(Unsupported, match=r"dq_kernel: tile 32x32 .*dq_block_n128.* needs Q \d+ \+ dO \d+ \+ K"):
        TRITON.check_tile(problem, Target.named("ada"), "backward", large)


def test_sums_that_tensor_memory_does_not_hold_are_refused_with_the_arithmetic() -> None:
    problem, tile = Problem(1, 1, 1, 256, 256, 192, mask=Mask.causal()), Tile(64, 64, warps=8, stages=1)
    with pytest.raises(Unsupported, match=r"dk 256 \+ dv 256 \+ scores 64 = 576 columns of tensor .* sm_100a has 512"):
        TRITON.check_tile(problem, Target.named("blackwell"), "backward", tile)
    TRITON.check_tile(problem, Target.named("hopper"), "backward", tile)


def compiled_unchecked(problem: Problem, target: Target, tile: Tile) -> str:
    """What is said, in a process that compiles, of a tile that `check_tile` would have refused."""
    from triton_impl.build import _compile, plan

    launch, dtypes = plan(problem, target, "backward", tile, Switches())[1]
    try:
        return str(_compile(launch, dtypes, target))
    except Unsupported as reason:
        return str(reason)


def test_a_kernel_that_the_compiler_made_a_trap_of_is_no_build() -> None:
    problem, tile = Problem(1, 1, 1, 256, 256, 192, mask=Mask.causal()), Tile(64, 64, warps=8, stages=1)
    worker = Worker(environment={INTERPRET: "0"})
    try:
        said = worker.call(compiled_unchecked, problem, Target.named("blackwell"), tile)
    finally:
        worker.close()
    assert "no tensor memory for dkdv_kernel, tile 64x64 w8 s1" in said


@pytest.mark.parametrize("target", ["ada", "hopper", "geforce_blackwell", "blackwell"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_there_is_a_tile_for_every_head_dim_and_all_of_them_fit(
    target: str, dtype: torch.dtype, direction: Direction
) -> None:
    chip = Target.named(target)
    for head_dim in range(16, 257, 8):
        for mask in (Mask(), Mask.causal()):
            problem = Problem(1, 1, 1, 64, 64, head_dim, dtype, mask)
            tiles = TRITON.tiles(problem, chip, direction)
            assert tiles
            assert len(tiles) == len(set(tiles))
            for one in tiles:
                TRITON.check_tile(problem, chip, direction, one)


def found_when_launched(problem: Problem, target: Target, native: Target, tile: Tile) -> list[tuple[str, str, bool]]:
    """Of each kernel, in a process that compiles: its name, whose instructions it has, and whether Triton's launcher
    finds what was compiled ahead on disk, when it is given tensors and the problem's own numbers."""
    import triton

    from triton_impl.ahead import Code, driver_of
    from triton_impl.build import plan
    from triton_impl.launch import compile_options

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    found = []
    for launch, dtypes in plan(problem, target, "backward", tile, Switches()):
        Code.of(launch, dtypes, target).compile(native.sm)
        launch.kernel.device_caches.clear()
        tensors = [torch.empty(64, dtype=dtype) for dtype in dtypes]
        with driver_of(native):
            options = compile_options(launch.tile.warps, launch.tile.stages, target, native)
            compiled = launch.kernel.warmup(*tensors, *launch.numbers, grid=(1,), **launch.constants, **options)
        assert hits.pop(0) is False
        found.append((launch.kernel.__name__, compiled.metadata.arch, hits.pop()))
    return found


@pytest.mark.parametrize(("target", "arch", "last"), [("ada", "sm89", "cast_kernel"), ("hopper", "sm90", "dq_kernel")])
def test_what_was_compiled_ahead_is_what_a_launch_looks_for(target: str, arch: str, last: str, tmp_path: Path) -> None:
    problem = Problem(2, 4, 2, 300, 333, 40, torch.bfloat16, Mask.causal())
    worker = Worker(environment={INTERPRET: "0", "TRITON_CACHE_DIR": str(tmp_path)})
    try:
        tile = Tile(32, 32, 4, 2, (("atomics", 1),) if last == "cast_kernel" else ())
        about = Target.named(target), Target.named("hopper"), tile
        found = worker.call(found_when_launched, problem, *about)
    finally:
        worker.close()
    assert found == [(kernel, arch, True) for kernel in ("prepare_kernel", "dkdv_kernel", last)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process compiles")
def test_an_interpreting_process_has_nothing_to_compile_ahead() -> None:
    problem = Problem(1, 1, 1, 64, 64, 64)
    assert TRITON.kernels(problem, Target.named("ada"), "forward") == ()
