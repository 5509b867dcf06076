"""Are the data of a report right, with recipes too, and are the names of strangers text?"""

from __future__ import annotations

import base64
import errno
import html.parser
import json
import math
import os
import re
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.numbers import RecordMetrics
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.identity import natural
from ranktape.analyze.numerics.digest import SAMPLE_METRICS as KNOWN_OF_SAMPLES
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.numerics.sweeps.sweep import sweep_array
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.analyze.table import Column, Kind, Table
from ranktape.analyze.views.report import columns
from ranktape.analyze.views.report import columns as report_columns
from ranktape.analyze.views.report.columns import MAX_SWEPT_NBYTES, SAMPLE_METRICS, packed, recipe_map, sample_columns
from ranktape.analyze.views.report.model import Comparison, Model, build_model
from ranktape.analyze.views.report.page import FORMATS, deflated, render, write_report
from ranktape.errors import NoRecordsError, NoSpaceError, StorageError, UsageError
from ranktape.storage import Records, Run
from tests.analyze.linear_runs import hot_channels, linear_run
from tests.analyze.pt_files import legacy_file
from tests.analyze.report_page import HOSTILE as STRANGE
from tests.analyze.report_page import Page
from tests.analyze.runs import Tensor, describe_tensor, model_tensors, store
from tests.exhaustive import exhaustive

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

Array = np.ndarray[Any, Any]

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "<!--<script>",
    "'-alert(4)-'",
    "<b>bold</b><a href='javascript:alert(5)'>x</a>",
    "&lt;i&gt;",
    "{{ 7*7 }}{% raw %}",
    "\u2028\u2029\u202e\ud800",
    "\x03\x1b[2Jtouch hurt\n",
)
"""What a stranger may call a module."""


def all_kinds() -> list[Tensor]:
    """Tensors of every kind that a record can be of."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((4, 96))
    spoiled = normal.copy()
    spoiled[1, :3] = [np.nan, np.inf, -np.inf]
    arrays = {
        "plain": (normal.astype(ml_dtypes.bfloat16), 0),
        "wide": (normal.astype(np.float32), 0),
        "double": (normal * 1e30, None),
        "spoiled": (spoiled.astype(np.float16), 0),
        "nothing but NaN": (np.full(5, np.nan, dtype=np.float16), None),
        "constant": (np.full((3, 4), 2.5, dtype=ml_dtypes.bfloat16), None),
        "zeros": (np.zeros((3, 4), dtype=np.float32), None),
        "empty": (np.zeros((0, 7), dtype=ml_dtypes.bfloat16), 0),
        "scalar": (np.array(3.0, dtype=np.float32), None),
        "flags": (np.array([True, False, True]), None),
        "tokens": (np.arange(12, dtype=np.int64), None),
        "complex": ((normal + 1j).astype(np.complex64), None),
        "narrow": (normal.astype(ml_dtypes.float8_e4m3fn), None),
    }
    return [
        describe_tensor(array, tensor_name=name, layer_idx=index - 1, sample_dim=dim, module=f"m.{index}")
        for index, (name, (array, dim)) in enumerate(arrays.items())
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a tensor of every kind."""
    return store(tmp_path_factory.mktemp("run"), all_kinds())


def unpacked(column: dict[str, Any], *, count: int) -> Array:
    """What `packed` was given, with the digits that it kept: what the page's script reads."""
    if column["type"] == "same":
        return np.full(count, math.nan if column["value"] is None else float(column["value"]))
    dtype = np.dtype(column["type"])
    planes = np.frombuffer(base64.b64decode(column["data"]), dtype=np.uint8).reshape(dtype.itemsize, -1)
    values: Array = np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
    return values.astype(np.float64)


def data_of(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    (packed_text,) = re.findall(r'id="report-data">([^<]*)<', page)
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed_text)))
    return found


def model_of(records: Records, **options: Any) -> Model:
    defaults: dict[str, Any] = {"findings": [], "formats": FORMATS, "view": View.COMPUTE, "engine": Engine()}
    return build_model(records, **(defaults | options))


