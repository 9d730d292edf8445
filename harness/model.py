"""`harness model`: a GPT-2 with the attention swapped, evaluated or trained with each, on the same tokens.

What is told apart is the attention alone: weights, batches and their order are the same for all. Two of PyTorch's own
attentions, which add in different orders, give the difference that means nothing, the noise floor.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import common
from common import Mask, Problem
from common.ports import is_written

from .ahead import compile_ahead
from .attend import implementations
from .baselines import BASELINES
from .checkpoint import Checkpoint
from .environment import Environment
from .errors import UsageError, one_of
from .gpt2 import GPT2, GPT2Config
from .inputs import InputSpec
from .isolation import Lost
from .jobs import NAIVE
from .model_tables import REFERENCE, model_tables
from .reader import Record
from .records import SHOWN, RecordFile, problem_fields, record_file
from .schema import VERSION
from .session import FAILED, NOTHING_RAN, OK, Request, Session, progress
from .suites import Case, Suite
from .tables import print_tables
from .text import Text, drawn, has_tokenizer, load_text, windows
from .training import OUT_OF_MEMORY, Mode, Outcome, Plan, run_model
from .trial import Verdict

SMALL = GPT2Config(layers=4, heads=4, width=128, context=64)  # what an interpreter can train
STRAY = 2.0**-7  # one unit of bf16's last place: no order of adding moves a loss by as much


@dataclass(frozen=True)
class Sizes:
    """What a run is made of where the command line does not say. tokens: of an evaluation."""

    config: GPT2Config
    batch: int
    tokens: int
    steps: int
    floor: str  # PyTorch's attention that adds in another order than its flash one


ON_GPU = Sizes(GPT2Config(), batch=8, tokens=65_536, steps=200, floor="sdpa_efficient")
ON_CPU = Sizes(SMALL, batch=2, tokens=512, steps=5, floor="sdpa_math")


@dataclass(frozen=True)
class ModelRequest(Request):
    """The options of the command; None for what depends on the machine. contestants: as `contestants` gives them."""

    contestants: tuple[str, ...] = ()
    mode: Mode = "eval"
    batch: int | None = None
    context: int | None = None
    tokens: int | None = None
    steps: int | None = None
    weights: Path | None = None
    text: Path | None = None
    tokenizer: Path | None = None
    compiles: bool = False


@dataclass
class Model:
    """A run of the command, and what it has so far."""

    request: ModelRequest
    session: Session
    plan: Plan
    text: Text
    file: RecordFile | None = None
    records: list[Record] = field(default_factory=list)
    outcomes: dict[tuple[str, bool], Outcome] = field(default_factory=dict)


def contestants(asked: str, here: Environment) -> tuple[str, ...]:
    """The names of a comma-separated list, or of all; `sdpa` is PyTorch's flash attention.

    Flash comes first, and after it the attention that gives the noise floor, asked for or not: all are told beside
    them. Raises UsageError for a name that is no implementation.
    """
    names = [NAIVE, *(name for name in common.port_names() if is_written(name))]
    if asked != "all":
        names = [REFERENCE if name == "sdpa" else name for name in (part.strip() for part in asked.split(","))]
    for name in names:
        if name not in implementations():
            raise UsageError(one_of("--impl", ("all", "sdpa", *implementations()), name))
    return tuple(dict.fromkeys((REFERENCE, _defaults(here).floor, *names)))


def _defaults(here: Environment) -> Sizes:
    return ON_GPU if here.has_gpu else ON_CPU


def model(request: ModelRequest, here: Environment, *, all_asked: bool = True) -> int:
    """Runs the command and returns its exit status.

    all_asked: a port that cannot run is an error, and not just a line on stderr. Raises UsageError for what can be told
    before anything runs.
    """
    plan, text = _plan(request, here)
    ports = tuple(name for name in request.contestants if name in common.port_names())
    with Session.open(replace(request, impls=ports), here, suite=_suite(plan)) as session:
        if ports and not session.ports:
            return NOTHING_RAN
        this = Model(request, session, plan, text)
        with record_file(request.json, use=SHOWN) as file:
            this.file = file
            compile_ahead(session)
            try:
                _run(this)
            finally:
                print_tables(model_tables(this.records), request.form)
        return _status(this, all_asked=all_asked)


def _plan(request: ModelRequest, here: Environment) -> tuple[Plan, Text]:
    """What all contestants do. Raises UsageError for sizes that do not go together."""
    sizes = _defaults(here)
    checkpoint = None if request.weights is None else Checkpoint.open(request.weights)
    config = sizes.config if checkpoint is None else checkpoint.config
    context = request.context or min(sizes.config.context, config.context)
    if checkpoint is None:
        config = replace(config, context=context)
    elif context > config.context:
        raise UsageError(
            f"--context {context}: {checkpoint.path} has embeddings for {config.context} positions; a longer "
            "context takes weights from a seed (no --weights)"
        )
    batch = request.batch or sizes.batch
    text = _text(request, config)
    if request.mode == "train":
        batches = drawn(text, request.steps or sizes.steps, batch, context, request.seed)
    else:
        batches = windows(text, _whole_batches(request.tokens, sizes.tokens, batch * context), batch, context)
    return Plan(request.mode, config, checkpoint, request.seed, batches, here.device), text


def _whole_batches(tokens: int | None, default: int, each: int) -> int:
    """How many batches of `each` tokens; by default as many whole ones as the default has, and at least one."""
    if tokens is None:
        return max(1, default // each)
    if tokens % each:
        raise UsageError(f"--tokens must be a multiple of batch × context, which is {each}, got {tokens}")
    return tokens // each


def _text(request: ModelRequest, config: GPT2Config) -> Text:
    tokenizer, weights = request.tokenizer, request.weights
    if tokenizer is None and weights is not None and has_tokenizer(weights):
        tokenizer = weights
    text = load_text(request.text, tokenizer)
    largest = int(text.tokens.max()) if len(text.tokens) else 0
    if largest >= config.vocabulary:
        raise UsageError(f"the text has token {largest}, the model's vocabulary ends at {config.vocabulary - 1}")
    return text


def _suite(plan: Plan) -> Suite:
    """The attention of the model as the one problem of a suite, so that it is checked as in any other command."""
    batch, length = plan.batches.shape[1], plan.batches.shape[2] - 1
    heads, head_dim = plan.config.heads, plan.config.width // plan.config.heads
    try:
        problem = Problem(batch, heads, heads, length, length, head_dim, torch.bfloat16, Mask.causal())
    except ValueError as error:
        raise UsageError(f"no port has the attention of this model: {error}") from error
    case = Case("attention", problem, InputSpec(layout="bshd"), "the attention of the model, in its layout")
    return Suite("gpt2", "the attention of a GPT-2", timed=True, small=False, cases=(case,))


def _run(this: Model) -> None:
    asked = [name for name in this.request.contestants if name not in this.session.missing]
    forms = (False, True) if this.request.compiles else (False,)
    runs = [(name, compiled) for name in asked for compiled in forms]
    with progress("evaluating" if this.plan.mode == "eval" else "training", len(runs)) as begin:
        refused: dict[str, tuple[Verdict, str]] = {}
        for name, compiled in runs:
            begin(f"{name}, compiled" if compiled else name)
            if not compiled:
                refused[name] = _checked(this, name)
            verdict, reason = refused[name]
            outcome = Outcome()
            if verdict == "pass":
                verdict, reason, outcome = _outcome(this, name, compiled)
            record = _record(this, name, compiled, verdict, reason, outcome)
            this.records.append(record)
            if this.file is not None:
                this.file.write(record)


def _checked(this: Model, name: str) -> tuple[Verdict, str]:
    """The verdict of the checks of an attention by itself, on the problem that the model poses; and why it is that."""
    session = this.session
    if name not in session.ports and not (name in BASELINES and session.environment.has_gpu):
        return "pass", ""  # the plain attention is what checks count errors in, and a CPU's SDPA is not ours
    for check in session.check(session.callers[0], name, session.suite.cases[0]):
        if check.verdict != "pass":
            why = check.reason or "; ".join(check.complaints()[:1])
            return check.verdict, f"its check failed, {check.direction}: {why}" if check.verdict == "fail" else why
    return "pass", ""


def _outcome(this: Model, name: str, compiled: bool) -> tuple[Verdict, str, Outcome]:
    try:
        outcome = this.session.callers[0].call(run_model, this.plan, name, compiled)
    except Lost as lost:
        return "fail", f"it {lost}", Outcome()
    if outcome.reason:
        return "unsupported", outcome.reason, outcome
    this.outcomes[name, compiled] = outcome
    reason = fault_of(outcome, this.outcomes.get((REFERENCE, False)), this.plan.mode)
    return "fail" if reason else "pass", reason, outcome


def fault_of(outcome: Outcome, reference: Outcome | None, mode: Mode) -> str:
    """What is wrong with a run: numbers that are none, or that no order of adding explains; empty for nothing.

    Where all have the same weights, on every batch of an evaluation and in the first step of a training, loss and
    gradient norm may be apart from the reference's by `STRAY` of them. Later steps only tell how differences grow.
    """
    for what, values in (("loss", outcome.losses), ("gradient norm", outcome.grad_norms)):
        for step, value in enumerate(values, start=1):
            if not math.isfinite(value):
                return f"its {what} is {value} at step {step}"
        theirs = () if reference is None else reference.losses if what == "loss" else reference.grad_norms
        comparable = list(zip(values, theirs, strict=False))[: None if mode == "eval" else 1]
        for step, (a, b) in enumerate(comparable, start=1):
            if abs(a - b) > STRAY * abs(b):
                return f"its {what} strays at step {step}: {a:.6g}, with PyTorch's attention {b:.6g}"
    return ""


def _status(this: Model, *, all_asked: bool) -> int:
    verdicts = [record["verdict"] for record in this.records]
    if "fail" in verdicts:
        return FAILED
    refused = [r for r in this.records if r["verdict"] == "unsupported" and r["reason"] != OUT_OF_MEMORY]
    idle = {*this.session.missing, *(r["contestant"] for r in refused if r["contestant"] in this.session.ports)}
    return NOTHING_RAN if "pass" not in verdicts or (all_asked and idle) else OK


def _record(this: Model, name: str, compiled: bool, verdict: Verdict, reason: str, outcome: Outcome) -> dict[str, Any]:
    """The record of one contestant's run."""
    session, plan = this.session, this.plan
    case = session.suite.cases[0]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT2(plan.config, "").parameters())
    checkpoint = plan.checkpoint
    weights = None if checkpoint is None else {"source": checkpoint.source, "sha256": checkpoint.sha256}
    return {
        "schema": VERSION,
        "kind": "model",
        "suite": session.suite.name,
        "case": case.id,
        "contestant": name,
        "direction": "forward" if plan.mode == "eval" else "both",
        "mode": plan.mode,
        "compiled": compiled,
        "model": asdict(plan.config) | {"parameters": parameters},
        "weights": weights,
        "text": {"source": this.text.source, "tokenizer": this.text.tokenizer, "sha256": this.text.sha256},
        "steps": len(plan.batches),
        "problem": problem_fields(case.problem),
        "inputs": asdict(case.inputs),
        "seed": this.request.seed,
        "target": {"name": session.target.name, "sm": session.target.sm},
        "verdict": verdict,
        "reason": reason,
        "losses": list(outcome.losses),
        "grad_norms": list(outcome.grad_norms),
        "step_ms": list(outcome.step_ms),
        "peak_bytes": outcome.peak_bytes,
        "sources": session.ports.get(name),
        "provenance": session.facts,
    }
