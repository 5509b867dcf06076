"""Does every 16-bit value round to what other people's arithmetic says, in every format and rounding?"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import gfloat  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import pytest
from gfloat import formats as gfloat_formats

from ranktape.analyze.numerics.formats import FORMATS, Coding, Format, Rounding, decode, round_to, uniforms
from ranktape.analyze.numerics.formats.values import check_values, mix
from ranktape.errors import UsageError

Floats = np.ndarray[Any, np.dtype[np.float64]]

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
"""Every code of a 16-bit type."""

TYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
"""The 16-bit types whose every value is tried."""


def every_16_bit_value() -> Floats:
    """All numbers, infinities and NaN patterns of bfloat16 and float16."""
    with np.errstate(invalid="ignore"):
        return np.concatenate([PATTERNS.view(dtype).astype(np.float64) for dtype in TYPES])


def listed(row: Format) -> Floats:
    """The nonnegative finite values of a format, ascending."""
    values = decode(np.arange(1 << row.num_bits), target=row)
    return np.unique(np.abs(values[np.isfinite(values) & (np.abs(values) <= row.maximum)]))


def neighbours(magnitudes: Floats, *, row: Format) -> tuple[Floats, Floats]:
    """The largest value of the format not above each magnitude, and the smallest not below it.

    At the ends both are the end.
    """
    table = listed(row)
    last = len(table) - 1
    lower = table[np.clip(np.searchsorted(table, magnitudes, side="right") - 1, 0, last)]
    upper = table[np.clip(np.searchsorted(table, magnitudes, side="left"), 0, last)]
    return lower, upper


def rounded_by_table(values: Floats, *, row: Format, rounding: Rounding, uniform: Floats | None = None) -> Floats:
    """The saturating rounding, by looking the neighbours up; `uniform` decides the stochastic one."""
    magnitudes = np.abs(values)
    lower, upper = neighbours(np.nan_to_num(magnitudes, nan=0.0, posinf=row.maximum), row=row)
    # Of neighbours the mean is a float64, and so is every multiple of their distance that occurs.
    middle = lower + (upper - lower) / 2
    step = np.where(upper > lower, upper - lower, 1.0)
    if rounding is Rounding.EVEN:
        # Of one significand bit, all significands are odd and the larger value is chosen (IEEE 754-2019, 4.3.1).
        is_up = (magnitudes > middle) | ((magnitudes == middle) & (np.floor(lower / step) % 2 == 1))
    elif rounding is Rounding.AWAY:
        is_up = magnitudes >= middle
    elif rounding is Rounding.FLOOR:
        is_up = np.zeros(values.shape, dtype=bool)
    else:
        assert uniform is not None
        with np.errstate(invalid="ignore"):
            is_up = uniform < (magnitudes - lower) / step
    found = np.where(is_up, upper, lower)
    return signed(np.where(np.isnan(values), np.nan, found), like=values, row=row)


def signed(magnitudes: Floats, *, like: Floats, row: Format) -> Floats:
    """The magnitudes with the signs of `like`, as far as the format has signs."""
    if not row.is_signed:
        return np.where(like < 0, np.nan, magnitudes)
    found = np.copysign(magnitudes, like)
    return found if row.has_negative_zero else found + 0.0


def gfloat_info(row: Format) -> gfloat.FormatInfo:
    """What gfloat knows the format as; the formats that it lacks in its own terms."""
    known = {
        "fp8_e4m3": gfloat_formats.format_info_ocp_e4m3,
        "fp8_e5m2": gfloat_formats.format_info_ocp_e5m2,
        "fp6_e2m3": gfloat_formats.format_info_ocp_e2m3,
        "fp6_e3m2": gfloat_formats.format_info_ocp_e3m2,
        "fp4_e2m1": gfloat_formats.format_info_ocp_e2m1,
        "nvfp4": gfloat_formats.format_info_ocp_e2m1,
        "int8": gfloat_formats.format_info_ocp_int8,
        "e8m0": gfloat_formats.format_info_ocp_e8m0,
        "bf16": gfloat_formats.format_info_bfloat16,
        "fp16": gfloat_formats.format_info_binary16,
        "fp32": gfloat_formats.format_info_binary32,
    }
    if row.name in known:
        return known[row.name]
    if row.coding is Coding.INTEGER:
        return dataclasses.replace(known["int8"], name=row.name, k=row.num_bits, precision=row.num_bits)
    is_ieee = row.num_infinities > 0
    return gfloat.FormatInfo(
        row.name,
        row.num_bits,
        row.mantissa_bits + 1,
        bias=row.bias,
        is_signed=row.is_signed,
        domain=gfloat.Domain.Extended if is_ieee else gfloat.Domain.Finite,
        has_nz=row.has_negative_zero,
        num_high_nans=(1 << row.mantissa_bits) - 1 if is_ieee else 0 if row.is_signed else row.num_nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


GFLOAT_MODES = {
    Rounding.EVEN: gfloat.RoundMode.TiesToEven,
    Rounding.AWAY: gfloat.RoundMode.TiesToAway,
    Rounding.FLOOR: gfloat.RoundMode.TowardZero,
}


def rounded_by_gfloat(values: Floats, *, row: Format, rounding: Rounding, saturate: bool = True) -> Floats:
    """The same by gfloat; integers symmetric about 0, as ours are."""
    # Of int8 gfloat gives -2 too, of formats without a sign negative numbers: magnitudes are rounded, signs put back.
    is_by_magnitude = row.coding is Coding.INTEGER or not row.is_signed
    exact = np.abs(values) if is_by_magnitude else values
    is_number = ~np.isnan(values)
    found = np.full(values.shape, np.nan)
    found[is_number] = gfloat.round_ndarray(
        gfloat_info(row), exact[is_number], rnd=GFLOAT_MODES[rounding], sat=saturate
    )
    return signed(np.abs(found), like=values, row=row) if is_by_magnitude else found


def assert_same(found: Floats, expected: Floats) -> None:
    """Every value equal, a zero in its sign too, NaN where NaN is expected."""
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found[~is_nan].view(np.int64), expected[~is_nan].view(np.int64))


LISTED = [row for row in FORMATS.values() if row.num_bits <= 16]
"""Formats whose codes can all be listed; the two others hold every 16-bit value."""

WITH_ZERO = [row for row in FORMATS.values() if row.name not in {"e8m0", "fp64"}]
"""Formats that kernels round to."""

NEAREST_OR_FLOOR = (Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR)

SEED = 20


def random_patterns(size: int) -> Floats:
    """Numbers with float64 bits drawn at random: any exponent, subnormals too."""
    drawn = np.random.default_rng(3).integers(0, 1 << 64, size, dtype=np.uint64).view(np.float64)
    return drawn[np.isfinite(drawn)]


def test_every_16_bit_value_and_every_tie_round_as_the_table_of_values_says() -> None:
    for row in LISTED:
        table = listed(row)
        middles = (table[:-1] + table[1:]) / 2
        near = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)])
        values = np.concatenate([every_16_bit_value(), random_patterns(20_000), near, -near])
        for rounding in NEAREST_OR_FLOOR:
            found = round_to(values, target=row, rounding=rounding)
            assert_same(found, rounded_by_table(values, row=row, rounding=rounding))


def test_rounding_keeps_the_order_and_what_was_rounded() -> None:
    for row in [row for row in FORMATS.values() if row.is_signed]:
        values = np.concatenate([every_16_bit_value(), random_patterns(100_000)])
        found = round_to(np.sort(values[~np.isnan(values)]), target=row)
        assert (np.diff(found) >= 0).all()
        assert np.abs(found).max() <= row.maximum
        assert_same(round_to(found, target=row), found)


def test_every_16_bit_value_rounds_by_chance_as_the_table_of_values_says() -> None:
    for row in LISTED:
        values = every_16_bit_value()
        uniform = uniforms(SEED, start=0, size=values.size)
        found = round_to(values, target=row, rounding=Rounding.STOCHASTIC, seed=SEED)
        assert_same(found, rounded_by_table(values, row=row, rounding=Rounding.STOCHASTIC, uniform=uniform))


def test_every_16_bit_value_rounds_as_in_gfloat() -> None:
    for row, rounding in itertools.product(
        [row for row in FORMATS.values() if row.name not in {"hif8", "e8m0", "fp64"}], NEAREST_OR_FLOOR
    ):
        values = every_16_bit_value()
        found = round_to(values, target=row, rounding=rounding)
        assert_same(found, rounded_by_gfloat(values, row=row, rounding=rounding))


def test_wide_formats_hold_every_16_bit_value() -> None:
    for name, rounding in itertools.product(["fp32", "fp64"], [*NEAREST_OR_FLOOR, Rounding.STOCHASTIC]):
        row, values = FORMATS[name], every_16_bit_value()
        assert_same(round_to(values, target=row, rounding=rounding, saturate=False), values)
        assert_same(round_to(values, target=row, rounding=rounding), np.clip(values, row.minimum, row.maximum))


def test_wide_formats_round_round_as_in_gfloat() -> None:
    for rounding in NEAREST_OR_FLOOR:
        for name in ("bf16", "fp16", "fp32"):
            row = FORMATS[name]
            near = np.random.default_rng(1).standard_normal(20_000) * row.maximum ** np.linspace(-1, 1, 20_000)
            for values in (random_patterns(20_000), near):
                found = round_to(values, target=row, rounding=rounding)
                assert_same(found, rounded_by_gfloat(values, row=row, rounding=rounding))


def test_overflow_is_that_of_gfloat() -> None:
    for row, rounding in itertools.product(
        [row for row in FORMATS.values() if row.has_overflow_code and row.name not in {"hif8", "e8m0", "fp64"}],
        [Rounding.EVEN, Rounding.AWAY],
    ):
        values = every_16_bit_value()
        found = round_to(values, target=row, rounding=rounding, saturate=False)
        assert_same(found, rounded_by_gfloat(values, row=row, rounding=rounding, saturate=False))


def test_what_overflows_is_infinite_or_nan_where_it_is_not_saturated() -> None:
    for row, rounding in itertools.product(
        [row for row in FORMATS.values() if row.has_overflow_code and row.name != "e8m0"], NEAREST_OR_FLOOR
    ):
        start = row.overflow_start_of(rounding)
        below = np.nextafter(start, 0.0) if start < np.inf else row.maximum
        found = round_to([below, start, -start, np.inf, -np.inf], target=row, rounding=rounding, saturate=False)
        assert found[0] == row.maximum
        beyond = [np.inf, -np.inf, np.inf, -np.inf] if row.num_infinities else [np.nan] * 4
        assert_same(found[1:], np.array(beyond))
        saturated = round_to([start, -start, np.inf, -np.inf], target=row, rounding=rounding)
        assert_same(saturated, np.array([row.maximum, -row.maximum if row.is_signed else np.nan] * 2))


def test_a_format_with_nothing_to_overflow_to_must_saturate() -> None:
    for row in [row for row in WITH_ZERO if not row.has_overflow_code]:
        with pytest.raises(UsageError, match="no infinity and no NaN"):
            round_to([1.0], target=row, saturate=False)


def test_chance_decides_about_overflow_too() -> None:
    row = FORMATS["fp8_e5m2"]
    values = np.full(1000, row.maximum + 2048)  # a quarter of a step beyond
    found = round_to(values, target=row, rounding=Rounding.STOCHASTIC, saturate=False, seed=1)
    assert 200 < np.isinf(found).sum() < 300
    assert set(found.tolist()) == {row.maximum, np.inf}
    assert set(round_to(values, target=row, rounding=Rounding.STOCHASTIC, seed=1).tolist()) == {row.maximum}


def test_the_same_seed_rounds_the_same_in_any_chunks() -> None:
    row, values = FORMATS["fp4_e2m1"], np.random.default_rng(0).standard_normal((30, 70))
    whole = round_to(values, target=row, seed=7)
    assert np.array_equal(whole, round_to(values, target=row, rounding="stochastic", seed=7))
    assert not np.array_equal(whole, round_to(values, target=row, seed=8))
    parts = [uniforms(7, start=start, size=300) for start in range(0, 2100, 300)]
    assert np.array_equal(np.concatenate(parts), uniforms(7, start=0, size=2100))
    # The index is that of C order, whatever the memory looks like.
    assert np.array_equal(whole, round_to(np.asfortranarray(values), target=row, seed=7))


def splitmix64(state: int) -> int:
    """The output function as it was published, on integers without end."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return state ^ (state >> 31)


