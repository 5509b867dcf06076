// Lets heat maps be read and opened from the keyboard: arrow keys go from cell to cell, Enter opens one.
(function () {
  "use strict";
  const page = window.ranktape;
  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const spoken = page.element("p", { class: "spoken", role: "status" });
  document.body.append(spoken);

  /** What a hover says, as words. */
  function wordsOf(markup) {
    return markup.replace(/<br>/g, ". ").replace(/<[^>]*>/g, "").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }

  /** Whether the first row is at the top. */
  const isTopDown = (place) => place._fullLayout.yaxis.range[0] > place._fullLayout.yaxis.range[1];

  /** Open cells of a heat map by a click or by Enter; the cell is given as the place of its column and its row. */
  function listen(place, open) {
    if (place.dataset.listens) return;
    place.dataset.listens = "yes";
    place.tabIndex = 0;
    place.setAttribute("role", "application");
    place.setAttribute("aria-roledescription", "heat map: arrow keys go from cell to cell, Enter opens one");
    let at = null;

    const textOf = ([row, column]) => (place.data[0].customdata ?? place.data[0].text)[row]?.[column];

    /** The next cell in a direction that says something. */
    function next(from, [down, right]) {
      const step = isTopDown(place) ? down : -down;
      let cell = [from[0] + step, from[1] + right];
      while (textOf(cell) === "") cell = [cell[0] + step, cell[1] + right];
      return textOf(cell) === undefined ? from : cell;
    }

    function show() {
      const [x, y] = [place.data[0].x[at[1]], place.data[0].y[at[0]]];
      const color = page.themes.colors[1];
      Plotly.relayout(place, { shapes: [{ type: "rect", x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color, width: 3 } }] });
      Plotly.Fx.hover(place, { xval: x, yval: y });
      spoken.textContent = wordsOf(textOf(at));
    }

    place.on("plotly_click", (event) => open(event.points[0]));
    place.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && at !== null) {
        open({ x: place.data[0].x[at[1]], y: place.data[0].y[at[0]] });
        return;
      }
      if (!(event.key in STEPS)) return;
      event.preventDefault();
      const top = isTopDown(place) ? 0 : place.data[0].y.length - 1;
      // After a change of the selection the cell may be gone.
      at = at === null || textOf(at) === undefined ? [top, 0] : next(at, STEPS[event.key]);
      show();
    });
    place.addEventListener("blur", () => {
      at = null;
      if (place.layout?.shapes?.length > 0) Plotly.relayout(place, { shapes: [] });
      Plotly.Fx.unhover(place);
    });
  }

  page.keyboard = { listen };
})();
