"""What a command gives up with, and how it says so."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(Exception):
    """A wrong request, or one that this machine cannot honour: one line for stderr, and exit status 2."""


def complain(text: str) -> None:
    """One line on stderr."""
    print(f"harness: {text}", file=sys.stderr)


def one_of(what: str, names: Iterable[str], got: str) -> str:
    """The message for a name that is none of those allowed, with the one that was probably meant."""
    names = list(names)
    close = get_close_matches(got, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{what} must be one of {', '.join(names)}, got {got!r}{hint}"


def one_line(error: BaseException) -> str:
    """An exception as one line: its type, and the first line of its text; of a card out of memory, not who holds it."""
    lines = str(error).strip().partition(". GPU ")[0].splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
