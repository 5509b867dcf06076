// Knows which records are looked at: those that the filters leave, and of these the ones that were clicked.
(function () {
  "use strict";
  const page = window.ranktape;
  const listeners = [];
  const start = page.raw.start;
  const state = {
    /** By the name of a field the codes that are let through; a field that is not in it lets all through. */
    filters: new Map(),
    /** What was clicked: its records and its name; null where nothing was. */
    focus: null,
    metric: start.metric,
    across: start.across,
    down: start.down,
    againstPeers: start.againstPeers,
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
  function focus(records, name) {
    if (records === null && state.focus === null) return;
    if (records !== null) {
      const left = new Set(selected);
      if (!records.every((record) => left.has(record))) {
        state.filters.clear();
        selected = filtered();
        state.focus = { records: Array.from(records), name };
        tell("selection");
        return;
      }
    }
    state.focus = records === null ? null : { records: Array.from(records), name };
    tell("focus");
  }

  function choose(changes) {
    Object.assign(state, changes);
    tell("metric");
  }

  page.selection = {
    state, filter, clearFilters, focus, choose,
    onChange: (listener) => listeners.push(listener),
    records: () => selected,
    /** The records of the drill-down: what was clicked, or else the whole selection. */
    focused: () => (state.focus === null ? selected : state.focus.records),
    metric: () => page.metrics.get(state.metric),
  };
})();
