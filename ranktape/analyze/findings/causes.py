"""Separates causes from consequences: a consequence is computed from its cause, with nothing clean between them.

Within a pass, consequences are computed later, on the same rank and for the same microbatch. NaN and infinities reach
a later iteration through the weights, unless a gradient scaler skipped the step or an iteration in between is clean.
Records do not show which operations read a tensor, so two branches of one pass can be mistaken for one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import KINDS, Finding, Severity
from ranktape.analyze.findings.survey import Codes, Mask, Survey, row_codes

_NONFINITE = frozenset({"nan", "inf", "overflow"})
"""Kinds that spread to everything that is computed from them, and to all ranks with the next step."""

_TOO_LARGE = frozenset({"rank_differs", "sample_outlier", "layer_differs"})
"""Kinds that can cause an overflow."""

_LOCAL = frozenset({"replica_differs", "channel_outlier"})
"""Kinds that explain only other findings at the same site."""

_KIND_ORDER = {kind: number for number, kind in enumerate(KINDS)}

Moment = tuple[int, int, int]
"""Captured iteration, rank and microbatch."""


class _Event:
    """A finding with the properties that decide what it follows from; a cause has its consequences."""

    def __init__(self, survey: Survey, finding: Finding) -> None:
        chosen, fields = list(finding.places), survey.fields
        first = min(chosen, key=survey.when)
        self.finding, self.kind = finding, finding.kind
        self.root, self.following, self.similar = self, list[_Event](), list[_Event]()
        """The cause; its consequences; independent findings of the same kind at other sites."""
        self.is_low = finding.severity is Severity.LOW
        is_odd_gradient = self.kind == "layer_differs" and bool(survey.is_gradient[chosen[0]])
        is_small = is_odd_gradient and (finding.binades or 0) < 0
        self.is_shrinking = self.kind in {"gradient_underflow", "zero"} or is_small
        """Whether it explains smaller values downstream, and nothing else."""
        self.is_exploding = is_odd_gradient and not is_small
        self.is_nonfinite = self.kind in _NONFINITE and not self.is_low
        """Whether values are lost; infinities of a mask do not count."""
        self.sample, self.channel = (finding.where.get(name) for name in ("sample", "channel"))
        self.start, self.site = survey.when(first), int(survey.sites[first])
        self.time = self.start[0]
        self.module, self.is_backward = str(fields["module"][first]), fields["operation"][first] == "backward"
        self.is_weight = bool(survey.is_weight[chosen[0]])
        self.is_reduced = str(fields["tensor_name"][first]).startswith("reduced_")
        """Whether it is about a gradient as the optimizer got it: over all ranks and microbatches, and clipped."""
        self.layer, self.stack = int(fields["layer_idx"][first]), str(fields["layer_stack"][first])
        self.moments: dict[Moment, int] = {}
        """For each moment of its records, the order of the first record."""
        columns = (survey.times, fields["rank"], fields["microbatch"], survey.order)
        for time, rank, microbatch, order in zip(*(column[chosen].tolist() for column in columns), strict=True):
            # A weight is the same in all microbatches.
            moment = time, rank, 0 if self.is_weight else microbatch
            self.moments[moment] = min(order, self.moments.get(moment, order))
        self.times = frozenset(time for time, _, _ in self.moments)
        is_spread = self.kind in _NONFINITE
        self.ranks = frozenset(rank for time, rank, _ in self.moments if time == self.time or not is_spread)
        """The ranks of the first iteration, if the kind spreads; otherwise the ranks of all records."""

    @property
    def order(self) -> tuple[tuple[int, int], int]:
        """The sort key: the earliest start first, then the most informative kind."""
        return self.start, _KIND_ORDER[self.kind]

    @property
    def members(self) -> list[_Event]:
        """The cause, the findings like it, and the consequences."""
        return [self, *self.similar, *self.following]

    @property
    def severity(self) -> Severity:
        """The worst severity of all members."""
        return min((event.finding.severity for event in self.members), key=lambda severity: severity.order)

    @property
    def badness(self) -> tuple[object, ...]:
        """The sort key: the worst cause first; among lost values, the earliest start first."""
        if self.is_nonfinite:
            return self.severity.order, _KIND_ORDER["nan"], self.start
        return self.severity.order, _KIND_ORDER[self.kind], (), -self.finding.score

    def to_finding(self) -> Finding:
        """The finding of a cause, with its consequences and the findings like it."""
        finding, following = self.finding, sorted(self.following, key=lambda event: event.order)
        same_site = [event.finding for event in following if event.site == self.site]
        return dataclasses.replace(
            finding,
            severity=self.severity,
            places=(*finding.places, *(event.finding.places[0] for event in self.similar)),
            alike=tuple(event.finding.title for event in self.similar),
            consequences=tuple(event.finding.title for event in following),
            followed_by=tuple(event.finding.places[0] for event in following),
            evidence=finding.evidence + "".join(f"; {event.kind}: {event.evidence}" for event in same_site[:2]),
        )


def merge_consequences(survey: Survey, findings: Sequence[Finding]) -> list[Finding]:
    """The causes with their consequences, the worst cause first."""
    roots: list[_Event] = []
    by_site: dict[int, list[_Event]] = defaultdict(list)
    # Consequences that can have consequences themselves, by episode.
    spreading: dict[int, list[_Event]] = defaultdict(list)
    ordered = sorted((_Event(survey, finding) for finding in findings), key=lambda event: event.order)
    flow = _Flow(survey, ordered)
    for event in ordered:
        episode = int(flow.episodes[event.time])
        # A finding about the same values, even if it is a consequence, is a nearer cause than any earlier one.
        same_values = (other for other in by_site[event.site] if _is_same_values(other, event))
        # The cause of a consequence is also the cause of what follows: a layer grew, so gradients and weights are NaN.
        causes = (other for other in itertools.chain(roots, spreading[episode]) if flow.explains(other, event))
        cause = next(itertools.chain(same_values, causes), None)
        if cause is None:
            roots.append(event)
        else:
            event.root = cause.root
            event.root.following.append(event)
            if event.is_nonfinite or event.is_weight:
                spreading[episode].append(event)
        by_site[event.site].append(event)
    for root in roots:
        _mark_as_skipped(survey, root)
    merged = _merge_similar(_merge_recurring(survey, roots))
    return [root.to_finding() for root in sorted(merged, key=lambda event: event.badness)]


class _Flow:
    """The flow of computation, as far as records show it."""

    def __init__(self, survey: Survey, events: Sequence[_Event]) -> None:
        self._survey = survey
        self._nonfinite = _record_mask(survey, [event for event in events if event.is_nonfinite])
        self._shrunk = _record_mask(survey, [event for event in events if event.is_shrinking])
        self.episodes = survey.episodes(self._nonfinite)
        """For each captured iteration, the number of its episode of lost values; -1 if the iteration is clean."""

    def explains(self, cause: _Event, event: _Event) -> bool:
        """Whether an event follows from an event that started earlier at another site."""
        if cause.site == event.site or {cause.kind, event.kind} & _LOCAL:
            return False
        # Infinities of a mask are intended: they are neither causes nor consequences.
        if any(other.kind in _NONFINITE and not other.is_nonfinite for other in (cause, event)):
            return False
        if cause.is_nonfinite and event.is_nonfinite and self._is_carried(cause, event):
            return True
        if event.is_weight:
            # Within an iteration, weights do not change.
            return self._is_step_with(cause, event)
        return _is_plausible(cause, event) and self._is_downstream(cause, event)

    def _is_downstream(self, cause: _Event, event: _Event) -> bool:
        """Whether the other event was computed from the cause in the same passes."""
        if event.time not in cause.times:
            return False
        if cause.sample is not None:
            if event.sample not in {None, cause.sample} or not event.moments.keys() <= cause.moments.keys():
                return False
        elif event.sample is not None and not cause.is_nonfinite and not event.is_backward:
            # A weight or a rank affects all samples alike.
            return False
        covered = {moment: _comes_before(cause, event, moment) for moment in event.moments}
        # The cause has to explain the start, and most of what came later.
        is_explained = all(is_covered for moment, is_covered in covered.items() if moment[0] == event.time)
        return is_explained and 2 * sum(covered.values()) > len(covered) and not self._is_clean_between(cause, event)

    def _is_clean_between(self, cause: _Event, event: _Event) -> bool:
        """Whether its module's inputs, or a layer between the two, are clean in the pass in which it started."""
        if cause.is_nonfinite and self._is_source(event):
            return True
        is_similar = event.kind in _NONFINITE if cause.is_nonfinite else cause.is_shrinking and event.is_shrinking
        if not is_similar or event.is_reduced or min(cause.layer, event.layer) < 0 or cause.stack != event.stack:
            return False
        low, high = sorted((cause.layer, event.layer))
        spans: list[tuple[bool, float, float]] = [(event.is_backward, low, high)]
        if cause.is_backward != event.is_backward:
            spans = [(False, cause.layer, np.inf), (True, event.layer, np.inf)]
        moment = next(moment for moment in event.moments if moment[0] == event.time)
        clean = self._finite_layers if cause.is_nonfinite else self._unshrunk_layers
        return any(
            first < layer < last
            for is_backward, first, last in spans
            for layer in clean[(*moment, event.stack, is_backward)]
        )

    def _is_source(self, event: _Event) -> bool:
        """Whether a module lost the values itself: its inputs were recorded, and all its earlier records are clean."""
        if not event.is_nonfinite or event.is_weight or event.is_reduced:
            return False
        survey, fields = self._survey, self._survey.fields
        starts = ((order, moment) for moment, order in event.moments.items() if moment[0] == event.time)
        order, (time, rank, microbatch) = min(starts, key=lambda start: start[0])
        mask = (fields["module"] == event.module) & (survey.times == time) & (fields["rank"] == rank)
        mask &= (survey.order < order) & survey.is_floating
        is_input = mask & (fields["phase"] == "pre") & ~survey.is_weight & (fields["microbatch"] == microbatch)
        # Gradients are computed from the inputs of the forward pass, too.
        operations = {"forward", "backward"} if event.is_backward else {"forward"}
        return operations <= set(fields["operation"][is_input].tolist()) and not self._nonfinite[mask].any()

    @functools.cached_property
    def _finite_layers(self) -> Mapping[tuple[object, ...], list[int]]:
        return _clean_layers(self._survey, self._nonfinite)

    @functools.cached_property
    def _unshrunk_layers(self) -> Mapping[tuple[object, ...], list[int]]:
        return _clean_layers(self._survey, self._shrunk)

    def _is_carried(self, cause: _Event, event: _Event) -> bool:
        """Whether lost values of an earlier iteration reach a later one by a step, with no clean iteration between."""
        if cause.time >= event.time or self.episodes[cause.time] != self.episodes[event.time]:
            return False
        before = [time for time in cause.times if time < event.time]
        if self._survey.skipped_times[before].all():
            return False
        if event.is_weight:
            return not self._is_recorded_between(event, max(before))
        carriers = [self._carriers[event.time, rank] for rank in event.ranks if (event.time, rank) in self._carriers]
        return (
            any(lost or (not has_weights and not event.is_backward) for has_weights, lost in carriers) or not carriers
        )

    @functools.cached_property
    def _carriers(self) -> Mapping[tuple[int, int], tuple[bool, bool]]:
        """For each captured iteration and rank, whether weights were recorded, and whether one of them is lost.

        If no weight was recorded, the second is whether another tensor of the forward pass is lost.
        """
        survey, carriers = self._survey, dict[tuple[int, int], tuple[bool, bool]]()
        is_forward = (survey.fields["operation"] == "forward") & survey.is_floating
        for is_weight in (False, True):
            chosen = np.flatnonzero(is_forward & (survey.is_weight == is_weight))
            groups = row_codes(survey.times[chosen], survey.fields["rank"][chosen])
            lost = np.bincount(groups, weights=self._nonfinite[chosen])
            for row, group in zip(chosen[np.unique(groups, return_index=True)[1]].tolist(), lost, strict=True):
                carriers[int(survey.times[row]), int(survey.fields["rank"][row])] = is_weight, bool(group)
        return carriers

    def _is_step_with(self, gradient: _Event, weight: _Event) -> bool:
        """Whether a weight became too large in a step with an exploded gradient.

        A gradient that explodes in one layer also reaches the layers before it.
        """
        before = [time for time in gradient.times if time < weight.time]
        return (
            gradient.is_exploding
            and weight.kind == "layer_differs"
            and (weight.finding.binades or 0) > 0
            and bool(before)
            and (gradient.module == weight.module or 0 <= weight.layer < gradient.layer)
            and not self._is_recorded_between(weight, max(before))
        )

    def _is_recorded_between(self, event: _Event, time: int) -> bool:
        """Whether its site was recorded after that captured iteration and before the one in which it started."""
        site_times = self._survey.times[self._survey.sites == event.site]
        return bool(((site_times > time) & (site_times < event.time)).any())


