"""The known roles: those of PyTorch and its frameworks, and those that a user has registered.

`nn.MultiheadAttention` needs no row: its projections are calls of `F.linear` on its parameters, and its attention is a
call of `F.scaled_dot_product_attention`. If it returns its attention weights, see `module_hooks.py`.
"""

from __future__ import annotations

import fnmatch
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ranktape.capture.roles.table import CallOption, FunctionRole, ModuleRole, Operand, Place, operand_of
from ranktape.capture.settings.options import LAYER_OUTPUTS
from ranktape.capture.torch_private import parameters_of
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch

_QKV = ("query", "key", "value")
_PARAMETERS = {"weight": "weight", "bias": "bias"}


def _attention(
    *functions: str,
    operands: Mapping[str, Place] | None = None,
    layout: str = "BHTD",
    output_layout: str | None = None,
    **more: Any,
) -> FunctionRole:
    """The role of attention functions; by default their first three arguments are `query`, `key` and `value`."""
    return FunctionRole(
        functions=functions,
        layer_type="attention",
        component="FA",
        operands=operands or _query_key_value(*_QKV),
        layouts={**dict.fromkeys(_QKV, layout), "output": output_layout or layout},
        **more,
    )


def _attention_module(
    name: str, keywords: tuple[str, str, str], layout: str | tuple[str, ...], output_layout: str | tuple[str, ...]
) -> ModuleRole:
    return ModuleRole(
        classes=(name,),
        layer_type="attention",
        component="FA",
        operands=_query_key_value(*keywords),
        layouts={**dict.fromkeys(_QKV, layout), "output": output_layout},
    )


def _linear_module(*classes: type | str, keyword: str, **more: Any) -> ModuleRole:
    return ModuleRole(
        classes=classes,
        layer_type="linear",
        component="linear",
        operands={"input": (0, keyword)},
        parameters=_PARAMETERS,
        **more,
    )


def _embedding_module(kind: type | str, keyword: str, layout: str | tuple[str, ...]) -> ModuleRole:
    return ModuleRole(
        classes=(kind,),
        layer_type="embedding",
        component="embedding",
        operands={"input": (0, keyword)},
        parameters={"weight": "weight"},
        layouts={"input": layout, "weight": "VH"},
    )


def _named(**keywords: str) -> dict[str, CallOption]:
    return {word: CallOption(position=None, keyword=keyword) for word, keyword in keywords.items()}


def _query_key_value(query: str, key: str, value: str, *, first: int = 0) -> dict[str, Place]:
    return {"query": (first, query), "key": (first + 1, key), "value": (first + 2, value)}


