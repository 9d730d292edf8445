"""FlashAttention-2 in CuTe DSL. Read `forward.py`, then `backward.py`; `port.py` is how they are reached."""

from .autograd import FlashAttentionCute
from .port import CutePort

__all__ = ["CutePort", "FlashAttentionCute"]
