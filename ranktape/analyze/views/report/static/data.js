// Gives what the report wrote: columns of numbers, and the words of fields; and plotly.
await (async function () {
  "use strict";

  function bytesOf(base64) {
    const letters = atob(base64);
    const bytes = new Uint8Array(letters.length);
    for (let place = 0; place < letters.length; place += 1) bytes[place] = letters.charCodeAt(place);
    return bytes;
  }

  /** The text that an element holds deflated; the element is not needed any more. */
  async function inflated(id) {
    const holder = document.getElementById(id);
    const stream = new Blob([bytesOf(holder.textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
    holder.remove();
    return new Response(stream).text();
  }

  if (!("DecompressionStream" in window)) {
    document.getElementById("controls").textContent = "This browser is too old for the charts and tables: Chrome 80, Firefox 113, Safari 16.4 and newer show them.";
    throw new Error("no DecompressionStream");
  }
  const [data, plotly] = await Promise.all([inflated("report-data"), inflated("plotly")]);
  const library = document.createElement("script");
  library.textContent = plotly;
  document.head.append(library);
  const raw = JSON.parse(data);
  const ARRAYS = {
    u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array, i2: Int16Array, i4: Int32Array,
    f4: Float32Array, f8: Float64Array,
  };

  const WHOLE = new Intl.NumberFormat("en-US");

  function unpacked(column, count) {
    if (column.type === "same") {
      return new Float64Array(count).fill(column.value === null ? NaN : Number(column.value));
    }
    const values = new ARRAYS[column.type](count);
    const bytes = new Uint8Array(values.buffer);
    const planes = bytesOf(column.data);
    const width = ARRAYS[column.type].BYTES_PER_ELEMENT;
    for (let plane = 0, from = 0; plane < width; plane += 1) {
      for (let place = plane; place < bytes.length; place += width, from += 1) bytes[place] = planes[from];
    }
    return values;
  }

  function startsOf(lengths) {
    const starts = new Float64Array(lengths.length + 1);
    for (let place = 0; place < lengths.length; place += 1) starts[place + 1] = starts[place] + lengths[place];
    return starts;
  }

  const count = raw.count;
  const fields = new Map(
    raw.fields.map((field) => [field.name, { ...field, codes: unpacked(field.codes, count) }])
  );
  const metrics = new Map(
    raw.metrics.map((metric) => [metric.name, { ...metric, column: unpacked(metric.column, count) }])
  );

  function unpackedDetails(details) {
    const length = unpacked(details.length, details.count);
    const starts = startsOf(length);
    const counts = unpacked(details.counts, starts[starts.length - 1]);
    const sweeps = details.sweeps.map((sweep) => ({
      ...sweep,
      log2Signal: unpacked(sweep.log2_signal, details.count),
      sqnr: unpacked(sweep.sqnr, details.count * details.offsets.length),
    }));
    return {
      ...details, of: unpacked(details.of, count), first: unpacked(details.first, details.count),
      length, starts, counts, sweeps,
    };
  }

  function unpackedSamples(samples) {
    const length = unpacked(samples.length, samples.count);
    const starts = startsOf(length);
    const total = starts[starts.length - 1];
    const records = unpacked(samples.records, samples.count);
    const columns = new Map(Object.entries(samples.metrics).map(([name, one]) => [name, unpacked(one, total)]));
    const placeOf = new Map(Array.from(records, (record, place) => [record, place]));
    return { count: samples.count, records, length, starts, metrics: columns, placeOf };
  }

  function unpackedRecipes(recipes) {
    const { calls, rows } = recipes;
    const length = unpacked(calls.length, calls.count);
    const starts = startsOf(length);
    const records = unpacked(calls.records, starts[starts.length - 1]);
    return {
      ...recipes,
      calls: { records, starts, first: Float64Array.from(length, (_, call) => records[starts[call]]) },
      rows: {
        call: unpacked(rows.call, rows.count), product: unpacked(rows.product, rows.count),
        recipe: unpacked(rows.recipe, rows.count), against: unpacked(rows.against, rows.count),
      },
      sums: Object.entries(rows.sums).map(([name, column]) => [name, unpacked(column, rows.count)]),
    };
  }

  /** A number for people: six significant digits at most. */
  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e15) return size < 1000 ? String(value) : WHOLE.format(value);
    if (size < 1e-3 || size >= 1e6) return value.toExponential(4).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(5)));
  }

  /** A part of a whole in percent; only a true zero is "0 %". */
  function percent(value) {
    if (Number.isNaN(value)) return "–";
    if (value === 0) return "0 %";
    const size = value * 100;
    return `${size < 1e-3 ? size.toExponential(2) : Number(size.toPrecision(3))} %`;
  }

  function shown(metric, value) {
    if (metric.merge === "ratio") return percent(value);
    return metric.unit && Number.isFinite(value) ? `${number(value)} ${metric.unit}` : number(value);
  }

  function nbytes(value) {
    let size = value;
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (size < 1000) return `${Number(size.toPrecision(4))} ${unit}`;
      size /= 1000;
    }
    return `${Number(size.toPrecision(4))} TB`;
  }

  /** The word for a value of a field, as it is: for textContent only. */
  function word(field, code) {
    if (field.words !== undefined) return field.words[code];
    const value = field.values[code];
    if (value === null) return "none";
    if (field.name === "layer_idx" && value < 0) return "outside";
    return value === "" ? "(empty)" : String(value);
  }

  const wordOf = (name, record) => word(fields.get(name), fields.get(name).codes[record]);

  /** The codes of a field that words mean. */
  function codesOf(field, words) {
    const wanted = new Set(words);
    return field.values.map((_, code) => code).filter((code) => wanted.has(word(field, code)));
  }

  /** Fields that together tell records apart. */
  const identity = Array.from(fields.values()).filter((field) => field.values.length > 1 && field.name !== "kind").map((field) => field.name);

  /** The same for a chart: plotly takes <b> and &lt; in its texts for markup, so these letters become entities. */
  function label(text, maxLength = 44) {
    if (/^[\w .%-]{0,40}$/.test(text)) return String(text);
    const letters = Array.from(String(text));
    const start = Math.floor((maxLength - 1) / 3);
    const short =
      letters.length <= maxLength
        ? letters
        : [...letters.slice(0, start), "…", ...letters.slice(letters.length - (maxLength - 1 - start))];
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

  window.ranktape = {
    raw, count, fields, metrics,
    elements: unpacked(raw.elements, count),
    nbytesOf: unpacked(raw.nbytes, count),
    details: unpackedDetails(raw.details),
    samples: unpackedSamples(raw.samples),
    recipes: raw.recipes === null ? null : unpackedRecipes(raw.recipes),
    number, percent, shown, nbytes, word, wordOf, codesOf, identity, label, element,
  };
})();
