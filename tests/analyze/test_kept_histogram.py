"""Has a record whose histogram was kept the same answers as one whose values were kept?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze import View, overflow, sweep
from ranktape.analyze.engine.values import read_block_histogram
from ranktape.analyze.numerics.histograms.block_counts import (
    BLOCK_AXES,
    NUM_CODES,
    BlockCounts,
    pack_histogram,
    unpack_blocks,
)
from ranktape.analyze.numerics.histograms.block_histogram import CELLS, EXCLUDED, count_blocks
from ranktape.analyze.numerics.histograms.histogram import count_values, dtype_limits, scan, scan_histogram
from ranktape.analyze.views.plots.table import PLOTS
from ranktape.analyze.views.plots.write import write_one
from ranktape.capture.writing.counting import kept_nbytes, reduce_to
from ranktape.errors import DataError, RanktapeError, UsageError
from ranktape.storage import Run
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import RecordInfo
from tests.analyze.runs import Tensor, describe_tensor, store
from tests.runs import describe

FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp4_e2m1", "bf16", "fp16")


def sizes(dtype: str) -> np.ndarray[Any, Any]:
    """Values of every magnitude with NaN, infinities and zeros among them."""
    rng = np.random.default_rng(1)
    with np.errstate(over="ignore"):
        values = (rng.standard_normal(3000) * 2.0 ** rng.integers(-40, 20, 3000)).astype(numpy_dtype(dtype))
    values[:6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, np.nan]
    return values.reshape(50, 60)


def kept_as_histogram(tensor: Tensor) -> Tensor:
    """The same record as the writer keeps it when there is no room for values."""
    array, info = tensor
    reduced = reduce_to("histogram", array, info=info)
    assert reduced is not None
    return reduced


def kept_without_blocks(tensor: Tensor) -> Tensor:
    """The same without counts of blocks."""
    words, info = kept_as_histogram(tensor)
    return words[: 1 << 16], dataclasses.replace(info, nbytes=4 << 16)


def both(tmp_path: Path, **fields: Any) -> tuple[Run, Run]:
    """Two runs of one tensor: its values, and its histogram."""
    tensor = describe_tensor(sizes(fields.pop("dtype")), **fields)
    return store(tmp_path / "values", [tensor]), store(tmp_path / "histogram", [kept_as_histogram(tensor)])


KINDS = (
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "float16", "compute_dtype": "bfloat16"},
    {"dtype": "float32", "compute_dtype": "bfloat16"},
    {"dtype": "float64", "compute_dtype": "float16"},
)


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_question_about_single_values_has_the_same_answer(
    tmp_path: Path, fields: dict[str, Any], format_name: str
) -> None:
    values, histogram = both(tmp_path, **dict(fields))
    ours = overflow(histogram.select(), format=format_name)
    assert ours.rows == overflow(values.select(), format=format_name).rows
    assert sweep(histogram.select(), format=format_name).rows == sweep(values.select(), format=format_name).rows


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_the_limits_of_the_dtype_have_too(tmp_path: Path, fields: dict[str, Any]) -> None:
    values, histogram = both(tmp_path, **dict(fields))
    for view in (None, View.COMPUTE):
        assert overflow(histogram.select(), view=view).rows == overflow(values.select(), view=view).rows
    write_one(PLOTS["overflow"], histogram.select(), path=tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_values_that_were_rounded_cannot_be_looked_at_as_they_were_seen(tmp_path: Path) -> None:
    _, histogram = both(tmp_path, dtype="float32", compute_dtype="bfloat16")
    with pytest.raises(UsageError, match=r"the histogram of its values in bfloat16 was kept.*leave out --view seen"):
        sweep(histogram.select(), format="fp8_e4m3", view=View.SEEN)
    with pytest.raises(UsageError, match="leave out --view seen"):
        overflow(histogram.select(), format="fp8_e4m3", view=View.SEEN)
    # What the dtype's own limits do was counted before: no value is needed.
    assert len(overflow(histogram.select(), view=View.SEEN).rows) == 1


@pytest.mark.parametrize("fields", KINDS[:1] + KINDS[3:], ids=str)
@pytest.mark.parametrize("axis", ["features", "tokens"])
@pytest.mark.parametrize("shape", [(50, 60), (3000,), (5, 10, 60), (2, 5, 5, 60)], ids=str)
def test_the_blocks_are_those_of_the_values(
    tmp_path: Path, fields: dict[str, Any], axis: str, shape: tuple[int, ...]
) -> None:
    said = dict(fields)
    values = sizes(said.pop("dtype")).reshape(shape)
    tensor = describe_tensor(values, **said)
    record = store(tmp_path / "run", [kept_as_histogram(tensor)]).select()[0]
    ours = read_block_histogram(record, axis=axis, view=View.COMPUTE)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.reshape(-1, shape[-1]).astype(numpy_dtype(record.compute_dtype))
    theirs = count_blocks(rounded, axis=-1 if axis == "features" else 0)
    assert (ours.axis, ours.dtype, ours.block_size, ours.cuts) == (axis, theirs.dtype, 32, theirs.cuts)
    for name in CELLS:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), strict=True)
    assert {name: getattr(ours, name) for name in EXCLUDED} == {name: getattr(theirs, name) for name in EXCLUDED}
    assert ours.num_elements == values.size


def test_blocks_are_not_looked_at_in_another_type(tmp_path: Path) -> None:
    _, rounded = both(tmp_path / "a", dtype="float32", compute_dtype="bfloat16")
    with pytest.raises(UsageError, match=r"blocks of values in bfloat16 were counted.*in float32: give --view compute"):
        read_block_histogram(rounded.select()[0], view=View.SEEN)
    _, half = both(tmp_path / "b", dtype="float16", compute_dtype="bfloat16")
    with pytest.raises(UsageError, match=r"blocks of values in float16 were counted.*in bfloat16: give --view seen"):
        read_block_histogram(half.select()[0], view=View.COMPUTE)
    assert read_block_histogram(half.select()[0], view=View.SEEN).num_elements == 3000


def test_histograms_without_blocks_answer_what_they_did(tmp_path: Path) -> None:
    tensor = describe_tensor(sizes("bfloat16"))
    values = store(tmp_path / "values", [tensor])
    earlier = store(tmp_path / "earlier", [kept_without_blocks(tensor)])
    assert overflow(earlier.select(), format="fp4_e2m1").rows == overflow(values.select(), format="fp4_e2m1").rows
    with pytest.raises(UsageError, match="no blocks along 'features' were counted, but single values alone"):
        read_block_histogram(earlier.select()[0], view=View.SEEN)


def test_records_of_both_kinds_stand_in_one_table(tmp_path: Path) -> None:
    first = describe_tensor(sizes("bfloat16"))
    second = kept_as_histogram(describe_tensor(sizes("bfloat16"), call=1))
    run = store(tmp_path / "run", [first, second])
    rows = overflow(run.select(), format="fp4_e2m1", by=["keep"]).rows
    assert [row[0] for row in rows] == ["histogram", "values"]
    assert rows[0][1:] == rows[1][1:]


def test_a_histogram_of_another_tensor_is_refused(tmp_path: Path) -> None:
    counts, info = kept_as_histogram(describe_tensor(sizes("bfloat16")))
    run = store(tmp_path / "run", [(counts, dataclasses.replace(info, shape=(2, 2)))])
    with pytest.raises(DataError, match="counts other elements than the tensor had"):
        sweep(run.select(), format="fp8_e4m3")


def test_a_histogram_is_scanned_as_its_array() -> None:
    for dtype in [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.int16, np.uint8]:
        array = np.random.default_rng(2).integers(0, 256, 4096, dtype=np.uint8).view(np.dtype(dtype))
        limits = dtype_limits(array.dtype)
        assert repr(scan_histogram(count_values(array), limits=limits)) == repr(scan(array, limits=limits))


HEADER = NUM_CODES + 1
"""Where the first section begins."""

FIRST_ROW = HEADER + 12 + 9
"""Where its kinds of blocks begin."""


def kept(shape: tuple[int, ...], **fields: Any) -> tuple[np.ndarray[Any, Any], RecordInfo]:
    """What the writer keeps of a tensor with NaN, infinities, zeros and subnormals."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)
    flat = values.reshape(-1)
    flat[:70] = 0
    flat[100:105] = [np.nan, np.inf, -np.inf, -0.0, 2.0**-130]
    array = values.astype(ml_dtypes.bfloat16)
    reduced = reduce_to("histogram", array, info=describe(array, **fields))
    assert reduced is not None
    return reduced