def _record_mask(survey: Survey, events: Sequence[_Event]) -> Mask:
    mask = np.zeros(len(survey), dtype=bool)
    mask[[row for event in events for row in event.finding.places]] = True
    return mask


def _comes_before(cause: _Event, event: _Event, moment: Moment) -> bool:
    """Whether the cause precedes the other event in that pass."""
    time, rank, microbatch = moment
    if event.is_reduced:
        return any(
            time == start_time and (cause.is_nonfinite or rank == on_rank) for start_time, on_rank, _ in cause.moments
        )
    start = cause.moments.get((time, rank, 0 if cause.is_weight else microbatch))
    return start is not None and start < event.moments[moment]


def _clean_layers(survey: Survey, mask: Mask) -> Mapping[tuple[object, ...], list[int]]:
    """For each pass, the layers without a tensor in the mask; weights do not belong to a pass."""
    fields = survey.fields
    chosen = np.flatnonzero((fields["layer_idx"] >= 0) & survey.is_floating & ~survey.is_weight)
    names = ("rank", "microbatch", "layer_stack", "operation", "layer_idx")
    groups = row_codes(survey.times[chosen], *(fields[name][chosen] for name in names))
    is_clean: Codes = np.bincount(groups, weights=mask[chosen]) == 0
    clean: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row in chosen[np.unique(groups, return_index=True)[1]][is_clean].tolist():
        rank, microbatch, stack, operation, layer = (fields[name][row] for name in names)
        moment = int(survey.times[row]), int(rank), int(microbatch)
        clean[(*moment, str(stack), operation == "backward")].append(int(layer))
    return clean


