"""The `legacy` mode gives the numbers of the legacy tool.

The tool is written anew, in torch, in `benchmarks/original_sweep.py`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from benchmarks.original_sweep import ORIGINAL_FORMATS, count_beyond, original_sweep, quantize
from ranktape.analyze.numerics.formats import FORMATS, Rounding, round_to
from ranktape.analyze.numerics.histograms.histogram import Histogram, count_values
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel, legacy_histogram, legacy_result, to_bfloat16
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import sweep_array, sweep_formats
from ranktape.analyze.questions.advice import Recommendation
from ranktape.errors import UsageError

E4M3 = FORMATS["fp8_e4m3"]

EXPONENTS = (
    0.0,
    1.0,
    -7.0,
    60.0,
    -126.0,
    127.0,
    128.0,
    -128.0,
    -149.0,
    300.0,
    -300.0,
    -5.85,
    3.3333,
    -20.4,
    -120.25,
    0.7,
)
"""Whole and fractional, near 1, at the ends of float32 and beyond them."""

PATTERNS = np.arange(1 << 16, dtype=np.uint16)

ALL = torch.from_numpy(PATTERNS.view(np.int16)).view(torch.bfloat16)
"""Every bfloat16 there is."""

GAUSS = np.random.default_rng(0).standard_normal(1 << 16).astype(ml_dtypes.bfloat16)


def as_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def same_bits(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    """Equal as float32, NaN as good as any other NaN, zeros told apart."""
    is_nan = np.isnan(found)
    same = found.astype(np.float32).view(np.uint32) == expected.astype(np.float32).view(np.uint32)
    return bool((same | is_nan).all() and (is_nan == np.isnan(expected)).all())


def levels_of(sweep: Any) -> tuple[LegacyLevel, ...]:
    assert all(isinstance(level, LegacyLevel) for level in sweep.levels)
    levels: tuple[LegacyLevel, ...] = sweep.levels
    return levels


def legacy(**options: Any) -> SweepOptions:
    """Options of a legacy sweep."""
    return SweepOptions(mode=SweepMode.LEGACY, **options)


def at(exponent: float) -> SweepOptions:
    """One level."""
    return legacy(num_levels=1, max_scale_exp=exponent, min_scale_exp=exponent)


def test_every_bfloat16_becomes_what_the_tool_made_of_it() -> None:
    for exponent, name in itertools.product(EXPONENTS, ORIGINAL_FORMATS):
        _, expected = quantize(ALL, row=ORIGINAL_FORMATS[name], exponent=exponent)
        found = legacy_result(ALL.float().numpy(), target=FORMATS[name], exponent=exponent)
        assert same_bits(found, expected.float().numpy())


def test_counts_of_every_bfloat16_are_the_tools() -> None:
    for exponent, name in itertools.product(EXPONENTS, ORIGINAL_FORMATS):
        scaled, _ = quantize(ALL, row=ORIGINAL_FORMATS[name], exponent=exponent)
        expected = count_beyond(scaled, row=ORIGINAL_FORMATS[name])
        every = Histogram(dtype=np.dtype(ml_dtypes.bfloat16), counts=np.ones(1 << 16, dtype=np.int64))
        (level,) = levels_of(sweep_formats(every, formats=[name], options=at(exponent))[0])
        assert level.original_overflow_count == expected["overflow"]
        assert level.original_underflow_count == expected["underflow"]
        assert level.original_flush_count == expected["flush"]
        assert level.original_overflow_ratio == expected["overflow"] / (1 << 16)


@pytest.mark.parametrize("name", ORIGINAL_FORMATS)
def test_a_sweep_is_the_tools(name: str) -> None:
    """Metrics in float32 agree to what float32 can say; the tool's cosine not even to that."""
    expected = original_sweep(as_torch(GAUSS), format=name)
    found = levels_of(sweep_array(GAUSS, format=name, options=legacy()))
    assert [level.exponent for level in found] == [row["exponent"] for row in expected]
    for level, row in zip(found, expected, strict=True):
        for metric in ("mse", "rmse", "psnr", "mae", "max_abs_error"):
            assert math.isclose(getattr(level, metric), row[metric], rel_tol=1e-4), metric
        assert math.isclose(level.relative_error_percent, row["relative_error"], rel_tol=1e-4)
        assert math.isclose(level.cosine, row["cosine"], abs_tol=2e-3)
        assert math.isclose(level.original_score, row["score"], abs_tol=2e-3)
        counts = (level.original_overflow_count, level.original_underflow_count, level.original_flush_count)
        assert counts == (row["overflow"], row["underflow"], row["flush"])


