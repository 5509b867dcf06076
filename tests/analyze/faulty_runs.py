"""The runs that the tests of findings look at: a small model that is really computed, with faults planted into it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ranktape.storage import Run
from tests.analyze.runs import Tensor, describe_tensor, store

Array = np.ndarray[Any, Any]
Place = tuple[int, int, int, str]
"""Iteration, rank, layer and name of a tensor."""
Fault = Callable[[Place, Array], Array]
"""Gives a tensor back as it is computed with, changed at its place and as it is elsewhere."""

NUM_SAMPLES, NUM_TOKENS, NUM_CHANNELS = 6, 8, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large a run is."""

    num_ranks: int = 2
    num_layers: int = 3
    iterations: Iterable[int] = (0, 10, 20)
    dtype: Any = ml_dtypes.bfloat16
    gradient: float = 1e-4
    """How large the gradient of the last layer is."""


def healthy(place: Place, tensor: Array) -> Array:  # noqa: ARG001 - the signature of a fault
    """The tensor as it is."""
    return tensor


def all_faults(*faults: Fault) -> Fault:
    """Several faults in one run."""

    def both(place: Place, tensor: Array) -> Array:
        for fault in faults:
            tensor = fault(place, tensor)
        return tensor

    return both


def cast(dtype: Any, *, layers: Collection[int], scale: float = 1.0) -> Fault:
    """Gradients of outputs in another type: what is below its smallest number becomes zero."""

    def fault(place: Place, tensor: Array) -> Array:
        if place[3] != "grad_output" or place[2] not in layers:
            return tensor
        rounded = (tensor.astype(np.float64) * scale).astype(dtype).astype(np.float64) / scale
        return rounded.astype(tensor.dtype)

    return fault


def everywhere(layer: int, *, name: str = "weight", factor: float) -> Fault:
    """One tensor of one layer times a factor, on all ranks."""

    def fault(place: Place, tensor: Array) -> Array:
        if place[2:] != (layer, name):
            return tensor
        return (tensor.astype(np.float64) * factor).astype(tensor.dtype)

    return fault


def faulty_run(
    folder: Path,
    fault: Fault = healthy,
    *,
    sizes: Sizes | None = None,
    seed: int = 0,
    skipped_steps: Collection[int] = (),
) -> Run:
    """A run of data parallel ranks: weights are copies, batches are not; a scaler skipped the steps of iterations."""
    chosen = sizes or Sizes()
    tensors: list[Tensor] = []
    for iteration in chosen.iterations:
        for rank in range(chosen.num_ranks):
            tensors += _iteration(iteration, rank, fault, sizes=chosen, seed=seed)
    return store(folder, tensors, skipped_steps=skipped_steps)


def _iteration(iteration: int, rank: int, fault: Fault, *, sizes: Sizes, seed: int) -> list[Tensor]:
    """What one rank records of one iteration."""
    found: list[Tensor] = []

    def seen(layer: int, name: str, values: Array) -> Array:
        changed = fault((iteration, rank, layer, name), values.astype(sizes.dtype))
        is_backward, is_weight = name.startswith("grad"), name.endswith("weight")
        array, info = describe_tensor(
            changed,
            iteration=iteration,
            rank=rank,
            layer_idx=layer,
            tensor_name=name,
            operation="backward" if is_backward else "forward",
            phase="post" if name in {"output", "grad_input", "grad_weight"} else "pre",
            sample_dim=None if is_weight else 0,
            counter=len(found),
        )
        found.append((array, info))
        return changed.astype(np.float64)

    with np.errstate(invalid="ignore"):  # of infinities that were planted
        _passes(seen, batch=np.random.default_rng((seed, iteration, rank)), iteration=iteration, sizes=sizes, seed=seed)
    return found


def _passes(
    seen: Callable[[int, str, Array], Array],
    *,
    batch: np.random.Generator,
    iteration: int,
    sizes: Sizes,
    seed: int,
) -> None:
    """Forward and backward through layers x + tanh(norm(x) W); gradients do not go through the norm."""
    model = np.random.default_rng(seed)
    x = batch.standard_normal((NUM_SAMPLES, NUM_TOKENS, NUM_CHANNELS))
    kept = []
    for layer in range(sizes.num_layers):
        steps = model.standard_normal((2, NUM_CHANNELS, NUM_CHANNELS)) / NUM_CHANNELS**0.5
        inner = seen(layer, "input", x / np.sqrt((x**2).mean(axis=-1, keepdims=True)))
        weight = seen(layer, "weight", steps[0] + 1e-3 * iteration * steps[1])
        output = seen(layer, "output", inner @ weight)
        kept.append((inner, weight, output))
        x = x + np.tanh(output)
    grad = x * sizes.gradient
    for layer, (inner, weight, output) in reversed(list(enumerate(kept))):
        grad_output = seen(layer, "grad_output", grad / np.cosh(np.clip(output, -20, 20)) ** 2)
        tokens, grads = (one.reshape(-1, NUM_CHANNELS) for one in (inner, grad_output))
        seen(layer, "grad_weight", tokens.T @ grads)
        grad = grad + seen(layer, "grad_input", grad_output @ weight.T)
