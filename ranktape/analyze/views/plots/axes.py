"""Scales the axes of plots for powers of two, shares, layers and names, and marks the limits of formats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ranktape.analyze.numerics.distributions import NARROW_FORMATS
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.views import BLUE, SKY
from ranktape.analyze.views.plots.style import INK, PALE_INK, SMALL_SIZE, empty, key, name, plain

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axes._secondary_axes import SecondaryAxis
    from matplotlib.axis import Axis
    from numpy.typing import NDArray

    from ranktape.analyze.identity import LayerPosition

MAX_TICKS, MAX_SHARE_TICKS = 8, 6
"""The largest number of ticks of an axis, and of powers of ten on an axis of shares."""

LIMITS = ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "fp16", "bf16")
"""The formats whose largest values are marked, in order of priority: if two are too close, only the first is marked."""

BANDS = tuple(one for one in NARROW_FORMATS if one != "int8")
"""The formats whose ranges are drawn as bands. Ranges of integer formats depend only on their scale."""

_NICE_STEPS = [factor * 10**power for power in range(19) for factor in (1, 2, 5)]


def _axis(axes: Axes | SecondaryAxis, which: str) -> Axis:
    return axes.xaxis if which == "x" else axes.yaxis


def set_ticks(axis: Axis, places: Sequence[float], names: Sequence[str]) -> None:
    """Set the major ticks of an axis and their labels, without minor ticks."""
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FixedFormatter(names))
    axis.set_minor_locator(NullLocator())


def scale_powers(axes: Axes, which: str, exponents: Sequence[float] | Any, *, pad: float = 0.5) -> None:
    """An axis of base-2 exponents, labelled with powers of two.

    It extends from the smallest to the largest finite exponent, and over at least 4 binades.
    """
    finite = np.asarray(exponents, dtype=float)
    finite = finite[np.isfinite(finite)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (-4.0, 4.0)
    if high - low < 4:  # noqa: PLR2004 - as the docstring says
        middle = (low + high) / 2
        low, high = middle - 2, middle + 2
    low, high = low - pad, high + pad
    axes.set(**{f"{which}lim": (low, high)})
    ticks = powers_between(low, high)
    set_ticks(_axis(axes, which), ticks, [power_text(tick) for tick in ticks])


def powers_between(low: float, high: float, *, max_ticks: int = MAX_TICKS) -> list[int]:
    """Integer exponents between two limits, evenly spaced; the step is a power of two."""
    steps = (2**power for power in range(10))
    step = next(step for step in steps if math.floor(high / step) - math.ceil(low / step) < max_ticks)
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def scale_shares(axes: Axes, which: str, shares: Sequence[float] | Any) -> None:
    """A logarithmic axis up to 100 % that starts at zero."""
    lowest = lowest_decade(np.asarray(shares, dtype=float))
    step = max(1, math.ceil(-lowest / MAX_SHARE_TICKS))
    ticks = [0.0, *(10.0**power for power in range(-(-lowest // step * step), 1, step))]
    (axes.set_xscale if which == "x" else axes.set_yscale)(
        "symlog", linthresh=10.0**lowest, linscale=max(0.6, -0.12 * lowest)
    )
    axes.set(**{f"{which}lim": (0, 1.4)})
    set_ticks(_axis(axes, which), ticks, [share_text(tick) for tick in ticks])


def lowest_decade(shares: NDArray[np.float64]) -> int:
    """The exponent of the power of ten below which an axis of shares is linear: at or below the smallest share."""
    positive = shares[shares > 0]
    return min(-2, math.floor(math.log10(max(1e-12, float(positive.min()))))) if positive.size else -2


def scale_factors(axes: Axes, logs: NDArray[np.float64]) -> None:
    """A vertical axis of the base-2 logarithms of factors, symmetric about a line at no difference."""
    known = logs[np.isfinite(logs)]
    reach = max(1.0, float(np.abs(known).max(initial=0.0))) * 1.08
    axes.set_ylim(-reach, reach)
    ticks = powers_between(-reach, reach, max_ticks=6)
    set_ticks(axes.yaxis, ticks, [factor_text(tick) for tick in ticks])
    axes.axhline(0, color=INK, linewidth=0.9)
    if not known.size:
        empty(axes, "nothing to compare")


_SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


def power_text(power: int, *, base: int = 2) -> str:
    """A power as text with superscripts, which is drawn several times faster than a formula of matplotlib."""
    return f"{base}{str(power).translate(_SUPERSCRIPTS)}"


def scale_decades(axes: Axes) -> None:
    """A vertical logarithmic axis, labelled with powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_text(round(math.log10(value)), base=10)))


def factor_text(power: int) -> str:
    """A power of two as a factor, such as `4 x` or `1/4 x`."""
    if abs(power) > 6:  # noqa: PLR2004 - short enough to be read at once
        return f"{power_text(power)} x"
    return f"{2**power} x" if power >= 0 else f"1/{2**-power} x"


def share_text(share: float) -> str:
    """A ratio in percent."""
    return f"{100 * share:.3g} %"


