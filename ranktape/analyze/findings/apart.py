"""Finds ranks, layers, samples and channels that are far from their peers, and channels that are zero.

A channel is a place along the last dimension. Digests do not know it: records are read once more, and what is found is
kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Columns, Payload
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View, read_values
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import (
    Finding,
    Severity,
    factor_text,
    far_finding,
    finding_of,
    named_numbers,
    number_text,
    records_text,
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
    robust_z,
    sizes_of,
)
from ranktape.analyze.identity import sample_names
from ranktape.analyze.numerics.pieces import pieces
from ranktape.storage import Record
from ranktape.storage.format.record_info import Keep

MAX_OUTLYING_RATIO = 0.05
"""Where more of the channels are large, being so is ordinary."""

_MAX_CHANNELS = 8
_MIN_DIMENSIONS = 2

RANK_METRICS = ("absmax", "rms")
"""What ranks are compared by."""

_PAIR = 2
_CLEARLY_NEARER = 1.0
"""By so many binades one of two ranks is nearer to its own neighbours than the other is, to be the healthy one."""

_MIN_WITHIN = 3
"""Of two samples in a tensor the median is half way between them."""


def differing_ranks(survey: Survey) -> Iterator[Finding]:
    """One for each place and rank, by the metric that shows it best.

    The same place is compared in the same iteration, microbatch and call. Where a single sample is larger it is the
    sample that stands out: the gradient of a rank does if the median of its samples does. Of two ranks the one is
    meant whose metric is farther from the layers around it, and from its own in other iterations; where neither is,
    both are.
    """
    best: dict[tuple[int, int], Finding] = {}
    least = _least(survey)
    for name in RANK_METRICS:
        for finding in _by_metric(survey, name=name, least=least):
            places = list(finding.places)
            key = (int(survey.sites[places[0]]), int(survey.fields["rank"][places].min()))
            if key not in best or finding.score > best[key].score:
                best[key] = finding
    yield from best.values()


def _by_metric(survey: Survey, *, name: str, least: Floats) -> Iterator[Finding]:
    values = binades(survey.metrics[name])
    known, groups = _compared(survey, values)
    if not known.size:
        return
    # Arrays over all records, as places are told apart by them.
    apart, scores = np.zeros(len(survey)), np.zeros(len(survey))
    apart[known], mads = _deviations(groups, values[known], roles=survey.roles[known])
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
                yield _rank_finding(survey, name, part, apart=apart, scores=scores, is_sure=is_sure)


def _compared(survey: Survey, values: Floats) -> tuple[Codes, Codes]:
    """The records with a value that have peers on other ranks, and which are peers."""
    known = np.flatnonzero(np.isfinite(values) & survey.is_floating)
    moments = survey.codes("attempt", "iteration", "microbatch", "call")
    groups = codes_of(moments[known], survey.sites[known])
    has_peers = sizes_of(groups) > 1
    return known[has_peers], groups[has_peers]


def _least(survey: Survey) -> Floats:
    """For each record by how many binades it differs from its peers, at the least, to be told."""
    # Of shards each is another part of the tensor, and a few large channels are on one rank alone.
    texts = survey.records.column("placement").tolist()
    sharded = {text: "shard(" in text for text in set(texts)}
    is_shard = np.array([sharded[text] for text in texts], dtype=bool)
    usual = np.where(survey.is_gradient, limit.GRADIENT_TAIL_BINADES, limit.RANK_BINADES)
    # Where not a single sample, but the median of three and more, is far from that of other ranks.
    middles = survey.middle_samples()
    known, groups = _compared(survey, middles)
    if known.size:
        apart, _ = _deviations(groups, middles[known], roles=survey.roles[known])
        far = known[np.abs(apart) >= limit.GRADIENT_RANK_BINADES]
        usual[far[survey.is_gradient[far]]] = limit.GRADIENT_RANK_BINADES
    return np.where(is_shard, limit.SERIOUS_BINADES, usual)


def _deviations(groups: Codes, values: Floats, *, roles: Codes) -> tuple[Floats, Floats]:
    """How far each value is from its peers, and the spread among them."""
    apart, mads = deviations_of(groups, values)
    is_pair = sizes_of(groups) == _PAIR
    # Of two the middle is half way: the peer of each is the other one, and both are as far apart to the last bit.
    low, high = middles_of(groups, values)
    apart = np.where(is_pair, np.where(values == high, high - low, low - high), apart)
    pooled = medians_of(roles, np.abs(apart))
    # A handful of ranks says little about their own spread; the same tensor of all layers says more.
    return apart, np.where(is_pair, np.minimum(pooled, limit.MAX_POOLED_MAD_BINADES), np.maximum(mads, pooled))


def _culprits(survey: Survey, values: Floats, known: Codes, groups: Codes, *, chosen: Mask) -> Mask:
    """Of pairs that differ the one that is clearly farther from what its own rank has around the place.

    That is from other layers, or from other iterations; the larger one.
    """
    found = np.zeros(known.size, dtype=bool)
    places = np.flatnonzero(chosen)
    if not places.size:
        return found
    sites, moments = survey.sites, survey.codes("rank", "attempt", "iteration")
    in_layers = codes_of(moments, survey.roles), sites
    in_time = codes_of(survey.fields["rank"], sites), moments
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
        if abs(gap) >= _CLEARLY_NEARER:
            found[places[one if gap > 0 else two]] = True
    return found


def _rank_finding(survey: Survey, name: str, places: Codes, *, apart: Floats, scores: Floats, is_sure: bool) -> Finding:
    worst = int(places[0])
    far = float(apart[worst])
    iterations = named_numbers("iteration", survey.fields["iteration"][places].tolist())
    unsure = f"differs by {factor_text(abs(far))} in {name} between its two ranks, of which either may be wrong"
    return far_finding(
        survey,
        places=places,
        kind="rank_differs",
        severity=Severity.HIGH if abs(far) >= limit.SERIOUS_BINADES else Severity.MEDIUM,
        peers="the other rank" if survey.num_ranks[worst] == _PAIR else "the other ranks",
        text="" if is_sure else unsure,
        seen=f"in {records_text(len(places))} of {iterations}",
        metric=name,
        value=(value := float(survey.metrics[name][worst])),
        expected=value / 2.0**far,
        deviation=float(scores[worst]),
        binades=far,
    )


LAYER_METRICS = ("rms", "absmax")
"""What layers are compared by."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Course:
    """A metric along the layers: at each layer the middle over ranks and microbatches."""

    records: Codes
    """Those that it is made of."""
    at: Codes
    """The step of each of these."""
    steps: Codes
    """The steps that there are, ascending."""
    values: Floats
    """The metric at each of those: two rows, for the two in the middle of an even number of records. So what one of
    two ranks does, and the other does not share, is none of the step."""

    def at_step(self, step: int) -> Codes:
        """The records of a step."""
        found: Codes = self.records[self.at == step]
        return found


