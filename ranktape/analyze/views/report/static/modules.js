// Draws the modules of the model in order of execution, layer by layer: how bad each is, and what follows from what.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection } = page;
  const SVG = "http://www.w3.org/2000/svg";
  const SEVERITIES = ["high", "medium", "low"];
  const MARKS = { high: "\u2715 ", medium: "\u25b2 ", low: "\u25cf " };
  const [ROW, BOX, GAP, LETTER, MARGIN, MAX_BEND] = [34, 24, 16, 7, 12, 160];
  const [MAX_MODULES, MAX_EDGES, MAX_LETTERS] = [2000, 400, 30];
  const home = document.getElementById("modules-chart");
  const field = page.fields.get("module");
  const layers = page.fields.get("layer_idx");
  const nodes = new Map();

  function drawn(name, attributes, children = []) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  /** Of each module its layer and when it was first seen, forward first. */
  function modules() {
    const forward = page.fields.get("operation").values.indexOf("forward");
    const { codes } = page.fields.get("operation");
    const found = new Map();
    for (let record = 0; record < page.count; record += 1) {
      const code = field.codes[record];
      const isForward = codes[record] === forward;
      const known = found.get(code);
      if (known === undefined || (isForward && !known.isForward)) {
        found.set(code, { code, layer: layers.codes[record], order: record, isForward });
      }
    }
    const when = (one) => (one.isForward ? one.order : page.count + one.order);
    return Array.from(found.values()).sort((one, other) => one.layer - other.layer || when(one) - when(other));
  }

  /** The name within its layer: what stands behind the layer's number. */
  function shortName(code) {
    const name = page.word(field, code);
    const rest = /^(?:.*?\.)?\d+\.(.+)$/.exec(name)?.[1] ?? name;
    const letters = Array.from(rest);
    return letters.length <= MAX_LETTERS ? rest : `\u2026${letters.slice(1 - MAX_LETTERS).join("")}`;
  }

  /** Of each module the worst finding in it, and whether it is merely what follows from one elsewhere. */
  function judged() {
    const worst = new Map();
    const edges = new Map();
    const note = (code, severity, isCause) => {
      const known = worst.get(code);
      const rank = SEVERITIES.indexOf(severity) + (isCause ? 0 : SEVERITIES.length);
      if (known === undefined || rank < known.rank) worst.set(code, { rank, severity, isCause });
    };
    for (const { severity, places, followed_by: followers } of page.raw.findings) {
      const causes = new Set(places.map((record) => field.codes[record]));
      for (const code of causes) note(code, severity, true);
      for (const record of followers) {
        const code = field.codes[record];
        note(code, severity, false);
        const cause = field.codes[places[0]];
        if (code !== cause && edges.size < MAX_EDGES) edges.set(`${cause} ${code}`, { cause, code, severity });
      }
    }
    return { worst, edges: Array.from(edges.values()) };
  }

  function toggle(code) {
    const chosen = new Set(selection.state.filters.get("module") ?? []);
    if (chosen.has(code)) chosen.delete(code);
    else chosen.add(code);
    selection.filter("module", chosen);
  }

  function box({ code, x, y, width }, known) {
    const severity = known?.severity;
    const isCause = known?.isCause === true;
    const state = severity === undefined ? "nothing found" : isCause ? `${severity} finding` : `follows from a ${severity} finding`;
    const words = `${page.word(field, code)}: ${state}`;
    const made = drawn("g", { class: `module ${severity ?? ""} ${isCause ? "cause" : ""}`, tabindex: "0", role: "button", "aria-label": words, "data-module": code }, [
      drawn("title", {}, [words]),
      drawn("rect", { x, y, width, height: BOX, rx: 5 }),
      drawn("text", { x: x + width / 2, y: y + BOX / 2 }, [(isCause ? MARKS[severity] : "") + shortName(code)]),
    ]);
    made.addEventListener("click", () => toggle(code));
    made.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle(code);
    });
    return made;
  }

  /** From a cause to what follows: within a row below it, else right of it, the farther out the farther apart. */
  function edge({ cause, code, severity }) {
    const [from, to] = [nodes.get(cause), nodes.get(code)];
    const right = (node) => [node.x + node.width, node.y + BOX / 2];
    const below = (node) => [node.x + node.width / 2, node.y + BOX];
    const isRow = from.y === to.y;
    const [[x0, y0], [x1, y1]] = [from, to].map(isRow ? below : right);
    const out = Math.max(x0, x1) + GAP + Math.min(MAX_BEND, Math.abs(y1 - y0) / 3);
    const d = isRow ? `M${x0} ${y0}C${x0} ${y0 + GAP} ${x1} ${y0 + GAP} ${x1} ${y1 + 2}` : `M${x0} ${y0}C${out} ${y0} ${out} ${y1} ${x1 + 3} ${y1}`;
    return drawn("path", { class: `follows ${severity}`, d, "marker-end": `url(#arrow-${severity})` });
  }

  function arrow(severity) {
    const attributes = { id: `arrow-${severity}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse", class: severity };
    return drawn("marker", attributes, [drawn("path", { d: "M0 0L8 4L0 8z" })]);
  }

  function draw() {
    const all = modules();
    document.getElementById("modules").hidden = all.length < 2 || all.length > MAX_MODULES;
    if (document.getElementById("modules").hidden) return;
    const labels = new Map(all.map(({ layer }) => [layer, layers.words?.[layer] ?? (layers.values[layer] < 0 ? "outside" : `layer ${layers.values[layer]}`)]));
    const left = MARGIN + LETTER * Math.max(...Array.from(labels.values(), (word) => word.length)) + GAP;
    const widest = Math.max(600, home.clientWidth - MAX_BEND);
    const { worst, edges } = judged();
    const shapes = [];
    let [x, y, layer, last] = [left, MARGIN - ROW, null, null];
    for (const one of all) {
      const width = Math.ceil(LETTER * (Array.from(shortName(one.code)).length + 2)) + 10;
      const isNew = one.layer !== layer;
      if (isNew || x + width > widest) [x, y, last] = [left, y + ROW, null];
      if (isNew) shapes.push(drawn("text", { class: "layer", x: MARGIN, y: y + BOX / 2 }, [labels.get(one.layer)]));
      if (last !== null) shapes.push(drawn("path", { class: "order", d: `M${last} ${y + BOX / 2}H${x}` }));
      const node = { code: one.code, x, y, width };
      nodes.set(one.code, node);
      [x, last, layer] = [x + width + GAP, x + width, one.layer];
    }
    const boxes = Array.from(nodes.values(), (node) => box(node, worst.get(node.code)));
    const height = y + BOX + MARGIN;
    const width = Math.max(...Array.from(nodes.values(), (node) => node.x + node.width)) + MAX_BEND;
    home.replaceChildren(
      drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Modules of the model, in order of execution" }, [
        drawn("defs", {}, SEVERITIES.map(arrow)), ...shapes, ...edges.map(edge), ...boxes,
      ])
    );
    update();
  }

  /** Say which modules the filter lets through. */
  function update() {
    const chosen = selection.state.filters.get("module");
    for (const made of home.querySelectorAll("[data-module]")) {
      made.setAttribute("aria-pressed", String(chosen !== undefined && chosen.has(Number(made.dataset.module))));
    }
  }

  page.modules = { draw, update };
})();
