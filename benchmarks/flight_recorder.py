"""How much longer is a training step in which a flight recorder holds every tensor, and nothing happens?

One process, one thread for the training, the GPT of `captured_step.py` with 8 layers of width 384. Blocks of held steps
and of plain ones take turns; a figure is the ratio of two neighbours. Between the held steps of a block the
hooks stay on, as in a training of which each step is held; the last step of a block does not count: at its end they go
on or off for the next block. The training thread's own processor time tells what is done on it, whatever else the
machine does; the clock, what the writer takes.

    statistics    what each tensor adds up to (`--record-last 3 --keep statistics`)
    values        the values of each tensor, as far as the budget goes (`--record-last 3`)
    copies        the bytes of such a step, copied into warm memory: what values cost at least

The bars: statistics under 1.03 of plain; values the price of a copy.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time

import torch

from benchmarks import captured_step
from ranktape.capture import Capture, CaptureOptions

captured_step.WIDTH, captured_step.HEADS, captured_step.LAYERS = 384, 6, 8
PAIRS = 12
COUNTED = 2
"""Steps of a block, besides its last one."""
LAST = 3
BUDGET_NBYTES = 3 << 30

Seconds = tuple[float, float]
"""By the clock, and of the processor on the training thread."""


def block_seconds(training: captured_step.Training, capture: Capture) -> Seconds:
    """Of the steps that count in a block, all of them held, or none; then the other kind is next."""
    clock, cpu = time.perf_counter(), time.thread_time()
    for _ in range(COUNTED):
        training.step_seconds()
        capture.step(capture.iteration + 2)
    found = time.perf_counter() - clock, time.thread_time() - cpu
    training.step_seconds()
    capture.step(capture.iteration + 1)
    return found


def pairs_of(
    training: captured_step.Training, url: str, *, keep: str, count: int
) -> tuple[list[tuple[Seconds, Seconds]], int]:
    """A block of held steps and the plain one after it, again and again; the bytes of the tensors of a step."""
    # Even steps are held: the numbers that the steps are given choose.
    options = CaptureOptions(record_last=LAST, every=2, keep=keep, host_budget_nbytes=BUDGET_NBYTES, advance_on="step")
    with Capture(url, model=training.model, options=options) as capture:
        training.step_seconds()  # finds out what there is
        capture.step(2)
        found = [(block_seconds(training, capture), block_seconds(training, capture)) for _ in range(count + 1)]
        return found[1:], capture._predicted_nbytes


def copy_seconds(nbytes: int) -> float:
    """What it takes to copy so many bytes from one place, a megabyte at once, into warm memory."""
    source, target = torch.ones(1 << 18), torch.zeros(nbytes // 4 + (1 << 18))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for offset in range(0, nbytes // 4, 1 << 18):
            target[offset : offset + (1 << 18)].copy_(source)
        best = min(best, time.perf_counter() - start)
    return best


def main(pairs: int) -> None:
    """Time the ways in turn; print the medians of their ratios."""
    torch.set_num_threads(1)
    training = captured_step.Training()
    with tempfile.TemporaryDirectory() as folder:
        for keep in ("statistics", "values"):
            with contextlib.redirect_stderr(io.StringIO()):
                found, nbytes = pairs_of(training, f"{folder}/{keep}", keep=keep, count=pairs)
            if keep == "statistics":
                plain = statistics.median(cpu for _, (_, cpu) in found) / COUNTED
                copies = 1 + copy_seconds(nbytes) / plain
                print(f"a plain step takes {plain:.3f} s of processor time; {nbytes / 1e6:.0f} MB of tensors in it")
                print(f"copies alone: {copies:.3f} of a plain step")
            for number, what in enumerate(("clock", "training thread")):
                ratios = sorted(held[number] / plain_block[number] for held, plain_block in found)
                low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
                median = statistics.median(ratios)
                print(f"{keep:>10}, {what:>15}: {median:.3f} of a plain step (middle half {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS)
