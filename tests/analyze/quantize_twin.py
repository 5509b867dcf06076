"""What does quantisation mean, block by block in plain words? The slow twin of `quantize`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ranktape.analyze.numerics.formats import FORMATS, Format, Rounding, codes_of, round_to, uniforms
from ranktape.analyze.numerics.quantization.schemes import Scaling, parse_scheme

AnyArray = np.ndarray[Any, np.dtype[Any]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


class Expected(NamedTuple):
    """What `quantize` must give."""

    values: AnyArray
    codes: AnyArray | None
    """None where an element is NaN, and the format has no code for that."""
    scales: AnyArray | None
    scale_values: FloatArray | None
    tensor_scale: float | None
    losses: dict[str, int]


class _Scale(NamedTuple):
    stored: float
    value: float
    factor: float
    reciprocal: float | None


@np.errstate(all="ignore")
def quantize_slowly(
    x: AnyArray, scheme: str, *, rotation: int = 0, rotation_seed: int | None = None, **options: Any
) -> Expected:
    """The same for numpy arrays, one group of elements after the other."""
    if not rotation:
        return _quantized(x, scheme, **options)
    axis = options.get("axis", -1)
    wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    found = _quantized(_rotated(wide, rotation, rotation_seed, axis), scheme, **options)
    return found._replace(values=_rotated(found.values, rotation, rotation_seed, axis, is_back=True))


def _rotated(x: AnyArray, size: int, seed: int | None, axis: int, *, is_back: bool = False) -> AnyArray:
    """Each run of neighbours times signs and the matrix, whose columns are added up pair by pair."""
    signs = np.ones(size) if seed is None else np.where(uniforms(seed, start=0, size=size) < 0.5, -1, 1)
    runs = np.moveaxis(x, axis, -1).reshape(-1, size)
    turned = []
    for run in runs:
        terms = [number if is_back else number * x.dtype.type(sign) for number, sign in zip(run, signs, strict=True)]
        sums = _hadamard(terms)
        scale = x.dtype.type(1 / math.sqrt(size))
        turned.append(
            [
                total * (scale * x.dtype.type(sign) if is_back else scale)
                for total, sign in zip(sums, signs, strict=True)
            ]
        )
    moved = np.moveaxis(x, axis, -1).shape
    return np.moveaxis(np.array(turned, dtype=x.dtype).reshape(moved), -1, axis)


def _hadamard(terms: list[Any]) -> list[Any]:
    """The product with [[H, H], [H, -H]], H being the one half as large: the halves first, then their sum."""
    if len(terms) == 1:
        return terms
    half = len(terms) // 2
    first, second = _hadamard(terms[:half]), _hadamard(terms[half:])
    return [a + b for a, b in zip(first, second, strict=True)] + [a - b for a, b in zip(first, second, strict=True)]


def _quantized(
    x: AnyArray,
    scheme: str,
    *,
    scaling: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    scale_format: str | None = None,
    axis: int = -1,
    scale_rule: str | None = None,
    four_over_six: bool = False,
    rounding: str | None = None,
    scale_offset: int = 0,
    saturate: bool = True,
    seed: int | None = None,
    scale_bits: int = 8,
) -> Expected:
    named = parse_scheme(scheme)
    element = named.element
    how = Rounding(rounding) if rounding else Rounding.STOCHASTIC if seed is not None else element.rounding
    kind = Scaling(scaling) if scaling else named.scaling
    rows = np.atleast_1d(x)
    exact = rows.astype(np.float64)
    shared = _shared(exact, scale_offset, scheme, 256 if four_over_six else 448) if named.has_tensor_scale else None
    sizes = block_size if isinstance(block_size, tuple) else (1, block_size or named.block_size or 32)
    own = named.scale.name if named.scale is not None else "e8m0"
    stored_in = scale_format or (own if kind is Scaling.BLOCK else "fp32")
    is_power = stored_in == "e8m0" if kind is Scaling.BLOCK else scale_rule not in {None, "exact"}
    scaled, factors, rounded = exact.copy(), np.ones(rows.shape), np.empty(rows.shape)
    kept = np.float64 if x.dtype == np.float64 else np.float32
    shape = _scales_shape(rows.shape, kind=kind, axis=axis, sizes=sizes)
    stored, stored_values = np.zeros(shape), np.zeros(shape)

    def round_whole(values: FloatArray) -> FloatArray:
        """All elements at once: what chance decides follows from their place in the tensor."""
        source = values.astype(np.float32) if kind is not Scaling.NONE else rows
        given = source if how is Rounding.HYBRID else values
        return round_to(given, target=element, rounding=how, saturate=saturate, seed=seed)

    for place, place_of_scale in _groups(rows.shape, kind=kind, axis=axis, sizes=sizes):
        largest = np.abs(exact[place])
        if kind is not Scaling.BLOCK:
            largest = largest[np.isfinite(largest)]
        amax = float(largest.max(initial=0.0))
        tried: list[tuple[_Scale, FloatArray]] = []
        for stretch in (1.0, 1.5) if four_over_six else (1.0,):
            if shared is not None:
                scale = _nvfp4(amax, shared, stretch)
            elif is_power:
                scale = _power(amax, rule=scale_rule or "floor", element=element, offset=scale_offset, bits=scale_bits)
            else:
                scale = _exact(amax, element=element, offset=scale_offset, stored_in=stored_in, stretch=stretch)
            tried.append((scale, _divided(exact[place], scale, is_float32=not is_power)))
        scale, scaled[place] = tried[0]
        if four_over_six:
            errors = []
            for scale, values in tried:
                attempt = exact.copy()
                attempt[place] = values
                found = (round_whole(attempt)[place] * scale.factor).astype(kept).astype(np.float64) - exact[place]
                # By rows of a tile, and within each one after the other.
                runs = found.reshape(-1, found.shape[-1]) if sizes[0] > 1 else [found.ravel()]
                errors.append(sum(sum((error * error for error in run.tolist()), 0.0) for run in runs))
            scale, scaled[place] = tried[int(errors[1] < errors[0])]
        factors[place] = scale.factor
        stored[place_of_scale] = scale.stored if kind is Scaling.BLOCK else scale.value
        stored_values[place_of_scale] = scale.value
    rounded = round_whole(scaled)
    unspoiled = np.where(np.isnan(factors), 0.0, rounded)
    can_encode = element.num_nans or not np.isnan(unspoiled).any()
    codes = codes_of(unspoiled, target=element).reshape(x.shape) if can_encode else None
    scale_shape = stored.shape if x.ndim else ()
    stored = (
        stored.astype(np.float32 if stored_in == "fp32" else np.uint8)
        if kind is Scaling.BLOCK
        else stored.astype(np.float32)
    )
    return Expected(
        values=(rounded * factors).astype(kept).reshape(x.shape),
        codes=codes,
        scales=None if kind is Scaling.NONE else stored.reshape(scale_shape),
        scale_values=None if kind is Scaling.NONE else stored_values.reshape(scale_shape),
        tensor_scale=None if shared is None else float(shared.scale),
        losses=_losses(exact, scaled, rounded, element=element, how=how),
    )


def _divided(exact: FloatArray, scale: _Scale, *, is_float32: bool) -> FloatArray:
    if math.isnan(scale.value):
        return np.full_like(exact, np.nan)
    divided = exact / scale.factor if scale.reciprocal is None else exact * scale.reciprocal
    # Of both zeros the sign stays, as numbers of numpy would lose it.
    result: FloatArray = np.copysign(np.asarray(_float32(divided), np.float64), exact) if is_float32 else divided
    return result


def _losses(
    exact: FloatArray, scaled: FloatArray, rounded: FloatArray, *, element: Format, how: Rounding
) -> dict[str, int]:
    is_counted = np.isfinite(exact) & ~np.isnan(scaled) & (exact != 0)
    return {
        "num_elements": exact.size,
        "underflow": int((is_counted & (np.abs(scaled) < element.min_normal)).sum()),
        "flushed": int((is_counted & (rounded == 0)).sum()),
        "overflow": int((is_counted & (np.abs(scaled) >= element.overflow_start_of(how))).sum()),
        "spoiled": int((np.isfinite(exact) & np.isnan(scaled)).sum()),
        "nan": int(np.isnan(exact).sum()),
        "inf": int(np.isinf(exact).sum()),
    }


def _scales_shape(shape: tuple[int, ...], *, kind: Scaling, axis: int, sizes: tuple[int, int]) -> tuple[int, ...]:
    if kind is Scaling.CHANNEL:
        return (shape[axis],)
    if kind is not Scaling.BLOCK:
        return ()
    found = list(shape)
    found[axis] = math.ceil(found[axis] / sizes[1])
    if sizes[0] > 1:
        found[-2] = math.ceil(found[-2] / sizes[0])
    return tuple(found)


def _groups(shape: tuple[int, ...], *, kind: Scaling, axis: int, sizes: tuple[int, int]) -> Iterator[tuple[Any, Any]]:
    """The elements of each group, and where its scale is."""
    axis %= len(shape)
    if kind is Scaling.TENSOR:
        yield ..., ()
    elif kind is Scaling.CHANNEL:
        for channel in range(shape[axis]):
            yield (*[slice(None)] * axis, channel), (channel,)
    elif kind is Scaling.BLOCK and sizes[0] > 1:
        for index in np.ndindex(*_scales_shape(shape, kind=kind, axis=axis, sizes=sizes)):
            tile = (slice(place * size, (place + 1) * size) for place, size in zip(index[-2:], sizes, strict=True))
            yield (*index[:-2], *tile), index
    elif kind is Scaling.BLOCK:
        for index in np.ndindex(*shape[:axis], 1, *shape[axis + 1 :]):
            for block, start in enumerate(range(0, shape[axis], sizes[1])):
                run = slice(start, start + sizes[1])
                yield (*index[:axis], run, *index[axis + 1 :]), (*index[:axis], block, *index[axis + 1 :])


def _power(amax: float, *, rule: str, element: Format, offset: int, bits: int) -> _Scale:
    """A power of two by the definition of the rule, in exact rational numbers."""
    if not math.isfinite(amax):
        return _Scale(255, math.nan, math.nan, None)
    end = 2 ** (bits - 1) - 1
    exponent = -end
    if amax:
        exponent = max(-end, min(end, _rule_exponent(Fraction(amax), rule=rule, element=element) + offset))
    return _Scale(exponent + 127, 2.0**exponent, 2.0**exponent, None)


def _rule_exponent(amax: Fraction, *, rule: str, element: Format) -> int:
    floor = math.frexp(float(amax))[1] - 1
    assert Fraction(2) ** floor <= amax < Fraction(2) ** (floor + 1)
    if rule == "floor":
        return floor - element.emax
    if rule == "ceil":
        return floor + (amax > Fraction(2) ** floor) - element.emax
    if rule == "even":
        half_a_step = Fraction(2) ** (floor - element.mantissa_bits - 1)
        return floor + (amax + half_a_step >= Fraction(2) ** (floor + 1)) - element.emax
    exponent = floor - element.emax - 1
    while amax > Fraction(element.maximum) * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def _exact(amax: float, *, element: Format, offset: int, stored_in: str, stretch: float) -> _Scale:
    target, stored = (8.0 if element.name == "hif8" else element.maximum) / stretch, FORMATS[stored_in]
    if not math.isfinite(amax):
        nan = math.nan if stored_in == "fp32" else float(codes_of(math.nan, target=stored))
        return _Scale(nan, math.nan, math.nan, None)
    scale = 1.0
    if amax:
        scale = float(_float32(math.ldexp(float(_float32(amax / target)), offset)))
        scale = max(float(round_to(scale, target=stored)), stored.min_subnormal)
    code = scale if stored_in == "fp32" else float(codes_of(scale, target=stored))
    return _Scale(code, scale, scale, None)


class _Shared(NamedTuple):
    """What the blocks of a tensor in NVFP4 share, in numpy's own float32."""

    scheme: str
    scale: Any
    encode: Any


