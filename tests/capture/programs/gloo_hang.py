"""A training with gloo and DDP that never ends, by torch 2.13 alone: made to be shown to PyTorch.

    python tests/capture/programs/gloo_hang.py

DDP is the last to hold its process group. When `train` returns, the group's destructor runs under DDP's, with the
interpreter's lock held, and joins gloo's threads. One of them still gathers; in a real training it has not been given a
processor since the last backward pass. Done, it destroys its work and with it the thread's state of the backward pass,
a Python object (`_stash_obj_in_tls` in `_engine_run_backward`): for that it waits for the lock.

Where torch._dynamo is not imported before `init_process_group`, DDP imports it, and with it
torch.distributed.nn.functional, whose default arguments (`group=group.WORLD`) then keep the default group alive.
"""

from __future__ import annotations

import faulthandler
import sys

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

PART = torch.ones(1 << 26)
"""So large that gloo's thread still copies it when the training has returned."""


def train(*, has_optimizer: bool = False) -> torch.Tensor:
    """One backward pass; gives what is still being gathered."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(4, 4))
    whole = torch.zeros_like(PART)

    def gather(_grad: torch.Tensor) -> None:
        dist.all_gather([whole], PART, async_op=True)

    model.module.weight.register_hook(gather)
    model(torch.randn(4, 4)).sum().backward()
    if has_optimizer:
        torch.optim.SGD(model.parameters()).step()
    dist.destroy_process_group()
    return whole


if __name__ == "__main__":
    faulthandler.dump_traceback_later(20, exit=True)
    train()
    sys.stdout.write("ended\n")
