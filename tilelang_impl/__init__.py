"""FlashAttention-2 in TileLang. Read `forward.py`, then `backward.py`; `port.py` is how they are reached."""

from .autograd import FlashAttentionTilelang
from .port import TilelangPort

__all__ = ["FlashAttentionTilelang", "TilelangPort"]
