"""One captured tensor: its fields, and its values, which are read on demand."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ranktape.errors import DataError, UsageError
from ranktape.storage.format.dtypes import to_torch
from ranktape.storage.format.record_info import Keep, RecordInfo
from ranktape.storage.format.statistics import Statistics
from ranktape.storage.records.tables import fields_html

if TYPE_CHECKING:
    import numpy as np
    import torch
    import xarray
    from matplotlib.axes import Axes

    from ranktape.storage.records.assemble import GlobalView


class RecordOrigin(Protocol):
    """The source of records: a run, a folder of files, or several of these."""

    @property
    def url(self) -> str:
        """URL or name of the source, for messages."""
        ...


class RecordReader(RecordOrigin, Protocol):
    """The source of the values of records: a run, or a folder of files."""

    def read(self, record: Record, *, sample: int | None) -> np.ndarray[Any, Any]:
        """The stored part of a record; with `sample`, that of one sample without the sample dimension."""
        ...

    def parts(self, record: Record) -> Iterator[np.ndarray[Any, Any]]:
        """The values of a record in parts."""
        ...

    def siblings(self, record: Record) -> Iterable[Record]:
        """The records of all ranks at the site of a record, in its iteration and attempt, including the record."""
        ...


if TYPE_CHECKING:
    _Fields = RecordInfo
else:
    _Fields = object
"""Declares the attributes of a record for type checkers and editors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The location of the values of a record."""

    group: str
    """Path of the group of its rank's iteration, below the run."""
    site: str
    """Path of the tensor below the group, which is also its name."""
    stack: str
    """Name of the array below the group that it shares with other tensors; empty if it has its own array."""
    index: int
    """Index in the shared array; -1 if it has its own array."""

    @property
    def array_path(self) -> str:
        """Path, below the run, of the array with the values."""
        return f"{self.group}/{self.stack or self.site}"


