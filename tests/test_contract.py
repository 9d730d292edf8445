"""What the contract refuses, argument by argument, before anything is allocated; and what its parts tell."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import common.ports
from common import (
    DTYPE_NAMES,
    Form,
    GuardedBuffers,
    Mask,
    Port,
    Problem,
    Switches,
    Target,
    Tile,
    TileTable,
    Unsupported,
    attention,
    empty,
    empty_like,
    port,
    port_names,
)
from common.target import TARGETS
from reference.port import ReferencePort

PROBLEM = Problem(batch=2, heads_q=4, heads_kv=2, len_q=5, len_k=7, head_dim=16)
ADA = Target.named("ada")
ORDER = [target.name for target in TARGETS]


def test_two_lengths_that_no_integer_of_the_kernels_adds_up_are_refused() -> None:
    Problem(1, 1, 1, 700, 2**31 - 2000, 16)
    with pytest.raises(ValueError, match=r"len_q \+ len_k must be <= 2147483135, got 700 \+ 2147483000"):
        Problem(1, 1, 1, 700, 2147483000, 16)


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("ada", ["ada", "hopper", "geforce_blackwell", "blackwell"]),
        ("hopper", ["hopper"]),
        ("geforce_blackwell", ["geforce_blackwell"]),
        ("blackwell", ["blackwell"]),
    ],
)
def test_a_path_runs_on_its_own_card_and_ada_s_on_later_ones(name: str, cards: list[str]) -> None:
    assert [card.name for card in TARGETS if Target.named(name).runs_on(card)] == sorted(cards, key=ORDER.index)


class NothingRuns(TorchDispatchMode):
    """Every operation on tensors, an allocation as well, fails the test."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{func} ran before the arguments were refused")


class Untouched(Port):
    """A port that validates as every port does, and must not be reached."""

    name = "untouched"

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        return None

    def tiles(self, problem: Problem, target: Target, direction: str) -> list[Tile]:
        return [Tile(16, 16)]

    def _forward(self, *arguments: Any) -> Any:
        raise AssertionError("the kernels were reached")

    _backward = _forward


