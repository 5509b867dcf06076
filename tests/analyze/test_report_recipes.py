"""Does the page say of recipes what was computed, and lead from a cell to its calls and their records?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.replays.calls import places_in
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.analyze.views.report import recipes as report_recipes
from ranktape.analyze.views.report.page import write_report
from ranktape.analyze.views.report.recipes import recipe_columns
from ranktape.storage import Records
from tests.analyze.linear_runs import hot_channels, linear_run
from tests.analyze.report_page import HOSTILE, Page
from tests.analyze.test_report import unpacked

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


def test_the_page_holds_the_sums_of_every_product(records: Records, replayed: Replayed) -> None:
    found = recipe_columns(records, replayed, RECIPES)
    assert found is not None
    assert (found["names"], found["products"], found["num_left_out"]) == (NAMES, PRODUCTS, 0)
    assert found["bits"] == [*(recipe.bits for recipe in RECIPES), None]
    rows, calls = found["rows"], found["calls"]
    assert (rows["count"], calls["count"]) == (6 * 4 * 3 * 4, 6 * 4)
    assert list(rows["sums"]) == list(ErrorSums.__slots__)
    sums = np.array([unpacked(column, count=rows["count"]) for column in rows["sums"].values()]).T
    np.testing.assert_allclose(sums, replayed.exact, rtol=1e-6)
    ends = np.cumsum(unpacked(calls["length"], count=calls["count"])).astype(int)
    places = np.split(unpacked(calls["records"], count=ends[-1]).astype(int), ends[:-1])
    for call, own in zip(replayed.calls.calls, places, strict=True):
        assert {records[place].module for place in own.tolist()} == {call.field("module")}
        assert {"input", "weight", "grad_output"} <= {records[place].tensor_name for place in own.tolist()}


def test_of_too_many_products_the_worst_of_each_layer_are_kept(
    records: Records, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_recipes, "MAX_PRODUCTS", 6 * 3 * 4)
    found = recipe_columns(records, replayed, RECIPES)
    assert found is not None
    assert found["num_left_out"] == 6 * 3 * 3 * 4
    kept = report_recipes._kept(replayed)
    worst = [group.worst for group in replayed.groups(["module", "product", "recipe"])]
    assert kept.tolist() == sorted(worst)


def test_a_selection_without_layers_says_nothing(records: Records) -> None:
    gradients = records.select(tensor_name="grad_weight", iteration=0)
    found = replay_calls(gradients, RECIPES, engine=Engine(use_cache=False))
    columns = recipe_columns(gradients, found, RECIPES)
    assert columns is not None
    assert columns["products"] == ["grad_weight"]
    # Operands outside of the selection are read, and are no records of the page.
    assert {gradients[place].tensor_name for own in places_in(gradients, found.calls) for place in own} == {
        "grad_weight"
    }


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


def test_cells_are_those_of_replay(page: Page, replayed: Replayed) -> None:
    (drawn,) = page.ask("return document.getElementById('recipes-chart').data.map((one) => one.text)")
    expected = {
        tuple(group.key.values()): group.exact.sqnr for group in replayed.groups(["product", "recipe", "module"])
    }
    modules = sorted({module for _, _, module in expected})
    rows = [
        " ".join(f"{expected[product, recipe, module]:.1f}" for product in PRODUCTS for recipe in NAMES)
        for module in modules
    ]
    assert [" ".join(filter(None, row)) for row in drawn] == rows


def test_a_cell_leads_to_its_calls_and_they_to_their_records(page: Page, records: Records, replayed: Replayed) -> None:
    page.cell(3, NAMES.index("mxfp4"), chart="recipes-chart")
    assert page.text("#recipe-calls-title") == f"Calls of layers.3.{HOSTILE[0]}: output in mxfp4"
    calls = [place for place, call in enumerate(replayed.calls.calls) if call.field("layer_idx") == 3]
    rows = [
        row
        for row in range(len(replayed.places))
        if replayed.places[row] in calls and (replayed.products[row], replayed.names[row]) == ("output", "mxfp4")
    ]
    ordered = sorted(rows, key=lambda row: ErrorSums.pooled(replayed.exact[row]).sqnr or 0)
    shown: list[str] = page.ask(
        "return Array.from(document.querySelectorAll('#recipe-calls tr'), (row) => row.innerText)"
    )
    expected = [ErrorSums.pooled(replayed.exact[row]) for row in ordered]
    assert [line.split("\t")[2] for line in shown] == [f"{float(f'{sums.sqnr:.4g}'):g} dB" for sums in expected]
    for line, sums in zip(shown, expected, strict=True):
        assert float(line.split("\t")[6]) == pytest.approx(sums.bias, rel=1e-3, abs=1e-4)
    page.ask(
        "document.querySelector('#recipe-calls tr').dispatchEvent("
        "new KeyboardEvent('keydown', { key: 'Enter', bubbles: true }))"
    )
    worst = places_in(records, replayed.calls)[int(replayed.places[ordered[0]])]
    assert sorted(page.rows()) == sorted(worst)
    page.ask("window.ranktape.selection.focus(null)")


def test_an_address_opens_a_cell_of_recipes(page: Page) -> None:
    page.type("#recipe-metric", "cosine")
    page.cell(2, NAMES.index("mxfp4"), chart="recipes-chart")
    seen = [page.text("#recipe-calls-title"), page.text("#recipe-calls")]
    link = page.browser.current_url
    for address, shown in ((link, seen), (link.replace("mxfp4", "nothing"), ["Calls", None])):
        page.browser.get("about:blank")
        page.browser.get(address)
        page.wait("document.documentElement.dataset.ready === 'yes'")
        assert page.ask("return document.getElementById('recipe-metric').value") == "cosine"
        assert page.text("#recipe-calls-title") == shown[0]
        assert page.text("#recipe-calls") == shown[1] or shown[1] is None
    page.open()


def test_filters_act_on_calls(page: Page) -> None:
    page.click("#recipe-calls-clear")
    count = "return document.getElementById('recipe-calls-count').innerText"
    assert page.ask(count).startswith("the worst 200 of 216")
    page.ask("window.ranktape.selection.filter('layer_idx', new Set([3]))")
    assert page.ask(count).startswith("36,")
    page.ask("window.ranktape.selection.filter('rank', new Set([9]))")
    assert page.text("#recipes-chart + .empty") == "No product that was computed again passes the filters."
    page.ask("window.ranktape.selection.clearFilters()")


def test_a_call_that_lost_numbers_is_the_worst(page: Page) -> None:
    change = """const lost = window.ranktape.recipes.sums.find(([name]) => name === "num_lost")[1];
        lost[5] = arguments[0]; window.ranktape.recipePanel.update();
        return [document.getElementById("recipe-calls-head").innerText,
                document.querySelector("#recipe-calls tr").dataset.row,
                document.querySelector("#recipe-calls td:last-child").innerText]"""
    head, row, lost = page.ask(change, 3)
    assert (head.split("\t")[-1], row, lost) == ("lost", "5", "3")
    head, row, _ = page.ask(change, 0)
    assert head.split("\t")[-1] == "against recorded"
    assert row != "5"


def test_every_metric_and_both_kinds_of_rows_are_drawn(page: Page) -> None:
    for metric in ("relative_error", "cosine", "largest_error", "bias", "gain", "norm_ratio", "sqnr"):
        page.type("#recipe-metric", metric)
        page.type("#recipe-down", "layer_idx")
        page.click("#recipe-worst")
        (drawn,) = page.ask("return document.getElementById('recipes-chart').data.map((one) => one.z)")
        assert np.isfinite(np.array(drawn, dtype=float)[:, :4]).all()
        assert page.text("#recipe-iterations-title").endswith("over the iterations: of each the worst product")
    page.type("#recipe-down", "module")
    page.click("#theme")
    assert page.ask("return document.getElementById('recipes-chart').layout.paper_bgcolor") == "#1b1e24"
    page.click("#theme")
    assert page.ask("return window.hurt") is None


def test_a_finding_says_which_layer_and_why(page: Page) -> None:
    assert "because 3 channels of its input hold " in page.text("#findings")
