"""Do other tools read a whole run, with stacks, shards, odd names and every dtype, and do they see the same bits?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr

from ranktape.storage.format.record_info import Keep
from ranktape.storage.records.record import Record
from ranktape.storage.records.run import open_run
from tests.runs import describe, write_run, zarr_array
from tests.storage.test_zarr_types import NOT_IN_TENSORSTORE
from tests.strategies import raw_bytes

GOLDEN = Path(__file__).parent.parent / "golden"
RUNS = ["restarted", "modes", "blocks", "large"]


def stored(record: Record) -> np.ndarray[Any, Any]:
    if record.keep == Keep.STATISTICS:
        return record.statistics().to_vector()
    if record.keep == Keep.HISTOGRAM:
        return record.histogram()
    return record.read()


@pytest.fixture(scope="module", params=RUNS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it, and one whose tensors are as large as those that are cut into samples."""
    if request.param != "large":
        return GOLDEN / str(request.param)
    folder = tmp_path_factory.mktemp("runs") / "large"
    random = np.random.default_rng(0)

    def tensors(iteration: int, rank: int) -> Any:
        shapes = [(4, 256, 512), (8, 16), (8, 16), (8, 16), (16,)]
        for number, shape in enumerate(shapes):
            array = random.standard_normal(shape).astype(ml_dtypes.bfloat16)
            dim = 0 if number < 4 else None
            names = {"module": f"layers.{number}.query", "layer_idx": number, "counter": number}
            yield array, describe(array, iteration=iteration, rank=rank, sample_dim=dim, **names)

    write_run(str(folder), {iteration: [list(tensors(iteration, rank)) for rank in (0, 1)] for iteration in (0, 4)})
    return folder


@pytest.fixture
def records(folder: Path) -> list[Record]:
    return list(open_run(folder).select())


def test_zarr_walks_the_run(folder: Path, records: list[Record]) -> None:
    arrays = {path: node for path, node in members(folder).items() if isinstance(node, zarr.Array)}
    for record in records:
        values = np.asarray(arrays[record.location.array_path][...])
        assert raw_bytes(values[record.location.index] if record.location.stack else values) == raw_bytes(
            stored(record)
        )


def members(folder: Path) -> dict[str, Any]:
    group = zarr.open_group(str(folder), mode="r", use_consolidated=False)
    return dict(group.members(max_depth=None))


def test_zarr_reads_a_rank(folder: Path, records: list[Record]) -> None:
    for record in records:
        group = zarr.open_group(f"{folder}/{record.location.group}", mode="r")
        array = group[record.location.stack or record.location.site]
        assert isinstance(array, zarr.Array)
        values = np.asarray(array[record.location.index] if record.location.stack else array[...])
        assert raw_bytes(values) == raw_bytes(stored(record))


def test_xarray_opens_a_rank(folder: Path, records: list[Record]) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("dask.array")
    for group in {record.location.group for record in records}:
        dataset = xarray.open_zarr(f"{folder}/{group}", consolidated=False)
        for record in records:
            name = record.location.stack or record.location.site
            # Names that go over two segments are groups to zarr, and no variables of this one.
            if record.location.group == group and "/" not in name:
                array = dataset[name]
                values = array[record.location.index].values if record.location.stack else array.values
                assert raw_bytes(values) == raw_bytes(stored(record))


def test_xarray_opens_the_whole_run_as_a_tree(folder: Path, records: list[Record]) -> None:
    xarray = pytest.importorskip("xarray")
    tree = xarray.open_datatree(str(folder), engine="zarr", consolidated=False)
    for record in records:
        path, _, name = record.location.array_path.rpartition("/")
        array = tree[path][name]
        values = array[record.location.index].values if record.location.stack else array.values
        assert raw_bytes(values) == raw_bytes(stored(record))
    tree.close()


def test_dask_reads_an_array_chunk_by_chunk(folder: Path, records: list[Record]) -> None:
    dask_array = pytest.importorskip("dask.array")
    for record in records:
        array = dask_array.from_zarr(f"{folder}/{record.location.array_path}")
        part = array[record.location.index] if record.location.stack else array
        assert raw_bytes(part.compute(scheduler="synchronous")) == raw_bytes(stored(record))


def test_tensorstore_reads_every_array(folder: Path, records: list[Record]) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    for record in records:
        if record.dtype not in NOT_IN_TENSORSTORE:
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/{record.location.array_path}/"}}
            array = tensorstore.open(spec, read=True).result()
            part = array[record.location.index] if record.location.stack else array
            assert raw_bytes(part.read().result()) == raw_bytes(stored(record))


def test_all_kinds_of_arrays_were_there(records: list[Record]) -> None:
    sharded = {zarr_array(record).shards is not None for record in records if not record.location.stack}
    assert sharded == {True, False}
    assert any(record.location.stack for record in records)
