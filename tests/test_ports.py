"""What every port must hold to: its results against the oracle, its layouts and streams, its way into PyTorch.

Triton runs here without a GPU as well, in its interpreter. A port's own tests, of its tiles, builds and refusals, are
in a file of its own. Tests that could do with any problem take the same few, so that they share compiled kernels.
"""

from __future__ import annotations

import pytest
import torch

from common import Mask, Problem, Switches, Target, Tile, attention, empty_like
from reference import oracle_forward

from .cases import LAYOUTS, Case
from .helpers import check_case, check_port
from .subjects import (
    GPU,
    REFERENCE,
    SUBJECTS,
    Subject,
    case_of,
    each,
    each_case,
    each_head_dim,
    each_path,
    each_trial,
)


@each_case()
def test_every_case_that_broke_a_kernel_in_public(subject: Subject, target: Target | None, case: Case) -> None:
    dlse = (True,) if subject.device == "cpu" else (False, True)
    check_case(case, subject.port, subject.device, target=target, dlse=dlse)


@each_trial()
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
    subject: Subject, target: Target | None, dtype: torch.dtype, tile: Tile, mask: Mask, lengths: tuple[int, int]
) -> None:
    len_q, len_k = (subject.rows(length) for length in lengths)
    case = case_of((2, 4, len_q, 64), (2, 2, len_k, 64), dtype, mask)
    subject.check(case, target=target, tile=tile, dlse=(True,))


@each()
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "packed"])
def test_any_layout_in_memory(subject: Subject, layout: str) -> None:
    shape = 2, 2, subject.rows(40), 40
    subject.check(case_of(shape, shape, torch.float16, Mask.causal(), layout))


@each()
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)], ids=str)
@pytest.mark.parametrize("width", [32, 96], ids=["dense", "part of wider rows"])
def test_results_lie_in_memory_as_the_operators_promise(subject: Subject, order: tuple[int, ...], width: int) -> None:
    memory = [torch.randn(3, 2, 40, width, device=subject.device).to(torch.float16) for _ in range(4)]
    q, k, v, do = (x[..., :32].permute(order) for x in memory)
    problem = Problem.from_tensors(q, k, v, mask=Mask.causal())
    o, lse = subject.port.forward(q, k, v, problem, tile=subject.tile)
    grads = subject.port.backward(do, None, q, k, v, o, lse, problem, tile=subject.tile)
    for result, like in zip((o, *grads), (q, q, k, v), strict=True):
        assert result.stride() == empty_like(like).stride()


@each()
def test_lse_and_its_gradient_may_start_anywhere(subject: Subject) -> None:
    q, k, v, do = (torch.randn(1, 1, subject.rows(21), 32, device=subject.device).to(torch.float16) for _ in range(4))
    problem = Problem.from_tensors(q, k, v)
    o, lse = subject.port.forward(q, k, v, problem, tile=subject.tile)
    dlse = torch.randn_like(lse)
    expected = subject.port.backward(do, dlse, q, k, v, o, lse, problem, tile=subject.tile, deterministic=True)
    odd = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x) for x in (lse, dlse)]
    found = subject.port.backward(do, odd[1], q, k, v, o, odd[0], problem, tile=subject.tile, deterministic=True)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@each()
@pytest.mark.parametrize(
    "switches",
    [Switches.rung(name) for name in ("naive", "tiles", "skip", "exp2", "edges", "order")]
    + [Switches().without(name) for name in ("tiles", "skip", "exp2", "edges")],
    ids=str,
)
@pytest.mark.parametrize("mask", [Mask.causal(), Mask(left=9, right=12)], ids=str)
def test_every_rung_and_every_switch_off(subject: Subject, switches: Switches, mask: Mask) -> None:
    case = case_of((1, 2, subject.rows(50), 32), (1, 1, subject.rows(60), 32), torch.float16, mask)
    subject.check(case, tile=subject.tile if switches.tiles else None, switches=switches, dlse=(True,))


