"""Do recipes mean what their names, files and fields say, and are wrong ones refused?"""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ranktape.analyze import quantize
from ranktape.analyze.numerics.quantization.operand import named_operand, quantized_operands
from ranktape.analyze.numerics.recipes.recipe import HighPrecision, OperandRecipe, ProductRecipe, Recipe, products_of
from ranktape.analyze.numerics.recipes.table import ALIASES, RECIPES
from ranktape.analyze.numerics.recipes.words import (
    KEYS,
    OPTIONS,
    parse_recipe,
    parse_recipes,
    read_recipe_file,
    recipe_to_yaml,
    recipes_from_yaml,
)
from ranktape.errors import UsageError
from ranktape.yaml_file import parse_yaml


def in_file(folder: Path, text: str) -> Path:
    path = folder / "recipes.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_shipped_recipe_has_a_name_and_a_source_and_can_be_sent() -> None:
    for name in RECIPES:
        recipe = parse_recipe(name)
        assert (recipe.name, parse_recipe(recipe)) == (name, recipe)
        assert len(recipe.source) > 20
        assert pickle.loads(pickle.dumps(recipe)) == recipe  # noqa: S301 - our own


def test_shipped_recipes_differ_from_each_other_and_other_words_mean_one_of_them() -> None:
    without_names = [dataclasses.replace(one, name="x", source="x") for one in RECIPES.values()]
    assert all(one not in without_names[:place] for place, one in enumerate(without_names))
    assert {word: parse_recipe(word).name for word in ALIASES} == ALIASES


def test_the_words_of_a_recipe_say_it_again(tmp_path: Path) -> None:
    for name in RECIPES:
        mine = dataclasses.replace(RECIPES[name], name="mine", seed=3, draws=2)
        path = in_file(tmp_path, yaml.safe_dump({"mine": recipe_to_yaml(mine)}))
        assert parse_recipe(path) == mine


FILE = """
wide_weights:
  operands: {input: mxfp8_e4m3, weight: none, grad_output: {scheme: mxfp8_e5m2, scale_rule: rceil}}
mine:
  source: a trial
  base: wide_weights
  operands:
    all: {block_size: 16}
    weight: {scheme: nvfp4}
  products:
    grad_weight: {rotation: 16, rotation_seed: 0, grad_output: {rounding: stochastic}}
  high_precision: {first_layers: 1, last_layers: 0.25, modules: ["*head"]}
  seed: 7
  draws: 4
"""


def test_a_file_says_what_differs_from_a_base_and_from_what_holds_for_all(tmp_path: Path) -> None:
    text = FILE.replace("weight: none", "weight: mxfp6")
    wide, mine = parse_recipes([in_file(tmp_path, text)])
    assert wide.products == products_of(
        input=OperandRecipe(scheme="mxfp8_e4m3"),
        weight=OperandRecipe(scheme="mxfp6"),
        grad_output=OperandRecipe(scheme="mxfp8_e5m2", scale_rule="rceil"),
    )
    x = OperandRecipe(scheme="mxfp8_e4m3", block_size=16)
    grad = OperandRecipe(scheme="mxfp8_e5m2", scale_rule="rceil", block_size=16)
    weight = OperandRecipe(scheme="nvfp4")
    assert mine == Recipe(
        name="mine",
        source="a trial",
        products={
            "output": ProductRecipe(operands={"input": x, "weight": weight}),
            "grad_input": ProductRecipe(operands={"grad_output": grad, "weight": weight}),
            "grad_weight": ProductRecipe(
                operands={"grad_output": dataclasses.replace(grad, rounding="stochastic"), "input": x},
                rotation=16,
                rotation_seed=0,
            ),
        },
        high_precision=HighPrecision(first_layers=1, last_layers=0.25, modules=("*head",)),
        seed=7,
        draws=4,
    )


def test_a_rotation_of_the_base_is_taken_back_with_its_signs(tmp_path: Path) -> None:
    text = """
turned: {operands: nvfp4, products: {output: {rotation: 16, rotation_seed: 1}}}
back: {base: turned, products: {output: {rotation: 0}}}
"""
    turned, back = parse_recipes([in_file(tmp_path, text)])
    assert (turned.products["output"].rotation, turned.products["output"].rotation_seed) == (16, 1)
    assert back.products == RECIPES["nvfp4"].products


