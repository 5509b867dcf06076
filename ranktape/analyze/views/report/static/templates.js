// Gives the charts as they are before numbers are put into them: axes, colours, what a hover says; and two themes.
(function () {
  "use strict";
  const page = window.ranktape;
  const { colors } = page.raw.charts;
  const [BLUE, , GREEN, , , SKY] = colors;
  const CIVIDIS = [
    "#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838",
  ].map((color, place, all) => [place / (all.length - 1), color]);
  const FONT = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", size: 12 };
  const NO_LINE = { width: 0 };

  function chart(data, { xaxis, yaxis, ...layout } = {}) {
    return {
      data,
      layout: {
        // plotly's buttons stand right of the chart, one above the other: above it they would cover the legend.
        margin: { l: 60, r: 40, t: 40, b: 48 },
        modebar: { orientation: "v" },
        font: FONT,
        hovermode: "closest",
        hoverlabel: { font: FONT, align: "left" },
        legend: {
          orientation: "h", traceorder: "normal", font: { size: 11 }, maxheight: 0.7,
          x: 0, xanchor: "left", yref: "container", y: 1, yanchor: "top",
        },
        showlegend: true,
        dragmode: "zoom",
        template: { data: { scatter: [{ type: "scatter" }] } },
        xaxis: { automargin: true, ...xaxis },
        yaxis: { automargin: true, ...yaxis },
        ...layout,
      },
    };
  }

  const line = { type: "scatter", mode: "lines+markers", line: { width: 2 }, marker: { size: 6 } };
  const category = { type: "category", showgrid: false, zeroline: false };
  const range = { type: "bar", orientation: "h", yaxis: "y2", width: 0.6 };

  const templates = {
    overview: chart(
      [{
        type: "heatmap", colorscale: CIVIDIS, hoverongaps: false, hovertemplate: "%{text}<extra></extra>",
        colorbar: { thickness: 14, len: 1, outlinewidth: 0 },
      }],
      // It has colours on its right, and no legend.
      {
        xaxis: category, yaxis: { ...category, autorange: "reversed" },
        margin: { l: 60, r: 16, t: 32, b: 48 }, modebar: { orientation: "h" },
      }
    ),
    lines: chart([line]),
    bars: chart([{ type: "bar" }], { barmode: "group", bargap: 0.25 }),
    // Counts above, the ranges of the formats below, over the same binades.
    distribution: chart(
      [
        { type: "bar", name: "values", marker: { color: BLUE, line: NO_LINE }, showlegend: false },
        { ...range, name: "subnormal range of the format", marker: { color: SKY, line: NO_LINE } },
        { ...range, name: "normal range", marker: { color: GREEN, line: NO_LINE } },
      ],
      {
        barmode: "overlay",
        bargap: 0.05,
        xaxis: { title: { text: "exponent: log2 of the magnitude" }, anchor: "y2", zeroline: false },
        yaxis: { domain: [0.4, 1], title: { text: "values" }, rangemode: "tozero" },
        yaxis2: { domain: [0, 0.36], automargin: true, autorange: "reversed", showgrid: false },
      }
    ),
    occupancy: chart([{ type: "bar", orientation: "h", marker: { line: NO_LINE } }], {
      barmode: "stack",
      xaxis: { tickformat: ".0%", range: [0, 1], title: { text: "part of the nonzero values" } },
      yaxis: { autorange: "reversed" },
    }),
    sweep: chart([line], {
      xaxis: { title: { text: "scale exponent relative to the usual scale" }, dtick: 2, zeroline: false },
      yaxis: { title: { text: "SQNR, dB" } },
      shapes: [{ type: "line", yref: "paper", x0: 0, x1: 0, y0: 0, y1: 1, line: { dash: "dot", width: 1 } }],
    }),
  };

  function theme(ink, paper, grid) {
    const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, tickcolor: grid };
    return {
      paper_bgcolor: paper, plot_bgcolor: paper, font: { color: ink }, shapes: { color: ink },
      xaxis: axis, yaxis: axis, yaxis2: axis,
      hoverlabel: { bgcolor: paper, bordercolor: grid, font: { color: ink } },
    };
  }

  page.templates = templates;
  page.palette = { light: theme("#1a1a1a", "#ffffff", "#e3e3e3"), dark: theme("#e6e6e6", "#1b1e24", "#363b45") };
})();