@each()
def test_heads_in_several_sections_of_the_order(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    length = subject.rows(41)
    monkeypatch.setattr(f"{subject.name}_impl.launch.L2_BYTES", 3 * 2 * length * 64 * 2)  # three of four key heads
    subject.check(case_of((1, 8, length, 64), (1, 4, length, 64), torch.float16, Mask.causal()))


@each()
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
def test_a_window_wider_than_any_integer_of_the_device(subject: Subject, mask: Mask) -> None:
    case = case_of((1, 1, subject.rows(40), 64), (1, 1, subject.rows(50), 64), torch.float16, mask)
    subject.check(case, dlse=(True,))


@each((REFERENCE, *SUBJECTS))
@pytest.mark.parametrize("mask", [Mask.causal(), Mask(left=2, corner="top_left"), Mask(0, 0)], ids=str)
def test_what_a_caller_puts_into_rows_that_see_no_key_changes_nothing(subject: Subject, mask: Mask) -> None:
    len_q, len_k = subject.rows(70), subject.rows(40)
    case = case_of((1, 2, len_q, 64), (1, 1, len_k, 64), torch.float16, mask)
    x, problem, port = case.inputs(subject.device), case.problem, subject.port
    o, lse = port.forward(x.q, x.k, x.v, problem, tile=subject.tile)
    unseen = lse == -torch.inf
    assert unseen.any()
    assert mask.has_unseeing_rows(len_q, len_k)
    expected = (o, lse, *port.backward(x.do, x.dlse, x.q, x.k, x.v, o, lse, problem, tile=subject.tile))
    q, do, dlse = (t.clone() for t in (x.q, x.do, x.dlse))
    for tensor in (q, do, dlse):
        tensor[unseen] = torch.nan
    o, lse = port.forward(q, x.k, x.v, problem, tile=subject.tile)
    found = (o, lse, *port.backward(do, dlse, q, x.k, x.v, o, lse, problem, tile=subject.tile))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@each((REFERENCE, *SUBJECTS))
def test_gradients_lie_in_memory_as_their_tensors_do(subject: Subject) -> None:
    q, k, v = (torch.randn(1, subject.rows(n), 2, 64, device=subject.device).half() for n in (24, 16, 16))
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, causal=True, impl=subject.name)  # the first rows of q see no key
    for x, grad in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v)), strict=True):
        assert grad.stride() == x.stride()


@each()
def test_a_view_that_stands_for_its_negative(subject: Subject) -> None:
    x = torch._neg_view(torch.randn(1, 1, 20, 64, device=subject.device, dtype=subject.finest))
    o = attention(x, x, x, causal=True, impl=subject.name)
    expected = torch.nn.functional.scaled_dot_product_attention(*[x.double()] * 3, is_causal=True)
    torch.testing.assert_close(o.double(), expected, **TOLERANCE[subject.finest])


@each_head_dim()
def test_every_head_dim(subject: Subject, target: Target | None, head_dim: int) -> None:
    q, kv = ((1, 1, subject.rows(length), head_dim) for length in (20, 24))
    subject.check(case_of(q, kv, torch.float16, Mask.causal()), target=target, tile=None, dlse=(True,))


@each()
@pytest.mark.parametrize(("rows", "stride"), [(3, 2**30 + 8), (2, 2**31 + 8)])  # both inside one tile
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_a_row_far_past_32_bits_of_offset(subject: Subject, dtype: torch.dtype, rows: int, stride: int) -> None:
    if dtype not in subject.dtypes:
        pytest.skip(f"{subject} does not take it")
    if dtype == torch.float32 and subject.device == "cpu":
        pytest.skip("8 GB of address space for what fp16 shows")
    far = far_rows(subject, dtype, rows, stride)
    near, port, tile = far.contiguous(), subject.port, subject.tile
    problem = Problem.from_tensors(far, far, far, mask=Mask.causal())
    o, lse = port.forward(far, far, far, problem, tile=tile)
    o_near, lse_near = port.forward(near, near, near, problem, tile=tile)
    assert torch.equal(o, o_near)
    assert torch.equal(lse, lse_near)
    grads = port.backward(near, None, far, far, far, o, lse, problem, tile=tile)
    expected = port.backward(near, None, near, near, near, o, lse, problem, tile=tile)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@each()
