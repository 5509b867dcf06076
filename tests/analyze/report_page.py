"""A report in headless Chromium, and the run with planted faults that it is of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.analyze.faulty_runs import Array, Place

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

LAPTOP = (1280, 800)
"""The first screen, in CSS pixels."""

SCALED, OUTLYING, VANISHING, FLIPPED = (0, 1), (3, 2), (2, None), (1, 3)
"""Layer and rank of the planted faults."""

HOSTILE = ("<script>window.hurt=1</script>", '"><img src=x onerror=window.hurt=2>', "<a href='javascript:hurt=3'>x</a>")
"""What a stranger calls modules."""


def fault(place: Place, tensor: Array) -> Array:
    """One rank's weight times 2^12, one sample's outlier, one layer's gradient that underflows, one bit of a copy."""
    iteration, rank, layer, name = place
    changed = tensor.copy()
    if (layer, rank) == SCALED and name == "weight":
        changed = (changed.astype(np.float64) * 2.0**12).astype(tensor.dtype)
    if (layer, rank, iteration) == (*OUTLYING, 10) and name == "input":
        changed[4, 2, 7] = 3000.0
    if layer == VANISHING[0] and name == "grad_output":
        changed = (changed.astype(np.float64) * 2.0**-117).astype(tensor.dtype)
    if (layer, rank, iteration) == (*FLIPPED, 20) and name == "weight":
        changed.view(np.uint16)[3, 4] ^= 1
    return changed


class Page:
    """A report in the browser."""

    def __init__(self, browser: Chrome, path: Path) -> None:
        self.browser = browser
        self.path = path

    def open(self) -> None:
        """Open it from disk, at the size of a laptop; what was logged before is forgotten."""
        self.resize(*LAPTOP)
        self.browser.get_log("browser")  # type: ignore[no-untyped-call]
        self.browser.get(f"file://{self.path}")
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def wait(self, condition: str, *arguments: Any) -> None:
        """Until something holds in the page."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, 30, 0.05).until(lambda _: self.ask(f"return {condition}", *arguments))

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def log(self) -> list[str]:
        """What went wrong in the page since it was asked last."""
        return [entry["message"] for entry in self.browser.get_log("browser")]  # type: ignore[no-untyped-call]

    def text(self, selector: str) -> str:
        found: str = self.ask("return document.querySelector(arguments[0]).innerText", selector)
        return found

    def click(self, selector: str) -> None:
        self.ask("document.querySelector(arguments[0]).click()", selector)

    def type(self, selector: str, text: str) -> None:
        self.ask(
            "const box = document.querySelector(arguments[0]); box.value = arguments[1];"
            "box.dispatchEvent(new Event(box.tagName === 'SELECT' ? 'change' : 'input'));",
            selector,
            text,
        )

    def rows(self) -> list[int]:
        """The records in the table, by their number."""
        found: list[int] = self.ask(
            "return Array.from(document.querySelectorAll('#table tbody tr'), (row) => Number(row.dataset.record))"
        )
        return found

    def cell(self, row: int, column: int, *, chart: str = "overview-chart") -> None:
        """Click the middle of a cell of a heat map with the mouse."""
        from selenium.webdriver import ActionChains

        x, y = self.ask(
            """const chart = document.getElementById(arguments[2]);
            chart.scrollIntoView({ block: "center" });
            const box = chart.getBoundingClientRect();
            const { xaxis: x, yaxis: y } = chart._fullLayout;
            return [box.left + x._offset + x.l2p(arguments[1]), box.top + y._offset + y.l2p(arguments[0])];""",
            row,
            column,
            chart,
        )
        chain = ActionChains(self.browser)
        chain.w3c_actions.pointer_action.move_to_location(int(x), int(y))  # type: ignore[no-untyped-call]
        chain.w3c_actions.pointer_action.click()
        chain.perform()
