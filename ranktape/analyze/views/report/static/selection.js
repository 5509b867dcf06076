// Knows which records are looked at: those that the filters leave, and of these the ones that were clicked.
(function () {
  "use strict";
  const page = window.ranktape;
  const listeners = [];
  const panels = [];
  const start = page.raw.start;
  const state = {
    /** By the name of a field the codes that are let through; a field that is not in it lets all through. */
    filters: new Map(),
    /**
     * What was clicked: its records, its name, and what it is: the number of a `finding`, or `where`, pairs of fields
     * and words in which its records agree; null where nothing was clicked.
     */
    focus: null,
    metric: start.metric,
    across: start.across,
    down: start.down,
    againstPeers: start.againstPeers,
    /** Whom the overview compares with: the same place in other ranks and iterations ("places"), or other "layers". */
    peersOf: start.peersOf,
    /** The kind of tensors that the overview is of; empty for all. */
    ofKind: start.ofKind,
    colorBy: start.colorBy,
  };
  let selected = Int32Array.from({ length: page.count }, (_, record) => record);

  function filtered() {
    const active = Array.from(state.filters, ([name, codes]) => [page.fields.get(name).codes, codes]);
    const found = [];
    for (let record = 0; record < page.count; record += 1) {
      if (active.every(([column, codes]) => codes.has(column[record]))) found.push(record);
    }
    return Int32Array.from(found);
  }

  function tell(what) {
    for (const listener of listeners) listener(what);
  }

  /** Let through those codes of a field; null lets all through. */
  function filter(name, codes) {
    if (codes === null || codes.size === 0) state.filters.delete(name);
    else state.filters.set(name, codes);
    selected = filtered();
    if (state.focus !== null) {
      const left = new Set(selected);
      const records = state.focus.records.filter((record) => left.has(record));
      state.focus = records.length > 0 ? { ...state.focus, records } : null;
    }
    tell("selection");
  }

  function clearFilters() {
    if (state.filters.size === 0) return;
    state.filters.clear();
    selected = filtered();
    tell("selection");
  }

  /** Look at some records; filters that would hide one are lifted. */
  function focus(records, name, about = {}) {
    if (records === null && state.focus === null) return;
    const isNone = records === null;
    const isHidden = !isNone && !isSelected(records);
    if (isHidden) {
      state.filters.clear();
      selected = filtered();
    }
    state.focus = isNone ? null : { records: Array.from(records), name, ...about };
    tell(isHidden ? "selection" : "focus");
  }

  function isSelected(records) {
    const left = new Set(selected);
    return records.every((record) => left.has(record));
  }

  function openFinding(number) {
    const { places, title } = page.raw.findings[number];
    focus(places, title, { finding: number });
  }

  function openRecord(record) {
    const words = ["module", "operation", "tensor_name"].map((name) => page.wordOf(name, record));
    focus([record], `Record ${record}: ${words.join(" ")}`, { where: page.identity.map((name) => [name, page.wordOf(name, record)]) });
  }

  /** The records of the selection whose fields are these words; a sample is one that they must have. */
  function recordsWhere(where) {
    const tests = where.map(([name, word]) => {
      if (name === "sample") {
        const { placeOf, length } = page.samples;
        return (record) => placeOf.has(record) && length[placeOf.get(record)] > Number(word);
      }
      const field = page.fields.get(name);
      const codes = new Set(field === undefined ? [] : page.codesOf(field, [word]));
      return (record) => codes.has(field.codes[record]);
    });
    return Array.from(selected).filter((record) => tests.every((test) => test(record)));
  }

  /** All that can be chosen, at once: what an address says. */
  function restore({ filters, finding, where, name, pairs, ...choices }) {
    Object.assign(state, { filters, focus: null }, choices);
    for (const panel of panels) panel.read(pairs);
    selected = filtered();
    const records = finding !== null ? page.raw.findings[finding].places : where.length > 0 ? recordsWhere(where) : [];
    if (records.length > 0 && isSelected(records)) {
      state.focus = { records, name, ...(finding !== null ? { finding } : { where }) };
    }
    tell("restored");
  }

  function choose(changes) {
    Object.assign(state, changes);
    tell("metric");
  }

  page.selection = {
    state, filter, clearFilters, focus, openFinding, openRecord, choose, restore,
    onChange: (listener) => listeners.push(listener),
    /** A panel with choices of its own: `written` gives them as pairs of words, `read` takes them from `URLSearchParams`. */
    keep: (panel) => panels.push(panel),
    /** The choices of the panels, as pairs of words. */
    ofPanels: () => panels.flatMap((panel) => panel.written()),
    /** A panel has another choice, and has drawn it. */
    chose: () => tell("panel"),
    records: () => selected,
    /** The records of the drill-down: what was clicked, or else the whole selection. */
    focused: () => (state.focus === null ? selected : state.focus.records),
    metric: () => page.metrics.get(state.metric),
  };
})();
