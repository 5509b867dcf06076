// Shows the records that were clicked: beside their peers, how large their values are, and a metric through layers and
// iterations.
const AXES = ["rank", "layer_idx", "iteration", "source", "microbatch"];
const MAX_PEERS = 3000;

/** The field in which the records are fewest among their peers: which rank, layer or iteration they are of. */
function peerAxis(records) {
  const shares = AXES.filter((name) => fields.has(name)).map((name) => {
    const { codes } = fields.get(name);
    const num = (some) => new Set(some.map((record) => codes[record])).size;
    const peers = num(placesLike(records, name === "layer_idx" ? "layers" : "places"));
    return { name, share: peers > 1 ? num(records) / peers : Infinity };
  });
  const best = shares.reduce((least, one) => (one.share < least.share ? one : least));
  return best.share <= 1 ? best.name : null;
}

/** What was clicked and its peers as points: of a finding about samples all samples, else a point for each record. */
function peerPoints({ records, finding }, metric) {
  const bad = finding === null ? null : raw.findings[finding].samples;
  if (bad !== null && samples.columns.has(metric.name)) {
    const { places } = raw.findings[finding];
    const sampleOf = new Map(places.map((record, index) => [record, bad[index]]));
    const points = placesLike(records, "places").flatMap((record) => {
      const values = Array.from(samples.columns.get(metric.name).subarray(...(samples.rangeOf(record) ?? [0, 0])));
      return values.map((value, sample) => ({ record, x: sample, value, isBad: sampleOf.get(record) === sample }));
    });
    return { points, axis: "sample" };
  }
  const axis = peerAxis(records);
  if (axis === null) return { points: [], axis };
  const field = fields.get(axis);
  const chosen = new Set(records);
  const point = (record) => ({ record, x: field.values[field.codes[record]], value: valueOf(metric, record), isBad: chosen.has(record) });
  return { points: [...records, ...placesLike(records, axis === "layer_idx" ? "layers" : "places").filter((record) => !chosen.has(record))].map(point), axis };
}

function drawPeers() {
  const { focus } = state;
  at("peers").hidden = focus === null;
  if (focus === null) return;
  const metric = metrics.get(focus.finding === null ? state.metric : raw.findings[focus.finding].metric) ?? metrics.get(state.metric);
  const { points, axis } = peerPoints(focus, metric);
  const peers = points.filter(({ value, isBad }) => !isBad && Number.isFinite(value));
  const bad = points.filter(({ isBad }) => isBad);
  at("peers-title").textContent = `${metric.head}, compared with peers`;
  if (peers.length === 0 || bad.length === 0) {
    say("peers-chart", `No peer has ${metric.head}.`);
    return;
  }
  const step = Math.ceil(peers.length / MAX_PEERS);
  const middle = median(peers.map(({ value }) => value));
  const yaxis = valueAxis(metric, points.map(({ value }) => value));
  const trace = (some, name, marker) => ({
    type: "scatter", mode: "markers", name, marker, x: some.map(({ x }) => x), y: some.map(({ value }) => (Number.isFinite(value) ? value : null)),
    customdata: some.map(({ record }) => record),
    text: some.map(({ record, x, value }) => {
      const who = ["module", "tensor_name", "operation"].map((field) => wordOf(field, record)).join(" ");
      return `<b>${label(name)}</b><br>${label(who)}<br>rank ${wordOf("rank", record)}, iteration ${wordOf("iteration", record)}${axis === "sample" ? `, sample ${x}` : ""}<br>${label(metric.head)}: ${label(shown(metric, value))}`;
    }),
  });
  const known = axis === "sample" ? {} : fieldTicks(fields.get(axis), points.map(({ record }) => record));
  const hasLine = yaxis.type !== "log" || middle > 0;
  draw("peers-chart", [
    trace(peers.filter((_, index) => index % step === 0), step === 1 ? "peers" : `peers (one of ${step} is drawn)`, { color: colors[6], size: 7, opacity: 0.55, symbol: "circle-open", line: { width: 1.5 } }),
    trace(bad, "selected", { color: colors[1], size: 11, symbol: "diamond" }),
  ], {
    xaxis: { title: { text: nameOf(axis) }, ...known }, yaxis, showlegend: true,
    shapes: hasLine ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: middle, y1: middle, line: { dash: "dot", width: 1.5 } }] : [],
    annotations: hasLine ? [{ xref: "paper", x: 1, xanchor: "right", y: yaxis.type === "log" ? Math.log10(middle) : middle, yanchor: "bottom", showarrow: false, text: `median of the peers ${label(shown(metric, middle))}` }] : [],
  });
  onClick("peers-chart", ({ customdata }) => openRecord(customdata));
}

/** The values of a field as ticks of an axis. */
function fieldTicks(field, records) {
  const codes = Array.from(groups(records, field).keys()).filter((code) => field.values[code] !== null);
  return ticksOf(codes.map((code) => word(field, code)), { places: codes.map((code) => field.values[code]), maxTicks: 14 });
}

