"""Are the figures of a sweep right, and is the recommended scale one that a user would choose?"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.analyze.engine.target import is_sweepable
from ranktape.analyze.numerics.formats import FORMATS, round_to
from ranktape.analyze.numerics.quantization.schemes import ScaleRule
from ranktape.analyze.numerics.sweeps.metrics import (
    DECIBELS_PER_BIT,
    METRICS,
    SAME_RATIO,
    SAME_SQNR,
    Level,
    Loss,
    levels_of,
    scores,
    settled,
)
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sums import SUMS, Sums
from ranktape.analyze.numerics.sweeps.sweep import sweep_array, sweep_formats
from ranktape.analyze.questions.advice import Recommendation, common_scale
from ranktape.analyze.questions.sweep import sweep
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES, numpy_dtype
from tests.strategies import arrays

E4M3 = FORMATS["fp8_e4m3"]

GAUSS = np.random.default_rng(0).standard_normal(1 << 20)


def at(exponent: float, **options: Any) -> SweepOptions:
    """One level."""
    return SweepOptions(num_levels=1, max_scale_exp=exponent, **options)


def test_an_array_has_the_table_of_a_record() -> None:
    formats = ["fp8_e4m3", "mxfp8_e4m3"]
    table = sweep(GAUSS[: 1 << 12], format=formats)
    names = [column.name for column in table.columns]
    found = [dict(zip(names, row, strict=True)) for row in table.rows]
    expected = [one.recommended for one in sweep_formats(GAUSS[: 1 << 12], formats=formats)]
    assert [row["format"] for row in found] == ["fp8_e4m3", "mxfp8_e4m3"]
    assert [(row["exponent"], row["sqnr"]) for row in found] == [(one.exponent, one.sqnr) for one in expected if one]
    assert len(sweep(GAUSS[: 1 << 12], format=formats, with_levels=True).rows) == 42
    with pytest.raises(UsageError, match="not for an array"):
        sweep(GAUSS, format="fp8_e4m3", by=["layer_idx"])


def test_levels_go_from_the_largest_value_to_the_smallest() -> None:
    found = sweep_array(np.array([448.0, -3.0, 2.0**-9], dtype=np.float32), format="fp8_e4m3")
    assert [level.exponent for level in found.levels] == np.linspace(0, -3, 21).tolist()
    first, last = found.levels[0], found.levels[-1]
    assert (first.overflow_count, first.underflow_count) == (0, 1)
    assert (last.overflow_count, last.underflow_count) == (1, 0)
    assert (first.scale, last.scale) == (1.0, 0.125)


def test_figures_are_their_definitions() -> None:
    x = np.array([1.0, -2.7, 0.003, 500.0, 0.0, 1e-5], dtype=np.float32)
    level = sweep_array(x, format="fp8_e4m3", options=at(-0.5)).levels[0]
    exact, scale = x.astype(np.float64), 2**-0.5
    y = round_to(exact / scale, target=E4M3) * scale
    error = exact - y
    expected = {
        "mse": np.mean(error**2),
        "rmse": np.sqrt(np.mean(error**2)),
        "mae": np.mean(np.abs(error)),
        "max_abs_error": np.max(np.abs(error)),
        "relative_error": np.mean(np.abs(error)) / np.mean(np.abs(exact)),
        "cosine": exact @ y / np.sqrt((exact @ exact) * (y @ y)),
        "psnr": 20 * np.log10(500 / np.sqrt(np.mean(error**2))),
        "sqnr": 10 * np.log10(np.mean(exact**2) / np.mean(error**2)),
        "overflow_ratio": 1 / 6,
        "underflow_ratio": 2 / 6,
        "flushed_ratio": 1 / 6,
    }
    for name, value in expected.items():
        assert math.isclose(getattr(level, name), value, rel_tol=1e-12), name


def test_known_signal_to_noise_ratios() -> None:
    for target, dtype, sqnr in [
        # Published or measured before, on N(0, 1): bf16 and fp16 as they are, fp8 with a scale for the tensor.
        ("bf16", np.float32, 55.6),
        ("fp16", np.float32, 73.65),
        ("fp8_e4m3", ml_dtypes.bfloat16, 31.54),
    ]:
        exponent = -5.85 if target == "fp8_e4m3" else 0.0
        level = sweep_array(GAUSS.astype(dtype), format=target, options=at(exponent)).levels[0]
        assert abs(level.sqnr - sqnr) < 0.1


def test_known_error_of_the_tool_that_came_before() -> None:
    """At exponent -5.85 its arithmetic in float32 gave a mean squared error of 7.015e-4 and a cosine of 0.999649."""
    level = sweep_array(GAUSS.astype(ml_dtypes.bfloat16), format="fp8_e4m3", options=at(-5.85)).levels[0]
    assert math.isclose(level.mse, 7.015e-4, rel_tol=0.01)
    assert abs(level.cosine - 0.999649) < 5e-6


def test_the_recommended_scale_is_good() -> None:
    """Within 0.5 dB of the best of 2,001 scales."""
    for name in ["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1"]:
        array = GAUSS[:10_000].astype(np.float32)
        found = sweep_array(array, format=name)
        fine = sweep_array(array, format=name, options=SweepOptions(num_levels=2001))
        recommended, finest = found.recommended, fine.best(lambda level: level.sqnr)
        assert recommended is not None
        assert finest is not None
        assert recommended.sqnr > finest.sqnr - 0.5


@pytest.mark.parametrize("power", [-90, -20, 3, 100])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_the_recommendation_moves_with_the_tensor(power: int, dtype: Any) -> None:
    """Gradients of 1e-6 are judged as activations of 1 are: the legacy tools' score was not invariant."""
    array = GAUSS[:5000].astype(dtype)
    near = sweep_array(array, format="fp8_e4m3")
    far = sweep_array(np.ldexp(array.astype(np.float64), power).astype(dtype), format="fp8_e4m3")
    assert [level.score for level in far.levels] == [level.score for level in near.levels]
    assert [level.exponent - power for level in far.levels] == pytest.approx([level.exponent for level in near.levels])


