"""Gives the names of the samples of each record."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from ranktape.storage.format.record_info import is_one_sample

if TYPE_CHECKING:
    from ranktape.storage import Records

SAMPLE = "sample"
"""The word for them among the fields that are grouped by."""

SampleName = int | str
"""The user's identifier, or the index along the dimension of samples where none were given."""


def sample_names(records: Records) -> list[list[SampleName]]:
    """For each record the names of its samples, in order; none for a record whose samples cannot be told apart.

    A record without a dimension of samples that has one identifier is that sample, unless it is a parameter.
    """
    columns = (records.column(name).tolist() for name in ("sample_dim", "sample_ids", "shape", "tensor_name"))
    return [_names(*fields) for fields in zip(*columns, strict=True)]


def _names(dim: float, given: str, shape: str, tensor_name: str) -> list[SampleName]:
    names = json.loads(given)
    if math.isnan(dim):
        return names if is_one_sample(names, tensor_name=tensor_name) else []
    count = json.loads(shape)[int(dim)]
    return names if isinstance(names, list) and len(names) == count else list(range(count))
