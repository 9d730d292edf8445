"""The mask's arithmetic against a double loop over all pairs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import Mask, TileKind

LENGTHS = st.integers(0, 9)
SIDES = st.none() | st.integers(0, 11)
MASKS = st.builds(Mask, left=SIDES, right=SIDES, corner=st.sampled_from(["bottom_right", "top_left"]))


@dataclass(frozen=True)
class Drawn:
    mask: Mask
    len_q: int
    len_k: int
    begin: int
    end: int
    other_begin: int
    other_end: int

    def sees(self, i: int, j: int) -> bool:
        """The definition, pair by pair."""
        diagonal = i + (self.len_k - self.len_q if self.mask.corner == "bottom_right" else 0)
        after_left = self.mask.left is None or diagonal - self.mask.left <= j
        return after_left and (self.mask.right is None or j <= diagonal + self.mask.right)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """A mask, two lengths, and two ranges that may be empty or reach past the end."""
    (begin, end), (other_begin, other_end) = (sorted(draw(st.tuples(st.integers(0, 12), LENGTHS))) for _ in range(2))
    return Drawn(draw(MASKS), draw(LENGTHS), draw(LENGTHS), begin, end, other_begin, other_end)


def hull(positions: list[int]) -> tuple[int, int]:
    """The range from the first to the last, which must be all of them: a band leaves no holes."""
    if not positions:
        return 0, 0
    assert positions == list(range(positions[0], positions[-1] + 1))
    return positions[0], positions[-1] + 1


@given(drawn())
def test_dense_and_visible_pairs_count_every_pair(d: Drawn) -> None:
    expected = [[d.sees(i, j) for j in range(d.len_k)] for i in range(d.len_q)]
    assert d.mask.dense(d.len_q, d.len_k).tolist() == expected
    assert d.mask.visible_pairs(d.len_q, d.len_k) == sum(map(sum, expected))


@given(drawn())
def test_dense_tile_is_a_tile_of_dense(d: Drawn) -> None:
    rows, keys = (d.begin, min(d.end, d.len_q)), (d.other_begin, min(d.other_end, d.len_k))
    if rows[0] <= rows[1] and keys[0] <= keys[1]:
        tile = d.mask.dense_tile(*rows, *keys, d.len_q, d.len_k)
        assert torch.equal(tile, d.mask.dense(d.len_q, d.len_k)[slice(*rows), slice(*keys)])


@given(drawn())
def test_key_ranges_hold_the_keys_that_some_and_that_all_rows_see(d: Drawn) -> None:
    rows = range(d.begin, min(d.end, d.len_q))
    some = [j for j in range(d.len_k) if any(d.sees(i, j) for i in rows)]
    every = [j for j in range(d.len_k) if rows and all(d.sees(i, j) for i in rows)]
    begin, end = d.mask.key_range(d.begin, d.end, d.len_q, d.len_k)
    # Between two rows of a narrow band there is never a hole: consecutive rows see consecutive keys.
    assert (begin, end) == hull(some)
    assert d.mask.full_key_range(d.begin, d.end, d.len_q, d.len_k) == hull(every)


@given(drawn())
def test_query_ranges_hold_the_queries_that_see_some_and_that_see_all_keys(d: Drawn) -> None:
    keys = range(d.begin, min(d.end, d.len_k))
    some = [i for i in range(d.len_q) if any(d.sees(i, j) for j in keys)]
    every = [i for i in range(d.len_q) if keys and all(d.sees(i, j) for j in keys)]
    assert d.mask.query_range(d.begin, d.end, d.len_q, d.len_k) == hull(some)
    assert d.mask.full_query_range(d.begin, d.end, d.len_q, d.len_k) == hull(every)


@given(drawn())
def test_tile_kind_says_what_the_tile_holds(d: Drawn) -> None:
    rows, keys = range(d.begin, min(d.end, d.len_q)), range(d.other_begin, d.other_end)
    pairs = [j < d.len_k and d.sees(i, j) for i in rows for j in keys]
    kind = d.mask.tile_kind(d.begin, d.end, d.other_begin, d.other_end, d.len_q, d.len_k)
    expected = TileKind.SKIP if not any(pairs) else TileKind.FULL if all(pairs) else TileKind.EDGE
    assert kind is expected


@given(MASKS, st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=50)
def test_rows_with_a_visible_key_are_one_range(mask: Mask, len_q: int, len_k: int) -> None:
    seen = mask.dense(len_q, len_k).any(dim=1).nonzero().flatten().tolist()
    assert mask.query_range(0, len_k, len_q, len_k) == hull(seen)


@pytest.mark.parametrize(
    ("mask", "lengths", "expected"),
    [
        (Mask.causal(), (2, 5), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        (Mask.causal("top_left"), (2, 5), [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]),
        (Mask.causal(), (3, 1), [[0], [0], [1]]),
        (Mask(left=1, right=0), (3, 3), [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
        (Mask(left=0, right=1, corner="top_left"), (3, 3), [[1, 1, 0], [0, 1, 1], [0, 0, 1]]),
    ],
    ids=str,
)
def test_dense_written_out(mask: Mask, lengths: tuple[int, int], expected: list[list[int]]) -> None:
    assert mask.dense(*lengths).int().tolist() == expected


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"left": -1}, ValueError, "left must be >= 0"),
        ({"right": 1.0}, TypeError, "right must be an int"),
        ({"right": True}, TypeError, "right must be an int"),
        ({"corner": "left"}, ValueError, "corner must be one of"),
    ],
)
def test_a_wrong_mask_is_refused(arguments: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Mask(**arguments)


@given(drawn())
def test_it_knows_whether_some_row_sees_no_key(d: Drawn) -> None:
    dense = d.mask.dense(d.len_q, d.len_k)
    assert d.mask.has_unseeing_rows(d.len_q, d.len_k) == bool((~dense.any(dim=1)).any())


@pytest.mark.parametrize("mask", [Mask(10**20, 3), Mask(3, 10**20), Mask(10**20, 10**20, "top_left")], ids=str)
def test_a_side_without_end_is_an_open_one(mask: Mask) -> None:
    opened = Mask(*(None if side == 10**20 else side for side in (mask.left, mask.right)), mask.corner)
    assert mask.visible_pairs(9, 7) == opened.visible_pairs(9, 7)
    assert torch.equal(mask.dense(9, 7), opened.dense(9, 7))
