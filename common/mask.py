"""Which keys a query sees, for one pair and for whole tiles.

This is the one place where the mask's arithmetic is written in Python; the kernels repeat it on the device and are
tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

import torch

Corner = Literal["bottom_right", "top_left"]


class TileKind(Enum):
    """What a kernel has to do with a tile of scores."""

    SKIP = "skip"  # no pair is visible: do not visit the tile
    FULL = "full"  # every pair is visible: no comparison is needed
    EDGE = "edge"  # some pairs are visible: compare


@dataclass(frozen=True)
class Mask:
    """A band of visible keys: query `i` sees key `j` when `i + offset - left <= j <= i + offset + right`.

    left, right: how many keys before and after the diagonal are visible; `None` leaves that side open.
    corner: where the diagonal lies. `"bottom_right"` aligns the last query with the last key (`offset = Nk - Nq`, the
        convention of FlashAttention-2); `"top_left"` aligns the first with the first (`offset = 0`, the convention of
        PyTorch's `is_causal`).

    Raises TypeError when a side is no integer, ValueError when it is negative or the corner is unknown.
    """

    left: int | None = None
    right: int | None = None
    corner: Corner = "bottom_right"

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is None:
                continue
            if isinstance(side, bool) or not isinstance(side, int):
                raise TypeError(f"mask {name} must be an int or None, got {type(side).__name__}")
            if side < 0:
                raise ValueError(f"mask {name} must be >= 0, got {side}; use None to leave that side unbounded")
        if self.corner not in get_args(Corner):
            raise ValueError(f"mask corner must be one of {', '.join(get_args(Corner))}, got {self.corner!r}")

    @classmethod
    def causal(cls, corner: Corner = "bottom_right") -> Mask:
        """Every key up to the diagonal."""
        return cls(right=0, corner=corner)

    @property
    def is_full(self) -> bool:
        """Whether both sides are open, so that every query sees every key."""
        return self.left is None and self.right is None

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        name = "causal" if self.right == 0 else "window" if self.right is None else f"right{self.right}"
        if self.left is not None:
            name += f"-left{self.left}"
        return name if self.corner == "bottom_right" else f"{name}-topleft"

    def offset(self, len_q: int, len_k: int) -> int:
        """The key on the diagonal of query 0."""
        return len_k - len_q if self.corner == "bottom_right" else 0

    def band(self, len_q: int, len_k: int) -> tuple[int | None, int | None]:
        """`(low, high)`: query `i` sees the keys `i + low <= j <= i + high`; `None` where that side is open.

        Both lie within `-len_q` and `len_k`: beyond, a side sees no more and no less, and a sum with a position stays
        in the integers that hold positions.
        """
        offset = self.offset(len_q, len_k)
        low = None if self.left is None else min(max(offset - self.left, -len_q), len_k)
        high = None if self.right is None else min(max(offset + self.right, -len_q), len_k)
        return low, high

    def has_unseeing_rows(self, len_q: int, len_k: int) -> bool:
        """Whether some query sees no key."""
        if len_q == 0:
            return False
        low, high = self.band(len_q, len_k)
        return len_k == 0 or (high is not None and high < 0) or (low is not None and len_q - 1 + low >= len_k)

    def key_range(self, row_begin: int, row_end: int, len_q: int, len_k: int) -> tuple[int, int]:
        """The keys `[begin, end)` that some query of the rows `[row_begin, row_end)` sees; `(0, 0)` when none does."""
        row_end = min(row_end, len_q)
        if row_begin >= row_end:
            return 0, 0
        low, high = self.band(len_q, len_k)
        begin = 0 if low is None else max(0, row_begin + low)
        end = len_k if high is None else min(len_k, row_end - 1 + high + 1)
        return (begin, end) if begin < end else (0, 0)

    def full_key_range(self, row_begin: int, row_end: int, len_q: int, len_k: int) -> tuple[int, int]:
        """The keys `[begin, end)` all queries of `[row_begin, row_end)` see; `(0, 0)` when there is none.

        Rows past `len_q` do not count.
        """
        row_end = min(row_end, len_q)
        if row_begin >= row_end:
            return 0, 0
        low, high = self.band(len_q, len_k)
        begin = 0 if low is None else max(0, row_end - 1 + low)
        end = len_k if high is None else min(len_k, row_begin + high + 1)
        return (begin, end) if begin < end else (0, 0)

    def _transposed(self) -> Mask:
        # Key j is seen by the queries j - high <= i <= j - low: the same band with its sides and its axes exchanged.
        # With the bottom-right corner the offset Nk - Nq changes sign by itself; with the top-left one it stays 0.
        return Mask(left=self.right, right=self.left, corner=self.corner)

    def query_range(self, key_begin: int, key_end: int, len_q: int, len_k: int) -> tuple[int, int]:
        """The queries `[begin, end)` that see some key of `[key_begin, key_end)`; `(0, 0)` when none does."""
        return self._transposed().key_range(key_begin, key_end, len_k, len_q)

    def full_query_range(self, key_begin: int, key_end: int, len_q: int, len_k: int) -> tuple[int, int]:
        """The queries `[begin, end)` that see every key of `[key_begin, key_end)`; keys past `len_k` do not count."""
        return self._transposed().full_key_range(key_begin, key_end, len_k, len_q)

    def tile_kind(self, row_begin: int, row_end: int, key_begin: int, key_end: int, len_q: int, len_k: int) -> TileKind:
        """What a tile of scores is. A tile that reaches past the last key is never full: the keys beyond are masked."""
        begin, end = self.key_range(row_begin, row_end, len_q, len_k)
        if max(begin, key_begin) >= min(end, key_end):
            return TileKind.SKIP
        full_begin, full_end = self.full_key_range(row_begin, row_end, len_q, len_k)
        if full_begin <= key_begin and key_end <= full_end:
            return TileKind.FULL
        return TileKind.EDGE

    def visible_pairs(self, len_q: int, len_k: int) -> int:
        """How many (query, key) pairs are visible."""
        if self.is_full:
            return len_q * len_k
        low, high = self.band(len_q, len_k)
        rows = torch.arange(len_q, dtype=torch.int64, device="cpu")
        first = torch.zeros_like(rows) if low is None else (rows + low).clamp(min=0)
        last = torch.full_like(rows, len_k - 1) if high is None else (rows + high).clamp(max=len_k - 1)
        return int((last - first + 1).clamp(min=0).sum())

    def dense(self, len_q: int, len_k: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The mask as a bool tensor `(Nq, Nk)`, True where the key is visible: for references, never for kernels."""
        return self.dense_tile(0, len_q, 0, len_k, len_q, len_k, device)

    def dense_tile(
        self,
        row_begin: int,
        row_end: int,
        key_begin: int,
        key_end: int,
        len_q: int,
        len_k: int,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """The tile `[row_begin, row_end) × [key_begin, key_end)` of `dense`, without the rest of it."""
        low, high = self.band(len_q, len_k)
        rows = torch.arange(row_begin, row_end, device=device)[:, None]
        keys = torch.arange(key_begin, key_end, device=device)[None, :]
        visible = torch.ones(row_end - row_begin, key_end - key_begin, dtype=torch.bool, device=device)
        if low is not None:
            visible &= keys >= rows + low
        if high is not None:
            visible &= keys <= rows + high
        return visible
