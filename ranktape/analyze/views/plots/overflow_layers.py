"""Draws where in the model tensors overflow and underflow, layer by layer.

One row of panels for each kind of loss, one column for each operation, one line for each type of layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.lines import Line2D

from ranktape.analyze.identity import LayerPlace, layer_places
from ranktape.analyze.numerics.formats import BY_DTYPE, FORMATS, Format
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.table import Column, Kind, Table
from ranktape.analyze.views.plots.axes import scale_layers, scale_shares, with_gap
from ranktape.analyze.views.plots.lines import MAX_MARKS
from ranktape.analyze.views.plots.style import COLORS, INK, MARKS, Page, key, name, plain, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot

WORST: dict[str, Any] = {"linestyle": ":", "linewidth": 1.2, "marker": "o", "markersize": 2}
"""How the line of the worst tensors looks."""

MAX_NAMED_LIMITS = 3
"""Types whose limits the title names."""

MANY_ZEROS = 0.1
"""Of all elements of a layer, with one type and operation."""

FLUSHED = "overflow.flushed.count"
"""The column that an overflow table has against a format alone: of what is stored already nothing is flushed."""


class Panel(NamedTuple):
    """A row of panels: a kind of loss, what is said where there is none, the column of its counts, what is counted.

    `limits` says what is counted under the limits of a format.
    """

    kind: str
    absence: str
    column: str
    definition: str
    limits: str = ""


ZEROS = Panel("zeros", "no zeros", "overflow.zero.count", "exactly 0 as captured")
"""Drawn below where a layer has many: what was cast to a narrow format is zero and underflows no more."""

PANELS = (
    Panel(
        *("overflow", "no overflow", "overflow.total", "beyond the largest value"),
        "|x| rounds beyond {0.maximum:.4g}",
    ),
    Panel(
        *("underflow", "no underflow", "overflow.underflow.count", "below the smallest normal"),
        "0 < |x| < {0.min_normal:.3g}",
    ),
    Panel("flush to zero", "nothing is flushed", FLUSHED, "rounds to zero", "0 < |x| <= {0.flush_limit:.3g}"),
)
"""From top to bottom; the last one against a format only."""


class Line(NamedTuple):
    """One type of layer in one panel: for each layer the share of its elements, and that of its worst tensor."""

    layers: list[LayerPlace]
    ratios: list[float]
    worst: list[float]


def overflow_by_layer(data: PlotData, row: Plot) -> Figure:
    """Overflow and underflow by layer, of what is known already; counts that are not known are 0."""
    counted = {
        "elements": data.metric("num_elements"),
        "overflow.total": data.metric("upper") + data.metric("lower"),
        "overflow.underflow.count": data.metric("underflow"),
        "overflow.zero.count": data.metric("zero"),
        **({FLUSHED: data.metric("flushed")} if data.target is not None else {}),
    }
    fields = ("iteration", "rank", "operation", "layer_type", "layer_idx")
    limits = data.column("dtype").tolist() if data.target is None else [data.target.name] * len(data)
    numbers = ([0 if value != value else int(value) for value in column.tolist()] for column in counted.values())  # noqa: PLR0124 - NaN
    rows = tuple(zip(*(data.column(field).tolist() for field in fields), limits, *numbers, strict=True))
    columns = tuple(Column(name=one, kind=Kind.INTEGER) for one in (*fields, "limits_of", *counted))
    if data.target is not None:
        columns = (*columns, Column(name="scaling", kind=Kind.TEXT))
        rows = tuple((*row, data.target.scaling.value) for row in rows)
    return draw_overflow(Table(title="", columns=columns, rows=rows), title=row.title)


def draw_overflow(table: Table, *, title: str = "") -> Figure:
    """The plot of an overflow table that has one row for each record."""
    rows = _placed(table)
    operations = sorted({row["operation"] for row in rows}, key=lambda name: (name != "forward", name))
    layers = sorted({row["layer_idx"] for row in rows})
    styles: dict[str, dict[str, Any]] = {}
    for index, one in enumerate(sorted({row["layer_type"] for row in rows})):
        hollow = {"markerfacecolor": "white"} if index >= len(COLORS) else {}
        styles[one] = {"color": COLORS[index % len(COLORS)], "marker": MARKS[index % len(MARKS)], **hollow}
    is_against_format = any(column.name == FLUSHED for column in table.columns)
    panels = [*PANELS[: 3 if is_against_format else 2], *([ZEROS] if zeros_of(table) >= MANY_ZEROS else [])]
    # int8 is the name of a format and of an element type, and they have different limits.
    formats = FORMATS if is_against_format else BY_DTYPE
    limits = {one: formats.get(one) for one in sorted(set(table.column("limits_of")))}
    is_scaled = is_against_format and Scaling.NONE.value not in table.column("scaling")
    # Of several types, and of integers, there are no limits that count for every tensor.
    shared = next(iter(limits.values())) if len(limits) == 1 else None
    page = Page(
        len(panels),
        len(operations),
        width=min(8.0, max(4.5, 2.5 + 0.06 * len(layers))),
        height=2.3,
        title=title,
        subtitle=_subtitle(rows, limits, is_scaled=is_scaled),
        notes=["Shares are of the elements of a layer."],
    )
    for panel, axes_of_panel in zip(panels, page.panels, strict=True):
        drawn = [lines(rows, panel=panel, operation=operation) for operation in operations]
        worst = [ratio for found in drawn for line in found.values() for ratio in line.worst]
        for found, axes in zip(drawn, axes_of_panel, strict=True):
            _draw_panel(axes, found, panel=panel, styles=styles, layers=layers)
            scale_shares(axes, "y", worst)
            axes.tick_params(labelleft=axes is axes_of_panel[0])
            scale_layers(axes, layers, is_labelled=panel is panels[-1])
        words = panel.limits.format(shared) if shared and panel.limits else panel.definition
        words = words.replace("|x|", "|x / scale|") if is_scaled else words
        name(axes_of_panel[0], y=f"{panel.kind}\n{words}")
    for operation, axes in zip(operations, page.panels[0], strict=True):
        name(axes, title=operation)
    for layer_type, style in styles.items():
        line = Line2D([], [], **style, markersize=5, linewidth=1.4)
        page.handles.append(key(line, plain(layer_type, max_letters=60)))
    page.handles.append(key(Line2D([], [], **WORST, color=INK), "the worst tensor of the layer"))
    return page.finish()


def _placed(table: Table) -> list[dict[str, Any]]:
    """The rows, in which the layer is the place where it is drawn."""
    rows = table.records()
    places = layer_places([row.get("layer_stack", "") for row in rows], [row["layer_idx"] for row in rows])
    return [{**row, "layer_idx": place} for row, place in zip(rows, places, strict=True)]


def zeros_of(table: Table) -> float:
    """The largest part of a layer, with one type and operation, that is exactly zero."""
    rows = _placed(table)
    found = [lines(rows, panel=ZEROS, operation=one) for one in {row["operation"] for row in rows}]
    return max((ratio for by_type in found for line in by_type.values() for ratio in line.ratios), default=0.0)


def lines(rows: Sequence[dict[str, Any]], *, panel: Panel, operation: str) -> dict[str, Line]:
    """For each type of layer its line in the panel of an operation."""
    cells: dict[tuple[str, LayerPlace], list[tuple[int, int]]] = {}
    for row in rows:
        if row["operation"] == operation:
            cells.setdefault((row["layer_type"], row["layer_idx"]), []).append((row[panel.column], row["elements"]))
    found: dict[str, Line] = {}
    for (layer_type, layer), tensors in sorted(cells.items()):
        line = found.setdefault(layer_type, Line([], [], []))
        line.layers.append(layer)
        line.ratios.append(sum(count for count, _ in tensors) / max(1, sum(size for _, size in tensors)))
        line.worst.append(max(count / max(1, size) for count, size in tensors))
    return found


def _draw_panel(
    axes: Axes, found: Mapping[str, Line], *, panel: Panel, styles: Mapping[str, dict[str, Any]], layers: Sequence[int]
) -> None:
    axes.grid(visible=False, axis="x")
    for index, (layer_type, line) in enumerate(found.items()):
        style = styles[layer_type]
        # Later lines are finer, so that one which covers another does not hide it.
        fineness = max(0.5, 1 - 0.2 * index)
        size = (8 if len(line.layers) <= MAX_MARKS else 3) * fineness
        places, ratios = with_gap(line.layers, line.ratios, all_layers=layers)
        _, worst = with_gap(line.layers, line.worst, all_layers=layers)
        axes.plot(places, worst, **WORST, color=style["color"], clip_on=False)
        axes.plot(places, ratios, **style, markersize=size, linewidth=2 * fineness, clip_on=False)
    if not any(ratio for line in found.values() for ratio in line.worst):
        say(axes, panel.absence)


def _subtitle(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, Format | None], *, is_scaled: bool) -> str:
    """What the limits are, and what was drawn."""
    scale = " with one scale for each tensor" if is_scaled else ""
    said = [
        one
        if known is None
        else f"{one}{scale}: largest value {known.maximum:.4g}, smallest normal {known.min_normal:.3g}"
        for one, known in limits.items()
    ][:MAX_NAMED_LIMITS]
    rest = len(limits) - MAX_NAMED_LIMITS
    iterations = sorted({row["iteration"] for row in rows})
    span = f"iteration {iterations[0]}" if len(iterations) == 1 else f"iterations {iterations[0]} to {iterations[-1]}"
    elements = sum(row["elements"] for row in rows)
    counts = ((len({row["rank"] for row in rows}), "rank"), (len(rows), "tensor"), (elements, "element"))
    drawn = ", ".join([span, *(f"{count:,} {word}{'s' if count != 1 else ''}" for count, word in counts)])
    return "\n".join([*said, *([f"and {rest} more types"] if rest > 0 else []), drawn])
