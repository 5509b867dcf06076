"""Is the composite score what it says, whatever the figures are?"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.numerics.sweeps.metrics import DECIBELS_PER_BIT, METRICS, Level, Loss, levels_of, scores
from ranktape.analyze.numerics.sweeps.sums import SUMS, Sums

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
