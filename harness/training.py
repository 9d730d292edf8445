"""What `harness model` asks a worker to do: evaluate or train one model with one attention, see `harness.isolation`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from common import Unsupported

from .checkpoint import Checkpoint
from .gpt2 import GPT2, GPT2Config
from .jobs import Stand

Mode = Literal["eval", "train"]

LEARNING_RATE, WARM_UP, WEIGHT_DECAY, BETAS, CLIP = 3e-4, 20, 0.1, (0.9, 0.95), 1.0
UNTIMED = 10  # first training steps, in which compilers and allocators are still at work
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Plan:
    """What all contestants do: the same weights on the same batches `(steps, B, N + 1)`, in the same order.

    checkpoint: None for weights drawn by the seed.
    """

    mode: Mode
    config: GPT2Config
    checkpoint: Checkpoint | None
    seed: int
    batches: torch.Tensor
    device: torch.device


@dataclass(frozen=True)
class Outcome:
    """One contestant's run, by step. losses: in nats. grad_norms: before clipping, of a training. step_ms: device time
    from the end of one step to that of the next, without a GPU none. peak_bytes: of PyTorch's allocator, likewise.

    reason: why there is no run: the memory did not suffice, or the attention cannot do it.
    """

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    step_ms: tuple[float, ...] = ()
    peak_bytes: int | None = None
    reason: str = ""


def run_model(plan: Plan, impl: str, compiled: bool) -> Outcome:
    """A run with the attention of that name; compiled: the whole model by torch.compile, in one graph.

    Parameters are fp32, products bf16 by autocast. What it raises is a fault, and lost by the worker.
    """
    _let_go(plan.device)
    try:
        return _run(plan, impl, compiled)
    except torch.OutOfMemoryError:
        return Outcome(reason=OUT_OF_MEMORY)
    except Unsupported as error:
        return Outcome(reason=str(error))


def _let_go(device: torch.device) -> None:
    """Frees what was left in this process by the checks and by the run before: peaks are to be this run's alone."""
    Stand.forget()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # a compiled model keeps its weights
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _run(plan: Plan, impl: str, compiled: bool) -> Outcome:
    model = GPT2(plan.config, impl)
    if plan.checkpoint is None:
        model.initialise(plan.seed)
    else:
        plan.checkpoint.load(model)
    model.to(plan.device)
    loss_of = _loss(model, plan.device, compiled)
    watch = Watch(plan.device)
    steps = _evaluation(plan, loss_of, watch) if plan.mode == "eval" else _training(plan, model, loss_of, watch)
    values = torch.stack(list(steps)).cpu()  # (steps, 2)
    losses, norms = ([float(x) for x in column] for column in values.T)
    grad_norms = tuple(norms) if plan.mode == "train" else ()
    return Outcome(tuple(losses), grad_norms, watch.step_ms(), watch.peak_bytes())


Loss = Callable[[torch.Tensor], torch.Tensor]


def _loss(model: GPT2, device: torch.device, compiled: bool) -> Loss:
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = model
    if compiled:
        # Without a GPU there is no speed to win, and generating C++ for the model takes a minute: its graph will do.
        function = torch.compile(model, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")

    def loss(batch: torch.Tensor) -> torch.Tensor:
        tokens = batch.to(device, torch.int64)
        with torch.autocast(device.type, torch.bfloat16):
            return function(tokens[:, :-1], tokens[:, 1:])

    return loss


def _evaluation(plan: Plan, loss_of: Loss, watch: Watch) -> Iterator[torch.Tensor]:
    """The loss of each batch, after one that does not count, beside a norm that there is none of."""
    with torch.no_grad():
        loss_of(plan.batches[0])
        watch.step()
        for batch in plan.batches:
            loss = loss_of(batch)
            watch.step()
            yield torch.stack((loss, torch.zeros_like(loss)))


def _training(plan: Plan, model: GPT2, loss_of: Loss, watch: Watch) -> Iterator[torch.Tensor]:
    """The loss of each batch before its step, and the norm of its gradient: `(2,)`, left where they are."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=False, foreach=True
    )
    for step, batch in enumerate(plan.batches):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        loss = loss_of(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.step()
        yield torch.stack((loss.detach(), norm.detach()))


class Watch:
    """Device time and memory of steps. The first one warms up: it is neither timed nor does its memory count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[torch.cuda.Event] = []

    def step(self) -> None:
        """A step has ended, as far as the host is concerned."""
        if self._device.type != "cuda":
            return
        if not self._ends:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        end = torch.cuda.Event(enable_timing=True)
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)

    def step_ms(self) -> tuple[float, ...]:
        """Milliseconds of every step but the first."""
        if self._ends:
            torch.cuda.synchronize(self._device)
        return tuple(a.elapsed_time(b) for a, b in zip(self._ends, self._ends[1:], strict=False))

    def peak_bytes(self) -> int | None:
        """The height of what PyTorch's allocator held after the first step."""
        return torch.cuda.max_memory_allocated(self._device) if self._ends else None
