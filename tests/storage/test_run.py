"""Does a run show what was committed, all of it, and nothing else?"""

from __future__ import annotations

import json
import math
import pickle
import shutil
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr

from ranktape.errors import (
    DataError,
    NoRecordsError,
    RunFormatError,
    RunNotFoundError,
    UnknownFieldError,
    UsageError,
)
from ranktape.storage import open_run
from ranktape.storage.format import arrays
from ranktape.storage.format.arrays import open_stored
from ranktape.storage.format.catalogue import Catalogue, catalogued_columns, documented_columns
from ranktape.storage.format.commit import finish_iteration, open_catalogue, open_rank_catalogue, read_commit
from ranktape.storage.format.documents import group_document
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.writer import RankWriter
from ranktape.storage.records import run as run_module
from ranktape.storage.records.run import RunReader
from tests.analyze.runs import store
from tests.runs import describe, start, write_run
from tests.storage.whole_run import forge


def tensors(*, rank: int, iteration: int = 0, count: int = 3) -> list[tuple[np.ndarray[Any, Any], Any]]:
    rng = np.random.default_rng(1000 * iteration + rank)
    arrays = [rng.standard_normal((4, 8, 64)).astype(ml_dtypes.bfloat16) for _ in range(count)]
    place: dict[str, Any] = {"iteration": iteration, "rank": rank, "sample_dim": 0}
    types = ["linear", "linear", "attention"]
    return [
        (array, describe(array, **place, module=f"layers.{index}.query", layer_idx=index, layer_type=types[index]))
        for index, array in enumerate(arrays)
    ]


def write_tensors(writer: RankWriter, *, rank: int = 0, iteration: int = 0, count: int = 3) -> None:
    for array, info in tensors(rank=rank, iteration=iteration, count=count):
        writer.write(array, info=info)


def attempt_folder(url: str) -> Path:
    """Where the only attempt of a run lies."""
    [folder] = Path(url).glob("attempt_*")
    return folder


