"""FlashAttention-2 in plain PyTorch, and the port around it, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import DTYPE_NAMES, RUNGS, Mask, Problem, Switches, Target, Tile, Unsupported, port
from reference import ReferencePort, naive_forward, tiled_backward, tiled_forward

from .cases import HALVES, LAYOUTS, TENSORS, Case, load_cases
from .helpers import check_case, check_port

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL_DTYPES = (*HALVES, torch.float32)
REFERENCE = ReferencePort()

CASES = load_cases(small=DEVICE == "cpu", dtypes=ALL_DTYPES)


def case_of(q: tuple[int, ...], kv: tuple[int, ...], dtype: torch.dtype, mask: Mask, layout: str = "packed") -> Case:
    name = f"{q}-{kv}-{DTYPE_NAMES[dtype]}-{mask}-{layout}"
    return Case(name, "", q, kv, dtype, mask, layout=tuple((tensor, layout) for tensor in TENSORS))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_that_broke_a_kernel_in_public(case: Case) -> None:
    check_case(case, REFERENCE, DEVICE)


MASKS = (
    Mask.causal(),
    Mask.causal("top_left"),
    Mask(left=20, right=0),
    Mask(left=7, right=40),
    Mask(left=0, right=0, corner="top_left"),
    Mask(left=33),
    Mask(right=70, corner="top_left"),
)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("lengths", [(75, 75), (40, 130), (130, 40)], ids=str)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=DTYPE_NAMES.get)
def test_windows_and_corners_with_grouped_heads(mask: Mask, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    case = case_of((1, 4, lengths[0], 32), (1, 2, lengths[1], 32), dtype, mask)
    check_port(REFERENCE, case.inputs(DEVICE), case.problem, tile=Tile(32, 32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=DTYPE_NAMES.get)
def test_any_layout_in_memory(layout: str, dtype: torch.dtype) -> None:
    case = case_of((2, 2, 37, 24), (2, 2, 50, 24), dtype, Mask.causal(), layout)
    check_port(REFERENCE, case.inputs(DEVICE), case.problem, tile=Tile(16, 32))


@pytest.mark.parametrize("tile", [Tile(16, 16), Tile(48, 16), Tile(16, 80), Tile(7, 5), Tile(256, 256)], ids=str)
def test_any_tile(tile: Tile) -> None:
    case = case_of((1, 2, 70, 40), (1, 1, 61, 40), torch.bfloat16, Mask(left=30, right=3))
    check_port(REFERENCE, case.inputs(DEVICE), case.problem, tile=tile)


SWITCHES = [Switches.rung(rung) for rung in RUNGS] + [Switches().without(rung) for rung in RUNGS[1:]]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask(left=9, right=2, corner="top_left")], ids=str)
def test_every_rung_and_every_switch_off(switches: Switches, mask: Mask) -> None:
    case = case_of((1, 2, 70, 16), (1, 2, 45, 16), torch.float16, mask)
    check_port(REFERENCE, case.inputs(DEVICE), case.problem, switches=switches)


@pytest.mark.parametrize("factor", [0.3, 2.5])
def test_a_scale_of_ones_own(factor: float) -> None:
    case = case_of((1, 2, 33, 16), (1, 2, 40, 16), torch.float32, Mask())
    problem = Problem(1, 2, 2, 33, 40, 16, torch.float32, Mask(), scale=factor)
    check_port(REFERENCE, case.inputs(DEVICE), problem)


def test_both_directions_are_bitwise_repeatable() -> None:
    case = case_of((2, 4, 90, 64), (2, 2, 90, 64), torch.bfloat16, Mask.causal())
    i, problem = case.inputs(DEVICE), case.problem
    runs = []
    for _ in range(3):
        o, lse = REFERENCE.forward(i.q, i.k, i.v, problem)
        runs.append((o, lse, *REFERENCE.backward(i.do, i.dlse, i.q, i.k, i.v, o, lse, problem)))
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest tensor that any operator returns has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


@pytest.mark.parametrize("mask", [Mask(), Mask.causal()], ids=str)
def test_no_tensor_is_larger_than_the_inputs(mask: Mask) -> None:
    length, head_dim = 768, 16
    case = case_of((1, 1, length, head_dim), (1, 1, length, head_dim), torch.float32, mask)
    i, problem = case.inputs(), case.problem
    with LargestTensor() as tiled:
        o, lse = tiled_forward(i.q, i.k, i.v, problem, block_m=64, block_n=64)
        tiled_backward(i.do, i.dlse, i.q, i.k, i.v, o, lse, problem, block_m=64, block_n=64)
    assert tiled.numel == length * head_dim
    with LargestTensor() as naive:
        naive_forward(i.q, i.k, i.v, problem)
    assert naive.numel == length * length


def test_the_port_is_found_by_name_and_says_what_it_is() -> None:
    found = port("reference")
    problem = Problem(1, 1, 1, 8, 8, 256, torch.float32)
    for target in ("ada", "blackwell"):
        assert found.unsupported(problem, Target.named(target)) is None
        assert len(found.tiles(problem, Target.named(target), "backward")) > 1
    with pytest.raises(Unsupported, match="reference has no kernels to compile"):
        found.build(problem, Target.named("ada"), "forward")


def test_a_tensor_that_is_not_the_problems_is_refused() -> None:
    case = case_of((1, 2, 8, 16), (1, 2, 8, 16), torch.float16, Mask())
    i = case.inputs()
    with pytest.raises(ValueError, match=r"^v must have shape \(1, 2, 8, 16\), got \(1, 2, 7, 16\)"):
        REFERENCE.forward(i.q, i.k, i.v[:, :, :7], case.problem)
    with pytest.raises(TypeError, match=r"^k must be torch.float16, got torch.float32"):
        REFERENCE.forward(i.q, i.k.float(), i.v, case.problem)
