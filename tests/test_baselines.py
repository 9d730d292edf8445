"""What the ports are measured against: each is the attention it stands for, and says what it cannot do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from common import Mask, Problem, Target, Unsupported
from harness.baselines import BASELINES, Baseline
from harness.baselines.protocol import bytes_of, flops_of, is_importable
from harness.checks import Truth
from harness.inputs import InputSpec, make_inputs
from harness.trial import Trial

ADA = Target.named("ada")
CPU = torch.device("cpu")
CAUSAL = Mask.causal()
# The lower-right bias needs CUDA's kernels.
PROBLEMS = [
    Problem(2, 4, 2, 48, 48, 32, torch.bfloat16, CAUSAL),
    Problem(2, 4, 2, 32, 48, 32, torch.bfloat16),
    Problem(1, 2, 2, 40, 56, 32, torch.bfloat16, Mask(left=9, right=3)),
    Problem(1, 2, 2, 40, 56, 32, torch.bfloat16, CAUSAL, 0.3),
]


@pytest.fixture(autouse=True)
def _as_with_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the SDPA backends fall back, FlexAttention is interpreted, and the packages are stood in for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for name, unbounded in (("flash_attn.flash_attn_interface", -1), ("flash_attn.cute", None)):
        module: Any = ModuleType(name)
        module.__spec__ = object()  # type: ignore[assignment]
        module.flash_attn_func = stand_in(unbounded)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.delenv("TILELANG_EXAMPLES", raising=False)


def stand_in(unbounded: int | None) -> Any:
    """A function with the arguments of flash-attn's, and results as in that of its package."""

    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int | None, int | None] = (unbounded, unbounded),
    ) -> Any:
        left, right = (None if side == unbounded else side for side in window_size)
        mask = CAUSAL if causal else Mask(left, right)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        visible = mask.dense(q.shape[2], k.shape[2])
        o = F.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale, enable_gqa=True).transpose(1, 2)
        return o if unbounded is not None else (o, None)

    return flash_attn_func


def pairs() -> list[tuple[Baseline, Problem]]:
    """The problems that each takes."""
    return [
        (baseline, problem)
        for baseline in BASELINES.values()
        for problem in PROBLEMS
        if baseline.name not in ("sdpa_cudnn", "sdpa_efficient")  # not on a CPU
        and baseline.refusal(problem) is None
        and not (baseline.name.startswith("sdpa") and not problem.mask.is_full and problem.len_q != problem.len_k)
    ]


@pytest.mark.parametrize(("baseline", "problem"), pairs(), ids=lambda x: x.name if isinstance(x, Baseline) else x.id)
def test_a_baseline_is_the_attention_it_stands_for(baseline: Baseline, problem: Problem) -> None:
    x = make_inputs(problem, InputSpec(), seed=0, device=CPU)
    trial = Trial(baseline, problem, x, Truth(problem, x), target=ADA)
    for direction in ("forward", "backward"):
        check = trial.check(direction)  # type: ignore[arg-type]
        assert check.verdict == "pass", check.complaints()
        assert [t.name for t in check.tensors] == (["o"] if direction == "forward" else ["dq", "dk", "dv"])
        if baseline.name == "flex":
            return  # which has no backward on a CPU
    with baseline.context(), torch.no_grad():
        (o,) = trial.launch("forward")()
        backward, both = trial.launch("backward"), trial.launch("both")
        grads, again, all_four = backward(), backward(), both()
    assert not o.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), "gradients must not accumulate"
    assert all(torch.equal(a, b) for a, b in zip((o, *grads), all_four, strict=True))


def test_one_head_may_be_left_out() -> None:
    problem = Problem(2, 1, 1, 24, 24, 16, torch.bfloat16, CAUSAL)
    x = make_inputs(problem, InputSpec(layout="bnd"), seed=0, device=CPU)
    trial = Trial(BASELINES["sdpa_math"], problem, x, Truth(problem, x), target=ADA)
    assert [trial.check(d).verdict for d in ("forward", "backward")] == ["pass", "pass"]  # type: ignore[arg-type]


