"""The Triton port against the oracle: on a CPU in the interpreter, on a GPU compiled for it and for the Ada path."""

from __future__ import annotations

import pytest
import torch

from common import Mask, Problem, Switches, Target, Tile, Unsupported, attention, port
from reference import oracle_forward
from triton_impl import FlashAttentionTriton
from triton_impl.backward import plan_backward
from triton_impl.forward import plan_forward

from .cases import Case, load_cases
from .helpers import check_case, check_port

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ALL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRITON = port("triton")
ADA = Target.named("ada")
# Compiled, both paths are other code; interpreted, they differ in their tiles only.
TARGETS = [pytest.param(None, id="native"), pytest.param(ADA, id="ada")] if GPU else [pytest.param(ADA, id="ada")]
SMALL = Tile(32, 16)


def case_of(q: tuple[int, ...], kv: tuple[int, ...], dtype: torch.dtype, mask: Mask, layout: str = "packed") -> Case:
    return Case("t", "t", q, kv, dtype, mask, layout=tuple((name, layout) for name in ("q", "k", "v", "do")))


def check(case: Case, **options: object) -> None:
    check_port(TRITON, case.inputs(DEVICE), case.problem, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", load_cases(small=not GPU, dtypes=ALL_DTYPES if GPU else (torch.float16,)), ids=str)
def test_every_case_that_broke_a_kernel_in_public(case: Case, target: Target | None) -> None:
    check_case(case, TRITON, DEVICE, target=target, dlse=(False, True) if GPU else (True,))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (Mask(), (40, 70)),
        (Mask.causal(), (70, 40)),
        (Mask.causal("top_left"), (40, 70)),
        (Mask(left=20), (70, 70)),
        (Mask(left=9, right=12), (70, 90)),
    ],
    ids=str,
)
def test_masks_with_grouped_heads(
    mask: Mask, lengths: tuple[int, int], dtype: torch.dtype, target: Target | None
) -> None:
    case = case_of((2, 4, lengths[0], 32), (2, 2, lengths[1], 32), dtype, mask)
    check(case, target=target, tile=SMALL, dlse=(True,))


@pytest.mark.parametrize("layout", ["bshd", "expanded", "last_dim_strided", "offset_one", "every_second_batch"])
def test_any_layout_in_memory(layout: str) -> None:
    check(case_of((2, 2, 40, 40), (2, 2, 40, 40), torch.float16, Mask.causal(), layout), tile=SMALL)


@pytest.mark.parametrize(
    "switches",
    [Switches.rung(name) for name in ("naive", "tiles", "skip", "exp2", "edges", "order")]
    + [Switches().without(name) for name in ("tiles", "skip", "exp2", "edges")],
    ids=str,
)
@pytest.mark.parametrize("mask", [Mask.causal(), Mask(left=9, right=12)], ids=str)
def test_every_rung_and_every_switch_off(switches: Switches, mask: Mask) -> None:
    tile = None if not switches.tiles else SMALL
    check(case_of((1, 2, 50, 32), (1, 1, 60, 32), torch.float16, mask), tile=tile, switches=switches, dlse=(True,))


def test_heads_in_several_sections_of_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_impl.launch.L2_BYTES", 3 * 2 * 40 * 32 * 2)  # three key heads a section, of four
    check(case_of((1, 8, 40, 32), (1, 4, 40, 32), torch.float16, Mask.causal()), tile=Tile(16, 16))


