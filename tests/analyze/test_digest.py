"""Does a digest say of a record what numpy says of its values, however it was stored?"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.engine.digests import digest_columns, digests, grouped_digests, merge_digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import CACHED_METRICS, NUMBERS
from ranktape.analyze.engine.values import View
from ranktape.analyze.numerics.digest import SAMPLE_METRICS, Digest
from ranktape.analyze.numerics.histograms.histogram import KINDS, dtype_limits, scan
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import DataError
from ranktape.storage import Run
from ranktape.storage.format.dtypes import DTYPES, numpy_dtype
from ranktape.storage.format.record_info import RUN, Compression
from tests.analyze.engine_runs import assert_same_digests, store_as
from tests.analyze.every_tensor import numbers_of
from tests.analyze.runs import Tensor, describe_tensor
from tests.strategies import special_patterns

Array = np.ndarray[Any, Any]
ENGINE = Engine(use_cache=False)
ENDS = ("minimum", "maximum", "largest_finite", "smallest_nonzero")


def drawn(name: str, shape: tuple[int, ...], *, seed: int) -> Array:
    """Values of a type, many of them special."""
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(name)
    size = math.prod(shape)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    with np.errstate(all="ignore"):
        values = (rng.standard_normal(size) * 2.0 ** rng.integers(-30, 12, size)).astype(dtype)
    raw = values.view(np.uint8).reshape(size, dtype.itemsize)
    specials = special_patterns(name)
    for place in range(0, size, 3):
        raw[place] = np.frombuffer(specials[rng.integers(len(specials))].to_bytes(dtype.itemsize, "little"), np.uint8)
    return values.reshape(shape)


def digest_of_array(folder: Path, array: Array, **fields: Any) -> Digest:
    """The digest of a stored record."""
    run = store_as(folder, [describe_tensor(array, **fields)])
    (digest,) = digests(run.select(), view=View.SEEN, engine=ENGINE)
    return digest


def check_digest(digest: Digest, array: Array, *, sample_dim: int | None) -> None:
    """Compare a digest with the array that it is of."""
    limits = dtype_limits(array.dtype)
    tallies = scan(array, limits=limits)
    assert [getattr(digest.tallies, kind) for kind in KINDS] == [getattr(tallies, kind) for kind in KINDS]
    assert [getattr(digest.tallies, end) for end in ENDS] == [getattr(tallies, end) for end in ENDS]
    check_statistics(digest, array)
    values, counts = np.unique(numbers_of(array), return_counts=True)
    assert digest.is_exact
    np.testing.assert_array_equal(digest.values, values, strict=True)
    np.testing.assert_array_equal(digest.counts, counts, strict=True)
    assert (digest.samples is None) == (sample_dim is None)
    if digest.samples is not None and sample_dim is not None:
        assert list(digest.samples) == list(SAMPLE_METRICS)
        for place, sample in enumerate(np.moveaxis(array, sample_dim, 0)):
            check_sample({name: float(column[place]) for name, column in digest.samples.items()}, sample)


def check_statistics(digest: Digest, array: Array) -> None:
    """Compare sums with those that are added up element by element."""
    found, expected = digest.statistics, statistics_of(array)
    assert (found.num_elements, found.num_finite) == (expected.num_elements, expected.num_finite)
    assert (found.minimum, found.maximum, found.absmax) == (expected.minimum, expected.maximum, expected.absmax)
    scale = expected.sum_magnitudes
    assert found.sum_magnitudes == pytest.approx(scale, rel=1e-12)
    assert found.sum == pytest.approx(expected.sum, abs=1e-12 * scale)
    for name in ("std", "skewness", "kurtosis"):
        if getattr(expected, name) is None:
            assert getattr(found, name) is None
        else:
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-9)


def check_sample(figures: dict[str, float], sample: Array) -> None:
    """Compare the figures of a sample with the sample."""
    tallies, statistics = scan(sample, limits=dtype_limits(sample.dtype)), statistics_of(sample)
    for name, found in figures.items():
        expected = getattr(tallies if name in KINDS else statistics, name)
        if expected is None:
            assert math.isnan(found), name
        else:
            slack = 1e-12 * statistics.sum_magnitudes
            assert found == pytest.approx(expected, rel=1e-9, abs=slack), name


def test_of_every_dtype_and_shape(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors: list[Tensor] = []
    for name in [*DTYPES] * 6:
        shape = tuple(rng.integers(0, 10, rng.integers(4)).tolist())
        dim = int(rng.integers(3))
        place: dict[str, Any] = {"layer_idx": len(tensors), "sample_dim": dim if dim < len(shape) else None}
        tensors.append(describe_tensor(drawn(name, shape, seed=len(tensors)), **place))
    records = store_as(tmp_path / "run", tensors).select()
    for record, digest in zip(records, digests(records, view=View.SEEN, engine=ENGINE), strict=True):
        array, info = tensors[record.layer_idx]
        check_digest(digest, array, sample_dim=info.sample_dim)


@pytest.mark.parametrize(
    ("array", "sample_dim"),
    [
        (np.full((4, 3000), 3.0, ml_dtypes.bfloat16), 0),
        (np.full((4, 3000), 0.1, np.float32), 0),
        (np.full((2, 70_000), -0.0, np.float16), 0),
        (np.full(70_000, np.nan, ml_dtypes.bfloat16), None),
        (np.array(np.inf, np.float32), None),
        (np.zeros((3, 0), ml_dtypes.bfloat16), 0),
        (np.zeros((0, 3), np.float32), 0),
        (np.array([0x7F800001, 0xFF800001, 0x7F800000], np.uint32).view(np.float32), None),
        (np.array([1e300, -1e300, 5e-324, np.nan, np.inf, 2.0**-126, 1.0 + 2.0**-50], np.float64), None),
        (drawn("bfloat16", (3, 70_001), seed=1), 0),
        (drawn("float16", (70_001, 3), seed=2), 1),
        (drawn("float8_e4m3fn", (5, 40_003), seed=3), 0),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else str(value),
)
def test_of_what_is_awkward(tmp_path: Path, array: Array, sample_dim: int | None) -> None:
    check_digest(digest_of_array(tmp_path / "run", array, sample_dim=sample_dim), array, sample_dim=sample_dim)


def test_no_more_than_a_run_of_elements_is_read_at_once(tmp_path: Path) -> None:
    array = np.arange(2 * RUN + 5, dtype=np.float32)
    record = store_as(tmp_path / "run", [describe_tensor(array)]).select()[0]
    parts = list(record.parts())
    assert [part.size for part in parts] == [RUN, RUN, 5]
    np.testing.assert_array_equal(np.concatenate(parts), array)


def tensors() -> list[Tensor]:
    """Records with samples in each place, large and small."""
    shapes: list[tuple[tuple[int, ...], int | None]] = [
        ((6, 300, 5), 0),
        ((300, 6, 5), 1),
        ((40, 50, 6), 2),
        ((50, 2), 0),
        ((70_000, 2), 1),
        ((777,), None),
    ]
    names = ("bfloat16", "float32")
    return [
        describe_tensor(drawn(name, shape, seed=number), layer_idx=number, sample_dim=dim, tensor_name=name)
        for name in names
        for number, (shape, dim) in enumerate(shapes)
    ]


def test_the_storage_makes_no_difference_to_a_bit(tmp_path: Path) -> None:
    runs = [
        store_as(tmp_path / "alone", tensors()),
        store_as(tmp_path / "packed", tensors(), compression=Compression.ZSTD),
        store_as(tmp_path / "stacked", tensors(), is_stacked=True),
    ]
    first, *others = [list(digests(run.select(), engine=ENGINE)) for run in runs]
    assert len(first) == len(tensors())
    for other in others:
        assert_same_digests(first, other)


def test_a_large_tensor_in_one_chunk_is_the_same_packed(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal(RUN + 7).astype(np.float32)
    runs = [
        store_as(tmp_path / packing.value, [describe_tensor(array)], compression=packing) for packing in Compression
    ]
    plain, *packed = [list(digests(run.select(), engine=ENGINE)) for run in runs]
    assert len(packed) == len(Compression) - 1
    for one in packed:
        assert_same_digests(plain, one)


@pytest.mark.parametrize("keep", ["histogram", "statistics"])
def test_what_was_kept_of_values_has_the_same_digest(tmp_path: Path, keep: str) -> None:
    tensor = describe_tensor(drawn("bfloat16", (50, 60), seed=5))
    reduced = reduce_to(keep, tensor[0], info=tensor[1])
    assert reduced is not None
    (values,) = digests(store_as(tmp_path / "values", [tensor]).select(), engine=ENGINE)
    (kept,) = digests(store_as(tmp_path / "kept", [reduced]).select(), engine=ENGINE)
    if keep == "histogram":
        assert_same_digests([kept], [values])
        return
    assert not kept.has_values
    assert not kept.values.size
    assert kept.statistics.std == pytest.approx(values.statistics.std, rel=1e-12)
    assert kept.tallies.nan == values.tallies.nan


def test_values_are_looked_at_as_computed_with(tmp_path: Path) -> None:
    array = drawn("float32", (4, 100), seed=6)
    run = store_as(tmp_path / "run", [describe_tensor(array, compute_dtype="bfloat16", sample_dim=0)])
    with np.errstate(over="ignore", invalid="ignore"):
        computed = array.astype(ml_dtypes.bfloat16)
    (digest,) = digests(run.select(), engine=ENGINE)
    assert digest.dtype == "bfloat16"
    check_digest(digest, computed, sample_dim=0)


def test_digests_of_parts_are_the_digest_of_the_whole(tmp_path: Path) -> None:
    array = drawn("bfloat16", (4, 500), seed=7)
    run = store_as(tmp_path / "run", [describe_tensor(part, layer_idx=place) for place, part in enumerate(array)])
    together = merge_digests(list(digests(run.select(), engine=ENGINE)))
    check_digest(together, array, sample_dim=None)


def flip(run: Run, *, offset: int) -> None:
    """Change a byte of the one array of a run."""
    (path,) = [path for path in Path(run.url).glob("attempt_*/rank_*/iter_*/layers*/c*") if path.is_file()]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("array", "sample_dim"),
    [(np.ones((4, 2000), np.float32), 0), (np.ones(RUN + 1, np.float32), None), (np.ones(9, np.float32), None)],
    ids=["samples", "runs", "whole"],
)
def test_a_changed_byte_is_found(tmp_path: Path, array: Array, sample_dim: int | None) -> None:
    run = store_as(tmp_path / "run", [describe_tensor(array, sample_dim=sample_dim)])
    flip(run, offset=array.nbytes - 1)
    with pytest.raises(DataError, match=r"is damaged: .*checksum"):
        list(digests(run.select(), engine=ENGINE))
    # And what was counted of it before is in no later digest.
    whole = store_as(tmp_path / "whole", [describe_tensor(array, sample_dim=sample_dim)])
    (digest,) = digests(whole.select(), engine=ENGINE)
    check_digest(digest, array, sample_dim=sample_dim)


def test_records_of_a_stack_are_read_together_and_a_changed_one_is_named(tmp_path: Path) -> None:
    """Records of one stored array are fetched with one request; each is compared with its own checksum."""
    arrays = [drawn("bfloat16", (4, 60), seed=seed) for seed in range(5)]
    tensors = [describe_tensor(array, layer_idx=place, sample_dim=0) for place, array in enumerate(arrays)]
    run = store_as(tmp_path / "run", tensors, is_stacked=True)
    found = list(digests(run.select(), engine=ENGINE))
    for digest, array in zip(found, arrays, strict=True):
        check_digest(digest, array, sample_dim=0)
    (path,) = Path(run.url).glob("attempt_*/rank_*/iter_*/stack_*/c*")
    data = bytearray(path.read_bytes())
    data[3 * (arrays[0].nbytes + 4)] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"layers\.3.* is damaged: .*checksum"):
        list(digests(run.select(), engine=ENGINE))
    assert len(list(digests(run.select(layer_idx="0-2,4"), engine=ENGINE))) == 4


@pytest.mark.parametrize("total", [1000, 100, 33, 16_000])
def test_a_percentile_is_the_value_of_its_rank(tmp_path: Path, total: int) -> None:
    """In floats, 0.999 times 1000 is above 999, and the percentile was one rank too high."""
    (digest,) = digests(
        store_as(tmp_path / "run", [describe_tensor(np.arange(1, total + 1, dtype=np.float32))]).select(), engine=ENGINE
    )
    for percent in ("0.1", "7", "12.5", "33", "99", "99.9", "100"):
        exact = Fraction(percent) / 100
        expected = max(1, math.ceil(exact * total))
        assert digest.quantiles([exact, float(exact)]) == [expected, expected], percent


def test_digests_of_groups_are_those_of_their_values_together(tmp_path: Path) -> None:
    """Narrow and wide types, records without values of their own and groups of one record, in any order."""
    arrays = [
        *(drawn("bfloat16", (3, 40), seed=seed) for seed in range(4)),
        *(drawn("float32", (50,), seed=seed) for seed in range(3)),
        np.zeros((0, 3), np.float16),
        np.full((2, 2), np.nan, np.float16),
        drawn("float8_e4m3fn", (30,), seed=9),
    ]
    run = store_as(tmp_path / "run", [describe_tensor(one, layer_idx=place) for place, one in enumerate(arrays)])
    numbers = [2, 0, 2, 1, 0, 4, 3, 5, 5, 2]
    is_mask = np.zeros(len(arrays), dtype=bool)
    found: dict[int, Digest] = {}
    for groups, columns in grouped_digests(run.select(), numbers, is_mask=is_mask, view=View.SEEN, engine=ENGINE):
        found |= {group: columns.digest(place) for place, group in enumerate(groups.tolist())}
    assert sorted(found) == list(range(6))
    for group, digest in found.items():
        members = [array for number, array in zip(numbers, arrays, strict=True) if number == group]
        with np.errstate(invalid="ignore"):  # NaN that signal
            together = [array.reshape(-1).astype(np.float64) for array in members]
        values, counts = np.unique(numbers_of(np.concatenate(together)), return_counts=True)
        np.testing.assert_array_equal(digest.values, values)
        np.testing.assert_array_equal(digest.counts, counts)
        check_statistics(digest, np.concatenate(together))
        assert digest.tallies.num_elements == sum(one.size for one in together)
        assert digest.tallies.nan == int(np.isnan(np.concatenate(together)).sum())


def test_numbers_that_are_kept_are_those_that_follow_from_the_values(tmp_path: Path) -> None:
    names = ("bfloat16", "float32", "float8_e4m3fn", "complex64", "int64")
    arrays = [drawn(name, (3, 40), seed=seed) for name in names for seed in range(2)]
    run = store_as(tmp_path / "run", [describe_tensor(one, layer_idx=place) for place, one in enumerate(arrays)])
    for known in digest_columns(run.select(), view=View.SEEN, engine=ENGINE):
        assert known.cached_metrics is not None
        for name, kept in zip(CACHED_METRICS, known.cached_metrics.T, strict=True):
            np.testing.assert_array_equal(kept, NUMBERS[name].compute(known), err_msg=name)