def test_names_files_and_recipes_mix_and_each_comes_once(tmp_path: Path) -> None:
    path = in_file(tmp_path, "mine: {operands: mxfp8_e5m2}")
    found = parse_recipes(f"nvfp4, {path},hifp8,nvfp4")
    assert [one.name for one in found] == ["nvfp4", "mine", "hif8"]
    assert parse_recipes(["nvfp4", path, RECIPES["hif8"]]) == found
    assert parse_recipe(str(path)) == read_recipe_file(path)["mine"]
    assert [one.name for one in parse_recipes(["nvfp4,mxfp8", "mxfp8"])] == ["nvfp4", "mxfp8"]


def test_a_wrong_file_is_refused_with_the_recipe_and_the_key(tmp_path: Path) -> None:
    for text, message in [
        ("", "contains no recipes"),
        ("- nvfp4", "contains no recipes"),
        ("mine: {operands: nvfp4", "is not YAML that is read here: line 1"),
        ("mine: {}", "mine: input has no scheme"),
        ("mine:", "mine: must be a mapping of base, .* not None"),
        ("nvfp4: {operands: mxfp4}", "nvfp4 is the name of a recipe that comes with ranktape"),
        ("a b: {operands: mxfp4}", "'a b' is no name of a recipe"),
        ("mine: {operand: nvfp4}", "mine: unknown key 'operand': did you mean operands"),
        ("mine: {operands: nvfp5}", r"mine, operands.all: format 'nvfp5' is not known: did you mean nvfp4"),
        ("mine: {operands: {weights: nvfp4}}", "mine, operands: unknown key 'weights': did you mean weight"),
        ("mine: {operands: {all: {scheme: nvfp4, block: 16}}}", "operands.all: unknown key 'block'"),
        ("mine: {operands: {all: {block_size: 16}}}", "operands.all: there is no scheme"),
        ("mine: {operands: {all: {scheme: }}}", "operands.all.scheme: is empty"),
        ("mine: {operands: {all: {scheme: 4}}}", "operands.all.scheme: must be a scheme or none, not 4"),
        ("mine: {operands: {all: {scheme: nvfp4, prescale: 0}}}", "operands.all: prescale is 0"),
        (f"mine: {{operands: {{all: {{scheme: nvfp4, prescale: 1{'0' * 400}}}}}}}", "operands.all: prescale is 1000"),
        ("mine: {operands: {all: {scheme: nvfp4, prescale: 1.0e-320}}}", "operands.all: prescale is 1e-320"),
        ("mine: {operands: {all: {scheme: nvfp4, prescale: half}}}", "operands.all: prescale is 'half'"),
        ("mine: {base: nvfp4, high_precision: {outside: 1}}", "high_precision: outside is 1"),
        ("mine: {operands: {all: {scheme: nvfp4, four_over_six: 1}}}", "operands.all: four_over_six is 1"),
        ("mine: {operands: {all: {scheme: mxfp8, scale_rule: [floor]}}}", r"operands.all: scale_rule is \['floor'\]"),
        ("mine: {operands: {all: {scheme: mxfp8, scale_format: 8}}}", "operands.all: scale_format is 8"),
        ("mine: {operands: {all: {scheme: mxfp8, block_size: [1, 2, 3]}}}", r"operands.all: block_size is \(1, 2, 3\)"),
        (
            "mine: {operands: {all: {scheme: mxfp8, block_size: 9999999999}}}",
            "at least one element, at most 2147483647",
        ),
        ("mine: {base: nvfp4, products: {output: {rotation: 8192}}}", "give a power of two from 2 to 4096"),
        ("mine: {operands: {all: {scheme: none, block_size: 4}}}", "operands.all: block_size has no effect"),
        (
            "mine: {base: nvfp}",
            "mine, base: 'nvfp' is neither a shipped recipe nor an earlier one in the file: did you mean nvfp4",
        ),
        ("mine: {base: later}\nlater: {base: nvfp4}", "'later' is neither a shipped recipe nor an earlier"),
        ("mine: {base: nvfp4, products: {grad_weigth: {}}}", "unknown key 'grad_weigth': did you mean grad_weight"),
        ("mine: {base: nvfp4, products: {output: {grad_output: mxfp4}}}", "products.output: unknown key 'grad_output'"),
        ("mine: {base: nvfp4, products: {output: {rotation: 12}}}", "products.output: rotation is 12"),
        ("mine: {base: nvfp4, products: {output: {rotation_seed: 1}}}", "there is no rotation"),
        ("mine: {base: nvfp4, high_precision: {last_layers: 1.5}}", "high_precision: last_layers is 1.5"),
        ("mine: {base: nvfp4, high_precision: {first_layers: -1}}", "high_precision: first_layers is -1"),
        ("mine: {base: nvfp4, high_precision: {modules: head}}", "high_precision: modules is 'head'"),
        ("mine: {base: nvfp4, draws: 0}", "mine: draws is 0"),
        ("mine: {base: nvfp4, draws: 2000}", "mine: draws is 2000"),
        ("mine: {base: nvfp4, seed: many}", "mine: seed is 'many'"),
        ("mine: {base: nvfp4, source: 3}", "mine, source: must be text, not 3"),
    ]:
        path = in_file(tmp_path, text)
        with pytest.raises(UsageError, match=message) as caught:
            parse_recipe(path)
        assert str(path) in str(caught.value)