def test_a_baseline_that_is_wrong_or_raises_fails_and_one_that_refuses_or_does_not_fit_is_unsupported() -> None:
    problem = PROBLEMS[1]
    x = make_inputs(problem, InputSpec(), seed=0, device=CPU)

    class Odd(Baseline):
        name, title = "odd", "Odd"

        def attention(self, problem: Problem, device: torch.device) -> Any:
            raise RuntimeError("no kernel for this card")

    class Wrong(Odd):
        def attention(self, problem: Problem, device: torch.device) -> Any:
            return lambda q, k, v: q * 2

    class Large(Odd):
        def attention(self, problem: Problem, device: torch.device) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 GiB. GPU 0 has a total capacity")

    def verdict(baseline: Baseline) -> tuple[str, str]:
        check = Trial(baseline, problem, x, Truth(problem, x), target=ADA).check("forward")
        return check.verdict, check.reason

    assert verdict(Odd()) == ("fail", "raised RuntimeError: no kernel for this card")
    assert verdict(Wrong()) == ("fail", "")
    assert verdict(Large()) == ("unsupported", "out of memory")
    assert verdict(BASELINES["sdpa_cudnn"])[0] == "unsupported"


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("sdpa_flash", Problem(1, 1, 1, 8, 8, 64, torch.float32), "takes fp16, bf16; the problem is fp32"),
        ("sdpa_math", Problem(1, 1, 1, 8, 8, 64, torch.float32), None),
        ("sdpa_flash", Problem(1, 1, 1, 8, 8, 64, mask=Mask(left=3, right=0)), "no window"),
        ("sdpa_flash", Problem(1, 1, 1, 8, 9, 64, mask=Mask.causal("top_left")), "no top-left corner"),
        ("sdpa_flash", Problem(1, 1, 1, 9, 8, 64, mask=CAUSAL), "rows that see no key"),
        ("sdpa_flash", Problem(1, 1, 1, 8, 9, 64, mask=CAUSAL), None),
        ("sdpa_cudnn", Problem(1, 1, 1, 8, 9, 64, mask=CAUSAL), "no bottom-right corner"),
        ("flex", Problem(1, 1, 1, 9, 8, 64, mask=Mask(3, 4, "top_left")), None),
        ("fa4", Problem(1, 1, 1, 8, 9, 64, mask=Mask.causal("top_left")), "no top-left corner"),
        ("flash_attn", Problem(1, 1, 1, 8, 9, 64, mask=Mask(left=3)), None),
    ],
)
def test_a_baseline_says_what_it_cannot(name: str, problem: Problem, reason: str | None) -> None:
    told = BASELINES[name].unsupported(problem, ADA)
    assert told is None if reason is None else reason in str(told)


def test_a_baseline_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name)
    if is_importable("flash_attn"):
        pytest.skip("it is installed")
    assert BASELINES["fa4"].unsupported(PROBLEMS[0], ADA) == (
        "FA4 needs flash_attn.cute, which is not installed: pip install --pre flash-attn-4"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BASELINES["fa4"].unsupported(PROBLEMS[0], ADA) == "FA4 needs a CUDA device"


def test_a_launch_of_both_counts_both() -> None:
    problem = PROBLEMS[0]
    assert flops_of(problem, "both") == 3.5 * problem.flops("forward")
    assert bytes_of(problem, "both") == problem.bytes("forward") + problem.bytes("backward")


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(BASELINES))
def test_on_a_card_a_baseline_passes_or_says_why_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    problem = Problem(2, 4, 4, 256, 256, 64, torch.bfloat16, CAUSAL)
    device = torch.device("cuda", torch.cuda.current_device())
    x = make_inputs(problem, InputSpec(), seed=0, device=device)
    trial = Trial(BASELINES[name], problem, x, Truth(problem, x), target=Target.detect(device))
    for direction in ("forward", "backward"):
        check = trial.check(direction)  # type: ignore[arg-type]
        assert check.verdict in ("pass", "unsupported"), check.complaints()


