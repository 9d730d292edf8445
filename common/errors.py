"""The one exception that is the contract's own, and the checks of arguments that several modules share."""

from __future__ import annotations

import torch


class Unsupported(Exception):
    """What a port, a target or a machine cannot do; its text is the reason, fit to be printed in a table's cell."""


def check_type(name: str, value: object, kind: type) -> None:
    """Raises TypeError, naming the argument, when `value` is no `kind`."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "aeiou" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, got {type(value).__name__}")


def check_strided(name: str, tensor: object) -> None:
    """Raises TypeError, naming the argument, unless `tensor` is a dense strided tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense strided tensor, got a nested one")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense strided tensor, got layout {tensor.layout}")