@pytest.mark.parametrize("lengths", [(12288, 1), (1, 12288), (16384, 1)])
@pytest.mark.parametrize("heads", [(128, 1), (64, 64)])
def test_the_order_of_many_tiles_over_few_keys_is_in_32_bits(lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    problem = Problem(1, *heads, *lengths, 16, torch.float16, Mask.causal())
    layouts = {n: (n * h * 16, n * 16, 16, 1) for n in lengths for h in heads}
    q, k = layouts[lengths[0]], layouts[lengths[1]]
    tile, switches = Tile(16, 16), Switches()
    launches = [plan_forward(problem, tile, switches, q, k, k, q)]
    launches += plan_backward(problem, tile, switches, False, q, q, k, k, q, q, k, k)[1:]
    for launch in launches:
        *_, count, section, _, _, _, _, _ = launch.numbers
        assert 1 <= section <= count  # so that tiles x section is at most the grid
        assert launch.grid < 2**31


def test_a_grid_past_32_bits_is_refused() -> None:
    problem = Problem(2**20, 64, 64, 1024, 16, 16, torch.float16)
    layout = (64 * 1024 * 16, 1024 * 16, 16, 1)
    with pytest.raises(Unsupported, match="blocks"):
        plan_forward(problem, Tile(16, 16), Switches(), layout, layout, layout, layout)


@pytest.mark.parametrize(
    "mask",
    [
        Mask(5, 2**31 - 1),
        Mask(None, 2**31 - 40),
        Mask(2**31 - 1, 5, "top_left"),
        Mask(2**31 - 1, 0),
        Mask(10**20, 3),
        Mask(3, 10**20, "top_left"),
    ],
    ids=str,
)
def test_a_window_wider_than_any_integer_of_the_device(mask: Mask) -> None:
    check(case_of((1, 1, 40, 16), (1, 1, 50, 16), torch.float16, mask), tile=SMALL, dlse=(True,))


@pytest.mark.parametrize("mask", [Mask.causal(), Mask(left=2, corner="top_left"), Mask(0, 0)], ids=str)
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_what_a_caller_puts_into_rows_that_see_no_key_changes_nothing(name: str, mask: Mask) -> None:
    case = case_of((1, 2, 70, 32), (1, 1, 40, 32), torch.float16, mask)
    inputs, problem = case.inputs(DEVICE), case.problem
    x, impl = inputs, port(name)
    options = {"tile": Tile(16, 16), "switches": None}
    o, lse = impl.forward(x.q, x.k, x.v, problem, **options)
    unseen = lse == -torch.inf
    assert unseen.any()
    assert mask.has_unseeing_rows(70, 40)
    expected = (o, lse, *impl.backward(x.do, x.dlse, x.q, x.k, x.v, o, lse, problem, **options))
    q, do, dlse = (t.clone() for t in (x.q, x.do, x.dlse))
    for tensor in (q, do, dlse):
        tensor[unseen] = torch.nan
    o, lse = impl.forward(q, x.k, x.v, problem, **options)
    found = (o, lse, *impl.backward(do, dlse, q, x.k, x.v, o, lse, problem, **options))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_view_that_stands_for_its_negative() -> None:
    x = torch._neg_view(torch.randn(1, 1, 20, 16, device=DEVICE))
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(attention(x, x, x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_every_head_dim(head_dim: int) -> None:
    check(case_of((1, 1, 20, head_dim), (1, 1, 24, head_dim), torch.float16, Mask.causal()), dlse=(True,))


@pytest.mark.parametrize(("rows", "stride"), [(3, 2**30 + 8), (2, 2**31 + 8)])  # both inside one tile
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=["fp16", "bf16", "fp32"])
def test_a_row_far_past_32_bits_of_offset(dtype: torch.dtype, rows: int, stride: int) -> None:
    if dtype == torch.float32 and not GPU:
        pytest.skip("8 GB of address space for what fp16 shows")
    buffer = torch.empty((rows - 1) * stride + 32, dtype=dtype, device=DEVICE)
    far = buffer.as_strided((1, 1, rows, 32), (0, 0, stride, 1))
    far.copy_(torch.randn(far.shape))
    near = far.contiguous()
    problem = Problem.from_tensors(far, far, far, mask=Mask.causal())
    o, lse = TRITON.forward(far, far, far, problem, tile=SMALL)
    o_near, lse_near = TRITON.forward(near, near, near, problem, tile=SMALL)
    assert torch.equal(o, o_near)
    assert torch.equal(lse, lse_near)
    grads = TRITON.backward(near, None, far, far, far, o, lse, problem, tile=SMALL)
    for grad, grad_near in zip(
        grads, TRITON.backward(near, None, near, near, near, o, lse, problem, tile=SMALL), strict=True
    ):
        assert torch.equal(grad, grad_near)


def test_a_tile_far_past_32_bits_of_offset() -> None:
    rows, stride = 40, 2**26  # each tile's own offsets fit, the tiles' do not
    buffer = torch.empty((rows - 1) * stride + 32, dtype=torch.float16, device=DEVICE)
    far = buffer.as_strided((1, 1, rows, 32), (0, 0, stride, 1))
    far.copy_(torch.randn(far.shape))
    problem = Problem.from_tensors(far, far, far)
    o, lse = TRITON.forward(far, far, far, problem, tile=Tile(16, 16))
    near = far.contiguous()
    truth, _ = oracle_forward(near, near, near, problem)
    assert (o.double() - truth).abs().max() < 2e-3
    grads = TRITON.backward(near, None, far, far, far, o, lse, problem, tile=Tile(16, 16))
    for grad, grad_near in zip(
        grads, TRITON.backward(near, None, near, near, near, o, lse, problem, tile=Tile(16, 16)), strict=True
    ):
        assert torch.equal(grad, grad_near)


def test_a_tile_too_large_is_refused_with_the_arithmetic() -> None:
    problem = Problem(1, 2, 2, 256, 256, 256)
    with pytest.raises(Unsupported, match=r"Q 65536 \+ K or V 65536 \+ P 32768 = 163840 B.*sm_89 gives 101376 B"):
        TRITON.check_tile(problem, ADA, "forward", Tile(128, 128, warps=8, stages=1))
    q = torch.zeros(problem.q_shape, dtype=problem.dtype, device=DEVICE)
    with pytest.raises(Unsupported, match="101376"):
        TRITON.forward(q, q, q, problem, target=ADA, tile=Tile(128, 128))


@pytest.mark.parametrize("tile", [Tile(48, 64), Tile(8, 64), Tile(64, 64, warps=3)], ids=str)
def test_a_tile_that_triton_cannot_cut_is_refused(tile: Tile) -> None:
    with pytest.raises(Unsupported, match="power"):
        TRITON.check_tile(Problem(1, 1, 1, 64, 64, 64), ADA, "forward", tile)


def test_two_problems_in_one_process_do_not_mix() -> None:
    for head_dim in (64, 128, 64):
        for mask in (Mask(), Mask.causal(), Mask()):
            check(case_of((1, 2, 70, head_dim), (1, 2, 70, head_dim), torch.float16, mask), dlse=(True,))


def test_both_directions_are_bitwise_repeatable() -> None:
    repeats = 250 if GPU else 2
    shape = (8, 4, 384, 64) if GPU else (1, 2, 70, 64)
    case = case_of(shape, shape, torch.bfloat16, Mask.causal())
    inputs, problem = case.inputs(DEVICE), case.problem
    q, k, v = inputs.q, inputs.k, inputs.v
    o, lse = TRITON.forward(q, k, v, problem)
    first = TRITON.backward(inputs.do, inputs.dlse, q, k, v, o, lse, problem)
    for repeat in range(repeats):
        again = TRITON.forward(q, k, v, problem)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], lse)
        grads = TRITON.backward(inputs.do, inputs.dlse, q, k, v, o, lse, problem, deterministic=repeat % 2 == 0)
        assert all(torch.equal(a, b) for a, b in zip(grads, first, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_function_of_one_head_saves_one_lse_and_differentiates(is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 40, 32, device=DEVICE, requires_grad=True) for _ in range(3))
    o = FlashAttentionTriton.apply(q, k, v, is_causal)
    assert [t.shape for t in o.grad_fn.saved_tensors].count((2, 40)) == 1
    grads = torch.autograd.grad(o.square().sum(), (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    for grad, truth in zip(grads, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(grad, truth, atol=2e-5, rtol=1e-4)


def test_attention_is_the_port_and_compiles_without_a_graph_break() -> None:
    backend = "inductor" if GPU else "aot_eager"
    layer = torch.nn.Linear(32, 96, device=DEVICE)

    def step(x: torch.Tensor) -> torch.Tensor:
        q, k, v = layer(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        o, lse = attention(q, k, v, causal=True, return_lse=True)  # type: ignore[misc]
        return o.square().mean() + lse.mean()

    start = {name: value.clone() for name, value in layer.state_dict().items()}
    batches = torch.randn(3, 2, 20, 32, device=DEVICE)
    losses = []
    for run in (step, torch.compile(step, fullgraph=True, backend=backend)):
        layer.load_state_dict(start)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for batch in batches:
            loss = run(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    torch.testing.assert_close(losses[:3], losses[3:], atol=1e-5, rtol=1e-5)


def test_a_last_stride_that_is_not_one_compiles_as_well() -> None:
    inputs = [torch.randn(1, 2, 20, 16, device=DEVICE).mT.contiguous().mT.requires_grad_() for _ in range(3)]

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v).mT.reshape(1, 2, -1)

    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    expected, found = step(*inputs), compiled(*inputs)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(x, inputs, weight) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_operators_hold_to_what_pytorch_asks_of_them() -> None:
    q = torch.randn(1, 2, 20, 16, device=DEVICE, requires_grad=True)
    kv = torch.randn(1, 1, 24, 16, device=DEVICE, requires_grad=True)
    arguments = (q, kv, kv.detach(), None, 0, "bottom_right", 0.25, "triton", True)
    torch.library.opcheck(torch.ops.fa2.forward.default, arguments)


@pytest.mark.gpu
def test_a_launch_goes_to_the_current_stream() -> None:
    case = case_of((2, 4, 512, 64), (2, 4, 512, 64), torch.float16, Mask.causal())
    inputs, problem = case.inputs(DEVICE), case.problem
    q, k, v = inputs.q, inputs.k, inputs.v
    expected, lse = TRITON.forward(q, k, v, problem)
    grads = TRITON.backward(inputs.do, None, q, k, v, expected, lse, problem, deterministic=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the default stream is busy while the side stream works
    with torch.cuda.stream(side):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)  # a launch on another stream would read zeros
        o, lse = TRITON.forward(late, k, v, problem)
        again = TRITON.backward(inputs.do, None, late, k, v, o, lse, problem, deterministic=True)
    assert not torch.cuda.default_stream().query()
    side.synchronize()
    assert torch.equal(o, expected)
    assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_forward_and_backward_replay_in_a_cuda_graph_on_new_inputs() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o = attention(q, k, v, causal=True, deterministic=True)
        return o, *torch.autograd.grad(o, (q, k, v), do)

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
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_ada_path_stays_on_mma_sync_within_its_shared_memory_on_any_card(head_dim: int) -> None:
    case = case_of((1, 2, 300, head_dim), (1, 2, 300, head_dim), torch.bfloat16, Mask.causal())
    inputs, problem = case.inputs(DEVICE), case.problem
    q, k, v = inputs.q, inputs.k, inputs.v
    o, lse = TRITON.forward(q, k, v, problem, target=ADA)
    TRITON.backward(inputs.do, None, q, k, v, o, lse, problem, target=ADA)
    layout = q.stride()
    forward_tile, backward_tile = (TRITON.tiles(problem, ADA, way)[0] for way in ("forward", "backward"))
    launches = [
        plan_forward(problem, forward_tile, Switches(), *[layout] * 4),
        *plan_backward(problem, backward_tile, Switches(), False, *[layout] * 8)[1:],
    ]
    for launch in launches:
        built = [kernel for (target, *_), kernel in launch.compiled.items() if target == "ada"]
        assert built
        for kernel in built:
            ptx = kernel.asm["ptx"]
            assert "mma.sync" in ptx
            assert "cp.async.cg" in ptx
            assert "wgmma" not in ptx
            assert "cp.async.bulk" not in ptx
            assert kernel.metadata.shared <= ADA.smem_per_block


@pytest.mark.gpu
def test_a_tensor_past_32_bits_of_elements() -> None:
    shape = (1, 1, 2**31 // 64 // 8 + 70, 64 * 8)
    buffer = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)  # 4.3 GB
    far = buffer[..., -70:, :64]
    far.copy_(torch.randn(far.shape))
    whole = buffer.as_strided((1, 1, shape[2], 64), (0, 0, shape[3], 1))
    whole.narrow(2, 0, shape[2] - 70).zero_()
    problem = Problem.from_tensors(far, whole, whole)
    o, lse = TRITON.forward(far, whole, whole, problem)
    # The zeros before contribute exp(0) each to the sum, and nothing to the numerator.
    s = far.double() @ far.double().mT * problem.scale
    total = s.exp().sum(-1) + (shape[2] - 70)
    torch.testing.assert_close(lse.double(), total.log(), atol=1e-5, rtol=1e-6)
    truth = s.exp() / total[..., None] @ far.double()
    torch.testing.assert_close(o.double(), truth, atol=float(truth.abs().max()) * 2**-7, rtol=0)


@pytest.mark.gpu
def test_another_device_is_not_needed_to_be_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = case_of((1, 2, 70, 64), (1, 2, 70, 64), torch.float16, Mask.causal())
    with torch.cuda.device(0):
        check_port(TRITON, case.inputs("cuda:1"), case.problem)


@pytest.mark.skipif(GPU, reason="on a GPU machine the process does not interpret")
def test_an_interpreting_process_says_so_of_other_devices() -> None:
    meta = torch.empty(1, 1, 16, 16, dtype=torch.float16, device="meta")
    with pytest.raises(Unsupported, match="interpreter"):
        TRITON.forward(meta, meta, meta, Problem.from_tensors(meta, meta, meta))
