"""FlashAttention-2 in Triton. Read `forward.py`, then `backward.py`; `port.py` is how they are reached."""
