"""How are the axes of plots divided: into powers of two, shares of a whole, layers, and names?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ranktape.analyze.layer_stacks import number_of, stack_of
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.views.plots.style import PALE_INK, SMALL_SIZE, TEXT_SIZE, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MAX_TICKS = 8
"""Numbers beside an axis."""

MAX_SHARE_TICKS = 6
"""Powers of ten beside an axis of shares."""

SMALLEST_SHARE = 1e-12
"""Below this an axis of shares is linear at most."""

LIMITS = ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "fp16", "bf16")
"""Formats whose largest values axes name, the most wanted first: of two that lie too close the later one is not."""

_NICE_STEPS = [factor * 10**power for power in range(19) for factor in (1, 2, 5)]


def axis_of(axes: Axes, which: str) -> Axis:
    """The horizontal or the vertical axis."""
    return axes.xaxis if which == "x" else axes.yaxis


def set_ends(axes: Axes, which: str, low: float, high: float) -> None:
    """From where to where an axis goes."""
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)


def power_text(exponent: float) -> str:
    """A power of two, raised."""
    return f"$2^{{{exponent:g}}}$"


def scale_powers(axes: Axes, which: str, exponents: Sequence[float] | Any, *, pad: float = 0.5) -> None:
    """An axis of log2: what is drawn are exponents, what stands beside it are powers of two.

    It reaches from the smallest to the largest finite exponent, and over 4 octaves at least.
    """
    finite = np.asarray(exponents, dtype=float)
    finite = finite[np.isfinite(finite)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (-4.0, 4.0)
    if high - low < 4:  # noqa: PLR2004 - as the docstring says
        middle = (low + high) / 2
        low, high = middle - 2, middle + 2
    low, high = low - pad, high + pad
    set_ends(axes, which, low, high)
    axis = axis_of(axes, which)
    ticks = powers_between(low, high)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([power_text(tick) for tick in ticks]))
    axis.set_minor_locator(NullLocator())


def powers_between(low: float, high: float, *, max_ticks: int = MAX_TICKS) -> list[int]:
    """Whole exponents between two, evenly spaced, with a round step."""
    step = next(
        step
        for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        if math.floor(high / step) - math.ceil(low / step) < max_ticks
    )
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def scale_shares(axes: Axes, which: str, shares: Sequence[float] | Any) -> None:
    """A logarithmic axis up to 100 % that has a true zero at its foot."""
    known = np.asarray(shares, dtype=float)
    positive = known[known > 0]
    smallest = max(SMALLEST_SHARE, float(positive.min())) if positive.size else 0.01
    lowest = min(-2, math.floor(math.log10(smallest)))
    step = max(1, math.ceil(-lowest / MAX_SHARE_TICKS))
    ticks = [0.0, *(10.0**power for power in range(-(-lowest // step * step), 1, step))]
    (axes.set_xscale if which == "x" else axes.set_yscale)(
        "symlog", linthresh=10.0**lowest, linscale=max(0.6, -0.12 * lowest)
    )
    set_ends(axes, which, 0, 1.4)
    axis = axis_of(axes, which)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([share_text(tick) for tick in ticks]))
    axis.set_minor_locator(NullLocator())


def share_text(share: float) -> str:
    """A part of a whole in percent."""
    return f"{100 * share:.3g} %"


def scale_numbers(axes: Axes, which: str, *, max_ticks: int = 6) -> None:
    """A linear axis of numbers of any size, with few ticks and digits enough to tell them apart."""
    axis = axis_of(axes, which)
    axis.set_major_locator(MaxNLocator(max_ticks, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.5g}"))


def scale_whole(axes: Axes, which: str, values: Sequence[int], *, max_ticks: int = 16, pad: float = 0.5) -> None:
    """An axis of whole numbers that are their own names: ranks, iterations; some of them are named."""
    low, high = min(values), max(values)
    margin = max(pad, 0.01 * (high - low))
    set_ends(axes, which, low - margin, high + margin)
    known = sorted(set(values))
    step = next(step for step in _NICE_STEPS if high - low < step * max_ticks)
    wanted = known if len(known) <= max_ticks else [value for value in known if value % step == 0] or known
    named: list[int] = []
    for value in wanted:
        if not named or (value - named[-1]) * max_ticks >= high - low:
            named.append(value)
    axis_of(axes, which).set_major_locator(FixedLocator(named))
    axis_of(axes, which).set_major_formatter(FixedFormatter([str(value) for value in named]))
    axis_of(axes, which).set_minor_locator(NullLocator())


def place_of_layer(layer: int, layers: Sequence[int]) -> float:
    """Where a layer is drawn: what is outside of the stack apart from the first, however many there are."""
    if layer >= 0 or max(layers) < 0:
        return float(layer)
    return min(one for one in layers if one >= 0) - max(1.0, 0.05 * len(layers))


def scale_layers(axes: Axes, layers: Sequence[int], *, max_ticks: int = 12, is_labelled: bool = True) -> None:
    """Layers from left to right, and "outside" for what is outside of the stack; several stacks side by side."""
    inside = [layer for layer in layers if layer >= 0]
    step = next(step for step in _NICE_STEPS if len(inside) <= step * max_ticks)
    named = [layer for layer in inside if number_of(layer) % step == 0] or inside[:1]
    outside = [place_of_layer(-1, layers)] if -1 in layers else []
    # So that the word has room, the first layers go without a number.
    room = 0.09 * (max(inside) - outside[0]) if outside and inside else 0.0
    ticks = [layer for layer in named if not outside or layer - outside[0] >= room]
    margin = max(0.5, 0.01 * len(layers))
    places = [*outside, *map(float, inside)]
    axes.set_xlim(min(places) - margin, max(places) + margin)
    axes.xaxis.set_major_locator(FixedLocator([*outside, *ticks]))
    axes.xaxis.set_major_formatter(
        FixedFormatter([*("outside" for _ in outside), *(str(number_of(layer)) for layer in ticks)])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelbottom=is_labelled)
    for one, other in itertools.pairwise(inside):
        if stack_of(one) != stack_of(other):
            axes.axvline((one + other) / 2, color=PALE_INK, linewidth=0.8)
    if is_labelled:
        stacks = [plain(stack, max_letters=24) for stack in dict.fromkeys(map(stack_of, inside)) if stack]
        axes.set_xlabel(" ".join(["layer", *([f"of {' | '.join(stacks)}"] if stacks else [])]), fontsize=TEXT_SIZE)


def with_gap(
    layers: Sequence[int], values: Sequence[float], *, all_layers: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Places and values of layers, ascending: no line joins a stack with another one, or with what is outside of it."""
    places: list[float] = []
    known: list[float] = []
    for before, layer, value in zip([None, *layers], layers, values, strict=False):
        if before is not None and (before < 0 or stack_of(before) != stack_of(layer)):
            places.append(math.nan)
            known.append(math.nan)
        places.append(place_of_layer(layer, all_layers))
        known.append(value)
    return places, known


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names of what is drawn from top to bottom at 0, 1, 2, ...; they are `plain` already."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.yaxis.set_major_formatter(FixedFormatter(list(names)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def thinned(names: Sequence[str], *, max_names: int) -> tuple[list[int], list[str]]:
    """Which of many places along an axis are named: every n-th with a round n."""
    step = next(step for step in _NICE_STEPS if len(names) <= step * max_names)
    return list(range(0, len(names), step)), [names[index] for index in range(0, len(names), step)]


