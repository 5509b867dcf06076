// Gives the metric of several records, and how far one is from its peers.
(function () {
  "use strict";
  const page = window.ranktape;
  const MIN_PEERS = 3;

  function valueOf(metric, record) {
    const value = metric.column[record];
    return metric.merge === "ratio" ? value / Math.max(1, page.elements[record]) : value;
  }

  function median(values) {
    const ordered = Float64Array.from(values).sort();
    // The lower of two in the middle: one of two records that is far too large stands out, and not both.
    return ordered.length > 0 ? ordered[(ordered.length - 1) >> 1] : NaN;
  }

  function merged(values, merge) {
    const known = values.filter((value) => !Number.isNaN(value));
    if (known.length === 0) return NaN;
    if (merge === "median") return median(known);
    const better = merge === "smallest" ? (one, best) => one < best : (one, best) => one > best;
    return known.reduce((best, one) => (better(one, best) ? one : best));
  }

  /** The metric of several records: NaN where none of them has it. */
  function fold(metric, records) {
    if (metric.merge !== "ratio") return merged(Array.from(records, (record) => metric.column[record]), metric.merge);
    let count = 0;
    let elements = 0;
    let isKnown = false;
    for (const record of records) {
      if (Number.isNaN(metric.column[record])) continue;
      isKnown = true;
      count += metric.column[record];
      elements += page.elements[record];
    }
    return isKnown ? count / Math.max(1, elements) : NaN;
  }

  /** Records by the code of a field, in the order of its values. */
  function groups(records, field) {
    const found = new Map();
    for (const record of records) {
      const code = field.codes[record];
      if (!found.has(code)) found.set(code, []);
      found.get(code).push(record);
    }
    // Forward before backward, in every legend and with one colour each.
    const sign = field.name === "operation" ? -1 : 1;
    return new Map(Array.from(found).sort(([one], [other]) => sign * (one - other)));
  }

  const SITE = ["operation", "phase", "component", "tensor_name", "quant_type", "mode"];

  /** For each record a number that it shares with those of its module, or of modules whose names differ in digits. */
  function codesOf(nameOfModule) {
    const names = page.fields.get("module").values.map(nameOfModule);
    const columns = SITE.map((name) => page.fields.get(name).codes);
    const module = page.fields.get("module").codes;
    const codes = new Map();
    return Int32Array.from({ length: page.count }, (_, record) => {
      const key = `${columns.map((column) => column[record]).join(",")},${names[module[record]]}`;
      if (!codes.has(key)) codes.set(key, codes.size);
      return codes.get(key);
    });
  }

  function mediansOf(codes, metric) {
    const values = new Map();
    for (let record = 0; record < page.count; record += 1) {
      const value = metric.column[record];
      if (!(value > 0)) continue;
      if (!values.has(codes[record])) values.set(codes[record], []);
      values.get(codes[record]).push(value);
    }
    return new Map(Array.from(values, ([code, some]) => [code, { count: some.length, middle: median(some) }]));
  }

  let sites = null;
  let families = null;
  const deviations = new Map();

  /**
   * For each record the log2 of its metric over the median of its peers: the same place in other ranks, iterations and
   * microbatches where there are three, else the like places of all layers; of "layers" always these. NaN where the
   * metric is not positive.
   */
  function deviation(metric, peersOf) {
    const name = `${peersOf} ${metric.name}`;
    if (!deviations.has(name)) {
      sites ??= codesOf((name) => name);
      families ??= codesOf((name) => String(name).replace(/\d+/g, "#"));
      const near = mediansOf(sites, metric);
      const far = mediansOf(families, metric);
      const found = new Float64Array(page.count).fill(NaN);
      for (let record = 0; record < page.count; record += 1) {
        const value = metric.column[record];
        if (!(value > 0)) continue;
        const own = near.get(sites[record]);
        found[record] = Math.log2(value / (peersOf === "places" && own.count >= MIN_PEERS ? own : far.get(families[record])).middle);
      }
      deviations.set(name, found);
    }
    return deviations.get(name);
  }

  /** The records at the places of some: in all ranks and iterations (`isNear`), or at the like places of all layers. */
  function placesLike(records, isNear) {
    sites ??= codesOf((name) => name);
    families ??= codesOf((name) => String(name).replace(/\d+/g, "#"));
    const codes = isNear ? sites : families;
    const wanted = new Set(records.map((record) => codes[record]));
    return Array.from(codes.keys()).filter((record) => wanted.has(codes[record]));
  }

  /** Of several deviations the one that is farthest from 0. */
  function farthest(values) {
    let found = NaN;
    for (const value of values) {
      if (!Number.isNaN(value) && !(Math.abs(value) <= Math.abs(found))) found = value;
    }
    return found;
  }

  page.folding = { valueOf, median, merged, fold, groups, deviation, placesLike, farthest };
})();
