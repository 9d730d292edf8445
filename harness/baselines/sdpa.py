"""PyTorch's `F.scaled_dot_product_attention`, each of its backends forced and named."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import Problem, Unsupported

from ..errors import one_line
from .protocol import HALVES, Attend, Baseline, causal_only, is_lower_right


class Sdpa(Baseline):
    """One backend. lower_right: it takes causal masks of unequal lengths, which PyTorch does for some backends."""

    def __init__(self, name: str, title: str, backend: SDPBackend, *, fp32: bool, lower_right: bool) -> None:
        self.name, self.title = name, title  # type: ignore[misc]
        self.dtypes = (*HALVES, torch.float32) if fp32 else HALVES  # type: ignore[misc]
        self._backend, self._lower_right = backend, lower_right

    def refusal(self, problem: Problem) -> str | None:
        """No windows; and of the corners those that it computes without NaN."""
        reason = causal_only(self.title, problem)
        if reason is None and is_lower_right(problem) and not self._lower_right:
            return f"{self.title} has no bottom-right corner for unequal lengths"
        return reason

    def context(self) -> AbstractContextManager:
        """Forces the backend."""
        return sdpa_kernel(self._backend)

    def attention(self, problem: Problem, device: torch.device) -> Attend:
        """The public function."""
        mask = None
        if is_lower_right(problem):
            # is_causal is the top-left corner, and flash refuses it for unequal lengths; this bias is the other corner.
            from torch.nn.attention.bias import causal_lower_right  # here, because it imports torch._dynamo: seconds

            mask = causal_lower_right(problem.len_q, problem.len_k)
        options = {
            "attn_mask": mask,
            "is_causal": mask is None and not problem.mask.is_full,
            "scale": problem.scale,
            "enable_gqa": problem.group > 1,
        }

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            try:
                return F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
            except RuntimeError as error:
                # What PyTorch says when the forced backend will not take a problem.
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise Unsupported(f"{self.title} will not take it ({one_line(error)})") from error
                raise

        return attend


# FlashAttention-2's own code, as PyTorch ships it.
SDPA_FLASH = Sdpa("sdpa_flash", "SDPA flash", SDPBackend.FLASH_ATTENTION, fp32=False, lower_right=True)
SDPA_OTHERS = (
    Sdpa("sdpa_cudnn", "SDPA cuDNN", SDPBackend.CUDNN_ATTENTION, fp32=False, lower_right=False),
    Sdpa("sdpa_efficient", "SDPA efficient", SDPBackend.EFFICIENT_ATTENTION, fp32=True, lower_right=True),
    Sdpa("sdpa_math", "SDPA math", SDPBackend.MATH, fp32=True, lower_right=False),
)
