// Gives one menu for each field that has more than one value: which records may be seen.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection, element } = page;
  const MAX_SHOWN = 200;
  const MENU_WIDTH = 290;
  const home = document.getElementById("filters");
  const menus = new Map();

  /** The codes of a field that a text means: numbers and ranges (0-3, 7), or a part of a word. */
  function matching(field, text) {
    const trimmed = text.trim().toLowerCase();
    const codes = field.values.map((_, code) => code);
    if (trimmed === "") return codes;
    if (field.isNumber && /^-?\d+(\s*-\s*\d+)?(\s*,\s*-?\d+(\s*-\s*\d+)?)*$/.test(trimmed)) {
      const spans = trimmed.split(",").map((part) => {
        const [, low, high] = /^(-?\d+)(?:\s*-\s*(\d+))?$/.exec(part.trim());
        return [Number(low), Number(high ?? low)];
      });
      return codes.filter((code) => spans.some(([low, high]) => field.values[code] !== null && field.values[code] >= low && field.values[code] <= high));
    }
    return codes.filter((code) => page.word(field, code).toLowerCase().includes(trimmed));
  }

  function countsOf(field) {
    const counts = new Float64Array(field.values.length);
    for (let record = 0; record < page.count; record += 1) counts[field.codes[record]] += 1;
    return counts;
  }

  function fill(menu) {
    const { field, list, search, counts } = menu;
    const chosen = selection.state.filters.get(field.name);
    const codes = matching(field, search.value);
    const rows = codes.slice(0, MAX_SHOWN).map((code) => {
      const box = element("input", { type: "checkbox" });
      box.checked = chosen !== undefined && chosen.has(code);
      box.addEventListener("change", () => {
        const wanted = new Set(selection.state.filters.get(field.name) ?? []);
        if (box.checked) wanted.add(code);
        else wanted.delete(code);
        selection.filter(field.name, wanted);
      });
      const name = element("span", { text: page.word(field, code) });
      const count = element("small", { text: page.number(counts[code]) });
      return element("label", { children: [box, name, count] });
    });
    if (codes.length > MAX_SHOWN) rows.push(element("small", { text: `${codes.length - MAX_SHOWN} more: type to find them` }));
    if (codes.length === 0) rows.push(element("small", { text: "nothing like that" }));
    list.replaceChildren(...rows);
  }

  function made(field) {
    const summary = element("summary", { children: [element("span", { text: page.overview.nameOf(field.name) }), element("b", {})] });
    const search = element("input", {
      type: "search", placeholder: field.isNumber ? "0-3, 7" : "part of a word", "aria-label": `values of ${field.name}`,
    });
    const only = element("button", { type: "button", text: "only these" });
    const all = element("button", { type: "button", text: "all" });
    const list = element("div", { class: "values" });
    const box = element("details", {
      class: "filter", "data-field": field.name,
      children: [summary, element("div", { class: "menu", children: [search, element("div", { class: "row", children: [only, all] }), list] })],
    });
    const menu = { field, box, list, search, counts: countsOf(field), said: summary.lastChild };
    search.addEventListener("input", () => fill(menu));
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") only.click();
    });
    only.addEventListener("click", () => {
      const codes = matching(field, search.value);
      if (codes.length > 0) selection.filter(field.name, codes.length === field.values.length ? null : new Set(codes));
    });
    all.addEventListener("click", () => {
      search.value = "";
      selection.filter(field.name, null);
    });
    box.addEventListener("toggle", () => {
      if (!box.open) return;
      for (const other of menus.values()) if (other !== menu) other.box.open = false;
      // Near the right edge it opens to the left.
      box.classList.toggle("end", box.getBoundingClientRect().left + MENU_WIDTH > document.documentElement.clientWidth);
      fill(menu);
    });
    return menu;
  }

  function update() {
    for (const menu of menus.values()) {
      const chosen = selection.state.filters.get(menu.field.name);
      menu.box.classList.toggle("active", chosen !== undefined);
      menu.said.textContent = chosen === undefined ? "" : chosen.size === 1 ? page.word(menu.field, [...chosen][0]) : `${chosen.size} of ${menu.field.values.length}`;
      if (menu.box.open) fill(menu);
    }
    const count = selection.records().length;
    document.getElementById("selected-count").textContent =
      count === page.count ? `all ${page.number(count)} records` : `${page.number(count)} of ${page.number(page.count)} records`;
    document.getElementById("clear-filters").hidden = selection.state.filters.size === 0;
  }

  for (const field of page.fields.values()) {
    if (field.values.length < 2 || field.name === "kind" || field.name === "shape") continue;
    const menu = made(field);
    menus.set(field.name, menu);
    home.append(menu.box);
  }
  document.addEventListener("click", (event) => {
    for (const menu of menus.values()) if (menu.box.open && !menu.box.contains(event.target) && event.target.isConnected) menu.box.open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const menu of menus.values()) menu.box.open = false;
  });
  document.getElementById("clear-filters").addEventListener("click", () => selection.clearFilters());

  page.filters = { update };
})();
