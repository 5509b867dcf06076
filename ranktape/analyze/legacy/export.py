"""Writes records as `.pt` files that legacy tools can read, and that can be read back without loss.

Each file appears under its name only once it is complete. Names are escaped so that none leaves the folder. An existing
file with the same content is not written again, so an interrupted export can be repeated.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.console import writing
from ranktape.analyze.legacy.files import LAST_SECOND, RECORD_KEY
from ranktape.analyze.legacy.names import (
    METADATA,
    STATISTICS,
    TensorFileName,
    format_layer_output_name,
    format_tensor_file_name,
    name_timestamp,
)
from ranktape.analyze.legacy.payload import read_header, read_plain, read_values
from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.errors import DataError, NoRecordsError, StorageError, UsageError
from ranktape.storage.format.arrays import checksum
from ranktape.storage.format.dtypes import DTYPES, dtype_row, to_torch
from ranktape.storage.format.record_info import Keep, Operation, Overflow

if TYPE_CHECKING:
    import torch

    from ranktape.storage.records.record import Record
    from ranktape.storage.records.records import Records

_NOT_EMBEDDED = ("overflow", "checksum", "keep", "dtype", "shape", "nbytes", "attempt")
"""Fields of a record that its file contains elsewhere."""

_PART = 1 << 20
"""Number of values that are converted to float64 at once."""

_COUNTER_STEP = 10**9
"""Added to a record's counter if its name is taken, since a restart counts from 0 again."""


class ExportForm(enum.StrEnum):
    """The kind of files to write: the choices of `--form`."""

    TENSORS = "tensors"
    """One file for each tensor, with tags in its name."""
    LAYERS = "layers"
    """One file for the output of each layer, and a file of statistics."""


@dataclass(slots=True)
class ExportReport:
    """The result of an export."""

    num_written: int = 0
    """Number of files written."""
    num_kept: int = 0
    """Number of files that already existed with the same content."""
    nbytes: int = 0
    """Size of the values in the written files, in bytes."""


def export_records(
    records: Records,
    folder: Path,
    *,
    form: ExportForm = ExportForm.TENSORS,
    per_sample: bool = False,
    overwrite: bool = False,
    on_record: Callable[[], object] = lambda: None,
) -> ExportReport:
    """Write the tensors of records into a folder, which is created if needed; call `on_record` after each.

    If `per_sample` is true, a tensor with samples becomes one file per sample, each a batch of one.

    Raises:
        UsageError: the values of a record are not stored; a name is too long for a file; a file exists with other
            content, and `overwrite` is false; or two records are the output of the same layer.
        NoRecordsError: the form is that of layers, and no record is the output of a layer.
        DataError: a record is damaged.
        StorageError: the folder cannot be written, or the store cannot be read.
    """
    for keep in (Keep.HISTOGRAM, Keep.STATISTICS):
        reduced = records.where(f"keep == '{keep}'")
        if len(reduced):
            way_out = "no record stores values, so there is nothing to export"
            if len(records.where(f"keep == '{Keep.VALUES}'")):
                way_out = "leave them out with --where \"keep == 'values'\""
            raise UsageError(f"{len(reduced)} records store only {keep}, such as {reduced[0]!r}: {way_out}")
    files = _Files(folder, overwrite=overwrite)
    if form is ExportForm.LAYERS:
        _export_layers(records, files, on_record=on_record)
        return files.report
    names: set[str] = set()
    for record in records:
        values = record.read()
        dim = record.sample_dim if per_sample else None
        for sample in [None] if dim is None else range(record.shape[dim]):
            # The sample stays a batch of one, as the legacy tools saved it, so that axes keep their numbers.
            part = values if sample is None else values.take([sample], axis=dim)
            name = _file_name(record, sample=sample, names=names)
            files.put(name, part, record=record, description=_embedded(record, part, sample=sample))
        on_record()
    return files.report


def _file_name(record: Record, *, sample: int | None, names: set[str]) -> str:
    """A file name that is not in `names`, to which it is added.

    It contains the index of the sample in the tensor, or the user's ID if the tensor is a single sample.
    """
    if not 0 <= record.timestamp <= LAST_SECOND:
        raise DataError(f"{record!r} has the timestamp {record.timestamp} s, which a file name cannot represent")
    only = _only(record.sample_ids)
    shared = ("iteration", "layer_type", "phase", "component", "quant_type", "rank", "tensor_name")
    fields: dict[str, Any] = {field: getattr(record, field) for field in shared} | {
        "timestamp": name_timestamp(record.timestamp),
        "layer_idx": None if record.layer_idx < 0 else record.layer_idx,
        "operation": Operation(record.operation),
        "sample_idx": only if sample is None and type(only) is int and only >= 0 else sample,
    }
    counter = record.counter
    while (name := format_tensor_file_name(TensorFileName(**fields, counter=counter))) in names:
        counter += _COUNTER_STEP
    names.add(name)
    return name


def _only(ids: Sequence[Any] | None) -> Any:
    """The only sample ID; None if there is not exactly one."""
    return ids[0] if ids is not None and len(ids) == 1 else None


