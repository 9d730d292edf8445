"""The commands that measure: bench, ladder, memory, compile."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_options import (
    TARGET_HELP,
    BaselineOption,
    DirectionOption,
    DtypeOption,
    FirstBaselineOption,
    FormatOption,
    IsolateOption,
    JsonOption,
    LimitOption,
    OnlyOption,
    ResumeOption,
    RoundsOption,
    SeedOption,
    SkipOption,
    SpansOption,
    SuiteOption,
    TargetOption,
    app,
    kernel_ports,
    names,
    piped,
    prepare,
    records_file,
    spans,
)
from .errors import UsageError
from .options import LIMIT_S, Directions, Format


@app.command("bench", short_help="Time all ports and baselines against each other.")
def bench_command(
    impl: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="The ports; default, all that have kernels. One named twice is timed beside itself.",
            show_default=False,
        ),
    ] = None,
    suite: SuiteOption = "walkthrough",
    direction: SpansOption = "forward,backward,both",
    baseline: FirstBaselineOption = None,
    target: TargetOption = "native",
    only: OnlyOption = None,
    skip: SkipOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    rounds: RoundsOption = 40,
    compiles: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Tell what compiling takes, from empty caches.")
    ] = True,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    resume: ResumeOption = None,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Time all ports and all baselines against each other, after a check of each.

    All contestants of a row are timed by turns, in random order, with a cold L2. A table for each port and direction
    tells its time, its speed beside the first baseline with the 95 % interval, host time, compile seconds, clocks and
    throttling; one table across has everybody. A baseline that cannot run is a column that says why.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage or a port named could not run.

    \b
    Examples:
      harness bench --suite fa2 --json fa2.jsonl
      harness bench --impl triton --direction forward --baseline sdpa_flash,fa4
      harness bench --impl triton,triton --only n1024        (a port beside itself)
    """
    here = prepare()
    from .baselines import BASELINES
    from .bench import BenchRequest, bench

    request = BenchRequest(
        impls=kernel_ports() if impl is None else tuple(name.strip() for name in impl.split(",")),
        suite=suite,
        spans=spans(direction),
        baselines=tuple(BASELINES) if baseline is None else names(baseline),
        target=target,
        only=only,
        skip=skip,
        dtype=dtype,
        seed=seed,
        rounds=rounds,
        compiles=compiles,
        limit_s=time_limit,
        isolated=isolate,
        resume=resume,
        json=records_file(json, resume),
        form=form,
    )
    raise typer.Exit(piped(lambda: bench(request, here, all_asked=impl is not None)))


