"""Are a run and its records what they are as DataFrames, as xarray and in a notebook, whoever wrote their strings?"""

from __future__ import annotations

import json
import pickle
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from ranktape.errors import UsageError
from ranktape.storage.format.catalogue import COLUMNS
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.record import Record
from ranktape.storage.records.run import Run
from ranktape.storage.records.tables import MAX_SHOWN_LETTERS, MAX_SHOWN_ROWS
from tests.runs import describe, write_run
from tests.storage.wrapped import CountingReader

pandas = pytest.importorskip("pandas")
xarray = pytest.importorskip("xarray")

HOSTILE = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks; of each an activation with samples that have names, a hostile weight, a scalar and an empty tensor."""
    url = str(tmp_path_factory.mktemp("runs") / "run")

    def tensors(rank: int) -> list[Any]:
        random = np.random.default_rng(rank)
        query = random.normal(size=(3, 4, 5)).astype(ml_dtypes.bfloat16)
        query[0, 0, :2] = np.inf, np.nan
        samples = {"layout": "BTH", "sample_dim": 0, "sample_ids": ["a", 7, "c"], "batch_size": 3}
        fields: dict[str, tuple[Any, dict[str, Any]]] = {
            "query": (query, samples),
            "weight": (random.normal(size=(40, 2)), {"module": HOSTILE * 8 + "z" * 200, "metadata": {"why": HOSTILE}}),
            "scalar": (np.array(rank, dtype=np.int64), {}),
            "empty": (np.zeros((0, 3), dtype=np.float32), {"layout": "OI"}),
        }
        return [
            (array, describe(array, iteration=5, rank=rank, counter=count, tensor_name=name, **fields[name][1]))
            for count, (name, (array, _)) in enumerate(fields.items())
        ]

    return write_run(url, {5: [tensors(rank) for rank in (0, 1)]})


class Page(HTMLParser):
    """The tags of a page, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - the parser's signature
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_catalogue_is_a_frame(run: Run) -> None:
    records = run.select()
    frame = records.to_pandas()
    assert len(frame) == 8
    # `index`, `site` and `stack` say where bytes lie; counts of single samples are no column.
    assert set(COLUMNS) - set(frame.columns) == {"index", "site", "stack", "numel", "overflow.per_sample"}
    for place, record in enumerate(records):
        row = frame.iloc[place]
        for name in ("iteration", "rank", "module", "dtype", "timestamp", "nbytes", "checksum"):
            assert row[name] == getattr(record, name)
        for name in ("metadata", "sample_ids", "placement"):
            assert (None if pandas.isna(row[name]) else json.loads(row[name])) == getattr(record, name)
        assert row["shape"] == list(record.shape)
        assert pandas.isna(row["batch_size"]) == (record.batch_size is None)
        assert row["overflow.nan.count"] == record.overflow.nan.count
        assert row["overflow.ratio"] == record.overflow.ratio
        assert pandas.isna(row["overflow.absmax"]) == (record.overflow.absmax is None)
    types = frame.dtypes.astype(str)
    assert (types["batch_size"], types["module"], types["overflow.total"]) == ("Int64", "string", "Int64")
    assert frame.attrs["units"]["nbytes"] == "bytes"
    num_nan = frame.groupby("tensor_name")["overflow.nan.count"].sum().to_dict()
    assert num_nan == {"empty": 0, "query": 2, "scalar": 0, "weight": 0}
    nothing = run.select(rank=9).to_pandas()
    assert nothing.dtypes.astype(str).tolist() == types.tolist()


def test_without_pandas_and_xarray_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run.select()[0]
    monkeypatch.delitem(sys.modules, "ranktape.storage.records.labelled", raising=False)
    for name in ("pandas", "xarray"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"to_pandas\(\) needs pandas .*pip install 'ranktape\[notebook\]'"):
        run.select().to_pandas()
    with pytest.raises(UsageError, match=r"to_xarray\(\) needs xarray .*pip install 'ranktape\[notebook\]'"):
        record.to_xarray()


@pytest.mark.parametrize("name", ["query", "weight", "scalar", "empty"])
def test_a_record_is_a_labelled_array_of_its_bits(run: Run, name: str) -> None:
    record = run.select(rank=1, tensor_name=name)[0]
    array = record.to_xarray()
    dims = {"query": ("sample", "T", "H"), "weight": ("dim0", "dim1"), "scalar": (), "empty": ("O", "I")}
    assert (array.dims, array.name, array.shape) == (dims[name], name, record.shape)
    assert array.dtype == record.read().dtype
    assert array.values.tobytes() == record.read().tobytes()
    fields = record.info.to_json()
    ids = fields.pop("sample_ids")
    assert array.attrs == fields
    assert (array.coords["sample"].values.tolist() if "sample" in array.coords else None) == ids


