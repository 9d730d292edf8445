"""The TileLang port against the oracle on a GPU, native and on the Ada path; its builds and host side without one."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from common import Direction, Mask, Problem, Switches, Target, Tile, TileKind, Unsupported, attention, port

tilelang_impl = pytest.importorskip("tilelang_impl", reason="TileLang is not installed", exc_type=ImportError)

from tilelang_impl import FlashAttentionTilelang, budget  # noqa: E402
from tilelang_impl.blocks import tile_range  # noqa: E402
from tilelang_impl.build import lower, plan  # noqa: E402
from tilelang_impl.launch import band, block_d, padded_len, settle  # noqa: E402

from .cases import LAYOUTS, Case, laid_out, load_cases  # noqa: E402
from .helpers import check_case, check_port  # noqa: E402

DEVICE = "cuda"
TILELANG = port("tilelang")
ADA, HOPPER = Target.named("ada"), Target.named("hopper")
TARGETS = [pytest.param(None, id="native"), pytest.param(ADA, id="ada")]


def dq(block_m: int, block_n: int, warps: int, stages: int) -> tuple[tuple[str, int], ...]:
    return ("dq_block_m", block_m), ("dq_block_n", block_n), ("dq_stages", stages), ("dq_warps", warps)


def case_of(q: tuple[int, ...], kv: tuple[int, ...], dtype: torch.dtype, mask: Mask, layout: str = "packed") -> Case:
    return Case("t", "t", q, kv, dtype, mask, layout=tuple((name, layout) for name in ("q", "k", "v", "do")))


def check(case: Case, **options: object) -> None:
    check_port(TILELANG, case.inputs(DEVICE), case.problem, **options)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", load_cases(), ids=str)
def test_every_case_that_broke_a_kernel_in_public(case: Case, target: Target | None) -> None:
    check_case(case, TILELANG, DEVICE, target=target)


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stages", [1, 2, 3])
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
def test_masks_and_stages_with_grouped_heads(
    mask: Mask, lengths: tuple[int, int], stages: int, target: Target | None
) -> None:
    case = case_of((2, 4, lengths[0], 64), (2, 2, lengths[1], 64), torch.bfloat16, mask)
    check(case, target=target, tile=Tile(64, 64, 4, stages, dq(64, 64, 4, stages)))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "packed"])
def test_any_layout_in_memory(layout: str) -> None:
    check(case_of((2, 2, 140, 40), (2, 2, 140, 40), torch.float16, Mask.causal(), layout))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "switches",
    [Switches.rung(name) for name in ("naive", "tiles", "skip", "exp2", "edges", "order")]
    + [Switches().without(name) for name in ("tiles", "skip", "exp2", "edges")],
    ids=str,
)
@pytest.mark.parametrize("mask", [Mask.causal(), Mask(left=9, right=12)], ids=str)
def test_every_rung_and_every_switch_off(switches: Switches, mask: Mask) -> None:
    check(case_of((1, 2, 150, 32), (1, 1, 160, 32), torch.float16, mask), switches=switches, dlse=(True,))


@pytest.mark.gpu
def test_heads_in_several_sections_of_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilelang_impl.launch.L2_BYTES", 3 * 2 * 143 * 32 * 2)  # three key heads a section, of four
    check(case_of((1, 8, 143, 32), (1, 4, 143, 32), torch.float16, Mask.causal()), tile=Tile(64, 64, 4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_every_head_dim(head_dim: int, target: Target | None) -> None:
    case = case_of((1, 1, 100, head_dim), (1, 1, 124, head_dim), torch.float16, Mask.causal())
    check(case, target=target, dlse=(True,))


@pytest.mark.gpu
def test_a_new_length_or_batch_or_number_of_heads_compiles_nothing() -> None:
    from tilelang_impl.launch import _compiled

    check(case_of((1, 2, 100, 64), (1, 2, 120, 64), torch.float16, Mask.causal()))
    before = _compiled.cache_info().misses
    check(case_of((3, 3, 333, 64), (3, 3, 77, 64), torch.float16, Mask.causal()))
    assert _compiled.cache_info().misses == before


@pytest.mark.gpu
def test_two_problems_in_one_process_do_not_mix() -> None:
    for head_dim in (64, 128, 64):
        for mask in (Mask(), Mask.causal(), Mask()):
            check(case_of((1, 2, 170, head_dim), (1, 2, 170, head_dim), torch.float16, mask), dlse=(True,))


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(8, 4, 384, 64), (1, 4, 2048, 128)], ids=str)
def test_both_directions_are_bitwise_repeatable(shape: tuple[int, ...], target: Target | None) -> None:
    case = case_of(shape, shape, torch.bfloat16, Mask.causal())
    inputs, problem = case.inputs(DEVICE), case.problem
    q, k, v = inputs.q, inputs.k, inputs.v
    o, lse = TILELANG.forward(q, k, v, problem, target=target)
    first = TILELANG.backward(inputs.do, inputs.dlse, q, k, v, o, lse, problem, target=target)
    for repeat in range(250):
        again = TILELANG.forward(q, k, v, problem, target=target)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], lse)
        grads = TILELANG.backward(
            inputs.do, inputs.dlse, q, k, v, o, lse, problem, target=target, deterministic=repeat % 2 == 0
        )
        assert all(torch.equal(a, b) for a, b in zip(grads, first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_function_of_one_head_saves_one_lse_and_differentiates(is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 140, 32, device=DEVICE, dtype=torch.float16, requires_grad=True) for _ in range(3))
    o = FlashAttentionTilelang.apply(q, k, v, is_causal)
    assert [t.shape for t in o.grad_fn.saved_tensors].count((2, 140)) == 1
    grads = torch.autograd.grad(o.float().square().sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=is_causal)
    for grad, truth in zip(grads, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(grad.double(), truth, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_attention_is_the_port_and_compiles_without_a_graph_break() -> None:
    layer = torch.nn.Linear(32, 96, device=DEVICE)

    def step(x: torch.Tensor) -> torch.Tensor:
        q, k, v = layer(x).half().unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        o, lse = attention(q, k, v, causal=True, return_lse=True, impl="tilelang")  # type: ignore[misc]
        return o.float().square().mean() + lse.mean()

    start = {name: value.clone() for name, value in layer.state_dict().items()}
    batches = torch.randn(3, 2, 20, 32, device=DEVICE)
    losses = []
    for run in (step, torch.compile(step, fullgraph=True)):
        layer.load_state_dict(start)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for batch in batches:
            loss = run(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    torch.testing.assert_close(losses[:3], losses[3:], atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_a_launch_goes_to_the_current_stream() -> None:
    case = case_of((2, 4, 512, 64), (2, 4, 512, 64), torch.float16, Mask.causal())
    inputs, problem = case.inputs(DEVICE), case.problem
    q, k, v = inputs.q, inputs.k, inputs.v
    expected, lse = TILELANG.forward(q, k, v, problem)
    grads = TILELANG.backward(inputs.do, None, q, k, v, expected, lse, problem)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the default stream is busy while the side stream works
    with torch.cuda.stream(side):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)  # a launch on another stream would read zeros
        o, lse = TILELANG.forward(late, k, v, problem)
        again = TILELANG.backward(inputs.do, None, late, k, v, o, lse, problem)
    assert not torch.cuda.default_stream().query()
    side.synchronize()
    assert torch.equal(o, expected)
    assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_forward_and_backward_replay_in_a_cuda_graph_on_new_inputs() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o = attention(q, k, v, causal=True, impl="tilelang")
        return o, *torch.autograd.grad(o, (q, k, v), do)  # type: ignore[arg-type,return-value]

    make = [torch.randn(2, 4, 300, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    static = [t.clone().requires_grad_(i < 3) for i, t in enumerate(make)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static)
    for _ in range(3):
        fresh = [torch.randn_like(t) for t in make]
        with torch.no_grad():
            for target, source in zip(static, fresh, strict=True):
                target.copy_(source)
        graph.replay()
        expected = step(*(t.requires_grad_(i < 3) for i, t in enumerate(fresh)))
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS)
def test_a_tensor_past_32_bits_of_elements(target: Target | None) -> None:
    heads, length = 2**31 // (1024 * 64) + 2, 1024
    q = torch.randn(1, heads, 70, 64, dtype=torch.bfloat16, device=DEVICE)
    kv = torch.zeros(1, heads, length, 64, dtype=torch.bfloat16, device=DEVICE)  # 4.3 GB
    kv[:, -1] = torch.randn(length, 64)
    problem = Problem.from_tensors(q, kv, kv)
    o, lse = TILELANG.forward(q, kv, kv, problem, target=target)
    s = q[0, -1].double() @ kv[0, -1].double().mT * problem.scale
    torch.testing.assert_close(lse[0, -1].double(), s.logsumexp(-1), atol=1e-5, rtol=1e-6)
    truth = s.softmax(-1) @ kv[0, -1].double()
    torch.testing.assert_close(o[0, -1].double(), truth, atol=float(truth.abs().max()) * 2**-7, rtol=0)
    assert not o[0, :-1].any()


@pytest.mark.gpu
def test_another_device_is_not_needed_to_be_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = case_of((1, 2, 170, 64), (1, 2, 170, 64), torch.float16, Mask.causal())
    with torch.cuda.device(0):
        check_port(TILELANG, case.inputs("cuda:1"), case.problem)


VARIANTS = [
    pytest.param(ADA, "forward", Mask.causal(), 128, 1, id="ada-forward-causal"),
    pytest.param(ADA, "backward", Mask(left=9, right=12), 40, 2, id="ada-backward-window-grouped-padded"),
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
        if launch.name == "prepare_kernel":
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


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("target", [ADA, HOPPER], ids=str)
def test_a_build_tells_what_it_takes_of_the_chip(target: Target) -> None:
    problem = Problem(1, 2, 2, 256, 256, 64)
    (build,) = TILELANG.build(problem, target, "forward")
    assert build.kernel == "forward_kernel"
    assert target.instruction in build.instructions
    assert build.shared == sum(budget.shared_memory(problem, target, "forward", build.tile)["forward_kernel"].values())
    assert 0 < build.registers <= 255
    assert build.spills == 0


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
    taken, name = settle(tensor)
    assert torch.equal(taken, tensor)
    assert name == ("bnhd" if layout == "bshd" else "bhnd")
    assert (taken is tensor) == (layout in ("packed", "bshd"))
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
        assert end > begin
        for tile in range(-(-len_k // block_n)):
            kind = mask.tile_kind(first, first + block_m, tile * block_n, (tile + 1) * block_n, len_q, len_k)
            walked, full = begin <= tile < end, full_begin <= tile < full_end
            assert walked or kind is TileKind.SKIP
            if walked:
                assert full == (kind is TileKind.FULL)


def test_a_launch_is_told_apart_by_its_constants_only() -> None:
    short, long = (Problem(1, 2, 2, n, n, 64, mask=Mask.causal()) for n in (100, 5000))
    tile = Tile(64, 64)
    (a,), (b,) = (plan(p, ADA, "forward", tile, Switches()) for p in (short, long))
    assert a.constants == b.constants
    (c,) = plan(dataclasses.replace(short, mask=Mask()), ADA, "forward", tile, Switches())
    assert a.constants != c.constants
