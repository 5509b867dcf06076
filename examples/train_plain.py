"""A plain PyTorch training script: data parallel, gradient accumulation, attention. It knows of no recorder.

torchrun --nproc-per-node 4 examples/train_plain.py --micro-batches 4
python examples/train_plain.py
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 64
CONTEXT = 32
WIDTH = 64
HEADS = 4


class Block(nn.Module):
    """Attention and a feed-forward part, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, positions, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, positions, WIDTH))
        transformed: Tensor = x + self.mlp(self.mlp_norm(x))
        return transformed


class Model(nn.Module):
    """A decoder of a few blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens) + self.position))
        return logits


def draw_tokens(batch_size: int, *, generator: torch.Generator) -> Tensor:
    """Sequences that count upwards by a constant stride: something that a small model learns soon."""
    start = torch.randint(VOCABULARY, (batch_size, 1), generator=generator)
    stride = torch.randint(1, 4, (batch_size, 1), generator=generator)
    return (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(1_000 * arguments.seed + rank)
    model: nn.Module = Model(arguments.blocks).to(device)
    if is_distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    mean_loss = float("nan")
    for step in range(arguments.steps):
        total = torch.zeros((), device=device)
        for microbatch in range(arguments.micro_batches):
            is_last = microbatch == arguments.micro_batches - 1
            tokens = draw_tokens(arguments.batch_size, generator=generator).to(device)
            # DDP averages the gradients of the last microbatch only, and with it those of all.
            is_local = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if is_local else contextlib.nullcontext():  # type: ignore[operator]
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / arguments.micro_batches).backward()
            total += loss.detach() / arguments.micro_batches
        optimizer.step()
        optimizer.zero_grad()
        if is_distributed:
            dist.all_reduce(total)
        mean_loss = total.item() / world_size
        if rank == 0:
            print(f"step {step:3d}  loss {mean_loss:.4f}", flush=True)

    if rank == 0:
        # Exact, so that two runs can be compared bit for bit.
        print(f"final loss {mean_loss.hex()}", flush=True)
    if is_distributed:
        # gloo aborts now and then when one rank tears down while another still talks to it.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
