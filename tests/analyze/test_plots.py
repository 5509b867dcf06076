"""Do all plots of a run show what numpy finds in its tensors, readably, for any model?"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.lines import AxLine

from ranktape.analyze.engine.target import parse_target
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.views.plots import bars
from ranktape.analyze.views.plots.bars import ratio_counts, read_pairs
from ranktape.analyze.views.plots.data import LOWEST, PlotData, exponents
from ranktape.analyze.views.plots.distributions import standardised
from ranktape.analyze.views.plots.groups import group_by
from ranktape.analyze.views.plots.heat_maps import Grid, Scale, draw_heat_maps, rank_deviations, size_of
from ranktape.analyze.views.plots.style import Page, families, plain, wrapped
from ranktape.analyze.views.plots.table import FOLDERS, PLOTS
from ranktape.errors import NoRecordsError
from tests.analyze.runs import SITES, Tensor, describe_tensor, store

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg

from ranktape.analyze import overflow
from ranktape.analyze.legacy.plots import draw_panels
from ranktape.analyze.views.plots.axes import scale_shares, scale_whole
from ranktape.storage import Records
from tests.analyze.runs import model_tensors
from tests.exhaustive import exhaustive_but

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

TYPES = ("hifp8", "mxfp8")


def model(*, num_ranks: int = 2, layers: tuple[int, ...] = (-1, 0, 1)) -> list[Tensor]:
    """A model in two quant types, the second of which is a little off; samples, NaN, Inf and zeros in some tensors."""
    rng = np.random.default_rng(0)
    tensors = []
    for rank in range(num_ranks):
        for layer in layers:
            for number, (layer_type, operation, phase, name, deviation) in enumerate(SITES):
                array = (rng.standard_normal((4, 48)) * deviation * 3.0**layer).astype(np.float32)
                array[0, :2] = 0.0, deviation * 900 if number % 3 == 0 else 0.0
                if number == 0:
                    array[1, :3] = np.nan, np.inf, -np.inf
                for index, quant_type in enumerate(TYPES):
                    fields = {"layer_type": layer_type, "operation": operation, "phase": phase, "tensor_name": name}
                    component = "FA" if layer_type == "attention" else "linear"
                    seen = (array * (1 + index / 64)).astype(ml_dtypes.bfloat16)
                    place = {"rank": rank, "layer_idx": layer, "quant_type": quant_type, "component": component}
                    sample_dim = None if name == "weight" else 0
                    tensors.append(describe_tensor(seen, **fields, **place, sample_dim=sample_dim))
    return tensors


TENSORS = model()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PlotData:
    """The model, against fp8_e4m3 without a scale."""
    records = store(tmp_path_factory.mktemp("run"), TENSORS).select()
    return PlotData(records, target=parse_target("fp8_e4m3", "none"))


def arrays(**fields: Any) -> list[np.ndarray[Any, Any]]:
    """The tensors of the model whose fields have those values, in float64."""
    return [
        array.astype(np.float64)
        for array, info in TENSORS
        if all(getattr(info, field) == value for field, value in fields.items())
    ]


ONE_OF_EACH = (
    *("overflow_by_layer_type", "overflow_upper_lower", "overflow_histogram", "layer_rank_absmax"),
    *("gradients", "distribution_by_phase", "statistics_by_tensor"),
    *("neighbouring_layers", "sample_differences", "layer_binades"),
    *("fp8_scatter", "fp8_normal_fit", "rank_deviation"),
)
"""A plot of each function that draws, but for that of test_plot.py; the others differ in their data."""


def test_a_plot_can_be_read(data: PlotData) -> None:
    for name in ONE_OF_EACH:
        assert PLOTS[name].missing(data) == ""
        figure = PLOTS[name].draw(data)
        shown = [text.get_text() for text in readable_texts(figure)]
        assert any(text.startswith(PLOTS[name].title) for text in shown)
        assert any("2 ranks" in text for text in shown)


@pytest.mark.parametrize("name", ["statistics_by_iteration", "bf16_raw", "bf16_density", "bf16_raw_against_normalised"])
def test_a_plot_of_two_iterations_in_bf16_can_be_read(in_bf16: PlotData, name: str) -> None:
    assert PLOTS[name].missing(in_bf16) == ""
    readable_texts(PLOTS[name].draw(in_bf16))


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> PlotData:
    """Two iterations, forward and backward."""
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(ml_dtypes.bfloat16)
    tensors = [
        describe_tensor(values, quant_type="bf16", operation=operation, iteration=iteration)
        for iteration in (0, 1)
        for operation in ("forward", "backward")
    ]
    return PlotData(store(tmp_path_factory.mktemp("run"), tensors).select())


def test_every_row_names_what_draws_it() -> None:
    assert {one.folder for one in PLOTS.values()} == set(FOLDERS)
    for one in PLOTS.values():
        module, _, function = one.function.partition(".")
        assert callable(getattr(importlib.import_module(f"ranktape.analyze.views.plots.{module}"), function))


def shares(parts: list[np.ndarray[Any, Any]], is_lost: Callable[[np.ndarray[Any, Any]], Any]) -> float:
    """The part of all elements for which it holds."""
    return float(sum(is_lost(array).sum() for array in parts) / sum(array.size for array in parts))


def test_bars_are_shares_of_all_elements(data: PlotData) -> None:
    limits = FORMATS["fp8_e4m3"]
    axes = PLOTS["overflow_by_quant_type"].draw(data).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    bars = [item for item in axes.containers if isinstance(item, BarContainer)]
    kinds: list[Callable[[np.ndarray[Any, Any]], Any]] = [
        lambda array: array >= limits.overflow_start,
        lambda array: array <= -limits.overflow_start,
        lambda array: (array != 0) & (np.abs(array) < limits.min_normal),
        lambda array: (array != 0) & (np.abs(array) <= limits.flush_limit),
        np.isnan,
    ]
    assert names == list(TYPES)
    for container, kind in zip(bars, kinds, strict=True):
        widths = [bar.get_width() for bar in container.patches]
        assert widths == [pytest.approx(shares(arrays(quant_type=name), kind)) for name in names]


def cells(axes: Axes) -> np.ndarray[Any, Any]:
    """What the colours of a heat map stand for, NaN where a cell has a colour of its own."""
    values = axes.images[1].get_array()
    assert values is not None
    return np.ma.filled(values.astype(float), np.nan)


@pytest.mark.parametrize("metric", ["underflow", "absmax"])
def test_cells_of_layers_and_ranks(data: PlotData, metric: str) -> None:
    limits = FORMATS["fp8_e4m3"]
    panels = PLOTS[f"layer_rank_{metric}"].draw(data).axes[:2]
    for axes, operation in zip(panels, ("forward", "backward"), strict=True):
        assert axes.get_title() == operation
        for (row, rank), found in np.ndenumerate(cells(axes)):
            parts = arrays(operation=operation, layer_idx=row - 1, rank=rank)
            lost = shares(parts, lambda array: (array != 0) & (np.abs(array) < limits.min_normal))
            largest = max(np.nanmax(np.abs(array)) for array in parts)
            expected = np.log10(lost) if metric == "underflow" else np.log2(largest)
            if np.isfinite(expected):
                assert found == pytest.approx(expected)
            else:
                assert np.isnan(found)
        # A cell of whose values some are NaN has its colour and a mark.
        marked = [places for one in axes.collections for places in np.asarray(one.get_offsets()).tolist()]
        assert len(marked) == (6 if operation == "forward" else 0)


def page_of(grids: list[Grid], scale: Scale) -> Page:
    """A page for heat maps."""
    return Page(1, len(grids), title="t", **size_of(grids, scale))


def colour_numbers(axes: Axes) -> np.ndarray[Any, Any]:
    """For each cell of a heat map 0 for zero, 1 for infinite, 2 for NaN; -1 for a colour of the scale, or none."""
    special = axes.images[0].get_array()
    assert special is not None
    return np.ma.filled(special.astype(float), -1)


def test_nan_infinite_and_missing_cells_have_colours_of_their_own(data: PlotData) -> None:
    forward = PLOTS["layer_rank_absmax"].draw(data).axes[0]
    assert np.isnan(cells(forward)).all()  # each cell holds an infinity
    values = np.array([[0.0, np.inf, np.nan, 4.0, 4.0, np.nan]])
    has_nan = np.array([[False, False, False, False, True, True]])
    grid = Grid(title="t", values=values, rows=["0"], columns=list("abcdef"), nan=has_nan)
    scale = Scale("magnitude", "x")
    figure = draw_heat_maps(page_of([grid], scale), [grid], scale=scale, labels=("r", "c"), unit="columns")
    assert colour_numbers(figure.axes[0]).tolist() == [[0, 1, -1, -1, -1, 2]]
    assert cells(figure.axes[0])[0].tolist()[3:5] == [2.0, 2.0]
    (marks,) = figure.axes[0].collections
    assert [column for column, _ in np.asarray(marks.get_offsets()).tolist()] == [4]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [" no record", " exactly 0", " infinite", " NaN", " NaN among the values"]


def test_one_iteration_of_nan_does_not_hide_the_samples(tmp_path: Path) -> None:
    values = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    tensors = [
        describe_tensor(values * (np.nan if iteration == 1 else 1), iteration=iteration, sample_dim=0)
        for iteration in (0, 1)
    ]
    figure = PLOTS["layer_sample_absmax"].draw(PlotData(store(tmp_path, tensors).select()))
    np.testing.assert_allclose(cells(figure.axes[0]), [np.log2([3, 6, 9, 12])])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" NaN among the values"]


def test_cells_of_layers_and_samples(data: PlotData) -> None:
    """A sample is known by its rank and its place in the batch; weights have none."""
    samples = data.samples
    assert samples.keys == [(rank, place) for rank in (0, 1) for place in range(4)]
    grid = samples.grid("forward")
    for (row, column), found in np.ndenumerate(grid):
        fields = {"layer_idx": row - 1, "rank": column // 4, "operation": "forward"}
        parts = [
            array[column % 4].astype(np.float64)
            for array, info in TENSORS
            if info.tensor_name != "weight" and all(getattr(info, name) == value for name, value in fields.items())
        ]
        values = np.concatenate(parts)
        assert found == pytest.approx(np.abs(values[np.isfinite(values)]).max())


def test_samples_have_the_names_that_the_user_gave(tmp_path: Path) -> None:
    values = np.array([[1.0, 2.0], [4.0, 4.0], [8.0, 1.0]], dtype=np.float32)
    tensors = [
        describe_tensor(values * 2.0**rank, rank=rank, sample_dim=0, sample_ids=["b", "$a$", "_c"]) for rank in (0, 1)
    ]
    found = PlotData(store(tmp_path, tensors).select())
    assert found.samples.keys == [(None, "$a$"), (None, "_c"), (None, "b")]
    # The median sample's absmax is 4 on the first rank and 8 on the second.
    assert found.samples.ratios("forward").tolist() == [[0, 0, 0], [1, 1, 1], [-1, -1, -1]]
    readable_texts(PLOTS["layer_sample_absmax"].draw(found))


def test_binades_are_those_of_all_values(data: PlotData) -> None:
    lines = PLOTS["gradients"].draw(data).axes[0].get_lines()
    for line, name in zip(lines, data.gradient_names(), strict=True):
        values = np.concatenate([array.reshape(-1) for array in arrays(tensor_name=name)])
        places = np.asarray(line.get_xdata(), dtype=float) - 0.5
        magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
        counts = [(np.floor(np.log2(magnitudes)) == place).sum() / values.size for place in places]
        assert np.nan_to_num(np.asarray(line.get_ydata(), dtype=float)).tolist() == pytest.approx(counts)


def test_rows_of_binades(data: PlotData) -> None:
    found = data.binade_shares("backward")
    for row, layer in enumerate((-1, 0, 1)):
        values = np.concatenate([array.reshape(-1) for array in arrays(operation="backward", layer_idx=layer)])
        magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
        expected = np.bincount(np.floor(np.log2(magnitudes)).astype(int) - LOWEST, minlength=exponents().size)
        assert found[row].tolist() == pytest.approx((expected / values.size).tolist())


def test_the_shape_is_a_density(data: PlotData) -> None:
    digest = data.distribution(operation="forward", phase="post")
    assert digest is not None
    edges, density = standardised(digest)
    values = np.concatenate([array.reshape(-1) for array in arrays(operation="forward", phase="post")])
    finite = values[np.isfinite(values)]
    expected, _ = np.histogram((finite - finite.mean()) / finite.std(), bins=edges)
    assert density.tolist() == pytest.approx((expected / finite.size / np.diff(edges)).tolist())


def test_values_of_few_bits_show_no_comb(tmp_path: Path) -> None:
    """Every bin between two others holds something, and all of them together what there is."""
    values = np.random.default_rng(0).standard_normal((64, 1024))
    coarse = values.astype(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16)
    fine = values.astype(np.float16)
    runs = [store(tmp_path / str(one.dtype), [describe_tensor(one)]) for one in (coarse, fine)]
    digests = [PlotData(run.select()).distribution() for run in runs]
    (edges, density), (equal, _) = (standardised(digest) for digest in digests if digest is not None)
    assert (density > 0).all()
    assert (density * np.diff(edges)).sum() == pytest.approx(1)
    assert (np.diff(edges) > 0).all()
    assert np.ptp(np.diff(equal)) < 1e-9


def test_plots_of_bf16_are_of_that_quant_type(tmp_path: Path) -> None:
    """Values of another quant type are held in bfloat16, too, and are no part of them."""
    rng = np.random.default_rng(0)
    seen = [rng.standard_normal((8, 64)).astype(ml_dtypes.bfloat16) * factor for factor in (1, 64)]
    tensors = [
        describe_tensor(one, quant_type=quant_type, layer_idx=0)
        for one, quant_type in zip(seen, ("bf16", "mxfp8"), strict=True)
    ]
    found = PlotData(store(tmp_path, tensors).select())
    assert PLOTS["bf16_raw"].missing(found) == ""
    ends = PLOTS["bf16_raw"].draw(found).axes[0].get_xlim()
    assert -4 < ends[0] < ends[1] < 4
    only = PlotData(found.records.select(quant_type="mxfp8"))
    assert PLOTS["bf16_raw"].missing(only) == "no tensor has the quant type bf16"


def test_letters_of_other_writings_are_drawn_where_a_font_has_them() -> None:
    has_font = len(families()) > 1
    assert plain("线性") == ("线性" if has_font else r"\u7ebf\u6027")


def test_a_layer_of_zeros_has_a_panel(tmp_path: Path) -> None:
    """What was cast to a format without a scale is zero: it neither overflows nor underflows."""
    tensors = [describe_tensor(np.zeros((4, 8), np.float32), layer_idx=1)]
    tensors.append(describe_tensor(np.ones((4, 8), np.float32), layer_idx=0))
    figure = PLOTS["overflow"].draw(PlotData(store(tmp_path, tensors).select()))
    assert any(text.get_text().startswith("zeros") for text in texts(figure))


def test_boxes_are_metrics_of_tensors(data: PlotData) -> None:
    group = group_by(data, "layer_type", "operation")[0][1]
    assert group.label == "attention, backward"
    found = bars.box_values(data, group, bars.STD)
    parts = arrays(layer_type="attention", operation="backward")
    assert sorted(found) == pytest.approx(sorted(math.log2(array[np.isfinite(array)].std()) for array in parts))


def test_a_ratio_is_in_one_bar() -> None:
    values = np.array([0.0, 0.0, 1e-4, 0.02, 1.0])
    edges, counts, num_zero = ratio_counts(values)
    assert (edges[0], edges[-1], num_zero, counts.sum()) == (pytest.approx(1e-4), 1.0, 2, 3)
    assert (counts[0], counts[-1]) == (1, 1)


def test_two_quant_types_are_matched(data: PlotData) -> None:
    types = data.two_quant_types()
    assert types == TYPES
    pairs = data.matched(types)
    assert len(pairs) == len(TENSORS) // 2
    for pair in read_pairs(data, types)[:3]:
        assert pair.correlation == pytest.approx(1.0, abs=1e-3)
        ratio = pair.other[pair.one != 0] / pair.one[pair.one != 0]
        assert np.abs(ratio - 65 / 64).max() < 2**-6
    diagonal, points = PLOTS["fp8_scatter"].draw(data).axes[0].lines
    assert isinstance(diagonal, AxLine)
    assert (diagonal.get_xy1(), diagonal.get_slope()) == ((0, 0), 1)
    x, y = (np.asarray(values, dtype=float) for values in points.get_data())
    assert np.abs(y - x * 65 / 64).max() < 2**-6
    assert max(np.abs(x).max(), np.abs(y).max()) == 1


def test_a_rank_that_differs_is_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 16)).astype(np.float32)
    tensors = [
        describe_tensor(values * (4096.0 if (rank, layer) == (2, 1) else 1.0), rank=rank, layer_idx=layer)
        for rank in range(4)
        for layer in range(2)
    ]
    found = PlotData(store(tmp_path, tensors).select())
    assert rank_deviations(found, layers=[0, 1]).tolist() == [[0, 0, 0, 0], [0, 0, 12, 0]]


def test_neighbouring_columns_are_one_where_there_are_too_many() -> None:
    """A single cell that stands out stays, whichever way."""
    values = np.zeros((3, 1000))
    values[1, 501] = -7.0
    grid = Grid(title="t", values=values, rows=list("abc"), columns=[str(rank) for rank in range(1000)])
    scale = Scale("factor", "x")
    figure = draw_heat_maps(page_of([grid], scale), [grid], scale=scale, labels=("layer", "rank"), unit="ranks")
    drawn = cells(figure.axes[0])
    assert drawn.shape == (3, 250)
    assert np.argwhere(drawn != 0).tolist() == [[1, 125]]
    assert drawn.min() == -7.0
    assert any("4 neighbouring ranks" in text.get_text() for text in readable_texts(figure))


HOSTILE = ("<script>alert(1)</script>", "$\\frac{a}{b}$ $x$", "_under", "\u5c42\u7c7b\u578b", "a" * 50, "%s {0} \\n")


@pytest.mark.parametrize("name", ["distribution_by_phase", "overflow_by_layer_type"])
def test_names_are_text_and_nothing_else(name: str, hostile: PlotData) -> None:
    shown = readable_texts(PLOTS[name].draw(hostile))
    words = "\n".join(text.get_text() for text in shown).replace(r"\$", "$")
    for one in HOSTILE[:3]:
        assert one in words
    assert plain("\u5c42\u7c7b\u578b") in words
    canvas_texts = [text for text in shown if "frac" in text.get_text()]
    assert all(not text._preprocess_math(text.get_text())[1] for text in canvas_texts)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> PlotData:
    """A run whose every name is chosen by an enemy."""
    rng = np.random.default_rng(0)
    tensors = [
        describe_tensor(
            rng.standard_normal((4, 16)) * 10.0 ** (20 * index - 50),
            **dict.fromkeys(("layer_type", "module", "phase", "component", "quant_type", "tensor_name"), name),
            layer_idx=index - 1,
        )
        for index, name in enumerate(HOSTILE)
    ]
    return PlotData(store(tmp_path_factory.mktemp("run"), tensors).select())


STRANGE: dict[str, np.ndarray[Any, Any]] = {
    "constant": np.full((4, 8), 0.5, dtype=np.float32),
    "empty": np.zeros((0, 8), dtype=np.float32),
    "nan": np.full((4, 8), np.nan, dtype=ml_dtypes.bfloat16),
    "zero": np.zeros((4, 8), dtype=ml_dtypes.bfloat16),
    "infinite": np.full((4, 8), -np.inf, dtype=ml_dtypes.bfloat16),
    "scalar": np.array(1e300),
    "wide": np.geomspace(1e-300, 1e300, 64),
    "complex": np.full(8, 1 + 2j, dtype=np.complex64),
    "fp8": np.arange(-8, 8).astype(ml_dtypes.float8_e4m3fn),
}


@pytest.mark.parametrize("number", range(len(STRANGE)))
@exhaustive_but("1", "2", "4", "6", reason="empty, NaN, infinite and wide tensors are in make test")
def test_strange_tensors_have_plots(tmp_path: Path, number: int) -> None:
    """Three layers of one tensor; each plot is drawn of some kinds of tensors."""
    array = list(STRANGE.values())[number]
    tensors = [
        describe_tensor(array, layer_idx=layer, operation=operation, sample_dim=0 if array.ndim > 1 else None)
        for layer in (-1, 0, 1)
        for operation in ("forward", "backward")
    ]
    found = PlotData(store(tmp_path, tensors).select())
    for one in ONE_OF_EACH[number::9]:
        if not PLOTS[one].missing(found):
            readable_texts(PLOTS[one].draw(found))


def test_integers_are_left_out(tmp_path: Path) -> None:
    integers = describe_tensor(np.arange(4), tensor_name="ids")
    both = PlotData(store(tmp_path / "both", [integers, describe_tensor(np.ones(3, dtype=np.float32))]).select())
    assert (len(both), both.num_left_out) == (1, 1)
    with pytest.raises(NoRecordsError, match="all 1 records have dtype int64"):
        PlotData(store(tmp_path / "integers", [integers]).select())


def test_many_groups_are_the_largest(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.ones(4 + index, dtype=np.float32), tensor_name=f"name_{index:02d}") for index in range(12)
    ]
    found = PlotData(store(tmp_path, tensors).select())
    groups, note = group_by(found, "tensor_name")
    assert [group.label for group in groups] == [f"name_{index:02d}" for index in range(4, 12)]
    assert note == "The 8 largest of 12 groups are drawn."
    by_name = PLOTS["distribution_by_phase"].grouped_by(["tensor_name"])
    assert note in {text.get_text() for text in texts(by_name.draw(found))}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Two layers of a model."""
    return store(tmp_path_factory.mktemp("run"), model_tensors()).select()


