"""Divides the axes of plots, and gives the letters that can be drawn beside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALLEST_RATIO = 1e-5
"""Below this part an axis of parts is linear at most; above it each tenth has the same height."""

SMALLEST_DRAWN, LARGEST_DRAWN = 1e-280, 1e280
"""Between these a logarithmic axis can show what there is, with room beside it."""

MANY_TIMES = 300.0
"""Between ends that are so far apart powers of ten are ticks enough."""

FEW_TICKS = 3
"""With fewer ticks an axis hardly says what is where."""


def is_drawable(figure: float) -> bool:
    """Whether a logarithmic axis has a place for it."""
    return SMALLEST_DRAWN <= figure <= LARGEST_DRAWN


def log_scale(axes: Axes, figures: Sequence[float]) -> None:
    """Logarithmic where an error is above zero, for errors spread over many orders and for those that are not.

    Ticks are powers of ten; within few orders 1, 2 and 5 times powers of ten; within less than that round numbers.
    """
    positive = list(filter(is_drawable, figures))
    if not positive:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_locator(NullLocator())
        return
    lowest, highest = math.log10(min(positive)), math.log10(max(positive))
    margin = max(0.1, 0.08 * (highest - lowest))
    low, high = 10 ** (lowest - margin), 10 ** (highest + margin)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    if high / low < MANY_TIMES:
        ticks = _ticks(low, high)
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_major_formatter(FixedFormatter([f"{tick:.6g}" for tick in ticks]))
    axes.yaxis.set_minor_locator(NullLocator())


def _ticks(low: float, high: float) -> list[float]:
    candidates: list[float] = []
    for locator in (LogLocator(subs=(1.0, 2.0, 5.0)), MaxNLocator(4, steps=[1, 2, 5, 10])):
        candidates = [tick for tick in np.asarray(locator.tick_values(low, high)).tolist() if low <= tick <= high]
        if len(candidates) >= FEW_TICKS:
            break
    return candidates


def linear_scale(axes: Axes, figures: Sequence[float]) -> None:
    """Linear, with every digit that tells ticks apart."""
    finite = [figure for figure in figures if math.isfinite(figure)]
    if not finite:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_locator(NullLocator())
        return
    lowest, highest = min(finite), max(finite)
    margin = 0.08 * (highest - lowest) or 0.05 * max(abs(highest), 1e-300)
    axes.set_ylim(lowest - margin, highest + margin)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.9g}"))


def ratio_scale(axes: Axes, figures: Sequence[float]) -> None:
    """Logarithmic up to 100 %, with a true zero at its foot."""
    smallest = min((figure for figure in figures if figure > 0), default=SMALLEST_RATIO)
    lowest = min(-3, max(math.floor(math.log10(smallest)), round(math.log10(SMALLEST_RATIO))))
    ticks = [0.0, *(10.0**power for power in range(lowest, 1))]
    axes.set_yscale("symlog", linthresh=10.0**lowest, linscale=0.6)
    axes.set_ylim(0, 1.4)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter([f"{100 * tick:.3g} %" for tick in ticks]))
    axes.yaxis.set_minor_locator(NullLocator())


def drawable(text: str) -> str:
    """The text as matplotlib draws it: letters that its font has, others by their number; $ as itself."""
    letters = _letters()
    kept = "".join(letter if ord(letter) in letters else letter.encode("unicode_escape").decode() for letter in text)
    # matplotlib reads $ as the start of a formula.
    return kept.replace("$", r"\$")


def wrapped(text: str, *, width: int, num_lines: int) -> str:
    """Lines of at most `width` letters, ended behind a mark where there is one; the middle of what is too long is cut.

    The ends of names tell tensors apart.
    """
    room = width * num_lines
    if len(text) > room:
        text = f"{text[: room // 3]} ... {text[len(text) - room // 2 :]}"
    lines: list[str] = []
    while len(text) > width and len(lines) < num_lines - 1:
        end = max(text.rfind(mark, width // 2, width) for mark in " ,/_.-") + 1 or width
        lines.append(text[:end])
        text = text[end:]
    return "\n".join([*lines, text])


@functools.cache
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties())).get_charmap())
