"""Compiling what the ports of a run will launch, before it and in parallel, where check after check would wait for it.

Some languages take ten seconds and more for a kernel, and a suite has a hundred of them. Their compilers keep on disk
what they have compiled, so it does not matter which process it was. A kernel travels between processes as bytes, so
that the harness itself need not import its language.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import product

from common import Direction, Kernel, Problem

from .environment import core_count
from .isolation import Caller, Lost, processes
from .jobs import Setting
from .names import own_name, switches_of, tiles_of
from .session import Session, in_order, progress

PROCESSES_MOST = 16  # each takes about 1 GB
WORTH_IT = 3  # kernels; a process takes seconds to start


def compile_ahead(
    session: Session,
    names: Sequence[str] | None = None,
    problems: Sequence[Problem] | None = None,
    directions: Sequence[Direction] | None = None,
    until: float = math.inf,
    workers: Sequence[Caller] = (),
) -> int:
    """Compiles what the checks and timings of a session launch, as far as its ports ask for it: how many kernels.

    names: the contestants, by default the ports as they are. problems, directions: by default those of the session.
    until: when nothing more is begun, by `time.monotonic`. workers: processes that are there already; else it starts
    some, where that is worth the seconds. Only for a GPU, and not in the harness's own process. What cannot be compiled
    is left to the check that needs it, which will say why.
    """
    request, setting = session.request, session.setting
    if not (session.environment.has_gpu and request.isolated):
        return 0
    if problems is None:
        problems = tuple(case.problem for case in session.suite.cases if not session.earlier(case))
    try:
        names = tuple(session.ports) if names is None else names
        kernels = session.callers[0].call(kernels_of, setting, names, problems, directions or request.each)
    except Lost:
        return 0
    cores = core_count()
    count = min(cores, len(kernels), PROCESSES_MOST)
    if not workers and (len(kernels) < WORTH_IT or count < 2):
        return 0
    sm = session.environment.native.sm

    def compile_there(caller: Caller, kernel: bytes) -> None:
        with suppress(Lost):
            if time.monotonic() < until:
                caller.call(compile_kernel, kernel, sm)

    those = nullcontext(workers) if workers else processes(count, request.limit_s, session.variables)
    with (
        those as callers,
        progress("compiling", len(kernels)) as begin,
        in_order(callers, compile_there, kernels) as outcomes,
    ):
        for outcome in outcomes:
            begin("")
            outcome()
    return len(kernels)


def kernels_of(
    setting: Setting, names: Sequence[str], problems: Sequence[Problem], directions: Sequence[Direction]
) -> list[bytes]:
    """The kernels of contestants, each once; called in a worker.

    A check has the backward take the gradient of lse in one call, and be deterministic without it in another.
    """
    found: dict[Kernel, None] = {}
    for name in names:
        port, target, switches = setting.open_port(own_name(name)), setting.target_of(name), switches_of(name)
        tiles = tiles_of(name)
        for problem, direction in product(problems, directions):
            forms: list[dict[str, bool]] = [{}] if direction == "forward" else [{"dlse": True}, {"deterministic": True}]
            for form in forms:
                tile = tiles.get(direction)
                kernels = port.kernels(problem, target, direction, tile=tile, switches=switches, **form)
                found.update(dict.fromkeys(kernels))
    return [pickle.dumps(kernel) for kernel in found]


def compile_kernel(kernel: bytes, sm: str) -> None:
    """Compiles a kernel; called in a worker."""
    pickle.loads(kernel).compile(sm)
