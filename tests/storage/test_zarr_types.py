"""Do the small floats come back bit for bit, through whichever library?"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
import zarr.storage
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.dtype import data_type_registry

from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES, numpy_dtype
from ranktape.storage.format.zarr_floats import DATA_TYPES, data_type, register
from tests.analyze.runs import describe_tensor, store
from tests.strategies import arrays, dtype_names, element_bits, from_patterns, raw_bytes, shapes, special_patterns

SMALL_FLOATS = [row.name for row in DTYPES.values() if row.is_ml_dtype]

if TYPE_CHECKING:
    from zarr.core.array_spec import ArrayConfigParams

NOT_IN_TENSORSTORE = frozenset({"float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"})
"""Types that tensorstore 0.1.86 refuses by name."""

SCALES = "float8_e8m0fnu"
"""The type without a zero."""

KEEP_ALL: ArrayConfigParams = {"write_empty_chunks": True}
"""Chunks equal to the fill value are otherwise left out, and -0.0 comes back as 0.0."""


def open_tensorstore(place: Path | None = None, **metadata: Any) -> Any:
    """An array as tensorstore opens it; with metadata a new one."""
    tensorstore = pytest.importorskip("tensorstore")
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": "memory://" if place is None else f"file://{place}"}
    if metadata:
        spec |= {"metadata": metadata, "store_data_equal_to_fill_value": True}
    return tensorstore.open(spec, create=bool(metadata)).result()


def layout(num_rows: int, *, sharded: bool) -> dict[str, tuple[int, int]]:
    """A grid of chunks that does not fit the matrix, few however many rows it has."""
    if not sharded:
        return {"chunks": (max(1, num_rows // 7), 3)}
    rows = max(1, num_rows // 14)
    return {"chunks": (rows, 3), "shards": (2 * rows, 6)}


def every_pattern(name: str) -> np.ndarray[Any, Any]:
    """Every value of an 8-bit type, every seventh of a 16-bit one with all special ones, as a matrix."""
    row = DTYPES[name]
    if row.numpy_dtype.kind == "b":
        patterns = [0, 1] * 21
    elif row.itemsize == 1:
        patterns = list(range(1 << element_bits(row))) * (1 if element_bits(row) == 8 else 4)
    elif row.itemsize == 2:
        patterns = [*range(0, 1 << 16, 7), *special_patterns(name)]
    else:
        patterns = special_patterns(name)
    whole = patterns + patterns[: -len(patterns) % 7]
    return from_patterns(whole, name=name, shape=(len(whole) // 7, 7))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_zarr_and_tensorstore_read_what_zarr_wrote(name: str, tmp_path: Path, *, sharded: bool) -> None:
    values = every_pattern(name)
    options: dict[str, Any] = {"shape": values.shape, "dtype": values.dtype, "config": KEEP_ALL}
    options |= layout(len(values), sharded=sharded)
    zarr.create_array(tmp_path / "packed", **options)[...] = values
    document = json.loads((tmp_path / "packed" / "zarr.json").read_text())
    assert document["data_type"] == name
    read = zarr.open_array(tmp_path / "packed", mode="r")
    assert read.dtype == values.dtype
    assert raw_bytes(np.asarray(read[...])) == raw_bytes(values)
    assert raw_bytes(np.asarray(read[1:3, ::2])) == raw_bytes(values[1:3, ::2])
    if name not in NOT_IN_TENSORSTORE:
        zarr.create_array(tmp_path / "plain", compressors=None, **options)[...] = values
        theirs = open_tensorstore(tmp_path / "plain")
        assert theirs.dtype.numpy_dtype == values.dtype
        assert raw_bytes(theirs.read().result()) == raw_bytes(values)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", sorted(set(DTYPES) - NOT_IN_TENSORSTORE))
def test_zarr_reads_what_tensorstore_wrote(name: str, tmp_path: Path, *, sharded: bool) -> None:
    values = every_pattern(name)
    num_rows = max(2, len(values) // 14)
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    shard = {"name": "sharding_indexed", "configuration": {"chunk_shape": [num_rows, 7], "codecs": inner}}
    created = open_tensorstore(
        tmp_path,
        shape=list(values.shape),
        data_type=name,
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [2 * num_rows, 7]}},
        codecs=[shard] if sharded else inner,
    )
    created.write(values).result()
    read = zarr.open_array(tmp_path, mode="r")
    assert read.dtype == values.dtype
    assert raw_bytes(np.asarray(read[...])) == raw_bytes(values)


@pytest.mark.parametrize("name", sorted(NOT_IN_TENSORSTORE))
def test_what_tensorstore_does_not_read_is_known(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} data type is not one of the supported data types"):
        open_tensorstore(shape=[1], data_type=name)


@settings(max_examples=60)
@given(name=dtype_names(), shape=shapes(max_dims=3), data=st.data())
def test_any_shape_comes_back(name: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    values = data.draw(arrays(name=name, shape=shape))
    chunks = tuple(data.draw(st.integers(1, max(1, side))) for side in shape)
    store = zarr.storage.MemoryStore()
    written = zarr.create_array(store, shape=shape, dtype=values.dtype, chunks=chunks or "auto", config=KEEP_ALL)
    written[...] = values
    read = np.asarray(zarr.open_array(store, mode="r")[...])
    assert (read.dtype, read.shape) == (values.dtype, shape)
    assert raw_bytes(read) == raw_bytes(values)


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_zarr_and_xarray_open_a_group(name: str, tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    values = every_pattern(name)
    group = zarr.create_group(tmp_path)
    group.create_array("small", data=values, dimension_names=("row", "column"), config=KEEP_ALL)
    group.create_array("plain", data=np.arange(3.0), dimension_names=("place",))
    with xarray.open_dataset(tmp_path, engine="zarr", consolidated=False, mask_and_scale=False) as opened:
        assert opened["small"].dims == ("row", "column")
        assert raw_bytes(opened["small"].to_numpy()) == raw_bytes(values)
    with warnings.catch_warnings():
        # Zarr v3 has not specified consolidated metadata yet.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(tmp_path)
    small = zarr.open_group(tmp_path, mode="r", use_consolidated=True)["small"]
    assert isinstance(small, zarr.Array)
    assert raw_bytes(np.asarray(small[...])) == raw_bytes(values)
    copied = pickle.loads(pickle.dumps(small))  # noqa: S301 - our own bytes
    assert raw_bytes(np.asarray(copied[...])) == raw_bytes(values)


def fill_values(name: str) -> list[Any]:
    native = numpy_dtype(name)
    everything = np.arange(1 << element_bits(DTYPES[name])).astype(f"<u{native.itemsize}").view(native)
    return list(everything[:: max(1, len(everything) // 512)]) + [
        from_patterns([bits], name=name, shape=())[()] for bits in special_patterns(name)
    ]


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_fill_value_survives_json_and_the_type_pickle(name: str) -> None:
    kind = data_type(name)
    assert pickle.loads(pickle.dumps(kind)) == kind  # noqa: S301 - our own bytes
    for value in fill_values(name):
        text = json.dumps(kind.to_json_scalar(value, zarr_format=3), allow_nan=False)
        read = kind.from_json_scalar(json.loads(text), zarr_format=3)
        assert raw_bytes(np.asarray(read)) == raw_bytes(np.asarray(value)), (text, value)


@pytest.mark.parametrize("name", sorted(set(SMALL_FLOATS) - NOT_IN_TENSORSTORE))
def test_tensorstore_and_zarr_agree_on_fill_values(name: str, tmp_path: Path) -> None:
    kind = data_type(name)
    for number, value in enumerate(fill_values(name)[::9]):
        place = tmp_path / str(number)
        zarr.create_array(place, shape=(1,), dtype=numpy_dtype(name), fill_value=value)
        assert raw_bytes(open_tensorstore(place).read().result()) == raw_bytes(np.asarray(value)), kind.to_json_scalar(
            value, zarr_format=3
        )


@pytest.mark.parametrize("name", sorted(set(SMALL_FLOATS) - NOT_IN_TENSORSTORE - {SCALES}))
@pytest.mark.parametrize("fill", [None, 0.0, -0.0, 1.0, 0.3, "NaN", "Infinity", "-Infinity", "0x05"])
def test_zarr_reads_the_fill_values_that_tensorstore_writes(
    name: str, fill: float | str | None, tmp_path: Path
) -> None:
    created = open_tensorstore(tmp_path, shape=[1], data_type=name, **({} if fill is None else {"fill_value": fill}))
    read = np.asarray(zarr.open_array(tmp_path, mode="r")[...])
    assert raw_bytes(read) == raw_bytes(created.read().result())


def test_fill_values_are_written_as_zarr_spells_them() -> None:
    kind = data_type("bfloat16")
    expected = {0x0000: "0.0", 0x8000: "-0.0", 0x3F80: "1.0", 0x7F80: "Infinity", 0xFF80: "-Infinity", 0x7FC0: "NaN"}
    expected |= {pattern: hex(pattern) for pattern in (0x7FC1, 0xFFC0, 0x7F81)}
    for pattern, text in expected.items():
        found = kind.to_json_scalar(from_patterns([pattern], name="bfloat16", shape=())[()], zarr_format=3)
        assert str(found) == text
        assert isinstance(found, float) == (pattern in {0x0000, 0x8000, 0x3F80})


@pytest.mark.parametrize(
    ("name", "fill", "error", "match"),
    [
        ("bfloat16", "nan", ValueError, "'nan' is not a value of bfloat16: .* its 16 bits"),
        ("bfloat16", "0x10000", ValueError, "'0x10000' is not a value of bfloat16"),
        ("bfloat16", "0xzz", ValueError, "'0xzz' is not a value of bfloat16"),
        ("bfloat16", "0x-1", ValueError, "'0x-1' is not a value of bfloat16"),
        ("bfloat16", None, TypeError, "None is not a value of bfloat16"),
        ("bfloat16", [0.0, 0.0], TypeError, "is not a value of bfloat16"),
        ("bfloat16", 1e300, ValueError, r"1e\+300 is not a value of bfloat16"),
        ("bfloat16", 10**400, ValueError, "is not a value of bfloat16"),
        ("float8_e4m3fn", "Infinity", ValueError, "'Infinity' is not a value of float8_e4m3fn"),
        ("float8_e4m3fn", 1e6, ValueError, "1000000.0 is not a value of float8_e4m3fn"),
        ("float8_e8m0fnu", -1.0, ValueError, "-1.0 is not a value of float8_e8m0fnu"),
        ("float4_e2m1fn", "NaN", ValueError, "'NaN' is not a value of float4_e2m1fn: .* its 4 bits"),
        ("float4_e2m1fn", "0x10", ValueError, "'0x10' is not a value of float4_e2m1fn"),
        ("float6_e2m3fn", "0x40", ValueError, "'0x40' is not a value of float6_e2m3fn: .* its 6 bits"),
    ],
)
def test_a_fill_value_that_the_type_has_not_is_refused(
    name: str, fill: Any, error: type[Exception], match: str
) -> None:
    kind = data_type(name)
    assert not kind._check_scalar(fill)
    with pytest.raises(error, match=match):
        kind.from_json_scalar(fill, zarr_format=3)


@pytest.mark.parametrize(("fill", "bits"), [(None, 0), (0.0, 0), (2.0**-127, 0), (1.0, 127), ("NaN", 255), ("0x05", 5)])
def test_scales_have_their_own_fill_values(fill: float | str | None, bits: int) -> None:
    kind = data_type(SCALES)
    read = kind.default_scalar() if fill is None else kind.from_json_scalar(fill, zarr_format=3)
    assert raw_bytes(np.asarray(read)) == bytes([bits])
    assert kind.to_json_scalar(read, zarr_format=3) == ("NaN" if bits == 255 else f"0x{bits:02x}")


def test_tensorstore_still_takes_fill_values_of_scales_for_others() -> None:
    # When this fails tensorstore has been mended, and numbers can be written as numbers.
    created = open_tensorstore(shape=[1], data_type=SCALES, fill_value=1.0)
    assert raw_bytes(created.read().result()) == bytes([127 - 64])


def test_zero_is_the_lowest_code_where_there_is_no_zero() -> None:
    kind = data_type("float8_e8m0fnu")
    assert raw_bytes(np.asarray(kind.default_scalar())) == raw_bytes(np.asarray(kind.cast_scalar(0))) == b"\0"


def test_zarr_v2_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Zarr v2 has no name for bfloat16: create the array with zarr_format=3"):
        zarr.create_array(tmp_path, shape=(1,), dtype=numpy_dtype("bfloat16"), zarr_format=2)


def test_registering_again_changes_nothing() -> None:
    before = dict(data_type_registry.contents)
    register()
    assert data_type_registry.contents == before
    assert {name: before[name] for name in SMALL_FLOATS} == DATA_TYPES


@pytest.mark.parametrize(
    "doors",
    [
        "import ranktape.storage\nassert not {'zarr', 'numpy'} & {*sys.modules}\nranktape.storage.register()",
        "import zarr\nfrom ranktape.storage import open_run\nopen_run(sys.argv[1])",
    ],
)
def test_plain_zarr_knows_them_once_they_are_registered_or_a_run_is_open(doors: str, tmp_path: Path) -> None:
    store(tmp_path / "run", [describe_tensor(every_pattern("bfloat16"))])
    zarr.create_group(tmp_path / "group").create_array("a", data=every_pattern("bfloat16"), config=KEEP_ALL)
    code = f"import sys\n{doors}\nimport zarr\nprint(zarr.open_group(sys.argv[2], mode='r')['a'].dtype.name)"
    words = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "run"), str(tmp_path / "group")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("bfloat16\n", "")


def test_somebody_elses_type_of_the_name_is_kept() -> None:
    ours = data_type_registry.get("bfloat16")
    theirs = type("Theirs", (ours,), {})
    data_type_registry.register("bfloat16", theirs)
    try:
        register()
        assert data_type_registry.get("bfloat16") is theirs
    finally:
        data_type_registry.register("bfloat16", ours)
