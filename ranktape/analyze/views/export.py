"""Exports a selection to the programs that people look at all day: TensorBoard, and those that read Parquet.

The same records give the same bytes, and a file has one name: beside a training's own events it is one more file, and
an export that is repeated adds nothing. For TensorBoard all records of a place in one iteration are taken as one
tensor, as `trend` takes them.
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
from ranktape.analyze.engine.numbers import group_digests, numbers_of_groups
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
"""What `--kind` says for no picture at all."""

EVENTS = "events.out.tfevents.ranktape"
"""The file for TensorBoard, which reads every file with `tfevents` in its name."""

PARQUET = "records.parquet"
"""The file with one row for each record."""

_NEEDS = {
    "tensorboard": ("TensorBoard", "tensorboard.summary.writer.record_writer"),
    "parquet": ("pyarrow", "pyarrow.parquet"),
}
"""For each destination the package that it needs, and a module of it."""

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
"""The destinations that each option is for."""


def refuse_strangers(to: str, **given: object) -> None:
    """Refuse options that were given and are for another destination."""
    for name, value in given.items():
        if value not in (None, (), False) and to not in OWNERS[name]:
            allowed = " or ".join(f"--to {one}" for one in OWNERS[name])
            raise UsageError(f"--{name.replace('_', '-')} is for {allowed}, and not for --to {to}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export gave to another program."""

    place: str
    """The file."""
    what: str
    """How much of what was exported, in words."""
    is_kept: bool
    """Whether the file was there already and holds the same."""
    next_step: str
    """The command that looks at it."""

    def message(self) -> str:
        """What was done, and what to do next."""
        kept = "; it was there already" if self.is_kept else ""
        return f"{self.place}: {self.what}{kept}\n{self.next_step}"


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
    """Write a selection for TensorBoard, or as Parquet; `target` is the folder.

    A library or a name that is missing is said before anything is read. For TensorBoard, pictures belong to the last
    iteration. Parquet has the catalogue with a column for each metric that the catalogue lacks: without metrics no
    value is read, and a metric that is not there is null.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read, or what is exported cannot be written.
        UnknownFieldError: `by` names no field of a record.
        UsageError: a library is not installed; a metric, a plot or the target is not known; or the file is there and
            holds something else, and `overwrite` was not given.
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
        next_step = "open it: SELECT in DuckDB, read_parquet of pandas and polars"
    else:
        path = _folder(target) / EVENTS
        found = points(records, metrics=metrics, has_histograms=not no_histograms, by=by, view=view, engine=engine)
        drawn = _pictures(records, kinds, must_be_there=bool(named), view=view, engine=engine)
        data, what = _event_file(found, drawn)
        next_step = f"look at it: tensorboard --logdir {shlex.quote(target)}"
    with writing(path, what="export", option="folder"):
        is_there = path.is_file()
        is_kept = is_there and path.stat().st_size == len(data) and path.read_bytes() == data
    if is_there and not (is_kept or overwrite):
        raise UsageError(f"{path} is there and holds something else: add --overwrite, or choose another folder")
    if not is_kept:
        write_whole(path, data, what="export", option="folder")
    return Exported(place=str(path), what=what, is_kept=is_kept, next_step=next_step)


def _folder(target: str) -> Path:
    """The folder that files go to, which need not be there."""
    if "://" in target:
        raise UsageError(f"{target} is a URL, and files are written to a folder of this machine: name one")
    path = Path(target)
    try:
        is_file = path.exists() and not path.is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"{target} is not a path: {error}: name a folder") from error
    if is_file:
        raise UsageError(f"{target} is a file: name a folder")
    return path


def _counted(**numbers: int) -> str:
    """Numbers of things in words, without those of which there are none: `3 scalars, 1 picture`."""
    return ", ".join(f"{number:,} {what}{'' if number == 1 else 's'}" for what, number in numbers.items() if number)


def _parquet(
    records: Records, metrics: Sequence[str], *, view: View | None, engine: Engine | None
) -> tuple[bytes, str]:
    """The catalogue with metrics as a Parquet file, and how much is in it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = records.to_arrow()
    wanted = {name: parse_metric(name) for name in metrics if name not in table.column_names}
    if wanted:
        groups = row_groups(records, by=())
        known = numbers_of_groups(records, groups, [*wanted.values()], view=view or View.COMPUTE, engine=engine)
        for name, metric in wanted.items():
            table = table.append_column(name, pa.array(known.column(metric.name), from_pandas=True))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue(), _counted(record=table.num_rows, column=table.num_columns)