def _courses_of(groups: Codes, steps: Codes, values: Floats, *, known: Mask, min_steps: int) -> Iterator[_Course]:
    """For each group its course, where it has so many steps; of the records that are known and have a value."""
    records = np.flatnonzero(known & np.isfinite(values))
    at = steps[records].astype(np.int64)
    middles = np.stack(middles_of(codes_of(groups[records], at), values[records]))
    for part in members_of(groups[records], at):
        found, firsts = np.unique(at[part], return_index=True)
        if found.size >= min_steps:
            yield _Course(records=records[part], at=at[part], steps=found, values=middles[:, part][:, firsts])


def _layers(survey: Survey, name: str) -> Iterator[_Course]:
    """A metric over the layers of one kind of place, in one iteration."""
    layers = survey.fields["layer_idx"].astype(np.int64)
    groups = codes_of(survey.roles, survey.codes("attempt", "iteration"))
    known = survey.is_floating & (layers >= 0)
    yield from _courses_of(groups, layers, binades(survey.metrics[name]), known=known, min_steps=limit.MIN_LAYERS)


def differing_layers(survey: Survey) -> Iterator[Finding]:
    """One for each place of a layer, by the metric that shows it best.

    A layer stands out if it does so from the layers on both sides, in the same direction.
    """
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for name in LAYER_METRICS:
        for course in _layers(survey, name):
            for known in _standing_out(survey, course, name):
                found[int(survey.sites[known["places"][0]])].append(known)
    for several in found.values():
        worst = max(several, key=lambda known: abs(known["binades"]))
        # With the records of every iteration in which it shows.
        places = list(dict.fromkeys(place for known in (worst, *several) for place in known["places"].tolist()))
        seen = f"{worst['seen']}, in {named_numbers('iteration', survey.fields['iteration'][places].tolist())}"
        yield far_finding(survey, **worst | {"places": places, "seen": seen})


