"""What do an encoder and a decoder leave behind, whose layers have the same numbers and other values?"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.analyze.runs import SITES, Tensor, describe_tensor

STACKS = ("encoder.block", "decoder.block")
"""The lists that hold the layers."""


def stacked_tensors(*, num_layers: int = 3, iterations: int = 2, factor: float = 64.0) -> list[Tensor]:
    """The tensors of each stack, the second of which has values so many times as large, and of a head."""
    rng = np.random.default_rng(5)
    tensors: list[Tensor] = []
    for iteration in range(iterations):
        for stack, times in zip(STACKS, (1.0, factor), strict=True):
            for layer in range(num_layers):
                for layer_type, operation, phase, name, deviation in SITES:
                    values = rng.standard_normal((4, 64)) * deviation * times
                    tensors.append(
                        describe_tensor(
                            values.astype(ml_dtypes.bfloat16),
                            iteration=iteration,
                            layer_idx=layer,
                            layer_stack=stack,
                            module=f"{stack}.{layer}.{layer_type}",
                            layer_type=layer_type,
                            operation=operation,
                            phase=phase,
                            tensor_name=name,
                            sample_dim=None if "weight" in name else 0,
                            counter=len(tensors),
                        )
                    )
        for name in ("input", "weight"):
            array = rng.standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
            sample_dim = 0 if name == "input" else None
            fields = {"iteration": iteration, "layer_idx": -1, "module": "head", "sample_dim": sample_dim}
            tensors.append(describe_tensor(array, tensor_name=name, counter=len(tensors), **fields))
    return tensors
