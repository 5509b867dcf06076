"""The roles that are known: those of PyTorch, of the frameworks on it, and those that a user has registered.

`nn.MultiheadAttention` needs no row: its projections are bare calls of `F.linear` on its parameters, and its attention
is one of `F.scaled_dot_product_attention`, or, when it is asked for the weights of its attention, see `multihead.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from ranktape.capture.roles.table import FunctionRole, ModuleRole, Operand, Place, operand_of
from ranktape.capture.settings.rules import LAYER_OUTPUTS
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch

_PYTORCH_MODULES = (
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

_PYTORCH_FUNCTIONS = (ATTENTION, FLEX_ATTENTION, LINEAR, EMBEDDING, *GROUPED)

PRODUCTS = frozenset(role.component for role in _PYTORCH_FUNCTIONS if role.owner)
"""What modules are whose forward is one of these functions on their own weight."""

# Hugging Face. Its models ask a registry for the function that computes attention. What that gives is wrapped,
# whichever it is: `sdpa`, `eager`, FlashAttention, FlexAttention, or one that was registered. Key and value are seen
# before they are repeated for the heads of a group.

_HUGGING_FACE_MODULES = (
    ModuleRole(
        classes=("transformers.pytorch_utils.Conv1D",),
        layer_type="linear",
        component="linear",
        operands={"input": (0, "x")},
        parameters={"weight": "weight", "bias": "bias"},
        layouts={"weight": "IO"},
    ),
)

_HUGGING_FACE_FUNCTIONS = (
    FunctionRole(
        functions=("transformers.modeling_utils.AttentionInterface.get_interface",),
        layer_type="attention",
        component="FA",
        operands={"query": (1, "query"), "key": (2, "key"), "value": (3, "value")},
        output=0,
        layouts={"query": "BHTD", "key": "BHTD", "value": "BHTD", "output": "BTHD"},
        gives_function=True,
    ),
    # Its experts; without torch's grouped product it has an operator of its own.
    grouped("transformers.integrations.moe._grouped_mm", names=("input", "weight")),
)

# FlashAttention, versions 2 and 3. Written from their documentation; tested with functions of the same names and
# arguments, not with the package itself.

_PACKAGES = ("flash_attn", "flash_attn_interface")
_SEPARATE = {"query": (0, "q"), "key": (1, "k"), "value": (2, "v")}
_PADDED, _RAGGED = "BTHD", "THD"


def _flash_role(name: str, *, operands: Mapping[str, Place], layout: str) -> FunctionRole:
    return FunctionRole(
        functions=tuple(f"{package}.{name}" for package in _PACKAGES),
        layer_type="attention",
        component="FA",
        operands=operands,
        layouts=dict.fromkeys(("query", "key", "value", "output"), layout),
    )


def _packed(position: int, keyword: str, *names: str, dim: int) -> dict[str, Place]:
    return {name: Operand(position=position, keyword=keyword, part=(dim, place)) for place, name in enumerate(names)}


_FLASH_FUNCTIONS = (
    _flash_role("flash_attn_func", operands=_SEPARATE, layout=_PADDED),
    _flash_role("flash_attn_varlen_func", operands=_SEPARATE, layout=_RAGGED),
    _flash_role(
        "flash_attn_qkvpacked_func", operands=_packed(0, "qkv", "query", "key", "value", dim=2), layout=_PADDED
    ),
    _flash_role(
        "flash_attn_varlen_qkvpacked_func",
        operands=_packed(0, "qkv", "query", "key", "value", dim=1),
        layout=_RAGGED,
    ),
    _flash_role(
        "flash_attn_kvpacked_func",
        operands={"query": (0, "q"), **_packed(1, "kv", "key", "value", dim=2)},
        layout=_PADDED,
    ),
    _flash_role(
        "flash_attn_varlen_kvpacked_func",
        operands={"query": (0, "q"), **_packed(1, "kv", "key", "value", dim=1)},
        layout=_RAGGED,
    ),
)

# Megatron-core. Activations have the tokens first. Linear layers return their bias beside the output. With
# `gradient_accumulation_fusion` a layer adds the gradient of its weight up in `main_grad`, and autograd sees a dummy.


def main_grad(module: nn.Module, weight: torch.Tensor) -> torch.Tensor | None:
    """The tensor in which the layer adds up its weight's gradient by itself; None where autograd does."""
    if weight is getattr(module, "bias", None):
        return None
    flags = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
    return getattr(weight, "main_grad", None) if any(getattr(module, flag, False) for flag in flags) else None


