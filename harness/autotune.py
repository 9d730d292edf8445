"""What `@triton.autotune` costs at its first call, beside the look-up in the table that this project ships.

Autotuning is wrapped around the kernels from outside, in a process of its own: the name of a kernel in its module is
bound to an object that the launcher takes for the kernel, and that hands every launch to Triton's autotuner with the
candidates of the sweep as its configurations. Both sides begin with empty caches.

A backward is called with `deterministic=True` on both sides: an autotuner launches a kernel many times over, and one
that adds to dq would add to it as often.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common import Direction, Problem, Switches, Target, Tile, port_package
from common.ports import prepared

from .candidates import Stage
from .isolation import Caller, Here, Lost, Worker
from .jobs import Setting, Stand
from .session import Session
from .suites import Case
from .tables import Table
from .trial import wait

TUNES = "triton"  # the port whose kernels it can wrap
CACHE = "TRITON_CACHE_DIR"
AUTOTUNE_LIMIT_S = 1800.0
Bench = Callable[..., Sequence[float]]


@dataclass(frozen=True)
class FirstCalls:
    """Seconds of the first and the second call. look_up: of those of the first, for the tile. chosen: of each kernel
    that was tuned, the constants, warps and stages that autotuning chose."""

    first_s: float
    second_s: float
    look_up_s: float = 0.0
    chosen: tuple[str, ...] = ()


def autotuned(session: Session, case: Case, direction: Direction, stages: Sequence[Stage]) -> Table:
    """The table: the port as it is, and its kernels under autotuning over the candidates that the stages built."""
    table = Table(
        f"@triton.autotune beside the table, {direction}, {case.problem.id}",
        ("how", "first call s", "second call s", "what it took"),
    )
    tiles = {stage.grid.kernel: tuple(one.tile for one in stage.candidates if not one.refused) for stage in stages}
    sides = (("tiles.yaml", table_calls, ()), ("@triton.autotune", autotune_calls, (tiles,)))
    for how, function, more in sides:
        try:
            calls = _in_empty_caches(session, partial(function, session.setting, case, direction, *more))
        except Lost as lost:
            table.add(how, "–", "–", f"it {lost}")
            continue
        took = "; ".join(calls.chosen) or f"the look-up {1e3 * calls.look_up_s:.1f} ms of the first call"
        table.add(how, f"{calls.first_s:.2f}", f"{calls.second_s:.4f}", took)
    sweep_s = sum(stage.build_s for stage in stages)
    counts = ", ".join(f"{len(own)} of {kernel}" for kernel, own in tiles.items())
    table.notes.append(
        f"First calls with empty caches, which compile. Autotuning tries {counts}, in every process anew; the sweep "
        f"built them once, in {sweep_s:.1f} s by the clock."
    )
    return table


def _in_empty_caches(session: Session, function: Callable[[], FirstCalls]) -> FirstCalls:
    with tempfile.TemporaryDirectory(prefix="harness-autotune-", ignore_cleanup_errors=True) as folder:
        # All that the sweep compiled on many cores is compiled again, one after the other.
        limit_s = max(session.request.limit_s, AUTOTUNE_LIMIT_S)
        caller: Caller = Worker(limit_s, environment={CACHE: folder}) if session.request.isolated else Here()
        try:
            return caller.call(function)
        finally:
            caller.close()


def table_calls(setting: Setting, case: Case, direction: Direction) -> FirstCalls:
    """The port as it is; called in a worker."""
    port, target = setting.open_port(TUNES), setting.target
    begin = time.perf_counter()
    port.choose_tile(case.problem, target, direction, None, Switches())
    look_up_s = time.perf_counter() - begin
    first_s, second_s = _calls(setting, case, direction)
    return FirstCalls(first_s + look_up_s, second_s, look_up_s)


def autotune_calls(
    setting: Setting,
    case: Case,
    direction: Direction,
    tiles: dict[str, tuple[Tile, ...]],
    bench: Bench | None = None,
) -> FirstCalls:
    """The port with the kernels of these names tuned over these tiles; called in a worker that is not used again.

    bench: how the autotuner times a launch; default, its own way.
    """
    if direction == "backward":
        Stand.of(setting, case).new_trial(TUNES).calls("forward")()  # not tuned, and not in the first call
    tuned = [_bind(case.problem, setting.target, direction, *own, bench) for own in tiles.items()]
    first_s, second_s = _calls(setting, case, direction)
    return FirstCalls(first_s, second_s, chosen=tuple(str(one) for one in tuned))


def _calls(setting: Setting, case: Case, direction: Direction) -> tuple[float, float]:
    trial, device = Stand.of(setting, case).new_trial(TUNES), setting.environment.device
    saved = () if direction == "forward" else trial.calls("forward")()
    call = trial.calls(direction, saved, deterministic=True)
    seconds = []
    with torch.no_grad():
        for _ in range(2):
            wait(device)
            begin = time.perf_counter()
            call()
            wait(device)
            seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1]


def _bind(
    problem: Problem, target: Target, direction: Direction, kernel: str, tiles: Sequence[Tile], bench: Bench | None
) -> _Tuned:
    """Puts an autotuner in the place of a kernel."""
    package = port_package(TUNES)
    plan = importlib.import_module(f"{package}.build").plan
    plans = [plan(problem, target, direction, tile, Switches(), deterministic=True) for tile in tiles]
    launches = [launch for planned in plans for launch, _ in planned if launch.kernel.__name__ == kernel]
    tuned = _Tuned(launches, bench)
    module = importlib.import_module(f"{package}.{direction}")  # that which plans the direction's launches
    setattr(module, kernel, tuned)
    prepared.cache_clear()  # it keeps launches of the kernel itself
    return tuned


class _Tuned:
    """What a launcher takes for a kernel: it leaves tile and grid to Triton's autotuner.

    launches: of the kernel itself, one for each configuration.
    """

    def __init__(self, launches: Sequence[Any], bench: Bench | None) -> None:
        import triton

        self._kernel = launches[0].kernel
        self.arg_names, self.__name__ = self._kernel.arg_names, self._kernel.__name__
        self._varying = [name for name in launches[0].constants if len({x.constants[name] for x in launches}) > 1]
        self._grids = {self._key(launch.constants): launch.grid for launch in launches}
        configs = {
            (self._key(launch.constants), launch.tile.warps, launch.tile.stages): triton.Config(
                {name: launch.constants[name] for name in self._varying},
                num_warps=launch.tile.warps,
                num_stages=launch.tile.stages,
            )
            for launch in launches
        }
        self._tuner = triton.autotune(configs=list(configs.values()), key=[], do_bench=bench)(self._kernel)

    def _key(self, constants: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(constants[name] for name in self._varying)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            tuned = {"num_warps", "num_stages", *self._varying}
            others = {name: value for name, value in options.items() if name not in tuned}

            def again(*all_arguments: Any) -> Any:
                # A launcher that knows a compiled kernel adds its own constants to the arguments.
                given = all_arguments[: len(arguments)]
                return self._tuner[lambda meta: (self._grids[self._key(meta)], 1, 1)](*given, **others)

            return _Compiled(getattr(again(*arguments), "metadata", None), again)

        return launch

    def __str__(self) -> str:
        return f"{self.__name__} {self._tuner.best_config}"


@dataclass(frozen=True)
class _Compiled:
    """What a launcher takes for the compiled kernel, and keeps for its next launch."""

    metadata: Any
    launch: Callable[..., Any]
    function: Any = None
    packed_metadata: Any = None

    def run(self, *about_and_arguments: Any) -> None:
        """As Triton's own: nine arguments say where and how to launch, the kernel's follow."""
        self.launch(*about_and_arguments[9:])
