"""Where in the model do tensors overflow and underflow? One picture, layer by layer.

One row of panels for each kind of loss, one column for each operation, one line for each type of layer. No
global state of matplotlib is touched, so that pictures can be drawn from any thread and any notebook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from ranktape.analyze.formats import BY_DTYPE, FORMATS
from ranktape.analyze.questions.overflow import overflow
from ranktape.errors import StorageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ranktape.analyze.formats import Format
    from ranktape.analyze.table import Table
    from ranktape.analyze.values import View
    from ranktape.storage import Records

BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
"""Okabe and Ito's colours, which people with any colour vision tell apart."""

STYLES = (
    (BLUE, "o"),
    (VERMILION, "s"),
    (GREEN, "^"),
    (PURPLE, "D"),
    (ORANGE, "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
    ("#7F7F7F", "*"),
)
"""Colour and mark of each type of layer, in alphabetical order of the types; hollow from the second round on."""

DOTS_PER_INCH = 150

MAX_TICKS = 6
"""Powers of ten that an axis of ratios names."""

MAX_LAYER_TICKS = 16
"""Layers that an axis of layers names."""

_NICE_STEPS = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]

MAX_MARKS = 40
"""Layers up to which marks do not run together."""

LEGEND_CHARACTERS_PER_INCH = 12
"""How much text fits beside itself in the legend."""

WORST: dict[str, Any] = {"linestyle": ":", "linewidth": 1.2, "marker": "o", "markersize": 2}
"""How the line of the worst tensors looks."""

MAX_NAMED_LIMITS = 3
"""Types whose limits the title names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One row of panels: a kind of loss."""

    kind: str
    """The word in titles."""
    absence: str
    """What is said where there is none."""
    column: str
    """The counts in the overflow table."""
    definition: Callable[[Format | None], str]
    """What is counted, in words, under the limits of a format; under several if None."""


def _overflow_words(limits: Format | None) -> str:
    return "beyond the largest value" if limits is None else f"|x| rounds beyond {limits.maximum:.4g}"


def _underflow_words(limits: Format | None) -> str:
    return "below the smallest normal" if limits is None else f"0 < |x| < {limits.min_normal:.3g}"


def _flush_words(limits: Format | None) -> str:
    return "rounds to zero" if limits is None else f"0 < |x| <= {limits.flush_limit:.3g}"


PANELS = (
    Panel(kind="overflow", absence="no overflow", column="overflow.total", definition=_overflow_words),
    Panel(kind="underflow", absence="no underflow", column="overflow.underflow.count", definition=_underflow_words),
    Panel(kind="flush to zero", absence="nothing is flushed", column="overflow.flushed.count", definition=_flush_words),
)
"""From top to bottom; the last one against a format only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One type of layer in one panel; ratios are over elements."""

    layers: list[int]
    """Ascending; -1 is outside of the stack."""
    ratios: list[float]
    """Of all elements of the layer."""
    worst: list[float]
    """Of that tensor of the layer which has the largest."""


def plot_overflow(
    records: Records,
    *,
    path: Path,
    format: str | None = None,  # noqa: A002 - the option's name
    view: View | None = None,
    on_record: Callable[[], object] = lambda: None,
) -> Table:
    """Write a PNG of the overflow and underflow ratio of each layer, operation and type of layer; returns the counts.

    Limits and values are those of `questions.overflow`. Zeros lie on the axis; where nothing at all is lost, the
    panel says so. Existing files are replaced, folders made.

    Raises:
        UsageError: the format is not known.
        StorageError: the file cannot be written.
    """
    table = overflow(records, format=format, view=view, on_record=on_record)
    figure = draw_overflow(table)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=DOTS_PER_INCH)
    except OSError as error:
        raise StorageError(f"the plot cannot be written to {path}: {error.strerror}") from error
    return table


