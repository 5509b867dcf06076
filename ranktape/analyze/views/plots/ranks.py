"""Compares ranks tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.views.plots.data import PlotData

SITE_OF_RANKS = ("iteration", "microbatch", "call", "module", "operation", "phase", "tensor_name")
"""What is the same of a tensor on all ranks."""


def rank_logs(data: PlotData, metric: str) -> tuple[NDArray[np.float64], list[tuple[Any, ...]]]:
    """log2 of a metric for each site and rank, NaN where there is none; the sites are `SITE_OF_RANKS` and the layer."""
    fields = [data.column(field).tolist() for field in (*SITE_OF_RANKS, "layer_idx")]
    sites = list(zip(*fields, strict=True))
    index = {site: number for number, site in enumerate(dict.fromkeys(sites))}
    grid = np.full((len(index), len(data.values_of("rank"))), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(data.metric(metric))
    places = ([index[site] for site in sites], data.codes("rank"))
    grid[places] = np.where(np.isfinite(logs), logs, np.nan)
    return grid, list(index)


def rank_deviations(data: PlotData, *, layers: Sequence[int]) -> NDArray[np.float64]:
    """For each layer and rank log2 of absmax over that of the median rank: of the tensor that is farthest off.

    NaN where no other rank has the same tensor.
    """
    logs, sites = rank_logs(data, "absmax")
    is_shared = (~np.isnan(logs)).sum(axis=1) > 1
    found = np.full((len(layers), logs.shape[1]), np.nan)
    rows = {layer: row for row, layer in enumerate(layers)}
    if not is_shared.any():
        return found
    deviations = logs[is_shared] - np.nanmedian(logs[is_shared], axis=1, keepdims=True)
    shared = [site for site, kept in zip(sites, is_shared.tolist(), strict=True) if kept]
    for site, values in zip(shared, deviations, strict=True):
        row = found[rows[int(site[-1])]]
        row[:] = np.where(np.isnan(row) | (np.abs(values) > np.abs(row)), np.where(np.isnan(values), row, values), row)
    return found


MAX_COMPARED = 128
"""Ranks that are compared with one another: of more, blocks of neighbours are."""

MAX_SITES = 4096
"""Tensors that they are compared by: of more, every n-th."""


def rank_distances(data: PlotData) -> tuple[NDArray[np.float64], int]:
    """For each pair of ranks the mean |log2| of the ratio of the deviations of the same tensors, and ranks in a block.

    Of blocks of neighbouring ranks, a tensor's deviation is the one farthest from the median rank's. NaN where two
    have no tensor in common.
    """
    logs, _ = rank_logs(data, "std")
    logs = logs[:: math.ceil(logs.shape[0] / MAX_SITES)]
    size = math.ceil(logs.shape[1] / MAX_COMPARED)
    if size > 1:
        known = logs[(~np.isnan(logs)).any(axis=1)]
        off = known - np.nanmedian(known, axis=1, keepdims=True)
        starts = np.arange(0, off.shape[1], size)
        high, low = np.fmax.reduceat(off, starts, axis=1), np.fmin.reduceat(off, starts, axis=1)
        logs = np.where(-low > high, low, high)
    num_ranks = logs.shape[1]
    found = np.full((num_ranks, num_ranks), np.nan)
    for rank in range(num_ranks):
        gaps = np.abs(logs - logs[:, rank : rank + 1])
        counts = (~np.isnan(gaps)).sum(axis=0)
        found[rank] = np.where(counts > 0, np.nansum(gaps, axis=0) / np.maximum(1, counts), np.nan)
    return found, size
