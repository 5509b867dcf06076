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
from ranktape.analyze.findings.survey import Codes, Mask, Survey, codes_of

_LOST = frozenset({"nan", "inf", "overflow"})
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
        self.root, self.following, self.alike = self, list[_Event](), list[_Event]()
        """The cause; its consequences; independent findings of the same kind at other sites."""
        self.is_low = finding.severity is Severity.LOW
        is_odd_gradient = self.kind == "layer_differs" and bool(survey.is_gradient[chosen[0]])
        is_small = is_odd_gradient and (finding.binades or 0) < 0
        self.is_shrinking = self.kind in {"gradient_underflow", "zero"} or is_small
        """Whether it explains smaller values downstream, and nothing else."""
        self.is_exploding = is_odd_gradient and not is_small
        self.is_lost = self.kind in _LOST and not self.is_low
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
        is_spread = self.kind in _LOST
        self.ranks = frozenset(rank for time, rank, _ in self.moments if time == self.time or not is_spread)
        """The ranks of the first iteration, if the kind spreads; otherwise the ranks of all records."""

    @property
    def order(self) -> tuple[tuple[int, int], int]:
        """The sort key: the earliest start first, then the most informative kind."""
        return self.start, _KIND_ORDER[self.kind]

    @property
    def members(self) -> list[_Event]:
        """The cause, the findings like it, and the consequences."""
        return [self, *self.alike, *self.following]

    @property
    def severity(self) -> Severity:
        """The worst severity of all members."""
        return min((one.finding.severity for one in self.members), key=lambda one: one.order)

    @property
    def badness(self) -> tuple[object, ...]:
        """The sort key: the worst cause first; among lost values, the earliest start first."""
        if self.is_lost:
            return self.severity.order, _KIND_ORDER["nan"], self.start
        return self.severity.order, _KIND_ORDER[self.kind], (), -self.finding.score

    def told(self) -> Finding:
        """The finding of a cause, with its consequences and the findings like it."""
        finding, following = self.finding, sorted(self.following, key=lambda one: one.order)
        here = [one.finding for one in following if one.site == self.site]
        return dataclasses.replace(
            finding,
            severity=self.severity,
            places=(*finding.places, *(one.finding.places[0] for one in self.alike)),
            alike=tuple(one.finding.title for one in self.alike),
            consequences=tuple(one.finding.title for one in following),
            followed_by=tuple(one.finding.places[0] for one in following),
            evidence=finding.evidence + "".join(f"; {one.kind}: {one.evidence}" for one in here[:2]),
        )


def with_consequences(survey: Survey, findings: Sequence[Finding]) -> list[Finding]:
    """The causes with their consequences, the worst cause first."""
    roots: list[_Event] = []
    here: dict[int, list[_Event]] = defaultdict(list)
    # Consequences that can have consequences themselves, by episode.
    spreading: dict[int, list[_Event]] = defaultdict(list)
    ordered = sorted((_Event(survey, finding) for finding in findings), key=lambda one: one.order)
    flow = _Flow(survey, ordered)
    for one in ordered:
        episode = int(flow.episodes[one.time])
        # A finding about the same values, even if it is a consequence, is a nearer cause than any earlier one.
        same = (other for other in here[one.site] if _is_same_thing(other, one))
        # The cause of a consequence is also the cause of what follows: a layer grew, so gradients and weights are NaN.
        causes = (other for other in itertools.chain(roots, spreading[episode]) if flow.explains(other, one))
        cause = next(itertools.chain(same, causes), None)
        if cause is None:
            roots.append(one)
        else:
            one.root = cause.root
            one.root.following.append(one)
            if one.is_lost or one.is_weight:
                spreading[episode].append(one)
        here[one.site].append(one)
    for root in roots:
        _mark_as_skipped(survey, root)
    return [root.told() for root in sorted(_alike(_again(survey, roots)), key=lambda one: one.badness)]