def draw_overflow(table: Table) -> Figure:
    """The picture of an overflow table that has one row for each record."""
    rows = table.records()
    operations = sorted({row["operation"] for row in rows}, key=lambda name: (name != "forward", name))
    layers = sorted({row["layer_idx"] for row in rows})
    layer_types = sorted({row["layer_type"] for row in rows})
    styles = {name: _style(index) for index, name in enumerate(layer_types)}
    panels = PANELS if _is_against_format(table) else PANELS[:-1]
    limits = _only_limits(table)
    width = min(20.0, max(4.5, 2.5 + 0.06 * len(layers)) * len(operations) + 1.5)
    figure = Figure(figsize=(width, 2.2 * len(panels) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), len(operations), squeeze=False)
    for panel, axes_of_panel in zip(panels, grid, strict=True):
        drawn = {operation: lines(rows, panel=panel, operation=operation) for operation in operations}
        worst = [ratio for found in drawn.values() for line in found.values() for ratio in line.worst]
        for operation, axes in zip(operations, axes_of_panel, strict=True):
            _draw_panel(axes, drawn[operation], panel=panel, styles=styles, layers=layers)
            _scale_ratios(axes, worst, is_labelled=axes is axes_of_panel[0])
            _scale_layers(axes, layers, is_labelled=panel is panels[-1])
        axes_of_panel[0].set_ylabel(f"{panel.kind}\n{panel.definition(limits)}", fontsize=9)
    for operation, axes in zip(operations, grid[0], strict=True):
        axes.set_title(operation, fontsize=10)
    figure.supylabel("share of elements", fontsize=9)
    figure.suptitle(_title(table), fontsize=10)
    _add_legend(figure, styles)
    return figure


def lines(rows: Sequence[dict[str, Any]], *, panel: Panel, operation: str) -> dict[str, Line]:
    """For each type of layer its line in the panel of an operation."""
    cells: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for row in rows:
        if row["operation"] == operation:
            cells.setdefault((row["layer_type"], row["layer_idx"]), []).append((row[panel.column], row["elements"]))
    found: dict[str, Line] = {}
    for (layer_type, layer), tensors in sorted(cells.items()):
        line = found.setdefault(layer_type, Line(layers=[], ratios=[], worst=[]))
        line.layers.append(layer)
        line.ratios.append(sum(count for count, _ in tensors) / max(1, sum(size for _, size in tensors)))
        line.worst.append(max(count / max(1, size) for count, size in tensors))
    return found


