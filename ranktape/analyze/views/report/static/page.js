// Fills the menus, draws the page, and redraws what a choice changes.
function drawAllLines() {
  drawLines("layers-chart", "layer_idx");
  if (!at("trend").hidden) drawLines("trend-chart", "iteration");
}

function metricChanged() {
  drawOverview();
  drawPeers();
  drawAllLines();
}

function focusChanged() {
  drawDrill();
  drawTable();
}

function selectionChanged() {
  drawFilters();
  metricChanged();
  focusChanged();
}

function fillChoices(id, choices, changed) {
  at(id).append(...choices.map(([value, text]) => element("option", { value, text })));
  at(id).value = state[id];
  at(id).addEventListener("change", (event) => {
    state[id] = event.target.value;
    changed();
  });
}

const varied = Array.from(fields.values()).filter(({ name, values }) => values.length > 1 || name === state.rows || name === state.columns || name === state.lines);
const named = (names) => names.map((name) => [name, nameOf(name)]);
const variedNames = varied.map(({ name }) => name).filter((name) => name !== "shape");
fillChoices("metric", Array.from(metrics.values(), ({ name, head }) => [name, head]), metricChanged);
fillChoices("lines", named(variedNames.filter((name) => name !== "batch_size")), metricChanged);
fillChoices("rows", named(variedNames), drawOverview);
fillChoices("columns", [...named(variedNames), ...(raw.samples.count > 0 ? [["sample", "sample"]] : [])], drawOverview);
fillChoices("kind", [["", "all"], ...fields.get("kind").values.map((_, code) => word(fields.get("kind"), code)).map((one) => [one, one])], drawOverview);
fillChoices("against", [["", "absolute"], ["places", "relative to other ranks and iterations"], ["layers", "relative to other layers"]], drawOverview);
at("drill-clear").addEventListener("click", () => focusOn(null));
at("trend").hidden = fields.get("iteration").values.length < 2;

for (const link of document.querySelectorAll("[data-finding]")) link.addEventListener("click", () => openFinding(Number(link.dataset.finding)));
drawFilters();
// One chart after the other, so that the page can be read and scrolled meanwhile.
for (const one of [drawRecipes, drawLosses, drawOverview, drawDrill, drawTable, drawAllLines]) {
  one();
  await new Promise((resolve) => setTimeout(resolve));
}
// A link names its finding by its title.
const linked = raw.findings.findIndex(({ title }) => title === new URLSearchParams(window.location.hash.slice(1)).get("finding"));
if (linked >= 0) openFinding(linked);
// For tests and for the console.
window.ranktape = { raw, state, filterBy, clearFilters, focusOn, openRecord, drawRecipes };
document.documentElement.dataset.ready = "yes";
