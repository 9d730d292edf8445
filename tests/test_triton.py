"""What is the Triton port's own: its launches, tiles and refusals, and the Ada path's code on any card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common import GuardedBuffers, Mask, Problem, Switches, Target, Tile, Unsupported, port
from harness.checks import Truth
from triton_impl.backward import adds_dq, plan_backward
from triton_impl.forward import plan_forward
from triton_impl.launch import Launch, interpreter_fault

from .helpers import assert_allowed
from .subjects import GPU, case_of

DEVICE = "cuda" if GPU else "cpu"
TRITON = port("triton")
ADA = Target.named("ada")


@pytest.mark.skipif(GPU, reason="the interpreter is for machines without a GPU")
def test_the_interpreter_is_tried_without_what_torch_does_around_it() -> None:
    with torch.device("meta"):
        assert interpreter_fault() is None
    with FakeTensorMode():
        assert interpreter_fault() is None


@pytest.mark.parametrize("lengths", [(12288, 1), (1, 12288), (16384, 1)])
@pytest.mark.parametrize("heads", [(128, 1), (64, 64)])
def test_the_order_of_many_tiles_over_few_keys_is_in_32_bits(lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    problem = Problem(1, *heads, *lengths, 16, torch.float16, Mask.causal())
    layouts = {n: (n * h * 16, n * 16, 16, 1) for n in lengths for h in heads}
    q, k = layouts[lengths[0]], layouts[lengths[1]]
    tile, switches = Tile(16, 16), Switches()
    launches = [plan_forward(problem, ADA, tile, switches, q, k, k, q)]
    launches += plan_backward(problem, ADA, tile, switches, False, True, q, q, k, k, q, q, k, k)[1:]
    for launch in launches:
        *_, count, section, _, _, _, _, _ = launch.numbers
        assert 1 <= section <= count  # so that tiles x section is at most the grid
        assert launch.grid < 2**31


def test_a_grid_past_32_bits_is_refused() -> None:
    problem = Problem(2**20, 64, 64, 1024, 16, 16, torch.float16)
    layout = (64 * 1024 * 16, 1024 * 16, 16, 1)
    with pytest.raises(Unsupported, match="blocks"):
        plan_forward(problem, ADA, Tile(16, 16), Switches(), layout, layout, layout, layout)


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


@pytest.mark.parametrize("factor", [1.0, 12.0])
@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask.causal("top_left"), Mask(left=9, right=12)], ids=str)
def test_a_maximum_that_lags_behind_changes_nothing(mask: Mask, factor: float) -> None:
    case = replace(case_of((1, 2, 150, 32), (1, 1, 190, 32), torch.float16, mask), factors=(("q", factor),))
    for block_m, warps in ((64, 4), (64, 8), (128, 4)):  # on a card, threads with rows of one sixteen and of two
        tile = Tile(block_m, 32, warps=warps, stages=2, extra=(("lazy_rescale", 1),))
        for dtype in (torch.float16, torch.bfloat16):
            one = replace(case, dtype=dtype)
            inputs = one.inputs(DEVICE)
            with GuardedBuffers() as guard:
                outputs = TRITON.forward(inputs.q, inputs.k, inputs.v, one.problem, tile=tile)
            assert not guard.faults()
            assert_allowed(outputs, Truth(one.problem, inputs).forward(), dtype)
    with pytest.raises(Unsupported, match="not in fp32"):
        TRITON.check_tile(replace(case, dtype=torch.float32).problem, ADA, "forward", Tile(16, 16, extra=tile.extra))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_ada_path_stays_on_mma_sync_within_its_shared_memory_on_any_card(
    head_dim: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []
    run = Launch.run

    def noted(launch: Launch, *arguments: object) -> None:
        launches.append(launch)
        run(launch, *arguments)

    monkeypatch.setattr(Launch, "run", noted)
    case = case_of((1, 2, 300, head_dim), (1, 2, 300, head_dim), torch.bfloat16, Mask.causal())
    inputs, problem = case.inputs(DEVICE), case.problem
    q, k, v = inputs.q, inputs.k, inputs.v
    o, lse = TRITON.forward(q, k, v, problem, target=ADA)
    TRITON.backward(inputs.do, None, q, k, v, o, lse, problem, target=ADA, deterministic=deterministic)
    names = [launch.kernel.__name__ for launch in launches]
    last = "cast_kernel" if adds_dq(TRITON.tiles(problem, ADA, "backward")[0], deterministic) else "dq_kernel"
    assert names == ["forward_kernel", "prepare_kernel", "dkdv_kernel", last]
    for name, launch in zip(names, launches, strict=True):
        built = [kernel for (target, *_), kernel in launch.compiled.items() if target == "ada"]
        assert built
        for kernel in built:
            ptx = kernel.asm["ptx"]
            if name in ("forward_kernel", "dkdv_kernel", "dq_kernel"):
                assert "mma.sync" in ptx
                assert "cp.async.cg" in ptx
            assert "wgmma" not in ptx
            assert "cp.async.bulk" not in ptx
            assert kernel.metadata.shared <= ADA.smem_per_block


@pytest.mark.gpu
def test_a_row_stride_with_which_the_rows_pass_32_bits_of_elements() -> None:
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


@pytest.mark.skipif(GPU, reason="on a GPU machine the process does not interpret")
def test_an_interpreting_process_says_so_of_other_devices() -> None:
    meta = torch.empty(1, 1, 16, 16, dtype=torch.float16, device="meta")
    with pytest.raises(Unsupported, match="interpreter"):
        TRITON.forward(meta, meta, meta, Problem.from_tensors(meta, meta, meta))