def _draw_panel(
    axes: Axes,
    found: Mapping[str, Line],
    *,
    panel: Panel,
    styles: Mapping[str, dict[str, Any]],
    layers: Sequence[int],
) -> None:
    axes.grid(visible=True, axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for index, (layer_type, line) in enumerate(found.items()):
        style = styles[layer_type]
        # Later lines are finer, so that one which covers another does not hide it.
        fineness = max(0.5, 1 - 0.2 * index)
        size = (8 if len(line.layers) <= MAX_MARKS else 3) * fineness
        places, ratios, worst = _places(line, layers=layers)
        axes.plot(places, worst, **WORST, color=style["color"], clip_on=False)
        axes.plot(places, ratios, **style, markersize=size, linewidth=2 * fineness, clip_on=False)
    if not any(ratio for line in found.values() for ratio in line.worst):
        axes.text(0.5, 0.5, panel.absence, transform=axes.transAxes, ha="center", va="center", color="0.35")


def _scale_ratios(axes: Axes, ratios: Sequence[float], *, is_labelled: bool) -> None:
    """A logarithmic axis up to 100 % that has a true zero at its foot."""
    smallest = min((ratio for ratio in ratios if ratio > 0), default=0.01)
    lowest = min(-2, math.floor(math.log10(smallest)))
    step = max(1, math.ceil(-lowest / MAX_TICKS))
    ticks = [0.0, *(10.0**power for power in range(-(-lowest // step) * -step if step > 1 else lowest, 1, step))]
    axes.set_yscale("symlog", linthresh=10.0**lowest, linscale=0.6)
    axes.set_ylim(0, 1.25)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter([f"{100 * tick:.3g} %" for tick in ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="both", labelsize=8, labelleft=is_labelled)


def _scale_layers(axes: Axes, layers: Sequence[int], *, is_labelled: bool) -> None:
    """Whole numbers, and "outside" for what is outside of the stack."""
    inside = [layer for layer in layers if layer >= 0]
    step = next(step for step in _NICE_STEPS if len(inside) <= step * MAX_LAYER_TICKS)
    ticks = [layer for layer in inside if layer % step == 0]
    outside = [_outside(layers)] if -1 in layers else []
    margin = max(0.5, 0.01 * len(layers))
    axes.set_xlim(min([*outside, *inside]) - margin, max([*outside, *inside]) + margin)
    axes.xaxis.set_major_locator(FixedLocator([*outside, *ticks]))
    axes.xaxis.set_major_formatter(FixedFormatter([*("outside" for _ in outside), *map(str, ticks)]))
    axes.tick_params(axis="x", labelbottom=is_labelled)
    if is_labelled:
        axes.set_xlabel("layer")


def _outside(layers: Sequence[int]) -> float:
    """Where what is outside of the stack is drawn: apart from the first layer, however many there are."""
    return min(layer for layer in layers if layer >= 0) - max(1.0, 0.05 * len(layers)) if max(layers) >= 0 else -1.0


def _places(line: Line, *, layers: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """Layers, ratios and worst ratios as they are drawn: no line joins the stack with what is outside of it."""
    if line.layers[0] >= 0:
        return [float(layer) for layer in line.layers], line.ratios, line.worst
    gap = [math.nan]
    return (
        [_outside(layers), *gap, *map(float, line.layers[1:])],
        [*line.ratios[:1], *gap, *line.ratios[1:]],
        [*line.worst[:1], *gap, *line.worst[1:]],
    )


def _style(index: int) -> dict[str, Any]:
    colour, mark = STYLES[index % len(STYLES)]
    hollow = {"markerfacecolor": "white"} if index >= len(STYLES) else {}
    return {"color": colour, "marker": mark, **hollow}


def _add_legend(figure: Figure, styles: Mapping[str, dict[str, Any]]) -> None:
    # matplotlib reads $ as the start of a formula, and hides labels that begin with an underscore.
    labels = {name: " " + name.replace("$", r"\$") for name in styles}
    handles = [
        Line2D([], [], **style, markersize=5, linewidth=1.4, label=labels[name]) for name, style in styles.items()
    ]
    handles.append(Line2D([], [], **WORST, color="0.35", label=" the worst tensor of the layer"))
    longest = max(len(str(handle.get_label())) for handle in handles)
    num_columns = min(4, max(1, int(figure.get_figwidth() * LEGEND_CHARACTERS_PER_INCH) // (longest + 6)))
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=9)


def _title(table: Table) -> str:
    """What the limits are, and what was drawn."""
    names = sorted(set(table.column("limits_of")))
    rows = table.records()
    iterations = sorted({row["iteration"] for row in rows})
    ranks = {row["rank"] for row in rows}
    span = f"iteration {iterations[0]}" if len(iterations) == 1 else f"iterations {iterations[0]} to {iterations[-1]}"
    elements = sum(row["elements"] for row in rows)
    limits = [_limits(name, table=table) for name in names[:MAX_NAMED_LIMITS]]
    rest = [f"and {len(names) - MAX_NAMED_LIMITS} more types"] if len(names) > MAX_NAMED_LIMITS else []
    plural = "s" if len(ranks) > 1 else ""
    drawn = f"{span}, {len(ranks)} rank{plural}, {len(rows):,} tensors, {elements:,} elements"
    return "\n".join([*limits, *rest, drawn])


def _only_limits(table: Table) -> Format | None:
    """The limits that count for every tensor; None if there are several, or those of integers."""
    names = set(table.column("limits_of"))
    return _format(names.pop(), table=table) if len(names) == 1 else None


def _is_against_format(table: Table) -> bool:
    """Whether the limits are those of a format: of what is stored already nothing is flushed."""
    return any(column.name == "overflow.flushed.count" for column in table.columns)


def _format(name: str, *, table: Table) -> Format | None:
    # int8 is the name of a format and of an element type, and they have different limits.
    return (FORMATS if _is_against_format(table) else BY_DTYPE).get(name)


def _limits(name: str, *, table: Table) -> str:
    row = _format(name, table=table)
    if row is None:
        return name
    return f"{name}: largest value {row.maximum:.4g}, smallest normal {row.min_normal:.3g}"
