"""Which records are in an iteration, as columns that can be filtered without parsing a document for each?

The catalogue of an iteration is an npz archive: one array for each field, strings as codes into a table.
Fields are read from the archive when a question first needs them. It is stored as an array of bytes, so
that plain Zarr can read it too.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.errors import RunFormatError
from ranktape.storage.columns import StringColumn
from ranktape.storage.record import EXTREMES, TALLY_KINDS, Overflow, RecordInfo, Tally

if TYPE_CHECKING:
    from ranktape.storage.columns import Column

INT_FIELDS = ("iteration", "rank", "attempt", "microbatch", "call", "layer_idx", "counter", "nbytes")
OPTIONAL_INT_FIELDS = ("sample_dim", "batch_size")
STRING_FIELDS = (
    "module",
    "layer_type",
    "operation",
    "phase",
    "component",
    "quant_type",
    "tensor_name",
    "dtype",
    "layout",
    "compute_dtype",
)
JSON_FIELDS = ("shape", "sample_ids", "placement", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record as a rank committed it."""

    path: str
    """The array's path below the run."""
    info: RecordInfo
    """What is known of it."""


def _tally_count(kind: str) -> Callable[[Entry], int]:
    return lambda entry: int(getattr(entry.info.overflow, kind).count)


def _extreme(name: str) -> Callable[[Entry], float]:
    def value(entry: Entry) -> float:
        extreme = getattr(entry.info.overflow, name)
        return float("nan") if extreme is None else float(extreme)

    return value


def _field(name: str) -> Callable[[Entry], Any]:
    return lambda entry: getattr(entry.info, name)


def _optional(name: str) -> Callable[[Entry], float]:
    def value(entry: Entry) -> float:
        number = getattr(entry.info, name)
        return float("nan") if number is None else float(number)

    return value


def _json(name: str) -> Callable[[Entry], str]:
    return lambda entry: json.dumps(getattr(entry.info, name), separators=(",", ":"))


def _numel(entry: Entry) -> int:
    count = 1
    for extent in entry.info.shape:
        count *= extent
    return count


_NUMBERS: dict[str, tuple[Any, Callable[[Entry], Any]]] = {
    **{name: (np.int64, _field(name)) for name in INT_FIELDS},
    **{name: (np.float64, _optional(name)) for name in OPTIONAL_INT_FIELDS},
    "numel": (np.int64, _numel),
    "timestamp": (np.float64, _field("timestamp")),
    "checksum": (np.uint32, lambda entry: int(entry.info.checksum.partition(":")[2], 16)),
    **{f"overflow.{kind}.count": (np.int64, _tally_count(kind)) for kind in TALLY_KINDS},
    **{f"overflow.{name}": (np.float64, _extreme(name)) for name in EXTREMES},
}
"""Columns of numbers as stored: the dtype and how an entry gives its value."""

_STRINGS: dict[str, Callable[[Entry], str]] = {
    **{name: _field(name) for name in STRING_FIELDS},
    **{name: _json(name) for name in JSON_FIELDS},
    "overflow.per_sample": lambda entry: json.dumps(entry.info.overflow.per_sample, separators=(",", ":")),
    "path": lambda entry: entry.path,
}
"""Columns of strings as stored: how an entry gives its value."""

_DERIVED = (*(f"overflow.{kind}.ratio" for kind in TALLY_KINDS), "overflow.total", "overflow.ratio")

COLUMNS = (*_NUMBERS, *_STRINGS, *_DERIVED)
"""The names that filters may use."""

_CODES = "codes:"
_TABLE = "table:"


def encode_catalogue(entries: Sequence[Entry]) -> bytes:
    """The npz archive that holds the entries as columns, in their order."""
    arrays: dict[str, np.ndarray[Any, Any]] = {
        name: np.array([value(entry) for entry in entries], dtype=dtype) for name, (dtype, value) in _NUMBERS.items()
    }
    for name, text in _STRINGS.items():
        codes: dict[str, int] = {}
        arrays[_CODES + name] = np.array(
            [codes.setdefault(text(entry), len(codes)) for entry in entries], dtype=np.uint32
        )
        arrays[_TABLE + name] = np.frombuffer(json.dumps(list(codes)).encode(), dtype=np.uint8)
    archive = io.BytesIO()
    np.savez_compressed(archive, allow_pickle=False, **arrays)
    return archive.getvalue()


