// Shows where in the model a metric is unusual: a cell for each layer and iteration, rank, sample or tensor; and what
// recipes keep of each product.
const [MIN_BINADES, MAX_BINADES] = [8, 16];

/** Every value of the overview with its row, its column and its record: samples are values of their own. */
function* overviewValues(metric) {
  const { rows, columns, kind, against } = state;
  const rowCodes = fields.get(rows).codes;
  const kinds = fields.get("kind");
  const of = selected.filter((record) => kind === "" || word(kinds, kinds.codes[record]) === kind);
  if (columns !== "sample") {
    const values = against === "" ? null : deviation(metric, against);
    for (const record of of) yield { row: rowCodes[record], column: fields.get(columns).codes[record], record, value: values?.[record] };
    return;
  }
  for (const record of of) {
    const range = samples.rangeOf(record);
    if (range === null) continue;
    const values = samples.columns.get(metric.name).subarray(...range);
    const middle = median(values.filter((value) => value > 0));
    for (const [sample, value] of values.entries()) yield { row: rowCodes[record], column: sample, record, value: against === "" ? value : Math.log2(value / middle) };
  }
}

function overviewCells(metric) {
  const cells = new Map();
  for (const { row, column, record, value } of overviewValues(metric)) {
    const key = `${row} ${column}`;
    if (!cells.has(key)) cells.set(key, { row, column, records: [], values: [] });
    cells.get(key).records.push(record);
    cells.get(key).values.push(value);
  }
  for (const cell of cells.values()) {
    const finite = cell.values.filter(Number.isFinite);
    if (state.against !== "") cell.value = finite.reduce((far, one) => (Math.abs(one) > Math.abs(far) ? one : far), finite[0] ?? NaN);
    else if (state.columns === "sample") cell.value = merged(cell.values, metric.merge === "ratio" ? "largest" : metric.merge);
    else cell.value = folded(metric, cell.records);
  }
  const sorted = (name) => Array.from(new Set(Array.from(cells.values(), (cell) => cell[name]))).sort((one, other) => one - other);
  return { cellAt: (row, column) => cells.get(`${row} ${column}`), rows: sorted("row"), columns: sorted("column") };
}

/** Why a cell has no colour of the metric, as MARKS name it; null if it has one. */
function markOf(cell, metric) {
  if (cell === undefined) return "missing";
  const counts = (name) => cell.records.some((record) => metrics.get(name).column[record] > 0);
  const isKnown = !Number.isNaN(cell.value);
  // Of a sample the counts of its record do not tell.
  if (!(state.columns === "sample" && isKnown)) {
    if (metric.name !== "overflow.nan.ratio" && counts("overflow.nan.ratio")) return "nan";
    // Against its own type nothing but infinities overflows, and those of masks are not counted. Ratios count them.
    if (metric.merge !== "ratio" && counts("overflow.ratio")) return "inf";
  }
  if (isKnown) return null;
  return state.against !== "" && cell.records.every((record) => metric.column[record] === 0) ? "zero" : "missing";
}

function powerTicks(low, high) {
  const step = Math.max(1, Math.ceil((high - low) / 8));
  const ticks = [];
  for (let power = Math.ceil(low / step) * step; power <= high; power += step) ticks.push(power);
  return ticks.length > 1 ? ticks : [low, high];
}