def test_uniform_numbers_are_those_of_their_definition() -> None:
    for seed in [0, 1, -1, 2**63, -(2**63), 2**64 + 1, 10**30]:
        golden, start = 0x9E3779B97F4A7C15, 10**6
        state = splitmix64((seed + golden) % (1 << 64))
        expected = [
            (splitmix64((state + (index + 1) * golden) % (1 << 64)) >> 11) * 2.0**-53
            for index in range(start, start + 300)
        ]
        assert uniforms(seed, start=start, size=300).tolist() == expected


def test_uniform_numbers_are_even_and_unrelated() -> None:
    size = 1 << 16
    numbers_SN = np.stack([uniforms(seed, start=0, size=size) for seed in range(6)])
    assert numbers_SN.min() >= 0
    assert numbers_SN.max() < 1
    for numbers in numbers_SN:
        counts = np.bincount((numbers * 256).astype(int), minlength=256)
        assert 150 < ((counts - size / 256) ** 2 / (size / 256)).sum() < 370  # chi squared, 255 degrees, 5 deviations
    neighbours_SN = np.concatenate([numbers_SN[:, :-1], numbers_SN[:, 1:]])
    correlations = np.corrcoef(neighbours_SN) - np.eye(12)
    same = np.arange(6)
    correlations[same, same + 6] = correlations[same + 6, same]
    assert np.abs(correlations).max() < 5 / np.sqrt(size)


