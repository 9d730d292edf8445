"""The command line: `main`, and the commands that read what is there: doctor, tables, report, compare.

What a command does is in the module of its name.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from . import cli_checks, cli_learn, cli_measures, cli_model, cli_roofline, cli_sweep  # noqa: F401  # they add commands
from .cli_options import INTERRUPTED, FormatOption, JsonOption, app, piped, prepare
from .errors import UsageError, complain
from .options import TOLERANCE_PERCENT, Format

USAGE = 2
PACKAGE = "fa2-ports"


def _version(asked: bool) -> None:
    if asked:
        try:
            print(f"harness {version(PACKAGE)}")
        except PackageNotFoundError:
            print(f"harness, from a folder: the package {PACKAGE} is not installed")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


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
        here, trouble = prepare(), ""
    except UsageError as error:
        here, trouble = CPU, str(error)
    from .doctor import doctor

    raise typer.Exit(piped(lambda: doctor(json, form, here, trouble)))


@app.command("tables", short_help="Print or write the tables of records.")
def tables_command(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of records.", show_default=False)] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the tables between this file's markers instead.", metavar="FILE")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Only tell whether --write would change this file.", metavar="FILE")
    ] = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Print the tables that files of records make, or write those that a text quotes.

    A text quotes files of harness/results between two lines, <!-- records: FILE… --> and <!-- /records -->. Other words
    quote a part: summary, how fast the ports are beside their baseline; across, of a bench the tables with everybody;
    ladder, how the ports compare on one; matrix, the checks counted.

    Of a sweep without a GPU, as of compile, the kernels that were built are told. A file that has nothing for a table
    is told and left out.

    Exit status: 0 all good, 1 the text of --check is behind its records, 2 wrong usage, or no file has anything.

    \b
    Examples:
      harness tables walkthrough.jsonl --format markdown
      harness tables --write README.md
    """
    from .published import read_tabled, record_tables, write_tables
    from .tables import print_tables

    if sum((write is not None, check is not None, bool(files))) != 1:
        raise UsageError("give files of records to print, or --write FILE, or --check FILE")
    if write is not None:
        print(f"{write}: {'written' if write_tables(write) else 'as it was'}")
        return
    if check is not None:
        behind = write_tables(check, write=False)
        print(f"{check}: {'behind its records' if behind else 'as its records have it'}")
        raise typer.Exit(int(behind))
    print_tables(record_tables(read_tabled(files or ())), form)


@app.command("report", short_help="Records as one HTML page.")
def report_command(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of records; default, the kept ones.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the page is written.")] = Path("report.html"),
) -> None:
    """Write one HTML page of records: verdicts, bars of TFLOP/s, time and memory against N, losses, and all the tables.

    It takes what --json of run, bench, matrix, ladder, memory, roofline and model has written; a file that has none of
    it is told and left out, as one of a sweep is. The page loads nothing: it can be mailed, and opens from disk. Its
    filters are kept in its address, so that a link shows the same view.

    Exit status: 0 all good, 2 wrong usage, or no file has anything.

    \b
    Examples:
      harness report
      harness report matrix.jsonl bench.jsonl memory.jsonl --out h200.html
    """
    from .report import report

    print(report(files or (), out))


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
    raise typer.Exit(piped(lambda: compare((before, after), **options)))  # type: ignore[arg-type]


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
    complain(text)
    return USAGE
