"""Is the composite score what it says, whatever the figures are?"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.metrics import DECIBELS_PER_BIT, _Figures, scores

FIGURES = st.builds(
    _Figures,
    squared=st.floats(0, 1e300),
    cosine=st.floats(0, 1),
    psnr=st.one_of(st.floats(-3000, 3000), st.just(math.inf)),
    absolute=st.floats(0, 1e300),
)


@given(figures=st.lists(FIGURES, min_size=1, max_size=30))
def test_scores_are_never_nan_and_between_0_and_1(figures: list[_Figures]) -> None:
    assert all(-1e-12 <= score <= 1 + 1e-12 for score in scores(figures))


def test_weights_are_those_of_the_seeds() -> None:
    best = _Figures(squared=0.0, cosine=1.0, psnr=60.0, absolute=0.0)
    worst = _Figures(squared=1.0, cosine=0.0, psnr=0.0, absolute=1.0)
    middle = _Figures(squared=0.25, cosine=0.5, psnr=30.0, absolute=0.5)
    found = scores([best, worst, middle])
    expected = [1.0, 0.0, 0.3 * 0.75 + 0.3 * 0.5 + 0.2 * 0.5 + 0.2 * 0.5]
    assert all(math.isclose(one, other, abs_tol=1e-12) for one, other in zip(found, expected, strict=True))


def test_equal_levels_are_all_best() -> None:
    figure = _Figures(squared=0.1, cosine=1.0, psnr=40.0, absolute=0.2)
    assert scores([figure, figure]) == [1.0, 1.0]


def test_lossless_is_one_bit_better_than_the_best_of_the_others() -> None:
    lossless = _Figures(squared=0.0, cosine=1.0, psnr=math.inf, absolute=0.0)
    good = _Figures(squared=0.0, cosine=1.0, psnr=60.0, absolute=0.0)
    bad = _Figures(squared=0.0, cosine=1.0, psnr=60.0 - 9 * DECIBELS_PER_BIT, absolute=0.0)
    found = scores([lossless, good, bad])
    assert math.isclose(found[0] - found[1], 0.2 / 10)
    assert math.isclose(found[1] - found[2], 0.2 * 9 / 10)
