"""Counts by binade and by sample what is in digests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.identity import SampleName
from ranktape.analyze.identity import sample_names as names_of_samples
from ranktape.analyze.views.plots.style import plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest
    from ranktape.storage import Records

LOWEST, HIGHEST = -160, 135
"""Exponents of the first and the last binade, which hold what lies beyond them too; float32 has those in between."""


def binade_counts(digest: Digest) -> NDArray[np.float64]:
    """How many finite magnitudes other than zero lie in each binade from `LOWEST` to `HIGHEST`."""
    is_wanted = np.isfinite(digest.values) & (digest.values != 0)
    # frexp has mantissas from 0.5 to 1, and is exact for subnormals too.
    places = np.clip(np.frexp(digest.values[is_wanted])[1] - 1, LOWEST, HIGHEST) - LOWEST
    counts = np.bincount(places, weights=digest.counts[is_wanted], minlength=HIGHEST - LOWEST + 1)
    return counts.astype(np.float64)


def exponents() -> NDArray[np.int64]:
    """The exponent of each binade."""
    return np.arange(LOWEST, HIGHEST + 1)


def filled(counts: NDArray[np.float64]) -> slice:
    """From the first binade that holds anything, in any row, to the last; all empty ones give a few about 2^0."""
    held = np.flatnonzero(counts.reshape(-1, counts.shape[-1]).any(axis=0))
    return slice(int(held[0]), int(held[-1]) + 1) if held.size else slice(-LOWEST - 2, -LOWEST + 3)


MAX_COLUMNS = 4096
"""Samples that are kept apart: where ranks have more, those in one place of their batches are one."""


class SampleMetrics:
    """Metrics of samples by operation and layer.

    A sample is known by the id that the user gave it; without ids by its rank and its place in the batch, as ranks have
    batches of their own. Over iterations, microbatches and tensors the largest magnitude remains.
    """

    def __init__(self, records: Records, *, layers: Sequence[int]) -> None:
        """Find out from the catalogue which samples there are; `layers` says of each record where its layer lies."""
        self._names = names_of_samples(records)
        self._ranks = records.column("rank").tolist()
        ids = records.column("sample_ids").tolist()
        self._has_ids = [
            text != "null" and not _are_places(names) for text, names in zip(ids, self._names, strict=True)
        ]
        places = zip(self._names, self._ranks, self._has_ids, strict=True)
        keys = {(rank, name) for names, rank, has_ids in places if not has_ids for name in names}
        self.is_by_rank = len({rank for rank, _ in keys}) > 1 and len(keys) <= MAX_COLUMNS
        """Whether samples without ids are told apart by their rank."""
        self.columns: dict[tuple[int | None, SampleName], int] = {}
        """Rank, or None, and id or place of each sample, and its column."""
        self._operations = records.column("operation").tolist()
        self._layers = layers
        self._largest: dict[tuple[str, int, int], float] = {}
        self._with_nan: set[tuple[str, int, int]] = set()
        # How many tensors, the sum of their ratios, the lowest, the highest.
        self._ratios: dict[tuple[str, int], list[float]] = {}

    def add(self, index: int, digest: Digest) -> None:
        """Take in the samples of the record in that place, if it has any."""
        samples = digest.samples
        if samples is None or not samples["num_elements"].size:
            return
        operation, layer = self._operations[index], self._layers[index]
        median = float(np.nanmedian(samples["absmax"])) if np.isfinite(samples["absmax"]).any() else math.nan
        rank = self._ranks[index] if self.is_by_rank and not self._has_ids[index] else None
        rows = zip(self._names[index], samples["nan"].tolist(), samples["absmax"].tolist(), strict=True)
        for name, num_nan, absmax in rows:
            column = self.columns.setdefault((rank, name), len(self.columns))
            cell = (operation, layer, column)
            if num_nan > 0:
                self._with_nan.add(cell)
            self._largest[cell] = float(np.fmax(self._largest.get(cell, math.nan), absmax))
            if absmax > 0 and median > 0:
                ratio = math.log2(absmax / median)
                found = self._ratios.setdefault((operation, column), [0.0, 0.0, math.inf, -math.inf])
                found[:] = [found[0] + 1, found[1] + ratio, min(found[2], ratio), max(found[3], ratio)]

    def ordered(self) -> list[tuple[int | None, SampleName]]:
        """The samples: by rank and place, then by id; numbers before words."""
        return sorted(self.columns, key=lambda key: (key[0] is None, key[0] or 0, isinstance(key[1], str), key[1]))

    def grid(self, *, operation: str, layers: list[int]) -> NDArray[np.float64]:
        """The largest finite magnitude of each layer and sample, in the order of `ordered`; NaN if there is none."""
        order = {self.columns[key]: place for place, key in enumerate(self.ordered())}
        rows = {layer: row for row, layer in enumerate(layers)}
        grid = np.full((len(layers), len(order)), np.nan)
        for (whose, layer, column), largest in self._largest.items():
            if whose == operation and layer in rows:
                grid[rows[layer], order[column]] = largest
        return grid

    def has_nan(self, operation: str, layers: list[int]) -> NDArray[np.bool_]:
        """For each layer and sample, in the order of `ordered`, whether values are NaN."""
        columns = [self.columns[key] for key in self.ordered()]
        return np.array(
            [[(operation, layer, one) in self._with_nan for one in columns] for layer in layers], dtype=bool
        )

    def ratios(self, operation: str) -> NDArray[np.float64]:
        """For each sample in order: mean, lowest and highest log2 of its absmax over the median sample's of the tensor.

        NaN where nothing is known.
        """
        found = np.full((len(self.columns), 3), np.nan)
        for place, key in enumerate(self.ordered()):
            if (operation, self.columns[key]) in self._ratios:
                count, total, low, high = self._ratios[operation, self.columns[key]]
                found[place] = total / count, low, high
        return found


def _are_places(names: list[SampleName]) -> bool:
    """Whether names may be places in a batch: of all of it, or of one sample that was saved alone."""
    return names == list(range(len(names))) or (len(names) == 1 and isinstance(names[0], int))


def sample_names(samples: SampleMetrics) -> tuple[list[str], str]:
    """What samples are called, and what stands below an axis of them: the user's ids, or rank and place, or place."""
    names = [plain(one, max_letters=12) if rank is None else f"{rank}:{one}" for rank, one in samples.ordered()]
    return names, "rank : place in the batch" if samples.is_by_rank else "sample"