def write_iterations(url: str) -> None:
    """A run of two ranks with iterations 10 and 20."""
    write_run(url, {i: [tensors(rank=0, iteration=i), tensors(rank=1, iteration=i)] for i in (10, 20)})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Such a run, which nobody changes."""
    place = str(tmp_path_factory.mktemp("whole") / "run")
    write_iterations(place)
    return place


@pytest.fixture
def own_url(url: str, tmp_path: Path) -> str:
    """A copy of it, to be damaged."""
    return str(shutil.copytree(url, tmp_path / "run"))


def test_a_complete_run_reads_back(url: str) -> None:
    run = open_run(url)
    assert run.iterations == [10, 20]
    records = run.select()
    assert len(records) == 12
    for record in records:
        expected = tensors(rank=record.rank, iteration=record.iteration)[record.layer_idx][0]
        assert record.read().tobytes() == expected.tobytes()
        assert record.read(sample=3).tobytes() == expected[3].tobytes()
        assert record.tensor().dtype is torch.bfloat16
        assert record.tensor().view(torch.uint16).numpy().tobytes() == expected.tobytes()


def test_selecting_opens_no_array(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(url)
    monkeypatch.setattr(RunReader, "read", lambda *_, **__: pytest.fail("values were read"))
    assert len(run.select(layer_type="attention", rank=[0, 1])) == 4


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({}, 12),
        ({"rank": 1}, 6),
        ({"rank": [0, 1], "iteration": 10}, 6),
        ({"iteration": "10:20"}, 6),
        ({"iteration": range(10, 21, 10)}, 12),
        ({"layer_type": "attention"}, 4),
        ({"module": "layers.*.query", "layer_idx": "0-1"}, 8),
        ({"module": "layers.*.query,layers.*.nothing"}, 12),
        ({"module": ["layers.0.*,layers.1.*", "layers.7*"]}, 8),
        ({"mode": "eval", "operation": "backward"}, 0),
        ({"layer_type": "attention", "layer_idx": 1}, 0),
        ({"overflow__nan__count": 0}, 12),
        ({"attempt": 0}, 12),
        ({"attempt": 1}, 0),
    ],
)
def test_filters(url: str, filters: dict[str, Any], count: int) -> None:
    assert len(open_run(url).select(**filters)) == count
    assert len(open_run(url).select().select(**filters)) == count


def test_filters_name_what_is_wrong(url: str) -> None:
    run = open_run(url)
    with pytest.raises(UnknownFieldError, match="layer_type"):
        run.select(layertype="attention")
    with pytest.raises(UnknownFieldError, match="no field 'layers'"):
        run.select().where("layers == 3")
    with pytest.raises(UnknownFieldError, match="no field 'nope'"):
        run.select().column("nope")
    with pytest.raises(UsageError, match="rank"):
        run.select(rank="zero")


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (
            {"layer_type": "atention"},
            r"no records match layer_type atention: layer_type is .*; did you mean attention\?",
        ),
        ({"layer_type": ["atention", "x"], "rank": 9}, "no records match layer_type atention,x: layer_type is "),
        ({"tensor_name": "ouput, qury"}, "no records match tensor_name ouput, qury: tensor_name is "),
        ({"module": "layers.7*"}, "no records match module layers.7"),
        ({"mode": "evl"}, r"mode is train \(12 records\)$"),
    ],
)
def test_a_text_that_no_record_has_is_answered_as_on_the_command_line(
    url: str, filters: dict[str, Any], message: str
) -> None:
    run = open_run(url)
    for records in (run, run.select(), run.select().where("layer_type == 'linear'")):
        with pytest.raises(NoRecordsError, match=message):
            records.select(**filters)
    (name, value), *_ = filters.items()
    text = value if isinstance(value, str) else value[0]
    assert len(run.select().where(f"like({name}, '{text}')")) == 0


def test_selections_nest_slice_and_group(url: str) -> None:
    records = open_run(url).select(iteration=20).where("layer_idx >= 1 and rank == 1")
    assert [record.layer_idx for record in records] == [1, 2]
    assert [record.layer_idx for record in records[1:]] == [2]
    assert records[-1].layer_type == "attention"
    assert records.column("layer_idx").tolist() == [1, 2]
    assert records.column("module").tolist() == ["layers.1.query", "layers.2.query"]
    assert [record.layer_idx for record in records.take([1, 0, -1])] == [2, 1, 2]
    assert len(records.take([])) == 0
    with pytest.raises(IndexError):
        records.take([2])
    groups = open_run(url).select().group_by(["layer_type", "rank"])
    assert [(key, len(group)) for key, group in groups] == [
        ({"layer_type": "attention", "rank": 0}, 2),
        ({"layer_type": "attention", "rank": 1}, 2),
        ({"layer_type": "linear", "rank": 0}, 4),
        ({"layer_type": "linear", "rank": 1}, 4),
    ]
    [(key, _)] = open_run(url).select(iteration=10, layer_idx=0, rank=0).group_by(["sample_dim", "placement"])
    assert key == {"sample_dim": 0.0, "placement": "null"}
    assert open_run(url).select(rank=7).group_by([])[0][0] == {}
    with pytest.raises(IndexError, match="selection of 2 records"):
        records[2]


def test_a_selection_that_is_sent_has_its_own_rows_alone(url: str) -> None:
    chosen = open_run(url).select().take([7, 2, 2, 11])
    sent = pickle.loads(pickle.dumps(chosen))  # noqa: S301  # our own
    assert [record.info for record in sent] == [record.info for record in chosen]
    assert [record.path for record in sent] == [record.path for record in chosen]
    np.testing.assert_array_equal(sent[3].read(), chosen[3].read())
    assert len(sent.unfiltered()[0]) == 4
    assert sent.column("overflow.ratio").tolist() == chosen.column("overflow.ratio").tolist()


def test_a_selection_knows_what_filters_left_out(url: str) -> None:
    run = open_run(url)
    chosen = run.select(iteration=run.iterations[0]).select(rank=0)[1:]
    everything, places = chosen.unfiltered()
    assert [one.path for one in everything] == [one.path for one in run.select(iteration=run.iterations[0])]
    assert [everything[place].path for place in places] == [one.path for one in chosen]


def test_records_without_a_value_are_one_group(tmp_path: Path) -> None:
    array = np.ones((2, 3), np.float32)
    infos = [describe(array, sample_dim=dim, call=call) for call, dim in enumerate((None, 0, None, 1))]
    groups = store(tmp_path / "run", [(array, info) for info in infos]).select().group_by(["sample_dim"])
    assert [(key["sample_dim"], len(group)) for key, group in groups] == [(0, 1), (1, 1), (None, 2)]


def test_samples_are_checked(url: str) -> None:
    record = open_run(url).select()[0]
    with pytest.raises(UsageError, match="samples 0 to 3"):
        record.read(sample=4)


def test_a_record_answers_for_its_fields_only(url: str) -> None:
    record = open_run(url).select()[0]
    assert record.info.quant_type == record.quant_type == "bf16"
    assert "layers.0.query forward pre input" in repr(record)
    with pytest.raises(AttributeError, match="quant"):
        _ = record.quant


def test_plain_zarr_walks_the_whole_run(url: str) -> None:
    members = zarr.open_group(url, mode="r", use_consolidated=False).members(max_depth=None)
    arrays = [path for path, node in members if isinstance(node, zarr.Array)]
    # Two iterations on two ranks, each with one stack and its catalogue; and the catalogues of both iterations.
    assert len(arrays) == 2 * 2 * 2 + 2


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"no run at .*nothing: check the URL"):
        open_run(tmp_path / "nothing")
    (tmp_path / "zarr.json").write_text("{")
    with pytest.raises(RunFormatError, match="not JSON"):
        open_run(tmp_path)
    document = group_document({"ranktape_schema": 99})
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(RunFormatError, match="schema 99, this version reads schema 1: read it with"):
        open_run(tmp_path)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_values_are_found_and_named(own_url: str, damage: str) -> None:
    record = open_run(own_url).select()[0]
    path = Path(own_url) / record.location.array_path / "c.0.0.0.0"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[10] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-5])
    else:
        path.unlink()
    with pytest.raises(DataError, match=r"layers\.0\.query"):
        record.read()
    if damage == "remove":
        with pytest.raises(DataError, match="lost"):
            record.read(sample=0)


def test_damaged_documents_are_found_and_named(own_url: str) -> None:
    record = open_run(own_url).select()[0]
    document = Path(own_url) / record.location.array_path / "zarr.json"
    text = document.read_bytes()
    document.write_bytes(text.replace(b'"rank":0', b'"rank":1'))
    with pytest.raises(DataError, match="its checksum differs"):
        record.read()
    # A stranger can make a right checksum of a wrong document.
    document.write_bytes(text)
    key = f"{record.location.array_path}/zarr.json"
    forge(Path(own_url), key, lambda hostile: hostile["chunk_grid"].update(name="hostile"))
    with pytest.raises(DataError, match="other chunks or codecs"):
        record.read()
    document.unlink()
    with pytest.raises(DataError, match="is committed, but missing"):
        record.read()
    catalogue = attempt_folder(own_url) / "iterations/iter_00000010/c.0"
    catalogue.write_bytes(catalogue.read_bytes()[:-1])
    with pytest.raises(DataError, match="its checksum differs"):
        open_run(own_url).select()


def test_a_commit_whose_catalogue_lost_a_record_is_not_finished(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, [writer] = start(url)
    write_tensors(writer)
    writer.commit(0, expected=[], silent_sites={})
    group = f"{attempt.path}/rank_00000/iter_00000000"
    forge(tmp_path / "run", f"{group}/zarr.json", lambda document: document["attributes"].update(num_records=4))
    with pytest.raises(DataError, match="has 3 records, the rank's commit says 4"):
        finish_iteration(backend, attempt=attempt, iteration=0)
    (tmp_path / "run" / group / "zarr.json").unlink()
    with pytest.raises(DataError, match="rank 0 has no commit of iteration 0"):
        finish_iteration(backend, attempt=attempt, iteration=0)


def test_nan_everywhere_empty_and_scalar_records(tmp_path: Path) -> None:
    arrays = [np.full((2, 3), np.nan, np.float32), np.zeros((0, 3), np.float32), np.array(2.5)]
    records = store(tmp_path, [(array, describe(array, call=call)) for call, array in enumerate(arrays)]).select()
    assert [record.overflow.nan.count for record in records] == [6, 0, 0]
    assert [record.overflow.absmax for record in records] == [None, None, 2.5]
    assert [math.prod(record.read().shape) for record in records] == [6, 0, 1]


def test_the_documents_of_arrays_say_what_the_catalogue_says(url: str) -> None:
    backend, attempt = open_backend(url), attempt_folder(url).name
    for rank in (0, 1):
        commit = read_commit(backend, attempt, rank, 10)
        columns = catalogued_columns(open_rank_catalogue(backend, attempt, rank, 10, commit))
        found: dict[str, list[Any]] = {name: [] for name in columns}
        for name in dict.fromkeys(stack or site for stack, site in zip(columns["stack"], columns["site"], strict=True)):
            stored = open_stored(backend, f"{attempt}/rank_{rank:05d}/iter_00000010/{name}")
            for column, values in documented_columns(stored.attributes, name=name).items():
                found[column] += values
        assert len(found["site"]) == commit.num_records > 0
        order = sorted(range(commit.num_records), key=lambda row: (found["counter"][row], found["site"][row]))
        assert {name: [values[row] for row in order] for name, values in found.items()} == columns


def test_a_large_catalogue_is_read_by_columns(own_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [record.info for record in open_run(own_url).select()]
    monkeypatch.setattr(arrays, "WHOLE_NBYTES", 0)
    assert [record.info for record in open_run(own_url).select()] == whole
    catalogue = attempt_folder(own_url) / "iterations/iter_00000010/c.0"
    data = catalogue.read_bytes()
    for damaged in (data[:200], data[:300] + bytes(200) + data[500:]):
        catalogue.write_bytes(damaged)
        with pytest.raises(RunFormatError, match="damaged"):
            list(open_run(own_url).select(layer_idx=1, layer_type="linear", overflow__nan__count=0))


def test_columns_of_iterations_that_nobody_holds_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "run")
    write_run(url, {iteration: [tensors(rank=0, iteration=iteration)] for iteration in range(5)})
    monkeypatch.setattr(run_module, "_MAX_CACHED_RECORDS", 6)
    read: list[tuple[int, weakref.ref[Any]]] = []

    def open_and_note(backend: Backend, attempt: str, iteration: int) -> Catalogue:
        catalogue = open_catalogue(backend, attempt, iteration)
        read.append((iteration, weakref.ref(catalogue)))
        return catalogue

    monkeypatch.setattr(run_module, "open_catalogue", open_and_note)
    run = open_run(url)
    first = run.select(iteration=0)
    for iteration in (*range(5), 4, 0):
        assert run.select(iteration=iteration).column("iteration").tolist() == [iteration] * 3
    # Those that are selected, and of six records those asked for last, which are not read again.
    assert [iteration for iteration, _ in read] == [0, 1, 2, 3, 4]
    assert [iteration for iteration, held in read if held() is not None] == [0, 4]
    del first
    assert len(run.select()) == 15
    assert sorted(iteration for iteration, _ in read[5:]) == [1, 2, 3]
    assert sum(held() is not None for _, held in read) == 2


def test_a_run_without_complete_iterations_answers_every_filter(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    start(url)
    run = open_run(url)
    for filters in ({"module": "x"}, {"module": ["x", "y*"]}, {"iteration": "0-3"}, {"overflow__ratio": 0.5}):
        assert len(run.select(**filters)) == 0
    assert len(run.select().where("overflow.ratio > 0 and layer_type == 'attention'")) == 0
    assert run.select().column("module").dtype == object
    assert run.select().column("overflow.ratio").dtype == np.float64
    assert run.select().group_by(["module"]) == []
    with pytest.raises(UsageError, match="rank holds numbers"):
        run.select(rank="x")


def test_empty_records_become_torch_tensors(tmp_path: Path) -> None:
    arrays = [np.zeros((0, 3), ml_dtypes.bfloat16), np.zeros((2, 0), np.float32), np.zeros(0, np.int64)]
    records = store(tmp_path, [(array, describe(array, call=call)) for call, array in enumerate(arrays)]).select()
    read = [record.tensor() for record in records]
    assert [tuple(tensor.shape) for tensor in read] == [(0, 3), (2, 0), (0,)]
    assert [tensor.dtype for tensor in read] == [torch.bfloat16, torch.float32, torch.int64]
