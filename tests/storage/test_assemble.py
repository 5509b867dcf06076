"""Is a tensor that several ranks held rebuilt bit by bit, and is what is missing or contradicts itself refused?"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ranktape.analyze.legacy.open import open_source
from ranktape.errors import DataError, IncompleteTensorError, RanktapeError, ReplicaMismatchError, UsageError
from ranktape.storage import Records
from ranktape.storage.format.dtypes import DTYPES, round_once
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.assemble import GlobalView
from tests.launch.processes import torchrun
from tests.runs import describe, write_run

PROGRAM = Path(__file__).parent / "programs" / "dtensors.py"

Tensor = tuple[np.ndarray[Any, Any], RecordInfo]


def mesh(*shape: int) -> dict[str, Any]:
    """A mesh of the first ranks."""
    ranks = np.arange(int(np.prod(shape))).reshape(shape).tolist()
    return {"axes": ["dp", "tp", "pp"][: len(shape)], "shape": list(shape), "ranks": ranks}


def placed(
    array: np.ndarray[Any, Any],
    at: list[int],
    words: list[str],
    *,
    whole: list[int],
    offset: list[int],
    of: dict[str, Any] | None = None,
    **fields: Any,
) -> Tensor:
    """A part of a tensor, on a mesh of 2 x 2 where none is given."""
    grid = of or mesh(2, 2)
    ranks = np.array(grid["ranks"])
    document = {
        "mesh": grid,
        "coordinates": at,
        "placements": words,
        "global_shape": whole,
        "offset": offset,
        "partial": any(word.startswith("partial") for word in words),
    }
    changes = fields.pop("changes", {})
    return array, describe(array, rank=int(ranks[tuple(at)]), placement=document | changes, **fields)


def run_of(path: Path, *tensors: Tensor, world_size: int = 4) -> Records:
    """The records of a run of one iteration."""
    by_rank = [[tensor for tensor in tensors if tensor[1].rank == rank] for rank in range(world_size)]
    return write_run(path / "run", {0: by_rank}).select()


@pytest.fixture(scope="module")
def dtensors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Records, dict[str, np.ndarray[Any, Any]]]:
    """A run of what four ranks had of real DTensors, and what torch makes of them."""
    folder = tmp_path_factory.mktemp("dtensors")
    done = torchrun(PROGRAM, folder, cwd=folder, num_ranks=4)
    assert done.returncode == 0, done.stderr[-3000:]
    tensors = []
    for rank in range(4):
        parts = pickle.loads((folder / f"parts_{rank}.pickle").read_bytes())  # noqa: S301  # our own
        for counter, (name, (local, text)) in enumerate(parts.items()):
            array = as_numpy(local)
            fields = {"rank": rank, "module": name, "counter": counter, "placement": json.loads(text)}
            tensors.append((array, describe(array, **fields)))
    wholes = pickle.loads((folder / "wholes.pickle").read_bytes())  # noqa: S301
    return run_of(folder, *tensors), {name: as_numpy(whole) for name, whole in wholes.items()}


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_real_dtensors_are_what_torch_makes_of_them(
    dtensors: tuple[Records, dict[str, np.ndarray[Any, Any]]],
) -> None:
    records, wholes = dtensors
    views = {view.records[0].module: view for view in records.assemble()}
    assert list(views) == list(wholes)
    assert sum("fsdp and tp" in name for name in views) == 8
    for name, view in views.items():
        found, wanted = view.read(), wholes[name]
        assert (view.shape, view.dtype) == (wanted.shape, wanted.dtype.name), name
        assert len(view.records) == 4
        assert view.missing_ranks == ()
        assert view.is_partial == ("partial" in name or "summands" in name)
        if view.is_partial:
            # Rounded once here, and at every step there.
            np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=2**-7, atol=2**-7)
        else:
            assert found.tobytes() == wanted.tobytes(), name


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_each_record_knows_the_whole(dtensors: tuple[Records, dict[str, np.ndarray[Any, Any]]]) -> None:
    records, wholes = dtensors
    for record in records.select(module="strided"):
        view = record.global_view()
        assert view.placement == "dp=2 strided_shard(0, 2), tp=2 shard(0)"
        assert view.read().tobytes() == wholes["strided"].tobytes()
        assert view.tensor().dtype is torch.bfloat16
        assert view.tensor().float().numpy().tolist() == wholes["strided"].astype(np.float32).tolist()
    assert "bfloat16[8, 3] of 4 records" in repr(records.select(module="strided")[0].global_view())


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_check_agrees_with_torch_on_which_are_copies(
    dtensors: tuple[Records, dict[str, np.ndarray[Any, Any]]],
) -> None:
    records, _ = dtensors
    report = check_run(open_backend(records.reader.url), deep=True)
    assert [finding.message for finding in report.findings if finding.is_error] == []


def test_a_tensor_of_one_rank_is_its_own_whole(tmp_path: Path) -> None:
    arrays = [np.arange(4.0) + rank for rank in range(2)]
    tensors = [(array, describe(array, rank=rank)) for rank, array in enumerate(arrays)]
    records = run_of(tmp_path, *tensors, world_size=2)
    views = records.assemble()
    assert [view.read().tolist() for view in views] == [array.tolist() for array in arrays]
    assert [view.placement for view in views] == ["", ""]
    assert records[1].global_view().read().tolist() == arrays[1].tolist()


def halves(**fields: Any) -> list[Tensor]:
    """A tensor of 2 x 6, cut along tp and copied along dp."""
    whole = np.arange(12, dtype=np.float32).reshape(2, 6)
    words = ["replicate", "shard(1)"]
    places = [(dp, tp) for dp in range(2) for tp in range(2)]
    return [
        placed(whole[:, 3 * tp : 3 * tp + 3].copy(), [dp, tp], words, whole=[2, 6], offset=[0, 3 * tp], **fields)
        for dp, tp in places
    ]


def test_copies_that_differ_are_named(tmp_path: Path) -> None:
    tensors = halves()
    tensors[3][0][0, 0] = -1
    tensors[3] = (tensors[3][0], describe(tensors[3][0], rank=3, placement=tensors[3][1].placement))
    records = run_of(tmp_path, *tensors)
    (view,) = records.assemble()
    assert view.differing_replicas() == [(1, 3)]
    with pytest.raises(ReplicaMismatchError, match=r"differ between ranks 1, 3: .* replicas='ignore'"):
        view.read()
    with pytest.raises(ReplicaMismatchError):
        records[0].global_view().read()
    assert records[0].global_view(replicas="ignore").read().tolist() == np.arange(12.0).reshape(2, 6).tolist()
    with pytest.raises(UsageError, match="replicas='some' is not allowed: use one of check, ignore"):
        records.assemble(replicas="some")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    records = run_of(tmp_path, *halves())
    (view,) = records.select(rank=[0, 2]).assemble()
    assert view.missing_ranks == (1, 3)
    with pytest.raises(IncompleteTensorError, match=r"6 of 12 elements of .* there is no record of ranks 1, 3 here"):
        view.read()
    # One copy of each part is enough.
    (view,) = records.select(rank=[0, 3]).assemble()
    assert view.read().shape == (2, 6)
    # The record itself asks the run, and not the selection.
    assert records.select(rank=[0])[0].global_view().read().shape == (2, 6)


def test_a_selection_is_grouped_into_its_tensors(tmp_path: Path) -> None:
    tensors = [*halves(), *halves(mode="eval"), *halves(call=1), *halves(module="other")]
    records = run_of(tmp_path, *tensors)
    views = records.assemble()
    assert [len(view.records) for view in views] == [4] * 4
    assert sorted((view.records[0].module, view.records[0].call, view.records[0].mode) for view in views) == [
        ("layers.0.query", 0, "eval"),
        ("layers.0.query", 0, "train"),
        ("layers.0.query", 1, "train"),
        ("other", 0, "train"),
    ]
    assert {record.mode for record in records.select(mode="eval")[0].global_view().records} == {"eval"}


def test_summands_are_added_in_float64_and_rounded_once(tmp_path: Path) -> None:
    values = [1.0, 2.0**-8, 2.0**-40]
    arrays = [np.full((2, 3), value, ml_dtypes.bfloat16) for value in values]
    parts = [
        placed(array, [at], ["partial(sum)"], whole=[2, 3], offset=[0, 0], of=mesh(3))
        for at, array in enumerate(arrays)
    ]
    records = run_of(tmp_path, *parts, world_size=3)
    (view,) = records.assemble()
    assert view.is_partial
    # Just above the middle of two bfloat16: float32 would have lost the last summand, and rounded to the even one.
    assert view.read().astype(np.float64).tolist() == [[1 + 2.0**-7] * 3] * 2
    (view,) = records.select(rank=[0, 2]).assemble()
    with pytest.raises(IncompleteTensorError, match=r"1 of 3 summands of .* no record of rank 1 here"):
        view.read()


def test_whole_numbers_are_added_as_such(tmp_path: Path) -> None:
    parts = [
        placed(np.array([2**60 + 1], np.int64), [at], ["partial(sum)"], whole=[1], offset=[0], of=mesh(2))
        for at in range(2)
    ]
    (view,) = run_of(tmp_path, *parts, world_size=2).assemble()
    assert view.read().tolist() == [2**61 + 2]


def test_parts_without_values_are_refused(tmp_path: Path) -> None:
    array, vector = np.ones(4, np.float32), np.zeros(10)
    parts = [placed(array, [at], ["shard(0)"], whole=[8], offset=[4 * at], of=mesh(2)) for at in range(2)]
    kept = [(vector, describe(array, rank=1, placement=parts[1][1].placement, keep="statistics", nbytes=80))]
    (view,) = run_of(tmp_path, parts[0], *kept, world_size=2).assemble()
    with pytest.raises(UsageError, match=r"the statistics of a part were kept"):
        view.read()


ROWS, WORDS = np.ones((1, 3), np.float32), np.ones(4, np.float32)
REFUSED: dict[str, tuple[list[np.ndarray[Any, Any]], str, list[int], list[int], type[RanktapeError], str]] = {
    "samples": ([ROWS, ROWS], "shard(0)", [4, 3], [2, 0], IncompleteTensorError, r"6 of 12 .* not all samples were"),
    "product": ([WORDS, WORDS], "partial(product)", [4], [0], UsageError, "one of sum, avg, max, min can be"),
    "masked": ([WORDS, WORDS], "partial(masked)", [4], [0], UsageError, "one of sum, avg, max, min can be"),
    "dtypes": ([WORDS, np.ones(4)], "shard(0)", [8], [4], DataError, "several shapes or dtypes"),
    "overlap": ([WORDS, WORDS], "shard(0)", [8], [2], DataError, "lie over each other"),
}
"""Two parts, the word of their placement, the whole's shape and the second one's offset; what is said of them."""


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_are_no_whole_are_refused(tmp_path: Path, case: str) -> None:
    arrays, word, whole, offset, kind, match = REFUSED[case]
    offsets = ([0] * len(whole), offset)
    parts = [
        placed(array, [at], [word], whole=whole, offset=offsets[at], of=mesh(2)) for at, array in enumerate(arrays)
    ]
    (view,) = run_of(tmp_path, *parts, world_size=2).assemble()
    with pytest.raises(kind, match=match):
        view.read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_shape": [1 << 40, 1 << 40]}, "which no memory holds"),
        ({"global_shape": [1 << 30, 6]}, "6442450938 of 6442450944 elements"),
        ({"global_shape": [2, -6]}, "global_shape"),
        ({"global_shape": [2, 6, 1]}, "3 dimensions and 2 offsets"),
        ({"global_shape": [2.0, 6.0]}, "global_shape"),
        ({"offset": [0, -3]}, "offset"),
        ({"offset": [0, 4]}, "lead out of the whole"),
        ({"offset": [0]}, "1 offsets"),
        ({"coordinates": [0]}, "coordinates"),
        ({"coordinates": [0, 2]}, "coordinates"),
        ({"coordinates": [1, 1]}, "those of rank 3"),
        ({"placements": ["replicate"]}, "one name, one size and one word"),
        ({"placements": ["replicate", "shard(7)"]}, "shards a dimension"),
        ({"placements": ["replicate", "shard(-1)"]}, "the word 'shard"),
        ({"placements": ["replicate", "strided_shard(1, 999999999)"]}, "allowed are 1 to 65536"),
        ({"placements": ["replicate", "strided_shard(1, 2)"]}, "its strided shards give"),
        ({"placements": ["replicate", 5]}, "none that can be assembled"),
        ({"partial": True}, "partial is True"),
        ({"partial": 0}, "partial is 0"),
        ({"mesh": ["tp"]}, "names no ranks"),
        ({"mesh": {**mesh(2, 2), "shape": [2, 0]}}, "mesh shape"),
        ({"mesh": {**mesh(2, 2), "shape": [1 << 30, 1 << 30]}}, "a mesh of"),
        ({"mesh": {**mesh(2, 2), "ranks": [[0, 1], [2]]}}, "its ranks are not those"),
        ({"mesh": {**mesh(2, 2), "ranks": [[0, 1], [1, 0]]}}, "a rank is twice"),
        ({"mesh": {**mesh(2, 2), "ranks": [[0, 1], [2, -1]]}}, "ranks"),
        ({"mesh": {**mesh(2, 2), "axes": "dp"}}, "one name, one size and one word"),
        ({}, None),
    ],
)
def test_placements_of_a_stranger_are_refused(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    records = run_of(tmp_path, *halves(changes=changes)[:1])
    assert records[0].read().shape == (2, 3)
    with pytest.raises(DataError, match=message or "no record of rank 1, 2, 3|ranks 1, 2, 3"):
        records.assemble()[0].read()
    with pytest.raises(DataError):
        records[0].global_view().read()


def test_a_placement_without_a_field_is_refused(tmp_path: Path) -> None:
    array = np.ones(3)
    for number, document in enumerate(({}, {"mesh": mesh(1)}, {"mesh": [0, 1], "placements": ["replicate"]})):
        records = run_of(tmp_path / str(number), (array, describe(array, placement=document)), world_size=1)
        with pytest.raises(DataError, match="of iteration 0, rank 0 is none that can be assembled"):
            records.assemble()


def test_a_folder_does_not_know_what_other_ranks_recorded(tmp_path: Path) -> None:
    from ranktape.analyze.legacy.export import export_records

    export_records(run_of(tmp_path, *halves()), tmp_path / "files")
    records = open_source(str(tmp_path / "files")).select()
    with pytest.raises(UsageError, match="select them and use assemble"):
        records[0].global_view()
    (view,) = records.assemble()
    assert isinstance(view, GlobalView)
    assert view.read().tolist() == np.arange(12.0).reshape(2, 6).tolist()


@pytest.mark.parametrize("dtype", [name for name, row in DTYPES.items() if row.is_ml_dtype and row.is_floating])
def test_numbers_are_rounded_once(dtype: str) -> None:
    row = DTYPES[dtype]
    patterns = np.arange(1 << min(8 * row.itemsize, 8), dtype=np.uint8)
    known = patterns.astype(f"u{row.itemsize}") << (8 * (row.itemsize - 1))
    if dtype.startswith(("float4", "float6")):
        known = known[: 16 if dtype.startswith("float4") else 64]
    values = known.view(row.numpy_dtype).astype(np.float64)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    middles = (values[1:] + values[:-1]) / 2
    for moved, wanted in ((np.nextafter(middles, np.inf), values[1:]), (np.nextafter(middles, 0), values[:-1])):
        if row.itemsize == 1 and dtype != "float8_e8m0fnu":
            assert round_once(moved, row=row).astype(np.float64).tolist() == wanted.tolist()
            assert round_once(-moved, row=row).astype(np.float64).tolist() == (-wanted).tolist()
    special = round_once(np.array([np.nan, 0.0, -0.0, 1.0]), row=row).astype(np.float64)
    assert special[3] == 1.0
    assert round_once(np.array(1.0), row=row).shape == ()