def _event_file(points: Sequence[Point], pictures: Mapping[str, bytes]) -> tuple[bytes, str]:
    """The scalars, histograms and pictures as a file of TensorBoard, and how much is in it."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    writer = RecordWriter(stream)
    for event in _events(points, pictures):
        writer.write(event.SerializeToString(deterministic=True))
    num_histograms = sum(one is not None for point in points for one in (point.values, point.binades))
    num_scalars = sum(len(point.metrics) for point in points)
    amount = _counted(scalar=num_scalars, histogram=num_histograms, picture=len(pictures))
    places, iterations = ({getattr(point, name) for point in points} for name in ("place", "iteration"))
    return stream.getvalue(), f"{amount} of {_counted(place=len(places), iteration=len(iterations))}"


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
        # The header of a PNG: the size stands after its signature and the name of its first chunk.
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
        value = Summary.Value(tag=f"plots/{name}", image=image)
        yield Event(wall_time=points[-1].timestamp, step=points[-1].iteration, summary=Summary(value=[value]))


METRICS = (
    *("absmax", "rms", "std"),
    *(f"overflow.{kind}" for kind in ("ratio", "underflow.ratio", "zero.ratio", "nan.ratio")),
)
"""The metrics that are exported where none is named."""

PICTURES = ("overflow", "layer_binades")
"""The plots that go along where none is named, if the selection has something for them."""

NUM_BINS = 64
"""Bins of equal width."""

MAX_BINS = 512
"""Bins at most: W&B refuses more. Only float64 has so many binades; they are then counted together."""


class BinnedValues(NamedTuple):
    """Finite values in bins: each is counted where it lies, and none is drawn from another histogram."""

    edges: NDArray[np.float64]
    """One more than there are bins, ascending."""
    counts: NDArray[np.int64]
    sum: float
    """Of the values that are counted, on the axis of the bins."""
    sum_squares: float

    @property
    def num_values(self) -> int:
        """Values in all bins."""
        return int(self.counts.sum())


class Point(NamedTuple):
    """One place of the model, or one group, in one iteration."""

    place: str
    """What it is called: the same in every iteration, and unlike all others."""
    iteration: int
    timestamp: float
    """When the last of its records was captured, in seconds since the epoch."""
    metrics: Mapping[str, float]
    """Each metric that there is."""
    values: BinnedValues | None
    """Finite values in bins of equal width; None where none was kept, or no histogram was asked for."""
    binades: BinnedValues | None
    """Their magnitudes in binades: edges are powers of two, as exponents. Zeros are in none."""


def points(
    records: Records,
    *,
    metrics: Sequence[str] = (),
    has_histograms: bool = True,
    by: Sequence[str] = (),
    view: View | None = None,
    engine: Engine | None = None,
) -> list[Point]:
    """What is known of each place, or of each group of `by`, in each iteration: by iteration, then by place.

    A metric that is not there (of nothing finite, of statistics that were kept) is missing.
    """
    if "iteration" in by:
        raise UsageError("by 'iteration' is not allowed: what is exported goes along it; leave it out")
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
    """What groups are called that are not equal in some field; with `is_whole` by all fields, else by as few as tell.

    The module and the tensor come first.
    """
    fields = list(keys[0]) if keys else []
    chosen = fields if is_whole else [field for field in ("module", "tensor_name") if field in fields]

    def num_told(named: Sequence[str]) -> int:
        return len({tuple(key[field] for field in named) for key in keys})

    while num_told(chosen) < num_told(fields):
        # The field that tells most of them apart; of equals the first.
        rest = [field for field in fields if field not in chosen]
        chosen = [*chosen, max(rest, key=lambda field: num_told([*chosen, field]))]
    return ["/".join(_word(field, key[field]) for field in chosen) or "all" for key in keys]


def _word(field: str, value: Any) -> str:
    if value is None or value == "":
        return f"no {field}"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{field} {number}" if field in INT_FIELDS or isinstance(value, float) else printable(number)


def _histograms(digest: Digest) -> tuple[BinnedValues | None, BinnedValues | None]:
    """The finite values of a digest in bins of equal width, and their magnitudes by binade; None where there are none.

    Their sums are infinite where float64 has no number for them, as in what reads them.
    """
    values, binades, numbers = linear_bins(digest, NUM_BINS), log2_bins(digest), finite(digest)
    is_nonzero = numbers.values != 0
    # The upper end of the last binade may be beyond all numbers; its exponent is not.
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
    """For each plot a picture of the whole selection, as the bytes of a PNG."""
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
