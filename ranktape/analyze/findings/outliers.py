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
    factor_text,
    far_finding,
    finding_of,
    number_text,
    records_text,
    without,
)
from ranktape.analyze.findings.survey import (
    Codes,
    Floats,
    Mask,
    Survey,
    binades,
    codes_of,
    deviations_of,
    medians_of,
    members_of,
    middles_of,
    named_numbers,
    robust_z,
    sizes_of,
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
    best: dict[tuple[int, int], Finding] = {}
    least = _least(survey)
    for name in ("absmax", "rms"):
        for finding in _ranks_by_metric(survey, name, least=least):
            places = list(finding.places)
            key = (int(survey.sites[places[0]]), int(survey.fields["rank"][places].min()))
            if key not in best or finding.score > best[key].score:
                best[key] = finding
    yield from best.values()


def _ranks_by_metric(survey: Survey, name: str, *, least: Floats) -> Iterator[Finding]:
    values = binades(survey.metrics[name])
    known, groups = _compared(survey, values)
    if not known.size:
        return
    apart, scores = np.zeros((2, len(survey)))
    apart[known], mads = _from_other_ranks(groups, values[known], roles=survey.roles[known])
    scores[known] = robust_z(apart[known], mads)
    is_far = (np.abs(scores[known]) > limit.ROBUST_Z) & (np.abs(apart[known]) >= least[known])
    is_pair = sizes_of(groups) == _PAIR
    culprits = _culprits(survey, values, known, groups, chosen=is_far & is_pair)
    is_settled = np.isin(groups, groups[culprits])
    for mask, is_sure in ((is_far & ~is_pair | culprits, True), (is_far & is_pair & ~is_settled, False)):
        chosen = np.zeros(len(survey), dtype=bool)
        chosen[known] = mask
        for places in survey.by_site(chosen, np.abs(apart)):
            ranks = survey.fields["rank"][places]
            for part in [places[ranks == rank] for rank in np.unique(ranks)] if is_sure else [places]:
                worst = int(part[0])
                far = float(apart[worst])
                unsure = (
                    f"differs by {factor_text(abs(far))} in {name} between its two ranks, of which either may be wrong"
                )
                yield far_finding(
                    survey,
                    places=part,
                    kind="rank_differs",
                    severity=Severity.HIGH if abs(far) >= limit.SERIOUS_BINADES else Severity.MEDIUM,
                    peers="the other rank" if survey.num_ranks[worst] == _PAIR else "the other ranks",
                    text="" if is_sure else unsure,
                    seen=f"in {records_text(len(part))} of {survey.numbered('iteration', part)}",
                    metric=name,
                    value=float(survey.metrics[name][worst]),
                    deviation=float(scores[worst]),
                    binades=far,
                )


def _compared(survey: Survey, values: Floats) -> tuple[Codes, Codes]:
    """The records with a value that have peers on other ranks, and the group of each."""
    known = np.flatnonzero(np.isfinite(values) & survey.is_floating)
    groups = codes_of(survey.codes("attempt", "iteration", "microbatch", "call")[known], survey.sites[known])
    has_peers = sizes_of(groups) > 1
    return known[has_peers], groups[has_peers]


def _least(survey: Survey) -> Floats:
    """For each record, the smallest difference from the other ranks that is a finding."""
    # Shards are different parts of a tensor, and a few large channels can be on one rank only.
    texts = survey.records.column("placement").tolist()
    sharded = {text: "shard(" in text for text in set(texts)}
    is_shard = np.array([sharded[text] for text in texts], dtype=bool)
    usual = np.where(survey.is_gradient, limit.GRADIENT_TAIL_BINADES, limit.RANK_BINADES)
    # A lower limit applies if the median of at least three samples, not a single one, is far from other ranks.
    sizes = binades(survey.sample_absmax)
    finite = np.flatnonzero(np.isfinite(sizes))
    finite = finite[sizes_of(survey.sample_records[finite]) >= _MIN_WITHIN]
    middles = np.full(len(survey), np.nan)
    middles[survey.sample_records[finite]] = medians_of(survey.sample_records[finite], sizes[finite])
    known, groups = _compared(survey, middles)
    if known.size:
        apart, _ = _from_other_ranks(groups, middles[known], roles=survey.roles[known])
        far = known[np.abs(apart) >= limit.GRADIENT_RANK_BINADES]
        usual[far[survey.is_gradient[far]]] = limit.GRADIENT_RANK_BINADES
    return np.where(is_shard, limit.SERIOUS_BINADES, usual)


def _from_other_ranks(groups: Codes, values: Floats, *, roles: Codes) -> tuple[Floats, Floats]:
    """The difference of each value from its peers, and their spread."""
    apart, mads = deviations_of(groups, values)
    is_pair = sizes_of(groups) == _PAIR
    # The peer of each of two values is the other one, not the median halfway; both differences have equal magnitude.
    low, high = middles_of(groups, values)
    apart = np.where(is_pair, np.where(values == high, high - low, low - high), apart)
    pooled = medians_of(roles, np.abs(apart))
    # The spread of a few ranks is uncertain; that of the same tensor over all layers is less so.
    return apart, np.where(is_pair, np.minimum(pooled, limit.MAX_POOLED_MAD_BINADES), np.maximum(mads, pooled))


def _culprits(survey: Survey, values: Floats, known: Codes, groups: Codes, *, chosen: Mask) -> Mask:
    """In each pair that differs, the record that is clearly farther from its rank's other layers or iterations."""
    found = np.zeros(known.size, dtype=bool)
    places = np.flatnonzero(chosen)
    if not places.size:
        return found
    moments = codes_of(survey.fields["rank"], survey.times)
    in_layers = codes_of(moments, survey.roles), survey.sites
    in_time = codes_of(survey.fields["rank"], survey.sites), moments
    distances = np.zeros(places.size)
    for around, own in (in_layers, in_time):
        order = np.argsort(around, kind="stable")
        order = order[np.isfinite(values[order])]
        labels = around[order]
        for number, place in enumerate(known[places].tolist()):
            first, last = np.searchsorted(labels, around[place] + np.arange(2))
            peers = order[first:last][own[order[first:last]] != own[place]]
            if peers.size:
                distances[number] = max(distances[number], abs(float(np.median(values[peers]) - values[place])))
    for one, two in np.argsort(groups[places], kind="stable").reshape(-1, _PAIR).tolist():
        gap = distances[one] - distances[two]
        if abs(gap) >= limit.CLEARLY_NEARER_BINADES:
            found[places[one if gap > 0 else two]] = True
    return found


def layer_differs(survey: Survey) -> Iterator[Finding]:
    """A finding for each site of a layer that is far from the layers on both sides, about the most different metric."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for name in ("rms", "absmax"):
        for known in _layers_by_metric(survey, name):
            found[int(survey.sites[known["places"][0]])].append(known)
    for several in found.values():
        worst = max(several, key=lambda known: abs(known["binades"]))
        # Includes the records of every iteration in which the layer differs.
        places = list(dict.fromkeys(place for known in (worst, *several) for place in known["places"].tolist()))
        seen = f"{worst['seen']}, in {survey.numbered('iteration', places)}"
        yield far_finding(survey, **worst | {"places": places, "seen": seen})


def _layers_by_metric(survey: Survey, name: str) -> Iterator[dict[str, Any]]:
    """The arguments of `far_finding` for each layer that differs from the others of its role and iteration."""
    sizes, layers = binades(survey.metrics[name]), survey.fields["layer_idx"].astype(np.int64)
    known = np.flatnonzero(survey.is_floating & (layers >= 0) & np.isfinite(sizes))
    groups, at = codes_of(survey.roles[known], survey.times[known]), layers[known]
    # Takes both medians over ranks and microbatches, so that one of two ranks alone does not make the layer an outlier.
    middles = np.stack(middles_of(codes_of(groups, at), sizes[known]))
    for part in members_of(groups, at):
        steps, firsts = np.unique(at[part], return_index=True)
        if steps.size < limit.MIN_LAYERS:
            continue
        low, high = map(_from_neighbours, middles[:, part][:, firsts])
        apart = np.where(low * high > 0, np.where(np.abs(low) < np.abs(high), low, high), 0.0)
        scores = robust_z(apart, float(np.median(np.abs(apart))))
        edge = limit.GRADIENT_TAIL_BINADES if survey.is_gradient[known[part[0]]] else limit.EDGE_LAYER_BINADES
        least = np.full(steps.size, limit.LAYER_BINADES)
        least[[0, -1]] = edge
        for number in np.flatnonzero((np.abs(scores) > limit.ROBUST_Z) & (np.abs(apart) >= least)).tolist():
            is_edge, far = number in {0, steps.size - 1}, float(apart[number])
            places = known[part[at[part] == steps[number]]]
            middle = float(np.median(sizes[places]))
            # Weights are the tensors that differ least between neighbouring layers.
            is_serious = not is_edge and (abs(far) >= limit.SERIOUS_BINADES or bool(survey.is_weight[places[0]]))
            yield {
                "places": places[np.argsort(-np.abs(sizes[places] - middle + far), kind="stable")],
                "kind": "layer_differs",
                "severity": Severity.MEDIUM if is_serious else Severity.LOW,
                "peers": "the next layers" if is_edge else "the layers on both sides",
                "seen": f"median of {records_text(len(places))}",
                "metric": name,
                "value": without(-middle, 1.0),
                "deviation": float(scores[number]),
                "binades": far,
            }


def _from_neighbours(values: Floats) -> Floats:
    """The difference of each layer from the nearer of its two sides; 0 if it is between them."""
    below, above = values - _before(values), values - _before(values[::-1])[::-1]
    nearer = np.where(np.abs(below) <= np.abs(above), below, above)
    apart = np.where(below * above > 0, nearer, 0.0)
    apart[0] = _nearer_middle(values[0] - values[1 : 1 + limit.NUM_EDGE_NEIGHBOURS])
    apart[-1] = _nearer_middle(values[-1] - values[:-1][-limit.NUM_EDGE_NEIGHBOURS :])
    return apart


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
    known = np.flatnonzero(np.isfinite(values) & survey.is_floating[survey.sample_records])
    if not known.size:
        return
    records, sizes = survey.sample_records[known], values[known]
    sites = survey.sites[records]
    # Subtracts what all samples of an iteration share: training makes every gradient smaller.
    apart = sizes - medians_of(codes_of(sites, survey.times[records]), sizes)
    scores = robust_z(apart, medians_of(sites, np.abs(apart)))
    within = sizes - medians_of(records, sizes)
    least = np.where(survey.is_gradient[records], limit.GRADIENT_TAIL_BINADES, limit.SAMPLE_BINADES)
    num_within = sizes_of(records)
    is_far = (
        (scores > limit.ROBUST_Z)
        & (apart >= least)
        & (sizes_of(sites) >= limit.MIN_SAMPLES)
        & ((num_within == 1) | (within >= least) | (num_within < _MIN_WITHIN) & (within >= least / 2))
    )
    chosen = np.flatnonzero(is_far)
    names = sample_names(survey.records) if chosen.size else []
    groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for number in chosen[np.argsort(-apart[chosen], kind="stable")].tolist():
        record = int(records[number])
        name = str(names[record][int(survey.sample_numbers[known[number]])])
        groups[(int(sites[number]), int(survey.fields["rank"][record]), name)].append(number)
    for (site, rank, name), found in groups.items():
        far, value = float(apart[found[0]]), float(survey.sample_absmax[known[found[0]]])
        places = records[found]
        serious = limit.GRADIENT_SERIOUS_BINADES if survey.is_gradient[places[0]] else limit.SERIOUS_BINADES
        yield far_finding(
            survey,
            places=places,
            kind="sample_outlier",
            severity=Severity.HIGH if far >= serious else Severity.MEDIUM,
            peers=f"{int((sites == site).sum()) - 1} other samples",
            text=f"has an absmax of {factor_text(far)} times that of the other samples",
            seen=f"in {records_text(len(found))} of {survey.numbered('iteration', places)}, rank {rank}",
            metric="absmax",
            value=value,
            deviation=float(scores[found[0]]),
            binades=far,
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
    found = np.zeros(array.shape[-1])
    for part in pieces(array.reshape(-1, array.shape[-1]), axis=1, block_size=array.shape[-1] or 1):
        with np.errstate(invalid="ignore"):  # from signaling NaN
            magnitudes = np.abs(part if part.dtype.kind == "c" else part.astype(np.float64))
        np.maximum(found, np.where(np.isfinite(magnitudes), magnitudes, 0).max(axis=0, initial=0), out=found)
    return found


def channels(survey: Survey) -> Iterator[Finding]:
    """A finding for each site with outlying channels in at least half of its records, and one for channels of zeros."""
    sites: dict[tuple[int, int], _Channels] = {}
    waiting: dict[tuple[int, int], list[tuple[int, Floats]]] = defaultdict(list)
    nbytes = 0
    for place, payload in enumerate(survey.engine.measure(survey.records, ChannelMeasure(view=survey.view))):
        absmax = payload["absmax"]
        if absmax.size >= limit.MIN_CHANNELS and survey.is_floating[place]:
            waiting[int(survey.sites[place]), absmax.size].append((place, absmax))
            nbytes += absmax.nbytes
            if nbytes >= _WAITING_NBYTES:
                _add_waiting(sites, waiting)
                nbytes = 0
    _add_waiting(sites, waiting)
    for (_, count), found in sites.items():
        yield from found.findings(survey, count=count)


_WAITING_NBYTES = 32 << 20
"""So much is held of the magnitudes of channels before they are added to what is known of their sites."""


def _add_waiting(
    sites: dict[tuple[int, int], _Channels], waiting: dict[tuple[int, int], list[tuple[int, Floats]]]
) -> None:
    for key, found in waiting.items():
        known = sites.setdefault(key, _Channels(key[1]))
        known.places += [place for place, _ in found]
        known.add(np.stack([absmax for _, absmax in found]))
    waiting.clear()


class _Channels:
    """The channels of one site, as far as its records have been read."""

    def __init__(self, count: int) -> None:
        self.places: list[int] = []
        self._usual: list[float] = []
        self._apart, self._times, self._scores, self._largest = np.zeros((4, count))

    def add(self, absmax: Floats) -> None:
        """Count records more, one in each row."""
        np.maximum(self._largest, absmax.max(axis=0), out=self._largest)
        sizes = binades(absmax)
        sizes = sizes[np.isfinite(sizes).sum(axis=1) >= limit.MIN_CHANNELS]
        if not sizes.size:
            return
        middles = np.nanmedian(sizes, axis=1, keepdims=True)
        self._usual += (2.0**middles).reshape(-1).tolist()
        apart = np.nan_to_num(sizes - middles)
        scores = robust_z(apart, np.nanmedian(np.abs(sizes - middles), axis=1, keepdims=True))
        is_far = (scores > limit.ROBUST_Z) & (apart >= limit.CHANNEL_BINADES)
        self._apart += np.where(is_far, apart, 0.0).sum(axis=0)
        self._times += is_far.sum(axis=0)
        np.maximum(self._scores, scores.max(axis=0), out=self._scores)

    def findings(self, survey: Survey, *, count: int) -> Iterator[Finding]:
        """The findings of the site: outlying channels and channels of zeros."""
        places, times, of_all = self.places, self._times, records_text(len(self.places))
        usual = float(np.median(self._usual or [0.0]))
        outlying = np.flatnonzero((times * 2 >= len(self._usual)) & (times > 0))
        if 0 < outlying.size <= max(1, limit.MAX_OUTLYING_CHANNELS * count):
            means = self._apart[outlying] / times[outlying]
            ordered = outlying[np.argsort(-means, kind="stable")]
            channel, far = int(ordered[0]), float(means.max())
            value = float(self._largest[channel])
            yield finding_of(
                survey,
                places=places,
                kind="channel_outlier",
                severity=Severity.MEDIUM if far >= limit.SERIOUS_BINADES else Severity.LOW,
                score=far,
                text=f"has an absmax of {factor_text(far)} times that of the other channels",
                evidence=(
                    f"absmax {number_text(value)}, median of {count} channels {number_text(usual)}; in "
                    f"{int(times[channel])} of {of_all}; {_named(ordered)}"
                ),
                metric="absmax",
                value=value,
                expected=usual,
                deviation=float(self._scores[channel]),
                binades=far,
                channel=channel,
            )
        dead = np.flatnonzero(self._largest == 0)
        if 0 < dead.size < count and not survey.is_gradient[places[0]]:
            yield finding_of(
                survey,
                places=places,
                kind="zero",
                severity=Severity.LOW,
                score=dead.size / count,
                text=f"has {dead.size} of {count} channels that are zero everywhere",
                evidence=f"in all of {of_all}; {_named(dead)}",
                metric="absmax",
                value=0.0,
                expected=usual,
                channel=int(dead[0]),
            )


def _named(channels: Codes) -> str:
    more = f" and {channels.size - 8} more" if channels.size > 8 else ""  # noqa: PLR2004 - as many as are named
    return named_numbers("channel", channels[:8].tolist()) + more
