"""Does a run show what was committed, all of it, and nothing else?"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr

from ranktape.errors import (
    CaptureError,
    DataError,
    RunExistsError,
    RunFormatError,
    RunNotFoundError,
    UnknownFieldError,
    UsageError,
)
from ranktape.storage import IterationState, open_run
from ranktape.storage.format import blob
from ranktape.storage.format.attempt import Launch
from ranktape.storage.format.catalogue import COLUMNS, concatenate
from ranktape.storage.format.commit import finish_iteration, read_commit, read_whole_commit
from ranktape.storage.format.documents import encode_document
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import open_iteration, read_progress, write_verdict
from ranktape.storage.places.urls import open_backend
from ranktape.storage.query.columns import StringColumn
from ranktape.storage.recording.start import join_attempt
from ranktape.storage.records.reader import RunReader
from tests.runs import describe, start, write_run


def tensors(*, rank: int, iteration: int = 0, count: int = 3) -> list[tuple[np.ndarray[Any, Any], Any]]:
    rng = np.random.default_rng(1000 * iteration + rank)
    arrays = [rng.standard_normal((4, 8, 64)).astype(ml_dtypes.bfloat16) for _ in range(count)]
    return [
        (
            array,
            describe(
                array,
                iteration=iteration,
                rank=rank,
                module=f"layers.{index}.query",
                layer_idx=index,
                layer_type="attention" if index == 2 else "linear",
                sample_dim=0,
            ),
        )
        for index, array in enumerate(arrays)
    ]


def attempt_folder(url: str) -> Path:
    """Where the only attempt of a run lies."""
    [folder] = Path(url).glob("attempt_*")
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run of two ranks with iterations 10 and 20."""
    place = str(tmp_path / "run")
    write_run(place, {i: [tensors(rank=0, iteration=i), tensors(rank=1, iteration=i)] for i in (10, 20)})
    return place


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
        assert record.array.shape == (3, 4, 8, 64)
        assert np.asarray(record.array[record.location.index]).tobytes() == expected.tobytes()


