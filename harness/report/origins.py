"""Origins: what each file holds, on what and when it was measured, and whether the kernels have changed since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import common

from ..jobs import own_name
from ..published import have_changed
from ..reader import Record
from ..tables import Table
from .runs import Run, origins
from .tables import PageTable, page_table

KIND_WORDS = {"check": "checks", "disagreement": "disagreements", "memory": "measurements of memory"}


def origins_table(runs: Sequence[Run]) -> PageTable:
    """A row for each run and each different origin in it."""
    table = Table(
        "What was read",
        ("file", "code path", "records", "suites", "seed", "measured with", "Python", "kernels changed since"),
        labels=8,
    )
    paths = []
    for run in runs:
        for origin in origins(run.records):
            records = [record for record in run.records if origins([record]) == [origin]]
            kinds = Counter(record["kind"] for record in records)
            held = ", ".join(f"{count} {KIND_WORDS[kind]}" for kind, count in kinds.items())
            suites = ", ".join(dict.fromkeys(record["suite"] for record in records))
            seeds = ", ".join(dict.fromkeys(str(record["seed"]) for record in records))
            python = ", ".join(dict.fromkeys(record["provenance"]["python"] for record in records))
            made_of = dict.fromkeys(source for record in records for source in _sources(record))
            changed = ", ".join(sorted({port for port, digest in made_of if have_changed(port, digest)}))
            table.add(run.file, run.path, held, suites, seeds, origin, python, changed or "none")
            paths.append({"path": run.path})
    table.notes.append(
        "Kernels count as changed when the sources of a port or of `common` are no longer those that were measured, "
        "by their hashes."
    )
    return page_table(table, {}, rows=paths)


def _sources(record: Record) -> Iterator[tuple[str, str]]:
    """The ports of a record, with the hashes of the sources that it was made with."""
    if record["kind"] == "disagreement":
        sources = record["sources"]
    else:
        sources = {record["contestant" if record["kind"] == "memory" else "port"]: record["sources"]}
    for name, digest in sources.items():
        if own_name(name) in common.port_names() and digest is not None:
            yield own_name(name), digest
