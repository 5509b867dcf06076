"""Counts by binade and by sample what one pass over the digests of a selection finds, and compares ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.identity import SAMPLE
from ranktape.analyze.identity import sample_names as names_of_samples
from ranktape.analyze.views.plots.style import plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.identity import SampleName
    from ranktape.analyze.numerics.digest import Digest
    from ranktape.analyze.views.plots.data import PlotData
    from ranktape.storage import Records

LOWEST, HIGHEST = -160, 135
"""Exponents of the first and the last binade, which hold what lies beyond them too; float32 has those in between."""


class Binades:
    """Counts of finite magnitudes by binade, [2^e, 2^(e+1)) for an exponent e, by operation and value of a field."""

    def __init__(self, data: PlotData, field: str) -> None:
        self._operations, self._num_values = data.values_of("operation"), len(data.values_of(field))
        self._row_of = data.codes("operation") * self._num_values + data.codes(field)
        # Zeros, and what is not finite, are behind the binades.
        self._counts = np.zeros((len(self._operations) * self._num_values, HIGHEST - LOWEST + 3))

    def add(self, index: int, digest: Digest) -> None:
        """Add the values of the record in that place."""
        row = self._counts[self._row_of[index]]
        row[:-2] += binade_counts(digest)
        row[-2:] += digest.tallies.zero, digest.tallies.nan + digest.tallies.inf

    def shares(self, operation: str, *, with_zeros: bool = False) -> NDArray[np.float64]:
        """For each value of the field, in order, the part of all its elements in each binade.

        With zeros in a column of their own behind. NaN where no record is, or no value is known.
        """
        start = self._operations.index(operation) * self._num_values
        counts = self._counts[start : start + self._num_values]
        total = counts.sum(axis=1, keepdims=True)
        wanted = counts[:, : -1 if with_zeros else -2]
        return np.where(total > 0, wanted / np.maximum(1, total), np.nan)


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

_TAKEN = ("num_elements", "upper", "lower", "underflow", "num_finite", "mean", "std", "absmax")


class SampleMetrics:
    """Metrics of samples by operation and layer.

    A sample is known by the id that the user gave it; without ids by its rank and its place in the batch, as ranks have
    batches of their own. Over iterations, microbatches and tensors counts add up, and the largest magnitude remains.
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
        self.is_recounted = False
        """Whether counts are those of `recount`."""
        self.columns: dict[tuple[int | None, SampleName], int] = {}
        """Rank, or None, and id or place of each sample, and its column."""
        self._operations = records.column("operation").tolist()
        self._layers = layers
        # Elements, overflow, underflow, finite values, their sum, that of their squares; the largest magnitude.
        self._cells: dict[tuple[str, int, int], list[float]] = {}
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
        rows = zip(*(samples[name].tolist() for name in _TAKEN), strict=True)
        for name, (elements, upper, lower, underflow, count, mean, std, absmax) in zip(
            self._names[index], rows, strict=True
        ):
            column = self.columns.setdefault((rank, name), len(self.columns))
            cell = self._cells.setdefault((operation, layer, column), [0.0] * 6 + [math.nan])
            of_finite = (count, count * mean, count * (std**2 + mean**2)) if count and std == std else (0.0, 0.0, 0.0)  # noqa: PLR0124
            added = (elements, upper + lower, underflow, *of_finite)
            cell[:] = [*map(sum, zip(cell, added, strict=False)), float(np.fmax(cell[-1], absmax))]
            if absmax > 0 and median > 0:
                ratio = math.log2(absmax / median)
                found = self._ratios.setdefault((operation, column), [0.0, 0.0, math.inf, -math.inf])
                found[:] = [found[0] + 1, found[1] + ratio, min(found[2], ratio), max(found[3], ratio)]

    def recount(
        self, groups: Iterable[tuple[Mapping[str, Any], Mapping[str, float]]], *, places: Mapping[tuple[str, int], int]
    ) -> None:
        """Replace counts by those of groups by operation, stack, layer, rank and sample.

        `places` says for each stack and layer where it lies.
        """
        self.is_recounted = True
        for cell in self._cells.values():
            cell[:3] = 0.0, 0.0, 0.0
        for key, counts in groups:
            column = self.columns.get((key["rank"], key[SAMPLE]), self.columns.get((None, key[SAMPLE]), -1))
            layer = places[key["layer_stack"], key["layer_idx"]]
            found = self._cells.get((key["operation"], layer, column))
            if found is not None:
                added = (counts["elements"], counts["total"], counts["underflow"])
                found[:3] = [one + other for one, other in zip(found[:3], added, strict=True)]

    def ordered(self) -> list[tuple[int | None, SampleName]]:
        """The samples: by rank and place, then by id; numbers before words."""
        return sorted(self.columns, key=lambda key: (key[0] is None, key[0] or 0, isinstance(key[1], str), key[1]))

    def grid(self, name: str, *, operation: str, layers: list[int]) -> NDArray[np.float64]:
        """A metric for each layer and sample, in the order of `ordered`; NaN where there is none.

        `overflow` and `underflow` are parts of all elements, `std` is of all finite values, `extreme` the largest
        finite magnitude.
        """
        order = {self.columns[key]: place for place, key in enumerate(self.ordered())}
        rows = {layer: row for row, layer in enumerate(layers)}
        grid = np.full((len(layers), len(order)), np.nan)
        for (whose, layer, column), cell in self._cells.items():
            if whose == operation and layer in rows:
                grid[rows[layer], order[column]] = _metric(name, cell)
        return grid

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


