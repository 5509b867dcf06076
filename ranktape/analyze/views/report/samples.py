"""Gathers metrics of samples, record by record, in as many numbers as a page can hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.views.report.columns import packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digests.digest import Digest

SAMPLE_FIGURES = ("overflow.ratio", "overflow.underflow.ratio", "absmax", "std", "mean", "norm")
"""What the page knows of each sample."""

MAX_SAMPLES = 200_000
"""Samples of all records together; of more, the records whose samples differ most are kept."""


class SampleColumns:
    """Collects metrics of samples, one digest after the other."""

    def __init__(self) -> None:
        self._figures: dict[int, NDArray[np.float64]] = {}

    def add(self, index: int, digest: Digest) -> None:
        """Take in what is known of one record."""
        samples = digest.samples
        if samples is None or not samples["num_elements"].size:
            return
        elements = np.maximum(1, samples["num_elements"])
        known = {
            "overflow.ratio": (samples["upper"] + samples["lower"]) / elements,
            "overflow.underflow.ratio": samples["underflow"] / elements,
        }
        rows = [known[name] if name in known else samples[name] for name in SAMPLE_FIGURES]
        self._figures[index] = np.asarray(rows, dtype=np.float64)

    @property
    def num_records(self) -> int:
        """Records that have samples."""
        return len(self._figures)

    def to_json(self, *, first: Collection[int], limit: int = MAX_SAMPLES) -> tuple[dict[str, Any], int]:
        """The figures as columns, and of how many records; those of `first` before others."""
        kept = self._kept(first=first, limit=limit)
        nothing = np.zeros((len(SAMPLE_FIGURES), 0))
        columns = np.concatenate([nothing, *(self._figures[index] for index in kept)], axis=1)
        document = {
            "records": packed(kept),
            "length": packed([self._figures[index].shape[1] for index in kept]),
            "count": len(kept),
            "figures": {name: packed(column) for name, column in zip(SAMPLE_FIGURES, columns, strict=True)},
        }
        return document, len(kept)

    def _kept(self, *, first: Collection[int], limit: int) -> list[int]:
        wanted = set(first)
        order = sorted(self._figures, key=lambda index: (index not in wanted, -self._spread(index), index))
        lengths = np.cumsum([self._figures[index].shape[1] for index in order])
        return sorted(order[: int(np.searchsorted(lengths, limit, side="right"))])

    def _spread(self, index: int) -> float:
        """The largest magnitude of the samples over their median; 0 where there is none."""
        largest = self._figures[index][SAMPLE_FIGURES.index("absmax")]
        known = largest[np.isfinite(largest)]
        middle = float(np.median(known)) if known.size else 0.0
        return float(known.max()) / middle if middle > 0 else 0.0
