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


@pytest.mark.parametrize("size", [2, 100, 4097, 3 * module.PART + 5])
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
    assert found.gain == pytest.approx((reference * result.astype("f8")).sum() / (reference.astype("f8") ** 2).sum())


def test_bias_is_over_the_error_that_rows_and_columns_leave() -> None:
    for shape in [(37, 101), (5, 3, 700), (40_000, 20), (2, module.PART), (9, 1), (1, 9)]:
        reference, result = (part[91:].reshape(shape) for part in pair(91 + math.prod(shape)))
        errors = (result.astype(np.float64) - reference).reshape(-1, shape[-1])
        rows, columns, single = (float((errors.sum(axis) ** 2).sum()) for axis in (1, 0, ()))
        found = error_sums(reference, result)
        assert found.error_deviation**2 == pytest.approx(max(rows + columns - single, single), rel=1e-9)
        assert found.bias == pytest.approx(errors.sum() / math.sqrt(max(rows + columns - single, single)), rel=1e-9)


def test_bias_of_unbiased_products_is_that_of_chance() -> None:
    """Rows and columns share what was rounded of them: as independent errors they would be beyond 4, ever again."""
    rng = np.random.default_rng(0)
    found, lone = [], []
    for _ in range(100):
        a, b = rng.standard_normal((200, 64)) + 1, rng.standard_normal((300, 64))
        noisy_a, noisy_b = (one + 0.1 * rng.standard_normal(one.shape) for one in (a, b))
        sums = error_sums((a @ b.T), (noisy_a @ noisy_b.T))
        assert sums.bias is not None
        found.append(sums.bias)
        lone.append(sums.error / math.sqrt(sums.error_squared))
    assert 0.7 < np.sqrt(np.mean(np.square(found))) < 1.3
    assert np.sqrt(np.mean(np.square(lone))) > 4
    shifted = error_sums(np.zeros((200, 300)), rng.standard_normal((200, 300)) + 0.1)
    assert shifted.bias is not None
    assert shifted.bias > 8


def test_bias_of_many_calls_with_one_weight_is_that_of_chance() -> None:
    """What is rounded of a weight meets the mean of the input in every call: each repeats the error of the others."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(40):
        b = rng.standard_normal((60, 64))
        noisy_b = b + 0.1 * rng.standard_normal(b.shape)
        calls = [rng.standard_normal((50, 64)) + 1 for _ in range(20)]
        sums = sum((error_sums(a @ b.T, a @ noisy_b.T) for a in calls), start=ErrorSums())
        assert sums.bias is not None
        found.append(sums.bias)
    assert 0.7 < np.sqrt(np.mean(np.square(found))) < 1.3


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
    reference, result = (part.reshape(-1, 1000) for part in pair(5 * 280_000))
    whole = error_sums(reference, result)
    cut = 560
    both = error_sums(reference[:cut], result[:cut]) + error_sums(reference[cut:], result[cut:])
    # A column of both is two columns.
    same = dataclasses.replace(both, error_deviation=whole.error_deviation)
    assert same.to_array() == pytest.approx(whole.to_array(), rel=1e-12)
    assert ErrorSums.pooled([whole.to_array()]) == whole
    monkeypatch.setattr("ranktape.analyze.numerics.pieces.num_threads", lambda _threads: 1)
    assert error_sums(reference, result) == whole


def test_a_device_adds_up_what_the_compiled_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, result = pair(5000)
    monkeypatch.setattr(module, "DEVICE_PART", 1024)
    tensors = [torch.from_numpy(part.reshape(5, 10, 100)) for part in (reference, result)]
    assert module._device_sums(*tensors).to_array() == pytest.approx(error_sums(*tensors).to_array(), rel=1e-12)
    assert module._device_sums(torch.zeros(0), torch.zeros(0)) == ErrorSums()


def test_a_rest_is_added_exactly() -> None:
    reference, high, low = (torch.from_numpy(part) for part in (*pair(6000), pair(6000, seed=1)[1]))
    high, low = high.bfloat16(), (low * 1e-3).bfloat16()
    plain = error_sums(reference.double(), (high.double() + low.double()))
    assert error_sums(reference, high, residual=low).to_array() == pytest.approx(plain.to_array(), rel=1e-5)


def test_layouts_and_types_are_taken_as_float32() -> None:
    reference, result = (torch.from_numpy(part[91:]).reshape(30, 20) for part in pair(691))
    plain = error_sums(reference.numpy(), result.numpy())
    assert error_sums(reference.T.contiguous().T, result) == plain
    assert error_sums(reference.double(), result.requires_grad_()) == plain
    beyond = error_sums(np.array([1.0, 1e300]), np.array([1e300, 1.0]))
    assert [beyond.num_compared, beyond.num_lost] == [0, 1]
    assert error_sums(reference, result.bfloat16()) == error_sums(reference, result.bfloat16().float())


def test_metrics_where_there_is_nothing_to_compare_or_to_divide_by() -> None:
    nothing = error_sums(np.zeros((0, 3)), np.zeros((0, 3)))
    assert nothing == ErrorSums() == error_sums(np.zeros(0), torch.zeros(0)) == ErrorSums.pooled([])
    names = ("sqnr", "relative_error", "cosine", "max_abs_error", "bias", "norm_ratio", "gain")
    assert [getattr(nothing, name) for name in names] == [None] * 7
    lost = error_sums(np.ones(3), np.full(3, np.nan))
    assert [lost.num_lost, lost.sqnr, lost.bias] == [3, None, None]
    equal = error_sums(np.ones(3), np.ones(3))
    assert [getattr(equal, name) for name in names] == [math.inf, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    of_zero = error_sums(np.zeros(3), np.ones(3))
    assert [getattr(of_zero, name) for name in names] == [-math.inf, math.inf, None, 1.0, 1.0, math.inf, None]
    assert error_sums(np.ones(3), np.zeros(3)).norm_ratio == 0.0
    large = error_sums(np.full(10_000, 3e38), np.full(10_000, -3e38))
    assert [large.cosine, large.relative_error, large.norm_ratio] == [-1.0, 2.0, 1.0]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"a result of shape \(2, 3\) has no errors against a reference of shape \(6,\)"
    ):
        error_sums(np.zeros(6), np.zeros((2, 3)))
