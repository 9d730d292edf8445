"""The application, and what its commands share: options, and how they are read.

PyTorch is imported by the commands, not here, so that `--help` and a typo answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import UsageError, complain, one_of
from .options import Directions, Dtype, Format

if TYPE_CHECKING:
    from .baselines.protocol import Span
    from .environment import Environment

INTERRUPTED, BROKEN_PIPE = 130, 141
SEED_MOST = 2**63 - 1  # of PyTorch's generators and of readers of JSON

app = typer.Typer(
    name="harness",
    help="Checks, times and compares the FlashAttention-2 ports.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def directions(text: str) -> Directions:
    """The directions of a comma-separated list. Raises UsageError for what is none."""
    given = names(text)
    for name in given:
        if name not in [*Directions]:
            raise UsageError(one_of("--direction", Directions, name))
    return Directions(given[0]) if len(given) == 1 else Directions.BOTH


JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write JSON lines to FILE.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the tables.")]
TARGET_HELP = "Whose code path: native, or a target's whose code runs here. Ada's runs on every later card."
ImplOption = Annotated[str, typer.Option(metavar="NAME[,NAME…]", help="The ports: triton, tilelang, cute, reference.")]
SuiteOption = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="quick, walkthrough, long, fa2, hard, or the path of a .yaml file.")
]
DirectionOption = Annotated[
    Directions, typer.Option(parser=directions, metavar="NAME[,NAME…]", help="forward, backward, or both.")
]
TargetOption = Annotated[str, typer.Option(metavar="NAME", help=TARGET_HELP)]
OnlyOption = Annotated[str | None, typer.Option(metavar="TEXT", help="Only cases with TEXT in name or id.")]
SkipOption = Annotated[str | None, typer.Option(metavar="TEXT", help="No cases with TEXT in name or id.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Every problem of the suite in this dtype.", show_default=False)
]
RoundsOption = Annotated[int, typer.Option(min=2, metavar="N", help="Rounds of a timing.")]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Go on from these records, also of an interrupted run (FILE.partial), as far as they fit; refused when "
        "none does. Records go to FILE; if some are not carried over, what was there is kept as FILE.before.",
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, max=SEED_MOST, metavar="N", help="The seed of the inputs.")]
LimitOption = Annotated[
    float, typer.Option("--time-limit", min=1, metavar="S", help="Seconds that one check or row of timings may take.")
]
IsolateOption = Annotated[
    bool,
    typer.Option("--isolate/--no-isolate", help="Launch kernels in a process apart, or in this one, for debuggers."),
]
SpansOption = Annotated[
    str,
    typer.Option(
        metavar="NAME[,NAME…]", help="forward, backward, both: here both is something by itself, one launch of the two."
    ),
]
BASELINE_HELP = (
    "sdpa_flash, sdpa_cudnn, sdpa_efficient, sdpa_math, flex, flash_attn, fa4, tilelang_example; default, all."
)
BaselineOption = Annotated[str | None, typer.Option(metavar="NAME[,NAME…]", help=BASELINE_HELP, show_default=False)]
FirstBaselineOption = Annotated[
    str | None,
    typer.Option(metavar="NAME[,NAME…]", help=f"{BASELINE_HELP} Speeds are relative to the first.", show_default=False),
]


def spans(text: str) -> tuple[Span, ...]:
    """The spans of a comma-separated list. Raises UsageError for what is none."""
    from .baselines.protocol import SPANS

    for name in names(text):
        if name not in SPANS:
            raise UsageError(one_of("--direction", SPANS, name))
    return tuple(span for name in names(text) for span in SPANS if span == name)


def names(text: str) -> tuple[str, ...]:
    """The names of a comma-separated list, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def kernel_ports() -> tuple[str, ...]:
    """The ports that are written and have kernels: all but the reference."""
    from common.ports import is_written, port_names

    return tuple(name for name in port_names() if name != "reference" and is_written(name))


def records_file(json: Path | None, resume: Path | None) -> Path | None:
    """Where records go: to the file that is resumed, unless another one is named."""
    if json is not None or resume is None:
        return json
    return resume.with_suffix("") if re.fullmatch(r"\.(partial|before\d*)", resume.suffix) else resume


def piped(command: Callable[[], int]) -> int:
    """The command's exit status, also of one that Ctrl-C ends, or `harness run … | head` by closing the pipe.

    Of a pipe that is closed only what becomes of records is told: the rest is what was wanted.
    """
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        complain("; ".join(["interrupted", *_notes(stop)]))
        return INTERRUPTED
    except BrokenPipeError as stop:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if _notes(stop):
            complain("; ".join(["standard output was closed before the end", *_notes(stop)]))
        return BROKEN_PIPE
    return status


def _notes(stop: BaseException) -> list[str]:
    return getattr(stop, "__notes__", [])


def prepare() -> Environment:
    """Where commands run; to be known before anything imports triton, which some parts of torch do too."""
    from .environment import prepare

    return prepare()