def mark_limits(axes: Axes, which: str, *, formats: Sequence[str] = LIMITS, min_distance: float = 0.06) -> None:
    """The largest values of formats as lines across an axis of log2, named at its far end; those that it reaches.

    `min_distance` is a part of the axis: of two limits that are closer the first of `formats` is drawn.
    """
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    shown: dict[str, float] = {}
    for name in formats:
        place = math.log2(FORMATS[name].maximum)
        far = all(abs(place - other) > min_distance * (high - low) for other in shown.values())
        if low < place < high and far:
            shown[name] = place
    for place in shown.values():
        (axes.axvline if which == "x" else axes.axhline)(place, color=PALE_INK, linewidth=0.9, linestyle=(0, (4, 3)))
    if not shown:
        return
    beside = axes.secondary_xaxis("top") if which == "x" else axes.secondary_yaxis("right")
    axis = beside.xaxis if which == "x" else beside.yaxis
    axis.set_major_locator(FixedLocator(list(shown.values())))
    axis.set_major_formatter(FixedFormatter([f"{name} {FORMATS[name].maximum:.4g}" for name in shown]))
    axis.set_minor_locator(NullLocator())
    beside.tick_params(labelsize=SMALL_SIZE - 1, labelcolor=PALE_INK, length=0, labelrotation=0)
    beside.spines[:].set_visible(False)
