"""Do the joint counts of blocks say what a dictionary says, for any shape, axis, layout and number of threads?"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.numerics import pieces as pieces_module
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.histograms import block_histogram
from ranktape.analyze.numerics.histograms.block_counts import CUT_UNITS
from ranktape.analyze.numerics.histograms.block_histogram import (
    CUTS,
    EXCLUDED,
    BlockHistogram,
    count_blocks,
    count_few_cells,
)
from ranktape.analyze.numerics.histograms.histogram import count_values
from ranktape.analyze.numerics.quantization.schemes import ScaleRule, scale_exponents
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES, numpy_dtype
from tests.exhaustive import exhaustive_but

SMALL_TYPES = [row.name for row in DTYPES.values() if row.is_floating and row.itemsize <= 2]
ELEMENTS = ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "int8", "nvfp4", "hif8")


def every_pattern(dtype: str) -> np.ndarray[Any, Any]:
    """All patterns of a type in an order of no meaning: with NaN, infinities, zeros of both signs and subnormals."""
    unsigned = np.dtype(f"u{numpy_dtype(dtype).itemsize}")
    patterns = np.random.default_rng(3).permutation(1 << 8 * unsigned.itemsize).astype(unsigned)
    return patterns.view(numpy_dtype(dtype))


def mixed(shape: tuple[int, ...], *, dtype: str = "bfloat16", seed: int = 0) -> np.ndarray[Any, Any]:
    """Values of many magnitudes, a fifth of them zero, with a NaN and an infinity here and there."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    values[rng.random(shape) < 0.2] = 0.0
    for special in (np.nan, np.inf, -np.inf, -0.0, 2.0**-24):
        values[rng.random(shape) < 0.004] = special
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(numpy_dtype(dtype))


Key = tuple[int, int, float]


def counted_one_by_one(
    array: np.ndarray[Any, Any], *, axis: int, block_size: int
) -> tuple[Counter[Key], dict[str, int]]:
    """The twin: a dictionary of (exponent, class, magnitude), and what is counted apart."""
    cells: Counter[Key] = Counter()
    apart = dict.fromkeys(EXCLUDED, 0)
    with np.errstate(invalid="ignore"):
        lines = np.moveaxis(array.astype(np.float64), axis, -1)
    for line in lines.reshape(math.prod(lines.shape[:-1]), lines.shape[-1]).tolist():
        for start in range(0, len(line), block_size):
            block = [abs(value) for value in line[start : start + block_size]]
            apart["num_blocks"] += 1
            if all(math.isfinite(value) for value in block):
                largest = max(block)
                if largest == 0:
                    apart["zero_blocks"] += 1
                    apart["zero_elements"] += len(block)
                    continue
                half, exponent = math.frexp(largest)
                passed = sum(2 * half * CUT_UNITS >= cut for cut in CUTS)
                cells.update((exponent - 1, passed, value) for value in block)
            else:
                apart["spoiled_blocks"] += 1
                apart["spoiled"] += sum(map(math.isfinite, block))
                apart["nan"] += sum(map(math.isnan, block))
                apart["inf"] += sum(map(math.isinf, block))
    return cells, apart


def as_dictionary(histogram: BlockHistogram) -> tuple[Counter[Key], dict[str, int]]:
    columns = (histogram.exponents, histogram.classes, histogram.values, histogram.counts)
    cells: Counter[Key] = Counter()
    for exponent, passed, value, number in zip(*(column.tolist() for column in columns), strict=True):
        cells[exponent, passed, value] += number
    return cells, {name: getattr(histogram, name) for name in EXCLUDED}


def parts_of(histogram: BlockHistogram) -> dict[str, bytes | int]:
    """Everything that is counted, to be compared bit for bit."""
    columns = ("exponents", "classes", "magnitudes", "counts")
    return {name: getattr(histogram, name).tobytes() for name in columns} | {
        name: getattr(histogram, name) for name in EXCLUDED
    }


