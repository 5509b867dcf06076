"""Are the errors of replayed products those that plain loops in float64 find with `quantize`?"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from ranktape.analyze.numerics import products
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.products import RECORDED, ProductError, replay_products
from ranktape.analyze.numerics.quantization import operand
from ranktape.analyze.numerics.quantization.operand import (
    QuantizedOperand,
    difference_from,
    matrix_product,
    named_operand,
    quantized_operand,
    quantized_operands,
)
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, OperandRecipe, ProductRecipe, Recipe, products_of
from ranktape.analyze.numerics.recipes.table import RECIPES
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.errors import UsageError
from tests.exhaustive import exhaustive_but

Tensors = dict[str, torch.Tensor]

TWIN = {
    "output": ("ti,oi->to", {"input": 1, "weight": 1}),
    "grad_input": ("to,io->ti", {"grad_output": 1, "weight": 0}),
    "grad_weight": ("ot,it->oi", {"grad_output": 0, "input": 0}),
}
"""Of each product the sum over matrices whose rows are summed, and along which axis operands have their blocks."""


def call(*, tokens: int = 96, inputs: int = 160, outputs: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A call of a linear layer with outlier channels, and everything that was computed in its type."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, tokens // 4, inputs, generator=generator)
    x[..., :3] *= 30
    made = {
        "input": x,
        "weight": torch.randn(outputs, inputs, generator=generator) * 0.02,
        "grad_output": torch.randn(4, tokens // 4, outputs, generator=generator) * 1e-6,
    }
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def results(operands: Tensors) -> Tensors:
    x, weight, grad = (operands[name] for name in ("input", "weight", "grad_output"))
    return {"output": x @ weight.T, "grad_input": grad @ weight, "grad_weight": grad.flatten(0, 1).T @ x.flatten(0, 1)}


def twin(operands: Tensors, product: str, recipe: Recipe | None) -> Any:
    """The product in float64 of operands as `quantize` leaves them, one by one."""
    equation, axes = TWIN[product]
    sides = {}
    for name, axis in axes.items():
        matrix = operands[name].flatten(0, -2).float().numpy()
        rows = matrix if axis else matrix.T
        sides[name] = rows if recipe is None else quantised(rows, recipe.products[product], name, seed=recipe.seed)
    return np.einsum(equation, *sides.values())


def quantised(rows: Any, product: ProductRecipe, name: str, *, seed: int) -> Any:
    how = product.operands[name]
    options: dict[str, Any] = dict(how.options)
    if how.is_stochastic:
        options["seed"] = 3 * seed + ["input", "weight", "grad_output"].index(name)
    if product.rotation:
        options |= {"rotation": product.rotation, "rotation_seed": product.rotation_seed}
    padding = -rows.shape[1] % (product.rotation or 1)
    padded = np.pad(rows, ((0, 0), (0, padding))) * np.float32(how.prescale)
    axis = 0 if how.scaling == "channel" else 1
    values = quantize(padded, how.scheme, axis=axis, warn=False, **options).values if how.scheme else padded
    return np.asarray(values, dtype=np.float64) / how.prescale


def by_name(errors: list[ProductError]) -> dict[tuple[str, str], ProductError]:
    return {(one.product, one.recipe): one for one in errors}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("small", "rel"), [(1 << 10, 5e-4), (1 << 40, 1e-5)], ids=["differences", "products"])
@exhaustive_but("differences-dtype0", "products-dtype1", reason="each way and each type is in make test")
def test_errors_are_those_of_the_twin(
    small: int, rel: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operand, "SMALL", small)
    operands = call(dtype=dtype)
    recorded, recipes = results(operands), list(RECIPES.values())
    found = by_name(replay_products(operands, recipes, recorded=recorded))
    assert list(found) == [(product, name) for product in PRODUCTS for name in (RECORDED, *(r.name for r in recipes))]
    for product, wanted in recorded.items():
        exact, was = twin(operands, product, None), wanted.flatten(0, -2).double().numpy()
        own = found[product, RECORDED]
        assert own.recorded is None
        check(own.exact, exact, was, rel=rel)
        for recipe in recipes:
            result, row = twin(operands, product, recipe), found[product, recipe.name]
            check(row.exact, exact, result, rel=rel)
            assert row.recorded is not None
            check(row.recorded, was, result, rel=rel)


def test_tiles_that_are_no_squares_lie_along_the_sum_of_each_product() -> None:
    row = OperandRecipe(scheme="mxfp4_e2m1")
    of_tiles = products_of(row, weight=dataclasses.replace(row, block_size=(2, 32)))
    recipe = Recipe(name="tiles", source="here", products=of_tiles)
    operands = call()
    for (product, _), found in by_name(replay_products(operands, [recipe])).items():
        check(found.exact, twin(operands, product, None), twin(operands, product, recipe), rel=5e-4)


@pytest.mark.parametrize("sample_dim", [0, 1])
def test_errors_of_samples_are_those_of_their_rows(sample_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operand, "SMALL", 1 << 10)
    operands = call()
    recorded, recipes = results(operands), parse_recipes("fp8_tensor,nvfp4")
    found = replay_products(operands, recipes, recorded=recorded, sample_dim=sample_dim)
    sizes = operands["input"].shape[:-1]
    assert [(one.product, one.recipe, one.sample) for one in found] == [
        (product, name, sample)
        for product in ("output", "grad_input")
        for name in (RECORDED, "fp8_tensor", "nvfp4")
        for sample in range(sizes[sample_dim])
    ]
    of_recipes: dict[str, Recipe | None] = {one.name: one for one in recipes} | {"exact": None}
    slow = {(name, recipe): twin(operands, name, of_recipes[recipe]) for name in recorded for recipe in of_recipes}
    for one in found:
        assert one.sample is not None
        was = recorded[one.product].flatten(0, -2).double().numpy()
        exact = slow[one.product, "exact"]
        got = was if one.recipe == RECORDED else slow[one.product, one.recipe]
        exact, was, got = (rows.reshape(*sizes, -1).take(one.sample, axis=sample_dim) for rows in (exact, was, got))
        check(one.exact, exact, got, rel=2e-3)
        if one.recipe != RECORDED:
            assert one.recorded is not None
            check(one.recorded, was, got, rel=2e-3)
    with pytest.raises(UsageError, match="sample_dim=2 is no dimension of the tokens of input"):
        replay_products(operands, recipes, sample_dim=2)


def check(found: ErrorSums, reference: Any, result: Any, *, rel: float) -> None:
    """Within what sums in float32 leave of the reference, and differences in bfloat16 of the errors."""
    errors = result - reference
    scale, size = float(np.linalg.norm(reference)), float(np.linalg.norm(errors))
    assert found.num_elements == found.num_compared == reference.size
    assert math.sqrt(found.error_squared) == pytest.approx(size, rel=rel, abs=1e-6 * scale)
    assert math.sqrt(found.reference_squared) == pytest.approx(scale, rel=1e-6)
    assert found.norm_ratio == pytest.approx(np.linalg.norm(result) / scale, rel=max(rel / 5, 1e-6))
    assert found.cosine == pytest.approx(
        (reference * result).sum() / scale / np.linalg.norm(result), rel=max(rel / 5, 1e-6)
    )
    assert found.max_error == pytest.approx(
        np.abs(errors).max(), rel=max(rel * 10, 1e-6), abs=1e-6 * float(np.abs(reference).max())
    )
    assert found.error == pytest.approx(errors.sum(), abs=1e-3 * size * math.sqrt(errors.size) + 1e-5 * scale)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_a_product_of_bfloat16_loses_nothing(*, is_bf16: bool) -> None:
    operands = call(tokens=256, inputs=384, outputs=128)
    a, b = (quantized_operand(operands[name].flatten(0, -2)) for name in ("input", "weight"))
    if not is_bf16:
        b = dataclasses.replace(b, values=b.values.float() * 1.0001)
    exact = a.values.double() @ b.values.double().T
    before = torch.get_float32_matmul_precision()
    found = matrix_product(a, dataclasses.replace(b, factor=0.3))
    assert torch.get_float32_matmul_precision() == before
    assert found.dtype is torch.float32
    assert (found.double() - 0.3 * exact).norm() <= 1e-6 * 0.3 * exact.norm()
    factors = torch.arange(1.0, 257.0), torch.arange(1.0, 129.0)
    scaled = matrix_product(dataclasses.replace(a, factor=factors[0]), dataclasses.replace(b, factor=factors[1]))
    wanted = exact * torch.outer(*factors)
    assert (scaled.double() - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has one setting alone")
def test_what_is_chosen_for_all_backends_still_counts_afterwards() -> None:
    backends: Any = torch.backends
    a = quantized_operand(torch.ones(2, 2))
    before = backends.fp32_precision
    try:
        for chosen in ("tf32", "ieee"):
            backends.fp32_precision = chosen
            matrix_product(a, a)
            assert (backends.mkldnn.matmul.fp32_precision, backends.cuda.matmul.fp32_precision) == (chosen, chosen)
    finally:
        backends.fp32_precision = before


def test_a_process_that_asks_for_fewer_bits_does_not_change_the_reference() -> None:
    operands = call(tokens=64, dtype=torch.float32)
    found = replay_products(operands, parse_recipes("nvfp4"))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert replay_products(operands, parse_recipes("nvfp4")) == found
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_difference_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, 300, generator=generator).bfloat16().float() for size in (200, 250))
    exact = a.double() @ b.double().T
    base = exact.bfloat16()
    sides = [QuantizedOperand(values=one.bfloat16(), factor=1.0) for one in (a, b)]
    found = difference_from(base, *sides)
    if found is None:
        pytest.skip("this processor does not multiply bfloat16")
    wanted = exact - base.double()
    assert ((found.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-4).all()
    assert difference_from(base, dataclasses.replace(sides[0], values=sides[0].values.float()), sides[1]) is None
    assert difference_from(base, dataclasses.replace(sides[0], factor=torch.ones(200)), sides[1]) is None
    assert difference_from(base[:2, :2], *(dataclasses.replace(one, values=one.values[:2]) for one in sides)) is None


def test_operands_are_quantised_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def counted(product: Any, name: str, x: torch.Tensor, *, seed: int) -> QuantizedOperand:
        made.append((name, x.stride(), product.operands[name]))
        return named_operand(product, name, x, seed=seed)

    monkeypatch.setattr(products, "named_operand", counted)
    operands = call()
    recipes = parse_recipes("bf16,fp8_tensor,nvfp4,mxfp8,mxfp8_e5m2_grad")
    many = [dataclasses.replace(one, name=f"{one.name}_{copy}") for one in recipes for copy in range(2)]
    found = by_name(replay_products(operands, many))
    # Three of one scale for the tensor, six of nvfp4 and of mxfp8, two gradients of mxfp8_e5m2_grad.
    assert len(made) == len(set(made)) == 3 + 6 + 6 + 2
    for product in PRODUCTS:
        for one in recipes:
            same = found[product, f"{one.name}_0"].exact
            assert same == found[product, f"{one.name}_1"].exact
        assert found[product, "bf16_0"].exact.sqnr == math.inf
    monkeypatch.setattr(products, "MAX_CACHED", 2)
    made.clear()
    assert by_name(replay_products(operands, many)) == found
    assert len(made) > 3 + 6 + 6 + 2


def test_no_operand_is_kept_after_its_last_product() -> None:
    weight_alone = Recipe(
        name="weight", source="here", products=products_of(OperandRecipe(), weight=OperandRecipe(scheme="nvfp4"))
    )
    matrices = {name: one.reshape(-1, one.shape[-1]) for name, one in call().items()}
    recipes = [RECIPES["bf16"], weight_alone, RECIPES["bf16"]]
    jobs = [job for recipe in recipes for job in products._draws("output", recipe, matrices=matrices)]
    kept = products._Operands(matrices, jobs=jobs)
    for job in dict.fromkeys(jobs):
        kept.of(job)
    assert not kept._cache


def test_draws_are_pooled_and_differ() -> None:
    noisy = OperandRecipe(scheme="mxfp4_e2m1", rounding="stochastic")
    recipe = Recipe(name="noisy", source="here", products=products_of(noisy), seed=3)
    operands = call()
    each = [
        by_name(replay_products(operands, [dataclasses.replace(recipe, seed=3 + draw)]))["output", "noisy"].exact
        for draw in range(3)
    ]
    assert len({one.error_squared for one in each}) == 3
    pooled = by_name(replay_products(operands, [dataclasses.replace(recipe, draws=3)]))["output", "noisy"].exact
    assert pooled.to_array() == pytest.approx(ErrorSums.pooled([one.to_array() for one in each]).to_array())


def test_only_products_with_both_operands() -> None:
    operands = call()
    recipes = parse_recipes("nvfp4")
    for missing, left in (("weight", "grad_weight"), ("input", "grad_input"), ("grad_output", "output")):
        given = {name: tensor for name, tensor in operands.items() if name != missing}
        assert [one.product for one in replay_products(given, recipes)] == [left]
    assert replay_products({}, recipes) == replay_products({"weight": operands["weight"]}, recipes) == []
    assert replay_products(operands, []) == []
    assert [one.product for one in replay_products(operands, recipes, products=["grad_input"])] == ["grad_input"]


def test_nan_rows_and_no_tokens() -> None:
    operands = call()
    operands["input"][0, 0, 5] = math.nan
    found = by_name(replay_products(operands, parse_recipes("nvfp4"), recorded=results(operands)))
    tokens, outputs, inputs = 96, 64, 160
    output = found["output", "nvfp4"]
    assert output.recorded is not None
    for sums in (output.exact, output.recorded, found["output", RECORDED].exact):
        assert [sums.num_elements, sums.num_compared, sums.num_lost] == [tokens * outputs, (tokens - 1) * outputs, 0]
    gradient = found["grad_weight", "nvfp4"].exact
    assert [gradient.num_compared, gradient.num_lost] == [outputs * (inputs - 1), 0]
    assert found["grad_input", "nvfp4"].exact.num_compared == tokens * inputs
    nothing = call(tokens=0)
    for (product, _), row in by_name(
        replay_products(nothing, parse_recipes("nvfp4"), recorded=results(nothing))
    ).items():
        assert row.exact.num_elements == (outputs * inputs if product == "grad_weight" else 0)
        assert row.exact.sqnr == (math.inf if product == "grad_weight" else None)


def test_operands_that_are_none_are_refused() -> None:
    cases: list[tuple[Tensors, str]] = [
        ({"bias": torch.zeros(64)}, "'bias' is no operand of a linear layer: give input, weight, grad_output"),
        ({"weight": torch.zeros(64, 160, dtype=torch.int8)}, "weight has elements of torch.int8"),
        ({"weight": torch.zeros(2, 64, 160)}, r"weight has the shape \[2, 64, 160\]: it needs \[outputs, inputs\]"),
        ({"input": torch.tensor(1.0)}, r"input has the shape \[\]: it needs at least one dimension"),
        ({"weight": torch.zeros(64, 161)}, r"weight of shape \[64, 161\] has 161 inputs and input 160"),
        ({"grad_output": torch.zeros(95, 64)}, r"grad_output of shape \[95, 64\] has 95 tokens and input 96"),
    ]
    for change, message in cases:
        with pytest.raises(UsageError, match=message):
            replay_products(call() | change, parse_recipes("nvfp4"))


def test_a_recorded_result_of_another_call_is_refused() -> None:
    with pytest.raises(UsageError, match="the recorded output has 5 elements and the product of its operands 6144"):
        replay_products(call(), parse_recipes("nvfp4"), recorded={"output": torch.zeros(5)})


def test_the_mean_of_drawn_products_converges_and_that_of_rounded_ones_does_not() -> None:
    """Of unbiased products the error of the mean of N is that of one over the root of N, at every N."""
    operands = call()
    exact = twin(operands, "grad_weight", None)
    recipe = RECIPES["mxfp4_rht_sr"].products["grad_weight"]
    even = {name: dataclasses.replace(operand, rounding=None) for name, operand in recipe.operands.items()}
    errors = {}
    for product in (recipe, dataclasses.replace(recipe, operands=even)):
        sides = [operands[name].flatten(0, -2).T for name in PRODUCTS["grad_weight"]]
        draws = [matrix_product(*quantized_operands(product, *sides, seed=seed)).double() for seed in range(64)]
        means = {count: torch.stack(draws[:count]).mean(0).numpy() for count in (1, 4, 16, 64)}
        errors[product is recipe] = {count: np.linalg.norm(mean - exact) for count, mean in means.items()}
    for count, error in errors[True].items():
        assert error * math.sqrt(count) == pytest.approx(errors[True][1], rel=0.15), count
    assert errors[False][64] == pytest.approx(errors[False][1])
    drawn = by_name(replay_products(operands, [dataclasses.replace(RECIPES["mxfp4_rht_sr"], draws=16)]))
    sums = drawn["grad_weight", "mxfp4_rht_sr"].exact
    assert sums.bias is not None
    assert sums.gain is not None
    assert abs(sums.bias) < 4
    assert sums.gain == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", ["near", "far", "spoiled"])
def test_what_was_recorded_does_not_change_the_exact_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operand, "SMALL", 1 << 10)
    operands, recipes = call(), parse_recipes("nvfp4,int8_token")
    recorded = results(operands)
    if kind == "far":
        recorded = {name: tensor + 0.1 * tensor.std() for name, tensor in recorded.items()}
    if kind == "spoiled":
        recorded["output"][0, 0, :2] = torch.tensor([math.nan, math.inf])
    alone = by_name(replay_products(operands, recipes))
    beside = by_name(replay_products(operands, recipes, recorded=recorded))
    for key, row in alone.items():
        assert beside[key].exact.to_array() == pytest.approx(row.exact.to_array(), rel=2e-3, abs=1e-9), key
        assert beside[key].exact.sqnr == pytest.approx(row.exact.sqnr, abs=1e-3)
