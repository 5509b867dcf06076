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
ALL = (*MODEL, "accumulation", "checkpointing", "autocast")

support = pytest.mark.support

VARIANTS: list[Any] = [
    pytest.param("ddp", marks=support(framework="PyTorch", parallelism="DDP", features=(*MODEL, "accumulation"))),
    pytest.param("ddp_all", marks=support(framework="PyTorch", parallelism="DDP", features=ALL)),
    pytest.param("fsdp", marks=support(framework="PyTorch", parallelism="FSDP2", features=MODEL)),
    pytest.param("fsdp_kept", marks=support(framework="PyTorch", parallelism="FSDP2", features=MODEL)),
    pytest.param("fsdp_bf16", marks=support(framework="PyTorch", parallelism="FSDP2", features=MODEL)),
    pytest.param(
        "fsdp_accumulated",
        marks=support(framework="PyTorch", parallelism="FSDP2", features=(*MODEL, "accumulation")),
    ),
    pytest.param(
        "fsdp_checkpointed",
        marks=support(framework="PyTorch", parallelism="FSDP2", features=(*MODEL, "checkpointing")),
    ),
    pytest.param("fsdp_all", marks=support(framework="PyTorch", parallelism="FSDP2", features=ALL)),
    pytest.param("hsdp", marks=support(framework="PyTorch", parallelism="FSDP2", features=MODEL)),
    pytest.param("tp", marks=support(framework="PyTorch", parallelism="TP", features=MODEL)),
    pytest.param(
        "tp_sequence", marks=support(framework="PyTorch", parallelism="TP", features=(*MODEL, "accumulation"))
    ),
    pytest.param("tp_all", marks=support(framework="PyTorch", parallelism="TP", features=ALL)),
    pytest.param("fsdp_tp", marks=support(framework="PyTorch", parallelism="FSDP2 x TP", features=MODEL)),
    pytest.param("fsdp_tp_all", marks=support(framework="PyTorch", parallelism="FSDP2 x TP", features=ALL)),
    pytest.param(
        "llama-ddp", marks=support(framework="HF Llama", parallelism="DDP", features=(*MODEL, "accumulation"))
    ),
    pytest.param("llama-ddp_all", marks=support(framework="HF Llama", parallelism="DDP", features=ALL)),
    pytest.param("llama-fsdp", marks=support(framework="HF Llama", parallelism="FSDP2", features=MODEL)),
    pytest.param("llama-fsdp_all", marks=support(framework="HF Llama", parallelism="FSDP2", features=ALL)),
    pytest.param("llama-tp", marks=support(framework="HF Llama", parallelism="TP", features=MODEL)),
    pytest.param("llama-tp_auto", marks=support(framework="HF Llama", parallelism="TP", features=MODEL)),
    pytest.param("llama-tp_all", marks=support(framework="HF Llama", parallelism="TP", features=ALL)),
    pytest.param("llama-fsdp_tp", marks=support(framework="HF Llama", parallelism="FSDP2 x TP", features=MODEL)),
    pytest.param("llama-fsdp_tp_all", marks=support(framework="HF Llama", parallelism="FSDP2 x TP", features=ALL)),
    pytest.param("gpt2-ddp", marks=support(framework="HF GPT-2", parallelism="DDP", features=(*MODEL, "accumulation"))),
    pytest.param("gpt2-ddp_all", marks=support(framework="HF GPT-2", parallelism="DDP", features=ALL)),
    pytest.param("gpt2-fsdp", marks=support(framework="HF GPT-2", parallelism="FSDP2", features=MODEL)),
    pytest.param("gpt2-fsdp_all", marks=support(framework="HF GPT-2", parallelism="FSDP2", features=ALL)),
    pytest.param("moe-ddp", marks=support(framework="MoE", parallelism="DDP", features=(*MODEL, "accumulation"))),
    pytest.param("moe-ddp_all", marks=support(framework="MoE", parallelism="DDP", features=ALL)),
    pytest.param("moe-fsdp", marks=support(framework="MoE", parallelism="FSDP2", features=MODEL)),
    pytest.param("moe-fsdp_all", marks=support(framework="MoE", parallelism="FSDP2", features=ALL)),
    pytest.param(
        "moe-tp_twice",
        marks=support(framework="MoE", parallelism="TP", features=(*MODEL, "accumulation", "checkpointing")),
    ),
    pytest.param(
        "moe-fsdp_tp_twice",
        marks=support(framework="MoE", parallelism="FSDP2 x TP", features=(*MODEL, "accumulation", "checkpointing")),
    ),
]

# Where ranks add up in bfloat16, tokens go to other experts than in one process: there is nothing to compare them with.
NOT_COMPARED: list[Any] = [
    pytest.param("moe-tp_all", marks=support(framework="MoE", parallelism="TP", features=("autocast",))),
    pytest.param("moe-fsdp_tp_all", marks=support(framework="MoE", parallelism="FSDP2 x TP", features=("autocast",))),
]


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


def proving(variants: list[Any], *features: str) -> list[Any]:
    """The variants for a test that proves these features alone of each."""
    found = []
    for param in variants:
        [mark] = param.marks
        own = tuple(feature for feature in mark.kwargs["features"] if feature in features)
        marks = [support.with_args(**{**mark.kwargs, "features": own})]
        if param.values[0] not in FEW:
            marks.append(exhaustive("its model and its way of being parallel are in make test, each with another"))
        found.append(pytest.param(*param.values, marks=marks))
    return found


def started_with(variant: str) -> tuple[str, ...]:
    """What the program trains in one start: all variants of as many ranks that run in the same target of make."""
    names = [param.values[0] for param in (*VARIANTS, *NOT_COMPARED)]
    return tuple(
        name for name in names if num_ranks_of(name) == num_ranks_of(variant) and (name in FEW) == (variant in FEW)
    )
