// Shows what is in the records that were clicked: how large their values are, and what each format makes of them.
(function () {
  "use strict";
  const page = window.ranktape;
  const { selection, themes, label, element } = page;
  const LOSSLESS = 32767;
  const UNKNOWN = -32768;
  const at = (id) => document.getElementById(id);

  /** The groups of records that have one histogram, and how many of their records were not asked for. */
  function bundlesOf(records) {
    const { of, count } = page.details;
    const bundles = new Set();
    for (const record of records) bundles.add(of[record]);
    if (count === page.count) return { bundles, num: records.length };
    let num = 0;
    for (let record = 0; record < page.count; record += 1) num += bundles.has(of[record]);
    return { bundles, num };
  }

  function binadesOf(bundles) {
    const { first, starts, counts } = page.details;
    const binades = new Map();
    for (const bundle of bundles) {
      for (let place = starts[bundle]; place < starts[bundle + 1]; place += 1) {
        const exponent = first[bundle] + place - starts[bundle];
        binades.set(exponent, (binades.get(exponent) ?? 0) + counts[place]);
      }
    }
    return new Map(Array.from(binades).sort(([one], [other]) => one - other));
  }

  function drawDistribution(binades) {
    const place = at("distribution-chart");
    if (binades.size === 0) {
      themes.say(place, "Of these records no finite value other than zero is known.");
      return;
    }
    const exponents = Array.from(binades.keys());
    const low = exponents[0];
    const high = exponents[exponents.length - 1];
    const total = Array.from(binades.values()).reduce((sum, one) => sum + one, 0);
    const { bands } = page.raw;
    const names = bands.map((band) => band.name);
    const text = exponents.map((one) => `2<sup>${one}</sup> to 2<sup>${one + 1}</sup><br>${label(page.number(binades.get(one)))} values, ${page.percent(binades.get(one) / total)}`);
    themes.draw(
      place, "distribution",
      [
        { x: exponents.map((one) => one + 0.5), y: Array.from(binades.values()), text, textposition: "none", hovertemplate: "%{text}<extra></extra>" },
        {
          y: names, base: bands.map((band) => band.subnormal), x: bands.map((band) => band.normal - band.subnormal),
          hovertemplate: "%{y}: subnormal from 2<sup>%{base}</sup><extra></extra>",
        },
        {
          y: names, base: bands.map((band) => band.normal), x: bands.map((band) => band.largest + 1 - band.normal),
          hovertemplate: "%{y}: normal from 2<sup>%{base}</sup><extra></extra>",
        },
      ],
      {
        height: 420,
        xaxis: { range: [Math.min(low, -26) - 1, Math.max(high, 17) + 1], tickformat: "d" },
        yaxis: {
          type: at("distribution-log").checked ? "log" : "linear", exponentformat: "power",
          dtick: at("distribution-log").checked ? Math.ceil(Math.log10(total) / 5) || 1 : null,
        },
      }
    );
  }

  const PARTS = ["beyond the largest", "normal", "subnormal", "too small"];

  /** How much of the values lies in which part of a format's range, once its exponents are moved by a scale. */
  function partsOf(binades, band, shift) {
    const sums = [0, 0, 0, 0];
    for (const [exponent, count] of binades) {
      const scaled = exponent - shift;
      const part = scaled > band.largest ? 0 : scaled >= band.normal ? 1 : scaled >= band.subnormal ? 2 : 3;
      sums[part] += count;
    }
    const total = sums.reduce((sum, one) => sum + one, 0);
    return sums.map((sum) => sum / total);
  }

  function drawOccupancy(binades) {
    const place = at("occupancy-chart");
    if (binades.size === 0) {
      themes.say(place, "Of these records no finite value other than zero is known.");
      return;
    }
    const high = Math.max(...binades.keys());
    const rows = page.raw.bands.flatMap((band) => [
      { name: `${band.name}, as it is`, parts: partsOf(binades, band, 0) },
      { name: `${band.name}, scaled to fit`, parts: partsOf(binades, band, high - band.largest) },
    ]);
    const colors = [themes.colors[1], themes.colors[2], themes.colors[5], themes.colors[6]];
    const shapes = ["x", "", "/", "."];
    themes.draw(
      place, "occupancy",
      PARTS.map((name, part) => ({
        name, y: rows.map((row) => row.name), x: rows.map((row) => row.parts[part]),
        text: rows.map((row) => `${row.name}<br>${name}: ${page.percent(row.parts[part])}`), textposition: "none",
        hovertemplate: "%{text}<extra></extra>",
        marker: { color: colors[part], pattern: { shape: shapes[part], size: 5, solidity: 0.25 } },
      })),
      { height: 420 }
    );
  }

  /** The ratio of all records together at each offset: signals and errors are added up. */
  function curveOf(sweep, bundles) {
    const { offsets } = page.details;
    const known = Array.from(bundles).filter((bundle) => !Number.isNaN(sweep.log2Signal[bundle]));
    if (known.length === 0) return null;
    const largest = known.reduce((best, bundle) => Math.max(best, sweep.log2Signal[bundle]), -Infinity);
    const signals = known.map((bundle) => 2 ** (sweep.log2Signal[bundle] - largest));
    const signal = signals.reduce((sum, one) => sum + one, 0);
    return offsets.map((_, offset) => {
      let noise = 0;
      known.forEach((bundle, index) => {
        const ratio = sweep.sqnr[bundle * offsets.length + offset];
        if (ratio === UNKNOWN) noise = NaN;
        else if (ratio !== LOSSLESS) noise += signals[index] * 10 ** (-ratio / 1000);
      });
      return 10 * Math.log10(signal / noise);
    });
  }

  function drawSweep(bundles) {
    const place = at("sweep-chart");
    const { offsets, sweeps } = page.details;
    const curves = sweeps.map((sweep) => ({ ...sweep, curve: curveOf(sweep, bundles) })).filter((one) => one.curve !== null);
    if (curves.length === 0) {
      themes.say(place, "No format was tried on these records: their values are not known, are all zero, or are whole numbers.");
      return;
    }
    themes.draw(
      place, "sweep",
      curves.map((one, index) => ({
        x: offsets, y: one.curve.map((value) => (Number.isFinite(value) ? value : null)),
        name: `${label(one.name)} (${one.is_block ? "scales of blocks" : "one scale"})`,
        text: one.curve.map((value, place_) => `${label(one.name)}<br>2<sup>${offsets[place_]}</sup> times the usual scale<br>SQNR ${label(page.number(value))} dB`),
        hovertemplate: "%{text}<extra></extra>",
        line: { color: themes.colorOf(index), dash: themes.dashes[index % themes.dashes.length] },
        marker: { color: themes.colorOf(index) },
      })),
      { height: 420 }
    );
  }

  /** The samples of the one record that is looked at. */
  function updateSamples() {
    const { focus } = selection.state;
    const record = focus !== null && focus.records.length === 1 ? focus.records[0] : null;
    const card = at("samples");
    const { placeOf, starts, length, metrics } = page.samples;
    const place = record === null ? undefined : placeOf.get(record);
    card.hidden = place === undefined;
    if (card.hidden) return;
    const chosen = metrics.has(selection.state.metric) ? selection.metric() : page.metrics.get("absmax");
    const values = Array.from(metrics.get(chosen.name).subarray(starts[place], starts[place] + length[place]));
    at("samples-title").textContent = `Samples of this record: ${chosen.head}`;
    themes.draw(
      at("samples-chart"), "bars",
      [{
        x: values.map((_, sample) => sample), y: values.map((value) => (Number.isFinite(value) ? value : null)), showlegend: false,
        text: values.map((value, sample) => `sample ${sample}<br>${label(page.shown(chosen, value))}`), textposition: "none",
        hovertemplate: "%{text}<extra></extra>", marker: { color: themes.colors[0] },
      }],
      { height: 420, showlegend: false, xaxis: { title: { text: "sample" }, tickformat: "d" }, yaxis: { title: { text: label(chosen.head) }, rangemode: "tozero", exponentformat: "power" } }
    );
  }

  function quoted(text) {
    return /^[\w./:-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`;
  }

  function commandOf(record) {
    const options = ["iteration", "rank", "module", "operation", "phase", "tensor_name", "microbatch", "call"]
      .map((name) => [name, page.fields.get(name)])
      .filter(([, field]) => field.values[field.codes[record]] !== "" && field.values[field.codes[record]] !== null)
      .map(([name, field]) => `--${name.replace(/_/g, "-")} ${quoted(String(field.values[field.codes[record]]))}`);
    const source = page.fields.get("source");
    const url = source ? page.raw.urls[source.values[source.codes[record]]] : page.raw.url;
    return ["ranktape analyze distribution", quoted(url || "RUN"), ...options].join(" ");
  }

  function showRecord(record) {
    const pairs = Array.from(page.fields.values())
      .filter((field) => field.name !== "kind")
      .map((field) => [page.overview.nameOf(field.name), page.word(field, field.codes[record])]);
    pairs.push(["elements", page.number(page.elements[record])], ["size", page.nbytes(page.nbytesOf[record])]);
    for (const metric of page.metrics.values()) pairs.push([metric.head, page.shown(metric, page.folding.valueOf(metric, record))]);
    at("record-fields").replaceChildren(
      ...pairs.map(([name, value]) => element("div", { children: [element("dt", { text: name }), element("dd", { text: value })] }))
    );
    at("record-command").textContent = commandOf(record);
  }

  function update() {
    const records = selection.focused();
    const { focus } = selection.state;
    const total = page.number(records.length);
    at("drill-title").textContent = focus === null ? `All ${total} selected records` : focus.name;
    at("drill-count").textContent = focus === null ? "" : `${total} record${records.length === 1 ? "" : "s"}`;
    at("drill-clear").hidden = focus === null;
    const isSingle = focus !== null && records.length === 1;
    at("record").hidden = !isSingle;
    if (isSingle) showRecord(records[0]);
    updateSamples();
    const { bundles, num } = bundlesOf(records);
    at("drill-note").textContent =
      num === records.length ? "" : `The charts below are of ${page.number(num)} records: there are too many for a histogram each, and those that agree in ${page.details.together} share one.`;
    const binades = binadesOf(bundles);
    drawDistribution(binades);
    drawOccupancy(binades);
    drawSweep(bundles);
  }

  page.drill = { update, updateSamples, binadesOf };
})();
