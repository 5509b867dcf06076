"""What are the samples of each record called?"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranktape.storage import Records

SAMPLE = "sample"
"""The word for them among the fields that are grouped by."""

SampleName = int | str
"""The user's identifier, or the index along the dimension of samples where none were given."""


def sample_names(records: Records) -> list[list[SampleName]]:
    """For each record the names of its samples, in order; none for a record without a dimension of samples."""
    columns = (records.column(name).tolist() for name in ("sample_dim", "sample_ids", "shape"))
    return [_names(dim, given, shape) for dim, given, shape in zip(*columns, strict=True)]


def _names(dim: float, given: str, shape: str) -> list[SampleName]:
    if math.isnan(dim):
        return []
    count = json.loads(shape)[int(dim)]
    names = json.loads(given)
    return names if isinstance(names, list) and len(names) == count else list(range(count))
