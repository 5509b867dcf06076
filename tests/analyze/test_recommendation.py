"""The recommendation says what follows from the levels, whatever they are."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.numerics.quantization.encoded import LossSeverity
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.quantization.schemes import parse_scheme
from ranktape.analyze.numerics.sweeps.metrics import METRICS, Level
from ranktape.analyze.numerics.sweeps.options import MAX_SCALE_EXPONENT, SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep, sweep_array
from ranktape.analyze.questions.advice import (
    Position,
    Range,
    Recommendation,
    Variation,
    best_format,
    bits_per_element,
    common_grid,
    common_scale,
    range_after,
    range_before,
)
from ranktape.errors import UsageError

GAUSS = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)


@functools.cache
def sweep_of_gauss() -> ScaleSweep:
    return sweep_array(GAUSS, format="fp4_e2m1")


def level(exponent: float, **figures: Any) -> Level:
    """A level with these figures; the rest is ordinary."""
    overflow, underflow = figures.pop("overflow_ratio", 0.0), figures.pop("underflow_ratio", 0.0)
    ordinary: dict[str, Any] = {
        "exponent": exponent,
        "scale": 2.0**exponent,
        "mse": 1.0,
        "rmse": 1.0,
        "mae": 1.0,
        "max_abs_error": 2.0,
        "relative_error": 0.1,
        "cosine": 0.99,
        "psnr": 20.0,
        "sqnr": 15.0,
        "overflow_count": round(1e6 * overflow),
        "overflow_ratio": overflow,
        "underflow_count": round(1e6 * underflow),
        "underflow_ratio": underflow,
        "flushed_count": 0,
        "flushed_ratio": 0.0,
        "score": 0.5,
    }
    return Level(**ordinary | figures)


def of(*levels: Level) -> ScaleSweep:
    """A sweep that found these levels."""
    return dataclasses.replace(sweep_of_gauss(), levels=levels)


def judged(*levels: Level) -> Recommendation:
    return Recommendation(of(*levels))


def exponent_of(verdict: Any) -> float:
    assert verdict is not None
    return float(getattr(verdict, "level", verdict).exponent)


def test_the_best_level_of_each_metric_is_found() -> None:
    better = {"mse": 0.5, "rmse": 0.5, "cosine": 0.999, "psnr": 30.0, "sqnr": 25.0, "mae": 0.5, "max_abs_error": 1.0}
    better |= {"relative_error": 0.05}
    assert better.keys() == METRICS.keys()
    levels = [level(float(index), **{name: figure}) for index, (name, figure) in enumerate(better.items())]
    found = judged(*levels)
    assert {name: exponent_of(verdict) for name, verdict in found.best.items()} == {
        name: float(index) for index, name in enumerate(better)
    }


def test_the_first_of_equally_good_levels_is_taken() -> None:
    found = judged(level(2.0), level(1.0), level(0.0))
    assert {exponent_of(verdict) for verdict in found.best.values()} == {2.0}
    assert exponent_of(found.recommended) == 2.0


def test_severity_is_medium_above_a_thousandth_and_high_above_a_hundredth() -> None:
    for ratio, severity in [
        (0.0, LossSeverity.NONE),
        (0.001, LossSeverity.NONE),
        (0.00101, LossSeverity.MEDIUM),
        (0.01, LossSeverity.MEDIUM),
        (0.0101, LossSeverity.HIGH),
        (1.0, LossSeverity.HIGH),
    ]:
        for kind, other in (("overflow", "underflow"), ("underflow", "overflow")):
            (verdict,) = judged(level(0.0, **{f"{kind}_ratio": ratio})).verdicts
            assert (verdict.severity_by(kind), verdict.severity_by(other)) == (severity, LossSeverity.NONE)
            assert verdict.severity is severity
            assert verdict.is_clean is (severity is LossSeverity.NONE)


def test_ranges_to_avoid_are_parted_by_their_cause() -> None:
    found = judged(
        level(4.0, underflow_ratio=0.5),
        level(3.0, underflow_ratio=0.02),
        level(2.0, underflow_ratio=0.005),
        level(1.0, score=0.9, sqnr=30.0),
        level(0.0, overflow_ratio=0.0001),
        level(-1.0, overflow_ratio=0.02, underflow_ratio=0.02),
        level(-2.0, overflow_ratio=0.3),
    )
    assert [(one.exponents, one.overflows, one.underflows) for one in found.avoid] == [
        (Range(minimum=3.0, maximum=4.0), False, True),
        (Range(minimum=-1.0, maximum=-1.0), True, True),
        (Range(minimum=-2.0, maximum=-2.0), True, False),
    ]
    assert [one.num_levels for one in found.avoid] == [2, 1, 1]
    assert found.optimal == Range(minimum=0.0, maximum=1.0)
    assert found.least_bad is None
    assert sum(not verdict.is_clean for verdict in found.verdicts) == 5
    assert "avoid scale exponents 3 to 4: more than 1 % of the values underflow" in found.advice.limits
    assert "avoid scale exponent -2: more than 1 % of the values overflow" in found.advice.limits
    assert "free of significant overflow and underflow: scale exponents 0 to 1" in found.advice.limits


def test_the_least_bad_level_is_named_where_none_is_clean() -> None:
    found = judged(
        level(1.0, underflow_ratio=0.5, flushed_ratio=0.1),
        level(0.0, overflow_ratio=0.04, underflow_ratio=0.6, flushed_ratio=0.02),
        level(-1.0, overflow_ratio=0.07),
    )
    assert found.optimal is None
    assert exponent_of(found.least_bad) == 0.0
    assert any(
        "become zero at scale exponent 0, overflow 4.00%, underflow 60.00%, of which 2.00% become zero" in one
        for one in found.advice.limits
    )


def test_of_equally_bad_levels_the_recommended_one_is_named() -> None:
    found = judged(level(1.0, underflow_ratio=0.5), level(0.0, underflow_ratio=0.4, score=0.9))
    assert exponent_of(found.least_bad) == exponent_of(found.recommended) == 0.0


def test_the_recommended_level_is_not_one_to_avoid() -> None:
    for name in ["mxfp4_e2m1", "nvfp4"]:
        found = Recommendation(sweep_array(GAUSS.reshape(-1, 32), format=name))
        assert exponent_of(found.recommended) == exponent_of(found.least_bad) == 0.0
        assert found.avoid
        assert not any(one.exponents.minimum <= 0 <= one.exponents.maximum for one in found.avoid)
        assert any(
            one.startswith("the recommended level also has high overflow or underflow") for one in found.advice.limits
        )


def test_levels_that_are_as_good_as_the_recommended_one_are_named() -> None:
    found = Recommendation(sweep_array(GAUSS.reshape(-1, 32), format="nvfp4"))
    assert found.as_good == Range(minimum=0.0, maximum=10.0)
    assert "offsets 0 to 10 are equally good: their SQNR is within 0.01 dB" in found.advice.conclusion
    alone = Recommendation(sweep_array(GAUSS.reshape(-1, 32), format="mxfp4_e2m1"))
    assert alone.as_good == Range(minimum=0.0, maximum=0.0)
    assert not any("equally good" in one for one in alone.advice.conclusion)


def test_levels_that_keep_nothing_are_not_recommended() -> None:
    cases: list[tuple[float, float, str]] = [(40, 30, "smaller"), (-20, -30, "larger")]
    for first, last, direction in cases:
        options = SweepOptions(max_scale_exp=first, min_scale_exp=last, num_levels=5)
        found = Recommendation(sweep_array(GAUSS, format="fp8_e4m3", options=options))
        assert found.loses_everything
        assert found.advice.metrics == ()
        assert found.advice.conclusion == (f"all levels lose nearly everything in fp8_e4m3: try {direction} scales",)
        assert found.advice.limits[0].startswith(f"avoid scale exponents {last} to {first}: ")
        assert not any("best score" in one or "fewest" in one for one in found.advice.limits)


def test_what_is_lost_at_the_edge_says_where_to_look() -> None:
    for losses, position, said in [
        ({"overflow_ratio": 0.1}, Position.LARGEST, "that was tried: a larger one may be better"),
        ({"underflow_ratio": 0.1}, Position.LARGEST, "nothing overflows, so a larger one is unlikely to be"),
        ({"underflow_ratio": 0.1}, Position.SMALLEST, "that was tried: a smaller one may be better"),
        ({"overflow_ratio": 0.1}, Position.SMALLEST, "nothing underflows, so a smaller one is unlikely to be"),
        ({"overflow_ratio": 0.1}, Position.ONLY, "values overflow, a larger one may be better"),
        ({"underflow_ratio": 0.1}, Position.ONLY, "values underflow, a smaller one may be better"),
    ]:
        chosen = level(0.0, score=0.9, **losses)
        levels = {
            Position.LARGEST: [chosen, level(-1.0)],
            Position.SMALLEST: [level(1.0), chosen],
            Position.ONLY: [chosen],
        }
        found = judged(*levels[position])
        assert found.position is position
        assert any(said in one for one in found.advice.conclusion)


def test_limits_of_a_tapered_format_do_not_tell_where_to_look() -> None:
    options = SweepOptions(num_levels=3, max_scale_exp=-10, min_scale_exp=-12)
    found = Recommendation(sweep_array(GAUSS, format="hif8", options=options))
    assert found.position is Position.LARGEST
    assert found.recommended is not None
    assert found.recommended.count("overflow") == 0
    assert any("a larger one may be better" in one for one in found.advice.conclusion)


def test_squares_beyond_float64_are_no_figures() -> None:
    for power in [1e200, 1e-310]:
        sweep = sweep_array(GAUSS.astype(np.float64) * power, format="fp8_e4m3")
        found = Recommendation(sweep)
        assert found.is_mse_beyond
        assert found.best["mse"] is found.best["rmse"] is not sweep.levels[-1]
        assert any("range of float64" in one for one in found.advice.metrics)
        assert not any("loses nothing" in one for one in found.advice.conclusion)


def test_extremes_are_the_worst_and_the_best_level() -> None:
    found = judged(level(1.0, underflow_ratio=0.5), level(0.0, underflow_ratio=0.1), level(-1.0, underflow_ratio=0.2))
    assert {kind: tuple(map(exponent_of, ends)) for kind, ends in found.extremes.items()} == {"underflow": (1.0, 0.0)}


def test_the_position_says_whether_another_scale_might_be_better() -> None:
    for scores, position in [
        ([0.1, 0.9, 0.2], Position.BALANCED),
        ([0.9, 0.1, 0.2], Position.LARGEST),
        ([0.1, 0.2, 0.9], Position.SMALLEST),
        ([0.9], Position.ONLY),
        ([0.5, 0.5, 0.5], Position.LARGEST),
    ]:
        found = judged(*(level(-float(index), score=score) for index, score in enumerate(scores)))
        assert found.position is position
        assert sum("est scale that was tried" in one for one in found.advice.conclusion) == (
            position in {Position.LARGEST, Position.SMALLEST}
        )


def test_stability_has_the_limits_of_the_legacy_tool() -> None:
    for figures, metric, variation in [
        ([{"mse": 1.0}, {"mse": 1.09}], "mse", Variation.STABLE),
        ([{"mse": 1.0}, {"mse": 1.11}], "mse", Variation.VARIES),
        ([{"mse": 0.0}, {"mse": 1e-30}], "mse", Variation.VARIES),
        ([{"mse": 0.0}, {"mse": 0.0}], "mse", Variation.STABLE),
        ([{"cosine": 0.99}, {"cosine": 0.9999}], "cosine", Variation.STABLE),
        ([{"cosine": 0.98}, {"cosine": 0.9999}], "cosine", Variation.VARIES),
        ([{"psnr": 30.0}, {"psnr": 39.0}], "psnr", Variation.STABLE),
        ([{"psnr": 30.0}, {"psnr": 45.0}], "psnr", Variation.MODERATE),
        ([{"psnr": 30.0}, {"psnr": 51.0}], "psnr", Variation.VARIES),
        ([{"psnr": 30.0}, {"psnr": math.inf}], "psnr", Variation.VARIES),
        ([{"psnr": math.inf}, {"psnr": math.inf}], "psnr", Variation.STABLE),
        ([{"psnr": -math.inf}, {"psnr": math.inf}], "psnr", Variation.VARIES),
    ]:
        found = judged(*(level(-float(index), **figure) for index, figure in enumerate(figures)))
        spread = found.spreads[metric]
        given_figures = [figure[metric] for figure in figures]
        assert spread.variation is variation
        assert (spread.lowest, spread.highest) == (min(given_figures), max(given_figures))
        assert spread.width >= 0


def test_deviations_are_those_of_the_levels() -> None:
    figures = [1.5, 11.0, 2.25, 7.0]
    found = judged(*(level(-float(index), mse=figure) for index, figure in enumerate(figures)))
    assert found.spreads["mse"].deviation == pytest.approx(float(np.std(figures)))
    huge = judged(level(0.0, mse=1e300), level(-1.0, mse=3e300))
    assert huge.spreads["mse"].deviation == pytest.approx(1e300)


FIGURES = st.fixed_dictionaries(
    {
        "mse": st.floats(0, allow_nan=False),
        "cosine": st.floats(0, 1),
        "psnr": st.floats(allow_nan=False),
        "sqnr": st.floats(allow_nan=False),
        "overflow_ratio": st.floats(0, 1),
        "underflow_ratio": st.floats(0, 1),
        "score": st.floats(0, 1),
    }
)


@given(figures=st.lists(FIGURES, max_size=12))
def test_any_levels_give_a_document_without_nan(figures: list[dict[str, float]]) -> None:
    found = judged(*(level(-float(index), **figure) for index, figure in enumerate(figures)))
    numbers = [number for spread in found.spreads.values() for number in (*spread[:3], spread.width)]
    assert not any(map(math.isnan, numbers))
    assert not re.search(r"\bnan\b", str(found.advice))
    assert found.advice.conclusion
    assert (found.recommended is None) is (not figures)
    if figures:
        assert (found.least_bad is None) is (found.optimal is not None)
    members = sum(one.num_levels for one in found.avoid)
    high = [verdict.level.exponent for verdict in found.verdicts if verdict.severity is LossSeverity.HIGH]
    spared = found.as_good
    if spared is not None and not found.loses_everything:
        high = [exponent for exponent in high if not spared.minimum <= exponent <= spared.maximum]
    assert members == len(high)


def test_a_tensor_without_levels_has_no_recommendation_and_says_why() -> None:
    for values in [[], [0.0, -0.0], [np.nan, np.inf]]:
        found = Recommendation(sweep_array(np.array(values, dtype=np.float32), format="fp8_e4m3"))
        assert (found.recommended, found.spreads, found.position, found.best) == (None, {}, None, {})
        assert found.advice.conclusion == (f"no scale to recommend: {found.sweep.note}",)


def test_levels_that_lose_nothing_are_recommended() -> None:
    values = np.array([6.0, -3.0, 1.0], dtype=np.float32)
    found = Recommendation(sweep_array(values, format="fp4_e2m1", options=SweepOptions(num_levels=1, max_scale_exp=0)))
    assert found.position is Position.ONLY
    assert "it loses nothing" in found.advice.conclusion
    assert found.spreads["psnr"].variation is Variation.STABLE


@pytest.mark.parametrize("power", [-80, 60])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp4_e2m1"])
def test_a_multiple_of_a_tensor_gets_the_same_advice(name: str, power: int) -> None:
    near = Recommendation(sweep_array(GAUSS, format=name))
    far = Recommendation(sweep_array(np.ldexp(GAUSS, power), format=name))
    assert [one.severity for one in near.verdicts] == [one.severity for one in far.verdicts]
    assert near.recommended is not None
    assert far.recommended is not None
    assert near.recommended.level.exponent == pytest.approx(far.recommended.level.exponent - power)
    assert near.position is far.position
    assert [(one.overflows, one.underflows) for one in near.avoid] == [
        (one.overflows, one.underflows) for one in far.avoid
    ]


def test_the_range_after_rounding_is_what_the_ends_become() -> None:
    values = np.array([-7.7, 0.3, 500.0], dtype=np.float32)
    options = SweepOptions(num_levels=3, max_scale_exp=2, min_scale_exp=-2)
    sweep = sweep_array(values, format="fp8_e4m3", options=options)
    assert range_before(sweep) == Range(minimum=float(np.float32(-7.7)), maximum=500.0)
    ends = [range_after(sweep, level=level) for level in sweep.levels]
    assert ends == [Range(-7.5, 512.0), Range(-7.5, 448.0), Range(-7.5, 112.0)]


def test_the_range_of_blocks_after_rounding_is_that_of_the_largest_value() -> None:
    for dtype in [np.float32, ml_dtypes.bfloat16]:
        values = np.array([[1.0, -13.0], [0.1, 0.2]]).astype(dtype)
        sweep = sweep_array(values, format="mxfp4_e2m1")
        (at_zero,) = (range_after(sweep, level=level) for level in sweep.levels if level.exponent == 0)
        assert at_zero.minimum == -12.0
        assert at_zero.maximum <= 12.0


def test_a_negative_offset_clamps_the_largest_value() -> None:
    values = np.array([[1.0, -13.0]], dtype=np.float32)
    sweep = sweep_array(values, format="mxfp4_e2m1")
    assert [range_after(sweep, level=level).minimum for level in sweep.levels if level.exponent == -1] == [-6.0]


def test_infinities_are_in_no_range() -> None:
    values = np.array([np.inf, 1.0, -2.0, -np.inf], dtype=np.float32)
    assert range_before(sweep_array(values, format="fp8_e4m3")) == Range(minimum=-2.0, maximum=1.0)


def test_levels_of_blocks_are_called_offsets() -> None:
    found = Recommendation(sweep_array(GAUSS.reshape(-1, 32), format="mxfp8_e4m3"))
    assert found.recommended is not None
    expected = f"use offset {found.recommended.level.exponent:.4g} (factor {found.recommended.level.scale:.6g})"
    assert found.advice.conclusion[0] == f"{expected} for mxfp8_e4m3"
    assert any(": offsets " in one for one in found.advice.limits)


def test_a_legacy_sweep_says_what_the_tool_would_have_recommended() -> None:
    found = Recommendation(sweep_array(GAUSS, format="fp8_e4m3", options=SweepOptions(mode=SweepMode.LEGACY)))
    assert found.original_choice is not None
    exponent = found.original_choice.exponent
    assert any(f"the legacy tool recommends scale exponent {exponent:.4g}" in one for one in found.advice.conclusion)
    assert Recommendation(sweep_array(GAUSS, format="fp8_e4m3")).original_choice is None


@pytest.mark.parametrize("mode", [SweepMode.CHANNEL, SweepMode.MX])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp6_e2m3", "int8"])
def test_what_the_largest_value_becomes_is_what_quantising_makes_of_it(name: str, mode: SweepMode) -> None:
    array = GAUSS[:640].reshape(20, 32)
    block_size = 20 if mode is SweepMode.MX else None
    sweep = sweep_array(array, format=name, options=SweepOptions(mode=mode, axis=0, block_size=block_size))
    index = np.unravel_index(np.abs(array).argmax(), array.shape)
    is_negative = array[index] < 0
    scaling = {SweepMode.CHANNEL: "channel", SweepMode.MX: "block"}[mode]
    assert len(sweep.levels) == 21
    for level in sweep.levels:
        after = range_after(sweep, level=level)
        quantized = quantize(
            array,
            name,
            scaling=scaling,
            block_size=block_size,
            axis=0,
            scale_offset=int(level.exponent),
            warn=False,
        )
        assert (after.minimum if is_negative else after.maximum) == quantized.values[index]


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("better", [-1, 0, 1, 2])
def test_the_first_of_levels_that_rounding_alone_tells_apart_is_the_best(name: str, better: int) -> None:
    worst, best = (0.5, 0.25) if METRICS[name].is_error else (0.25, 0.5)
    figures = [worst, best, best, best, worst]
    if better >= 0:
        figures[1 + better] = math.nextafter(best, 0.0 if METRICS[name].is_error else 1.0)
    several = [level(float(exponent), **{name: figure}) for exponent, figure in enumerate(figures)]
    found = Recommendation(dataclasses.replace(of(*several), mode=SweepMode.TENSOR)).best[name]
    assert found.exponent == 1.0
    better_one = level(9.0, **{name: best * (0.99 if METRICS[name].is_error else 1.01)})
    assert Recommendation(dataclasses.replace(of(*several, better_one), mode=SweepMode.TENSOR)).best[name] is better_one


def sweep_with(*levels: Level) -> ScaleSweep:
    """A sweep that found these levels."""
    return dataclasses.replace(sweep_array(GAUSS, format="fp8_e4m3"), levels=levels)


def spread_apart(name: str, units: list[float]) -> list[ScaleSweep]:
    """Tensors of different magnitudes on one grid."""
    own = [sweep_array(GAUSS * np.float32(unit), format=name) for unit in units]
    grid = common_grid(own)
    assert grid is not None
    return [sweep_array(GAUSS * np.float32(unit), format=name, options=grid) for unit in units]


def test_a_common_scale_of_equal_tensors_costs_nothing() -> None:
    found = common_scale(spread_apart("fp8_e4m3", [1.0, 1.0]))
    assert found is not None
    assert (found.worst_price, found.median_price) == (0.0, 0.0)
    assert found.exponent == round(found.exponent)


def test_a_common_scale_of_tensors_far_apart_costs_decibels() -> None:
    sweeps = spread_apart("fp4_e2m1", [1.0, 16.0, 16.0])
    found = common_scale(sweeps)
    assert found is not None
    index = [one.exponent for one in sweeps[0].levels].index(found.exponent)
    means = [sum(one.levels[number].score for one in sweeps) / len(sweeps) for number in range(len(sweeps[0].levels))]
    assert means[index] == pytest.approx(max(means))
    assert [share.level for share in found.shares] == [one.levels[index] for one in sweeps]
    assert found.worst_price > 3
    assert all(share.price >= 0 for share in found.shares)
    assert all(
        share.own.sqnr == max(one.sqnr for one in sweep.levels)
        for share, sweep in zip(found.shares, sweeps, strict=True)
    )


def test_tensors_without_levels_do_not_choose_the_common_scale() -> None:
    empty = sweep_array(np.zeros(0, dtype=np.float32), format="fp8_e4m3")
    sweeps = spread_apart("fp8_e4m3", [1.0, 4.0])
    assert common_scale([empty, *sweeps]) == common_scale(sweeps)
    assert common_scale([empty]) is None
    assert common_grid([empty]) is None
    assert common_scale([]) is None


def test_tensors_tried_at_different_scales_have_no_common_one() -> None:
    sweeps = [sweep_array(GAUSS * np.float32(unit), format="fp8_e4m3") for unit in (1.0, 100.0)]
    with pytest.raises(UsageError, match="tried at different scales, which do not add up: sweep them on one grid"):
        common_scale(sweeps)


def test_a_price_is_infinite_where_nothing_would_be_lost_alone() -> None:
    first, last = spread_apart("fp8_e4m3", [1.0, 1.0])[0].levels[:2]
    alone = sweep_with(dataclasses.replace(first, sqnr=math.inf, score=0.1), dataclasses.replace(last, score=0.1))
    other = sweep_with(dataclasses.replace(first, score=0.1, sqnr=9.0), dataclasses.replace(last, score=1.0, sqnr=9.0))
    found = common_scale([alone, other])
    assert found is not None
    assert (found.exponent, found.worst_price, found.median_price) == (last.exponent, math.inf, 0.0)


def test_offsets_are_common_as_they_are() -> None:
    sweep = sweep_array(GAUSS.astype(ml_dtypes.bfloat16), format="mxfp8_e4m3")
    assert common_grid([sweep]) == sweep.options
    found = common_scale([sweep, sweep])
    assert found is not None
    assert found.worst_price >= 0


def choices(names: list[str], array: np.ndarray[Any, Any] = GAUSS) -> dict[str, list[ScaleSweep]]:
    return {name: [sweep_array(array, format=name)] for name in names}


def test_the_narrowest_format_that_keeps_enough_is_chosen() -> None:
    cases: list[tuple[float, str]] = [
        (15.0, "fp4_e2m1"),
        (25.0, "fp6_e2m3"),
        (31.2, "fp8_e4m3"),
        (99.0, "fp8_e4m3"),
    ]
    for target, expected in cases:
        found = best_format(choices(["fp8_e5m2", "fp8_e4m3", "fp6_e2m3", "fp4_e2m1"]), target_sqnr=target)
        assert found is not None
        assert (found.scheme.name, found.meets_target) == (expected, target < 40)


def test_every_tensor_of_a_layer_has_to_keep_enough() -> None:
    heavy = GAUSS.copy()
    heavy[:3] = 3e4
    sweeps = {
        name: [sweep_array(GAUSS, format=name), sweep_array(heavy, format=name)] for name in ("fp4_e2m1", "fp8_e5m2")
    }
    found = best_format(sweeps, target_sqnr=17)
    assert found is not None
    assert found.worst_sqnr == min(max(one.sqnr for one in sweep.levels) for sweep in sweeps[found.scheme.name])


def test_scales_of_blocks_count_as_bits() -> None:
    assert [
        bits_per_element(parse_scheme(name)) for name in ("mxfp8", "nvfp4", "mxfp4", "fp4_e2m1", "hif8", "mxint8")
    ] == [
        8.25,
        4.5,
        4.25,
        4.0,
        8.0,
        8.25,
    ]


def test_nothing_chooses_no_format() -> None:
    assert best_format({}) is None
    assert best_format(choices(["fp8_e4m3"], np.full(3, np.nan, dtype=np.float32))) is None
    zeros = best_format(choices(["fp8_e4m3", "fp4_e2m1"], np.zeros(3, dtype=np.float32)))
    assert zeros is not None
    assert (zeros.scheme.name, zeros.worst_sqnr, zeros.meets_target) == ("fp4_e2m1", math.inf, True)
    with pytest.raises(UsageError, match="--target-sqnr nan is not allowed"):
        best_format({}, target_sqnr=math.nan)


@pytest.mark.parametrize(("largest", "exponent"), [(1.7e308, MAX_SCALE_EXPONENT), (1e-320, -MAX_SCALE_EXPONENT)])
def test_a_common_scale_is_one_that_may_be_asked_for(largest: float, exponent: float) -> None:
    grid = common_grid([sweep_array(np.array([largest, largest / 2]), format="fp8_e4m3")])
    assert grid is not None
    assert exponent in {grid.max_scale_exp, grid.min_scale_exp}