def test_a_level_without_error_is_recommended_and_nothing_is_nan() -> None:
    """PSNR is infinite there, which made the legacy tools' score NaN."""
    array = np.array([6.0, 3.0, -1.5, 1.0, 0.5, 0.0], dtype=np.float32)
    found = sweep_array(array, format="fp4_e2m1", options=SweepOptions(num_levels=5, max_scale_exp=1, min_scale_exp=-1))
    recommended = found.recommended
    assert recommended is not None
    assert (recommended.exponent, recommended.mse, recommended.psnr) == (0.0, 0.0, math.inf)
    assert all(0 <= level.score <= 1 for level in found.levels)


def test_a_constant_tensor_is_exact_where_it_is_a_value_of_the_format() -> None:
    for value, dtype in itertools.product([1.0, -3.5, 2.0**-130, 1e38], [ml_dtypes.bfloat16, np.float32, np.float64]):
        found = sweep_array(np.full(7, value).astype(dtype), format="fp8_e4m3")
        assert len(found.levels) == 21
        recommended = found.recommended
        assert recommended is not None
        assert recommended.cosine == pytest.approx(1.0)
        assert recommended.overflow_count == recommended.underflow_count == 0
        assert all(math.isfinite(level.score) for level in found.levels)


def test_tensors_without_a_scale_say_why() -> None:
    for (values, note), dtype in itertools.product(
        [
            ([], "empty"),
            ([0.0, -0.0], "all zero: exact at any scale"),
            ([np.nan, np.nan], "no finite number"),
            ([np.inf, -np.inf, np.nan], "no finite number"),
            ([0.0, np.nan], "no finite number other than zero"),
        ],
        [np.float16, ml_dtypes.bfloat16, np.float32, np.float64],
    ):
        found = sweep_array(np.array(values).astype(dtype), format="fp8_e4m3")
        assert (found.levels, found.recommended, found.note) == ((), None, note)


