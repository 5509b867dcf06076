"""Gives what a table says of a record's sweep, and keeps it: a question asked again sweeps nothing."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ranktape.analyze.advice.recommendation import best_by
from ranktape.analyze.advice.shared import best_sqnr
from ranktape.analyze.advice.verdict import direction_of, keeps_nothing
from ranktape.analyze.engine.digests import VERSION as DIGEST_VERSION
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.memo import values_of_records
from ranktape.analyze.engine.sweep_measure import VERSION as BLOCKS_VERSION
from ranktape.analyze.engine.sweep_measure import sweep_records
from ranktape.analyze.numerics.sweeps.metrics import Level
from ranktape.analyze.numerics.sweeps.options import SweepMode
from ranktape.errors import RanktapeError

if TYPE_CHECKING:
    from ranktape.analyze.engine.sweep_measure import Job
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.quantization.schemes import Scheme
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
    from ranktape.storage import Records

KEPT_VERSION = f"2-{DIGEST_VERSION}-{BLOCKS_VERSION}"
"""Versions of what is kept of sweeps, and of the counts that they follow from."""

COUNTED = ("num_elements", "nan", "inf", "spoiled", "zero")
"""What a sweep counts of a tensor."""

BEST_BY = ("mse", "cosine", "psnr")
"""Metrics whose best level is named beside the recommended one."""

LEVEL_FIELDS = tuple(field.name for field in dataclasses.fields(Level))


class SweptCells(NamedTuple):
    """What a table says of one record in one format."""

    scheme: Scheme
    """The format."""
    mode: SweepMode
    """What its levels are."""
    counts: tuple[int, ...]
    """`COUNTED`."""
    bests: tuple[float | None, ...]
    """The exponents of the levels that are best by `BEST_BY`; None without levels."""
    recommended: tuple[float | None, ...]
    """The fields of the recommended level; None without levels."""
    best_sqnr: float | None
    """The largest one of a level, in dB; infinite of zeros; None of other tensors without levels."""
    note: str
    """What is unusual about the tensor, and whether the recommended level is none to use."""


def cells_of(found: ScaleSweep) -> SweptCells:
    """The cells of one sweep."""
    chosen, bests = found.recommended, [best_by(found, name) for name in BEST_BY]
    names = [field.name for field in dataclasses.fields(chosen)] if chosen is not None else LEVEL_FIELDS
    return SweptCells(
        scheme=found.scheme,
        mode=found.mode,
        counts=tuple(getattr(found, name) for name in COUNTED),
        bests=tuple(None if level is None else level.exponent for level in bests),
        recommended=tuple(None if chosen is None else getattr(chosen, name) for name in names),
        best_sqnr=best_sqnr(found),
        note=_note(found),
    )


def _note(found: ScaleSweep) -> str:
    notes = [found.note] if found.note else []
    chosen = found.recommended
    if chosen is not None and keeps_nothing(found.levels):
        direction = direction_of(found.levels, chosen, is_tapered=bool(found.target.taper))
        notes.append(f"no level keeps anything: try {direction} scales")
    return "; ".join(notes)


def can_be_kept(jobs: Sequence[Job]) -> bool:
    """Whether the cells of these sweeps are numbers alone: those of the legacy mode have more fields."""
    return all(job.mode is not SweepMode.LEGACY for job in jobs)


def kept_cells(
    records: Records, jobs: Sequence[Job], *, view: View, engine: Engine | None = None
) -> Iterator[tuple[SweptCells, ...] | RanktapeError]:
    """The cells of each record, one for each job; in the place of a record that fails the reason why.

    Raises:
        UsageError: of the engine itself; of records none are.
        WorkersError: the processes or the cluster cannot be had, or were lost.
    """
    used = engine or Engine()
    # In whatever order formats are given, the rows that are kept are the same.
    ordered = sorted(set(jobs), key=repr)
    asked = hashlib.blake2b(repr(ordered).encode(), digest_size=8).hexdigest()
    values = values_of_records(
        records,
        functools.partial(_values, jobs=ordered, view=view, engine=used),
        name=f"sweep_{asked}_{view}_v{KEPT_VERSION}",
        engine=used,
    )
    numbers = [ordered.index(job) for job in jobs]
    for value in values:
        if isinstance(value, RanktapeError):
            yield value
            continue
        yield tuple(
            SweptCells(job.scheme, job.mode, tuple(counts), tuple(bests), tuple(recommended), best, note)
            for job, (counts, bests, recommended, best, note) in zip(jobs, map(value.__getitem__, numbers), strict=True)
        )


def _values(records: Records, *, jobs: Sequence[Job], view: View, engine: Engine) -> Iterator[Any]:
    """What is kept of each record: for each job the cells but for the format."""
    for found in sweep_records(records, [{None: jobs}] * len(records), view=view, engine=engine):
        yield found if isinstance(found, RanktapeError) else [cells_of(one)[2:] for one in found[None]]
