"""Reads from the name of a file and from the file itself what its tensor is.

Names come first, as they are what people see and change; what a name does not say is taken from what the tools before
us embedded, or from the record that our own export embedded under `RECORD_KEY`. A stranger may have written any of
it: what no record can hold ends the reading of that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ranktape.analyze.legacy.names import (
    LayerFile,
    LayerOutputName,
    TensorFileName,
    name_seconds,
    recorded_tensor_name,
)
from ranktape.analyze.legacy.payload import TensorFile
from ranktape.errors import DataError
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.record_info import MAX_TERM_LENGTH, Mode, Operation, is_parameter

RECORD_KEY = "ranktape"
"""Under which our export embeds the record among what it says of the tensor."""

TAGS = ("layer_type", "operation", "phase", "component", "quant_type", "tensor_name")
"""The fields of a record that are words; the legacy tool embeds them under the same names."""

NUMBERS = ("iteration", "rank", "layer_idx")
"""The fields of a record that are numbers, and that the legacy tool embeds."""

_SAID_ELSEWHERE = frozenset({*TAGS, *NUMBERS, "sample_idx", RECORD_KEY})
"""What is embedded and becomes fields of the record."""

_QUANT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The tags of plain types, for files that have none."""

LAST_SECOND = 253402300799
"""The end of the last year that has four digits, in seconds since the epoch."""

_MAX_NUMBER = 2**53
"""Numbers in files are whole and below this: a catalogue's columns hold them exactly."""

_OF_ALL_OUTPUTS = ("iteration", "rank", "microbatch", "call", "quant_type")
"""What our export says of the outputs of layers together."""

_HIDDEN_LAYOUT = "BTH"
"""The dimensions of the output of a layer."""

_UNTAGGED: dict[str, Any] = {
    "layer_type": "unknown",
    "operation": Operation.FORWARD.value,
    "phase": "unknown",
    "component": "unknown",
    "iteration": 0,
    "rank": 0,
    "layer_idx": -1,
}
"""What a file is taken for that says nothing."""


def given_fields(words: Any, *, stem: str) -> dict[str, Any]:
    """The fields of one output of a layer that the `metadata.pt` of its folder says; none that no record can hold.

    Our export writes those of all outputs together, and under `RECORD_KEY` those of each.
    """
    known = words if isinstance(words, Mapping) else {}
    of_each = known.get(RECORD_KEY)
    own = of_each.get(stem) if isinstance(of_each, Mapping) else None
    found = {name: known[name] for name in _OF_ALL_OUTPUTS if name in known}
    found |= own if isinstance(own, Mapping) else {}
    return {name: value for name, value in found.items() if name in _OWN_FIELDS and _OWN_FIELDS[name](value)}


