"""The digest of each record of a selection, and that of several together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.engine.digest_measure import DigestMeasure, digest_of, merge_tallies
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.numerics.digests.digest import Digest, Summary, merge_summaries
from ranktape.storage.format.statistics import merge_statistics

if TYPE_CHECKING:
    from ranktape.storage import Records


__all__ = ["DigestMeasure", "digest_of", "digests", "merge_digests"]


def digests(records: Records, *, view: View = View.COMPUTE, engine: Engine | None = None) -> Iterator[Digest]:
    """The digest of each record, in their order: of those that were asked about before, nothing is read.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen.
    """
    measured = (engine or Engine()).measure(records, DigestMeasure(view=view))
    # The columns say the dtype; the payload holds numbers alone.
    pairs = zip(records.column("dtype").tolist(), records.column("compute_dtype").tolist(), strict=True)
    for (dtype, compute), payload in zip(pairs, measured, strict=True):
        yield digest_of(payload, dtype=viewed_dtype(dtype=dtype, compute_dtype=compute, view=view))


def merge_digests(parts: Sequence[Digest]) -> Digest:
    """The digest of all values together; of samples nothing is said. At least one part.

    The order of the parts matters to the last bit of sums, and to nothing else.
    """
    summary = merge_summaries([Summary(part.values, part.counts, part.is_exact) for part in parts])
    return Digest(
        dtype=" ".join(sorted({part.dtype for part in parts})),
        statistics=merge_statistics([part.statistics for part in parts]),
        tallies=merge_tallies([part.tallies for part in parts]),
        values=summary.values,
        counts=summary.counts,
        is_exact=summary.is_exact,
        has_values=all(part.has_values for part in parts),
    )
