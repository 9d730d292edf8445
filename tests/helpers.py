"""What the tests of every port share: the rule of error, and a case run against a port."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from common import GuardedBuffers, Port, Problem, Switches, Target, Tile
from reference import naive_backward, naive_forward, oracle_backward, oracle_forward

from .cases import Case, Inputs

EPS_32 = torch.finfo(torch.float32).eps


def error(x: torch.Tensor, oracle: torch.Tensor) -> float:
    """max|x - oracle|; an infinity must be the oracle's, and a NaN is an error of infinity."""
    if x.numel() == 0:
        return 0.0
    x = x.double()
    difference = torch.where(x == oracle, 0.0, (x - oracle).abs())
    return float(difference.nan_to_num(nan=torch.inf).max())


def assert_close(name: str, x: torch.Tensor, oracle: torch.Tensor, naive: torch.Tensor, floor: float) -> None:
    """The error of `x` may be twice the naive attention's, plus the floor; the message names the worst element."""
    assert x.shape == oracle.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(oracle.shape)}"
    assert torch.equal(x == -torch.inf, oracle == -torch.inf), f"{name} is -inf in other places than the oracle"
    found, allowed = error(x, oracle), 2 * error(naive, oracle) + floor
    if not found <= allowed:
        worst = int((x.double() - oracle).abs().nan_to_num(nan=torch.inf).argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), x.shape))
        raise AssertionError(
            f"{name} errs by {found:.3g} at {where}: {x[where].item():.8g} for {oracle[where].item():.8g}; "
            f"allowed {allowed:.3g} = 2 x {error(naive, oracle):.3g} (naive) + {floor:.3g} (floor)"
        )


def rounding_floor(oracle: torch.Tensor, dtype: torch.dtype) -> float:
    """Half an ulp of the largest value: what rounding the result alone may cost."""
    return torch.finfo(dtype).eps / 2 * largest(oracle)


def largest(x: torch.Tensor) -> float:
    """max|x|, 0 of nothing."""
    return float(x.abs().max()) if x.numel() else 0.0


def lse_floor(oracle: torch.Tensor) -> float:
    """Four ulp of the largest lse in fp32."""
    return 4 * EPS_32 * max(1.0, largest(oracle[oracle.isfinite()]))


def gradient_floors(
    inputs: Inputs, o: torch.Tensor, o_true: torch.Tensor, lse_true: torch.Tensor, problem: Problem
) -> tuple[float, float, float]:
    """The error that the algorithm has and plain autograd has not: of dq, of dk, and of all relative to their largest.

    FlashAttention takes `delta = rowsum(do · o)` from the o that was rounded and returned. Where one key outweighs all
    others, `ds = p · (dp - delta)` should cancel, and autograd does cancel it exactly; what remains here is delta's
    error: that of o, and an fp32 ulp of `rowsum|do · o|` for two sums computed apart. An error of delta acts as a
    gradient of lse does, so the oracle tells what it does to dq and dk.

    And p is recomputed as `exp(s - lse)`, both rounded in fp32 to half an ulp of lse, which is a relative error of p.
    """
    if o.numel() == 0:
        return 0.0, 0.0, 0.0
    do = inputs.do.double()
    signs = torch.randint(0, 2, lse_true.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    residue = 2 * EPS_32 * (do * o_true).abs().sum(-1) * signs.to(o.device)
    error_of_delta = (do * (o.double() - o_true)).sum(-1) + residue
    dq, dk, _ = oracle_backward(torch.zeros_like(do), error_of_delta, inputs.q, inputs.k, inputs.v, problem)
    relative = lse_floor(lse_true) / 4
    return 2 * largest(dq), 2 * largest(dk), relative


def check_port(
    port: Port,
    inputs: Inputs,
    problem: Problem,
    *,
    target: Target | None = None,
    tile: Tile | None = None,
    switches: Switches | None = None,
    dlse: Sequence[bool] = (False, True),
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward (without and with a gradient of lse) against the oracle, in poisoned and guarded buffers.

    Returns the port's o and lse.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"target": target, "tile": tile, "switches": switches}
    with GuardedBuffers() as guard:
        o, lse = port.forward(q, k, v, problem, **options)
    o_true, lse_true = oracle_forward(q, k, v, problem)
    o_naive, _ = naive_forward(q, k, v, problem)
    # lse is fp32 whatever the inputs are, and so is its yardstick.
    _, lse_naive = naive_forward(q.float(), k.float(), v.float(), problem)
    assert (o.dtype, lse.dtype) == (problem.dtype, torch.float32)
    assert_close("o", o, o_true, o_naive, rounding_floor(o_true, problem.dtype))
    assert_close("lse", lse, lse_true, lse_naive, lse_floor(lse_true))

    unseen = lse_true == -torch.inf
    assert not o[unseen].any(), "o is not 0 in rows that see no key"
    dq_floor, dk_floor, relative = gradient_floors(inputs, o, o_true, lse_true, problem)
    for with_dlse in dlse:
        gradient = inputs.dlse if with_dlse else None
        with guard:
            grads = port.backward(inputs.do, gradient, q, k, v, o, lse, problem, **options, deterministic=deterministic)
        truths = oracle_backward(inputs.do, gradient, q, k, v, problem)
        naives = naive_backward(inputs.do, gradient, q, k, v, problem)
        for name, floor, grad, truth, naive in zip(
            ("dq", "dk", "dv"), (dq_floor, dk_floor, 0.0), grads, truths, naives, strict=True
        ):
            assert grad.dtype == problem.dtype
            label = f"{name} with dlse" if with_dlse else name
            floor += rounding_floor(truth, problem.dtype) + relative * largest(truth)
            assert_close(label, grad, truth, naive, floor)
        assert not grads[0][unseen].any(), "dq is not 0 in rows that see no key"
    assert not guard.faults(), guard.faults()
    return o, lse


def check_case(
    case: Case,
    port: Port,
    device: torch.device | str,
    *,
    target: Target | None = None,
    tile: Tile | None = None,
    switches: Switches | None = None,
    dlse: Sequence[bool] = (False, True),
) -> None:
    """A case of `cases.yaml` against a port: the oracle, and what the case expects besides."""
    inputs = case.inputs(device)
    if case.refused is not None:
        with pytest.raises(ValueError, match=case.refused):
            Problem.from_tensors(inputs.q, inputs.k, inputs.v, mask=case.mask)
        return
    problem = Problem.from_tensors(inputs.q, inputs.k, inputs.v, mask=case.mask)
    assert problem == case.problem
    o, _ = check_port(port, inputs, problem, target=target, tile=tile, switches=switches, dlse=dlse)
    if case.entry == "one-by-one":
        assert torch.equal(o, inputs.v)
