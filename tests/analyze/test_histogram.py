"""Do the kernels count what a slow loop over the elements counts?"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.histograms.histogram import (
    KINDS,
    Histogram,
    Limits,
    count_values,
    dtype_limits,
    measure,
    pattern_values,
    scan,
)
from ranktape.analyze.numerics.kernels import BLOCK
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.record_info import TALLY_KINDS, ElementTally, Overflow
from tests.strategies import arrays

Array = np.ndarray[Any, Any]


def element(scalar: Any) -> float:
    """The number that an element is judged by."""
    if isinstance(scalar, complex | np.complexfloating):
        real, imaginary = float(scalar.real), float(scalar.imag)
        if math.isnan(real) or math.isnan(imaginary):
            return math.nan
        return real if abs(real) >= abs(imaginary) else imaginary
    return float(scalar)


def kinds_of(value: float, *, limits: Limits) -> set[str]:
    """What one number is."""
    if math.isnan(value):
        return {"nan"}
    magnitude = abs(value)
    found = {
        "zero": value == 0,
        "inf": math.isinf(value),
        "upper": magnitude >= limits.overflow_start and value > 0,
        "lower": magnitude >= limits.overflow_start and value < 0,
        "underflow": 0 < magnitude < limits.min_normal,
        "flushed": 0 < magnitude <= limits.flush_limit,
    }
    return {kind for kind, holds in found.items() if holds}


def counted(array: Array, *, limits: Limits, sample_dim: int | None) -> dict[str, Any]:
    """The slow twin of `scan`: one element after the other."""
    num_samples = 1 if sample_dim is None else array.shape[sample_dim]
    counts = {kind: [0] * num_samples for kind in KINDS}
    numbers = []
    for index in itertools.product(*map(range, array.shape)):
        value = element(array[index])
        for kind in kinds_of(value, limits=limits):
            counts[kind][0 if sample_dim is None else index[sample_dim]] += 1
        if not math.isnan(value):
            numbers.append(value)
    finite = [abs(value) for value in numbers if math.isfinite(value)]
    return {
        "num_elements": array.size,
        **{kind: sum(per_sample) for kind, per_sample in counts.items()},
        "minimum": min(numbers, default=None),
        "maximum": max(numbers, default=None),
        "largest_finite": max(finite, default=None),
        "smallest_nonzero": min((value for value in finite if value), default=None),
        "per_sample": None if sample_dim is None else counts,
    }


@settings(max_examples=300)
@given(name=st.sampled_from(list(DTYPES)), data=st.data())
def test_scan_equals_its_twin_at_the_limits_of_the_dtype_and_of_a_format(name: str, data: st.DataObject) -> None:
    array = data.draw(arrays(name=name))
    sample_dim = data.draw(st.none() if not array.ndim else st.one_of(st.none(), st.integers(0, array.ndim - 1)))
    row = data.draw(st.sampled_from(list(FORMATS.values())))
    of_format = Limits(overflow_start=row.overflow_start, min_normal=row.min_normal, flush_limit=row.flush_limit)
    for limits in (dtype_limits(array.dtype), of_format):
        tallies = scan(array, limits=limits, sample_dim=sample_dim)
        found = {field: getattr(tallies, field) for field in tallies.__dataclass_fields__}
        assert found == counted(array, limits=limits, sample_dim=sample_dim)


@given(array=arrays())
def test_measure_says_what_scan_counts(array: Array) -> None:
    twin = counted(array, limits=dtype_limits(array.dtype), sample_dim=None)
    numbers = [value for value in (twin["minimum"], twin["maximum"]) if value is not None]
    assert measure(array, sample_dim=None) == Overflow(
        **{kind: ElementTally(count=twin[kind], ratio=twin[kind] / max(1, array.size)) for kind in TALLY_KINDS},
        minimum=twin["minimum"],
        maximum=twin["maximum"],
        absmax=max(map(abs, numbers), default=None),
        per_sample=None,
    )


def test_measure_counts_each_sample() -> None:
    array = np.array([[np.inf, 0.0, -0.0], [np.nan, 1e-40, 1.0]], dtype=np.float32)
    assert measure(array, sample_dim=0).per_sample == {
        "upper": [1, 0],
        "lower": [0, 0],
        "underflow": [0, 1],
        "nan": [0, 1],
        "inf": [1, 0],
        "zero": [2, 0],
    }
    per_column = measure(array, sample_dim=1).per_sample
    assert per_column is not None
    assert per_column["zero"] == [0, 1, 1]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_counts_are_whole_beyond_a_block(name: str, size: int) -> None:
    """A block counts in integers as narrow as the elements; none may run over."""
    dtype = DTYPES[name].numpy_dtype
    for value, kind in ((np.nan, "nan"), (np.inf, "upper"), (-np.inf, "lower"), (0.0, "zero")):
        tallies = scan(np.full(size, value).astype(dtype), limits=dtype_limits(dtype))
        assert getattr(tallies, kind) == size
    signed = np.dtype(f"i{dtype.itemsize}")
    tallies = scan(np.ones(size, dtype=signed).view(dtype), limits=dtype_limits(dtype))
    assert (tallies.underflow, tallies.flushed, tallies.zero) == (size, 0, 0)


def test_a_complex_element_counts_once_by_its_larger_part() -> None:
    array = np.array(
        [complex(1, np.inf), complex(np.nan, 1), complex(-np.inf, 1), 0, complex(1e-40, 0)], dtype=np.complex64
    )
    found = measure(array, sample_dim=None)
    counts = {kind: getattr(found, kind).count for kind in TALLY_KINDS}
    assert counts == {"upper": 1, "lower": 1, "underflow": 1, "nan": 1, "inf": 2, "zero": 1}


def test_extremes_of_wide_integers_are_rounded() -> None:
    found = measure(np.array([-(2**63), 2**63 - 1]), sample_dim=None)
    assert (found.minimum, found.maximum, found.absmax) == (-(2.0**63), 2.0**63, 2.0**63)


@settings(max_examples=150)
@given(name=st.sampled_from([name for name, row in DTYPES.items() if row.itemsize <= 2]), data=st.data())
def test_pairs_are_the_values_and_how_often_each_occurs(name: str, data: st.DataObject) -> None:
    array = data.draw(arrays(name=name))
    values, counts = count_values(array).pairs()
    with np.errstate(invalid="ignore"):
        expected = np.sort(array.astype(np.float64).ravel())
    assert values.dtype == np.float64
    assert np.array_equal(np.sort(np.repeat(values, counts)), expected, equal_nan=True)


def test_histograms_add_up() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal(1000).astype(ml_dtypes.bfloat16) for _ in range(2))
    together = count_values(first) + count_values(second)
    assert np.array_equal(together.counts, count_values(np.concatenate([first, second])).counts)


def test_threads_that_share_a_kernel_count_the_same() -> None:
    array = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    expected = measure(array, sample_dim=None)
    found: list[Overflow] = []
    threads = [threading.Thread(target=lambda: found.append(measure(array, sample_dim=None))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_read_only_and_unaligned_buffers_are_counted() -> None:
    values = np.arange(10, dtype=np.float32)
    buffer = b"x" + values.tobytes()
    array = np.frombuffer(buffer, dtype=np.float32, offset=1)
    assert not array.flags.aligned
    assert measure(array, sample_dim=0) == measure(values, sample_dim=0)


def test_what_is_not_ours_is_refused() -> None:
    with pytest.raises(UsageError, match="sample_dim=2 is not a dimension"):
        measure(np.zeros((2, 3)), sample_dim=2)
    with pytest.raises(UsageError, match="cannot be stored"):
        measure(np.array(["a"]), sample_dim=None)
    with pytest.raises(UsageError, match="too many patterns"):
        count_values(np.zeros(3, dtype=np.float32))
    with pytest.raises(UsageError, match=r"big-endian .* convert the array with .astype\('<f2'\)"):
        count_values(np.zeros(3, dtype=">f2"))


def test_values_of_patterns_are_shared_and_cannot_be_changed() -> None:
    values = pattern_values(np.dtype(ml_dtypes.bfloat16))
    assert values is pattern_values(np.dtype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


def test_an_empty_histogram_has_no_pairs() -> None:
    empty = Histogram(dtype=np.dtype(np.float16), counts=np.zeros(1 << 16, dtype=np.int64))
    values, counts = empty.pairs()
    assert (values.size, counts.size) == (0, 0)


def test_kernels_work_where_no_cache_can_be_written() -> None:
    """A read-only container without a home: numba finds no directory and would fail at import."""
    source = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "import numpy as np\n"
        "from ranktape.analyze.numerics.histograms.histogram import count_values\n"
        "print(count_values(np.ones(3, dtype=np.uint8)).counts[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout == "3\n", done.stderr
