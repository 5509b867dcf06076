"""Gathers metrics of all records of a selection as columns, and digests of groups, in one pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.digest_measure import digests, merge_digests
from ranktape.analyze.identity import group_columns, group_row, identity_columns, identity_rows, with_stacks
from ranktape.analyze.numerics.digest import Digest, push
from ranktape.storage.query.columns import equal_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.table import Column
    from ranktape.storage import Records


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
    for place, digest in enumerate(digests(records, view=view, engine=engine)):
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
    heads: Sequence[tuple[Any, ...]] = ()
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
        groups = equal_rows(zip(*(records.column(field).tolist() for field in fields), strict=True))
        for number, (_, rows) in enumerate(groups):
            numbers[rows] = number
        keys = tuple(dict(zip(fields, key, strict=True)) for key, _ in groups)
        sizes = tuple(len(rows) for _, rows in groups)
    return Groups(
        fields=fields,
        columns=group_columns(fields),
        heads=[group_row(key, num_records=size) for key, size in zip(keys, sizes, strict=True)],
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
        heads=identity_rows(records),
        keys=({},) * count,
        sizes=(1,) * count,
        numbers=tuple(range(count)),
    )


def group_digests(
    records: Records,
    groups: Groups,
    *,
    view: View,
    engine: Engine | None,
    on_digest: Callable[[int, Digest], object] = lambda *_: None,
) -> Iterator[tuple[int, Digest]]:
    """The place of each group and the digest of its records together, as soon as the last of them was read.

    `on_digest` is called with the group of each record and its digest, for what of single records is asked.
    In memory are the digests of the groups that have begun, and have not ended.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of a record cannot be looked at so.
    """
    seen: Counter[int] = Counter()
    begun: dict[int, list[Digest]] = {}
    for number, digest in zip(groups.numbers, digests(records, view=view, engine=engine), strict=True):
        on_digest(number, digest)
        if groups.sizes[number] == 1:
            yield number, digest
            continue
        parts = begun.setdefault(number, [])
        seen[number] += 1
        push(parts, digest, number=seen[number], merge=merge_digests)
        if seen[number] == groups.sizes[number]:
            del begun[number]
            yield number, merge_digests(parts) if len(parts) > 1 else parts[0]
