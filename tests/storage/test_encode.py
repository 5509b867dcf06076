"""Does every tensor come back bit for bit, through us and through other readers of Zarr?"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

import ranktape.storage  # registers our data types with zarr
from ranktape.errors import DataError
from ranktape.storage.format import arrays
from ranktape.storage.format.arrays import (
    MIN_SAMPLE_NBYTES,
    EncodedArray,
    checksum,
    combine,
    dimension_names,
    encode_array,
    encode_stack,
)
from ranktape.storage.format.documents import chunk_key, encode_document
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.record_info import Compression, RecordInfo
from ranktape.storage.format.zarr_floats import register
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.record import Location, Record
from ranktape.storage.records.run import RunReader
from tests import strategies
from tests.runs import describe, zarr_array

tensorstore = pytest.importorskip("tensorstore")

assert ranktape.storage.register is not None


def identity(array: np.ndarray[Any, Any], **fields: Any) -> RecordInfo:
    return dataclasses.replace(describe(array, **fields), checksum=checksum(array))


def written(folder: Path, encoded: EncodedArray) -> RunReader:
    """Write an array as a rank would, and give what reads it."""
    backend = open_backend(folder)
    if encoded.parts is not None:
        backend.put(f"g/x/{chunk_key(len(encoded.document['shape']))}", encoded.parts)
    backend.put("g/x/zarr.json", [encode_document(encoded.document, key="g/x/zarr.json")])
    return RunReader(backend)


def store(
    folder: Path, array: np.ndarray[Any, Any], compression: Compression = Compression.NONE, **fields: Any
) -> Record:
    """The record of an array, written alone."""
    info = identity(array, **fields)
    reader = written(folder, encode_array(array, info=info, compression=compression))
    return Record(info, location=Location(group="g", site="x", stack="", index=-1), reader=reader)


def store_stack(
    folder: Path, arrays: list[np.ndarray[Any, Any]], compression: Compression = Compression.NONE, **fields: Any
) -> list[Record]:
    """The records of equal arrays, written as a stack."""
    infos = [identity(array, call=call, **fields) for call, array in enumerate(arrays)]
    reader = written(folder, encode_stack(arrays, infos=infos, compression=compression))
    return [
        Record(info, location=Location(group="g", site=f"s{index}", stack="x", index=index), reader=reader)
        for index, info in enumerate(infos)
    ]


@given(data=st.data())
def test_every_dtype_and_shape_comes_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    array = data.draw(strategies.arrays())
    sample_dim = None if array.ndim == 0 else data.draw(st.one_of(st.none(), st.integers(0, array.ndim - 1)))
    compression = data.draw(st.sampled_from(Compression))
    record = store(tmp_path_factory.mktemp("run"), array, compression, sample_dim=sample_dim)
    values = record.read()
    assert values.dtype == array.dtype
    assert values.shape == array.shape
    assert strategies.raw_bytes(values) == strategies.raw_bytes(array)
    if sample_dim is not None and array.shape[sample_dim]:
        index = data.draw(st.integers(0, array.shape[sample_dim] - 1))
        assert strategies.raw_bytes(record.read(sample=index)) == strategies.raw_bytes(array.take(index, sample_dim))


@given(data=st.data())
def test_every_dtype_and_shape_comes_back_from_a_stack(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    array = data.draw(strategies.arrays().filter(lambda drawn: drawn.size > 0))
    others = [np.roll(array, 1), np.flip(array)]
    folder = tmp_path_factory.mktemp("run")
    records = store_stack(folder, [array, *others], data.draw(st.sampled_from(Compression)))
    for record, expected in zip(records, [array, *others], strict=True):
        values = record.read()
        assert values.dtype == array.dtype
        assert values.shape == array.shape
        assert strategies.raw_bytes(values) == strategies.raw_bytes(expected)
        # The slow twin: zarr reads the whole stack.
        twin = np.asarray(zarr_array(record)[record.location.index])
        assert strategies.raw_bytes(twin) == strategies.raw_bytes(expected)


def test_a_stack_names_every_tensor_in_it(tmp_path: Path) -> None:
    arrays = [np.full((2, 3), value, np.float32) for value in (1, 2, 3)]
    records = store_stack(tmp_path, arrays, sample_dim=0, layout="BT")
    attributes: Any = dict(zarr_array(records[0]).attrs)
    assert attributes["common"]["module"] == "layers.0.query"
    assert [capture["call"] for capture in attributes["captures"]] == [0, 1, 2]
    rebuilt = [RecordInfo.from_json({**attributes["common"], **capture}) for capture in attributes["captures"]]
    assert rebuilt == [record.info for record in records]
    assert records[1].read(sample=1).tolist() == [2, 2, 2]
    document = json.loads((tmp_path / "g" / "x" / "zarr.json").read_text())
    assert document["dimension_names"] == ["capture_3", "B_2", "T_3"]


def random_array(name: str, *shape: int) -> np.ndarray[Any, Any]:
    """Any bits of a type, in as many elements."""
    row = DTYPES[name]
    top = 2 if name == "bool" else 256
    raw = np.random.default_rng(0).integers(0, top, (*shape[:-1], shape[-1] * row.itemsize), dtype=np.uint8)
    return raw.view(row.numpy_dtype)


def read_with_tensorstore(folder: Path) -> bytes:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "g" / "x")}}
    return strategies.raw_bytes(tensorstore.open(spec).result().read().result())


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn"])
def test_tensorstore_reads_stacks(tmp_path: Path, name: str, compression: Compression) -> None:
    array = random_array(name, 5, 3, 8)
    store_stack(tmp_path, list(array), compression)
    assert read_with_tensorstore(tmp_path) == array.tobytes()


@pytest.mark.parametrize("compression", [Compression.ZSTD, Compression.BLOSC])
@pytest.mark.parametrize("name", list(DTYPES))
def test_zarr_and_we_read_what_is_packed(tmp_path: Path, name: str, compression: Compression) -> None:
    dtype = DTYPES[name].numpy_dtype
    # More than a block of blosc, and not a multiple of one.
    bits = np.random.default_rng(0).integers(0, 2, (1100, 1000 * DTYPES[name].itemsize), dtype=np.uint8)
    array = bits.view(dtype)
    record = store(tmp_path, array, compression)
    document = json.loads((tmp_path / "g" / "x" / "zarr.json").read_text())
    assert document["codecs"][1]["name"] == compression.value
    opened = np.asarray(zarr_array(record)[:])
    assert strategies.raw_bytes(opened) == strategies.raw_bytes(record.read()) == array.tobytes()
    assert (tmp_path / "g/x/c.0.0").stat().st_size < array.nbytes / 2


def forge(frame: bytes, at: int, number: int) -> bytes:
    return frame[:at] + struct.pack("<I", number) + frame[at + 4 :]


LIES: dict[str, Callable[[bytes], bytes]] = {
    "unpacks to more": lambda frame: forge(frame, 4, 2**31 - 1),
    "goes on behind its end": lambda frame: forge(frame, 12, 2**31 - 1),
    "ends before": lambda frame: forge(frame, 12, len(frame) - 1),
    "half a header": lambda frame: frame[:15],
    "nothing": lambda _: b"",
    "no frame inside": lambda frame: frame[:16] + b"\xff" * (len(frame) - 16),
    "of another compressor": lambda _: bytes(blosc.compress(bytes(4000), b"lz4", 1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_blosc_frame_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    record = store(tmp_path, np.arange(1000, dtype=np.float32), Compression.BLOSC)
    path = tmp_path / "g" / "x" / "c.0"
    frame = LIES[lie](path.read_bytes()[:-4])
    # The checksum of the chunk is right: whoever wrote it means harm.
    path.write_bytes(frame + struct.pack("<I", google_crc32c.value(frame)))
    with pytest.raises(DataError, match=r"g/x/c\.0 (cannot be unpacked|is cut or not what was written)"):
        record.read()


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in strategies.WITHOUT_TORCH])
@pytest.mark.parametrize("sample_dim", [None, 0, 1])
def test_large_samples_are_chunks_of_their_own(tmp_path: Path, name: str, sample_dim: int | None) -> None:
    array = random_array(name, 3, 5, 1024)
    record = store(tmp_path, array, sample_dim=sample_dim)
    expected = array.shape if sample_dim is None else tuple(np.where(np.arange(3) == sample_dim, 1, array.shape))
    opened = zarr_array(record)
    assert (opened.shards or opened.chunks) == array.shape
    assert opened.chunks == expected
    assert strategies.raw_bytes(record.read()) == array.tobytes()
    if sample_dim is not None:
        assert strategies.raw_bytes(record.read(sample=2)) == strategies.raw_bytes(array.take(2, sample_dim))


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int64"])
@pytest.mark.parametrize("sample_dim", [None, 0, 1])
def test_tensorstore_and_plain_zarr_read_the_same_bits(tmp_path: Path, name: str, sample_dim: int | None) -> None:
    array = random_array(name, 3, 4, 2048)
    store(tmp_path, array, sample_dim=sample_dim)
    assert read_with_tensorstore(tmp_path) == array.tobytes()
    register()
    read = zarr.open_array(tmp_path / "g" / "x", mode="r")
    assert strategies.raw_bytes(np.asarray(read[...])) == array.tobytes()
    assert read.attrs["tensor_name"] == "input"


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.ZSTD])
def test_samples_of_an_array_that_is_not_read_at_once_are_its_own(tmp_path: Path, compression: Compression) -> None:
    array = np.random.default_rng(0).standard_normal((5, 300_000), dtype=np.float32)  # three are one request
    parts = list(store(tmp_path, array, compression, sample_dim=0).parts())
    np.testing.assert_array_equal(np.concatenate(parts), array)


@pytest.mark.parametrize("sample_dim", [None, 0])
def test_large_objects_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample_dim: int | None
) -> None:
    monkeypatch.setattr(arrays, "_PIECE_NBYTES", 1000)
    array = np.random.default_rng(0).standard_normal((4, 1024))
    record = store(tmp_path, array, sample_dim=sample_dim)
    assert record.read().tobytes() == array.tobytes()
    path = tmp_path / "g" / "x" / "c.0.0"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match="bytes instead of"):
        record.read()


def test_small_samples_share_a_chunk(tmp_path: Path) -> None:
    array = np.zeros((64, MIN_SAMPLE_NBYTES // 4 - 1), dtype=np.float32)
    assert zarr_array(store(tmp_path, array, sample_dim=0)).chunks == array.shape


def test_an_empty_tensor_has_no_object(tmp_path: Path) -> None:
    record = store(tmp_path, np.zeros((0, 7), dtype=np.float32))
    assert sorted(path.name for path in (tmp_path / "g" / "x").iterdir()) == ["zarr.json"]
    assert record.read().shape == (0, 7)


def test_a_zero_tensor_is_written(tmp_path: Path) -> None:
    store(tmp_path, np.zeros((2, 3), dtype=np.float32))
    assert (tmp_path / "g" / "x" / "c.0.0").stat().st_size == 24 + 4


def test_documents_are_plain_json(tmp_path: Path) -> None:
    array = np.array([np.inf, -np.inf, np.nan], dtype=np.float32)
    store(tmp_path, array)
    document = json.loads((tmp_path / "g" / "x" / "zarr.json").read_text(), parse_constant=pytest.fail)
    assert document["attributes"]["overflow"]["maximum"] == "inf"


def test_the_checksum_is_of_the_raw_bytes() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert checksum(array) == f"crc32c:{google_crc32c.value(array.tobytes()):08x}"
    assert checksum(array.T) == f"crc32c:{google_crc32c.value(array.T.tobytes()):08x}"
    assert checksum(np.zeros(0)) == "crc32c:00000000"


@given(st.lists(st.integers(0, 255), min_size=1, max_size=60), st.integers(1, 12))
def test_checksums_combine(values: list[int], count: int) -> None:
    part = bytes(values)
    parts = [bytes(value ^ index for value in part) for index in range(count)]
    expected = google_crc32c.value(b"".join(parts))
    assert combine([google_crc32c.value(one) for one in parts], part_nbytes=len(part)) == expected


@pytest.mark.parametrize("shape", [(3, 1 << 18), (1, 1 << 18), (2, 7)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_checksum_of_samples_gives_that_of_the_whole(shape: tuple[int, int], order: Literal["C", "F"]) -> None:
    array = np.array(np.random.default_rng(0).integers(0, 99, shape, dtype=np.int16), order=order)
    encoded = encode_array(array, info=describe(array, sample_dim=0))
    assert encoded.parts is not None
    for again in (0, 1):
        encoded.document["attributes"]["checksum"] = f"not known yet, {again}"
        assert sum(len(part) for part in encoded.parts) > array.nbytes
        assert encoded.document["attributes"]["checksum"] == checksum(array)


def test_one_sample_cannot_stand_for_another(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((4, 1024))
    record = store(tmp_path, array, sample_dim=0)
    store(tmp_path / "other", np.flip(array, 0), sample_dim=0)
    (tmp_path / "g/x/c.0.0").write_bytes((tmp_path / "other/g/x/c.0.0").read_bytes())
    for sample in (None, 0):
        with pytest.raises(DataError, match="is not what was captured"):
            record.read(sample=sample)


@given(strategies.shapes(), st.sampled_from(["", "BHTD", "TBH"]))
def test_dimension_names_are_unique_and_tell_the_extent(shape: tuple[int, ...], layout: str) -> None:
    names = dimension_names(describe(np.zeros(shape), layout=layout), shape=shape)
    assert len(set(names)) == len(shape)
    assert [int(name.rpartition("_")[2]) for name in names] == list(shape)
