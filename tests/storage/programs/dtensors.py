"""Make DTensors of many placements on four ranks, and write what each rank has of them, and what they are as a whole.

torchrun --nproc-per-node 4 dtensors.py DIRECTORY
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ranktape.capture.tensors.placement import shard_of

PLACED: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "both dimensions": ((8, 6), [Shard(0), Shard(1)]),
    "both dimensions, uneven": ((5, 7, 2), [Shard(0), Shard(1)]),
    "one dimension twice, uneven": ((7, 3), [Shard(0), Shard(0)]),
    "copies of shards": ((6, 4), [Replicate(), Shard(1)]),
    "copies": ((3, 4), [Replicate(), Replicate()]),
    "empty shards": ((2, 3), [Shard(0), Shard(0)]),
    "nothing": ((0, 3), [Shard(1), Replicate()]),
    "strided": ((8, 3), [_StridedShard(0, split_factor=2), Shard(0)]),
    "strided, in pieces": ((3, 8), [_StridedShard(1, split_factor=2), Replicate()]),
}
"""By name the shape of a tensor, and its placements on a mesh of dp=2, tp=2."""


def placed(mesh: DeviceMesh) -> Iterator[tuple[str, DTensor]]:
    """DTensors of `PLACED`."""
    for name, (shape, placements) in PLACED.items():
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(torch.bfloat16)
        yield name, distribute_tensor(whole, mesh, placements)


def in_pieces(mesh: DeviceMesh) -> Iterator[tuple[str, DTensor]]:
    """Strided shards that torch cuts unevenly, but does not distribute by itself."""
    whole = torch.arange(27.0).reshape(9, 3)
    placement = _StridedShard(0, split_factor=2)
    parts, _ = placement._split_tensor(whole, 2, with_padding=False)
    local = parts[mesh.get_local_rank("dp")]
    options: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    yield "strided, uneven pieces", DTensor.from_local(local, mesh, [placement, Replicate()], **options)


def summands(mesh: DeviceMesh) -> Iterator[tuple[str, DTensor]]:
    """DTensors whose sum, or average, or maximum is not made yet."""
    for operation in ("sum", "avg", "max"):
        local = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank())).to(torch.bfloat16)
        yield f"partial {operation}", DTensor.from_local(local, mesh, [Partial(operation), Shard(1)], run_check=False)
    # The same on both ranks of tp.
    local = torch.randn(5, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    yield "copies of summands", DTensor.from_local(local, mesh, [Partial(), Replicate()], run_check=False)


def trained(mesh: DeviceMesh) -> Iterator[tuple[str, DTensor]]:
    """The weights of a model under FSDP2 over tensor parallelism; those of the layers do not divide evenly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 10), nn.Linear(10, 7))
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        yield f"fsdp and tp, {name}", parameter


def main(directory: Path) -> None:
    """Write this rank's parts, and on the first rank the wholes."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parts, wholes = {}, {}
    for make in (placed, in_pieces, summands, trained):
        for name, tensor in make(mesh):
            shard = shard_of(tensor)
            assert shard is not None
            local = tensor.to_local().detach()
            assert tuple(local.shape) == shard.shape, (name, local.shape, shard.shape)
            parts[name] = (local, shard.text)
            wholes[name] = tensor.full_tensor().detach()
    (directory / f"parts_{dist.get_rank()}.pickle").write_bytes(pickle.dumps(parts))
    if dist.get_rank() == 0:
        (directory / "wholes.pickle").write_bytes(pickle.dumps(wholes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
