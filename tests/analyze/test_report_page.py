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
        "const { selection } = window.ranktape; selection.focus(null); selection.clearFilters();"
        "document.querySelector('[data-tab=records]').click(); window.scrollTo(0, 0);"
    )
    faulty.type("#table-search", "")
    faulty.type("#peers-of", "places")
    faulty.type("#of-kind", "")
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


def test_values_move_over_the_iterations(fresh: Page, records: Records) -> None:
    """Of a record of one iteration the same place in all of them: which part of the values is in which binade."""
    wanted = {"tensor_name": "weight", "layer_idx": 0, "rank": 1}
    (weight,) = (
        place
        for place, one in enumerate(records)
        if one.iteration == 10 and all(getattr(one, name) == value for name, value in wanted.items())
    )
    fresh.ask("window.ranktape.selection.openRecord(arguments[0])", weight)
    (drawn,) = fresh.ask("return document.getElementById('moves-chart').data.map((one) => [one.y, one.z])")
    for column, one in enumerate(records.select(**wanted)):
        values = np.abs(one.read().astype(np.float64))
        exponents, counts = np.unique(np.frexp(values[values > 0])[1] - 1, return_counts=True)
        found = {exponent: row[column] for exponent, row in zip(*drawn, strict=True) if row[column] is not None}
        assert found == pytest.approx(dict(zip(exponents.tolist(), np.log10(counts / counts.sum()), strict=True)))


def test_an_address_shows_the_same_again(fresh: Page, records: Records) -> None:
    """A link, back and forward, and a reload."""

    def seen() -> list[Any]:
        found: list[Any] = fresh.ask(
            """const { metric, down, across } = window.ranktape.selection.state;
            const value = (id) => document.getElementById(id).value;
            return [[metric, down, across], [value("metric"), value("down"), value("across")],
            ...["drill-title", "selected-count"].map((id) => document.getElementById(id).textContent)]"""
        )
        return [*found, fresh.rows()]

    fresh.type("#metric", "std")
    fresh.type("#down", "module")
    fresh.ask("window.ranktape.selection.filter('rank', new Set([0, 1]))")
    states = [seen()]
    fresh.cell(2, 1)
    states.append(seen())
    fresh.click(f"[data-finding='{number_of(fresh, 'weight on rank 1')}']")
    states.append(seen())
    fresh.click("#table tbody tr")
    states.append(seen())
    assert len({str(state) for state in states}) == 4
    link = fresh.browser.current_url
    fresh.browser.back()
    fresh.browser.back()
    fresh.wait("document.getElementById('drill-title').textContent === arguments[0]", states[1][2])
    assert seen() == states[1]
    fresh.browser.forward()
    fresh.wait("document.getElementById('drill-title').textContent === arguments[0]", states[2][2])
    assert seen() == states[2]
    fresh.ask("document.documentElement.dataset.ready = 'no'; window.location.reload()")
    fresh.wait("document.documentElement.dataset.ready === 'yes'")
    assert seen() == states[2]
    fresh.browser.get("about:blank")
    fresh.browser.get(link)
    fresh.wait("document.documentElement.dataset.ready === 'yes'")
    assert seen() == states[3]
    fresh.browser.get(f"file://{fresh.path}#finding=nothing&in.rank=77&metric=nothing&only.rank=9")
    fresh.wait("document.getElementById('selected-count').textContent === arguments[0]", f"all {len(records)} records")
    assert fresh.ask("return window.ranktape.selection.state.focus") is None


def test_an_address_sorts_and_searches_a_table(fresh: Page) -> None:
    fresh.click("[data-tab='stats']")
    fresh.click("#table th[data-column='kurtosis'] button")
    fresh.click("#table th[data-column='kurtosis'] button")
    fresh.type("#table-search", "weight")
    rows = fresh.rows()
    assert rows != sorted(rows)
    link = fresh.browser.current_url
    assert link.endswith("table=stats&sort=kurtosis&search=weight")
    for address, shown in ((link, rows), (f"file://{fresh.path}#table=nothing&sort=-kurtosis", None)):
        fresh.browser.get("about:blank")
        fresh.browser.get(address)
        fresh.wait("document.documentElement.dataset.ready === 'yes'")
        assert fresh.rows() == (shown or sorted(fresh.rows()))
    assert fresh.ask("return document.querySelector('[data-tab=records]').ariaSelected") == "true"