def _metric(name: str, cell: list[float]) -> float:
    elements, overflow, underflow, count, total, squares, absmax = cell
    if name == "extreme":
        return absmax
    if name == "std":
        return math.sqrt(max(0.0, squares / count - (total / count) ** 2)) if count else math.nan
    return (overflow if name == "overflow" else underflow) / max(1.0, elements)


def sample_names(samples: SampleMetrics) -> tuple[list[str], str]:
    """What samples are called, and what stands below an axis of them: the user's ids, or rank and place, or place."""
    names = [plain(one, max_letters=12) if rank is None else f"{rank}:{one}" for rank, one in samples.ordered()]
    return names, "rank : place in the batch" if samples.is_by_rank else "sample"


SITE_OF_RANKS = ("iteration", "microbatch", "call", "module", "operation", "phase", "tensor_name")
"""What is the same of a tensor on all ranks."""

MAX_COMPARED, MAX_SITES = 128, 4096
"""Ranks that are compared with one another, and tensors that they are compared by.

Of more ranks blocks of neighbours are compared, of more tensors every n-th."""


def _rank_logs(data: PlotData, metric: str) -> tuple[NDArray[np.float64], list[int]]:
    """log2 of a metric for each site and rank, NaN where there is none; and the layer of each site."""
    sites = list(zip(*(data.column(field).tolist() for field in (*SITE_OF_RANKS, "layer_idx")), strict=True))
    index = {site: number for number, site in enumerate(dict.fromkeys(sites))}
    grid = np.full((len(index), len(data.values_of("rank"))), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(data.metric(metric))
    grid[[index[site] for site in sites], data.codes("rank")] = np.where(np.isfinite(logs), logs, np.nan)
    return grid, [site[-1] for site in index]


def rank_deviations(data: PlotData, *, layers: Sequence[int]) -> NDArray[np.float64]:
    """For each layer and rank log2 of absmax over that of the median rank: of the tensor that is farthest off.

    NaN where no other rank has the same tensor.
    """
    logs, layer_of = _rank_logs(data, "absmax")
    found = np.full((len(layers), logs.shape[1]), np.nan)
    rows = {layer: row for row, layer in enumerate(layers)}
    shared = np.flatnonzero((~np.isnan(logs)).sum(axis=1) > 1)
    if not shared.size:
        return found
    deviations = logs[shared] - np.nanmedian(logs[shared], axis=1, keepdims=True)
    for site, values in zip(shared.tolist(), deviations, strict=True):
        row = found[rows[layer_of[site]]]
        row[:] = np.where(np.isnan(row) | (np.abs(values) > np.abs(row)), np.where(np.isnan(values), row, values), row)
    return found


def rank_distances(data: PlotData) -> tuple[NDArray[np.float64], int]:
    """For each pair of ranks the mean |log2| of the ratio of the deviations of the same tensors, and ranks in a block.

    Of blocks of neighbouring ranks, a tensor's deviation is the one farthest from the median rank's. NaN where two
    have no tensor in common.
    """
    logs, _ = _rank_logs(data, "std")
    logs = logs[:: math.ceil(logs.shape[0] / MAX_SITES)]
    size = math.ceil(logs.shape[1] / MAX_COMPARED)
    if size > 1:
        known = logs[(~np.isnan(logs)).any(axis=1)]
        off = known - np.nanmedian(known, axis=1, keepdims=True)
        starts = np.arange(0, off.shape[1], size)
        high, low = np.fmax.reduceat(off, starts, axis=1), np.fmin.reduceat(off, starts, axis=1)
        logs = np.where(-low > high, low, high)
    found = np.full((logs.shape[1], logs.shape[1]), np.nan)
    for rank in range(logs.shape[1]):
        gaps = np.abs(logs - logs[:, rank : rank + 1])
        counts = (~np.isnan(gaps)).sum(axis=0)
        found[rank] = np.where(counts > 0, np.nansum(gaps, axis=0) / np.maximum(1, counts), np.nan)
    return found, size
