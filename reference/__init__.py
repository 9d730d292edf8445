"""Attention in PyTorch: the float64 oracle, the naive attention, the tiled FlashAttention-2, a row's online softmax."""

from .autograd import FlashAttentionPytorch
from .naive import naive_attention, naive_backward, naive_forward
from .oracle import oracle_backward, oracle_forward
from .port import ReferencePort
from .tiled import tiled_backward, tiled_forward
from .trace import SoftmaxStep, trace_row

__all__ = [
    "FlashAttentionPytorch",
    "ReferencePort",
    "SoftmaxStep",
    "naive_attention",
    "naive_backward",
    "naive_forward",
    "oracle_backward",
    "oracle_forward",
    "tiled_backward",
    "tiled_forward",
    "trace_row",
]
