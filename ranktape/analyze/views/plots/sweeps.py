"""Draws what each scale loses of the tensor that needs the widest range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.engine.sweep_measure import sweep_one
from ranktape.analyze.legacy.outputs.plots import draw_panels, draw_summary
from ranktape.analyze.questions.swept import parse_jobs
from ranktape.analyze.views.plots.data import DEFAULT_FORMAT
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.analyze.views.plots.plot import Plot


def sweep(data: PlotData, _: Plot, *, is_summary: bool) -> Figure:
    """Six panels or a summary of the sweep of that record, one scale for the tensor; it is read once more.

    It is the first of those whose finite magnitudes reach over the most binades.

    Raises:
        DataError: the record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: the format has no room for a scale.
    """
    is_kept = data.records.column("keep") != Keep.STATISTICS
    # Records whose values are not known at all are behind those without a range.
    ranges = np.where(is_kept, np.nan_to_num(data.metric("log2_range"), nan=-1.0), -2.0)
    place = int(ranges.argmax())
    if not is_kept[place]:
        raise UsageError("of all tensors statistics alone were kept: no scale can be tried")
    record = data.records[place]
    name = DEFAULT_FORMAT if data.target is None else data.target.name
    (found,) = sweep_one(record, parse_jobs(name), view=data.view)
    title = f"{record.module or record.layer_type} {record.tensor_name}, {record.operation} {record.phase}"
    named = f"{title}, iteration {record.iteration}, rank {record.rank}"
    return (draw_summary if is_summary else draw_panels)(found, name=named)