def test_a_uniform_number_equal_to_the_fraction_does_not_round_up() -> None:
    """Else a value of the format would not stay itself when 0 is drawn."""
    row, uniform = FORMATS["fp4_e2m1"], uniforms(SEED, start=0, size=1000)
    fractions = uniform * row.min_subnormal
    assert not round_to(fractions, target=row, rounding="stochastic", seed=SEED).any()
    above = round_to(np.nextafter(fractions, 1.0), target=row, rounding="stochastic", seed=SEED)
    assert (above == row.min_subnormal).all()


def test_kernels_round_to_no_format_that_is_none_to_quantise_to() -> None:
    for name, why in [("fp64", "holds every float64"), ("e8m0", "has no sign"), ("ue5m3", "has no sign")]:
        with pytest.raises(UsageError, match=why):
            check_values(FORMATS[name])


def test_mixing_is_a_bijection_with_zero_fixed() -> None:
    """A property of the definition: no seed is weak but through the state before mixing."""
    assert int(mix(np.int64(0))) == 0
    assert len(set(mix(np.arange(10_000)).tolist())) == 10_000


def test_powers_of_two_hold_neither_zero_nor_sign() -> None:
    row = FORMATS["e8m0"]
    smallest, largest = 2.0**-127, 2.0**127
    given = [0.0, -0.0, 5e-324, 2.0**-127, 1.49, 1.5, 3.0, 1e300, np.inf, -1.0, -np.inf, -5e-324]
    expected = [*[smallest] * 4, 1.0, 2.0, 4.0, largest, largest, *[np.nan] * 3]
    assert_same(round_to(given, target=row), np.array(expected))
    assert_same(round_to([1e300, np.inf], target=row, saturate=False), np.full(2, np.nan))


def test_what_rounding_cannot_be_is_refused() -> None:
    row = FORMATS["fp8_e4m3"]
    with pytest.raises(UsageError, match="rounding 'up' is not known: use one of even, away, floor, stochastic"):
        round_to([1.0], target=row, rounding="up")
    with pytest.raises(UsageError, match="seed is 3, and rounding even draws nothing"):
        round_to([1.0], target=row, rounding="even", seed=3)
    with pytest.raises(UsageError, match="seed is 'x': give an integer"):
        round_to([1.0], target=row, seed="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="rounding hybrid is that of hif8, and the format is fp8_e4m3"):
        round_to(np.ones(1, dtype=np.float32), target=row, rounding="hybrid")


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="complex numbers are not rounded"):
        round_to(np.ones(2, dtype=np.complex64), target=FORMATS["bf16"])


def test_a_format_rounds_its_own_way_unless_told() -> None:
    assert round_to([2.125, 2.0625], target=FORMATS["hif8"]).tolist() == [2.25, 2.0]
    assert round_to([2.125], target=FORMATS["hif8"], rounding="even").tolist() == [2.0]
    assert round_to([2.125], target=FORMATS["fp8_e4m3"]).tolist() == [2.0]
