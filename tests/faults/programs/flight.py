"""A training of some ranks with a flight recorder, on one of which something goes wrong in an iteration.

flight.py URL FAULT: `nan`, `exception`, `sigterm`, `sigkill`, `segfault`, `hang`, `user`, `flood`, `none`, or
`both` (the rank and its writer are killed), `closing` (its writers are, while they close the rank). With `resume`
after it the run is continued.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranktape.capture import Capture

FAULTY_RANK, FAULTY_ITERATION, NUM_ITERATIONS = 2, 20, 24
LAST = 3
NUM_IN_FLOOD, NUM_BEFORE_DEATH = 120, 130
"""Iterations of a flood of triggers, and iterations before the rank is killed that sent them."""

TIMEOUT_SECONDS = {"hang": 15.0}
"""Of a collective, where one is waited for in vain."""

_SIGNALS = {"both": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL, "segfault": signal.SIGSEGV}


def begin(capture: Capture, fault: str, batch: torch.Tensor) -> None:
    """Let something happen before the forward pass."""
    if fault == "nan":
        batch[1, 3] = torch.nan
    elif fault == "user":
        capture.trigger("the validation fell")


def end(capture: Capture, fault: str) -> None:
    """End the process by a signal, and before it its writer where both are to end."""
    writer = capture._process._process
    if fault == "both" and writer is not None:
        os.kill(writer.pid, signal.SIGKILL)
    os.kill(os.getpid(), _SIGNALS[fault])


def kill_writers(capture: Capture) -> None:
    """Kill each writer process that the capture starts."""
    while True:
        if (writer := capture._process._process) is not None:
            writer.kill()
        time.sleep(0.02)


def flood(capture: Capture, iteration: int) -> None:
    """Trigger in each iteration, and end the process some iterations after that."""
    if iteration < NUM_IN_FLOOD:
        capture.trigger("the reward is low")
    elif iteration == NUM_BEFORE_DEATH:
        os.kill(os.getpid(), signal.SIGKILL)


def main(url: str, fault: str, *resume: str) -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=TIMEOUT_SECONDS.get(fault, 120.0)))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Capture(url, model=model, record_last=LAST, host_budget_nbytes=4 << 20, resume=bool(resume)) as capture:
        for iteration in range(NUM_ITERATIONS if fault != "flood" else NUM_BEFORE_DEATH + 1):
            batch = torch.randn(4, 16)
            optimizer.zero_grad()
            if rank == FAULTY_RANK and iteration == FAULTY_ITERATION:
                begin(capture, fault, batch)
            if fault == "flood" and rank == FAULTY_RANK:
                flood(capture, iteration)
            hidden = model(batch)
            if rank == FAULTY_RANK and iteration == FAULTY_ITERATION:
                if fault == "exception":
                    raise ValueError("the data are wrong")
                if fault in _SIGNALS:
                    end(capture, fault)
                if fault == "hang":
                    time.sleep(3600)
            loss = hidden.square().mean()
            loss.backward()
            optimizer.step()
            time.sleep(0.02)
        if rank == FAULTY_RANK and fault == "closing":
            threading.Thread(target=kill_writers, args=(capture,), daemon=True).start()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