/** The numbers that colours are given to, and the bar of colours. */
function overviewColors(values, metric) {
  const known = values.flat().filter(Number.isFinite);
  if (state.against !== "") {
    const [low, high] = ends(known);
    const limit = Math.min(MAX_BINADES, Math.max(MIN_BINADES, -low || 0, high || 0));
    const ticks = powerTicks(-Math.floor(limit), Math.floor(limit));
    return { z: values, zmin: -limit, zmax: limit, colorscale: diverging, colorbar: { tickvals: ticks, ticktext: ticks.map((power) => (power < 0 ? `1/${number(2 ** -power)} ×` : `${number(2 ** power)} ×`)) } };
  }
  const [low, high] = ends(known.filter((value) => value > 0));
  const isPositive = metric.isMagnitude || metric.merge === "ratio";
  if (isPositive && known.length > 0 && ends(known)[1] === 0) {
    return { z: values, zmin: 0, zmax: 1, colorbar: { tickvals: [0], ticktext: ["0"] } };
  }
  if (!isPositive || Number.isNaN(low)) {
    // plotly draws no infinite cell: a lossless format has the colour of the best one.
    const [least, most] = ends(known);
    return { z: values.map((row) => row.map((value) => (Math.abs(value) === Infinity ? (value > 0 ? most : least) : value))), colorbar: { ticksuffix: metric.unit ? ` ${metric.unit}` : "" } };
  }
  // Logarithms; zeros are below the smallest number.
  const [zmin, zmax] = [Math.log10(low), Math.max(Math.log10(high), Math.log10(low) + 0.3)];
  const floor = known.includes(0) ? zmin - Math.max(0.5, (zmax - zmin) / 5) : zmin;
  const ticks = powerTicks(zmin, zmax);
  return {
    z: values.map((row) => row.map((value) => (value === null ? null : value > 0 ? Math.min(zmax, Math.log10(value)) : floor))), zmin: floor, zmax,
    colorbar: {
      tickvals: [...(floor < zmin ? [floor] : []), ...ticks],
      ticktext: [...(floor < zmin ? ["0"] : []), ...ticks.map((power) => shown(metric, Number((10 ** power).toPrecision(2))))],
    },
  };
}

function overviewCaption(metric) {
  const of = { ratio: "all records of a cell together", largest: "the largest of a cell", smallest: "the smallest of a cell", median: "the median of a cell" };
  if (state.against === "") return `${metric.head}: ${of[metric.merge]}. Click a cell to see its records.`;
  const places = `the same tensor on other ranks and iterations${fields.has("source") ? " and in other sources" : ""} (in other layers, if there are none)`;
  const peers = state.columns === "sample" ? "the median sample of the tensor" : state.against === "layers" ? "similar tensors of all layers" : places;
  return `Colour: the largest deviation of ${metric.head} in a cell from ${peers}. Click a cell to see its records.`;
}

function drawOverview() {
  const metric = metrics.get(state.metric);
  if (!metric.isMagnitude) state.against = "";
  at("against").value = state.against;
  at("against").disabled = !metric.isMagnitude;
  at("overview-title").textContent = `Overview: ${nameOf(state.rows)} by ${nameOf(state.columns)}`;
  const isSample = state.columns === "sample";
  if (isSample && !samples.columns.has(metric.name)) {
    const known = Array.from(samples.columns.keys(), (name) => metrics.get(name).head).join(", ");
    say("overview-chart", `${metric.head} is not available for single samples: choose ${known}.`);
    return;
  }
  const { cellAt, rows, columns } = overviewCells(metric);
  if (rows.length === 0) {
    say("overview-chart", isSample ? "None of these records has samples." : "No record passes the filters.");
    return;
  }
  const rowWords = rows.map((code) => word(fields.get(state.rows), code));
  const columnWords = columns.map((code) => (isSample ? String(code) : word(fields.get(state.columns), code)));
  const marked = rows.map((row) => columns.map((column) => markOf(cellAt(row, column), metric)));
  const values = rows.map((row, r) => columns.map((column, c) => (marked[r][c] === null ? cellAt(row, column).value : null)));
  const nameOfCell = (r, c, shownWord) => `${nameOf(state.rows)} ${shownWord(rowWords[r])}, ${nameOf(state.columns)} ${shownWord(columnWords[c])}`;
  const text = rows.map((row, r) => columns.map((column, c) => {
    const cell = cellAt(row, column);
    if (cell === undefined) return "";
    const value = state.against === "" ? shown(metric, cell.value) : `${number(2 ** cell.value)} times the median of its peers`;
    const special = { nan: ", with NaN", inf: ", with Inf", zero: " (0)" }[marked[r][c]] ?? "";
    return `<b>${nameOfCell(r, c, label)}</b><br>${label(metric.head)}: ${label(value)}${special}<br>records: ${cell.records.length}, click to see them`;
  }));
  at("overview-caption").textContent = overviewCaption(metric);
  drawHeatMap("overview-chart", {
    rows: rowWords, columns: columnWords, colored: overviewColors(values, metric), text, marked, legend: at("overview-legend"),
    height: Math.min(680, Math.max(240, 110 + rows.length * 22)),
    xaxis: { title: { text: nameOf(state.columns) } }, yaxis: { title: { text: nameOf(state.rows) } },
    open: (r, c) => {
      const cell = cellAt(rows[r], columns[c]);
      if (cell !== undefined) focusOn(Array.from(new Set(cell.records)), nameOfCell(r, c, String));
    },
  });
}