/** Magnitudes by binade, above the ranges of the formats. */
function drawDistribution() {
  const sums = new Map();
  let num = 0;
  for (const record of focused()) {
    const range = binades.rangeOf(record);
    if (range === null) continue;
    num += 1;
    for (let place = range[0]; place < range[1]; place += 1) {
      const exponent = binades.columns.get("exponent")[place];
      sums.set(exponent, (sums.get(exponent) ?? 0) + binades.columns.get("count")[place]);
    }
  }
  at("distribution-note").textContent = num === focused().length ? "" : `Of ${number(num)} of these ${number(focused().length)} records; the page has no histogram of the others.`;
  if (sums.size === 0) {
    say("distribution-chart", "No finite nonzero values of these records are known.");
    return;
  }
  const exponents = Array.from(sums.keys()).sort((one, other) => one - other);
  const total = exponents.reduce((sum, one) => sum + sums.get(one), 0);
  const { bands } = raw;
  const names = bands.map((band) => band.name);
  const range = (name, color, base, top) => ({
    type: "bar", orientation: "h", yaxis: "y2", width: 0.6, name, marker: { color }, y: names, base: bands.map(base), x: bands.map((band) => top(band) - base(band)),
    hovertemplate: `%{y}: ${name} from 2<sup>%{base}</sup><extra></extra>`,
  });
  draw("distribution-chart", [
    {
      type: "bar", name: "values", showlegend: false, marker: { color: colors[0] }, x: exponents.map((one) => one + 0.5), y: exponents.map((one) => sums.get(one)), textposition: "none",
      text: exponents.map((one) => `2<sup>${one}</sup> to 2<sup>${one + 1}</sup><br>${number(sums.get(one))} values, ${percent(sums.get(one) / total)}`),
    },
    range("subnormal range of the format", colors[5], (band) => band.subnormal, (band) => band.normal),
    range("normal range", colors[2], (band) => band.normal, (band) => band.largest + 1),
  ], {
    barmode: "overlay", bargap: 0.05,
    xaxis: { title: { text: "exponent: log2 of the magnitude" }, anchor: "y2", range: [Math.min(exponents[0], -26) - 1, Math.max(exponents[exponents.length - 1], 17) + 1], tickformat: "d" },
    yaxis: { domain: [0.4, 1], title: { text: "values" }, type: "log", exponentformat: "power", dtick: Math.ceil(Math.log10(total) / 5) || 1 },
    yaxis2: { domain: [0, 0.36], automargin: true, autorange: "reversed", showgrid: false },
  });
}

const quoted = (text) => (/^[\w./:-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`);

function commandOf(record) {
  const valueIn = (name) => fields.get(name).values[fields.get(name).codes[record]];
  const options = ["iteration", "rank", "module", "operation", "phase", "tensor_name", "microbatch", "call"]
    .filter((name) => valueIn(name) !== "" && valueIn(name) !== null)
    .map((name) => `--${name.replace(/_/g, "-")} ${quoted(String(valueIn(name)))}`);
  const url = fields.has("source") ? raw.urls[valueIn("source")] : raw.url;
  return ["ranktape analyze distribution", quoted(url || "RUN"), ...options].join(" ");
}

function drawRecord(record) {
  const pairs = Array.from(fields.values()).filter(({ name }) => name !== "kind").map((field) => [nameOf(field.name), wordOf(field.name, record)]);
  pairs.push(["elements", number(elements[record])], ["size", nbytes(sizes[record])]);
  for (const metric of metrics.values()) pairs.push([metric.head, shown(metric, valueOf(metric, record))]);
  at("record-fields").replaceChildren(...pairs.map(([name, value]) => element("div", { children: [element("dt", { text: name }), element("dd", { text: value })] })));
  at("record-command").textContent = commandOf(record);
}

function drawDrill() {
  const { focus } = state;
  const records = focused();
  at("drill-title").textContent = focus === null ? `All ${number(records.length)} selected records` : focus.name;
  at("drill-count").textContent = focus === null ? "" : `${number(records.length)} record${records.length === 1 ? "" : "s"}`;
  at("drill-clear").hidden = focus === null;
  at("record").hidden = focus === null || records.length !== 1;
  if (!at("record").hidden) drawRecord(records[0]);
  drawPeers();
  drawDistribution();
}

/** A column with nothing between two stacks of layers, so that no line joins them. */
function withGaps(column, codes, field) {
  const stackOf = (code) => (field.words === undefined ? "" : field.words[code].replace(/\d+$/, ""));
  return column.flatMap((value, index) => (index > 0 && stackOf(codes[index]) !== stackOf(codes[index - 1]) ? [null, value] : [value]));
}

/** The chosen metric over a field: one line for each value of the field `lines`. */
function drawLines(id, over) {
  const metric = metrics.get(state.metric);
  const [overField, byField] = [fields.get(over), fields.get(state.lines)];
  const all = Array.from(groups(selected, byField));
  const drawn = [];
  const traces = all.slice(0, MAX_LINES).map(([code, members], index) => {
    const points = Array.from(groups(members, overField)).filter(([x]) => overField.values[x] !== null);
    const values = points.map(([, some]) => folded(metric, some));
    drawn.push(...values);
    const name = label(word(byField, code));
    const spaced = (column) => withGaps(column, points.map(([x]) => x), overField);
    return {
      type: "scatter", mode: "lines+markers", name, ...lineStyle(index), x: spaced(points.map(([x]) => overField.values[x])), y: spaced(values.map((value) => (Number.isFinite(value) ? value : null))),
      text: spaced(points.map(([x, some], place) => `<b>${name}</b><br>${nameOf(over)} ${label(word(overField, x))}<br>${label(shown(metric, values[place]))}<br>${number(some.length)} records`)),
    };
  });
  if (!drawn.some(Number.isFinite)) say(id, selected.length === 0 ? "No record passes the filters." : `No record has ${metric.head}.`);
  else if (metric.merge === "ratio" && !drawn.some((value) => value > 0)) say(id, `${metric.head}: 0 % in all of these records.`);
  else {
    const more = all.length > MAX_LINES ? ` (${all.length - MAX_LINES} more lines are not drawn: filter)` : "";
    draw(id, traces, { showlegend: true, xaxis: { title: { text: nameOf(over) + more }, ...fieldTicks(overField, selected) }, yaxis: valueAxis(metric, drawn) });
  }
}