def grouped(*functions: str, names: tuple[str, str]) -> FunctionRole:
    """The role of grouped products: of tokens, sorted by expert, with the weights of all experts in one call.

    `names` are the arguments of the tokens and of the weights (experts, in, out). The end of each expert's tokens is
    recorded as `offsets`. Splitting the tokens in the training would make it wait for the device.
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


ATTENTION = _attention(
    "torch.nn.functional.scaled_dot_product_attention",
    options={
        "mask": CallOption(position=3, keyword="attn_mask"),
        "dropout": CallOption(position=4, keyword="dropout_p"),
        "is_causal": CallOption(position=5, keyword="is_causal", default=False),
        "scale": CallOption(position=None, keyword="scale"),
    },
)

MULTIHEAD = _attention("torch.nn.functional.multi_head_attention_forward", layout="TBHD")
"""The attention in an `nn.MultiheadAttention` that returns its attention weights; `module_hooks.py` records it."""

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

_PYTORCH_FUNCTIONS = (
    ATTENTION,
    _attention(
        "torch.nn.attention.flex_attention.flex_attention",
        options={
            "bias": CallOption(position=3, keyword="score_mod"),
            "mask": CallOption(position=4, keyword="block_mask"),
            "scale": CallOption(position=5, keyword="scale"),
        },
    ),
    LINEAR,
    FunctionRole(
        functions=("torch.nn.functional.embedding",),
        layer_type="embedding",
        component="embedding",
        operands={"input": (0, "input"), "weight": (1, "weight")},
        layouts={"input": ("BT",), "weight": "VH"},
        owner="weight",
    ),
    grouped("torch.nn.functional.grouped_mm", names=("mat_a", "mat_b")),
    grouped("torch._grouped_mm", names=("input", "mat2")),
)


def _product(*functions: str, weight: str) -> FunctionRole:
    """The role of products of an input with a parameter (in, out) outside a layer, such as `x @ self.weight`."""
    return FunctionRole(
        functions=functions,
        layer_type="linear",
        component="linear",
        operands={"input": (0, "input"), "weight": (1, weight)},
        layouts={"weight": ("IO", "EIO")},
        owner="weight",
        is_grouped=True,
    )


ADDMM = FunctionRole(
    functions=("torch.addmm", "torch.Tensor.addmm"),
    layer_type="linear",
    component="linear",
    operands={
        "bias": Operand(position=0, keyword="input", is_optional=True),
        "input": (1, "mat1"),
        "weight": (2, "mat2"),
    },
    layouts={"weight": "IO"},
    owner="weight",
    is_grouped=True,
    options=_named(alpha="alpha", beta="beta"),
)

PARAMETER_PRODUCTS: tuple[FunctionRole, ...] = (
    _product("torch.matmul", "torch.Tensor.matmul", weight="other"),
    _product("torch.mm", "torch.Tensor.mm", "torch.bmm", "torch.Tensor.bmm", weight="mat2"),
    ADDMM,
)
"""The products that are recorded if the second operand is a parameter. They are not recorded in compiled graphs."""

SOFTMAX = FunctionRole(
    functions=("torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax", "torch.special.softmax"),
    layer_type="attention",
    operands={"input": (0, "input")},
)

EINSUM = FunctionRole(functions=("torch.einsum",), layer_type="attention", operands={"left": 1, "right": 2})

ATTENTION_STEPS: tuple[FunctionRole, ...] = (
    SOFTMAX,
    EINSUM,
    FunctionRole(
        functions=("torch.baddbmm", "torch.Tensor.baddbmm"),
        layer_type="attention",
        operands={"left": (1, "batch1"), "right": (2, "batch2")},
    ),
)
"""The functions that, with `PARAMETER_PRODUCTS`, are steps of an attention that is written out. They are not recorded
by themselves, nor in compiled graphs."""

PRODUCTS = frozenset(role.component for role in _PYTORCH_FUNCTIONS if role.owner)
"""The components of modules whose forward is one of these functions on their own weight."""

# Hugging Face's models get the attention function from a registry. The function that it returns is recorded, whichever
# it is: `sdpa`, `eager`, FlashAttention, FlexAttention, or a registered one. Key and value are recorded before they are
# repeated for the heads of a group. Its experts use their own operator if torch has no grouped product.

HUGGING_FACE_ATTENTION = _attention(
    "transformers.modeling_utils.AttentionInterface.get_interface",
    operands=_query_key_value(*_QKV, first=1),
    output_layout="BTHD",
    output=0,
    gives_function=True,
    options={
        "mask": CallOption(position=4, keyword="attention_mask"),
        **_named(dropout="dropout", scale="scaling", window="sliding_window", cap="softcap", sinks="s_aux"),
    },
)

_HUGGING_FACE_FUNCTIONS = (
    HUGGING_FACE_ATTENTION,
    grouped("transformers.integrations.moe._grouped_mm", names=("input", "weight")),
)

# FlashAttention, versions 2 and 3, according to their documentation. Tested with functions of the same names and
# arguments, not with the package.


def _packed(position: int, keyword: str, *names: str, dim: int) -> dict[str, Place]:
    return {name: Operand(position=position, keyword=keyword, part=(dim, index)) for index, name in enumerate(names)}


_FLASH_OPTIONS = _named(
    dropout="dropout_p",
    scale="softmax_scale",
    is_causal="causal",
    window="window_size",
    cap="softcap",
    bias="alibi_slopes",
)
"""The options of FlashAttention. Their positions differ between versions."""


def _flash_roles(ragged: str, *, layout: str) -> Iterator[FunctionRole]:
    """The roles of functions for padded batches, or for ragged ones, which lack a sample dimension."""
    dim = len(layout) - 2
    forms: dict[str, dict[str, Place]] = {
        "": _query_key_value("q", "k", "v"),
        "qkvpacked_": _packed(0, "qkv", *_QKV, dim=dim),
        "kvpacked_": {"query": (0, "q"), **_packed(1, "kv", "key", "value", dim=dim)},
    }
    for packed, operands in forms.items():
        names = [f"{package}.flash_attn_{ragged}{packed}func" for package in ("flash_attn", "flash_attn_interface")]
        yield _attention(*names, operands=operands, layout=layout, options=_FLASH_OPTIONS)


_FLASH_FUNCTIONS = (*_flash_roles("", layout="BTHD"), *_flash_roles("varlen_", layout="THD"))

# Megatron-core. The first dimension of activations is tokens. Linear layers return their bias beside the output. With
# `gradient_accumulation_fusion`, a layer accumulates its weight's gradient in `main_grad`, and autograd gets a dummy.


def main_grad(module: nn.Module, weight: torch.Tensor) -> torch.Tensor | None:
    """The tensor in which the layer itself accumulates its weight's gradient; None if autograd does."""
    if weight is getattr(module, "bias", None):
        return None
    flags = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
    return getattr(weight, "main_grad", None) if any(getattr(module, flag, False) for flag in flags) else None


