"""The commands that hold ports to the oracle: run, matrix, fuzz."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    DirectionOption,
    DtypeOption,
    FormatOption,
    ImplOption,
    IsolateOption,
    JsonOption,
    LimitOption,
    OnlyOption,
    ResumeOption,
    RoundsOption,
    SeedOption,
    SkipOption,
    SuiteOption,
    TargetOption,
    app,
    names,
    piped,
    prepare,
    records_file,
)
from .options import LIMIT_S, Directions, Format


@app.command("run", short_help="Check ports, then time them beside SDPA.")
def run_command(
    impl: ImplOption,
    suite: SuiteOption = "quick",
    direction: DirectionOption = Directions.BOTH,
    target: TargetOption = "native",
    only: OnlyOption = None,
    skip: SkipOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    rounds: RoundsOption = 40,
    timing: Annotated[bool, typer.Option("--timing/--no-timing", help="Time what passed, on a GPU.")] = True,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    resume: ResumeOption = None,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Check ports against a float64 oracle, then time them beside PyTorch's SDPA.

    Every problem of the suite is checked, forward and backward. On a GPU what passed is then timed by turns with the
    forced flash backend of SDPA. Without a GPU, Triton's interpreter checks the suite on smaller sizes. Kernels are
    launched in a process apart, so that one that faults, hangs or spoils the device costs its own cell.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage or something asked for could not run.

    \b
    Examples:
      harness run --impl triton
      harness run --impl triton,reference --suite hard --only planted --no-timing
      harness run --impl triton --suite walkthrough --target ada --json walkthrough.jsonl
    """
    here = prepare()
    from .run import RunRequest, run

    request = RunRequest(
        impls=names(impl),
        suite=suite,
        directions=direction,
        target=target,
        only=only,
        skip=skip,
        dtype=dtype,
        seed=seed,
        rounds=rounds,
        timed=timing,
        limit_s=time_limit,
        isolated=isolate,
        resume=resume,
        json=records_file(json, resume),
        form=form,
    )
    raise typer.Exit(piped(lambda: run(request, here)))


@app.command("matrix", short_help="Check ports beside each other.")
def matrix_command(
    impl: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME…]", help="The ports; default, all of them.", show_default=False)
    ] = None,
    suite: SuiteOption = "quick",
    direction: DirectionOption = Directions.BOTH,
    target: TargetOption = "native",
    only: OnlyOption = None,
    skip: SkipOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    resume: ResumeOption = None,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Check every port on every problem, and compare every two ports.

    Three tables: problems by ports, with the verdict and the largest error over the allowed one; ports by ports, with
    their largest disagreement; and where that is, by tensor. Of a port that cannot run here a note says why.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage, nothing could run, or a port named could not.

    \b
    Examples:
      harness matrix --suite hard
      harness matrix --impl triton,reference --only causal --json matrix.jsonl
    """
    here = prepare()
    from common import port_names

    from .matrix import matrix
    from .session import Request

    request = Request(
        impls=names(impl) if impl is not None else port_names(),
        suite=suite,
        directions=direction,
        target=target,
        only=only,
        skip=skip,
        dtype=dtype,
        seed=seed,
        limit_s=time_limit,
        isolated=isolate,
        resume=resume,
        json=records_file(json, resume),
        form=form,
    )
    raise typer.Exit(piped(lambda: matrix(request, here, all_asked=impl is not None)))


@app.command("fuzz", short_help="Random problems over the whole contract.")
def fuzz_command(
    impl: ImplOption,
    minutes: Annotated[float, typer.Option(min=0, metavar="M", help="After them nothing more is begun.")] = 1,
    most: Annotated[int | None, typer.Option("--problems", min=1, metavar="N", help="No more than N problems.")] = None,
    direction: DirectionOption = Directions.BOTH,
    target: TargetOption = "native",
    seed: SeedOption = 0,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where failing cases are written; made if it is not there.")
    ] = Path(),
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Check ports on random problems: shapes, strides, dtypes, masks, scales, values, dlse.

    A failing problem is made as small as it still fails, printed as a command that repeats it, and written as a suite.
    The same seed gives the same problems in the same order.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage or a port named could not run.

    \b
    Example:
      harness fuzz --impl triton,reference --minutes 10 --seed 7
    """
    here = prepare()
    from .fuzz import FuzzRequest, fuzz

    request = FuzzRequest(
        impls=names(impl),
        directions=direction,
        target=target,
        seed=seed,
        minutes=minutes,
        most=most,
        folder=out,
        limit_s=time_limit,
        isolated=isolate,
        json=json,
        form=form,
    )
    raise typer.Exit(piped(lambda: fuzz(request, here)))
