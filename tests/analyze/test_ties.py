"""Where several levels are as good, the one is named that a user would take."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ranktape.analyze.numerics.sweeps.metrics import SAME_RATIO, SAME_SQNR, Level, settled
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import sweep_array
from ranktape.analyze.questions.advice import Recommendation, common_scale
from ranktape.errors import UsageError

GAUSS = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)

(LEVEL,) = sweep_array(GAUSS, format="mxfp8_e4m3", options=SweepOptions(num_levels=1)).levels


def level(exponent: float, *, sqnr: float, score: float = 0.5, overflow: float = 0.0, flushed: float = 0.0) -> Level:
    return dataclasses.replace(
        LEVEL, exponent=exponent, sqnr=sqnr, score=score, overflow_ratio=overflow, flushed_ratio=flushed
    )


def test_of_offsets_that_are_as_good_the_nearest_to_none() -> None:
    levels = [level(2, sqnr=30.0, score=0.9), level(0, sqnr=30 - SAME_SQNR / 2), level(-1, sqnr=30 - 2 * SAME_SQNR)]
    assert settled(levels, levels[0], has_offsets=True).exponent == 0
    assert settled(levels, levels[0], has_offsets=False).exponent == 2


@pytest.mark.parametrize("loss", ["overflow", "flushed"])
def test_not_one_that_loses_values_which_the_best_keeps(loss: str) -> None:
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
    found = sweep_array(GAUSS, format="nvfp4")
    assert {level.exponent for level in Recommendation(found).best.values()} == {0.0}
    common = common_scale([found, sweep_array(2 * GAUSS, format="nvfp4")])
    assert common is not None
    assert common.exponent == 0


def test_words_are_the_members_of_their_enumerations() -> None:
    words = SweepOptions(mode="mx", scale_rule="floor", rounding="away")  # type: ignore[arg-type]
    assert words == SweepOptions(mode=SweepMode.MX, scale_rule=words.scale_rule, rounding=words.rounding)
    plain = sweep_array(GAUSS, format="mxfp4")
    assert sweep_array(GAUSS, format="mxfp4", options=SweepOptions(scale_rule="floor")).levels == plain.levels  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "mxx"), ("scale_rule", "up"), ("rounding", "odd"), ("num_levels", 2.5), ("axis", 1.0), ("axis", True)],
)
def test_other_words_and_kinds_are_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{name}={value!r} is not"):
        SweepOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "offset"), [({}, 0), ({"max_scale_exp": -2}, -2), ({"min_scale_exp": 3}, 3), ({"min_scale_exp": 0}, 0)]
)
def test_a_single_offset_is_the_one_given_or_none(options: dict[str, float], offset: int) -> None:
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
