"""Do plots of recipes show what replay finds, readably, and what do they say where there is nothing to show?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.views.plots import heat_maps
from ranktape.analyze.views.plots.data import PlotData
from ranktape.analyze.views.plots.table import PLOTS
from tests.analyze.linear_runs import hot_channels, linear_run
from tests.analyze.runs import model_tensors, store
from tests.analyze.test_plot import readable_texts, texts
from tests.analyze.test_plots import cells, colour_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECIPES = parse_recipes("mxfp8,mxfp4,nvfp4")
PRODUCTS = ["output", "grad_input", "grad_weight"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PlotData:
    """Twelve layers, one of which loses more; as many make ten come after nine."""
    run = linear_run(tmp_path_factory.mktemp("run"), hot_channels, num_layers=12)
    return PlotData(run.select(), recipes=RECIPES)


def test_a_plot_can_be_read(data: PlotData) -> None:
    assert PLOTS["replay_modules"].missing(data) == ""
    figure = PLOTS["replay_modules"].draw(data)
    readable_texts(figure)
    assert [axes.get_title() for axes in figure.axes[:3]] == PRODUCTS


def ratios(data: PlotData) -> dict[tuple[str, str, str], float]:
    groups = data.replayed.groups(["product", "recipe", "module"])
    return {tuple(group.key.values()): group.exact.sqnr or np.nan for group in groups}


def test_cells_are_ratios_of_modules_in_natural_order(data: PlotData) -> None:
    figure = PLOTS["replay_modules"].draw(data)
    found, columns = ratios(data), ["mxfp8", "mxfp4", "nvfp4", "recorded"]
    for axes, product in zip(figure.axes, PRODUCTS, strict=False):
        expected = [[found[product, recipe, f"layers.{layer}.query"] for recipe in columns] for layer in range(12)]
        best = max(value for (_, recipe, _), value in found.items() if recipe != "recorded")
        np.testing.assert_allclose(cells(axes), np.minimum(expected, best))
        written = [text.get_text() for text in axes.texts]
        assert written == [f"{value:.1f}" for row in expected for value in row]


def test_what_loses_nothing_is_as_good_as_the_best(data: PlotData) -> None:
    found = PlotData(data.records.select(layer_idx=[0, 1, 2]), recipes=parse_recipes("mxfp4,bf16"))
    figure = PLOTS["replay_modules"].draw(found)
    readable_texts(figure)
    assert [text.get_text() for text in figure.axes[0].texts][1::3] == ["inf"] * 3
    assert (cells(figure.axes[0])[:, 1] >= max(cells(axes)[:, 0].max() for axes in figure.axes[:3])).all()
    assert not figure.legends


def test_many_modules_are_layers_and_many_layers_neighbours(data: PlotData, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*, max_layers: int) -> Figure:
        monkeypatch.setattr(heat_maps, "MAX_MODULES", 8)
        monkeypatch.setattr(heat_maps, "MAX_ROWS", max_layers)
        figure = PLOTS["replay_modules"].draw(data)
        readable_texts(figure)
        return figure

    whole = cells(PLOTS["replay_modules"].draw(data).axes[0])
    layers = drawn(max_layers=12)
    np.testing.assert_array_equal(cells(layers.axes[0]), whole)
    assert "Each row is a layer: the worst module of it." in {text.get_text() for text in texts(layers)}
    pairs = drawn(max_layers=6)
    np.testing.assert_array_equal(cells(pairs.axes[0])[:, :3], np.minimum(whole[::2], whole[1::2])[:, :3])


def test_a_product_that_is_nan_alone_is_marked(data: PlotData, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all calls NaN comes of finite operands: there is no ratio, and the cell is not an empty one."""
    replayed = data.replayed
    is_lost = (replayed.products == "output") & (replayed.names == "mxfp4")
    exact = replayed.exact.copy()
    exact[is_lost] = 0.0
    exact[is_lost, ErrorSums.__slots__.index("num_lost")] = 5.0
    found = PlotData(data.records, recipes=RECIPES)
    monkeypatch.setitem(vars(found), "replayed", dataclasses.replace(replayed, exact=exact))
    figure = PLOTS["replay_modules"].draw(found)
    assert (colour_numbers(figure.axes[0])[:, 1] == 2).all()
    assert (colour_numbers(figure.axes[1]) == -1).all()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" NaN"]


def test_without_recipes_they_are_left_out_of_all_and_usual_ones_are_taken_for_one(tmp_path: Path) -> None:
    linear_run(tmp_path / "run", num_layers=2)
    result = CliRunner().invoke(
        cli, ["plot", str(tmp_path / "run"), "--kind", "replay_modules", "-o", str(tmp_path / "a.png")]
    )
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/a.png\n")
    data = PlotData(store(tmp_path / "model", model_tensors()).select())
    assert PLOTS["replay_modules"].missing(data) == (
        "no recipe was named: --recipe mxfp8,mxfp4,nvfp4 computes products again"
    )


def test_what_cannot_be_computed_is_said(tmp_path: Path) -> None:
    store(tmp_path / "run", [one for one in model_tensors() if one[1].layer_type == "attention"])
    folder = tmp_path / "draw"
    words = ["plot", str(tmp_path / "run"), "--kind", "replay_analysis", "-o", str(folder)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    reasons = {one["kind"]: one["why"] for one in json.loads((folder / "index.json").read_text())["left_out"]}
    assert reasons["replay_modules"] == "no product can be computed again: no input was recorded"
