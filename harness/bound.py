"""The roofline of one kernel: what each ceiling alone would let it take, and which of them holds it back.

Every ceiling gives a time that the kernel takes at least: its operations at the rate of its instruction, its bytes at
the rate of a copy, its exponentials at theirs. The longest of these is its roof; a kernel whose operations take longer
than its bytes lies right of the ridge. Source: Williams, Waterman, Patterson 2009, "Roofline".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .ceilings import Ceilings
from .counters import Counters

NEAR = 0.7  # of a ceiling: what is closer is held back by it
MORE = 1.2  # times the bytes that are counted: what moves no more moves those
IN_TURN = 0.85  # of the time: what products and exponentials take one after the other, with little overlap
SHORT_MS = 0.005  # less is hardly more than starting and draining the card
FEW_WARPS = 20.0  # percent of those that a multiprocessor could hold

PRODUCTS, MEMORY, EXPONENTIALS = "products", "memory", "exponentials"


def least_ms(flops: int, moved_bytes: int, exponentials: int, instruction: str, ceilings: Ceilings) -> dict[str, float]:
    """Milliseconds that a kernel takes at least by each ceiling that is known; operations without one count none."""
    least = {}
    if instruction in ceilings.matrix_tflops:
        least[PRODUCTS] = flops / ceilings.matrix_tflops[instruction] / 1e9
    if ceilings.copy_gbs:
        least[MEMORY] = moved_bytes / ceilings.copy_gbs / 1e6
    if exponentials and ceilings.exp_gps:
        least[EXPONENTIALS] = exponentials / ceilings.exp_gps / 1e6
    return least


def bound(least: Mapping[str, float], ms: float | None, ceilings: Ceilings, counters: Counters | None = None) -> str:
    """What holds a kernel back, in words. ms: what it takes; None where nothing was timed, and then its roof is told.

    In this order: a ceiling that it comes near; what the counters find near its peak; products and exponentials one
    after the other; that it is over too soon; and else latency, its warps waiting for what the counters say.
    """
    if not least:
        return "–"
    roof = max(least, key=lambda name: least[name])
    if ms is None or least[roof] >= NEAR * ms:
        return roof
    if counters is not None:
        if (counters.tensor_percent or 0.0) >= 100 * NEAR:
            return "the matrix unit"
        moving_ms = (counters.dram_bytes or 0.0) / (ceilings.copy_gbs or math.inf) / 1e6
        if moving_ms >= NEAR * (counters.ms or ms):  # ncu's own launch
            return MEMORY if moving_ms <= MORE * least.get(MEMORY, 0.0) else f"{MEMORY}, which moves more than counted"
    if PRODUCTS in least and least[PRODUCTS] + least.get(EXPONENTIALS, 0.0) >= IN_TURN * ms:
        return "products and exponentials in turn"
    if ms < SHORT_MS:
        return "too short"
    told = ["latency"]
    if counters is not None and counters.stalls:
        told.append(f"stalled on {counters.stalls[0][0]}")
    if counters is not None and counters.warps_percent is not None and counters.warps_percent < FEW_WARPS:
        told.append("few warps")
    return ", ".join(told)