def returns_bias(module: nn.Module) -> bool:
    """Whether the layer leaves it to others to add its bias."""
    return any(getattr(module, flag, False) for flag in ("skip_bias_add", "return_bias"))


_MEGATRON_MODULES = (
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

# TransformerEngine, and Megatron-core's wrappers around its layers. Written from their documentation: they need a GPU,
# and were not run. The input of a layer that normalises first is what enters the norm, not the operand of its product;
# what is quantised inside of a layer is seen before that.

_TRANSFORMER_ENGINE_MODULES = (
    ModuleRole(
        classes=("transformer_engine.pytorch.*.Linear", "transformer_engine.pytorch.*.LayerNormLinear"),
        layer_type="linear",
        component="linear",
        operands={"input": (0, "inp")},
        parameters={"weight": "weight", "bias": "bias"},
        output=0,
        layouts={"weight": "OI"},
        accumulated=main_grad,
        returned=returns_bias,
    ),
    ModuleRole(
        classes=("transformer_engine.pytorch.*.DotProductAttention",),
        layer_type="attention",
        component="FA",
        operands={"query": (0, "query_layer"), "key": (1, "key_layer"), "value": (2, "value_layer")},
        layouts={"query": ("TBHD", "THD"), "key": ("TBHD", "THD"), "value": ("TBHD", "THD"), "output": ("TBH", "TH")},
    ),
)

MODULE_ROLES: tuple[ModuleRole, ...] = (
    *_PYTORCH_MODULES,
    *_HUGGING_FACE_MODULES,
    *_MEGATRON_MODULES,
    *_TRANSFORMER_ENGINE_MODULES,
)
"""Our own roles of modules."""

FUNCTION_ROLES: tuple[FunctionRole, ...] = (*_PYTORCH_FUNCTIONS, *_HUGGING_FACE_FUNCTIONS, *_FLASH_FUNCTIONS)
"""Our own roles of functions."""

_registered: list[ModuleRole | FunctionRole] = []
_found: dict[type, ModuleRole | None] = {}


def register_role(role: ModuleRole | FunctionRole) -> None:
    """Capture what the role says, from the next captured iteration on; it comes before our own roles.

    A role that matches no module, or names an operand that is not passed, is told at the end of the first iteration.

    Raises:
        UsageError: it is no role, or one of its operands is no place.
    """
    if not isinstance(role, ModuleRole | FunctionRole):
        raise UsageError(f"{role!r:.80} is no role: give a ModuleRole or a FunctionRole")
    for place in role.operands.values():
        operand_of(place)
    if role not in _registered:
        _registered.insert(0, role)
        _found.clear()


def unregister_role(role: ModuleRole | FunctionRole) -> None:
    """Capture it no more, from the next captured iteration on."""
    if role in _registered:
        _registered.remove(role)
        _found.clear()


def registered_roles() -> tuple[ModuleRole | FunctionRole, ...]:
    """The user's own, the latest first."""
    return tuple(_registered)


def function_roles() -> tuple[FunctionRole, ...]:
    """All roles of functions, the user's own first."""
    return (*(role for role in _registered if isinstance(role, FunctionRole)), *FUNCTION_ROLES)


def role_of(kind: type) -> ModuleRole | None:
    """The role of modules of that class: of the first of its bases that has one; None without any."""
    if kind not in _found:
        roles = (*(role for role in _registered if isinstance(role, ModuleRole)), *MODULE_ROLES)
        hits = (role for base in kind.__mro__ for role in roles if _matches(base, role))
        _found[kind] = next(hits, None)
    return _found[kind]


def known_layer_types() -> tuple[str, ...]:
    """Every kind of layer that can be asked for."""
    roles = (*MODULE_ROLES, *FUNCTION_ROLES, *_registered)
    return tuple(dict.fromkeys((*(role.layer_type for role in roles), *LAYER_OUTPUTS)))


def _matches(base: type, role: ModuleRole) -> bool:
    name = f"{base.__module__}.{base.__qualname__}"
    return any(
        base is one if isinstance(one, type) else name == one or ("*" in one and fnmatch.fnmatchcase(name, one))
        for one in role.classes
    )
