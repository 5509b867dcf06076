// Shows what recipes keep of each product: a cell for each module and recipe, the calls of one, and their iterations.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection, themes, label, element, recipes } = page;
  const at = (id) => document.getElementById(id);
  if (recipes === null) {
    page.recipePanel = { update() {} };
    return;
  }
  const { names, products, rows, calls, sums } = recipes;
  const MAX_ROWS_OF_MODULES = 60;
  const MAX_NUMBERED_CELLS = 1500;
  const MAX_CALLS = 200;
  const WHO = ["iteration", "rank", "microbatch", "call"];
  const place = at("recipes-chart");
  const state = { metric: "sqnr", down: "", isWorst: false, cell: null };
  let shownCells = [];

  /** What several products together are, as `ErrorSums` has it: all are sums, but for the largest error. */
  function added(chosen) {
    const total = {};
    for (const [name, column] of sums) {
      total[name] = chosen.reduce((sum, row) => (name === "max_error" ? Math.max(sum, column[row]) : sum + column[row]), 0);
    }
    return total;
  }

  const known = (sum, value) => (sum.num_compared > 0 ? value : NaN);
  const relative = (sum) => known(sum, sum.error_squared === 0 ? 0 : Math.sqrt(sum.error_squared / sum.reference_squared));
  const bias = (sum) => known(sum, sum.error === 0 ? 0 : sum.error / sum.error_deviation);
  const METRICS = {
    sqnr: { head: "SQNR", unit: "dB", of: (sum) => -20 * Math.log10(relative(sum)), badness: (value) => -value },
    relative_error: { head: "relative error", of: relative, badness: (value) => value, isLog: true },
    cosine: { head: "cosine", of: (sum) => known(sum, sum.product / Math.sqrt(sum.reference_squared * sum.result_squared)), badness: (value) => -value },
    largest_error: { head: "largest error", of: (sum) => known(sum, sum.max_error), badness: (value) => value, isLog: true },
    bias: { head: "bias", of: bias, badness: Math.abs, middle: 0 },
    gain: { head: "gain", of: (sum) => known(sum, sum.product / sum.reference_squared), badness: (value) => Math.abs(value - 1), middle: 1 },
    norm_ratio: { head: "norm ratio", of: (sum) => known(sum, Math.sqrt(sum.result_squared / sum.reference_squared)), badness: (value) => Math.abs(value - 1), middle: 1 },
  };
  const shown = (metric, value) => (metric.unit && Number.isFinite(value) ? `${Number(value.toPrecision(4))} ${metric.unit}` : page.number(value));

  const fieldOf = (name) => page.fields.get(name);
  const codeOf = (name, row) => fieldOf(name).codes[calls.first[rows.call[row]]];
  const wordOf = (name, row) => page.word(fieldOf(name), codeOf(name, row));

  /** Module and layer in a word: files have no module. */
  function moduleOf(row) {
    return fieldOf("module").values[codeOf("module", row)] === "" ? `layer ${wordOf("layer_idx", row)} ${wordOf("layer_type", row)}` : wordOf("module", row);
  }
  const moduleWords = Array.from(rows.call, (_, row) => moduleOf(row));

  /** The products of calls of which a filter has left a record. */
  function selected() {
    const isLeft = new Uint8Array(page.count);
    for (const record of selection.records()) isLeft[record] = 1;
    const isShown = Array.from(calls.first, (_, call) => recordsOf(call).some((record) => isLeft[record]));
    return Array.from(rows.call.keys()).filter((row) => isShown[rows.call[row]]);
  }

  function recordsOf(call) {
    return Array.from(calls.records.subarray(calls.starts[call], calls.starts[call + 1]));
  }

  function grouped(chosen, keyOf) {
    const groups = new Map();
    for (const row of chosen) {
      const key = keyOf(row);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    }
    return groups;
  }

  function worstOf(metric, values) {
    return values.reduce((worst, one) => (Number.isNaN(worst) || metric.badness(one) > metric.badness(worst) ? one : worst), NaN);
  }

  /** Of a cell all calls together, or the worst of them; of several modules the worst. */
  function valueOf(metric, chosen) {
    const groups = state.isWorst ? chosen.map((row) => [row]) : Array.from(grouped(chosen, (row) => moduleWords[row]).values());
    return worstOf(metric, groups.map((group) => metric.of(added(group))).filter((value) => !Number.isNaN(value)));
  }

  /** The colours; what the training's own rounding costs is far above all recipes, and has the colour of the best. */
  function colored(metric, values) {
    const placed = (value) => (metric.isLog ? Math.log10(value) : metric.middle === undefined ? value : value - metric.middle);
    const isRecipe = (column) => shownCells[column] !== null && shownCells[column].recipe !== recipes.recorded;
    const z = values.map((row) => row.map((value) => (Number.isNaN(value) ? null : placed(value))));
    const finite = z.flatMap((row) => row.filter((value, column) => isRecipe(column) && Number.isFinite(value)));
    const [low, high] = finite.length > 0 ? [Math.min(...finite), Math.max(...finite)] : [0, 1];
    const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const [zmin, zmax] = metric.middle === undefined ? [low, high > low ? high : low + 1] : [-reach, reach];
    const ticks = roundTicks(zmin, zmax);
    const back = (tick) => (metric.isLog ? 10 ** tick : tick + (metric.middle ?? 0));
    return {
      z: z.map((row) => row.map((value) => (value === null ? null : Math.min(Math.max(value, zmin), zmax)))), zmin, zmax,
      ...(metric.middle === undefined ? {} : { colorscale: themes.diverging }),
      colorbar: { tickvals: ticks, ticktext: ticks.map((tick) => shown(metric, Number(back(tick).toPrecision(3)))) },
    };
  }

  function roundTicks(low, high) {
    const least = (high - low) / 8;
    const power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= least);
    return Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (_, index) => (Math.ceil(low / step) + index) * step);
  }

  function updateMap(chosen) {
    if (chosen.length === 0) {
      themes.say(place, "No product that was computed again passes the filters.");
      return;
    }
    const metric = METRICS[state.metric];
    const isOfModules = state.down === "module";
    const wordOfRow = isOfModules ? (row) => moduleWords[row] : (row) => wordOf("layer_idx", row);
    const lines = Array.from(grouped(chosen, wordOfRow).entries()).sort(
      ([, one], [, other]) => codeOf(state.down, one[0]) - codeOf(state.down, other[0]) || codeOf("layer_idx", one[0]) - codeOf("layer_idx", other[0])
    );
    const occurring = new Set(chosen.map((row) => rows.product[row]));
    // A column of nothing stands between two products.
    shownCells = products.flatMap((_, product) => (occurring.has(product) ? [null, ...names.map((_name, recipe) => ({ product, recipe }))] : [])).slice(1);
    const cells = lines.map(([, members]) => {
      const found = grouped(members, (row) => rows.product[row] * names.length + rows.recipe[row]);
      return shownCells.map((cell) => (cell === null ? [] : found.get(cell.product * names.length + cell.recipe) ?? []));
    });
    const values = cells.map((line) => line.map((some) => valueOf(metric, some)));
    const lost = cells.map((line) => line.map((some) => added(some).num_lost));
    const isNumbered = values.length * shownCells.length <= MAX_NUMBERED_CELLS && values.length <= MAX_ROWS_OF_MODULES;
    const hover = cells.map((line, y) => line.map((some, x) => (some.length === 0 ? "" : hoverText(lines[y][0], shownCells[x], metric, values[y][x], some.length, lost[y][x]))));
    const columns = shownCells.flatMap((cell, x) => (cell === null ? [] : [[x, names[cell.recipe]]]));
    const titles = Array.from(occurring).sort((one, other) => one - other).map((product) => {
      const some = shownCells.flatMap((cell, x) => (cell !== null && cell.product === product ? [x] : []));
      return { x: (some[0] + some[some.length - 1]) / 2, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: `<b>${label(products[product])}</b>` };
    });
    themes.draw(
      place, "overview",
      [{
        ...colored(metric, values), x: shownCells.map((_, x) => x), y: lines.map((_, y) => y), xgap: 1, ygap: 1,
        text: values.map((line) => line.map((value) => (isNumbered && !Number.isNaN(value) ? brief(metric, value) : ""))), texttemplate: "%{text}", textfont: { size: 11 },
        customdata: hover, hovertemplate: "%{customdata}<extra></extra>",
      }],
      {
        height: Math.min(1000, Math.max(260, 150 + lines.length * (isNumbered ? 20 : 12))),
        margin: { t: 44 }, annotations: titles,
        xaxis: { type: "linear", tickmode: "array", tickvals: columns.map(([x]) => x), ticktext: columns.map(([, name]) => label(name, 24)), tickangle: columns.length > 9 ? -90 : 0, automargin: true },
        yaxis: { type: "linear", autorange: "reversed", automargin: true, tickmode: "array", ...ticksOf(lines.map(([word]) => word)) },
      }
    );
    shownCells.lines = lines;
    page.keyboard.listen(place, openCell);
  }

  /** A number that fits into a cell. */
  function brief(metric, value) {
    if (!Number.isFinite(value) || value === 0) return page.number(value);
    if (metric.unit) return value.toFixed(1);
    return Math.abs(value) >= 0.01 && Math.abs(value) < 1e4 ? value.toPrecision(3) : value.toExponential(1);
  }

  function ticksOf(words) {
    const step = Math.ceil(words.length / MAX_ROWS_OF_MODULES);
    const places = words.map((_, index) => index).filter((index) => index % step === 0);
    return { tickvals: places, ticktext: places.map((index) => label(words[index], 40)) };
  }

  function hoverText(word, cell, metric, value, count, numLost) {
    const bits = recipes.bits[cell.recipe];
    return `<b>${label(word)}</b><br>${label(products[cell.product])} in ${label(names[cell.recipe])}${bits === null ? "" : ` (${page.number(bits)} bits)`}<br>${metric.head} ${label(shown(metric, value))}${numLost > 0 ? `<br>${page.number(numLost)} elements became NaN or infinite` : ""}<br>calls: ${count}, click to see them`;
  }

  function openCell(point) {
    const cell = shownCells[Math.round(point.x)];
    const line = shownCells.lines[Math.round(point.y)];
    if (!cell || line === undefined) return;
    choose({ cell: { ...cell, word: line[0], down: state.down } }, updateCalls);
    at("recipe-calls-title").scrollIntoView({ block: "start" });
  }

  /** Those of the cell that was clicked, or of all. */
  function ofCell(chosen) {
    const { cell } = state;
    if (cell === null) return chosen.filter((row) => rows.recipe[row] !== recipes.recorded);
    return chosen.filter((row) => rows.product[row] === cell.product && rows.recipe[row] === cell.recipe && isInLine(row));
  }

  function isInLine(row) {
    return (state.cell.down === "module" ? moduleWords[row] : wordOf("layer_idx", row)) === state.cell.word;
  }

  function updateCalls(chosen) {
    const { cell } = state;
    const metric = METRICS[state.metric];
    const single = new Map(ofCell(chosen).map((row) => [row, added([row])]));
    // What became NaN or infinite is in no metric: it is worse than every error.
    const values = new Map(Array.from(single, ([row, sum]) => [row, sum.num_lost > 0 ? Infinity : metric.badness(metric.of(sum))]));
    const hasLost = Array.from(single.values()).some((sum) => sum.num_lost > 0);
    const order = Array.from(values.keys()).sort((one, other) => (values.get(one) === values.get(other) ? one - other : values.get(other) - values.get(one)));
    const shownRows = order.slice(0, MAX_CALLS);
    const where = cell === null ? "" : ` of ${cell.down === "module" ? "" : "layer "}${cell.word}: ${products[cell.product]} in ${names[cell.recipe]}`;
    at("recipe-calls-title").textContent = `Calls${where}`;
    at("recipe-calls-count").textContent = order.length > shownRows.length ? `the worst ${MAX_CALLS} of ${page.number(order.length)} by ${metric.head}` : `${page.number(order.length)}, the worst by ${metric.head} first`;
    at("recipe-calls-clear").hidden = cell === null;
    const fields = WHO.filter((name) => fieldOf(name).values.length > 1 || name === "iteration" || name === "rank");
    const isOfOne = cell !== null && cell.down === "module";
    const heads = [
      ...(isOfOne ? [] : ["module"]), ...(cell === null ? ["product", "recipe"] : []), ...fields.map(page.overview.nameOf),
      ...Object.values(METRICS).map((one) => one.head), "against recorded", ...(hasLost ? ["lost"] : []),
    ];
    const firstNumber = (isOfOne ? 0 : 1) + (cell === null ? 2 : 0);
    const kindOf = (column) => (column < firstNumber ? null : "number");
    at("recipe-calls-head").replaceChildren(...heads.map((text, column) => element("th", { scope: "col", class: kindOf(column), text })));
    at("recipe-calls").replaceChildren(...shownRows.map((row) => {
      const texts = [
        ...(isOfOne ? [] : [moduleWords[row]]), ...(cell === null ? [products[rows.product[row]], names[rows.recipe[row]]] : []), ...fields.map((name) => wordOf(name, row)),
        ...Object.values(METRICS).map((one) => shown(one, one.of(single.get(row)))), shown(METRICS.sqnr, rows.against[row]),
        ...(hasLost ? [page.number(single.get(row).num_lost)] : []),
      ];
      return element("tr", { tabindex: "0", "data-row": row, children: texts.map((text, column) => element("td", { class: kindOf(column), text })) });
    }));
    updateIterations(chosen);
  }

  /** Lines over the iterations: of the clicked module and product each recipe, else of each the worst module. */
  function updateIterations(chosen) {
    const iteration = fieldOf("iteration");
    at("recipe-iterations").hidden = iteration.values.length < 2;
    if (at("recipe-iterations").hidden) return;
    const { cell } = state;
    const metric = METRICS[state.metric];
    const some = chosen.filter((row) => rows.recipe[row] !== recipes.recorded && (cell === null || (rows.product[row] === cell.product && isInLine(row))));
    at("recipe-iterations-title").textContent = cell === null ? `${metric.head} over the iterations: of each the worst product` : `${metric.head} over the iterations: ${cell.word}, ${products[cell.product]}`;
    if (some.length === 0) {
      themes.say(at("recipe-iterations-chart"), "No product that was computed again passes the filters.");
      return;
    }
    const traces = Array.from(grouped(some, (row) => rows.recipe[row])).sort(([one], [other]) => one - other).map(([recipe, members]) => {
      const points = Array.from(grouped(members, (row) => codeOf("iteration", row))).sort(([one], [other]) => one - other);
      const values = points.map(([, group]) => worstOf(metric, Array.from(grouped(group, (row) => `${rows.product[row]} ${moduleWords[row]}`).values(), (one) => metric.of(added(one)))));
      return {
        x: points.map(([code]) => iteration.values[code]), y: values.map((value) => (Number.isFinite(value) ? value : null)), name: label(names[recipe]),
        text: values.map((value, index) => `${label(names[recipe])}<br>iteration ${iteration.values[points[index][0]]}<br>${metric.head} ${label(shown(metric, value))}`),
        hovertemplate: "%{text}<extra></extra>", line: { color: themes.colorOf(recipe), dash: themes.dashOf(recipe) }, marker: { color: themes.colorOf(recipe) },
      };
    });
    themes.draw(at("recipe-iterations-chart"), "lines", traces, {
      height: 340, xaxis: { title: { text: "iteration" }, zeroline: false, tickformat: "d" },
      yaxis: { title: { text: metric.head + (metric.unit ? `, ${metric.unit}` : "") }, type: metric.isLog ? "log" : "linear", exponentformat: "power", zeroline: false },
    });
  }

  function openCall(event) {
    const line = event.target.closest("tr[data-row]");
    if (line === null) return;
    const row = Number(line.dataset.row);
    selection.focus(recordsOf(rows.call[row]), `${moduleWords[row]}, iteration ${wordOf("iteration", row)}, rank ${wordOf("rank", row)}: what its ${products[rows.product[row]]} is computed from`);
    at("drill").scrollIntoView({ block: "start" });
  }

  function update() {
    draw(selected());
  }

  function draw(chosen) {
    updateMap(chosen);
    updateCalls(chosen);
  }

  function choose(changes, drawn = draw) {
    Object.assign(state, changes);
    drawn(selected());
    selection.chose();
  }

  /** What differs from the part as the page opens; of a cell product, recipe and row. */
  function written() {
    const { cell } = state;
    const pairs = ["metric", "down"].filter((key) => state[key] !== start[key]).map((key) => [`recipes.${key}`, state[key]]);
    if (state.isWorst) pairs.push(["recipes.worst", "true"]);
    if (cell !== null) pairs.push(["recipes.product", products[cell.product]], ["recipes.recipe", names[cell.recipe]], ["recipes.row", cell.word]);
    return pairs;
  }

  function read(pairs) {
    const word = (key) => pairs.get(`recipes.${key}`);
    const down = Array.from(at("recipe-down").options, (one) => one.value).includes(word("down")) ? word("down") : start.down;
    Object.assign(state, start, { metric: word("metric") in METRICS ? word("metric") : start.metric, down, isWorst: word("worst") === "true" });
    const cell = { product: products.indexOf(word("product")), recipe: names.indexOf(word("recipe")), word: word("row"), down };
    if (cell.product >= 0 && cell.recipe >= 0) state.cell = cell;
    updateMenus();
  }

  function updateMenus() {
    at("recipe-metric").value = state.metric;
    at("recipe-down").value = state.down;
    at("recipe-worst").checked = state.isWorst;
  }

  for (const [name, metric] of Object.entries(METRICS)) at("recipe-metric").append(element("option", { value: name, text: metric.head }));
  for (const name of ["module", "layer_idx"]) at("recipe-down").append(element("option", { value: name, text: page.overview.nameOf(name) }));
  state.down = new Set(moduleWords).size <= MAX_ROWS_OF_MODULES ? "module" : "layer_idx";
  const start = { ...state };
  updateMenus();
  at("recipe-metric").addEventListener("change", (event) => choose({ metric: event.target.value }));
  at("recipe-down").addEventListener("change", (event) => choose({ down: event.target.value, cell: null }));
  at("recipe-worst").addEventListener("change", (event) => choose({ isWorst: event.target.checked }));
  at("recipe-calls-clear").addEventListener("click", () => choose({ cell: null }, updateCalls));
  at("recipe-calls").addEventListener("click", openCall);
  at("recipe-calls").addEventListener("keydown", (event) => {
    if (event.key === "Enter") openCall(event);
  });

  selection.keep({ written, read });
  page.recipePanel = { update };
})();
