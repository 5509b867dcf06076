"""Makes the charts as they are before the page's script fills them in: axes, colours, what a hover says.

Charts of plotly, checked by it. The script puts numbers into them, and chooses between the two themes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ranktape.analyze.views.palette import BLUE, DIVERGING, GREEN, ORANGE, PURPLE, SKY, VERMILION

if TYPE_CHECKING:
    import plotly.graph_objects as go  # type: ignore[import-untyped]  # it has no types

COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#999999", "#8C6D1F")
"""Those of the plots, with a lighter grey and brown in the place of black: all can be seen on white and on black."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""A second cue beside the colour of lines."""

_AT_ZERO = {"x0": 0, "x1": 0, "y0": 0, "y1": 1}
_TOP_LEFT = {"x": 0, "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top"}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"


def charts() -> dict[str, Any]:
    """Templates by the name of the chart, themes, and colours, as JSON has them."""
    import plotly.graph_objects as go

    made = {
        "overview": _heat_map(go),
        "lines": _chart(go, go.Scatter(mode="lines+markers", line={"width": 2}, marker={"size": 6})),
        "bars": _chart(go, go.Bar(), barmode="group", bargap=0.25),
        "distribution": _distribution(go),
        "occupancy": _chart(
            go,
            go.Bar(orientation="h", marker={"line": {"width": 0}}),
            barmode="stack",
            xaxis={"tickformat": ".0%", "range": [0, 1], "title": {"text": "part of the nonzero values"}},
            yaxis={"autorange": "reversed"},
        ),
        "sweep": _chart(
            go,
            go.Scatter(mode="lines+markers", line={"width": 2}, marker={"size": 6}),
            xaxis={"title": {"text": "scale exponent relative to the usual scale"}, "dtick": 2, "zeroline": False},
            yaxis={"title": {"text": "SQNR, dB"}},
            shapes=[{"type": "line", "yref": "paper", **_AT_ZERO, "line": {"dash": "dot", "width": 1}}],
        ),
    }
    return {
        "templates": {name: figure.to_plotly_json() for name, figure in made.items()},
        "themes": {"light": _theme("#1a1a1a", "#ffffff", "#e3e3e3"), "dark": _theme("#e6e6e6", "#1b1e24", "#363b45")},
        "colors": list(COLORS),
        "dashes": list(DASHES),
        "diverging": [[place / (len(DIVERGING) - 1), color] for place, color in enumerate(DIVERGING)],
    }


def _chart(go: Any, *traces: Any, **layout: Any) -> go.Figure:
    shared = {
        # plotly's buttons stand right of the chart, one above the other: above it they would cover the legend.
        "margin": layout.pop("margin", {"l": 60, "r": 40, "t": 40, "b": 48}),
        "modebar": layout.pop("modebar", {"orientation": "v"}),
        "font": {"family": _FONT, "size": 12},
        "hovermode": "closest",
        "hoverlabel": {"font": {"family": _FONT, "size": 12}, "align": "left"},
        "legend": {"orientation": "h", "traceorder": "normal", "font": {"size": 11}, **_TOP_LEFT},
        "showlegend": True,
        "dragmode": "zoom",
        "template": {},
    }
    axes = {name: {"automargin": True, **layout.pop(name, {})} for name in ("xaxis", "yaxis")}
    return go.Figure(data=list(traces), layout=go.Layout(**shared, **axes, **layout))


def _heat_map(go: Any) -> go.Figure:
    trace = go.Heatmap(
        colorscale="Cividis",
        hoverongaps=False,
        colorbar={"thickness": 14, "len": 1, "outlinewidth": 0},
        hovertemplate="%{text}<extra></extra>",
    )
    category = {"type": "category", "showgrid": False, "zeroline": False}
    margin = {"l": 60, "r": 16, "t": 32, "b": 48}
    # It has colours on its right, and no legend.
    buttons = {"modebar": {"orientation": "h"}}
    return _chart(go, trace, xaxis=category, yaxis={**category, "autorange": "reversed"}, margin=margin, **buttons)


def _distribution(go: Any) -> go.Figure:
    """Counts above, the ranges of the formats below, over the same binades."""
    counts = go.Bar(name="values", marker={"color": BLUE, "line": {"width": 0}}, showlegend=False)
    subnormal, normal = (
        go.Bar(orientation="h", yaxis="y2", name=name, marker={"color": color, "line": {"width": 0}}, width=0.6)
        for name, color in (("subnormal range of the format", SKY), ("normal range", GREEN))
    )
    return _chart(
        go,
        counts,
        subnormal,
        normal,
        barmode="overlay",
        bargap=0.05,
        xaxis={"title": {"text": "exponent: log2 of the magnitude"}, "anchor": "y2", "zeroline": False},
        yaxis={"domain": [0.4, 1], "title": {"text": "values"}, "rangemode": "tozero"},
        yaxis2={"domain": [0, 0.36], "automargin": True, "autorange": "reversed", "showgrid": False},
    )


def _theme(ink: str, paper: str, grid: str) -> dict[str, Any]:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "tickcolor": grid}
    return {
        "paper_bgcolor": paper,
        "plot_bgcolor": paper,
        "font": {"color": ink},
        "xaxis": axis,
        "yaxis": axis,
        "yaxis2": axis,
        "shapes": {"color": ink},
        "hoverlabel": {"bgcolor": paper, "bordercolor": grid, "font": {"color": ink}},
    }
