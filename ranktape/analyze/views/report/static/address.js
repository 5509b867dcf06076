// Keeps what is chosen in the address of the page: a link, a reload, back and forward show it again.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection } = page;
  const CHOICES = { metric: "metric", rows: "down", columns: "across", lines: "colorBy", peers: "againstPeers", beside: "peersOf", tensor: "ofKind" };
  const IN = "in.";
  const start = { ...selection.state };

  /** What differs from the page as it opens: choices, filters (a key for each word), and what was clicked. */
  function written() {
    const { state } = selection;
    const pairs = Object.entries(CHOICES).filter(([, key]) => state[key] !== start[key]).map(([name, key]) => [name, String(state[key])]);
    for (const [name, codes] of state.filters) {
      for (const code of codes) pairs.push([`only.${name}`, page.word(page.fields.get(name), code)]);
    }
    if (state.focus?.finding !== undefined) pairs.push(["finding", page.raw.findings[state.focus.finding].title]);
    for (const [name, word] of state.focus?.where ?? []) pairs.push([IN + name, word]);
    if (state.focus?.where !== undefined) pairs.push(["name", state.focus.name]);
    return new URLSearchParams([...pairs, ...selection.ofPanels()]).toString();
  }

  /** The choices that an address says; what this page does not have is left out. */
  function read(text) {
    const pairs = new URLSearchParams(text);
    const filters = new Map();
    for (const field of page.fields.values()) {
      const codes = page.codesOf(field, pairs.getAll(`only.${field.name}`));
      if (codes.length > 0) filters.set(field.name, new Set(codes));
    }
    const finding = page.raw.findings.findIndex((one) => one.title === pairs.get("finding"));
    const where = Array.from(pairs).filter(([name]) => name.startsWith(IN)).map(([name, word]) => [name.slice(IN.length), word]);
    const choices = {};
    for (const [name, key] of Object.entries(CHOICES)) choices[key] = isAllowed(name, pairs.get(name)) ? pairs.get(name) : start[key];
    choices.againstPeers = String(choices.againstPeers) === "true";
    const name = finding < 0 ? pairs.get("name") ?? "" : page.raw.findings[finding].title;
    return { filters, finding: finding < 0 ? null : finding, where, name, pairs, ...choices };
  }

  function isAllowed(name, value) {
    if (name === "peers") return value === "true" || value === "false";
    const menu = { metric: "metric", rows: "down", columns: "across", lines: "color-by", beside: "peers-of", tensor: "of-kind" }[name];
    return Array.from(document.getElementById(menu).options).some((option) => option.value === value);
  }

  const said = () => window.location.hash.slice(1);

  selection.onChange((what) => {
    if (what === "restored" || written() === said()) return;
    // "Back" leaves a panel as it is: nobody goes back through the letters of a search.
    window.history[what === "panel" ? "replaceState" : "pushState"](null, "", `#${written()}`);
  });
  window.addEventListener("popstate", () => selection.restore(read(said())));
  // Where the reader was, for the page that a reload shows.
  window.addEventListener("pagehide", () => window.history.replaceState({ scroll: window.scrollY }, ""));

  /** Choose what the address says. */
  function restore() {
    if (said() !== "") selection.restore(read(said()));
  }

  /** Go where the reader was, or to what a link opens. */
  function scroll() {
    if (window.history.state?.scroll !== undefined) window.scrollTo(0, window.history.state.scroll);
    else if (selection.state.focus !== null) document.getElementById("drill").scrollIntoView({ block: "start" });
  }

  page.address = { restore, scroll };
})();
