"""Which one scale would all tensors of a group bear best?

Where each was tried at scales of its own, all of a group are looked at again at the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ranktape.analyze.advice.recommendation import common_grid, common_scale
from ranktape.analyze.engine.sweep_measure import Job, sweep_records, sweep_samples
from ranktape.analyze.questions.swept import SweepRequest, Swept, jobs_of
from ranktape.errors import RanktapeError
from ranktape.storage.query.groups import equal_rows

if TYPE_CHECKING:
    from ranktape.analyze.advice.recommendation import CommonScale
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.sweeps.options import SweepOptions
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
    from ranktape.storage import Records

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptGroup:
    """Records that agree in the fields that are grouped by."""

    key: dict[str, Any]
    """These fields and their values."""
    members: tuple[Swept, ...]
    """At least one."""
    commons: tuple[CommonScale | None, ...]
    """For each format the scale that all would share; None where no member needs one."""


def grouped(
    swept: Sequence[Swept], request: SweepRequest, *, engine: Engine | None = None, on_record: Callable[[], object]
) -> list[SweptGroup]:
    """The records in groups of equal keys, in the order of these, and the best common scale of each group.

    `on_record` is called for each record that is looked at again.

    Raises:
        DataError: a record that is read again is damaged now.
        StorageError: the store cannot be read.
    """
    groups = equal_rows(tuple(one.key.values()) for one in swept)
    ordered = [[swept[row] for row in rows] for _, rows in groups]
    again = _sweep_again(ordered, request, engine=engine, on_record=on_record)
    return [
        SweptGroup(key=members[0].key, members=tuple(members), commons=_common_scales(members, again))
        for members in ordered
    ]


def _grids(members: Sequence[Swept], request: SweepRequest) -> dict[int, SweepOptions]:
    """For each format that members were not tried at the same scales in, the scales to try all of them at."""
    columns = zip(*(member.sweeps for member in members), strict=True)
    grids = {index: grid for index, sweeps in enumerate(columns) if (grid := common_grid(sweeps)) is not None}
    return {index: grid for index, grid in grids.items() if grid != request.options}


def _sweep_again(
    groups: Sequence[Sequence[Swept]],
    request: SweepRequest,
    *,
    engine: Engine | None,
    on_record: Callable[[], object],
) -> dict[int, dict[int, ScaleSweep]]:
    """By the `id` of each member whose group needs it: for each format its sweep at the scales of the group."""
    asked = {id(member): grids for members in groups if (grids := _grids(members, request)) for member in members}
    batches: dict[int, list[Swept]] = {}
    for members in groups:
        for member in members:
            if id(member) in asked:
                batches.setdefault(id(member.records), []).append(member)
    found: dict[int, dict[int, ScaleSweep]] = {}
    for batch in batches.values():
        records = batch[0].records
        jobs: list[dict[int | None, list[Job]]] = [{} for _ in range(len(records))]
        for member in batch:
            jobs[member.index][member.sample] = jobs_of(request, asked[id(member)])
        sweeps = _batch_sweeps(records, jobs, view=request.view, engine=engine, on_record=on_record)
        for member in batch:
            pairs = zip(asked[id(member)], sweeps[member.index, member.sample], strict=True)
            found[id(member)] = dict(pairs)
    return found


def _batch_sweeps(
    records: Records,
    jobs: Sequence[Mapping[int | None, Sequence[Job]]],
    *,
    view: View,
    engine: Engine | None,
    on_record: Callable[[], object],
) -> dict[tuple[int, int | None], tuple[ScaleSweep, ...]]:
    """By the place of a record and its sample: the sweeps for its jobs."""
    found: dict[tuple[int, int | None], tuple[ScaleSweep, ...]] = {}
    whole = [of_record.get(None, []) for of_record in jobs]
    samples = [{sample: asked for sample, asked in one.items() if sample is not None} for one in jobs]
    if any(whole):
        for row, sweeps in enumerate(sweep_records(records, whole, view=view, engine=engine)):
            if whole[row]:
                found[row, None] = _known(sweeps)
                on_record()
    if any(samples):
        for row, of_samples in enumerate(sweep_samples(records, samples, view=view, engine=engine)):
            found |= {(row, sample): sweeps for sample, sweeps in _known(of_samples).items()}
            on_record()
    return found


def _known(found: Found | RanktapeError) -> Found:
    if isinstance(found, RanktapeError):
        raise found
    return found


def _common_scales(
    members: Sequence[Swept], again: Mapping[int, Mapping[int, ScaleSweep]]
) -> tuple[CommonScale | None, ...]:
    columns = list(zip(*(member.sweeps for member in members), strict=True))
    found = []
    for index, sweeps in enumerate(columns):
        on_grid = [again[id(member)][index] for member in members if index in again.get(id(member), {})]
        found.append(common_scale(on_grid or sweeps))
    return tuple(found)