def test_selecting_opens_no_array(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(url)
    monkeypatch.setattr(zarr, "open_array", lambda *_, **__: pytest.fail("an array was opened"))
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
        ({"module": "layers.7*"}, 0),
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


def test_a_selection_knows_what_filters_left_out(url: str) -> None:
    run = open_run(url)
    chosen = run.select(iteration=run.iterations[0]).select(rank=0)[1:]
    everything, places = chosen.unfiltered()
    assert [one.path for one in everything] == [one.path for one in run.select(iteration=run.iterations[0])]
    assert [everything[place].path for place in places] == [one.path for one in chosen]


def test_records_without_a_value_are_one_group(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    array = np.ones((2, 3), np.float32)
    dims = (None, 0, None, 1)
    write_run(url, {0: [[(array, describe(array, sample_dim=dim, call=call)) for call, dim in enumerate(dims)]]})
    groups = open_run(url).select().group_by(["sample_dim"])
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        members = list(zarr.open_group(url, mode="r", use_consolidated=False).members(max_depth=None))
    arrays = [path for path, node in members if isinstance(node, zarr.Array)]
    # Two iterations on two ranks, each with one stack and its catalogue; and the catalogues of both iterations.
    assert len(arrays) == 2 * 2 * 2 + 2


def test_xarray_opens_an_iteration_of_a_rank(url: str) -> None:
    xarray = pytest.importorskip("xarray")
    dataset = xarray.open_zarr(f"{attempt_folder(url)}/rank_00001/iter_00000010", consolidated=True)
    assert dict(dataset["stack_bfloat16_4x8x64_0"].sizes) == {"capture_3": 3, "dim0_4": 4, "dim1_8": 8, "dim2_64": 64}


def test_an_uncommitted_rank_hides_the_iteration(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, writers = start(url, world_size=2, min_iterations=1)
    open_iteration(backend, attempt=attempt, iteration=5)
    for array, info in tensors(rank=0, iteration=5):
        writers[0].write(array, info=info)
    writers[0].commit(5, expected=[], silent_sites={})
    for array, info in tensors(rank=1, iteration=5):
        writers[1].write(array, info=info)
    run = open_run(url)
    assert run.iterations == []
    assert len(run.select()) == 0
    assert read_progress(backend, attempt).ready() == []
    [status] = run.status()
    assert (status.state, status.committed_ranks) == (IterationState.OPEN, [0])
    assert status.missing == {1: "has not committed yet"}
    writers[1].mark(5, mark=Mark.FAILED, attributes={"reason": "the training process died"})
    [status] = open_run(url).status()
    assert (status.state, status.missing) == (IterationState.PARTIAL, {1: "the training process died"})
    assert not open_run(url).verdict().met
    assert "iteration 5 is partial (rank 1: the training process died)" in open_run(url).verdict().message()


def test_a_skipped_iteration_is_hidden_and_named(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, writers = start(url, world_size=2)
    open_iteration(backend, attempt=attempt, iteration=5)
    writers[0].commit(5, expected=[], silent_sites={})
    writers[1].mark(5, mark=Mark.SKIPPED, attributes={"reason": "no room"})
    [status] = open_run(url).status()
    assert (status.state, status.missing) == (IterationState.SKIPPED, {1: "no room"})


def test_a_verdict_ends_the_waiting(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, writers = start(url, world_size=2, min_iterations=2)
    open_iteration(backend, attempt=attempt, iteration=5)
    writers[0].commit(5, expected=[], silent_sites={})
    writers[0].close(reason="the training ended after 6 iterations")
    verdict = write_verdict(backend, attempt=attempt)
    assert (verdict.met, verdict.final, verdict.complete) == (False, True, [])
    assert "rank 1: never reported" in verdict.message()
    assert "the training ended after 6 iterations" in verdict.message()
    assert open_run(url).verdict() == verdict


def test_two_finishers_leave_one_commit(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, writers = start(url)
    for array, info in tensors(rank=0):
        writers[0].write(array, info=info)
    writers[0].commit(0, expected=["a"], silent_sites={"a": "its hook did not fire"})
    finish_iteration(backend, attempt=attempt, iteration=0)
    first = (tmp_path / "run" / attempt.path / "iterations/iter_00000000/zarr.json").read_bytes()
    finish_iteration(backend, attempt=attempt, iteration=0)
    assert (tmp_path / "run" / attempt.path / "iterations/iter_00000000/zarr.json").read_bytes() == first
    assert open_run(url).status()[0].silent_sites == {0: {"a": "its hook did not fire"}}


def test_a_foreign_run_is_refused_resumed_or_overwritten(url: str) -> None:
    with pytest.raises(RunExistsError, match=r"--resume .* --overwrite"):
        start(url, launch_id="another")
    assert open_run(url).iterations == [10, 20]
    _, attempt, _ = start(url, launch_id="another", resume=True)
    assert (attempt.number, attempt.completed) == (1, (10, 20))
    start(url, launch_id="a third", overwrite=True)
    assert open_run(url).iterations == []


def test_the_same_launch_resumes_by_itself(url: str) -> None:
    backend, attempt, [writer] = start(url, restart=1)
    assert attempt.number == 1
    for array, info in tensors(rank=0, iteration=20, count=1):
        writer.write(array, info=info)
    writer.commit(20, expected=[], silent_sites={})
    finish_iteration(backend, attempt=attempt, iteration=20)
    run = open_run(url)
    # The latest attempt of each iteration, unless asked for all.
    assert len(run.select(iteration=20)) == 1
    assert len(run.select(iteration=10)) == 6
    assert len(run.select(iteration=20, attempt="0-9")) == 7


def test_a_restart_finishes_what_the_coordinator_left(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    _, _, [writer] = start(url)
    writer.commit(7, expected=[], silent_sites={})
    assert open_run(url).iterations == []
    _, attempt, _ = start(url, restart=1)
    assert attempt.completed == (7,)
    assert open_run(url).iterations == [7]


def test_data_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RunExistsError, match=r"holds no run .*thesis\.tex"):
            start(str(tmp_path), overwrite=overwrite)
    zarr.create_group(tmp_path / "other")
    with pytest.raises(RunFormatError, match="holds a Zarr group, but no run"):
        start(str(tmp_path / "other"), overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"no run at .*nothing: check the URL"):
        open_run(tmp_path / "nothing")
    (tmp_path / "zarr.json").write_text("{")
    with pytest.raises(RunFormatError, match="not JSON"):
        open_run(tmp_path)
    (tmp_path / "zarr.json").write_text(
        '{"zarr_format": 3, "node_type": "group", "attributes": {"ranktape_schema": 99}}'
    )
    with pytest.raises(RunFormatError, match="schema 99, this version reads schema 1: read it with"):
        open_run(tmp_path)


def test_a_rank_that_sees_another_store_says_so(tmp_path: Path) -> None:
    start(str(tmp_path / "run"), world_size=2)
    backend, _, _ = start(str(tmp_path / "elsewhere"), world_size=2)
    launch = Launch(launch_id="launch", restart=7, world_size=2)
    with pytest.raises(CaptureError, match="give a URL that all nodes share"):
        join_attempt(backend, launch=launch, timeout_seconds=0.2)
    found = join_attempt(backend, launch=Launch(launch_id="launch", restart=0, world_size=2), timeout_seconds=0.2)
    assert found.number == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_values_are_found_and_named(url: str, damage: str) -> None:
    record = open_run(url).select()[0]
    path = Path(url) / record.location.array_path / "c.0.0.0.0"
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


def test_damaged_documents_are_found_and_named(url: str) -> None:
    record = open_run(url).select()[0]
    document = Path(url) / record.location.array_path / "zarr.json"
    text = document.read_bytes()
    document.write_bytes(text.replace(b'"rank":0', b'"rank":1'))
    with pytest.raises(DataError, match="its checksum differs"):
        record.read()
    # A stranger can make a right checksum of a wrong document.
    hostile = json.loads(text.replace(b'"name":"regular"', b'"name":"hostile"'))
    del hostile["attributes"]["ranktape_checksum"]
    document.write_bytes(encode_document(hostile, key=f"{record.location.array_path}/zarr.json"))
    with pytest.raises(DataError, match="other chunks or codecs"):
        record.read()
    document.unlink()
    with pytest.raises(DataError, match="is committed, but missing"):
        record.read()
    catalogue = attempt_folder(url) / "iterations/iter_00000010/c.0"
    catalogue.write_bytes(catalogue.read_bytes()[:-1])
    with pytest.raises(DataError, match="its checksum differs"):
        open_run(url).select()


def test_a_commit_that_lost_a_record_is_not_finished(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, [writer] = start(url)
    for array, info in tensors(rank=0):
        writer.write(array, info=info)
    writer.commit(0, expected=[], silent_sites={})
    key = f"{attempt.path}/rank_00000/iter_00000000/zarr.json"
    path = tmp_path / "run" / key
    document = json.loads(path.read_text())
    members = document.pop("consolidated_metadata")["metadata"]
    [stack] = [member for name, member in members.items() if name.startswith("stack_")]
    stack["attributes"]["captures"].pop()
    encoded = {name: json.dumps(member).encode() for name, member in members.items()}
    del document["attributes"]["ranktape_checksum"]
    path.write_bytes(encode_document(document, key=key, members=encoded))
    with pytest.raises(DataError, match="says 3 records and holds 2"):
        read_whole_commit(backend, attempt.path, 0, 0)
    path.unlink()
    with pytest.raises(DataError, match="marked iteration 0 as committed, but"):
        finish_iteration(backend, attempt=attempt, iteration=0)


def test_nan_everywhere_empty_and_scalar_records(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    arrays = [np.full((2, 3), np.nan, np.float32), np.zeros((0, 3), np.float32), np.array(2.5)]
    write_run(url, {0: [[(array, describe(array, call=index)) for index, array in enumerate(arrays)]]})
    records = open_run(url).select()
    assert [record.overflow.nan.count for record in records] == [6, 0, 0]
    assert [record.overflow.absmax for record in records] == [None, None, 2.5]
    assert [math.prod(record.read().shape) for record in records] == [6, 0, 1]


def test_the_catalogue_of_a_commit_says_what_its_documents_say(url: str) -> None:
    run = open_run(url)
    attempt = attempt_folder(url).name
    backend = open_backend(url)
    for rank in (0, 1):
        fast, slow = read_commit(backend, attempt, rank, 10), read_whole_commit(backend, attempt, rank, 10)
        assert (fast.nbytes, fast.silent_sites, fast.checksum) == (slow.nbytes, slow.silent_sites, slow.checksum)
        for name in COLUMNS:
            one, other = (concatenate([commit.catalogue.column(name)]) for commit in (fast, slow))
            if isinstance(one, StringColumn):
                assert isinstance(other, StringColumn)
                assert [one.table[code] for code in one.codes] == [other.table[code] for code in other.codes]
            else:
                np.testing.assert_array_equal(one, other)
    assert len(run.select(iteration=10)) == 6


def test_a_large_catalogue_is_read_by_columns(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [record.info for record in open_run(url).select()]
    monkeypatch.setattr(blob, "WHOLE_NBYTES", 0)
    assert [record.info for record in open_run(url).select()] == whole
    catalogue = attempt_folder(url) / "iterations/iter_00000010/c.0"
    data = catalogue.read_bytes()
    for damaged in (data[:200], data[:300] + bytes(200) + data[500:]):
        catalogue.write_bytes(damaged)
        with pytest.raises(RunFormatError, match="damaged"):
            list(open_run(url).select(layer_idx=1, layer_type="linear", overflow__nan__count=0))


def test_a_live_run_is_refreshed(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, [writer] = start(url)
    run = open_run(url)
    assert (run.iterations, run.refresh()) == ([], [])
    for iteration in (3, 4):
        for array, info in tensors(rank=0, iteration=iteration):
            writer.write(array, info=info)
        writer.commit(iteration, expected=[], silent_sites={})
        finish_iteration(backend, attempt=attempt, iteration=iteration)
    before = run.select()
    assert run.refresh() == [3, 4]
    assert (len(before), len(run.select()), run.refresh()) == (0, 6, [])


def test_looking_again_sees_what_looking_anew_sees(tmp_path: Path) -> None:
    backend, attempt, writers = start(str(tmp_path / "run"), world_size=2)
    known = read_progress(backend, attempt)
    for iteration in range(6):
        open_iteration(backend, attempt=attempt, iteration=iteration)
        for writer in writers[: 1 + iteration % 2]:
            if iteration == 3:
                writer.mark(iteration, mark=Mark.SKIPPED, attributes={"reason": "no room"})
            else:
                writer.commit(iteration, expected=[], silent_sites={})
        known = read_progress(backend, attempt, known=known)
        assert known == read_progress(backend, attempt)
        for ready in known.ready():
            finish_iteration(backend, attempt=attempt, iteration=ready)
    writers[0].close(reason="done")
    assert read_progress(backend, attempt, known=known) == read_progress(backend, attempt)


def test_long_names_are_nested_groups(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    array = np.ones(3, np.float32)
    module = ".".join(f"submodule_{index}" for index in range(40))
    write_run(url, {0: [[(array, describe(array, module=module)), (array, describe(array, module=module, call=1))]]})
    [record, _] = open_run(url).select()
    assert record.module == module
    assert record.read().tolist() == [1, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(zarr.open_group(url, mode="r", use_consolidated=False).members(max_depth=None))


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
    url = str(tmp_path / "run")
    arrays = [np.zeros((0, 3), ml_dtypes.bfloat16), np.zeros((2, 0), np.float32), np.zeros(0, np.int64)]
    write_run(url, {0: [[(array, describe(array, call=index)) for index, array in enumerate(arrays)]]})
    read = [record.tensor() for record in open_run(url).select()]
    assert [tuple(tensor.shape) for tensor in read] == [(0, 3), (2, 0), (0,)]
    assert [tensor.dtype for tensor in read] == [torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize("url", ["/" + "/".join(["d" * 200] * 19), "memory://bucket/" + "p" * 700])
def test_a_url_below_which_no_key_has_room_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(UsageError, match=r"bytes too long .* give a shorter URL"):
        start(url)
