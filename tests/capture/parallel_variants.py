"""Which variants of parallel training do the tests run, and what does each of them prove?

A variant is a way of being parallel (`programs/parallel.py`), with the kind of model before it. A way that ends with
`_all` has several microbatches, checkpoints and autocast; one that ends with `_twice` has no autocast.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.exhaustive import exhaustive

FEW = {
    *("ddp", "fsdp", "fsdp_kept", "fsdp_all", "hsdp", "tp", "tp_sequence", "fsdp_tp", "fsdp_tp_all"),
    *("llama-ddp_all", "llama-tp_auto", "gpt2-fsdp", "moe-fsdp", "moe-tp_twice"),
}
"""What `make test` trains: each way of being parallel, and each model, once at least; the others are pairs of these."""

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
            marks.append(exhaustive("its model and its way of being parallel are in make test, each with another"))
        found.append(pytest.param(variant, marks=marks))
    return found


def started_with(variant: str) -> tuple[str, ...]:
    """What the program trains in one start: all variants of as many ranks that run in the same target of make."""
    return tuple(
        name
        for name in (*VARIANTS, *NOT_COMPARED)
        if num_ranks_of(name) == num_ranks_of(variant) and (name in FEW) == (variant in FEW)
    )
