"""Does a precision plan say the same when it is read again, and what is wrong with one that a person wrote?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ranktape.analyze.numerics.recipes.plan_file import PlannedModule, PrecisionPlan, parse_plan, read_plan, write_plan
from ranktape.analyze.numerics.recipes.recipe import HighPrecision, OperandRecipe, Recipe, products_of
from ranktape.analyze.numerics.recipes.words import parse_recipe
from ranktape.errors import UsageError

OWN = Recipe(
    name="mine",
    source="a test",
    products=products_of(OperandRecipe(scheme="mxfp8_e4m3"), weight=OperandRecipe(scheme="nvfp4"), rotations=None),
    high_precision=HighPrecision(first_layers=1),
    seed=3,
)

PLAN = PrecisionPlan(
    run="runs/demo",
    target_sqnr={"output": 18.0, "grad_weight": 15.5},
    candidates=("nvfp4", "mxfp8", "mine"),
    modules=(
        PlannedModule(
            module="layers.0.query",
            recipe=parse_recipe("nvfp4"),
            multiply_adds=300,
            sqnr={"output": 19.25, "grad_weight": math.inf},
            worst_sqnr={"output": 18.5, "grad_weight": math.inf},
        ),
        PlannedModule(module="0", recipe=parse_recipe("mxfp8"), multiply_adds=100),
        PlannedModule(module="layers.0.key", recipe=OWN, multiply_adds=0),
        PlannedModule(module="head", recipe=parse_recipe("bf16"), multiply_adds=400, why="nothing: holds [18 dB]"),
    ),
)


def test_a_plan_that_was_written_is_the_same_when_it_is_read(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == PLAN


def test_the_file_has_what_a_person_wants_to_know(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text(encoding="utf-8")
    assert "layers.0.query:\n    recipe: nvfp4\n    bits: 4.5\n    speed: 4.0\n" in text
    assert "multiply_adds: {nvfp4: 0.375, mxfp8: 0.125, mine: 0.0, bf16: 0.5}" in text
    # 4.5 bits for 3 of 8, 8.25 for 1 and 16 for 4; a quarter, a half and all of the time.
    assert PLAN.mean_bits == pytest.approx((3 * 4.5 + 8.25 + 4 * 16) / 8)
    assert PLAN.relative_gemm_time == pytest.approx((3 / 4 + 1 / 2 + 4) / 8)


def test_the_means_of_a_plan_by_hand_are_not_known() -> None:
    plan = parse_plan("modules: {'*': mxfp8}", place="")
    assert plan.multiply_adds == {}
    assert math.isnan(plan.mean_bits)


def test_the_longest_names_of_a_large_model_fit(tmp_path: Path) -> None:
    names = [f"model.decoder.layers.{layer}.mlp.experts.{expert}.up" for layer in range(20) for expert in range(20)]
    modules = tuple(PlannedModule(module=name, recipe=parse_recipe("nvfp4"), sqnr={"output": 20.0}) for name in names)
    write_plan(PrecisionPlan(modules=modules), tmp_path / "plan.yaml")
    assert list(read_plan(tmp_path / "plan.yaml").recipes_of(names)) == names


def test_a_name_goes_before_a_pattern_and_a_pattern_before_later_ones() -> None:
    text = "modules: {'*.up': mxfp8, 0.up: bf16, '*': nvfp4, 1.up: mxfp4}"
    recipes = parse_plan(text, place="").recipes_of(["0.up", "1.up", "2.up", "0.down"])
    found = {name: recipe.name for name, recipe in recipes.items()}
    assert found == {"1.up": "mxfp4", "2.up": "mxfp8", "0.down": "nvfp4"}
    assert parse_plan("modules: {0.up: mxfp8}", place="").recipes_of(["0.up", "1.up"]).keys() == {"0.up"}


def test_what_is_wrong_with_a_plan_is_said_with_its_place() -> None:
    for text, match in [
        ("", "must be a mapping of run, .* not None"),
        ("[]", "must be a mapping"),
        ("{}", r"names no modules: write modules: \{layers.0.mlp.up: nvfp4\}"),
        ("modules: {}", "names no modules"),
        ("modules: [head]", "names no modules"),
        ("modul: {}", "unknown key 'modul': did you mean modules"),
        ("modules: {head: mxfp9}", r"plan.yaml, modules.head: recipe 'mxfp9' is not known: did you mean mxfp8"),
        ("modules: {head: 4}", "modules.head: must be a mapping"),
        ("modules: {head: {}}", "modules.head, recipe: must be the name of a recipe, such as mxfp8, not None"),
        ("modules: {head: {recipe: mxfp8, sqnr: 18}}", "modules.head, sqnr: must be a mapping of output"),
        ("modules: {head: {recipe: mxfp8, sqnr: {outptu: 1}}}", "unknown key 'outptu': did you mean output"),
        ("modules: {head: {recipe: mxfp8, sqnr: {output: high}}}", "sqnr.output: must be a number of dB"),
        ("modules: {head: {recipe: mxfp8, sqnr: {output: .nan}}}", "sqnr.output: must be a number of dB, not nan"),
        (f"{{target_sqnr: {{output: 1{'0' * 400}}}, modules: {{head: mxfp8}}}}", "target_sqnr.output: must be a"),
        (
            "modules: {head: {recipe: mxfp8, multiply_adds: -1}}",
            "multiply_adds: must be a whole number, 0 or more, not -1",
        ),
        ("modules: {head: {recipe: mxfp8, why: 3}}", "why: must be text, not 3"),
        ("{run: 3, modules: {head: mxfp8}}", "run: must be text, not 3"),
        ("{candidates: mxfp8, modules: {head: mxfp8}}", "candidates: must be a list of names, not 'mxfp8'"),
        ("{target_sqnr: {all: 3}, modules: {head: mxfp8}}", "target_sqnr: unknown key 'all'"),
        ("{recipes: {mine: 3}, modules: {head: mine}}", "plan.yaml, recipes, mine: must be a mapping"),
        ("modules: {head: mxfp8, head: nvfp4}", "'head' is given twice"),
        ("modules: {head: *other}", "aliases"),
    ]:
        with pytest.raises(UsageError, match=match):
            parse_plan(text, place="plan.yaml")


def test_a_plan_for_another_model_names_what_is_not_there() -> None:
    plan = parse_plan("modules: {layers.0.quary: mxfp8, '*.up': mxfp8}", place="")
    with pytest.raises(UsageError, match=r"names layers.0.quary and 1 more, .* did you mean layers.0.query"):
        plan.recipes_of(["layers.0.query", "head"])
    plan = parse_plan("modules: {experts: bf16, head: bf16, up: mxfp8}", place="")
    assert plan.recipes_of(["up"], others={"experts": "Experts", "head": "Linear"}).keys() == {"up"}
    with pytest.raises(UsageError, match=r"names up, and .* no such nn.Linear: it is a Doubled: give it bf16"):
        plan.recipes_of(["experts", "head"], others={"up": "Doubled"})
    with pytest.raises(UsageError, match="names module head twice"):
        PrecisionPlan(modules=(PLAN.modules[3], PLAN.modules[3]))


def test_a_file_that_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plan .*missing.yaml cannot be read"):
        read_plan(tmp_path / "missing.yaml")
    with pytest.raises(UsageError, match=r"cannot be written \(Is a directory\)"):
        write_plan(PLAN, tmp_path)
