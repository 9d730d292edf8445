"""What the ports are measured against: each is the attention it stands for, and says what it cannot do."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from common import Mask, Problem, Target
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
