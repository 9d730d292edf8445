"""One attention problem: its shapes, dtype, mask and scale, and what it costs at least."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

import torch

from .errors import check_strided, check_type
from .mask import Mask

Direction = Literal["forward", "backward"]

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 256, 8
FP32 = torch.finfo(torch.float32)
SCALE_MAX = FP32.max / 2
LEN_MAX = 2**31 - 1 - 2 * 256  # positions, rounded up to a tile, stay in 32 bits, and so does the sum of two


def check_scale(scale: object) -> float:
    """`scale` as a float. Raises TypeError when it is no number, ValueError unless it is finite and > 0."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    # Kernels take it in fp32, times log2(e): 1e39 would be infinite there and 1e-46 zero.
    if not FP32.tiny <= scale <= SCALE_MAX:
        raise ValueError(f"scale must be finite and > 0 in fp32, {FP32.tiny:.3g} to {SCALE_MAX:.3g}, got {scale}")
    return float(scale)


def check_direction(direction: object) -> None:
    """Raises ValueError unless it is one of the two."""
    if direction not in get_args(Direction):
        raise ValueError(f"direction must be one of {', '.join(get_args(Direction))}, got {direction!r}")


@dataclass(frozen=True)
class Problem:
    """The shapes `q (B, Hq, Nq, D)`, `k, v (B, Hkv, Nk, D)`, the dtype, the mask and the scale of one attention.

    Raises ValueError/TypeError, naming the field, when a value is not one the contract allows: `heads_q` a multiple
    of `heads_kv`, `head_dim` a multiple of 8 from 16 to 256, dtype fp16, bf16 or fp32, `scale` finite and > 0
    (default `1/sqrt(D)`).
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    mask: Mask = field(default_factory=Mask)
    scale: float = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        for name, least in (("batch", 0), ("heads_q", 1), ("heads_kv", 1), ("len_q", 0), ("len_k", 0), ("head_dim", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        for name in ("len_q", "len_k"):
            if getattr(self, name) > LEN_MAX:
                raise ValueError(f"{name} must be <= {LEN_MAX}, got {getattr(self, name)}")
        if self.len_q + self.len_k > LEN_MAX:
            raise ValueError(f"len_q + len_k must be <= {LEN_MAX}, got {self.len_q} + {self.len_k}")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}")
        if not HEAD_DIM_MIN <= self.head_dim <= HEAD_DIM_MAX or self.head_dim % HEAD_DIM_STEP:
            raise ValueError(
                f"head_dim must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}, "
                f"got {self.head_dim}"
            )
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPE_NAMES:
            raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPE_NAMES))}, got {self.dtype!r}")
        check_type("mask", self.mask, Mask)
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else check_scale(self.scale)
        object.__setattr__(self, "scale", scale)

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> Problem:
        """The problem that `q (B, Hq, Nq, D)` and `k, v (B, Hkv, Nk, D)` pose; `(B, N, D)` means one head.

        Raises TypeError for what is not a strided tensor or differs in dtype, ValueError for shapes and devices that
        do not go together; the message names the argument.
        """
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_strided(name, tensor)
        if mask is not None:
            check_type("mask", mask, Mask)
        if scale is not None:
            scale = check_scale(scale)
        q_form, k_form, v_form = ((tensor.shape, tensor.dtype, tensor.device) for tensor in (q, k, v))
        return _posed_by(q_form, k_form, v_form, mask, scale)

    @property
    def group(self) -> int:
        """How many query heads share one key head."""
        return self.heads_q // self.heads_kv

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """`(B, Hq, Nq, D)`, the shape of q, o, do and dq."""
        return self.batch, self.heads_q, self.len_q, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """`(B, Hkv, Nk, D)`, the shape of k, v, dk and dv."""
        return self.batch, self.heads_kv, self.len_k, self.head_dim

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """`(B, Hq, Nq)`, the shape of lse, delta and dlse."""
        return self.batch, self.heads_q, self.len_q

    @property
    def id(self) -> str:
        """A stable name that tells every field, for records, file names and `--only`."""
        heads = f"h{self.heads_q}" if self.group == 1 else f"h{self.heads_q}kv{self.heads_kv}"
        length = f"n{self.len_q}" if self.len_q == self.len_k else f"n{self.len_q}k{self.len_k}"
        name = f"b{self.batch}-{heads}-{length}-d{self.head_dim}-{DTYPE_NAMES[self.dtype]}-{self.mask}"
        return name if self.scale == 1 / math.sqrt(self.head_dim) else f"{name}-s{self.scale!r}"

    def flops(self, direction: Direction) -> int:
        """Floating-point operations by the convention of the field, over the visible pairs only.

        Forward: two products, `4·B·Hq·D·pairs`. Backward: five products, 2.5 times that; what a kernel recomputes
        beyond it earns no credit (Dao 2023, section 4.1).
        """
        check_direction(direction)
        forward = 4 * self.batch * self.heads_q * self.head_dim * self.mask.visible_pairs(self.len_q, self.len_k)
        return forward if direction == "forward" else forward * 5 // 2

    def bytes(self, direction: Direction) -> int:
        """Bytes of device memory that must move: each tensor read or written once.

        Forward reads q, k, v and writes o, lse. Backward reads q, k, v, o, do, lse and writes dq, dk, dv.
        """
        check_direction(direction)
        q_bytes = math.prod(self.q_shape) * self.dtype.itemsize
        kv_bytes = math.prod(self.kv_shape) * self.dtype.itemsize
        lse_bytes = math.prod(self.lse_shape) * 4
        if direction == "forward":
            return 2 * q_bytes + 2 * kv_bytes + lse_bytes
        return 4 * q_bytes + 4 * kv_bytes + lse_bytes


Form = tuple[torch.Size, torch.dtype, torch.device]


@lru_cache(maxsize=4096)
def _posed_by(q: Form, k: Form, v: Form, mask: Mask | None, scale: float | None) -> Problem:
    for name, (shape, dtype, _) in (("q", q), ("k", k), ("v", v)):
        if dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} must be {', '.join(DTYPE_NAMES.values())}, got {dtype}")
        if len(shape) not in (3, 4):
            raise ValueError(f"{name} must be (B, H, N, D) or (B, N, D), got shape {tuple(shape)}")
    q_shape, q_dtype, q_device = q
    for name, (shape, dtype, device) in (("k", k), ("v", v)):
        if dtype != q_dtype:
            raise TypeError(f"{name} must have the dtype of q, {q_dtype}, got {dtype}")
        if device != q_device:
            raise ValueError(f"{name} must be on the device of q, {q_device}, got {device}")
        if len(shape) != len(q_shape):
            raise ValueError(f"{name} must have {len(q_shape)} dimensions as q has, got shape {tuple(shape)}")
        if shape[0] != q_shape[0]:
            raise ValueError(f"{name} must have the batch of q, {q_shape[0]}, got {shape[0]}")
        if shape[-1] != q_shape[-1]:
            raise ValueError(f"{name} must have the head_dim of q, {q_shape[-1]}, got {shape[-1]}")
    k_shape, v_shape = k[0], v[0]
    if v_shape != k_shape:
        raise ValueError(f"v must have the shape of k, {tuple(k_shape)}, got {tuple(v_shape)}")
    one_head = len(q_shape) == 3
    return Problem(
        batch=q_shape[0],
        heads_q=1 if one_head else q_shape[1],
        heads_kv=1 if one_head else k_shape[1],
        len_q=q_shape[-2],
        len_k=k_shape[-2],
        head_dim=q_shape[-1],
        dtype=q_dtype,
        mask=Mask() if mask is None else mask,
        scale=scale,  # type: ignore[arg-type]
    )
