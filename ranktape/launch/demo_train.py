"""The demo's model and training: a small GPT over bytes, with DDP and autocast; for torchrun."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# B = batch, T = positions, D = model width, H = heads, V = vocabulary

VOCABULARY = 256
"""Number of tokens, which are bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The size of the model."""

    layers: int = 4
    """Number of decoder layers."""
    width: int = 128
    """Width of the model, D."""
    heads: int = 4
    """Number of attention heads, H, which divides the width."""
    context: int = 128
    """Length of the longest sequence, in tokens."""


class Attention(nn.Module):
    """Causal self-attention with separate projections."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The attended values, [B, T, D]."""
        batch, positions, width = x_BTD.shape

        def split(projected_BTD: Tensor) -> Tensor:
            return projected_BTD.view(batch, positions, self.heads, width // self.heads).transpose(1, 2)

        attended_BHTD = functional.scaled_dot_product_attention(
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

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The transformed values, [B, T, D]."""
        transformed: Tensor = self.down(functional.gelu(self.up(x_BTD)))
        return transformed


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
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
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            # As in GPT-2, layers that add to the residual stream start smaller, by the number of such layers.
            if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The logits of the next token at each position, [B, T, V]."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


WARM_UP_STEPS = 10
"""Number of steps in which the learning rate rises."""
PRINT_EVERY = 10
"""Number of steps between two lines of output."""


BATCH_SIZE = 8
"""Number of sequences of each rank in a step."""


def read_corpus() -> Tensor:
    """The training data: the bytes of Python's reference documentation, which is part of its standard library."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def draw_batch(text: Tensor, *, batch_size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text and the same windows one byte later, each [batch_size, context]."""
    starts = torch.randint(len(text) - context, (batch_size,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1 + rank)

    config = GPTConfig()
    model = DistributedDataParallel(GPT(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS)
    text = read_corpus()

    started = time.monotonic()
    losses: list[Tensor] = []
    for step in range(arguments.steps):
        tokens, targets = draw_batch(text, batch_size=BATCH_SIZE, context=config.context, generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.dtype == "bf16"):
            logits = model(tokens)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        if rank == 0 and (step % PRINT_EVERY == 0 or step == arguments.steps - 1):
            # The mean since the last line, because the loss of a single small batch is noisy.
            mean_loss = torch.stack(losses).mean().item()
            sys.stdout.write(f"step {step:4d}  loss {mean_loss:6.3f}  {time.monotonic() - started:6.1f} s\n")
            sys.stdout.flush()
            losses = []

    # gloo sometimes aborts if a rank destroys its group while another one still communicates with it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("run this under torchrun, or use 'ranktape demo'")
    main()
