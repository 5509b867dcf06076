"""One record as a labelled array, whose values are read when they are used. Imports xarray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing

from ranktape.storage.records.labelled import SAMPLE, RecordGrid, labels_of, own_names

if TYPE_CHECKING:
    from ranktape.storage.records.interfaces import ReadableRecord


class LazyRecord(BackendArray):
    """The values of a record, as xarray asks for parts of a file."""

    def __init__(self, record: ReadableRecord) -> None:
        self._grid = RecordGrid([record], np.zeros((), dtype=np.int64))
        self.dtype, self.shape = self._grid.dtype, self._grid.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        # Places and slices alone: what is chosen of them by lists is chosen after the reading.
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._grid.__getitem__
        )


def record_array(record: ReadableRecord) -> xarray.DataArray:
    """The values under the names of their dimensions; `attrs` are the record's fields, samples have their identifiers.

    Nothing is read before it is used. One sample is read alone.
    """
    info = record.info
    fields = info.to_json()
    ids = fields.pop("sample_ids")
    values = xarray.Variable(own_names(record), indexing.LazilyIndexedArray(LazyRecord(record)))
    is_labelled = ids is not None and info.sample_dim is not None and len(ids) == info.shape[info.sample_dim]
    coordinates = {SAMPLE: (SAMPLE, labels_of(ids))} if is_labelled else {}
    return xarray.DataArray(values, coords=coordinates, name=info.tensor_name, attrs=fields)
