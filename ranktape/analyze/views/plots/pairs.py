"""Draws how the values of tensors in one quant type follow those of the same tensors in another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.engine.values import read_values
from ranktape.analyze.views.palette import BLUE, GREY, VERMILION
from ranktape.analyze.views.plots.axes import scale_numbers
from ranktape.analyze.views.plots.style import PANEL_SIZE, TEXT_SIZE, Heading, empty, finish, page, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.storage import Record

MAX_PAIRS = 48
"""Pairs of tensors whose values are read: of more, every n-th."""

VALUES_OF_PAIR = 400
"""Values that are drawn of each pair: of more, every n-th."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPair:
    """The same tensor in two quant types."""

    name: str
    """What people call it."""
    one: NDArray[np.float64]
    """Some of the values of the first, finite in both."""
    other: NDArray[np.float64]
    """Those of the second in the same places."""
    correlation: float
    """Of all values that are finite in both; NaN where either has no two that differ."""


def read_pairs(data: PlotData, types: tuple[str, str]) -> list[TensorPair]:
    """Values of some pairs, evenly chosen from all; both tensors of each are read once more.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
    """
    places = data.matched(types)
    chosen = places[:: math.ceil(len(places) / MAX_PAIRS) or 1]
    return [_pair(data.records[one], data.records[other], data) for one, other in chosen]


def _pair(one: Record, other: Record, data: PlotData) -> TensorPair:
    values = []
    for record in (one, other):
        array = read_values(record, view=data.view)
        # Complex values: the real part stands for both.
        real = array.real if array.dtype.kind == "c" else array
        values.append(real.astype(np.float64).reshape(-1))
    both = np.isfinite(values[0]) & np.isfinite(values[1])
    first, second = (array[both] for array in values)
    step = math.ceil(first.size / VALUES_OF_PAIR) or 1
    name = f"{plain(one.module)} {plain(one.tensor_name)}"
    return TensorPair(name=name, one=first[::step], other=second[::step], correlation=correlation(first, second))


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Pearson's; NaN where either has no two values that differ."""
    if one.size < 2 or one.min() == one.max() or other.min() == other.max():  # noqa: PLR2004 - of fewer there is none
        return math.nan
    # Scaled first: squares may be beyond all numbers.
    scaled = [(array - array.mean()) / np.abs(array).max() for array in (one / 2, other / 2)]
    norms = math.sqrt(float(scaled[0] @ scaled[0]) * float(scaled[1] @ scaled[1]))
    return float(scaled[0] @ scaled[1]) / norms if norms else math.nan


def draw_pairs(pairs: Sequence[TensorPair], *, types: tuple[str, str], heading: Heading) -> Figure:
    """Left the values of one against those of the other in units of each tensor's largest, right each correlation."""
    figure, panels = page(1, 2, panel_width=5.4, panel_height=4.6)
    scatter, bars = panels[0]
    names = [plain(name) for name in types]
    scatter.set_title("values, over the tensor's largest", fontsize=PANEL_SIZE)
    points = [_over_largest(pair) for pair in pairs if pair.one.size]
    known = np.array(sorted(pair.correlation for pair in pairs if not math.isnan(pair.correlation)))
    if not points:
        empty(scatter, "no value is finite in both")
    else:
        one, other = (np.concatenate(values) for values in zip(*points, strict=True))
        scatter.axline((0, 0), slope=1, color=GREY, linewidth=1.2, linestyle=":")
        scatter.plot(one, other, "o", color=BLUE, markersize=2.2, alpha=0.35, markeredgecolor="none")
        for which in ("x", "y"):
            scale_numbers(scatter, which)
        scatter.set_xlabel(names[0], fontsize=TEXT_SIZE)
        scatter.set_ylabel(names[1], fontsize=TEXT_SIZE)
    bars.set_title("correlation of each tensor", fontsize=PANEL_SIZE)
    if not known.size:
        empty(bars, "no tensor has values that differ in both")
    else:
        bars.hist(known, bins=correlation_edges(known), color=VERMILION, edgecolor="white", hatch="//")
        scale_numbers(bars, "x", max_ticks=4)
        scale_numbers(bars, "y", max_ticks=5)
        bars.set_xlabel("correlation: 1 is the same up to a factor and a shift", fontsize=TEXT_SIZE)
        bars.set_ylabel("tensors", fontsize=TEXT_SIZE)
        words = f"median {np.median(known):.6f}, lowest {known[0]:.6f}"
        bars.set_title(f"correlation of each tensor\n{words}", fontsize=PANEL_SIZE)
    return finish(figure, heading)


def _over_largest(pair: TensorPair) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    largest = max(float(np.abs(pair.one).max()), float(np.abs(pair.other).max())) or 1.0
    return pair.one / largest, pair.other / largest


def correlation_edges(known: NDArray[np.float64]) -> NDArray[np.float64]:
    """Edges of bins from the lowest correlation to 1."""
    low = min(float(known.min()), 1 - 1e-6)
    return np.linspace(low, max(1.0, float(known.max())), 13)
