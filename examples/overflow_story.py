"""A training whose layer 5 grows until it overflows, and that dies of it a few steps later.

    torchrun --nproc-per-node 2 -m ranktape.launch --capture runs/story --record-last 4 examples/overflow_story.py

In step 137 a bad update makes the weight of one projection in layer 5 on rank 1 so large that its output is beyond the
largest float16. All ranks have it with the next gradients; the script looks at its loss every tenth step alone, and
raises in step 140.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH, LENGTH = 32, 8, 4, 16
FAULTY_RANK, FAULTY_LAYER = 1, 5
OVERFLOW, LOOKS_EVERY = 137, 10


class Layer(nn.Module):
    """A layer with a branch of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state after it."""
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Some layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state after all of them."""
        return self.layers(hidden)  # type: ignore[no-any-return]


def main() -> None:
    """Train until the loss is not a number."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model().to(torch.float16)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    weight = model.get_parameter(f"layers.{FAULTY_LAYER}.up.weight")
    torch.manual_seed(rank)
    for step in range(200):
        if rank == FAULTY_RANK and step == OVERFLOW:
            with torch.no_grad():
                weight.mul_(2e5)
        hidden = torch.randn(BATCH, LENGTH, WIDTH).to(torch.float16)
        loss = parallel(hidden).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step % LOOKS_EVERY == 0 and not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} in step {step}")
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
