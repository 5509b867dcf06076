"""How much longer is a training step in which the ranks agree whether the training ends (`--stop-when-stored`)?

A small model in DDP over gloo, on two ranks or as many as are given. Each step that asks the ranks' key-value store
stands beside the one after it, which does not. The figures are the median of the differences on rank 0, as every rank
asks for itself, and that of the questions alone, which other work on the machine changes less.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranktape.capture import Capture
from ranktape.capture.rendezvous import StopGate

WIDTH = 256
PAIRS = 400
NUM_RANKS = 2


class TimedGate:
    """A gate that knows how long each of its questions took."""

    def __init__(self, gate: StopGate) -> None:
        self._gate = gate
        self.seconds: list[float] = []

    def stops_before(self, iteration: int, *, is_wanted: bool) -> bool:
        """Ask."""
        began = time.perf_counter()
        answer = self._gate.stops_before(iteration, is_wanted=is_wanted)
        self.seconds.append(time.perf_counter() - began)
        return answer


def pairs_of(folder: str, *, count: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Seconds of a step that asks, and of the next one, which does not; and of the questions."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, WIDTH)

    def step_seconds() -> float:
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    # The second iteration that it waits for never comes.
    with Capture(folder, model=model, stop_when_stored=True, min_iterations=2, every=10**9) as capture:
        for _ in range(20):
            step_seconds()
        found = []
        assert capture._stop_gate is not None
        gate: Any = TimedGate(capture._stop_gate)
        for _ in range(count):
            capture._stop_gate = gate
            asking = step_seconds()
            capture._stop_gate = None
            found.append((asking, step_seconds()))
    return found, gate.seconds


def main(count: int) -> None:
    """Time, and print what rank 0 has found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    places = [tempfile.mkdtemp()]
    dist.broadcast_object_list(places)
    with contextlib.redirect_stderr(io.StringIO()):
        found, questions = pairs_of(f"{places[0]}/run", count=count)
    if dist.get_rank() == 0:
        differences = sorted(1e6 * (asking - other) for asking, other in found)
        plain = 1e6 * statistics.median(other for _, other in found)
        low, high = differences[len(differences) // 4], differences[-1 - len(differences) // 4]
        median = statistics.median(differences)
        question = 1e6 * statistics.median(questions)
        print(
            f"{dist.get_world_size()} ranks, a step of {plain:.0f} us: {median:.0f} us more (middle half {low:.0f} to "
            f"{high:.0f}); a question takes {question:.0f} us"
        )
    dist.barrier()
    dist.destroy_process_group()


def launch(num_ranks: int) -> None:
    """Run this under torchrun."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", __file__]
    subprocess.run([sys.executable, *words], check=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(PAIRS)
    else:
        launch(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_RANKS)