def _shared(exact: FloatArray, offset: int, scheme: str, largest_code: int) -> _Shared:
    amax = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
    if not amax:
        return _Shared(scheme, np.float32(1), np.float32(1))
    largest, products = _bounded(amax), np.float32(largest_code) * np.float32(6)
    if scheme == "nvfp4":
        encode = max(_bounded(math.ldexp(float(_bounded(products / largest)), -offset)), np.float32(2.0**-127))
        return _Shared(scheme, np.float32(1) / encode, encode)
    scale = max(_bounded(math.ldexp(float(largest / products), offset)), np.float32(2.0**-121))
    return _Shared(scheme, scale, np.float32(0))


def _nvfp4(amax: float, shared: _Shared, stretch: float) -> _Scale:
    """As each of the three programs says it, operation by operation."""
    if not math.isfinite(amax):
        return _Scale(0x7F, math.nan, math.nan, math.nan)
    one, six, largest, tensor = np.float32(1), np.float32(6), _bounded(amax), shared.scale
    if shared.scheme == "nvfp4":
        wanted = largest * (shared.encode * (one / six)) * np.float32(stretch)
    elif shared.scheme == "nvfp4_modelopt":
        wanted = largest / _bounded(six * tensor) * np.float32(stretch)
        wanted = max(wanted, np.float32(2.0**-9)) if wanted else one
    else:
        wanted = max(largest / six / tensor * np.float32(stretch), np.float32(2.0**-6))
    code = np.float32(min(wanted, np.float32(448))).astype(ml_dtypes.float8_e4m3fn)
    block = np.float32(code)
    factor = _bounded(block * tensor)
    reciprocal: float | None = None
    if shared.scheme == "nvfp4":
        reciprocal = float(_bounded(one / factor)) if block else 0.0
    elif shared.scheme == "nvfp4_torchao":
        reciprocal = float(one / tensor / block)
    return _Scale(int(code.view(np.uint8)), float(block), float(factor), reciprocal)


