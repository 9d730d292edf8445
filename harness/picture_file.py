"""The file that `--picture` names: checked before anything runs, written at the end."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UsageError
from .records import check_place


def check_picture(path: Path, records: Path | None) -> None:
    """Raises UsageError for a place of a picture that cannot be written to, a name that is none of an SVG file, or that
    of the file that the records go to."""
    check_place(path, path, "--picture")
    if path.suffix.lower() != ".svg":
        raise UsageError(f"--picture draws an SVG file: its name must end in .svg, got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"--picture {path} cannot be written: there is no folder {path.parent}")
    if records is not None and path.resolve() == records.resolve():
        raise UsageError(f"--picture {path} is the file that the records go to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--picture {path} cannot be written: Permission denied")


def write_picture(path: Path, picture: str) -> None:
    """Writes the picture. Raises UsageError when that fails after all."""
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--picture {path} cannot be written: {error.strerror}") from error