def scale_numbers(axes: Axes, which: str, *, max_ticks: int = 6) -> None:
    """A linear axis of numbers of any size, with few ticks and enough digits to distinguish them."""
    axis = _axis(axes, which)
    axis.set_major_locator(MaxNLocator(max_ticks, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.5g}"))


def scale_whole(axes: Axes, values: Sequence[int], *, max_ticks: int) -> None:
    """A horizontal axis of integers such as ranks or iterations, some of which are labelled."""
    low, high = min(values), max(values)
    margin = max(0.5, 0.01 * (high - low))
    axes.set_xlim(low - margin, high + margin)
    known = sorted(set(values))
    step = next(step for step in _NICE_STEPS if high - low < step * max_ticks)
    wanted = known if len(known) <= max_ticks else [value for value in known if value % step == 0] or known
    named: list[int] = []
    for value in wanted:
        if not named or (value - named[-1]) * max_ticks >= high - low:
            named.append(value)
    set_ticks(axes.xaxis, named, [str(value) for value in named])


def place_of_layer(layer: int, layers: Sequence[int]) -> float:
    """The position of a layer; tensors outside of the stack are at a distance before the first layer."""
    if layer >= 0 or max(layers) < 0:
        return float(layer)
    return min(one for one in layers if one >= 0) - max(1.0, 0.05 * len(layers))


def scale_layers(axes: Axes, layers: Sequence[LayerPosition], *, is_labelled: bool = True) -> None:
    """A horizontal axis of layers, with "outside" for tensors outside of the stack; several stacks are side by side."""
    inside = [layer for layer in layers if layer >= 0]
    step = next(step for step in _NICE_STEPS if len(inside) <= step * 12)
    named = [layer for layer in inside if layer.number % step == 0] or inside[:1]
    outside = [place_of_layer(-1, layers)] if -1 in layers else []
    # The first layers have no numbers, to make room for "outside".
    room = 0.09 * (max(inside) - outside[0]) if outside and inside else 0.0
    ticks = [layer for layer in named if not outside or layer - outside[0] >= room]
    margin = max(0.5, 0.01 * len(layers))
    places = [*outside, *map(float, inside)]
    axes.set_xlim(min(places) - margin, max(places) + margin)
    names = [*("outside" for _ in outside), *(str(layer.number) for layer in ticks)]
    set_ticks(axes.xaxis, [*outside, *ticks], names)
    axes.tick_params(axis="x", labelbottom=is_labelled)
    for one, other in itertools.pairwise(inside):
        if one.stack != other.stack:
            axes.axvline((one + other) / 2, color=PALE_INK, linewidth=0.8)
    if is_labelled:
        stacks = [plain(stack, max_letters=24) for stack in dict.fromkeys(layer.stack for layer in inside) if stack]
        name(axes, x=" ".join(["layer", *([f"of {' | '.join(stacks)}"] if stacks else [])]))


def with_gap(
    layers: Sequence[LayerPosition], values: Sequence[float], *, all_layers: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Positions and values of layers in ascending order, with NaN where a line would join different stacks."""
    found: list[tuple[float, float]] = []
    for before, layer, value in zip([None, *layers], layers, values, strict=False):
        if before is not None and (before < 0 or before.stack != layer.stack):
            found.append((math.nan, math.nan))
        found.append((place_of_layer(layer, all_layers), value))
    return [place for place, _ in found], [value for _, value in found]


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows at 0, 1, 2, ... from top to bottom. Names are already `plain`."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    set_ticks(axes.yaxis, range(len(names)), list(names))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def thinned(names: Sequence[str], *, max_names: int) -> tuple[list[int], list[str]]:
    """The indices and names to label along an axis: every n-th name, for a round n."""
    step = next(step for step in _NICE_STEPS if len(names) <= step * max_names)
    return list(range(0, len(names), step)), [names[index] for index in range(0, len(names), step)]


def mark_limits(axes: Axes, which: str, *, min_distance: float) -> None:
    """Mark the largest values of formats within an axis of base-2 logarithms by lines with labels at the far side.

    `min_distance` is relative to the axis: of two limits that are closer, only the first one in `LIMITS` is drawn.
    """
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    shown: dict[str, float] = {}
    for one in LIMITS:
        place = math.log2(FORMATS[one].maximum)
        far = all(abs(place - other) > min_distance * (high - low) for other in shown.values())
        if low < place < high and far:
            shown[one] = place
    for place in shown.values():
        (axes.axvline if which == "x" else axes.axhline)(place, color=PALE_INK, linewidth=0.9, linestyle=(0, (4, 3)))
    if not shown:
        return
    beside = axes.secondary_xaxis("top") if which == "x" else axes.secondary_yaxis("right")
    names = [f"{one} {FORMATS[one].maximum:.4g}" for one in shown]
    set_ticks(_axis(beside, which), list(shown.values()), names)
    beside.tick_params(labelsize=SMALL_SIZE - 1, labelcolor=PALE_INK, length=0, labelrotation=0)
    beside.spines[:].set_visible(False)


def draw_bands(axes: Axes, bands: Axes, exponents: NDArray[np.int64], *, is_named: bool = True) -> None:
    """Scale two panels to the same binades, and draw the ranges of formats without a scale into the second.

    Normal numbers are dark, subnormal numbers light.
    """
    for one in (axes, bands):
        scale_powers(one, "x", [exponents[0], exponents[-1] + 1])
    low, high = bands.get_xlim()
    for row, band in enumerate(BANDS):
        limits = FORMATS[band]
        ends = [math.log2(value) for value in (limits.min_subnormal, limits.min_normal, limits.maximum)]
        subnormal, normal, largest = (min(max(end, low), high) for end in ends)
        bands.barh(row, normal - subnormal, left=subnormal, height=0.62, color=SKY, hatch="////", edgecolor="white")
        bands.barh(row, largest - normal, left=normal, height=0.62, color=BLUE, edgecolor="white")
    name_rows(bands, BANDS if is_named else [""] * len(BANDS))
    name(bands, x="|x|")


def band_handles() -> list[Artist]:
    """The legend entries of bands."""
    subnormal = Patch(facecolor=SKY, hatch="////", edgecolor="white")
    return [key(Patch(facecolor=BLUE), "normal numbers of a format"), key(subnormal, "subnormal numbers of a format")]
