"""Does the page do in a browser what it is for: say what is wrong on its first screen, and lead to the records?

Opened from disk in headless Chromium, which reaches no network and whose log must be empty.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.views.report.page import write_report
from ranktape.storage import Records
from tests.analyze.faulty_runs import Array, Place, Sizes, faulty_run
from tests.analyze.runs import describe_tensor, store

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
        assert self.ask("return document.documentElement.dataset.ready") == "yes"

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

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


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Those of a run with four faults."""
    sizes = Sizes(num_ranks=4, num_layers=4)
    return faulty_run(tmp_path_factory.mktemp("run"), fault, sizes=sizes).select()


@pytest.fixture(scope="module")
def faulty(chromium: Chrome, records: Records, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of that run; it must have nothing in its log when all is done."""
    path = write_report(records, output=tmp_path_factory.mktemp("page") / "report.html", engine=Engine(use_cache=False))
    page = Page(chromium, path)
    page.open()
    yield page
    assert page.log() == []


@pytest.fixture
def fresh(faulty: Page) -> Page:
    """The same with nothing chosen."""
    if not faulty.browser.current_url.endswith(str(faulty.path)):
        faulty.open()
    faulty.ask(
        "const { selection } = window.ranktape; selection.focus(null); selection.clearFilters();"
        "document.querySelector('[data-tab=records]').click(); window.scrollTo(0, 0);"
    )
    faulty.type("#table-search", "")
    return faulty


def test_the_first_screen_says_what_is_wrong_and_where(fresh: Page) -> None:
    seen: list[str] = fresh.ask(
        """return Array.from(document.querySelectorAll("#findings > ol > li"))
        .filter((item) => item.getBoundingClientRect().bottom <= window.innerHeight).map((item) => item.innerText)"""
    )
    for layer, rank, word in (
        (*SCALED, "weight"),
        (*OUTLYING, "sample 4"),
        (*VANISHING, "grad_output"),
        (*FLIPPED, "bits"),
    ):
        assert any(
            f"layers.{layer}." in text and word in text and (rank is None or f"rank {rank}" in text) for text in seen
        ), f"nothing of layer {layer}, {word} in {seen}"
    assert all(re.match(r"(high|medium|low)\n", text, re.IGNORECASE) for text in seen)
    assert all("\nLook closer: ranktape analyze " in text for text in seen)
    assert re.match(r"\d+ things stand out: ", fresh.text("#headline"))
    assert "4 ranks" in fresh.text(".facts")


def test_a_finding_leads_to_its_records(fresh: Page, records: Records) -> None:
    links = fresh.ask("return Array.from(document.querySelectorAll('[data-finding]'), (link) => link.dataset.title)")
    (number,) = (place for place, title in enumerate(links) if "differs in bits" in title)
    fresh.click(f"[data-finding='{number}']")
    (found,) = fresh.rows()
    record = records[found]
    assert (record.layer_idx, record.rank, record.iteration, record.tensor_name) == (*FLIPPED, 20, "weight")
    assert fresh.text("#drill-title") == links[number]
    assert "layers.1.linear" in fresh.text("#record-fields")
    assert "--module layers.1.linear" in fresh.text("#record-command")


def test_a_cell_leads_to_its_records(fresh: Page, records: Records) -> None:
    fresh.type("#metric", "absmax")
    fresh.type("#across", "rank")
    layer, rank = SCALED
    fresh.cell(layer, rank)
    expected = [place for place, one in enumerate(records) if (one.layer_idx, one.rank) == (layer, rank)]
    assert fresh.rows() == expected
    assert fresh.text("#drill-title") == f"layer {layer}, rank {rank}"
    fresh.type("#table-search", "weight forward")
    weights = [place for place in expected if records[place].tensor_name == "weight"]
    assert fresh.rows() == weights
    # Its values are 2^12 times larger than those of the others.
    fresh.click(f"tr[data-record='{weights[0]}']")
    values = np.abs(records[weights[0]].read().astype(np.float64))
    drawn = fresh.ask(
        "const { x, y } = document.getElementById('distribution-chart').data[0]; return [Array.from(x), Array.from(y)]"
    )
    exponents, counts = np.unique(np.frexp(values[values > 0])[1] - 1, return_counts=True)
    assert drawn == [(exponents + 0.5).tolist(), counts.tolist()]
    names = fresh.ask("return document.getElementById('sweep-chart').data.map((trace) => trace.name)")
    assert [name.split(" ")[0] for name in names] == ["mxfp8_e4m3", "mxfp4_e2m1", "fp8_e4m3", "hif8"]


def test_filters_act_on_every_chart_and_table(fresh: Page, records: Records) -> None:
    fresh.click(".filter[data-field=rank] summary")
    fresh.type(".filter[data-field=rank] input[type=search]", "1-2")
    fresh.click(".filter[data-field=rank] .row button")
    fresh.click(".filter[data-field=rank] summary")
    wanted = (records.column("rank") >= 1) & (records.column("rank") <= 2)
    assert fresh.text("#selected-count") == f"{wanted.sum()} of {len(records)} records"
    assert fresh.rows() == np.flatnonzero(wanted).tolist()[:50]
    fresh.type("#across", "rank")
    assert fresh.ask("return document.getElementById('overview-chart').layout.xaxis.ticktext") == ["1", "2"]
    counts = fresh.ask("return Array.from(document.getElementById('distribution-chart').data[0].y)")
    values = [records[int(place)].read().astype(np.float64) for place in np.flatnonzero(wanted)]
    assert sum(counts) == sum(int(np.count_nonzero(array)) for array in values)
    fresh.click("#clear-filters")
    assert fresh.text("#selected-count") == f"all {len(records)} records"


def test_tables_sort_both_ways(fresh: Page, records: Records) -> None:
    fresh.click("[data-tab=stats]")
    fresh.click("th[data-column=absmax] button")
    absmax = np.array([np.abs(record.read().astype(np.float64)).max() for record in records])
    assert fresh.rows() == np.argsort(-absmax, kind="stable")[:50].tolist()
    fresh.click("th[data-column=absmax] button")
    assert fresh.rows() == np.argsort(absmax, kind="stable")[:50].tolist()
    fresh.click("#table-on")
    assert fresh.rows() == np.argsort(absmax, kind="stable")[50:100].tolist()


@pytest.mark.parametrize("across", ["iteration", "sample"])
def test_cells_are_those_of_numpy(fresh: Page, records: Records, across: str) -> None:
    fresh.type("#metric", "absmax")
    fresh.type("#across", across)
    fresh.ask("if (document.getElementById('against-peers').checked) document.getElementById('against-peers').click()")
    (drawn,) = fresh.ask("return document.getElementById('overview-chart').data.map((one) => one.z)")
    expected: dict[tuple[int, int], float] = {}
    columns = {"iteration": [0, 10, 20], "sample": list(range(6))}[across]
    for record in records:
        values = np.abs(record.read().astype(np.float64))
        if across == "sample":
            found = [] if record.sample_dim is None else list(enumerate(values.reshape(6, -1).max(axis=1)))
        else:
            found = [(getattr(record, across), values.max())]
        for column, largest in found:
            key = (record.layer_idx, column)
            expected[key] = max(expected.get(key, 0.0), float(largest))
    logs = [[np.log10(expected[layer, column]) for column in columns] for layer in range(4)]
    np.testing.assert_allclose(drawn, logs, rtol=1e-6)
    assert fresh.ask("return document.querySelectorAll('#overview-chart .heatmaplayer image').length")


def test_cells_against_peers(fresh: Page, records: Records) -> None:
    """log2 over the median of the same tensor in all ranks and iterations, and of a cell the farthest."""
    fresh.type("#metric", "absmax")
    fresh.type("#across", "rank")
    fresh.ask("if (!document.getElementById('against-peers').checked) document.getElementById('against-peers').click()")
    (drawn,) = fresh.ask("return document.getElementById('overview-chart').data.map((one) => one.z)")
    (ticks,) = fresh.ask("return document.getElementById('overview-chart').data.map((one) => one.colorbar.ticktext)")
    assert "1 \u00d7" in ticks
    absmax: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for record in records:
        largest = float(np.abs(record.read().astype(np.float64)).max())
        absmax.setdefault((record.module, record.tensor_name), []).append((record.rank, largest))
    expected = np.zeros((4, 4))
    for (module, _), values in absmax.items():
        middle = sorted(value for _, value in values)[(len(values) - 1) // 2]
        for rank, value in values:
            row, deviation = int(module.split(".")[1]), np.log2(value / middle)
            if abs(deviation) > abs(expected[row, rank]):
                expected[row, rank] = deviation
    np.testing.assert_allclose(drawn, expected, atol=1e-5)


def test_a_chart_comes_back_after_a_selection_without_one(fresh: Page, records: Records) -> None:
    """Of samples no kurtosis is known, and no record is of rank 9: a sentence says so, and clicks work after it."""
    fresh.type("#across", "sample")
    fresh.type("#metric", "kurtosis")
    assert "is not known: choose" in fresh.text("#overview-chart + .empty")
    fresh.type("#metric", "absmax")
    fresh.type("#across", "rank")
    fresh.ask("window.ranktape.selection.filter('rank', new Set([9]))")
    assert fresh.text("#overview-chart + .empty") == "No record passes the filters."
    fresh.click("#clear-filters")
    fresh.cell(2, 3)
    assert fresh.rows() == [place for place, one in enumerate(records) if (one.layer_idx, one.rank) == (2, 3)]
    assert fresh.log() == []


def test_light_and_dark(fresh: Page) -> None:
    def seen() -> list[str]:
        found: list[str] = fresh.ask(
            """return [getComputedStyle(document.body).backgroundColor,
            document.getElementById("layers-chart").layout.paper_bgcolor]"""
        )
        return found

    light = seen()
    fresh.click("#theme")
    dark = seen()
    assert light == ["rgb(243, 244, 246)", "#ffffff"]
    assert dark == ["rgb(17, 19, 24)", "#1b1e24"]
    fresh.click("#theme")
    assert seen() == light


def test_no_chart_is_wider_than_the_page(fresh: Page) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    fits = """const charts = Array.from(document.querySelectorAll(".js-plotly-plot"))
        .filter((one) => one.offsetParent !== null);
    return charts.length > 8 && document.documentElement.scrollWidth <= arguments[0]
        && charts.every((chart) => Math.abs(chart._fullLayout.width - chart.clientWidth) < 2)"""
    width = 420
    fresh.resize(width, 900)
    # plotly waits for the last of several changes of size.
    WebDriverWait(fresh.browser, 30, 0.1).until(lambda _: fresh.ask(fits, width))
    fresh.resize(*LAPTOP)


def test_it_can_be_printed(fresh: Page) -> None:
    fresh.click("#theme")  # dark: paper is white all the same
    fresh.ask(
        """window.printed = null; window.addEventListener("beforeprint", () => {
            const charts = Array.from(document.querySelectorAll(".js-plotly-plot"));
            window.printed = [charts.length, ...new Set(charts.map((chart) =>
                `${chart._fullLayout.width} ${chart.layout.paper_bgcolor}`))]; }, { once: true })"""
    )
    document = base64.b64decode(fresh.browser.print_page())
    assert document.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", document)) >= 3
    num_charts, *forms = fresh.ask("return window.printed")
    assert (num_charts > 8, forms) == (True, ["660 #ffffff"])
    assert fresh.ask("return document.getElementById('layers-chart').layout.paper_bgcolor") == "#1b1e24"
    fresh.click("#theme")


def test_names_of_strangers_do_nothing(chromium: Chrome, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = [
        describe_tensor(
            (rng.standard_normal((2, 64)) * (1e4 if index == 1 and rank == 1 else 1)).astype(ml_dtypes.bfloat16),
            module=f"{name}.{layer}",
            layer_idx=layer,
            layer_type=name[:60],
            tensor_name=name[:60],
            component=name[:60],
            rank=rank,
            sample_dim=0,
        )
        for index, name in enumerate(HOSTILE)
        for layer in range(2)
        for rank in range(3)
    ]
    path = write_report(
        store(tmp_path / "run", tensors).select(), output=tmp_path / "report.html", url=HOSTILE[0], scope=HOSTILE[1]
    )
    page = Page(chromium, path)
    page.open()
    for column in ("module", "kind", "component"):
        page.type("#down", column) if column != "component" else page.type("#color-by", column)
    page.type("#across", "kind")
    page.click(".filter[data-field=module] summary")
    page.click("tr[data-record='7']")
    page.click("[data-finding='0']")
    assert HOSTILE[0] in page.text("h1")
    assert HOSTILE[1][:20] in page.text("#findings")
    assert page.ask("return window.hurt") is None
    # Nothing of theirs became an element, in the page or in a chart.
    assert page.ask("return document.querySelectorAll('img, a[href^=javascript], a:not([data-finding])').length") == 0
    # And nothing was asked of anybody: what was loaded is this file and what it holds.
    loaded = page.ask("return performance.getEntriesByType('resource').map((one) => one.name.slice(0, 5))")
    assert set(loaded) <= {"data:", "blob:"}
    assert page.log() == []


def test_a_browser_refuses_what_is_not_ours(faulty: Page) -> None:
    """The page's own policy stops a script and a request, were one to get in; the log says so."""
    refused: Callable[[str], Any] = faulty.ask
    refused(
        "const script = document.createElement('script'); script.textContent = 'window.hurt = 4';"
        "document.body.append(script)"
    )
    refused("fetch('http://127.0.0.1:9/').catch(() => { window.refused = true })")
    assert faulty.ask("return window.hurt") is None
    assert sum("Content Security Policy" in message for message in faulty.log()) >= 2
