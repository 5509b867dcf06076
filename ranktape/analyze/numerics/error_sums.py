"""Adds up how far a result is from the one that it should be, in sums that can be added to others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ranktape.analyze.numerics.differences import SUMS, add_up, cosine_of, decibels
from ranktape.analyze.numerics.pieces import array_of, each, frozen, tensor_or_array
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, NDArray

    from ranktape.analyze.numerics.histograms.histogram import AnyArray

    Floats: TypeAlias = NDArray[np.float64]

# Shapes: C = columns, N = parts, M = sums.


PART = 1 << 18
"""Elements that a thread adds up at a time, at least."""

MAX_PARTS = 16
"""Parts of a matrix that are added up apart, each with sums of all columns."""

DEVICE_PART = 1 << 24
"""Elements of a tensor on another device that are looked at at once, with some 700 MB of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSums:
    """What the errors of the elements of one or several results add up to; sums of parts are those of the whole.

    Sums and the largest error are over the positions where reference and result are both finite. A metric is None
    where nothing was compared, or where it is not defined.
    """

    num_elements: float = 0.0
    """Elements of each array; a whole number, as all counts."""
    num_compared: float = 0.0
    """Positions where both are finite."""
    num_lost: float = 0.0
    """Positions where the reference is finite and the result is NaN or infinite. At all others the reference is."""
    reference_squared: float = 0.0
    """Sum of the squares of the reference."""
    result_squared: float = 0.0
    """Sum of the squares of the result."""
    product: float = 0.0
    """Sum of reference times result."""
    error_squared: float = 0.0
    """Sum of the squares of the errors, result minus reference."""
    error: float = 0.0
    """Sum of the errors."""
    error_deviation: float = 0.0
    """The standard deviation of that sum, from the sums of the rows and of the columns: the errors of a product of two
    matrices are not independent, because all of a row come from one row of the first and all of a column from one of
    the second (two-way clusters: Cameron, Gelbach and Miller 2011, doi:10.1198/jbes.2010.07136).

    Of several results the sum of theirs, which is the most that it can be: calls of a layer share the errors of its
    weight."""
    max_error: float = 0.0
    """Largest |error|: the one that is not a sum."""

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """Those of both together."""
        return ErrorSums.pooled([self.to_array(), other.to_array()])

    def to_array(self) -> NDArray[np.float64]:
        """The same numbers as a row of float64, in the order of the fields."""
        return np.array([getattr(self, name) for name in self.__slots__])

    @classmethod
    def pooled(cls, rows: ArrayLike) -> ErrorSums:
        """Those of all rows of `to_array` together, in the order of the rows; of a single one itself."""
        table = np.asarray(rows, dtype=np.float64).reshape(-1, len(cls.__slots__))
        *sums, _ = table.sum(axis=0).tolist()
        return cls(**dict(zip(cls.__slots__, [*sums, float(table[:, -1].max(initial=0.0))], strict=True)))

    @property
    def relative_error(self) -> float | None:
        """The norm of the errors over the norm of the reference (Frobenius); infinite where the reference is 0."""
        if not self.num_compared or not self.error_squared:
            return 0.0 if self.num_compared else None
        return math.sqrt(self.error_squared / self.reference_squared) if self.reference_squared else math.inf

    @property
    def sqnr(self) -> float | None:
        """The reference's mean square over that of the errors, in dB; infinite without any error."""
        return decibels(self.relative_error)

    @property
    def cosine(self) -> float | None:
        """Of the angle between reference and result; None where one of them is 0 everywhere."""
        is_equal = not self.error_squared
        return cosine_of(self.product, self.reference_squared, self.result_squared, is_equal=is_equal)

    @property
    def max_abs_error(self) -> float | None:
        """Largest |error|."""
        return self.max_error if self.num_compared else None

    @property
    def norm_ratio(self) -> float | None:
        """The norm of the result over the norm of the reference; infinite where only the latter is 0."""
        if not self.reference_squared:
            return math.inf if self.result_squared else None
        return math.sqrt(self.result_squared / self.reference_squared)

    @property
    def bias(self) -> float | None:
        """The mean error over its standard error: beyond 4 or so it is no chance; 0 without any error.

        Rows and columns of a result may each have an error of their own: few of them show little. Several results may
        all have the same one: they show no more than one of them.
        """
        if not self.num_compared:
            return None
        return self.error / self.error_deviation if self.error_deviation else 0.0

    @property
    def gain(self) -> float | None:
        """What the reference is multiplied by in the result, by least squares: below 1 for rounding towards 0.

        None where the reference is 0 everywhere.
        """
        return self.product / self.reference_squared if self.reference_squared else None


