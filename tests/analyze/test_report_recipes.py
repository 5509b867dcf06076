"""Does the page say of recipes what was computed, and lead from a cell to its calls and their records?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.analyze.views.report import columns as report_columns
from ranktape.analyze.views.report.columns import recipe_map
from ranktape.analyze.views.report.page import write_report
from ranktape.storage import Records
from tests.analyze.linear_runs import hot_channels, linear_run
from tests.analyze.report_page import HOSTILE, Page
from tests.exhaustive import exhaustive

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

RECIPES = parse_recipes("mxfp8,mxfp4,nvfp4")
NAMES = [*(recipe.name for recipe in RECIPES), RECORDED]
PRODUCTS = ["output", "grad_input", "grad_weight"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Those of six layers, of which one has three channels that are far above the others; a stranger named them."""
    run = linear_run(tmp_path_factory.mktemp("run"), hot_channels, num_ranks=2, name=HOSTILE[0])
    return run.select()


@pytest.fixture(scope="module")
def replayed(records: Records) -> Replayed:
    """What becomes of the products."""
    return replay_calls(records, RECIPES, engine=Engine(use_cache=False))


def ratios(replayed: Replayed, *, by: str) -> dict[tuple[Any, ...], float | None]:
    """The SQNR of each product in each recipe, of each value of a field."""
    groups = replayed.groups([by, "product", "recipe"])
    return {tuple(group.key.values()): group.exact.sqnr for group in groups}


def test_the_page_holds_the_ratio_of_every_product(records: Records, replayed: Replayed) -> None:
    found = recipe_map(records, replayed, RECIPES)
    assert found is not None
    columns = [(one["product"], one["recipe"]) for one in found["columns"]]
    assert columns == [(product, name) for product in PRODUCTS for name in NAMES]
    assert [one["bits"] for one in found["columns"]] == [*(recipe.bits for recipe in RECIPES), None] * 3
    assert [one["is_recorded"] for one in found["columns"]] == [False, False, False, True] * 3
    modules = [f"layers.{layer}.{HOSTILE[0]}" for layer in range(6)]
    assert found["rows"] == modules
    expected = ratios(replayed, by="module")
    assert found["sqnr"] == [[expected[module, *column] for column in columns] for module in modules]
    assert found["num_lost"] == [[0] * 12] * 6
    for module, own in zip(modules, found["records"], strict=True):
        assert {records[place].module for place in own} == {module}
        assert {"input", "weight", "grad_output"} <= {records[place].tensor_name for place in own}


def test_of_many_modules_a_row_is_a_layer(
    records: Records, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_columns, "MAX_RECIPE_ROWS", 5)
    found = recipe_map(records, replayed, RECIPES)
    assert found is not None
    assert found["rows"] == [f"layer {layer} linear" for layer in range(6)]
    expected = ratios(replayed, by="layer_idx")
    assert found["sqnr"][3][0] == expected[3, "output", "mxfp8"]


def test_a_selection_without_layers_says_nothing(records: Records) -> None:
    gradients = records.select(tensor_name="grad_weight", iteration=0)
    replayed = replay_calls(gradients, RECIPES, engine=Engine(use_cache=False))
    found = recipe_map(gradients, replayed, RECIPES)
    assert found is not None
    assert {one["product"] for one in found["columns"]} == {"grad_weight"}
    # Operands outside of the selection are read, and are no records of the page.
    assert {gradients[place].tensor_name for own in found["records"] for place in own} == {"grad_weight"}


@pytest.fixture(scope="module")
def page(chromium: Chrome, records: Records, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of that run; it must have nothing in its log when all is done."""
    path = write_report(
        records,
        output=tmp_path_factory.mktemp("page") / "report.html",
        recipe=RECIPES,
        engine=Engine(use_cache=False),
    )
    found = Page(chromium, path)
    found.open()
    yield found
    assert found.log() == []


@exhaustive("make test draws them")
def test_cells_are_those_of_replay(page: Page, replayed: Replayed) -> None:
    (drawn,) = page.ask("return document.getElementById('recipes-chart').data.map((one) => one.text)")
    expected = ratios(replayed, by="module")
    rows = [
        " ".join(
            f"{expected[f'layers.{layer}.{HOSTILE[0]}', product, name]:.1f}" for product in PRODUCTS for name in NAMES
        )
        for layer in range(6)
    ]
    assert [" ".join(filter(None, row)) for row in drawn] == rows


def test_a_cell_leads_to_the_records_of_its_module(page: Page, records: Records, replayed: Replayed) -> None:
    page.cell(3, NAMES.index("mxfp4"), chart="recipes-chart")
    assert page.text("#drill-title") == f"What the products of layers.3.{HOSTILE[0]} are computed from"
    found = recipe_map(records, replayed, RECIPES)
    assert found is not None
    assert page.ask("return window.ranktape.state.focus.records") == found["records"][3]
    page.ask("window.ranktape.focusOn(null)")


def test_a_cell_that_lost_numbers_is_marked(page: Page) -> None:
    marks = page.ask(
        """window.ranktape.raw.recipes.num_lost[2][1] = 3; window.ranktape.drawRecipes();
        return document.getElementById("recipes-chart").data[1].z"""
    )
    marked = [(row, column) for row, line in enumerate(marks) for column, mark in enumerate(line) if mark is not None]
    assert marked == [(2, 1)]
    assert page.text("#recipes-legend") == "NaN"
    page.ask("window.ranktape.raw.recipes.num_lost[2][1] = 0; window.ranktape.drawRecipes()")