@pytest.mark.parametrize("name", ORIGINAL_FORMATS)
def test_figures_are_their_definitions_in_float64(name: str) -> None:
    with_specials = GAUSS.copy()
    with_specials[:4] = [np.nan, np.inf, -np.inf, 0.0]
    (level,) = levels_of(sweep_array(with_specials, format=name, options=at(-1.3)))
    x = with_specials[3:].astype(np.float64)
    scaled, result = quantize(as_torch(with_specials[3:].copy()), row=ORIGINAL_FORMATS[name], exponent=-1.3)
    y, magnitude = result.double().numpy(), scaled.abs().double().numpy()
    error = np.abs(x - y)
    expected = {
        "mse": np.mean(error**2),
        "rmse": np.sqrt(np.mean(error**2)),
        "mae": np.mean(error),
        "max_abs_error": np.max(error),
        "relative_error": np.mean(error) / np.mean(np.abs(x)),
        "cosine": x @ y / np.sqrt((x @ x) * (y @ y)),
        "psnr": 20 * np.log10(np.abs(x).max() / np.sqrt(np.mean(error**2))),
        "sqnr": 10 * np.log10((x @ x) / (error @ error)),
        "overflow_count": (magnitude >= FORMATS[name].overflow_start_of(Rounding.AWAY)).sum(),
        "underflow_count": ((x != 0) & (magnitude < FORMATS[name].min_normal)).sum(),
        "flushed_count": ((x != 0) & (y == 0)).sum(),
    }
    for field, value in expected.items():
        assert math.isclose(getattr(level, field), value, rel_tol=1e-12), field


def test_known_errors_of_the_tool_are_kept() -> None:
    """Its logarithms are bfloat16 numbers, and so is what a half was added to."""
    found = legacy_result(ALL.float().numpy(), target=E4M3, exponent=0.0)
    is_finite = torch.isfinite(ALL).numpy()
    assert np.isnan(found[is_finite]).sum() == 80
    assert np.abs(ALL.float().numpy()[is_finite & np.isnan(found)]).min() > 2.87e38
    assert legacy_result(0.00097275, target=E4M3, exponent=0.0) == 2.0**-9
    assert round_to(float(to_bfloat16(0.00097275)), target=E4M3, rounding=Rounding.AWAY) == 0


def test_known_mean_squared_error_of_the_tool() -> None:
    """7.131e-4 was measured on N(0, 1), where float32 arithmetic gives 7.015e-4."""
    (level,) = levels_of(sweep_array(GAUSS, format="fp8_e4m3", options=at(-5.85)))
    assert math.isclose(level.mse, 7.131e-4, rel_tol=0.01)


def test_alignments_are_the_tools() -> None:
    """The largest value of fp8_e4m3 is taken for one of exponent 7, and the smallest is aligned to a normal value."""
    array = np.array([5.3, 1.0, 2.0**-20], dtype=np.float32)
    found = sweep_array(array, format="fp8_e4m3", options=legacy(num_levels=3))
    assert [level.exponent for level in found.levels] == [-5.0, -9.5, -14.0]


def test_ends_that_cross_change_places() -> None:
    found = sweep_array(np.ones(3, dtype=np.float32), format="fp8_e4m3", options=legacy(num_levels=2))
    assert [level.exponent for level in found.levels] == [6.0, -7.0]


def test_its_defaults_mean_that_no_exponent_was_given() -> None:
    array = np.array([5.3, 2.0**-20], dtype=np.float32)
    options = legacy(num_levels=2, max_scale_exp=10, min_scale_exp=-10)
    assert [level.exponent for level in sweep_array(array, format="fp8_e4m3", options=options).levels] == [-5.0, -14.0]
    options = legacy(num_levels=2, max_scale_exp=9, min_scale_exp=-9)
    assert [level.exponent for level in sweep_array(array, format="fp8_e4m3", options=options).levels] == [9.0, -9.0]


