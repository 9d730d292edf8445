"""`harness trace`: the online softmax of one query, tile by tile, and which tiles of scores a mask visits.

The numbers are the reference's, `reference.trace_row` on the CPU; the kinds of tiles are `common.Mask`'s, by which the
kernels go as well. A tile that reaches past the last key is an edge, as it is in a kernel.
"""

from __future__ import annotations

import itertools
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from common import Mask, Problem, TileKind
from reference import SoftmaxStep, trace_row

from .errors import UsageError
from .options import Format
from .tables import Table, print_tables

SIGNS = {TileKind.FULL: "█", TileKind.EDGE: "▒", TileKind.SKIP: "·"}
PLAIN_SIGNS = {TileKind.FULL: "#", TileKind.EDGE: "/", TileKind.SKIP: "."}  # where the output takes ASCII only
WIDEST = 160  # tiles a side of the largest picture
BESIDE = 60  # characters of a line that the other columns of a picture may take
TILES_MAX = 2**18
SCORES_SHOWN = 8  # of tiles with more keys than this the scores are not printed
GROWTH = (1, 4, 16)


@dataclass(frozen=True)
class TraceRequest:
    """What is to be traced. scores, values: of the keys, else inputs are random; row: None for the last query."""

    mask: Mask
    len_q: int
    len_k: int
    head_dim: int
    block_m: int
    block_n: int
    row: int | None
    scores: tuple[float, ...] | None
    values: tuple[float, ...] | None
    seed: int
    form: Format

    @property
    def query(self) -> int:
        """The query whose softmax is traced."""
        return self.len_q - 1 if self.row is None else self.row


def trace(request: TraceRequest) -> int:
    """Prints the tables and returns the exit status, 0. Raises UsageError for what no problem has."""
    problem = problem_of(request)
    if not 0 <= request.query < request.len_q:
        raise UsageError(f"--row must be from 0 to {request.len_q - 1}, got {request.query}")
    tiles = math.prod(_count(length, block) for length, block in _sides(request))
    if tiles > TILES_MAX:
        raise UsageError(f"{tiles} tiles are more than the {TILES_MAX} that are looked at: make them larger")
    tables = [steps_table(problem, request), walk_table(request, _signs()), bytes_table(problem)]
    print_tables(tables, request.form)
    return 0


def problem_of(request: TraceRequest) -> Problem:
    """One head in fp32; given scores are not scaled. Raises UsageError for what no problem has."""
    scale = None if request.scores is None else 1.0
    lengths = request.len_q, request.len_k
    try:
        return Problem(1, 1, 1, *lengths, request.head_dim, torch.float32, request.mask, scale)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(str(error)) from error


