"""Do the programs that train and serve by a plan's export quantise the layers that the plan names?"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.export_plan import torchao_text, transformer_engine_text
from ranktape.analyze.numerics.recipes.plan_file import parse_plan
from ranktape.errors import UsageError
from tests.exhaustive import exhaustive
from tests.launch.processes import CHECKOUT

SCRIPT = CHECKOUT / "examples" / "export_plan.py"

PLAN = """
modules:
  "layers.*.up": mxfp8
  layers.0.up: int8_token
  layers.0.down: mxfp4
  head: {recipe: bf16, why: no recipe holds the target}
"""

EXPECTED = {
    "layers.0.up": "int8_token",
    "layers.0.down": "mxfp4",
    "layers.1.up": "mxfp8",
    "layers.1.down": None,
    "head": "bf16",
}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [{name: nn.Linear(64, 64, dtype=torch.bfloat16) for name in ("up", "down")} for _ in range(2)]
        self.layers = nn.ModuleList(nn.ModuleDict(layer) for layer in layers)
        self.head = nn.Linear(64, 64, dtype=torch.bfloat16)


def _run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _export(tmp_path: Path, text: str, *words: str) -> Path:
    plan, output = tmp_path / "plan.yaml", tmp_path / "output"
    plan.write_text(text, encoding="utf-8")
    done = _run(plan, output, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}: the recipes of 4 modules\n"
    return output


@exhaustive("make test quantises by our own layers")
def test_torchao_quantises_a_model_as_the_plan_says(tmp_path: Path) -> None:
    quantization, config = pytest.importorskip("torchao.quantization"), pytest.importorskip("torchao.core.config")
    output = _export(tmp_path, PLAN, "--form", "torchao")
    model = _Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own
        read = config.config_from_dict(json.loads(output.read_text(encoding="utf-8")))
        quantization.quantize_(model, read, filter_fn=None)
    found: dict[str, Any] = {}
    for name in EXPECTED:
        weight = model.get_submodule(name).weight
        found[name] = type(weight.data).__name__, getattr(weight, "elem_dtype", None)
    assert found == {
        "layers.0.up": ("Int8Tensor", None),
        "layers.0.down": ("MXTensor", torch.float4_e2m1fn_x2),
        "layers.1.up": ("MXTensor", torch.float8_e4m3fn),
        "layers.1.down": ("Tensor", None),
        "head": ("Tensor", None),
    }


def test_megatron_core_finds_the_recipe_of_each_module(tmp_path: Path) -> None:
    quant_config = pytest.importorskip("megatron.core.quantization.quant_config")
    text = PLAN.replace("int8_token", "fp8_tensor").replace("mxfp4", "nvfp4")
    output = _export(tmp_path, text)
    recipes = quant_config.RecipeConfig.from_yaml_file(str(output))
    found = {}
    for name in EXPECTED:
        matched = recipes.match(quant_config.MatchContext(module_path=name, layer_number=None))
        found[name] = matched and matched.config["training_recipe"]
        assert matched is None or matched.config["transformer_engine_config_type"] == "TEQuantizationParams"
    anywhere = {"override_nonquantized_autocast": True}
    assert found == {
        "layers.0.up": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid", **anywhere},
        "layers.0.down": {"fp4_quantization_recipe": "nvfp4", **anywhere},
        "layers.1.up": {"fp8_quantization_recipe": "mxfp8", **anywhere},
        "layers.1.down": None,
        "head": {},
    }
    first = output.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# Needs in the environment: NVTE_NVFP4_DISABLE_RHT=1 ")


def test_what_another_program_does_not_compute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="TransformerEngine computes nothing like the recipe mxfp4: plan with bf16, "):
        transformer_engine_text(parse_plan("modules: {head: mxfp4}", place=""))
    with pytest.raises(UsageError, match="torchao computes nothing like the recipe hif8"):
        torchao_text(parse_plan("modules: {head: hif8}", place=""))
    (tmp_path / "plan.yaml").write_text("modules: {head: hif8}", encoding="utf-8")
    done = _run(tmp_path / "plan.yaml", tmp_path / "te.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("TransformerEngine computes nothing like the recipe hif8")
