"""TileLang's own example of FlashAttention, whose code is not here: it is read from a clone that the user names."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from contextlib import AbstractContextManager, redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from common import Problem, Target, Unsupported

from ..errors import one_line
from ..inputs import Inputs
from .protocol import Attend, Baseline, Launch, Span, causal_only

VARIABLE = "TILELANG_EXAMPLES"
SET = (
    f"set {VARIABLE} to the folder examples/flash_attention of a clone of github.com/tile-ai/tilelang at the installed "
    "version"
)
FORWARD, BACKWARD = "example_mha_fwd_bhsd.py", "example_mha_bwd_bhsd.py"
CALLED = {FORWARD: ("flashattn", "get_configs"), BACKWARD: ("attention",)}
ROWS = 128  # of its largest tile; what it does past the end of a length is left alone
HEAD_DIMS = (64, 128)  # what its tiles are made for; at 256 its backward spills


class TileLangExample(Baseline):
    """Two of TileLang's examples, as they are shipped.

    Forward: the kernel of example_mha_fwd_bhsd.py with the tile that its `get_configs` has for tuning: 128 × 128,
    2 stages, 256 threads. TileLang measures it with that one itself. Where a block has too little shared memory for it
    (Ada at D 128), the kernel's defaults, which its `main` takes untuned: 64 × 64, 1 stage, 128 threads.

    Backward and both: the autograd function of example_mha_bwd_bhsd.py with the tiles that it chooses: 64 × 64, in the
    backward 32 queries at D 128. Its forward is a kernel of its own, not that of the other file. Its backward
    allocates dq, dk and dv, fills a dq in fp32 with zeros, adds to it by atomics and converts it in the end: all that
    is in its time, beside the kernel of delta.

    Source: github.com/tile-ai/tilelang, examples/flash_attention; 0.1.13 is commit 8001cc4cc.
    """

    name = "tilelang_example"
    title = "TileLang example"
    dtypes = (torch.float16,)
    package = "tilelang"
    install = "pip install tilelang==0.1.13"

    def absence(self) -> str | None:
        """Also when the examples are not where the variable says, or do not import."""
        return super().absence() or _fault_of_examples(self.title)

    def refusal(self, problem: Problem) -> str | None:
        """Full and causal, as many queries as keys, no grouped heads, whole tiles, the usual scale."""
        reason = causal_only(self.title, problem)
        if reason is not None:
            return reason
        if problem.len_q != problem.len_k:
            return f"{self.title} has no unequal lengths"
        if problem.group > 1:
            return f"{self.title} has no grouped heads"
        if problem.head_dim not in HEAD_DIMS:
            return f"{self.title} takes D of {' and '.join(map(str, HEAD_DIMS))}; the problem has {problem.head_dim}"
        if problem.batch == 0 or problem.len_q == 0 or problem.len_q % ROWS:
            return f"{self.title} takes lengths in whole tiles of {ROWS}"
        if problem.scale != 1 / math.sqrt(problem.head_dim):
            return f"{self.title} has no scale but 1/sqrt(D)"
        return None

    def context(self) -> AbstractContextManager:
        """TileLang says on standard output what it compiles, which is where tables go."""
        return redirect_stdout(sys.stderr)

    def launch(self, span: Span, x: Inputs, problem: Problem) -> Launch:
        """Of packed inputs only; raises Unsupported for others."""
        if any(not tensor.is_contiguous() or tensor.data_ptr() % 16 for tensor in (x.q, x.k, x.v, x.do)):
            raise Unsupported(f"{self.title} takes packed tensors that start on 16 bytes")
        return super().launch(span, x, problem)

    def attention(self, problem: Problem, device: torch.device) -> Attend:
        """The autograd function where a gradient is wanted, else the forward's kernel, which is compiled here.

        Raises Unsupported when it does not compile.
        """
        forward, backward = (_module(_folder() / name) for name in (FORWARD, BACKWARD))
        causal = not problem.mask.is_full
        sizes = problem.batch, problem.heads_q, problem.len_q, problem.len_k, problem.head_dim, causal
        tile = forward.get_configs()[0]
        if _shared_bytes(tile, problem) > Target.detect(device).smem_per_block:
            tile = {}
        try:
            # Called by way of the autotuner it would be timed here, and a log written into the working directory.
            kernel = forward.flashattn.jit_impl(*sizes, **tile)
        except Exception as error:  # the compiler raises many kinds
            raise Unsupported(f"{self.title} does not compile here: {one_line(error)}") from error

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() and q.requires_grad:
                return backward.attention(q, k, v, causal)
            return kernel(q, k, v)

        return attend


def _shared_bytes(tile: dict[str, Any], problem: Problem) -> int:
    """What the forward's kernel holds: queries, whose place o takes in the end, and keys and values of each stage."""
    rows = tile["block_M"] + 2 * tile["num_stages"] * tile["block_N"]
    return rows * problem.head_dim * problem.dtype.itemsize


def _folder() -> Path:
    return Path(os.environ.get(VARIABLE, "")).expanduser()


def _fault_of_examples(title: str) -> str | None:
    """Why the examples cannot be called, and what to do; None when they can."""
    if not os.environ.get(VARIABLE):
        return f"{title} needs a clone of TileLang: {SET}"
    for name, called in CALLED.items():
        path = _folder() / name
        if not path.is_file():
            return f"{title} needs {path}, which is not there: {SET}"
        try:
            module = _module(path)
        except (Exception, SystemExit) as error:  # a file may raise anything
            return f"{title} cannot be imported: {path} raised {one_line(error)}"
        for function in called:
            if not hasattr(module, function):
                return f"{title} needs {function} of {path}, which has none: {SET}"
    return None


@cache
def _module(path: Path) -> ModuleType:
    """The file as a module of a name that nobody imports. Raises what the file raises."""
    spec = importlib.util.spec_from_file_location(f"_{VARIABLE.lower()}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