def test_what_names_no_recipe_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ("nvfp5", "recipe 'nvfp5' is not known: did you mean nvfp4"),
        ("mxfp8,,nvfp4", "has an empty name"),
        ("", "has an empty name"),
        (("nvfp4,",), "recipe 'nvfp4,' has an empty name"),
        ([], "has an empty name"),
        ("missing.yaml", "recipe missing.yaml cannot be read"),
        ([3], "recipe 3 is not a name"),
        (None, "recipe None is not a name"),
        ([RECIPES["nvfp4"], dataclasses.replace(RECIPES["mxfp8"], name="nvfp4")], "two different recipes are called"),
    ]
    for words, message in cases:
        with pytest.raises(UsageError, match=message):
            parse_recipes(words)


def test_one_recipe_is_wanted_of_a_file(tmp_path: Path) -> None:
    path = in_file(tmp_path, "a: {base: nvfp4}\nb: {base: mxfp8}")
    with pytest.raises(UsageError, match=r"contains 2 recipes \(a, b\)"):
        parse_recipe(path)


def test_a_recipe_in_python_has_all_products_and_operands() -> None:
    nvfp4 = RECIPES["nvfp4"]
    backwards = {name: nvfp4.products["output"].operands[name] for name in ("weight", "input")}
    wrong: list[tuple[dict[str, ProductRecipe], str]] = [
        ({}, "output is missing"),
        ({**nvfp4.products, "bias": nvfp4.products["output"]}, "there is no 'bias'"),
        ({**nvfp4.products, "output": nvfp4.products["grad_weight"]}, "product output: there is no 'grad_output'"),
        ({**nvfp4.products, "output": ProductRecipe(operands={})}, "product output: input is missing"),
        ({**nvfp4.products, "output": ProductRecipe(operands=backwards)}, "product output: give input before weight"),
    ]
    for products, message in wrong:
        with pytest.raises(UsageError, match=message):
            dataclasses.replace(nvfp4, products=products)


def test_only_products_with_stochastic_rounding_are_computed_for_several_draws() -> None:
    once = OperandRecipe(scheme="mxfp4", rounding="stochastic")
    products = products_of(OperandRecipe(scheme="mxfp4"), grad_output=once)
    recipe = Recipe(name="drawn", source="gradients alone", products=products, seed=5, draws=3)
    assert [list(recipe.seeds_of(product)) for product in products] == [[5], [5, 6, 7], [5, 6, 7]]


def test_first_and_last_layers_stay_in_bf16() -> None:
    for kept, num_layers, expected in [
        (HighPrecision(first_layers=1, last_layers=2), 8, {0, 6, 7}),
        # Of 62 blocks the 2 and 8 of arXiv 2509.25149; of 2 none, so that small models are quantised too.
        (HighPrecision(first_layers=2 / 62, last_layers=8 / 62), 62, {0, 1, *range(54, 62)}),
        (HighPrecision(first_layers=2 / 62, last_layers=8 / 62), 2, set()),
        (HighPrecision(first_layers=5, last_layers=5), 3, {0, 1, 2}),
    ]:
        recipe = dataclasses.replace(RECIPES["nvfp4"], high_precision=kept)
        made = [recipe.of_layer("layers.up", layer_idx=index, num_layers=num_layers) for index in range(-1, num_layers)]
        wide = {index for index, one in enumerate(made, start=-1) if one.products == RECIPES["bf16"].products}
        assert wide == expected
        assert all(one.name == "nvfp4" for one in made)


