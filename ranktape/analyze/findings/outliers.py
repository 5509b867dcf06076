"""Finds ranks, layers, samples and channels that are far from their peers, and channels that are zero.

Sizes are compared as base-2 logarithms, in binades. A channel is an index of the last dimension. Digests do not contain
channels, so they are measured by reading the records once more, and the measurements are cached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Columns, Payload
from ranktape.analyze.engine.values import View, read_values
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import (
    Finding,
    Severity,
    deviation_finding,
    divide_by_binades,
    factor_text,
    make_finding,
    number_text,
    records_text,
)
from ranktape.analyze.findings.survey import (
    Codes,
    Floats,
    Mask,
    Survey,
    binades,
    group_deviations,
    group_median_bounds,
    group_medians,
    group_members,
    group_sizes,
    named_numbers,
    robust_z,
    row_codes,
)
from ranktape.analyze.identity import sample_names
from ranktape.analyze.numerics.pieces import pieces
from ranktape.storage import Record
from ranktape.storage.format.record_info import Keep

_PAIR = 2
_MIN_WITHIN = 3
"""The smallest number of samples in a tensor with a useful median: that of two is halfway between them."""


def rank_differs(survey: Survey) -> Iterator[Finding]:
    """A finding for each site and rank that is far from the other ranks in the same iteration, microbatch and call.

    It is about the metric with the largest difference. A large gradient of a single sample does not make its rank an
    outlier; the median of the rank's samples decides. Of two ranks, the outlier is the one whose metric is farther from
    its other layers and iterations; if there is no clear difference, the finding is about both.
    """
    largest: dict[tuple[int, int], Finding] = {}
    min_differences = _min_rank_difference(survey)
    for name in ("absmax", "rms"):
        for finding in _rank_outliers(survey, name, min_differences=min_differences):
            rows = list(finding.places)
            key = (int(survey.sites[rows[0]]), int(survey.fields["rank"][rows].min()))
            if key not in largest or finding.score > largest[key].score:
                largest[key] = finding
    yield from largest.values()


def _rank_outliers(survey: Survey, name: str, *, min_differences: Floats) -> Iterator[Finding]:
    values = binades(survey.metrics[name])
    rows, groups = _compared(survey, values)
    if not rows.size:
        return
    differences, scores = np.zeros((2, len(survey)))
    differences[rows], mads = _rank_differences(groups, values[rows], roles=survey.roles[rows])
    scores[rows] = robust_z(differences[rows], mads)
    is_outlier = (np.abs(scores[rows]) > limit.ROBUST_Z) & (np.abs(differences[rows]) >= min_differences[rows])
    is_pair = group_sizes(groups) == _PAIR
    culprits = _culprits(survey, values, rows, groups, chosen=is_outlier & is_pair)
    is_settled = np.isin(groups, groups[culprits])
    for mask, is_sure in ((is_outlier & ~is_pair | culprits, True), (is_outlier & is_pair & ~is_settled, False)):
        chosen = np.zeros(len(survey), dtype=bool)
        chosen[rows] = mask
        for site_rows in survey.by_site(chosen, np.abs(differences)):
            ranks = survey.fields["rank"][site_rows]
            for part in [site_rows[ranks == rank] for rank in np.unique(ranks)] if is_sure else [site_rows]:
                worst = int(part[0])
                difference = float(differences[worst])
                factor = factor_text(abs(difference))
                unsure = f"differs by {factor} in {name} between its two ranks, of which either may be wrong"
                yield deviation_finding(
                    survey,
                    places=part,
                    kind="rank_differs",
                    severity=Severity.HIGH if abs(difference) >= limit.SERIOUS_BINADES else Severity.MEDIUM,
                    peers="the other rank" if survey.num_ranks[worst] == _PAIR else "the other ranks",
                    text="" if is_sure else unsure,
                    occurrences=f"in {records_text(len(part))} of {survey.numbered('iteration', part)}",
                    metric=name,
                    value=float(survey.metrics[name][worst]),
                    deviation=float(scores[worst]),
                    binades=difference,
                )


def _compared(survey: Survey, values: Floats) -> tuple[Codes, Codes]:
    """The records with a value that have peers on other ranks, and the group of each."""
    rows = np.flatnonzero(np.isfinite(values) & survey.is_floating)
    groups = row_codes(survey.codes("attempt", "iteration", "microbatch", "call")[rows], survey.sites[rows])
    has_peers = group_sizes(groups) > 1
    return rows[has_peers], groups[has_peers]


def _min_rank_difference(survey: Survey) -> Floats:
    """For each record, the smallest difference from the other ranks that is a finding."""
    # Shards are different parts of a tensor, and a few large channels can be on one rank only.
    texts = survey.records.column("placement").tolist()
    sharded = {text: "shard(" in text for text in set(texts)}
    is_shard = np.array([sharded[text] for text in texts], dtype=bool)
    usual = np.where(survey.is_gradient, limit.GRADIENT_TAIL_BINADES, limit.RANK_BINADES)
    # A lower limit applies if the median of at least three samples, not a single one, is far from other ranks.
    sizes = binades(survey.sample_absmax)
    finite = np.flatnonzero(np.isfinite(sizes))
    finite = finite[group_sizes(survey.sample_records[finite]) >= _MIN_WITHIN]
    medians = np.full(len(survey), np.nan)
    medians[survey.sample_records[finite]] = group_medians(survey.sample_records[finite], sizes[finite])
    rows, groups = _compared(survey, medians)
    if rows.size:
        differences, _ = _rank_differences(groups, medians[rows], roles=survey.roles[rows])
        outlying = rows[np.abs(differences) >= limit.GRADIENT_RANK_BINADES]
        usual[outlying[survey.is_gradient[outlying]]] = limit.GRADIENT_RANK_BINADES
    return np.where(is_shard, limit.SERIOUS_BINADES, usual)


def _rank_differences(groups: Codes, values: Floats, *, roles: Codes) -> tuple[Floats, Floats]:
    """The difference of each value from its peers, and their spread."""
    differences, mads = group_deviations(groups, values)
    is_pair = group_sizes(groups) == _PAIR
    # The peer of each of two values is the other one, not the median halfway; both differences have equal magnitude.
    low, high = group_median_bounds(groups, values)
    differences = np.where(is_pair, np.where(values == high, high - low, low - high), differences)
    pooled = group_medians(roles, np.abs(differences))
    # The spread of a few ranks is uncertain; that of the same tensor over all layers is less so.
    return differences, np.where(is_pair, np.minimum(pooled, limit.MAX_POOLED_MAD_BINADES), np.maximum(mads, pooled))


def _culprits(survey: Survey, values: Floats, rows: Codes, groups: Codes, *, chosen: Mask) -> Mask:
    """In each pair that differs, the record that is clearly farther from its rank's other layers or iterations."""
    is_culprit = np.zeros(rows.size, dtype=bool)
    chosen_rows = np.flatnonzero(chosen)
    if not chosen_rows.size:
        return is_culprit
    moments = row_codes(survey.fields["rank"], survey.times)
    in_layers = row_codes(moments, survey.roles), survey.sites
    in_time = row_codes(survey.fields["rank"], survey.sites), moments
    distances = np.zeros(chosen_rows.size)
    for cohorts, identities in (in_layers, in_time):
        order = np.argsort(cohorts, kind="stable")
        order = order[np.isfinite(values[order])]
        labels = cohorts[order]
        for number, row in enumerate(rows[chosen_rows].tolist()):
            first, last = np.searchsorted(labels, cohorts[row] + np.arange(2))
            peers = order[first:last][identities[order[first:last]] != identities[row]]
            if peers.size:
                distances[number] = max(distances[number], abs(float(np.median(values[peers]) - values[row])))
    for left, right in np.argsort(groups[chosen_rows], kind="stable").reshape(-1, _PAIR).tolist():
        gap = distances[left] - distances[right]
        if abs(gap) >= limit.CLEARLY_NEARER_BINADES:
            is_culprit[chosen_rows[left if gap > 0 else right]] = True
    return is_culprit


