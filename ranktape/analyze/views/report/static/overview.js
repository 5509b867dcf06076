// Shows where in the model a metric is unusual: one cell for each layer and rank, iteration, sample or tensor.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection, folding, themes, label } = page;
  const MAX_GAPPED_CELLS = 3000;
  const MAX_TICKS = 28;
  const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
  const MIN_BINADES = 3;
  const MAX_BINADES = 16;
  const FAR = 4;
  const NAMES = { layer_idx: "layer", kind: "tensor", tensor_name: "tensor name", quant_type: "quant type" };
  const place = document.getElementById("overview-chart");
  let shownCells = null;

  const nameOf = (field) => NAMES[field] ?? field.replace(/_/g, " ");

  /** Every value that is shown, with its row, its column and its record: samples are values of their own. */
  function* valuesOf(metric, isDeviation) {
    const { down, across } = selection.state;
    const rows = page.fields.get(down).codes;
    const chosen = ofKind();
    if (across !== "sample") {
      const columns = page.fields.get(across).codes;
      const deviation = isDeviation ? folding.deviation(metric, selection.state.peersOf) : null;
      for (const record of selection.records()) {
        if (!chosen(record)) continue;
        yield [rows[record], columns[record], record, deviation ? deviation[record] : NaN];
      }
      return;
    }
    const { placeOf, starts, length, metrics } = page.samples;
    const column = metrics.get(metric.name);
    for (const record of selection.records()) {
      const at = placeOf.get(record);
      if (at === undefined || !chosen(record)) continue;
      const values = column.subarray(starts[at], starts[at] + length[at]);
      const middle = folding.median(values.filter((value) => value > 0));
      for (let sample = 0; sample < values.length; sample += 1) {
        yield [rows[record], sample, record, isDeviation ? Math.log2(values[sample] / middle) : values[sample]];
      }
    }
  }

  /** Whether a record is of the kind of tensors that was chosen. */
  function ofKind() {
    const kind = page.fields.get("kind");
    const codes = new Set(page.codesOf(kind, [selection.state.ofKind]));
    return selection.state.ofKind === "" ? () => true : (record) => codes.has(kind.codes[record]);
  }

  /** Why a cell has no place in the colours of a metric, as `themes.marked` has it; null where it has one. */
  function markOf(cell, metric, value, isDeviation) {
    if (cell === undefined) return "missing";
    const counts = (name) => cell.records.some((record) => page.metrics.get(name).column[record] > 0);
    // A count of NaN, Inf or zeros says itself what is there; of samples a record alone does not tell which it is.
    const isTold = metric.merge === "ratio" || (selection.state.across === "sample" && value !== null);
    // Against its own type nothing but infinities overflows, and those of masks do not.
    if (!isTold && counts("overflow.nan.ratio")) return "nan";
    if (!isTold && counts("overflow.ratio")) return "inf";
    if (value !== null) return null;
    const isZero = isDeviation && cell.records.every((record) => metric.column[record] === 0);
    return isZero ? "zero" : "missing";
  }

  function cellsOf(metric, isDeviation) {
    const cells = new Map();
    const rows = new Set();
    const columns = new Set();
    for (const [row, column, record, value] of valuesOf(metric, isDeviation)) {
      rows.add(row);
      columns.add(column);
      const key = row * 1e7 + column;
      if (!cells.has(key)) cells.set(key, { records: [], values: [] });
      const cell = cells.get(key);
      cell.records.push(record);
      cell.values.push(value);
    }
    const ascending = (one, other) => one - other;
    return { cells, rows: Array.from(rows).sort(ascending), columns: Array.from(columns).sort(ascending) };
  }

  function valueOfCell(cell, metric, isDeviation) {
    if (isDeviation) return folding.farthest(cell.values.filter(Number.isFinite));
    if (selection.state.across !== "sample") return folding.fold(metric, cell.records);
    return folding.merged(cell.values, metric.merge === "ratio" ? "largest" : metric.merge);
  }

  function powerTicks(low, high) {
    const step = Math.max(1, Math.ceil((high - low) / 8));
    const ticks = [];
    // Multiples, so that 1, which is no difference, is among them.
    for (let power = Math.ceil(low / step) * step; power <= high; power += step) ticks.push(power);
    return ticks.length > 1 ? ticks : high - low > 0.05 ? [low, high] : [high];
  }

  /** How far half of the cells are from their peers, in binades. */
  const usualOf = (known) => folding.median(known.map(Math.abs)) || 0;

  /** Colours that are the middle one up to a part of the way to either end, and change from there on. */
  function whiteUpTo(part) {
    const middle = themes.diverging.length >> 1;
    return themes.diverging.flatMap(([place, color], index) => {
      const end = place < 0.5 ? place * (1 - part) : 1 - (1 - place) * (1 - part);
      return index === middle ? [[(1 - part) / 2, color], [(1 + part) / 2, color]] : [[end, color]];
    });
  }

  /** Numbers that colours are given to, and what the bar beside them says. */
  function colored(values, metric, isDeviation) {
    const known = values.flat().filter((value) => Number.isFinite(value));
    if (isDeviation) {
      const sizes = known.map(Math.abs);
      const usual = usualOf(known);
      const farthest = sizes.reduce((best, one) => Math.max(best, one), Math.max(MIN_BINADES, FAR * usual));
      const limit = Math.max(Math.min(MAX_BINADES, farthest), FAR * usual);
      const ticks = powerTicks(-limit, limit).filter((power) => Number.isInteger(power));
      return {
        z: values, zmin: -limit, zmax: limit, colorscale: whiteUpTo(usual / limit),
        colorbar: { tickvals: ticks, ticktext: ticks.map((power) => (power < 0 ? `1/${page.number(2 ** -power)} ×` : `${page.number(2 ** power)} ×`)) },
      };
    }
    const isLog = metric.isMagnitude || metric.merge === "ratio";
    const positive = known.filter((value) => value > 0);
    if (!isLog || positive.length === 0) {
      // plotly leaves infinities out, and with them the click: a lossless format has the colour of the best one.
      const ends = known.length > 0 ? [known.reduce((best, one) => Math.min(best, one)), known.reduce((best, one) => Math.max(best, one))] : [-1, 1];
      const z = values.map((row) => row.map((value) => (value === Infinity ? ends[1] : value === -Infinity ? ends[0] : value)));
      return { z, zmin: null, zmax: null, colorbar: { ticksuffix: metric.unit ? ` ${metric.unit}` : "" } };
    }
    const low = Math.log10(positive.reduce((best, one) => Math.min(best, one)));
    const hasZero = known.length > positive.length;
    const high = Math.max(Math.log10(positive.reduce((best, one) => Math.max(best, one))), low + (hasZero ? 0 : 0.3));
    const floor = hasZero ? low - Math.max(0.5, (high - low) / 5) : low;
    const z = values.map((row) => row.map((value) => (value === Infinity ? high : value > 0 ? Math.log10(value) : value === 0 ? floor : null)));
    const ticks = powerTicks(low, high);
    const texts = ticks.map((power) => page.shown(metric, Number((10 ** power).toPrecision(2))));
    return {
      z, zmin: floor, zmax: high,
      colorbar: {
        tickvals: hasZero ? [floor, ...ticks] : ticks, ticktext: hasZero ? ["0", ...texts] : texts,
      },
    };
  }

  /** What a hover says of each cell; names are made harmless once, for there may be 100,000 cells. */
  function hoverTexts(rowWords, columnWords, cellAt, values, marks, metric, isDeviation) {
    const { down, across } = selection.state;
    const rowLabels = rowWords.map((word) => `<b>${nameOf(down)} ${label(word)}, ${nameOf(across)} `);
    const columnLabels = columnWords.map((word) => `${label(word)}</b><br>${label(metric.head)}: `);
    const said = isDeviation
      ? (value) => (value === null ? "–" : `${page.number(2 ** value)} times the median of its peers`)
      : (value) => label(page.shown(metric, value));
    return values.map((row, r) =>
      row.map((value, c) => {
        const cell = cellAt(r, c);
        if (cell === undefined) return "";
        const special = { nan: ", with NaN", inf: ", with Inf", zero: " (0)" }[marks[r][c]] ?? "";
        return `${rowLabels[r]}${columnLabels[c]}${said(value)}${special}<br>records: ${cell.records.length}, click to open them`;
      })
    );
  }

  function caption(metric, isDeviation, values) {
    const merge = { ratio: "all of a cell together", largest: "the largest of a cell", smallest: "the smallest of a cell", median: "the median of a cell" };
    if (!isDeviation) return `${metric.head}: ${merge[metric.merge]}. Click a cell to open its records.`;
    const places = `the same tensor in other ranks and iterations${page.fields.has("source") ? ", and in other sources" : ""} (in other layers, where there are none)`;
    const peers = selection.state.across === "sample" ? "the other samples of its batch" : selection.state.peersOf === "layers" ? "the like tensors of all layers" : places;
    const usual = page.number(Number((2 ** usualOf(values.flat().filter((value) => Number.isFinite(value)))).toPrecision(2)));
    return `How far ${metric.head} is from that of ${peers}; of a cell the farthest. White is usual: up to ${usual} ×, as in half of the cells. Click a cell to open its records.`;
  }

  function update() {
    const metric = selection.metric();
    const { down, across, againstPeers } = selection.state;
    const isSample = across === "sample";
    const isDeviation = againstPeers && metric.isMagnitude;
    document.getElementById("overview-title").textContent = `Overview: ${nameOf(down)} by ${nameOf(across)}`;
    if (isSample && !page.samples.metrics.has(metric.name)) {
      const known = Array.from(page.samples.metrics.keys(), (name) => page.metrics.get(name).head).join(", ");
      themes.say(place, `Of single samples ${metric.head} is not known: choose ${known}.`);
      return;
    }
    const { cells, rows, columns } = cellsOf(metric, isDeviation);
    if (rows.length === 0) {
      themes.say(place, isSample ? "None of these records has samples." : "No record passes the filters.");
      return;
    }
    const rowField = page.fields.get(down);
    const columnField = page.fields.get(across);
    const rowWords = rows.map((code) => page.word(rowField, code));
    const columnWords = columns.map((code) => (isSample ? String(code) : page.word(columnField, code)));
    const at = (row, column) => cells.get(row * 1e7 + column);
    const known = rows.map((row) =>
      columns.map((column) => {
        const cell = at(row, column);
        const value = cell === undefined ? NaN : valueOfCell(cell, metric, isDeviation);
        return Number.isNaN(value) ? null : value;
      })
    );
    const marks = rows.map((row, r) => columns.map((column, c) => markOf(at(row, column), metric, known[r][c], isDeviation)));
    const values = known.map((row, r) => row.map((value, c) => (marks[r][c] === null ? value : null)));
    document.getElementById("overview-caption").textContent = caption(metric, isDeviation, values);
    const text = hoverTexts(rowWords, columnWords, (r, c) => at(rows[r], columns[c]), known, marks, metric, isDeviation);
    const gap = rows.length * columns.length <= MAX_GAPPED_CELLS ? 1 : 0;
    shownCells = { rows, columns, rowWords, columnWords, at };
    const tickOf = (words) => ({ tickmode: "array", ...ticksOf(words) });
    const layout = { text, xgap: gap, ygap: gap, x: columns.map((_, c) => c), y: rows.map((_, r) => r) };
    const over = themes.marked(marks, document.getElementById("overview-legend"));
    themes.draw(
      place, "overview",
      [{ ...colored(values, metric, isDeviation), ...layout }, ...over.map((one) => ({ ...one, ...layout }))],
      {
        height: Math.min(680, Math.max(240, 110 + rows.length * 22)),
        xaxis: { title: { text: nameOf(across) }, type: "linear", ...tickOf(columnWords) },
        yaxis: { title: { text: nameOf(down) }, type: "linear", autorange: "reversed", ...tickOf(rowWords) },
      }
    );
    page.keyboard.listen(place, openCell);
  }

  /** As many names as fit beside one another. */
  function ticksOf(words) {
    const step = STEPS.find((one) => words.length / one <= MAX_TICKS) ?? Math.ceil(words.length / MAX_TICKS);
    const places = words.map((_, index) => index).filter((index) => index % step === 0);
    return { tickvals: places, ticktext: places.map((index) => label(words[index], 36)) };
  }

  function openCell(point) {
    const { rows, columns, rowWords, columnWords, at } = shownCells;
    const cell = at(rows[Math.round(point.y)], columns[Math.round(point.x)]);
    if (cell === undefined) return;
    const { down, across } = selection.state;
    const records = Array.from(new Set(cell.records));
    const where = [[down, rowWords[Math.round(point.y)]], [across, columnWords[Math.round(point.x)]]];
    selection.focus(records, where.map(([name, word]) => `${nameOf(name)} ${word}`).join(", "), { where });
    document.getElementById("drill").scrollIntoView({ block: "start" });
  }

  page.overview = { update, nameOf, ticksOf };
})();
