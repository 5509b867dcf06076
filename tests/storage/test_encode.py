"""Does every tensor come back bit for bit, through us and through other readers of Zarr?"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import ranktape.storage  # registers our data types with zarr
from ranktape.storage.documents import chunk_key, encode_document
from ranktape.storage.dtypes import DTYPES
from ranktape.storage.encode import MIN_SAMPLE_NBYTES, checksum, dimension_names, encode_array
from ranktape.storage.records import Record, RunReader
from ranktape.storage.urls import open_backend
from tests import strategies
from tests.runs import describe

tensorstore = pytest.importorskip("tensorstore")

assert ranktape.storage.register is not None


def store(folder: Path, array: np.ndarray[Any, Any], **fields: Any) -> Record:
    """Write one array as a rank would, and give the record to read it by."""
    backend = open_backend(folder)
    info = dataclasses.replace(describe(array, **fields), checksum=checksum(array))
    encoded = encode_array(array, info=info)
    backend.put("x/zarr.json", [encode_document(encoded.document)])
    if encoded.parts is not None:
        backend.put(f"x/{chunk_key(array.ndim)}", encoded.parts)
    return Record(info, path="x", reader=RunReader(backend))


@given(data=st.data())
def test_every_dtype_and_shape_comes_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    array = data.draw(strategies.arrays())
    sample_dim = None if array.ndim == 0 else data.draw(st.one_of(st.none(), st.integers(0, array.ndim - 1)))
    record = store(tmp_path_factory.mktemp("run"), array, sample_dim=sample_dim)
    values = record.read()
    assert values.dtype == array.dtype
    assert values.shape == array.shape
    assert strategies.raw_bytes(values) == strategies.raw_bytes(array)
    if sample_dim is not None and array.shape[sample_dim]:
        index = data.draw(st.integers(0, array.shape[sample_dim] - 1))
        assert strategies.raw_bytes(record.read(sample=index)) == strategies.raw_bytes(array.take(index, sample_dim))


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in strategies.WITHOUT_TORCH])
@pytest.mark.parametrize("sample_dim", [None, 0, 1])
def test_large_samples_are_chunks_of_their_own(tmp_path: Path, name: str, sample_dim: int | None) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2 if name == "bool" else 256, (3, 5, 1024 * DTYPES[name].itemsize), dtype=np.uint8)
    array = raw.view(DTYPES[name].numpy_dtype)
    record = store(tmp_path, array, sample_dim=sample_dim)
    expected = array.shape if sample_dim is None else tuple(np.where(np.arange(3) == sample_dim, 1, array.shape))
    assert (record.array.shards or record.array.chunks) == array.shape
    assert record.array.chunks == expected
    assert strategies.raw_bytes(record.read()) == array.tobytes()
    if sample_dim is not None:
        assert strategies.raw_bytes(record.read(sample=2)) == strategies.raw_bytes(array.take(2, sample_dim))


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int64"])
@pytest.mark.parametrize("sample_dim", [None, 0, 1])
def test_tensorstore_reads_the_same_bits(tmp_path: Path, name: str, sample_dim: int | None) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (3, 4, 2048 * DTYPES[name].itemsize), dtype=np.uint8)
    array = raw.view(DTYPES[name].numpy_dtype)
    store(tmp_path, array, sample_dim=sample_dim)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "x")}}
    read = tensorstore.open(spec).result().read().result()
    assert strategies.raw_bytes(read) == array.tobytes()


def test_plain_zarr_reads_the_same_bits(tmp_path: Path) -> None:
    array = np.arange(4096, dtype=np.uint16).view(DTYPES["bfloat16"].numpy_dtype).reshape(4, 1024)
    store(tmp_path, array, sample_dim=0)
    read = zarr.open_array(tmp_path / "x", mode="r")
    assert strategies.raw_bytes(np.asarray(read[...])) == array.tobytes()
    assert read.attrs["tensor_name"] == "input"


def test_small_samples_share_a_chunk(tmp_path: Path) -> None:
    array = np.zeros((64, MIN_SAMPLE_NBYTES // 4 - 1), dtype=np.float32)
    assert store(tmp_path, array, sample_dim=0).array.chunks == array.shape


def test_an_empty_tensor_has_no_object(tmp_path: Path) -> None:
    record = store(tmp_path, np.zeros((0, 7), dtype=np.float32))
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["zarr.json"]
    assert record.read().shape == (0, 7)


def test_a_zero_tensor_is_written(tmp_path: Path) -> None:
    store(tmp_path, np.zeros((2, 3), dtype=np.float32))
    assert (tmp_path / "x" / "c.0.0").stat().st_size == 24 + 4


def test_documents_are_plain_json(tmp_path: Path) -> None:
    array = np.array([np.inf, -np.inf, np.nan], dtype=np.float32)
    store(tmp_path, array)
    document = json.loads((tmp_path / "x" / "zarr.json").read_text(), parse_constant=pytest.fail)
    assert document["attributes"]["overflow"]["maximum"] == "inf"


def test_the_checksum_is_of_the_raw_bytes() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert checksum(array) == f"crc32c:{google_crc32c.value(array.tobytes()):08x}"
    assert checksum(array.T) == f"crc32c:{google_crc32c.value(array.T.tobytes()):08x}"
    assert checksum(np.zeros(0)) == "crc32c:00000000"


@given(strategies.record_infos())
def test_dimension_names_are_unique_and_tell_the_extent(info: Any) -> None:
    names = dimension_names(info)
    assert len(set(names)) == len(info.shape)
    assert math.prod(int(name.rpartition("_")[2]) for name in names) == math.prod(info.shape)
