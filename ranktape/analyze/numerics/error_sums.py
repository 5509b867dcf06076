"""Adds up how far a result is from the one that it should be, in sums that can be added to others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.differences import cosine_of, decibels
from ranktape.analyze.numerics.error_kernels import add_errors
from ranktape.analyze.numerics.kernels import BLOCK
from ranktape.analyze.numerics.pieces import array_of, each, frozen, tensor_or_array
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, NDArray

    from ranktape.analyze.numerics.histograms.histogram import AnyArray

CHUNK = 64 * BLOCK
"""Elements that a thread adds up at a time."""

DEVICE_CHUNK = 1 << 24
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
    max_error: float = 0.0
    """Largest |error|: the one that is not a sum."""

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """Those of both together."""
        return ErrorSums.pooled([self.to_array(), other.to_array()])

    def to_array(self) -> NDArray[np.float64]:
        """The same numbers as a row of float64, in the order of the fields."""
        return np.array(dataclasses.astuple(self))

    @classmethod
    def pooled(cls, rows: ArrayLike) -> ErrorSums:
        """Those of all rows of `to_array` together, in the order of the rows; of a single one itself."""
        table = np.asarray(rows, dtype=np.float64).reshape(-1, len(dataclasses.fields(cls)))
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
        """The mean error over its standard error, as if errors were independent: beyond 4 or so it is no chance.

        0 without any error; None of fewer than two compared positions, infinite where all have the same error.
        """
        if self.num_compared < 2:  # noqa: PLR2004 - a spread takes two
            return None
        mean = self.error / self.num_compared
        variance = (self.error_squared - self.error * mean) / (self.num_compared - 1)
        if variance > 0:
            return mean / math.sqrt(variance / self.num_compared)
        return math.copysign(math.inf, mean) if mean else 0.0


def error_sums(
    reference: AnyArray | torch.Tensor, result: AnyArray | torch.Tensor, *, rest: torch.Tensor | None = None
) -> ErrorSums:
    """What the errors of a result add up to; both are taken as float32, of any real type.

    With a `rest` the result is the exact sum of the two, which are tensors of bfloat16 on a CPU.

    Arrays or tensors of one shape, whose order is that of the reference's rows. Sums are float64, of blocks of 4,096
    elements that are added up one after the other: the number of threads changes no bit. Tensors on another device stay
    there. NaN and Inf are counted apart, whatever is in the other array; empty arrays add up to nothing.

    Raises:
        UsageError: the shapes differ.
    """
    pair = tensor_or_array(reference), tensor_or_array(result)
    shapes = [tuple(one.shape) for one in pair]
    if shapes[0] != shapes[1]:
        raise UsageError(f"a result of shape {shapes[1]} has no errors against a reference of shape {shapes[0]}")
    if any(not isinstance(one, np.ndarray) and one.device.type != "cpu" for one in pair):
        return _device_sums(*pair)
    want, got = _flat(pair[0]), _flat(pair[1]) if rest is None else _patterns(pair[1])
    more = None if rest is None else _patterns(rest)
    sums_BM = np.zeros((-(-want.size // BLOCK), len(ErrorSums.__slots__)))  # noqa: N806 - the letters of a shape

    def add(start: int) -> None:
        part, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
        add_errors(want[part], got[part], None if more is None else more[part], sums_BM[blocks])

    each(add, range(0, want.size, CHUNK), threads=None)
    return ErrorSums.pooled(sums_BM)


def _flat(array: Any) -> NDArray[np.float32]:
    """The elements in C order."""
    plain = array if isinstance(array, np.ndarray) else array_of(array)
    return frozen(plain.astype(np.float32, copy=False), shape=(plain.size,))


def _patterns(tensor: Any) -> NDArray[np.uint16]:
    """The same of bfloat16, as it is."""
    return frozen(array_of(tensor).view(np.uint16), shape=(tensor.numel(),))


def _device_sums(reference: Any, result: Any) -> ErrorSums:
    """The same of tensors of which one at least is not in the CPU's memory; sums in the order of their device."""
    rows = [sums.tolist() for sums in _chunk_sums(reference.detach().reshape(-1), result.detach().reshape(-1))]
    return ErrorSums.pooled(rows)


def _chunk_sums(reference: torch.Tensor, result: torch.Tensor) -> Iterator[torch.Tensor]:
    import torch

    for want, got in zip(reference.split(DEVICE_CHUNK), result.to(reference.device).split(DEVICE_CHUNK), strict=True):
        x, y = want.to(torch.float32).to(torch.float64), got.to(torch.float32).to(torch.float64)
        is_finite = x.isfinite()
        num_finite = is_finite.sum()
        is_finite &= y.isfinite()
        x, y = x.where(is_finite, 0.0), y.where(is_finite, 0.0)
        errors, count = y - x, is_finite.sum()
        largest = errors.abs().amax() if want.numel() else errors.sum()
        counts = torch.tensor(want.numel(), device=x.device), count, num_finite - count
        sums = x @ x, y @ y, x @ y, errors @ errors, errors.sum(), largest
        yield torch.stack([one.to(torch.float64) for one in (*counts, *sums)])