def _is_plausible(cause: _Event, event: _Event) -> bool:
    """Whether a finding of the cause's kind can lead to one of the other's kind, wherever they are."""
    if cause.finding.metric.startswith("flushed"):
        # The finding is about a format that the run did not use.
        return False
    shrinks = event.is_shrinking or (event.finding.binades or 0) < 0
    if cause.is_shrinking:
        is_worse = event.is_shrinking and event.finding.severity.order < cause.finding.severity.order
        # Compares the lost parts: a gradient that loses far more has its own cause.
        is_worse |= cause.kind == event.kind == "gradient_underflow" and event.finding.score > 2 * cause.finding.score
        is_zero = cause.kind == event.kind == "zero" and cause.module == event.module
        return shrinks and not is_worse and ((cause.is_backward and event.is_backward) or is_zero)
    if event.kind == "zero":
        return False
    if event.kind in _NONFINITE:
        return cause.is_nonfinite or (cause.kind in _TOO_LARGE and not cause.is_low)
    # A low finding explains a worse one only within its own module, such as one about its gradients.
    return not cause.is_low or event.is_low or (cause.kind in _TOO_LARGE and cause.module == event.module)


def _is_same_values(cause: _Event, event: _Event) -> bool:
    """Whether two findings at one site are about the same values; the first is earlier or more informative."""
    if (cause.is_low and not event.is_low) or not cause.times & event.times:
        # A low finding does not give the title of a worse one.
        return False
    if cause.is_nonfinite and not event.is_nonfinite and not event.times <= cause.times:
        # The other finding also occurs in iterations without lost values.
        return False
    if cause.channel is not None and event.channel is not None:
        return bool(cause.channel == event.channel)
    if cause.sample is not None and event.sample is not None:
        return bool(cause.sample == event.sample) and cause.ranks == event.ranks
    if cause.sample is not None:
        return event.kind not in {"nan", "inf", "replica_differs"} and event.moments.keys() <= cause.moments.keys()
    return bool(cause.ranks & event.ranks) and event.sample is None


