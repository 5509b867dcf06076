"""What does the `zarr.json` of a group or an array say?

Documents are built here and not through `create_array`, which takes 2 ms of Python for each. They follow
the Zarr v3 specification, so every reader of Zarr walks a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ranktape.errors import RunFormatError

SCHEMA_VERSION = 1
"""Of the layout, the documents and the catalogue; readers refuse what is newer."""

SCHEMA_KEY = "ranktape_schema"
"""The attribute of a run's document that holds the schema version."""

_BYTES_CODEC = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC_CODEC = {"name": "crc32c"}


def encode_document(document: Mapping[str, Any]) -> bytes:
    """A document as JSON text.

    Raises:
        ValueError: a NaN or an infinity is in it, which JSON cannot hold.
    """
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def decode_document(data: bytes, *, place: str) -> dict[str, Any]:
    """The document in JSON text.

    Raises:
        RunFormatError: it is not the JSON of a Zarr v3 group or array.
    """
    try:
        document = json.loads(data)
    except ValueError as error:
        raise RunFormatError(f"{place} is not JSON ({error}): the store is damaged or is not a run") from error
    if not isinstance(document, dict) or document.get("zarr_format") != 3 or "node_type" not in document:  # noqa: PLR2004
        raise RunFormatError(f"{place} is not a Zarr v3 document: the store is damaged or is not a run")
    return document


def group_document(
    attributes: Mapping[str, Any], *, members: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """The document of a group; `members` are the documents below it, consolidated by their paths."""
    document: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    if members is not None:
        document["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": dict(members)}
    return document


def array_document(
    *,
    shape: Sequence[int],
    data_type: str,
    fill_value: Any,
    itemsize: int,
    inner_chunk: Sequence[int] | None,
    dimension_names: Sequence[str],
    attributes: Mapping[str, Any],
) -> dict[str, Any]:
    """The document of an array that lies in one object; with `inner_chunk` the object is a shard of such chunks.

    An extent of zero gives a chunk of one, as Zarr has no empty chunks; such an array has no object.
    """
    chunk = [max(1, extent) for extent in shape]
    # The bytes codec of one-byte types has no endianness.
    to_bytes = {"name": "bytes"} if itemsize == 1 else _BYTES_CODEC
    codecs: list[Mapping[str, Any]] = [to_bytes, _CRC_CODEC]
    if inner_chunk is not None:
        sharding = {
            "chunk_shape": list(inner_chunk),
            "codecs": codecs,
            "index_codecs": [_BYTES_CODEC, _CRC_CODEC],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill_value,
        "codecs": codecs,
        "attributes": dict(attributes),
        "dimension_names": list(dimension_names),
        "storage_transformers": [],
    }


def chunk_key(num_dims: int) -> str:
    """The key, below an array, of the one object that holds it."""
    return ".".join(["c", *["0"] * num_dims])