def error_sums(
    reference: AnyArray | torch.Tensor, result: AnyArray | torch.Tensor, *, rest: torch.Tensor | None = None
) -> ErrorSums:
    """What the errors of a result add up to; both are taken as float32, of any real type.

    With a `rest` the result is the exact sum of the two, which are tensors of bfloat16 on a CPU.

    Arrays or tensors of one shape: matrices, whose last dimension is that of the columns, or a single row. Sums are
    float64, of at most 16 parts that are added up in their order: the number of threads changes no bit. Tensors on
    another device stay there. NaN and Inf are counted apart, whatever is in the other array; empty arrays add up to
    nothing.

    Raises:
        UsageError: the shapes differ.
    """
    pair = tensor_or_array(reference), tensor_or_array(result)
    shapes = [tuple(one.shape) for one in pair]
    if shapes[0] != shapes[1]:
        raise UsageError(f"a result of shape {shapes[1]} has no errors against a reference of shape {shapes[0]}")
    if any(not isinstance(one, np.ndarray) and one.device.type != "cpu" for one in pair):
        return _device_sums(*pair)
    want, got = _rows(pair[0]), _rows(pair[1]) if rest is None else _patterns(pair[1])
    more = None if rest is None else _patterns(rest)
    step = max(1, PART // max(1, want.shape[1]), -(-want.shape[0] // MAX_PARTS))
    starts = range(0, want.shape[0], step)
    columns_N2C, sums_NM = np.zeros((len(starts), 2, want.shape[1])), np.zeros((len(starts), len(SUMS)))

    def add(number: int) -> None:
        part = slice(starts[number], starts[number] + step)
        own, kept_2C = None if more is None else more[part], np.zeros((2, want.shape[1]))
        add_up(want[part], got[part], own, columns_N2C[number], kept_2C, sums_NM[number : number + 1])

    each(add, range(len(starts)), threads=None)
    return _together(sums_NM[:, _PLACES], num_elements=want.size, columns=columns_N2C[:, 0].sum(axis=0))


_PLACES = [
    SUMS.index(name)
    for name in (
        *("finite", "finite_a", "square_a", "square_b", "product", "square_difference", "difference", "row_variance"),
        "largest",
    )
]
"""What is added up for the fields of `ErrorSums` behind the first one, in their order."""


def _together(parts: ArrayLike, *, num_elements: int, columns: NDArray[np.float64]) -> ErrorSums:
    """Those of one result, from `_PLACES` of its parts."""
    table = np.asarray(parts, dtype=np.float64).reshape(-1, len(_PLACES))
    sums, largest = table.sum(axis=0), float(table[:, -1].max(initial=0.0))
    compared, num_finite, *squares, error, variance, _ = sums.tolist()
    deviation = math.sqrt(max(variance + float(columns @ columns), squares[-1]))
    return ErrorSums(
        **dict(
            zip(
                ErrorSums.__slots__,
                [num_elements, compared, num_finite - compared, *squares, error, deviation, largest],
                strict=True,
            )
        )
    )


def _rows(array: Any) -> NDArray[np.float32]:
    """The elements as a matrix in C order."""
    plain = array if isinstance(array, np.ndarray) else array_of(array)
    with np.errstate(over="ignore", invalid="ignore"):  # beyond float32 they are infinite, and counted so
        return frozen(plain.astype(np.float32, copy=False), shape=_matrix_shape(plain.shape))


def _patterns(tensor: Any) -> NDArray[np.uint16]:
    """The same of bfloat16, as it is."""
    return frozen(array_of(tensor).view(np.uint16), shape=_matrix_shape(tensor.shape))


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _device_sums(reference: Any, result: Any) -> ErrorSums:
    """The same of tensors of which one at least is not in the CPU's memory; sums in the order of their device."""
    import torch

    shape = _matrix_shape(reference.shape)
    num_rows = max(1, DEVICE_PART // max(1, shape[1]))
    parts = [one.detach().reshape(shape).split(num_rows) for one in (reference, result.to(reference.device))]
    columns = torch.zeros(shape[1], dtype=torch.float64, device=reference.device)
    sums = [_part_sums(want, got, columns).tolist() for want, got in zip(*parts, strict=True)]
    return _together(sums, num_elements=reference.numel(), columns=columns.cpu().numpy())


def _part_sums(want: torch.Tensor, got: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`_PLACES` of a part, by operations of torch."""
    import torch

    x, y = want.to(torch.float32).to(torch.float64), got.to(torch.float32).to(torch.float64)
    is_finite = x.isfinite()
    num_finite = is_finite.sum()
    is_finite &= y.isfinite()
    x, y = x.where(is_finite, 0.0), y.where(is_finite, 0.0)
    errors, count = y - x, is_finite.sum()
    columns += errors.sum(0)
    squared, largest = (errors * errors).sum(), errors.abs().amax() if want.numel() else errors.sum()
    counts = count, num_finite
    sums = (x * x).sum(), (y * y).sum(), (x * y).sum(), squared, errors.sum()
    variance = errors.sum(1).square().sum() - squared
    return torch.stack([one.to(torch.float64) for one in (*counts, *sums, variance, largest)])
