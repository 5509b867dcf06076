"""Writes a precision plan in the words of those who train and serve with it: TransformerEngine and torchao.

python examples/export_plan.py plan.yaml te.yaml
python examples/export_plan.py plan.yaml torchao.json --form torchao

transformer_engine is the YAML file for Megatron-core's --te-precision-config-file. torchao is the JSON of a
FqnToConfig, which `torchao.core.config.config_from_dict` reads for `quantize_(model, config, filter_fn=None)`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from ranktape.analyze.numerics.recipes.plan_file import PlannedModule, PrecisionPlan, read_plan
from ranktape.errors import RanktapeError, UsageError

TRANSFORMER_ENGINE: dict[str, dict[str, str]] = {
    "bf16": {},
    "fp8_tensor": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
    "fp8_deepseek": {"fp8_quantization_recipe": "blockwise"},
    "mxfp8": {"fp8_quantization_recipe": "mxfp8"},
    "mxfp8_e5m2_grad": {"fp8_quantization_recipe": "mxfp8", "fp8_format": "hybrid"},
    "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
    "nvfp4_nvidia": {"fp4_quantization_recipe": "nvfp4"},
}
"""By the name of a recipe the `training_recipe` that computes the same."""

PLAIN_NVFP4 = "nvfp4"
"""The recipe that TransformerEngine computes only with the additions of its own NVFP4 switched off."""


def transformer_engine_text(plan: PrecisionPlan) -> str:
    """The file for Megatron-core; a comment says what has to be in the environment.

    A layer that the training has in bf16 is quantised, too; one that the plan does not name stays as the training's
    options say. Source: megatron/core/extensions/TransformerEngineMixedPrecision.md of Megatron-LM, and the environment
    of `NVFP4BlockScaling` in transformer_engine/common/recipe.
    """
    names = list(plan.by_recipe())
    check(names, TRANSFORMER_ENGINE, whose="TransformerEngine")
    if {PLAIN_NVFP4, "nvfp4_nvidia"} <= set(names):
        raise UsageError("the plan has nvfp4 and nvfp4_nvidia, and TransformerEngine computes one of them in a process")
    configs = {}
    for name in names:
        own: dict[str, Any] = dict(TRANSFORMER_ENGINE[name])
        if own:
            own["override_nonquantized_autocast"] = True
        configs[name] = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": own}
    matchers = {
        one.module: {"config": one.recipe.name, "type": "glob", "pattern": one.module, "enabled": True}
        for one in names_first(plan)
    }
    text = yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False, default_flow_style=None)
    settings = " ".join(f"NVTE_NVFP4_DISABLE_{what}=1" for what in ("RHT", "STOCHASTIC_ROUNDING", "2D_QUANTIZATION"))
    return (f"# Needs in the environment: {settings}\n" if PLAIN_NVFP4 in names else "") + text


def torchao_text(plan: PrecisionPlan) -> str:
    """A `FqnToConfig` of torchao as JSON.

    Its configurations are those of inference: weights are quantised at once, inputs as they come, and there are no
    gradients. Layers in bf16 are named, and left alone.
    """
    import torch
    from torchao.core.config import config_to_dict
    from torchao.prototype import mx_formats
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        FqnToConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerTensor,
    )

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
    check(plan.by_recipe(), configs, whose="torchao")
    keys = (f"re:{fnmatch.translate(one.module)}" if one.is_pattern else one.module for one in names_first(plan))
    config = FqnToConfig(OrderedDict(zip(keys, (configs[one.recipe.name] for one in names_first(plan)), strict=True)))
    return json.dumps(config_to_dict(config), indent=1) + "\n"


def names_first(plan: PrecisionPlan) -> list[PlannedModule]:
    """The modules in the order in which a plan means them: names before patterns, then the first that matches."""
    return sorted(plan.modules, key=lambda one: one.is_pattern)


def check(names: Collection[str], known: Collection[str], *, whose: str) -> None:
    """Refuse a recipe that the other program does not compute."""
    for name in names:
        if name not in known:
            raise UsageError(f"{whose} computes nothing like the recipe {name}: plan with {', '.join(known)}")


def main() -> None:
    """Read the plan, write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--form", choices=["transformer_engine", "torchao"], default="transformer_engine")
    options = parser.parse_args()
    try:
        plan = read_plan(options.plan)
        text = torchao_text(plan) if options.form == "torchao" else transformer_engine_text(plan)
    except RanktapeError as error:
        sys.exit(str(error))
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: the recipes of {len(plan.modules)} modules")


if __name__ == "__main__":
    main()