def returns_bias(module: nn.Module) -> bool:
    """Whether the layer returns its bias instead of adding it."""
    return any(getattr(module, flag, False) for flag in ("skip_bias_add", "return_bias"))


# Layers of ranktape that compute with quantised operands. The operands before quantisation are recorded too, because
# the products of the backward pass, which quantise again, can only be recomputed from them.

_QUANTIZED = ModuleRole(
    classes=("ranktape.analyze.numerics.quantization.quantized_layers.QuantizedLinear",),
    layer_type="linear",
    component="linear",
    operands={
        "input": (0, "x"),
        "weight": (1, "weight"),
        "wide_input": (2, "wide_x"),
        "wide_weight": (3, "wide_weight"),
    },
    parameters={"bias": "bias"},
)

# TransformerEngine, and Megatron-core's wrappers around its layers, according to their documentation. They need a GPU
# and were not run. The input of a layer that normalises first is the input of the norm, not the operand of its product.
# Operands that a layer quantises are recorded before.

MODULE_ROLES: tuple[ModuleRole, ...] = (
    _linear_module(nn.Linear, keyword="input"),
    _QUANTIZED,
    _embedding_module(nn.Embedding, "input", ("BT",)),
    _linear_module("transformers.pytorch_utils.Conv1D", keyword="x", layouts={"weight": "IO"}),
    _linear_module(
        "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
        "megatron.core.tensor_parallel.layers.RowParallelLinear",
        keyword="input_",
        output=0,
        layouts={"input": "TBH", "output": "TBH", "weight": "OI"},
        accumulated=main_grad,
        returned=returns_bias,
    ),
    _attention_module(
        "megatron.core.transformer.dot_product_attention.DotProductAttention", _QKV, "TBHD", output_layout="TBH"
    ),
    _embedding_module("megatron.core.tensor_parallel.layers.VocabParallelEmbedding", "input_", "BT"),
    _linear_module(
        "transformer_engine.pytorch.*.Linear",
        "transformer_engine.pytorch.*.LayerNormLinear",
        keyword="inp",
        output=0,
        layouts={"weight": "OI"},
        accumulated=main_grad,
        returned=returns_bias,
    ),
    _attention_module(
        "transformer_engine.pytorch.*.DotProductAttention",
        ("query_layer", "key_layer", "value_layer"),
        ("TBHD", "THD"),
        output_layout=("TBH", "TH"),
    ),
)
"""The built-in roles of modules."""

# Classes that quantise their operands. The operands are recorded before quantisation, with this type as their tag.

_QUANTISED_TO = {
    "torchao.float8.float8_linear.Float8Linear": "fp8",
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "fp8",
    "torchao.prototype.float8nocompile.float8nocompile_linear.Float8LinearNoCompile": "fp8",
    "torchao.prototype.blockwise_fp8_training.linear.Float8BlockwiseLinear": "fp8",
    "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor": "fp8",
    "torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor": "mxfp8",
    "torchao.prototype.moe_training.mxfp8_linear.MXFP8Linear": "mxfp8",
    "torchao.prototype.moe_training.nvfp4_training.nvfp4_training.NVFP4Linear": "nvfp4",
    "torchao.prototype.qat.nvfp4.NVFP4FakeQuantizedLinear": "nvfp4",
    "torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinear": "int8",
    "torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight": "int8",
    "bitsandbytes.nn.modules.Linear8bitLt": "int8",
}
"""The `quant_type` for each class of a layer or of its weight."""

