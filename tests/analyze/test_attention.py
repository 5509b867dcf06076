"""Is attention that is computed again what torch's own is, in every layout, and are its operands quantised as said?"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ranktape.analyze.numerics.attention import (
    ATTENTION_OPERANDS,
    ATTENTION_PRODUCTS,
    CAUSAL,
    FULL,
    AttentionForm,
    attention_products,
    heads_second,
    quantised_attention,
    replay_attention,
)
from ranktape.analyze.numerics.error_sums import error_sums
from ranktape.analyze.numerics.quantization.quantized_product import Draws, quantized_attention
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.recipes.recipe import OperandRecipe, Recipe, products_of
from ranktape.analyze.numerics.recipes.words import parse_recipe
from ranktape.analyze.replays.tasks import UnknownFormError, find_form
from ranktape.errors import UsageError

FORMS = {
    "causal": CAUSAL,
    "full": FULL,
    "scaled": AttentionForm(scale=0.5),
    "window": AttentionForm(before=3, after=0),
    "both sides": AttentionForm(before=2, after=1),
}


def operands_of(
    *,
    batch: int = 2,
    heads: int = 4,
    groups: int = 4,
    queries: int = 9,
    keys: int | None = None,
    size: int = 16,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (batch, heads, queries, size),
        "key": (batch, groups, keys or queries, size),
        "value": (batch, groups, keys or queries, 8),
        "grad_output": (batch, heads, queries, 8),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def plain(operands: dict[str, torch.Tensor], form: AttentionForm) -> dict[str, torch.Tensor]:
    """Attention as its definition has it, and its gradients by autograd."""
    leaves = [operands[name].detach().requires_grad_() for name in ATTENTION_OPERANDS[:3]]
    query, key, value = leaves
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if form.scale is None else form.scale)
    for place in range(query.shape[2]):
        own = place + form.shift
        first = 0 if form.before is None else max(own - form.before, 0)
        last = key.shape[2] if form.after is None else own + form.after + 1
        hidden = torch.ones(key.shape[2], dtype=torch.bool)
        hidden[first:last] = False
        scores[:, :, place] = scores[:, :, place].masked_fill(hidden, -math.inf)
    output = scores.softmax(-1) @ value
    grads = torch.autograd.grad(output, leaves, operands["grad_output"])
    return dict(zip(ATTENTION_PRODUCTS, (output.detach(), *grads), strict=True))


def test_products_are_those_of_the_definition() -> None:
    for groups, form, (dtype, tolerance) in itertools.product(
        [1, 2, 4], FORMS.values(), [(torch.float64, 1e-12), (torch.float32, 1e-5)]
    ):
        operands = operands_of(groups=groups, dtype=dtype)
        found, expected = attention_products(operands, form=form), plain(operands, form)
        assert list(found) == list(ATTENTION_PRODUCTS)
        for name, one in found.items():
            assert (one.dtype, one.shape) == (dtype, expected[name].shape)
            assert torch.allclose(one, expected[name], rtol=tolerance, atol=tolerance), name
        without = {name: one for name, one in operands.items() if name != "grad_output"}
        assert list(attention_products(without, form=form)) == ["output"]


def test_the_last_query_may_see_the_last_key() -> None:
    operands = operands_of(queries=3, keys=7)
    form = AttentionForm(after=0, shift=4)
    found, expected = attention_products(operands, form=form), plain(operands, form)
    assert all(torch.allclose(found[name], expected[name]) for name in ATTENTION_PRODUCTS)
    assert not torch.allclose(found["output"], attention_products(operands, form=CAUSAL)["output"])


LAYOUTS = {"BHTD": (0, 1, 2, 3), "BTHD": (0, 2, 1, 3), "TBHD": (2, 0, 1, 3)}


def test_tensors_of_every_layout_are_turned_to_the_same() -> None:
    for layout, order in LAYOUTS.items():
        query = operands_of()["query"]
        seen = query.permute(order)
        assert torch.equal(heads_second(seen, layout), query)
        if layout != "BHTD":
            joined = seen.flatten(-2)
            assert torch.equal(heads_second(joined, layout[:3], num_heads=4), query)


def test_tensors_without_a_batch_heads_or_letters_have_one() -> None:
    query = operands_of()["query"]
    assert torch.equal(heads_second(query[0].transpose(0, 1), "THD"), query[:1])
    assert torch.equal(heads_second(query[0].transpose(0, 1).flatten(1), "TH", num_heads=4), query[:1])
    assert torch.equal(heads_second(query, ""), query)
    assert torch.equal(heads_second(query[:, 0], ""), query[:, :1])
    assert heads_second(query[0, 0], "").shape == (1, 1, 9, 16)


def test_other_tensors_are_refused() -> None:
    for shape, layout, num_heads, message in [
        ((2, 3, 4), "BHTD", None, "layout 'BHTD' is not that of a tensor with 3 dimensions"),
        ((4,), "", None, "not computed of tensors with 1 dimensions"),
        ((2, 3, 10), "BTH", 4, "10 elements are not those of 4 heads"),
        ((2, 3, 4), "BTI", None, "the layout 'BTI' is none of attention"),
    ]:
        with pytest.raises(UsageError, match=message):
            heads_second(torch.zeros(shape), layout, num_heads=num_heads)


def test_operands_that_do_not_belong_together_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"key": None}, "not computed without key"),
        ({"key": torch.zeros(2, 3, 9, 16)}, "not those of one attention: .*'key': \\(2, 3, 9, 16\\)"),
        ({"grad_output": torch.zeros(2, 4, 9, 16)}, "not those of one attention"),
        ({"query": torch.zeros(2, 4, 9)}, "not those of one attention"),
    ]
    for change, message in cases:
        operands = {name: one for name, one in (operands_of() | change).items() if one is not None}
        with pytest.raises(UsageError, match=message):
            attention_products(operands, form=CAUSAL)


def test_nothing_gives_nothing_and_nan_stays_where_it_is_seen() -> None:
    empty = attention_products(operands_of(batch=0), form=CAUSAL)
    assert {name: one.numel() for name, one in empty.items()} == dict.fromkeys(ATTENTION_PRODUCTS, 0)
    operands = operands_of()
    operands["value"][0, :, 5] = math.nan
    output = attention_products(operands, form=CAUSAL)["output"]
    assert output[0, :, 5:].isnan().all()
    assert output[1].isfinite().all()


def test_without_keys_attention_of_quantised_operands_is_zero() -> None:
    operands = operands_of(dtype=torch.float32)
    operands |= {name: operands[name][:, :, :0] for name in ("key", "value")}
    errors = replay_attention(operands, [parse_recipe("mxfp8")], form=FULL)
    assert [(one.product, one.exact.num_elements, one.exact.max_error) for one in errors] == [
        ("output", 2 * 4 * 9 * 8, 0.0),
        ("grad_query", 2 * 4 * 9 * 16, 0.0),
        ("grad_key", 0, 0.0),
        ("grad_value", 0, 0.0),
    ]


def test_operands_are_quantised_along_what_the_products_sum_over() -> None:
    operands = operands_of(queries=40, size=64, dtype=torch.float32)
    quantised = quantised_attention(operands, parse_recipe("mxfp8"))
    for name in ("query", "key"):
        assert torch.equal(quantised[name], quantize(operands[name], "mxfp8_e4m3", axis=-1, scale_rule="rceil").values)
    expected = quantize(operands["value"], "mxfp8_e4m3", axis=2, scale_rule="rceil").values
    assert torch.equal(quantised["value"], expected)
    small = OperandRecipe(scheme="mxfp4_e2m1", prescale=0.75)
    quantised = quantised_attention(operands, Recipe(name="small", source="none", products=products_of(small)))
    expected = quantize(0.75 * operands["query"], "mxfp4_e2m1", warn=False).values / 0.75
    assert torch.allclose(quantised["query"], expected, rtol=1e-6)
    wide = quantised_attention(operands, Recipe(name="wide", source="none", products=products_of(OperandRecipe())))
    assert all(torch.equal(wide[name], operands[name]) for name in operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_computes_what_a_replay_says_that_it_would(dtype: torch.dtype) -> None:
    recipe = parse_recipe("mxfp4")
    operands = operands_of(queries=40, size=64, dtype=dtype)
    leaves = [operands[name].clone().requires_grad_() for name in ATTENTION_OPERANDS[:3]]
    output = quantized_attention(
        lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        *leaves,
        recipe=recipe,
        draws=Draws(),
    )
    grads = torch.autograd.grad(output, leaves, operands["grad_output"])
    quantised = {name: one.to(dtype) for name, one in quantised_attention(operands, recipe).items()}
    expected = attention_products(quantised, form=CAUSAL)
    for name, got in zip(ATTENTION_PRODUCTS, (output, *grads), strict=True):
        assert torch.equal(got, expected[name]), name


def test_errors_of_recipes_and_of_what_was_recorded() -> None:
    operands = operands_of(queries=64, size=32, dtype=torch.bfloat16)
    recorded = attention_products(operands, form=CAUSAL)
    recipes = [parse_recipe(name) for name in ("bf16", "mxfp8", "mxfp4")]
    errors = replay_attention(operands, recipes, form=CAUSAL, recorded=recorded)
    assert [(one.product, one.recipe) for one in errors] == [
        (product, recipe) for product in ATTENTION_PRODUCTS for recipe in ("recorded", "bf16", "mxfp8", "mxfp4")
    ]
    exact = attention_products({name: one.float() for name, one in operands.items()}, form=CAUSAL)
    for product in ATTENTION_PRODUCTS:
        own, bf16, mxfp8, mxfp4 = (one for one in errors if one.product == product)
        assert own.exact == error_sums(exact[product], recorded[product])
        assert (own.recorded, bf16.exact.sqnr) == (None, math.inf)
        assert bf16.recorded == error_sums(recorded[product], exact[product])
        got = attention_products(quantised_attention(operands, recipes[1]), form=CAUSAL)
        assert mxfp8.exact == error_sums(exact[product], got[product])
        assert mxfp8.recorded == error_sums(recorded[product], got[product])
        levels = [one.sqnr or 0.0 for one in (own.exact, mxfp8.exact, mxfp4.exact)]
        assert [level > least for level, least in zip(levels, (40, 22, 10), strict=True)] == [True] * 3, levels
        assert levels == sorted(levels, reverse=True)


def test_draws_of_stochastic_rounding_are_added_up_and_differ() -> None:
    operands = operands_of(queries=16, size=32, dtype=torch.float32)
    drawn_gradient = OperandRecipe(scheme="mxfp4_e2m1", rounding="stochastic")
    products = products_of(OperandRecipe(scheme="mxfp4_e2m1"), grad_output=drawn_gradient)
    one = Recipe(name="one", source="none", products=products)
    several = Recipe(name="several", source="none", products=products, draws=3)
    [*_, single] = replay_attention(operands, [one], form=FULL)
    [*_, drawn] = replay_attention(operands, [several], form=FULL)
    assert (single.product, drawn.exact.num_elements) == ("grad_value", 3 * single.exact.num_elements)
    draws = [quantised_attention(operands, several, draw=draw) for draw in range(3)]
    assert not torch.equal(draws[0]["grad_output"], draws[1]["grad_output"])
    assert torch.equal(draws[0]["query"], draws[1]["query"])
    assert drawn.exact.error_squared != 3 * single.exact.error_squared


def recorded_output(operands: dict[str, torch.Tensor], form: AttentionForm) -> torch.Tensor:
    return attention_products(operands, form=form)["output"]


def test_what_was_said_of_a_call_is_its_form() -> None:
    operands = operands_of(dtype=torch.bfloat16)
    said = {"is_causal": True, "scale": 0.25, "dropout": 0.0}
    assert find_form(said, operands, output=None, compute_dtype=torch.bfloat16) == AttentionForm(scale=0.25, after=0)
    window = {"is_causal": True, "window": [3, 0], "cap": 0.0}
    found = find_form(window, operands, output=None, compute_dtype=torch.bfloat16)
    assert found == AttentionForm(before=3, after=0)
    endless = find_form({"is_causal": True, "window": 1 << 80}, operands, output=None, compute_dtype=torch.bfloat16)
    assert torch.equal(recorded_output(operands, endless), recorded_output(operands, CAUSAL))


@pytest.mark.parametrize("said", [{}, {"mask": "Tensor", "is_causal": False}, {"window": 4}], ids=str)
@pytest.mark.parametrize("form", [CAUSAL, FULL])
def test_a_mask_that_was_not_recorded_is_known_by_the_output(form: AttentionForm, said: dict[str, Any]) -> None:
    operands = operands_of(groups=2, dtype=torch.bfloat16)
    output = recorded_output(operands, form)
    assert find_form(said, operands, output=output, compute_dtype=torch.bfloat16) == form
    with pytest.raises(UnknownFormError, match="neither its mask nor its output"):
        find_form(said, operands, output=None, compute_dtype=torch.bfloat16)


def test_windows_and_alignments_are_known_by_the_output() -> None:
    operands = operands_of(dtype=torch.bfloat16)
    window = AttentionForm(before=3, after=0)
    output = recorded_output(operands, window)
    assert find_form({"mask": "Tensor", "window": 4}, operands, output=output, compute_dtype=torch.bfloat16) == window
    operands = operands_of(queries=3, keys=7, dtype=torch.bfloat16)
    for form in (CAUSAL, AttentionForm(after=0, shift=4)):
        output = recorded_output(operands, form)
        assert find_form({"is_causal": True}, operands, output=output, compute_dtype=torch.bfloat16) == form


def test_what_cannot_be_computed_again_is_said() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dropout": 0.1}, r"it uses random dropout \(0.1\)"),
        ({"cap": 50.0}, r"its scores are capped \(cap 50.0\)"),
        ({"scale": "Tensor"}, "its scale was not recorded as a number, but as 'Tensor'"),
        ({"scale": [1.0]}, r"its scale was not recorded as a number, but as \[1.0\]"),
        ({"window": ["a", None], "is_causal": "yes"}, "neither causal attention nor attention to all keys"),
        ({"mask": "BlockMask"}, "neither causal attention nor attention to all keys gives its output: mask was not"),
        ({}, "a mask, a bias, dropout or another scale was not recorded"),
    ]
    for said, message in cases:
        operands = operands_of(dtype=torch.bfloat16)
        mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.5
        mask |= torch.eye(9, dtype=torch.bool)
        output = F.scaled_dot_product_attention(operands["query"], operands["key"], operands["value"], attn_mask=mask)
        with pytest.raises(UnknownFormError, match=message):
            find_form(said, operands, output=output, compute_dtype=torch.bfloat16)
