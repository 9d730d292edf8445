"""The ports as attention implementations of Hugging Face transformers.

After `register()` a model takes them by name, `from_pretrained(..., attn_implementation="fa2_triton")`. Two functions
are registered for each port. The first is called once a forward pass, with what transformers knows of its mask, and
decides whether it is one that a port computes from the lengths alone: causal or full. The second is the attention of a
layer. Whatever else is asked of them, padding, a window, dropout, raises Unsupported with the reason: transformers
would leave a mask out silently for an implementation that registers no function for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .attention import attention
from .errors import Unsupported
from .mask import Mask
from .ports import port_names, port_package

PREFIX = "fa2_"
# What some models hand to their attention beside the usual: the argument, and what it asks for.
REFUSED = {
    "softcap": "scores are capped (softcap)",
    "sliding_window": "there is a sliding window",
    "s_aux": "there are attention sinks (s_aux)",
    "position_bias": "a bias is added to the scores (position_bias)",
    "head_mask": "heads are masked (head_mask)",
    "output_attentions": "the probabilities are asked for (output_attentions), which are never held",
    "cu_seq_lens_q": "several sequences are packed into one (cu_seq_lens_q)",
}


def register(impls: Sequence[str] | None = None) -> tuple[str, ...]:
    """Registers ports with transformers, by default all, and returns the names there: `fa2_` and the port's.

    A port is imported when a model first attends by it. Safe to call again. Raises ValueError for a name that is no
    port's, Unsupported when transformers is not installed or too old to take attentions from outside.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise Unsupported(
            f"registering with transformers needs its version 5 or later (pip install 'transformers>=5'): {error}"
        ) from error
    names = tuple(port_names() if impls is None else impls)
    for name in names:
        port_package(name)  # which raises for an unknown one
    for name in names:
        AttentionInterface.register(PREFIX + name, partial(attend, name))
        AttentionMaskInterface.register(PREFIX + name, partial(check_mask, name))
    return tuple(PREFIX + name for name in names)


def attend(
    impl: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of a layer, as transformers calls it: o `(B, Nq, Hq, D)`, and no probabilities.

    query: `(B, Hq, Nq, D)`; key, value: `(B, Hkv, Nk, D)`; heads are shared, never repeated.
    is_causal: default, the module's own. Causal aligns the last query with the last key, so that a query that decodes
    after a cache sees all of it.

    Raises Unsupported for what the port cannot do: a mask given as a tensor, dropout, and what `REFUSED` names.
    """
    if attention_mask is not None:
        raise _refusal(impl, "a mask is given as a tensor, and causal or none is all it takes")
    if dropout:
        raise _refusal(impl, f"probabilities are dropped out ({dropout:g}): set the model's dropout of attention to 0")
    for name, asked in REFUSED.items():
        if others.get(name) not in (None, False):
            raise _refusal(impl, asked)
    if is_causal is None:
        # A decoder whose configuration says so attends in both directions, although its modules are causal.
        config = getattr(module, "config", None)
        is_causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True)
    mask = Mask.causal() if is_causal else Mask()
    o = attention(query, key, value, mask=mask, scale=scaling, impl=impl)
    assert isinstance(o, torch.Tensor)
    return o.transpose(1, 2).contiguous(), None


def check_mask(
    impl: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> None:
    """Passes the masks that a port computes from the lengths alone, and raises Unsupported for all others.

    These are the causal one whose last query is aligned with the last key, and the one of both directions.
    mask_function: transformers' function of a pair of positions. attention_mask: `(B, Nk)`, True where there is no
    padding.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if attention_mask is not None:
        if torch.compiler.is_compiling():
            raise _refusal(impl, "whether an attention_mask pads cannot be seen under torch.compile: leave it out")
        if attention_mask.shape[-1] != kv_length or not bool(attention_mask.all()):
            raise _refusal(impl, "sequences are padded (attention_mask): batch those of one length")
    if mask_function is bidirectional_mask_function:
        return
    if mask_function is not causal_mask_function:
        raise _refusal(
            impl,
            "the mask is neither causal nor full: a window, chunks, or several sequences packed into one, which under "
            "torch.compile transformers allows for wherever there is no cache",
        )
    if isinstance(q_offset, torch.Tensor) or kv_offset or q_offset + q_length != kv_length:
        raise _refusal(impl, "the cache has places after the last key (a static cache): use a dynamic one")


def _refusal(impl: str, asked: str) -> Unsupported:
    return Unsupported(f"{PREFIX}{impl} cannot attend here: {asked}")
