// Draws a metric through the layers and the iterations, and for each kind of tensors.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection, folding, themes, label } = page;
  const BAR_FIELDS = ["layer_type", "quant_type", "phase", "component"];
  const MAX_BARS = 16;
  const MAX_TICKS = 14;
  const at = (id) => document.getElementById(id);
  const nameOf = (field) => page.overview.nameOf(field);

  function valueAxis(metric, values) {
    const title = { text: label(metric.head + (metric.unit ? `, ${metric.unit}` : "")) };
    const positive = values.filter((value) => value > 0 && Number.isFinite(value));
    if (metric.isMagnitude && positive.length > 0) {
      const decades = Math.log10(positive.reduce((best, one) => Math.max(best, one)) / positive.reduce((best, one) => Math.min(best, one)));
      // Within a decade a logarithmic axis may have no number at all.
      if (decades < 1) return { title, exponentformat: "power" };
      return { title, type: "log", exponentformat: "power", dtick: decades < 1.5 ? "D2" : Math.max(1, Math.ceil(decades / 7)) };
    }
    if (metric.merge === "ratio") return { title, tickformat: "~%", rangemode: "tozero", exponentformat: "power" };
    return { title, zeroline: true };
  }

  /** What a chart says where it would be too full: filters bring the rest. */
  function more(count, what) {
    return count > 0 ? ` (${count} more ${what} are not drawn: filter)` : "";
  }

  /** Names of the values that there are, as many as fit beside one another. */
  function ticksOf(field, records) {
    const codes = Array.from(folding.groups(records, field).keys()).filter((code) => field.values[code] !== null);
    const step = Math.ceil(codes.length / MAX_TICKS);
    const named = codes.filter((_, place) => place % step === 0);
    return { tickmode: "array", tickvals: named.map((code) => field.values[code]), ticktext: named.map((code) => label(page.word(field, code))) };
  }

  /** Whether nothing of a kind was counted, so that there is nothing to draw. */
  function isNothing(metric, values) {
    return metric.merge === "ratio" && values.every((value) => !(value > 0));
  }

  /** What stands before the number in the name of a layer of several stacks. */
  function stackOf(field, code) {
    return field.words === undefined ? "" : field.words[code].replace(/\d+$/, "");
  }

  /** A column with nothing between two stacks, so that no line joins them. */
  function withGaps(column, stacks) {
    return column.flatMap((value, place) => (place > 0 && stacks[place] !== stacks[place - 1] ? [null, value] : [value]));
  }

  /** Pixels of a legend above a chart, whose names stand in columns. */
  function legendHeight(place, names) {
    const widest = names.reduce((most, name) => Math.max(most, name.length), 0);
    const columns = Math.max(1, Math.floor((place.clientWidth - 150) / (60 + 7 * widest)));
    return 19 * Math.ceil(names.length / columns);
  }

  /** One line for each value of a field, over the numbers of another. */
  function lines(place, { records, over, by, metric, none }) {
    const overField = page.fields.get(over);
    const byField = page.fields.get(by);
    const groups = Array.from(folding.groups(records, byField));
    const shown = groups.slice(0, themes.MAX_LINES);
    const all = [];
    const traces = shown.map(([code, members], index) => {
      const points = Array.from(folding.groups(members, overField)).filter(([x]) => overField.values[x] !== null);
      const values = points.map(([, some]) => folding.fold(metric, some));
      all.push(...values);
      const word = label(page.word(byField, code));
      const texts = points.map(([x, some], p) => `<b>${word}</b><br>${nameOf(over)} ${label(page.word(overField, x))}<br>${label(page.shown(metric, values[p]))}<br>${page.number(some.length)} records`);
      const spaced = (column) => withGaps(column, points.map(([x]) => stackOf(overField, x)));
      return {
        x: spaced(points.map(([x]) => overField.values[x])),
        y: spaced(values.map((value) => (Number.isFinite(value) ? value : null))),
        text: spaced(texts),
        hovertemplate: "%{text}<extra></extra>",
        name: word,
        line: { color: themes.colorOf(index), dash: themes.dashOf(index) },
        marker: { color: themes.colorOf(index) },
      };
    });
    if (!all.some(Number.isFinite)) {
      themes.say(place, none);
      return;
    }
    if (isNothing(metric, all)) {
      themes.say(place, `${metric.head}: 0 % in all of these records.`);
      return;
    }
    themes.draw(place, "lines", traces, {
      height: 300 + legendHeight(place, traces.map(({ name }) => name)),
      xaxis: { title: { text: nameOf(over) + more(groups.length - shown.length, "lines") }, zeroline: false, ...ticksOf(overField, records) },
      yaxis: valueAxis(metric, all),
    });
  }

  /** For each value of a field a bar of forward and one of backward. */
  function bars(place, name) {
    const metric = selection.metric();
    const field = page.fields.get(name);
    const operation = page.fields.get("operation");
    const records = selection.records();
    const every = Array.from(folding.groups(records, field).keys());
    const codes = every.slice(0, MAX_BARS);
    const words = codes.map((code) => label(page.word(field, code), 24));
    const all = [];
    const traces = Array.from(folding.groups(records, operation)).map(([code, members], index) => {
      const groups = folding.groups(members, field);
      const values = codes.map((one) => (groups.has(one) ? folding.fold(metric, groups.get(one)) : NaN));
      all.push(...values);
      const word = label(page.word(operation, code));
      return {
        x: codes.map((_, bar) => bar), y: values.map((value) => (Number.isFinite(value) ? value : null)), name: word,
        text: values.map((value, place_) => `<b>${words[place_]}, ${word}</b><br>${label(metric.head)}: ${label(page.shown(metric, value))}`),
        textposition: "none", hovertemplate: "%{text}<extra></extra>",
        marker: { color: themes.colorOf(index), pattern: { shape: index % 2 ? "/" : "", size: 6, solidity: 0.25 } },
      };
    });
    if (!all.some(Number.isFinite)) {
      themes.say(place, `No record has ${metric.head}.`);
      return;
    }
    if (isNothing(metric, all)) {
      themes.say(place, `${metric.head}: 0 % in all of these records.`);
      return;
    }
    themes.draw(place, "bars", traces, { height: 260, xaxis: { tickmode: "array", tickvals: codes.map((_, bar) => bar), ticktext: words, title: { text: more(every.length - codes.length, "values") } }, yaxis: valueAxis(metric, all) });
  }

  function updateBars() {
    const home = at("bars");
    const wanted = BAR_FIELDS.filter((name) => page.fields.get(name).values.length > 1);
    const names = wanted.length > 0 ? wanted : ["layer_type"];
    if (home.childElementCount === 0) {
      for (const name of names) {
        const place = page.element("div", { id: `bars-${name}`, class: "chart" });
        home.append(page.element("figure", { children: [page.element("h3", { text: `By ${nameOf(name)}, forward and backward` }), place] }));
      }
    }
    for (const name of names) bars(at(`bars-${name}`), name);
  }

  function updateGradients() {
    const names = page.fields.get("tensor_name");
    const isGradient = names.values.map((name) => String(name).startsWith("grad_"));
    const records = selection.records().filter((record) => isGradient[names.codes[record]]);
    at("gradients").hidden = records.length === 0;
    if (records.length === 0) return;
    const common = { records, over: "layer_idx", by: "tensor_name" };
    lines(at("gradients-underflow"), { ...common, metric: zerosAndUnderflow(), none: "No gradient has values." });
    lines(at("gradients-range"), { ...common, metric: page.metrics.get("absmax"), none: "No gradient is other than zero." });
    lines(at("gradients-ratio"), { ...common, records: weightGradients(records), metric: ratioToWeight(), none: "No gradient of a weight was recorded beside its weight." });
  }

  let lost = null;

  /** A metric of the page's own: zeros and subnormal values together. */
  function zerosAndUnderflow() {
    const [zeros, small] = ["zero", "underflow"].map((kind) => page.metrics.get(`overflow.${kind}.ratio`).column);
    const name = "zeros and underflow";
    lost ??= { name, head: name, merge: "ratio", isMagnitude: false, unit: "", column: Float64Array.from(zeros, (count, record) => count + small[record]) };
    return lost;
  }

  let ratio = null;

  /** A metric of the page's own: the norm of a weight's gradient over the norm of the weight. */
  function ratioToWeight() {
    if (ratio !== null) return ratio;
    const norm = page.metrics.get("norm");
    const names = page.fields.get("tensor_name");
    const keys = ["source", "module", "rank", "iteration", "attempt"]
      .filter((name) => page.fields.has(name))
      .map((name) => page.fields.get(name).codes);
    const keyOf = (record) => keys.map((codes) => codes[record]).join(",");
    const weights = new Map();
    for (let record = 0; record < page.count; record += 1) {
      if (names.values[names.codes[record]] === "weight") weights.set(keyOf(record), norm.column[record]);
    }
    const column = new Float64Array(page.count).fill(NaN);
    for (const record of weightGradients(Array.from({ length: page.count }, (_, one) => one))) {
      const weight = weights.get(keyOf(record));
      if (weight > 0) column[record] = norm.column[record] / weight;
    }
    ratio = { name: "gradient to weight", head: "gradient / weight", merge: "median", isMagnitude: true, unit: "", column };
    return ratio;
  }

  function weightGradients(records) {
    const names = page.fields.get("tensor_name");
    return Array.from(records).filter((record) => names.values[names.codes[record]] === "grad_weight");
  }

  function update() {
    const { colorBy } = selection.state;
    const metric = selection.metric();
    const records = selection.records();
    const none = records.length === 0 ? "No record passes the filters." : `No record has ${metric.head}.`;
    lines(at("layers-chart"), { records, over: "layer_idx", by: colorBy, metric, none });
    at("trend").hidden = page.fields.get("iteration").values.length < 2;
    if (!at("trend").hidden) lines(at("trend-chart"), { records, over: "iteration", by: colorBy, metric, none });
    updateBars();
    updateGradients();
  }

  page.panels = { update, valueAxis, ticksOf };
})();
