// Shows records and their metrics in tables that sort, search and open a record.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection, element } = page;
  const ROWS_AT_ONCE = 50;
  const WHO = [...(page.fields.has("source") ? ["source"] : []), "iteration", "rank", "layer_idx", "module", "operation", "phase", "tensor_name"];
  const TABS = {
    records: { fields: [...WHO, "microbatch", "quant_type", "dtype", "shape"], metrics: ["elements", "nbytes"] },
    overflow: {
      fields: WHO,
      metrics: ["overflow.ratio", "overflow.upper.ratio", "overflow.lower.ratio", "overflow.underflow.ratio", "overflow.nan.ratio", "overflow.inf.ratio", "overflow.zero.ratio"],
    },
    stats: {
      fields: WHO,
      metrics: ["mean", "std", "minimum", "maximum", "absmax", "skewness", "kurtosis", "p1", "p50", "p99", "smallest_nonzero", "log2_range"],
    },
    formats: { fields: WHO, metrics: Array.from(page.metrics.keys()).filter((name) => name.startsWith("sqnr.")) },
  };
  const START = { tab: "records", sort: null, isDescending: true, search: "", first: 0 };
  const state = { ...START };
  const head = document.querySelector("#table thead tr");
  const body = document.querySelector("#table tbody");
  const count = document.getElementById("table-count");
  let order = [];

  function fieldColumn(name) {
    const field = page.fields.get(name);
    return {
      name, head: page.overview.nameOf(name), isNumber: field.isNumber,
      value: (record) => (field.isNumber ? field.values[field.codes[record]] ?? NaN : field.codes[record]),
      text: (record) => page.word(field, field.codes[record]),
    };
  }

  function metricColumn(name) {
    if (name === "elements") return { name, head: "elements", isNumber: true, value: (record) => page.elements[record], text: (record) => page.number(page.elements[record]) };
    if (name === "nbytes") return { name, head: "size", isNumber: true, value: (record) => page.nbytesOf[record], text: (record) => page.nbytes(page.nbytesOf[record]) };
    const metric = page.metrics.get(name);
    const value = (record) => page.folding.valueOf(metric, record);
    return { name, head: metric.head, isNumber: true, value, text: (record) => page.shown(metric, value(record)) };
  }

  function columns() {
    const { fields, metrics } = TABS[state.tab];
    const differing = fields.filter((name) => page.fields.get(name).values.length > 1 || name === "tensor_name");
    return [...differing.map(fieldColumn), ...metrics.map(metricColumn)];
  }

  /** For each word of each field whether it holds what is searched, so that no record's text is made. */
  function searched(records) {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length === 0) return Array.from(records);
    const fields = Array.from(page.fields.values()).map((field) => ({
      codes: field.codes, texts: field.values.map((_, code) => page.word(field, code).toLowerCase()),
    }));
    const tests = words.map((word) => fields.map(({ codes, texts }) => ({ codes, hits: texts.map((text) => text.includes(word)) })));
    return Array.from(records).filter((record) => tests.every((test) => test.some(({ codes, hits }) => hits[codes[record]])));
  }

  function ordered(records) {
    const column = columns().find((one) => one.name === state.sort);
    if (column === undefined) return records;
    const values = new Map(records.map((record) => [record, column.value(record)]));
    const sign = state.isDescending ? -1 : 1;
    return records.sort((one, other) => {
      const [first, second] = [values.get(one), values.get(other)];
      if (Number.isNaN(first) || Number.isNaN(second)) return Number.isNaN(first) - Number.isNaN(second) || one - other;
      return first === second ? one - other : sign * (first < second ? -1 : 1);
    });
  }

  function drawHead() {
    head.replaceChildren(
      ...columns().map((column) => {
        const isSorted = column.name === state.sort;
        const button = element("button", { type: "button", text: column.head });
        button.addEventListener("click", () => choose({ sort: column.name, isDescending: isSorted ? !state.isDescending : column.isNumber }));
        return element("th", {
          scope: "col", class: column.isNumber ? "number" : null, "data-column": column.name,
          "aria-sort": isSorted ? (state.isDescending ? "descending" : "ascending") : "none", children: [button],
        });
      })
    );
  }

  function drawRows() {
    const shown = order.slice(state.first, state.first + ROWS_AT_ONCE);
    const made = columns();
    body.replaceChildren(
      ...shown.map((record) => {
        const row = element("tr", { tabindex: "0", "data-record": record });
        for (const column of made) {
          const text = column.text(record);
          row.append(element("td", { text, class: column.isNumber ? "number" : null, title: text.length > 24 ? text : null }));
        }
        return row;
      })
    );
    const last = state.first + shown.length;
    count.textContent = order.length === 0 ? "no records" : `${page.number(state.first + 1)} to ${page.number(last)} of ${page.number(order.length)}`;
    document.getElementById("table-back").disabled = state.first === 0;
    document.getElementById("table-on").disabled = last >= order.length;
  }

  function update() {
    order = ordered(searched(selection.focused()));
    if (state.first >= order.length) state.first = 0;
    for (const tab of document.querySelectorAll("[data-tab]")) tab.setAttribute("aria-selected", String(tab.dataset.tab === state.tab));
    drawHead();
    drawRows();
  }

  function choose(changes) {
    Object.assign(state, changes, { first: 0 });
    update();
    selection.chose();
  }

  /** What differs from the tables as the page opens. */
  function written() {
    const sort = state.sort === null ? "" : (state.isDescending ? "-" : "") + state.sort;
    return [["table", state.tab === START.tab ? "" : state.tab], ["sort", sort], ["search", state.search]].filter(([, word]) => word !== "");
  }

  function read(pairs) {
    const tab = Object.keys(TABS).find((name) => name === pairs.get("table") && TABS[name].metrics.length > 0) ?? START.tab;
    Object.assign(state, START, { tab, search: pairs.get("search") ?? "" });
    const sort = pairs.get("sort") ?? "";
    const column = columns().find((one) => one.name === sort.replace(/^-/, ""));
    if (column !== undefined) Object.assign(state, { sort: column.name, isDescending: sort.startsWith("-") });
    document.getElementById("table-search").value = state.search;
  }

  function open(event) {
    const row = event.target.closest("tr[data-record]");
    if (row === null) return;
    selection.openRecord(Number(row.dataset.record));
    document.getElementById("drill").scrollIntoView({ block: "start" });
  }

  body.addEventListener("click", open);
  body.addEventListener("keydown", (event) => {
    if (event.key === "Enter") open(event);
  });
  for (const tab of document.querySelectorAll("[data-tab]")) {
    if (TABS[tab.dataset.tab].metrics.length === 0) tab.hidden = true;
    tab.addEventListener("click", () => choose({ tab: tab.dataset.tab, sort: null }));
  }
  document.getElementById("table-search").addEventListener("input", (event) => choose({ search: event.target.value }));
  for (const [id, step] of [["table-back", -ROWS_AT_ONCE], ["table-on", ROWS_AT_ONCE]]) {
    document.getElementById(id).addEventListener("click", () => {
      state.first = Math.max(0, state.first + step);
      drawRows();
    });
  }

  selection.keep({ written, read });
  page.tables = { update };
})();
