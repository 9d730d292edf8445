"""What a port is, and how one is found by name."""

from __future__ import annotations

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from .buffers import Form, empty, empty_like, form_key
from .errors import Unsupported, check_strided, check_type
from .problem import DTYPE_NAMES, Direction, Problem, check_direction
from .target import ADA, Target
from .tile import Switches, Tile
from .tile_table import Grid, TileTable
from .work import Work

__all__ = ["Build", "Kernel", "Port", "Unsupported", "port", "port_names", "port_package"]

# name: (module, class, how to get the package it needs)
_PORTS = {
    "reference": ("reference.port", "ReferencePort", "torch"),
    "triton": ("triton_impl.port", "TritonPort", "triton"),
    "tilelang": ("tilelang_impl.port", "TilelangPort", "tilelang==0.1.13"),
    "cute": ("cute_impl.port", "CutePort", "nvidia-cutlass-dsl apache-tvm-ffi"),
}


@dataclass(frozen=True)
class Build:
    """One kernel compiled for one target: what it takes of the chip and what it is made of.

    tile: this kernel's own; the kernels of one direction may differ in it. shared: bytes of shared memory a block.
    registers: 32-bit registers a thread. spills: bytes of spill stores and loads a thread. instructions: the matrix
    instructions in its code. seconds: what it took to get it. cached: it came out of the compiler's cache, so that
    `seconds` is not the time of a compile. ptx: its code, where the compiler shows it; not printed with the rest.
    """

    kernel: str
    target: str
    tile: Tile
    shared: int
    registers: int
    spills: int
    instructions: tuple[str, ...]
    seconds: float
    cached: bool
    ptx: str = field(repr=False)


class Kernel(Protocol):
    """A kernel to be compiled ahead: hashable, equal for equal code, and fit to be pickled."""

    def compile(self, sm: str) -> object:
        """Compiles it for an architecture, into the cache on disk that a launch looks into."""


# The forms of a call's tensors, under the names that `Port.backward` gives them and without a dlse that is None; and
# what is called with the tensors and returns the outputs of its direction.
Forms = dict[str, Form]
Run = Callable[..., tuple[torch.Tensor, ...]]

_LSES = ("lse", "dlse")
_Key = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]  # the fields of a `Form`


def _key(name: str, tensor: torch.Tensor) -> _Key:
    check_strided(name, tensor)
    return form_key(tensor)


def _check_forms(problem: Problem, forms: Forms) -> None:
    """Compares the forms of a call's tensors with the problem they are said to be of.

    `lse` and `dlse` are fp32 `(B, Hq, Nq)`; k, v have the shape `(B, Hkv, Nk, D)`, the others that of q. A tensor with
    one dimension less has one head and leaves it out, and then all do. Raises TypeError for a wrong dtype, ValueError
    for a wrong shape or device; the message names the argument, what came and what is allowed.
    """
    device, one_head = None, None
    for name, form in forms.items():
        is_lse = name in _LSES
        shape = problem.lse_shape if is_lse else problem.kv_shape if name in ("k", "v") else problem.q_shape
        if form.shape != shape and not (shape[1] == 1 and form.shape == shape[:1] + shape[2:]):
            raise ValueError(f"{name} must have shape {shape}, got {tuple(form.shape)}")
        if one_head is None:
            one_head = len(form.shape) < len(shape)
        elif one_head != (len(form.shape) < len(shape)):
            allowed = shape[:1] + shape[2:] if one_head else shape
            raise ValueError(f"{name} must have shape {allowed} as the tensors before it, got {tuple(form.shape)}")
        dtype = torch.float32 if is_lse else problem.dtype
        if form.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {form.dtype}")
        if device is None:
            device = form.device
        elif form.device != device:
            raise ValueError(f"{name} must be on {device} as the tensors before it, got {form.device}")


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels read it, rows of D contiguous elements: itself, or else a copy."""
    if tensor.is_neg():  # a view that stands for its negative
        tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _is_taken(name: str, form: Form) -> bool:
    """Whether a port's own part takes a tensor of that form as it is."""
    if form.negative:
        return False
    if name in _LSES:
        return len(form.shape) == 3 and form.is_contiguous
    return len(form.shape) == 4 and form.strides[-1] == 1


