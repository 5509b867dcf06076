"""Gathers metrics of all records of a selection as columns, in one pass over their digests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.engine.digests import digests

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.digests.digest import Digest
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
