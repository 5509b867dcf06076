"""Compares catalogues, and finds ranks that hold the same tensor and disagree on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.storage.format.catalogue import COLUMNS, RecordTable, concatenate
from ranktape.storage.query.columns import StringColumn, values_of

if TYPE_CHECKING:
    from ranktape.storage.query.columns import Column

_REPLICATE = "replicate"
_PARTIAL = "partial"

WEIGHTS = frozenset({"weight", "bias"})
"""The names of tensors that all data-parallel ranks hold; others hold parts of them."""

_WHAT = ("rank", "site", "placement", "checksum", "tensor_name", "shape", "dtype", "keep")


def first_difference(parts: Sequence[RecordTable], whole: RecordTable) -> str:
    """Where the rows of some catalogues, taken together, are not those of another; empty where they are.

    The order of the rows does not count: records are told apart by rank and path.

    Raises:
        RunFormatError: a column is missing or damaged.
    """
    num_rows = sum(part.num_rows for part in parts)
    if num_rows != whole.num_rows:
        return f"{whole.num_rows} records instead of {num_rows}"
    ranks, sites = (_pair(name, parts, whole) for name in ("rank", "site"))
    orders = [np.lexsort((sites[side], ranks[side])) for side in (0, 1)]
    for name in COLUMNS:
        left, right = _pair(name, parts, whole)
        left, right = left[orders[0]], right[orders[1]]
        is_float = left.dtype.kind == "f" and right.dtype.kind == "f"
        differs = ~((left == right) | (np.isnan(left) & np.isnan(right)) if is_float else left == right)
        if differs.any():
            row = int(orders[1][int(np.flatnonzero(differs)[0])])
            text = f"{name} of {int(differs.sum())} records differs"
            return f"{text}, first of rank {_text(whole.column('rank'), row)} {_text(whole.column('site'), row)}"
    return ""


def differing_replicas(table: RecordTable) -> Iterator[tuple[str, bool, list[int]]]:
    """The tensors of an iteration whose copies on several ranks differ: path, whether they must agree, the ranks.

    Copies must agree where their placement says that they are replicas. A `weight` without a placement is a copy
    where training is data-parallel and a part where it is not: nobody knows, and so it need not agree.
    """
    columns = {name: values_of(table.column(name)) for name in _WHAT}
    keys: dict[str, str | None] = {}
    copies: dict[tuple[Any, ...], dict[int, Any]] = {}
    for row in range(table.num_rows):
        placement = columns["placement"][row]
        if placement not in keys:
            keys[placement] = replica_key(placement)
        must_agree = keys[placement] is not None
        if not must_agree and (placement != "null" or columns["tensor_name"][row] not in WEIGHTS):
            continue
        form = tuple(columns[name][row] for name in ("site", "shape", "dtype", "keep"))
        copy = copies.setdefault((*form, must_agree, keys[placement]), {})
        copy[int(columns["rank"][row])] = columns["checksum"][row]
    for (site, *_, must_agree, _), checksums in copies.items():
        if len(set(checksums.values())) > 1:
            yield site, must_agree, sorted(checksums)


def replica_key(placement: str) -> str | None:
    """What copies of one part of a tensor have in common, from the JSON of a placement; None where there are none.

    All of the placement but the coordinates along mesh axes over which the tensor is replicated. A sum that is
    not made yet (`partial`) has no copies.
    """
    document = json.loads(placement)
    if not isinstance(document, dict) or document.get(_PARTIAL):
        return None
    placements = document.get("placements")
    coordinates = document.get("coordinates")
    if not isinstance(placements, list) or not isinstance(coordinates, list) or len(placements) != len(coordinates):
        return None
    words = [str(word).lower() for word in placements]
    if any(word.startswith(_PARTIAL) for word in words) or not any(word.startswith(_REPLICATE) for word in words):
        return None
    fixed = [None if word.startswith(_REPLICATE) else at for word, at in zip(words, coordinates, strict=True)]
    return json.dumps({**document, "coordinates": fixed}, sort_keys=True)


def _pair(name: str, parts: Sequence[RecordTable], whole: RecordTable) -> list[np.ndarray[Any, Any]]:
    """A column of the parts and of the whole, as numbers that can be compared: texts by their place in one table."""
    column = concatenate([*(part.column(name) for part in parts), whole.column(name)])
    values = column.codes if isinstance(column, StringColumn) else column
    return [values[: len(values) - whole.num_rows], values[len(values) - whole.num_rows :]]


def _text(column: Column, row: int) -> str:
    return str(column.table[column.codes[row]] if isinstance(column, StringColumn) else column[row])