def test_bfloat16_is_rounded_to_as_torch_does() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    assert same_bits(to_bfloat16(values), torch.from_numpy(values).to(torch.bfloat16).float().numpy())
    wide = np.random.default_rng(2).standard_normal(10_000) * 10.0 ** np.arange(10_000).clip(0, 300)
    assert same_bits(to_bfloat16(wide), torch.from_numpy(wide).to(torch.bfloat16).float().numpy())


def test_a_tensor_is_cast_to_bfloat16_first() -> None:
    for dtype in [np.float16, np.float32, np.float64, ml_dtypes.float8_e5m2, np.int32]:
        array = (100 * np.random.default_rng(3).standard_normal(300_000)).astype(dtype)
        expected = count_values(
            torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        )
        found = legacy_histogram(array)
        assert (found.dtype, found.counts.tolist()) == (np.dtype(ml_dtypes.bfloat16), expected.counts.tolist())
        if array.dtype.itemsize <= 2:
            assert legacy_histogram(count_values(array)).counts.tolist() == expected.counts.tolist()


def test_tensors_without_a_scale_have_no_levels() -> None:
    for values in [[], [0.0, -0.0], [np.nan, np.inf], [0.0, np.inf]]:
        found = sweep_array(np.array(values, dtype=np.float32), format="fp8_e4m3", options=legacy())
        assert found.levels == ()
        assert found.note


def test_levels_far_off_have_figures() -> None:
    """Where a value becomes infinite or NaN the errors are infinite, and the score is the worst."""
    for exponent in [-300.0, -140.0, 140.0, 300.0]:
        options = legacy(num_levels=2, max_scale_exp=max(exponent, -7.0), min_scale_exp=min(exponent, -7.0))
        found = levels_of(sweep_array(GAUSS, format="fp8_e4m3", options=options))
        near, far = sorted(found, key=lambda level: abs(level.exponent + 7))
        assert near.score > far.score >= 0
        assert far.cosine == 0
        assert not any(
            math.isnan(getattr(far, field)) for field in LegacyLevel.__dataclass_fields__ if field != "original_score"
        )


def test_the_choice_of_the_tool_is_kept_apart_from_the_recommendation() -> None:
    """Where a level loses nothing, the tool's scores are NaN and it takes the first of these."""
    array = np.array([448.0, 1.0, 2.0**-6], dtype=np.float32)
    sweep = sweep_array(array, format="fp8_e4m3", options=legacy(num_levels=21, max_scale_exp=3, min_scale_exp=-3))
    found = Recommendation(sweep)
    assert found.original_choice is not None
    assert found.recommended is not None
    assert found.recommended.level.mse == 0
    chosen = found.original_choice
    assert isinstance(chosen, LegacyLevel)
    assert math.isnan(chosen.original_score)
    assert "nan" not in " ".join(found.advice.conclusion)


def test_the_tools_score_of_gradients_sees_less() -> None:
    """Of a tensor a millionth as large its score is another one; ours is the same."""
    near, far = (
        levels_of(sweep_array((GAUSS.astype(np.float32) * unit), format="fp8_e4m3", options=legacy()))
        for unit in (1.0, 2.0**-20)
    )
    assert [level.score for level in near] == [level.score for level in far]
    assert max(abs(one.original_score - other.original_score) for one, other in zip(near, far, strict=True)) > 0.2


def test_formats_that_the_tool_did_not_know() -> None:
    for name in ["hif8", "int8", "bf16", "fp16"]:
        message = f"format '{name}' is not allowed with --sweep-mode legacy: give one of fp8_e4m3"
        with pytest.raises(UsageError, match=message):
            sweep_array(GAUSS, format=name, options=legacy())


def test_another_rounding_is_refused() -> None:
    with pytest.raises(UsageError, match="--rounding even is not allowed with --sweep-mode legacy"):
        sweep_array(GAUSS, format="fp8_e4m3", options=legacy(rounding=Rounding.EVEN))


def test_where_the_tools_squares_are_no_float32_a_note_says_that_it_may_have_chosen_otherwise() -> None:
    cases: list[tuple[float, str]] = [(1e37, "overflow"), (1e-39, "vanish"), (1.0, "")]
    for factor, word in cases:
        values = np.random.default_rng(0).standard_normal(4096) * factor
        found = sweep_array(values.astype(ml_dtypes.bfloat16), format="fp8_e4m3", options=legacy())
        assert found.note == (word and f"the original's squares in float32 {word}: it may have chosen another level")