@pytest.fixture(scope="module", autouse=True)
def _interpreter_was_tried() -> None:
    port("triton")  # when it is first asked for, it tries its interpreter out


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block raises exactly `kind`, its message holds the words, and no operation ran before."""
    with NothingRuns(), pytest.raises(kind) as caught:
        yield
    assert caught.type is kind
    for word in words:
        assert word in str(caught.value)


def tensors(problem: Problem = PROBLEM, *, one_head: bool = False) -> dict[str, Any]:
    """The arguments of a backward by name, all right."""
    shapes = dict.fromkeys(("do", "q", "o"), problem.q_shape) | dict.fromkeys("kv", problem.kv_shape)
    found = {name: torch.zeros(shape, dtype=problem.dtype) for name, shape in shapes.items()}
    found |= {name: torch.zeros(problem.lse_shape) for name in ("lse", "dlse")}
    return {name: tensor[:, 0] for name, tensor in found.items()} if one_head else found


def call_from_tensors(t: dict[str, Any], **options: Any) -> None:
    Problem.from_tensors(t["q"], t["k"], t["v"], **options)


def call_attention(t: dict[str, Any], **options: Any) -> None:
    attention(t["q"], t["k"], t["v"], **({"impl": "reference"} | options))


def call_forward(t: dict[str, Any], problem: Any = PROBLEM, **options: Any) -> None:
    Untouched().forward(t["q"], t["k"], t["v"], problem, **options)


def call_backward(t: dict[str, Any], problem: Any = PROBLEM, **options: Any) -> None:
    Untouched().backward(t["do"], t["dlse"], t["q"], t["k"], t["v"], t["o"], t["lse"], problem, **options)


ALL = ("do", "dlse", "q", "k", "v", "o", "lse")
POSED = [(call, name) for call in (call_from_tensors, call_attention) for name in "qkv"]
GIVEN = [(call_forward, name) for name in "qkv"] + [(call_backward, name) for name in ALL]


def places(pairs: list[tuple[Callable[..., None], str]]) -> list[Any]:
    return [pytest.param(call, name, id=f"{call.__name__.removeprefix('call_')}-{name}") for call, name in pairs]


def nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(tensor))


@pytest.mark.parametrize(("call", "name"), places(POSED + GIVEN))
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (torch.Tensor.tolist, "must be a torch.Tensor, got list"),
        (lambda x: x.float().numpy(), "must be a torch.Tensor, got ndarray"),
        (lambda x: None, "must be a torch.Tensor, got NoneType"),
        (torch.Tensor.to_sparse, "must be a dense strided tensor, got layout torch.sparse_coo"),
        (nested, "must be a dense strided tensor, got a nested one"),
        (torch.Tensor.int, "got torch.int32"),
        (torch.Tensor.double, "got torch.float64"),
        (torch.Tensor.bool, "got torch.bool"),
        (torch.Tensor.cfloat, "got torch.complex64"),
    ],
    ids=["list", "ndarray", "None", "sparse", "nested", "int32", "float64", "bool", "complex64"],
)
def test_what_is_no_tensor_of_an_allowed_dtype_is_refused(
    call: Callable[..., None], name: str, spoil: Callable[[torch.Tensor], Any], words: str
) -> None:
    if name == "dlse" and spoil(torch.zeros(1)) is None:
        pytest.skip("None stands for no gradient of lse")
    arguments = tensors()
    arguments[name] = spoil(arguments[name])
    with refused(TypeError, f"{name} must be", words):
        call(arguments)


@pytest.mark.parametrize(("call", "name"), places(GIVEN))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=DTYPE_NAMES.get)
def test_a_dtype_that_is_not_the_problems_is_refused(call: Callable[..., None], name: str, dtype: torch.dtype) -> None:
    arguments = tensors()
    allowed = arguments[name].dtype
    if dtype == allowed:
        dtype = torch.bfloat16
    arguments[name] = arguments[name].to(dtype)
    with refused(TypeError, f"{name} must be {allowed}, got {dtype}"):
        call(arguments)


@pytest.mark.parametrize(("call", "name"), places(GIVEN))
def test_a_shape_that_is_not_the_problems_is_refused(call: Callable[..., None], name: str) -> None:
    good = tensors()[name]
    wrong = [good[0], good[None], good[:, 0], good.mT]
    for dim in range(good.dim()):
        wrong += [good.narrow(dim, 0, good.shape[dim] - 1), torch.cat([good, good.narrow(dim, 0, 1)], dim)]
    for tensor in wrong:
        arguments = tensors() | {name: tensor}
        with refused(ValueError, f"{name} must have shape {tuple(good.shape)}", f"got {tuple(tensor.shape)}"):
            call(arguments)


@pytest.mark.parametrize(("call", "name"), places(POSED + GIVEN))
def test_tensors_of_two_devices_are_refused(call: Callable[..., None], name: str) -> None:
    arguments = tensors()
    arguments[name] = arguments[name].to("meta")
    # The first one is believed, and the second named.
    first = {"q": "k", "do": "dlse"} if call is call_backward else {"q": "k"}
    named = first.get(name, name) if call is not call_backward or name == "do" else name
    with refused(ValueError, f"{named} must be on", "cpu", "meta"):
        call(arguments)


@pytest.mark.parametrize(("call", "name"), places(GIVEN))
@pytest.mark.parametrize("one_head", [False, True])
def test_one_head_is_left_out_by_all_tensors_or_by_none(call: Callable[..., None], name: str, one_head: bool) -> None:
    problem = replace(PROBLEM, heads_q=1, heads_kv=1)
    arguments = tensors(problem, one_head=one_head)
    arguments[name] = arguments[name][:, 0] if not one_head else arguments[name].unsqueeze(1)
    with refused(ValueError, "must have shape", "as the tensors before it, got"):
        call(arguments, problem)


@pytest.mark.parametrize("call", [call_from_tensors, call_attention])
@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"q": (5, 16)}, "q must be (B, H, N, D) or (B, N, D), got shape (5, 16)"),
        ({"v": (1, 2, 2, 7, 16)}, "v must be (B, H, N, D) or (B, N, D), got shape (1, 2, 2, 7, 16)"),
        ({"k": (2, 7, 16)}, "k must have 4 dimensions as q has, got shape (2, 7, 16)"),
        ({"q": (2, 5, 16)}, "k must have 3 dimensions as q has, got shape (2, 2, 7, 16)"),
        ({"q": (3, 4, 5, 16)}, "k must have the batch of q, 3, got 2"),
        ({"v": (1, 2, 7, 16)}, "v must have the batch of q, 2, got 1"),
        ({"k": (2, 2, 7, 24)}, "k must have the head_dim of q, 16, got 24"),
        ({"v": (2, 2, 7, 24)}, "v must have the head_dim of q, 16, got 24"),
        ({"v": (2, 2, 8, 16)}, "v must have the shape of k, (2, 2, 7, 16), got (2, 2, 8, 16)"),
        ({"v": (2, 4, 7, 16)}, "v must have the shape of k, (2, 2, 7, 16), got (2, 4, 7, 16)"),
        ({"q": (2, 5, 5, 16)}, "heads_q must be a multiple of heads_kv, got 5 and 2"),
        ({"q": (2, 1, 5, 16)}, "heads_q must be a multiple of heads_kv, got 1 and 2"),
        ({"q": (2, 0, 5, 16)}, "heads_q must be >= 1, got 0"),
        ({"k": (2, 0, 7, 16), "v": (2, 0, 7, 16)}, "heads_kv must be >= 1, got 0"),
    ],
    ids=str,
)
def test_shapes_that_do_not_go_together_are_refused(
    call: Callable[..., None], shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    arguments = tensors() | {name: torch.zeros(shape, dtype=PROBLEM.dtype) for name, shape in shapes.items()}
    with refused(ValueError, words):
        call(arguments)


@pytest.mark.parametrize("call", [call_from_tensors, call_attention])
@pytest.mark.parametrize("head_dim", [0, 8, 15, 59, 100, 264])
def test_a_head_dim_that_is_no_multiple_of_8_from_16_to_256_is_refused(
    call: Callable[..., None], head_dim: int
) -> None:
    arguments = {name: torch.zeros(1, 1, 3, head_dim) for name in "qkv"}
    with refused(ValueError, "head_dim must be", str(head_dim)):
        call(arguments)
    with refused(ValueError, "head_dim must be", str(head_dim)):
        replace(PROBLEM, head_dim=head_dim)


@pytest.mark.parametrize("call", [call_from_tensors, call_attention])
@pytest.mark.parametrize("name", ["k", "v"])
def test_mixed_dtypes_are_refused(call: Callable[..., None], name: str) -> None:
    arguments = tensors()
    arguments[name] = arguments[name].half()
    with refused(TypeError, f"{name} must have the dtype of q, torch.bfloat16, got torch.float16"):
        call(arguments)


@pytest.mark.parametrize("call", [call_from_tensors, call_attention, lambda t, scale: replace(PROBLEM, scale=scale)])
@pytest.mark.parametrize(
    ("scale", "kind"),
    [(x, ValueError) for x in (0, 0.0, -1, -0.5, math.inf, -math.inf, math.nan, 1e39, 1e-46, 10**400)]
    + [(x, TypeError) for x in ("0.1", True, [1.0], 1j, torch.ones(()))],
    ids=str,
)
def test_a_scale_that_is_not_finite_and_positive_is_refused(
    call: Callable[..., None], scale: Any, kind: type[Exception]
) -> None:
    arguments = tensors()
    with refused(kind, "scale must be", "finite and > 0" if kind is ValueError else f"got {type(scale).__name__}"):
        call(arguments, scale=scale)


@pytest.mark.parametrize(
    ("field", "value", "kind", "words"),
    [
        *((name, -1, ValueError, "must be >= ") for name in ("batch", "heads_q", "heads_kv", "len_q", "len_k")),
        *((name, 0, ValueError, "must be >= 1, got 0") for name in ("heads_q", "heads_kv", "head_dim")),
        *(
            (name, value, TypeError, f"must be an int, got {type(value).__name__}")
            for name in ("batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim")
            for value in (2.0, "2", True, None)
        ),
        *((name, 2**31, ValueError, "must be <= 21474") for name in ("len_q", "len_k")),
        ("dtype", torch.float64, TypeError, "torch.bfloat16, torch.float32, got torch.float64"),
        ("dtype", "bf16", TypeError, "torch.bfloat16, torch.float32, got 'bf16'"),
        ("dtype", [torch.float16], TypeError, "torch.bfloat16, torch.float32, got [torch.float16]"),
        ("mask", "causal", TypeError, "must be a Mask, got str"),
        ("mask", torch.ones(5, 7), TypeError, "must be a Mask, got Tensor"),
        ("mask", None, TypeError, "must be a Mask, got NoneType"),
    ],
)
def test_a_wrong_field_of_a_problem_is_refused(field: str, value: Any, kind: type[Exception], words: str) -> None:
    with refused(kind, f"{field} must be", words):
        replace(PROBLEM, **{field: value})


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with refused(ValueError, "heads_q must be a multiple of heads_kv, got 6 and 4"):
        replace(PROBLEM, heads_q=6, heads_kv=4)


@pytest.mark.parametrize("direction", ["sideways", "forwards", None, True])
def test_a_direction_there_is_not_is_refused(direction: Any) -> None:
    words = "direction must be one of forward, backward, got"
    triton = port("triton")  # before nothing may run: a language may compute something as it is imported
    for call in (
        PROBLEM.flops,
        PROBLEM.bytes,
        lambda one: Untouched().choose_tile(PROBLEM, ADA, one, None, Switches()),
        lambda one: triton.build(PROBLEM, ADA, one),
    ):
        with refused(ValueError, words, repr(direction)):
            call(direction)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"mask": "causal"}, TypeError, "mask must be a Mask, got str"),
        ({"mask": torch.ones(5, 7, dtype=torch.bool)}, TypeError, "mask must be a Mask, got Tensor"),
        ({"mask": True}, TypeError, "mask must be a Mask, got bool"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [call_from_tensors, call_attention])
def test_a_mask_of_another_kind_is_refused(
    call: Callable[..., None], options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    arguments = tensors()
    with refused(kind, words):
        call(arguments, **options)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"causal": True, "mask": Mask()}, ValueError, "causal=True and mask are two ways to say the same: give one"),
        ({"causal": 1}, TypeError, "causal must be a bool, got int"),
        ({"causal": "no"}, TypeError, "causal must be a bool, got str"),
        ({"causal": None}, TypeError, "causal must be a bool, got NoneType"),
        ({"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
        ({"deterministic": "yes"}, TypeError, "deterministic must be a bool, got str"),
        ({"impl": "torch"}, ValueError, "impl must be one of reference, triton, tilelang, cute, got 'torch'"),
        ({"impl": ""}, ValueError, "got ''"),
        ({"impl": None}, TypeError, "impl must be a str, got NoneType"),
        ({"impl": ["reference"]}, TypeError, "impl must be a str, got list"),
        ({"impl": Untouched()}, TypeError, "impl must be a str, got Untouched"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_option_of_attention_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    arguments = tensors()
    with refused(kind, words):
        call_attention(arguments, **options)


@pytest.mark.parametrize("call", [call_forward, call_backward])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"problem": "b1-h1"}, "problem must be a Problem, got str"),
        ({"problem": None}, "problem must be a Problem, got NoneType"),
        ({"target": "ada"}, "target must be a Target, got str"),
        ({"target": ""}, "target must be a Target, got str"),
        ({"target": []}, "target must be a Target, got list"),
        ({"tile": (64, 64)}, "tile must be a Tile, got tuple"),
        ({"tile": "64x64"}, "tile must be a Tile, got str"),
        ({"switches": "naive"}, "switches must be a Switches, got str"),
        ({"switches": {}}, "switches must be a Switches, got dict"),
    ],
    ids=str,
)
def test_an_option_of_another_kind_is_refused_by_every_port(
    call: Callable[..., None], options: dict[str, Any], words: str
) -> None:
    arguments = tensors()
    with refused(TypeError, words):
        call(arguments, **options)


def test_deterministic_that_is_no_bool_is_refused() -> None:
    arguments = tensors()
    with refused(TypeError, "deterministic must be a bool, got int"):
        call_backward(arguments, deterministic=1)


@pytest.mark.parametrize("call", [call_forward, call_backward])
def test_what_a_port_cannot_do_is_its_reason_and_nothing_runs(
    call: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = tensors()
    monkeypatch.setattr(Untouched, "unsupported", lambda self, problem, target: "only on Tuesdays")
    with refused(Unsupported, "only on Tuesdays"):
        call(arguments)


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(
    ("tile", "words"),
    [
        (Tile(64, 64, extra=(("cluster", 2), ("threads", 128))), "no cluster, threads"),
        (
            Tile(64, 64, extra=(("dq_warp", 4),)),
            "no dq_warp (but atomics, dq_block_m, dq_block_n, dq_stages, dq_warps, lazy_rescale)",
        ),
        (Tile(48, 64), "powers of two"),
        (Tile(4096, 4096), "sm_89 gives 101376 B"),
    ],
    ids=str,
)
def test_a_tile_of_another_port_or_chip_is_refused(name: str, tile: Tile, words: str) -> None:
    t = tensors()
    order = ("q", "k", "v") if name == "forward" else ALL
    with refused(Unsupported, words):
        getattr(port("triton"), name)(*(t[one] for one in order), PROBLEM, target=ADA, tile=tile)


@pytest.mark.parametrize(
    ("warps", "dq_warps"), [(3, 4), (64, 4), (4, 3), (4, 64)], ids=lambda value: f"{value}"
)  # fmt: skip
def test_warps_that_triton_cannot_have_are_refused_for_each_kernel(warps: int, dq_warps: int) -> None:
    tile = Tile(32, 32, warps=warps, extra=(("dq_warps", dq_warps),))
    with refused(Unsupported, "power of two of warps"):
        port("triton").check_tile(PROBLEM, ADA, "backward", tile)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        *(({name: 0}, ValueError, f"{name} must be >= 1, got 0") for name in ("block_m", "block_n", "warps", "stages")),
        ({"block_m": 64.0}, TypeError, "block_m must be an int, got float"),
        ({"warps": True}, TypeError, "warps must be an int, got bool"),
        ({"stages": "2"}, TypeError, "stages must be an int, got str"),
        ({"extra": {"dq_warps": 4}}, TypeError, "extra must be a tuple of (name, value) pairs, got {'dq_warps': 4}"),
        ({"extra": (4,)}, TypeError, "extra must be a tuple of (name, value) pairs, got (4,)"),
        ({"extra": (("dq_warps", "4"),)}, TypeError, "dq_warps must be an int, got str"),
        ({"extra": (("dq_warps", 0),)}, ValueError, "dq_warps must be >= 1, got 0"),
        ({"extra": (("b", 1), ("a", 1))}, ValueError, "extra must be sorted by name and name each once, got b, a"),
        ({"extra": (("a", 1), ("a", 2))}, ValueError, "extra must be sorted by name and name each once, got a, a"),
    ],
    ids=str,
)
def test_a_wrong_field_of_a_tile_is_refused(fields: dict[str, Any], kind: type[Exception], words: str) -> None:
    with refused(kind, f"tile {words}"):
        Tile(**({"block_m": 64, "block_n": 64} | fields))


def test_a_tile_is_parsed_with_its_extras_and_printed() -> None:
    tile = Tile.parse({"block_m": 64, "warps": 8, "dq_warps": 4, "block_n": 32, "dq_block_m": 16})
    assert tile == Tile(64, 32, warps=8, extra=(("dq_block_m", 16), ("dq_warps", 4)))
    assert (tile.get("dq_warps", 1), tile.get("dq_stages", 7)) == (4, 7)
    assert str(tile) == "64x32 w8 s2 dq_block_m16 dq_warps4"
    with refused(TypeError, "block_n"):
        Tile.parse({"block_m": 64})


@pytest.mark.parametrize("name", ["tiles", "skip", "exp2", "edges", "order", "tf32"])
@pytest.mark.parametrize("value", [1, "no", None])
def test_a_switch_that_is_no_bool_is_refused(name: str, value: Any) -> None:
    with refused(TypeError, f"switch {name} must be a bool, got {type(value).__name__}"):
        Switches(**{name: value})


@pytest.mark.parametrize("name", ["fast", "", None])
def test_a_rung_there_is_not_is_refused(name: Any) -> None:
    with refused(ValueError, "rung must be one of naive, tiles, skip, exp2, edges, order, got", repr(name)):
        Switches.rung(name)
    with refused(ValueError, "switch must be one of tiles, skip, exp2, edges, order, got", repr(name)):
        Switches().without(name)


def test_rungs_are_cumulative() -> None:
    assert str(Switches.rung("naive")) == "-tiles -skip -exp2 -edges -order"
    assert str(Switches.rung("exp2")) == "-edges -order"
    assert Switches.rung("order") == Switches()
    assert str(replace(Switches().without("skip"), tf32=True)) == "-skip +tf32"


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        *(({side: -1}, ValueError, f"{side} must be >= 0, got -1; use None") for side in ("left", "right")),
        *(({side: True}, TypeError, f"{side} must be an int or None, got bool") for side in ("left", "right")),
        *(({side: 1.0}, TypeError, f"{side} must be an int or None, got float") for side in ("left", "right")),
        *(({side: "3"}, TypeError, f"{side} must be an int or None, got str") for side in ("left", "right")),
        ({"corner": "middle"}, ValueError, "corner must be one of bottom_right, top_left, got 'middle'"),
        ({"corner": None}, ValueError, "corner must be one of bottom_right, top_left, got None"),
    ],
    ids=str,
)
def test_a_wrong_field_of_a_mask_is_refused(fields: dict[str, Any], kind: type[Exception], words: str) -> None:
    with refused(kind, f"mask {words}"):
        Mask(**fields)


@pytest.mark.parametrize("name", ["sm_90", "Ada", "h100", "", None, 89, ["ada"]])
def test_a_target_there_is_not_is_refused_with_those_there_are(name: Any) -> None:
    with refused(ValueError, "target must be one of ada, hopper, geforce_blackwell, blackwell, got", repr(name)):
        Target.named(name)


@pytest.mark.parametrize(
    ("name", "sm", "capability"),
    [
        ("ada", "sm_89", 89),
        ("hopper", "sm_90a", 90),
        ("geforce_blackwell", "sm_120a", 120),
        ("blackwell", "sm_100a", 100),
    ],
)
def test_a_target_is_found_by_name_and_by_sm_and_detected(
    name: str, sm: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.named(name)
    assert target is Target.named(sm)
    assert (target.sm, target.capability, str(target)) == (sm, capability, f"{name} ({sm})")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
    assert Target.detect() is target


def test_detect_says_what_the_card_is_when_it_is_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with refused(Unsupported, "NVIDIA A100 is sm_80", "the targets are ada (sm_89), hopper (sm_90a)"):
        Target.detect()


def test_detect_says_so_when_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(Unsupported, "no CUDA device"):
        Target.detect()


def test_a_port_that_is_not_written_or_lacks_its_package_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dsl_impl").mkdir()
    (tmp_path / "dsl_impl" / "__init__.py").touch()
    (tmp_path / "dsl_impl" / "lacking.py").write_text("import absent_dsl.language\n")
    (tmp_path / "dsl_impl" / "broken.py").write_text("from math import no_such_function\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("later_impl.port", "dsl_impl.lacking", "dsl_impl.broken"):
        monkeypatch.setitem(common.ports._PORTS, module, (module, "Kind", "absent-dsl"))
    with refused(Unsupported, "the later_impl.port port is not written yet"):
        port("later_impl.port")
    with refused(Unsupported, "needs absent_dsl, which is not installed: pip install absent-dsl"):
        port("dsl_impl.lacking")
    with refused(Unsupported, "could not be imported", "no_such_function"):
        port("dsl_impl.broken")


def test_ports_are_made_once_and_known_by_name() -> None:
    assert port_names() == ("reference", "triton", "tilelang", "cute")
    assert port("reference") is port("reference")
    assert port("reference").name == "reference"


@pytest.mark.parametrize(
    ("lengths", "mask", "pairs"),
    [
        ((3, 5), Mask(), 15),
        ((3, 5), Mask.causal(), 3 + 4 + 5),
        ((3, 5), Mask.causal("top_left"), 1 + 2 + 3),
        ((3, 5), Mask(left=1, right=0), 2 + 2 + 2),
        ((3, 5), Mask(left=1), 4 + 3 + 2),
        ((5, 3), Mask.causal(), 0 + 0 + 1 + 2 + 3),
        ((5, 3), Mask.causal("top_left"), 1 + 2 + 3 + 3 + 3),
        ((0, 3), Mask(), 0),
        ((3, 0), Mask.causal(), 0),
    ],
    ids=str,
)
def test_flops_count_the_visible_pairs(lengths: tuple[int, int], mask: Mask, pairs: int) -> None:
    problem = Problem(2, 4, 2, *lengths, 16, mask=mask)
    assert problem.flops("forward") == 4 * 2 * 4 * 16 * pairs
    assert problem.flops("backward") == 10 * 2 * 4 * 16 * pairs


def test_flops_and_bytes_of_a_large_problem_by_hand() -> None:
    problem = Problem(4, 8, 8, 4096, 4096, 64, mask=Mask.causal())
    assert problem.flops("forward") == 4 * 4 * 8 * 64 * (4096 * 4097 // 2) == 68_736_253_952
    assert problem.flops("backward") == 171_840_634_880
    # q, k, v, o of 16 MiB and lse of 512 KiB; backward also do, dq, dk, dv.
    assert problem.bytes("forward") == 4 * 2**24 + 2**19
    assert problem.bytes("backward") == 8 * 2**24 + 2**19


def test_bytes_count_each_tensor_once_in_its_dtype() -> None:
    problem = Problem(2, 4, 2, 3, 5, 16, torch.float16)
    assert problem.bytes("forward") == 2 * 768 + 2 * 640 + 96
    assert problem.bytes("backward") == 4 * 768 + 4 * 640 + 96
    assert replace(problem, dtype=torch.float32).bytes("forward") == 4 * 768 + 4 * 640 + 96
    assert replace(problem, batch=0).bytes("backward") == 0


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (Problem(2, 4, 4, 128, 128, 64), "b2-h4-n128-d64-bf16-full"),
        (Problem(2, 4, 1, 5, 7, 40, torch.float32, Mask.causal()), "b2-h4kv1-n5k7-d40-fp32-causal"),
        (Problem(1, 1, 1, 0, 3, 16, torch.float16, Mask(2, 0, "top_left")), "b1-h1-n0k3-d16-fp16-causal-left2-topleft"),
        (Problem(1, 1, 1, 9, 9, 16, mask=Mask(left=2)), "b1-h1-n9-d16-bf16-window-left2"),
        (Problem(1, 1, 1, 9, 9, 16, mask=Mask(2, 3), scale=0.05), "b1-h1-n9-d16-bf16-right3-left2-s0.05"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_id_of_a_problem_is_stable(problem: Problem, name: str) -> None:
    assert problem.id == name


def test_the_id_tells_every_field() -> None:
    shapes = [(b, h * g, h, n, k) for b, h, g, n, k in itertools.product((1, 2), (1, 2), (1, 2), (3, 4), (3, 4))]
    sides = (None, 0, 1)
    masks = [Mask(left, right, corner) for left in sides for right in sides for corner in ("bottom_right", "top_left")]
    masks.remove(Mask(corner="top_left"))  # where nothing is hidden there is no corner
    problems = {
        Problem(*shape, head_dim, dtype, mask, scale)  # type: ignore[arg-type]
        for shape in shapes
        for head_dim in (16, 24)
        for dtype in DTYPE_NAMES
        for mask in masks
        for scale in (None, 0.5, 0.1234567, 0.1234568)
    }
    assert len(problems) == len({problem.id for problem in problems}) == 32 * 2 * 3 * 17 * 4


def test_a_problem_with_its_own_default_scale_is_the_default() -> None:
    assert replace(PROBLEM, scale=0.25) == PROBLEM
    assert replace(PROBLEM, scale=1).scale == 1.0


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_guarded_buffers_are_poisoned_and_plain_ones_are_not_guarded(dtype: torch.dtype) -> None:
    with GuardedBuffers() as guard:
        buffer = empty((2, 3), dtype=dtype, device=torch.device("cpu"))
        like = empty_like(buffer)
    assert buffer.isnan().all()
    assert like.isnan().all()
    assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == ((2, 3), dtype, True)
    buffer.fill_(1)
    assert guard.faults() == []
    outside = empty((2, 3), dtype=dtype, device=torch.device("cpu"))
    assert outside.untyped_storage().nbytes() == 6 * dtype.itemsize


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.transpose(1, 2),
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x[:, :1].expand(x.shape),
        lambda x: x[:, ::2],
        lambda x: x[:0],
    ],
    ids=["packed", "transposed", "permuted", "expanded", "sliced", "empty"],
)
def test_empty_like_has_the_strides_of_torchs_own_or_is_packed(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.zeros(2, 4, 3, 5, dtype=torch.float16))
    expected = torch.empty_like(tensor if tensor.stride(-1) == 1 else tensor.contiguous())
    with GuardedBuffers() as guard:
        for buffer in (empty_like(tensor), Form.of(tensor).dense.empty()):
            assert (buffer.shape, buffer.stride(), buffer.dtype) == (expected.shape, expected.stride(), expected.dtype)
            buffer.copy_(tensor)
    assert guard.faults() == []


@pytest.mark.parametrize("kind", ["empty", "empty_like"])
@pytest.mark.parametrize(
    ("elements", "words"),
    [
        (-1, "wrote before the buffer (4, 4) torch.float32: 4 bytes, nearest 0 bytes away"),
        (-3, "wrote before the buffer (4, 4) torch.float32: 4 bytes, nearest 8 bytes away"),
        (16, "wrote after the buffer (4, 4) torch.float32: 4 bytes, nearest 0 bytes away"),
        (19, "wrote after the buffer (4, 4) torch.float32: 4 bytes, nearest 12 bytes away"),
        (-(2**14), "wrote before the buffer (4, 4) torch.float32: 4 bytes, nearest 65532 bytes away"),
        (16 + 2**14 - 1, "wrote after the buffer (4, 4) torch.float32: 4 bytes, nearest 65532 bytes away"),
    ],
)
def test_a_write_outside_a_buffer_is_found(kind: str, elements: int, words: str) -> None:
    with GuardedBuffers() as guard:
        if kind == "empty":
            buffer = empty((4, 4), dtype=torch.float32, device=torch.device("cpu"))
        else:
            buffer = empty_like(torch.zeros(4, 4).mT)
        untouched = empty_like(buffer)
    untouched.zero_()
    buffer.as_strided((1,), (1,), buffer.storage_offset() + elements).zero_()
    assert guard.faults() == [words]


def test_guards_nest_and_the_same_one_may_be_entered_inside_itself() -> None:
    def is_guarded() -> bool:
        return bool(empty((1,), dtype=torch.float32, device=torch.device("cpu")).untyped_storage().nbytes() > 4)

    outer, inner = GuardedBuffers(), GuardedBuffers()
    with outer:
        with inner:
            buffer = empty((1,), dtype=torch.float32, device=torch.device("cpu"))
        with outer:
            assert is_guarded()
        assert is_guarded()
    assert not is_guarded()
    buffer.as_strided((1,), (1,), buffer.storage_offset() + 1).zero_()
    assert (len(outer.faults()), len(inner.faults())) == (0, 1)
    with pytest.raises(KeyError), outer:
        raise KeyError
    assert not is_guarded()
    with outer:
        assert is_guarded()


def test_a_guard_is_this_threads_only() -> None:
    sizes: list[int] = []

    def allocate() -> None:
        sizes.append(empty((8,), dtype=torch.float32, device=torch.device("cpu")).untyped_storage().nbytes())

    with GuardedBuffers():
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        allocate()
    assert sizes[0] == 32
    assert sizes[1] == 32 + 2 * GuardedBuffers.GUARD_BYTES


TABLE = """
- {target: ada, direction: forward, bits: 16, head_dim: 128, masked: false, tiles: [{block_m: 128, block_n: 32}]}
- {target: ada, direction: forward, bits: 16, head_dim: 64, masked: false,
   tiles: [{block_m: 64, block_n: 64, warps: 8}, {block_m: 32, block_n: 32, stages: 3}]}