def layer_differs(survey: Survey) -> Iterator[Finding]:
    """A finding for each site of a layer that is far from the layers on both sides, about the most different metric."""
    by_site: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for name in ("rms", "absmax"):
        for outlier in _layer_outliers(survey, name):
            by_site[int(survey.sites[outlier["places"][0]])].append(outlier)
    for outliers in by_site.values():
        worst = max(outliers, key=lambda outlier: abs(outlier["binades"]))
        # Includes the records of every iteration in which the layer differs.
        rows = list(dict.fromkeys(row for outlier in (worst, *outliers) for row in outlier["places"].tolist()))
        occurrences = f"{worst['occurrences']}, in {survey.numbered('iteration', rows)}"
        yield deviation_finding(survey, **worst | {"places": rows, "occurrences": occurrences})


def _layer_outliers(survey: Survey, name: str) -> Iterator[dict[str, Any]]:
    """The arguments of `deviation_finding` for each layer that differs from the others of its role and iteration."""
    sizes, layers = binades(survey.metrics[name]), survey.fields["layer_idx"].astype(np.int64)
    rows = np.flatnonzero(survey.is_floating & (layers >= 0) & np.isfinite(sizes))
    groups, row_layers = row_codes(survey.roles[rows], survey.times[rows]), layers[rows]
    # Takes both medians over ranks and microbatches, so that one of two ranks alone does not make the layer an outlier.
    medians = np.stack(group_median_bounds(row_codes(groups, row_layers), sizes[rows]))
    for part in group_members(groups, row_layers):
        steps, firsts = np.unique(row_layers[part], return_index=True)
        if steps.size < limit.MIN_LAYERS:
            continue
        low, high = map(_from_neighbours, medians[:, part][:, firsts])
        differences = np.where(low * high > 0, np.where(np.abs(low) < np.abs(high), low, high), 0.0)
        scores = robust_z(differences, float(np.median(np.abs(differences))))
        edge = limit.GRADIENT_TAIL_BINADES if survey.is_gradient[rows[part[0]]] else limit.EDGE_LAYER_BINADES
        min_differences = np.full(steps.size, limit.LAYER_BINADES)
        min_differences[[0, -1]] = edge
        for number in np.flatnonzero(
            (np.abs(scores) > limit.ROBUST_Z) & (np.abs(differences) >= min_differences)
        ).tolist():
            is_edge, difference = number in {0, steps.size - 1}, float(differences[number])
            layer_rows = rows[part[row_layers[part] == steps[number]]]
            median = float(np.median(sizes[layer_rows]))
            # Weights are the tensors that differ least between neighbouring layers.
            is_serious = not is_edge and (
                abs(difference) >= limit.SERIOUS_BINADES or bool(survey.is_weight[layer_rows[0]])
            )
            yield {
                "places": layer_rows[np.argsort(-np.abs(sizes[layer_rows] - median + difference), kind="stable")],
                "kind": "layer_differs",
                "severity": Severity.MEDIUM if is_serious else Severity.LOW,
                "peers": "the next layers" if is_edge else "the layers on both sides",
                "occurrences": f"median of {records_text(len(layer_rows))}",
                "metric": name,
                "value": divide_by_binades(-median, 1.0),
                "deviation": float(scores[number]),
                "binades": difference,
            }


