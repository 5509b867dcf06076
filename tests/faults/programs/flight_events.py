"""A training of one process with a flight recorder, to which one thing after the other happens.

flight_events.py URL
"""

from __future__ import annotations

import functools
import os
import signal
import sys

import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import open_run
from tests.waiting import until

LARGE, NAN, USR1, TERM, USER = range(20, 70, 10)
"""The iterations in which they happen."""

LIMITS = ("maximum > 10 where module == '0' and tensor_name == 'input'",)

NUM_ITERATIONS = 70


def is_known(url: str, iteration: int) -> bool:
    """Whether the run says that something happened in an iteration."""
    return any(one.iteration == iteration for one in open_run(url).triggers())


def main(url: str) -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a program that saves a checkpoint, say
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with Capture(url, model=model, record_last=1, trigger=LIMITS) as capture:
        for iteration in range(NUM_ITERATIONS):
            optimizer.zero_grad()
            batch = torch.rand(64, 8)
            batch[0, 0] = {LARGE: 50.0, NAN: float("nan")}.get(iteration, 1.0)
            output = model(batch)
            loss = output[1:].square().mean()
            loss.backward()
            if iteration in {USR1, TERM}:
                os.kill(os.getpid(), signal.SIGUSR1 if iteration == USR1 else signal.SIGTERM)
                # The writer looks for signals a few times in a second, where the machine lets it.
                until(functools.partial(is_known, url, iteration))
            if iteration == USER:
                capture.trigger("the validation fell")
            optimizer.step()
    # Ours have gone: another one would end the process.
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


if __name__ == "__main__":
    main(*sys.argv[1:])