- {target: ada, direction: forward, bits: 16, head_dim: 64, masked: true, tiles: [{block_m: 16, block_n: 64}]}
- {target: ada, direction: backward, bits: 32, head_dim: 64, masked: false,
   tiles: [{block_m: 16, block_n: 16, dq_warps: 2}]}
"""


@pytest.mark.parametrize(
    ("changes", "target", "direction", "expected"),
    [
        ({"head_dim": 64}, "ada", "forward", [Tile(64, 64, warps=8), Tile(32, 32, stages=3)]),
        ({"head_dim": 40}, "ada", "forward", [Tile(64, 64, warps=8), Tile(32, 32, stages=3)]),
        ({"head_dim": 72}, "ada", "forward", [Tile(128, 32)]),
        ({"head_dim": 136}, "ada", "forward", []),
        ({"dtype": torch.float16}, "ada", "forward", [Tile(64, 64, warps=8), Tile(32, 32, stages=3)]),
        ({"dtype": torch.float32}, "ada", "forward", []),
        ({"dtype": torch.float32}, "ada", "backward", [Tile(16, 16, extra=(("dq_warps", 2),))]),
        ({"mask": Mask.causal()}, "ada", "forward", [Tile(16, 64)]),
        ({"mask": Mask(right=9)}, "ada", "forward", [Tile(16, 64)]),
        ({"mask": Mask(left=9)}, "ada", "forward", [Tile(64, 64, warps=8), Tile(32, 32, stages=3)]),
        ({"mask": Mask.causal(), "head_dim": 128}, "ada", "forward", []),
        ({}, "hopper", "forward", []),
        ({}, "ada", "backward", []),
    ],
    ids=str,
)
def test_a_table_gives_the_tiles_of_the_smallest_head_dim_that_holds_the_problem(
    changes: dict[str, Any], target: str, direction: Any, expected: list[Tile], tmp_path: Path
) -> None:
    path = tmp_path / "tiles.yaml"
    path.write_text(TABLE)
    table = TileTable.load(path)
    problem = replace(PROBLEM, **changes)
    found = table.lookup(problem, Target.named(target), direction)
    assert found == expected
    found.clear()  # a caller's list is the caller's
    assert table.lookup(problem, Target.named(target), direction) == expected


class Counted(ReferencePort):
    """The reference, which counts how often it is prepared."""

    def __init__(self) -> None:
        self.prepared = 0

    def _plan(self, *arguments: Any) -> Any:
        self.prepared += 1
        return super()._plan(*arguments)


def test_a_call_of_known_forms_is_not_prepared_again_and_gives_what_the_first_did() -> None:
    counted, t = Counted(), tensors(Problem(1, 1, 1, 5, 7, 16))
    problem = Problem.from_tensors(t["q"], t["k"], t["v"])
    for values in t.values():
        values.normal_()
    for _ in range(3):
        o, lse = counted.forward(t["q"], t["k"], t["v"], problem)
        expected = ReferencePort().forward(t["q"].clone(), t["k"].clone(), t["v"].clone(), problem)
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])
        for values in t.values():
            values.mul_(0.5)
    assert counted.prepared == 1
    for change in (lambda x: x.mT.contiguous().mT, lambda x: x[:, 0], lambda x: torch._neg_view(x)):
        other = counted.forward(change(t["q"]), change(t["k"]), change(t["v"]), problem)
        sign = -1 if change(t["q"]).is_neg() else 1
        right = ReferencePort().forward(*(sign * t[name] for name in "qkv"), problem)
        assert torch.equal(other[0].flatten(), right[0].flatten())


def test_after_a_call_that_was_right_a_wrong_one_is_refused_as_before_it() -> None:
    port_, t = ReferencePort(), tensors()
    arguments = [t[name] for name in ("do", "dlse", "q", "k", "v", "o", "lse")]
    port_.backward(*arguments, PROBLEM)
    for _ in range(2):  # what is refused is not kept
        for i, name in enumerate(("do", "dlse", "q", "k", "v", "o", "lse")):
            elsewhere = arguments[i].to("meta")
            for wrong, kind in (
                (arguments[i][:1], ValueError),
                (arguments[i].double(), TypeError),
                (elsewhere, ValueError),
                (arguments[i].to_sparse(), TypeError),
                (3, TypeError),
            ):
                # With the first tensor elsewhere, it is the next that is not where "the tensors before it" are.
                told = name if i or wrong is not elsewhere else "dlse"
                with pytest.raises(kind, match=f"^{told} must (be|have)"):
                    port_.backward(*arguments[:i], wrong, *arguments[i + 1 :], PROBLEM)  # type: ignore[arg-type]
        for name, option in (("tile", [16, 16]), ("switches", {}), ("target", ["ada"]), ("deterministic", 0)):
            with pytest.raises(TypeError, match=name):
                port_.backward(*arguments, PROBLEM, **{name: option})  # type: ignore[arg-type]


def test_a_derivative_that_there_is_not_is_refused_and_not_left_out() -> None:
    q = torch.randn(1, 1, 9, 16)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError):
        attention(forward_ad.make_dual(q, q), q, q, impl="reference")
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda x: attention(x, q, q, impl="reference"))(torch.stack([q, q]))


def test_what_was_called_keeps_no_tensor_alive() -> None:
    q = torch.randn(1, 1, 9, 16)
    seen = weakref.ref(q)
    kept = [weakref.ref(output) for output in attention(q, q, q, impl="reference", return_lse=True)]
    del q
    gc.collect()
    assert [one() for one in (seen, *kept)] == [None] * 3


def test_an_output_like_rows_that_overlap_has_a_last_stride_of_one() -> None:
    overlapping = torch.zeros(400).as_strided((2, 4, 20, 16), (1, 1, 1, 1))
    with GuardedBuffers():
        assert empty_like(overlapping).stride() == (1280, 320, 16, 1)
    assert empty_like(overlapping).stride() == (1280, 320, 16, 1)


def test_a_last_stride_that_is_not_one_is_copied_once_for_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(1, 2, 20, 16).mT.contiguous().mT.requires_grad_() for _ in range(3)]
    copies = []
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: copies.append(x.shape) or contiguous(x))
    attention(*inputs, impl="reference").sum().backward()
    assert len(copies) <= 3 + 1 + 1  # q, k, v; the expanded gradient of the sum; lse


def test_the_reference_rounds_as_it_says_whatever_the_defaults_are() -> None:
    q, k, v = (torch.randn(1, 2, 40, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    plain = attention(q, k, v, impl="reference")
    expected = (plain, *torch.autograd.grad(plain.sum(), (q, k, v)))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            o = attention(q, k, v, impl="reference")
            found = (o, *torch.autograd.grad(o.sum(), (q, k, v)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.device("meta"):
        assert Problem(1, 1, 1, 8, 8, 16, mask=Mask.causal()).flops("forward") == 4 * 16 * 36
