"""The runs that the tests of recipes look at: linear layers with their products, and causes planted in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ranktape.storage import Run
from tests.analyze.runs import Tensor, describe_tensor, store

Array = np.ndarray[Any, Any]
Operands = dict[str, Array]
Cause = Callable[[int, Operands, np.random.Generator], None]
"""Changes the input [T, I], weight [O, I] and grad_output [T, O] of a layer in their place."""

NUM_TOKENS, NUM_INPUTS, NUM_OUTPUTS = 96, 128, 64
PLACES = {"input": "pre", "weight": "pre", "output": "post", "grad_output": "pre", "grad_input": "post"}


def nothing(layer: int, operands: Operands, rng: np.random.Generator) -> None:
    """Leaves all layers alike."""


def hot_channels(layer: int, operands: Operands, rng: np.random.Generator) -> None:  # noqa: ARG001 - a cause
    """Three channels of layer 3 are 20 times the others, and meet weights that are so much smaller."""
    if layer == 3:
        operands["input"][:, [5, 40, 77]] *= 20
        operands["weight"][:, [5, 40, 77]] /= 20


def small_gradients(layer: int, operands: Operands, rng: np.random.Generator) -> None:
    """In layer 2 one value of each token is 300 times the others, which a scale for each token makes 0 in 8 bits."""
    if layer == 2:
        small = np.ones((NUM_TOKENS, NUM_OUTPUTS), dtype=bool)
        small[np.arange(NUM_TOKENS), rng.permutation(np.arange(NUM_TOKENS) % NUM_OUTPUTS)] = False
        operands["grad_output"][small] /= 300


def cancelling_terms(layer: int, operands: Operands, rng: np.random.Generator) -> None:  # noqa: ARG001 - a cause
    """In layer 4 all channels have a mean that the weights, which have none, take away."""
    if layer == 4:
        operands["input"] += 3
        operands["weight"] -= operands["weight"].mean(axis=1, keepdims=True)


def linear_run(
    folder: Path, cause: Cause = nothing, *, num_layers: int = 6, num_ranks: int = 1, name: str = "query"
) -> Run:
    """A run of layers whose products are computed in bfloat16, in two iterations."""
    tensors: list[Tensor] = []
    for iteration in (0, 10):
        for rank in range(num_ranks):
            for layer in range(num_layers):
                rng = np.random.default_rng((iteration, rank, layer))
                operands = {
                    "input": rng.standard_normal((NUM_TOKENS, NUM_INPUTS)),
                    "weight": np.random.default_rng((9, layer)).standard_normal((NUM_OUTPUTS, NUM_INPUTS)) * 0.05,
                    "grad_output": rng.standard_normal((NUM_TOKENS, NUM_OUTPUTS)) * 1e-3,
                }
                cause(layer, operands, rng)
                place = {"iteration": iteration, "rank": rank, "layer_idx": layer}
                tensors += _tensors(operands, module=f"layers.{layer}.{name}", **place)
    return store(folder, tensors)


def _tensors(operands: Operands, **fields: Any) -> Iterator[Tensor]:
    x, w, g = (operands[name].astype(ml_dtypes.bfloat16).astype(np.float32) for name in operands)
    found = {"input": x, "weight": w, "output": x @ w.T, "grad_output": g, "grad_input": g @ w, "grad_weight": g.T @ x}
    for counter, (name, values) in enumerate(found.items()):
        yield describe_tensor(
            values.astype(ml_dtypes.bfloat16),
            layer_type="linear",
            tensor_name=name,
            operation="backward" if name.startswith("grad") else "forward",
            phase=PLACES.get(name, "post"),
            counter=fields["layer_idx"] * len(found) + counter,
            **fields,
        )