class _Flow:
    """The flow of computation, as far as records show it."""

    def __init__(self, survey: Survey, events: Sequence[_Event]) -> None:
        self._survey = survey
        self._lost = _records_of(survey, [one for one in events if one.is_lost])
        self._shrunk = _records_of(survey, [one for one in events if one.is_shrinking])
        self.episodes = survey.episodes(self._lost)
        """For each captured iteration, the number of its episode of lost values; -1 if the iteration is clean."""

    def explains(self, cause: _Event, one: _Event) -> bool:
        """Whether an event follows from an event that started earlier at another site."""
        if cause.site == one.site or {cause.kind, one.kind} & _LOCAL:
            return False
        # Infinities of a mask are intended: they are neither causes nor consequences.
        if any(other.kind in _LOST and not other.is_lost for other in (cause, one)):
            return False
        if cause.is_lost and one.is_lost and self._is_carried(cause, one):
            return True
        if one.is_weight:
            # Within an iteration, weights do not change.
            return self._is_step_with(cause, one)
        return _is_plausible(cause, one) and self._is_downstream(cause, one)

    def _is_downstream(self, cause: _Event, one: _Event) -> bool:
        """Whether the other event was computed from the cause in the same passes."""
        if one.time not in cause.times:
            return False
        if cause.sample is not None:
            if one.sample not in {None, cause.sample} or not one.moments.keys() <= cause.moments.keys():
                return False
        elif one.sample is not None and not cause.is_lost and not one.is_backward:
            # A weight or a rank affects all samples alike.
            return False
        covered = {moment: _comes_before(cause, one, moment) for moment in one.moments}
        # The cause has to explain the start, and most of what came later.
        is_explained = all(known for moment, known in covered.items() if moment[0] == one.time)
        return is_explained and 2 * sum(covered.values()) > len(covered) and not self._is_clean_between(cause, one)

    def _is_clean_between(self, cause: _Event, one: _Event) -> bool:
        """Whether its module's inputs, or a layer between the two, are clean in the pass in which it started."""
        if cause.is_lost and self._is_own(one):
            return True
        is_alike = one.kind in _LOST if cause.is_lost else cause.is_shrinking and one.is_shrinking
        if not is_alike or one.is_reduced or min(cause.layer, one.layer) < 0 or cause.stack != one.stack:
            return False
        low, high = sorted((cause.layer, one.layer))
        spans: list[tuple[bool, float, float]] = [(one.is_backward, low, high)]
        if cause.is_backward != one.is_backward:
            spans = [(False, cause.layer, np.inf), (True, one.layer, np.inf)]
        moment = next(moment for moment in one.moments if moment[0] == one.time)
        clean = self._clean_lost if cause.is_lost else self._clean_shrunk
        return any(
            first < layer < last
            for is_backward, first, last in spans
            for layer in clean[(*moment, one.stack, is_backward)]
        )

    def _is_own(self, one: _Event) -> bool:
        """Whether a module lost the values itself: its inputs were recorded, and all its earlier records are clean."""
        if not one.is_lost or one.is_weight or one.is_reduced:
            return False
        survey, fields = self._survey, self._survey.fields
        starts = ((order, moment) for moment, order in one.moments.items() if moment[0] == one.time)
        order, (time, rank, microbatch) = min(starts, key=lambda start: start[0])
        own = (fields["module"] == one.module) & (survey.times == time) & (fields["rank"] == rank)
        own &= (survey.order < order) & survey.is_floating
        is_given = own & (fields["phase"] == "pre") & ~survey.is_weight & (fields["microbatch"] == microbatch)
        # Gradients are computed from the inputs of the forward pass, too.
        operations = {"forward", "backward"} if one.is_backward else {"forward"}
        return operations <= set(fields["operation"][is_given].tolist()) and not self._lost[own].any()

    @functools.cached_property
    def _clean_lost(self) -> Mapping[tuple[object, ...], list[int]]:
        return _clean_layers(self._survey, self._lost)

    @functools.cached_property
    def _clean_shrunk(self) -> Mapping[tuple[object, ...], list[int]]:
        return _clean_layers(self._survey, self._shrunk)

    def _is_carried(self, cause: _Event, one: _Event) -> bool:
        """Whether lost values of an earlier iteration reach a later one by a step, with no clean iteration between."""
        if cause.time >= one.time or self.episodes[cause.time] != self.episodes[one.time]:
            return False
        before = [time for time in cause.times if time < one.time]
        if self._survey.skipped_times[before].all():
            return False
        if one.is_weight:
            return not self._is_seen_between(one, max(before))
        known = [self._carriers[one.time, rank] for rank in one.ranks if (one.time, rank) in self._carriers]
        return any(is_lost or (not has_weights and not one.is_backward) for has_weights, is_lost in known) or not known

    @functools.cached_property
    def _carriers(self) -> Mapping[tuple[int, int], tuple[bool, bool]]:
        """For each captured iteration and rank, whether weights were recorded, and whether one of them is lost.

        If no weight was recorded, the second is whether another tensor of the forward pass is lost.
        """
        survey, found = self._survey, dict[tuple[int, int], tuple[bool, bool]]()
        is_forward = (survey.fields["operation"] == "forward") & survey.is_floating
        for is_weight in (False, True):
            chosen = np.flatnonzero(is_forward & (survey.is_weight == is_weight))
            groups = codes_of(survey.times[chosen], survey.fields["rank"][chosen])
            lost = np.bincount(groups, weights=self._lost[chosen])
            for place, group in zip(chosen[np.unique(groups, return_index=True)[1]].tolist(), lost, strict=True):
                found[int(survey.times[place]), int(survey.fields["rank"][place])] = is_weight, bool(group)
        return found

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
            and not self._is_seen_between(weight, max(before))
        )

    def _is_seen_between(self, one: _Event, time: int) -> bool:
        """Whether its site was recorded after that captured iteration and before the one in which it started."""
        own = self._survey.times[self._survey.sites == one.site]
        return bool(((own > time) & (own < one.time)).any())


