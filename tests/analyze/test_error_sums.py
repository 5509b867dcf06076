"""Do the sums over errors give the metrics that numpy finds in the whole arrays, in parts, in threads, on a device?"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from ranktape.analyze.numerics import error_sums as module
from ranktape.analyze.numerics.differences import compare_parts
from ranktape.analyze.numerics.error_sums import ErrorSums, error_sums
from ranktape.errors import UsageError

Array = np.ndarray[Any, Any]


def pair(size: int, *, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal(size).astype(np.float32)
    result = (reference * 0.97 + 0.1 * rng.standard_normal(size) + 0.01).astype(np.float32)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 7.0, 1e-45], dtype=np.float32)
    for values, places in ((reference, slice(0, 49)), (result, slice(42, 91))):
        values[places] = np.repeat(special, 7) if values is reference else np.tile(special, 7)
    return reference, result


@pytest.mark.parametrize("size", [2, 100, 4096, 4097, 3 * module.CHUNK + 5])
def test_metrics_are_those_of_whole_arrays_in_float64(size: int) -> None:
    reference, result = (part[-size:] for part in pair(size + 91))
    found, twin = error_sums(reference, result), compare_parts([(reference, result)], shape=reference.shape)
    errors = result.astype(np.float64) - reference
    assert [found.num_elements, found.num_compared, found.num_lost] == [size, twin.num_compared, 0]
    assert found.max_abs_error == twin.max_abs == np.abs(errors).max()
    for name, other in (("sqnr", "sqnr"), ("cosine", "cosine"), ("relative_error", "relative_norm")):
        assert getattr(found, name) == pytest.approx(getattr(twin, other), rel=1e-12), name
    assert found.norm_ratio == pytest.approx(
        np.linalg.norm(result.astype("f8")) / np.linalg.norm(reference.astype("f8"))
    )
    assert found.bias == pytest.approx(errors.mean() / (errors.std(ddof=1) / math.sqrt(size)), rel=1e-9)


def test_nan_and_infinity_are_counted_apart() -> None:
    reference, result = pair(1000)
    found = error_sums(reference, result)
    is_finite, is_compared = np.isfinite(reference), np.isfinite(reference) & np.isfinite(result)
    assert [found.num_compared, found.num_lost] == [is_compared.sum(), (is_finite & ~np.isfinite(result)).sum()]
    assert found.num_lost > 0
    kept = error_sums(reference[is_compared], result[is_compared])
    same = dataclasses.replace(found, num_elements=kept.num_elements, num_lost=0.0)
    assert same.to_array() == pytest.approx(kept.to_array(), rel=1e-12)


def test_sums_of_parts_are_those_of_the_whole_whatever_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, result = pair(5 * module.CHUNK)
    whole = error_sums(reference, result)
    cut = 2 * module.CHUNK
    both = error_sums(reference[:cut], result[:cut]) + error_sums(reference[cut:], result[cut:])
    assert both.to_array() == pytest.approx(whole.to_array(), rel=1e-13)
    assert ErrorSums.pooled([whole.to_array()]) == whole
    monkeypatch.setattr("ranktape.analyze.numerics.pieces.num_threads", lambda _threads: 1)
    assert error_sums(reference, result) == whole


def test_a_device_adds_up_what_the_compiled_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, result = pair(5000)
    monkeypatch.setattr(module, "DEVICE_CHUNK", 1024)
    twin = module._device_sums(torch.from_numpy(reference), torch.from_numpy(result).reshape(50, 100))
    assert twin.to_array() == pytest.approx(error_sums(reference, result).to_array(), rel=1e-12)
    assert module._device_sums(torch.zeros(0), torch.zeros(0)) == ErrorSums()


def test_layouts_and_types_are_taken_as_float32() -> None:
    reference, result = (torch.from_numpy(part[91:]).reshape(30, 20) for part in pair(691))
    plain = error_sums(reference.numpy(), result.numpy())
    assert error_sums(reference.T.contiguous().T, result) == plain
    assert error_sums(reference.double(), result.requires_grad_()) == plain
    assert error_sums(reference, result.bfloat16()) == error_sums(reference, result.bfloat16().float())


def test_metrics_where_there_is_nothing_to_compare_or_to_divide_by() -> None:
    nothing = error_sums(np.zeros((0, 3)), np.zeros((0, 3)))
    assert nothing == ErrorSums() == error_sums(np.zeros(0), torch.zeros(0)) == ErrorSums.pooled([])
    names = ("sqnr", "relative_error", "cosine", "max_abs_error", "bias", "norm_ratio")
    assert [getattr(nothing, name) for name in names] == [None] * 6
    lost = error_sums(np.ones(3), np.full(3, np.nan))
    assert [lost.num_lost, lost.sqnr, lost.bias] == [3, None, None]
    equal = error_sums(np.ones(3), np.ones(3))
    assert [getattr(equal, name) for name in names] == [math.inf, 0.0, 1.0, 0.0, 0.0, 1.0]
    of_zero = error_sums(np.zeros(3), np.ones(3))
    assert [getattr(of_zero, name) for name in names] == [-math.inf, math.inf, None, 1.0, math.inf, math.inf]
    assert error_sums(np.ones(3), np.zeros(3)).norm_ratio == 0.0
    large = error_sums(np.full(10_000, 3e38), np.full(10_000, -3e38))
    assert [large.cosine, large.relative_error, large.norm_ratio] == [-1.0, 2.0, 1.0]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"a result of shape \(2, 3\) has no errors against a reference of shape \(6,\)"
    ):
        error_sums(np.zeros(6), np.zeros((2, 3)))
