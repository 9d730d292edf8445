"""The command roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    DirectionOption,
    DtypeOption,
    FormatOption,
    IsolateOption,
    JsonOption,
    LimitOption,
    OnlyOption,
    RoundsOption,
    SeedOption,
    SkipOption,
    SuiteOption,
    TargetOption,
    app,
    kernel_ports,
    names,
    piped,
    prepare,
)
from .options import LIMIT_S, Directions, Format


@app.command("roofline", short_help="Where each kernel stands under what the card can do.")
def roofline_command(
    impl: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME…]", help="The ports; default, all that have kernels.", show_default=False),
    ] = None,
    suite: SuiteOption = "walkthrough",
    direction: DirectionOption = Directions.BOTH,
    target: TargetOption = "native",
    counters: Annotated[
        bool, typer.Option("--counters/--no-counters", help="Ask ncu for counters, where it may read them.")
    ] = True,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Also draw the rooflines, which takes a GPU.", show_default=False),
    ] = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    rounds: RoundsOption = 40,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Tell of each kernel its operations and bytes, its rate, the ceilings above it, and what holds it back.

    Operations and bytes are counted from the problem. The ceilings are measured in the same run: a copy, and products
    by the instruction of the kernel; the datasheets stand beside them. Each port is checked before it is timed. With
    ncu, where it may read counters, a kernel also has the use of the matrix unit, occupancy, traffic, bank conflicts
    and stalls. Without a GPU what is counted stands beside the datasheets of the target's cards.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage or a port named could not run.

    \b
    Examples:
      harness roofline --only n4096 --json roofline.jsonl --picture roofline.svg
      harness roofline --impl triton,cute --target ada --direction forward
    """
    here = prepare()
    from .roofline import RooflineRequest, roofline

    request = RooflineRequest(
        impls=kernel_ports() if impl is None else names(impl),
        suite=suite,
        directions=direction,
        target=target,
        counters=counters,
        picture=picture,
        only=only,
        skip=skip,
        dtype=dtype,
        seed=seed,
        rounds=rounds,
        limit_s=time_limit,
        isolated=isolate,
        json=json,
        form=form,
    )
    raise typer.Exit(piped(lambda: roofline(request, here, all_asked=impl is not None)))