def _embedded(record: Record, values: Any, *, sample: int | None = None) -> dict[str, Any]:
    """The record as embedded in the file under `RECORD_KEY`."""
    fields = {name: value for name, value in record.info.to_json().items() if name not in _NOT_EMBEDDED}
    fields["record_checksum"] = checksum(values)
    if sample is not None:
        ids, placement = record.sample_ids or [], None
        dim, size = record.sample_dim, [record.shape[record.sample_dim or 0]]
        shape = None if record.placement is None else record.placement.get("global_shape")
        # If ranks have different samples, a single sample is complete on one rank.
        if (
            record.placement is not None
            and dim is not None
            and isinstance(shape, list)
            and shape[dim : dim + 1] == size
        ):
            placement = {**record.placement, "global_shape": [*shape[:dim], 1, *shape[dim + 1 :]]}
        only = ids[sample] if sample < len(ids) else sample
        fields |= {"sample_ids": [only], "batch_size": 1, "placement": placement}
    return fields


def _words(record: Record, values: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """The description that the legacy tool saved with a tensor."""
    shared = ("layer_type", "operation", "quant_type", "tensor_name", "layer_idx", "phase", "component", "rank")
    date, time = name_timestamp(record.timestamp).split("_")
    return {
        "tensor_info": _tensor_info(record.dtype, values, measure(values, sample_dim=None)),
        "metadata": {
            **(record.metadata or {}),
            **{name: getattr(record, name) for name in shared},
            "iteration": record.iteration,
            "sample_idx": _only(own["sample_ids"]),
            "save_time": f"{date[:4]}-{date[4:6]}-{date[6:]} {time[:2]}:{time[2:4]}:{time[4:]}",
            RECORD_KEY: dict(own),
        },
    }


def _tensor_info(dtype: str, values: Any, overflow: Overflow) -> dict[str, Any]:
    mean, deviation = _mean_and_deviation(np.abs(values) if dtype_row(dtype).is_complex else values)
    return {
        "shape": list(values.shape),
        "dtype": f"torch.{dtype}",
        "device": "cpu",
        "requires_grad": False,
        "is_leaf": True,
        "min": 0.0 if overflow.minimum is None else overflow.minimum,
        "max": 0.0 if overflow.maximum is None else overflow.maximum,
        "mean": mean,
        "std": deviation,
        "overflow_info": {
            "upper_overflow_count": overflow.upper.count,
            "lower_overflow_count": overflow.lower.count,
            "upper_overflow_ratio": overflow.upper.ratio,
            "lower_overflow_ratio": overflow.lower.ratio,
            "total_overflow_ratio": overflow.ratio,
        },
    }


def _mean_and_deviation(values: Any) -> tuple[float, float]:
    """The mean and sample standard deviation of all values, including NaN, as in the legacy tool; 0 if too few."""
    flat = np.ascontiguousarray(values).reshape(-1)
    parts = [flat[start : start + _PART] for start in range(0, flat.size, _PART)]
    # float64 can represent sums of squares of all narrower dtypes; for its own largest values, they are infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        mean = sum(float(part.astype(np.float64).sum()) for part in parts) / max(1, flat.size)
        squares = sum(float(((part.astype(np.float64) - mean) ** 2).sum()) for part in parts)
    return mean, math.sqrt(squares / (flat.size - 1)) if flat.size > 1 else 0.0


def _export_layers(records: Records, files: _Files, *, on_record: Callable[[], object]) -> None:
    chosen = _layer_outputs(records)
    statistics: dict[str, dict[str, Any]] = {}
    of_each: dict[str, dict[str, Any]] = {}
    for stem, record in chosen.items():
        values = record.read()
        files.put(f"{stem}.pt", values, record=record, description=None)
        overflow = measure(values, sample_dim=None)
        info = _tensor_info(record.dtype, values, overflow)
        statistics[stem] = {
            **{key: info[key] for key in ("shape", "dtype", "min", "max", "mean", "std")},
            "has_nan": overflow.nan.count > 0,
            "has_inf": overflow.inf.count > 0,
        }
        rest = {key: value for key, value in (record.metadata or {}).items() if key != "folder"}
        of_each[stem] = _embedded(record, values) | {"metadata": rest or None}
        # The checksum is omitted because files can be combined from several folders.
        del of_each[stem]["record_checksum"]
        on_record()
    files.put_plain(STATISTICS, statistics)
    # The metadata of the folder that the records come from, if it is the same for all.
    first, *others = [((record.metadata or {}).get("folder") or {}).get("metadata") for record in chosen.values()]
    folder = first if isinstance(first, dict) and all(one == first for one in others) else {}
    record = next(iter(chosen.values()))
    of_all = {name: getattr(record, name) for name in ("iteration", "rank", "microbatch", "call", "quant_type")}
    files.put_plain(METADATA, {**folder, "num_outputs": len(chosen), **of_all, RECORD_KEY: of_each})


def _layer_outputs(records: Records) -> dict[str, Record]:
    """The outputs of layers by file stem.

    Raises:
        NoRecordsError: there is none.
        UsageError: a hidden layer has no index, or two records are the output of the same layer.
    """
    outputs = records.where("layer_type in ['embedding', 'hidden'] and operation == 'forward' and phase == 'post'")
    outputs = outputs.where("tensor_name == 'output'")
    if not len(outputs):
        raise NoRecordsError(
            f"none of {len(records)} records is the output of an embedding or of a decoder layer "
            f"(layer_type embedding or hidden, forward, post): use --form tensors"
        )
    chosen: dict[str, Record] = {}
    # Prefers the input of the first layer over the embeddings that a model adds up to it, such as positions.
    enters = bool(len(outputs.where("layer_type == 'embedding' and component == 'hidden'")))
    for record in outputs:
        is_hidden = record.layer_type == "hidden"
        if enters and not is_hidden and record.component != "hidden":
            continue
        if is_hidden and record.layer_idx < 0:
            raise UsageError(f"layer {record.layer_idx} has no output file: layers count from 0")
        name = format_layer_output_name(record.layer_idx if is_hidden else -1)
        stem = name.removesuffix(".pt")
        if stem in chosen:
            raise UsageError(
                f"{chosen[stem]!r} and {record!r} are both {name}: choose one with --iteration, --rank, --microbatch, "
                f"--module and --call"
            )
        chosen[stem] = record
    return chosen


class _Files:
    """A folder in which files appear only once they are complete."""

    def __init__(self, folder: Path, *, overwrite: bool) -> None:
        self.report = ExportReport()
        """The result so far."""
        self._folder, self._overwrite = folder, overwrite
        with writing(folder, what="folder", option="folder"):
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, values: Any, *, record: Record, description: Mapping[str, Any] | None) -> None:
        """Write a file with a tensor and, unless `description` is None, with the legacy metadata that contains it."""
        embedded = None if description is None else json.loads(json.dumps(description))

        def is_same(path: Path) -> bool:
            header = read_header(path)
            existing = header.metadata.get(RECORD_KEY) if isinstance(header.metadata, dict) else None
            is_alike = existing == embedded and header.shape == values.shape
            return is_alike and checksum(read_values(path, header)) == checksum(values)

        if not self._is_there(name, is_same):
            tensor = as_tensor(values, record.dtype)
            self._write(
                name, tensor if description is None else {"tensor": tensor, **_words(record, values, description)}
            )
            self.report.nbytes += values.nbytes

    def put_plain(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a file of plain data, in which tensors that `read_plain` lists become tensors again."""
        same = json.loads(json.dumps(document), parse_constant=lambda text: str(float(text)))
        if not self._is_there(name, lambda path: read_plain(path) == same):
            self._write(name, with_tensors(dict(document)))

    def _is_there(self, name: str, is_same: Callable[[Path], bool]) -> bool:
        path = self._folder / name
        if not os.path.lexists(path):
            return False
        with contextlib.suppress(DataError):  # an unreadable file differs
            if not path.is_symlink() and is_same(path):
                self.report.num_kept += 1
                return True
        if self._overwrite:
            return False
        raise UsageError(f"{path} already exists with other content: add --overwrite, or choose another folder")

    def _write(self, name: str, payload: Any) -> None:
        import torch

        temporary = self._folder / f".ranktape-{secrets.token_hex(8)}.partial"
        try:
            with temporary.open("xb") as file:
                torch.save(payload, file)
            temporary.replace(self._folder / name)
        except (OSError, RuntimeError) as error:
            # If the disk is full, torch raises its own error from that of the system.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise StorageError(f"{self._folder / name} cannot be written: {cause.strerror or cause}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        self.report.num_written += 1


def as_tensor(values: Any, dtype: str) -> torch.Tensor:
    """The values as a tensor; `dtype` is the name of a torch dtype.

    Raises:
        UsageError: torch has no such dtype.
    """
    try:
        return to_torch(values, dtype=dtype, shape=values.shape)
    except UsageError as error:
        raise UsageError(f"torch has no dtype {dtype}: leave such records out with --dtype or --where") from error


def with_tensors(entry: Any) -> Any:
    """The data with tensors in place of the dictionaries with which `read_plain` represents them."""
    if isinstance(entry, list):
        return [with_tensors(inner) for inner in entry]
    if not isinstance(entry, dict):
        return entry
    if entry.keys() != {"tensor", "shape", "values"}:
        return {key: with_tensors(inner) for key, inner in entry.items()}
    row = DTYPES.get(str(entry["tensor"]))
    if row is None or not isinstance(entry["values"], list) or not isinstance(entry["shape"], list):
        return entry
    try:
        numbers = [float(number) for number in entry["values"]] if row.is_floating else entry["values"]
        return as_tensor(np.array(numbers).astype(row.numpy_dtype).reshape(entry["shape"]), row.name)
    except (TypeError, ValueError, OverflowError, UsageError):
        return entry  # it looks like a tensor, but is not one
