"""Gives a precision plan in the words of those who train and serve with it: TransformerEngine and torchao."""

from __future__ import annotations

import fnmatch
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import yaml

from ranktape.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection

    from ranktape.analyze.numerics.recipes.plan_file import PlannedModule, PrecisionPlan

TRANSFORMER_ENGINE: dict[str, dict[str, str]] = {
    "bf16": {},
    "fp8_tensor": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
    "fp8_deepseek": {"fp8_quantization_recipe": "blockwise"},
    "mxfp8": {"fp8_quantization_recipe": "mxfp8"},
    "mxfp8_e5m2_grad": {"fp8_quantization_recipe": "mxfp8", "fp8_format": "hybrid"},
    "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
    "nvfp4_nvidia": {"fp4_quantization_recipe": "nvfp4"},
}
"""By the name of a recipe the `training_recipe` that computes so."""

PLAIN_NVFP4 = "nvfp4"
"""The recipe that TransformerEngine computes with everything left out that its NVFP4 has besides."""

_PLAIN_NVFP4_SETTINGS = tuple(
    f"NVTE_NVFP4_DISABLE_{what}=1" for what in ("RHT", "STOCHASTIC_ROUNDING", "2D_QUANTIZATION")
)


def transformer_engine_text(plan: PrecisionPlan) -> str:
    """The file for Megatron-core's `--te-precision-config-file`, by which TransformerEngine's layers are quantised.

    A layer that the training has in bf16 is quantised, too; one that the plan does not name stays as the training's
    options say. A comment says what has to be in the environment.

    Source: megatron/core/extensions/TransformerEngineMixedPrecision.md of Megatron-LM, and the environment of
    `NVFP4BlockScaling` in transformer_engine/common/recipe.

    Raises:
        UsageError: TransformerEngine computes no recipe of that name, or not both of two in one process.
    """
    names = list(plan.by_recipe())
    _check(names, TRANSFORMER_ENGINE, whose="TransformerEngine")
    if {PLAIN_NVFP4, "nvfp4_nvidia"} <= set(names):
        raise UsageError(
            "the plan has nvfp4 and nvfp4_nvidia, and TransformerEngine computes one of the two in a process: plan "
            "with one of them"
        )
    configs = {}
    for name in names:
        own: dict[str, Any] = dict(TRANSFORMER_ENGINE[name])
        if own:
            own["override_nonquantized_autocast"] = True
        configs[name] = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": own}
    matchers = {
        one.module: {"config": one.recipe.name, "type": "glob", "pattern": one.module, "enabled": True}
        for one in _names_first(plan)
    }
    text = yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False, default_flow_style=None)
    needs = f"# Needs in the environment: {' '.join(_PLAIN_NVFP4_SETTINGS)}\n" if PLAIN_NVFP4 in names else ""
    return needs + text


def torchao_text(plan: PrecisionPlan) -> str:
    """`torchao_config` as JSON, which `torchao.core.config.config_from_dict` reads.

    Raises:
        UsageError: as `torchao_config`.
    """
    config = torchao_config(plan)
    from torchao.core.config import config_to_dict

    return json.dumps(config_to_dict(config), indent=1) + "\n"


def torchao_config(plan: PrecisionPlan) -> Any:
    """The `FqnToConfig` with which `torchao.quantization.quantize_(model, config, filter_fn=None)` quantises a model.

    Its configurations are those of inference: weights at once, inputs as they come, and no gradients. Layers in bf16
    are named, and left alone.

    Raises:
        UsageError: torchao is not installed, or has no configuration for a recipe.
    """
    try:
        from torchao.prototype import mx_formats
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            FqnToConfig,
            Int8DynamicActivationInt8WeightConfig,
            PerTensor,
        )
    except ImportError as error:
        raise UsageError(f"torchao cannot be imported ({error}): install it to export a plan for it") from error
    import torch

    mxfp4, scales = torch.float4_e2m1fn_x2, mx_formats.ScaleCalculationMode
    mx, nvfp4 = mx_formats.MXDynamicActivationMXWeightConfig, mx_formats.NVFP4DynamicActivationNVFP4WeightConfig
    configs = {
        "bf16": None,
        "fp8_tensor": Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()),
        "int8_token": Int8DynamicActivationInt8WeightConfig(),
        "mxfp8": mx(scaling_mode=scales.RCEIL),
        "mxfp8_e5m2_grad": mx(scaling_mode=scales.RCEIL),
        "mxfp4": mx(activation_dtype=mxfp4, weight_dtype=mxfp4, scaling_mode=scales.EVEN),
        "nvfp4": nvfp4(),
    }
    _check(plan.by_recipe(), configs, whose="torchao")
    return FqnToConfig(OrderedDict((_torchao_key(one), configs[one.recipe.name]) for one in _names_first(plan)))


def _torchao_key(one: PlannedModule) -> str:
    return f"re:{fnmatch.translate(one.module)}" if one.is_pattern else one.module


def _names_first(plan: PrecisionPlan) -> list[PlannedModule]:
    """As the plan means it: the first that matches counts."""
    return sorted(plan.modules, key=lambda one: one.is_pattern)


def _check(names: Collection[str], known: Collection[str], *, whose: str) -> None:
    """Refuse a recipe that the other program does not compute.

    Raises:
        UsageError: there is one.
    """
    for name in names:
        if name not in known:
            raise UsageError(f"{whose} computes nothing like the recipe {name}: plan with {', '.join(known)}")
