"""The commands that show how the algorithm works: trace."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from .cli_options import FormatOption, SeedOption, app, piped
from .errors import UsageError, one_of
from .options import Format

MASKS = ("full", "causal", "window")
CORNERS = {"bottom-right": "bottom_right", "top-left": "top_left"}
LENGTH = 96  # where none is given
LENGTH_MAX = 2**17


@app.command("trace", short_help="The online softmax step by step, and the tiles that a mask visits.")
def trace_command(
    scores: Annotated[
        str | None,
        typer.Option(metavar="X[,X…]", help="The scores of the keys, instead of random inputs.", show_default=False),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(metavar="X[,X…]", help="Their values; default, the keys' numbers.", show_default=False),
    ] = None,
    len_q: Annotated[
        int | None,
        typer.Option(min=1, max=LENGTH_MAX, metavar="N", help=f"Queries; default, as many as keys, or {LENGTH}."),
    ] = None,
    len_k: Annotated[
        int | None,
        typer.Option(
            min=0, max=LENGTH_MAX, metavar="N", help=f"Keys; default, as many as scores or queries, or {LENGTH}."
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(metavar="D", help="The head dimension.")] = 64,
    block_m: Annotated[int, typer.Option(min=1, metavar="N", help="Queries of a tile.")] = 16,
    block_n: Annotated[int, typer.Option(min=1, metavar="N", help="Keys of a tile.")] = 16,
    row: Annotated[
        int | None, typer.Option(metavar="I", help="The query; default, the last.", show_default=False)
    ] = None,
    mask: Annotated[str, typer.Option(metavar="NAME", help="full, causal, or window, with --left and --right.")] = (
        "causal"
    ),
    left: Annotated[int | None, typer.Option(min=0, metavar="N", help="Keys visible before the diagonal.")] = None,
    right: Annotated[int | None, typer.Option(min=0, metavar="N", help="Keys visible behind the diagonal.")] = None,
    corner: Annotated[
        str, typer.Option(metavar="NAME", help="Where the diagonal lies: bottom-right or top-left.")
    ] = "bottom-right",
    seed: SeedOption = 0,
    form: FormatOption = Format.TEXT,
) -> None:
    """Show the online softmax of one query tile by tile, and which tiles of scores a mask visits.

    Three tables: the walk of the query's tile over the keys, with running maximum, running sum, rescale factor and
    output after each tile, computed by the reference, and the error against the plain softmax; all tiles of scores, one
    sign each, skipped, full or edge; and the memory that S and P would take. --left makes a window of causal as well.
    Everything runs on the CPU.

    Exit status: 0 all good, 2 wrong usage.

    \b
    Examples:
      harness trace --scores 1,5,2,8,3,9,4,7 --block-n 2 --mask full
      harness trace --len-q 90 --len-k 150 --row 40 --mask window --left 40 --right 8
      harness trace --len-q 4096 --block-m 128 --block-n 64 --format markdown
    """
    given = None if scores is None else _numbers("--scores", scores)
    weighed = None if values is None else _numbers("--values", values)
    if weighed is not None and (given is None or len(weighed) != len(given)):
        raise UsageError("--values takes one number for each of --scores")
    if given is not None:
        if len_k not in (None, len(given)):
            raise UsageError(f"--len-k is {len_k}, but --scores has {len(given)} keys")
        len_k = len(given)
    queries = len_q if len_q is not None else len_k or LENGTH
    keys = len_k if len_k is not None else queries
    if mask not in MASKS:
        raise UsageError(one_of("--mask", MASKS, mask))
    if corner not in CORNERS:
        raise UsageError(one_of("--corner", CORNERS, corner))
    if mask == "full" and (left, right) != (None, None):
        raise UsageError("--mask full has no --left and no --right; window has")
    if mask == "causal" and right is not None:
        raise UsageError("--mask causal has no --right; window has")
    if mask == "window" and (left, right) == (None, None):
        raise UsageError("--mask window takes --left, --right or both")
    from common import Mask

    from .trace import TraceRequest, trace

    request = TraceRequest(
        mask=Mask(left, 0 if mask == "causal" else right, CORNERS[corner]),  # type: ignore[arg-type]
        len_q=queries,
        len_k=keys,
        head_dim=head_dim,
        block_m=block_m,
        block_n=block_n,
        row=row,
        scores=given,
        values=weighed,
        seed=seed,
        form=form,
    )
    raise typer.Exit(piped(lambda: trace(request)))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of a comma-separated list. Raises UsageError for what is none, or not finite in fp32."""
    try:
        numbers = tuple(float(one) for one in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} must be numbers with commas between them, got {text!r}") from error
    for number in numbers:
        if not math.isfinite(number) or abs(number) > 1e38:
            raise UsageError(f"{option} must be from -1e38 to 1e38, got {number}")
    return numbers