def _standing_out(survey: Survey, course: _Course, name: str) -> Iterator[dict[str, Any]]:
    """What `far_finding` takes of each layer that stands out."""
    is_gradient = bool(survey.is_gradient[course.records[0]])
    low, high = map(_from_neighbours, course.values)
    apart = np.where(low * high > 0, np.where(np.abs(low) < np.abs(high), low, high), 0.0)
    scores = robust_z(apart, float(np.median(np.abs(apart))))
    for step, far, score in zip(course.steps.tolist(), apart.tolist(), scores.tolist(), strict=True):
        is_edge = step in {course.steps[0], course.steps[-1]}
        edge = limit.GRADIENT_TAIL_BINADES if is_gradient else limit.EDGE_LAYER_BINADES
        least = edge if is_edge else limit.LAYER_BINADES
        if abs(score) <= limit.ROBUST_Z or abs(far) < least:
            continue
        places = course.at_step(step)
        sizes, worst = binades(survey.metrics[name][places]), int(places[0])
        middle = float(np.median(sizes))
        # Of all that a layer has, its weights are most like those of the layers around it.
        is_serious = not is_edge and (abs(far) >= limit.SERIOUS_BINADES or bool(survey.is_weight[worst]))
        yield {
            "places": places[np.argsort(-np.abs(sizes - middle + far), kind="stable")],
            "kind": "layer_differs",
            "severity": Severity.MEDIUM if is_serious else Severity.LOW,
            "peers": "the next layers" if is_edge else "the layers on both sides",
            "seen": f"median of {records_text(len(places))}",
            "metric": name,
            "value": 2.0**middle,
            "expected": 2.0 ** (middle - far),
            "deviation": score,
            "binades": far,
        }


def _from_neighbours(values: Floats) -> Floats:
    """How far each layer is from those on both sides, the nearer ones; 0 where it lies between them."""
    below, above = values - _before(values), values - _before(values[::-1])[::-1]
    nearer = np.where(np.abs(below) <= np.abs(above), below, above)
    apart = np.where(below * above > 0, nearer, 0.0)
    apart[0] = _nearer_middle(values[0] - values[1 : 1 + limit.NUM_EDGE_NEIGHBOURS])
    apart[-1] = _nearer_middle(values[-1] - values[:-1][-limit.NUM_EDGE_NEIGHBOURS :])
    return apart


