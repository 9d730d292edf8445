"""GPT-2 in PyTorch, its attention one call that takes an implementation by name.

The modules are named as in Hugging Face's GPT2LMHeadModel, so that a state dict of one fits the other. There is no
dropout: the same weights and tokens give the same loss, up to the order in which an attention adds.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .attend import attend


@dataclass(frozen=True)
class GPT2Config:
    """Sizes; the defaults are those of the 124M model. context: how many positions have an embedding."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50257


class Conv1D(nn.Module):
    """A linear layer whose weight is `(in, out)`, as GPT-2's first release kept it."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(size_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x (…, in) @ weight + bias`, `(…, out)`."""
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    """Causal self-attention over all heads. impl: whose, see `harness.attend`."""

    def __init__(self, config: GPT2Config, impl: str) -> None:
        super().__init__()
        self.heads, self.impl = config.heads, impl
        self.c_attn = Conv1D(config.width, 3 * config.width)
        self.c_proj = Conv1D(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, N, width)` to the same."""
        # Views, no copies: the heads stay where the product has put them, and so do those of o.
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, D)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        o = attend(q, k, v, self.impl)
        return self.c_proj(o.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two layers with a GELU between them, in its tanh form."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.width, 4 * config.width)
        self.c_proj = Conv1D(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, N, width)` to the same."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer: what attention and MLP find is added to the stream."""

    def __init__(self, config: GPT2Config, impl: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, eps=1e-5)
        self.attn = Attention(config, impl)
        self.ln_2 = nn.LayerNorm(config.width, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, N, width)` to the same."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Embeddings of tokens and positions, the layers, and a last normalisation."""

    def __init__(self, config: GPT2Config, impl: str) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config, impl) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, eps=1e-5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(B, N)` tokens to `(B, N, width)`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT2(nn.Module):
    """The language model. Its last layer is the embedding of tokens once more: the two share their weight."""

    def __init__(self, config: GPT2Config, impl: str) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config, impl)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy in nats, fp32, of the tokens that follow: tokens and targets are `(B, N)`."""
        logits = self.lm_head(self.transformer(tokens))  # (B, N, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """GPT-2's own initialisation, on the CPU: N(0, 0.02), less for what is added to the stream (section 2.3)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_added = name.endswith("c_proj.weight")
                deviation = 0.02 / math.sqrt(2 * self.config.layers) if is_added else 0.02
                parameter.normal_(0, deviation, generator=generator)
