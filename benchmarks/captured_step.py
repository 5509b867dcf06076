"""How much longer is a training step that is captured, or that could be, beside hooks with `torch.save` and msprobe?

One process, one thread for the training, the same model for each way. The ways take turns, round after round, so that
what else the machine does falls on all of them; a round's figure is its step over the plain step of the same round.

    plain               no capture at all
    idle                a capture is open, its writer waits, and no step is captured
    after captured      the steps between captured ones, when all is stored
    captured            every tensor of the step is recorded; one step in four, as a capture would be set
    torch.save          the linear layers' tensors by hooks, each into a file of its own
    msprobe statistics  mindstudio-probe, level L0 (modules), only statistics: no values are kept
    msprobe tensor      the same, with values

The bars: idle under 1.01 of plain; torch.save slows the step at least 5 times as much as capture does, and msprobe's
statistics more than capture does. msprobe is taken where it is installed (`pip install -e '.[bench]'`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ranktape.capture import Capture

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 256, 4, 4, 4, 256
ROUNDS = 8
PER_ROUND = 3
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


class Probe:
    """The other peer: msprobe's debugger around a step of a model of its own, for it leaves its hooks on."""

    def __init__(self, model: nn.Module, folder: Path, *, task: str) -> None:
        from msprobe.pytorch import PrecisionDebugger

        self._model = model
        self._folder = folder
        config = folder / f"{task}.json"
        modes = {"scope": [], "list": [], "data_mode": ["all"]}
        common = {"task": task, "dump_path": str(folder), "rank": [], "step": [], "level": "L0"}
        config.write_text(
            json.dumps({**common, "statistics": {**modes, "summary_mode": "statistics"}, "tensor": modes})
        )
        config.chmod(0o600)  # others may write: msprobe refuses
        PrecisionDebugger._instance = None
        self._debugger = PrecisionDebugger(config_path=str(config))

    def step_seconds(self, train: Training) -> float:
        self._debugger.start(model=self._model)
        seconds = train.step_seconds()
        start = time.perf_counter()
        self._debugger.stop()
        self._debugger.step()
        return seconds + time.perf_counter() - start


class Training:
    """A model and its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._batch = torch.randn(BATCH, LENGTH, WIDTH)

    def step_seconds(self) -> float:
        start = time.perf_counter()
        self._optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - start


def captured_round(training: Training, url: str) -> tuple[list[float], list[float], int]:
    """Seconds of the steps between captured ones, of the captured ones, and the bytes of one."""
    after, captured = [], []
    with Capture(url, model=training.model, start_at=1, every=EVERY, min_iterations=PER_ROUND) as capture:
        training.step_seconds()  # watched, to learn what an iteration costs
        ring = capture._process.ring
        for _ in range(PER_ROUND):
            captured.append(training.step_seconds())
            training.step_seconds()
            while ring.pending_nbytes:
                time.sleep(0.05)
            after += [training.step_seconds() for _ in range(EVERY - 2)]
        return after, captured, capture._predicted_nbytes


def idle_round(training: Training, url: str) -> list[float]:
    """Seconds of steps while a capture waits for an iteration that does not come."""
    with Capture(url, model=training.model, start_at=1000, min_iterations=1):
        for _ in range(2):
            training.step_seconds()  # the first one is watched
        return [training.step_seconds() for _ in range(2 * PER_ROUND)]


def main() -> None:
    """Time the ways in turn; print the medians and their ratios."""
    torch.set_num_threads(1)
    training = Training()
    has_msprobe = importlib.util.find_spec("msprobe") is not None
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    nbytes = 0
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()) as _:
        folder = Path(temporary)
        probes: dict[str, tuple[Probe, Training]] = {}
        for number in range(ROUNDS):
            plain = statistics.median(training.step_seconds() for _ in range(2 * PER_ROUND))
            after, captured, nbytes = captured_round(training, f"{folder}/run{number}")
            with contextlib.redirect_stderr(io.StringIO()):  # that the minimum is not met
                idle = idle_round(training, f"{folder}/idle{number}")
            saver = Saver(training.model, folder)
            saved = [training.step_seconds() for _ in range(PER_ROUND)]
            saver.remove()
            again = statistics.median(training.step_seconds() for _ in range(2 * PER_ROUND))
            base = (plain + again) / 2
            ratios["plain, after over before"].append(again / plain)
            ways = {"idle": idle, "after captured": after, "captured": captured, "torch.save": saved}
            if has_msprobe:
                for task in ("statistics", "tensor"):
                    if task not in probes:
                        other = Training()
                        probes[task] = Probe(other.model, folder, task=task), other
                    probe, other = probes[task]
                    ways[f"msprobe {task}"] = [probe.step_seconds(other) for _ in range(PER_ROUND)]
            for name, seconds in ways.items():
                ratios[name].append(statistics.median(seconds) / base)
            shutil.rmtree(folder / f"run{number}")
    for name, values in ratios.items():
        low, median, high = (sorted(values)[at] for at in (0, len(values) // 2, -1))
        print(f"{name:>24}: {median:.3f} of a plain step ({low:.3f} to {high:.3f} in {len(values)} rounds)")
    added = {name: statistics.median(values) - 1 for name, values in ratios.items()}
    print(f"{nbytes / 1e6:.0f} MB a captured step")
    for name in ("torch.save", "msprobe statistics", "msprobe tensor"):
        if name in added:
            print(f"{name} adds {added[name] / added['captured']:.1f} times what capture adds")


if __name__ == "__main__":
    main()