def _records_of(survey: Survey, events: Sequence[_Event]) -> Mask:
    mask = np.zeros(len(survey), dtype=bool)
    mask[[place for one in events for place in one.finding.places]] = True
    return mask


def _comes_before(cause: _Event, one: _Event, moment: Moment) -> bool:
    """Whether the cause precedes the other event in that pass."""
    time, rank, microbatch = moment
    if one.is_reduced:
        return any(time == own and (cause.is_lost or rank == on_rank) for own, on_rank, _ in cause.moments)
    known = cause.moments.get((time, rank, 0 if cause.is_weight else microbatch))
    return known is not None and known < one.moments[moment]


def _clean_layers(survey: Survey, mask: Mask) -> Mapping[tuple[object, ...], list[int]]:
    """For each pass, the layers without a tensor in the mask; weights do not belong to a pass."""
    fields = survey.fields
    chosen = np.flatnonzero((fields["layer_idx"] >= 0) & survey.is_floating & ~survey.is_weight)
    names = ("rank", "microbatch", "layer_stack", "operation", "layer_idx")
    groups = codes_of(survey.times[chosen], *(fields[name][chosen] for name in names))
    is_clean: Codes = np.bincount(groups, weights=mask[chosen]) == 0
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place in chosen[np.unique(groups, return_index=True)[1]][is_clean].tolist():
        rank, microbatch, stack, operation, layer = (fields[name][place] for name in names)
        moment = int(survey.times[place]), int(rank), int(microbatch)
        found[(*moment, str(stack), operation == "backward")].append(int(layer))
    return found


