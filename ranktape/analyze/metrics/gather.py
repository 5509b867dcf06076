"""Gathers metrics of all records of a selection as columns, and digests of groups, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.digests import digest_columns, group_digests_of
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import group_columns, group_row, identity_cells, identity_columns, with_stacks
from ranktape.analyze.metrics.masks import additive_masks, digests_without_masks
from ranktape.analyze.numerics.digest import Digest, Digests
from ranktape.analyze.table import Column, Rows
from ranktape.storage import Records
from ranktape.storage.query.columns import equal_rows


def gather(
    records: Records,
    wanted: Mapping[str, Callable[[Digest], float | None]],
    *,
    view: View,
    engine: Engine | None = None,
    on_digest: Callable[[int, Digest], object] = lambda *_: None,
) -> dict[str, NDArray[np.float64]]:
    """For each name one number for each record, NaN where there is none; values are read of new records alone.

    `on_digest` is called with the place of each record and its digest, for what is no number.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen.
    """
    table = np.full((len(wanted), len(records)), math.nan)
    for place, digest in enumerate(digests_without_masks(records, view=view, engine=engine)):
        for row, metric in zip(table, wanted.values(), strict=True):
            value = metric(digest)
            if value is not None:
                row[place] = value
        on_digest(place, digest)
    return dict(zip(wanted, table, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Records in groups of equal values of some fields, sorted by them, or each record for itself."""

    fields: tuple[str, ...] = ()
    """The fields that are grouped by."""
    columns: tuple[Column, ...] = ()
    """The columns that say which group or record a row of a table is of."""
    heads: Rows = field(default_factory=lambda: Rows([]))
    """What those hold, for each group."""
    keys: tuple[dict[str, Any], ...]
    """The values of the fields, for each group."""
    sizes: tuple[int, ...]
    """Records in each group."""
    numbers: tuple[int, ...]
    """For each record the place of its group in `keys`."""


def group_records(records: Records, *, by: Sequence[str]) -> Groups:
    """The groups of a selection, in the order of `Records.group_by`; one of all records without fields.

    Where records are of several stacks, `layer_stack` comes before `layer_idx`.

    Raises:
        UnknownFieldError: records have no such field.
    """
    fields = with_stacks(by, records)
    keys: tuple[dict[str, Any], ...] = ({},)
    sizes: tuple[int, ...] = (len(records),)
    numbers = np.zeros(len(records), dtype=np.int64)
    if fields:
        for name in fields:
            records.column(name)  # refuses what is no field
        groups = equal_rows([records.stored(name) for name in fields])
        for number, (_, rows) in enumerate(groups):
            numbers[rows] = number
        keys = tuple(dict(zip(fields, key, strict=True)) for key, _ in groups)
        sizes = tuple(len(rows) for _, rows in groups)
    columns = group_columns(fields)
    heads = [group_row(key, num_records=size) for key, size in zip(keys, sizes, strict=True)]
    return Groups(
        fields=fields,
        columns=columns,
        heads=Rows.of(heads, width=len(columns)),
        keys=keys,
        sizes=sizes,
        numbers=tuple(numbers.tolist()),
    )


def row_groups(records: Records, *, by: Sequence[str]) -> Groups:
    """As `group_records`; without fields each record is a group of its own.

    Raises:
        UnknownFieldError: records have no such field.
    """
    if by:
        return group_records(records, by=by)
    count = len(records)
    return Groups(
        columns=identity_columns(records),
        heads=Rows(identity_cells(records), size=count),
        keys=({},) * count,
        sizes=(1,) * count,
        numbers=tuple(range(count)),
    )


def group_columns_of(
    records: Records, groups: Groups, *, view: View, engine: Engine | None, with_values: bool = True
) -> Iterator[tuple[NDArray[np.int64], Digests]]:
    """The places of groups and the digests of their records together, some hundred at a time, in any order.

    Without `with_values` nothing is known of the numbers that occur in groups.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of a record cannot be looked at so.
    """
    is_mask = additive_masks(records)
    if len(groups.keys) == len(records):
        # Each record is a group of its own.
        numbers, start = np.array(groups.numbers, dtype=np.int64), 0
        for columns in digest_columns(records, view=view, engine=engine, is_mask=is_mask):
            yield numbers[start : start + len(columns)], columns
            start += len(columns)
        return
    yield from group_digests_of(
        records, groups.numbers, is_mask=is_mask, view=view, engine=engine, with_values=with_values
    )


def group_digests(
    records: Records, groups: Groups, *, view: View, engine: Engine | None
) -> Iterator[tuple[int, Digest]]:
    """The place of each group and the digest of its records together, in any order. Raises as `group_columns_of`."""
    for numbers, columns in group_columns_of(records, groups, view=view, engine=engine):
        yield from zip(numbers.tolist(), map(columns.digest, range(len(columns))), strict=True)
