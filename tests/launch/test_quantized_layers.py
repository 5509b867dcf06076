"""Do quantised layers compute as they say, and does a capture see what they compute with?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ranktape.analyze import quantize
from ranktape.capture import Capture, unregister_role
from ranktape.launch import demo
from ranktape.launch.demo_train import GPT, VOCABULARY, GPTConfig
from ranktape.launch.quantized_layers import QUANTIZATIONS, ROLE, QuantizedLinear, quantize_linears
from ranktape.storage import open_run

CAPTURED = ("mxfp8", "nvfp4")
"""One with scales that are powers of two, and one with numbers of a format."""

CONFIG = GPTConfig(layers=2, width=32, heads=2, context=16)


def _model(quant: str) -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    if quant != demo.UNQUANTIZED:
        quantize_linears(model, how=QUANTIZATIONS[quant])
    return model


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


@pytest.fixture(autouse=True)
def _no_role() -> Iterator[None]:
    yield
    unregister_role(ROLE)


class Captured(NamedTuple):
    path: Path
    losses: list[float]


Runs = dict[str, Captured]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same training, plain and quantised, with its first step captured."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    for quant in (demo.UNQUANTIZED, *CAPTURED):
        model = _model(quant)
        with Capture(root / quant, start=0, min_iterations=1, model=model, layer_type=["linear"]):
            found[quant] = Captured(root / quant, _train(model, steps=3))
        unregister_role(ROLE)
    return found


def _recorded(path: Path) -> Recorded:
    return {(record.module, record.tensor_name): record.tensor() for record in open_run(path).select()}


def test_the_option_has_the_words_that_the_training_knows() -> None:
    (option,) = (one for one in demo.command.params if one.name == "quant")
    choices: Any = option.type
    assert list(choices.choices) == [demo.UNQUANTIZED, *QUANTIZATIONS]


def test_every_linear_layer_is_replaced_and_keeps_its_name_and_its_parameters() -> None:
    plain, quantised = _model("none"), _model("mxfp8")
    assert {name for name, _ in plain.named_modules()} == {name for name, _ in quantised.named_modules()}
    assert not any(isinstance(module, nn.Linear) for module in quantised.modules())
    expected = plain.state_dict()
    assert list(quantised.state_dict()) == list(expected)
    for name, value in quantised.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_quantised_layer_is_called_and_looks_as_a_linear_layer_does() -> None:
    linear = nn.Linear(4, 3).eval()
    model = nn.ModuleDict({"first": linear, "second": linear, "other": nn.Bilinear(2, 2, 2)})
    quantize_linears(model, how=QUANTIZATIONS["mxfp8"])
    first = model["first"]
    assert isinstance(first, QuantizedLinear)
    assert model["second"] is first
    assert (first.in_features, first.out_features, first.training) == (4, 3, False)
    assert repr(first) == "QuantizedLinear(4, 3, mxfp8_e4m3 forward, mxfp8_e5m2 backward)"
    x = torch.randn(2, 4)
    torch.testing.assert_close(first(input=x), first(x), rtol=0, atol=0)


def test_a_class_of_its_own_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
            return 2 * super().forward(input)

    model = nn.Sequential(Doubled(4, 3))
    quantize_linears(model, how=QUANTIZATIONS["mxfp8"])
    assert isinstance(model[0], Doubled)


@pytest.mark.parametrize("quant", CAPTURED)
def test_a_capture_records_what_the_products_are_computed_with(quant: str, runs: Runs) -> None:
    records = _recorded(runs[quant].path)
    how = QUANTIZATIONS[quant]
    assert how.forward is not None
    for name, layer in _model(quant).named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        x, weight = records[name, "input"], records[name, "weight"]
        assert x.dtype is weight.dtype is torch.bfloat16
        assert layer.bias is None or torch.equal(records[name, "bias"], layer.bias)
        bias = None if layer.bias is None else records[name, "bias"].to(torch.bfloat16)
        torch.testing.assert_close(records[name, "output"], F.linear(x, weight, bias), rtol=0, atol=0)
        quantised = quantize(
            layer.weight.detach().to(torch.bfloat16),
            how.forward,
            scaling=how.scaling,
            scale_rule=how.scale_rule,
            warn=False,
        )
        torch.testing.assert_close(weight, quantised.values.to(torch.bfloat16), rtol=0, atol=0)


def test_the_recorded_gradients_are_those_of_the_products(runs: Runs) -> None:
    records = _recorded(runs["mxfp8"].path)
    how, name = QUANTIZATIONS["mxfp8"], "layers.1.feed_forward.up"
    layer = _model("mxfp8").get_submodule(name)
    grad_output = records[name, "grad_output"].flatten(0, 1)
    weight = how.operand(layer.weight.detach().to(torch.bfloat16), axis=0)  # type: ignore[operator]
    expected = how.gradient(grad_output, axis=-1) @ weight
    torch.testing.assert_close(records[name, "grad_input"].flatten(0, 1), expected, rtol=0, atol=0)
    assert records[name, "grad_weight"].shape == (128, 32)
    assert records[name, "grad_weight"].dtype is torch.bfloat16


def test_runs_with_and_without_have_the_same_records(runs: Runs) -> None:
    plain, quantised = (_recorded(runs[quant].path) for quant in ("none", "nvfp4"))
    assert {name: value.shape for name, value in plain.items()} == {name: one.shape for name, one in quantised.items()}
    layers = {record.module: record.layer_idx for record in open_run(runs["nvfp4"].path).select()}
    assert layers == {record.module: record.layer_idx for record in open_run(runs["none"].path).select()}
    assert layers["layers.1.attention.query"] == 1


@pytest.mark.parametrize("quant", CAPTURED)
def test_a_capture_changes_no_loss(quant: str, runs: Runs) -> None:
    assert _train(_model(quant), steps=3) == runs[quant].losses


@pytest.mark.parametrize("quant", QUANTIZATIONS)
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


def test_the_documentation_lists_what_the_demo_does() -> None:
    text = (Path(__file__).parents[2] / "docs" / "fake_quantization.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [(word, how.forward, how.backward) for word, how in QUANTIZATIONS.items()]