def test_what_is_outside_of_the_stack_stays_in_bf16_where_there_is_a_stack() -> None:
    recipe = dataclasses.replace(RECIPES["nvfp4"], high_precision=HighPrecision(outside=True))
    places = [(-1, 4), (0, 4), (3, 4), (-1, 0)]
    speeds = [recipe.of_layer("any", layer_idx=index, num_layers=number).speed for index, number in places]
    assert speeds == [1, 4, 4, 4]


def test_modules_stay_in_bf16_by_their_paths() -> None:
    recipe = dataclasses.replace(RECIPES["nvfp4"], high_precision=HighPrecision(modules=("*head", "layers.?.gate")))
    wide = [
        module
        for module in ("head", "model.lm_head", "layers.1.gate", "layers.12.gate", "layers.1.gate_up")
        if recipe.of_layer(module, layer_idx=-1, num_layers=16).speed == 1
    ]
    assert wide == ["head", "model.lm_head", "layers.1.gate"]


def test_bits_hold_the_scales_of_blocks() -> None:
    for name, bits, speed in [
        ("bf16", 16.0, 1),
        ("mxfp8", 8.25, 2),
        ("mxfp8_e5m2_grad", 8.25, 2),
        ("mxfp6", 6.25, 2),
        ("mxfp4", 4.25, 4),
        ("nvfp4", 4.5, 4),
        ("hif8", 8.0, 2),
        ("fp8_tensor", 8.0, 2),
        ("int8_token", 8.0, 2),
        # One product is that of bf16.
        ("mxfp4_rht_sr", (16 + 2 * 4.25) / 3, 3 / (1 + 2 / 4)),
        # Two of six operands are weights in tiles.
        ("fp8_deepseek", (4 * (8 + 32 / 128) + 2 * (8 + 32 / 128**2)) / 6, 2),
        ("fp8_deepseek_ue8m0", (4 * (8 + 8 / 128) + 2 * (8 + 8 / 128**2)) / 6, 2),
        ("nvfp4_nvidia", (4 * 4.5 + 2 * (4 + 8 / 256)) / 6, 4),
        ("nvfp4_4over6", (4 * 4.5 + 2 * (4 + 8 / 256)) / 6, 4),
    ]:
        assert RECIPES[name].bits == pytest.approx(bits)
        assert RECIPES[name].speed == pytest.approx(speed)


def test_bits_and_speed_are_those_of_all_products() -> None:
    tiles = OperandRecipe(scheme="nvfp4", block_size=(16, 16))
    assert tiles.bits == 4 + 8 / 256
    mixed = products_of(OperandRecipe(scheme="nvfp4"), grad_output=OperandRecipe())
    recipe = Recipe(name="mixed", source="wide gradients", products=mixed)
    assert recipe.bits == (4 * 4.5 + 2 * 16) / 6
    assert recipe.speed == 3 / (1 / 4 + 1 + 1)


PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_the_table_has_a_row_for_every_recipe() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (\d) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(one.name, f"{one.bits:.4g}", f"{one.speed:g}", one.source) for one in RECIPES.values()]


def test_the_file_on_the_page_says_every_recipe() -> None:
    words = parse_yaml(BLOCKS[0][1], place="the page")
    found = recipes_from_yaml(words, place="the page", shipped={})
    assert found == {name: dataclasses.replace(one, source=found[name].source) for name, one in RECIPES.items()}


def test_the_page_names_every_key_and_what_every_row_is_tested_with() -> None:
    keys, tested = PAGE.partition("| key | ")[2], PAGE.partition("## How the rows are tested")[2]
    assert [key for key in (*KEYS, *OPTIONS, "rotation", "rotation_seed") if f"`{key}`" not in keys] == []
    assert [name for name in RECIPES if f"`{name}`" not in tested] == []