_TE_RECIPES = {"MXFP8": "mxfp8", "NVFP4": "nvfp4"}
"""The `quant_type` for each prefix of the class name of a TransformerEngine recipe; `fp8` for all others."""


class Quantising(NamedTuple):
    """A class that quantises its operands."""

    kind: str
    """Name of the class."""
    to: Callable[[], str]
    """A function that returns the `quant_type`; empty if nothing is quantised, as in TransformerEngine without fp8."""


def quantising(module: nn.Module) -> Quantising | None:
    """The class of a layer, or of its weight, if it quantises its operands; otherwise None."""
    kinds = (*type(module).__mro__, type(parameters_of(module).get("weight")))
    for kind in kinds:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name.startswith("transformer_engine.pytorch."):
            return Quantising(kind.__name__, _te_quant_type)
        if name in _QUANTISED_TO:
            return Quantising(kind.__name__, functools.partial(str, _QUANTISED_TO[name]))
    return None


def _te_quant_type() -> str:
    """The type to which TransformerEngine currently quantises, according to its documentation."""
    for name in ("quantization", "fp8"):
        state = getattr(sys.modules.get(f"transformer_engine.pytorch.{name}"), "FP8GlobalStateManager", None)
        if state is not None:
            recipe = type(state.get_fp8_recipe()).__name__
            quant_type = next(
                (name_of_type for start, name_of_type in _TE_RECIPES.items() if recipe.startswith(start)), "fp8"
            )
            return quant_type if state.is_fp8_enabled() else ""
    return ""


FUNCTION_ROLES: tuple[FunctionRole, ...] = (
    *_PYTORCH_FUNCTIONS,
    *PARAMETER_PRODUCTS,
    *ATTENTION_STEPS,
    *_HUGGING_FACE_FUNCTIONS,
    *_FLASH_FUNCTIONS,
)
"""The built-in roles of functions."""

_registered: list[ModuleRole | FunctionRole] = []
_roles_of_classes: dict[type, ModuleRole | None] = {}


def register_role(role: ModuleRole | FunctionRole) -> None:
    """Record the tensors of a role from the next captured iteration on. It has precedence over the built-in roles.

    At the end of the first iteration, a warning names a role that matched no module, or an operand that was not passed.

    Raises:
        UsageError: the argument is not a role, or an operand is not valid.
    """
    if not isinstance(role, ModuleRole | FunctionRole):
        raise UsageError(f"{role!r:.80} is no role: give a ModuleRole or a FunctionRole")
    for operand in role.operands.values():
        operand_of(operand)
    if role not in _registered:
        _registered.insert(0, role)
        _roles_of_classes.clear()


def unregister_role(role: ModuleRole | FunctionRole) -> None:
    """Do not record the tensors of a role from the next captured iteration on."""
    if role in _registered:
        _registered.remove(role)
        _roles_of_classes.clear()


def registered_roles() -> tuple[ModuleRole | FunctionRole, ...]:
    """The user's roles, the latest first."""
    return tuple(_registered)


def function_roles() -> tuple[FunctionRole, ...]:
    """All roles of functions, the user's first."""
    return (*(role for role in _registered if isinstance(role, FunctionRole)), *FUNCTION_ROLES)


def role_of(kind: type) -> ModuleRole | None:
    """The role of modules of a class: that of the first of its bases with a role; None if there is none."""
    if kind not in _roles_of_classes:
        roles = (*(role for role in _registered if isinstance(role, ModuleRole)), *MODULE_ROLES)
        hits = (role for base in kind.__mro__ for role in roles if _matches(base, role))
        _roles_of_classes[kind] = next(hits, None)
    return _roles_of_classes[kind]


def class_of(kind: type, role: ModuleRole) -> type:
    """The class, or the base of it, that its role names."""
    return next((base for base in kind.__mro__ if _matches(base, role)), kind)


def known_layer_types() -> tuple[str, ...]:
    """All layer types of the known roles."""
    roles = (*MODULE_ROLES, *FUNCTION_ROLES, *_registered)
    return tuple(dict.fromkeys((*(role.layer_type for role in roles), *LAYER_OUTPUTS)))


def _matches(base: type, role: ModuleRole) -> bool:
    name = f"{base.__module__}.{base.__qualname__}"
    return any(
        base is one if isinstance(one, type) else name == one or ("*" in one and fnmatch.fnmatchcase(name, one))
        for one in role.classes
    )
