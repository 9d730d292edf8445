"""Origins: what each file holds, on what and when it was measured, and whether the kernels have changed since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..provenance import changed_ports
from ..reader import Record
from ..tables import Table
from .runs import Run, origin_of
from .tables import PageTable, page_table

KIND_WORDS = {
    "check": "checks",
    "disagreement": "disagreements",
    "memory": "measurements of memory",
    "roofline": "rooflines",
    "model": "models",
}


def origins_table(runs: Sequence[Run]) -> PageTable:
    """A row for each run and each different origin in it."""
    table = Table(
        "What was read",
        ("file", "code path", "records", "suites", "seed", "measured with", "Python", "kernels changed since"),
        labels=8,
    )
    paths = []
    for run in runs:
        by_origin: dict[str, list[Record]] = {}
        for record in run.records:
            by_origin.setdefault(origin_of(record), []).append(record)
        for origin, records in by_origin.items():
            kinds = Counter(record["kind"] for record in records)
            held = ", ".join(f"{count} {KIND_WORDS[kind]}" for kind, count in kinds.items())
            suites = ", ".join(dict.fromkeys(record["suite"] for record in records))
            seeds = ", ".join(dict.fromkeys(str(record["seed"]) for record in records))
            python = ", ".join(dict.fromkeys(record["provenance"]["python"] for record in records))
            changed = ", ".join(sorted(changed_ports(records))) or "none"
            table.add(run.file, run.path, held, suites, seeds, origin, python, changed)
            paths.append({"path": run.path})
    table.notes.append(
        "Kernels count as changed when the sources of a port or of `common` are no longer those that were measured, "
        "by their hashes."
    )
    return page_table(table, {}, rows=paths)