class Record(_Fields):
    """One captured tensor. Each field of `RecordInfo` is an attribute; values are read on demand."""

    def __init__(self, info: RecordInfo, *, location: Location, reader: RecordReader) -> None:
        self.info = info
        """The metadata as one object."""
        self.location = location
        """The location of the values."""
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "info":
            raise AttributeError(name)
        return getattr(self.info, name)

    def __repr__(self) -> str:
        info = self.info
        place = f"iteration={info.iteration} rank={info.rank} microbatch={info.microbatch} call={info.call}"
        what = f"{info.module or '(no module)'} {info.operation} {info.phase} {info.tensor_name}"
        return f"<Record {what} {place} {info.dtype}{list(info.shape)}>"

    def _repr_html_(self) -> str:
        document = self.info.to_json()
        overflow = document.pop("overflow")
        overflow.pop("per_sample")
        counts = {
            f"overflow.{name}": value["count"] if isinstance(value, dict) else value for name, value in overflow.items()
        }
        return fields_html("Record", {"path": self.path, **document, **counts})

    @property
    def reader(self) -> RecordReader:
        """The source of the values."""
        return self._reader

    @property
    def path(self) -> str:
        """The record's name below the run. If the record has its own array, this is the path of the array."""
        return f"{self.location.group}/{self.location.site}"

    def read(self, sample: int | None = None) -> np.ndarray[Any, Any]:
        """The values as a numpy array of the captured dtype (from ml_dtypes if numpy has none).

        NaN payloads, infinities and signed zeros are those captured. With `sample`, the values of one sample without
        the sample dimension, which takes two small requests if samples have 1 kB or more. If the whole tensor is one
        sample, sample 0 is the tensor.

        Raises:
            DataError: bytes are missing or were changed.
            UsageError: the sample does not exist, the tensor has no samples, or its values were not kept.
        """
        self._expect(Keep.VALUES)
        index = None if sample is None else self._checked_sample(sample)
        return self._reader.read(self, sample=None if self.info.sample_dim is None else index)

    def parts(self) -> Iterator[np.ndarray[Any, Any]]:
        """The values in parts, so that at most one chunk, or a few small ones, are in memory at a time.

        If the record has samples, a part has one or more of them along its first dimension; otherwise a part is a run
        of `record_info.RUN` elements in C order, whatever the chunks of the store. Parts are read-only. Checksums are
        compared at the latest after the last part: do not rely on a part before that. An empty record has no parts.

        Raises:
            DataError: bytes are missing or were changed.
            UsageError: the values were not kept.
        """
        self._expect(Keep.VALUES)
        return self._reader.parts(self)

    def histogram(self) -> np.ndarray[Any, Any]:
        """The words of the histogram: first the counts of the 65,536 bit patterns, then counts of values in blocks.

        docs/format.md specifies each word.

        Raises:
            DataError: bytes are missing or were changed.
            UsageError: the record is not stored as a histogram.
        """
        self._expect(Keep.HISTOGRAM)
        return self._reader.read(self, sample=None)

    def statistics(self) -> Statistics:
        """The statistics over the finite values: mean, standard deviation, extremes and others.

        Raises:
            DataError: bytes are missing or were changed.
            UsageError: the record is not stored as statistics.
        """
        self._expect(Keep.STATISTICS)
        statistics = Statistics.from_vector(self._reader.read(self, sample=None))
        if statistics.num_elements != math.prod(self.info.shape):
            raise DataError(f"the statistics of {self!r} are damaged: they are of {statistics.num_elements} elements")
        return statistics

    def hist(self, *, axes: Axes | None = None) -> Axes:
        """Draw the share of the values in each binade (power of two of the magnitude), and return the axes.

        Zeros, NaN and infinities are not drawn; the title counts them. Without `axes`, a figure of pyplot is created.
        For a selection of records use `ranktape.analyze.distribution(records).plot()`.

        Raises:
            DataError: bytes are missing or were changed.
            UsageError: the values were not kept, or are complex.
        """
        import numpy as np

        counts: Counter[int] = Counter()
        special: Counter[str] = Counter()
        for part in self.parts():
            if np.iscomplexobj(part):
                raise UsageError(f"hist() draws real values, and {self!r} is complex: use read()")
            values = np.abs(part.astype(np.float64))
            is_plain = np.isfinite(values) & (values > 0)
            binades, number = np.unique(np.frexp(values[is_plain])[1] - 1, return_counts=True)
            counts.update(dict(zip(binades.tolist(), number.tolist(), strict=True)))
            special["zero"] += int((values == 0).sum())
            special["NaN"] += int(np.isnan(values).sum())
            special["Inf"] += int(np.isinf(values).sum())
        total = max(sum(counts.values()) + sum(special.values()), 1)
        if axes is None:
            from matplotlib import pyplot as plt

            axes = plt.subplots(layout="constrained")[1]
        axes.bar(list(counts), [count / total for count in counts.values()], width=0.9)
        rest = ", ".join(f"{count / total:.3g} {name}" for name, count in special.items() if count)
        name = f"{self.info.module} {self.info.tensor_name}, iteration {self.info.iteration}, rank {self.info.rank}"
        axes.set(xlabel="power of two of the magnitude", ylabel="share of the values")
        axes.set_title(f"{name}\n{rest}" if rest else name)
        return axes

    def tensor(self) -> torch.Tensor:
        """The values as a CPU tensor of the captured dtype.

        Raises:
            DataError: bytes are missing or were changed.
            UsageError: torch does not have the dtype.
        """
        return to_torch(self.read(), dtype=self.info.dtype, shape=self.info.shape)

    def to_xarray(self) -> xarray.DataArray:
        """The values with named dimensions and the identifiers of samples as coordinates. They are read on use.

        Dimensions are named by the letters of `layout`, else `dim0`, `dim1` and so on; the sample dimension is
        `sample`. `attrs` are the record's fields. Indexing one sample reads that sample only; `load()` caches values.

        Raises:
            UsageError: xarray is not installed, or the values were not kept.
        """
        try:
            from ranktape.storage.records.labelled import record_array
        except ImportError as error:
            raise UsageError(f"to_xarray() needs xarray ({error}): pip install 'ranktape[notebook]'") from error
        self._expect(Keep.VALUES)
        return record_array(self)

    def global_view(self, *, replicas: str = "check") -> GlobalView[Record]:
        """The tensor over all ranks, assembled from this record and those of the other ranks.

        Replicas of a shard must have equal bits, unless `replicas` is `"ignore"`: then the first one is used.

        Raises:
            DataError: the placement is damaged.
            StorageError: the store cannot be read.
            UsageError: the record is from a folder of files, which does not know the other ranks.
        """
        from ranktape.storage.records.assemble import view_of

        siblings = [self] if self.info.placement is None else self._reader.siblings(self)
        return view_of(self, siblings=siblings, replicas=replicas)

    def _expect(self, keep: Keep) -> None:
        if self.info.keep != keep:
            raise UsageError(f"of {self!r} {Keep(self.info.keep).not_kept(keep)}")

    def _checked_sample(self, sample: int) -> int:
        count = self.info.num_samples
        if self.info.sample_dim is None and not count:
            raise UsageError(f"{self!r} has no dimension of samples: read it as a whole")
        index = operator.index(sample)
        if not 0 <= index < count:
            raise UsageError(f"sample {sample} is not in {self!r}: it has samples 0 to {count - 1}")
        return index