def _from_neighbours(values: Floats) -> Floats:
    """The difference of each layer from the nearer of its two sides; 0 if it is between them."""
    below, above = values - _before(values), values - _before(values[::-1])[::-1]
    nearer = np.where(np.abs(below) <= np.abs(above), below, above)
    differences = np.where(below * above > 0, nearer, 0.0)
    differences[0] = _nearer_middle(values[0] - values[1 : 1 + limit.NUM_EDGE_NEIGHBOURS])
    differences[-1] = _nearer_middle(values[-1] - values[:-1][-limit.NUM_EDGE_NEIGHBOURS :])
    return differences


def _nearer_middle(values: Floats) -> float:
    """The median; of two middle values, the one nearer to 0, or 0 if their signs differ.

    Otherwise, an outlier among three layers would shift the reference of the other two by half of its distance.
    """
    low, high = np.sort(values)[[(values.size - 1) // 2, values.size // 2]].tolist()
    return 0.0 if low * high < 0 else min(low, high, key=abs)


def _before(values: Floats) -> Floats:
    """The mean of the two layers before each; for the second, the first one, and for the first, itself."""
    return np.concatenate((values[:1], values[:1], (values[:-2] + values[1:-1]) / 2))


def sample_outlier(survey: Survey) -> Iterator[Finding]:
    """A finding for each sample of each rank and site that is far above its peers in any record.

    Peers are the samples of the site over all ranks, microbatches and iterations. A sample also has to be far above
    those of its own iteration and, if there are others, of its own tensor: if all samples of a rank or an iteration are
    larger, the rank or the iteration is the outlier.
    """
    values = binades(survey.sample_absmax)
    finite = np.flatnonzero(np.isfinite(values) & survey.is_floating[survey.sample_records])
    if not finite.size:
        return
    records, sizes = survey.sample_records[finite], values[finite]
    sites = survey.sites[records]
    # Subtracts what all samples of an iteration share: training makes every gradient smaller.
    differences = sizes - group_medians(row_codes(sites, survey.times[records]), sizes)
    scores = robust_z(differences, group_medians(sites, np.abs(differences)))
    within = sizes - group_medians(records, sizes)
    min_differences = np.where(survey.is_gradient[records], limit.GRADIENT_TAIL_BINADES, limit.SAMPLE_BINADES)
    num_within = group_sizes(records)
    is_outlier = (
        (scores > limit.ROBUST_Z)
        & (differences >= min_differences)
        & (group_sizes(sites) >= limit.MIN_SAMPLES)
        & (
            (num_within == 1)
            | (within >= min_differences)
            | (num_within < _MIN_WITHIN) & (within >= min_differences / 2)
        )
    )
    chosen = np.flatnonzero(is_outlier)
    names = sample_names(survey.records) if chosen.size else []
    groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for number in chosen[np.argsort(-differences[chosen], kind="stable")].tolist():
        record = int(records[number])
        name = str(names[record][int(survey.sample_numbers[finite[number]])])
        groups[(int(sites[number]), int(survey.fields["rank"][record]), name)].append(number)
    for (site, rank, name), members in groups.items():
        difference, value = float(differences[members[0]]), float(survey.sample_absmax[finite[members[0]]])
        rows = records[members]
        serious = limit.GRADIENT_SERIOUS_BINADES if survey.is_gradient[rows[0]] else limit.SERIOUS_BINADES
        yield deviation_finding(
            survey,
            places=rows,
            kind="sample_outlier",
            severity=Severity.HIGH if difference >= serious else Severity.MEDIUM,
            peers=f"{int((sites == site).sum()) - 1} other samples",
            text=f"has an absmax of {factor_text(difference)} times that of the other samples",
            occurrences=f"in {records_text(len(members))} of {survey.numbered('iteration', rows)}, rank {rank}",
            metric="absmax",
            value=value,
            deviation=float(scores[members[0]]),
            binades=difference,
            sample=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMeasure:
    """The largest finite magnitude of each channel; empty for vectors, scalars and records without stored values."""

    view: View = View.COMPUTE

    @property
    def name(self) -> str:
        """The name of its cache."""
        return f"channels_{self.view}_v1"

    def __call__(self, records: Iterable[Record], /) -> Columns:
        """The largest magnitudes, as `absmax`."""
        return Columns.of_payloads([self._payload(record) for record in records])

    def _payload(self, record: Record) -> Payload:
        if record.keep != Keep.VALUES or len(record.shape) <= 1:
            return {"absmax": np.zeros(0)}
        return {"absmax": channel_absmax(read_values(record, view=self.view))}


def channel_absmax(array: NDArray[np.generic]) -> NDArray[np.float64]:
    """The largest finite magnitude at each index of the last dimension; 0 if no value is finite."""
    absmax = np.zeros(array.shape[-1])
    for part in pieces(array.reshape(-1, array.shape[-1]), axis=1, block_size=array.shape[-1] or 1):
        with np.errstate(invalid="ignore"):  # from signaling NaN
            magnitudes = np.abs(part if part.dtype.kind == "c" else part.astype(np.float64))
        np.maximum(absmax, np.where(np.isfinite(magnitudes), magnitudes, 0).max(axis=0, initial=0), out=absmax)
    return absmax


def channels(survey: Survey) -> Iterator[Finding]:
    """A finding for each site with outlying channels in at least half of its records, and one for channels of zeros."""
    sites: dict[tuple[int, int], _Channels] = {}
    pending: dict[tuple[int, int], list[tuple[int, Floats]]] = defaultdict(list)
    nbytes = 0
    for row, payload in enumerate(survey.engine.measure(survey.records, ChannelMeasure(view=survey.view))):
        absmax = payload["absmax"]
        if absmax.size >= limit.MIN_CHANNELS and survey.is_floating[row]:
            pending[int(survey.sites[row]), absmax.size].append((row, absmax))
            nbytes += absmax.nbytes
            if nbytes >= _MAX_PENDING_NBYTES:
                _add_pending(sites, pending)
                nbytes = 0
    _add_pending(sites, pending)
    for (_, count), site_channels in sites.items():
        yield from site_channels.findings(survey, count=count)


_MAX_PENDING_NBYTES = 32 << 20
"""Maximum size of the magnitudes of channels that are buffered before they are added to their sites, in bytes."""


def _add_pending(
    sites: dict[tuple[int, int], _Channels], pending: dict[tuple[int, int], list[tuple[int, Floats]]]
) -> None:
    for key, measurements in pending.items():
        site_channels = sites.setdefault(key, _Channels(key[1]))
        site_channels.rows += [row for row, _ in measurements]
        site_channels.add(np.stack([absmax for _, absmax in measurements]))
    pending.clear()


class _Channels:
    """The channels of one site, as far as its records have been read."""

    def __init__(self, count: int) -> None:
        self.rows: list[int] = []
        self._medians: list[float] = []
        self._excess_sums, self._num_outlying, self._scores, self._largest = np.zeros((4, count))

    def add(self, absmax: Floats) -> None:
        """Count records more, one in each row."""
        np.maximum(self._largest, absmax.max(axis=0), out=self._largest)
        sizes = binades(absmax)
        sizes = sizes[np.isfinite(sizes).sum(axis=1) >= limit.MIN_CHANNELS]
        if not sizes.size:
            return
        medians = np.nanmedian(sizes, axis=1, keepdims=True)
        self._medians += (2.0**medians).reshape(-1).tolist()
        differences = np.nan_to_num(sizes - medians)
        scores = robust_z(differences, np.nanmedian(np.abs(sizes - medians), axis=1, keepdims=True))
        is_outlier = (scores > limit.ROBUST_Z) & (differences >= limit.CHANNEL_BINADES)
        self._excess_sums += np.where(is_outlier, differences, 0.0).sum(axis=0)
        self._num_outlying += is_outlier.sum(axis=0)
        np.maximum(self._scores, scores.max(axis=0), out=self._scores)

    def findings(self, survey: Survey, *, count: int) -> Iterator[Finding]:
        """The findings of the site: outlying channels and channels of zeros."""
        rows, num_outlying, records = self.rows, self._num_outlying, records_text(len(self.rows))
        median = float(np.median(self._medians or [0.0]))
        outlying = np.flatnonzero((num_outlying * 2 >= len(self._medians)) & (num_outlying > 0))
        if 0 < outlying.size <= max(1, limit.MAX_OUTLYING_CHANNELS * count):
            means = self._excess_sums[outlying] / num_outlying[outlying]
            ordered = outlying[np.argsort(-means, kind="stable")]
            channel, difference = int(ordered[0]), float(means.max())
            value = float(self._largest[channel])
            yield make_finding(
                survey,
                places=rows,
                kind="channel_outlier",
                severity=Severity.MEDIUM if difference >= limit.SERIOUS_BINADES else Severity.LOW,
                score=difference,
                text=f"has an absmax of {factor_text(difference)} times that of the other channels",
                evidence=(
                    f"absmax {number_text(value)}, median of {count} channels {number_text(median)}; in "
                    f"{int(num_outlying[channel])} of {records}; {_channel_text(ordered)}"
                ),
                metric="absmax",
                value=value,
                expected=median,
                deviation=float(self._scores[channel]),
                binades=difference,
                channel=channel,
            )
        dead = np.flatnonzero(self._largest == 0)
        if 0 < dead.size < count and not survey.is_gradient[rows[0]]:
            yield make_finding(
                survey,
                places=rows,
                kind="zero",
                severity=Severity.LOW,
                score=dead.size / count,
                text=f"has {dead.size} of {count} channels that are zero everywhere",
                evidence=f"in all of {records}; {_channel_text(dead)}",
                metric="absmax",
                value=0.0,
                expected=median,
                channel=int(dead[0]),
            )


def _channel_text(channels: Codes) -> str:
    more = f" and {channels.size - 8} more" if channels.size > 8 else ""  # noqa: PLR2004 - as many as are named
    return named_numbers("channel", channels[:8].tolist()) + more
