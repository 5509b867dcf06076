"""Finds what each record of a selection loses in each format and level, and the scale a group would share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.analyze.advice.shared import common_grid, common_scale
from ranktape.analyze.engine.sweep_measure import Asked, Found, Job, sweep_numbers, sweep_records
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import SAMPLE, identity_rows, sample_names
from ranktape.analyze.numerics.inputs import numbers_of
from ranktape.analyze.numerics.quantization.schemes import MX_BLOCK_SIZE
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions, resolve, resolve_all
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage.format.record_info import Keep
from ranktape.storage.query.columns import equal_rows

if TYPE_CHECKING:
    from ranktape.analyze.advice.shared import CommonScale
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
    from ranktape.storage import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What is asked of every record."""

    formats: tuple[str, ...]
    """Names of the formats, no two of which are the same thing with these options."""
    options: SweepOptions
    """Which scales are tried."""
    view: View = View.COMPUTE
    """Which numbers are judged."""


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


def parse_request(
    formats: str | Sequence[str], *, options: SweepOptions | None = None, view: View = View.COMPUTE
) -> SweepRequest:
    """The request for formats as people write them: one name, several, or several with commas in between.

    Raises:
        UsageError: a format is not known, or does not go with the options; none has a use for one of them; nothing is
            asked for.
    """
    texts = [formats] if isinstance(formats, str) else formats
    names = [name.strip() for text in texts for name in text.split(",")]
    chosen = options or SweepOptions()
    found: dict[str, str] = {}
    for name, (scheme, mode) in zip(names, resolve_all(names, options=chosen), strict=True):
        if mode.has_offsets:
            chosen.offsets()  # refuses ends between which there are not so many
        found.setdefault(scheme.name, name)
    if not found:
        raise UsageError("no format is given: give --format NAME, such as fp8_e4m3")
    return SweepRequest(formats=tuple(found.values()), options=chosen, view=view)


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


def answerable(request: SweepRequest, *, keeps: Collection[str]) -> tuple[SweepRequest, str]:
    """The request without the formats that kept histograms do not answer, and a sentence on what was left out.

    `keeps` says what was kept of the records. As it was where no histogram was kept, where all formats can be
    answered, and where none can: then each record says why.
    """
    if Keep.HISTOGRAM not in keeps:
        return request, ""
    wanted = {name: resolve(name, options=request.options) for name in request.formats}
    left_out = {
        name: (scheme, mode)
        for name, (scheme, mode) in wanted.items()
        if mode is SweepMode.CHANNEL
        or (mode is SweepMode.MX and (scheme.has_tensor_scale or scheme.block_size != MX_BLOCK_SIZE))
    }
    if not left_out or len(left_out) == len(wanted):
        return request, ""
    formats = tuple(name for name in request.formats if name not in left_out)
    return dataclasses.replace(request, formats=formats), (
        f"{', '.join(left_out)} left out: the values are needed, and of some records their histograms were kept, which "
        f"answer mx formats in blocks of {MX_BLOCK_SIZE}, tensor and legacy mode; --where \"keep == 'values'\" leaves "
        "out such records instead"
    )


def jobs_of(request: SweepRequest, options: Mapping[int, SweepOptions] | None = None) -> list[Job]:
    """What is sought of a record for each format; with `options`, for the formats at these places with options."""
    chosen = options if options is not None else dict.fromkeys(range(len(request.formats)), request.options)
    return [Job(*resolve(request.formats[index], options=one), one) for index, one in chosen.items()]


def sweep_selection(
    records: Records,
    request: SweepRequest,
    *,
    source: str = "",
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Iterator[list[Swept] | RanktapeError]:
    """The sweeps of each record, in their order; in the place of one that fails the reason why.

    With `sample` among the fields to group by, those of each of its samples; nothing of records without samples.

    Raises:
        UnknownFieldError: `by` names no field of a record.
    """
    names = sample_names(records) if SAMPLE in by else None
    columns = {field: records.column(field).tolist() for field in by if field != SAMPLE}
    jobs = jobs_of(request)
    asked: list[Asked] = [{None: jobs}] * len(records)
    if names is not None:
        asked = [dict.fromkeys(range(len(found)), jobs) for found in names]
    all_found = sweep_records(records, asked, view=request.view, engine=engine)
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


def swept_array(array: Any, request: SweepRequest, *, by: Sequence[str]) -> Swept:
    """The sweeps of an array of numpy, a tensor of torch or nested lists.

    Raises:
        UsageError: there are fields to group by; or it holds no such numbers.
    """
    if by:
        raise UsageError(f"by={list(by)} groups records, and this is an array: leave it out")
    sweeps = sweep_numbers(numbers_of(array), jobs_of(request))
    return Swept(source="", identity=(), key={}, sweeps=sweeps, records=None, index=0)


def num_readings(request: SweepRequest, *, by: Sequence[str]) -> int:
    """How often each record is read: for a common scale a second time, unless levels are common offsets anyway."""
    modes = {resolve(name, options=request.options)[1] for name in request.formats}
    return 2 if by and not all(mode.has_offsets for mode in modes) else 1


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
    ordered = [[swept[row] for row in rows] for _, rows in equal_rows(tuple(one.key.values()) for one in swept)]
    again = _sweep_again(ordered, request, engine=engine, on_record=on_record)
    return [
        SweptGroup(key=members[0].key, members=tuple(members), commons=_common_scales(members, again))
        for members in ordered
    ]


def _sweep_again(
    groups: Sequence[Sequence[Swept]],
    request: SweepRequest,
    *,
    engine: Engine | None,
    on_record: Callable[[], object],
) -> dict[int, dict[int, ScaleSweep]]:
    """By the `id` of each member that was not tried at the scales of its group: by format its sweep at these."""
    grids: dict[int, dict[int, SweepOptions]] = {}
    batches: dict[int, list[Swept]] = {}
    for members in groups:
        columns = enumerate(zip(*(member.sweeps for member in members), strict=True))
        found = {index: grid for index, sweeps in columns if (grid := common_grid(sweeps)) is not None}
        if wanted := {index: grid for index, grid in found.items() if grid != request.options}:
            for member in members:
                grids[id(member)] = wanted
                batches.setdefault(id(member.records), []).append(member)
    again: dict[int, dict[int, ScaleSweep]] = {}
    for batch in batches.values():
        records = batch[0].records
        assert records is not None, "an array is in no group"
        jobs: list[dict[int | None, list[Job]]] = [{} for _ in range(len(records))]
        for member in batch:
            jobs[member.index][member.sample] = jobs_of(request, grids[id(member)])
        sweeps: list[Found] = []
        for asked, one in zip(jobs, sweep_records(records, jobs, view=request.view, engine=engine), strict=True):
            if isinstance(one, RanktapeError):
                raise one
            sweeps.append(one)
            if asked:
                on_record()
        for member in batch:
            found_again = sweeps[member.index][member.sample]
            again[id(member)] = dict(zip(grids[id(member)], found_again, strict=True))
    return again


def _common_scales(
    members: Sequence[Swept], again: Mapping[int, Mapping[int, ScaleSweep]]
) -> tuple[CommonScale | None, ...]:
    """For each format, that of the sweeps at common scales, or of the first ones where these had the same."""
    return tuple(
        common_scale([again.get(id(member), {}).get(index, member.sweeps[index]) for member in members])
        for index in range(len(members[0].sweeps))
    )