def test_nan_and_infinities_are_left_out_and_counted() -> None:
    for dtype in [np.float16, np.float32]:
        clean = np.array([1.0, 2.5, -3.0, 0.0], dtype=dtype)
        spoiled = np.concatenate([clean, np.array([np.nan, np.inf, -np.inf, np.nan], dtype=dtype)])
        expected, found = sweep_array(clean, format="fp8_e4m3"), sweep_array(spoiled, format="fp8_e4m3")
        assert found.levels == expected.levels
        assert (found.num_elements, found.nan, found.inf, found.zero) == (8, 2, 2, 1)
        assert found.note == "NaN or Inf left out"


@settings(max_examples=150)
@given(name=st.sampled_from([name for name in DTYPES if is_sweepable(name)]), data=st.data())
def test_every_dtype_and_all_bits_give_numbers(name: str, data: st.DataObject) -> None:
    array = data.draw(arrays(name=name))
    found = sweep_array(array, format="fp8_e4m3", options=SweepOptions(num_levels=3))
    assert found.note or found.levels
    for level in found.levels:
        assert 0 <= level.score <= 1 + 1e-12
        assert 0 <= level.cosine <= 1
        assert not any(math.isnan(getattr(level, field)) for field in Level.__dataclass_fields__)


def test_integers_and_bool_are_refused() -> None:
    for name, format_name in itertools.product(
        [name for name in DTYPES if not is_sweepable(name)], ["fp8_e4m3", "mxfp8"]
    ):
        with pytest.raises(UsageError, match="no floating-point numbers"):
            sweep_array(np.ones((2, 4), dtype=numpy_dtype(name)), format=format_name)


def test_an_option_that_no_format_uses_is_refused() -> None:
    cases: list[tuple[list[str], dict[str, Any], str]] = [
        (["fp8_e4m3"], {"scale_bits": 4}, "--scale-bits 4 has no effect on fp8_e4m3 in tensor mode"),
        (["fp8_e4m3"], {"scale_bits": 4, "mode": "channel"}, "--scale-bits 4 has no effect on fp8_e4m3 in channel"),
        (["fp8_e4m3"], {"scale_bits": 4, "mode": "legacy"}, "--scale-bits 4 has no effect on fp8_e4m3 in legacy mode"),
        (["hif8"], {"scale_bits": 4}, "--scale-bits 4 has no effect on hif8"),
        (["hif8", "fp8_e5m2"], {"block_size": 8}, "--block-size 8 has no effect on hif8 in tensor mode, fp8_e5m2 in"),
        (["nvfp4"], {"scale_rule": "floor"}, "--scale-rule floor has no effect on nvfp4 in mx mode"),
        (["nvfp4", "int8"], {"scale_bits": 4}, "--scale-bits 4 has no effect on nvfp4"),
    ]
    for formats, options, message in cases:
        with pytest.raises(UsageError, match=message):
            sweep_formats(GAUSS, formats=formats, options=SweepOptions(**options))


def test_the_legacy_tools_default_of_scale_bits_may_be_given() -> None:
    plain, given = SweepOptions(num_levels=3), SweepOptions(num_levels=3, scale_bits=8)
    expected = sweep_formats(GAUSS, formats=["fp8_e4m3"], options=plain)[0].levels
    assert sweep_formats(GAUSS, formats=["fp8_e4m3"], options=given)[0].levels == expected


def test_an_option_that_some_format_uses_leaves_the_others_as_they_are() -> None:
    options = SweepOptions(scale_bits=4, scale_rule=ScaleRule.RCEIL, num_levels=3)
    together = sweep_formats(GAUSS, formats=["nvfp4", "fp8_e4m3", "mxfp4"], options=options)
    plain = SweepOptions(num_levels=3)
    for found, name in zip(together, ["nvfp4", "fp8_e4m3"], strict=False):
        assert found.levels == sweep_array(GAUSS, format=name, options=plain).levels
    assert together[2].levels == sweep_array(GAUSS, format="mxfp4", options=options).levels
    assert together[2].levels != sweep_array(GAUSS, format="mxfp4", options=plain).levels


