"""One scale, and one format, are found for several tensors, with their price."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.numerics.quantization.schemes import parse_scheme
from ranktape.analyze.numerics.sweeps.metrics import Level
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep, sweep_array
from ranktape.analyze.questions.advice import best_format, bits_per_element, common_grid, common_scale
from ranktape.errors import UsageError

GAUSS = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)


def of(*levels: Level) -> ScaleSweep:
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
    alone = of(dataclasses.replace(first, sqnr=math.inf, score=0.1), dataclasses.replace(last, score=0.1))
    other = of(dataclasses.replace(first, score=0.1, sqnr=9.0), dataclasses.replace(last, score=1.0, sqnr=9.0))
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


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (15.0, "fp4_e2m1"),
        (25.0, "fp6_e2m3"),
        (31.2, "fp8_e4m3"),
        (99.0, "fp8_e4m3"),
    ],
)
def test_the_narrowest_format_that_keeps_enough_is_chosen(target: float, expected: str) -> None:
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