def test_a_tile_far_past_32_bits_of_offset(subject: Subject) -> None:
    rows, stride = subject.rows(40), 2**26  # each tile's own offsets fit, the tiles' do not
    far = far_rows(subject, torch.float16, rows, stride)
    near, port, tile = far.contiguous(), subject.port, subject.tile
    problem = Problem.from_tensors(far, far, far, mask=Mask.causal())
    o, lse = port.forward(far, far, far, problem, tile=tile)
    truth, _ = oracle_forward(near, near, near, problem)
    assert (o.double() - truth).abs().max() < 2e-3
    grads = port.backward(near, None, far, far, far, o, lse, problem, tile=tile)
    expected = port.backward(near, None, near, near, near, o, lse, problem, tile=tile)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def far_rows(subject: Subject, dtype: torch.dtype, rows: int, stride: int) -> torch.Tensor:
    """Random `(1, 1, rows, 64)`, each row that many elements after the last."""
    buffer = torch.empty((rows - 1) * stride + 64, dtype=dtype, device=subject.device)
    far = buffer.as_strided((1, 1, rows, 64), (0, 0, stride, 1))
    return far.copy_(torch.randn(far.shape))


@pytest.mark.gpu
@each_path()
def test_a_tensor_past_32_bits_of_elements(subject: Subject, target: Target | None) -> None:
    heads, length = 2**31 // (1024 * 64) + 2, 1024
    q = torch.randn(1, heads, 70, 64, dtype=torch.bfloat16, device="cuda")
    kv = torch.zeros(1, heads, length, 64, dtype=torch.bfloat16, device="cuda")  # 4.3 GB
    kv[:, -1] = torch.randn(length, 64)
    problem = Problem.from_tensors(q, kv, kv)
    o, lse = subject.port.forward(q, kv, kv, problem, target=target)
    s = q[0, -1].double() @ kv[0, -1].double().mT * problem.scale
    torch.testing.assert_close(lse[0, -1].double(), s.logsumexp(-1), atol=1e-5, rtol=1e-6)
    truth = s.softmax(-1) @ kv[0, -1].double()
    torch.testing.assert_close(o[0, -1].double(), truth, atol=float(truth.abs().max()) * 2**-7, rtol=0)
    assert not o[0, :-1].any()


@each()
def test_two_problems_in_one_process_do_not_mix(subject: Subject) -> None:
    length = subject.rows(70)
    for head_dim in (64, 128, 64):
        for mask in (Mask(), Mask.causal(), Mask()):
            case = case_of((1, 2, length, head_dim), (1, 2, length, head_dim), torch.float16, mask)
            subject.check(case, tile=None, dlse=(True,))


@each()
def test_two_tiles_and_two_paths_in_one_process_do_not_mix(subject: Subject) -> None:
    length = subject.rows(70)
    case = case_of((1, 2, length, 64), (1, 2, length, 64), torch.float16, Mask.causal())
    for target in (*subject.paths, *subject.paths):
        for tile in (subject.tile, None):
            subject.check(case, target=target, tile=tile, dlse=(True,))


SHAPES = [(8, 4, 384, 64), (1, 4, 2048, 128)] if GPU else [(1, 2, 70, 64)]


@each_path()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_directions_are_bitwise_repeatable(
    subject: Subject, target: Target | None, shape: tuple[int, ...]
) -> None:
    repeats = 2 if subject.device == "cpu" else 250
    case = case_of(shape, shape, torch.bfloat16, Mask.causal())
    x, problem, port = case.inputs(subject.device), case.problem, subject.port
    o, lse = port.forward(x.q, x.k, x.v, problem, target=target)

    def backward(deterministic: bool) -> tuple[torch.Tensor, ...]:
        options = {"target": target, "deterministic": deterministic}
        return port.backward(x.do, x.dlse, x.q, x.k, x.v, o, lse, problem, **options)

    first = {deterministic: backward(deterministic) for deterministic in (False, True)}
    for repeat in range(repeats):
        again = port.forward(x.q, x.k, x.v, problem, target=target)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], lse)
        deterministic = repeat % 2 == 0
        for name, a, b in zip(("dq", "dk", "dv"), backward(deterministic), first[deterministic], strict=True):
            # dq alone may be summed by atomics, and only where it need not be repeatable.
            assert torch.equal(a, b) or (name == "dq" and not deterministic), name


# How far a result in a dtype may lie from another way to compute it, where the oracle is not what is asked about.
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.float16: {"atol": 2e-2, "rtol": 2e-2}}