def test_cells_can_be_reached_by_keyboard(fresh: Page, records: Records) -> None:
    fresh.type("#metric", "absmax")
    fresh.type("#down", "layer_idx")
    fresh.type("#across", "rank")
    fresh.ask("document.getElementById('overview-chart').focus()")

    def press(key: str) -> None:
        fresh.ask(
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: arguments[0], bubbles: true }))",
            key,
        )

    for key in ["ArrowDown", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowUp", *["ArrowRight"] * 3]:
        press(key)
    assert fresh.ask("return document.querySelector('.spoken').textContent").startswith("layer 1, rank 3. absmax: ")
    press("Enter")
    assert fresh.rows() == [place for place, one in enumerate(records) if (one.layer_idx, one.rank) == (1, 3)]
    unnamed = fresh.ask(
        """return Array.from(document.querySelectorAll(".js-plotly-plot"))
        .filter((one) => !one.getAttribute("role") || !one.getAttribute("aria-label")).map((one) => one.id)"""
    )
    assert unnamed == []


def test_modules_say_what_was_found_in_them(fresh: Page, records: Records) -> None:
    words = fresh.ask(
        "return Array.from(document.querySelectorAll('.module'), (one) => one.getAttribute('aria-label'))"
    )
    assert words == [f"layers.{layer}.linear: high finding" for layer in range(4)]
    edges = {
        (records[finding["places"][0]].module, records[follower].module)
        for finding in fresh.ask("return window.ranktape.raw.findings")
        for follower in finding["followed_by"]
    }
    num_edges = fresh.ask("return document.querySelectorAll('path.follows').length")
    assert num_edges == len({(cause, follower) for cause, follower in edges if cause != follower})
    fresh.ask("document.querySelectorAll('.module')[2].dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }))")
    assert fresh.rows()[0] == next(place for place, one in enumerate(records) if one.module == "layers.2.linear")
    assert fresh.ask("return document.querySelector('[aria-pressed=true]').dataset.module") == "2"
    fresh.ask("document.querySelectorAll('.module')[2].dispatchEvent(new MouseEvent('click'))")
    assert fresh.text("#selected-count") == f"all {len(records)} records"


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
    assert page.ask("return document.getElementById('of-kind').value").endswith("pre weight")
    assert page.ask("return document.getElementById('across').value") == "iteration"
    for metric in ("absmax", "rms", "p50"):
        page.type("#metric", metric)
        for is_against in (True, False):
            box = "document.getElementById('against-peers')"
            page.ask(f"if ({box}.checked !== arguments[0]) {box}.click()", is_against and metric != "p50")
            drawn, marks = page.ask("return document.getElementById('overview-chart').data.map((one) => one.z)")
            nan, inf, zero, missing = 3, 2, 1, 0
            against = page.ask(f"return {box}.checked && !{box}.disabled")
            expected = [[missing, inf, None], [None, None, zero if against else None], [None, nan, nan]]
            assert marks == expected, (metric, against)
            assert (np.array(drawn, dtype=object) == None).tolist() == (np.array(marks, dtype=object) != None).tolist()  # noqa: E711
            words = page.text("#overview-legend").split("\n")
            assert words == ["no record, or not known", *(["all zero"] if against else []), "Inf", "NaN"]
    page.type("#metric", "overflow.nan.ratio")
    (drawn, marks) = page.ask("return document.getElementById('overview-chart').data.map((one) => one.z)")
    assert marks == [[0, None, None], [None] * 3, [None] * 3]
    assert page.log() == []


def test_zeros_count_beside_subnormal_gradients(fresh: Page, records: Records) -> None:
    lines = fresh.ask(
        "return document.getElementById('gradients-underflow').data.map(({ x, y, name }) => [x, y, name])"
    )
    (trace,) = [line for line in lines if line[2] == "grad_output"]
    gradients = [record for record in records if record.tensor_name == "grad_output"]
    for layer, part in zip(trace[0], trace[1], strict=True):
        arrays = [one.read().astype(np.float64) for one in gradients if one.layer_idx == layer]
        lost = sum(int((np.abs(array) < np.finfo(np.float32).tiny).sum()) for array in arrays)
        assert part == pytest.approx(lost / sum(array.size for array in arrays))


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
