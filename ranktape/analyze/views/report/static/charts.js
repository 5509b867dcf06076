// Draws charts with plotly. Colours of text, axes and background come from the style sheet, which follows the system.
const { colors, diverging, marks: MARKS } = raw.charts;
// A second cue beside the colour of lines.
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const MAX_LINES = colors.length * 2;
const MAX_TICKS = 28;
const MAX_GAPPED_CELLS = 3000;
const FONT = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", size: 12 };
// Width of A4 and letter paper, upright: before a page is printed it is still as wide as the screen.
const PRINTED_WIDTH = 660;
// Nothing that leaves the page: plotly would offer to send a chart to its maker.
const CONFIG = { responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

const colorOf = (index) => colors[index % colors.length];
const lineStyle = (index) => ({ line: { width: 2, color: colorOf(index), dash: DASHES[Math.floor(index / colors.length) % DASHES.length] }, marker: { size: 6, color: colorOf(index) } });

function draw(id, traces, { height = 380, xaxis, yaxis, ...layout }) {
  const home = at(id);
  sentenceOf(home)?.remove();
  home.hidden = false;
  home.style.height = `${height}px`;
  home.setAttribute("role", "img");
  const texts = Array.from(home.closest("figure").querySelectorAll("h2, h3, figcaption"), (one) => one.textContent.trim());
  home.setAttribute("aria-label", `Chart: ${texts.filter(Boolean).join(". ")}`);
  Plotly.react(home, traces.map((trace) => ({ hovertemplate: "%{text}<extra></extra>", ...trace })), {
    autosize: true, font: FONT, hovermode: "closest", paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    hoverlabel: { font: { ...FONT, color: "#1a1a1a" }, align: "left", bgcolor: "#ffffff", bordercolor: "#9aa0a8" },
    margin: { l: 60, r: 16, t: 32, b: 48 }, modebar: { bgcolor: "transparent" },
    legend: { orientation: "h", font: { size: 11 }, x: 0, xanchor: "left", yref: "container", y: 1, yanchor: "top" },
    xaxis: { automargin: true, zeroline: false, ...xaxis }, yaxis: { automargin: true, ...yaxis }, ...layout,
  }, CONFIG);
}

/** The sentence that stands where a chart was. */
function sentenceOf(home) {
  const next = home.nextElementSibling;
  return next !== null && next.classList.contains("empty") ? next : null;
}

/** Say why there is no chart. The chart is hidden and not taken apart: plotly may still be drawing it. */
function say(id, text) {
  const home = at(id);
  home.hidden = true;
  const sentence = sentenceOf(home) ?? element("p", { class: "empty" });
  sentence.textContent = text;
  home.after(sentence);
}

const opens = new Map();

/** Call `open` with the point of a chart that is clicked, in place of what was called before. */
function onClick(id, open) {
  if (!opens.has(id)) at(id).on("plotly_click", (event) => opens.get(id)(event.points[0]));
  opens.set(id, open);
}

/** As many names as fit beside one another. */
function ticksOf(words, { places = words.map((_, index) => index), maxTicks = MAX_TICKS } = {}) {
  const step = Math.ceil(words.length / maxTicks);
  const kept = words.map((_, index) => index).filter((index) => index % step === 0 && words[index] !== "");
  return { tickmode: "array", tickvals: kept.map((index) => places[index]), ticktext: kept.map((index) => label(words[index], 36)) };
}

/**
 * A heat map of rows and columns with names. `colored` has `z` and its colours. A cell that `marked` gives a mark (of
 * MARKS, null for none) has the colour of the mark; the legend names the marks that occur.
 */
function drawHeatMap(id, { rows, columns, colored, text, marked, legend, open, height, trace = {}, ...layout }) {
  const gap = rows.length * columns.length <= MAX_GAPPED_CELLS ? 1 : 0;
  const shared = { type: "heatmap", x: columns.map((_, index) => index), y: rows.map((_, index) => index), xgap: gap, ygap: gap, text, hoverongaps: false };
  const traces = [{ ...shared, colorscale: "Viridis", ...colored, ...trace, colorbar: { thickness: 14, len: 1, outlinewidth: 0, ...colored.colorbar } }];
  const occurring = new Set(marked.flat());
  legend.replaceChildren(
    ...MARKS.filter(([name]) => occurring.has(name)).map(([, words, color]) => {
      const swatch = element("i");
      swatch.style.background = color;
      return element("span", { children: [swatch, words] });
    })
  );
  if (MARKS.some(([name]) => occurring.has(name))) {
    const steps = MARKS.flatMap(([, , color], index) => [[index / MARKS.length, color], [(index + 1) / MARKS.length, color]]);
    const z = marked.map((row) => row.map((mark) => (mark === null ? null : MARKS.findIndex(([name]) => name === mark))));
    traces.push({ ...shared, z, zmin: -0.5, zmax: MARKS.length - 0.5, colorscale: steps, showscale: false });
  }
  draw(id, traces, {
    height, ...layout,
    xaxis: { type: "linear", showgrid: false, zeroline: false, ...ticksOf(columns), ...layout.xaxis },
    yaxis: { type: "linear", showgrid: false, zeroline: false, autorange: "reversed", ...ticksOf(rows, { maxTicks: 60 }), ...layout.yaxis },
  });
  onClick(id, (point) => open(Math.round(point.y), Math.round(point.x)));
}

/** The axis of values of a metric: logarithmic for magnitudes that span a decade or more. */
function valueAxis(metric, values) {
  const title = { text: label(metric.head + (metric.unit ? `, ${metric.unit}` : "")) };
  const [low, high] = ends(values.filter((value) => value > 0 && Number.isFinite(value)));
  if (metric.isMagnitude && high >= 10 * low) {
    const decades = Math.log10(high / low);
    return { title, type: "log", exponentformat: "power", dtick: decades < 1.5 ? "D2" : Math.max(1, Math.ceil(decades / 7)) };
  }
  if (metric.merge === "ratio") return { title, tickformat: "~%", rangemode: "tozero", exponentformat: "power" };
  return { title, exponentformat: "power" };
}

function printed(isPrinting) {
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    if (chart.offsetParent !== null) Plotly.relayout(chart, isPrinting ? { autosize: false, width: PRINTED_WIDTH } : { autosize: true, width: null });
  }
}
window.addEventListener("beforeprint", () => printed(true));
window.addEventListener("afterprint", () => printed(false));
