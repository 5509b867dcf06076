// Draws again what a choice changes.
await (async function () {
  "use strict";
  const page = window.ranktape;
  const { selection, themes, element } = page;
  const at = (id) => document.getElementById(id);

  const MENUS = [["metric", "metric"], ["across", "across"], ["down", "down"], ["color-by", "colorBy"], ["of-kind", "ofKind"], ["peers-of", "peersOf"]];

  function fillMenus() {
    for (const metric of page.metrics.values()) at("metric").append(element("option", { value: metric.name, text: metric.head }));
    const differs = (name) => page.fields.get(name).values.length > 1;
    const named = (name) => element("option", { value: name, text: page.overview.nameOf(name) });
    at("down").append(...["layer_idx", "module", "kind"].map(named));
    at("across").append(...["source", "rank", "iteration"].filter((name) => page.fields.has(name)).map(named));
    if (page.samples.count > 0) at("across").append(element("option", { value: "sample", text: "sample" }));
    at("across").append(...["kind", "microbatch", "quant_type", "phase", "component"].filter((name) => name === "kind" || differs(name)).map(named));
    const kind = page.fields.get("kind");
    at("of-kind").append(...kind.values.map((_, code) => element("option", { value: page.word(kind, code), text: page.word(kind, code) })));
    at("color-by").append(
      ...["source", "kind", "operation", "layer_type", "quant_type", "phase", "component", "tensor_name", "dtype", "rank"]
        .filter((name) => name === "kind" || (page.fields.has(name) && differs(name)))
        .map(named)
    );
    for (const [id, key] of MENUS) {
      at(id).addEventListener("change", (event) => selection.choose({ [key]: event.target.value }));
    }
    at("against-peers").addEventListener("change", (event) => selection.choose({ againstPeers: event.target.checked }));
  }

  function listenToFindings() {
    for (const link of document.querySelectorAll("[data-finding]")) {
      link.addEventListener("click", (event) => {
        event.preventDefault();
        selection.openFinding(Number(link.dataset.finding));
        at("drill").scrollIntoView({ block: "start" });
      });
    }
    at("drill-clear").addEventListener("click", () => selection.focus(null));
    at("distribution-log").addEventListener("change", () => page.drill.update());
  }

  function updateSwitch() {
    at("theme").textContent = themes.isDark() ? "Light" : "Dark";
    at("theme").setAttribute("aria-label", `show the page ${themes.isDark() ? "light" : "dark"}`);
  }

  function listenToThemes() {
    at("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = themes.isDark() ? "light" : "dark";
      updateSwitch();
      themes.redraw();
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      updateSwitch();
      themes.redraw();
    });
    window.addEventListener("beforeprint", () => themes.print(true));
    window.addEventListener("afterprint", () => themes.print(false));
    at("print").addEventListener("click", () => window.print());
  }

  function updateMenus() {
    for (const [id, key] of MENUS) at(id).value = selection.state[key];
    at("against-peers").checked = selection.state.againstPeers;
    at("against-peers").disabled = !selection.metric().isMagnitude;
    at("peers-of").disabled = at("against-peers").disabled || !selection.state.againstPeers || selection.state.across === "sample";
  }

  function update(what) {
    if (what === "panel") return;
    updateMenus();
    if (what !== "focus") {
      page.overview.update();
      page.panels.update();
    }
    if (what === "metric") {
      page.drill.updateSamples();
      page.peers.updatePeers();
      return;
    }
    if (what !== "focus") page.recipePanel.update();
    page.filters.update();
    page.modules.update();
    page.drill.update();
    page.peers.update();
    page.tables.update();
  }

  fillMenus();
  listenToFindings();
  listenToThemes();
  updateSwitch();
  page.address.restore();
  updateMenus();
  // The overview is seen first, while the rest is drawn.
  page.overview.update();
  page.filters.update();
  selection.onChange(update);
  for (const draw of [page.modules.draw, page.drill.update, page.peers.update, page.tables.update, page.panels.update, page.recipePanel.update]) {
    await new Promise((resolve) => setTimeout(resolve));
    draw();
  }
  page.address.scroll();
  document.documentElement.dataset.ready = "yes";
})();
