"""Which model do the tests of parallel trainings train, and how is it split over ranks?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from tests.capture.hugging_face import tiny
from tests.exhaustive import exhaustive

WIDTH = 16
HEADS = 4
HEAD_WIDTH = WIDTH // HEADS
BATCH = 3
LENGTH = 8
VOCABULARY = 32
EXPERTS = 6
STEPS = 2
OPTIONS: dict[str, Any] = {"host_budget_nbytes": 32 << 20, "layers": "all", "select": "layer_type=linear,attention"}
"""Of every capture."""


class Attention(nn.Module):
    """Heads are counted by what the projections give: a rank may have some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length = hidden.shape[:2]
        query, key, value = (
            part(hidden).view(batch, length, -1, HEAD_WIDTH).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))  # type: ignore[no-any-return]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(tokens)))  # type: ignore[no-any-return]


class MixtureBlock(nn.Module):
    """Each token goes to one expert: some get many, some few, some none."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        tokens = self.norm(hidden).flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            [own] = torch.where(chosen == number)
            mixed = mixed.index_add(0, own, (expert(tokens[own]) * share[own, None]).to(mixed.dtype))
        return hidden + mixed.view_as(hidden)


class Model(nn.Module):
    """Two blocks between two linear layers; with `is_checkpointed`, each block is computed twice."""

    def __init__(self, block: type[nn.Module] = Block, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2 * WIDTH + 1, bias=False)  # not divisible: shards of two lengths
        self.is_checkpointed = is_checkpointed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(hidden)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.is_checkpointed else layer(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is made parallel, and trained."""

    kind: str = "plain"
    """Which model: plain, moe, llama, or gpt2."""
    wrap: Callable[[Any], nn.Module] = field(default=lambda model: model)
    """Makes the model parallel."""
    data_rank: int = 0
    """Which batches this rank trains with."""
    microbatches: int = 1
    """Passes in a step."""
    is_checkpointed: bool = False
    """Whether blocks are computed again in the backward pass."""
    is_autocast: bool = False
    """Whether products are computed in bfloat16."""
    set_last: Callable[[nn.Module, bool], None] = field(default=lambda *_: None)
    """Told before each pass whether it is the step's last."""


def make_model(kind: str, *, is_checkpointed: bool = False) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    if takes_vectors(kind):
        return Model(Block if kind == "plain" else MixtureBlock, is_checkpointed=is_checkpointed)
    model = tiny(HUGGING_FACE[kind], vocab_size=VOCABULARY, tie_word_embeddings=False, use_cache=False)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


HUGGING_FACE = {"llama": "Llama", "gpt2": "GPT2"}


def takes_vectors(kind: str) -> bool:
    """Whether a model is given vectors, not the numbers of tokens."""
    return kind in {"plain", "moe"}


