"""Reads the tensor in a `.pt` file and its description, with `torch.load(weights_only=True)`.

Descriptions are read from a mapped file, so that the values of an archive stay on disk; files in the older format of
`torch.save` are read whole. Values are read into memory, and the checksums of the archive are verified, which torch
does not do. No memory is allocated for values that a file declares but does not contain.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError, StorageError
from ranktape.storage.format.dtypes import DTYPES, dtype_row

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

MAX_NBYTES = 1 << 22
"""The largest size of an archive's pickle, in bytes. Those that describe one tensor take hundreds of bytes."""

MAX_FOLDER_CHARACTERS = 1 << 20
"""The largest length of a folder's description, which is repeated in each of its records."""

MAX_CHARACTERS = 1 << 24
"""The largest length of a description. A small pickle can refer to one long text many times."""

MAX_NODES, MAX_DEPTH = 100_000, 64
"""The largest number of values in a description, and its deepest nesting; self-references would be endless."""

MAX_DIMENSIONS = 32
"""The largest number of dimensions: more than any trained tensor has. NumPy allows 64."""

MAX_EXTENT = 2**62
"""The largest product of a shape's dimensions, with empty ones counted as 1."""

MAX_LISTED = 1 << 14
"""The largest tensor in a folder's description that is listed, in elements, such as the tokens of a prompt."""

_LARGE_NBYTES = 1 << 26
"""Files above this size, in bytes, are read whole one at a time, not one in each thread, to limit memory."""

_large = threading.Lock()

_ARCHIVE_MAGIC, _OLDER_MAGIC = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """The description of the tensor in a file, without its values."""

    dtype: str
    """Name of the torch dtype."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    metadata: Any
    """The entry `metadata` of the file, as JSON data; None if there is none."""
    tensor_info: Any
    """The entry `tensor_info` of the file, as JSON data; None if there is none."""
    allow_longer_lists: bool
    """Whether the tensor can be the first of several entries of a list."""

    @property
    def nbytes(self) -> int:
        """Size of the contiguous values, in bytes."""
        return math.prod(self.shape) * dtype_row(self.dtype).itemsize


def read_header(path: Path, *, allow_longer_lists: bool = False) -> TensorFile:
    """Read the description of the tensor in a file.

    The file contains a tensor, a list of one, or a dictionary with one under `tensor`. If `allow_longer_lists`, it can
    also be a longer list that starts with a tensor.
    """
    payload, largest = _load(path, is_mapped=True)
    tensor = _tensor_of(payload, path, allow_longer_lists=allow_longer_lists)
    _check_held(tensor, largest, path)
    described = payload if isinstance(payload, dict) else {}
    return TensorFile(
        dtype=_dtype_of(tensor),
        shape=tuple(tensor.shape),
        metadata=plain(described.get("metadata"), path),
        tensor_info=plain(described.get("tensor_info"), path),
        allow_longer_lists=allow_longer_lists,
    )


def read_plain(path: Path) -> Any:
    """Read a file of plain data as JSON data.

    A tensor of at most `MAX_LISTED` real numbers becomes `{"tensor": dtype, "shape": [...], "values": [...]}`, with NaN
    and infinities as texts; any other tensor becomes a text with its dtype and shape.
    """

    def listed(tensor: torch.Tensor) -> dict[str, Any] | None:
        if tensor.numel() > MAX_LISTED or tensor.is_complex():
            return None
        _check_held(tensor, largest, path)
        numbers = (tensor.double() if tensor.is_floating_point() else tensor).reshape(-1).tolist()
        finite = [number if math.isfinite(number) else str(number) for number in numbers]
        return {"tensor": _dtype_of(tensor), "shape": list(tensor.shape), "values": finite}

    payload, largest = _load(path, is_mapped=True)
    return plain(payload, path, max_characters=MAX_FOLDER_CHARACTERS, listed=listed)


def read_values(path: Path, header: TensorFile) -> NDArray[Any]:
    """The values of the tensor that `header` describes, as a read-only array.

    Raises:
        DataError: the file is damaged, or has changed since the header was read.
        StorageError: the file cannot be read.
    """
    import torch

    payload, _ = _load(path)
    tensor = _tensor_of(payload, path, allow_longer_lists=header.allow_longer_lists)
    if (_dtype_of(tensor), tuple(tensor.shape)) != (header.dtype, header.shape):
        raise DataError(f"{path} has changed since it was listed: it is still being written, or was replaced")
    dtype = dtype_row(header.dtype).numpy_dtype
    # A view of a larger tensor is copied, so that the rest is not kept in memory.
    is_part = not tensor.is_contiguous() or tensor.untyped_storage().nbytes() > header.nbytes
    flat = tensor.detach().clone(memory_format=torch.contiguous_format) if is_part else tensor.detach()
    values: NDArray[np.generic] = flat.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(header.shape)
    values.flags.writeable = False
    return values


def _load(path: Path, *, is_mapped: bool = False) -> tuple[Any, int | None]:
    """The contents of a file, and the size of the largest storage of an archive, in bytes; None for the older format.

    If `is_mapped`, the values of an archive are not read.
    """
    try:
        # Opening a named pipe would block.
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - a Path that is no file has no better one
            raise DataError(f"{path} is not a file")
        with path.open("rb") as file:
            head = file.read(len(_OLDER_MAGIC))
        is_archive = head.startswith(_ARCHIVE_MAGIC)
        if not is_archive and head != _OLDER_MAGIC:
            what = "is empty" if not head else "was not written by torch.save"
            raise DataError(f"{path} {what}: it begins with {head[:8]!r}")
        largest = _check_archive(path, with_values=not is_mapped) if is_archive else None
        # torch cannot map a file whose name is not UTF-8.
        has_utf8_name = str(path).encode(errors="replace").decode() == str(path)
        if is_mapped and is_archive and has_utf8_name:
            return _loaded(path, is_mapped=True), largest
        with _large if path.stat().st_size > _LARGE_NBYTES else nullcontext():
            return _loaded(path, is_mapped=False), largest
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_archive(path: Path, *, with_values: bool) -> int:
    """Check that an archive is not compressed and, if `with_values`, that its checksums match.

    Returns the size of the largest storage, in bytes.

    Raises:
        DataError: the archive is compressed or damaged, or its pickle is too long.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise DataError(f"{path} cannot be read: {member.filename[:100]!r} in it is compressed")
                if member.filename.endswith("/data.pkl") and member.file_size > MAX_NBYTES:
                    raise DataError(f"{path} cannot be read: its pickle is longer than {MAX_NBYTES} bytes")
            if with_values and archive.testzip() is not None:
                raise DataError(f"the values in {path} are damaged: they do not match the checksum of the archive")
            return max((one.file_size for one in archive.infolist() if "/data/" in one.filename), default=0)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} is damaged or truncated: it starts like an archive of torch.save, but does not end like one"
        ) from error


