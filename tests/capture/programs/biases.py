"""Layers with biases on two ranks, under tensor parallelism and under FSDP2: captures one iteration of each.

biases.py OUT WAY...: each run goes to OUT/WAY.run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranktape.capture import Capture


def train(way: str, url: Path) -> None:
    """Train one iteration."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("up", nn.Linear(8, 16, dtype=torch.float64))
    model.add_module("down", nn.Linear(16, 8, dtype=torch.float64))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(way,))
    if way == "tp":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(url, master=True):
        model(torch.randn(4, 8, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def main(out: str, *ways: str) -> None:
    """Train in each way."""
    dist.init_process_group("gloo")
    for way in ways:
        train(way, Path(out) / f"{way}.run")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
