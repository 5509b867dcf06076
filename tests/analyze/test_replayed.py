"""Are products computed again to what was recorded, and taken together as one would by hand?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ranktape.analyze import quantize
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.numerics.error_sums import ErrorSums, error_sums
from ranktape.analyze.numerics.recipes.recipe import HighPrecision, Recipe
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.replays.replayed import GROUP_FIELDS, Replayed, ReplayedGroup, replay_calls
from ranktape.capture import Capture
from ranktape.errors import DataError, UnknownFieldError, UsageError
from ranktape.storage import Run, open_run
from tests.analyze.replay_runs import call_arrays, call_tensors, one_call, recorded_sqnr, trained
from tests.analyze.runs import Tensor, store
from tests.exhaustive import exhaustive

RECIPES = parse_recipes("nvfp4,mxfp8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two microbatches and two iterations of a transformer of 14 linear layers in float32."""
    return trained(tmp_path_factory.mktemp("plain"), microbatches=2)


@pytest.fixture(scope="module")
def replayed(plain: Run) -> Replayed:
    return replay_calls(plain.select(), RECIPES)


def test_a_recipe_is_applied_to_the_recorded_operands(plain: Run, replayed: Replayed) -> None:
    module = "layers.1.down"
    by_name = {one.tensor_name: one.tensor() for one in plain.select(module=module, iteration=1, microbatch=0)}
    inputs, weight, grad = (by_name[name] for name in ("input", "weight", "grad_output"))

    def rounded(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return torch.from_numpy(quantize(tensor.flatten(0, -2).numpy(), "nvfp4", axis=axis, warn=False).values)

    exact = F.linear(inputs, weight).flatten(0, 1)
    by_recipe = rounded(inputs, 1) @ rounded(weight, 1).T
    expected = {
        "output": error_sums(exact, by_recipe),
        "grad_weight": error_sums(grad.flatten(0, 1).T @ inputs.flatten(0, 1), rounded(grad, 0).T @ rounded(inputs, 0)),
    }
    calls = [call.field("module") == module and call.field("iteration") == 1 for call in replayed.calls.calls]
    (first, _) = np.flatnonzero(calls)
    for product, sums in expected.items():
        is_it = (replayed.places == first) & (replayed.products == product) & (replayed.names == "nvfp4")
        (row,) = np.flatnonzero(is_it)
        found = ErrorSums.pooled(replayed.exact[row])
        assert found.sqnr == pytest.approx(sums.sqnr, abs=1e-3)
        assert found.num_elements == sums.num_elements


@exhaustive("make test replays with workers in test_replay.py")
def test_workers_change_no_bit(plain: Run, replayed: Replayed) -> None:
    again = replay_calls(plain.select(), RECIPES, engine=Engine(workers=2, use_cache=False))
    for name in ("places", "exact", "recorded"):
        np.testing.assert_array_equal(getattr(again, name), getattr(replayed, name))
    assert (again.products == replayed.products).all()


def test_groups_are_pooled_and_name_the_worst_call(replayed: Replayed) -> None:
    groups = replayed.groups(["module", "product", "recipe"])
    assert [group.key["module"] for group in groups[:: 3 * 3]][:3] == [
        "embed",
        "layers.0.attention.query",
        "layers.0.attention.key",
    ]
    assert [group.key["recipe"] for group in groups[:3]] == ["recorded", "nvfp4", "mxfp8"]
    for group in groups[:12]:
        rows = [
            row
            for row, place in enumerate(replayed.places)
            if replayed.calls.calls[place].field("module") == group.key["module"]
            and (replayed.products[row], replayed.names[row]) == (group.key["product"], group.key["recipe"])
        ]
        assert group.num_calls == len(rows) == 4
        assert group.exact == ErrorSums.pooled(replayed.exact[rows])
        single = {row: ErrorSums.pooled(replayed.exact[row]).sqnr or 0.0 for row in rows}
        assert single[group.worst] == min(single.values())
    assert sum(group.exact.num_elements for group in groups) == replayed.exact[:, 0].sum()
    (whole,) = replayed.groups([])
    assert whole.exact.num_elements == replayed.exact[:, 0].sum()
    with pytest.raises(UnknownFieldError, match="did you mean module"):
        replayed.groups(["modul"])
    for field in GROUP_FIELDS:
        assert len(replayed.column(field)) == len(replayed.places)


def test_a_product_that_lost_numbers_is_the_worst_of_its_group(replayed: Replayed) -> None:
    fields = ["module", "product", "recipe"]
    best = replayed.groups(fields)[1].rows[-1]
    exact = replayed.exact.copy()
    exact[best, ErrorSums.__slots__.index("num_lost")] = 1
    assert dataclasses.replace(replayed, exact=exact).groups(fields)[1].worst == best


def test_layers_that_a_recipe_leaves_are_in_bf16(plain: Run) -> None:
    (nvfp4,) = parse_recipes("nvfp4")
    recipe = Recipe(name="mine", source="test", products=nvfp4.products, high_precision=HighPrecision(last_layers=1))
    groups = replay_calls(plain.select(layer_idx=1, iteration=0), [recipe]).groups(["layer_idx", "recipe"])
    assert {group.key["layer_idx"] for group in groups} == {1}
    assert all(group.exact.sqnr is not None and group.exact.sqnr > 45 for group in groups)
    outside = dataclasses.replace(recipe, high_precision=HighPrecision(outside=True))
    groups = replay_calls(plain.select(iteration=0), [outside]).groups(["layer_idx", "recipe"])
    is_wide = {
        group.key["layer_idx"]: group.exact.sqnr is not None and group.exact.sqnr > 45
        for group in groups
        if group.key["recipe"] == "mine"
    }
    assert is_wide == {-1: True, 0: False, 1: False}
    with pytest.raises(UsageError, match="the word for what was recorded"):
        replay_calls(plain.select(), [Recipe(name="recorded", source="test", products=nvfp4.products)])


@pytest.mark.parametrize("without", [(), ("bias",)])
def test_a_bias_is_no_error(tmp_path: Path, without: tuple[str, ...]) -> None:
    run = one_call(tmp_path, without=without)
    sqnr = recorded_sqnr(replay_calls(run.select(), []))
    assert sqnr["output"] > 130


def test_of_few_tokens_a_bias_that_was_not_recorded_is_not_told(tmp_path: Path) -> None:
    run = store(tmp_path / "run", call_tensors(call_arrays(tokens=15), without={"bias"}))
    replayed = replay_calls(run.select(), RECIPES)
    assert "no bias was recorded" in replayed.calls.calls[0].products["output"]
    assert "output" not in recorded_sqnr(replayed)
    of_output = replayed.products == "output"
    assert not replayed.recorded[of_output].any()
    assert replayed.exact[of_output].any()


def test_what_all_tokens_have_in_common_is_an_error_of_a_layer_without_a_bias(tmp_path: Path) -> None:
    arrays = call_arrays(tokens=15)
    product = arrays["input"] @ arrays["weight"].T
    arrays["output"] = product + np.float32(0.01)
    said = {"output": {"metadata": {"without_bias": True}}}
    for without in ((), ("bias",)):
        run = store(tmp_path / f"run{len(without)}", call_tensors(arrays, said=said, without=without))
        replayed = replay_calls(run.select(), [])
        assert replayed.calls.calls[0].is_bias_known
        expected = error_sums(product, arrays["output"]).sqnr
        assert recorded_sqnr(replayed)["output"] == pytest.approx(expected, abs=1e-3)


def test_a_returned_bias_is_not_in_the_output(tmp_path: Path) -> None:
    arrays = call_arrays()
    arrays["output"] = arrays["output"] - arrays["bias"]
    tensors = call_tensors(arrays, said={"bias": {"metadata": {"returned": True}}})
    assert recorded_sqnr(replay_calls(store(tmp_path / "run", tensors).select(), []))["output"] > 120


def test_wide_operands_come_before_quantised_ones(tmp_path: Path) -> None:
    arrays = call_arrays()
    quantised = {name: np.sign(arrays[name]) for name in ("input", "weight")}
    wide = {f"wide_{name}": arrays[name] for name in quantised}
    run = store(tmp_path / "run", call_tensors(arrays | quantised | wide))
    assert min(recorded_sqnr(replay_calls(run.select(), [])).values()) > 120


def test_nan_and_infinite_operands_are_counted_and_not_averaged(tmp_path: Path) -> None:
    arrays = call_arrays()
    arrays["input"][0, 0], arrays["input"][1, 1] = np.nan, np.inf
    arrays["output"] = arrays["input"] @ arrays["weight"].T
    run = store(tmp_path / "run", call_tensors(arrays, without={"bias"}))
    found = {
        (group.key["product"], group.key["recipe"]): group
        for group in replay_calls(run.select(), RECIPES).groups(["product", "recipe"])
    }
    sums = found["output", "mxfp8"].exact
    assert (sums.num_elements, sums.num_compared) == (32 * 8, 30 * 8)
    assert sums.sqnr is not None
    assert sums.sqnr > 20
    recorded = found["output", "recorded"].exact
    assert recorded.sqnr is not None
    assert recorded.sqnr > 120


def test_a_call_without_tokens_adds_nothing(tmp_path: Path) -> None:
    tensors = call_tensors(call_arrays(), call=0) + call_tensors(call_arrays(tokens=0), call=1)
    replayed = replay_calls(store(tmp_path / "run", tensors).select(), RECIPES)
    alone = replay_calls(one_call(tmp_path / "alone").select(), RECIPES)
    for group, other in zip(replayed.groups(["product", "recipe"]), alone.groups(["product", "recipe"]), strict=True):
        assert group.exact.sqnr == other.exact.sqnr


def test_what_was_found_is_kept_for_each_recipe(tmp_path: Path) -> None:
    run = one_call(tmp_path)
    first = replay_calls(run.select(), parse_recipes("nvfp4"))
    (kept,) = Path(run.url).glob("analysis/*/replay_*/attempt_*/rank_*/iter_*/*.counts")
    for values in Path(run.url).glob("attempt_*/rank_*/iter_*/*/c*"):
        values.unlink()
    again = replay_calls(open_run(run.url).select(), parse_recipes("nvfp4"))
    np.testing.assert_array_equal(again.exact, first.exact)
    np.testing.assert_array_equal(again.recorded, first.recorded)
    assert (again.products == first.products).all()
    assert (again.names == first.names).all()
    # A further recipe, another product or a damaged object takes the operands again.
    for recipes, products in (("nvfp4,mxfp8", ()), ("nvfp4", ("output",))):
        with pytest.raises(DataError):
            replay_calls(open_run(run.url).select(), parse_recipes(recipes), products=products)
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(DataError):
        replay_calls(open_run(run.url).select(), parse_recipes("nvfp4"))


def test_a_further_recipe_is_added_to_what_is_kept(plain: Run, replayed: Replayed) -> None:
    one = replay_calls(plain.select(module="head"), parse_recipes("mxfp6"))
    both = replay_calls(plain.select(module="head"), [*parse_recipes("mxfp6"), *RECIPES])
    alone = replay_calls(plain.select(module="head"), RECIPES, engine=Engine(use_cache=False))
    for name, other in (("mxfp6", one), ("nvfp4", alone), ("recorded", alone)):
        np.testing.assert_array_equal(both.exact[both.names == name], other.exact[other.names == name])
        np.testing.assert_array_equal(both.recorded[both.names == name], other.recorded[other.names == name])
    assert both.names.tolist()[:4] == ["recorded", "mxfp6", "nvfp4", "mxfp8"]
    assert replayed.recipes == ("nvfp4", "mxfp8")


def test_experts_of_one_product_are_computed_apart(tmp_path: Path) -> None:
    ends, parts = [10, 10, 32], (10, 0, 22)
    experts = [call_arrays(tokens=tokens, seed=number) for number, tokens in enumerate(parts)]
    arrays: dict[str, Any] = {
        name: np.concatenate([one[name] for one in experts]) for name in ("input", "grad_output", "grad_input")
    }
    arrays["weight"] = np.stack([one["weight"].T for one in experts])
    arrays["grad_weight"] = np.stack([one["grad_weight"].T for one in experts])
    arrays["offsets"] = np.array(ends, dtype=np.int32)
    arrays["output"] = np.concatenate([one["output"] - one["bias"] for one in experts])
    layouts = {name: {"layout": "EIO"} for name in ("weight", "grad_weight")}
    run = store(tmp_path / "run", call_tensors(arrays, said=layouts))
    replayed = replay_calls(run.select(), RECIPES)
    assert not replayed.calls.left_out
    assert min(recorded_sqnr(replayed).values()) > 120
    alone = [store(tmp_path / str(place), call_tensors(one)) for place, one in enumerate(experts) if parts[place]]
    expected = [replay_calls(one.select(), RECIPES).groups(["product", "recipe"]) for one in alone]
    for group, *several in zip(replayed.groups(["product", "recipe"]), *expected, strict=True):
        if group.key["recipe"] != "recorded":
            pooled = ErrorSums.pooled([one.exact.to_array() for one in several])
            assert group.exact.sqnr == pytest.approx(pooled.sqnr, abs=1e-6)


def row_parallel(*, without: dict[int, set[str]] | None = None) -> list[Tensor]:
    """A layer whose inputs are cut over two ranks, which add up their outputs, as Megatron-core records it."""
    whole = call_arrays()
    cut = {"input": 1, "weight": 1, "grad_input": 1, "grad_weight": 1}
    tensors = []
    for rank in range(2):
        half = slice(12 * rank, 12 * rank + 12)
        arrays = {name: array[:, half] if name in cut else array for name, array in whole.items()}
        said = {
            name: {
                "placement": {
                    "mesh": {"axes": ["tp"], "shape": [2], "ranks": [0, 1]},
                    "coordinates": [rank],
                    "placements": ["shard(1)" if name in cut else "replicate"],
                    "global_shape": list(whole[name].shape),
                    "offset": [0, 12 * rank] if name in cut else [0] * array.ndim,
                    "partial": False,
                }
            }
            for name, array in arrays.items()
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        tensors += call_tensors(arrays, said=said, rank=rank, without=(without or {}).get(rank, set()))
    return tensors


def test_a_sum_over_ranks_is_put_together(tmp_path: Path) -> None:
    run = store(tmp_path / "run", row_parallel())
    for records in (run.select(), run.select(rank=1, tensor_name="output"), run.select(rank=0)):
        replayed = replay_calls(records, RECIPES)
        assert not replayed.calls.left_out
        by_call = {(call.field("rank"), call.is_assembled): set(call.products) for call in replayed.calls.calls}
        assert by_call[0, True] == {"output"}
        local = {rank: products for (rank, is_assembled), products in by_call.items() if not is_assembled}
        assert all(products == {"grad_input", "grad_weight"} for products in local.values())
        assert len(local) == len(set(records.column("rank"))) - (len(records) == 1)
        assert min(recorded_sqnr(replayed).values()) > 120
    whole = replay_calls(one_call(tmp_path / "whole").select(tensor_name="output"), RECIPES)
    parts = replay_calls(run.select(tensor_name="output"), RECIPES)
    assert [group.exact.sqnr for group in parts.groups(["recipe"])][1:] == pytest.approx(
        [group.exact.sqnr for group in whole.groups(["recipe"])][1:]
    )


def test_a_part_that_no_rank_recorded_is_named(tmp_path: Path) -> None:
    run = store(tmp_path / "run", row_parallel(without={1: {"input"}}))
    replayed = replay_calls(run.select(), RECIPES)
    assert {(one.product, one.reason) for one in replayed.calls.left_out} == {
        ("output", "it needs the operands of all ranks of a mesh, and for one of them no input was recorded"),
        ("output", "no input was recorded"),
        ("grad_weight", "no input was recorded"),
    }


class Shared(torch.nn.Module):
    """One layer that is called twice, and two that have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = torch.nn.Linear(16, 16)
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.twice(self.twice(hidden))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_autocast", [False, True])
def test_gradients_of_several_uses_are_not_compared_with_one(
    tmp_path: Path,
    is_autocast: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    torch.manual_seed(0)
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters())
    with Capture(tmp_path / "run", model=model, min_iterations=1, host_budget_nbytes=32 << 20):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            output = model(torch.randn(32, 16))
        output.float().square().mean().backward()
        optimizer.step()
    replayed = replay_calls(open_run(tmp_path / "run").select(), RECIPES)
    whys = {(call.field("module"), why) for call in replayed.calls.calls for why in call.products.values() if why}
    several, tied = "grad_weight is summed over several calls", "grad_weight is summed over several modules"
    assert whys == ({("twice", several), ("first", tied), ("second", tied)} if is_autocast else set())
    assert min(recorded_sqnr(replayed).values()) > (50 if is_autocast else 120)


@pytest.mark.parametrize(("num_rows", "median"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (8, 3)])
def test_the_median_is_the_worse_of_the_rows_in_the_middle(num_rows: int, median: int) -> None:
    rows = np.arange(100, 100 + num_rows)
    group = ReplayedGroup(key={}, exact=ErrorSums(), recorded=ErrorSums(), num_calls=num_rows, rows=rows)
    assert (group.worst, group.median) == (100, 100 + median)