def _taken(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor in a form that is taken: itself, a view with the head it leaves out, or a copy."""
    if tensor is None:
        return None
    if name in _LSES:
        return (tensor if tensor.dim() == 3 else tensor.unsqueeze(1)).resolve_neg().contiguous()
    return unit_stride(tensor if tensor.dim() == 4 else tensor.unsqueeze(1))


class Port(ABC):
    """One implementation of FlashAttention-2.

    The public methods hold what is the same for all: validation, the dimension a single head leaves out, the copy of a
    tensor whose last stride is not 1, and problems with nothing to compute. A port writes `_forward` and `_backward`,
    which see four-dimensional tensors with a last stride of 1, at least one query and at least one key. One that
    compiles writes `_prepare_forward` and `_prepare_backward` in their place, so that a call with tensors of forms that
    came before does no more than allocate and launch; and `_build` and `_launches`, and `_kernels` if compiling takes
    long.

    tile_table: the path of its `tiles.yaml`, if it has one.
    """

    name: ClassVar[str]
    tile_table: ClassVar[Path | None] = None

    @abstractmethod
    def unsupported(self, problem: Problem, target: Target) -> str | None:
        """Why this port cannot do the problem on the target, or None when it can."""

    @abstractmethod
    def tiles(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        """Candidate tiles within the target's shared memory, best first: swept ones, else those of the budget."""

    def swept(self, problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        """The tiles measured for problems of this class, best first; none where no sweep was."""
        return [] if self.tile_table is None else TileTable.load(self.tile_table).lookup(problem, target, direction)

    def grids(self, problem: Problem, target: Target, direction: Direction) -> Sequence[Grid]:
        """What a sweep is to try, one grid after the other, each from the best of the one before.

        None of a port that has no choice of tiles. What `check_tile` refuses may be among it.
        """
        return ()

    def check_tile(self, problem: Problem, target: Target, direction: Direction, tile: Tile) -> None:  # noqa: B027
        """Raises Unsupported, with the arithmetic written out, when the tile does not fit the target."""

    def fitting(self, tiles: Iterable[Tile], problem: Problem, target: Target, direction: Direction) -> list[Tile]:
        """The tiles that `check_tile` lets pass, each once, in their order."""
        passed = []
        for tile in dict.fromkeys(tiles):
            with suppress(Unsupported):
                self.check_tile(problem, target, direction, tile)
                passed.append(tile)
        return passed

    @property
    def compiles(self) -> bool:
        """Whether the port has kernels to compile."""
        return type(self)._build is not Port._build

    def build(
        self,
        problem: Problem,
        target: Target,
        direction: Direction,
        *,
        tile: Tile | None = None,
        switches: Switches | None = None,
    ) -> list[Build]:
        """Compiles the direction's kernels for a target, which need not be in the machine.

        Raises Unsupported when the port has nothing to compile, cannot do the problem, or the tile does not fit.
        """
        if not self.compiles:
            raise Unsupported(f"{self.name} has no kernels to compile")
        check_type("target", target, Target)
        target, tile, switches = self._plan(problem, direction, target, tile, switches)
        return self._build(problem, target, direction, tile, switches)

    def kernels(
        self,
        problem: Problem,
        target: Target,
        direction: Direction,
        *,
        tile: Tile | None = None,
        switches: Switches | None = None,
        dlse: bool = False,
        deterministic: bool = False,
    ) -> Sequence[Kernel]:
        """What a call on packed `(B, H, N, D)` tensors launches, where it pays to compile that ahead, in parallel.

        Empty for a port whose kernels compile fast, and for what it does not support. Compiles nothing itself.
        """
        if self.unsupported(problem, target) is not None or not (problem.batch and problem.len_q and problem.len_k):
            return ()
        switches = _ALL_ON if switches is None else switches
        tile = self.choose_tile(problem, target, direction, tile, switches)
        return self._kernels(problem, target, direction, tile, switches, dlse, deterministic)

    def launches(
        self,
        problem: Problem,
        target: Target,
        direction: Direction,
        *,
        tile: Tile | None = None,
        switches: Switches | None = None,
        dlse: bool = False,
        deterministic: bool = False,
    ) -> tuple[Work, ...]:
        """The work of each kernel that a call launches, in their order; dlse: whether it is given the gradient of lse.

        Empty for a port without kernels, and where there is nothing to compute. Copies of tensors that a port cannot
        take as they are come on top. Raises Unsupported as the call would.
        """
        target, tile, _ = self._plan(problem, direction, target, tile, switches)
        if problem.batch == 0 or problem.len_q == 0 or problem.len_k == 0:
            return ()
        return self._launches(problem, target, direction, tile, dlse, deterministic)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        *,
        target: Target | None = None,
        tile: Tile | None = None,
        switches: Switches | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`o (B, Hq, Nq, D)` in the input dtype and `lse (B, Hq, Nq)` in fp32, the natural logarithm.

        q: `(B, Hq, Nq, D)`; k, v: `(B, Hkv, Nk, D)`; or all `(B, N, D)`, and then o and lse leave the head out too.
        target: whose code path to run; default, the device's own. tile: default, the best of `tiles()`.
        Source: Dao 2023, "FlashAttention-2", algorithm 1.

        Raises TypeError/ValueError for tensors that are not the problem's, Unsupported for what this port cannot do.
        """
        _check_options(problem, target, tile, switches)
        keys = _key("q", q), _key("k", k), _key("v", v)
        o, lse = prepared(self, "forward", problem, target, tile, switches, False, keys)(q, k, v)
        return o, lse

    def backward(
        self,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        problem: Problem,
        *,
        target: Target | None = None,
        tile: Tile | None = None,
        switches: Switches | None = None,
        deterministic: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`dq`, `dk`, `dv`, of the shapes and dtype of q, k, v.

        do: the gradient of o, of its shape. dlse: the gradient of lse, fp32 `(B, Hq, Nq)`, or None for zero.
        o, lse: what `forward` returned. dk and dv of a shared head are the sums over its group of query heads.
        deterministic: dq is bitwise repeatable too; dk and dv always are.
        Source: Dao 2023, "FlashAttention-2", algorithm 2, with `delta = rowsum(do * o) - dlse`.

        Raises TypeError/ValueError for tensors that are not the problem's, Unsupported for what this port cannot do.
        """
        _check_options(problem, target, tile, switches)
        check_type("deterministic", deterministic, bool)
        dlse_key = None if dlse is None else _key("dlse", dlse)
        keys = _key("do", do), dlse_key, _key("q", q), _key("k", k), _key("v", v), _key("o", o), _key("lse", lse)
        run = prepared(self, "backward", problem, target, tile, switches, deterministic, keys)
        dq, dk, dv = run(do, dlse, q, k, v, o, lse)
        return dq, dk, dv

    def _plan(
        self,
        problem: Problem,
        direction: Direction,
        target: Target,
        tile: Tile | None,
        switches: Switches | None,
    ) -> tuple[Target, Tile, Switches]:
        switches = _ALL_ON if switches is None else switches
        reason = self.unsupported(problem, target)
        if reason is not None:
            raise Unsupported(reason)
        return target, self.choose_tile(problem, target, direction, tile, switches), switches

    def choose_tile(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile | None, switches: Switches
    ) -> Tile:
        """The tile given, once it is known to fit; else the best one, or with the rung `tiles` off the naive one."""
        check_direction(direction)
        check_type("switches", switches, Switches)
        if tile is None:
            return _best_tile(self, problem, target, direction) if switches.tiles else NAIVE_TILE
        check_type("tile", tile, Tile)
        self.check_tile(problem, target, direction, tile)
        return tile

    def _build(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, switches: Switches
    ) -> list[Build]:
        raise NotImplementedError

    def _kernels(
        self,
        problem: Problem,
        target: Target,
        direction: Direction,
        tile: Tile,
        switches: Switches,
        dlse: bool,
        deterministic: bool,
    ) -> Sequence[Kernel]:
        return ()

    def _launches(
        self, problem: Problem, target: Target, direction: Direction, tile: Tile, dlse: bool, deterministic: bool
    ) -> tuple[Work, ...]:
        return ()

    def _prepare_forward(self, forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches) -> Run:
        """What computes o and lse of q, k, v of these forms. It is kept for as long as such calls come."""
        return lambda q, k, v: self._forward(q, k, v, problem, target, tile, switches)

    def _prepare_backward(
        self, forms: Forms, problem: Problem, target: Target, tile: Tile, switches: Switches, deterministic: bool
    ) -> Run:
        """What computes dq, dk and dv of do, dlse, q, k, v, o, lse of these forms; without a dlse it is None."""
        return lambda do, dlse, q, k, v, o, lse: self._backward(
            do, dlse, q, k, v, o, lse, problem, target, tile, switches, deterministic
        )

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        target: Target,
        tile: Tile,
        switches: Switches,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _backward(
        self,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        problem: Problem,
        target: Target,
        tile: Tile,
        switches: Switches,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError


@lru_cache(maxsize=4096)
def prepared(
    port: Port,
    direction: Direction,
    problem: Problem,
    target: Target | None,
    tile: Tile | None,
    switches: Switches | None,
    deterministic: bool,
    keys: tuple[_Key | None, ...],
) -> Run:
    """What computes a direction of tensors whose forms have these fields, in the order of the public method.

    The one look-up of a warm call: what it finds was validated, its tile chosen and its kernels made ready before. What
    is refused is not kept, and refused anew. Raises what the public methods do.
    """
    names = ("q", "k", "v") if direction == "forward" else ("do", "dlse", "q", "k", "v", "o", "lse")
    forms = {name: Form(*key) for name, key in zip(names, keys, strict=True) if key is not None}
    _check_forms(problem, forms)
    plan = problem, *port._plan(problem, direction, _target_on(forms["q"].device, target), tile, switches)
    if problem.batch == 0 or problem.len_q == 0 or problem.len_k == 0:
        return _no_attention if direction == "forward" else _no_gradients
    if all(_is_taken(name, form) for name, form in forms.items()):
        if direction == "forward":
            return port._prepare_forward(forms, *plan)
        return port._prepare_backward(forms, *plan, deterministic)

    options: dict[str, Any] = {"target": target, "tile": tile, "switches": switches}
    if direction == "backward":
        options["deterministic"] = deterministic
    one_head = len(forms["q"].shape) == 3

    def once_taken(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        outputs = getattr(port, direction)(*map(_taken, names, tensors), problem, **options)
        return tuple(output.squeeze(1) for output in outputs) if one_head else outputs

    return once_taken


def _no_attention(q: torch.Tensor, *kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return empty_like(q).zero_(), lse.fill_(-math.inf)


def _no_gradients(
    do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_like(q).zero_(), empty_like(k).zero_(), empty_like(v).zero_()


def _check_options(problem: object, target: object, tile: object, switches: object) -> None:
    check_type("problem", problem, Problem)
    if target is not None:
        check_type("target", target, Target)
    if tile is not None:
        check_type("tile", tile, Tile)
    if switches is not None:
        check_type("switches", switches, Switches)


_ALL_ON = Switches()
NAIVE_TILE = Tile(block_m=16, block_n=16, warps=1, stages=1)


@lru_cache(maxsize=4096)
def _best_tile(port: Port, problem: Problem, target: Target, direction: Direction) -> Tile:
    return port.tiles(problem, target, direction)[0]


@cache
def _native(device: torch.device) -> Target:
    # On a CPU it is the Ada path that an interpreter walks.
    return Target.detect(device) if device.type == "cuda" else ADA


def _target_on(device: torch.device, target: Target | None) -> Target:
    native = _native(device)
    if target is None:
        return native
    if device.type == "cuda" and not target.runs_on(native):
        raise Unsupported(f"code for {target} does not run on {torch.cuda.get_device_name(device)}, which is {native}")
    return target


def dtype_reason(name: str, problem: Problem, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """The reason to give when the problem's dtype is not among a port's, else None."""
    if problem.dtype in dtypes:
        return None
    return f"{name} takes {', '.join(DTYPE_NAMES[d] for d in dtypes)}; the problem is {DTYPE_NAMES[problem.dtype]}"


def port_names() -> tuple[str, ...]:
    """The names `port` knows, whether or not they can run here."""
    return tuple(_PORTS)


def port_package(name: str) -> str:
    """The package that the port of that name lives in, without importing it. Raises ValueError for another name."""
    if name not in _PORTS:
        raise ValueError(f"impl must be one of {', '.join(_PORTS)}, got {name!r}")
    return _PORTS[name][0].split(".")[0]


def is_written(name: str) -> bool:
    """Whether the port of that name is here at all; the package it needs may still be missing."""
    return importlib.util.find_spec(port_package(name)) is not None


def port(name: str) -> Port:
    """The port of that name, imported when first asked for.

    Raises TypeError/ValueError for a name there is not, Unsupported (with what to do) when it is not written yet or the
    package it needs is missing.
    """
    check_type("impl", name, str)
    if name not in _PORTS:
        raise ValueError(f"impl must be one of {', '.join(_PORTS)}, got {name!r}")
    return _port(name)


@cache
def _port(name: str) -> Port:
    module, kind, package = _PORTS[name]
    try:
        return getattr(importlib.import_module(module), kind)()
    except ModuleNotFoundError as error:
        missing, ours = error.name or "", module.split(".")[0]
        if missing in (ours, module):
            raise Unsupported(f"the {name} port is not written yet") from error
        missing = missing.split(".")[0]
        if missing in (ours, "common"):  # ours to ship: no package to install would help
            raise Unsupported(f"the {name} port could not be imported: {error}") from error
        raise Unsupported(f"the {name} port needs {missing}, which is not installed: pip install {package}") from error
    except ImportError as error:
        raise Unsupported(f"the {name} port could not be imported: {error}") from error
