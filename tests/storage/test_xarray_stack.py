"""Is a stack the records' own bits under their labels, read when and only where they are computed with?"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.errors import DataError, UsageError
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.labelled import RecordGrid
from ranktape.storage.records.records import Records
from tests.runs import Tensors, describe, write_run
from tests.storage.wrapped import CountingReader

pytest.importorskip("dask.array")
pytest.importorskip("xarray")

DTYPES = (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64)


def bits(values: Any) -> np.ndarray[Any, Any]:
    """The bytes of an array, that NaN equals NaN and a zero of one sign not that of the other."""
    array = np.asarray(values)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)


def drawn(dtype: Any, *, iteration: int, rank: int, layer: int) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng([iteration, rank, layer]).integers(0, 256, (3, 4, 512 * np.dtype(dtype).itemsize))
    return raw.astype(np.uint8).view(dtype)


def make_run(url: Path, *, dtype: Any = ml_dtypes.bfloat16, same_ids: bool = False) -> Records:
    """Two iterations, two ranks, two layers; each rank has samples of its own."""

    def tensors(iteration: int, rank: int) -> Tensors:
        for layer in (0, 1):
            array = drawn(dtype, iteration=iteration, rank=rank, layer=layer)
            place: dict[str, Any] = {"iteration": iteration, "rank": rank, "layer_idx": layer, "counter": layer}
            ids = [10 * rank * (not same_ids) + sample for sample in range(3)]
            names = {"module": f"layers.{layer}.query", "layout": "BTH"}
            yield array, describe(array, **place, **names, sample_dim=0, sample_ids=ids)

    return write_run(url, {step: [list(tensors(step, rank)) for rank in (0, 1)] for step in (3, 7)}).select()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stack_has_the_records_bits(tmp_path: Path, dtype: Any) -> None:
    records = make_run(tmp_path / "run", dtype=dtype)
    stack = records.stack()
    assert stack.dims == ("iteration", "rank", "layer_idx", "sample", "T", "H")
    assert stack.dtype == np.dtype(dtype)
    assert stack.data.chunks == ((1, 1), (1, 1), (1, 1), (3,), (4,), (512,))
    values = stack.compute()
    for record in records:
        own = values.sel(iteration=record.iteration, rank=record.rank, layer_idx=record.layer_idx)
        np.testing.assert_array_equal(bits(own), bits(record.read()))
        assert own.coords["module"].item() == record.module
        assert own.coords["sample_ids"].values.tolist() == record.sample_ids
    assert stack.name == "input"
    assert stack.attrs["operation"] == "forward"


def test_nothing_is_read_before_it_is_computed_with(tmp_path: Path) -> None:
    reader = CountingReader(open_backend(tmp_path / "run"))
    records = reader.of(make_run(tmp_path / "run"))
    part = records.stack().sel(iteration=7, rank=1)
    assert reader.reads == []
    part.isel(layer_idx=0).compute()
    assert reader.reads == [(7, 1, 0, None)]


def test_one_sample_is_read_alone(tmp_path: Path) -> None:
    reader = CountingReader(open_backend(tmp_path / "run"))
    records = reader.of(make_run(tmp_path / "run"))
    one = records.stack().isel(sample=2, T=slice(1, 3)).sel(iteration=3, rank=0, layer_idx=1).compute()
    assert reader.reads == [(3, 0, 1, 2)]
    expected = drawn(ml_dtypes.bfloat16, iteration=3, rank=0, layer=1)[2, 1:3]
    np.testing.assert_array_equal(bits(one), bits(expected))


@pytest.mark.parametrize("key", [(slice(None), 0, 1), (0, 1, 0), (slice(1, 2), slice(0, 1), slice(None))])
@pytest.mark.parametrize("inner", [(slice(1, 2), 3, slice(5, 9)), (0, slice(None), -1), (slice(None), 2, slice(2, 2))])
def test_slices_are_numpys(tmp_path: Path, key: tuple[Any, ...], inner: tuple[Any, ...]) -> None:
    stack = make_run(tmp_path / "run").stack()
    whole = stack.data.compute()
    np.testing.assert_array_equal(bits(stack.data[key + inner].compute()), bits(whole[key + inner]))


@pytest.mark.parametrize("axis", range(6))
def test_lists_of_places_are_numpys(tmp_path: Path, axis: int) -> None:
    stack = make_run(tmp_path / "run").stack()
    key = (*(slice(None) for _ in range(axis)), [1, 0])
    whole = stack.data.compute()
    np.testing.assert_array_equal(bits(stack.data[key].compute()), bits(whole[key]))
    grid = RecordGrid(make_run(tmp_path / "other"), np.arange(8).reshape(2, 2, 2))
    full = (*key, *(slice(None) for _ in range(5 - axis)))
    np.testing.assert_array_equal(bits(grid[full]), bits(whole[key]))


def test_a_stack_goes_to_other_processes(tmp_path: Path) -> None:
    stack = make_run(tmp_path / "run").stack()
    copied = pickle.loads(pickle.dumps(stack))  # noqa: S301  # our own
    np.testing.assert_array_equal(bits(copied), bits(stack))


def test_samples_that_all_records_share_label_the_dimension(tmp_path: Path) -> None:
    stack = make_run(tmp_path / "run", same_ids=True).stack()
    assert stack.coords["sample"].values.tolist() == [0, 1, 2]
    assert "sample_ids" not in stack.coords


def test_one_record_is_a_stack_without_further_dimensions(tmp_path: Path) -> None:
    records = make_run(tmp_path / "run").select(iteration=3, rank=0, layer_idx=0)
    stack = records.stack()
    assert stack.dims == ("sample", "T", "H")
    np.testing.assert_array_equal(bits(stack), bits(records[0].read()))
    assert stack.attrs["iteration"] == 3


def test_selections_in_another_order_are_the_same_stack(tmp_path: Path) -> None:
    records = make_run(tmp_path / "run")
    np.testing.assert_array_equal(bits(records[::-1].stack()), bits(records.stack()))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_scalars_and_empty_tensors_are_stacked(tmp_path: Path, shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    arrays: list[np.ndarray[Any, Any]] = [np.full(shape, rank, dtype=np.int64) for rank in ranks]
    parts = [[(array, describe(array, rank=rank))] for rank, array in enumerate(arrays)]
    stack = write_run(tmp_path / "run", {0: parts}).select().stack()
    own = tuple(f"dim{dim}" for dim in range(len(shape)))
    assert stack.dims == (("rank", *own) if len(ranks) > 1 else own)
    np.testing.assert_array_equal(stack.values, np.stack(arrays) if len(ranks) > 1 else arrays[0])


def test_damage_is_refused(tmp_path: Path) -> None:
    records = make_run(tmp_path / "run")
    stack = records.stack()
    shard = next((tmp_path / "run").glob("attempt*/rank_00001/iter_00000007/stack*/c.*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    stack.sel(rank=0).compute()
    with pytest.raises(DataError, match="is damaged"):
        stack.sel(rank=1).compute()


def test_records_of_several_forms_are_refused(tmp_path: Path) -> None:
    forms = [((2, 3), np.float32), ((2, 3), np.float16), ((2, 4), np.float32)]
    arrays: list[np.ndarray[Any, Any]] = [np.zeros(shape, dtype) for shape, dtype in forms]
    tensors = [(array, describe(array, tensor_name=f"of_{place}")) for place, array in enumerate(arrays)]
    records = write_run(tmp_path / "run", {0: [tensors]}).select()
    with pytest.raises(UsageError, match=r"several values of dtype .*select\(dtype='float32'\)"):
        records.stack()
    with pytest.raises(UsageError, match=r"several values of shape .*select\(shape='\[2,3\]'\)"):
        records.select(dtype="float32").stack()
    assert records.select(dtype="float32").select(shape="[2,3]").stack().shape == (2, 3)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    records = make_run(tmp_path / "run").where("not (iteration == 7 and rank == 1 and layer_idx == 0)")
    with pytest.raises(UsageError, match="iteration=7 rank=1 layer_idx=0"):
        records.stack()


def test_records_that_are_alike_are_refused(tmp_path: Path) -> None:
    records = make_run(tmp_path / "run")
    twice = records.take([0, 0])
    with pytest.raises(UsageError, match="several records are alike"):
        twice.stack()


def test_no_records_are_no_stack(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no record is selected"):
        make_run(tmp_path / "run").select(rank=9).stack()


@pytest.mark.parametrize("missing", ["dask.array", "xarray"])
def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    records = make_run(tmp_path / "run")
    monkeypatch.delitem(sys.modules, "ranktape.storage.records.labelled")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=r"pip install 'ranktape\[dask\]'"):
        records.stack()
