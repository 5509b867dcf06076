"""Does the plot show the ratios, readably, for any model?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ranktape.analyze import overflow
from ranktape.analyze.engine.target import one_target
from ranktape.analyze.legacy.plots import draw_panels
from ranktape.analyze.views.plots.axes import scale_shares
from ranktape.analyze.views.plots.data import PlotData
from ranktape.analyze.views.plots.style import Page
from ranktape.analyze.views.plots.table import PLOTS
from ranktape.storage import Records
from tests.analyze.runs import describe_tensor, model_tensors, store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Two layers of a model."""
    return store(tmp_path_factory.mktemp("run"), model_tensors()).select()


def draw_overflow(records: Records, **target: Any) -> Figure:
    """The plot of overflow by layer, against a format if `target` names one."""
    return PLOTS["overflow"].draw(PlotData(records, target=one_target(**target) if target else None))


def texts(figure: Figure) -> list[Any]:
    """Every text that is shown, after layout."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()  # type: ignore[no-untyped-call]
    shown: list[Any] = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        shown += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for one in (axes, *axes.child_axes):
            if one.axison:
                shown += [label for axis in (one.xaxis, one.yaxis) for label in tick_labels(axis)]
    return [text for text in shown if text.get_visible() and text.get_text()]


def tick_labels(axis: Axis) -> list[Any]:
    """The labels of an axis that are drawn: those of places between its ends."""
    low, high = sorted(axis.get_view_interval())
    margin = 1e-9 * (high - low)
    ticks = [tick for tick in axis.get_major_ticks() if low - margin <= tick.get_loc() <= high + margin]
    return [label for tick in ticks for label in (tick.label1, tick.label2)]


def readable_texts(figure: Figure) -> list[Any]:
    """The texts that are shown: no two overlap, and all lie within the plot."""
    shown = texts(figure)
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    whole = figure.bbox
    for text, box in boxes:
        assert whole.x0 - 1 <= box.x0, text
        assert box.x1 <= whole.x1 + 1, text
        assert whole.y0 - 1 <= box.y0, text
        assert box.y1 <= whole.y1 + 1, text
    for (one, left), (other, right) in itertools.combinations(boxes, 2):
        width = min(left.x1, right.x1) - max(left.x0, right.x0)
        height = min(left.y1, right.y1) - max(left.y0, right.y0)
        assert width <= 1 or height <= 1, (one, other)
    return shown


def drawn(axes: Axes) -> dict[str, list[float]]:
    """The ratios of each solid line, by its colour."""
    return {
        str(line.get_color()): list(np.asarray(line.get_ydata(), dtype=float))
        for line in axes.get_lines()
        if line.get_linestyle() == "-"
    }


def test_lines_are_the_ratios_of_the_table(records: Records) -> None:
    figure = draw_overflow(records, name="fp8_e4m3")
    table = overflow(records, format="fp8_e4m3", by=["operation", "layer_type", "layer_idx"]).records()
    columns = ("overflow.ratio", "overflow.underflow.ratio", "overflow.flushed.ratio")
    for panel, (column, operation) in zip(
        figure.axes, itertools.product(columns, ("forward", "backward")), strict=True
    ):
        expected = {
            colour: [row[column] for row in table if (row["operation"], row["layer_type"]) == (operation, layer_type)]
            for colour, layer_type in (("#0072B2", "attention"), ("#D55E00", "linear"))
        }
        assert drawn(panel) == expected


def test_dotted_lines_are_the_worst_tensors(tmp_path: Path) -> None:
    """Of two tensors of a layer one has a subnormal in four elements, the other none in twelve."""
    tensors = [
        describe_tensor(np.array([2.0**-140, 1, 1, 1], np.float32), tensor_name="input"),
        describe_tensor(np.ones(12, np.float32), tensor_name="weight"),
    ]
    axes = draw_overflow(store(tmp_path, tensors).select()).axes[1]
    found = {str(line.get_linestyle()): np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()}
    assert found == {":": [1 / 4], "-": [1 / 16]}


def test_the_plot_says_against_which_limits(records: Records) -> None:
    shown = " ".join(text.get_text() for text in texts(draw_overflow(records, name="fp8_e4m3")))
    assert "limits of fp8_e4m3 with one scale for each tensor: largest value 448, smallest normal 0.0156" in shown
    shown = " ".join(text.get_text() for text in texts(draw_overflow(records)))
    assert "limits of the values' own dtype" in shown


def test_a_healthy_run_says_so(records: Records) -> None:
    figure = draw_overflow(records)
    shown = [text.get_text() for text in texts(figure)]
    assert len(figure.axes) == 4
    assert shown.count("none") == 4
    assert all(set(line) == {0.0} for axes in figure.axes for line in drawn(axes).values())


def test_nothing_overlaps_in_a_thousand_layers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = [
        describe_tensor(10.0 ** -rng.uniform(0, 9, 16).astype(np.float32), layer_idx=layer)
        for layer in (-1, *range(0, 1000, 8), 999)
    ]
    readable_texts(draw_overflow(store(tmp_path, tensors).select(), name="fp8_e4m3", scaling="none"))


def test_nothing_overlaps_with_many_types_and_long_names(tmp_path: Path) -> None:
    names = [f"layer type {index} " + "x" * (5 * index) for index in range(5)]
    tensors = [
        describe_tensor(np.ones(8, np.float32), layer_type=name, layer_idx=layer)
        for layer in range(-1, 6)
        for name in (*names, "_hidden", "$a$ % \\frac")
    ]
    figure = draw_overflow(store(tmp_path, tensors).select())
    assert " _hidden" in [text.get_text() for text in readable_texts(figure)]
    styles = {(line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()}
    assert len(styles) == 8


def test_an_axis_of_small_shares_has_powers_of_ten_beside_it() -> None:
    page = Page(1, 1, width=4, height=3, title="t")
    scale_shares(page.panels[0, 0], "y", [1e-9])
    figure = page.finish()
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()  # type: ignore[no-untyped-call]
    labels = [label for label in tick_labels(figure.axes[0].yaxis) if label.get_visible()]
    words = [label.get_text() for label in labels]
    assert words == ["0 %", "1e-06 %", "0.0001 %", "0.01 %", "1 %", "100 %"]


def test_no_global_state_of_matplotlib_is_touched() -> None:
    """Pyplot is that state; a process that never needed it does not load it."""
    folders = [Path(function.__code__.co_filename).parent for function in (scale_shares, draw_panels)]
    sources = [path for folder in folders for path in folder.glob("*.py")]
    assert len(sources) > 10
    assert [path.name for path in sources if "pyplot" in path.read_text(encoding="utf-8")] == []