class Catalogue:
    """The records of one iteration as columns; a column is unpacked when it is first asked for."""

    def __init__(self, data: bytes, *, place: str) -> None:
        self._place = place
        self._columns: dict[str, Column] = {}
        try:
            self._archive = np.load(io.BytesIO(data), allow_pickle=False)
            self.num_rows = len(self._archive["iteration"])
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise RunFormatError(f"the catalogue {place} is damaged: {error}: see 'ranktape status'") from error

    def column(self, name: str) -> Column:
        """The values of a column of `COLUMNS`, one for each record."""
        if name not in self._columns:
            self._columns[name] = self._load(name)
        return self._columns[name]

    def _load(self, name: str) -> Column:
        if name in _DERIVED:
            return self._derive(name)
        try:
            if name in _STRINGS:
                table = json.loads(self._archive[_TABLE + name].tobytes())
                return StringColumn(codes=self._archive[_CODES + name], table=table)
            return self._archive[name]  # type: ignore[no-any-return]
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise RunFormatError(f"column {name} of the catalogue {self._place} is damaged: {error}") from error

    def _derive(self, name: str) -> Column:
        total = name in {"overflow.total", "overflow.ratio"}
        kinds = ("upper", "lower") if total else (name.split(".")[1],)
        counts = sum((self._numbers(f"overflow.{kind}.count") for kind in kinds), start=np.int64(0))
        ratios: np.ndarray[Any, Any] = counts / np.maximum(self._numbers("numel"), 1)
        return np.asarray(counts) if name == "overflow.total" else ratios

    def _numbers(self, name: str) -> np.ndarray[Any, Any]:
        column = self.column(name)
        assert not isinstance(column, StringColumn), name
        return column


def empty_catalogue() -> Catalogue:
    """No records, and yet every column of `COLUMNS` in its type."""
    return Catalogue(encode_catalogue([]), place="of no iteration")


def concatenate(columns: Iterable[Column]) -> Column:
    """The rows of several columns of one name, one after the other; strings share one table."""
    texts: list[StringColumn] = []
    numbers: list[np.ndarray[Any, Any]] = []
    for column in columns:
        if isinstance(column, StringColumn):
            texts.append(column)
        else:
            numbers.append(column)
    if not texts:
        return np.concatenate(numbers) if numbers else np.empty(0, dtype=np.int64)
    codes: dict[str | None, int] = {}
    rows = []
    for text_column in texts:
        renumber = np.array([codes.setdefault(text, len(codes)) for text in text_column.table], dtype=np.uint32)
        rows.append(renumber[text_column.codes] if len(text_column) else text_column.codes)
    return StringColumn(codes=np.concatenate(rows), table=list(codes))


def record_info(value: Callable[[str], Any]) -> RecordInfo:
    """The identity of the record for which `value` gives each column's value."""
    numel = value("numel")

    def tally(kind: str) -> Tally:
        count = int(value(f"overflow.{kind}.count"))
        return Tally(count=count, ratio=count / numel if numel else 0.0)

    def optional(name: str) -> float | None:
        number = float(value(name))
        return None if np.isnan(number) else number

    parts: dict[str, Any] = {name: optional(f"overflow.{name}") for name in EXTREMES}
    parts |= {kind: tally(kind) for kind in TALLY_KINDS}
    numbers: dict[str, Any] = {name: int(value(name)) for name in INT_FIELDS}
    for name in OPTIONAL_INT_FIELDS:
        number = optional(name)
        numbers[name] = None if number is None else int(number)
    documents = {name: json.loads(value(name)) for name in JSON_FIELDS}
    documents["shape"] = tuple(documents["shape"])
    return RecordInfo(
        **numbers,
        **{name: value(name) for name in STRING_FIELDS},
        **documents,
        overflow=Overflow(**parts, per_sample=json.loads(value("overflow.per_sample"))),
        timestamp=float(value("timestamp")),
        checksum=f"crc32c:{int(value('checksum')):08x}",
    )