def _loaded(path: Path, *, is_mapped: bool) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except MemoryError as error:
        raise DataError(f"{path} cannot be read: there is not enough memory for the tensor that it declares") from error
    except OSError:
        raise
    except Exception as error:  # an untrusted pickle can raise anything
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{path} cannot be read: it is damaged, or contains something other than dense tensors and plain data; "
            f"none of its code was executed ({reason})"
        ) from error


def _check_held(tensor: torch.Tensor, largest: int | None, path: Path) -> None:
    """Check that a tensor's declared storage fits into a member of the archive, which torch does not check."""
    if tensor.numel() and largest is not None and tensor.untyped_storage().nbytes() > largest:
        raise DataError(f"{path} is damaged or truncated: it contains fewer values than it declares")


def _tensor_of(payload: Any, path: Path, *, allow_longer_lists: bool) -> torch.Tensor:
    """The tensor in the contents of a file.

    Raises:
        DataError: there is not exactly one tensor, or its layout, dtype or shape is not supported.
    """
    import torch

    is_list = isinstance(payload, list | tuple)
    found = payload.get("tensor") if isinstance(payload, dict) else payload
    if is_list and (len(payload) == 1 or (allow_longer_lists and payload)):
        found = payload[0]
    if not isinstance(found, torch.Tensor):
        what = f"{len(payload)} values" if is_list else f"a {type(payload).__name__}"
        if isinstance(payload, dict):
            named = ", ".join(str(name)[:40] for name in list(payload)[:8] if isinstance(name, str))
            what = f"a dictionary of {named or 'nothing'}, without a tensor under 'tensor'"
        raise DataError(f"{path} contains {what}: give files that contain one tensor each")
    if found.is_conj() or found.is_neg():
        raise DataError(f"{path} cannot be read: its tensor is conjugated; save tensor.resolve_conj().resolve_neg()")
    is_dense = found.layout is torch.strided and found.device.type == "cpu" and not found.is_quantized
    if not is_dense or found.is_nested or _dtype_of(found) not in DTYPES or found.dim() > MAX_DIMENSIONS:
        kind = f"{_dtype_of(found)}, {found.layout}, {found.device.type}, {found.dim()} dimensions"
        raise DataError(f"{path} cannot be read: its tensor is not dense, or has an unsupported type ({kind})")
    if math.prod(max(1, count) for count in found.shape) > MAX_EXTENT:
        raise DataError(f"{path} declares {found.dim()} dimensions with {max(found.shape)} elements in one of them")
    # In an expanded view, one element represents many, and memory would be allocated for all of them.
    if found.numel() * found.element_size() > found.untyped_storage().nbytes():
        raise DataError(
            f"{path} declares {found.numel()} elements and contains fewer: save tensor.contiguous(), or it is damaged"
        )
    return found


def _dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def plain(
    value: Any,
    path: Path,
    *,
    max_characters: int = MAX_CHARACTERS,
    listed: Callable[[torch.Tensor], Any] = lambda _: None,
) -> Any:
    """Convert a value to JSON data: dictionaries with text keys, lists, texts and numbers; NaN and Inf become texts.

    A tensor becomes the result of `listed`, as long as half of the characters are not used yet; otherwise a text.

    Raises:
        DataError: the value is too large, or refers to itself.
    """
    import torch

    num_nodes = num_characters = 0

    def counted(text: str) -> str:
        nonlocal num_characters
        num_characters += len(text)
        if num_characters > max_characters:
            raise DataError(f"the description of the tensor in {path} is longer than {max_characters} characters")
        return text

    def convert(entry: Any, depth: int) -> Any:
        nonlocal num_nodes
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise DataError(
                f"the description of the tensor in {path} has more than {MAX_NODES} values or contains itself"
            )
        if isinstance(entry, dict):
            return {counted(str(key)): convert(inner, depth + 1) for key, inner in entry.items()}
        if isinstance(entry, torch.Tensor):
            has_room = num_characters + 26 * entry.numel() <= max_characters // 2
            known = listed(entry) if has_room else None
            text = counted(f"tensor {_dtype_of(entry)}{list(entry.shape)}" if known is None else json.dumps(known))
            return text if known is None else known
        if isinstance(entry, list | tuple | set):
            return [convert(inner, depth + 1) for inner in entry]
        text = counted(str(entry))
        is_plain = entry is None or isinstance(entry, int) or (isinstance(entry, float) and math.isfinite(entry))
        return entry if is_plain else text

    return convert(value, 0)
