"""Weights of GPT-2 as Hugging Face keeps them, in a local safetensors file: checked before anything else is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import UsageError, complain, one_line
from .gpt2 import GPT2, GPT2Config

FILE = "model.safetensors"
PREFIX = "transformer."
TIED = "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")  # of older files: what masks the scores, and no weight
DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls what fp32 weights may be made of
HEAD_DIM = 64  # of every GPT-2, where no config.json tells how many heads there are
# What config.json may say that this model does not compute otherwise.
FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights, the sizes of its model, and the hash of the file."""

    path: Path
    config: GPT2Config
    sha256: str

    @property
    def source(self) -> str:
        """What records and tables call it: its name and that of its folder, since most files have the same name."""
        return f"{self.path.resolve().parent.name}/{self.path.name}"

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """The checkpoint in a safetensors file, or in a folder with model.safetensors and config.json.

        Raises UsageError when it cannot be read, is none of GPT-2, or the package safetensors is missing.
        """
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise UsageError(f"--weights {path} is no safetensors file, nor a folder with {FILE}")
        with _opened(file) as tensors:
            slices = {_own_name(name): tensors.get_slice(name) for name in _weights(tensors)}
            shapes = {name: tuple(x.get_shape()) for name, x in slices.items()}
            for name, x in slices.items():
                if x.get_dtype() not in DTYPES:
                    raise UsageError(f"--weights {file} is no GPT-2: {name} is of {x.get_dtype()}, no floating point")
                if 0 in shapes[name]:
                    raise UsageError(f"--weights {file} is no GPT-2: {name} is {shapes[name]}, without an element")
        config = _config(file, shapes)
        with torch.device("meta"):
            wanted = {name: tuple(p.shape) for name, p in GPT2(config, "").named_parameters()}
        for name, shape in wanted.items():
            if shapes.get(name) != shape:
                found = "is not there" if name not in shapes else f"is {shapes[name]}"
                raise UsageError(f"--weights {file} is no GPT-2: {name} must be {shape} and {found}")
        if unknown := sorted(set(shapes) - set(wanted) - {TIED}):
            raise UsageError(f"--weights {file} is no GPT-2: it has {unknown[0]}")
        return cls(file, config, hashlib.sha256(file.read_bytes()).hexdigest())

    def load(self, model: GPT2) -> None:
        """Copies the weights into the model, in fp32. Raises UsageError for a last layer that is not the embedding."""
        with _opened(self.path) as tensors:
            state = {_own_name(name): tensors.get_tensor(name).float() for name in _weights(tensors)}
        embedding = state[f"{PREFIX}wte.weight"]
        if not torch.equal(state.setdefault(TIED, embedding), embedding):
            raise UsageError(f"--weights {self.path}: {TIED} is not the embedding of tokens, which this model shares")
        model.load_state_dict(state)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UsageError(f"--weights {file} needs the package safetensors: pip install safetensors") from error
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--weights {file} cannot be read: {one_line(error)}") from error


def _weights(tensors: Any) -> list[str]:
    return [name for name in tensors.keys() if not name.endswith(MASKS)]  # noqa: SIM118  # it is no mapping


def _own_name(name: str) -> str:
    """The name in GPT2LMHeadModel; files of the bare transformer, as the first releases are, lack the prefix."""
    return name if name.startswith(PREFIX) or name == TIED else PREFIX + name


def _config(file: Path, shapes: dict[str, tuple[int, ...]]) -> GPT2Config:
    """The sizes, of the shapes of the weights and of a config.json beside them."""
    told: dict[str, Any] = {}
    beside = file.with_name("config.json")
    if beside.is_file():
        try:
            told = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{beside} cannot be read: {one_line(error)}") from error
        if not isinstance(told, dict):
            raise UsageError(f"{beside} is no configuration: it holds no names with values")
    for name, value in FIXED.items():
        if told.get(name, value) != value:
            raise UsageError(f"{beside}: {name} must be {value}, got {told[name]}")
    tokens, positions = (shapes.get(f"{PREFIX}{name}.weight", ()) for name in ("wte", "wpe"))
    if len(tokens) != 2 or len(positions) != 2:
        raise UsageError(f"--weights {file} is no GPT-2: it has no wte.weight and wpe.weight of two dimensions")
    vocabulary, width = tokens
    layers = {name.split(".")[2] for name in shapes if name.startswith(f"{PREFIX}h.")}
    if not layers:
        raise UsageError(f"--weights {file} is no GPT-2: it has no layers")
    heads = told.get("n_head")
    if heads is None:
        if width % HEAD_DIM:
            raise UsageError(
                f"--weights {file}: nothing beside it tells how many heads there are (n_head of a config.json), and a "
                f"width of {width} does not go into heads of {HEAD_DIM}"
            )
        heads = width // HEAD_DIM
        complain(f"no n_head beside {file}: {heads} heads of {HEAD_DIM} are assumed")
    if type(heads) is not int or heads < 1 or width % heads:
        raise UsageError(f"--weights {file}: a width of {width} does not go into {heads} heads")
    return GPT2Config(len(layers), heads, width, positions[0], vocabulary)
