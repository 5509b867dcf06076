"""Does every 16-bit value round to what other people's arithmetic says, in every format and rounding?"""

# Shapes: S = seeds, N = numbers, R = roundings, D = draws, E = eighths, P = pairs of neighbours.

from __future__ import annotations

import numpy as np
import pytest

from ranktape.analyze.numerics.formats import FORMATS, Format, Rounding, round_to, uniforms
from ranktape.analyze.numerics.formats.values import check_values, mix
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import numpy_dtype
from tests.analyze.format_oracles import (
    Floats,
    assert_same,
    every_16_bit_value,
    listed,
    neighbours,
    rounded_by_gfloat,
    rounded_by_table,
)

LISTED = [row for row in FORMATS.values() if row.num_bits <= 16]
"""Formats whose codes can all be listed; the two others hold every 16-bit value."""

WITH_ZERO = [row for row in FORMATS.values() if row.name not in {"e8m0", "fp64"}]
"""Formats that kernels round to."""

NEAREST_OR_FLOOR = (Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR)

SEED = 20


def every_format(rows: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def random_patterns(size: int) -> Floats:
    """Numbers with float64 bits drawn at random: any exponent, subnormals too."""
    drawn = np.random.default_rng(3).integers(0, 1 << 64, size, dtype=np.uint64).view(np.float64)
    return drawn[np.isfinite(drawn)]


@every_format(LISTED)
def test_every_16_bit_value_and_every_tie_round_as_the_table_of_values_says(row: Format) -> None:
    table = listed(row)
    middles = (table[:-1] + table[1:]) / 2
    near = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)])
    values = np.concatenate([every_16_bit_value(), random_patterns(20_000), near, -near])
    for rounding in NEAREST_OR_FLOOR:
        found = round_to(values, target=row, rounding=rounding)
        assert_same(found, rounded_by_table(values, row=row, rounding=rounding))


@every_format([row for row in FORMATS.values() if row.is_signed])
def test_rounding_keeps_the_order_and_what_was_rounded(row: Format) -> None:
    values = np.concatenate([every_16_bit_value(), random_patterns(100_000)])
    found = round_to(np.sort(values[~np.isnan(values)]), target=row)
    assert (np.diff(found) >= 0).all()
    assert np.abs(found).max() <= row.maximum
    assert_same(round_to(found, target=row), found)


@every_format(LISTED)
def test_every_16_bit_value_rounds_by_chance_as_the_table_of_values_says(row: Format) -> None:
    values = every_16_bit_value()
    uniform = uniforms(SEED, start=0, size=values.size)
    found = round_to(values, target=row, rounding=Rounding.STOCHASTIC, seed=SEED)
    assert_same(found, rounded_by_table(values, row=row, rounding=Rounding.STOCHASTIC, uniform=uniform))


@every_format([row for row in FORMATS.values() if row.name not in {"hif8", "e8m0", "fp64"}])
@pytest.mark.parametrize("rounding", NEAREST_OR_FLOOR)
def test_every_16_bit_value_rounds_as_in_gfloat(row: Format, rounding: Rounding) -> None:
    values = every_16_bit_value()
    found = round_to(values, target=row, rounding=rounding)
    assert_same(found, rounded_by_gfloat(values, row=row, rounding=rounding))


@pytest.mark.parametrize("name", ["fp32", "fp64"])
@pytest.mark.parametrize("rounding", [*NEAREST_OR_FLOOR, Rounding.STOCHASTIC])
def test_wide_formats_hold_every_16_bit_value(name: str, rounding: Rounding) -> None:
    row, values = FORMATS[name], every_16_bit_value()
    assert_same(round_to(values, target=row, rounding=rounding, saturate=False), values)
    assert_same(round_to(values, target=row, rounding=rounding), np.clip(values, row.minimum, row.maximum))


@pytest.mark.parametrize("rounding", NEAREST_OR_FLOOR)
def test_wide_formats_round_round_as_in_gfloat(rounding: Rounding) -> None:
    for name in ("bf16", "fp16", "fp32"):
        row = FORMATS[name]
        near = np.random.default_rng(1).standard_normal(20_000) * row.maximum ** np.linspace(-1, 1, 20_000)
        for values in (random_patterns(20_000), near):
            found = round_to(values, target=row, rounding=rounding)
            assert_same(found, rounded_by_gfloat(values, row=row, rounding=rounding))


@pytest.mark.parametrize("rounding", [Rounding.AWAY, Rounding.FLOOR])
def test_powers_of_two_round_as_in_gfloat(rounding: Rounding) -> None:
    """Not to even, where gfloat looks at the code and IEEE 754 takes the larger, as ml_dtypes does."""
    row, values = FORMATS["e8m0"], every_16_bit_value()
    values = values[values >= row.min_normal]
    assert_same(round_to(values, target=row, rounding=rounding), rounded_by_gfloat(values, row=row, rounding=rounding))


@every_format([row for row in FORMATS.values() if row.has_overflow_code and row.name not in {"hif8", "e8m0", "fp64"}])
@pytest.mark.parametrize("rounding", [Rounding.EVEN, Rounding.AWAY])
def test_overflow_is_that_of_gfloat(row: Format, rounding: Rounding) -> None:
    values = every_16_bit_value()
    found = round_to(values, target=row, rounding=rounding, saturate=False)
    assert_same(found, rounded_by_gfloat(values, row=row, rounding=rounding, saturate=False))


