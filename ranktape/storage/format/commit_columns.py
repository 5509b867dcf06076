"""The records that the documents of a rank's commit describe, as columns."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.storage.format.catalogue import SOURCES, check_numbers, encode_text
from ranktape.storage.format.layout import CATALOGUE
from ranktape.storage.format.record_info import EXTREMES
from ranktape.storage.format.site_paths import Site, site_path

if TYPE_CHECKING:
    from ranktape.storage.query.columns import Column

_SITE_FIELDS = tuple(field.name for field in dataclasses.fields(Site))


def commit_columns(members: Mapping[str, Any]) -> dict[str, Any]:
    """Every stored column of a catalogue, from the documents of a commit's arrays; in the order of recording.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: a document is none of ours.
    """
    described = [_Described.of(name, member) for name, member in members.items() if _holds_records(name, member)]
    fields: dict[str, list[Any]] = {
        name: [value for one in described for value in one.values(source.path.split(".")[1:], convert=_converter(name))]
        for name, source in SOURCES.items()
        if source.path.startswith("info.")
    }
    fields["stack"] = [one.stack for one in described for _ in one.captures]
    fields["index"] = [index if one.stack else -1 for one in described for index in range(len(one.captures))]
    names = [one.site for one in described for _ in one.captures]
    sites = map(_site_path, *(fields[name] for name in _SITE_FIELDS))
    fields["site"] = [name or site for name, site in zip(names, sites, strict=True)]
    order = sorted(range(len(names)), key=lambda row: (fields["counter"][row], fields["site"][row]))
    if order != list(range(len(names))):
        fields = {name: [values[row] for row in order] for name, values in fields.items()}
    return {name: _column(name, fields[name]) for name in SOURCES}


def _holds_records(name: str, member: Mapping[str, Any]) -> bool:
    return member["node_type"] == "array" and name != CATALOGUE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """What the document of an array says of its records."""

    site: str
    """The path of its one record; empty for a stack."""
    stack: str
    """The name of a stack; empty for an array of one record."""
    common: Mapping[str, Any]
    """What is the same for all of them."""
    captures: Sequence[Mapping[str, Any]]
    """What is not, one for each record."""

    @classmethod
    def of(cls, name: str, member: Mapping[str, Any]) -> _Described:
        attributes = member["attributes"]
        if "captures" in attributes:
            return cls(site="", stack=name, common=attributes["common"], captures=attributes["captures"])
        return cls(site=name, stack="", common={}, captures=[attributes])

    def values(self, path: Sequence[str], *, convert: Any) -> list[Any]:
        """What is at a path in each record."""
        name, *inner = path
        if not any(name in capture for capture in self.captures):
            return [convert(_inner(self.common[name], inner))] * len(self.captures)
        parents = [capture if name in capture else self.common for capture in self.captures]
        return [convert(_inner(parent[name], inner)) for parent in parents]


def _inner(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value[name]
    return value


def _converter(name: str) -> Any:
    """From a value in JSON to one of a column."""
    source = SOURCES[name]
    if source.dtype is np.float64:
        # Infinities are texts in JSON, and nothing else is.
        return _extreme if name.removeprefix("overflow.") in EXTREMES else _optional
    convert = source.convert or _same
    return (lambda value: convert(tuple(value))) if name == "shape" else convert


def _same(value: Any) -> Any:
    return value


def _optional(value: Any) -> Any:
    return math.nan if value is None else value


def _extreme(value: Any) -> float:
    return math.nan if value is None else float(value)


def _column(name: str, values: list[Any]) -> Column:
    dtype = SOURCES[name].dtype
    if dtype is None:
        if not {*map(type, values)} <= {str}:
            raise TypeError(f"its {name} are no texts")
        return encode_text(values)
    # Without a dtype: numpy makes numbers of texts, and whole ones of fractions, where it is told to.
    column = np.array(values) if values else np.empty(0, dtype=dtype)
    if dtype is np.float64 and column.dtype.kind == "i":
        column = column.astype(dtype)
    check_numbers(name, column)
    return column.astype(dtype, copy=False)


@functools.lru_cache(maxsize=1 << 14)
def _site_path(*fields: Any) -> str:
    return site_path(Site(**dict(zip(_SITE_FIELDS, fields, strict=True))))
