"""Finds what each record of a selection loses in each format and level, and the scale a group would share."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ranktape.analyze.engine.digests import VERSION as DIGEST_VERSION
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.memo import values_of_records
from ranktape.analyze.engine.sweep_measure import VERSION as BLOCKS_VERSION
from ranktape.analyze.engine.sweep_measure import Asked, Found, Job, sweep_numbers, sweep_records
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import identity_rows, sample_names
from ranktape.analyze.numerics.pieces import numbers_of
from ranktape.analyze.numerics.quantization.schemes import MX_BLOCK_SIZE, Scheme
from ranktape.analyze.numerics.sweeps.metrics import Level
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions, resolve_all
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
from ranktape.analyze.questions.advice import (
    CommonScale,
    best_by,
    best_sqnr,
    common_grid,
    common_scale,
    direction_of,
    keeps_nothing,
)
from ranktape.errors import RanktapeError, UsageError
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.format.record_info import Keep
from ranktape.storage.query.columns import equal_rows

KEPT_VERSION = f"4-{DIGEST_VERSION}-{BLOCKS_VERSION}"
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
    """The cells of each record, one for each job; in the place of a record that fails the reason why."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """One record and its sweeps."""

    source: str
    """The run, folder or file that it is of, as it was asked for."""
    identity: tuple[Any, ...]
    """As `identity_rows` has it."""
    key: dict[str, Any]
    """The values of the fields that are grouped by."""
    sweeps: tuple[ScaleSweep, ...]
    """One for each format, in their order."""
    records: Records | None
    """The selection that it is of, to be looked at again where a scale is sought for many; None of an array."""
    index: int
    """Where in the selection."""
    sample: int | None = None
    """Which of its samples; None for all of it."""
    kept: tuple[SweptCells, ...] = ()
    """What was kept of the sweeps, in their place; then there are no `sweeps`."""

    @property
    def cells(self) -> tuple[SweptCells, ...]:
        """What a table says of the sweeps."""
        return self.kept or tuple(map(cells_of, self.sweeps))


def parse_jobs(formats: str | Sequence[str], *, options: SweepOptions | None = None) -> tuple[Job, ...]:
    """What is sought of each record for formats as people write them: a name, several, or several with commas between.

    No two are the same thing with these options.

    Raises:
        UsageError: a format is not known, or does not go with the options; none has a use for one of them; nothing is
            asked for.
    """
    texts = [formats] if isinstance(formats, str) else formats
    names = [name.strip() for text in texts for name in text.split(",")]
    chosen = options or SweepOptions()
    found: dict[str, Job] = {}
    for scheme, mode in resolve_all(names, options=chosen):
        if mode.has_offsets:
            chosen.offsets()  # refuses ends between which there are not so many
        found.setdefault(scheme.name, Job(scheme, mode, chosen))
    if not found:
        raise UsageError("no format is given: give --format NAME, such as fp8_e4m3")
    return tuple(found.values())


def with_samples(records: Records) -> tuple[Records, str]:
    """The records whose samples can be told apart, and a sentence on the others.

    Raises:
        UsageError: there is none.
    """
    with_values = records.where(f"keep == '{Keep.VALUES}' and numel > 0")
    chosen = with_values.take([place for place, names in enumerate(sample_names(with_values)) if names])
    left_out = len(records) - len(chosen)
    if not len(chosen):
        raise UsageError(
            f"none of {len(records)} records has samples that can be told apart, and values: leave sample out of --by"
        )
    return chosen, f"{left_out} of {len(records)} records have no samples, and are left out" if left_out else ""


def answerable(jobs: Sequence[Job], *, keeps: Collection[str]) -> tuple[Sequence[Job], str]:
    """The jobs that kept histograms answer, and a sentence on the formats that were left out.

    `keeps` says what was kept of the records. All of them where no histogram was kept, and where none can be answered:
    then each record says why.
    """
    left_out = [
        job.scheme.name
        for job in jobs
        if job.mode is SweepMode.CHANNEL
        or (job.mode is SweepMode.MX and (job.scheme.has_tensor_scale or job.scheme.block_size != MX_BLOCK_SIZE))
    ]
    if Keep.HISTOGRAM not in keeps or not left_out or len(left_out) == len(jobs):
        return jobs, ""
    return [job for job in jobs if job.scheme.name not in left_out], (
        f"{', '.join(left_out)} left out: the values are needed, and of some records their histograms were kept, which "
        f"answer mx formats in blocks of {MX_BLOCK_SIZE}, tensor and legacy mode; --where \"keep == 'values'\" leaves "
        "out such records instead"
    )


def sweep_selection(
    records: Records,
    jobs: Sequence[Job],
    *,
    view: View,
    source: str = "",
    by: Sequence[str] = (),
    is_kept: bool = False,
    engine: Engine | None = None,
) -> Iterator[list[Swept] | RanktapeError]:
    """The sweeps of each record, in their order; in the place of one that fails the reason why.

    With `is_kept` what a table of records says of them, which is kept, in the place of the sweeps.

    With `sample` among the fields to group by, those of each of its samples; nothing of records without samples.
    """
    if is_kept and not by and can_be_kept(jobs):
        cells = kept_cells(records, jobs, view=view, engine=engine)
        for row, (identity, kept) in enumerate(zip(identity_rows(records), cells, strict=True)):
            if isinstance(kept, RanktapeError):
                yield kept
            else:
                yield [
                    Swept(source=source, identity=identity, key={}, sweeps=(), records=records, index=row, kept=kept)
                ]
        return
    names = sample_names(records) if SAMPLE in by else None
    columns = {field: records.column(field).tolist() for field in by if field != SAMPLE}
    asked: list[Asked] = [{None: jobs}] * len(records)
    if names is not None:
        asked = [dict.fromkeys(range(len(found)), jobs) for found in names]
    all_found = sweep_records(records, asked, view=view, engine=engine)
    for row, (identity, found) in enumerate(zip(identity_rows(records), all_found, strict=True)):
        if isinstance(found, RanktapeError):
            yield found
            continue
        yield [
            Swept(
                source=source,
                identity=identity,
                key={field: names[row][sample or 0] if field == SAMPLE else columns[field][row] for field in by},  # type: ignore[index]
                sweeps=sweeps,
                records=records,
                index=row,
                sample=sample,
            )
            for sample, sweeps in found.items()
        ]


def swept_array(array: Any, jobs: Sequence[Job], *, by: Sequence[str]) -> Swept:
    """The sweeps of an array of numpy, a tensor of torch or nested lists.

    Raises:
        UsageError: there are fields to group by; or it holds no such numbers.
    """
    if by:
        raise UsageError(f"by={list(by)} groups records, and this is an array: leave it out")
    sweeps = sweep_numbers(numbers_of(array), jobs)
    return Swept(source="", identity=(), key={}, sweeps=sweeps, records=None, index=0)


def num_readings(jobs: Sequence[Job], *, by: Sequence[str]) -> int:
    """How often each record is read: for a common scale a second time, unless levels are common offsets anyway."""
    return 2 if by and not all(job.mode.has_offsets for job in jobs) else 1


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
    swept: Sequence[Swept], *, view: View, engine: Engine | None = None, on_record: Callable[[], object]
) -> list[SweptGroup]:
    """The records in groups of equal keys, in the order of these, and the best common scale of each group.

    `on_record` is called for each record that is looked at again.
    """
    columns = list(zip(*(one.key.values() for one in swept), strict=True))
    ordered = [[swept[row] for row in rows.tolist()] for _, rows in equal_rows(columns)]
    again = _sweep_again(ordered, view=view, engine=engine, on_record=on_record)
    return [
        SweptGroup(key=members[0].key, members=tuple(members), commons=_common_scales(members, again))
        for members in ordered
    ]


def _sweep_again(
    groups: Sequence[Sequence[Swept]],
    *,
    view: View,
    engine: Engine | None,
    on_record: Callable[[], object],
) -> dict[int, dict[int, ScaleSweep]]:
    """By the `id` of each member that was not tried at the scales of its group: by format its sweep at these."""
    wanted: dict[int, dict[int, Job]] = {}
    batches: dict[int, list[Swept]] = {}
    for members in groups:
        if jobs_of_group := _common_jobs(members):
            for member in members:
                wanted[id(member)] = jobs_of_group
                batches.setdefault(id(member.records), []).append(member)
    again: dict[int, dict[int, ScaleSweep]] = {}
    for batch in batches.values():
        records = batch[0].records
        assert records is not None, "an array is in no group"
        jobs: list[dict[int | None, list[Job]]] = [{} for _ in range(len(records))]
        for member in batch:
            jobs[member.index][member.sample] = list(wanted[id(member)].values())
        sweeps: list[Found] = []
        for asked, one in zip(jobs, sweep_records(records, jobs, view=view, engine=engine), strict=True):
            if isinstance(one, RanktapeError):
                raise one
            sweeps.append(one)
            if asked:
                on_record()
        for member in batch:
            again[id(member)] = dict(zip(wanted[id(member)], sweeps[member.index][member.sample], strict=True))
    return again


def _common_jobs(members: Sequence[Swept]) -> dict[int, Job]:
    """For each format that members were not tried at the same scales in, the job with the scales of all of them."""
    columns = list(zip(*(member.sweeps for member in members), strict=True))
    grids = [(common_grid(sweeps), sweeps[0]) for sweeps in columns]
    return {
        index: Job(first.scheme, first.mode, grid)
        for index, (grid, first) in enumerate(grids)
        if grid is not None and grid != first.options
    }


def _common_scales(
    members: Sequence[Swept], again: Mapping[int, Mapping[int, ScaleSweep]]
) -> tuple[CommonScale | None, ...]:
    """For each format, that of the sweeps at common scales, or of the first ones where these had the same."""
    return tuple(
        common_scale([again.get(id(member), {}).get(index, member.sweeps[index]) for member in members])
        for index in range(len(members[0].sweeps))
    )
