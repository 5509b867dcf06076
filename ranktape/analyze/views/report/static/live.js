// Asks the server how far the run is, and shows the newer page when there is one.
(function () {
  "use strict";
  const bar = document.getElementById("live");
  const [text, follow, show] = ["live-text", "live-follow", "live-show"].map((id) => document.getElementById(id));
  const key = "ranktape-follow";

  // A choice outlives the page that is shown next; a browser may keep nothing.
  function remembered() {
    try {
      return window.sessionStorage.getItem(key) !== "no";
    } catch {
      return true;
    }
  }

  function remember() {
    try {
      window.sessionStorage.setItem(key, follow.checked ? "yes" : "no");
    } catch {
      // It holds for this page alone.
    }
  }

  function say(words) {
    if (text.textContent !== words) text.textContent = words;
  }

  async function look() {
    try {
      const answer = await fetch("state", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const state = await answer.json();
      say(state.text);
      const isNew = state.version !== Number(bar.dataset.version);
      show.hidden = !isNew;
      if (isNew && follow.checked) {
        window.location.reload();
        return;
      }
    } catch {
      say("The server does not answer: this page stays as it is.");
    }
    window.setTimeout(look, Number(bar.dataset.milliseconds));
  }

  follow.checked = remembered();
  follow.addEventListener("change", remember);
  show.addEventListener("click", () => window.location.reload());
  window.setTimeout(look, Number(bar.dataset.milliseconds));
})();
