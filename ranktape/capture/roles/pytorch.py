"""What are PyTorch's own layers?

`nn.MultiheadAttention` needs no row: its projections are bare calls of `F.linear` on its parameters, and its attention
is one of `F.scaled_dot_product_attention`, or, when it is asked for the weights of its attention, see `multihead.py`.
"""

from __future__ import annotations

from torch import nn

from ranktape.capture.roles.table import FunctionRole, ModuleRole, Operand

MODULES = (
    ModuleRole(
        classes=(nn.Linear,),
        layer_type="linear",
        component="linear",
        operands={"input": (0, "input")},
        parameters={"weight": "weight", "bias": "bias"},
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
    operands={
        "input": (0, "input"),
        "weight": (1, "weight"),
        "bias": Operand(position=2, keyword="bias", is_optional=True),
    },
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


def grouped(*functions: str, names: tuple[str, str]) -> FunctionRole:
    """The products of tokens, sorted by expert, with the weights of all experts in one call.

    `names` are the arguments of the tokens and of the weights (experts, in, out). Where each expert's tokens end is
    recorded as `offsets`: told apart in the training, they would have it wait for the device.
    """
    return FunctionRole(
        functions=functions,
        layer_type="linear",
        component="linear",
        operands={"input": (0, names[0]), "weight": (1, names[1]), "offsets": (2, "offs")},
        layouts={"input": "TH", "weight": "EIO", "offsets": "E", "output": "TH"},
        owner="weight",
        is_grouped=True,
    )


GROUPED = (
    grouped("torch.nn.functional.grouped_mm", names=("mat_a", "mat_b")),
    grouped("torch._grouped_mm", names=("input", "mat2")),
)

FUNCTIONS = (ATTENTION, FLEX_ATTENTION, LINEAR, EMBEDDING, *GROUPED)

PRODUCTS = frozenset(role.component for role in FUNCTIONS if role.owner)
"""What modules are whose forward is one of these functions on their own weight."""
