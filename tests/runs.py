"""How do tests make a run without training: identities, tensors, commits?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.storage import Record, Records, Run, open_run, register
from ranktape.storage.format.attempt import Attempt, Launch
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.dtypes import dtype_name
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.start import begin_attempt
from ranktape.storage.recording.writer import RankWriter

Tensors = Iterable[tuple[np.ndarray[Any, Any], RecordInfo]]


def describe(array: np.ndarray[Any, Any], **fields: Any) -> RecordInfo:
    """The identity of an array; of a linear layer's input, where the fields do not say otherwise."""
    sample_dim = fields.get("sample_dim")
    values: dict[str, Any] = {
        "iteration": 0,
        "rank": 0,
        "attempt": 0,
        "microbatch": 0,
        "call": 0,
        "sample_dim": None,
        "sample_ids": None,
        "batch_size": None if sample_dim is None else array.shape[sample_dim],
        "module": "layers.0.query",
        "layer_type": "linear",
        "layer_idx": 0,
        "operation": "forward",
        "phase": "pre",
        "component": "linear",
        "quant_type": "bf16",
        "tensor_name": "input",
        "dtype": dtype_name(array.dtype),
        "shape": array.shape,
        "layout": "",
        "compute_dtype": dtype_name(array.dtype),
        "placement": None,
        "metadata": None,
        "overflow": measure(array, sample_dim=sample_dim),
        "counter": 0,
        "timestamp": 1.5,
        "nbytes": array.nbytes,
        "checksum": "",
    }
    return RecordInfo(**(values | fields))


def start(
    url: str | Path,
    *,
    world_size: int = 1,
    launch_id: str = "launch",
    restart: int = 0,
    min_iterations: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> tuple[Backend, Attempt, list[RankWriter]]:
    """A new attempt with the writers of all its ranks."""
    backend = open_backend(url, storage_options=storage_options)
    attempt = begin_attempt(
        backend,
        launch=Launch(launch_id=launch_id, restart=restart, world_size=world_size),
        options={"min_iterations": min_iterations},
        environment={"host": "test"},
        resume=resume,
        overwrite=overwrite,
    )
    writers = [RankWriter(backend, attempt=attempt, rank=rank, environment={}) for rank in range(world_size)]
    return backend, attempt, writers


def write_run(url: str | Path, iterations: dict[int, Sequence[Tensors]], *, skipped_steps: Collection[int] = ()) -> Run:
    """A run in which each iteration is complete: for each rank its tensors; the steps of some iterations skipped."""
    world_size = max(len(ranks) for ranks in iterations.values())
    backend, attempt, writers = start(url, world_size=world_size)
    for iteration, ranks in iterations.items():
        open_iteration(backend, attempt=attempt, iteration=iteration)
        for writer, tensors in zip(writers, ranks, strict=True):
            for array, info in tensors:
                writer.write(array, info=info)
            writer.commit(iteration, expected=[], silent_sites={}, step_skipped=iteration in skipped_steps)
        finish_iteration(backend, attempt=attempt, iteration=iteration)
    return open_run(url)


def complete(backend: Backend, attempt: Attempt, writers: Iterable[RankWriter], *, iteration: int = 0) -> Records:
    """Commit an iteration on all ranks and as a whole; the records that the run has then."""
    for writer in writers:
        writer.commit(iteration, expected=[], silent_sites={})
    finish_iteration(backend, attempt=attempt, iteration=iteration)
    return open_run(backend.url).select()


def zarr_array(record: Record) -> zarr.Array[Any]:
    """The array that holds a record of a run in a directory, as plain Zarr opens it."""
    register()
    return zarr.open_array(f"{record.reader.url}/{record.location.array_path}", mode="r")
