// Shows records and their metrics in tables that sort, search and open a record.
const ROWS_AT_ONCE = 50;
const WHO = [...(fields.has("source") ? ["source"] : []), "iteration", "rank", "layer_idx", "module", "operation", "phase", "tensor_name"];
const byPrefix = (prefix) => Array.from(metrics.keys()).filter((name) => name.startsWith(prefix));
const TABS = {
  records: { fields: [...WHO, "microbatch", "quant_type", "dtype", "shape"], metrics: ["absmax", "elements", "nbytes"] },
  overflow: { fields: WHO, metrics: byPrefix("overflow.") },
  stats: { fields: WHO, metrics: ["mean", "std", "minimum", "maximum", "absmax", "skewness", "kurtosis", "p1", "p50", "p99", "smallest_nonzero", "log2_range"] },
  formats: { fields: WHO, metrics: byPrefix("sqnr.") },
};
const table = { tab: "records", sort: null, isDescending: true, first: 0 };

function columnOf(name) {
  const field = fields.get(name);
  if (field !== undefined) {
    const value = (record) => (field.isNumber ? field.values[field.codes[record]] ?? NaN : field.codes[record]);
    return { name, head: nameOf(name), isNumber: field.isNumber, value, text: (record) => wordOf(name, record) };
  }
  if (name === "elements") return { name, head: name, isNumber: true, value: (record) => elements[record], text: (record) => number(elements[record]) };
  if (name === "nbytes") return { name, head: "size", isNumber: true, value: (record) => sizes[record], text: (record) => nbytes(sizes[record]) };
  const metric = metrics.get(name);
  return { name, head: metric.head, isNumber: true, value: (record) => valueOf(metric, record), text: (record) => shown(metric, valueOf(metric, record)) };
}

function columnsOfTable() {
  const tab = TABS[table.tab];
  return [...tab.fields.filter((name) => fields.get(name).values.length > 1 || name === "tensor_name"), ...tab.metrics].map(columnOf);
}

/** The records in whose fields all words are found. */
function searched(records, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  // Each value of a field is searched once, and no text of a record is made.
  const tests = words.map((one) => Array.from(fields.values(), (field) => ({ codes: field.codes, hits: field.values.map((_, code) => word(field, code).toLowerCase().includes(one)) })));
  return records.filter((record) => tests.every((test) => test.some(({ codes, hits }) => hits[codes[record]])));
}

function sorted(records, column) {
  if (column === undefined) return records;
  const values = new Map(records.map((record) => [record, column.value(record)]));
  const sign = table.isDescending ? -1 : 1;
  return [...records].sort((one, other) => {
    const [first, second] = [values.get(one), values.get(other)];
    if (Number.isNaN(first) || Number.isNaN(second)) return Number.isNaN(first) - Number.isNaN(second) || one - other;
    return first === second ? one - other : sign * (first < second ? -1 : 1);
  });
}

function headOf(column) {
  const isSorted = column.name === table.sort;
  const button = element("button", { type: "button", text: column.head });
  button.addEventListener("click", () => drawTable({ sort: column.name, isDescending: isSorted ? !table.isDescending : column.isNumber, first: 0 }));
  const order = isSorted ? (table.isDescending ? "descending" : "ascending") : "none";
  return element("th", { scope: "col", class: column.isNumber && "number", "data-column": column.name, "aria-sort": order, children: [button] });
}

function drawTable(changes = {}) {
  Object.assign(table, changes);
  const columns = columnsOfTable();
  const order = sorted(searched(focused(), at("table-search").value), columns.find((one) => one.name === table.sort));
  if (table.first >= order.length) table.first = 0;
  const records = order.slice(table.first, table.first + ROWS_AT_ONCE);
  const cell = (column, text) => element("td", { text, class: column.isNumber && "number", title: text.length > 24 && text });
  document.querySelector("#table thead tr").replaceChildren(...columns.map(headOf));
  document.querySelector("#table tbody").replaceChildren(
    ...records.map((record) => element("tr", { tabindex: "0", "data-record": record, children: columns.map((column) => cell(column, column.text(record))) }))
  );
  const last = table.first + records.length;
  at("table-count").textContent = order.length === 0 ? "no records" : `${number(table.first + 1)} to ${number(last)} of ${number(order.length)}`;
  at("table-back").disabled = table.first === 0;
  at("table-on").disabled = last >= order.length;
  for (const tab of document.querySelectorAll("[data-tab]")) tab.setAttribute("aria-selected", String(tab.dataset.tab === table.tab));
}

function openRow(event) {
  const row = event.target.closest("tr[data-record]");
  if (row !== null && (event.type === "click" || event.key === "Enter")) openRecord(Number(row.dataset.record));
}

for (const type of ["click", "keydown"]) document.querySelector("#table tbody").addEventListener(type, openRow);
for (const tab of document.querySelectorAll("[data-tab]")) {
  tab.hidden = TABS[tab.dataset.tab].metrics.length === 0;
  tab.addEventListener("click", () => drawTable({ tab: tab.dataset.tab, sort: null, first: 0 }));
}
at("table-search").addEventListener("input", () => drawTable({ first: 0 }));
at("table-back").addEventListener("click", () => drawTable({ first: Math.max(0, table.first - ROWS_AT_ONCE) }));
at("table-on").addEventListener("click", () => drawTable({ first: table.first + ROWS_AT_ONCE }));
