"""Exports a selection to TensorBoard, and to programs that read Parquet.

The same records give the same bytes under a fixed file name. The file can be next to the event files of a training, and
repeating an export adds nothing. For TensorBoard, all records of a place in one iteration count as one tensor, as in
`trend`.
"""

from __future__ import annotations

import importlib
import io
import math
import shlex
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.console import write_whole, writing
from ranktape.analyze.engine.metrics import parse_metric
from ranktape.analyze.engine.numbers import group_digests, group_metrics
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import group_records, row_groups, words
from ranktape.analyze.numerics.digest import Digest, finite
from ranktape.analyze.numerics.distributions import linear_bins, log2_bins
from ranktape.analyze.questions.trend import course_fields
from ranktape.errors import NoRecordsError, UsageError
from ranktape.fields import INT_FIELDS
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tensorboard.compat.proto.event_pb2 import Event

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.views.plots.table import Plot
    from ranktape.storage import Records


NO_PICTURES = "none"
"""The value of `--kind` for no pictures."""

EVENTS = "events.out.tfevents.ranktape"
"""The name of the TensorBoard file. TensorBoard reads every file with `tfevents` in its name."""

PARQUET = "records.parquet"
"""The name of the Parquet file, which has one row for each record."""

_NEEDS = {
    "tensorboard": ("TensorBoard", "tensorboard.summary.writer.record_writer"),
    "parquet": ("pyarrow", "pyarrow.parquet"),
}
"""For each destination, the package that it needs, and a module of that package."""

OWNERS = {
    "metric": ("tensorboard", "parquet"),
    "kind": ("tensorboard",),
    "no_histograms": ("tensorboard",),
    "by": ("tensorboard",),
    "view": ("tensorboard", "parquet"),
    "overwrite": ("pt", "tensorboard", "parquet"),
    "form": ("pt",),
    "per_sample": ("pt",),
}
"""The destinations that accept each option."""


def check_destination(to: str, **given: object) -> None:
    """Check that the given options are for this destination.

    Raises:
        UsageError: an option is for another destination.
    """
    for name, value in given.items():
        if value not in (None, (), False) and to not in OWNERS[name]:
            allowed = " or ".join(f"--to {one}" for one in OWNERS[name])
            raise UsageError(f"--{name.replace('_', '-')} is only for {allowed}, not for --to {to}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export."""

    path: str
    """Path of the file."""
    what: str
    """Text with the number of exported items."""
    already_exists: bool
    """Whether the file already existed with the same content."""
    next_step: str
    """The command that opens the file."""

    def message(self) -> str:
        """The message for the user: the result and the next step."""
        kept = "; it already exists" if self.already_exists else ""
        return f"{self.path}: {self.what}{kept}\n{self.next_step}"


def export_view(
    records: Records,
    target: str,
    *,
    to: str,
    metric: str | Sequence[str] = (),
    kind: str | Sequence[str] = (),
    no_histograms: bool = False,
    overwrite: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Exported:
    """Write a selection for TensorBoard or as Parquet into the folder `target`.

    Missing libraries and unknown names raise an error before any record is read. For TensorBoard, pictures have the
    step of the last iteration. The Parquet file contains the catalogue, with another column for each metric that is
    not in it, which is null for records without that metric. Without metrics, no values are read.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read, or the file cannot be written.
        UnknownFieldError: `by` has a name that is not a field of records.
        UsageError: a library is not installed; a metric or plot is unknown; the target is not a local folder; or the
            file exists with other content, and `overwrite` is false.
    """
    from ranktape.analyze.commands import parse_kinds

    metrics, named = words(metric), words(kind)
    for name in metrics:
        parse_metric(name)
    kinds = [] if to == "parquet" or named == (NO_PICTURES,) else parse_kinds(named or PICTURES)
    package, module = _NEEDS[to]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"--to {to} needs {package} ({error}): pip install 'ranktape[{to}]'") from error
    if to == "parquet":
        path = _folder(target) / PARQUET
        data, what = _parquet(records, metrics, view=view, engine=engine)
        next_step = "to open it: SELECT in DuckDB, read_parquet in pandas or polars"
    else:
        path = _folder(target) / EVENTS
        found = points(records, metrics=metrics, has_histograms=not no_histograms, by=by, view=view, engine=engine)
        drawn = _pictures(records, kinds, must_be_there=bool(named), view=view, engine=engine)
        data, what = _event_file(found, drawn)
        next_step = f"to view it: tensorboard --logdir {shlex.quote(target)}"
    with writing(path, what="export", option="folder"):
        is_there = path.is_file()
        already_exists = is_there and path.stat().st_size == len(data) and path.read_bytes() == data
    if is_there and not (already_exists or overwrite):
        raise UsageError(f"{path} already exists with other content: add --overwrite, or choose another folder")
    if not already_exists:
        write_whole(path, data, what="export", option="folder")
    return Exported(path=str(path), what=what, already_exists=already_exists, next_step=next_step)


def _folder(target: str) -> Path:
    """The folder for the files, which does not have to exist.

    Raises:
        UsageError: the target is a URL, an invalid path, or a file.
    """
    if "://" in target:
        raise UsageError(f"{target} is a URL, but files are written to a local folder: give one")
    path = Path(target)
    try:
        is_file = path.exists() and not path.is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"{target} is not a path: {error}: give a folder") from error
    if is_file:
        raise UsageError(f"{target} is a file: give a folder")
    return path


