// Shows the records that were clicked beside their peers in one chart, and how their values move over the iterations.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection, folding, themes, label } = page;
  const AXES = ["rank", "layer_idx", "iteration", "source", "microbatch"];
  const MAX_PEERS = 3000;
  const at = (id) => document.getElementById(id);
  const card = at("peers");
  const place = at("peers-chart");

  /** The metric that a finding is about, where the page knows it; else the chosen one. */
  function metricOf(focus) {
    const named = focus.finding === undefined ? undefined : page.metrics.get(page.raw.findings[focus.finding].metric);
    return named ?? selection.metric();
  }

  /** The field in which the records are fewest among their peers: which rank, layer or iteration they are of. */
  function axisOf(records) {
    const share = (name) => {
      const { codes } = page.fields.get(name);
      const count = (some) => new Set(some.map((record) => codes[record])).size;
      const peers = folding.placesLike(records, name !== "layer_idx");
      return count(peers) > 1 ? count(records) / count(peers) : Infinity;
    };
    const shares = AXES.filter((name) => page.fields.has(name)).map((name) => [name, share(name)]);
    const [name, best] = shares.reduce((found, one) => (one[1] < found[1] ? one : found));
    return best <= 1 ? name : null;
  }

  /** The samples of records as points, with those of a finding apart from their peers. */
  function samplePoints(focus, metric, { places, samples }) {
    const { placeOf, starts, metrics } = page.samples;
    const column = metrics.get(metric.name);
    const bad = new Map(places.map((record, index) => [record, samples[index]]));
    const points = { bad: [], peers: [] };
    for (const record of folding.placesLike(focus.records, true)) {
      const own = placeOf.get(record);
      if (own === undefined) continue;
      for (let index = starts[own]; index < starts[own + 1]; index += 1) {
        const number = index - starts[own];
        points[bad.get(record) === number ? "bad" : "peers"].push({ record, x: number, value: column[index] });
      }
    }
    return { ...points, axis: "sample" };
  }

  function recordPoints(focus, metric) {
    const axis = axisOf(focus.records);
    if (axis === null) return { bad: [], peers: [], axis };
    const field = page.fields.get(axis);
    const bad = new Set(focus.records);
    const point = (record) => ({ record, x: field.values[field.codes[record]], value: folding.valueOf(metric, record) });
    const others = folding.placesLike(focus.records, axis !== "layer_idx").filter((record) => !bad.has(record));
    return { bad: focus.records.map(point), peers: others.map(point), axis };
  }

  function traceOf(points, name, metric, axis, style) {
    const texts = points.map(({ record, value, x }) => {
      const who = ["module", "tensor_name", "operation"].map((field) => page.wordOf(field, record)).join(" ");
      const when = ["rank", "iteration"].map((field) => `${field} ${page.wordOf(field, record)}`).join(", ");
      return `<b>${label(name)}</b><br>${label(who)}<br>${label(when)}${axis === "sample" ? `, sample ${x}` : ""}<br>${label(metric.head)}: ${label(page.shown(metric, value))}`;
    });
    return {
      mode: "markers", name, x: points.map(({ x }) => x), y: points.map(({ value }) => (Number.isFinite(value) ? value : null)),
      customdata: points.map(({ record }) => record), text: texts, hovertemplate: "%{text}<extra></extra>", marker: style,
    };
  }

  function updatePeers() {
    const { focus } = selection.state;
    card.hidden = focus === null;
    if (card.hidden) return;
    const finding = focus.finding === undefined ? null : page.raw.findings[focus.finding];
    const metric = metricOf(focus);
    const isOfSample = finding !== null && finding.samples !== null && page.samples.metrics.has(metric.name);
    const { bad, peers, axis } = isOfSample ? samplePoints(focus, metric, finding) : recordPoints(focus, metric);
    const known = peers.filter(({ value }) => Number.isFinite(value));
    at("peers-title").textContent = `${metric.head}, beside the peers`;
    if (known.length === 0 || bad.length === 0) {
      themes.say(place, `There are no peers whose ${metric.head} is known.`);
      return;
    }
    const step = Math.ceil(known.length / MAX_PEERS);
    const drawn = known.filter((_, index) => index % step === 0);
    const middle = folding.median(known.map(({ value }) => value));
    const nouns = isOfSample ? "this sample" : bad.length === 1 ? "this record" : "these records";
    const ticks = isOfSample ? { dtick: Math.ceil(new Set(peers.map(({ x }) => x)).size / 14) } : page.panels.ticksOf(page.fields.get(axis), [...bad, ...drawn].map(({ record }) => record));
    const yaxis = page.panels.valueAxis(metric, [...bad, ...drawn].map(({ value }) => value));
    const spread = { color: themes.colors[6], size: 7, opacity: 0.55, symbol: "circle-open", line: { width: 1.5 } };
    themes.draw(
      place, "lines",
      [
        traceOf(drawn, step === 1 ? "peers" : `peers (one of ${step} is drawn)`, metric, axis, spread),
        traceOf(bad, nouns, metric, axis, { color: themes.colors[1], size: 11, symbol: "diamond" }),
      ],
      {
        height: 420,
        xaxis: { title: { text: page.overview.nameOf(axis) }, zeroline: false, ...ticks },
        yaxis,
        // The median of the peers, across the chart; on a logarithmic axis only where it has a place.
        shapes: yaxis.type === "log" && !(middle > 0) ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: middle, y1: middle, line: { dash: "dot", width: 1.5 } }],
        annotations: yaxis.type === "log" && !(middle > 0) ? [] : [{ xref: "paper", x: 1, xanchor: "right", y: yaxis.type === "log" ? Math.log10(middle) : middle, yanchor: "bottom", showarrow: false, text: `median of the peers ${label(page.shown(metric, middle))}` }],
      }
    );
    if (!place.dataset.listens) {
      place.dataset.listens = "yes";
      place.on("plotly_click", (event) => selection.openRecord(event.points[0].customdata));
    }
  }

  /** Which part of the values lies in which binade, iteration by iteration: of one iteration the same place in all. */
  function updateMoves() {
    const iteration = page.fields.get("iteration");
    const home = at("moves-chart");
    at("moves").hidden = iteration.values.length < 2;
    if (at("moves").hidden) return;
    const focused = Array.from(selection.focused());
    const isOfOne = new Set(focused.map((record) => iteration.codes[record])).size === 1;
    const ranks = new Set(focused.map((record) => page.fields.get("rank").codes[record]));
    const records = isOfOne ? folding.placesLike(focused, true).filter((record) => ranks.has(page.fields.get("rank").codes[record])) : focused;
    const { of, together } = page.details;
    if (together !== "" && !together.split(", ").includes("iteration")) {
      themes.say(home, "There are too many records for histograms of single iterations: select fewer when the report is made.");
      return;
    }
    const columns = Array.from(folding.groups(records, iteration)).filter(([code]) => iteration.values[code] !== null)
      .map(([code, some]) => ({ code, binades: page.drill.binadesOf(new Set(some.map((record) => of[record]))) }))
      .filter(({ binades }) => binades.size > 0);
    if (columns.length === 0) {
      themes.say(home, "Of these records no finite value other than zero is known.");
      return;
    }
    const exponents = columns.flatMap(({ binades }) => Array.from(binades.keys()));
    const [low, high] = exponents.reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [Infinity, -Infinity]);
    const rows = Array.from({ length: high - low + 1 }, (_, row) => low + row);
    const totals = columns.map(({ binades }) => Array.from(binades.values()).reduce((sum, one) => sum + one, 0));
    const parts = rows.map((exponent) => columns.map(({ binades }, column) => (binades.get(exponent) ?? 0) / totals[column]));
    const z = parts.map((row) => row.map((part) => (part > 0 ? Math.log10(part) : null)));
    const floor = z.flat().reduce((least, one) => (one === null ? least : Math.min(least, one)), 0);
    const ticks = Array.from({ length: Math.floor(-floor) + 1 }, (_, power) => -power).filter((_, index, all) => index % Math.ceil(all.length / 7) === 0);
    const words = columns.map(({ code }) => page.word(iteration, code));
    const shown = page.overview.ticksOf(words);
    themes.draw(
      home, "overview",
      [{
        x: columns.map((_, column) => column), y: rows, z, zmin: floor, zmax: 0, xgap: columns.length < 60 ? 1 : 0, ygap: rows.length < 60 ? 1 : 0,
        text: parts.map((row, r) => row.map((part, c) => `<b>iteration ${words[c]}</b><br>2<sup>${rows[r]}</sup> to 2<sup>${rows[r] + 1}</sup><br>${page.percent(part)} of the values`)),
        colorbar: { tickvals: ticks, ticktext: ticks.map((power) => page.percent(10 ** power)) },
      }],
      { height: 420, xaxis: { type: "linear", title: { text: "iteration" }, ...shown }, yaxis: { type: "linear", autorange: true, title: { text: "exponent: log2 of the magnitude" }, tickformat: "d" } }
    );
  }

  function update() {
    updatePeers();
    updateMoves();
  }

  page.peers = { update, updatePeers };
})();
