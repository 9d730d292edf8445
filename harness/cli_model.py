"""The command that puts the ports into a model: model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import FormatOption, IsolateOption, JsonOption, SeedOption, app, piped, prepare
from .options import LIMIT_S, Directions, Format


class ModelMode(StrEnum):
    """What `--mode` takes."""

    EVAL = "eval"
    TRAIN = "train"


@app.command("model", short_help="A GPT-2 with the attention swapped.")
def model_command(
    impl: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="naive, sdpa and its backends by name (sdpa_efficient, …), the ports; or all.",
        ),
    ] = "all",
    mode: Annotated[ModelMode, typer.Option(help="The loss on a text, or a training.")] = ModelMode.EVAL,
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Training steps; default 200, without a GPU 5.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens of an evaluation; default, whole batches of 65536, without a GPU 512.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="B", help="Sequences a step; default 8, without a GPU 2.", show_default=False),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of a sequence; default 1024, without a GPU 64.", show_default=False
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Hugging Face's GPT-2: a safetensors file, or its folder. Default, weights drawn by the seed.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The text; default, the sources of Python's standard library.", show_default=False
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="tokenizer.json, or a folder with it or with vocab.json and merges.txt. Default, the folder of "
            "--weights if it holds one, else bytes.",
            show_default=False,
        ),
    ] = None,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Each once more by torch.compile, the whole model in one graph.")
    ] = False,
    seed: SeedOption = 0,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=1, metavar="S", help="Seconds that one contestant's run may take.")
    ] = 2 * LIMIT_S,
    isolate: IsolateOption = True,
    json: JsonOption = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Put each attention into a GPT-2 of 124M parameters and show what changes beside time and memory: nothing.

    Weights and batches are the same for all. Losses, and in a training gradient norms, are told beside those with
    PyTorch's flash attention; another of PyTorch's attentions gives the difference that means nothing, the noise
    floor. Each attention is checked by itself first. One that runs out of memory has that in its cell. Without a GPU
    a small model runs, with Triton in its interpreter, and neither speed nor memory is told.

    Exit status: 0 all good, 1 a check failed, a run broke off or its loss strays from PyTorch's, 2 wrong usage or a
    port named could not run.

    \b
    Examples:
      harness model --impl all --mode train --json train.jsonl
      harness model --weights ~/gpt2 --text book.txt
      harness model --mode train --steps 50 --context 16384 --batch 1 --impl naive,sdpa,triton
      harness model --impl triton --compile
    """
    here = prepare()
    from .model import ModelRequest, contestants, model

    request = ModelRequest(
        impls=(),
        contestants=contestants(impl, here),
        mode=mode.value,
        directions=Directions.FORWARD if mode is ModelMode.EVAL else Directions.BOTH,
        steps=steps,
        tokens=tokens,
        batch=batch,
        context=context,
        weights=weights,
        text=text,
        tokenizer=tokenizer,
        compiles=compiles,
        seed=seed,
        limit_s=time_limit,
        isolated=isolate,
        json=json,
        form=form,
    )
    raise typer.Exit(piped(lambda: model(request, here, all_asked=impl != "all")))
