"""What does one record lose in each of several formats, at every level?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.analyze.advice.recommendation import common_grid, common_scale
from ranktape.analyze.identity import identity_row
from ranktape.analyze.quantization.schemes import MX_BLOCK_SIZE
from ranktape.analyze.sweeps.options import SweepMode, SweepOptions, resolve, resolve_all
from ranktape.analyze.sweeps.sweep import sweep_schemes
from ranktape.analyze.values import View, read_block_histogram, read_numbers
from ranktape.errors import UsageError
from ranktape.storage.dtypes import dtype_row
from ranktape.storage.record import Keep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.advice.recommendation import CommonScale
    from ranktape.analyze.histograms.block_histogram import BlockHistogram
    from ranktape.analyze.histograms.histogram import Histogram
    from ranktape.analyze.sweeps.sweep import ScaleSweep
    from ranktape.storage import Record, Records


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
    """As `identity_row` has it."""
    key: dict[str, Any]
    """The values of the fields that are grouped by."""
    sweeps: tuple[ScaleSweep, ...]
    """One for each format, in their order."""
    record: Record
    """To be read again where a scale is sought for many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptGroup:
    """Records that agree in the fields that are grouped by."""

    key: dict[str, Any]
    """These fields and their values."""
    members: tuple[Swept, ...]
    """At least one."""
    commons: tuple[CommonScale | None, ...]
    """For each format the scale that all would share; None where no member needs one."""


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


def sweepable(records: Records) -> Records:
    """The records of floating-point or complex numbers; nothing is read.

    Indices and masks are left out, as no format is sought for them: a run holds some among its inputs.
    """
    names = set(records.column("dtype").tolist())
    wanted = sorted(filter(is_sweepable, names))
    return records if len(wanted) == len(names) else records.select(dtype=wanted)


def is_sweepable(dtype: str) -> bool:
    """Whether a scale is sought for elements of that type, in torch's words."""
    row = dtype_row(dtype)
    return row.is_floating or row.is_complex


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


def sweep_record(record: Record, request: SweepRequest, *, source: str, key: dict[str, Any]) -> Swept:
    """The sweeps of one record, from one reading of it.

    Raises:
        DataError: the record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of the record does not answer the question, or it holds no real numbers.
    """
    options = dict.fromkeys(range(len(request.formats)), request.options)
    sweeps = tuple(_sweeps(record, request, options).values())
    return Swept(source=source, identity=identity_row(record), key=key, sweeps=sweeps, record=record)


def _sweeps(record: Record, request: SweepRequest, options: Mapping[int, SweepOptions]) -> dict[int, ScaleSweep]:
    """For each of some formats, by its place in the request, the sweep of a record with options of its own."""
    found: dict[int, ScaleSweep] = {}
    same = len(set(options.values())) == 1
    if record.keep != Keep.HISTOGRAM and same:
        chosen = next(iter(options.values()))
        wanted = [resolve(request.formats[index], options=chosen) for index in options]
        sweeps = sweep_schemes(read_numbers(record, view=request.view), wanted, options=chosen)
        return dict(zip(options, sweeps, strict=True))
    read: dict[str, NDArray[Any] | Histogram | BlockHistogram] = {}
    for index, chosen in options.items():
        name = request.formats[index]
        axis = _counted_axis(record, name, chosen)
        if axis not in read:
            read[axis] = (
                read_block_histogram(record, axis=axis, view=request.view)
                if axis
                else read_numbers(record, view=request.view)
            )
        found[index] = sweep_schemes(read[axis], [resolve(name, options=chosen)], options=chosen)[0]
    return found


def _counted_axis(record: Record, name: str, options: SweepOptions) -> str:
    """Along which axis the counts of blocks answer a sweep; empty where counts of values, or the values, do.

    Raises:
        UsageError: blocks along that dimension are not among the counts that were kept.
    """
    scheme, mode = resolve(name, options=options)
    if record.keep != Keep.HISTOGRAM or mode is not SweepMode.MX or scheme.has_tensor_scale:
        return ""
    num_dims = max(1, len(record.shape))
    dim = options.axis % num_dims if -num_dims <= options.axis < num_dims else None
    if dim == num_dims - 1:
        return "features"
    if dim == 0 and num_dims == 2:  # noqa: PLR2004 - the rows are the tokens
        return "tokens"
    raise UsageError(
        f"of {record!r} the histogram was kept, with blocks along its last dimension and along all others as one: "
        f"give --axis -1 and not {options.axis}, or leave such records out with --where \"keep == 'values'\""
    )


def num_readings(request: SweepRequest, *, by: Sequence[str]) -> int:
    """How often each record is read: for a common scale a second time, unless levels are common offsets anyway."""
    modes = {resolve(name, options=request.options)[1] for name in request.formats}
    return 2 if by and not all(mode.has_offsets for mode in modes) else 1


def grouped(swept: Sequence[Swept], request: SweepRequest, *, on_record: Callable[[], object]) -> list[SweptGroup]:
    """The records in groups of equal keys, in the order of these, and the best common scale of each group.

    `on_record` is called for each record that is read again.

    Raises:
        DataError: a record that is read again is damaged now.
        StorageError: the store cannot be read.
    """
    groups: dict[tuple[Any, ...], list[Swept]] = {}
    for record in swept:
        # A missing number is NaN, which is not equal to itself.
        values = tuple(None if value != value else value for value in record.key.values())  # noqa: PLR0124
        groups.setdefault(values, []).append(record)
    return [
        SweptGroup(
            key=members[0].key,
            members=tuple(members),
            commons=_common_scales(members, request, on_record=on_record),
        )
        for _, members in sorted(groups.items(), key=lambda item: [_sortable(value) for value in item[0]])
    ]


def _common_scales(
    members: Sequence[Swept], request: SweepRequest, *, on_record: Callable[[], object]
) -> tuple[CommonScale | None, ...]:
    columns = list(zip(*(member.sweeps for member in members), strict=True))
    grids = {index: grid for index, sweeps in enumerate(columns) if (grid := common_grid(sweeps)) is not None}
    again = {index: grid for index, grid in grids.items() if grid != request.options}
    on_grid: dict[int, list[ScaleSweep]] = {index: [] for index in again}
    for member in members if again else ():
        for index, sweep in _sweeps(member.record, request, again).items():
            on_grid[index].append(sweep)
        on_record()
    return tuple(common_scale(on_grid.get(index, sweeps)) for index, sweeps in enumerate(columns))


def _sortable(value: Any) -> tuple[str, Any]:
    """A value of a field, comparable with those of other records, of which some may have none."""
    return type(value).__name__, value