def _is_plausible(cause: _Event, one: _Event) -> bool:
    """Whether a finding of the cause's kind can lead to one of the other's kind, wherever they are."""
    if cause.finding.metric.startswith("flushed"):
        # The finding is about a format that the run did not use.
        return False
    shrinks = one.is_shrinking or (one.finding.binades or 0) < 0
    if cause.is_shrinking:
        is_worse = one.is_shrinking and one.finding.severity.order < cause.finding.severity.order
        # Compares the lost parts: a gradient that loses far more has its own cause.
        is_worse |= cause.kind == one.kind == "gradient_underflow" and one.finding.score > 2 * cause.finding.score
        is_zero = cause.kind == one.kind == "zero" and cause.module == one.module
        return shrinks and not is_worse and ((cause.is_backward and one.is_backward) or is_zero)
    if one.kind == "zero":
        return False
    if one.kind in _LOST:
        return cause.is_lost or (cause.kind in _TOO_LARGE and not cause.is_low)
    # A low finding explains a worse one only within its own module, such as one about its gradients.
    return not cause.is_low or one.is_low or (cause.kind in _TOO_LARGE and cause.module == one.module)


def _is_same_thing(cause: _Event, one: _Event) -> bool:
    """Whether two findings at one site are about the same values; the first is earlier or more informative."""
    if (cause.is_low and not one.is_low) or not cause.times & one.times:
        # A low finding does not give the title of a worse one.
        return False
    if cause.is_lost and not one.is_lost and not one.times <= cause.times:
        # The other finding also occurs in iterations without lost values.
        return False
    if cause.channel is not None and one.channel is not None:
        return bool(cause.channel == one.channel)
    if cause.sample is not None and one.sample is not None:
        return bool(cause.sample == one.sample) and cause.ranks == one.ranks
    if cause.sample is not None:
        return one.kind not in {"nan", "inf", "replica_differs"} and one.moments.keys() <= cause.moments.keys()
    return bool(cause.ranks & one.ranks) and one.sample is None


def _mark_as_skipped(survey: Survey, root: _Event) -> None:
    """Make a cause LOW if its infinities come from a loss scale that was too high.

    They start in a gradient, in iterations whose steps a gradient scaler skipped, and later gradients of the same
    site are finite. If there is only NaN, a smaller scale would not help.
    """
    if not (root.is_lost and root.is_backward and survey.skipped_times[list(root.times)].all()):
        return
    members = root.members
    is_infinite = any(one.kind == "inf" and one.site == root.site and one.time == root.time for one in members)
    if is_infinite and (survey.times[survey.sites == root.site] > max(root.times)).any():
        for one in members:
            one.finding = dataclasses.replace(one.finding, severity=Severity.LOW)
        title = f"{root.finding.title}, as the loss scale was too high"
        root.finding = dataclasses.replace(root.finding, title=title)


def _again(survey: Survey, roots: Sequence[_Event]) -> Iterable[_Event]:
    """Merge causes of lost values at one site that recur after clean iterations; the evidence says so."""
    groups: dict[tuple[object, ...], list[_Event]] = defaultdict(list)
    for number, root in enumerate(roots):
        groups[(root.site, root.kind, root.finding.severity) if root.is_lost else (number,)].append(root)
    for first, *again in groups.values():
        if again:
            finding, later = first.finding, [place for one in again for place in one.finding.places]
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
            known = {one.finding.title for one in first.members}
            following = {one.finding.title: one for root in again for one in root.following}
            first.following += [one for title, one in following.items() if title not in known]
        yield first


def _alike(roots: Iterable[_Event]) -> list[_Event]:
    """Merge many like causes into one: of the same kind on the same ranks, with the same start.

    The worst of them represents all; of lost values, the first.
    """
    groups: dict[tuple[object, ...], list[_Event]] = defaultdict(list)
    for root in roots:
        severity = root.finding.severity
        about: tuple[object, ...] = (severity, root.ranks, root.time, root.is_weight, root.sample, root.channel)
        # Low findings are merged by kind and metric only.
        groups[(root.kind, *((root.finding.metric,) if severity is Severity.LOW else about))].append(root)
    found: list[_Event] = []
    for members in groups.values():
        if len(members) < limit.SAME_CAUSE_SITES:
            found.extend(members)
            continue
        ordered = sorted(members, key=lambda root: root.order)
        if not ordered[0].is_lost:
            ordered.sort(key=lambda root: -root.finding.score)
        first, *first.alike = ordered
        first.following = [one for root in ordered for one in root.following]
        found.append(first)
    return found
