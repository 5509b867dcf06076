"""Writes and reads the document of a group, which is all that there is of most groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ranktape.errors import ObjectTooLargeError, RunFormatError
from ranktape.storage.format.documents import decode_document, encode_document, group_document
from ranktape.storage.format.layout import document_key
from ranktape.storage.format.validation import Fields

if TYPE_CHECKING:
    from ranktape.storage.places.backend import Backend

MAX_DOCUMENT_NBYTES = 16 << 20
"""Of the document of a run, an attempt and what else is one of a kind."""

MAX_COMMIT_NBYTES = 128 << 20
"""Of the documents that grow with what was captured: commits, and markers, which name what was not captured."""


def write_group(backend: Backend, path: str, attributes: Mapping[str, Any]) -> bytes:
    """Write the document of the group at a path, and return it as it was written.

    Raises:
        StorageError: the store cannot be written.
    """
    key = document_key(path)
    document = encode_document(group_document(attributes), key=key)
    backend.put(key, [document])
    return document


def read_document(backend: Backend, path: str, *, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> bytes | None:
    """The text of the document of the group or array at a path; None where there is none.

    Raises:
        RunFormatError: it is larger than it can be.
        StorageError: the store cannot be read.
    """
    try:
        return backend.get(document_key(path), max_nbytes=max_nbytes)
    except ObjectTooLargeError as error:
        raise RunFormatError(str(error)) from error


def read_attributes(backend: Backend, path: str, *, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> dict[str, Any] | None:
    """What the document of the group or array at a path says; None where there is none.

    Raises:
        DataError: it is not what was written there.
        RunFormatError: it is not a document of Zarr, or larger than it can be.
        StorageError: the store cannot be read.
    """
    data = read_document(backend, path, max_nbytes=max_nbytes)
    if data is None:
        return None
    key = document_key(path)
    return dict(decode_document(data, place=f"{backend.url}/{key}", key=key).get("attributes", {}))


def read_fields(backend: Backend, path: str, *, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> Fields | None:
    """The same, each attribute to be taken as what it must be.

    Raises:
        DataError: it is not what was written there.
        RunFormatError: it is not a document of Zarr, or larger than it can be.
        StorageError: the store cannot be read.
    """
    attributes = read_attributes(backend, path, max_nbytes=max_nbytes)
    if attributes is None:
        return None
    return Fields(attributes, place=f"{backend.url}/{document_key(path)}")
