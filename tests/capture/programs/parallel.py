"""Trainings of one model under several kinds of parallelism, each without a capture and with one.

parallel.py OUT VARIANT...: every rank writes the exact bits of each training to OUT, and each capture its run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from ranktape.capture import Capture
from tests.capture.parallel_models import EXPERTS, OPTIONS, STEPS, Model, Recipe, train


def layers_of(model: Any) -> nn.ModuleList:
    """The stack of the plain model, or of one of Hugging Face's."""
    inner = getattr(model, "model", getattr(model, "transformer", model))
    return getattr(inner, "layers", getattr(inner, "h", None))  # type: ignore[return-value]


def shard_fully(model: nn.Module, *, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def split(model: Model, *, mesh: DeviceMesh) -> Model:
    """Columns, then rows; the heads of attention are shared out."""
    prefixes = [f"experts.{number}." for number in range(EXPERTS)] if hasattr(model.layers[0], "experts") else [""]
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": RowwiseParallel(),
        **{f"{prefix}up": ColwiseParallel() for prefix in prefixes},
        **{f"{prefix}down": RowwiseParallel() for prefix in prefixes},
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def split_llama(model: Any, *, mesh: DeviceMesh) -> nn.Module:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in layers_of(model):
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        parallelize_module(layer, mesh, plan | {name: RowwiseParallel() for name in rows})
    return model  # type: ignore[no-any-return]


def split_by_transformers(model: Any, *, mesh: DeviceMesh) -> nn.Module:
    """As `tp_plan="auto"` has it: in place of each layer's forward stands one that goes to DTensors and back."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    styles = {name: "rowwise" if name.endswith(("o_proj", "down_proj")) else "colwise" for name in names}
    plan = styles | {f"{name}.weight": style for name, style in styles.items()}
    return apply_tensor_parallelism(model, mesh, plan)  # type: ignore[no-any-return]


def split_sequence(model: Model, *, mesh: DeviceMesh) -> Model:
    """Between the blocks each rank has a piece of the sequence; into the linear layers go DTensors."""
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "attention_norm": SequenceParallel(),
        "attention": gather,
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def split_any(model: Any, *, mesh: DeviceMesh) -> nn.Module:
    return (split if isinstance(model, Model) else split_llama)(model, mesh=mesh)


def split_both(model: Any, *, mesh: DeviceMesh) -> nn.Module:
    return shard_fully(split_any(model, mesh=mesh["tp"]), mesh=mesh["dp"])


def synchronise_last(model: Any, is_last: bool) -> None:  # noqa: FBT001  (what the recipe calls)
    model.set_requires_gradient_sync(is_last)


def set_require_sync(model: Any, is_last: bool) -> None:  # noqa: FBT001  (what the recipe calls)
    model.require_backward_grad_sync = is_last


def recipe_of(variant: str) -> Recipe:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def flat(name: str) -> DeviceMesh:
        return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(name,))

    def grid(*names: str) -> DeviceMesh:
        return init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=names)

    def tp() -> Recipe:
        return Recipe(wrap=partial(split_any, mesh=flat("tp")))

    def fsdp_tp() -> Recipe:
        return Recipe(wrap=partial(split_both, mesh=grid("dp", "tp")), data_rank=rank // 2, set_last=synchronise_last)

    change = dataclasses.replace
    everything: dict[str, Any] = {"microbatches": 2, "is_checkpointed": True, "is_autocast": True}
    twice: dict[str, Any] = {"microbatches": 2, "is_checkpointed": True}
    ddp = Recipe(wrap=DistributedDataParallel, data_rank=rank, set_last=set_require_sync)
    fsdp = Recipe(wrap=shard_fully, data_rank=rank, set_last=synchronise_last)
    makers: dict[str, Callable[[], Recipe]] = {
        "ddp": lambda: change(ddp, microbatches=2),
        "ddp_all": lambda: change(ddp, **everything),
        "fsdp": lambda: change(fsdp, wrap=partial(shard_fully, mesh=flat("dp"))),
        "fsdp_kept": lambda: change(fsdp, wrap=partial(shard_fully, reshard_after_forward=False)),
        "fsdp_bf16": lambda: change(fsdp, wrap=partial(shard_fully, mp_policy=half)),
        "fsdp_accumulated": lambda: change(fsdp, microbatches=2),
        "fsdp_checkpointed": lambda: change(fsdp, is_checkpointed=True),
        "fsdp_all": lambda: change(fsdp, **everything),
        "hsdp": lambda: change(fsdp, wrap=partial(shard_fully, mesh=grid("replica", "shard"))),
        "tp": tp,
        "tp_auto": lambda: Recipe(wrap=partial(split_by_transformers, mesh=flat("tp"))),
        "tp_sequence": lambda: Recipe(wrap=partial(split_sequence, mesh=flat("tp")), microbatches=2),
        "tp_twice": lambda: change(tp(), **twice),
        "tp_all": lambda: change(tp(), **everything),
        "fsdp_tp": fsdp_tp,
        "fsdp_tp_twice": lambda: change(fsdp_tp(), **twice),
        "fsdp_tp_all": lambda: change(fsdp_tp(), **everything),
    }
    kind, _, way = variant.rpartition("-")
    return dataclasses.replace(makers[way](), kind=kind) if kind else makers[variant]()


def main(out: Path, variants: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for variant in variants:
        recipe = recipe_of(variant)
        plain = train(recipe, capture=None)
        capture = Capture(out / f"{variant}.run", min_iterations=STEPS, with_master=True, **OPTIONS)
        captured = train(recipe, capture=capture)
        if not (verdict := capture.close()).met:
            sys.exit(f"{variant}: {verdict.message()}")
        (out / f"{variant}.rank{rank}.json").write_text(json.dumps({"plain": plain, "captured": captured}))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
