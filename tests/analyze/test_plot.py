"""Does the plot show the ratios, readably, for any model?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ranktape.analyze import overflow
from ranktape.analyze.legacy.plots import draw_panels
from ranktape.analyze.views.plots.overflow_layers import draw_overflow
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
    figure = draw_overflow(overflow(records, format="fp8_e4m3"))
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


def test_panels_say_what_they_count(records: Records) -> None:
    scaled = [text.get_text() for text in texts(draw_overflow(overflow(records, format="fp8_e4m3")))]
    assert "underflow\n0 < |x / scale| < 0.0156" in scaled
    assert any(one.startswith("fp8_e4m3 with one scale for each tensor: largest value 448") for one in scaled)
    shown = [text.get_text() for text in texts(draw_overflow(overflow(records, format="fp8_e4m3", scaling="none")))]
    for words in (
        "overflow\n|x| rounds beyond 448",
        "underflow\n0 < |x| < 0.0156",
        "flush to zero\n0 < |x| <= 0.000977",
        "Shares are of the elements of a layer.",
        "forward",
        "backward",
        "layer",
        " attention",
        " linear",
        "no overflow",
        "0 %",
        "100 %",
    ):
        assert words in shown
    assert "fp8_e4m3: largest value 448, smallest normal 0.0156" in shown
    assert "iteration 0, 1 rank, 18 tensors, 4,608 elements" in shown


def test_a_healthy_run_says_so(records: Records) -> None:
    figure = draw_overflow(overflow(records))
    shown = [text.get_text() for text in texts(figure)]
    assert len(figure.axes) == 4
    assert (shown.count("no overflow"), shown.count("no underflow")) == (2, 2)
    assert all(set(line) == {0.0} for axes in figure.axes for line in drawn(axes).values())


def test_nothing_overlaps_in_a_thousand_layers() -> None:
    """From the table's side alone, as a thousand layers are a large run."""
    rng = np.random.default_rng(0)
    figure = draw_overflow(
        layers_table(1000, layer_types=["attention", "linear"], ratios=10.0 ** -rng.uniform(0, 9, 9))
    )
    readable_texts(figure)


def test_an_axis_of_small_shares_has_powers_of_ten_beside_it() -> None:
    figure = draw_overflow(layers_table(3, layer_types=["linear"], ratios=[1e-9]))
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()  # type: ignore[no-untyped-call]
    labels = [label for label in tick_labels(figure.axes[0].yaxis) if label.get_visible()]
    words = [label.get_text() for label in labels]
    assert words == ["0 %", "1e-06 %", "0.0001 %", "0.01 %", "1 %", "100 %"]


def test_nothing_overlaps_with_many_types_and_long_names() -> None:
    names = [f"layer type {index} " + "x" * (5 * index) for index in range(11)]
    figure = draw_overflow(layers_table(6, layer_types=[*names, "_hidden", "$a$ % \\frac"], ratios=[0.0, 1.0, 1e-12]))
    shown = [text.get_text() for text in readable_texts(figure)]
    assert " _hidden" in shown
    styles = {
        (line.get_color(), line.get_marker(), line.get_markerfacecolor()) for line in figure.legends[0].get_lines()
    }
    assert len(styles) == 14


def layers_table(num_layers: int, *, layer_types: list[str], ratios: Any) -> Any:
    """An overflow table of so many layers, made by hand."""
    from ranktape.analyze.table import Column, Kind, Table

    names = ("iteration", "rank", "operation", "layer_type", "layer_idx", "limits_of", "scaling", "elements")
    counts = ("overflow.total", "overflow.underflow.count", "overflow.flushed.count")
    cycle = itertools.cycle(ratios)
    rows = tuple(
        (0, 0, operation, layer_type, layer, "fp8_e4m3", "none", 10**12, *(int(next(cycle) * 10**12) for _ in counts))
        for operation in ("forward", "backward")
        for layer_type in layer_types
        for layer in range(-1, num_layers)
    )
    rows = tuple((*row, 0) for row in rows)
    columns = tuple(Column(name=name, kind=Kind.INTEGER) for name in (*names, *counts, "overflow.zero.count"))
    return Table(title="", columns=columns, rows=rows)


def test_several_dtypes_are_named_in_the_title(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(8)
    dtypes = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int64)
    tensors = [describe_tensor(values.astype(dtype), tensor_name=np.dtype(dtype).name) for dtype in dtypes]
    figure = draw_overflow(overflow(store(tmp_path, tensors).select()))
    shown = "\n".join(text.get_text() for text in readable_texts(figure))
    assert "bfloat16: largest value 3.39e+38" in shown
    assert "and 2 more types" in shown
    assert "overflow\nbeyond the largest value" in shown


def test_the_element_type_int8_is_not_taken_for_the_format_of_that_name(tmp_path: Path) -> None:
    records = store(tmp_path, [describe_tensor(np.ones(8, dtype=np.int8))]).select()
    own, against = (
        "\n".join(text.get_text() for text in texts(draw_overflow(overflow(records, format=name))))
        for name in (None, "int8")
    )
    assert "int8: largest value" not in own
    assert "int8 with one scale for each tensor: largest value 1.984, smallest normal 0.0156" in against.replace(
        "\n", " "
    )


def test_no_global_state_of_matplotlib_is_touched() -> None:
    """Pyplot is that state; a process that never needed it does not load it."""
    folders = [Path(function.__code__.co_filename).parent for function in (draw_overflow, draw_panels)]
    sources = [path for folder in folders for path in folder.glob("*.py")]
    assert len(sources) > 10
    assert [path.name for path in sources if "pyplot" in path.read_text(encoding="utf-8")] == []
