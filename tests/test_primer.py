"""The primer's weighted sum against PyTorch: Triton's wherever the tests run, all three on a GPU, compiled without."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest
import torch

from common import GuardedBuffers
from primer.shared import WeightedSum

from .test_imports import NEEDS, fresh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FP32_EPS = torch.finfo(torch.float32).eps

# Rows and columns of one element, less than a tile, whole tiles, several with a ragged end, and ends that no vector of
# 16 bytes fits in.
SHAPES = [(1, 1), (1, 64), (5, 7), (16, 128), (17, 129), (100, 1000), (67, 1048), (33, 2051)]
LANGUAGES = [
    "triton",
    pytest.param("tilelang", marks=pytest.mark.gpu),
    pytest.param("cute", marks=pytest.mark.gpu),
]


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> ModuleType:
    pytest.importorskip(NEEDS[request.param][1], exc_type=ImportError)
    return importlib.import_module(f"primer.{request.param}_primer")


def among_nans(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A random tensor that starts on 16 bytes and has NaN before it and behind it."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)
    around = torch.full((values.numel() + 64,), torch.nan, dtype=dtype, device=DEVICE)
    inside = around[16 : 16 + values.numel()]
    inside.copy_(values.flatten())
    return inside.view(shape)


def assert_near(value: torch.Tensor, truth: torch.Tensor, magnitude: torch.Tensor, terms: int) -> None:
    """The error of a sum of so many terms in fp32, rounded to the dtype, whose magnitudes add up to `magnitude`.

    A whole unit of the last place: Triton's interpreter cuts bf16 off where the hardware rounds it.
    """
    info = torch.finfo(value.dtype)
    allowed = info.eps * truth.abs() + info.smallest_normal * info.eps + (terms + 2) * FP32_EPS * magnitude
    assert value.shape == truth.shape
    assert ((value.double() - truth).abs() <= allowed).all()


def check(language: ModuleType, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and dweight, in poisoned and guarded memory, against PyTorch's in float64."""
    x_64, weight_64 = (tensor.double().requires_grad_() for tensor in (x, weight))
    y_64 = x_64 @ weight_64
    truths = [y_64, *torch.autograd.grad(y_64, (x_64, weight_64), dy.double())]
    x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
    with GuardedBuffers() as guard:
        y = WeightedSum.apply(x, weight, language)
        grads = torch.autograd.grad(y, (x, weight), dy)
    assert not guard.faults(), guard.faults()
    x, weight, dy = (tensor.detach().double().abs() for tensor in (x, weight, dy))
    magnitudes = [x @ weight, torch.outer(dy, weight), dy @ x]
    terms = [x.shape[1], 1, x.shape[0]]
    for value, truth, magnitude, count in zip((y, *grads), truths, magnitudes, terms, strict=True):
        assert value.dtype == y.dtype
        assert_near(value.detach(), truth.detach(), magnitude, count)
    return [y.detach(), *grads]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_pytorch_s(language: ModuleType, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    x = among_nans(rows, columns, dtype=dtype, seed=1)
    check(language, x, among_nans(columns, dtype=dtype, seed=2), among_nans(rows, dtype=dtype, seed=3))


def test_a_second_run_gives_the_same_bits(language: ModuleType) -> None:
    x, weight, dy = (among_nans(*shape, dtype=torch.float16, seed=4) for shape in ((300, 200), (200,), (300,)))
    first, second = (check(language, x, weight, dy) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_tensors_that_lie_otherwise_are_copied(language: ModuleType) -> None:
    wide = among_nans(300, 50, dtype=torch.bfloat16, seed=5)
    weight, dy = wide[:40, 7], torch.ones((), dtype=torch.bfloat16, device=DEVICE)
    check(language, wide[:40].t(), weight, dy.expand(50))  # rows that are no neighbours, and a gradient of one element
    check(language, wide[:1, 8:48], weight, dy.expand(1))  # one row, whose stride is not its length
    check(language, wide[:8, :1], wide[9, 3:4], wide[1, 8:16])  # one column, and a weight of one element
    check(language, wide.flatten()[1:8001].view(200, 40), weight, dy.expand(200))  # packed, and not on 16 bytes


def test_rows_at_an_edge_do_not_reach_their_neighbours(language: ModuleType) -> None:
    x = torch.zeros(35, 130, dtype=torch.float32, device=DEVICE)
    x[17], x[34, 129] = torch.inf, 1
    y = WeightedSum.apply(x, torch.ones(130, device=DEVICE), language)
    assert [int(row) for row in y.nonzero()] == [17, 34]
    assert (y[17], y[34]) == (torch.inf, 1)


X, WEIGHT, DY = torch.zeros(3, 4), torch.zeros(4), torch.zeros(3)
REFUSED = [
    (X.double(), WEIGHT, DY, TypeError, "x must be one of torch.float16, torch.bfloat16, torch.float32, got"),
    (X, WEIGHT.half(), DY, TypeError, "weight must have the dtype of x, torch.float32, got torch.float16"),
    (X, WEIGHT, DY.half(), TypeError, "dy must have the dtype of x"),
    (X[0], WEIGHT, DY, ValueError, r"x must be \(M, D\) with at least one element, got shape \(4,\)"),
    (X[:0], WEIGHT, DY, ValueError, "with at least one element"),
    (X, DY, DY, ValueError, r"weight must have the shape \(4,\), got \(3,\)"),
    (X, WEIGHT, WEIGHT, ValueError, r"dy must have the shape \(3,\), got \(4,\)"),
    (X, WEIGHT.to("meta"), DY, ValueError, "weight must be on the device of x, cpu, got meta"),
]


@pytest.mark.parametrize(("x", "weight", "dy", "kind", "message"), REFUSED)
def test_wrong_tensors_are_named(x, weight, dy, kind: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("triton")
    from primer import triton_primer

    with pytest.raises(kind, match=message):
        triton_primer.backward(dy, x, weight)


@pytest.mark.parametrize("name", ["tilelang", "cute"])
def test_without_an_interpreter_cpu_tensors_are_refused(name: str) -> None:
    pytest.importorskip(NEEDS[name][1], exc_type=ImportError)
    with pytest.raises(ValueError, match=r"^x must be on a CUDA device, got cpu$"):
        WeightedSum.apply(X, WEIGHT, importlib.import_module(f"primer.{name}_primer"))


def test_triton_compiles_for_both_targets() -> None:
    # In a process of its own: this one may hold kernels for the interpreter.
    pytest.importorskip("triton")
    fresh("""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from primer.triton_primer import BLOCK_D, BLOCK_M, backward_kernel, forward_kernel

for kernel in (forward_kernel, backward_kernel):
    types = {name: "i32" if name.startswith("len") else "fp32" for name in kernel.arg_names[:-2]}
    types = {name: "i32" if name.startswith("len") else "*fp32" if name == "PARTIAL" else "*bf16" for name in types}
    source = ASTSource(kernel, types | {name: "constexpr" for name in ("BLOCK_M", "BLOCK_D")},
                       {"BLOCK_M": BLOCK_M, "BLOCK_D": BLOCK_D})
    for capability in (89, 90):
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
""")


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(
    ("sm", "dtype"), [("sm_89", "float16"), ("sm_89", "float32"), ("sm_90a", "bfloat16")], ids=lambda value: value
)
def test_tilelang_lowers_for_both_targets(name: str, sm: str, dtype: str) -> None:
    tilelang = pytest.importorskip("tilelang", exc_type=ImportError)
    from primer import tilelang_primer
    from tilelang_impl.launch import in_a_fresh_thread

    def lower() -> str:
        target = tilelang.tvm.target.Target({"kind": "cuda", "arch": sm})
        with tilelang.tvm.transform.PassContext(opt_level=3), target:
            program = getattr(tilelang_primer, f"{name}_program")(dtype)
            return tilelang.lower(
                program, target=target, enable_host_codegen=False, enable_device_compile=False
            ).kernel_source

    source = in_a_fresh_thread(lower)
    assert f"{name}_kernel" in source
    assert "int len_d, int len_m" in source  # one kernel for all lengths
    assert "(int64_t)len_d" in source  # offsets are in 64 bits


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("sm", ["sm_89", "sm_90a"])
@pytest.mark.parametrize(("dtype", "vector"), [(torch.float16, 8), (torch.bfloat16, 1), (torch.float32, 4)], ids=str)
def test_cute_compiles_for_both_targets(tmp_path, direction: str, sm: str, dtype: torch.dtype, vector: int) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("cutlass", exc_type=ImportError)
    from primer import cute_primer

    options = f"--gpu-arch {sm} --keep-ptx --keep-cubin --dump-dir {tmp_path}"
    ptx = cute_primer.compiled(direction, dtype, vector, options).__ptx__
    assert f".target {sm}" in ptx
    width = {8: "v4.b32", 4: "v4.b32", 1: "b16"}[vector]
    assert re.search(rf"ld\.global\.{re.escape(width)}", ptx)
    assert ".local" not in ptx  # what a thread holds is in registers
