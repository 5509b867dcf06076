"""The bytes of a chunk, packed and unpacked."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ranktape.storage.format.documents import BLOSC_BLOCK_NBYTES, BLOSC_LEVEL, Compression, shuffles_bits

MAX_PACKED_NBYTES = 1 << 30
"""Tensors larger than this are not compressed: readers unpack no more, whoever wrote it."""

_BLOSC_HEADER_NBYTES = 16
_BLOSC_ZSTD = 4
"""The number of Zstandard in a blosc frame."""


def pack(raw: np.ndarray[Any, Any], compression: Compression, *, itemsize: int) -> bytes:
    """Bytes as a chunk of a compressed array holds them; `itemsize` is that of the values."""
    from numcodecs import blosc, zstd

    if compression is Compression.ZSTD:
        return bytes(zstd.compress(raw, 1))
    shuffle = blosc.BITSHUFFLE if shuffles_bits(itemsize) else blosc.NOSHUFFLE
    return bytes(blosc.compress(raw, b"zstd", BLOSC_LEVEL, shuffle, BLOSC_BLOCK_NBYTES, itemsize))


def unpack(content: memoryview, compression: Compression, *, nbytes: int) -> memoryview:
    """The bytes that a chunk holds, `nbytes` as its document says.

    Raises:
        ValueError: it holds something else.
    """
    if compression is Compression.NONE:
        return content
    from numcodecs import blosc, zstd

    if nbytes > MAX_PACKED_NBYTES:
        raise ValueError(f"it says that it unpacks to {nbytes} bytes, at most {MAX_PACKED_NBYTES} are written")
    # Zeros take no memory before they are written over: a document that lies about the size costs nothing.
    target = np.zeros(nbytes, dtype=np.uint8)
    try:
        if compression is Compression.ZSTD:
            return memoryview(zstd.decompress(content, target)).cast("B")
        _check_blosc(content, nbytes)
        return memoryview(blosc.decompress(content, target)).cast("B")
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _check_blosc(content: memoryview, nbytes: int) -> None:
    # The library believes what a frame says of its own size, and would read beyond its end.
    if len(content) < _BLOSC_HEADER_NBYTES:
        raise ValueError(f"a blosc frame of {len(content)} bytes")
    unpacked, _, packed = struct.unpack_from("<3I", content, 4)
    if (unpacked, packed) != (nbytes, len(content)) or content[2] >> 5 != _BLOSC_ZSTD:
        raise ValueError(f"a blosc frame that says {packed} bytes for {unpacked}: it has {len(content)} for {nbytes}")
