"""What the tests of every port share: a case run against a port, by the rule of `harness.checks`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from common import GuardedBuffers, Port, Problem, Switches, Target, Tile
from harness.checks import Truth, Yardstick, compare

from .cases import Case, Inputs


def assert_allowed(
    values: Sequence[torch.Tensor], truth: dict[str, Yardstick], dtype: torch.dtype, label: str = ""
) -> None:
    """Each tensor's error is allowed; the message names the worst element. lse is fp32, the others are in `dtype`."""
    for x, (name, yardstick) in zip(values, truth.items(), strict=True):
        assert x.dtype == (torch.float32 if name == "lse" else dtype)
        assert x.shape == yardstick.oracle.shape
        check = compare(name, x, yardstick)
        worst = "" if check.worst is None else check.worst.describe(name, None)
        assert check.passed, f"{name}{label} errs by {check.error:.3g}, allowed {check.allowed:.3g}: {worst}"


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
    truth = Truth(problem, inputs)
    with GuardedBuffers() as guard:
        o, lse = port.forward(q, k, v, problem, **options)
    assert_allowed((o, lse), truth.forward(), problem.dtype)
    unseen = truth.forward()["lse"].oracle == -torch.inf
    assert not o[unseen].any(), "o is not 0 in rows that see no key"
    costs = truth.cost_of_delta(o)
    for with_dlse in dlse:
        gradient = inputs.dlse if with_dlse else None
        with guard:
            grads = port.backward(inputs.do, gradient, q, k, v, o, lse, problem, **options, deterministic=deterministic)
        label = " with dlse" if with_dlse else ""
        assert_allowed(grads, truth.backward(costs, with_dlse=with_dlse), problem.dtype, label)
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