def test_the_axis_matters_only_where_there_are_blocks_or_channels() -> None:
    options = SweepOptions(axis=5)
    assert sweep_array(GAUSS, format="fp8_e4m3", options=options).levels == sweep_array(GAUSS, format="fp8_e4m3").levels
    for name in ("mxfp8", "nvfp4"):
        with pytest.raises(UsageError, match="--axis 5 is not one of a tensor of shape"):
            sweep_array(GAUSS, format=name, options=options)


def test_complex_parts_are_values() -> None:
    parts = GAUSS[:100].astype(np.float32)
    found = sweep_array(parts.view(np.complex64), format="fp8_e4m3")
    assert found.num_elements == 100
    assert [level.mse for level in found.levels] == pytest.approx(
        [level.mse for level in sweep_array(parts, format="fp8_e4m3").levels]
    )


def test_exponents_that_are_given_are_used() -> None:
    options = SweepOptions(num_levels=3, max_scale_exp=4, min_scale_exp=-4)
    found = sweep_array(np.ones(3, dtype=np.float32), format="fp8_e4m3", options=options)
    assert [level.exponent for level in found.levels] == [4.0, 0.0, -4.0]


def test_options_that_are_not_allowed() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_levels": 0}, "--num-levels 0 is not allowed: give 1 to 10000"),
        ({"num_levels": 10_001}, "--num-levels 10001 is not allowed"),
        ({"max_scale_exp": 1001.0}, "--max-scale-exp 1001.0 is not allowed: give an exponent from -1000 to 1000"),
        ({"min_scale_exp": math.nan}, "--min-scale-exp nan is not allowed"),
        ({"max_scale_exp": -math.inf}, "--max-scale-exp -inf is not allowed"),
        ({"block_size": 0}, "--block-size 0 is not allowed: give 1 to"),
        ({"scale_bits": 9}, "--scale-bits 9 is not allowed: give 2 to 8"),
        ({"scale_bits": 1}, "--scale-bits 1 is not allowed"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            SweepOptions(**options)


def test_fp64_is_no_target() -> None:
    with pytest.raises(UsageError, match="'fp64' holds every captured value"):
        sweep_array(np.ones(3), format="fp64")


def test_tensors_and_lists_are_taken_as_arrays_are() -> None:
    array = np.linspace(-2, 3, 40, dtype=np.float32)
    found = sweep_array(array, format="mxfp8")
    assert sweep_array(torch.from_numpy(array), format="mxfp8").levels == found.levels
    assert sweep_array(array.astype(">f4"), format="mxfp8").levels == found.levels
    assert sweep_array(array.tolist(), format="mxfp8").levels == found.levels
    half = torch.from_numpy(array).bfloat16()
    assert (
        sweep_array(half, format="fp8_e4m3").levels
        == sweep_array(array.astype(ml_dtypes.bfloat16), format="fp8_e4m3").levels
    )
    with pytest.raises(UsageError, match="no numbers that records hold"):
        sweep_array(["a"], format="mxfp8")


def test_a_tapered_format_is_tried_where_it_has_most_bits() -> None:
    for scale in [1.0, 2.0**-20]:
        # Of few magnitudes: the alignment of the smallest is far from the middle of the format's range.
        array = scale * np.random.default_rng(0).uniform(0.5, 1.5, 4096).astype(np.float32)
        found = sweep_array(array, format="hif8")
        assert found.recommended is not None
        assert found.recommended.sqnr > 31
        assert found.recommended is not found.levels[-1]


ROWS = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)

(LEVEL,) = sweep_array(ROWS, format="mxfp8_e4m3", options=SweepOptions(num_levels=1)).levels


def level(exponent: float, *, sqnr: float, score: float = 0.5, overflow: float = 0.0, flushed: float = 0.0) -> Level:
    return dataclasses.replace(
        LEVEL, exponent=exponent, sqnr=sqnr, score=score, overflow_ratio=overflow, flushed_ratio=flushed
    )


def test_of_offsets_that_are_as_good_the_nearest_to_none() -> None:
    levels = [level(2, sqnr=30.0, score=0.9), level(0, sqnr=30 - SAME_SQNR / 2), level(-1, sqnr=30 - 2 * SAME_SQNR)]
    assert settled(levels, levels[0], has_offsets=True).exponent == 0
    assert settled(levels, levels[0], has_offsets=False).exponent == 2


