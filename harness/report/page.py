"""The page: one HTML text that holds its style, its script and its pictures, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .contestants import FORMULA, Contestant
from .learn import lesson
from .memory import memory_cards
from .model import model_parts
from .origins import origins_table
from .rooflines import roofline_parts
from .runs import Facets, Run, facets_of
from .speed import speed_parts
from .verdicts import checks_of, verdicts

# The filters in the order of the page: the facet, its label, and how its values are told.
FILTERS = (("direction", "Direction"), ("d", "Head size D"), ("mask", "Mask"), ("path", "Target"), ("dtype", "dtype"))
DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Section:
    """A part of the page. template: in `templates/`, given the content as `section.content`.

    missing: where there is nothing to show, the sentence that stands for it, and in `command` what would make it.
    """

    id: str
    title: str
    template: str
    content: Any
    missing: str
    command: str


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """The sections in their order; one without records is there as well, and says so."""
    return [
        Section(
            id="verdicts",
            title="Is it right?",
            template="verdicts.html",
            content=verdicts(runs),
            missing="These records hold no check of a port. With or without a GPU, this makes some:",
            command="harness matrix --suite quick --json matrix.jsonl",
        ),
        Section(
            id="speed",
            title="How fast is it?",
            template="speed.html",
            content=speed_parts(runs),
            missing="These records hold no timing. On a machine with a GPU, this makes some:",
            command="harness bench --suite fa2 --json bench.jsonl",
        ),
        Section(
            id="memory",
            title="How much memory does it take?",
            template="memory.html",
            content=memory_cards(runs),
            missing="These records hold no measurement of memory. On a machine with a GPU, this makes some:",
            command="harness memory --suite long --json memory.jsonl",
        ),
        Section(
            id="rooflines",
            title="What holds it back?",
            template="rooflines.html",
            content=roofline_parts(runs),
            missing="These records hold no roofline of a card. On a machine with a GPU, this makes some:",
            command="harness roofline --only n4096 --json roofline.jsonl",
        ),
        Section(
            id="model",
            title="Does a model train on it?",
            template="model.html",
            content=model_parts(runs),
            missing="These records hold no run of a model. With or without a GPU, this makes some:",
            command="harness model --mode train --json model.jsonl",
        ),
        Section(
            id="how",
            title="How it works",
            template="learn.html",
            content=lesson(),
            missing="",
            command="",
        ),
        Section(
            id="origins",
            title="Where do the numbers come from?",
            template="origins.html",
            content=origins_table(runs),
            missing="",
            command="",
        ),
    ]


def page(runs: Sequence[Run]) -> str:
    """The page of these runs. The same records give the same page."""
    environment = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = _asset("style.css", "learn.css"), _asset("script.js", "arithmetic.js", "learn.js")
    return environment.get_template("page.html").render(
        style=style,
        script=script,
        policy=_policy(style, script),
        sections=sections_of(runs),
        filters=[(name, label, _options(name, runs)) for name, label in FILTERS],
        contestants=_contestants(runs),
        paths=list(dict.fromkeys(run.path for run in runs)),
        figures=_figures(runs),
    )


def _asset(*names: str) -> Markup:
    folder = files("harness.report").joinpath("templates")
    return Markup("".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names))


def _policy(style: str, script: str) -> str:
    """A content security policy by which a browser runs this script and this style, and fetches nothing."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _facets(runs: Iterable[Run]) -> Iterator[Facets]:
    return (facets_of(record) for run in runs for record in run.records)


def _options(name: str, runs: Sequence[Run]) -> list[str]:
    """The values of a filter: directions and numbers in their order, others as they come."""
    found = list(dict.fromkeys(facets[name] for facets in _facets(runs)))
    if name == "direction":
        return sorted(found, key=DIRECTIONS.index)
    return sorted(found, key=int) if name == "d" else found


def _contestants(runs: Sequence[Run]) -> list[Contestant]:
    """Everybody who has a row, a bar or a curve."""
    names: set[str] = set()
    for record in (record for run in runs for record in run.records):
        if record["kind"] == "check":
            names |= {record["port"], *(record["host_us"] or ())}
            names |= {b["port"] for b in record["baselines"] if b["verdict"] == "fail"}
        elif record["kind"] == "memory":
            names |= {record["contestant"], FORMULA}
        elif record["kind"] == "roofline":
            names.add(record["port"])
        elif record["kind"] == "model":
            names.add(record["contestant"])
    return sorted((Contestant(name) for name in names), key=lambda who: (who.rank, who.name))


def _figures(runs: Sequence[Run]) -> list[tuple[str, int]]:
    """What is on the page, counted."""
    records = [record for run in runs for record in run.records]
    seen = Counter(record["verdict"] for run in runs for record in checks_of(run))
    timed = sum(bool(record.get("samples")) for record in records)
    measured = sum(record["kind"] == "memory" and record["peak_bytes"] is not None for record in records)
    return [
        ("checks pass", seen["pass"]),
        ("checks fail", seen["fail"]),
        ("unsupported", seen["unsupported"]),
        ("timings", timed),
        ("measurements of memory", measured),
        ("runs of a model", sum(record["kind"] == "model" for record in records)),
    ]