const TARGET_SPAN = 15;

/** The losses that trainings printed, a line for each. */
function drawLosses() {
  if (raw.losses === null || Object.keys(raw.losses).length === 0) return;
  const traces = Object.entries(raw.losses).map(([name, points], index) => ({
    type: "scatter", mode: points.length > 30 ? "lines" : "lines+markers", name: label(name), showlegend: true, ...lineStyle(index),
    x: points.map(([step]) => step), y: points.map(([, loss]) => loss), text: points.map(([step, loss]) => `<b>${label(name)}</b><br>step ${step}: ${number(loss)}`),
  }));
  draw("losses-chart", traces, { height: 320, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "loss" } } });
}

/** What recipes keep of each product of each module; a click shows the records that the products are computed from. */
function drawRecipes() {
  if (raw.recipes === null) return;
  const { rows, columns, sqnr, records, num_lost: lost, target } = raw.recipes;
  const isGap = (index) => index > 0 && columns[index].product !== columns[index - 1].product;
  // An empty column stands between two products.
  const spaced = columns.flatMap((_, index) => (isGap(index) ? [null, index] : [index]));
  const cellsOf = (row, made, gap = null) => spaced.map((index) => (index === null ? gap : made(sqnr[row][index] === null ? null : Number(sqnr[row][index]), index)));
  const finite = sqnr.flatMap((row) => row.map((value, index) => (value === null || columns[index].is_recorded ? NaN : Number(value)))).filter(Number.isFinite);
  // With a target, colours change there: orange below it, blue above.
  const [low, high] = target !== undefined ? [target - TARGET_SPAN, target + TARGET_SPAN] : finite.length > 0 ? ends(finite) : [0, 1];
  const marked = rows.map((_, row) => cellsOf(row, (value, index) => (lost[row][index] > 0 ? "nan" : null)));
  const text = rows.map((name, row) => cellsOf(row, (value, index) => {
    const { product, recipe, bits } = columns[index];
    const words = `<b>${label(name)}</b><br>${label(product)} in ${label(recipe)}${bits === null ? "" : ` (${number(bits)} bits)`}<br>SQNR ${value === null ? "not known" : `${number(value)} dB`}`;
    return lost[row][index] > 0 ? `${words}<br>${number(lost[row][index])} elements became NaN or infinite` : words;
  }, ""));
  const products = Array.from(new Set(columns.map(({ product }) => product)));
  const middle = (product) => {
    const places = spaced.map((index, place) => (index !== null && columns[index].product === product ? place : NaN)).filter((place) => !Number.isNaN(place));
    return (places[0] + places[places.length - 1]) / 2;
  };
  drawHeatMap("recipes-chart", {
    rows, columns: spaced.map((index) => (index === null ? "" : columns[index].recipe)), text, marked, legend: at("recipes-legend"),
    colored: {
      // What the training's own rounding costs is far above all recipes: it has the colour of the best one.
      z: rows.map((_, row) => cellsOf(row, (value) => (value === null ? null : Math.min(Math.max(value, low), high)))),
      zmin: low, zmax: Math.max(high, low + 1), ...(target === undefined ? {} : { colorscale: diverging, reversescale: true }), colorbar: { ticksuffix: " dB" },
    },
    trace: {
      customdata: text, hovertemplate: "%{customdata}<extra></extra>", texttemplate: "%{text}", textfont: { size: 11 },
      text: rows.map((_, row) => cellsOf(row, (value) => (value === null ? "" : Number.isFinite(value) ? value.toFixed(1) : value > 0 ? "exact" : number(value)), "")),
    },
    height: Math.max(260, 130 + rows.length * 20), margin: { l: 60, r: 16, t: 44, b: 48 },
    annotations: products.map((product) => ({ x: middle(product), y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: `<b>${label(product)}</b>` })),
    xaxis: { tickangle: columns.length > 9 ? -90 : 0 },
    open: (row) => records[row].length > 0 && focusOn(records[row], `Records of the products of ${rows[row]}`),
  });
}