def named_fields(
    file_name: TensorFileName | None, layer: LayerOutputName | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of the record that the file's name settles, so that the file need not be opened for them.

    What the name of the output of a layer does not say is what its folder gives for it.
    """
    if layer is not None:
        layer_type = "embedding" if layer.file is LayerFile.EMBEDDING else "hidden"
        fixed = {"layer_type": layer_type, "layer_idx": layer.layer_idx, "phase": "post", "tensor_name": "output"}
        return _UNTAGGED | {field: value for field, value in given.items() if field in _UNTAGGED} | fixed
    if file_name is None:
        return {}
    fields: dict[str, Any] = {tag: str(getattr(file_name, tag)) for tag in TAGS[:-1]}
    numbers = {number: getattr(file_name, number) for number in ("iteration", "rank")}
    fields |= {number: value for number, value in numbers.items() if value is not None}
    fields["layer_idx"] = -1 if file_name.layer_idx is None else file_name.layer_idx
    # A name of theirs that is another one of ours may stand in a file of ours, which says so inside.
    if recorded_tensor_name(file_name) == file_name.tensor_name:
        fields["tensor_name"] = file_name.tensor_name
    return fields


def described_fields(
    header: TensorFile,
    *,
    path: Path,
    file_name: TensorFileName | None,
    layer: LayerOutputName | None,
    said: Any,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Every field of the record but those that take its values, `overflow` and `checksum`, and `call`.

    `metadata` comes as JSON text. With `record_checksum` comes what our export says of the values, "" if nothing.

    Raises:
        DataError: the file says something that no record can hold.
    """
    known = header.metadata if isinstance(header.metadata, Mapping) else {}
    own = known.get(RECORD_KEY)
    stem = "".join(character if character.isprintable() else "?" for character in path.stem)
    fields: dict[str, Any] = {
        "microbatch": 0,
        "sample_dim": None,
        "sample_ids": None,
        "batch_size": None,
        "module": "",
        "layer_stack": "",
        "layout": "",
        "compute_dtype": header.dtype,
        "placement": None,
        "mode": Mode.TRAIN.value,
        "metadata": _rest(known, file_name, header, said),
        "counter": 0 if file_name is None else file_name.counter,
        "timestamp": 0.0 if file_name is None else name_seconds(file_name),
        "record_checksum": "",
        "quant_type": _QUANT_TYPES.get(header.dtype, header.dtype),
        "tensor_name": stem[:MAX_TERM_LENGTH] or "tensor",
        **_UNTAGGED,
        # What no record can hold of what the legacy tool embedded is left out.
        **{name: known[name] for name in (*TAGS, *NUMBERS) if name in known and _OWN_FIELDS[name](known[name])},
        **({} if file_name is None else {"tensor_name": recorded_tensor_name(file_name)}),
    }
    named = None if file_name is None else file_name.sample_idx
    sample_idx = known.get("sample_idx") if named is None else named
    if is_one := _is_number(sample_idx):
        fields["sample_ids"] = [sample_idx]
    fields |= _samples_of(known, header, layer, is_one=is_one, tensor_name=fields["tensor_name"])
    if isinstance(own, Mapping):
        fields |= _own_fields(own, header, place=path)
    elif given:
        rest = (given.get("metadata") or {}) | (fields["metadata"] or {}) or None
        fields |= _own_fields(given, header, place=path) | {"metadata": rest}
    fields["metadata"] = json.dumps(fields["metadata"], separators=(",", ":"))
    return fields | {"dtype": header.dtype, "shape": header.shape, "nbytes": header.nbytes}


def _rest(
    embedded: Mapping[str, Any], file_name: TensorFileName | None, header: TensorFile, said: Any
) -> dict[str, Any] | None:
    """What a file of somebody else says beyond the fields; the record's `metadata`."""
    rest = {key: value for key, value in embedded.items() if key not in _SAID_ELSEWHERE}
    if header.tensor_info is not None:
        rest["tensor_info"] = header.tensor_info
    if file_name is not None and file_name.group_idx is not None:
        rest["group_idx"] = file_name.group_idx
    if said is not None:
        rest["folder"] = said
    return rest or None


def _samples_of(
    embedded: Mapping[str, Any], header: TensorFile, layer: LayerOutputName | None, *, is_one: bool, tensor_name: str
) -> dict[str, Any]:
    """Where the samples of a tensor of somebody else are, and how many its batch has, as far as its shape shows it.

    Outputs of layers count them first. Of others the batch size is what the tool was told, else the smaller one of the
    two first dimensions of three or more: batches came first or second there, and the other one counts tokens or heads.
    """
    shape = header.shape
    if layer is not None:
        is_known = len(shape) == len(_HIDDEN_LAYOUT)
        return {"sample_dim": 0, "batch_size": shape[0], "layout": _HIDDEN_LAYOUT} if is_known else {}
    if is_parameter(tensor_name):
        return {}
    size = embedded.get("batch_size")
    if not _is_number(size):
        return {"batch_size": min(shape[:2])} if len(shape) >= len(_HIDDEN_LAYOUT) else {}
    dim = next((dim for dim in range(min(2, len(shape) - 1)) if shape[dim] == size), None)
    return {"sample_dim": None if is_one else dim, "batch_size": size}


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _is_term(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TERM_LENGTH and value.isprintable()


def _is_sample_ids(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(entry) in {int, str} for entry in value))


_OWN_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("iteration", "rank", "microbatch", "call", "counter"), _is_number),
    "layer_idx": lambda value: _is_number(value) or (type(value) is int and value == -1),
    **dict.fromkeys(("sample_dim", "batch_size"), lambda value: value is None or _is_number(value)),
    **dict.fromkeys(("layer_type", "phase", "component", "quant_type", "tensor_name"), _is_term),
    "operation": lambda value: value in tuple(Operation),
    "mode": lambda value: value in tuple(Mode),
    **dict.fromkeys(("module", "layer_stack", "record_checksum"), lambda value: isinstance(value, str)),
    # It becomes part of a name in the store.
    "layout": lambda value: isinstance(value, str) and re.fullmatch("[A-Za-z]{0,32}", value) is not None,
    "compute_dtype": lambda value: isinstance(value, str) and value in DTYPES,
    **dict.fromkeys(("placement", "metadata"), lambda value: value is None or isinstance(value, dict)),
    "sample_ids": _is_sample_ids,
    "timestamp": lambda value: type(value) in {int, float} and 0 <= value <= LAST_SECOND,
}
"""The fields that our export embeds, and what each may hold."""


def _own_fields(own: Mapping[str, Any], header: TensorFile, *, place: Path) -> dict[str, Any]:
    found = {field: own[field] for field in _OWN_FIELDS if field in own}
    for field, value in found.items():
        if not _OWN_FIELDS[field](value):
            raise DataError(f"{place} says {field}={str(value)[:60]!r} of its tensor, which no record can hold")
    dim = found.get("sample_dim")
    if dim is not None and dim >= len(header.shape):
        raise DataError(f"{place} says sample_dim={dim} of a tensor of {len(header.shape)} dimensions")
    ids = found.get("sample_ids")
    if dim is not None and ids is not None and len(ids) != header.shape[dim]:
        raise DataError(f"{place} names {len(ids)} samples of a tensor of {header.shape[dim]}")
    return found
