"""Lets zarr read a run through our own backends.

Requests go through `Backend`, so that zarr's reading has the same retries, deadlines, credentials and error texts as
ours, whichever client is below.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer, BufferPrototype

    from ranktape.storage.places.backend import Backend

_MAX_DOCUMENT_NBYTES = 256 << 20
"""A larger document is not read, whoever wrote it."""


class BackendStore(Store):
    """A read-only Zarr store over a run."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, backend: Backend) -> None:
        super().__init__(read_only=True)
        self._backend = backend

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BackendStore) and other._backend.url == self._backend.url

    def __hash__(self) -> int:
        return hash(self._backend.url)

    def __str__(self) -> str:
        return self._backend.url

    def __repr__(self) -> str:
        return f"BackendStore({self._backend.url!r})"

    def with_read_only(self, read_only: bool = False) -> BackendStore:  # noqa: FBT001, FBT002  # zarr's signature
        """This store; another that can be written does not exist."""
        if not read_only:
            msg = "a run is read through zarr, never written"
            raise ValueError(msg)
        return BackendStore(self._backend)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The bytes of an object, or some of them; None where there is none."""
        data = await asyncio.to_thread(self._read, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """As `get`, for many at once."""
        return list(await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Whether there is an object."""
        return await asyncio.to_thread(self._backend.exists, key)

    async def getsize(self, key: str) -> int:
        """The bytes that an object has."""
        size = await asyncio.to_thread(self._backend.size, key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002  # zarr's signature
        """Refused: the store is read-only."""
        self._check_writable()

    async def delete(self, key: str) -> None:  # noqa: ARG002  # zarr's signature
        """Refused: the store is read-only."""
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """The keys of all objects."""
        for key in await asyncio.to_thread(self._backend.list_keys, ""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The keys of all objects that begin so."""
        folder = prefix.rpartition("/")[0]
        for key in await asyncio.to_thread(self._backend.list_keys, folder):
            path = f"{folder}/{key}" if folder else key
            if path.startswith(prefix):
                yield path

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The first segments of all keys below a prefix."""
        for name in await asyncio.to_thread(self._backend.list_names, prefix.rstrip("/")):
            yield name

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        match byte_range:
            case None:
                is_document = key.endswith("zarr.json")
                return self._backend.get(key, max_nbytes=_MAX_DOCUMENT_NBYTES if is_document else None)
            case RangeByteRequest(start=start, end=end):
                return self._backend.get_range(key, start, end - start)
            case SuffixByteRequest(suffix=suffix):
                return self._backend.get_range(key, -suffix, suffix)
            case OffsetByteRequest(offset=offset):
                size = self._backend.size(key)
                return None if size is None else self._backend.get_range(key, offset, max(size - offset, 0))
