"""A training under DDP that captures itself, one of whose ranks kills itself.

ddp.py RANK:ITERATION --capture URL ...
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ranktape.capture import Capture, add_arguments
from tests.capture.models import BATCH, LENGTH, WIDTH, Net

STEPS = 8
MICROBATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kill")
    add_arguments(parser)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture.from_arguments(args, model=None):
        for step in range(STEPS):
            optimizer.zero_grad()
            for microbatch in range(MICROBATCHES):
                loss = model(torch.randn(BATCH, LENGTH, WIDTH)).square().mean()
                if args.kill == f"{rank}:{step}" and microbatch == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
            optimizer.step()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