# Two files with the names and functions of TileLang's, computed by PyTorch.
EXAMPLE_FORWARD = """
from types import SimpleNamespace
import torch.nn.functional as F

compiled = []

def get_configs():
    return [dict(block_M=128, block_N=128, num_stages=2, threads=256)]

def compile(batch, heads, seq_q, seq_kv, dim, is_causal, **tile):
    print("begins to compile")
    compiled.append(tile)
    if batch == 9:
        raise ValueError("no nvcc")
    assert seq_q == seq_kv
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

flashattn = SimpleNamespace(jit_impl=compile)
"""
EXAMPLE_BACKWARD = """
import torch

class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        ctx.save_for_backward(q, k, v)
        ctx.causal = causal
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    @staticmethod
    def backward(ctx, do):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=ctx.causal)
            return (*torch.autograd.grad(o, leaves, do), None)

attention = Attention.apply
"""
EXAMPLE = BASELINES["tilelang_example"]
FOR_EXAMPLE = Problem(1, 2, 2, 128, 128, 64, torch.float16, CAUSAL)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of examples that the variable names, on a machine with a TileLang and a Hopper."""
    (tmp_path / "example_mha_fwd_bhsd.py").write_text(EXAMPLE_FORWARD)
    (tmp_path / "example_mha_bwd_bhsd.py").write_text(EXAMPLE_BACKWARD)
    monkeypatch.setenv("TILELANG_EXAMPLES", str(tmp_path))
    monkeypatch.setattr("harness.baselines.protocol.is_importable", lambda package: True)
    monkeypatch.setattr(Target, "detect", lambda device=None: Target.named("hopper"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.mark.parametrize("mask", [CAUSAL, Mask()])
def test_the_example_of_a_clone_is_checked_and_launched(
    examples: Path, mask: Mask, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, path = Problem(1, 2, 2, 128, 128, 64, torch.float16, mask), list(sys.path)
    x = make_inputs(problem, InputSpec(), seed=0, device=CPU)
    trial = Trial(EXAMPLE, problem, x, Truth(problem, x), target=ADA)
    for direction in ("forward", "backward"):
        check = trial.check(direction)  # type: ignore[arg-type]
        assert check.verdict == "pass", check.complaints()
    with EXAMPLE.context(), torch.no_grad():
        alone = (*trial.launch("forward")(), *trial.launch("backward")())
        assert all(torch.equal(a, b) for a, b in zip(alone, trial.launch("both")(), strict=True))
    told = capsys.readouterr()
    assert told.out == ""
    assert "begins to compile" in told.err
    assert sys.path == path


@pytest.mark.parametrize(
    ("target", "head_dim", "tuned"),
    [("hopper", 64, True), ("hopper", 128, True), ("ada", 64, True), ("ada", 128, False)],
)
def test_the_example_has_its_tuned_tile_where_that_fits(
    examples: Path, monkeypatch: pytest.MonkeyPatch, target: str, head_dim: int, tuned: bool
) -> None:
    monkeypatch.setattr(Target, "detect", lambda device=None: Target.named(target))
    attend = EXAMPLE.attention(Problem(1, 1, 1, 128, 128, head_dim, torch.float16), CPU)
    kernel = next(cell.cell_contents for cell in attend.__closure__ or () if callable(cell.cell_contents))
    compiled = kernel.__globals__["compiled"]
    assert compiled[-1] == ({"block_M": 128, "block_N": 128, "num_stages": 2, "threads": 256} if tuned else {})


def test_the_example_says_what_it_cannot(examples: Path) -> None:
    def told(*sizes: int, dtype: torch.dtype = torch.float16, **more: Any) -> str:
        return EXAMPLE.unsupported(Problem(*sizes, dtype, **more), ADA) or ""

    assert told(1, 2, 2, 256, 256, 64) == told(1, 2, 2, 256, 256, 128, mask=CAUSAL) == ""
    assert "takes fp16; the problem is bf16" in told(1, 1, 1, 128, 128, 64, dtype=torch.bfloat16)
    assert "no window" in told(1, 1, 1, 128, 128, 64, mask=Mask(left=3, right=0))
    assert "no unequal lengths" in told(1, 1, 1, 128, 256, 64)
    assert "no grouped heads" in told(1, 4, 2, 128, 128, 64)
    assert "takes D of 64 and 128; the problem has 96" in told(1, 1, 1, 128, 128, 96)
    for batch, length in ((1, 192), (1, 0), (0, 128)):
        assert "in whole tiles of 128" in told(batch, 1, 1, length, length, 64)
    assert "no scale but 1/sqrt(D)" in told(1, 1, 1, 128, 128, 64, scale=0.3)
    for layout in ("bshd", "offset_one"):
        x = make_inputs(FOR_EXAMPLE, InputSpec(layout_do=layout), seed=0, device=CPU)
        with pytest.raises(Unsupported, match="packed tensors that start on 16 bytes"):
            EXAMPLE.launch("forward", x, FOR_EXAMPLE)
    with pytest.raises(Unsupported, match="does not compile here: ValueError: no nvcc"):
        EXAMPLE.attention(Problem(9, 1, 1, 128, 128, 64, torch.float16), CPU)


def test_an_example_that_is_not_set_up_says_what_to_do(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = examples / "example_mha_bwd_bhsd.py"
    for content, reason in (
        (
            "raise ImportError('no such thing\\nand more')",
            f"cannot be imported: {name} raised ImportError: no such thing",
        ),
        ("raise SystemExit('bye')", f"cannot be imported: {name} raised SystemExit: bye"),
        ("x = 1", f"needs attention of {name}, which has none: set TILELANG_EXAMPLES to the folder"),
    ):
        name.write_text(content)
        told = EXAMPLE.absence() or ""
        assert reason in told
        assert "\n" not in told
    name.unlink()
    assert f"needs {name}, which is not there: set TILELANG_EXAMPLES to the folder" in (EXAMPLE.absence() or "")
    for value in (None, ""):
        monkeypatch.delenv("TILELANG_EXAMPLES") if value is None else monkeypatch.setenv("TILELANG_EXAMPLES", value)
        assert "TileLang example needs a clone of TileLang: set TILELANG_EXAMPLES" in (EXAMPLE.absence() or "")
    monkeypatch.setattr("harness.baselines.protocol.is_importable", lambda package: False)
    told = "TileLang example needs tilelang, which is not installed: pip install tilelang==0.1.13"
    assert EXAMPLE.absence() == told


@pytest.mark.gpu
@pytest.mark.skipif("TILELANG_EXAMPLES" not in os.environ, reason="TILELANG_EXAMPLES names no clone of TileLang")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [CAUSAL, Mask()])
def test_on_a_card_the_example_passes(head_dim: int, mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    problem = Problem(2, 4, 4, 384, 384, head_dim, torch.float16, mask)
    device = torch.device("cuda", torch.cuda.current_device())
    x = make_inputs(problem, InputSpec(), seed=0, device=device)
    trial = Trial(EXAMPLE, problem, x, Truth(problem, x), target=Target.detect(device))
    for direction in ("forward", "backward"):
        check = trial.check(direction)  # type: ignore[arg-type]
        assert check.verdict == "pass", check.complaints() or check.reason