def draw_overflow(records: Records, **target: Any) -> Figure:
    """The plot of overflow by layer, against a format if `target` names one."""
    return PLOTS["overflow"].draw(PlotData(records, target=parse_target(**target) if target else None))


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


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([7], [7]),
        ([1, 11, 21, 31, 40, 51, 61, 71, 81], [1, 11, 21, 31, 40, 51, 61, 71, 81]),
        (range(100), [0, 20, 40, 60, 80]),
        (range(1, 21, 2), [5, 15]),
        ([0, 1, 1000], [0, 1000]),
        ([1, 3, 3, 7, 9], [1, 3, 7, 9]),
    ],
)
def test_an_axis_of_integers_names_all_of_a_few_and_round_ones_of_many(values: Sequence[int], named: list[int]) -> None:
    page = Page(1, 1, width=4, height=3, title="t")
    scale_whole(page.panels[0, 0], values, max_ticks=9)
    assert page.panels[0, 0].get_xticks().tolist() == named


@pytest.mark.parametrize("text", ["", "one line", "some words of a title " * 20, "x" * 300, "two " + "y" * 200])
def test_text_beyond_the_largest_number_of_lines_is_cut_off(text: str) -> None:
    *sizes, all_lines = (wrapped(text, width=3, size=8, max_lines=count) for count in (1, 2, 3, 1000))
    assert "".join("".join(all_lines).split()) == "".join(text.split())
    for count, lines in enumerate(sizes, start=1):
        if len(all_lines) <= count:
            assert lines == all_lines
        else:
            assert lines[:-1] == all_lines[: count - 1]
            assert lines[-1].endswith(" ...")
            assert all_lines[count - 1].startswith(lines[-1].removesuffix(" ..."))


def test_no_global_state_of_matplotlib_is_touched() -> None:
    """Pyplot is that state; a process that never needed it does not load it."""
    folders = [Path(function.__code__.co_filename).parent for function in (scale_shares, draw_panels)]
    sources = [path for folder in folders for path in folder.glob("*.py")]
    assert len(sources) > 10
    assert [path.name for path in sources if "pyplot" in path.read_text(encoding="utf-8")] == []
