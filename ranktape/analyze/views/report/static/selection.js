// Knows which records are shown: those that the filters leave, and of these the ones that were clicked.
const MAX_SHOWN_VALUES = 200;
const MENU_WIDTH = 290;
const state = {
  ...raw.start,
  /** By the name of a field the codes that are let through. A field that is not in it lets all through. */
  filters: new Map(),
  /** What was clicked: its records, its name, and the number of the finding, if it is one; null if nothing was. */
  focus: null,
};
let selected = Array.from({ length: count }, (_, record) => record);
const menus = new Map();

/** The records of the drill-down: what was clicked, or else the whole selection. */
const focused = () => (state.focus === null ? selected : state.focus.records);

/** Let these codes of a field through; none or all of them remove the filter. */
function filterBy(name, codes) {
  if (codes.size === 0 || codes.size === fields.get(name).values.length) state.filters.delete(name);
  else state.filters.set(name, codes);
  refilter();
}

function clearFilters() {
  state.filters.clear();
  refilter();
}

function refilter() {
  const active = Array.from(state.filters, ([name, codes]) => [fields.get(name).codes, codes]);
  selected = Array.from({ length: count }, (_, record) => record).filter((record) => active.every(([column, codes]) => codes.has(column[record])));
  if (state.focus !== null) {
    const left = new Set(selected);
    const records = state.focus.records.filter((record) => left.has(record));
    state.focus = records.length > 0 ? { ...state.focus, records } : null;
  }
  selectionChanged();
}

/** Show some records in the drill-down, null for the whole selection; filters that would hide one are cleared. */
function focusOn(records, name = "", finding = null) {
  const left = new Set(selected);
  state.focus = records === null ? null : { records, name, finding };
  if (records !== null && !records.every((record) => left.has(record))) clearFilters();
  else focusChanged();
  if (records !== null) at("drill").scrollIntoView({ block: "start" });
}

function openFinding(index) {
  focusOn(raw.findings[index].places, raw.findings[index].title, index);
}

function openRecord(record) {
  focusOn([record], `Record ${record}: ${["module", "operation", "tensor_name"].map((name) => wordOf(name, record)).join(" ")}`);
}

/** The codes of a field that a text means: numbers and ranges (0-3, 7), or a part of a word. */
function matching(field, text) {
  const trimmed = text.trim().toLowerCase();
  const codes = field.values.map((_, code) => code);
  if (field.isNumber && /^-?\d+(\s*-\s*\d+)?(\s*,\s*-?\d+(\s*-\s*\d+)?)*$/.test(trimmed)) {
    const spans = trimmed.split(",").map((part) => {
      const [, low, high] = /^(-?\d+)(?:\s*-\s*(\d+))?$/.exec(part.trim());
      return [Number(low), Number(high ?? low)];
    });
    return codes.filter((code) => spans.some(([low, high]) => field.values[code] !== null && field.values[code] >= low && field.values[code] <= high));
  }
  return codes.filter((code) => word(field, code).toLowerCase().includes(trimmed));
}

function fillMenu({ field, list, search }) {
  const chosen = state.filters.get(field.name) ?? new Set();
  const codes = matching(field, search.value);
  const rows = codes.slice(0, MAX_SHOWN_VALUES).map((code) => {
    const box = element("input", { type: "checkbox" });
    box.checked = chosen.has(code);
    box.addEventListener("change", () => {
      const wanted = new Set(state.filters.get(field.name));
      if (box.checked) wanted.add(code);
      else wanted.delete(code);
      filterBy(field.name, wanted);
    });
    return element("label", { children: [box, element("span", { text: word(field, code) })] });
  });
  if (codes.length > rows.length) rows.push(element("small", { text: `${codes.length - rows.length} more: type to find them` }));
  if (codes.length === 0) rows.push(element("small", { text: "no such value" }));
  list.replaceChildren(...rows);
}

/** One menu for each field that has more than one value. */
function makeMenu(field) {
  const summary = element("summary", { children: [element("span", { text: nameOf(field.name) }), element("b")] });
  const search = element("input", { type: "search", placeholder: field.isNumber ? "0-3, 7" : "part of a word", "aria-label": `values of ${nameOf(field.name)}` });
  const [only, all] = ["only these", "all"].map((text) => element("button", { type: "button", text }));
  const list = element("div", { class: "values" });
  const body = element("div", { class: "menu", children: [search, element("div", { class: "row", children: [only, all] }), list] });
  const box = element("details", { class: "filter", "data-field": field.name, children: [summary, body] });
  const menu = { field, box, list, search, chosen: summary.lastChild };
  search.addEventListener("input", () => fillMenu(menu));
  only.addEventListener("click", () => filterBy(field.name, new Set(matching(field, search.value))));
  all.addEventListener("click", () => {
    search.value = "";
    filterBy(field.name, new Set());
  });
  box.addEventListener("toggle", () => {
    // Near the right edge it opens to the left.
    box.classList.toggle("end", box.getBoundingClientRect().left + MENU_WIDTH > document.documentElement.clientWidth);
    if (box.open) fillMenu(menu);
  });
  return menu;
}

function drawFilters() {
  for (const { field, box, chosen, ...menu } of menus.values()) {
    const codes = state.filters.get(field.name);
    box.classList.toggle("active", codes !== undefined);
    chosen.textContent = codes === undefined ? "" : codes.size === 1 ? word(field, [...codes][0]) : `${codes.size} of ${field.values.length}`;
    if (box.open) fillMenu({ field, ...menu });
  }
  at("selected-count").textContent = selected.length === count ? `all ${number(count)} records` : `${number(selected.length)} of ${number(count)} records`;
  at("clear-filters").hidden = state.filters.size === 0;
}

for (const field of fields.values()) {
  if (field.values.length < 2 || field.name === "kind" || field.name === "shape") continue;
  menus.set(field.name, makeMenu(field));
  at("filters").append(menus.get(field.name).box);
}
document.addEventListener("click", (event) => {
  for (const { box } of menus.values()) if (box.open && event.target.isConnected && !box.contains(event.target)) box.open = false;
});
at("clear-filters").addEventListener("click", clearFilters);