def test_what_is_unpacked_is_what_was_packed() -> None:
    words, _ = kept((40, 96))
    blocks = unpack_blocks(words)
    assert [one.axis for one in blocks] == list(BLOCK_AXES)
    np.testing.assert_array_equal(pack_histogram(words[:NUM_CODES].astype(np.int64), blocks), words)
    assert all(one.num_elements == 40 * 96 for one in blocks)
    features = blocks[0]
    assert (features.num_blocks, features.zero_blocks, features.zero_elements) == (120, 2, 64)
    # Elements 100 to 104 are in the fourth block of 32.
    assert (features.spoiled_blocks, features.spoiled, features.nan, features.inf) == (1, 29, 1, 2)
    assert not unpack_blocks(words[:NUM_CODES])


def test_large_counts_have_wide_words() -> None:
    words, _ = kept((40, 96))
    counts = words[:NUM_CODES].astype(np.int64)
    counts[3] = 1 << 40
    blocks = [dataclasses.replace(one, zero_elements=1 << 40) for one in unpack_blocks(words)]
    wide = pack_histogram(counts, blocks)
    assert wide.dtype == np.uint64
    assert wide[3] == 1 << 40
    assert [one.zero_elements for one in unpack_blocks(wide)] == [1 << 40] * 2


def changes(words: np.ndarray[Any, Any]) -> dict[str, dict[int, int]]:
    """What to change, by what is wrong then."""
    num_rows = int(words[HEADER + 10])
    steps = FIRST_ROW + 3 * num_rows
    counts = steps + int(words[HEADER + 11])
    return {
        "three axes": {NUM_CODES: 3},
        "no section, but words": {NUM_CODES: 0},
        "an axis that is none": {HEADER: 2},
        "no block size": {HEADER + 1: 0},
        "cuts without end": {HEADER + 9: 1 << 31},
        "kinds without end": {HEADER + 10: (1 << 32) - 1},
        "cells without end": {HEADER + 11: (1 << 32) - 1},
        "a kind more": {HEADER + 10: num_rows + 1},
        "cuts in disorder": {HEADER + 12: 5000},
        "an exponent that is none": {FIRST_ROW: 4000},
        "a class that is none": {FIRST_ROW + 1: 10},
        "a kind without cells": {FIRST_ROW + 2: 0},
        "a kind with more cells than there are": {FIRST_ROW + 2: 1 << 20},
        "a kind twice": {FIRST_ROW + 3: int(words[FIRST_ROW]), FIRST_ROW + 4: int(words[FIRST_ROW + 1])},
        "a magnitude that is none": {steps: 1 << 15},
        "magnitudes beyond all": {steps + 1: (1 << 15) - 1},
        "a magnitude twice": {steps + 1: 0},
        "a cell without elements": {counts: 0},
        "something behind it all": {words.size - 1: 7},
    }