def test_not_one_that_loses_values_which_the_best_keeps() -> None:
    for loss in ["overflow", "flushed"]:
        kept, lost = SAME_RATIO / 2, 2 * SAME_RATIO
        levels = [level(1, sqnr=30.0, score=0.9), level(0, sqnr=30.0, **{loss: lost})]
        assert settled(levels, levels[0], has_offsets=True).exponent == 1
        levels[1] = level(0, sqnr=30.0, **{loss: kept})
        assert settled(levels, levels[0], has_offsets=True).exponent == 0


def test_of_scales_that_lose_nothing_the_one_in_the_middle() -> None:
    levels = [level(exponent, sqnr=math.inf if 1 <= exponent <= 5 else 30.0) for exponent in range(9, -1, -1)]
    assert settled(levels, levels[4], has_offsets=False).exponent == 3
    assert settled(levels, levels[0], has_offsets=False).exponent == 9


def test_where_the_tensor_scale_makes_up_for_it_no_offset_is_named() -> None:
    found = sweep_array(ROWS, format="nvfp4")
    assert {level.exponent for level in Recommendation(found).best.values()} == {0.0}
    common = common_scale([found, sweep_array(2 * ROWS, format="nvfp4")])
    assert common is not None
    assert common.exponent == 0


def test_words_are_the_members_of_their_enumerations() -> None:
    words = SweepOptions(mode="mx", scale_rule="floor", rounding="away")  # type: ignore[arg-type]
    assert words == SweepOptions(mode=SweepMode.MX, scale_rule=words.scale_rule, rounding=words.rounding)
    plain = sweep_array(ROWS, format="mxfp4")
    assert sweep_array(ROWS, format="mxfp4", options=SweepOptions(scale_rule="floor")).levels == plain.levels  # type: ignore[arg-type]


def test_other_words_and_kinds_are_refused() -> None:
    for name, value in [
        ("mode", "mxx"),
        ("scale_rule", "up"),
        ("rounding", "odd"),
        ("num_levels", 2.5),
        ("axis", 1.0),
        ("axis", True),
    ]:
        with pytest.raises(UsageError, match=f"{name}={value!r} is not"):
            SweepOptions(**{name: value})  # type: ignore[arg-type]


def test_a_single_offset_is_the_one_given_or_none() -> None:
    for options, offset in [({}, 0), ({"max_scale_exp": -2}, -2), ({"min_scale_exp": 3}, 3), ({"min_scale_exp": 0}, 0)]:
        assert SweepOptions(num_levels=1, **options).offsets().tolist() == [offset]  # type: ignore[arg-type]


def test_where_one_exponent_aligns_both_ends_others_are_tried_around_it() -> None:
    # What lies between them is just what the normal values of e4m3 span.
    array = np.array([2.0**-13, 3.5])
    exponents = [tried.exponent for tried in sweep_array(array, format="fp8_e4m3").levels]
    middle = exponents[10]
    assert exponents == [middle + 10 - step for step in range(21)]
    single = sweep_array(array, format="fp8_e4m3", options=SweepOptions(num_levels=1))
    assert [tried.exponent for tried in single.levels] == [middle]
    given = SweepOptions(max_scale_exp=-3, min_scale_exp=-3, num_levels=2)
    assert [tried.exponent for tried in sweep_array(array, format="fp8_e4m3", options=given).levels] == [-3, -3]


FIGURES = st.builds(
    Loss,
    squared=st.one_of(st.floats(0, 1e300), st.just(math.inf)),
    cosine=st.floats(0, 1),
    psnr=st.one_of(st.floats(-3000, 3000), st.just(math.inf), st.just(-math.inf)),
    absolute=st.one_of(st.floats(0, 1e300), st.just(math.inf)),
)


@given(figures=st.lists(FIGURES, min_size=1, max_size=30))
def test_scores_are_never_nan_and_between_0_and_1(figures: list[Loss]) -> None:
    assert all(-1e-12 <= score <= 1 + 1e-12 for score in scores(figures))


