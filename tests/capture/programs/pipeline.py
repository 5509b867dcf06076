"""Pipelines of two ranks, under several schedules, that capture themselves: an iteration each, all in one run.

pipeline.py OUT URL: every rank writes whether its losses and gradients were those without capture. After these, whole
models in two stages (`pipeline_models.py`), each in a run of its own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture

WIDTH = 8
BATCH = 8
MICROBATCHES = 4
STEPS = 2


def attend(hidden: torch.Tensor) -> torch.Tensor:
    """Attention among the features of each sample: two heads, two tokens."""
    query = hidden.view(-1, 2, 2, WIDTH // 4)
    return F.scaled_dot_product_attention(query, query, query).flatten(1)


class GlobalStage(nn.Module):
    """Layers under the names that they have in the whole model."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(WIDTH, WIDTH) for index in range(first, first + 2)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            hidden = torch.tanh(layer(hidden))
        return attend(hidden)


class CheckpointedStage(GlobalStage):
    """The same, recomputed in the backward pass, when later microbatches have gone forward."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return checkpoint(super().forward, hidden, use_reentrant=True)


def numbered_from_zero(_: int) -> nn.Module:
    """Layers that have the same names in every stage."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


KINDS: dict[str, tuple[str, Callable[[int], nn.Module], int]] = {
    "gpipe": ("ScheduleGPipe", GlobalStage, 1),
    "1f1b": ("Schedule1F1B", CheckpointedStage, 1),
    "interleaved": ("ScheduleInterleaved1F1B", numbered_from_zero, 2),
    "zero bubble": ("ScheduleInterleavedZeroBubble", numbered_from_zero, 2),
}
"""Schedules, their stages, and how many of them each rank has."""


def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def train(kind: str, *, after_step: Callable[[], None] = lambda: None) -> str:
    """Some steps under a schedule; a digest of the losses and weights of this rank."""
    # Loaded only now: a capture that began before must notice it, in the middle of the first rehearsal.
    from torch.distributed import pipelining

    schedule_name, make_stage, num_local = KINDS[kind]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    indexes = [rank + place * num_ranks for place in range(num_local)]
    modules = [make_stage(2 * index) for index in indexes]
    # Told the shapes, a schedule does not rehearse; torch's rehearsal cannot differentiate a reentrant checkpoint.
    shape = torch.zeros(BATCH // MICROBATCHES, WIDTH, requires_grad=True)
    told: dict[str, Any] = (
        dict.fromkeys(("input_args", "output_args", "output_grads", "input_grads"), shape)
        if make_stage is CheckpointedStage
        else {}
    )
    stages = [
        pipelining.PipelineStage(module, index, num_local * num_ranks, torch.device("cpu"), **told)
        for module, index in zip(modules, indexes, strict=True)
    ]
    schedule = getattr(pipelining, schedule_name)(
        stages if num_local > 1 else stages[0], MICROBATCHES, loss_fn=loss_function
    )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    digest = hashlib.sha256()
    torch.manual_seed(7)
    for _ in range(STEPS):
        inputs, target = torch.randn(BATCH, WIDTH, requires_grad=True), torch.randn(BATCH, WIDTH)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = {"target": target, "losses": losses} if rank == num_ranks - 1 else {}
        schedule.step(*([inputs] if rank == 0 else []), **given)
        optimizer.step()
        after_step()
        for tensor in (*losses, *parameters):
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    out, url = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    with Capture(url, advance_on="step", min_iterations=STEPS * len(KINDS)) as capture:
        capture.set_sample_ids(range(BATCH))
        captured = [train(kind, after_step=capture.step) for kind in KINDS]
    same = [train(kind) == digest for kind, digest in zip(KINDS, captured, strict=True)]
    (out / f"rank{dist.get_rank()}").write_text(str(same))
    # Loaded only now, as it loads torch's pipelines.
    from tests.capture.programs import pipeline_models

    pipeline_models.main(out, sys.argv[3:])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
