"""Is an unmodified training quantised, however its model is wrapped, and ended where it cannot be?"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.export_plan import torchao_text, transformer_engine_text
from ranktape.analyze import quantize
from ranktape.analyze.numerics.recipes.plan_file import parse_plan
from ranktape.errors import UsageError
from ranktape.launch.quantizing_attention import replace_in_model, replace_names
from ranktape.storage import open_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.launch.processes import CHECKOUT, Ended, errors, python, torchrun

LAUNCH = ("-m", "ranktape.launch")

TRAIN = """
    import os, sys
    import torch
    from torch.nn import functional as F

    kind, network = sys.argv[1], (*sys.argv[2:], "linear")[0]

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

        def forward(self, x):
            heads = [part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
            if kind == "quantised":
                attended = quantized_attention(attend, *heads, recipe=parse_recipe("mxfp4"), draws=Draws())
            else:
                attended = attend(*heads)
            return self.out(attended.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    compute = lambda x: (model(x) - x).square().mean()
    if network == "linear":
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        x = torch.randn(16, 32)
    elif network == "attention":
        model, x = torch.nn.Sequential(Attention(), Attention()), torch.randn(2, 40, 32)
    else:
        from tests.capture.hugging_face import tiny
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = tiny("Llama", **sizes, attn_implementation=network)
        x = torch.arange(40).view(2, 20)
        compute = lambda x: model(x, labels=x).loss
    if kind == "quantised":
        from ranktape.analyze import fake_quantize
        from ranktape.analyze.numerics.quantization.quantized_product import quantized_attention
        from ranktape.analyze.numerics.quantization.quantized_product import Draws
        from ranktape.analyze.numerics.recipes.words import parse_recipe
        fake_quantize(model, recipe="mxfp4")
    if kind in ("ddp", "fsdp", "fsdp_layers", "tp"):
        torch.distributed.init_process_group("gloo")
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard
        for part in (model[0], model[2]) if kind == "fsdp_layers" else ():
            fully_shard(part)
        fully_shard(model)
    if kind == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind in ("compiled", "one_graph"):
        model = torch.compile(model, backend="eager", fullgraph=kind == "one_graph")
    if kind == "compiled_in_place":
        model.compile(backend="eager")
    if kind == "alone":
        model = torch.nn.Linear(32, 32)
    if kind == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    if kind == "convolution":
        model = torch.nn.Sequential(torch.nn.Conv1d(16, 16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            loss = compute(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if kind == "compiled_step":
        step = torch.compile(step, backend="eager")
    with torch.no_grad():
        model(x)  # some evaluate before they train
    for _ in range(3):
        loss = step(x)
    if os.environ.get("RANK", "0") == "0":
        print("loss", loss.item().hex(), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""
"""A training that knows nothing of us but where it quantises itself: of linear layers, or of attention."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the script is."""
    folder = tmp_path_factory.mktemp("quantizing")
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    return folder


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, str]:
    """The last losses of the script as it is, quantised by its own line, and under autocast."""
    return {kind: _loss(python("train.py", kind, cwd=folder)) for kind in ("plain", "quantised", "autocast")}


def _loss(ended: Ended) -> str:
    assert ended.returncode == 0, ended.stderr
    return next(line for line in ended.stdout.splitlines() if line.startswith("loss "))


def test_a_script_that_knows_nothing_trains_and_is_recorded_as_one_that_quantises_itself(
    folder: Path, losses: dict[str, str]
) -> None:
    ended = python(*LAUNCH, "--capture", "run", "--quant", "mxfp4", "train.py", "plain", cwd=folder)
    assert _loss(ended) == losses["quantised"] != losses["plain"]
    assert "mxfp4: 2 linear layers of Sequential are quantised" in ended.stderr
    records = open_run(folder / "run").select()
    assert {record.quant_type for record in records} == {"mxfp4"}
    assert {"input", "wide_input", "weight", "wide_weight"} <= {record.tensor_name for record in records}


def test_the_variable_needs_no_launcher_and_no_capture(folder: Path, losses: dict[str, str]) -> None:
    ended = python("train.py", "plain", cwd=folder, env={"RANKTAPE_QUANT": "mxfp4"})
    assert _loss(ended) == losses["quantised"]
    environment = {"RANKTAPE_QUANT": "hifp8", "RANKTAPE_CAPTURE": "variable"}
    ended = python("train.py", "plain", cwd=folder, env=environment)
    assert _loss(ended) not in losses.values()
    assert {record.quant_type for record in open_run(folder / "variable").select()} == {"hifp8"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("fsdp_layers", marks=exhaustive("as fsdp"))])
@exhaustive_but("fsdp", reason="one wrapper is in make test")
def test_a_wrapped_model_is_quantised_on_every_rank(kind: str, folder: Path, losses: dict[str, str]) -> None:
    ended = torchrun(*LAUNCH, "--capture", kind, "--quant", "mxfp4", "train.py", kind, cwd=folder)
    assert _loss(ended) == losses["quantised"]
    records = open_run(folder / kind).select(tensor_name="wide_weight")
    assert {(record.rank, record.module) for record in records} == {(r, m) for r in (0, 1) for m in ("0", "2")}


@pytest.mark.parametrize("kind", ["compiled", "compiled_in_place", "compiled_step"])
@exhaustive_but("compiled", reason="one way to compile is in make test")
def test_a_compiled_training_is_quantised(kind: str, folder: Path, losses: dict[str, str]) -> None:
    ended = python(*LAUNCH, "--quant", "mxfp4", "train.py", kind, cwd=folder)
    assert _loss(ended) == losses["quantised"]
    assert "mxfp4: nothing is recorded (add --capture URL to record)" in ended.stderr


DEEP = """
import torch
from torch import nn

model = torch.compile(nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)]), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(64, 32)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@exhaustive("make test compiles a shallow one")
def test_a_deep_compiled_training_is_told_once_how_it_is_recorded_and_quantised_without_a_warning(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(DEEP)
    options = ("--capture", "run", "--quant", "mxfp8", "--start-at", "1")
    ended = python(*LAUNCH, *options, "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if "the compiled code" in line]
    assert line == (
        "ranktape: the compiled code of the training runs eagerly in captured iterations (1), where results may differ "
        "in the last bits: graphs do not show layers of the class QuantizedLinear"
    )
    # With a recompilation of what quantises for each layer dynamo would reach its limit.
    assert "recompile_limit" not in ended.stderr
    [status] = open_run(tmp_path / "run").status()
    assert status.num_missing == 0


@exhaustive("make test quantises to narrower formats")
def test_bf16_rounds_what_is_wider_and_leaves_the_rest(folder: Path, losses: dict[str, str]) -> None:
    rounded = python(*LAUNCH, "--quant", "bf16", "train.py", "plain", cwd=folder)
    assert _loss(rounded) not in losses.values()
    assert "bf16: 2 linear layers of Sequential are quantised" in rounded.stderr
    # Of a training in bf16 only the pass before it, outside of autocast, would be rounded.
    ended = python(*LAUNCH, "--quant", "bf16", "train.py", "autocast", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    ended = python(*LAUNCH, "--quant", "bf16", "train.py", "bf16", cwd=folder)
    assert "bf16: 2 linear layers of Sequential already compute in bf16" in ended.stderr
    assert "are quantised" not in ended.stderr


QUANT_ATTENTION = ("--quant", "mxfp4", "--quant-attention")


@exhaustive("make test quantises attention in tests/analyze/test_quantized_layers.py")
def test_attention_is_quantised_as_a_script_that_quantises_its_own_does_it(folder: Path) -> None:
    expected = _loss(python("train.py", "quantised", "attention", cwd=folder))
    words = (*LAUNCH, "--capture", "attention", *QUANT_ATTENTION, "train.py")
    ended = torchrun(*words, "ddp", "attention", cwd=folder)
    assert "mxfp4: 4 linear layers of Attention" not in ended.stderr
    assert "mxfp4: 4 linear layers of Sequential and attention are quantised" in ended.stderr
    assert _loss(ended) == expected
    assert _loss(torchrun(*LAUNCH, *QUANT_ATTENTION, "train.py", "fsdp", "attention", cwd=folder)) == expected
    assert _loss(python(*LAUNCH, *QUANT_ATTENTION, "train.py", "compiled", "attention", cwd=folder)) == expected
    assert _loss(python(*LAUNCH, "--quant", "mxfp4", "train.py", "plain", "attention", cwd=folder)) != expected
    records = open_run(folder / "attention").select(layer_type="attention", module="0", rank=0)
    assert {record.quant_type for record in records} == {"mxfp4"}
    # What is recorded is what was computed with: quantised again it stays.
    for name, axis in (("query", -1), ("key", -1), ("value", 2), ("grad_output", -1)):
        [record] = records.select(tensor_name=name)
        tensor = record.tensor()
        assert torch.equal(
            tensor, quantize(tensor, "mxfp4_e2m1", axis=axis, scale_rule="even", warn=False).values.float()
        ), name


@exhaustive("make test quantises attention in tests/analyze/test_quantized_layers.py")
def test_attention_of_hugging_face_is_quantised_whatever_computes_it(folder: Path) -> None:
    environment = {"RANKTAPE_QUANT": "mxfp4", "RANKTAPE_QUANT_ATTENTION": "1", "RANKTAPE_CAPTURE": "llama"}
    ended = python("train.py", "plain", "sdpa", cwd=folder, env=environment)
    assert _loss(ended) != _loss(python(*LAUNCH, "--quant", "mxfp4", "train.py", "plain", "sdpa", cwd=folder))
    [key] = open_run(folder / "llama").select(tensor_name="key")
    assert key.shape == (2, 1, 20, 16)  # before it is repeated for the heads of the group
    tensor = key.tensor()
    assert torch.equal(tensor, quantize(tensor, "mxfp4_e2m1", scale_rule="even", warn=False).values.float())
    eager = python(*LAUNCH, *QUANT_ATTENTION, "train.py", "plain", "eager", cwd=folder)
    assert float.fromhex(_loss(eager).split()[1]) == pytest.approx(float.fromhex(_loss(ended).split()[1]), rel=1e-3)


def test_a_plan_names_the_recipe_of_each_layer(folder: Path, losses: dict[str, str]) -> None:
    (folder / "plan.yaml").write_text("modules: {'0': mxfp4, '2': mxfp8}")
    ended = python(*LAUNCH, "--capture", "plan", "--quant-plan", "plan.yaml", "train.py", "plain", cwd=folder)
    assert _loss(ended) not in losses.values()
    assert {record.quant_type for record in open_run(folder / "plan").select()} == {"plan"}


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (("--quant", "mxfp8"), "one_graph", "compile without fullgraph=True"),
        (("--quant", "mxfp8"), "alone", "calls a linear layer by itself"),
        (("--quant", "mxfp8"), "convolution", "no nn.Linear was quantised"),
        (("--quant", "mxfp8"), "quantised", "are quantised already"),
        (("--quant", "mxfp8", "--quant-attention"), "plain", "no attention was quantised"),
    ],
)
def test_what_cannot_be_quantised_is_not_trained(words: tuple[str, ...], kind: str, message: str, folder: Path) -> None:
    ended = python(*LAUNCH, *words, "train.py", kind, cwd=folder)
    assert ended.returncode == 2, ended.stderr
    assert [line for line in errors(ended) if message in line], ended.stderr
    assert "loss" not in ended.stdout


@pytest.mark.parametrize("variable", ["RANKTAPE_QUANT_PLAN=plan.yaml", "RANKTAPE_QUANT_ATTENTION=1"])
@exhaustive_but("RANKTAPE_QUANT_PLAN=plan.yaml", reason="one variable is in make test")
def test_a_command_line_that_names_a_precision_overrules_all_its_variables(
    variable: str, folder: Path, losses: dict[str, str]
) -> None:
    name, _, value = variable.partition("=")
    ended = python(*LAUNCH, "--quant", "mxfp4", "train.py", "plain", cwd=folder, env={name: value})
    assert _loss(ended) == losses["quantised"]


def test_tensor_parallelism_is_refused_with_the_way_out(folder: Path) -> None:
    ended = torchrun(*LAUNCH, "--quant", "mxfp8", "train.py", "tp", cwd=folder)
    assert ended.returncode == 1
    assert "train without tensor parallelism, or without quantisation" in ended.stderr
    assert "loss" not in ended.stdout


def test_a_wrong_variable_ends_the_training(folder: Path) -> None:
    ended = python("train.py", "plain", cwd=folder, env={"RANKTAPE_QUANT": "mxfp9"})
    assert ended.returncode == 2
    assert "recipe 'mxfp9' is not known: did you mean mxfp8?" in ended.stderr
    assert "loss" not in ended.stdout


CODE = "from torch.nn.functional import scaled_dot_product_attention as attend\n"


HELD: tuple[Any] = (F.scaled_dot_product_attention,)
"""In a tuple, where the search does not find it: a name of this module would be replaced as well."""


@pytest.mark.parametrize("has_file", [True, False], ids=["a file", "no file"])
@pytest.mark.parametrize("name", ["sched", "mine"])
def test_a_module_of_the_users_is_searched_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, has_file: bool
) -> None:
    def marker() -> None:
        """Takes the function's place."""

    module = types.ModuleType(name)
    if has_file:
        module.__file__ = str(tmp_path / f"{name}.py")
    exec(CODE, module.__dict__)  # noqa: S102  (as notebooks and test runners make modules)
    monkeypatch.setitem(sys.modules, name, module)
    replace_names(HELD[0], marker)
    try:
        assert module.attend is marker
    finally:
        replace_names(marker, HELD[0])
    assert vars(module)["attend"] is HELD[0]
    assert vars(F)["scaled_dot_product_attention"] is HELD[0]


def attending(attend: Any) -> nn.Sequential:
    """A model that has a function in each way in which a model can have one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = attend

        def of_default(self, number: int, function: Any = attend) -> Any:
            return number, function

        def of_keyword(self, *, function: Any = attend) -> Any:
            return function

        def of_closure(self) -> Any:
            return attend

    return nn.Sequential(Model())


def test_a_function_is_replaced_wherever_a_model_has_it() -> None:
    def marker() -> None:
        """Takes the function's place."""

    root = attending(HELD[0])
    model: Any = root[0]
    for old, new in (HELD[0], marker), (marker, HELD[0]):
        replace_in_model(root, old, new)
        assert [model.attend, model.of_keyword(), model.of_closure()] == [new] * 3
        assert model.of_default(1) == (1, new)


SCRIPT = CHECKOUT / "examples" / "export_plan.py"

PLAN = """
modules:
  "layers.*.up": mxfp8
  layers.0.up: int8_token
  layers.0.down: mxfp4
  head: {recipe: bf16, why: no recipe reaches the target}
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


@exhaustive("make test quantises by our own layers")
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
