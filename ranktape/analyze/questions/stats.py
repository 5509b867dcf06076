"""Statistics of each record, of groups of records, of each sample, and of each layer compared with the next.

All metrics are computed from the columns of digests, for which each record is read once, if it is not cached.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import METRICS, NUMBERS, count_names, is_percentile, metric_columns, parse_metric
from ranktape.analyze.engine.numbers import group_digests, group_metrics, record_metrics
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import (
    SAMPLE_COLUMN,
    group_records,
    identity_cells,
    identity_columns,
    role_of,
    row_groups,
    sample_names,
    words,
)
from ranktape.analyze.numerics.digest import SAMPLE_METRICS, Digest, exponents_of
from ranktape.analyze.numerics.distributions import distance
from ranktape.analyze.table import Cells, Coded, Column, Kind, Table, TableRows, number_cells, take_cells
from ranktape.errors import NoRecordsError, UsageError
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.format.record_info import TALLY_KINDS
from ranktape.storage.format.statistics import Statistics
from ranktape.storage.query.filters import expect_list

Floats = NDArray[np.float64]

PRECISION = Column(name="percentiles", kind=Kind.TEXT, head="percentiles are", is_detail=True)
"""The precision of percentiles: `exact`, `within 2^-8` of their value and 2^-10 of their rank, or `unknown`."""


def stats(
    records: Records,
    *,
    metric: str | Sequence[str] = (),
    neighbours: bool = False,
    per_sample: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """Compute the mean, deviation, extremes, moments, percentiles and counts of each record or group.

    Text output shows the main metrics; --wide, --json and --csv show all. Moments and extremes are those of the finite
    values (of the magnitudes, for complex values), percentiles those of all values except NaN, and counts those of all
    elements against the limits of the captured dtype. Undefined metrics are left empty: the mean of no values, the
    skewness of a constant, and the percentiles of complex values or of records that store only statistics.

    Args:
        metric (NAME): Show only this metric, such as std, p99.9 or overflow.ratio; repeatable.
        neighbours: Compare each layer with the next one, by ratios and distances.
        per_sample: Show one row for each sample of each record, or with --by, for each sample of each group.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: no record has samples, or a neighbour.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
        UsageError: there is no such metric, or arguments exclude each other.
    """
    expect_list(by)
    chosen_view, names = view or View.COMPUTE, words(metric)
    has_samples = per_sample or SAMPLE in by
    if neighbours and has_samples:
        raise UsageError("--neighbours and --per-sample exclude each other: samples are not compared between layers")
    if neighbours and names:
        raise UsageError("--neighbours has its own metrics: leave out --metric")
    if neighbours:
        return _beside_next(records, by=by, view=chosen_view, engine=engine)
    if has_samples:
        return _sample_table(records, by=by, metrics=names, view=chosen_view, engine=engine)
    chosen = [parse_metric(name) for name in names] or list(METRICS.values())
    groups = row_groups(records, by=by)
    of_state = NUMBERS["has_percentiles"], NUMBERS["is_exact"]
    numbers = group_metrics(records, groups, [*chosen, *of_state], view=chosen_view, engine=engine)
    has_percentiles, is_exact = (numbers.column(one.name) > 0 for one in of_state)
    precision = Coded(np.where(has_percentiles, np.where(is_exact, 0, 1), 2), [_EXACT, _NEAR, _UNKNOWN])
    cells = [number_cells(numbers.column(one.name), kind=one.kind) for one in chosen]
    return Table(
        title=f"statistics of the values, {view_text(chosen_view)}",
        columns=(*groups.columns, *metric_columns(chosen, are_named=bool(names)), PRECISION),
        rows=TableRows([*groups.heads.columns, *cells, precision]),
        notes=_notes(precision.codes) if any(is_percentile(one.name) for one in chosen) else (),
    )


_EXACT, _NEAR, _UNKNOWN = "exact", "within 2^-8", "unknown"


def _notes(precision: NDArray[np.int64]) -> tuple[str, ...]:
    """Notes about rows whose percentiles are approximate (code 1) or missing (code 2)."""
    texts = {
        1: "have many values wider than 16 bits: their percentiles are within 2^-8 of the exact ones, "
        "and their ranks within 2^-10",
        2: "have no percentiles: they are complex, or store only statistics",
    }
    counts = np.bincount(precision, minlength=3).tolist()
    return tuple(f"{counts[code]} of {len(precision)} rows {text}" for code, text in texts.items() if counts[code])


def view_text(view: View) -> str:
    """The text about a view in a title."""
    return "as captured" if view is View.SEEN else "rounded to the compute dtype"


def combine_samples(samples: Floats, starts: NDArray[np.int64]) -> dict[str, Floats]:
    """The metrics of groups of samples, by the names of `METRICS`; NaN if undefined.

    `samples` has a row of `SAMPLE_METRICS` for each sample, and `starts` has the first row of each group.
    """
    columns = dict(zip(SAMPLE_METRICS, samples.T, strict=True))
    counts = {name: np.add.reduceat(columns[name], starts) for name in ("num_elements", "num_finite", *TALLY_KINDS)}
    largest = np.fmax.reduceat(columns["absmax"], starts)
    sizes = np.diff([*starts, len(samples)])
    # Numbers are divided by a power of two before they are squared, so that no square is infinite.
    exponents = exponents_of(largest)
    steps = -np.repeat(exponents, sizes)
    mean, std, norm = (np.ldexp(columns[name], steps) for name in ("mean", "std", "norm"))
    num_finite, all_finite = columns["num_finite"], counts["num_finite"]
    root = np.sqrt(np.where(all_finite > 0, all_finite, math.nan))
    means = np.add.reduceat(np.where(num_finite > 0, num_finite * mean, 0.0), starts) / root**2
    # The variance of all values from those of samples: Chan, Golub, LeVeque 1979.
    weighted_squares = np.where(num_finite > 0, num_finite * (std**2 + (mean - np.repeat(means, sizes)) ** 2), 0.0)
    spread, total = (np.sqrt(np.add.reduceat(squares, starts)) for squares in (weighted_squares, norm**2))
    is_alone = sizes == 1
    firsts = np.asarray(starts)[is_alone]
    means[is_alone], spread[is_alone], total[is_alone] = mean[firsts], (std * np.sqrt(num_finite))[firsts], norm[firsts]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        metrics = {name: np.ldexp(one, exponents) for name, one in (("mean", means), ("norm", total))}
        metrics |= {name: np.ldexp(one / root, exponents) for name, one in (("std", spread), ("rms", total))}
        metrics["variance"] = metrics["std"] ** 2
        metrics["minimum"] = np.fmin.reduceat(columns["minimum"], starts)
        metrics |= {"maximum": np.fmax.reduceat(columns["maximum"], starts), "absmax": largest}
        metrics["crest_factor"] = np.where(metrics["rms"] > 0, largest / metrics["rms"], math.nan)
    metrics = {name: np.where(np.isfinite(values), values, math.nan) for name, values in metrics.items()}
    metrics |= {"elements": counts["num_elements"], "finite": all_finite}
    for kind, count in {**counts, "total": counts["upper"] + counts["lower"]}.items():
        if kind not in {"num_elements", "num_finite"}:
            metrics |= zip(count_names(kind), (count, count / np.maximum(1, counts["num_elements"])), strict=True)
    return metrics


SAMPLE_NAMES = tuple(
    name for name in METRICS if name in combine_samples(np.zeros((1, len(SAMPLE_METRICS))), np.zeros(1, dtype=int))
)
"""The metrics that are available for samples, in the order of `METRICS`."""


def sample_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    """The distinct metrics with these names.

    Raises:
        UsageError: there is no such metric, or it is not available for samples.
    """
    names = tuple(dict.fromkeys(parse_metric(name).name for name in metrics))
    for name in names:
        if name not in SAMPLE_NAMES:
            raise UsageError(f"metric {name!r} is not available for samples: use one of {', '.join(SAMPLE_NAMES)}")
    return names


def _sample_table(
    records: Records, *, by: Sequence[str], metrics: Sequence[str], view: View, engine: Engine | None
) -> Table:
    """The metrics of each sample of each record, or with `by`, of each sample in each group of records.

    `sample` is the user's id, or the index along the dimension of samples if no ids were given. It is always one of the
    fields. Records without samples, such as weights, and those without stored values are left out and counted in a
    note.
    """
    chosen = [METRICS[name] for name in sample_metrics(metrics) or SAMPLE_NAMES]
    known, named = record_metrics(records, (), view=view, engine=engine), sample_names(records)
    is_named = np.repeat([bool(names) for names in named], known.sample_sizes)
    samples, owners, places = (one[is_named] for one in (known.samples, known.owners, known.sample_indices))
    if not owners.size:
        raise NoRecordsError(
            "no record has samples that can be distinguished: their sample_dim is unknown, or no values are stored"
        )
    names = [named[owner][place] for owner, place in zip(owners.tolist(), places.tolist(), strict=True)]
    starts, heads = np.arange(len(owners)), list[Cells]()
    if by:
        groups = group_records(records, by=[field for field in by if field != SAMPLE])
        # Names may be numbers and texts, which cannot be compared.
        keys = list(zip(groups.numbers[owners].tolist(), [isinstance(name, str) for name in names], names, strict=True))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        starts = np.array([0] + [n for n in range(1, len(order)) if keys[order[n]] != keys[order[n - 1]]])
        firsts = [order[start] for start in starts]
        samples, counts = samples[order], np.diff([*starts, len(order)])
        *columns, count = groups.columns
        columns = [*columns, SAMPLE_COLUMN, count]
        numbers = groups.numbers[owners[firsts]]
        heads = [take_cells(one, numbers) for one in groups.heads.columns[:-1]]
        heads += [[str(names[first]) for first in firsts], counts]
    else:
        index = Column(name="sample_index", kind=Kind.INTEGER, is_key=True, is_detail=True)
        columns = [*identity_columns(records), SAMPLE_COLUMN, index]
        heads = [take_cells(one, owners) for one in identity_cells(records)] + [list(map(str, names)), places]
    found = combine_samples(samples, starts)
    num_without = len(records) - np.unique(owners).size
    has_ids = any(text != "null" for text in records.column("sample_ids").tolist())
    return Table(
        title="statistics of each sample",
        columns=(*columns, *metric_columns(chosen, are_named=bool(metrics))),
        rows=TableRows([*heads, *(number_cells(found[one.name], kind=one.kind) for one in chosen)]),
        notes=tuple(_sample_notes(num_without, by=by, has_ids=has_ids)),
    )


def _sample_notes(num_without: int, *, by: Sequence[str], has_ids: bool) -> Iterator[str]:
    if num_without:
        yield f"{num_without} records are left out: their sample dimension is unknown, or no values are stored"
    apart = [field for field in ("iteration", "rank", "microbatch") if field not in by]
    if by and apart and not has_ids:
        yield (
            f"samples have no IDs, and an index is another sample in each iteration, rank and microbatch: "
            f"to distinguish them, add --by {','.join(apart)}"
        )


_SITE = (
    *("source", "iteration", "attempt", "microbatch", "call", "mode", "layer_type", "operation", "phase"),
    *("component", "quant_type", "tensor_name"),
)
"""The fields that identify a site across layers, besides the module's path without the layer's number."""


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _shift(layer: Statistics, next_layer: Statistics) -> float | None:
    return None if layer.mean is None or next_layer.mean is None else _ratio(next_layer.mean - layer.mean, layer.std)


_BESIDE: tuple[tuple[str, str, bool, Callable[[Statistics, Statistics], float | None]], ...] = (
    ("std", "std", False, lambda here, _: here.std),
    ("next.std", "next std", False, lambda _, there: there.std),
    ("ratio.std", "std ratio", False, lambda here, there: _ratio(there.std, here.std)),
    ("absmax", "absmax", False, lambda here, _: here.absmax),
    ("next.absmax", "next absmax", False, lambda _, there: there.absmax),
    ("ratio.absmax", "absmax ratio", False, lambda here, there: _ratio(there.absmax, here.absmax)),
    ("mean", "mean", True, lambda here, _: here.mean),
    ("next.mean", "next mean", True, lambda _, there: there.mean),
    ("shift.mean", "mean shift in std", False, _shift),
)
"""Name, heading, whether it is a detail, and function of the statistics of both layers."""

_DISTANCES = (
    Column(name="distance.kolmogorov_smirnov", kind=Kind.FLOAT, head="KS"),
    Column(name="distance.wasserstein", kind=Kind.FLOAT, head="Wasserstein", is_detail=True),
    Column(name="distance.relative_wasserstein", kind=Kind.FLOAT, head="Wasserstein in std"),
    Column(name="distance.total_variation", kind=Kind.RATIO, head="total variation"),
    Column(name="distance.jensen_shannon", kind=Kind.FLOAT, head="Jensen-Shannon bits"),
)


def _beside_next(records: Records, *, by: Sequence[str], view: View, engine: Engine | None) -> Table:
    """Each record, or with `by` each group of a layer, compared with that of the same site in the next layer.

    Ratios are the next layer's metric over this one's. The shift of the mean is in standard deviations of this layer.
    Distances are those of `distributions.distances`. Undefined values are None, such as a ratio to 0, or a distance if
    only statistics were stored. The next layer is the one with the next larger index that has the site. If it is on
    other ranks, as between pipeline stages, ranks are matched in ascending order. Layers without an index (-1) are left
    out.
    """
    apart = [field for field in dict.fromkeys(by) if field != "layer_idx"]
    groups = row_groups(records, by=[*apart, "layer_idx"] if by else ())
    sites: list[Any]
    if by:
        *sites, layers = map(list, zip(*(key.values() for key in groups.keys), strict=True))
        ranks = [0] * len(layers)
    else:
        layers = [int(layer) for layer in records.column("layer_idx").tolist()]
        ranks = records.column("rank").tolist()
        sites = [map(role_of, records.column("module").tolist(), layers)]
        sites += [records.column(field).tolist() for field in _SITE]
    pairs = _pairs(zip(*sites, strict=True) if sites else [()] * len(layers), layers, ranks)
    if not pairs:
        raise NoRecordsError("no record has a neighbour: no site of the selection occurs in two layers with an index")
    partners: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in pairs.items():
        for place in pair:
            partners[place].append(pair)
    rows: dict[int, tuple[float | None, ...]] = {}
    waiting: dict[int, Digest] = {}
    for place, digest in group_digests(records, groups, view=view, engine=engine):
        waiting[place] = digest
        for first, second in partners[place]:
            if first in waiting and second in waiting:
                rows[first] = tuple(_compare(waiting[first], waiting[second]))
        for one in {place, *itertools.chain(*partners[place])}:
            if all(first in rows for first, _ in partners[one]):
                waiting.pop(one, None)
    heads, firsts = list(groups.heads), sorted(rows)
    numbers = (Column(name=name, kind=Kind.FLOAT, head=head, is_detail=detail) for name, head, detail, _ in _BESIDE)
    next_layer = Column(name="next.layer_idx", kind=Kind.INTEGER, head="next layer")
    return Table(
        title="each layer compared with the next: ratios are the metric of the next layer over that of this one",
        columns=(*groups.columns, next_layer, *numbers, *_DISTANCES),
        rows=tuple((*heads[first], layers[pairs[first]], *rows[first]) for first in firsts),
    )


def _pairs(sites: Any, layers: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
    """For each place, the same site in the next layer, on the same rank if both layers have a common one."""
    stacks: dict[Any, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for place, (site, layer, rank) in enumerate(zip(sites, layers, ranks, strict=True)):
        if layer >= 0:
            stacks[site][layer].setdefault(rank, place)
    pairs: dict[int, int] = {}
    for stack in stacks.values():
        for layer, following in itertools.pairwise(sorted(stack)):
            layer_places, next_places = stack[layer], stack[following]
            if layer_places.keys() & next_places.keys():
                pairs |= {place: next_places[rank] for rank, place in layer_places.items() if rank in next_places}
            else:
                ours, theirs = ([places[rank] for rank in sorted(places)] for places in (layer_places, next_places))
                pairs |= zip(ours, theirs, strict=False)
    return pairs


def _compare(digest: Digest, next_digest: Digest) -> Iterator[float | None]:
    for _, _, _, metric in _BESIDE:
        yield metric(digest.statistics, next_digest.statistics)
    distances = distance(digest, next_digest)
    for column in _DISTANCES:
        yield getattr(distances, column.name.removeprefix("distance."))
