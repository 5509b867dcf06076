"""What does each scale lose of the tensor that needs the widest range?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.engine.sweep_measure import sweep_one
from ranktape.analyze.legacy.outputs.plots import draw_panels, draw_summary
from ranktape.analyze.questions.swept import jobs_of, parse_request
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.storage import Record

DEFAULT_FORMAT = "fp8_e4m3"
"""What is swept where no format is asked for."""


def widest(data: PlotData) -> int | None:
    """The place of the record whose finite magnitudes reach over the most octaves; None where no value was kept.

    Of several the first; records whose values are not known at all are none.
    """
    is_kept = data.records.column("keep") != Keep.STATISTICS
    ranges = np.where(is_kept, np.nan_to_num(data.metric("log2_range"), nan=-1.0), -2.0)
    place = int(ranges.argmax())
    return place if is_kept[place] else None


def draw_sweep(data: PlotData, *, is_summary: bool) -> Figure:
    """Six panels or a summary of the sweep of that record, one scale for the tensor; it is read once more.

    Raises:
        DataError: the record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: the format has no room for a scale.
    """
    place = widest(data)
    if place is None:
        raise UsageError("of all tensors statistics alone were kept: no scale can be tried")
    record = data.records[place]
    name = DEFAULT_FORMAT if data.target is None else data.target.name
    jobs = jobs_of(parse_request([name], view=data.view))
    (sweep,) = sweep_one(record, jobs, view=data.view)
    return (draw_summary if is_summary else draw_panels)(sweep, name=record_name(record))


def record_name(record: Record) -> str:
    """What people call a record: where it is in the model, and when and where it was recorded."""
    return (
        f"{record.module or record.layer_type} {record.tensor_name}, {record.operation} {record.phase}, "
        f"iteration {record.iteration}, rank {record.rank}"
    )