def _counted(**numbers: int) -> str:
    """Numbers of items as text, such as `3 scalars, 1 picture`, without zeros."""
    return ", ".join(f"{number:,} {what}{'' if number == 1 else 's'}" for what, number in numbers.items() if number)


def _parquet(
    records: Records, metrics: Sequence[str], *, view: View | None, engine: Engine | None
) -> tuple[bytes, str]:
    """The catalogue with metrics as a Parquet file, and a text with its numbers of records and columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = records.to_arrow()
    wanted = {name: parse_metric(name) for name in metrics if name not in table.column_names}
    if wanted:
        groups = row_groups(records, by=())
        known = group_metrics(records, groups, [*wanted.values()], view=view or View.COMPUTE, engine=engine)
        for name, metric in wanted.items():
            table = table.append_column(name, pa.array(known.column(metric.name), from_pandas=True))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue(), _counted(record=table.num_rows, column=table.num_columns)


def _event_file(points: Sequence[Point], pictures: Mapping[str, bytes]) -> tuple[bytes, str]:
    """The scalars, histograms and pictures as a TensorBoard file, and a text with their numbers."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    writer = RecordWriter(stream)
    for event in _events(points, pictures):
        writer.write(event.SerializeToString(deterministic=True))
    num_histograms = sum(one is not None for point in points for one in (point.values, point.binades))
    num_scalars = sum(len(point.metrics) for point in points)
    amount = _counted(scalar=num_scalars, histogram=num_histograms, picture=len(pictures))
    places, iterations = ({getattr(point, name) for point in points} for name in ("place", "iteration"))
    return stream.getvalue(), f"{amount} of {_counted(group=len(places), iteration=len(iterations))}"


def _events(points: Sequence[Point], pictures: Mapping[str, bytes]) -> Iterator[Event]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    yield Event(wall_time=points[0].timestamp if points else 0.0, file_version="brain.Event:2")
    for point in points:
        with np.errstate(over="ignore"):  # the field is a float32
            values = [
                Summary.Value(tag=f"{name}/{point.place}", simple_value=float(np.float32(value)))
                for name, value in point.metrics.items()
            ]
        for kind, found in (("values", point.values), ("binades", point.binades)):
            if found is not None:
                histogram = HistogramProto(
                    min=found.edges[0],
                    max=found.edges[-1],
                    num=found.num_values,
                    sum=found.sum,
                    sum_squares=found.sum_squares,
                    bucket_limit=found.edges[1:].tolist(),
                    bucket=found.counts.tolist(),
                )
                values.append(Summary.Value(tag=f"{kind}/{point.place}", histo=histogram))
        yield Event(wall_time=point.timestamp, step=point.iteration, summary=Summary(value=values))
    for name, png in pictures.items():
        # In a PNG, the size follows the signature and the header of the first chunk.
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
        value = Summary.Value(tag=f"plots/{name}", image=image)
        yield Event(wall_time=points[-1].timestamp, step=points[-1].iteration, summary=Summary(value=[value]))


METRICS = (
    *("absmax", "rms", "std"),
    *(f"overflow.{kind}" for kind in ("ratio", "underflow.ratio", "zero.ratio", "nan.ratio")),
)
"""The metrics that are exported by default."""

PICTURES = ("overflow", "layer_binades")
"""The plots that are exported by default, if they can be drawn for the selection."""

NUM_BINS = 64
"""The number of bins of equal width."""

MAX_BINS = 512
"""The largest number of bins that W&B accepts. Only float64 has more binades; adjacent ones are merged then."""


class BinnedValues(NamedTuple):
    """A histogram of finite values, counted directly and not resampled from another histogram."""

    edges: NDArray[np.float64]
    """Edges of the bins in ascending order, one more than there are bins."""
    counts: NDArray[np.int64]
    sum: float
    """Sum of the counted values, in the unit of the edges."""
    sum_squares: float

    @property
    def num_values(self) -> int:
        """Number of values in all bins."""
        return int(self.counts.sum())


class Point(NamedTuple):
    """The data of a place in the model, or of a group, in one iteration."""

    place: str
    """Unique name of the place, the same in every iteration."""
    iteration: int
    timestamp: float
    """Time of capture of its last record, in seconds since the epoch."""
    metrics: Mapping[str, float]
    """The available metrics by name."""
    values: BinnedValues | None
    """Histogram of the finite values, with bins of equal width; None without values, or if histograms are disabled."""
    binades: BinnedValues | None
    """Histogram of the nonzero magnitudes by binade, with base-2 exponents as edges; None if empty or disabled."""


