"""Does the device path hold on a GPU, and what does it cost? Everything for one loan of a machine, in under 8 minutes.

    PYTHONPATH=. python benchmarks/gpu.py            # tests of the device path, then the figures
    PYTHONPATH=. python benchmarks/gpu.py --figures  # the figures alone
    PYTHONPATH=. python benchmarks/gpu.py --tiny     # the same with a small model, to try the script

A bf16 transformer of about 1 B parameters, eager and compiled. The ways take turns, `ROUNDS` times `STEPS` steps each,
and wait for the device after each step, as a training does that logs its loss:

    plain       no capture
    idle        a capture is open, and no step is captured
    captured    one step in ten, the tensors of the first two layers
    eight       one step, the tensors of the first eight layers
    recorder    a flight recorder holds the statistics of every tensor

The bars: idle under 1.01 of plain; staging at half or more of the bytes per second of a plain copy into pinned memory.
Without a GPU, `--device sim --tiny` runs it on the simulated accelerator: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ranktape.capture import Capture
from ranktape.capture.staging.device import DeviceStage
from ranktape.capture.staging.ring import RingConsumer, RingProducer
from ranktape.capture.staging.ring_file import SlotKind
from ranktape.storage import open_run

STEPS, ROUNDS = 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is trained."""

    width: int
    """Hidden dimension."""
    num_layers: int
    """Layers of the stack."""
    num_heads: int
    """Heads of attention."""
    batch: int
    """Samples of a step."""
    length: int
    """Tokens of a sample."""


LARGE = Size(width=2048, num_layers=18, num_heads=16, batch=4, length=1024)
TINY = Size(width=64, num_layers=2, num_heads=2, batch=2, length=16)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.norm, self.next_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.output = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(hidden)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        after = hidden + self.output(attended.transpose(1, 2).flatten(2))
        return after + self.down(F.gelu(self.up(self.next_norm(after))))  # type: ignore[no-any-return]


class Training:
    """One training; each has a model of its own."""

    def __init__(self, size: Size, device: torch.device, *, is_compiled: bool) -> None:
        torch.manual_seed(0)
        # The CPU's kernels, by which the simulated accelerator computes, have other types for bfloat16 than a GPU's.
        dtype = torch.float32 if device.type == "sim" else torch.bfloat16
        with nullcontext() if device.type == "sim" else device:
            model = nn.Sequential(*(Block(size) for _ in range(size.num_layers))).to(device, dtype)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model = torch.compile(model) if is_compiled else model
        self.data = torch.randn(size.batch, size.length, size.width).to(device, dtype)

    def step(self) -> None:
        """One iteration."""
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self) -> list[float]:
        """Of each step."""
        seconds = []
        torch.accelerator.synchronize()
        for _ in range(STEPS):
            start = time.perf_counter()
            self.step()
            torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - start)
        return seconds


def ways(folder: Path, budget_nbytes: int) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """The captures that are compared, by name; each writes into a run of its own."""

    def capture(name: str, **options: Any) -> Callable[[], AbstractContextManager[object]]:
        return lambda: Capture(folder / name, host_budget_nbytes=budget_nbytes, **options)

    return {
        "plain": nullcontext,
        "idle": capture("idle", start_at=10**6),
        "captured": capture(
            "captured", every=10, start_at=4, min_iterations=2, max_iterations=2, select=["layer_idx=0-1"]
        ),
        "eight": capture("eight", start_at=4, min_iterations=1, max_iterations=1, select=["layer_idx=0-7"]),
        "recorder": capture("recorder", record_last=2, keep="statistics"),
    }


