"""A small transformer that computes the same bits on the CPU and on the simulated accelerator."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

NUM_STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(hidden)).chunk(3, -1))
        with sdpa_kernel(SDPBackend.MATH):  # by default the CPU has a kernel of its own
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return attended + self.down(F.gelu(self.up(attended)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class Training:
    """Made on the CPU from one seed, then moved; only `begin` waits for the device."""

    def __init__(self, device: torch.device | str, *, batch: int = 2, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.model = Transformer()
        self.ids = torch.randint(0, 20, (NUM_STEPS, batch, 7)).to(device)
        self.model.to(device)
        # With foreach, accelerators have another loop over the weights than the CPU, which rounds differently.
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.05, foreach=False)

    def run(self, *, after_step: Callable[[], object] = lambda: None) -> torch.Tensor:
        """The losses, on the device."""
        losses = []
        for batch in self.ids:
            loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
            after_step()
        return torch.stack(losses)
