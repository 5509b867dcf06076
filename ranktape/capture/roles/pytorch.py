"""What are PyTorch's own layers?

`nn.MultiheadAttention` needs no row: its projections are bare calls of `F.linear` on its parameters, and its attention
is one of `F.scaled_dot_product_attention`, or, when it is asked for the weights of its attention, see `multihead.py`.
"""

from __future__ import annotations

from torch import nn

from ranktape.capture.roles.table import FunctionRole, ModuleRole

MODULES = (
    ModuleRole(
        classes=(nn.Linear,),
        layer_type="linear",
        component="linear",
        operands={"input": (0, "input")},
        parameters={"weight": "weight"},
    ),
    ModuleRole(
        classes=(nn.Embedding,),
        layer_type="embedding",
        component="embedding",
        operands={"input": (0, "input")},
        parameters={"weight": "weight"},
        layouts={"input": ("BT",), "weight": "VH"},
    ),
)

ATTENTION = FunctionRole(
    functions=("torch.nn.functional.scaled_dot_product_attention",),
    layer_type="attention",
    component="FA",
    operands={"query": (0, "query"), "key": (1, "key"), "value": (2, "value")},
    layouts=dict.fromkeys(("query", "key", "value", "output"), "BHTD"),
)

FLEX_ATTENTION = FunctionRole(
    functions=("torch.nn.attention.flex_attention.flex_attention",),
    layer_type="attention",
    component="FA",
    operands={"query": (0, "query"), "key": (1, "key"), "value": (2, "value")},
    layouts=dict.fromkeys(("query", "key", "value", "output"), "BHTD"),
)

LINEAR = FunctionRole(
    functions=("torch.nn.functional.linear",),
    layer_type="linear",
    component="linear",
    operands={"input": (0, "input"), "weight": (1, "weight")},
    owner="weight",
)

MULTIHEAD = FunctionRole(
    functions=("torch.nn.functional.multi_head_attention_forward",),
    layer_type="attention",
    component="FA",
    operands={"query": (0, "query"), "key": (1, "key"), "value": (2, "value")},
    layouts=dict.fromkeys(("query", "key", "value", "output"), "TBHD"),
)
"""The attention inside of `nn.MultiheadAttention` that is asked for its weights; `multihead.py` sees it."""

EMBEDDING = FunctionRole(
    functions=("torch.nn.functional.embedding",),
    layer_type="embedding",
    component="embedding",
    operands={"input": (0, "input"), "weight": (1, "weight")},
    layouts={"input": ("BT",), "weight": "VH"},
    owner="weight",
)

FUNCTIONS = (ATTENTION, FLEX_ATTENTION, LINEAR, EMBEDDING)