@every_format([row for row in LISTED if row.dtype is not None])
def test_every_16_bit_value_in_range_rounds_as_a_cast_of_ml_dtypes(row: Format) -> None:
    """Casting float64 rounds once, also where float16 values meet narrow formats."""
    values = every_16_bit_value()
    inside = np.abs(values) <= row.maximum
    if row.name == "e8m0":
        # ml_dtypes makes zero NaN, and of what is between its two smallest values always the larger.
        inside &= ((values > 0) & (values <= 2.0**-127)) | (values >= 2.0**-126)
    with np.errstate(invalid="ignore"):
        expected = values[inside].astype(numpy_dtype(str(row.dtype))).astype(np.float64)
    assert_same(round_to(values[inside], target=row, rounding=Rounding.EVEN), expected)


@every_format([row for row in FORMATS.values() if row.has_overflow_code and row.name != "e8m0"])
@pytest.mark.parametrize("rounding", NEAREST_OR_FLOOR)
def test_what_overflows_is_infinite_or_nan_where_it_is_not_saturated(row: Format, rounding: Rounding) -> None:
    start = row.overflow_start_of(rounding)
    below = np.nextafter(start, 0.0) if start < np.inf else row.maximum
    found = round_to([below, start, -start, np.inf, -np.inf], target=row, rounding=rounding, saturate=False)
    assert found[0] == row.maximum
    beyond = [np.inf, -np.inf, np.inf, -np.inf] if row.num_infinities else [np.nan] * 4
    assert_same(found[1:], np.array(beyond))
    saturated = round_to([start, -start, np.inf, -np.inf], target=row, rounding=rounding)
    assert_same(saturated, np.array([row.maximum, -row.maximum if row.is_signed else np.nan] * 2))


@every_format([row for row in WITH_ZERO if not row.has_overflow_code])
def test_a_format_with_nothing_to_overflow_to_must_saturate(row: Format) -> None:
    with pytest.raises(UsageError, match="no infinity and no NaN"):
        round_to([1.0], target=row, saturate=False)


def test_chance_decides_about_overflow_too() -> None:
    row = FORMATS["fp8_e5m2"]
    values = np.full(1000, row.maximum + 2048)  # a quarter of a step beyond
    found = round_to(values, target=row, rounding=Rounding.STOCHASTIC, saturate=False, seed=1)
    assert 200 < np.isinf(found).sum() < 300
    assert set(found.tolist()) == {row.maximum, np.inf}
    assert set(round_to(values, target=row, rounding=Rounding.STOCHASTIC, seed=1).tolist()) == {row.maximum}


@every_format([row for row in LISTED if row.name != "e8m0"])
def test_stochastic_rounding_is_right_on_average(row: Format) -> None:
    """At eighths of the way between neighbours all over the range."""
    num_draws = 4000
    table = listed(row)
    lower = table[np.linspace(0, len(table) - 2, 12).astype(int)]
    upper = table[np.searchsorted(table, lower) + 1]
    eighths_E1 = np.arange(9)[:, None] / 8
    eighths_EP = eighths_E1 * (upper - lower) + lower
    found_DEP = round_to(
        np.broadcast_to(eighths_EP, (num_draws, *eighths_EP.shape)), target=row, rounding="stochastic", seed=SEED
    )
    assert np.all((found_DEP == lower) | (found_DEP == upper))
    ups_EP = (found_DEP == upper).sum(axis=0)
    expected_E1 = eighths_E1 * num_draws
    deviation_E1 = np.sqrt(expected_E1 * (1 - eighths_E1))
    assert np.all(np.abs(ups_EP - expected_E1) <= 5 * deviation_E1)


@every_format([row for row in LISTED if row.is_signed])
def test_stochastic_rounding_gives_a_neighbour_and_leaves_values_alone(row: Format) -> None:
    values = every_16_bit_value()
    values = values[np.isfinite(values)]
    lower, upper = neighbours(np.abs(values), row=row)
    for seed in (0, 1, -1):
        found = np.abs(round_to(values, target=row, rounding=Rounding.STOCHASTIC, seed=seed))
        assert np.all((found == lower) | (found == upper))
        assert np.array_equal(found[lower == upper], lower[lower == upper])


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


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, -(2**63), 2**64 + 1, 10**30])
def test_uniform_numbers_are_those_of_their_definition(seed: int) -> None:
    golden, start = 0x9E3779B97F4A7C15, 10**6
    state = splitmix64((seed + golden) % (1 << 64))
    expected = [
        (splitmix64((state + (index + 1) * golden) % (1 << 64)) >> 11) * 2.0**-53 for index in range(start, start + 300)
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


@pytest.mark.parametrize(
    ("name", "why"), [("fp64", "holds every float64"), ("e8m0", "has no sign"), ("ue5m3", "has no sign")]
)
def test_kernels_round_to_no_format_that_is_none_to_quantise_to(name: str, why: str) -> None:
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
