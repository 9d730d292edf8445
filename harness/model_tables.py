"""The tables of `harness model`, made of its records: losses, differences to PyTorch's attention, speed, memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .baselines import BASELINES
from .bench_tables import changed_notes, path_of, title_of
from .compilers import PACKAGES
from .provenance import in_words
from .reader import Record
from .tables import Table
from .training import UNTIMED

REFERENCE = "sdpa_flash"  # what all are told beside
GIGA = 1e9
CURVE_ROWS = 10
MIXED = "Parameters in fp32, products in bf16 by autocast."
RECIPE = (
    "AdamW with a learning rate of 3e-4 after 20 steps of warm-up, weight decay 0.1, gradients clipped to a norm of 1; "
    "the norm is that before clipping."
)


@dataclass(frozen=True)
class Group:
    """The runs of one model on one text, batch and path; the first is PyTorch's flash attention, if it is there."""

    records: tuple[Record, ...]

    def one(self, name: str, *, compiled: bool = False) -> Record | None:
        """The run of a contestant, where it has losses."""
        found = (r for r in self.records if (r["contestant"], r["compiled"]) == (name, compiled) and r["losses"])
        return next(found, None)

    @property
    def is_training(self) -> bool:
        """Whether these train, or evaluate."""
        return bool(self.records[0]["mode"] == "train")

    @property
    def step(self) -> str:
        """What one of its losses is of."""
        return "step" if self.is_training else "batch"

    @property
    def floor(self) -> Record | None:
        """The run of another of PyTorch's attentions, whose difference is the noise floor."""
        others = (r for r in self.records if r["contestant"] in BASELINES and r["contestant"] != REFERENCE)
        return next((r for r in others if r["losses"] and not r["compiled"]), None)

    @property
    def title(self) -> str:
        """What ran on which card."""
        first = self.records[0]
        steps = first["steps"]
        what = f"{steps} training steps" if self.is_training else f"loss on {steps * self.tokens} tokens"
        problem = first["problem"]
        sizes = f"batch {problem['batch']}, context {problem['len_q']}"
        where = path_of(first) if any(map(_runs_kernels, self.records)) else first["provenance"]["card"] or "the CPU"
        return f"{model_title(first)}, {what}, {sizes}, {where}"

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        problem = self.records[0]["problem"]
        return int(problem["batch"] * problem["len_q"])


def model_title(record: Record) -> str:
    """A model's name with its sizes."""
    sizes = record["model"]
    millions = sizes["parameters"] / 1e6
    shown = f"{millions:.0f}" if millions >= 10 else f"{millions:.1f}"
    layers = "1 layer" if sizes["layers"] == 1 else f"{sizes['layers']} layers"
    return f"GPT-2 with {layers}, width {sizes['width']} ({shown}M parameters)"


def _runs_kernels(record: Record) -> bool:
    """Whether kernels of a port ran, which have a code path."""
    return bool(record["losses"]) and record["contestant"] in PACKAGES


def groups(records: Iterable[Record]) -> list[Group]:
    """The records of models by what can be told beside each other."""
    found: dict[str, list[Record]] = {}
    for record in records:
        same = [record[name] for name in ("mode", "model", "weights", "text", "steps", "problem", "seed", "target")]
        found.setdefault(json.dumps([same, path_of(record)]), []).append(record)
    return [Group(tuple(members)) for members in found.values()]


def name_of(record: Record) -> str:
    """A contestant in words."""
    own = title_of(record["contestant"])
    return f"{own}, compiled" if record["compiled"] else own


def apart(a: Sequence[float], b: Sequence[float]) -> tuple[float, int]:
    """The largest difference of two rows of numbers, and where it is: the step, from 1."""
    differences = np.abs(np.array(a, float) - np.array(b, float))
    step = int(differences.argmax())
    return float(differences[step]), step + 1


def speed_of(record: Record, tokens: int) -> float | None:
    """Tokens a second, by the median of the steps; of a training without its first steps. None without a GPU."""
    timed = record["step_ms"][UNTIMED - 1 if record["mode"] == "train" else 0 :]
    return tokens / float(np.median(timed)) * 1e3 if timed else None


def model_tables(records: Iterable[Record]) -> list[Table]:
    """For each model and text: the runs beside PyTorch's, losses by step, and compiled runs beside eager ones."""
    return [table for group in groups(records) for table in tables_of(group)]


def tables_of(group: Group) -> list[Table]:
    """The tables of one group; the first has a row for each of its records, in their order."""
    return [_main_table(group), *(_curve_table(group) if group.is_training else ()), *_compiled_table(group)]


