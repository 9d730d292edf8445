"""What is the Triton backward's own: dq by atomics, in the interpreter and compiled."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch

from common import Mask, Problem, Switches, Target, Tile, Unsupported, port
from triton_impl.backward import fragment_order, plan_backward
from triton_impl.launch import block_d

from .helpers import check_port
from .subjects import GPU, case_of

DEVICE = "cuda" if GPU else "cpu"
TRITON = port("triton")
ADA, HOPPER = Target.named("ada"), Target.named("hopper")


def tile(block_m: int, block_n: int, warps: int = 4, stages: int = 2, **extra: int) -> Tile:
    """A tile whose backward adds up dq by atomics."""
    return Tile(block_m, block_n, warps, stages, tuple(sorted({"atomics": 1, **extra}.items())))


CASES = [
    # Several tiles of queries and keys, a group, rows that see no key; widths that are no power of two; fp32.
    ((1, 4, 70, 64), (1, 2, 90, 64), torch.bfloat16, Mask.causal(), tile(32, 32)),
    ((2, 1, 90, 64), (2, 1, 40, 64), torch.float16, Mask.causal(), tile(32, 16)),
    ((1, 2, 65, 40), (1, 1, 33, 40), torch.bfloat16, Mask(), tile(64, 64)),
    ((1, 1, 130, 128), (1, 1, 50, 128), torch.float16, Mask.causal("top_left"), tile(64, 64, warps=8)),
    ((1, 2, 60, 96), (1, 1, 70, 96), torch.bfloat16, Mask(left=9, right=12), tile(16, 32, warps=8)),
    ((1, 1, 33, 16), (1, 1, 20, 16), torch.float16, Mask(left=20), tile(16, 16)),
    ((1, 1, 1, 256), (1, 1, 40, 256), torch.bfloat16, Mask.causal(), tile(16, 16)),
    ((1, 2, 50, 40), (1, 1, 40, 40), torch.float32, Mask.causal(), tile(32, 16)),
    ((1, 1, 40, 128), (1, 1, 40, 128), torch.float32, Mask(), tile(16, 16)),
]


@pytest.mark.parametrize("target", [ADA, HOPPER], ids=str)
@pytest.mark.parametrize(("q", "kv", "dtype", "mask", "one"), CASES)
def test_dq_by_atomics_is_right_in_the_order_of_each_target(
    q: tuple[int, ...], kv: tuple[int, ...], dtype: torch.dtype, mask: Mask, one: Tile, target: Target
) -> None:
    case = case_of(q, kv, dtype, mask)
    if GPU and not target.runs_on(Target.detect()):
        pytest.skip(f"the card runs no code for {target}")
    check_port(TRITON, case.inputs(DEVICE), case.problem, target=target, tile=one)


@pytest.mark.parametrize("rung", ["naive", "skip", "exp2"])
def test_dq_by_atomics_is_right_on_the_rungs(rung: str) -> None:
    case = case_of((1, 2, 50, 64), (1, 1, 60, 64), torch.float16, Mask(left=9, right=12))
    switches = dataclasses.replace(Switches.rung(rung), tiles=True)
    check_port(TRITON, case.inputs(DEVICE), case.problem, tile=tile(32, 32), switches=switches, dlse=(True,))


def test_atomics_are_given_up_for_determinism() -> None:
    problem, one = Problem(1, 2, 2, 128, 128, 64), tile(32, 64, dq_block_m=64)
    layout = torch.empty(problem.q_shape, device="meta").stride()
    for deterministic, last in ((False, "cast_kernel"), (True, "dq_kernel")):
        launches = plan_backward(problem, ADA, one, Switches(), False, deterministic, *[layout] * 8)
        names = ["prepare_kernel", "dkdv_kernel", last]
        assert [launch.kernel.__name__ for launch in launches] == names
        works = TRITON.launches(problem, ADA, "backward", tile=one, deterministic=deterministic)
        assert [work.kernel for work in works] == names
        assert works[1].products == (4 if deterministic else 5)


def test_more_rows_of_queries_than_what_is_stored_for_them_is_padded_to_are_refused() -> None:
    for one in (Tile(256, 16), Tile(16, 16, extra=(("dq_block_m", 256),))):
        with pytest.raises(Unsupported, match="at most 128 rows of queries"):
            TRITON.check_tile(Problem(1, 1, 1, 512, 512, 16), ADA, "backward", one)


@pytest.mark.parametrize("target", [ADA, HOPPER, Target.named("blackwell")], ids=str)
def test_every_tile_is_cut_into_whole_fragments(target: Target) -> None:
    powers = [2**i for i in range(6)]
    for head_dim, rows, warps in itertools.product((16, 24, 64, 256), (16, 32, 64, 128), powers):
        problem = Problem(1, 1, 1, 64, 64, head_dim)
        order = fragment_order(problem, target, tile(rows, 64, warps))
        assert rows % (16 * order["ROW_WARPS"]) == 0
        assert block_d(problem) % (8 * order["COLUMN_WARPS"] * order["GROUPS"]) == 0


def test_atomics_with_products_on_two_instructions_are_refused() -> None:
    problem = Problem(1, 1, 1, 512, 512, 64)
    with pytest.raises(Unsupported, match=r"on wgmma as the scores are, not on mma\.sync"):
        TRITON.check_tile(problem, HOPPER, "backward", tile(32, 128))
    TRITON.check_tile(problem, ADA, "backward", tile(32, 128))


@pytest.mark.parametrize(
    ("target", "head_dim", "one"),
    [
        (ADA, 64, tile(32, 128)),
        (ADA, 64, tile(64, 64)),
        (ADA, 128, tile(64, 64)),
        (HOPPER, 64, tile(64, 64)),
        (HOPPER, 128, tile(64, 128, warps=8)),
    ],
    ids=str,
)
def test_the_order_of_dq_is_the_compilers_so_that_nothing_is_exchanged(
    target: Target, head_dim: int, one: Tile
) -> None:
    problem = Problem(1, 1, 1, 256, 256, head_dim)
    # One loop, where there are two with edges.
    dkdv = next(
        x
        for x in TRITON.build(problem, target, "backward", tile=one, switches=Switches(edges=False))
        if "dkdv" in x.kernel
    )
    vector = fragment_order(problem, target, one)["VECTOR"]
    added = re.findall(r"red\.\S*global\S*add\S*", dkdv.ptx)
    assert len(added) == one.block_m * head_dim // (32 * one.warps) // vector
    assert all((".v4" in instruction) == (vector == 4) for instruction in added)
    # An exchange among threads would go through shared memory, between the product and the first sum.
    before = dkdv.ptx[: dkdv.ptx.index(added[0])]
    assert "st.shared" not in before[before.rindex("mma") :]
