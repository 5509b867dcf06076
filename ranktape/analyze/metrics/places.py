"""What is counted of every record or sample of a selection, and in which groups are they?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.identity import SAMPLE
from ranktape.analyze.metrics.counts import EXTREMES, count_records
from ranktape.analyze.metrics.samples import count_samples
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.questions.swept import sweepable
from ranktape.errors import UsageError
from ranktape.storage.query.columns import equal_rows

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.identity import SampleName
    from ranktape.analyze.metrics.counts import Counts, Row
    from ranktape.analyze.metrics.target import Target
    from ranktape.storage import Records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Records, or the samples of records, and the counts of each."""

    records: Records
    """The records that were counted."""
    targets: tuple[Target, ...]
    """Whose limits count; none for those of the dtype."""
    owners: NDArray[np.int64]
    """Of each place where in `records` its record is."""
    dtypes: list[str]
    """Of each place what the values were looked at as."""
    samples: list[SampleName] | None
    """Of each place what the sample is called; None where places are whole records."""
    counts: tuple[Counts, ...]
    """For each target, or for the dtype, the counts of all places."""
    notes: tuple[str, ...]
    """What was left out."""

    @property
    def counted(self) -> list[tuple[Target | None, Counts]]:
        """Each target, or None for the dtype, and its counts."""
        return list(zip(self.targets or (None,), self.counts, strict=True))

    def limits_of(self, places: Sequence[int], target: Target | None) -> list[str]:
        """The type or format whose limits count there; of several places each once."""
        if target is not None:
            return [target.name]
        return sorted({self.dtypes[place] for place in places})

    def groups(self, by: Sequence[str]) -> list[tuple[dict[str, Any], NDArray[np.int64]]]:
        """For each group of equal values of the fields, sorted by them, its places; one of all without fields.

        Raises:
            UnknownFieldError: records have no such field.
        """
        if not by:
            return [({}, np.arange(self.owners.size))]
        columns = [
            (self.samples or []) if field == SAMPLE else self.records.column(field)[self.owners].tolist()
            for field in by
        ]
        return [
            (dict(zip(by, key, strict=True)), np.array(rows, dtype=np.int64))
            for key, rows in equal_rows(zip(*columns, strict=True))
        ]

    def together(self, counts: Counts, places: NDArray[np.int64]) -> Row:
        """The counts of several places; a count is not known if that of one is not, extremes are of those known."""
        found = {name: float(column[places].sum()) for name, column in counts.items() if name not in EXTREMES}
        for name in EXTREMES:
            known = counts[name][places]
            known = known[~np.isnan(known)]
            ends = known.min if name == "minimum" else known.max
            found[name] = float(ends()) if known.size else math.nan
        return found


def find_places(
    records: Records,
    targets: Sequence[Target],
    *,
    by: Sequence[str] = (),
    per_sample: bool = False,
    view: View,
    engine: Engine | None = None,
    on_record: Callable[[], object] = lambda: None,
) -> Places:
    """The counts of every record, or of every sample, where these are asked for or grouped by.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: no record has samples, or blocks; what was kept of one does not answer the question.
        UnknownFieldError: `by` names no field of a record.
    """
    for field in by:
        if field != SAMPLE:
            records.column(field)  # refuses what is no field before anything is read
    chosen, notes = _countable(records, targets)
    if per_sample or SAMPLE in by:
        found = count_samples(chosen, targets, view=view, engine=engine)
        num_without = len(chosen) - np.unique(found.owners).size
        if num_without:
            notes.append(f"{num_without} of {len(chosen)} records have no samples, and are left out")
        owners, samples, counts = found.owners, found.names, found.counts
    else:
        counts = count_records(chosen, targets, view=view, engine=engine, on_record=on_record)
        owners, samples = np.arange(len(chosen)), None
    pairs = zip(chosen.column("dtype").tolist(), chosen.column("compute_dtype").tolist(), strict=True)
    dtypes = [viewed_dtype(dtype=one, compute_dtype=two, view=view) for one, two in pairs]
    return Places(
        records=chosen,
        targets=tuple(targets),
        owners=owners,
        dtypes=[dtypes[owner] for owner in owners.tolist()],
        samples=samples,
        counts=tuple(counts),
        notes=tuple(notes),
    )


def _countable(records: Records, targets: Sequence[Target]) -> tuple[Records, list[str]]:
    """The records that can be counted against all targets, and a sentence on the others."""
    if all(target.scaling is not Scaling.BLOCK for target in targets):
        return records, []
    chosen = sweepable(records)
    if not len(chosen):
        raise UsageError("no record holds floating-point numbers, and of integers and bool no blocks are made")
    left_out = len(records) - len(chosen)
    return chosen, [f"{left_out} records of integers or bool left out: no blocks are made of them"] if left_out else []
