"""What does the demo train? A small GPT over bytes, as anyone would write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# B = batch, T = positions, D = model width, H = heads, V = vocabulary

VOCABULARY = 256
"""Tokens are bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The size of the model."""

    layers: int = 4
    """Decoder layers."""
    width: int = 128
    """Model width, D."""
    heads: int = 4
    """Attention heads, H; they divide the width."""
    context: int = 128
    """Longest sequence, in tokens."""


class Attention(nn.Module):
    """Causal self-attention with separate projections."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        """The attended values, [B, T, D]."""
        batch, positions, width = x_BTD.shape

        def split(projected_BTD: Tensor) -> Tensor:  # noqa: N803
            return projected_BTD.view(batch, positions, self.heads, width // self.heads).transpose(1, 2)

        attended_BHTD = functional.scaled_dot_product_attention(  # noqa: N806
            split(self.query(x_BTD)), split(self.key(x_BTD)), split(self.value(x_BTD)), is_causal=True
        )
        merged: Tensor = self.output(attended_BHTD.transpose(1, 2).reshape(batch, positions, width))
        return merged


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        """The transformed values, [B, T, D]."""
        transformed: Tensor = self.down(functional.gelu(self.up(x_BTD)))
        return transformed


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        """The residual stream after the layer, [B, T, D]."""
        attended = x_BTD + self.attention(self.attention_norm(x_BTD))
        transformed: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return transformed


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            # GPT-2: what is added to the residual stream shrinks with the number of additions to it.
            if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """The logits of the next token at each position, [B, T, V]."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions)  # noqa: N806
        for layer in self.layers:
            x_BTD = layer(x_BTD)  # noqa: N806
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