def points(
    records: Records,
    *,
    metrics: Sequence[str] = (),
    has_histograms: bool = True,
    by: Sequence[str] = (),
    view: View | None = None,
    engine: Engine | None = None,
) -> list[Point]:
    """The data of each place, or of each group of `by`, in each iteration, ordered by iteration, then by place.

    Metrics that are not available are left out: those of no finite values, or those that stored statistics lack.

    Raises:
        UsageError: `by` contains the iteration, or a metric is unknown.
    """
    if "iteration" in by:
        raise UsageError("by 'iteration' is not allowed: iterations are exported as steps; leave it out")
    chosen = [parse_metric(name) for name in dict.fromkeys(metrics or METRICS)]
    fields = course_fields(records, by)
    groups = group_records(records, by=(*fields, "iteration"))
    names = place_names([{field: key[field] for field in fields} for key in groups.keys], is_whole=bool(by))
    timestamps = np.zeros(len(groups.keys))
    np.maximum.at(timestamps, np.array(groups.numbers, dtype=np.int64), records.column("timestamp"))
    found = []
    for number, digest in group_digests(records, groups, view=view or View.COMPUTE, engine=engine):
        known = {one.name: value for one in chosen if (value := one.of(digest)) is not None}
        values, binades = _histograms(digest) if has_histograms else (None, None)
        place = names[number], int(groups.keys[number]["iteration"]), float(timestamps[number])
        point = Point(*place, {name: float(value) for name, value in known.items()}, values, binades)
        found.append((point.iteration, number, point))
    return [point for *_, point in sorted(found, key=lambda one: one[:2])]


def place_names(keys: Sequence[Mapping[str, Any]], *, is_whole: bool) -> list[str]:
    """Unique names for groups with distinct keys: from all fields if `is_whole`, otherwise from as few as needed.

    Unless `is_whole`, the module and the tensor come first.
    """
    fields = list(keys[0]) if keys else []
    chosen = fields if is_whole else [field for field in ("module", "tensor_name") if field in fields]

    def num_told(named: Sequence[str]) -> int:
        return len({tuple(key[field] for field in named) for key in keys})

    while num_told(chosen) < num_told(fields):
        # Adds the field that distinguishes the most groups; among equal fields, the first.
        rest = [field for field in fields if field not in chosen]
        chosen = [*chosen, max(rest, key=lambda field: num_told([*chosen, field]))]
    return ["/".join(_word(field, key[field]) for field in chosen) or "all" for key in keys]


def _word(field: str, value: Any) -> str:
    if value is None or value == "":
        return f"no {field}"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{field} {number}" if field in INT_FIELDS or isinstance(value, float) else printable(number)


def _histograms(digest: Digest) -> tuple[BinnedValues | None, BinnedValues | None]:
    """The histograms of a digest's finite values by bins of equal width, and of their magnitudes by binade, or None.

    Sums that exceed float64 are infinite.
    """
    values, binades, numbers = linear_bins(digest, NUM_BINS), log2_bins(digest), finite(digest)
    is_nonzero = numbers.values != 0
    # The upper edge of the last binade can exceed float64, so the edges are exponents.
    step = -(-binades.counts.size // MAX_BINS) or 1
    counts = np.add.reduceat(binades.counts, np.arange(0, binades.counts.size, step)) if binades.counts.size else None
    found: list[BinnedValues | None] = [None, None]
    with np.errstate(over="ignore"):
        if values.counts.size:
            held = numbers.values, numbers.counts
            found[0] = BinnedValues(values.edges, values.counts, *_sums(*held))
        if counts is not None:
            edges = round(math.log2(binades.edges[0])) + step * np.arange(counts.size + 1, dtype=np.float64)
            held = np.log2(np.abs(numbers.values[is_nonzero])), numbers.counts[is_nonzero]
            found[1] = BinnedValues(edges, counts, *_sums(*held))
    return found[0], found[1]


def _sums(values: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[float, float]:
    return float(values @ counts), float(values**2 @ counts)


def _pictures(
    records: Records, kinds: Sequence[Plot], *, must_be_there: bool, view: View | None, engine: Engine | None
) -> dict[str, bytes]:
    """A picture of the whole selection for each plot, as the bytes of a PNG.

    A plot that cannot be drawn is left out, unless `must_be_there`.

    Raises:
        NoRecordsError: no record has floating-point or complex numbers, and `must_be_there` is true.
        UsageError: a plot cannot be drawn, and `must_be_there` is true.
    """
    from ranktape.analyze.views.plots.data import PlotData, default_target
    from ranktape.analyze.views.plots.style import plot_bytes

    drawn: dict[str, bytes] = {}
    if not kinds:
        return drawn
    try:
        data = PlotData(records, target=default_target(records), view=view, engine=engine)
    except NoRecordsError:
        if must_be_there:
            raise
        return drawn
    for kind in kinds:
        reason = kind.missing(data)
        if reason and must_be_there:
            raise UsageError(f"--kind {kind.name} cannot be drawn: {reason}")
        if not reason:
            drawn[kind.name] = plot_bytes(kind.draw(data))
    return drawn