def _bounded(number: Any) -> Any:
    """In float32, the largest one at most."""
    return min(np.float32(number), np.finfo(np.float32).max)


def _float32(number: Any) -> Any:
    return np.asarray(number, dtype=np.float64).astype(np.float32)[()]


def same_bits(found: AnyArray, expected: AnyArray) -> bool:
    """Whether two arrays hold the same numbers bit for bit, every NaN being the same."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    is_nan = np.isnan(found)
    pattern = f"u{found.dtype.itemsize}"
    equal = found.reshape(-1).view(pattern) == expected.reshape(-1).view(pattern)
    return bool((equal | is_nan.reshape(-1)).all()) and bool((is_nan == np.isnan(expected)).all())


def special_values(shape: tuple[int, ...], *, dtype: Any, seed: int = 0) -> AnyArray:
    """Numbers of every magnitude that the type has, with zeros, subnormals, NaN and infinities among them."""
    random = np.random.default_rng(seed)
    size = math.prod(shape)
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    low, high = math.log2(float(info.smallest_subnormal)), math.log2(float(info.max))
    # Runs of neighbours have about the same magnitude, as in a tensor; the runs have any.
    centres = np.repeat(random.uniform(max(low, -160.0), min(high, 160.0), size=size // 16 + 1), 16)[:size]
    numbers = random.standard_normal(size) * 2.0 ** np.clip(centres, low, high)
    numbers[random.random(size) < 0.05] = 0.0
    numbers[random.random(size) < 0.02] = float(info.smallest_subnormal)
    numbers[random.random(size) < 0.02] = -0.0
    for special, share in ((np.nan, 0.01), (np.inf, 0.01), (-np.inf, 0.005)):
        numbers[random.random(size) < share] = special
    with np.errstate(all="ignore"):
        return numbers.astype(dtype).reshape(shape)


ELEMENTS = [name for name, row in FORMATS.items() if row.is_signed and name not in {"fp64", "nvfp4"}]
"""Formats that a tensor can be quantised to, with any scaling."""
