"""Two stages of a model, each on a rank, under a schedule of torch: without a capture, and with one.

Every rank writes the exact bits of each training, and each capture its run. The stages are cut by hand, as
users cut models: the first has the embedding, the last the norm and the head, and layers keep their numbers. A
variant is a kind of model; with -all it has checkpoints and autocast.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from tests.capture.parallel_models import LENGTH, OPTIONS, STEPS, batch_of, make_model, takes_vectors

MICROBATCHES = 3


class Stage(nn.Module):
    """One layer, and what comes before or after it."""

    def __init__(self, kind: str, *, idx: int, is_checkpointed: bool) -> None:
        super().__init__()
        whole: Any = make_model(kind)
        inner = getattr(whole, "model", getattr(whole, "transformer", whole))
        stack = getattr(inner, "h", None) or inner.layers
        self.idx, self.kind, self.is_checkpointed = idx, kind, is_checkpointed
        self.layers = nn.ModuleDict({str(idx): stack[idx]})
        self.rotary = inner.rotary_emb if kind == "llama" else None
        if idx == 0:
            names = {"llama": "embed_tokens", "gpt2": "wte"}
            self.embed = getattr(inner, names.get(kind, "embed"))
            self.positions = inner.wpe if kind == "gpt2" else None
        else:
            self.norm = inner.ln_f if kind == "gpt2" else inner.norm
            self.head = whole.head if takes_vectors(kind) else whole.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH).unsqueeze(0)
        if self.idx == 0:
            hidden = self.embed(hidden)
            hidden = hidden if self.positions is None else hidden + self.positions(positions)
        layer = self.layers[str(self.idx)]
        given = {} if self.rotary is None else {"position_embeddings": self.rotary(hidden, position_ids=positions)}
        if self.is_checkpointed:
            hidden = checkpoint(layer, hidden, use_reentrant=False, **given)
        else:
            hidden = layer(hidden, **given)
        return self.head(self.norm(hidden)) if self.idx else hidden


def loss_of(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Of a microbatch."""
    return output.float().square().mean()


def train(variant: str, *, capture: Capture | None) -> list[str]:
    """Train; every loss, gradient and weight of this rank, in their exact bits."""
    kind, _, suffix = variant.partition("-")
    rank = dist.get_rank()
    model = Stage(kind, idx=rank, is_checkpointed=bool(suffix))
    stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bits: list[str] = []
    if capture is not None:
        capture.__enter__()
    for step in range(STEPS):
        parts = [batch_of(kind, step=step, data_rank=0, microbatch=number) for number in range(MICROBATCHES)]
        losses: list[torch.Tensor] = []
        given: dict[str, Any] = {"target": torch.zeros(len(torch.cat(parts))), "losses": losses} if rank else {}
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(suffix)):
            schedule.step(*([] if rank else [torch.cat(parts)]), **given)
        bits += [bits_of(tensor) for tensor in (*losses, *(parameter.grad for parameter in model.parameters()))]
        optimizer.step()
    bits += [bits_of(parameter) for parameter in model.parameters()]
    if capture is not None:
        capture.close()
    return bits


def bits_of(tensor: torch.Tensor | None) -> str:
    assert tensor is not None
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def main(out: Path, variants: Sequence[str]) -> None:
    for variant in variants:
        plain = train(variant, capture=None)
        captured = train(variant, capture=Capture(out / f"{variant}.run", min_iterations=STEPS, **OPTIONS))
        document = json.dumps({"plain": plain, "captured": captured})
        (out / f"{variant}.rank{dist.get_rank()}.json").write_text(document)
        dist.barrier()
