"""A plot of where in the model tensors overflow and underflow, layer by layer.

One row of panels for each kind of loss, one column for each operation, one line for each type of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D

from ranktape.analyze.layer_stacks import layer_places
from ranktape.analyze.numerics.formats import BY_DTYPE, FORMATS
from ranktape.analyze.table import Column, Kind, Table
from ranktape.analyze.views.plots.axes import scale_layers, scale_shares, with_gap
from ranktape.analyze.views.plots.style import (
    COLORS,
    INK,
    MARKS,
    PANEL_SIZE,
    TEXT_SIZE,
    Heading,
    finish,
    key,
    page,
    plain,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ranktape.analyze.numerics.formats import Format
    from ranktape.analyze.views.plots.data import PlotData

MAX_MARKS = 40
"""Layers up to which marks do not run together."""

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


ZEROS = Panel(
    kind="zeros", absence="no zeros", column="overflow.zero.count", definition=lambda _: "exactly 0 as captured"
)
"""Drawn below where a layer has many: what was cast to a format without a scale is zero and underflows no more."""

MANY_ZEROS = 0.1
"""Of all elements of a layer, with one type and operation."""

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


def table_of(data: PlotData) -> Table:
    """What `draw_overflow` draws, of what is known already; counts that are not known are 0."""
    counted = {
        "elements": data.metric("num_elements"),
        "overflow.total": data.metric("upper") + data.metric("lower"),
        "overflow.underflow.count": data.metric("underflow"),
        "overflow.zero.count": data.metric("zero"),
        **({"overflow.flushed.count": data.metric("flushed")} if data.target is not None else {}),
    }
    fields = ("iteration", "rank", "operation", "layer_type", "layer_idx")
    limits = data.column("dtype").tolist() if data.target is None else [data.target.name] * len(data)
    numbers = ([0 if value != value else int(value) for value in column.tolist()] for column in counted.values())  # noqa: PLR0124 - NaN
    rows = tuple(zip(*(data.column(field).tolist() for field in fields), limits, *numbers, strict=True))
    columns = tuple(Column(name=name, kind=Kind.INTEGER) for name in (*fields, "limits_of", *counted))
    return Table(title="", columns=columns, rows=rows)


def draw_overflow(table: Table, *, title: str = "") -> Figure:
    """The plot of an overflow table that has one row for each record."""
    rows = _placed(table)
    operations = sorted({row["operation"] for row in rows}, key=lambda name: (name != "forward", name))
    layers = sorted({row["layer_idx"] for row in rows})
    layer_types = sorted({row["layer_type"] for row in rows})
    styles = {name: _style(index) for index, name in enumerate(layer_types)}
    panels = [*(PANELS if _is_against_format(table) else PANELS[:-1])]
    if zeros_of(table) >= MANY_ZEROS:
        panels.append(ZEROS)
    limits = _only_limits(table)
    width = min(8.0, max(4.5, 2.5 + 0.06 * len(layers)))
    figure, grid = page(len(panels), len(operations), panel_width=width, panel_height=2.3)
    for panel, axes_of_panel in zip(panels, grid, strict=True):
        drawn = {operation: lines(rows, panel=panel, operation=operation) for operation in operations}
        worst = [ratio for found in drawn.values() for line in found.values() for ratio in line.worst]
        for operation, axes in zip(operations, axes_of_panel, strict=True):
            _draw_panel(axes, drawn[operation], panel=panel, styles=styles, layers=layers)
            scale_shares(axes, "y", worst)
            axes.tick_params(labelleft=axes is axes_of_panel[0])
            scale_layers(axes, layers, is_labelled=panel is panels[-1])
        axes_of_panel[0].set_ylabel(f"{panel.kind}\n{panel.definition(limits)}", fontsize=TEXT_SIZE)
    for operation, axes in zip(operations, grid[0], strict=True):
        axes.set_title(operation, fontsize=PANEL_SIZE)
    heading = Heading(title=title, subtitle=_subtitle(table), notes=("Shares are of the elements of a layer.",))
    return finish(figure, heading, handles=_handles(styles))


def _placed(table: Table) -> list[dict[str, Any]]:
    """The rows, in which the layer is the place where it is drawn."""
    rows = table.records()
    stacks = [row.get("layer_stack", "") for row in rows]
    places = layer_places(stacks, [row["layer_idx"] for row in rows])
    return [{**row, "layer_idx": place} for row, place in zip(rows, places, strict=True)]


def zeros_of(table: Table) -> float:
    """The largest part of a layer, with one type and operation, that is exactly zero."""
    operations = set(table.column("operation"))
    found = [lines(_placed(table), panel=ZEROS, operation=one) for one in operations]
    return max((ratio for by_type in found for line in by_type.values() for ratio in line.ratios), default=0.0)


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


def _style(index: int) -> dict[str, Any]:
    hollow = {"markerfacecolor": "white"} if index >= len(COLORS) else {}
    return {"color": COLORS[index % len(COLORS)], "marker": MARKS[index % len(MARKS)], **hollow}


def _handles(styles: Mapping[str, dict[str, Any]]) -> list[Any]:
    handles = [
        key(Line2D([], [], **style, markersize=5, linewidth=1.4), plain(name, max_letters=60))
        for name, style in styles.items()
    ]
    return [*handles, key(Line2D([], [], **WORST, color=INK), "the worst tensor of the layer")]


def _subtitle(table: Table) -> str:
    """What the limits are, and what was drawn."""
    names = sorted(set(table.column("limits_of")))
    rows = table.records()
    iterations = sorted({row["iteration"] for row in rows})
    ranks = {row["rank"] for row in rows}
    span = f"iteration {iterations[0]}" if len(iterations) == 1 else f"iterations {iterations[0]} to {iterations[-1]}"
    elements = sum(row["elements"] for row in rows)
    limits = [_limits(name, table=table) for name in names[:MAX_NAMED_LIMITS]]
    rest = [f"and {len(names) - MAX_NAMED_LIMITS} more types"] if len(names) > MAX_NAMED_LIMITS else []
    counts = ((len(ranks), "rank"), (len(rows), "tensor"), (elements, "element"))
    drawn = ", ".join([span, *(f"{count:,} {word}{'s' if count != 1 else ''}" for count, word in counts)])
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