def test_a_record_as_xarray_is_read_when_it_is_used_and_no_more_than_is_used(run: Run) -> None:
    reader = CountingReader(open_backend(run.url))
    record = reader.of(run.select(rank=0, tensor_name="query"))[0]
    array = record.to_xarray()
    assert "query" in repr(array)
    assert reader.reads == []
    one = array.sel(sample=7).isel(T=[2, 0], H=slice(None, None, -2))
    assert one.values.tobytes() == record.read()[1][[2, 0]][:, ::-2].tobytes()
    assert [sample for *_, sample in reader.reads] == [1, None]
    array.load()
    array.isel(sample=0).load()
    assert [sample for *_, sample in reader.reads] == [1, None, None]


def test_a_record_as_xarray_goes_to_other_processes(run: Run) -> None:
    array = run.select(rank=0, tensor_name="weight")[0].to_xarray()
    copied = pickle.loads(pickle.dumps(array))  # noqa: S301  # our own
    xarray.testing.assert_identical(copied, array)


def test_records_are_xarray_as_a_stack_is(run: Run) -> None:
    pytest.importorskip("dask.array")
    records = run.select(tensor_name="query")
    array, stack = records.to_xarray(), records.stack()
    assert (array.dims, array.attrs, list(array.coords)) == (stack.dims, stack.attrs, list(stack.coords))
    assert array.values.tobytes() == stack.values.tobytes()
    assert array.attrs["dtype"] == "bfloat16"


def test_a_notebook_shows_them_and_runs_nothing_of_them(run: Run) -> None:
    records = run.select()
    weight = next(record for record in records if record.tensor_name == "weight")
    pages = [run._repr_html_(), records._repr_html_(), weight._repr_html_()]
    for page in pages:
        assert not {"script", "img", "a", "link"} & Page(page).tags
        assert len(page) < 20_000
    for page in pages[1:]:
        (shown,) = {text for text in Page(page).texts if text.startswith(HOSTILE)}
        assert len(shown) == MAX_SHOWN_LETTERS
    assert run.url in pages[0]
    assert f"Records: 8 in {run.url}" in Page(pages[1]).texts
    assert all("details" in Page(page).tags for page in pages)
    assert "overflow.nan" in Page(pages[2]).texts


def test_reprs_say_what_is_there(run: Run) -> None:
    assert repr(run) == f"<Run {run.url}: iterations 5>"
    assert repr(run.select()) == f"<Records: 8 in {run.url}>"


def test_many_records_are_not_all_shown(tmp_path: Path) -> None:
    arrays: list[np.ndarray[Any, Any]] = [np.array(number, dtype=np.float32) for number in range(100)]
    written: dict[int, Any] = {
        step: [[(array, describe(array, iteration=step, call=call)) for call, array in enumerate(arrays)]]
        for step in range(2)
    }
    records = write_run(tmp_path / "run", written).select()
    page = Page(records._repr_html_())
    assert page.texts.count("input") == MAX_SHOWN_ROWS
    assert page.texts[-1] == "the first 20 of 200"
    assert page.texts[1] == "800 B"
    assert Page(records.select(rank=9)._repr_html_()).texts[0] == f"Records: 0 in {tmp_path / 'run'}"


def test_a_public_record_is_this_one() -> None:
    from ranktape.storage import Record as Public

    assert Public is Record


def test_a_record_draws_the_share_of_its_values_in_each_power_of_two(tmp_path: Path) -> None:
    values = np.array([[1.0, -1.5, 2.0, 0.25], [0.0, np.nan, np.inf, 3.0]], dtype=np.float32)
    write_run(str(tmp_path / "run"), {0: [[(values, describe(values, module="up"))]]})
    (record,) = Run(open_backend(str(tmp_path / "run"))).select()
    axes = record.hist(axes=Figure().subplots())
    (drawn,) = axes.containers
    assert isinstance(drawn, BarContainer)
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in drawn.patches}
    assert bars == {0: 2 / 8, 1: 2 / 8, -2: 1 / 8}
    assert axes.get_title().endswith("0.125 zero, 0.125 NaN, 0.125 Inf")
