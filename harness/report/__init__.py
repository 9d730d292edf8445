"""`harness report`: records as one HTML page that needs no network and no server.

`runs` reads the records, `verdicts`, `speed`, `memory`, `rooflines`, `model` and `origins` make the content of the
page's sections of them, `cards`, `tables`, `bars`, `curves`, `steps` and `roofline_chart` say how it is shown, and
`page` puts it together with what is in `templates/`. Every figure comes from a record, apart from those of `learn`,
which shows how the algorithm works.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..published import KEPT, RESULTS
from ..records import check_place
from .page import page
from .runs import read_runs


def report(paths: Sequence[Path], out: Path) -> str:
    """Writes the page of these files of records, by default of the kept ones, and returns what it did in a line.

    The page takes its name when it is complete: what goes wrong before leaves an earlier one as it was. Raises
    UsageError for files of which none has anything, and for a place that cannot be written to.
    """
    paths = list(paths) or KEPT
    if not paths:
        raise UsageError(f"there are no records in {RESULTS}: give files that --json has written")
    partial = out.with_name(out.name + ".partial") if out.name else out
    for place in (out, partial):
        check_place(out, place, "--out")
    if any(out.exists() and path.exists() and out.samefile(path) for path in paths):
        raise UsageError(f"--out {out} is a file of records that is read")
    runs = read_runs(paths)
    text = page(runs)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
    records, files = sum(len(run.records) for run in runs), len({run.file for run in runs})
    return f"{out}: written, from {records} records in {files} {'file' if files == 1 else 'files'}"
