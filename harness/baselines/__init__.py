"""What the ports are measured against, by name; the first one is what speeds are relative to."""

from __future__ import annotations

from .flash_attention import FlashAttention2, FlashAttention4
from .flex import Flex
from .protocol import Baseline
from .sdpa import SDPA_FLASH, SDPA_OTHERS
from .tilelang_example import TileLangExample

__all__ = ["BASELINES", "SDPA_FLASH", "Baseline"]

BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (SDPA_FLASH, *SDPA_OTHERS, Flex(), FlashAttention2(), FlashAttention4(), TileLangExample())
}