def test_weights_are_those_of_the_legacy_tool() -> None:
    best = Loss(squared=0.0, cosine=1.0, psnr=60.0, absolute=0.0)
    worst = Loss(squared=1.0, cosine=0.0, psnr=0.0, absolute=1.0)
    middle = Loss(squared=0.25, cosine=0.5, psnr=30.0, absolute=0.5)
    found = scores([best, worst, middle])
    expected = [1.0, 0.0, 0.3 * 0.75 + 0.3 * 0.5 + 0.2 * 0.5 + 0.2 * 0.5]
    assert all(math.isclose(one, other, abs_tol=1e-12) for one, other in zip(found, expected, strict=True))


def test_equal_levels_are_all_best() -> None:
    figure = Loss(squared=0.1, cosine=1.0, psnr=40.0, absolute=0.2)
    assert scores([figure, figure]) == [1.0, 1.0]


def test_lossless_is_one_bit_better_than_the_best_of_the_others() -> None:
    lossless = Loss(squared=0.0, cosine=1.0, psnr=math.inf, absolute=0.0)
    good = Loss(squared=0.0, cosine=1.0, psnr=60.0, absolute=0.0)
    bad = Loss(squared=0.0, cosine=1.0, psnr=60.0 - 9 * DECIBELS_PER_BIT, absolute=0.0)
    found = scores([lossless, good, bad])
    assert math.isclose(found[0] - found[1], 0.2 / 10)
    assert math.isclose(found[1] - found[2], 0.2 * 9 / 10)


def test_an_infinite_error_is_the_worst() -> None:
    broken = Loss(squared=math.inf, cosine=0.0, psnr=-math.inf, absolute=math.inf)
    bad = Loss(squared=1.0, cosine=0.0, psnr=0.0, absolute=1.0)
    good = Loss(squared=0.0, cosine=1.0, psnr=60.0, absolute=0.0)
    assert scores([broken, bad, good]) == [0.0, 0.0, 1.0]
    assert scores([broken, broken]) == [0.0, 0.0]


def test_metrics_are_fields_of_a_level() -> None:
    assert METRICS.keys() <= Level.__dataclass_fields__.keys()
    assert {name for name, metric in METRICS.items() if not metric.is_error} == {"cosine", "psnr", "sqnr"}


def sums(**figures: float) -> Sums:
    """Those of one value 1.0 at one level."""
    ordinary = dict.fromkeys(SUMS, 0.0) | figures
    arrays = {f"{name}_L": np.array([figure]) for name, figure in ordinary.items()}
    return Sums(shift=0, num_finite=1, largest=1.0, absolute=1.0, squared=1.0, **arrays)


def test_a_result_that_is_infinite_has_figures() -> None:
    infinite = dict.fromkeys(("squared_error", "absolute_error", "squared_result", "largest_error"), math.inf)
    (level,) = levels_of(sums(**infinite), exponents=[0.0])
    assert (level.mse, level.psnr, level.sqnr, level.cosine) == (math.inf, -math.inf, -math.inf, 0.0)
    assert level.score == 0.0


def test_errors_that_are_no_number_are_the_worst() -> None:
    unknown = dict.fromkeys(("squared_error", "absolute_error", "squared_result", "largest_error", "product"), math.nan)
    (level,) = levels_of(sums(**unknown), exponents=[0.0])
    assert (level.mse, level.psnr, level.sqnr, level.cosine) == (math.inf, -math.inf, -math.inf, 0.0)
    assert (level.rmse, level.mae, level.max_abs_error, level.relative_error) == (math.inf,) * 4
    assert level.score == 0.0


def test_a_cosine_of_products_without_end_is_not_1() -> None:
    (level,) = levels_of(sums(squared_error=1.0, squared_result=math.inf, product=math.inf), exponents=[0.0])
    assert level.cosine == 0.0


def test_a_result_without_error_has_figures() -> None:
    (level,) = levels_of(sums(squared_result=1.0, product=1.0), exponents=[0.0])
    assert (level.mse, level.psnr, level.sqnr, level.cosine) == (0.0, math.inf, math.inf, 1.0)
    assert level.score == 1.0