def _mark_as_skipped(survey: Survey, root: _Event) -> None:
    """Make a cause LOW if its infinities come from a loss scale that was too high.

    They start in a gradient, in iterations whose steps a gradient scaler skipped, and later gradients of the same
    site are finite. If there is only NaN, a smaller scale would not help.
    """
    if not (root.is_nonfinite and root.is_backward and survey.skipped_times[list(root.times)].all()):
        return
    members = root.members
    is_infinite = any(event.kind == "inf" and event.site == root.site and event.time == root.time for event in members)
    if is_infinite and (survey.times[survey.sites == root.site] > max(root.times)).any():
        for event in members:
            event.finding = dataclasses.replace(event.finding, severity=Severity.LOW)
        title = f"{root.finding.title}, as the loss scale was too high"
        root.finding = dataclasses.replace(root.finding, title=title)


def _merge_recurring(survey: Survey, roots: Sequence[_Event]) -> Iterable[_Event]:
    """Merge causes of lost values at one site that recur after clean iterations; the evidence says so."""
    groups: dict[tuple[object, ...], list[_Event]] = defaultdict(list)
    for number, root in enumerate(roots):
        groups[(root.site, root.kind, root.finding.severity) if root.is_nonfinite else (number,)].append(root)
    for first, *again in groups.values():
        if again:
            finding, later = first.finding, [row for event in again for row in event.finding.places]
            severity, more = finding.severity, ""
            num_after = survey.num_times - 1 - max(first.times)
            if severity is Severity.LOW and len(again) > 1:
                is_often = np.unique(survey.times[later]).size * limit.MAX_SKIPPED_STEPS >= num_after
                severity = Severity.MEDIUM if is_often else severity
                more = "; a scaler that works skips a step once in thousands" * is_often
            iterations = survey.numbered("iteration", later)
            first.finding = dataclasses.replace(
                finding,
                places=(*finding.places, *later),
                severity=severity,
                evidence=f"{finding.evidence}; again in {iterations}, after clean iterations{more}",
            )
            titles = {event.finding.title for event in first.members}
            following = {event.finding.title: event for root in again for event in root.following}
            first.following += [event for title, event in following.items() if title not in titles]
        yield first


def _merge_similar(roots: Iterable[_Event]) -> list[_Event]:
    """Merge many like causes into one: of the same kind on the same ranks, with the same start.

    The worst of them represents all; of lost values, the first.
    """
    groups: dict[tuple[object, ...], list[_Event]] = defaultdict(list)
    for root in roots:
        severity = root.finding.severity
        key: tuple[object, ...] = (severity, root.ranks, root.time, root.is_weight, root.sample, root.channel)
        # Low findings are merged by kind and metric only.
        groups[(root.kind, *((root.finding.metric,) if severity is Severity.LOW else key))].append(root)
    merged: list[_Event] = []
    for members in groups.values():
        if len(members) < limit.SAME_CAUSE_SITES:
            merged.extend(members)
            continue
        ordered = sorted(members, key=lambda root: root.order)
        if not ordered[0].is_nonfinite:
            ordered.sort(key=lambda root: -root.finding.score)
        first, *first.similar = ordered
        first.following = [event for root in ordered for event in root.following]
        merged.append(first)
    return merged