def test_the_examples_run_and_print_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (own,) = (text for language, text in BLOCKS[1:] if language == "yaml")
    Path("own.yaml").write_text(own, encoding="utf-8")
    assert list(read_recipe_file(Path("own.yaml"))) == ["nvfp4_mine", "wide_gradients"]
    (example,) = (text for language, text in BLOCKS if language == "python")
    names: dict[str, Any] = {}
    exec(compile(example, "docs/recipes.md", "exec"), names)  # noqa: S102 - our own page
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", example)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_both_operands_are_quantised_along_the_sum_in_their_order() -> None:
    product = RECIPES["mxfp8_e5m2_grad"].products["grad_weight"]
    grad_OT, x_IT = numbers(24, 64), numbers(40, 64, seed=1)
    first, second = quantized_operands(product, grad_OT, x_IT, seed=0)
    for found, matrix, scheme in ((first, grad_OT, "mxfp8_e5m2"), (second, x_IT, "mxfp8_e4m3")):
        expected = quantize(matrix, scheme, scale_rule="rceil", warn=False)
        assert torch.equal(found.dequantized(), expected.values)


def test_an_operand_that_is_left_as_it_is_keeps_its_numbers() -> None:
    product = ProductRecipe(operands={"input": OperandRecipe(), "weight": OperandRecipe(scheme="mxfp4")})
    first, _ = quantized_operands(product, numbers(3, 5), numbers(4, 5), seed=0)
    assert torch.equal(first.values, numbers(3, 5))
    assert first.factor == 1


@pytest.mark.parametrize("length", [1, 63, 64, 100])
@pytest.mark.parametrize("scheme", [None, "fp32"])
def test_a_rotation_of_both_operands_leaves_their_product(length: int, scheme: str | None) -> None:
    """Whatever the length of the sum; and one that is left as it is turns with the other."""
    operands = {"input": OperandRecipe(), "weight": OperandRecipe(scheme=scheme)}
    product = ProductRecipe(operands=operands, rotation=64, rotation_seed=3)
    given = numbers(7, length), numbers(5, length, seed=1)
    one, other = (operand.values.double() for operand in quantized_operands(product, *given, seed=0))
    assert one.shape[1] == other.shape[1] == -(-length // 64) * 64
    assert not torch.equal(one[:, :length].float(), given[0])
    torch.testing.assert_close((one @ other.T).float(), (given[0].double() @ given[1].double().T).float())


def test_only_a_matrix_is_an_operand() -> None:
    product = RECIPES["nvfp4_nvidia"].products["grad_weight"]
    for tensor in (torch.tensor(1.0), numbers(3), numbers(2, 3, 4)):
        with pytest.raises(UsageError, match=f"has {tensor.ndim} dimensions"):
            named_operand(product, "input", tensor, seed=0)


def test_a_prescale_moves_the_numbers_on_the_grid_and_the_factor_takes_it_back() -> None:
    matrix = numbers(8, 64)
    product = ProductRecipe(
        operands={"input": OperandRecipe(scheme="mxfp4", prescale=0.75), "weight": OperandRecipe(scheme="mxfp4")}
    )
    found, plain = quantized_operands(product, matrix, matrix, seed=0)
    assert torch.equal(found.values.float(), quantize(matrix * 0.75, "mxfp4", warn=False).values)
    assert (found.factor, plain.factor) == (4 / 3, 1)
    assert found.is_bf16


def test_draws_follow_the_seed_and_differ_between_the_operands() -> None:
    drawn = OperandRecipe(scheme="mxfp4", rounding="stochastic")
    product = ProductRecipe(operands={"grad_output": drawn, "input": drawn})
    matrix = numbers(32, 64)
    pairs = [quantized_operands(product, matrix, matrix, seed=seed) for seed in (0, 0, 1, 2)]
    values = [[operand.values for operand in pair] for pair in pairs]
    assert all(torch.equal(one, other) for one, other in zip(values[0], values[1], strict=True))
    different = [*values[0], *values[2], *values[3]]
    assert not any(torch.equal(one, two) for i, one in enumerate(different) for two in different[:i])
    assert torch.equal(named_operand(product, "input", matrix, seed=2).values, values[3][1])