def _main_table(group: Group) -> Table:
    theirs = title_of(REFERENCE)
    training = group.is_training
    losses = ("first loss", "last loss") if training else ("loss", f"Δ to {theirs}")
    apart_columns = ("largest |Δ loss|", f"at {group.step}") + (("largest |Δ norm|", "at step") if training else ())
    speed = ("tokens/s", f"% of {theirs}", "peak GB") if any(r["step_ms"] for r in group.records) else ()
    table = Table(group.title, ("attention", *losses, *apart_columns, *speed, "verdict"))
    reference = group.one(REFERENCE)
    for record in group.records:
        cells = [*_losses(record, reference), *_apart(record, reference, training)]
        if speed:
            cells += _speed(record, reference, group.tokens)
        table.add(name_of(record), *cells, _verdict(record))
    first = group.records[0]
    if group.floor is not None:
        table.notes.append(
            f"Δ: to {theirs}, by {group.step}. The row of {name_of(group.floor)} is the noise "
            "floor: PyTorch's own attention, adding in another order."
        )
    if training:
        table.notes.append(f"{RECIPE} Training amplifies every difference, that of the noise floor as well.")
    if speed:
        left_out = f", without the first {UNTIMED} steps" if training else ""
        table.notes.append(
            f"tokens/s: by the median of device time from step to step{left_out}; each contestant ran by itself, not "
            "by turns. GB are 10^9 bytes of PyTorch's allocator at its height."
        )
    table.notes.append(f"{MIXED} {_material(first)}. {in_words(first['provenance'])}.")
    table.notes += changed_notes(group.records)
    return table


def _losses(record: Record, reference: Record | None) -> tuple[str, str]:
    losses = [float(x) for x in record["losses"]]
    if not losses:
        return "–", "–"
    if record["mode"] == "train":
        return f"{losses[0]:.5f}", f"{losses[-1]:.5f}"
    mean = float(np.mean(losses))
    beside = "–" if reference is None else f"{mean - float(np.mean([float(x) for x in reference['losses']])):+.2e}"
    return f"{mean:.6f}", beside


def _apart(record: Record, reference: Record | None, training: bool) -> list[str]:
    cells: list[str] = []
    for name in ("losses", "grad_norms") if training else ("losses",):
        if reference is None or record is reference or not record[name]:
            cells += ["–", "–"]
            continue
        difference, step = apart(record[name], reference[name])
        cells += [f"{difference:.2e}", str(step)]
    return cells


def _speed(record: Record, reference: Record | None, tokens: int) -> list[str]:
    own = speed_of(record, tokens)
    theirs = None if reference is None else speed_of(reference, tokens)
    percent = "–" if own is None or theirs is None else f"{100 * own / theirs:.1f}"
    peak = record["peak_bytes"]
    return ["–" if own is None else f"{own:,.0f}", percent, "–" if peak is None else f"{peak / GIGA:.2f}"]


def _verdict(record: Record) -> str:
    if record["verdict"] == "pass":
        return "pass"
    return f"FAIL: {record['reason']}" if record["verdict"] == "fail" else record["reason"]


def _material(record: Record) -> str:
    weights, text = record["weights"], record["text"]
    of = f"Weights of seed {record['seed']}" if weights is None else f"Weights of {weights['source']}"
    return f"{of}; text: {text['source']}, in {text['tokenizer']}"


def _curve_table(group: Group) -> list[Table]:
    """Losses at some steps; none where a training has one step."""
    runs = [record for record in group.records if record["losses"]]
    last = group.records[0]["steps"]
    if not runs or last < 2:
        return []
    table = Table(f"Loss by step: {group.title}", ("step", *map(name_of, runs)))
    for step in sorted({round(x) for x in np.linspace(1, last, CURVE_ROWS)}):
        table.add(str(step), *(f"{float(record['losses'][step - 1]):.5f}" for record in runs))
    return [table]


def _compiled_table(group: Group) -> list[Table]:
    """Whether torch.compile changes anything; none where nothing was compiled."""
    compiled = [record for record in group.records if record["compiled"]]
    if not compiled:
        return []
    columns = ("attention", "largest |Δ loss|", "largest |Δ norm|", "tokens/s, times")
    table = Table(f"Compiled beside eager: {group.title}", columns)
    for record in compiled:
        eager = group.one(record["contestant"])
        table.add(title_of(record["contestant"]), *_beside_eager(record, eager, group.tokens))
    table.notes.append(
        "The whole model by torch.compile in one graph (fullgraph=True), beside the same contestant without it."
    )
    return [table]


def _beside_eager(record: Record, eager: Record | None, tokens: int) -> list[str]:
    if eager is None or not record["losses"]:
        return ["–"] * 3
    cells = [f"{apart(record[name], eager[name])[0]:.2e}" if record[name] else "–" for name in ("losses", "grad_norms")]
    own, before = speed_of(record, tokens), speed_of(eager, tokens)
    return [*cells, "–" if own is None or before is None else f"{own / before:.2f}"]