@pytest.mark.parametrize("dtype", SMALL_TYPES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cells_are_those_of_a_dictionary(dtype: str, axis: int) -> None:
    array = mixed((3, 37, 10), dtype=dtype)
    for block_size in (1, 5, 32, 1000):
        histogram = count_blocks(array, axis=axis, block_size=block_size)
        assert as_dictionary(histogram) == counted_one_by_one(array, axis=axis, block_size=block_size)
        assert histogram.num_elements == array.size
        assert (histogram.axis, histogram.block_size) == (str(axis % 3 - 3), block_size)


@pytest.mark.parametrize("dtype", SMALL_TYPES)
@pytest.mark.parametrize("block_size", [1, 3])
def test_every_pattern_is_counted(dtype: str, block_size: int) -> None:
    array = every_pattern(dtype)
    histogram = count_blocks(array, block_size=block_size)
    assert as_dictionary(histogram) == counted_one_by_one(array, axis=0, block_size=block_size)


def test_cells_are_in_order_and_none_is_empty() -> None:
    histogram = count_blocks(mixed((64, 96)))
    keys = list(
        zip(histogram.exponents.tolist(), histogram.classes.tolist(), histogram.magnitudes.tolist(), strict=True)
    )
    assert keys == sorted(set(keys))
    assert (histogram.counts > 0).all()
    assert histogram.num_cells == len(keys)


def test_arrays_without_dimensions_or_elements() -> None:
    for shape in [(), (1,), (7,), (0,), (3, 0, 2), (0, 4)]:
        array = np.full(shape, 1.5, dtype=np.float16)
        histogram = count_blocks(array, block_size=4)
        assert histogram.num_elements == array.size
        assert histogram.num_blocks == -(-array.size // 4)
        assert histogram.counts.sum() == array.size


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_layout_has_the_same_counts(axis: int) -> None:
    array = mixed((6, 33, 40))
    expected = parts_of(count_blocks(array, axis=axis, block_size=16))
    wide = np.zeros((6, 66, 41), dtype=array.dtype)
    wide[:, ::2, 1:] = array
    layouts = (
        np.asfortranarray(array),
        np.ascontiguousarray(array.transpose(1, 2, 0)).transpose(2, 0, 1),
        wide[:, ::2, 1:],
        array[::-1, :, ::-1][::-1, :, ::-1],
    )
    for layout in layouts:
        assert parts_of(count_blocks(layout, axis=axis, block_size=16)) == expected


@pytest.mark.parametrize(
    "shape_and_axis", [((2500, 2000), 0), ((2500, 2000), 1), ((5_000_011,), 0), ((1, 40, 130_000), 1)]
)
@exhaustive_but("shape_and_axis0", reason="one shape is in make test")
def test_large_arrays_agree_with_numpy_for_any_number_of_threads(shape_and_axis: tuple[tuple[int, ...], int]) -> None:
    shape, axis = shape_and_axis
    rng = np.random.default_rng(5)
    patterns = rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    array = patterns.view(ml_dtypes.bfloat16)
    histograms = [count_blocks(array, axis=axis, threads=threads) for threads in (1, 2, 5)]
    assert parts_of(histograms[0]) == parts_of(histograms[1]) == parts_of(histograms[2])
    lines = np.moveaxis(patterns & 0x7FFF, axis, -1).reshape(-1, shape[axis])
    padded = np.pad(lines, ((0, 0), (0, -shape[axis] % 32))).reshape(lines.shape[0], -1, 32)
    largest = np.repeat(padded.max(axis=2), 32, axis=1)[:, : shape[axis]]
    halves, exponents = np.frexp(largest.view(ml_dtypes.bfloat16).astype(np.float64))
    significands = np.asarray(2 * halves)
    passed = sum(significands * CUT_UNITS >= cut for cut in CUTS)
    keys = ((exponents.astype(np.int64) - 1 + 512) * 16 + passed) * 65536 + lines
    distinct, numbers = np.unique(keys[largest > 0], return_counts=True)
    ours = histograms[0]
    found = ((ours.exponents.astype(np.int64) + 512) * 16 + ours.classes) * 65536 + ours.magnitudes
    np.testing.assert_array_equal(found, distinct)
    np.testing.assert_array_equal(ours.counts, numbers)


@pytest.mark.parametrize("axis", [0, 1])
def test_several_tables_count_as_one_does(monkeypatch: pytest.MonkeyPatch, axis: int) -> None:
    rng = np.random.default_rng(6)
    with np.errstate(over="ignore"):
        array = (mixed((320, 256)).astype(np.float32) * 2.0 ** rng.integers(-100, 100, (320, 1))).astype(
            ml_dtypes.bfloat16
        )
    expected = parts_of(count_blocks(array, axis=axis))
    # Counts have 32 bits: more elements are counted in several tables.
    monkeypatch.setattr(pieces_module, "PIECE", 2000)
    monkeypatch.setattr(block_histogram, "_MAX_COUNTED", 5000)
    assert parts_of(count_blocks(array, axis=axis, threads=1)) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
@pytest.mark.parametrize("rule", list(ScaleRule))
def test_scales_follow_from_the_cells_for_every_maximum(dtype: str, rule: ScaleRule) -> None:
    array = every_pattern(dtype)
    with np.errstate(invalid="ignore"):
        magnitudes = np.abs(array.astype(np.float64))
    largest = np.unique(magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)])
    # Of blocks with one element the value of each cell is the block's maximum.
    histogram = count_blocks(array, block_size=1)
    np.testing.assert_array_equal(histogram.values, largest)
    for name in ELEMENTS:
        element = FORMATS[name]
        assert histogram.supports(rule, element)
        clamped = np.clip(histogram.scale_exponents(rule, element) + 1, -127, 127)
        np.testing.assert_array_equal(clamped, scale_exponents(largest, rule=rule, element=element, offset=1))


