"""How much longer is a training step that is captured, or that could be, and beside hooks with `torch.save`?

One model, one process, one thread for the training. The ways take turns, so that what else the machine
does falls on all of them. Ways:

    plain        no capture at all
    idle         a capture is open, the step is not captured and nothing is left to store
    captured     every tensor of the step is recorded; one step in four, as a capture would be set
    torch.save   the linear layers' tensors by hooks, each into a file of its own

The bars: idle under 1.01 of plain; torch.save slows the step at least 5 times as much as capture does.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ranktape.capture import Capture

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 256, 4, 4, 4, 256
ROUNDS = 15
EVERY = 4


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = (
            part(hidden).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)  # type: ignore[misc]
        hidden = hidden + self.output(attended.reshape(BATCH, LENGTH, WIDTH))
        return hidden + self.down(F.gelu(self.up(hidden)))  # type: ignore[no-any-return]


class Saver:
    """The peer: hooks on the linear layers that save what they see, as scripts do it."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._handles: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                self._handles.append(module.register_forward_hook(self._forward))
                self._handles.append(module.weight.register_hook(self._save))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forward(self, module: nn.Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        for tensor in (args[0], module.weight, output):
            self._save(tensor)
        output.register_hook(self._save)
        if args[0].requires_grad:
            args[0].register_hook(self._save)

    def _save(self, tensor: torch.Tensor) -> None:
        torch.save(tensor.detach().clone(), self._folder / f"{next(self._numbers) % 2000}.pt")


def main() -> None:
    """Time the ways in turn; print the medians and their ratios."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(BATCH, LENGTH, WIDTH)

    def step_seconds() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = {"plain": [], "idle": [], "captured": [], "torch.save": []}
    nbytes = 0
    with tempfile.TemporaryDirectory() as folder:
        with Capture(f"{folder}/run", start=1, every=EVERY, min_iterations=ROUNDS) as capture:
            step_seconds()  # watched, to learn what an iteration costs
            ring = capture._process.ring
            for _ in range(ROUNDS):
                seconds["captured"].append(step_seconds())
                step_seconds()
                while ring.pending_nbytes:
                    time.sleep(0.05)
                seconds["idle"].append(step_seconds())
                step_seconds()
            nbytes = capture._predicted_nbytes
        for _ in range(ROUNDS):
            seconds["plain"].append(step_seconds())
            saver = Saver(model, Path(folder))
            seconds["torch.save"].append(step_seconds())
            saver.remove()
            step_seconds()
    plain = statistics.median(seconds["plain"])
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:>10}: {median * 1e3:7.1f} ms a step, {median / plain:.3f} of plain")
    added = {name: statistics.median(seconds[name]) - plain for name in ("captured", "torch.save")}
    print(
        f"{nbytes / 1e6:.0f} MB an iteration; torch.save adds {added['torch.save'] / added['captured']:.1f} times what"
    )
    print("capture adds, for fewer tensors (no attention)")


if __name__ == "__main__":
    main()