def measure_steps(size: Size, device: torch.device, *, is_compiled: bool, budget_nbytes: int) -> None:
    """Print the step of each way, and the peak of its memory; the ways take turns on one training."""
    training = Training(size, device, is_compiled=is_compiled)
    training.seconds()  # compiles, allocates, and lets the clocks of the device settle
    seconds, peaks, stored = defaultdict[str, list[float]](list), Counter[str](), Counter[str]()
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            for name, capture in ways(Path(folder), budget_nbytes).items():
                torch.accelerator.reset_peak_memory_stats(device)
                with capture():
                    # The first step attaches hooks, and says what a captured one costs.
                    seconds[name] += training.seconds()[0 if name == "recorder" else 1 :]
                peaks[name] = max(peaks[name], torch.accelerator.max_memory_allocated(device))
                if number == 0 and (Path(folder) / name).exists():
                    stored[name] = sum(record.nbytes for record in open_run(Path(folder) / name).select())
    plain = statistics.median(seconds["plain"])
    for name, all_seconds in seconds.items():
        median, mean = statistics.median(all_seconds), statistics.fmean(all_seconds)
        slowest = ", ".join(f"{1e3 * one:.1f}" for one in sorted(all_seconds)[-7:])
        print(
            f"{'compiled' if is_compiled else 'eager'} {name}: median {1e3 * median:.1f} ms ({median / plain:.3f}), "
            f"mean {1e3 * mean:.1f} ms ({mean / plain:.3f}), slowest {slowest} ms, "
            f"peak {peaks[name] / 2**30:.2f} GiB, {stored[name] / 1e9:.2f} GB stored",
            flush=True,
        )


def measure_staging(device: torch.device, *, num: int, nbytes: int) -> None:
    """Print the bytes per second that reach the ring, and those of a plain copy into pinned memory."""
    tensors = [torch.zeros(nbytes // 4, device=device) for _ in range(num)]
    pinned = torch.empty(nbytes // 4, pin_memory=True)
    ring = RingProducer(2 * num * nbytes, keep_alive=lambda: None)
    consumer = RingConsumer(ring.descriptor)
    stage = DeviceStage(ring, device=device, timeout_seconds=60)
    staged = plain = submitted = 0.0
    for _ in range(2):  # the first time, memory is allocated and streams are made
        torch.accelerator.synchronize()
        start = time.perf_counter()
        for tensor in tensors:
            pinned.copy_(tensor, non_blocking=True)
        torch.accelerator.synchronize()
        plain = num * nbytes / (time.perf_counter() - start)
        start, num_published = time.perf_counter(), 0
        for tensor in tensors:
            stage.copy(tensor, ring.reserve(SlotKind.TENSOR, b"{}", nbytes, timeout_seconds=60))
        submitted = time.perf_counter() - start
        slots = []
        while num_published < num:
            if (slot := consumer.take()) is None:
                time.sleep(1e-4)  # the publisher needs the GIL
                continue
            assert slot.kind is SlotKind.TENSOR, slot.header
            num_published += 1
            slots.append(slot)
        staged = num * nbytes / (time.perf_counter() - start)
        for slot in slots:
            consumer.free(slot)
    stage.close(timeout_seconds=60)
    print(
        f"staging: {staged / 1e9:.2f} GB/s into the ring, {plain / 1e9:.2f} GB/s by a plain copy into pinned memory; "
        f"the training thread spends {1e6 * submitted / num:.0f} us for each tensor of {nbytes / 2**20:g} MiB",
        flush=True,
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--figures", action="store_true", help="run no tests")
    parser.add_argument("--tiny", action="store_true", help="train a small model, eager only")
    parser.add_argument("--kind", choices=("eager", "compiled", "both"), default="both", help="of the large model")
    asked = parser.parse_args()
    if asked.device == "sim":
        from tests.device.accelerator import load

        torch.set_num_threads(1)
        load()
    elif not torch.cuda.is_available():
        print("no CUDA device: nothing is measured; --device sim --tiny tries the script")
        return
    command = [sys.executable, "-m", "pytest", "-q", "tests/device"]
    status = 0
    if not asked.figures:
        status = subprocess.run([*command, *(["--run-gpu"] if asked.device == "cuda" else [])], check=False).returncode
        print(f"tests of the device path: exit code {status}", flush=True)
    device = torch.device(asked.device, 0)
    measure_staging(device, num=16, nbytes=(1 if asked.tiny else 32) << 20)
    size = TINY if asked.tiny else LARGE
    num = Training(size, device, is_compiled=False).num_parameters
    print(
        f"a transformer of {num / 1e6:.0f} M parameters in bfloat16, {size.batch} x {size.length} tokens, {STEPS} steps"
    )
    kinds = {"eager": (False,), "compiled": (True,), "both": (False, True)}
    for is_compiled in kinds["eager" if asked.tiny else asked.kind]:
        measure_steps(size, device, is_compiled=is_compiled, budget_nbytes=(64 << 20) if asked.tiny else (8 << 30))
    sys.exit(status)


if __name__ == "__main__":
    main()
