"""Computes the CRC-32C of bytes from the checksums of their parts.

The checksum of a tensor follows from those of its samples, so that a large one is read once for both. Zeros behind a
message change its checksum by a linear map over bits; that of n zeros is found by squaring (as zlib's `crc32_combine`
does for CRC-32).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

_POLYNOMIAL = 0x82F63B78
"""Of CRC-32C (Castagnoli), its bits reversed."""

_NUM_BITS = 32

Matrix = tuple[int, ...]
"""A linear map of checksums: what becomes of each bit."""


def combine(crcs: Sequence[int], *, part_nbytes: int) -> int:
    """The checksum of parts of equal size, one after the other, from theirs; at least one."""
    zeros = _zeros(part_nbytes)
    whole = crcs[0]
    for crc in crcs[1:]:
        whole = _apply(zeros, whole) ^ crc
    return whole


@functools.lru_cache(maxsize=64)
def _zeros(nbytes: int) -> Matrix:
    """What so many zero bytes behind a message make of its checksum."""
    power: Matrix = (_POLYNOMIAL, *(1 << bit for bit in range(_NUM_BITS - 1)))  # one zero bit
    result: Matrix = tuple(1 << bit for bit in range(_NUM_BITS))
    count = 8 * nbytes
    while count:
        if count & 1:
            result = _product(power, result)
        power = _product(power, power)
        count >>= 1
    return result


def _product(outer: Matrix, inner: Matrix) -> Matrix:
    return tuple(_apply(outer, column) for column in inner)


def _apply(matrix: Matrix, crc: int) -> int:
    total = 0
    while crc:
        low = crc & -crc
        total ^= matrix[low.bit_length() - 1]
        crc ^= low
    return total
