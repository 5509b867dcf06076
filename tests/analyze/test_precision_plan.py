"""Does a plan give each layer the cheapest recipe that holds, and does a training with it lose what it says?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

from ranktape.analyze import fake_quantize
from ranktape.analyze.cli import cli
from ranktape.analyze.numerics.recipes.plan_file import (
    PlannedModule,
    PrecisionGap,
    PrecisionPlan,
    read_plan,
    write_plan,
)
from ranktape.analyze.numerics.recipes.recipe import HighPrecision, OperandRecipe, Recipe, products_of
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.questions.replay import _plan_table
from ranktape.analyze.replays.precision_plan import _gap, parse_targets, precision_plan
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.capture import Capture
from ranktape.errors import NoRecordsError, UsageError
from ranktape.launch.demo_train import GPT, GPTConfig, draw_batch, read_corpus
from ranktape.storage import Run, open_run
from tests.analyze.replay_runs import call_arrays, call_tensors
from tests.analyze.runs import store
from tests.exhaustive import exhaustive
from tests.runs import describe, write_run

CANDIDATES = "nvfp4,mxfp4,mxfp8,mxfp6"

SCALES = {"layers.0.up": 0.0, "layers.1.up": 1.0, "layers.2.up": 2.0}
"""By module the deviation of the logarithms of its tokens: how badly a sum over them bears narrow numbers."""


def _run(folder: Path, **more: Any) -> Run:
    """Layers that bear less and less, each in two calls of which the second is worse."""
    tensors = []
    for layer, (module, deviation) in enumerate(SCALES.items()):
        for iteration in range(2):
            arrays = call_arrays(tokens=64, inputs=64, outputs=32, seed=10 * layer + iteration)
            rng = np.random.default_rng(layer)
            sizes = np.exp((deviation + iteration / 2) * rng.standard_normal((64, 1))).astype(np.float32)
            arrays["input"] = arrays["input"] * sizes * sizes.T
            arrays["output"] = arrays["input"] @ arrays["weight"].T + arrays["bias"]
            arrays["grad_weight"] = arrays["grad_output"].T @ arrays["input"]
            tensors += call_tensors(arrays, module=module, layer_idx=layer, iteration=iteration, **more)
    return store(folder / "run", tensors)


def _slow_plan(replayed: Replayed, target: float) -> dict[str, str]:
    """By module the recipe, from every group of the replay."""
    found = {}
    for module in SCALES:
        groups = [one for one in replayed.groups(["module", "recipe", "product"]) if one.key["module"] == module]
        order = []
        for recipe in parse_recipes(CANDIDATES):
            own = [one.exact.sqnr for one in groups if one.key["recipe"] == recipe.name]
            least = min(sqnr for sqnr in own if sqnr is not None)
            if least >= target:
                order.append((-recipe.speed, recipe.bits, -least, recipe.name))
        found[module] = min(order)[-1] if order else "bf16"
    return found


def test_each_layer_gets_the_cheapest_recipe_that_holds(tmp_path: Path) -> None:
    records = _run(tmp_path).select()
    replayed = replay_calls(records, parse_recipes(CANDIDATES))
    seen = set()
    for target in (12, 18, 28, 60):
        plan = precision_plan(records, recipe=CANDIDATES, target_sqnr=target)
        expected = _slow_plan(replayed, target)
        assert {one.module: one.recipe.name for one in plan.modules} == expected
        assert list(expected) == [one.module for one in plan.modules]
        assert plan.run == str(tmp_path / "run")
        for one in plan.modules:
            # 64 tokens, inputs 64, outputs 32, three products, two calls.
            assert one.multiply_adds == 2 * 3 * 64 * 64 * 32
            assert (one.why is None) == (one.recipe.name != "bf16")
            assert all(one.worst_sqnr[product] <= sqnr for product, sqnr in one.sqnr.items())
        seen |= {*expected.values()}
    assert {"bf16", "mxfp8"} < seen
    assert seen & {"nvfp4", "mxfp4"}


def test_a_target_of_one_product_asks_nothing_of_the_others(tmp_path: Path) -> None:
    records = _run(tmp_path).select()
    plan = precision_plan(records, recipe="nvfp4", target_sqnr="grad_input=15")
    assert {one.recipe.name for one in plan.modules} == {"nvfp4"}
    assert [list(one.sqnr) for one in plan.modules] == [["grad_input"]] * 3
    assert plan.target_sqnr == {"grad_input": 15.0}


@exhaustive("make test has plans without such layers")
def test_layers_that_stay_in_bf16_say_why(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (first, second, third) = precision_plan(run.select(), recipe="mxfp4", target_sqnr=40).modules
    assert first.why is not None
    assert first.why.startswith("no recipe reaches 40 dB: mxfp4 comes nearest, with ")
    exempt = Recipe(
        name="mine",
        source="",
        products=products_of(OperandRecipe(scheme="mxfp8_e4m3")),
        high_precision=HighPrecision(first_layers=1),
    )
    (first, second, third) = precision_plan(run.select(), recipe=exempt, target_sqnr=10).modules
    assert (first.recipe.name, first.why) == ("bf16", "every recipe leaves it in bf16")
    assert {second.recipe.name, third.recipe.name} == {"mine"}


def test_a_layer_that_cannot_be_computed_again_stays_in_bf16_with_the_reason(tmp_path: Path) -> None:
    tensors = call_tensors(call_arrays(), module="whole") + call_tensors(
        call_arrays(), module="bare", without=["weight"]
    )
    plan = precision_plan(store(tmp_path / "run", tensors).select(), recipe="mxfp8", target_sqnr="output=10")
    assert {one.module: (one.recipe.name, one.why) for one in plan.modules} == {
        "whole": ("mxfp8", None),
        "bare": ("bf16", "no weight was recorded"),
    }
    assert plan.multiply_adds == {}
    bare = store(tmp_path / "bare", call_tensors(call_arrays(), module="bare", without=["weight", "input"])).select()
    with pytest.raises(NoRecordsError, match="no product of 1 linear layers can be computed again: no "):
        precision_plan(bare, recipe="mxfp8", target_sqnr=10)


def test_a_recipe_that_makes_nan_of_numbers_does_not_hold(tmp_path: Path) -> None:
    arrays = call_arrays()
    # It spoils the output that it is of, and the tile that it is in.
    arrays["weight"][0, 0] = np.nan
    tiles = OperandRecipe(scheme="nvfp4", block_size=(16, 16))
    recipe = Recipe(name="tiles", source="", products=products_of(OperandRecipe(scheme="nvfp4"), weight=tiles))
    records = store(tmp_path / "run", call_tensors(arrays)).select()
    (one,) = precision_plan(records, recipe=["nvfp4", recipe], target_sqnr={"output": 5}).modules
    assert one.recipe.name == "nvfp4"
    (one,) = precision_plan(records, recipe=recipe, target_sqnr={"output": 5}).modules
    assert one.why == "no recipe reaches 5 dB: tiles leaves NaN or Inf in output, or it has no elements"


def test_a_target_that_is_none_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ("high", "has 'high', which is no number of dB"),
        ("output", "has 'output', which is no number of dB: give one, as 18, or output=20,grad_weight=15"),
        ("output=", "has '', which is no number"),
        ("outptu=3", "names 'outptu', which is no product: did you mean output"),
        ("output=3,output=4", "has output twice"),
        (math.nan, "has nan, which is no number"),
        (True, "has True, which is no number"),
        ({"output": None}, "has None, which is no number"),
    ]
    for given, match in cases:
        with pytest.raises(UsageError, match=match):
            parse_targets(given)


def test_a_target_is_for_all_products_or_for_those_named() -> None:
    assert parse_targets("18") == parse_targets(18) == dict.fromkeys(("output", "grad_input", "grad_weight"), 18.0)
    assert parse_targets(" grad_weight=15, output = 20") == {"output": 20.0, "grad_weight": 15.0}


def test_the_target_of_a_budget_is_the_highest_that_keeps_to_it(tmp_path: Path) -> None:
    records = _run(tmp_path).select()
    bits = {
        halves / 2: precision_plan(records, recipe=CANDIDATES, target_sqnr=halves / 2).mean_bits
        for halves in range(24, 61, 18)
    }
    told = precision_plan(records, recipe=CANDIDATES, target_sqnr=18).bits_by_target
    assert {target: told[target] for target in bits} == bits
    assert len(set(bits.values())) > 2
    for budget in (4.6, 6.5, 8.3):
        plan = precision_plan(records, recipe=CANDIDATES, target_bits=budget)
        [target] = set(plan.target_sqnr.values())
        assert plan.mean_bits <= budget
        assert told[target] == plan.mean_bits
        assert [other for other, mean in told.items() if other > target and mean <= budget] == []
    with pytest.raises(UsageError, match=r"target_bits 3 is less than any plan .*: the least is 4\.25"):
        precision_plan(records, recipe=CANDIDATES, target_bits=3)
    with pytest.raises(UsageError, match="give target_sqnr or target_bits"):
        precision_plan(records, recipe=CANDIDATES)


def test_layers_without_elements_have_no_plan_within_a_budget(tmp_path: Path) -> None:
    shapes = {"input": (0, 32), "weight": (16, 32), "output": (0, 16)}
    tensors = [
        (array, describe(array, tensor_name=name, phase="post" if name == "output" else "pre", counter=place))
        for place, (name, array) in enumerate((one, np.ones(shape, np.float32)) for one, shape in shapes.items())
    ]
    records = write_run(tmp_path / "run", {0: [tensors]}).select()
    with pytest.raises(UsageError, match="the bits of a plan are not known: no product has elements"):
        precision_plan(records, recipe=CANDIDATES, target_bits=6)
    with pytest.raises(UsageError, match="target_bits nan is no number"):
        precision_plan(records, recipe=CANDIDATES, target_bits=math.nan)


def test_records_without_linear_layers_have_no_plan(tmp_path: Path) -> None:
    run = _run(tmp_path, layer_type="attention", component="FA")
    with pytest.raises(NoRecordsError, match="no linear layer is selected"):
        precision_plan(run.select(), recipe="mxfp8", target_sqnr=18)


CONFIG = GPTConfig(layers=2, width=128, heads=4, context=64)
NUM_STEPS, CAPTURED = 40, (0, 20)


class _Trained(NamedTuple):
    run: Run
    loss: float
    """Of the last steps: a single small batch says little."""


def _train(folder: Path, **quantized: Any) -> _Trained:
    torch.manual_seed(0)
    model, generator = GPT(CONFIG), torch.Generator().manual_seed(1)
    if quantized:
        fake_quantize(model, **quantized)
    text = read_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    losses = []
    with Capture(
        folder, model=model, start_at=CAPTURED[0], every=CAPTURED[1], min_iterations=2, select="layer_type=linear"
    ):
        for _ in range(NUM_STEPS):
            tokens, targets = draw_batch(text, batch_size=8, context=CONFIG.context, generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return _Trained(open_run(folder), sum(losses[-20:]) / 20)


def _errors(run: Run, plan: PrecisionPlan) -> Iterator[tuple[tuple[Any, ...], str, float]]:
    """The place of each product in a run, the recipe or `recorded`, and its SQNR, of what the plan gives a layer."""
    own = {one.module: one.recipe.name for one in plan.modules}
    replayed = replay_calls(run.select(), parse_recipes(plan.candidates))
    guessed = {call.field("module") for call in replayed.calls.calls if not call.is_bias_known}
    for group in replayed.groups(["module", "product", "iteration", "recipe"]):
        module, product, iteration, recipe = group.key.values()
        # Where no bias was recorded, what all tokens have in common is taken for one, and is no error.
        is_known = (product, module) not in {("output", name) for name in guessed}
        if own[module] != "bf16" and recipe in {"recorded", own[module]} and is_known:
            assert group.exact.sqnr is not None
            yield (module, product, iteration), recipe, group.exact.sqnr


@pytest.mark.slow
@exhaustive("make test trains by a plan in tests/launch/test_quantizing.py")
def test_a_training_by_the_plan_of_a_recording_loses_what_the_plan_says(tmp_path: Path) -> None:
    wide = _train(tmp_path / "bf16")
    write_plan(precision_plan(wide.run.select(), recipe="nvfp4,mxfp8", target_sqnr=18), tmp_path / "plan.yaml")
    plan = read_plan(tmp_path / "plan.yaml")
    assert {"nvfp4", "mxfp8"} <= plan.by_recipe().keys()
    planned = _train(tmp_path / "plan", plan=tmp_path / "plan.yaml")
    narrow = _train(tmp_path / "nvfp4", recipe="nvfp4")

    errors = list(_errors(planned.run, plan))
    recorded = {place: sqnr for place, recipe, sqnr in errors if recipe == "recorded"}
    replayed = {place: sqnr for place, recipe, sqnr in errors if recipe != "recorded"}
    # Three products of 13 layers, in two iterations.
    assert len(recorded) == len(replayed) == 2 * 3 * 13
    for place, sqnr in recorded.items():
        # The recorded result was rounded to bf16 after it: at some 50 dB, which costs the best of them a little.
        assert sqnr == pytest.approx(replayed[place], abs=0.5), place

    foreseen = {place: sqnr for place, recipe, sqnr in _errors(wide.run, plan) if recipe != "recorded"}
    first = {place: sqnr for place, sqnr in foreseen.items() if place[2] == CAPTURED[0] and sqnr < 35}
    assert len(first) > 20
    for place, sqnr in first.items():
        # The same weights and the same text: what goes into a layer differs by what those before it lost.
        assert recorded[place] == pytest.approx(sqnr, abs=0.5), place

    assert wide.loss < planned.loss < narrow.loss


def test_the_command_answers_with_the_plan_and_writes_it(tmp_path: Path) -> None:
    run, path = _run(tmp_path), tmp_path / "plan.yaml"
    words = ["replay", str(tmp_path / "run"), "--recipe", CANDIDATES, "--target-sqnr", "16", "--plan", str(path)]
    result = CliRunner().invoke(cli, [*words, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    plan = precision_plan(run.select(), recipe=CANDIDATES, target_sqnr=16)
    assert {row["module"]: row["recipe"] for row in answer["rows"]} == {
        one.module: one.recipe.name for one in plan.modules
    }
    assert sum(row["multiply_adds.ratio"] for row in answer["rows"]) == pytest.approx(1)
    assert f"products take {plan.relative_gemm_time:.1%} of the time of bf16" in "\n".join(answer["notes"])
    assert answer["notes"][-1] == f"the plan is written to {path}"
    assert read_plan(path).by_recipe() == plan.by_recipe()


def _planned(module: str, recipe: str, *, sqnr: float | None = None, worst: float | None = None) -> PlannedModule:
    return PlannedModule(
        module=module,
        recipe=parse_recipes(recipe)[0],
        sqnr={} if sqnr is None else {"output": sqnr + 3, "grad_weight": sqnr},
        worst_sqnr={} if worst is None else {"output": worst + 2, "grad_weight": worst},
    )


def test_a_plan_begins_with_its_exceptions_and_marks_calls_with_twice_the_noise() -> None:
    plan = PrecisionPlan(
        modules=(
            _planned("a", "nvfp4", sqnr=18.5, worst=18.0),
            _planned("b", "mxfp8", sqnr=30.0, worst=29.0),
            _planned("c", "nvfp4", sqnr=22.0, worst=17.9),
            _planned("d", "nvfp4", sqnr=19.0, worst=14.9),
            _planned("e", "bf16"),
        ),
        target_sqnr={"output": 18.0, "grad_weight": 18.0},
        gap=PrecisionGap(recipe="nvfp4", module="e", product="grad_weight", below=6.04),
    )
    table = _plan_table(plan)
    assert [(row["module"], row["recipe"], row["worst_sqnr"], row["mark"]) for row in table.records()] == [
        ("e", "bf16", None, None),
        ("b", "mxfp8", 29.0, None),
        ("a", "nvfp4", 18.0, None),
        # Of the calls of a layer about half are below their mean: that is no reason to look at it.
        ("c", "nvfp4", 17.9, None),
        ("d", "nvfp4", 14.9, "worst call 3.1 dB below target"),
    ]
    assert table.notes[:3] == (
        "3 of 5 layers get nvfp4; exceptions: e (bf16), b (mxfp8)",
        "grad_weight of e is 6 dB below all other layers in nvfp4",
        "1 of 5 layers exceed the target by less than 1 dB",
    )


def test_a_layer_far_below_all_others_is_the_gap() -> None:
    cases: list[tuple[dict[tuple[str, str], float], float | None]] = [
        ({("head", "output"): 30.0, ("head", "grad_weight"): 12.0, ("a", "output"): 18.0, ("b", "output"): 21.0}, 6.0),
        ({("head", "grad_weight"): 12.0, ("head", "output"): 13.0, ("a", "output"): 14.9}, None),
        ({("head", "grad_weight"): 12.0}, None),
        ({("head", "grad_weight"): -math.inf, ("a", "output"): 14.9}, None),
        ({}, None),
    ]
    for sqnr, below in cases:
        found = _gap(sqnr, recipe="nvfp4")
        wanted = PrecisionGap(recipe="nvfp4", module="head", product="grad_weight", below=below) if below else None
        assert found == wanted


def test_the_gap_of_a_plan_is_in_the_cheapest_recipe(tmp_path: Path) -> None:
    good, bad = call_arrays(), call_arrays(seed=1)
    for name in ("input", "weight"):
        # Half way between two numbers of four bits, so that each is rounded down by a fifth.
        bad[name] = np.where(bad[name] < 0, np.float32(-1.25), np.float32(1.25))
    records = store(tmp_path / "run", call_tensors(good, module="good") + call_tensors(bad, module="bad")).select()
    everything = precision_plan(records, recipe="mxfp4", target_sqnr=-99).modules
    least = {one.module: min(one.sqnr.values()) for one in everything}
    gap = precision_plan(records, recipe="mxfp8,mxfp4", target_sqnr=20).gap
    assert gap is not None
    assert (gap.recipe, gap.module, gap.below) == ("mxfp4", "bad", least["good"] - least["bad"])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--plan", "plan.yaml"], "--plan needs a target: give --target-sqnr, such as 18"),
        (["--target-sqnr", "18", "--by", "rank"], "--by and --target-sqnr exclude each other"),
        (["--target-sqnr", "18", "--product", "output"], "--product and --target-sqnr exclude each other"),
        (["--target-sqnr", "18", "--show", "unreplayable"], "--show and --target-sqnr exclude each other"),
        (["--target-sqnr", "18", "--target-bits", "5"], "exclude each other: give one"),
        (["--target-bits", "5", "--by", "rank"], "--by and --target-bits exclude each other"),
        (["--target-sqnr", "much"], "has 'much', which is no number of dB"),
        (["--target-sqnr", "18", "--plan", "."], "the plan . cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_go_with_a_plan_are_refused(tmp_path: Path, words: list[str], match: str) -> None:
    _run(tmp_path)
    result = CliRunner().invoke(cli, ["replay", str(tmp_path / "run"), *words])
    assert result.exit_code == 2
    assert match in result.output
