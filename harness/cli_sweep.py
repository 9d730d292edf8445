"""The command that looks for the best tiles: sweep."""

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
    ResumeOption,
    RoundsOption,
    SeedOption,
    SkipOption,
    TargetOption,
    app,
    kernel_ports,
    names,
    piped,
    prepare,
    records_file,
)
from .errors import UsageError
from .options import LIMIT_S, Directions, Format

SUITE, ONLY = "fa2", "4k"  # what is swept unless something else is asked for
ValuesOption = Annotated[
    str | None, typer.Option(metavar="N[,N…]", help="Try these, not the port's own values.", show_default=False)
]


@app.command("sweep", short_help="Which tile is the fastest, of all that fit.")
def sweep_command(
    impl: Annotated[
        str, typer.Option(metavar="NAME[,NAME…]", help="The ports, or all: those that have kernels.")
    ] = "triton",
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A suite as of the other commands; default fa2, and of it the problems with N = 4096 unless --only is "
            "given.",
            show_default=False,
        ),
    ] = None,
    direction: DirectionOption = Directions.BOTH,
    target: TargetOption = "native",
    only: OnlyOption = None,
    skip: SkipOption = None,
    dtype: DtypeOption = None,
    block_m: ValuesOption = None,
    block_n: ValuesOption = None,
    warps: ValuesOption = None,
    stages: ValuesOption = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N[,N…]",
            help="The same of a field that the port has besides, dq_block_m or lazy_rescale; 0 goes without. May come "
            "several times.",
            show_default=False,
        ),
    ] = None,
    spilling: Annotated[bool, typer.Option("--spilling", help="A tile that spills more may win.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write what is faster into the port's tiles.yaml.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Also draw the heat maps.", show_default=False)
    ] = None,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Also tell what @triton.autotune costs at its first call.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0, metavar="M", help="After them nothing more is begun.")] = 30,
    seed: SeedOption = 0,
    rounds: RoundsOption = 40,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    resume: ResumeOption = None,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Try the tiles that a port offers: tile, warps, stages, and what else it has.

    Each candidate is held to the shared memory of the target, then built, all cores at once, then checked, and those
    that pass are timed by turns, beside SDPA's flash backend. Of a backward the tile of the kernel of dk and dv comes
    first, then that of dq, each from the best of the one before. One problem of each class is swept: direction, dtype,
    head size, mask, and up to 1024 keys or more. The tile that is there stays unless another one is faster with the
    whole 95 % interval, and does not spill more. Without a GPU the candidates are built, each kernel's beside the tile
    that is there; nothing is timed, and nothing written.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage, a port named could not run, or there was no time for all.

    \b
    Examples:
      harness sweep --impl triton --direction forward --target ada
      harness sweep --impl cute --direction forward --only d128-4k --extra lazy_rescale=1 --picture tiles.svg --write
      harness sweep --impl triton --minutes 10 --json sweep.jsonl
      harness sweep --impl triton --resume sweep.jsonl
    """
    fields = {"block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}
    values = {name: _values(name, text) for name, text in fields.items() if text is not None}
    for text in extra or ():
        name, sign, numbers = (part.strip() for part in text.partition("="))
        if not (name and sign) or name in fields:
            raise UsageError(f"--extra takes NAME=N[,N…] of what is no option of its own, got {text!r}")
        if name in values:
            raise UsageError(f"--extra has {name} twice: several values of it go into one, as in {name}=N,N")
        values[name] = _values(f"extra {name}", numbers, least=0)
    here = prepare()
    from .sweep import sweep
    from .sweep_stage import SweepRequest

    request = SweepRequest(
        impls=kernel_ports() if impl == "all" else names(impl),
        suite=suite or SUITE,
        directions=direction,
        target=target,
        only=ONLY if suite is None and only is None else only,
        skip=skip,
        dtype=dtype,
        values=values,
        spilling=spilling,
        write=write,
        picture=picture,
        autotune=autotune,
        minutes=minutes,
        seed=seed,
        rounds=rounds,
        limit_s=time_limit,
        isolated=isolate,
        resume=resume,
        json=records_file(json, resume),
        form=form,
    )
    raise typer.Exit(piped(lambda: sweep(request, here, all_asked=impl != "all")))


def _values(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    parts = names(text)
    if not all(part.isdecimal() and len(part) < 6 and int(part) >= least for part in parts):
        raise UsageError(
            f"--{option.replace('_', '-', 1) if ' ' not in option else option} must be whole numbers "
            f"of at least {least}, got {text!r}"
        )
    return tuple(int(part) for part in parts)
