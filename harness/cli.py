"""The commands and their options. What they do is in the module of the command's name.

PyTorch is imported by the commands, not here, so that `--help` and a typo answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import UsageError
from .options import LIMIT_S, TOLERANCE_PERCENT, Directions, Format

if TYPE_CHECKING:
    from .environment import Environment

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

app = typer.Typer(
    name="harness",
    help="Checks, times and compares the FlashAttention-2 ports.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write JSON lines to FILE.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the tables.")]
ImplOption = Annotated[str, typer.Option(metavar="NAME[,NAME…]", help="The ports: triton, tilelang, cute, reference.")]
SuiteOption = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="quick, walkthrough, long, fa2, hard, or the path of a .yaml file.")
]
DirectionOption = Annotated[Directions, typer.Option(help="Which direction.")]
TargetOption = Annotated[str, typer.Option(metavar="NAME", help="Whose code path: native, or ada on any card.")]
OnlyOption = Annotated[str | None, typer.Option(metavar="TEXT", help="Only cases with TEXT in name or id.")]
SeedOption = Annotated[int, typer.Option(min=0, metavar="N", help="The seed of the inputs.")]
LimitOption = Annotated[
    float, typer.Option("--time-limit", min=1, metavar="S", help="Seconds that one check or row of timings may take.")
]
IsolateOption = Annotated[
    bool,
    typer.Option("--isolate/--no-isolate", help="Launch kernels in a process apart, or in this one, for debuggers."),
]


@app.callback()
def _harness() -> None:
    # With a callback typer keeps sub-commands even while there is only one.
    pass


@app.command("run", short_help="Check ports, then time them beside SDPA.")
def run_command(
    impl: ImplOption,
    suite: SuiteOption = "quick",
    direction: DirectionOption = Directions.BOTH,
    target: TargetOption = "native",
    only: OnlyOption = None,
    seed: SeedOption = 0,
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Rounds of a timing.")] = 40,
    timing: Annotated[bool, typer.Option("--timing/--no-timing", help="Time what passed, on a GPU.")] = True,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
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
    here = _prepare()
    from .run import RunRequest, run

    request = RunRequest(
        impls=_names(impl),
        suite=suite,
        directions=direction,
        target=target,
        only=only,
        seed=seed,
        rounds=rounds,
        timed=timing,
        limit_s=time_limit,
        isolated=isolate,
        json=json,
        form=form,
    )
    raise typer.Exit(_piped(lambda: run(request, here)))


@app.command("matrix", short_help="Check ports beside each other.")
def matrix_command(
    impl: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME…]", help="The ports; default, all of them.", show_default=False)
    ] = None,
    suite: SuiteOption = "quick",
    direction: DirectionOption = Directions.BOTH,
    target: TargetOption = "native",
    only: OnlyOption = None,
    seed: SeedOption = 0,
    time_limit: LimitOption = LIMIT_S,
    isolate: IsolateOption = True,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Check every port on every problem, and compare every two ports.

    Three tables: problems by ports, with the verdict and the largest error over the allowed one; ports by ports, with
    their largest disagreement; and where that is, by tensor. A port that cannot run here is a column that says why.

    Exit status: 0 all good, 1 a check failed, 2 wrong usage, nothing could run, or a port named could not.

    \b
    Examples:
      harness matrix --suite hard
      harness matrix --impl triton,reference --only causal --json matrix.jsonl
    """
    here = _prepare()
    from common import port_names

    from .matrix import matrix
    from .session import Request

    request = Request(
        impls=_names(impl) if impl is not None else port_names(),
        suite=suite,
        directions=direction,
        target=target,
        only=only,
        seed=seed,
        limit_s=time_limit,
        isolated=isolate,
        json=json,
        form=form,
    )
    raise typer.Exit(_piped(lambda: matrix(request, here, all_asked=impl is not None)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


@app.command("doctor", short_help="What is installed and what can run here.")
def doctor_command(json: JsonOption = None, form: FormatOption = Format.TEXT) -> None:
    """Tell what is installed, which ports can run here, and for those that cannot, why and what to do.

    Exit status: 0 when some port can run, 2 when none can.

    \b
    Example:
      harness doctor --json doctor.json
    """
    from .environment import CPU

    try:
        here, trouble = _prepare(), ""
    except UsageError as error:
        here, trouble = CPU, str(error)
    from .doctor import doctor

    raise typer.Exit(_piped(lambda: doctor(json, form, here, trouble)))


@app.command("tables", short_help="Print or write the tables of records.")
def tables_command(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of records.", show_default=False)] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the tables between this file's markers instead.", metavar="FILE")
    ] = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Print the tables that files of records make, or write those that a text quotes.

    A text quotes a file of harness/results between <!-- records: FILE --> and <!-- /records -->.

    Exit status: 0 all good, 2 wrong usage.

    \b
    Examples:
      harness tables walkthrough.jsonl --format markdown
      harness tables --write README.md
    """
    from .published import record_tables, write_tables
    from .reader import read_records
    from .tables import print_tables

    if (write is None) == (not files):
        raise UsageError("give files of records to print, or --write FILE")
    if write is not None:
        print(f"{write}: {'written' if write_tables(write) else 'as it was'}")
        return
    records = [record for path in files or () for record in read_records(path, ("check",))]
    tables = record_tables(records)
    if not tables:
        raise UsageError("no record there holds a timing: these come from harness run on a GPU")
    print_tables(tables, form)


@app.command("compare", short_help="What is faster, slower or wrong since.")
def compare_command(
    before: Annotated[Path, typer.Argument(help="A file of records.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="A later one.", show_default=False)],
    tolerance: Annotated[
        float, typer.Option(min=0, max=50, metavar="PERCENT", help="Differences within it count as the same.")
    ] = TOLERANCE_PERCENT,
    absolute: Annotated[
        bool, typer.Option("--absolute", help="Compare times as they are, not beside the baseline of their run.")
    ] = False,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Tell, for each port, problem and direction that two files share, what is faster, slower, the same or unclear.

    Clocks differ between runs, so that times are taken relative to the baseline that both runs timed, if there is one.
    The 95 % interval of the ratio decides, and a verdict that got worse is named.

    Exit status: 0 all good, 1 something is slower or no longer passes, 2 wrong usage.

    \b
    Example:
      harness compare monday.jsonl tuesday.jsonl --tolerance 3
    """
    from .compare import compare

    options = {"tolerance_percent": tolerance, "absolute": absolute, "json_path": json, "form": form}
    raise typer.Exit(_piped(lambda: compare((before, after), **options)))  # type: ignore[arg-type]


def _piped(command: Callable[[], int]) -> int:
    # `harness run … | head` closes the pipe early: no failed check, and nothing to complain about.
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _prepare() -> Environment:
    # Before anything that imports triton, which also some parts of torch do.
    from .environment import prepare

    return prepare()


def main(arguments: list[str] | None = None) -> None:
    """The console script: runs a command and exits with its status. Errors of usage are one line on stderr."""
    try:
        status = app(args=arguments, prog_name="harness", standalone_mode=False)
    except UsageError as error:
        status = _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        # Click's own errors of usage; typer brings its own copy of click from 0.26 on, so they are told by their shape.
        if not hasattr(error, "format_message"):
            raise
        text = str(error.format_message())
        if type(error).__name__ == "NoArgsIsHelpError":  # its text is the help
            print(text, file=sys.stderr)
            status = USAGE
        else:
            status = _complain(" ".join(text.split()))
    sys.exit(status or 0)


def _complain(text: str) -> int:
    print(f"harness: {text}", file=sys.stderr)
    return USAGE
