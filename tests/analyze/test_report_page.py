"""Does the page do in a browser what it is for: say what is wrong on its first screen, and lead to the records?

Opened from disk in headless Chromium, which reaches no network and whose log must be empty.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.views.report.page import write_report
from ranktape.storage import Records
from tests.analyze.faulty_runs import Sizes, faulty_run
from tests.analyze.report_page import FLIPPED, LAPTOP, OUTLYING, SCALED, VANISHING, Page, fault
from tests.analyze.runs import describe_tensor, store

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


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
    if not faulty.browser.current_url.partition("#")[0].endswith(str(faulty.path)):
        faulty.open()
    faulty.ask(
        "const { focusOn, clearFilters } = window.ranktape; focusOn(null); clearFilters();"
        "document.querySelector('[data-tab=records]').click(); window.scrollTo(0, 0);"
    )
    faulty.type("#table-search", "")
    faulty.type("#kind", "")
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
    assert all("\nNext command: ranktape analyze " in text for text in seen)
    assert re.match(r"\d+ findings: ", fresh.text("#headline"))
    assert "4 ranks" in fresh.text(".facts")


def test_a_finding_leads_to_its_records(fresh: Page, records: Records) -> None:
    links = fresh.ask("return window.ranktape.raw.findings.map((one) => one.title)")
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
    fresh.type("#columns", "rank")
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
    assert "SQNR in mxfp8_e4m3" in fresh.text("#record-fields")


def number_of(page: Page, words: str) -> int:
    """The number of the finding whose title has these words."""
    titles = page.ask("return window.ranktape.raw.findings.map((one) => one.title)")
    (number,) = (place for place, title in enumerate(titles) if words in title)
    return int(number)


def test_what_was_clicked_is_drawn_beside_its_peers(fresh: Page, records: Records) -> None:
    """One rank's weight beside those of the other ranks; of a sample all others; a layer beside the other layers."""
    axes = []
    layer, rank = SCALED
    for words in ("weight on rank 1", "sample 4", "underflow"):
        fresh.click(f"[data-finding='{number_of(fresh, words)}']")
        chart = fresh.ask(
            """const { data, layout } = document.getElementById("peers-chart");
            return [layout.xaxis.title.text, ...data.map((one) => [Array.from(one.x), Array.from(one.y)])]"""
        )
        axes.append(chart[0])
        if words == "weight on rank 1":
            weights = records.select(tensor_name="weight", module=f"layers.{layer}.linear")
            absmax = [float(np.abs(one.read().astype(np.float64)).max()) for one in weights]
            expected = [[one.rank, size] for one, size in zip(weights, absmax, strict=True)]
            peers, bad = (sorted(map(list, zip(*points, strict=True))) for points in chart[1:])
            assert bad == sorted(point for point in expected if point[0] == rank)
            assert peers == sorted(point for point in expected if point[0] != rank)
        if words == "sample 4":
            assert chart[2] == [[4], [3008]]
    assert axes == ["rank", "sample", "layer"]


def test_a_link_opens_its_finding(fresh: Page) -> None:
    number = number_of(fresh, "weight on rank 1")
    fresh.click(f"[data-finding='{number}']")
    link, seen = fresh.browser.current_url, [fresh.text("#drill-title"), fresh.rows()]
    fresh.browser.get("about:blank")
    fresh.browser.get(link)
    fresh.wait("document.documentElement.dataset.ready === 'yes'")
    assert [fresh.text("#drill-title"), fresh.rows()] == seen
    fresh.browser.get("about:blank")
    fresh.browser.get(f"file://{fresh.path}#finding=nothing")
    fresh.wait("document.documentElement.dataset.ready === 'yes'")
    assert fresh.ask("return window.ranktape.state.focus") is None


def test_filters_act_on_every_chart_and_table(fresh: Page, records: Records) -> None:
    fresh.click(".filter[data-field=rank] summary")
    fresh.type(".filter[data-field=rank] input[type=search]", "1-2")
    fresh.click(".filter[data-field=rank] .row button")
    fresh.click(".filter[data-field=rank] summary")
    wanted = (records.column("rank") >= 1) & (records.column("rank") <= 2)
    assert fresh.text("#selected-count") == f"{wanted.sum()} of {len(records)} records"
    assert fresh.rows() == np.flatnonzero(wanted).tolist()[:50]
    fresh.type("#columns", "rank")
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
    fresh.type("#columns", across)
    fresh.type("#against", "")
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


def test_a_map_of_zeros_has_one_number_beside_its_colours(fresh: Page) -> None:
    fresh.type("#metric", "overflow.ratio")
    fresh.type("#against", "")
    script = "const [{ z, zmin, zmax, colorbar }] = document.getElementById('overview-chart').data;"
    drawn, *ends = fresh.ask(script + " return [z, zmin, zmax, colorbar.ticktext]")
    assert {cell for row in drawn for cell in row} == {0}
    assert ends == [0, 1, ["0"]]


def test_cells_against_peers(fresh: Page, records: Records) -> None:
    """log2 over the median of the same tensor in all ranks and iterations, and of a cell the farthest."""
    fresh.type("#metric", "absmax")
    fresh.type("#columns", "rank")
    fresh.type("#against", "places")
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