def metric_of(model: Model, name: str) -> Array:
    (found,) = (one for one in model.data["metrics"] if one["name"] == name)
    return unpacked(found["column"], count=model.data["count"])


def binades_of(model: Model) -> dict[int, dict[int, int]]:
    """By record how many values have which exponent, as the page's script reads it."""
    found = model.data["binades"]
    records, lengths = (unpacked(found[name], count=found["count"]).astype(int) for name in ("records", "length"))
    ends = np.cumsum(lengths)
    exponents, counts = (
        np.split(unpacked(found["columns"][name], count=int(ends[-1])).astype(int), ends[:-1])
        for name in ("exponent", "count")
    )
    return {
        record: dict(zip(own.tolist(), number.tolist(), strict=True))
        for record, own, number in zip(records.tolist(), exponents, counts, strict=True)
    }


@given(
    st.lists(st.one_of(st.floats(width=32, allow_subnormal=False), st.none()), max_size=30)
    | st.lists(st.integers(-(2**40), 2**40), max_size=30)
    | st.lists(st.floats(allow_subnormal=False), max_size=5)
)
def test_a_column_keeps_its_numbers(values: list[float | None]) -> None:
    column = json.loads(json.dumps(packed(values), allow_nan=False))
    expected = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    found = unpacked(column, count=len(values))
    is_whole = np.isfinite(expected).all() and np.array_equal(expected, np.rint(expected))
    if is_whole and np.abs(expected).max(initial=0) < 2**31:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=2**-23)


