"""Computes sums over the errors of a result against a reference. Sums of several results can be added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ranktape.analyze.numerics.differences import SUMS, add_differences, cosine, decibels
from ranktape.analyze.numerics.pieces import frozen, map_in_threads, tensor_or_array, tensor_to_array
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, NDArray

    from ranktape.analyze.numerics.histograms.histogram import AnyArray

    Floats: TypeAlias = NDArray[np.float64]

# Shapes: C = columns, N = parts, M = sums.


PART = 1 << 18
"""Minimum number of elements of a part, which one thread sums."""

MAX_PARTS = 16
"""Maximum number of parts of a matrix. Each part has its own sums of all columns."""

DEVICE_PART = 1 << 24
"""Number of elements of a tensor on another device that are processed at once, which takes about 700 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSums:
    """Sums over the errors of the elements of one or more results, which can be added to those of other results.

    Sums and the largest error are over the positions where both the reference and the result are finite. A metric is
    None if no position was compared or if it is undefined.
    """

    num_elements: float = 0.0
    """Number of elements of each array; a whole number, as are all counts."""
    num_compared: float = 0.0
    """Number of positions where both are finite."""
    num_lost: float = 0.0
    """Number of positions where the reference is finite and the result is not.

    At all other positions that are not compared, the reference is not finite.
    """
    reference_squared: float = 0.0
    """Sum of the squares of the reference."""
    result_squared: float = 0.0
    """Sum of the squares of the result."""
    product: float = 0.0
    """Sum of the products of reference and result."""
    error_squared: float = 0.0
    """Sum of the squares of the errors, result minus reference."""
    error: float = 0.0
    """Sum of the errors."""
    error_deviation: float = 0.0
    """Standard deviation of `error`, from the sums of the errors of each row and of each column.

    The errors of a product of two matrices are not independent: those of a row share a row of the first matrix, and
    those of a column a column of the second (two-way clusters: Cameron, Gelbach and Miller 2011,
    doi:10.1198/jbes.2010.07136). For several results it is the sum of the deviations, an upper bound, because the calls
    of a layer share the errors of its weight.
    """
    max_error: float = 0.0
    """Largest |error|, the only field that is not summed."""

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """The sums of both results together."""
        return ErrorSums.pooled([self.to_array(), other.to_array()])

    def to_array(self) -> NDArray[np.float64]:
        """The fields as a row of float64, in their order."""
        return np.array([getattr(self, name) for name in self.__slots__])

    @classmethod
    def pooled(cls, rows: ArrayLike) -> ErrorSums:
        """The sums of all results together, given a row of `to_array` for each; added in the order of the rows."""
        table = np.asarray(rows, dtype=np.float64).reshape(-1, len(cls.__slots__))
        *sums, _ = table.sum(axis=0).tolist()
        return cls(**dict(zip(cls.__slots__, [*sums, float(table[:, -1].max(initial=0.0))], strict=True)))

    @property
    def relative_error(self) -> float | None:
        """Norm of the errors over the norm of the reference (Frobenius); infinite if only the reference is 0."""
        if not self.num_compared or not self.error_squared:
            return 0.0 if self.num_compared else None
        return math.sqrt(self.error_squared / self.reference_squared) if self.reference_squared else math.inf

    @property
    def sqnr(self) -> float | None:
        """Mean square of the reference over that of the errors, in dB; infinite if there is no error."""
        return decibels(self.relative_error)

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between reference and result; None if one of them is 0 everywhere."""
        is_equal = not self.error_squared
        return cosine(self.product, self.reference_squared, self.result_squared, is_equal=is_equal)

    @property
    def max_abs_error(self) -> float | None:
        """Largest |error|; None if no position was compared."""
        return self.max_error if self.num_compared else None

    @property
    def norm_ratio(self) -> float | None:
        """Norm of the result over the norm of the reference; infinite if only the reference is 0, None if both are."""
        if not self.reference_squared:
            return math.inf if self.result_squared else None
        return math.sqrt(self.result_squared / self.reference_squared)

    @property
    def bias(self) -> float | None:
        """Mean error over its standard error; 0 if there is no error. A magnitude above about 4 is not due to chance.

        The errors of a row or of a column may be correlated, so results with few rows or columns are weak evidence.
        Results may share their errors, so several are no stronger evidence than one.
        """
        if not self.num_compared:
            return None
        return self.error / self.error_deviation if self.error_deviation else 0.0

    @property
    def gain(self) -> float | None:
        """The least-squares factor of the reference in the result: below 1 for rounding towards 0.

        None if the reference is 0 everywhere.
        """
        return self.product / self.reference_squared if self.reference_squared else None


def error_sums(
    reference: AnyArray | torch.Tensor, result: AnyArray | torch.Tensor, *, residual: torch.Tensor | None = None
) -> ErrorSums:
    """The sums over the errors of a result.

    Both are arrays or tensors of the same shape and of any real dtype, and are converted to float32. The last dimension
    is that of the columns; a single dimension is one row. With `rest`, the result is the exact sum of `result` and
    `rest`, which are bfloat16 tensors on the CPU.

    Sums are float64 sums of at most 16 parts in their order, and bitwise the same for any number of threads. If a
    tensor is not on the CPU, they are computed on the device of the reference. Positions where either array is NaN or
    infinite are only counted. All sums of empty arrays are 0.

    Raises:
        UsageError: the shapes differ.
    """
    pair = tensor_or_array(reference), tensor_or_array(result)
    shapes = [tuple(array.shape) for array in pair]
    if shapes[0] != shapes[1]:
        raise UsageError(f"a result of shape {shapes[1]} has no errors against a reference of shape {shapes[0]}")
    if any(not isinstance(array, np.ndarray) and array.device.type != "cpu" for array in pair):
        return _device_sums(*pair)
    expected, actual = _rows(pair[0]), _rows(pair[1]) if residual is None else _patterns(pair[1])
    low = None if residual is None else _patterns(residual)
    step = max(1, PART // max(1, expected.shape[1]), -(-expected.shape[0] // MAX_PARTS))
    starts = range(0, expected.shape[0], step)
    columns_N2C, sums_NM = np.zeros((len(starts), 2, expected.shape[1])), np.zeros((len(starts), len(SUMS)))

    def add(number: int) -> None:
        part = slice(starts[number], starts[number] + step)
        part_low, buffer_2C = None if low is None else low[part], np.zeros((2, expected.shape[1]))
        add_differences(
            expected[part], actual[part], part_low, columns_N2C[number], buffer_2C, sums_NM[number : number + 1]
        )

    map_in_threads(add, range(len(starts)), threads=None)
    return _merge_parts(sums_NM[:, _FIELD_INDICES], num_elements=expected.size, columns=columns_N2C[:, 0].sum(axis=0))


_FIELD_INDICES = [
    SUMS.index(name)
    for name in (
        *("finite", "finite_a", "square_a", "square_b", "product", "square_difference", "difference", "row_variance"),
        "largest",
    )
]
"""The indices in `SUMS` of the sums from which the fields of `ErrorSums` after the first follow, in their order."""


def _merge_parts(parts: ArrayLike, *, num_elements: int, columns: NDArray[np.float64]) -> ErrorSums:
    """The sums of one result, from the sums `_PLACES` of its parts."""
    table = np.asarray(parts, dtype=np.float64).reshape(-1, len(_FIELD_INDICES))
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
    """The elements as a float32 matrix in C order."""
    plain = array if isinstance(array, np.ndarray) else tensor_to_array(array)
    with np.errstate(over="ignore", invalid="ignore"):  # values beyond float32 count as infinite
        return frozen(plain.astype(np.float32, copy=False), shape=_matrix_shape(plain.shape))


def _patterns(tensor: Any) -> NDArray[np.uint16]:
    """The bit patterns of a bfloat16 tensor as a matrix in C order."""
    return frozen(tensor_to_array(tensor).view(np.uint16), shape=_matrix_shape(tensor.shape))


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _device_sums(reference: Any, result: Any) -> ErrorSums:
    """`error_sums` of two tensors, at least one of which is not on the CPU; sums are in the order of the device."""
    import torch

    shape = _matrix_shape(reference.shape)
    num_rows = max(1, DEVICE_PART // max(1, shape[1]))
    parts = [tensor.detach().reshape(shape).split(num_rows) for tensor in (reference, result.to(reference.device))]
    columns = torch.zeros(shape[1], dtype=torch.float64, device=reference.device)
    sums = [_part_sums(expected, actual, columns).tolist() for expected, actual in zip(*parts, strict=True)]
    return _merge_parts(sums, num_elements=reference.numel(), columns=columns.cpu().numpy())


def _part_sums(expected: torch.Tensor, actual: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The sums `_PLACES` of a part, computed by torch; adds the errors to `columns`."""
    import torch

    x, y = expected.to(torch.float32).to(torch.float64), actual.to(torch.float32).to(torch.float64)
    is_finite = x.isfinite()
    num_finite = is_finite.sum()
    is_finite &= y.isfinite()
    x, y = x.where(is_finite, 0.0), y.where(is_finite, 0.0)
    errors, count = y - x, is_finite.sum()
    columns += errors.sum(0)
    squared, largest = (errors * errors).sum(), errors.abs().amax() if expected.numel() else errors.sum()
    counts = count, num_finite
    sums = (x * x).sum(), (y * y).sum(), (x * y).sum(), squared, errors.sum()
    variance = errors.sum(1).square().sum() - squared
    return torch.stack([value.to(torch.float64) for value in (*counts, *sums, variance, largest)])
