"""A layer that loses more in recipes than its peers is found, with the reason that was planted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.recipes.words import parse_recipe
from ranktape.analyze.replays.operand_figures import product_figures
from ranktape.errors import UsageError
from tests.analyze.linear_runs import (
    Cause,
    Operands,
    cancelling_terms,
    hot_channels,
    linear_run,
    nothing,
    small_gradients,
)

RECIPES = "mxfp8,mxfp4,nvfp4"


def outliers(folder: Path, cause: Cause, *, recipe: str = RECIPES) -> list[Finding]:
    """What is said of recipes."""
    records = linear_run(folder, cause).select()
    found = find(records, recipe=recipe, engine=Engine(use_cache=False))
    return [finding for finding in found if finding.kind == "recipe_outlier"]


def test_layers_that_are_alike_are_quiet(tmp_path: Path) -> None:
    assert outliers(tmp_path, nothing) == []


def test_hot_channels_are_the_reason(tmp_path: Path) -> None:
    found = {finding.where["layer_idx"]: finding for finding in outliers(tmp_path, hot_channels)}
    finding = found[3]
    assert len(found) == 1
    assert finding.severity is Severity.MEDIUM
    assert finding.title.startswith("layers.3.query output loses ")
    assert " dB more than its peers under every 4-bit recipe, because 3 channels of its input hold 89" in finding.title
    assert finding.title.endswith("% of the energy")
    assert finding.command == (
        "ranktape analyze replay RUN --by iteration,rank --module layers.3.query --recipe mxfp4,nvfp4"
    )
    assert "; 3 channels of its input hold" in finding.evidence


def test_values_that_become_zero_are_the_reason(tmp_path: Path) -> None:
    found = outliers(tmp_path, small_gradients, recipe=f"{RECIPES},int8_token")
    titles = {title for finding in found for title in (finding.title, *finding.consequences)}
    for product in ("grad_input", "grad_weight"):
        (title,) = (one for one in titles if one.startswith(f"layers.2.query {product} loses "))
        assert " dB more than its peers under int8_token, because " in title
        assert title.endswith("% of the values of its grad_output become 0")


def test_terms_that_cancel_are_the_reason(tmp_path: Path) -> None:
    (finding,) = outliers(tmp_path, cancelling_terms)
    assert "layers.4.query output loses" in finding.title
    assert "because the terms of its sums cancel: it is " in finding.title
    assert "dB smaller than that of unrelated operands" in finding.title


def test_each_layer_has_a_reason_of_its_own(tmp_path: Path) -> None:
    def all_causes(layer: int, operands: Operands, rng: np.random.Generator) -> None:
        for cause in (hot_channels, small_gradients, cancelling_terms):
            cause(layer, operands, rng)

    found = outliers(tmp_path, all_causes, recipe=f"{RECIPES},int8_token")
    reasons = {finding.where["layer_idx"]: finding.title.partition(", because ")[2] for finding in found}
    assert sorted(reasons) == [2, 3, 4]
    for layer, words in ((2, "of its grad_output become 0"), (3, "channels of its input hold"), (4, "sums cancel")):
        assert words in reasons[layer]


def test_figures_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    operands = {"input": rng.standard_normal((40, 96)) ** 3, "weight": rng.standard_normal((24, 96))}
    operands["grad_output"] = rng.standard_normal((40, 24)) ** 5
    recipe = parse_recipe("mxfp4")
    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in operands.items()}
    x, g = (operands[name].astype(np.float32).astype(np.float64) for name in ("input", "grad_output"))
    found = product_figures("grad_weight", tensors, recipe)
    assert list(found.operands) == ["grad_output", "input"]
    product = g.T @ x
    unrelated = (g**2).sum() * (x**2).sum() / 40
    assert found.coherence == pytest.approx(10 * math.log10((product**2).sum() / unrelated), abs=1e-4)
    for name, values, other in (("grad_output", g, x), ("input", x, g)):
        figures = found.operands[name]
        for which, axis in (("rows", 1), ("channels", 0)):
            shares = np.sort((values**2).sum(axis=axis) / (values**2).sum())[::-1]
            np.testing.assert_allclose(figures.energy[which], shares, rtol=1e-6)
        # The product sums over the tokens, and so blocks of 32 lie along them; the last one is short.
        quantised = quantize(values.astype(np.float32), "mxfp4", axis=0, scale_rule="even", warn=False).values
        assert figures.flushed == pytest.approx((quantised == 0).mean())
        peaks = sum(len(part) * (part**2).max(axis=0).sum() for part in (values[:32], values[32:]))
        assert figures.crest == pytest.approx(10 * math.log10(peaks / (values**2).sum()), abs=1e-5)
        of_tokens = product_figures("grad_weight", tensors, parse_recipe("int8_token")).operands[name]
        peaks = (40 * (values**2).max(axis=0)).sum()
        assert of_tokens.crest == pytest.approx(10 * math.log10(peaks / (values**2).sum()), abs=1e-5)
        of_all = product_figures("grad_weight", tensors, parse_recipe("fp8_tensor")).operands[name]
        peaks = values.size * (values**2).max()
        assert of_all.crest == pytest.approx(10 * math.log10(peaks / (values**2).sum()), abs=1e-5)
        errors = (quantised - values).T @ other
        sqnr = 10 * math.log10((product**2).sum() / (errors**2).sum())
        assert figures.alone == pytest.approx(sqnr, abs=1e-3)


def test_operands_without_numbers_have_figures_that_say_nothing() -> None:
    tensors = {"input": torch.zeros(4, 8), "weight": torch.full((3, 8), math.nan)}
    found = product_figures("output", tensors, parse_recipe("nvfp4"))
    assert math.isnan(found.coherence)
    assert all(math.isnan(one.crest) and np.isnan(one.energy["rows"]).all() for one in found.operands.values())


def test_a_recipe_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'nvfp5' is not known"):
        find(linear_run(tmp_path).select(), recipe="nvfp5")