def test_nan_inf_zero_and_missing_cells_have_colours_of_their_own(chromium: Chrome, tmp_path: Path) -> None:
    """The map opens with the tensor that the first finding is about, and no cell without numbers looks like others."""
    strange = {(2, 1): np.nan, (2, 2): np.nan, (0, 1): np.inf, (1, 2): 0.0}
    tensors = []
    for iteration, layer, name in itertools.product(range(3), range(3), ("weight", "input")):
        array = np.full((4, 8), 2.0, dtype=np.float32) + np.arange(8, dtype=np.float32)
        if name == "weight":
            array[:] = strange.get((layer, iteration), array)
        if (iteration, layer, name) != (0, 0, "weight"):
            place: dict[str, Any] = {"layer_idx": layer, "module": f"layers.{layer}.linear"}
            tensors.append(describe_tensor(array, **place, iteration=iteration, tensor_name=name))
    path = write_report(store(tmp_path / "run", tensors).select(), output=tmp_path / "report.html")
    page = Page(chromium, path)
    page.open()
    assert page.ask("return document.getElementById('kind').value").endswith("pre weight")
    assert page.ask("return document.getElementById('columns').value") == "iteration"
    for metric in ("absmax", "rms", "p50"):
        page.type("#metric", metric)
        for against in ("places", "") if metric != "p50" else ("",):
            page.type("#against", against)
            drawn, marks = page.ask("return document.getElementById('overview-chart').data.map((one) => one.z)")
            nan, inf, zero, missing = 3, 2, 1, 0
            expected = [[missing, inf, None], [None, None, zero if against else None], [None, nan, nan]]
            assert marks == expected, (metric, against)
            assert (np.array(drawn, dtype=object) == None).tolist() == (np.array(marks, dtype=object) != None).tolist()  # noqa: E711
            words = page.text("#overview-legend").split("\n")
            assert words == ["no record, or unknown", *(["all zero"] if against else []), "Inf", "NaN"]
    page.type("#metric", "overflow.nan.ratio")
    (drawn, marks) = page.ask("return document.getElementById('overview-chart').data.map((one) => one.z)")
    assert marks == [[0, None, None], [None] * 3, [None] * 3]
    assert page.log() == []


def test_a_chart_comes_back_after_a_selection_without_one(fresh: Page, records: Records) -> None:
    """Of samples no kurtosis is known, and no record is of rank 9: a sentence says so, and clicks work after it."""
    fresh.type("#columns", "sample")
    fresh.type("#metric", "kurtosis")
    assert "is not available for single samples: choose" in fresh.text("#overview-chart + .empty")
    fresh.type("#metric", "absmax")
    fresh.type("#columns", "rank")
    fresh.ask("window.ranktape.filterBy('rank', new Set([9]))")
    assert fresh.text("#overview-chart + .empty") == "No record passes the filters."
    fresh.click("#clear-filters")
    fresh.cell(2, 3)
    assert fresh.rows() == [place for place, one in enumerate(records) if (one.layer_idx, one.rank) == (2, 3)]
    assert fresh.log() == []


def test_light_and_dark_follow_the_system(fresh: Page) -> None:
    def seen(scheme: str) -> list[str]:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        fresh.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        found: list[str] = fresh.ask(
            """const colorOf = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
            return [colorOf("body", "backgroundColor"), colorOf("#layers-chart .xtick text", "fill"),
            colorOf("#layers-chart .gridlayer path", "stroke"),
            document.getElementById("layers-chart").layout.paper_bgcolor]"""
        )
        return found

    assert seen("dark") == ["rgb(17, 19, 24)", "rgb(230, 230, 230)", "rgb(54, 59, 69)", "transparent"]
    assert seen("light") == ["rgb(243, 244, 246)", "rgb(26, 26, 26)", "rgb(217, 220, 225)", "transparent"]


def test_no_chart_is_wider_than_the_page(fresh: Page) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    fits = """const charts = Array.from(document.querySelectorAll(".js-plotly-plot"))
        .filter((one) => one.offsetParent !== null);
    return charts.length > 3 && document.documentElement.scrollWidth <= arguments[0]
        && charts.every((chart) => Math.abs(chart._fullLayout.width - chart.clientWidth) < 2)"""
    width = 420
    fresh.resize(width, 900)
    # plotly waits for the last of several changes of size.
    WebDriverWait(fresh.browser, 30, 0.1).until(lambda _: fresh.ask(fits, width))
    fresh.resize(*LAPTOP)


def test_it_can_be_printed(fresh: Page) -> None:
    fresh.ask(
        """window.printed = null; window.addEventListener("beforeprint", () => {
            const charts = Array.from(document.querySelectorAll(".js-plotly-plot"));
            const shown = charts.filter((chart) => chart.offsetParent !== null);
            const widths = shown.map((chart) => chart._fullLayout.width);
            window.printed = [shown.length, ...new Set(widths)]; }, { once: true })"""
    )
    document = base64.b64decode(fresh.browser.print_page())
    assert document.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", document)) >= 3
    num_charts, *forms = fresh.ask("return window.printed")
    assert (num_charts, forms) == (4, [660])
    fresh.wait("document.getElementById('layers-chart')._fullLayout.width !== 660")


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
