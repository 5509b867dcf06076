// Draws charts: fills in a template, in a theme, at the size of paper when it is printed.
(function () {
  "use strict";
  const page = window.ranktape;
  const { templates, palette } = page;
  const { colors, diverging, marks } = page.raw.charts;
  // A second cue beside the colour of lines.
  const dashes = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  // Nothing that leaves the page: plotly would offer to send a chart to its maker.
  const CONFIG = {
    responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };
  const drawn = new Map();
  // What A4 and letter have room for, upright: when a page is about to be printed it is still as wide as the screen.
  const PRINTED_WIDTH = 660;
  let isPrinting = false;

  function isDark() {
    if (isPrinting) return false;
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const isPlain = (value) => value !== null && typeof value === "object" && !Array.isArray(value) && !ArrayBuffer.isView(value);

  function blended(...layers) {
    const result = {};
    for (const layer of layers) {
      for (const [key, value] of Object.entries(layer ?? {})) {
        result[key] = isPlain(value) ? blended(isPlain(result[key]) ? result[key] : {}, value) : value;
      }
    }
    return result;
  }

  function themed(layout) {
    const theme = palette[isDark() ? "dark" : "light"];
    const { shapes, ...rest } = theme;
    const result = blended(layout, rest);
    if (result.shapes) result.shapes = result.shapes.map((shape) => blended(shape, { line: { color: shapes.color } }));
    if (!result.yaxis2 || !result.yaxis2.domain) delete result.yaxis2;
    return result;
  }

  /** Draw a chart of some pixels into an element: traces laid over those of its template, and a layout over its own. */
  function draw(place, template, traces, { height, ...layout }) {
    const { data, layout: shared } = templates[template];
    drawn.set(place, { template, traces, layout: { height, ...layout } });
    sentenceOf(place)?.remove();
    place.hidden = false;
    place.style.height = `${height}px`;
    if (place.getAttribute("role") !== "application") place.setAttribute("role", "img");
    place.setAttribute("aria-label", saidOf(place));
    const filled = traces.map((trace, index) => blended(data[Math.min(index, data.length - 1)], trace));
    return Plotly.react(place, filled, themed(blended(shared, layout, isPrinting ? { width: PRINTED_WIDTH, height } : { autosize: true })), CONFIG);
  }

  /** What a chart is called, for who does not see it: its title, and what is written below that. */
  function saidOf(place) {
    const texts = Array.from(place.closest("figure").querySelectorAll("h2, h3, figcaption"), (one) => one.textContent.trim());
    return `Chart: ${texts.filter(Boolean).join(". ")}`;
  }

  /** The sentence that stands where a chart was. */
  function sentenceOf(place) {
    const next = place.nextElementSibling;
    return next !== null && next.classList.contains("empty") ? next : null;
  }

  /** Say in the place of a chart why there is none. It is hidden and not taken apart: plotly may still be drawing it. */
  function say(place, text) {
    drawn.delete(place);
    place.hidden = true;
    const sentence = sentenceOf(place) ?? page.element("p", { class: "empty" });
    sentence.textContent = text;
    place.after(sentence);
  }

  /**
   * What lies over a map: the cells whose mark (of `charts.marks`, null for none) says that they have no place in its
   * colours. The legend names the marks that occur.
   */
  function marked(cells, legend) {
    const places = new Map(marks.map(([name], place) => [name, place]));
    const occurring = new Set(cells.flat());
    legend.replaceChildren(
      ...marks.filter(([name]) => occurring.has(name)).map(([, words, color]) => {
        const swatch = page.element("i");
        swatch.style.background = color;
        return page.element("span", { children: [swatch, words] });
      })
    );
    if (!marks.some(([name]) => occurring.has(name))) return [];
    const steps = marks.flatMap(([, , color], place) => [[place / marks.length, color], [(place + 1) / marks.length, color]]);
    return [{
      z: cells.map((row) => row.map((name) => places.get(name) ?? null)),
      zmin: -0.5, zmax: marks.length - 0.5, colorscale: steps, showscale: false,
    }];
  }

  function redraw() {
    for (const [place, { template, traces, layout }] of drawn) draw(place, template, traces, layout);
  }

  function print(is) {
    isPrinting = is;
    redraw();
  }

  page.themes = {
    draw, say, marked, redraw, print, isDark, colors, dashes, diverging,
    colorOf: (index) => colors[index % colors.length],
    dashOf: (index) => dashes[Math.floor(index / colors.length) % dashes.length],
    MAX_LINES: colors.length * 2,
  };
})();