def test_metrics_are_those_of_numpy(run: Run) -> None:
    records = run.select()
    model = model_of(records)
    for index, record in enumerate(records):
        array = record.read()
        if array.dtype.kind == "c":
            continue
        values = array.astype(np.float64).reshape(-1)
        finite = values[np.isfinite(values)]
        expected = {
            "absmax": np.abs(finite).max() if finite.size else math.nan,
            "mean": finite.mean() if finite.size else math.nan,
            "std": finite.std() if finite.size else math.nan,
            "overflow.nan.ratio": np.isnan(values).sum(),
            "overflow.inf.ratio": np.isinf(values).sum(),
            "overflow.zero.ratio": (values == 0).sum(),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(metric_of(model, name)[index], value, rtol=1e-6, atol=1e-12, err_msg=name)
    elements = unpacked(model.data["elements"], count=len(records))
    assert elements.tolist() == [math.prod(record.shape) for record in records]


def test_binades_are_those_of_numpy(run: Run) -> None:
    records = run.select()
    binades = binades_of(model_of(records))
    assert len(binades) == len(records)
    for index, record in enumerate(records):
        array = record.read()
        if array.dtype.kind == "c":
            continue
        values = array.astype(np.float64)
        exponents = np.frexp(values[np.isfinite(values) & (values != 0)])[1] - 1
        assert binades[index] == dict(
            zip(*(part.tolist() for part in np.unique(exponents, return_counts=True)), strict=True)
        )


def test_ratios_are_those_of_the_sweep(run: Run) -> None:
    """At the rule of blocks, or the power of two at which the largest value just fits: the sweep's first level."""
    records = run.select(tensor_name=["plain", "wide", "spoiled", "narrow"])
    model = model_of(records, formats=(*FORMATS, "nvfp4"))
    for name in (*FORMATS, "nvfp4"):
        found = metric_of(model, f"sqnr.{name}")
        for index, record in enumerate(records):
            levels = sweep_array(record.read(), format=name).levels
            has_blocks = name.startswith(("mx", "nv"))
            (usual,) = (one for one in levels if one.exponent == 0) if has_blocks else levels[:1]
            np.testing.assert_allclose(found[index], usual.sqnr, rtol=1e-6)


def test_what_cannot_be_swept_has_no_ratio(run: Run) -> None:
    records = run.select()
    model = model_of(records)
    names = records.column("tensor_name").tolist()
    for name in FORMATS:
        usual = dict(zip(names, metric_of(model, f"sqnr.{name}").tolist(), strict=True))
        unknown = {one for one in names if math.isnan(usual[one])}
        assert unknown == {"nothing but NaN", "empty", "flags", "tokens"}
        assert usual["zeros"] == math.inf, "nothing is lost of zeros"


def test_of_too_many_records_some_of_each_tensor_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each tensor of the model, before a second of any; what a finding names comes first."""
    records = store(tmp_path, model_tensors(num_ranks=3, iterations=(0, 1))).select()
    everything = binades_of(model_of(records))
    monkeypatch.setattr(columns, "MAX_HISTOGRAMS", 20)
    finding = Finding(kind="x", severity=Severity.LOW, score=1.0, title="t", evidence="e", where={}, places=(107,))
    model = model_of(records, findings=[finding])
    found = binades_of(model)
    assert [*found] == [*range(19), 107]
    assert all(found[index] == everything[index] for index in found)
    assert np.isfinite(metric_of(model, "sqnr.mxfp8_e4m3")).sum() == 20
    assert any("The page has histograms of 20 of 108 records" in text for text in model.left_out)
    assert any("not tried on 88 records" in text for text in model.left_out)


@pytest.mark.parametrize(("limit", "value"), [("MAX_SWEPT_NBYTES", 18 * 512), ("MAX_SWEPT", 18)])
def test_what_is_too_large_to_sweep_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    records = store(tmp_path, model_tensors(num_ranks=2)).select()
    assert records.column("nbytes").sum() < MAX_SWEPT_NBYTES
    monkeypatch.setattr(columns, limit, value)
    model = model_of(records)
    for name in ("mxfp8_e4m3", "fp8_e4m3"):
        # One record of each tensor, before a second of any.
        assert np.isfinite(metric_of(model, f"sqnr.{name}")).tolist() == [True] * 18 + [False] * 18
    assert len(binades_of(model)) == 36
    assert any("not tried on 18 records" in text for text in model.left_out)


def test_samples_are_those_of_numpy(run: Run) -> None:
    records = run.select()
    model = model_of(records)
    samples = model.data["samples"]
    kept = unpacked(samples["records"], count=samples["count"]).astype(int).tolist()
    assert set(records.column("tensor_name")[kept]) == {"plain", "wide", "spoiled"}
    absmax = unpacked(samples["columns"]["absmax"], count=12).reshape(3, 4)
    for index, found in zip(kept, absmax, strict=True):
        values = records[index].read().astype(np.float64)
        np.testing.assert_allclose(
            found, np.nanmax(np.where(np.isinf(values), np.nan, np.abs(values)), axis=1), rtol=1e-6
        )


def test_the_samples_that_differ_most_are_kept() -> None:
    parts = np.ones((10, 4, len(KNOWN_OF_SAMPLES)))
    parts[:, 1, KNOWN_OF_SAMPLES.index("absmax")] = 1 + np.arange(10) % 7
    sizes = np.where(np.arange(11) == 10, 0, 4)
    known = RecordMetrics(columns={}, sample_sizes=sizes, samples=parts.reshape(40, -1))
    document = sample_columns(known, first=[0], limit=12)
    assert set(document["columns"]) == {*SAMPLE_METRICS}
    assert unpacked(document["records"], count=document["count"]).tolist() == [0, 5, 6]


def test_the_first_line_says_what_the_run_is(tmp_path: Path) -> None:
    run = store(tmp_path, model_tensors(iterations=range(0, 90, 10)))
    model = model_of(run.select(), url=run.url, scope="rank 0,1", environment={"torch": "2.6", "program": "train.py"})
    assert model.facts == (
        "1 rank",
        "9 iterations (0 to 80)",
        "162 records",
        "82.94 kB",
        "1970-01-01 00:00 UTC",
        "2 layers (attention, linear)",
        "bfloat16",
        "train.py",
        "torch 2.6",
        "only rank 0,1",
    )
    assert model.headline == "No findings in 162 records."


class Elements(html.parser.HTMLParser):
    """Collects elements with their attributes, and what the scripts hold."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def hostile_model(tmp_path: Path) -> Model:
    tensors = [
        describe_tensor(
            np.ones(4, dtype=np.float32), module=name.replace("\ud800", ""), layer_idx=index, tensor_name="x"
        )
        for index, name in enumerate(HOSTILE)
    ]
    findings = [
        Finding(
            kind="x",
            severity=Severity.HIGH,
            score=1.0,
            title=f"{name} is wrong",
            evidence=name,
            where={"module": name},
            places=(0,),
            consequences=(name,),
            command=f"ranktape analyze stats RUN --module {shlex.quote(name)}",
        )
        for name in HOSTILE
    ]
    names = " ".join(HOSTILE)
    return model_of(
        store(tmp_path, tensors).select(), findings=findings, url=names, scope=names, environment={"torch": names}
    )


def test_names_of_strangers_are_text(tmp_path: Path) -> None:
    model = hostile_model(tmp_path)
    page = render(model)
    elements = Elements()
    elements.feed(page)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 3  # data, plotly and our own
    assert "img" not in tags
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert not [1 for _, attributes in elements.found for name in ("src", "action") if name in attributes]
    hrefs = [attributes.get("href") or "" for tag, attributes in elements.found if tag == "a"]
    assert all(re.fullmatch(r"#finding=[\w.~%/-]+", href, re.ASCII) for href in hrefs)
    assert len(hrefs) == len(HOSTILE)
    shown = "".join(elements.text)
    assert "<script>alert(1)</script> is wrong" in shown
    assert "{{ 7*7 }}{% raw %} is wrong" in shown
    # What is copied from the page into a terminal is text there, too.
    commands = [elements.text[place + 1] for place, text in enumerate(elements.text) if "Next command" in text]
    begin = ["ranktape", "analyze", "stats", model.url]
    assert [shlex.split(command)[:4] for command in commands] == [begin] * len(HOSTILE)
    assert all(command.isprintable() for command in commands)
    policy = next(attributes["content"] for _, attributes in elements.found if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.replace("style-src-attr 'unsafe-inline'", "")


def test_no_letter_of_the_data_is_markup() -> None:
    text = deflated("".join(HOSTILE).replace("\ud800", ""))
    assert re.fullmatch(r"[\w+/=]+", text, re.ASCII)


def test_a_report_is_the_same_bytes_again(run: Run, tmp_path: Path) -> None:
    path = write_report(run.select(), output=tmp_path / "new" / "report.html")
    first = path.read_bytes()
    assert write_report(run.select(), output=path, engine=Engine(use_cache=False)).read_bytes() == first
    assert [one.name for one in path.parent.iterdir()] == ["report.html"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_comparison_with_a_training_that_diverged_has_a_page(run: Run) -> None:
    table = Table(title="t", columns=(Column(name="quant_type", kind=Kind.TEXT),), rows=(("bf16",), ("mxfp4",)))
    comparison = Comparison(
        table=table,
        explanation="against bf16",
        sqnr={
            ("a", "output", "mxfp4"): -math.inf,
            ("a", "grad_input", "mxfp4"): math.inf,
            ("b", "output", "x"): math.nan,
        },
        target_sqnr=18.0,
        losses={"bf16": [(0, 3.5), (1, 3.25)], "mxfp4": [(0, math.nan), (1, math.inf)]},
    )
    data = data_of(render(model_of(run.select(), comparison=comparison)))
    assert data["losses"] == {"bf16": [[0, 3.5], [1, 3.25]], "mxfp4": [[0, None], [1, None]]}
    assert {value for row in data["recipes"]["sqnr"] for value in row} == {"-Infinity", "Infinity", None}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_cannot_be_written_is_said_before_the_work(run: Run, tmp_path: Path) -> None:
    records = run.select()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is a directory: give a file in it"):
        write_report(records, output=tmp_path)
    with pytest.raises(UsageError, match="--output - is not allowed"):
        write_report(records, output="-")
    with pytest.raises(UsageError, match="is not a regular file"):
        write_report(records, output=tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a path"):
        write_report(records, output=tmp_path / "file" / "report.html")
    with pytest.raises(StorageError, match=r"cannot be written to /proc/report\.html"):
        write_report(records, output=Path("/proc/report.html"))
    with pytest.raises(UsageError, match="format 'fp9' is not known"):
        write_report(records, output=tmp_path / "report.html", format=["fp9"])
    with pytest.raises(NoRecordsError, match="no records"):
        write_report(records[:0], output=tmp_path / "report.html")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "pipe"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_half_a_report_is_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    path = tmp_path / "report.html"
    path.write_text("the one before", encoding="utf-8")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(NoSpaceError if isinstance(error, OSError) else KeyboardInterrupt, match=r"No space left|^$"):
        write_report(run.select(), output=path)
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8") == "the one before"


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    store(tmp_path / "run", model_tensors())
    output = tmp_path / "out" / "report.html"
    runner = CliRunner()
    done = runner.invoke(
        cli, ["report", str(tmp_path / "run"), "-o", str(output), "--layer-idx", "1", "--format", "hif8"]
    )
    assert (done.exit_code, done.output) == (0, f"{output}\n")
    page = output.read_text(encoding="utf-8")
    assert "9 records" in page
    assert "only layer_idx 1" in page
    assert [one["name"] for one in data_of(page)["metrics"] if one["name"].startswith("sqnr")] == ["sqnr.hif8"]
    refused = runner.invoke(cli, ["report", str(tmp_path / "run"), "-o", str(tmp_path), "--format", "hif8"])
    assert refused.exit_code != 0


def test_files_of_other_tools_have_a_report_too(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    for counter in range(3):
        legacy_file(folder, torch.randn(4, 32), counter=counter, layer_idx=counter)
    output = tmp_path / "report.html"
    done = CliRunner().invoke(cli, ["report", str(folder), "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert "3 records" in output.read_text(encoding="utf-8")


def test_layers_stand_in_the_order_of_their_numbers() -> None:
    names = ["layers.73.up", "layers.8.up", "embedding", "layers.8.down", "layers.10"]
    in_order = ["embedding", "layers.8.down", "layers.8.up", "layers.10", "layers.73.up"]
    assert sorted(names, key=natural) == in_order


RECIPES = parse_recipes("mxfp8,mxfp4,nvfp4")
NAMES = [*(recipe.name for recipe in RECIPES), RECORDED]
PRODUCTS = ["output", "grad_input", "grad_weight"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Those of six layers, of which one has three channels that are far above the others; a stranger named them."""
    run = linear_run(tmp_path_factory.mktemp("run"), hot_channels, num_ranks=2, name=STRANGE[0])
    return run.select()


@pytest.fixture(scope="module")
def replayed(records: Records) -> Replayed:
    """What becomes of the products."""
    return replay_calls(records, RECIPES, engine=Engine(use_cache=False))


def ratios(replayed: Replayed, *, by: str) -> dict[tuple[Any, ...], float | None]:
    """The SQNR of each product in each recipe, of each value of a field."""
    groups = replayed.groups([by, "product", "recipe"])
    return {tuple(group.key.values()): group.exact.sqnr for group in groups}


def test_the_page_holds_the_ratio_of_every_product(records: Records, replayed: Replayed) -> None:
    found = recipe_map(records, replayed, RECIPES)
    assert found is not None
    columns = [(one["product"], one["recipe"]) for one in found["columns"]]
    assert columns == [(product, name) for product in PRODUCTS for name in NAMES]
    assert [one["bits"] for one in found["columns"]] == [*(recipe.bits for recipe in RECIPES), None] * 3
    assert [one["is_recorded"] for one in found["columns"]] == [False, False, False, True] * 3
    modules = [f"layers.{layer}.{STRANGE[0]}" for layer in range(6)]
    assert found["rows"] == modules
    expected = ratios(replayed, by="module")
    assert found["sqnr"] == [[expected[module, *column] for column in columns] for module in modules]
    assert found["num_lost"] == [[0] * 12] * 6
    for module, own in zip(modules, found["records"], strict=True):
        assert {records[place].module for place in own} == {module}
        assert {"input", "weight", "grad_output"} <= {records[place].tensor_name for place in own}


def test_of_many_modules_a_row_is_a_layer(
    records: Records, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_columns, "MAX_RECIPE_ROWS", 5)
    found = recipe_map(records, replayed, RECIPES)
    assert found is not None
    assert found["rows"] == [f"layer {layer} linear" for layer in range(6)]
    expected = ratios(replayed, by="layer_idx")
    assert found["sqnr"][3][0] == expected[3, "output", "mxfp8"]


def test_a_selection_without_layers_says_nothing(records: Records) -> None:
    gradients = records.select(tensor_name="grad_weight", iteration=0)
    replayed = replay_calls(gradients, RECIPES, engine=Engine(use_cache=False))
    found = recipe_map(gradients, replayed, RECIPES)
    assert found is not None
    assert {one["product"] for one in found["columns"]} == {"grad_weight"}
    # Operands outside of the selection are read, and are no records of the page.
    assert {gradients[place].tensor_name for own in found["records"] for place in own} == {"grad_weight"}


@pytest.fixture(scope="module")
def page(chromium: Chrome, records: Records, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of that run; it must have nothing in its log when all is done."""
    path = write_report(
        records,
        output=tmp_path_factory.mktemp("page") / "report.html",
        recipe=RECIPES,
        engine=Engine(use_cache=False),
    )
    found = Page(chromium, path)
    found.open()
    yield found
    assert found.log() == []


@exhaustive("make test draws them")
def test_cells_are_those_of_replay(page: Page, replayed: Replayed) -> None:
    (drawn,) = page.ask("return document.getElementById('recipes-chart').data.map((one) => one.text)")
    expected = ratios(replayed, by="module")
    rows = [
        " ".join(
            f"{expected[f'layers.{layer}.{STRANGE[0]}', product, name]:.1f}" for product in PRODUCTS for name in NAMES
        )
        for layer in range(6)
    ]
    assert [" ".join(filter(None, row)) for row in drawn] == rows


def test_a_cell_leads_to_the_records_of_its_module(page: Page, records: Records, replayed: Replayed) -> None:
    page.cell(3, NAMES.index("mxfp4"), chart="recipes-chart")
    assert page.text("#drill-title") == f"Records of the products of layers.3.{STRANGE[0]}"
    found = recipe_map(records, replayed, RECIPES)
    assert found is not None
    assert page.ask("return window.ranktape.state.focus.records") == found["records"][3]
    page.ask("window.ranktape.focusOn(null)")


def test_a_cell_that_lost_numbers_is_marked(page: Page) -> None:
    marks = page.ask(
        """window.ranktape.raw.recipes.num_lost[2][1] = 3; window.ranktape.drawRecipes();
        return document.getElementById("recipes-chart").data[1].z"""
    )
    marked = [(row, column) for row, line in enumerate(marks) for column, mark in enumerate(line) if mark is not None]
    assert marked == [(2, 1)]
    assert page.text("#recipes-legend") == "NaN"
    page.ask("window.ranktape.raw.recipes.num_lost[2][1] = 0; window.ranktape.drawRecipes()")


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
        for index, name in enumerate(STRANGE)
        for layer in range(2)
        for rank in range(3)
    ]
    path = write_report(
        store(tmp_path / "run", tensors).select(), output=tmp_path / "report.html", url=STRANGE[0], scope=STRANGE[1]
    )
    page = Page(chromium, path)
    page.open()
    for menu, column in (("rows", "module"), ("rows", "kind"), ("lines", "component"), ("columns", "kind")):
        page.type(f"#{menu}", column)
    page.click(".filter[data-field=module] summary")
    page.click("tr[data-record='7']")
    page.click("[data-finding='0']")
    assert STRANGE[0] in page.text("h1")
    assert STRANGE[1][:20] in page.text("#findings")
    assert page.ask("return window.hurt") is None
    # Nothing of theirs became an element, in the page or in a chart.
    assert page.ask("return document.querySelectorAll('img, a[href^=javascript], a:not([data-finding])').length") == 0
    # And nothing was asked of anybody: what was loaded is this file and what it holds.
    loaded = page.ask("return performance.getEntriesByType('resource').map((one) => one.name.slice(0, 5))")
    assert set(loaded) <= {"data:", "blob:"}
    assert page.log() == []
