"""Does quantising say beforehand what it loses, and warn of it without changing anything?"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from ranktape.analyze import quantize
from ranktape.analyze.numerics.quantization.encoded import Losses, LossSeverity, QuantizationWarning


def losses(*, num_elements: int = 1000, underflow: int = 0, flushed: int = 0, overflow: int = 0) -> Losses:
    return Losses(
        num_elements=num_elements, underflow=underflow, flushed=flushed, overflow=overflow, spoiled=0, nan=0, inf=0
    )


def test_losses_are_counted_before_rounding() -> None:
    # fp8_e4m3: smallest normal 2**-6, smallest subnormal 2**-9, largest 448, the next would be 480.
    x = np.array([0.0, 2.0**-6, 2.0**-7, 2.0**-10, 2.0**-11, 448, 464, 465, 1e9, np.nan, np.inf], dtype=np.float64)
    found = quantize(x, "fp8_e4m3", warn=False).losses
    assert (found.underflow, found.flushed, found.overflow) == (3, 2, 2)
    assert (found.num_elements, found.nan, found.inf, found.spoiled) == (11, 1, 1, 0)
    away = quantize(x, "fp8_e4m3", rounding="away", warn=False).losses
    assert (away.underflow, away.flushed, away.overflow) == (3, 1, 3)
    floor = quantize(x, "fp8_e4m3", rounding="floor", warn=False).losses
    assert (floor.underflow, floor.flushed, floor.overflow) == (3, 2, 1)


def test_losses_are_counted_after_division_by_the_scale() -> None:
    x = np.full((1, 32), 2.0**-20, dtype=np.float32)
    x[0, 0] = 1.0
    for offset, underflow, flushed, overflow in ((0, 31, 31, 0), (-3, 31, 0, 1), (-5, 31, 0, 1), (-6, 0, 0, 1)):
        found = quantize(x, "mxfp8_e4m3", scale_offset=offset, warn=False).losses
        assert (found.underflow, found.flushed, found.overflow) == (underflow, flushed, overflow)


@pytest.mark.parametrize(
    ("count", "level"),
    [
        (0, LossSeverity.NONE),
        (1, LossSeverity.NONE),
        (2, LossSeverity.MEDIUM),
        (10, LossSeverity.MEDIUM),
        (11, LossSeverity.HIGH),
    ],
)
def test_levels_begin_above_a_thousandth_and_a_hundredth(count: int, level: LossSeverity) -> None:
    assert losses(underflow=count).level is level
    assert losses(overflow=count).overflow_level is level
    assert losses(num_elements=0).level is LossSeverity.NONE


def test_losses_are_one_line_for_people() -> None:
    assert str(losses(underflow=20, flushed=5, overflow=2)) == (
        "of 1000 elements: underflow 2.00% (high), 0.50% become zero; overflow 0.20% (medium)"
    )
    spoiled = Losses(num_elements=100, underflow=0, flushed=0, overflow=0, spoiled=31, nan=1, inf=0)
    assert str(spoiled).endswith("; 1 NaN, 0 Inf, 31 others in their blocks")


def test_underflow_above_a_thousandth_is_warned_of_and_changes_nothing() -> None:
    x = np.ones(1000, dtype=np.float32)
    x[:2] = 2.0**-7
    with pytest.warns(QuantizationWarning, match=r"fp8_e4m3: of 1000 elements: underflow 0.20% \(medium\)") as caught:
        found = quantize(x, "fp8_e4m3")
    assert caught[0].filename == __file__
    silent = quantize(x, "fp8_e4m3", warn=False)
    assert (found.values == silent.values).all()
    assert found.losses == silent.losses


def test_what_is_no_underflow_is_not_warned_of() -> None:
    x = np.ones(1000, dtype=np.float32)
    x[0], x[1:500] = 2.0**-7, 0.0
    x[500:600] = 1e6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantize(x, "fp8_e4m3").losses.overflow_level is LossSeverity.HIGH
