"""The device's arithmetic of tiles against `common.Mask`: which tiles a program visits, compares and owns."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from common import Mask, TileKind
from triton_impl.blocks import schedule, tile_range, visible

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = st.integers(0, 200)
SIDES = st.none() | st.integers(0, 210)
MASKS = st.builds(Mask, left=SIDES, right=SIDES, corner=st.sampled_from(["bottom_right", "top_left"]))
BLOCKS = st.sampled_from([16, 32])
MOST_TILES = 16  # of 200 positions and the smallest block: 13


@triton.jit(do_not_specialize=("length", "other", "low", "high"))
def ranges_kernel(
    OUT, length, other, low, high, BLOCK: tl.constexpr, OTHER_BLOCK: tl.constexpr, HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr, SKIP: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """`tile_range` of every tile of one side, as the kernels call it."""
    for tile in range(tl.cdiv(length, BLOCK)):
        first = tile * BLOCK
        begin, full_begin, full_end, end = tile_range(
            first, tl.minimum(first + BLOCK, length) - 1, other, low, high, OTHER_BLOCK, HAS_LOW, HAS_HIGH, SKIP, EDGES
        )
        tl.store(OUT + tile * 4, begin)
        tl.store(OUT + tile * 4 + 1, full_begin)
        tl.store(OUT + tile * 4 + 2, full_end)
        tl.store(OUT + tile * 4 + 3, end)


@triton.jit(do_not_specialize=("row_begin", "key_begin", "len_k", "low", "high"))
def visible_kernel(
    OUT, row_begin, key_begin, len_k, low, high, BLOCK: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """`visible` of one tile `[rows, keys]`, or as dkdv_kernel calls it `[keys, rows]`, stored as `[rows, keys]`."""
    rows = row_begin + tl.arange(0, BLOCK)
    keys = key_begin + tl.arange(0, BLOCK)
    if TRANSPOSED:
        seen = visible(rows[None, :], keys[:, None], len_k, low, high, HAS_LOW, HAS_HIGH)
        offsets = tl.arange(0, BLOCK)[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None]
    else:
        seen = visible(rows[:, None], keys[None, :], len_k, low, high, HAS_LOW, HAS_HIGH)
        offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(OUT + offsets, seen.to(tl.int32))


@triton.jit(do_not_specialize=("tiles", "heads", "section"))
def schedule_kernel(OUT, tiles, heads, section, HEAVY_LAST: tl.constexpr, ORDER: tl.constexpr):
    """`(tile, head)` of every program."""
    tile, head = schedule(tiles, heads, section, HEAVY_LAST, ORDER)
    tl.store(OUT + tl.program_id(0) * 2, tile)
    tl.store(OUT + tl.program_id(0) * 2 + 1, head)


def run_ranges(
    length: int, other: int, low: int | None, high: int | None, block: int, other_block: int, skip: bool, edges: bool
) -> list[list[int]]:
    out = torch.full((MOST_TILES, 4), -1, dtype=torch.int32, device=DEVICE)
    ranges_kernel[(1,)](
        out, length, other, low or 0, high or 0, block, other_block, low is not None, high is not None, skip, edges
    )
    return out.tolist()[: triton.cdiv(length, block)]


def run_schedule(tiles: int, heads: int, section: int, *, heavy_last: bool, order: bool) -> list[tuple[int, int]]:
    out = torch.full((tiles * heads, 2), -1, dtype=torch.int32, device=DEVICE)
    schedule_kernel[(tiles * heads,)](out, tiles, heads, section, heavy_last, order)
    return [(tile, head) for tile, head in out.tolist()]


def check_ranges(
    found: list[list[int]], kinds: list[list[TileKind]], length: int, other_block: int, skip: bool, edges: bool
) -> None:
    """The bounds of each tile of one side against the kinds of the tiles that it makes with those of the other side.

    length: of the other side. Of the last tile there the kind is that of its positions inside `length`.
    """
    assert len(found) == len(kinds)
    for (begin, full_begin, full_end, end), row in zip(found, kinds, strict=True):
        assert 0 <= begin <= full_begin <= full_end <= end <= length
        # The walk begins at a tile and goes in whole tiles, so that the interior ones are whole and inside.
        if begin < end:
            assert begin % other_block == 0
        for bound in (full_begin, full_end) if full_begin < full_end else ():
            assert bound % other_block == 0
        if full_begin == full_end:
            # All is edge: the walks over [begin, full_begin) and [full_end, end) must not visit a tile twice.
            assert full_begin in (begin, end) or full_begin % other_block == 0
        if not edges:
            assert full_begin == full_end == begin
        if not skip:
            assert (begin, end) == (0, length)
        for tile, kind in enumerate(row):
            first, past = tile * other_block, min((tile + 1) * other_block, length)
            visited = begin <= first < end
            assert visited or kind is TileKind.SKIP
            if skip and visited:
                assert kind is not TileKind.SKIP
            interior = full_begin <= first < full_end
            if interior:
                assert kind is TileKind.FULL
                assert past - first == other_block
            elif edges and kind is TileKind.FULL:
                # Only the tile that is not whole is compared although it is full.
                assert past - first < other_block


@given(MASKS, LENGTHS, LENGTHS, BLOCKS, BLOCKS, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_keys_of_a_query_tile_are_those_of_the_mask(
    mask: Mask, len_q: int, len_k: int, block_m: int, block_n: int, skip: bool, edges: bool
) -> None:
    low, high = mask.band(len_q, len_k)
    found = run_ranges(len_q, len_k, low, high, block_m, block_n, skip, edges)
    kinds = [
        [
            mask.tile_kind(row, row + block_m, key, min(key + block_n, len_k), len_q, len_k)
            for key in range(0, len_k, block_n)
        ]
        for row in range(0, len_q, block_m)
    ]
    check_ranges(found, kinds, len_k, block_n, skip, edges)
    for row, (begin, full_begin, full_end, end) in zip(range(0, len_q, block_m), found, strict=True):
        first, past = mask.key_range(row, row + block_m, len_q, len_k)
        if skip:
            assert (begin, end) == (first // block_n * block_n, past) if first < past else begin == end
        if edges and full_begin < full_end:
            full_first, full_past = mask.full_key_range(row, row + block_m, len_q, len_k)
            assert full_first <= full_begin < full_first + block_n
            assert full_past - block_n < full_end <= full_past


@given(MASKS, LENGTHS, LENGTHS, BLOCKS, BLOCKS, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_queries_of_a_key_tile_are_those_of_the_transposed_band(
    mask: Mask, len_q: int, len_k: int, block_m: int, block_n: int, skip: bool, edges: bool
) -> None:
    low, high = mask.band(len_q, len_k)
    # As dkdv_kernel calls it: a key is seen by the queries of the band with its sides exchanged.
    below, above = None if high is None else -high, None if low is None else -low
    found = run_ranges(len_k, len_q, below, above, block_n, block_m, skip, edges)
    kinds = [
        [
            mask.tile_kind(row, row + block_m, key, min(key + block_n, len_k), len_q, len_k)
            for row in range(0, len_q, block_m)
        ]
        for key in range(0, len_k, block_n)
    ]
    check_ranges(found, kinds, len_q, block_m, skip, edges)
    for key, (begin, full_begin, full_end, end) in zip(range(0, len_k, block_n), found, strict=True):
        first, past = mask.query_range(key, key + block_n, len_q, len_k)
        if skip:
            assert (begin, end) == (first // block_m * block_m, past) if first < past else begin == end
        if edges and full_begin < full_end:
            full_first, full_past = mask.full_query_range(key, key + block_n, len_q, len_k)
            assert full_first <= full_begin < full_first + block_m
            assert full_past - block_m < full_end <= full_past


@given(MASKS, LENGTHS, st.integers(1, 200), BLOCKS, st.integers(0, 12), st.integers(0, 12), st.booleans())
@settings(max_examples=100, deadline=None)
def test_visible_is_the_dense_mask_and_no_key_past_the_last(
    mask: Mask, len_q: int, len_k: int, block: int, row: int, key: int, transposed: bool
) -> None:
    low, high = mask.band(len_q, len_k)
    row, key = row * block, key * block
    out = torch.full((block, block), -1, dtype=torch.int32, device=DEVICE)
    visible_kernel[(1,)](
        out, row, key, len_k, low or 0, high or 0, block, low is not None, high is not None, transposed
    )
    # dense_tile goes by positions alone, so rows past the last query may be asked for; keys past the last are masked.
    expected = mask.dense_tile(row, row + block, key, key + block, len_q, len_k)
    expected &= torch.arange(key, key + block) < len_k
    assert torch.equal(out.cpu(), expected.int())


SIZES = [(1, 1), (1, 5), (5, 1), (4, 6), (3, 7)]


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("heavy_last", [False, True])
@pytest.mark.parametrize(("tiles", "heads"), SIZES)
def test_a_schedule_gives_every_tile_of_every_head_to_one_program(
    tiles: int, heads: int, heavy_last: bool, order: bool
) -> None:
    everything = list(itertools.product(range(tiles), range(heads)))
    for section in (*range(1, heads + 2), 1000):
        found = run_schedule(tiles, heads, section, heavy_last=heavy_last, order=order)
        assert sorted(found) == everything


@pytest.mark.parametrize("heavy_last", [False, True])
@pytest.mark.parametrize(("tiles", "heads"), SIZES)
def test_inside_a_section_of_heads_all_heaviest_tiles_go_first(tiles: int, heads: int, heavy_last: bool) -> None:
    weight = range(tiles - 1, -1, -1) if heavy_last else range(tiles)
    for section in (1, 2, 3, heads, heads + 1):
        found = run_schedule(tiles, heads, section, heavy_last=heavy_last, order=True)
        expected = [
            (tile, head)
            for first in range(0, heads, section)
            for tile in weight
            for head in range(first, min(first + section, heads))
        ]
        assert found == expected


@pytest.mark.parametrize(("tiles", "heads"), SIZES)
def test_without_order_the_tiles_of_a_head_run_one_after_another(tiles: int, heads: int) -> None:
    found = run_schedule(tiles, heads, 2, heavy_last=True, order=False)
    assert found == [(tile, head) for head in range(heads) for tile in range(tiles)]


@pytest.mark.parametrize("heavy_last", [False, True])
def test_the_heaviest_tile_is_the_one_that_sees_most(heavy_last: bool) -> None:
    # The forward passes HAS_HIGH for HEAVY_LAST, dkdv_kernel False: the last queries see most, the first keys are seen
    # by most.
    mask, length, block = Mask.causal(), 100, 16
    spans = [
        (mask.key_range if heavy_last else mask.query_range)(first, first + block, length, length)
        for first in range(0, length, block)
    ]
    tiles = [tile for tile, _ in run_schedule(len(spans), 1, 1, heavy_last=heavy_last, order=True)]
    weights = [spans[tile][1] - spans[tile][0] for tile in tiles]
    assert weights == sorted(weights, reverse=True)
