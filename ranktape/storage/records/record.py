"""One captured tensor: its fields, and its values, which are read when they are asked for."""

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
    """Where records come from: a run, a folder of files, or several of these."""

    @property
    def url(self) -> str:
        """What it is called in messages."""
        ...


class RecordReader(RecordOrigin, Protocol):
    """Where the values of records come from: a run, or a folder of files."""

    def read(self, record: Record, *, sample: int | None) -> np.ndarray[Any, Any]:
        """What is kept of a record; with `sample` of one sample, without the dimension of samples."""
        ...

    def parts(self, record: Record) -> Iterator[np.ndarray[Any, Any]]:
        """The values of a record, a part after the other."""
        ...

    def siblings(self, record: Record) -> Iterable[Record]:
        """What all ranks recorded at the place of a record, in its iteration and attempt; itself among it."""
        ...


if TYPE_CHECKING:
    _Fields = RecordInfo
else:
    _Fields = object
"""What checkers and editors take the attributes of a record from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the values of a record lie."""

    group: str
    """Path of the group of its rank's iteration, below the run."""
    site: str
    """Path of the tensor below it, which is also its name."""
    stack: str
    """The array below the group that holds it with others; empty where it has one of its own."""
    index: int
    """Its place in that array; -1 where it has one of its own."""

    @property
    def array_path(self) -> str:
        """Path, below the run, of the array that holds the values."""
        return f"{self.group}/{self.stack or self.site}"


class Record(_Fields):
    """One captured tensor; every field of `RecordInfo` is an attribute, and values are read when asked for."""

    def __init__(self, info: RecordInfo, *, location: Location, reader: RecordReader) -> None:
        self.info = info
        """The identity, as one value."""
        self.location = location
        """Where the values lie."""
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
        """Where the values come from."""
        return self._reader

    @property
    def path(self) -> str:
        """The record's name below the run; the path of its array, where it has one of its own."""
        return f"{self.location.group}/{self.location.site}"

    def read(self, sample: int | None = None) -> np.ndarray[Any, Any]:
        """The values as numpy array of the captured dtype (from ml_dtypes where numpy has none).

        With `sample` those of one sample, without the dimension of samples: two small requests where samples are
        of 1 kB and more. Of a tensor that is one sample, sample 0 is all of it. NaN payloads, infinities and signed
        zeros are those captured.

        Raises:
            DataError: bytes are missing, or are not those captured.
            UsageError: there is no such sample, the tensor has no samples, or its values were not kept.
        """
        self._expect(Keep.VALUES)
        index = None if sample is None else self._checked_sample(sample)
        return self._reader.read(self, sample=None if self.info.sample_dim is None else index)

    def parts(self) -> Iterator[np.ndarray[Any, Any]]:
        """The values in parts, of which no more is in memory at once than a chunk, or a few of small ones.

        Of a record with samples, one or some of them in each part, whose first dimension counts them; else runs of
        `record_info.RUN` elements in C order. In which parts the store holds the values makes no difference to a run.
        What is yielded may not be written to. Whether it is what was captured is said at the latest behind the last
        part: nothing holds before. Of an empty record there is no part.

        Raises:
            DataError: bytes are missing, or are not those captured.
            UsageError: the values were not kept.
        """
        self._expect(Keep.VALUES)
        return self._reader.parts(self)

    def histogram(self) -> np.ndarray[Any, Any]:
        """The words of the histogram, where that was kept: first how often each of the 65,536 bit patterns occurs.

        What follows counts values in blocks; docs/format.md has it word by word.

        Raises:
            DataError: bytes are missing, or are not those written.
            UsageError: something else was kept.
        """
        self._expect(Keep.HISTOGRAM)
        return self._reader.read(self, sample=None)

    def statistics(self) -> Statistics:
        """What the finite values add up to, where the statistics were kept: mean, deviation, extremes and others.

        Raises:
            DataError: bytes are missing, or are not those written.
            UsageError: something else was kept.
        """
        self._expect(Keep.STATISTICS)
        statistics = Statistics.from_vector(self._reader.read(self, sample=None))
        if statistics.num_elements != math.prod(self.info.shape):
            raise DataError(f"the statistics of {self!r} are damaged: they are of {statistics.num_elements} elements")
        return statistics

    def hist(self, *, axes: Axes | None = None) -> Axes:
        """Draw the share of the values in each binade (power of two of the magnitude); returns the axes.

        Zeros, NaN and infinities are in no bar, and in the title if there are some. Without `axes` a figure of pyplot
        is made. For a selection of records use `ranktape.analyze.distribution(records).plot()`.

        Raises:
            DataError: bytes are missing, or are not those captured.
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
        """The values as a torch tensor of the captured dtype, on the CPU.

        Raises:
            DataError: as `read`.
            UsageError: torch has no such dtype.
        """
        return to_torch(self.read(), dtype=self.info.dtype, shape=self.info.shape)

    def to_xarray(self) -> xarray.DataArray:
        """The values under the names of their dimensions, those of samples with their identifiers; read when used.

        Dimensions are the letters of `layout`, else `dim0`, `dim1` and so on; that of samples is `sample`. `attrs` are
        the record's fields. What is taken of one sample reads no more than that sample; `load()` keeps what it read.

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
        """The tensor over all ranks of which this record is a part, from the parts that all of them recorded.

        Copies of one part must be the same bits, unless `replicas` is `"ignore"`: the first of them counts then.

        Raises:
            DataError: the placement is damaged.
            StorageError: the store cannot be read.
            UsageError: a folder of files does not say what other ranks recorded.
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
