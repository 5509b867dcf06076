"""FSDP2 over half of the ranks, tensor parallelism over the other dimension. It knows of no recorder.

torchrun --nproc-per-node 4 -m ranktape.launch --capture runs/fsdp_tp examples/fsdp_and_tensor_parallel.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TENSOR_PARALLEL = 2


class FeedForward(nn.Module):
    """Two products: the first split by its outputs, the second by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + y


def main() -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (ranks // TENSOR_PARALLEL, TENSOR_PARALLEL), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward() for _ in range(2))).to(device)
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(mesh.get_local_rank("data"))
    for step in range(10):
        x = torch.randn(8, 64, device=device)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
