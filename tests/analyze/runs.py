"""Which runs do the questions get asked of in tests?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ranktape.storage import Run, open_run
from ranktape.storage.format.record_info import RecordInfo
from tests.runs import describe, write_run

Tensor = tuple[np.ndarray[Any, Any], RecordInfo]

SITES = (
    ("linear", "forward", "pre", "input", 1.0),
    ("linear", "forward", "pre", "weight", 0.02),
    ("linear", "forward", "post", "output", 3.0),
    ("linear", "backward", "pre", "grad_output", 1e-4),
    ("linear", "backward", "post", "grad_weight", 1e-3),
    ("attention", "forward", "pre", "query", 2.0),
    ("attention", "forward", "post", "output", 0.5),
    ("attention", "backward", "pre", "grad_output", 1e-5),
    ("attention", "backward", "post", "grad_query", 1e-6),
)
"""What a layer leaves behind, and how large it is: type, operation, phase, name, standard deviation."""


def store(folder: Path, tensors: Sequence[Tensor], *, skipped_steps: Collection[int] = ()) -> Run:
    """A run of those tensors, every iteration complete; the steps of some iterations skipped."""
    num_ranks = 1 + max(info.rank for _, info in tensors)
    iterations = sorted({info.iteration for _, info in tensors})
    write_run(
        str(folder),
        {
            iteration: [
                [(array, info) for array, info in tensors if (info.iteration, info.rank) == (iteration, rank)]
                for rank in range(num_ranks)
            ]
            for iteration in iterations
        },
        skipped_steps=skipped_steps,
    )
    return open_run(folder)


def model_tensors(
    *, num_layers: int = 2, num_ranks: int = 1, iterations: Iterable[int] = (0,), seed: int = 0
) -> list[Tensor]:
    """What a small transformer in bfloat16 leaves behind."""
    rng = np.random.default_rng(seed)
    return [
        describe_tensor(
            (rng.standard_normal((4, 64)) * deviation * 1.1**layer).astype(ml_dtypes.bfloat16),
            iteration=iteration,
            rank=rank,
            layer_idx=layer,
            layer_type=layer_type,
            operation=operation,
            phase=phase,
            tensor_name=name,
        )
        for iteration in iterations
        for rank in range(num_ranks)
        for layer in range(num_layers)
        for layer_type, operation, phase, name, deviation in SITES
    ]


def describe_tensor(array: np.ndarray[Any, Any], **fields: Any) -> Tensor:
    """A tensor with an identity of its own: the module follows from the layer."""
    module = f"layers.{fields.get('layer_idx', 0)}.{fields.get('layer_type', 'linear')}"
    return array, describe(array, **({"module": module} | fields))
