"""Writes an event file, which TensorBoard shows: scalars, histograms and pictures over the iterations.

The same records give the same bytes, and the file has one name: beside a training's own events it is one more file, and
an export that is repeated adds nothing.
"""

from __future__ import annotations

import io
import shlex
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.views.exports.files import (
    Exported,
    amount,
    check_folder,
    counted,
    missing_package,
    put_file,
)

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    from ranktape.analyze.views.exports.series import BinnedValues, Point

FILE = "events.out.tfevents.ranktape"
"""TensorBoard reads every file with `tfevents` in its name."""


def check_tensorboard() -> None:
    """See that the library is there, before anything is read.

    Raises:
        UsageError: TensorBoard is not installed.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401 - asked whether it is there
    except ImportError as error:
        raise missing_package("TensorBoard", "tensorboard", error) from error


def write_events(
    points: Sequence[Point], pictures: Mapping[str, bytes], *, folder: str, overwrite: bool = False
) -> Exported:
    """Write the event file of a folder; pictures belong to the last iteration.

    Raises:
        StorageError: it cannot be written.
        UsageError: TensorBoard is not installed, or the file is there and holds something else.
    """
    check_tensorboard()
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = check_folder(folder) / FILE
    stream = io.BytesIO()
    writer = RecordWriter(stream)
    for event in _events(points, pictures):
        writer.write(event.SerializeToString(deterministic=True))
    is_kept = put_file(path, stream.getvalue(), what="event file", overwrite=overwrite)
    places, iterations = ({getattr(point, name) for point in points} for name in ("place", "iteration"))
    over = counted([(len(places), "place"), (len(iterations), "iteration")])
    next_step = f"look at it: tensorboard --logdir {shlex.quote(folder)}"
    return Exported(place=str(path), what=f"{amount(points, pictures)} of {over}", is_kept=is_kept, next_step=next_step)


def _events(points: Sequence[Point], pictures: Mapping[str, bytes]) -> list[Event]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    events = [Event(wall_time=points[0].timestamp if points else 0.0, file_version="brain.Event:2")]
    for point in points:
        values = [
            Summary.Value(tag=f"{name}/{point.place}", simple_value=_float32(value))
            for name, value in point.metrics.items()
        ]
        for kind, found in (("values", point.values), ("binades", point.binades)):
            if found is not None:
                values.append(Summary.Value(tag=f"{kind}/{point.place}", histo=_histogram(found)))
        events.append(Event(wall_time=point.timestamp, step=point.iteration, summary=Summary(value=values)))
    for name, png in pictures.items():
        # The header of a PNG: the size stands after its signature and the name of its first chunk.
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
        value = Summary.Value(tag=f"plots/{name}", image=image)
        last = points[-1]
        events.append(Event(wall_time=last.timestamp, step=last.iteration, summary=Summary(value=[value])))
    return events


def _float32(value: float) -> float:
    """The value as the field holds it, which takes no number that is too large for it."""
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _histogram(found: BinnedValues) -> HistogramProto:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    return HistogramProto(
        min=found.edges[0],
        max=found.edges[-1],
        num=found.num_values,
        sum=found.sum,
        sum_squares=found.sum_squares,
        bucket_limit=found.edges[1:].tolist(),
        bucket=found.counts.tolist(),
    )
