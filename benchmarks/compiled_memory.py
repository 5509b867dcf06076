"""How much memory does a compiled training take at its peak that is recorded inside of its graphs, or eagerly?

Each way is a process of its own, of the same model, steps and seed; its figure is the largest resident set of that
process alone, the writer's not among it. Large tensors come from the system and go back to it
(`MALLOC_MMAP_THRESHOLD_`): with glibc's default they leave holes in its heap, another number of them in each way.

    compiled   no capture
    twice      no capture; the model is compiled once more for two of the steps, as it is for taps
    idle       a capture is open, and records none of these steps
    graph      two of the steps are captured inside of the compiled graphs (`--compiled graph`)
    eager      they are captured, and run as written (`--compiled eager`)

The bar: graph at most the staging budget above compiled. That is host memory; on a GPU it lies beside the training's.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ranktape.capture import Capture
from ranktape.errors import CaptureError

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 256, 4, 4, 16, 256
CAPTURED = (1, 2)
STEPS = 4
BUDGET_NBYTES = 512 * 2**20
WAYS = ("compiled", "twice", "idle", "graph", "eager")


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_up = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        parts = (part(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)  # type: ignore[misc]
        hidden = hidden + self.output(attended.flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norm_up(hidden))))  # type: ignore[no-any-return]


def train(way: str, folder: str) -> None:
    """Some steps; prints the loss of the last one, the bytes of a captured one, and the peak in KiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    context: Any = contextlib.nullcontext()
    losses = []
    if way not in {"compiled", "twice"}:
        url = f"{folder}/{way}"
        how, start = ("graph", STEPS) if way == "idle" else (way, CAPTURED[0])
        context = Capture(
            url,
            model=model,
            start_at=start,
            max_iterations=len(CAPTURED),
            min_iterations=1,
            compiled=how,
            host_budget_nbytes=BUDGET_NBYTES,
        )
    # An idle capture has nothing of its minimum at the end.
    unmet = contextlib.suppress(CaptureError)
    with unmet, contextlib.redirect_stderr(io.StringIO()), context as capture:
        for step in range(STEPS):
            if way == "twice" and step == CAPTURED[0]:
                # Else it would be the code that was compiled before.
                compiled = torch.compile(model, fullgraph=True, options={"fx_graph_cache": False})
            loss = compiled(torch.randn(BATCH, LENGTH, WIDTH)).square().mean()
            loss.backward()
            losses.append(float(loss).hex())
            optimizer.step()
            optimizer.zero_grad()
    nbytes = capture._predicted_nbytes if way in {"graph", "eager"} else 0
    print(losses[-1], nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def peak(way: str) -> tuple[str, int, float]:
    """Of one process: the last loss, the bytes of a captured step, and the peak in MB."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, way, folder]
        # With a cache of its own, so that each compiles all that it runs.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        environment["MALLOC_MMAP_THRESHOLD_"] = str(128 * 1024)
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    loss, nbytes, kibibytes = done.stdout.split()
    return loss, int(nbytes), int(kibibytes) * 1024 / 1e6


def main() -> None:
    """Run the ways one after the other, and print their peaks."""
    found = {way: peak(way) for way in WAYS}
    plain_loss, _, plain = found["compiled"]
    for way, (_, nbytes, megabytes) in found.items():
        more = megabytes - plain
        print(f"{way:>10}: {megabytes:,.0f} MB at the peak, {more:+,.0f} MB; {nbytes / 1e6:.0f} MB a captured step")
    print(f"bar: {BUDGET_NBYTES / 1e6:+,.0f} MB for graph")
    same = "the one" if found["graph"][0] == plain_loss else "not the one"
    print(f"the last loss of graph is {same} of compiled")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(*sys.argv[1:])
    else:
        main()