@app.command("ladder", short_help="What each optimisation is worth, rung by rung.")
def ladder_command(
    impl: Annotated[
        str, typer.Option(metavar="NAME[,NAME…]", help="The ports, or all: those that have kernels.")
    ] = "all",
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A suite as of the other commands; default walkthrough, and of it the longest problems unless --only "
            "is given.",
            show_default=False,
        ),
    ] = None,
    direction: DirectionOption = Directions.BOTH,
    target: Annotated[str, typer.Option(metavar="NAME[,NAME…]", help=TARGET_HELP)] = "native",
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="All switches on and each alone off, not one more at a time.")
    ] = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    rounds: RoundsOption = 40,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    resume: ResumeOption = None,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Check and time every rung of every port: naive, tiles, skip, exp2, edges, order.

    All rungs of all ports on all code paths are timed by turns, beside SDPA's flash backend. A table for each port and
    path tells TFLOP/s, % of SDPA, and the gain over the rung before with its 95 % interval. Tables across have all
    ports and paths beside each other, and below them one sentence for each rung says how far its gains agree. Without
    a GPU those of Triton, which runs there, are checked only.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage or a port named could not run.

    \b
    Examples:
      harness ladder --impl all --target ada,native --json ladder.jsonl
      harness ladder --impl triton --direction forward --leave-one-out
      harness ladder --impl triton --suite fa2 --only n4096-d128
    """
    here = prepare()
    from .ladder import LadderRequest, ladder

    request = LadderRequest(
        impls=kernel_ports() if impl == "all" else names(impl),
        suite=suite or "walkthrough",
        longest=suite is None and only is None,
        directions=direction,
        target=target,
        leave_one_out=leave_one_out,
        only=only,
        skip=skip,
        dtype=dtype,
        seed=seed,
        rounds=rounds,
        limit_s=time_limit,
        isolated=isolate,
        resume=resume,
        json=records_file(json, resume),
        form=form,
    )
    raise typer.Exit(piped(lambda: ladder(request, here, all_asked=impl != "all")))


@app.command("memory", short_help="Peak memory, up to where the plain attention has none left.")
def memory_command(
    impl: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME…]", help="The ports; default, all that have kernels.", show_default=False),
    ] = None,
    suite: SuiteOption = "long",
    direction: SpansOption = "forward,backward",
    baseline: BaselineOption = None,
    target: TargetOption = "native",
    only: OnlyOption = None,
    skip: SkipOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Measure the memory that a launch takes at its height, beside the plain attention's and the formula's.

    The formula is what FlashAttention-2 holds: inputs, outputs, lse, and for a backward delta. What is taken beyond it
    stands in brackets. Where the plain attention runs out of memory its cell says so.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage or a port named could not run.

    \b
    Example:
      harness memory --impl triton --suite long --json memory.jsonl
    """
    here = prepare()
    from .baselines import BASELINES
    from .memory import MemoryRequest, memory

    request = MemoryRequest(
        impls=kernel_ports() if impl is None else names(impl),
        suite=suite,
        spans=spans(direction),
        baselines=tuple(BASELINES) if baseline is None else names(baseline),
        target=target,
        only=only,
        skip=skip,
        dtype=dtype,
        seed=seed,
        limit_s=time_limit,
        isolated=isolate,
        json=json,
        form=form,
    )
    raise typer.Exit(piped(lambda: memory(request, here, all_asked=impl is not None)))


@app.command("compile", short_help="Build the shipped kernels for every target, without a GPU.")
def compile_command(
    impl: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME…]", help="The ports; default, all of them.", show_default=False)
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="NAME[,NAME…]", help="The targets.")
    ] = "ada,hopper,geforce_blackwell,blackwell",
    direction: DirectionOption = Directions.BOTH,
    head_dim: Annotated[str, typer.Option(metavar="D[,D…]", help="Head dimensions.")] = "64,128",
    mask: Annotated[
        str, typer.Option(metavar="NAME[,NAME…]", help="full, causal, causal-topleft: some ship tiles of their own.")
    ] = "causal",
    minutes: Annotated[float, typer.Option(min=0, metavar="M", help="After them nothing more is begun.")] = 10,
    time_limit: Annotated[
        float, typer.Option(min=1, metavar="S", help="Seconds that the kernels of one direction may take.")
    ] = LIMIT_S,
    record: Annotated[bool, typer.Option("--record", help="Write what is spilled to harness/spills.yaml.")] = False,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Build the tiles that every port ships, in bf16, for every target; none of them has to be here.

    A row for each kernel: shared memory beside what the target gives, registers, spills beside those recorded, matrix
    instructions, seconds. As many kernels are built at once as there are cores, up to four.

    Exit status: 0 all good, 1 a kernel takes too much shared memory, spills more than recorded or does not build,
    2 wrong usage, a port named is not here, or there was no time for all.

    \b
    Examples:
      harness compile
      harness compile --impl triton --target ada --head-dim 64,128,256 --mask full,causal
    """
    from .compile import CompileRequest, compile_all

    try:
        head_dims = tuple(int(name) for name in names(head_dim))
    except ValueError as error:
        raise UsageError(f"--head-dim must be numbers, got {head_dim!r}") from error
    request = CompileRequest(
        impls=names(impl) if impl is not None else kernel_ports(),
        targets=names(target),
        directions=direction,
        head_dims=head_dims,
        masks=names(mask),
        minutes=minutes,
        limit_s=time_limit,
        record=record,
        json=json,
        form=form,
    )
    raise typer.Exit(piped(lambda: compile_all(request, all_asked=impl is not None)))
