"""The digest of each group of records, found in one pass over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.digests import digests, merge_digests
from ranktape.analyze.numerics.digests.quantile_summary import push
from ranktape.storage.query.columns import equal_rows

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.digests.digest import Digest
    from ranktape.storage import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Records in groups of equal values of some fields, sorted by them."""

    keys: tuple[dict[str, Any], ...]
    """The values of the fields, for each group."""
    sizes: tuple[int, ...]
    """Records in each group."""
    numbers: tuple[int, ...]
    """For each record the place of its group in `keys`."""


def group_records(records: Records, *, by: Sequence[str]) -> Groups:
    """The groups of a selection, in the order of `Records.group_by`; one of all records without fields.

    Raises:
        UnknownFieldError: records have no such field.
    """
    if not by:
        return Groups(keys=({},), sizes=(len(records),), numbers=(0,) * len(records))
    groups = equal_rows(zip(*(records.column(field).tolist() for field in by), strict=True))
    numbers = np.zeros(len(records), dtype=np.int64)
    for number, (_, rows) in enumerate(groups):
        numbers[rows] = number
    return Groups(
        keys=tuple(dict(zip(by, key, strict=True)) for key, _ in groups),
        sizes=tuple(len(rows) for _, rows in groups),
        numbers=tuple(numbers.tolist()),
    )


def group_digests(
    records: Records, groups: Groups, *, view: View, engine: Engine | None
) -> Iterator[tuple[int, Digest]]:
    """The place of each group and the digest of its records together, as soon as the last of them was read.

    In memory are the digests of the groups that have begun, and have not ended.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of a record cannot be looked at so.
    """
    seen: Counter[int] = Counter()
    begun: dict[int, list[Digest]] = {}
    for number, digest in zip(groups.numbers, digests(records, view=view, engine=engine), strict=True):
        parts = begun.setdefault(number, [])
        seen[number] += 1
        push(parts, digest, number=seen[number], merge=merge_digests)
        if seen[number] == groups.sizes[number]:
            del begun[number]
            yield number, merge_digests(parts) if len(parts) > 1 else parts[0]