def _nearer_middle(values: Floats) -> float:
    """The median; of two values in the middle the one nearer to 0, and 0 if it lies between them.

    Of three layers one that is far off would else move what the other two are compared with by half of that.
    """
    low, high = np.sort(values)[[(values.size - 1) // 2, values.size // 2]].tolist()
    return 0.0 if low * high < 0 else min(low, high, key=abs)


def _before(values: Floats) -> Floats:
    """The mean of the two layers before each; of the second the first, and of the first itself."""
    means = np.concatenate((values[:2], (values[:-2] + values[1:-1]) / 2))
    means[1] = values[0]
    return means


def outlying_samples(survey: Survey) -> Iterator[Finding]:
    """One for each sample of each rank and place that is far above its peers, in any of the records.

    Peers are the samples of the place over all ranks, microbatches and iterations. A sample also has to stand out among
    those of its own iteration, and of its own tensor where there are others: when all samples of a rank are larger,
    the rank is what stands out, and when all of an iteration are, the iteration is.
    """
    samples = survey.samples
    values = binades(samples.absmax)
    known = np.flatnonzero(np.isfinite(values) & survey.is_floating[samples.record])
    if not known.size:
        return
    records, sizes = samples.record[known], values[known]
    places = survey.sites[records]
    moments = codes_of(places, survey.codes("attempt", "iteration")[records])
    # What all of an iteration share is no sample's own: learning makes every gradient smaller.
    apart = sizes - medians_of(moments, sizes)
    scores = robust_z(apart, medians_of(places, np.abs(apart)))
    within = sizes - medians_of(records, sizes)
    least = np.where(survey.is_gradient[records], limit.GRADIENT_TAIL_BINADES, limit.SAMPLE_BINADES)
    is_far = (
        (scores > limit.ROBUST_Z)
        & (apart >= least)
        & (sizes_of(places) >= limit.MIN_SAMPLES)
        & ((sizes_of(records) == 1) | (within >= least) | (sizes_of(records) < _MIN_WITHIN) & (within >= least / 2))
    )
    chosen = np.flatnonzero(is_far)
    indices, ranks = samples.number[known], survey.fields["rank"][records]
    names = sample_names(survey.records) if chosen.size else []
    groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for place in chosen[np.argsort(-apart[chosen], kind="stable")].tolist():
        name = str(names[int(records[place])][int(indices[place])])
        groups[(int(places[place]), int(ranks[place]), name)].append(place)
    for (_, rank, name), found in groups.items():
        worst = found[0]
        far, value = float(apart[worst]), float(samples.absmax[known[worst]])
        serious = limit.GRADIENT_SERIOUS_BINADES if survey.is_gradient[records[worst]] else limit.SERIOUS_BINADES
        iterations = named_numbers("iteration", survey.fields["iteration"][records[found]].tolist())
        yield far_finding(
            survey,
            places=records[found],
            kind="sample_outlier",
            severity=Severity.HIGH if far >= serious else Severity.MEDIUM,
            peers=f"{int((places == places[worst]).sum()) - 1} other samples",
            text=f"has an absmax of {factor_text(far)} times that of the other samples",
            seen=f"in {records_text(len(found))} of {iterations}, rank {rank}",
            metric="absmax",
            value=value,
            expected=value / 2.0**far,
            deviation=float(scores[worst]),
            binades=far,
            sample=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMeasure:
    """Measures the largest finite magnitude of each channel; nothing where values were not kept, or of vectors."""

    view: View = View.COMPUTE
    """Which numbers are judged."""

    @property
    def name(self) -> str:
        """What the cache knows it by."""
        return f"channels_{self.view}_v1"

    def __call__(self, records: Iterable[Record], /) -> Columns:
        """The largest magnitudes as `absmax`."""
        return Columns.of_payloads([self._payload(record) for record in records])

    def _payload(self, record: Record) -> Payload:
        if record.keep != Keep.VALUES or len(record.shape) < _MIN_DIMENSIONS:
            return {"absmax": np.zeros(0)}
        return {"absmax": channel_absmax(read_values(record, view=self.view))}


def channel_absmax(array: NDArray[np.generic]) -> NDArray[np.float64]:
    """The largest finite magnitude at each place of the last dimension; 0 where nothing is finite."""
    found = np.zeros(array.shape[-1])
    for part in pieces(array.reshape(-1, array.shape[-1]), axis=1, block_size=array.shape[-1] or 1):
        with np.errstate(invalid="ignore"):  # of a NaN that signals
            magnitudes = np.abs(part if part.dtype.kind == "c" else part.astype(np.float64))
        np.maximum(found, np.where(np.isfinite(magnitudes), magnitudes, 0).max(axis=0, initial=0), out=found)
    return found


def outlying_channels(survey: Survey, *, view: View | None = None, engine: Engine | None = None) -> Iterator[Finding]:
    """One for each place with channels that stand out in most of its records, and one where channels are dead."""
    measured = (engine or Engine()).measure(survey.records, ChannelMeasure(view=view or View.COMPUTE))
    sites: dict[tuple[int, int], _Channels] = {}
    for place, payload in enumerate(measured):
        absmax = payload["absmax"]
        if absmax.size >= limit.MIN_CHANNELS and survey.is_floating[place]:
            key = int(survey.sites[place]), absmax.size
            sites.setdefault(key, _Channels(absmax.size)).add(absmax, place=place)
    for channels in sites.values():
        yield from channels.findings(survey)


class _Channels:
    """What the channels of one place were in all of its records."""

    def __init__(self, count: int) -> None:
        # For each channel: how far it was above the others, in binades, over the records in which it stood out; in how
        # many that was; its largest robust z; and its largest value.
        self._apart, self._times, self._scores, self._worst = np.zeros((4, count))
        self._usual: list[float] = []
        self._places: list[int] = []

    def add(self, absmax: NDArray[np.float64], *, place: int) -> None:
        """Take one more record."""
        self._places.append(place)
        np.maximum(self._worst, absmax, out=self._worst)
        sizes = binades(absmax)
        known = np.isfinite(sizes)
        if known.sum() < limit.MIN_CHANNELS:
            return
        middle = float(np.median(sizes[known]))
        apart = np.where(known, sizes - middle, 0.0)
        scores = robust_z(apart, float(np.median(np.abs(apart[known]))))
        is_far = (scores > limit.ROBUST_Z) & (apart >= limit.CHANNEL_BINADES)
        self._apart += np.where(is_far, apart, 0.0)
        self._times += is_far
        np.maximum(self._scores, scores, out=self._scores)
        self._usual.append(2.0**middle)

    def findings(self, survey: Survey) -> Iterator[Finding]:
        """What stands out in at least half of the records, and what is always zero."""
        count, usual = self._worst.size, float(np.median(self._usual or [0.0]))
        known: dict[str, Any] = {"places": self._places, "metric": "absmax", "expected": usual}
        of_all = records_text(len(self._places))
        outlying = np.flatnonzero((self._times * 2 >= max(1, len(self._usual))) & (self._times > 0))
        if 0 < outlying.size <= max(1, MAX_OUTLYING_RATIO * count):
            means = self._apart[outlying] / self._times[outlying]
            ordered = outlying[np.argsort(-means, kind="stable")]
            channel, far = int(ordered[0]), float(means.max())
            value = float(self._worst[channel])
            yield finding_of(
                survey,
                kind="channel_outlier",
                severity=Severity.MEDIUM if far >= limit.SERIOUS_BINADES else Severity.LOW,
                score=far,
                text=f"has an absmax of {factor_text(far)} times that of the other channels",
                evidence=(
                    f"absmax {number_text(value)}, median of {count} channels {number_text(usual)}; in "
                    f"{int(self._times[channel])} of {of_all}; {_named(ordered)}"
                ),
                value=value,
                deviation=float(self._scores[channel]),
                binades=far,
                channel=channel,
                **known,
            )
        dead = np.flatnonzero(self._worst == 0)
        if 0 < dead.size < count and not survey.is_gradient[self._places[0]]:
            yield finding_of(
                survey,
                kind="zero",
                severity=Severity.LOW,
                score=dead.size / count,
                text=f"has {dead.size} of {count} channels that are zero everywhere",
                evidence=f"in all of {of_all}; {_named(dead)}",
                value=0.0,
                channel=int(dead[0]),
                **known,
            )


def _named(channels: NDArray[np.int64]) -> str:
    more = f" and {channels.size - _MAX_CHANNELS} more" if channels.size > _MAX_CHANNELS else ""
    return named_numbers("channel", channels[:_MAX_CHANNELS].tolist()) + more