def batch_of(kind: str, *, step: int, data_rank: int, microbatch: int) -> torch.Tensor:
    """What is trained with."""
    generator = torch.Generator().manual_seed(1 + microbatch + 10 * data_rank + 100 * step)
    if takes_vectors(kind):
        return torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def train(recipe: Recipe, *, capture: Capture | None) -> list[str]:
    """Train; every loss, gradient and weight of this rank, in their exact bits."""
    model = recipe.wrap(make_model(recipe.kind, is_checkpointed=recipe.is_checkpointed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    bits: list[str] = []
    with capture or _nothing():
        for step in range(STEPS):
            optimizer.zero_grad()
            for microbatch in range(recipe.microbatches):
                recipe.set_last(model, microbatch == recipe.microbatches - 1)
                batch = batch_of(recipe.kind, step=step, data_rank=recipe.data_rank, microbatch=microbatch)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.is_autocast):
                    output = model(batch)
                loss = getattr(output, "logits", output).float().square().mean()
                loss.backward()
                bits.append(loss.item().hex())
            bits.extend(_bits(parameter.grad) for parameter in model.parameters())
            optimizer.step()
        bits.extend(_bits(parameter) for parameter in model.parameters())
    return bits


def _bits(tensor: torch.Tensor | None) -> str:
    assert tensor is not None
    local = getattr(tensor, "_local_tensor", tensor).detach()
    return local.contiguous().view(torch.uint8).numpy().tobytes().hex()[:4096]


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


FEW = {"ddp", "fsdp", "fsdp_kept", "hsdp", "tp", "tp_sequence", "fsdp_tp", "moe-fsdp"}
"""What `make test` trains: each way of being parallel once at least; the others are pairs of a way and a model."""

MODEL = ("linear", "attention", "layer outputs", "unchanged", "assembly")
SEVERAL = (*MODEL, "accumulation")
TWICE = (*SEVERAL, "checkpointing")
ALL = (*TWICE, "autocast")

support = pytest.mark.support

VARIANTS: dict[str, pytest.MarkDecorator] = {
    "ddp": support(framework="PyTorch", parallelism="DDP", features=SEVERAL),
    "ddp_all": support(framework="PyTorch", parallelism="DDP", features=ALL),
    "fsdp": support(framework="PyTorch", parallelism="FSDP2", features=MODEL),
    "fsdp_kept": support(framework="PyTorch", parallelism="FSDP2", features=MODEL),
    "fsdp_bf16": support(framework="PyTorch", parallelism="FSDP2", features=MODEL),
    "fsdp_accumulated": support(framework="PyTorch", parallelism="FSDP2", features=SEVERAL),
    "fsdp_checkpointed": support(framework="PyTorch", parallelism="FSDP2", features=(*MODEL, "checkpointing")),
    "fsdp_all": support(framework="PyTorch", parallelism="FSDP2", features=ALL),
    "hsdp": support(framework="PyTorch", parallelism="FSDP2", features=MODEL),
    "tp": support(framework="PyTorch", parallelism="TP", features=MODEL),
    "tp_sequence": support(framework="PyTorch", parallelism="TP", features=SEVERAL),
    "tp_all": support(framework="PyTorch", parallelism="TP", features=ALL),
    "fsdp_tp": support(framework="PyTorch", parallelism="FSDP2 x TP", features=MODEL),
    "fsdp_tp_all": support(framework="PyTorch", parallelism="FSDP2 x TP", features=ALL),
    "llama-ddp": support(framework="HF Llama", parallelism="DDP", features=SEVERAL),
    "llama-ddp_all": support(framework="HF Llama", parallelism="DDP", features=ALL),
    "llama-fsdp": support(framework="HF Llama", parallelism="FSDP2", features=MODEL),
    "llama-fsdp_all": support(framework="HF Llama", parallelism="FSDP2", features=ALL),
    "llama-tp": support(framework="HF Llama", parallelism="TP", features=MODEL),
    "llama-tp_auto": support(framework="HF Llama", parallelism="TP", features=MODEL),
    "llama-tp_all": support(framework="HF Llama", parallelism="TP", features=ALL),
    "llama-fsdp_tp": support(framework="HF Llama", parallelism="FSDP2 x TP", features=MODEL),
    "llama-fsdp_tp_all": support(framework="HF Llama", parallelism="FSDP2 x TP", features=ALL),
    "gpt2-ddp": support(framework="HF GPT-2", parallelism="DDP", features=SEVERAL),
    "gpt2-ddp_all": support(framework="HF GPT-2", parallelism="DDP", features=ALL),
    "gpt2-fsdp": support(framework="HF GPT-2", parallelism="FSDP2", features=MODEL),
    "gpt2-fsdp_all": support(framework="HF GPT-2", parallelism="FSDP2", features=ALL),
    "moe-ddp": support(framework="MoE", parallelism="DDP", features=SEVERAL),
    "moe-ddp_all": support(framework="MoE", parallelism="DDP", features=ALL),
    "moe-fsdp": support(framework="MoE", parallelism="FSDP2", features=MODEL),
    "moe-fsdp_all": support(framework="MoE", parallelism="FSDP2", features=ALL),
    "moe-tp_twice": support(framework="MoE", parallelism="TP", features=TWICE),
    "moe-fsdp_tp_twice": support(framework="MoE", parallelism="FSDP2 x TP", features=TWICE),
}

# Where ranks add up in bfloat16, tokens go to other experts than in one process: there is nothing to compare them with.
NOT_COMPARED: dict[str, pytest.MarkDecorator] = {
    "moe-tp_all": support(framework="MoE", parallelism="TP", features=("autocast",)),
    "moe-fsdp_tp_all": support(framework="MoE", parallelism="FSDP2 x TP", features=("autocast",)),
}


def way_of(variant: str) -> str:
    """How it is parallel."""
    return variant.rpartition("-")[2]


def kind_of(variant: str) -> str:
    """Which model it trains."""
    return variant.rpartition("-")[0] or "plain"


def num_ranks_of(variant: str) -> int:
    """How many ranks train it."""
    return 4 if way_of(variant).startswith(("fsdp_tp", "hsdp")) else 2


def data_rank_of(variant: str, rank: int) -> int:
    """Which batches a rank trains with."""
    way = way_of(variant)
    return 0 if way.startswith("tp") else rank // 2 if way.startswith("fsdp_tp") else rank


def num_microbatches_of(variant: str) -> int:
    """Of a step."""
    is_several = way_of(variant) in {"ddp", "fsdp_accumulated", "tp_sequence"}
    return 2 if is_several or variant.endswith(("_all", "_twice")) else 1


def is_autocast(variant: str) -> bool:
    """Whether it computes in bfloat16, out of float32."""
    return variant.endswith("_all")


def proving(variants: dict[str, pytest.MarkDecorator], *features: str) -> list[Any]:
    """The variants for a test that proves these features alone of each."""
    found = []
    for variant, mark in variants.items():
        own = tuple(feature for feature in mark.kwargs["features"] if feature in features)
        marks = [support.with_args(**{**mark.kwargs, "features": own})]
        if variant not in FEW:
            marks.append(exhaustive("its way of being parallel is in make test, with another model"))
        found.append(pytest.param(variant, marks=marks))
    return found


def started_with(variant: str) -> tuple[str, ...]:
    """What the program trains in one start: all variants of as many ranks that run in the same target of make."""
    return tuple(
        name
        for name in (*VARIANTS, *NOT_COMPARED)
        if num_ranks_of(name) == num_ranks_of(variant) and (name in FEW) == (variant in FEW)
    )