def inputs(problem: Problem, request: TraceRequest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v `(1, 1, N, D)` in fp32: random ones of the seed, or such that the scores and values are those given.

    Given scores are the first column of k, and every query is the first unit vector, so that `q kᵀ` is they, exactly;
    values are the first column of v.
    """
    if request.scores is None:
        generator = torch.Generator().manual_seed(request.seed)
        q, k, v = (
            torch.randn(shape, generator=generator) for shape in (problem.q_shape, problem.kv_shape, problem.kv_shape)
        )
        return q, k, v
    q, k, v = torch.zeros(problem.q_shape), torch.zeros(problem.kv_shape), torch.zeros(problem.kv_shape)
    q[..., 0] = 1
    k[..., 0] = torch.tensor(request.scores)
    v[..., 0] = torch.arange(problem.len_k) if request.values is None else torch.tensor(request.values)
    return q, k, v


def plain_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, row: int
) -> tuple[torch.Tensor, float]:
    """The output `(D,)` and the lse of one query, from all its scores at once, in float64; without keys 0 and -inf."""
    scores = k[0, 0].double() @ q[0, 0, row].double() * problem.scale
    seen = problem.mask.dense_tile(row, row + 1, 0, problem.len_k, problem.len_q, problem.len_k)[0]
    lse = torch.logsumexp(scores[seen], 0)
    return torch.exp(scores[seen] - lse) @ v[0, 0].double()[seen], float(lse)


def steps_table(problem: Problem, request: TraceRequest) -> Table:
    """The walk of the query tile of a query, and what its online softmax is after each tile."""
    row, tile = request.query, request.query // request.block_m
    q, k, v = inputs(problem, request)
    steps = {step.key_begin: step for step in trace_row(q, k, v, problem, row=row, block_n=request.block_n)}
    kinds = kinds_of(request, tile)
    shown = request.block_n <= SCORES_SHOWN
    table = Table(
        f"The online softmax of query {row} as its query tile, {_span(tile, request.block_m, request.len_q)}, walks "
        f"over {len(kinds)} key tiles of {request.block_n}, {request.mask}",
        ("keys", "tile", *(["scores"] if shown else []), "max", "row_max", "rescale", "row_sum", "output"),
        labels=3 if shown else 2,
    )
    state = "-inf", "0", "0"  # row_max, row_sum, output
    for begin, end, kind in _runs(kinds):
        keys = _span(begin, request.block_n, request.len_k, end)
        step = steps.get(begin * request.block_n)
        scores = [_scores(step)] if shown else []
        if step is None:
            row_max, row_sum, output = state
            table.add(keys, _kind_text(kind, end - begin), *scores, "", row_max, "", row_sum, output)
            continue
        state = _number(step.row_max), _number(step.row_sum), _number(float(step.output[0]))
        table.add(
            keys, kind.value, *scores, _number(step.tile_max), state[0], _number(step.rescale), state[1], state[2]
        )
    table.notes += _notes(problem, request, kinds, list(steps.values()), plain_softmax(q, k, v, problem, row))
    return table


def _notes(
    problem: Problem,
    request: TraceRequest,
    kinds: Sequence[TileKind],
    steps: Sequence[SoftmaxStep],
    plain: tuple[torch.Tensor, float],
) -> list[str]:
    visited = sum(kind is not TileKind.SKIP for kind in kinds)
    if not steps:
        notes = [f"Query {request.query} sees no key: o = 0, lse = -inf."]
    else:
        output, lse = plain
        last = steps[-1]
        error = float((last.output.double() - output).abs().max())
        of = "of v" if request.scores is None or request.values is not None else "of v, which are the keys' numbers,"
        notes = [
            "max: of the tile's scores. rescale: exp(old row_max - row_max), what the sums so far are multiplied by. "
            f"row_sum: of exp(score - row_max). output: the first column {of} weighted so far, acc / row_sum.",
            f"lse = row_max + log(row_sum) = {_number(last.lse)}. Against the plain softmax of all scores at once, in "
            f"float64: error of the output {error:.1e}, of lse {abs(last.lse - lse):.1e}; the steps are in fp32.",
        ]
    if visited > len(steps):
        notes.append(
            f"Query {request.query} sees a key in {len(steps)} of the {visited} visited tiles; the others are visited "
            "for other queries of its tile, and change nothing for it."
        )
    return notes


def walk_table(request: TraceRequest, signs: Mapping[TileKind, str] = SIGNS) -> Table:
    """All tiles of scores, one sign each, and how many are visited."""
    (len_q, block_m), (len_k, block_n) = _sides(request)
    rows, columns = _count(len_q, block_m), _count(len_k, block_n)
    widest = _widest(request.form)
    drawn = columns <= widest and rows <= WIDEST
    legend = ", ".join(f"{sign} {kind.value}" for kind, sign in signs.items())
    table = Table(
        f"Tiles of {block_m} queries x {block_n} keys, Nq {len_q}, Nk {len_k}, {request.mask}: {legend}",
        ("queries", "key tiles" if drawn else "key tiles of this query tile", "visited", "full", "edge", "skip"),
        labels=2,
    )
    chosen, total = request.query // block_m, Counter[TileKind]()
    for tile in range(rows):
        kinds = kinds_of(request, tile)
        count = Counter(kinds)
        total += count
        if drawn or tile == chosen:
            walk = "".join(signs[kind] for kind in kinds) if drawn else _in_words(kinds)
            if drawn and request.form is Format.MARKDOWN:
                walk = f"`{walk}`"
            mark = "> " if tile == chosen else "  "
            table.add(mark + _span(tile, block_m, len_q), walk, *_counts(count))
    table.add("  all", "", *_counts(total))
    table.notes.append(
        "Marked by > is the query tile of the walk above. A full tile needs no comparison, in an edge some pairs are "
        "hidden or past the end, a skipped one is not visited."
    )
    if not drawn:
        table.notes.append(f"The picture would be {columns} x {rows} tiles; here up to {widest} x {WIDEST} are drawn.")
    if request.mask.has_unseeing_rows(len_q, len_k):
        table.notes.append("Some queries see no key: their o is 0, their lse -inf.")
    return table


def bytes_table(problem: Problem) -> Table:
    """What S and P would take in memory, beside the tensors that attention reads and writes, as lengths grow."""
    table = Table(
        f"Why in tiles: memory in fp32, one head, D {problem.head_dim}",
        ("Nq", "Nk", "Q + K + V + O", "S + P", "S + P / the others"),
        labels=0,
    )
    for growth in GROWTH:
        len_q, len_k = problem.len_q * growth, problem.len_k * growth
        tensors = 2 * (len_q + len_k) * problem.head_dim * problem.dtype.itemsize
        square = 2 * len_q * len_k * problem.dtype.itemsize
        table.add(str(len_q), str(len_k), f"{tensors:,} B", f"{square:,} B", _ratio(square / tensors))
    table.notes.append(
        "S = scale q k^T and P = softmax(S) grow with the product of the lengths, the others with their sum. In tiles, "
        "S and P never leave the chip."
    )
    return table


def kinds_of(request: TraceRequest, tile: int) -> list[TileKind]:
    """What the tiles of scores of a query tile are, in the order of their keys."""
    row_begin, (len_k, block_n) = tile * request.block_m, _sides(request)[1]
    return [
        request.mask.tile_kind(row_begin, row_begin + request.block_m, begin, begin + block_n, request.len_q, len_k)
        for begin in range(0, len_k, block_n)
    ]


def _sides(request: TraceRequest) -> tuple[tuple[int, int], tuple[int, int]]:
    return (request.len_q, request.block_m), (request.len_k, request.block_n)


def _count(length: int, block: int) -> int:
    return -(-length // block)


def _runs(kinds: Sequence[TileKind]) -> Iterator[tuple[int, int, TileKind]]:
    """The tiles one by one, `(begin, end, kind)`, but skipped neighbours as one."""
    for kind, group in itertools.groupby(enumerate(kinds), key=lambda one: one[1]):
        numbers = [number for number, _ in group]
        if kind is TileKind.SKIP:
            yield numbers[0], numbers[-1] + 1, kind
        else:
            yield from ((number, number + 1, kind) for number in numbers)


def _in_words(kinds: Sequence[TileKind]) -> str:
    return ", ".join(f"{len(list(group))} {kind.value}" for kind, group in itertools.groupby(kinds))


def _counts(count: Counter[TileKind]) -> tuple[str, ...]:
    full, edge, skip = (count[kind] for kind in (TileKind.FULL, TileKind.EDGE, TileKind.SKIP))
    return str(full + edge), str(full), str(edge), str(skip)


def _kind_text(kind: TileKind, tiles: int) -> str:
    return kind.value if tiles == 1 else f"{kind.value} x{tiles}"


def _span(begin: int, block: int, length: int, end: int | None = None) -> str:
    """The first and last position of the tiles `[begin, end)`, or of one."""
    last = min((begin + 1 if end is None else end) * block, length) - 1
    return f"{begin * block}..{last}"


def _scores(step: SoftmaxStep | None) -> str:
    return "" if step is None else " ".join("-inf" if x == -math.inf else _number(x) for x in step.scores.tolist())


def _number(value: float) -> str:
    return f"{value:.5g}"


def _ratio(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _widest(form: Format) -> int:
    """How many tiles a line of the picture takes: on a terminal no more than do not wrap."""
    if form is Format.TEXT and sys.stdout.isatty():
        return min(WIDEST, shutil.get_terminal_size().columns - BESIDE)
    return WIDEST


def _signs() -> Mapping[TileKind, str]:
    try:
        "".join(SIGNS.values()).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_SIGNS
    return SIGNS
