// Unpacks what the report wrote (columns of numbers, words of fields, plotly), and folds metrics of several records.
function bytesOf(base64) {
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let index = 0; index < letters.length; index += 1) bytes[index] = letters.charCodeAt(index);
  return bytes;
}

/** The text that an element holds deflated. The element is removed. */
async function inflated(id) {
  const holder = document.getElementById(id);
  const stream = new Blob([bytesOf(holder.textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
  holder.remove();
  return new Response(stream).text();
}

const at = (id) => document.getElementById(id);

if (!("DecompressionStream" in window)) {
  at("controls").textContent = "This browser is too old for the charts and tables: Chrome 80, Firefox 113, Safari 16.4 and newer show them.";
  throw new Error("no DecompressionStream");
}
const [dataText, plotlyText] = await Promise.all([inflated("report-data"), inflated("plotly")]);
const library = document.createElement("script");
library.textContent = plotlyText;
document.head.append(library);
const raw = JSON.parse(dataText);
const ARRAYS = {
  u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array,
};

function unpacked(column, count) {
  if (column.type === "same") return new Float64Array(count).fill(column.value === null ? NaN : Number(column.value));
  const values = new ARRAYS[column.type](count);
  const bytes = new Uint8Array(values.buffer);
  const planes = bytesOf(column.data);
  const width = values.BYTES_PER_ELEMENT;
  for (let plane = 0, from = 0; plane < width; plane += 1) {
    for (let to = plane; to < bytes.length; to += width, from += 1) bytes[to] = planes[from];
  }
  return values;
}

/** Columns of parts of some records: `startOf` gives the range of the parts of a record, null if it has none. */
function unpackedParts({ records, length, count, columns }) {
  const lengths = unpacked(length, count);
  const starts = new Float64Array(count + 1);
  lengths.forEach((one, index) => { starts[index + 1] = starts[index] + one; });
  const indexOf = new Map(Array.from(unpacked(records, count), (record, index) => [record, index]));
  return {
    columns: new Map(Object.entries(columns).map(([name, one]) => [name, unpacked(one, starts[count])])),
    rangeOf: (record) => (indexOf.has(record) ? [starts[indexOf.get(record)], starts[indexOf.get(record) + 1]] : null),
  };
}

const { count } = raw;
const fields = new Map(raw.fields.map((field) => [field.name, { ...field, codes: unpacked(field.codes, count) }]));
const metrics = new Map(raw.metrics.map((metric) => [metric.name, { ...metric, column: unpacked(metric.column, count) }]));
const elements = unpacked(raw.elements, count);
const sizes = unpacked(raw.nbytes, count);
const samples = unpackedParts(raw.samples);
const binades = unpackedParts(raw.binades);

// Words and numbers

/** A number for people: at most five significant digits, counts whole. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return size < 1000 ? String(value) : value.toLocaleString("en-US");
  if (size < 1e-3 || size >= 1e6) return value.toExponential(4).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(5)));
}

/** A part of a whole in percent; only a true zero is "0 %". */
function percent(value) {
  if (Number.isNaN(value)) return "–";
  const size = value * 100;
  return `${size > 0 && size < 1e-3 ? size.toExponential(2) : Number(size.toPrecision(3))} %`;
}

function shown(metric, value) {
  if (metric.merge === "ratio") return percent(value);
  return metric.unit && Number.isFinite(value) ? `${number(value)} ${metric.unit}` : number(value);
}

function nbytes(value) {
  const power = value < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${Number((value / 1000 ** power).toPrecision(4))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

const NAMES = { layer_idx: "layer", kind: "tensor" };
const nameOf = (field) => NAMES[field] ?? field.replace(/_/g, " ");

/** The word for a value of a field, as it is: for textContent only. */
function word(field, code) {
  if (field.words !== undefined) return field.words[code];
  const value = field.values[code];
  if (value === null) return "none";
  if (field.name === "layer_idx" && value < 0) return "outside";
  return value === "" ? "(empty)" : String(value);
}

const wordOf = (name, record) => word(fields.get(name), fields.get(name).codes[record]);

/** A text for a chart: plotly takes <b> and &lt; in its texts for markup, so these letters become entities. */
function label(text, maxLength = 44) {
  const letters = Array.from(String(text));
  const start = Math.floor((maxLength - 1) / 3);
  const short = letters.length <= maxLength ? letters : [...letters.slice(0, start), "…", ...letters.slice(letters.length - (maxLength - 1 - start))];
  return short.join("").replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** An element with text, attributes and children; texts are never read as markup. */
function element(name, { text, children = [], ...attributes } = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// Metrics of several records

function valueOf(metric, record) {
  return metric.merge === "ratio" ? metric.column[record] / Math.max(1, elements[record]) : metric.column[record];
}

/** The median; of two values the lower one, so that one of two records that is far too large stands out. */
function median(values) {
  const ordered = Float64Array.from(values).sort();
  return ordered.length > 0 ? ordered[(ordered.length - 1) >> 1] : NaN;
}

/** The smallest and the largest of some values; NaN if there are none. */
function ends(values) {
  if (values.length === 0) return [NaN, NaN];
  return values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
}

function merged(values, merge) {
  const known = Array.from(values).filter((value) => !Number.isNaN(value));
  return merge === "median" ? median(known) : ends(known)[merge === "smallest" ? 0 : 1];
}

/** The metric of several records: NaN if none of them has it. */
function folded(metric, records) {
  if (metric.merge !== "ratio") return merged(records.map((record) => metric.column[record]), metric.merge);
  const known = records.filter((record) => !Number.isNaN(metric.column[record]));
  const sum = (column) => known.reduce((total, record) => total + column[record], 0);
  return known.length > 0 ? sum(metric.column) / Math.max(1, sum(elements)) : NaN;
}

/** Records by the code of a field, in the order of its values. */
function groups(records, field) {
  const found = new Map();
  for (const record of records) {
    const code = field.codes[record];
    if (!found.has(code)) found.set(code, []);
    found.get(code).push(record);
  }
  // Forward before backward in every legend.
  const sign = field.name === "operation" ? -1 : 1;
  return new Map(Array.from(found).sort(([one], [other]) => sign * (one - other)));
}

const SITE = ["operation", "phase", "component", "tensor_name", "quant_type", "mode"];

/** For each record a number that it shares with those of its module, or of modules whose names `nameOfModule` equates. */
function siteCodes(nameOfModule) {
  const names = fields.get("module").values.map(nameOfModule);
  const columns = SITE.map((name) => fields.get(name).codes);
  const module = fields.get("module").codes;
  const codes = new Map();
  return Int32Array.from({ length: count }, (_, record) => {
    const key = `${columns.map((column) => column[record]).join(",")},${names[module[record]]}`;
    if (!codes.has(key)) codes.set(key, codes.size);
    return codes.get(key);
  });
}

/** Peers: the same tensor in other ranks and iterations, or the like tensors of all layers. */
const PEERS = { places: siteCodes((name) => name), layers: siteCodes((name) => String(name).replace(/\d+/g, "#")) };

function placesLike(records, peers) {
  const wanted = new Set(records.map((record) => PEERS[peers][record]));
  return Array.from(PEERS[peers].keys()).filter((record) => wanted.has(PEERS[peers][record]));
}

const MIN_PEERS = 3;
const deviations = new Map();

/**
 * For each record the log2 of its metric over the median of its peers. Of "places" with fewer than three known values
 * the peers are the like tensors of all layers. NaN if the metric is not positive.
 */
function deviation(metric, peers) {
  const key = `${peers} ${metric.name}`;
  if (deviations.has(key)) return deviations.get(key);
  const middles = (codes) => {
    const values = new Map();
    metric.column.forEach((value, record) => {
      if (!(value > 0)) return;
      if (!values.has(codes[record])) values.set(codes[record], []);
      values.get(codes[record]).push(value);
    });
    return new Map(Array.from(values, ([code, some]) => [code, { count: some.length, middle: median(some) }]));
  };
  const [near, far] = [middles(PEERS.places), middles(PEERS.layers)];
  const found = Float64Array.from(metric.column, (value, record) => {
    if (!(value > 0)) return NaN;
    const own = near.get(PEERS.places[record]);
    return Math.log2(value / (peers === "places" && own.count >= MIN_PEERS ? own : far.get(PEERS.layers[record])).middle);
  });
  deviations.set(key, found);
  return found;
}
