"""How does a test get a run to analyse? It writes one, with the storage's own writer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ranktape.analyze.histogram import measure
from ranktape.storage import Run, open_run
from ranktape.storage.attempt import Launch
from ranktape.storage.backend import open_backend
from ranktape.storage.dtypes import dtype_name
from ranktape.storage.progress import finish_iteration, open_iteration
from ranktape.storage.record import RecordInfo
from ranktape.storage.start import begin_attempt
from ranktape.storage.writer import RankWriter

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor to store."""

    values: NDArray[Any]
    """What it holds."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What of its identity differs from `IDENTITY`."""


IDENTITY: dict[str, Any] = {
    "iteration": 0,
    "rank": 0,
    "attempt": 0,
    "microbatch": 0,
    "call": 0,
    "sample_dim": None,
    "sample_ids": None,
    "batch_size": None,
    "module": "layers.0.linear",
    "layer_type": "linear",
    "layer_idx": 0,
    "operation": "forward",
    "phase": "pre",
    "component": "linear",
    "quant_type": "bf16",
    "tensor_name": "input",
    "layout": "",
    "placement": None,
    "counter": 0,
    "timestamp": 0.0,
    "checksum": "",
    "metadata": {},
}
"""A record's identity where a test does not care."""


def record_info(tensor: Tensor) -> RecordInfo:
    """The identity of a tensor as the writer process makes it."""
    values = {**IDENTITY, **tensor.fields}
    dtype = dtype_name(tensor.values.dtype)
    return RecordInfo(
        **{"compute_dtype": dtype, **values},
        dtype=dtype,
        shape=tensor.values.shape,
        overflow=measure(tensor.values, sample_dim=values["sample_dim"]),
        nbytes=tensor.values.nbytes,
    )


def write_run(folder: Path, tensors: Iterable[Tensor]) -> Run:
    """Store the tensors as a run of complete iterations."""
    infos = [(tensor.values, record_info(tensor)) for tensor in tensors]
    num_ranks = 1 + max(info.rank for _, info in infos)
    backend = open_backend(folder)
    attempt = begin_attempt(
        backend,
        launch=Launch(launch_id="test", restart=0, world_size=num_ranks),
        options={"min_iterations": 1},
        environment={},
        resume=False,
        overwrite=False,
    )
    writers = [RankWriter(backend, attempt=attempt, rank=rank, environment={}) for rank in range(num_ranks)]
    for iteration in sorted({info.iteration for _, info in infos}):
        open_iteration(backend, attempt=attempt.number, iteration=iteration)
        for rank, writer in enumerate(writers):
            for values, info in infos:
                if (info.iteration, info.rank) == (iteration, rank):
                    writer.write(values, info=info)
            writer.commit(iteration, expected=[], silent_sites={})
        finish_iteration(backend, attempt=attempt, iteration=iteration)
    return open_run(folder)


def model_tensors(
    *, num_layers: int, num_ranks: int = 1, iterations: Iterable[int] = (0,), seed: int = 0
) -> list[Tensor]:
    """What a small transformer in bfloat16 leaves behind: activations near 1, weights near 0.02, tiny gradients."""
    rng = np.random.default_rng(seed)
    sites = [
        ("linear", "forward", "pre", "input", 1.0),
        ("linear", "forward", "pre", "weight", 0.02),
        ("linear", "forward", "post", "output", 3.0),
        ("linear", "backward", "pre", "grad_output", 1e-4),
        ("linear", "backward", "post", "grad_weight", 1e-3),
        ("attention", "forward", "pre", "query", 2.0),
        ("attention", "forward", "post", "output", 0.5),
        ("attention", "backward", "pre", "grad_output", 1e-5),
        ("attention", "backward", "post", "grad_query", 1e-6),
    ]
    return [
        Tensor(
            values=(rng.standard_normal((4, 64)) * scale * 1.1**layer).astype(ml_dtypes.bfloat16),
            fields={
                "iteration": iteration,
                "rank": rank,
                "layer_idx": layer,
                "module": f"layers.{layer}.{layer_type}",
                "layer_type": layer_type,
                "operation": operation,
                "phase": phase,
                "tensor_name": name,
                "component": "FA" if layer_type == "attention" else "linear",
            },
        )
        for iteration in iterations
        for rank in range(num_ranks)
        for layer in range(num_layers)
        for layer_type, operation, phase, name, scale in sites
    ]
