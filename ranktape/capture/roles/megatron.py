"""What are the layers of Megatron-core?

Activations have the tokens first. Linear layers return their bias beside the output. With
`gradient_accumulation_fusion` a layer adds the gradient of its weight up in `main_grad`, and autograd sees a dummy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ranktape.capture.roles.table import ModuleRole

if TYPE_CHECKING:
    import torch
    from torch import nn


def main_grad(module: nn.Module, weight: torch.Tensor) -> torch.Tensor | None:
    """The tensor in which the layer adds up its weight's gradient by itself; None where autograd does."""
    if weight is getattr(module, "bias", None):
        return None
    flags = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
    return getattr(weight, "main_grad", None) if any(getattr(module, flag, False) for flag in flags) else None


def returns_bias(module: nn.Module) -> bool:
    """Whether the layer leaves it to others to add its bias."""
    return any(getattr(module, flag, False) for flag in ("skip_bias_add", "return_bias"))


MODULES = (
    ModuleRole(
        classes=(
            "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
            "megatron.core.tensor_parallel.layers.RowParallelLinear",
        ),
        layer_type="linear",
        component="linear",
        operands={"input": (0, "input_")},
        parameters={"weight": "weight", "bias": "bias"},
        output=0,
        layouts={"input": "TBH", "output": "TBH", "weight": "OI"},
        accumulated=main_grad,
        returned=returns_bias,
    ),
    ModuleRole(
        classes=("megatron.core.transformer.dot_product_attention.DotProductAttention",),
        layer_type="attention",
        component="FA",
        operands={"query": (0, "query"), "key": (1, "key"), "value": (2, "value")},
        layouts={"query": "TBHD", "key": "TBHD", "value": "TBHD", "output": "TBH"},
    ),
    ModuleRole(
        classes=("megatron.core.tensor_parallel.layers.VocabParallelEmbedding",),
        layer_type="embedding",
        component="embedding",
        operands={"input": (0, "input_")},
        parameters={"weight": "weight"},
        layouts={"input": "BT", "weight": "VH"},
    ),
)
