"""What the ports are measured against, behind the ports' own protocol.

A baseline is checked before it is timed like everything else, but it is not ours: it allocates its own memory, so that
nothing is poisoned, and its lse has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import Direction, Mask, Port, Problem, Switches, Target, Tile, Unsupported
from common.ports import dtype_reason

from .errors import one_line

Launch = Callable[[], torch.Tensor]
LaunchBackward = Callable[[], tuple[torch.Tensor, ...]]


class Baseline(Port):
    """A port of somebody else's. It has no tile of ours to choose: `choose_tile` gives a token that means nothing."""

    title = ""

    def tiles(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        """Its own business."""
        return [Tile(1, 1, 1, 1)]

    def context(self) -> AbstractContextManager:
        """What has to be entered around `launch_forward`'s and `launch_backward`'s launches."""
        raise NotImplementedError

    def launch_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> Launch:
        """What a timing launches: `o`, without autograd."""
        raise NotImplementedError

    def launch_backward(
        self, do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
    ) -> LaunchBackward:
        """What a timing launches: `dq, dk, dv` by `autograd.grad` from a forward that was run beforehand."""
        raise NotImplementedError


class SdpaFlash(Baseline):
    """`F.scaled_dot_product_attention` with the FlashAttention backend forced, which is FlashAttention-2's own code."""

    name = "sdpa_flash"
    title = "SDPA flash"

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        """fp16 and bf16 on CUDA; no windows; and of the corners those that it computes without NaN."""
        if not torch.cuda.is_available():
            return "SDPA's flash backend needs a CUDA device"
        reason = dtype_reason("SDPA flash", problem, (torch.float16, torch.bfloat16))
        if reason is not None:
            return reason
        if problem.mask.is_full:
            return None
        if problem.mask.left is not None or problem.mask.right != 0:
            return "SDPA flash has no window"
        if problem.mask.corner == "top_left" and problem.len_q != problem.len_k:
            return "SDPA flash has no top-left corner for unequal lengths"
        if problem.len_q > problem.len_k:
            return "SDPA flash gives NaN for rows that see no key"
        return None

    def context(self) -> AbstractContextManager:
        """Forces the flash backend."""
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)

    def launch_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> Launch:
        """o by the public function."""
        mask = self._bias(problem)

        def launch() -> torch.Tensor:
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None and not problem.mask.is_full,
                scale=problem.scale,
                enable_gqa=problem.group > 1,
            )

        return launch

    def launch_backward(
        self, do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
    ) -> LaunchBackward:
        """Gradients of o by `autograd.grad`, over a graph that is kept."""
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad(), self.context():
            o = self.launch_forward(leaves[0], leaves[1], leaves[2], problem)()
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    @staticmethod
    def _bias(problem: Problem) -> torch.Tensor | None:
        # is_causal is the top-left corner, and flash refuses it for unequal lengths; this bias is the other corner.
        if problem.mask == Mask() or problem.len_q == problem.len_k:
            return None
        from torch.nn.attention.bias import causal_lower_right  # here, because it brings in torch._dynamo: seconds

        return causal_lower_right(problem.len_q, problem.len_k)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        target: Target,
        tile: Tile,
        switches: Switches,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), self.context(), _no_kernel_is_unsupported():
            o = self.launch_forward(q, k, v, problem)()
            # The public function keeps its lse; the operator below it returns it, and its causal is bottom-right.
            operator = torch.ops.aten._scaled_dot_product_flash_attention
            lse = operator(q, k, v, 0.0, not problem.mask.is_full, False, scale=problem.scale)[1]
        return o, lse[..., : problem.len_q].contiguous()

    def _backward(
        self,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        problem: Problem,
        target: Target,
        tile: Tile,
        switches: Switches,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if dlse is not None:
            raise Unsupported("SDPA flash has no gradient for lse")
        with _no_kernel_is_unsupported():
            dq, dk, dv = self.launch_backward(do, q, k, v, problem)()
        return dq, dk, dv


class _no_kernel_is_unsupported:  # noqa: N801
    """Turns PyTorch's "No available kernel", what it says when the forced backend will not take a problem."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and "No available kernel" in str(error):
            raise Unsupported(f"SDPA flash will not take it ({one_line(error)})") from error


SDPA_FLASH = SdpaFlash()
BASELINES: dict[str, Baseline] = {baseline.name: baseline for baseline in (SDPA_FLASH,)}