@each()
@pytest.mark.parametrize("is_causal", [False, True])
def test_function_of_one_head_saves_one_lse_and_differentiates(subject: Subject, is_causal: bool) -> None:
    length = subject.rows(40)
    shape, dtype = (2, length, 64), subject.finest
    q, k, v = (torch.randn(shape, device=subject.device, dtype=dtype, requires_grad=True) for _ in range(3))
    o = subject.one_head.apply(q, k, v, is_causal)
    assert [t.shape for t in o.grad_fn.saved_tensors].count((2, length)) == 1
    grads = torch.autograd.grad(o.float().square().sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=is_causal)
    for grad, truth in zip(grads, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(grad.double(), truth, **TOLERANCE[dtype])


@each()
def test_attention_is_the_port_and_compiles_without_a_graph_break(subject: Subject) -> None:
    layer = torch.nn.Linear(32, 3 * 2 * 64, device=subject.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        q, k, v = layer(x).to(subject.finest).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        o, lse = attention(q, k, v, causal=True, return_lse=True, impl=subject.name)  # type: ignore[misc]
        return o.float().square().mean() + lse.mean()

    start = {name: value.clone() for name, value in layer.state_dict().items()}
    batches = torch.randn(3, 2, 20, 32, device=subject.device)
    losses = []
    for run in (step, torch.compile(step, fullgraph=True, backend=backend(subject))):
        layer.load_state_dict(start)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for batch in batches:
            loss = run(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    tolerance = 1e-5 if subject.finest == torch.float32 else 1e-3
    torch.testing.assert_close(losses[:3], losses[3:], atol=tolerance, rtol=tolerance)


@each()
def test_a_last_stride_that_is_not_one_compiles_as_well(subject: Subject) -> None:
    shape, dtype = (1, 2, 20, 64), subject.finest
    tensors = [torch.randn(shape, device=subject.device, dtype=dtype) for _ in range(3)]
    inputs = [x.mT.contiguous().mT.requires_grad_() for x in tensors]

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=True, impl=subject.name).mT.reshape(1, 2, -1)  # type: ignore[union-attr]

    compiled = torch.compile(step, fullgraph=True, backend=backend(subject))
    expected, found = step(*inputs), compiled(*inputs)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(x, inputs, weight) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def backend(subject: Subject) -> str:
    """What `torch.compile` compiles with: inductor where it has a GPU to compile for."""
    return "aot_eager" if subject.device == "cpu" else "inductor"


@each()
def test_operators_hold_to_what_pytorch_asks_of_them(subject: Subject) -> None:
    q = torch.randn(1, 2, 20, 64, device=subject.device, dtype=subject.finest, requires_grad=True)
    kv = torch.randn(1, 1, 24, 64, device=subject.device, dtype=subject.finest, requires_grad=True)
    arguments = (q, kv, kv.detach(), None, 0, "bottom_right", 0.25, subject.name, True)
    torch.library.opcheck(torch.ops.fa2.forward.default, arguments)


@pytest.mark.gpu
@each()
def test_a_launch_goes_to_the_current_stream(subject: Subject) -> None:
    case = case_of((2, 4, 512, 64), (2, 4, 512, 64), torch.float16, Mask.causal())
    inputs, problem, port = case.inputs("cuda"), case.problem, subject.port
    q, k, v = inputs.q, inputs.k, inputs.v
    expected, lse = port.forward(q, k, v, problem)
    grads = port.backward(inputs.do, None, q, k, v, expected, lse, problem, deterministic=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: the default stream is busy while the side stream works
    with torch.cuda.stream(side):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)  # a launch on another stream would read zeros
        o, lse = port.forward(late, k, v, problem)
        again = port.backward(inputs.do, None, late, k, v, o, lse, problem, deterministic=True)
    assert not torch.cuda.default_stream().query()
    side.synchronize()
    assert torch.equal(o, expected)
    assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))
    torch.cuda.synchronize()


@pytest.mark.gpu
@each()
def test_forward_and_backward_replay_in_a_cuda_graph_on_new_inputs(subject: Subject) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o = attention(q, k, v, causal=True, impl=subject.name, deterministic=True)
        return o, *torch.autograd.grad(o, (q, k, v), do)  # type: ignore[arg-type,return-value]

    make = [torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.float16) for _ in range(4)]
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
@each()
def test_another_device_is_not_needed_to_be_current(subject: Subject) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = case_of((1, 2, 170, 64), (1, 2, 170, 64), torch.float16, Mask.causal())
    with torch.cuda.device(0):
        check_port(subject.port, case.inputs("cuda:1"), case.problem)
