"""Do quantised layers compute as they say, and does a capture see what they compute with?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ranktape.analyze import compare, fake_quantize
from ranktape.analyze.numerics.quantization.operand import quantized_operands
from ranktape.analyze.numerics.quantization.quantized_layers import QuantizedLinear
from ranktape.analyze.numerics.recipes.plan_file import parse_plan
from ranktape.analyze.numerics.recipes.recipe import HighPrecision, OperandRecipe, Recipe, products_of
from ranktape.analyze.numerics.recipes.words import parse_recipe
from ranktape.capture import Capture
from ranktape.errors import UsageError
from ranktape.launch.demo_train import GPT, VOCABULARY, GPTConfig
from ranktape.storage import open_run
from tests.exhaustive import exhaustive_but

PLAIN = "bf16"

CAPTURED = ("mxfp8_e5m2_grad", "nvfp4")
"""One with scales that are powers of two, and one with numbers of a format."""

CONFIG = GPTConfig(layers=2, width=32, heads=2, context=16)


def _model(quant: str) -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    return fake_quantize(model, recipe=quant)


def _train(model: GPT, *, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (3, 17), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


Recorded = dict[tuple[str, str], torch.Tensor]


class Captured(NamedTuple):
    path: Path
    losses: list[float]


Runs = dict[str, Captured]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same training, plain and quantised, with its first step captured."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    for quant in (PLAIN, *CAPTURED):
        model = _model(quant)
        with Capture(root / quant, start_at=0, min_iterations=1, model=model, select="layer_type=linear"):
            found[quant] = Captured(root / quant, _train(model, steps=3))
    return found


def _recorded(path: Path) -> Recorded:
    return {(record.module, record.tensor_name): record.tensor() for record in open_run(path).select()}


def test_every_linear_layer_is_replaced_and_keeps_its_name_and_its_parameters() -> None:
    plain, quantised = _model(PLAIN), _model("mxfp8")
    assert {name for name, _ in plain.named_modules()} == {name for name, _ in quantised.named_modules()}
    assert not any(isinstance(module, nn.Linear) for module in quantised.modules())
    assert not any(isinstance(module, QuantizedLinear) for module in plain.modules())
    expected = plain.state_dict()
    assert list(quantised.state_dict()) == list(expected)
    for name, value in quantised.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_quantised_layer_is_called_and_looks_as_a_linear_layer_does() -> None:
    linear = nn.Linear(4, 3).eval()
    model = nn.ModuleDict({"first": linear, "second": linear, "other": nn.Bilinear(2, 2, 2)})
    assert fake_quantize(model, recipe="mxfp8") is model
    first = model["first"]
    assert isinstance(first, QuantizedLinear)
    assert model["second"] is first
    assert (first.in_features, first.out_features, first.training) == (4, 3, False)
    assert repr(first) == "QuantizedLinear(4, 3, recipe=mxfp8)"
    x = torch.randn(2, 4)
    torch.testing.assert_close(first(input=x), first(x), rtol=0, atol=0)


def test_a_class_of_its_own_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
            return 2 * super().forward(input)

    model = fake_quantize(nn.Sequential(Doubled(4, 3), nn.Linear(3, 2)), recipe="mxfp8")
    assert isinstance(model[0], Doubled)
    assert isinstance(model[1], QuantizedLinear)


def _recipes_of(model: nn.Module) -> dict[str, str]:
    named = model.named_modules()
    return {name: module.recipe.name for name, module in named if isinstance(module, QuantizedLinear)}


def test_layers_that_a_recipe_leaves_in_high_precision_stay_as_they_are() -> None:
    recipe = Recipe(
        name="mine",
        source="",
        products=products_of(OperandRecipe(scheme="nvfp4")),
        high_precision=HighPrecision(last_layers=1, modules=("*.value",)),
    )
    assert list(_recipes_of(fake_quantize(GPT(CONFIG), recipe=recipe))) == [
        *(f"layers.0.attention.{name}" for name in ("query", "key", "output")),
        *(f"layers.0.feed_forward.{name}" for name in ("up", "down")),
        "head",
    ]


def test_a_plan_gives_each_layer_a_recipe_of_its_own() -> None:
    text = """
    modules:
      layers.0.attention.query: bf16
      layers.*.attention.*: {recipe: nvfp4}
      layers.1.attention.key: mine
    recipes:
      mine: {operands: mxfp8_e5m2}
    """
    plan = parse_plan(text, place="plan.yaml")
    found = _recipes_of(fake_quantize(GPT(CONFIG), plan=plan))
    assert found == {
        f"layers.{layer}.attention.{name}": "mine" if (layer, name) == (1, "key") else "nvfp4"
        for layer in range(2)
        for name in ("query", "key", "value", "output")
        if (layer, name) != (0, "query")
    }


def test_projections_of_multihead_attention_in_a_plan_stay_as_they_are_with_a_warning() -> None:
    # They are recorded and replayed, so that a plan made from a recording names them.
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    named = ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    plan = parse_plan(f"modules: {{{', '.join(f'layers.0.{name}: mxfp8' for name in named)}}}", place="plan.yaml")
    model = nn.TransformerEncoder(block, num_layers=1, enable_nested_tensor=False)
    with pytest.warns(UserWarning, match=r"layers.0.self_attn.in_proj and 1 more stay as they are: nn.Multi"):
        fake_quantize(model, plan=plan)
    quantized = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert quantized == ["layers.0.linear1", "layers.0.linear2"]
    with pytest.raises(UsageError, match=r"names layers.0.self_atn.in_proj, and the model has no such"):
        fake_quantize(nn.Sequential(block), plan=parse_plan("modules: {layers.0.self_atn.in_proj: mxfp8}", place=""))


def test_what_cannot_be_quantised_says_why() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    for given, options, match in (
        (model, {}, "give recipe='mxfp8', or plan='plan.yaml'"),
        (model, {"recipe": "mxfp8", "plan": "plan.yaml"}, "by a recipe or by a plan"),
        (model, {"recipe": "mxfp9"}, "did you mean mxfp8"),
        (model, {"plan": "missing.yaml"}, "missing.yaml cannot be read"),
        (
            model,
            {"plan": parse_plan("modules: {'1': mxfp8}", place="")},
            "names 1, and the model has no such nn.Linear",
        ),
        (nn.Linear(4, 3), {"recipe": "mxfp8"}, "the Linear is a linear layer itself: put it into nn.Sequential"),
        (nn.ReLU(), {"recipe": "mxfp8"}, "the ReLU has no nn.Linear"),
    ):
        with pytest.raises(UsageError, match=match):
            fake_quantize(given, **options)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("quant", CAPTURED)
def test_a_capture_records_what_the_products_are_computed_with(quant: str, runs: Runs) -> None:
    records = _recorded(runs[quant].path)
    product = parse_recipe(quant).products["output"]
    for name, layer in _model(quant).named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        x, weight = records[name, "input"], records[name, "weight"]
        assert x.dtype is weight.dtype is torch.bfloat16
        assert layer.bias is None or torch.equal(records[name, "bias"], layer.bias)
        bias = None if layer.bias is None else records[name, "bias"].to(torch.bfloat16)
        torch.testing.assert_close(records[name, "output"], F.linear(x, weight, bias), rtol=0, atol=0)
        wide_x, wide_weight = records[name, "wide_input"], records[name, "wide_weight"]
        torch.testing.assert_close(wide_weight, layer.weight.detach().to(torch.bfloat16), rtol=0, atol=0)
        narrow = quantized_operands(product, wide_x.flatten(0, -2), wide_weight, seed=0)
        for found, operand in zip((x.flatten(0, -2), weight), narrow, strict=True):
            torch.testing.assert_close(found, operand.dequantized().to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("quant", CAPTURED)
def test_the_recorded_gradients_are_those_of_the_products(quant: str, runs: Runs) -> None:
    """Made of what the run holds of a layer: the operands before they were quantised, and the gradient."""
    records = _recorded(runs[quant].path)
    products, name = parse_recipe(quant).products, "layers.1.feed_forward.up"
    grad = records[name, "grad_output"].flatten(0, 1)
    wide_x, wide_weight = records[name, "wide_input"].flatten(0, 1), records[name, "wide_weight"]
    for product, operands in (("grad_input", (grad, wide_weight.T)), ("grad_weight", (grad.T, wide_x.T))):
        narrow = quantized_operands(products[product], *operands, seed=0)
        one, other = (operand.dequantized().to(torch.bfloat16) for operand in narrow)
        found = records[name, product]
        torch.testing.assert_close(found.reshape(one.shape[0], -1), one @ other.T, rtol=0, atol=0)


def test_runs_with_and_without_have_the_same_records_but_for_the_wide_operands(runs: Runs) -> None:
    plain, quantised = (_recorded(runs[quant].path) for quant in (PLAIN, "nvfp4"))
    narrow = {place: one.shape for place, one in quantised.items() if not place[1].startswith("wide_")}
    assert {place: value.shape for place, value in plain.items()} == narrow
    for name in ("input", "weight"):
        wide = {module for module, found in quantised if found == f"wide_{name}"}
        assert wide == {module for module, found in quantised if found == name}
    layers = {record.module: record.layer_idx for record in open_run(runs["nvfp4"].path).select()}
    assert layers == {record.module: record.layer_idx for record in open_run(runs[PLAIN].path).select()}
    assert layers["layers.1.attention.query"] == 1


def test_runs_with_and_without_are_compared_although_one_has_more_records(runs: Runs) -> None:
    plain, quantised = (open_run(runs[quant].path).select() for quant in (PLAIN, "nvfp4"))
    table = compare(plain, quantised)
    assert any("wide_input" in note and "no counterpart" in note for note in table.notes)
    assert {row["tensor_name"] for row in table.records()} >= {"input", "weight", "output"}
    with pytest.raises(UsageError, match=r"of the first side have no counterpart: .* output"):
        compare(plain, quantised.select(tensor_name=["input", "weight"]))


@pytest.mark.parametrize("quant", CAPTURED)
def test_a_capture_changes_no_loss(quant: str, runs: Runs) -> None:
    assert _train(_model(quant), steps=3) == runs[quant].losses


@pytest.mark.parametrize("quant", ["mxfp8", "mxfp4", "hifp8", "nvfp4", "int8_token"])
@exhaustive_but("nvfp4", reason="one recipe is in make test")
def test_the_loss_goes_down(quant: str) -> None:
    model = _model(quant)
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5
    assert losses[-1] < 3


def test_the_example_of_the_documentation_gives_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "fake_quantization.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [expected] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/fake_quantization.md", "exec"), {"__name__": "example"})  # noqa: S102  # our own page
    assert capsys.readouterr().out == expected


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler looks
def test_compiled_programs_call_what_quantises_and_give_the_same() -> None:
    torch.manual_seed(0)
    model = fake_quantize(nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 8)), recipe="mxfp8")
    x = torch.randn(6, 40, requires_grad=True)

    def loss(wide: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = model(fake_quantize(2 * wide, backward="mxfp8_e5m2"))
        return outputs.square().sum()

    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(loss(x), leaves)
    found = torch.autograd.grad(torch.compile(loss, backend="eager")(x), leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