WRONG = tuple(changes(kept((40, 96))[0]))


def test_what_cannot_be_is_damage() -> None:
    for wrong in WRONG:
        words, _ = kept((40, 96))
        for place, value in changes(words)[wrong].items():
            words[place] = value
        with pytest.raises(DataError, match="counts of blocks are damaged"):
            unpack_blocks(words)


def test_any_word_may_be_anything() -> None:
    words, _ = kept((40, 96))
    rng = np.random.default_rng(4)
    end = int(np.flatnonzero(words)[-1])
    for _ in range(600):
        damaged = words.copy()
        damaged[rng.integers(NUM_CODES, end)] = rng.choice([0, 1, 31, 1 << 16, (1 << 32) - 1])
        try:
            found = unpack_blocks(damaged)
        except DataError:
            continue
        assert all(isinstance(one, BlockCounts) for one in found)


def test_what_is_cut_off_is_damage() -> None:
    for length in [NUM_CODES - 1, NUM_CODES + 1, HEADER + 5, FIRST_ROW + 1]:
        words, _ = kept((40, 96))
        with pytest.raises(DataError, match="cut off"):
            unpack_blocks(words[:length])


def test_a_record_with_damaged_counts_is_refused(tmp_path: Path) -> None:
    words, info = kept((40, 96))
    words[FIRST_ROW + 2] = 0
    record = store(tmp_path / "run", [(words, info)]).select()[0]
    with pytest.raises(DataError, match=r"<Record .*is damaged: the counts of blocks"):
        read_block_histogram(record, view=View.SEEN)
    assert record.histogram()[:NUM_CODES].sum() == 40 * 96


