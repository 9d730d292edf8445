"""FlashAttention-2 in Triton. Read `forward.py`, then `backward.py`; `port.py` is how they are reached."""

from .autograd import FlashAttentionTriton
from .port import TritonPort

__all__ = ["FlashAttentionTriton", "TritonPort"]