def test_what_the_classes_do_not_tell_is_refused() -> None:
    histogram = count_blocks(np.ones(4, dtype=np.float16))
    element = FORMATS["fp8_e3m4"]
    assert histogram.supports(ScaleRule.FLOOR, element)
    assert not histogram.supports(ScaleRule.EVEN, element)
    with pytest.raises(UsageError, match="do not tell the scales of rule even for elements of fp8_e3m4"):
        histogram.scale_exponents(ScaleRule.EVEN, element)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("rounded_to", ["float16", "bfloat16"])
def test_values_are_rounded_before_they_are_counted(dtype: str, rounded_to: str) -> None:
    array = mixed((40, 50), dtype=dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = parts_of(count_blocks(array.astype(numpy_dtype(rounded_to)), axis=0))
    found = count_blocks(array, axis=0, rounded_to=numpy_dtype(rounded_to))
    assert parts_of(found) == expected
    assert found.dtype == numpy_dtype(rounded_to)


def test_what_cannot_be_counted_is_refused() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (np.ones(4, dtype=np.float32), {}, "float32 cannot be counted in blocks: use a floating type of at most 16"),
        (np.ones(4, dtype=np.int16), {}, "int16 cannot be counted in blocks"),
        (np.ones(4, dtype=np.complex64), {}, "complex64 cannot be counted in blocks"),
        (np.ones(4, dtype=np.int16), {"rounded_to": np.dtype(np.float16)}, "int16 cannot be counted in blocks"),
        (np.ones(4, dtype=np.float16), {"axis": 1}, "axis=1 is not an axis"),
        (np.ones((), dtype=np.float16), {"axis": -2}, "axis=-2 is not an axis"),
        (np.ones(4, dtype=np.float16), {"block_size": 0}, "block_size=0 is not a number"),
        (np.ones(4, dtype=np.float16), {"threads": 0}, "threads=0 is not a number"),
    ]
    for array, options, message in cases:
        with pytest.raises(UsageError, match=message):
            count_blocks(array, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("threads", [1, 3, None])
def test_single_values_are_counted_by_any_number_of_threads(dtype: str, threads: int | None) -> None:
    rng = np.random.default_rng(8)
    array = rng.integers(-128, 128, (2100, 2048)).astype(numpy_dtype(dtype))
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    expected = np.bincount(array.view(unsigned).reshape(-1), minlength=1 << 8 * unsigned.itemsize)
    for layout in (array, array.T, array[::-1, ::1]):
        np.testing.assert_array_equal(count_values(layout, threads=threads).counts, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("axis", [0, 1])
def test_too_many_cells_are_none_whatever_the_threads(axis: int, threads: int) -> None:
    array = every_pattern("bfloat16").reshape(256, 256)
    counted = count_blocks(array, axis=axis, block_size=8)

    def few(max_cells: int) -> BlockHistogram | None:
        return count_few_cells(array, axis=axis, block_size=8, threads=threads, max_cells=max_cells)

    enough = few(counted.num_cells + (1 << 15))  # with those of spoiled blocks
    assert enough is not None
    assert enough.counts.tolist() == counted.counts.tolist()
    assert few(counted.num_cells - 1) is None
    assert few(10) is None