def test_counts_of_other_elements_are_refused(tmp_path: Path) -> None:
    words, info = kept((40, 96))
    record = store(tmp_path / "run", [(words, dataclasses.replace(info, shape=(96, 41)))]).select()[0]
    with pytest.raises(DataError, match="are of other elements than it had"):
        read_block_histogram(record, view=View.SEEN)


@pytest.mark.parametrize("nbytes", [0, 4, 262143, 262140, 1 << 40])
def test_a_record_that_lies_about_its_size_is_refused(tmp_path: Path, nbytes: int) -> None:
    words, info = kept((40, 96))
    with pytest.raises(RanktapeError):
        store(tmp_path / "run", [(words, dataclasses.replace(info, nbytes=nbytes))])


def test_there_are_two_axes(tmp_path: Path) -> None:
    record = store(tmp_path / "run", [kept((4, 10, 96), layout="TBH")]).select()[0]
    assert read_block_histogram(record, view=View.SEEN).axis == "features"
    assert read_block_histogram(record, axis="features", view=View.SEEN).num_blocks == 40 * 3
    assert read_block_histogram(record, axis="tokens", view=View.SEEN).num_blocks == 2 * 96
    with pytest.raises(UsageError, match="no blocks along 'rows' were counted, but features, tokens"):
        read_block_histogram(record, axis="rows", view=View.SEEN)
    with pytest.raises(UsageError, match=r"use histogram\(\)"):
        record.read()


def test_histograms_are_always_packed(tmp_path: Path) -> None:
    store(tmp_path / "run", [kept((40, 96))])
    [path] = (tmp_path / "run").rglob("layers*/c.0")
    assert path.stat().st_size < 20_000


def test_what_a_histogram_takes_is_known_before() -> None:
    for shape in [(2, 4), (100, 96), (1024, 1024)]:
        array = np.random.default_rng(1).standard_normal(shape).astype(ml_dtypes.bfloat16)
        reduced = reduce_to("histogram", array, info=describe(array))
        assert reduced is not None
        forecast = kept_nbytes("histogram", nbytes=array.nbytes, dtype="bfloat16", compute_dtype="bfloat16")
        assert 0.6 < reduced[1].nbytes / forecast <= 1


def test_like_tensors_lie_in_one_stack(tmp_path: Path) -> None:
    tensors = [kept((40, 96), call=call) for call in range(3)]
    records = store(tmp_path / "run", tensors).select()
    assert len({record.location.stack for record in records}) == 1
    assert all(
        read_block_histogram(record, axis="tokens", view=View.SEEN).num_elements == 40 * 96 for record in records
    )
