"""Says which findings follow from which: a consequence is computed from its cause, with nothing clean between them.

Within a pass that is what is computed later, on the same rank and for the same microbatch. From one iteration to a
later one NaN and infinities are carried by the weights, unless a gradient scaler skipped the step or an iteration
between is clean. Records do not say which operations read a tensor, so that two branches of one pass may be taken for
one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import KINDS, Finding, Severity, named_numbers
from ranktape.analyze.findings.survey import Codes, Mask, Survey, codes_of

_LOST = frozenset({"nan", "inf", "overflow"})
"""Kinds that spread to everything that is computed from them, and to all ranks with the next step."""

_TOO_LARGE = frozenset({"rank_differs", "sample_outlier", "layer_differs"})
"""Kinds that may end in an overflow."""

_LOCAL = frozenset({"replica_differs", "channel_outlier"})
"""Kinds that explain only what else is found at their own place."""

_REDUCED = "reduced_"
"""Begins the names of gradients that the optimizer got: their mean over ranks and microbatches, clipped together."""

_HYPOTHETICAL = "flushed"
"""Begins the metric of a finding about a format that the run did not use: nothing follows from it."""


class Seen:
    """A finding with what decides over causes."""

    def __init__(self, survey: Survey, finding: Finding) -> None:
        chosen, fields = list(finding.places), survey.fields
        first = min(chosen, key=survey.when)
        self.finding, self.kind = finding, finding.kind
        self.is_low = finding.severity is Severity.LOW
        """Whether it is merely worth knowing."""
        is_odd_gradient = finding.kind == "layer_differs" and bool(survey.is_gradient[chosen[0]])
        is_small = is_odd_gradient and (finding.binades or 0) < 0
        self.is_shrinking = finding.kind in {"gradient_underflow", "zero"} or is_small
        """Whether it explains smaller values downstream, and nothing else."""
        self.is_exploding = is_odd_gradient and not is_small
        """Whether it is a gradient that is larger than those of the layers around it."""
        self.is_lost = finding.kind in _LOST and not self.is_low
        """Whether numbers are lost; infinities of a mask are not."""
        self.sample, self.channel = (finding.where.get(name) for name in ("sample", "channel"))
        """Which one it is about; None where it is about none."""
        self.start, self.site = survey.when(first), int(survey.sites[first])
        """When and where it was first seen: attempt, iteration, and order within the rank; the place of the model."""
        self.time = int(survey.times[first])
        """Number of the captured iteration in which it was first seen."""
        self.module, self.is_backward = str(fields["module"][first]), fields["operation"][first] == "backward"
        self.is_weight = bool(survey.is_weight[chosen[0]])
        self.is_reduced = str(fields["tensor_name"][first]).startswith(_REDUCED)
        """Whether it is about a gradient that the optimizer got, from all ranks and microbatches."""
        self.layer, self.stack = int(fields["layer_idx"][first]), str(fields["layer_stack"][first])
        self.moments: dict[tuple[int, int, int], int] = {}
        """Captured iteration, rank and microbatch of its records, with the order of the first of them."""
        columns = (survey.times, fields["rank"], fields["microbatch"], survey.order)
        for time, rank, microbatch, order in zip(*(column[chosen].tolist() for column in columns), strict=True):
            # A weight is the same in all microbatches, whichever it was recorded in.
            moment = time, rank, 0 if self.is_weight else microbatch
            self.moments[moment] = min(order, self.moments.get(moment, order))
        self.times = frozenset(time for time, _, _ in self.moments)
        """The captured iterations of its records."""
        is_spread = finding.kind in _LOST
        self.ranks = frozenset(rank for time, rank, _ in self.moments if time == self.time or not is_spread)
        """The ranks on which it was first seen, for what spreads; else of all records."""

    @property
    def order(self) -> tuple[tuple[int, int, int], int]:
        """What begins earlier comes first; of what begins together what says more."""
        return self.start, KINDS.index(self.kind)


@dataclass(frozen=True, slots=True)
class Family:
    """A cause, and what follows from it in order of execution."""

    root: Seen
    """The cause."""
    following: list[Seen]
    """Its consequences."""
    alike: list[Seen] = field(default_factory=list)
    """The same kind at other places, of which none follows from another."""

    @property
    def members(self) -> list[Seen]:
        """All of them."""
        return [self.root, *self.alike, *self.following]

    @property
    def severity(self) -> Severity:
        """That of the worst of all."""
        return min((one.finding.severity for one in self.members), key=lambda one: one.order)

    @property
    def order(self) -> tuple[object, ...]:
        """The worst cause comes first; of numbers that are lost what began first."""
        root = self.root
        if root.is_lost:
            return self.severity.order, KINDS.index("nan"), root.start
        return self.severity.order, KINDS.index(root.kind), (), -root.finding.score

    def as_finding(self) -> Finding:
        """The cause, with what is beside it in its evidence, and all else as its consequences."""
        finding = self.root.finding
        here = [one.finding for one in self.following if one.site == self.root.site]
        return dataclasses.replace(
            finding,
            severity=self.severity,
            places=(*finding.places, *(one.finding.places[0] for one in self.alike)),
            alike=tuple(one.finding.title for one in self.alike),
            consequences=tuple(one.finding.title for one in self.following),
            followed_by=tuple(one.finding.places[0] for one in self.following),
            evidence=finding.evidence + "".join(f"; {one.kind}: {one.evidence}" for one in here[:2]),
        )


def families_of(survey: Survey, findings: Sequence[Finding]) -> list[Family]:
    """Each cause with what follows from it; the worst cause first."""
    roots: list[Seen] = []
    followers: dict[int, list[Seen]] = defaultdict(list)
    here: dict[int, list[tuple[int, Seen]]] = defaultdict(list)
    # Consequences from which more follows, by what they have in common with it.
    spreading: dict[int, list[tuple[int, Seen]]] = defaultdict(list)
    ordered = sorted((Seen(survey, finding) for finding in findings), key=lambda one: one.order)
    flow = Flow(survey, ordered)
    for one in ordered:
        # What is said of the same numbers, be they a consequence already, is nearer than all that came before.
        same = (place for place, other in here[one.site] if _is_same_thing(other, one))
        causes = (place for place, root in enumerate(roots) if flow.explains(root, one))
        # What follows from a consequence follows from its cause: weights are NaN as gradients were, as a layer grew.
        through = (place for place, other in spreading[flow.episode(one)] if flow.explains(other, one))
        cause = next(itertools.chain(same, causes, through), len(roots))
        if cause == len(roots):
            roots.append(one)
        else:
            followers[cause].append(one)
            if one.is_lost or one.is_weight:
                spreading[flow.episode(one)].append((cause, one))
        here[one.site].append((cause, one))
    families = [_named_as_skipped(survey, Family(root, followers[place])) for place, root in enumerate(roots)]
    found = _alike(_once(survey, families))
    for family in found:
        family.following.sort(key=lambda one: one.order)
    return sorted(found, key=lambda one: one.order)


class Flow:
    """What is computed from what, as far as records say."""

    def __init__(self, survey: Survey, found: Sequence[Seen]) -> None:
        self._survey = survey
        self._lost = _places_of(survey, [one for one in found if one.is_lost])
        self._shrunk = _places_of(survey, [one for one in found if one.is_shrinking])
        self._episodes = survey.episodes(self._lost)

    def episode(self, one: Seen) -> int:
        """Number of the captured iterations without a clean one between them in which it began; -1 of clean ones."""
        return int(self._episodes[one.time])

    def explains(self, cause: Seen, one: Seen) -> bool:
        """Whether something follows from what began earlier at another place."""
        if cause.site == one.site or {cause.kind, one.kind} & _LOCAL:
            return False
        # Infinities of a mask are there on purpose: they spread to nothing, and come from nothing.
        if any(other.kind in _LOST and not other.is_lost for other in (cause, one)):
            return False
        if cause.is_lost and one.is_lost and self._is_carried(cause, one):
            return True
        if one.is_weight:
            # Within an iteration, no weight is computed from anything.
            return self._is_step_with(cause, one)
        return _is_plausible(cause, one) and self._is_downstream(cause, one)

    def _is_downstream(self, cause: Seen, one: Seen) -> bool:
        """Whether the cause was in what the other thing was computed from in the same passes."""
        if one.time not in cause.times:
            return False
        if cause.sample is not None:
            if one.sample not in {None, cause.sample} or not one.moments.keys() <= cause.moments.keys():
                return False
        elif one.sample is not None and not cause.is_lost and not one.is_backward:
            # A weight, or a rank, is the same to all of its samples.
            return False
        covered = {moment: _comes_before(cause, one, moment) for moment in one.moments}
        # It has to explain how it began, and most of what came later.
        is_explained = all(known for moment, known in covered.items() if moment[0] == one.time)
        return is_explained and 2 * sum(covered.values()) > len(covered) and not self._is_clean_between(cause, one)

    def _is_clean_between(self, cause: Seen, one: Seen) -> bool:
        """Whether what it was computed from, or some layer between them, is clean in the pass in which it began."""
        is_alike = one.kind in _LOST if cause.is_lost else cause.is_shrinking and one.is_shrinking
        if not is_alike or one.is_reduced or min(cause.layer, one.layer) < 0 or cause.stack != one.stack:
            return cause.is_lost and self._is_own(one)
        if cause.is_lost and self._is_own(one):
            return True
        moment = next(moment for moment in one.moments if moment[0] == one.time)
        low, high = sorted((cause.layer, one.layer))
        spans = [(one.is_backward, range(low + 1, high))]
        if cause.is_backward != one.is_backward:
            spans = [(False, range(cause.layer + 1, _NO_LAYER)), (True, range(one.layer + 1, _NO_LAYER))]
        clean = self._clean_lost if cause.is_lost else self._clean_shrunk
        return any(
            layer in layers for is_backward, layers in spans for layer in clean[(*moment, one.stack, is_backward)]
        )

    def _is_own(self, one: Seen) -> bool:
        """Whether a module lost the numbers itself: it was given some, and all that it had before is clean."""
        if not one.is_lost or one.is_weight or one.is_reduced:
            return False
        survey, fields = self._survey, self._survey.fields
        (time, rank, microbatch), order = min(
            ((moment, order) for moment, order in one.moments.items() if moment[0] == one.time),
            key=lambda item: item[1],
        )
        own = (fields["module"] == one.module) & (survey.times == time) & (fields["rank"] == rank)
        own &= (survey.order < order) & survey.is_floating
        is_given = own & (fields["phase"] == "pre") & ~survey.is_weight & (fields["microbatch"] == microbatch)
        # Gradients are computed from what the forward pass was given, too.
        operations = {"forward", "backward"} if one.is_backward else {"forward"}
        return operations <= set(fields["operation"][is_given].tolist()) and not self._lost[own].any()

    @functools.cached_property
    def _clean_lost(self) -> Mapping[tuple[object, ...], list[int]]:
        return _clean_layers(self._survey, self._lost)

    @functools.cached_property
    def _clean_shrunk(self) -> Mapping[tuple[object, ...], list[int]]:
        return _clean_layers(self._survey, self._shrunk)

    def _is_carried(self, cause: Seen, one: Seen) -> bool:
        """Whether lost numbers of an iteration before reach another one by a step, and all between is lost, too."""
        if cause.time >= one.time or self.episode(cause) != self.episode(one):
            return False
        before = [time for time in cause.times if time < one.time]
        if all(self._survey.skipped_times[time] for time in before):
            return False
        if one.is_weight:
            return not self._is_seen_between(one, max(before))
        known = [self._carriers[one.time, rank] for rank in one.ranks if (one.time, rank) in self._carriers]
        return any(is_lost or (not has_weights and not one.is_backward) for has_weights, is_lost in known) or not known

    @functools.cached_property
    def _carriers(self) -> Mapping[tuple[int, int], tuple[bool, bool]]:
        """For each captured iteration and rank: whether weights were recorded, and whether one of them is lost.

        Where no weight was recorded, whether another tensor of the forward pass is.
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

    def _is_step_with(self, gradient: Seen, weight: Seen) -> bool:
        """Whether a weight became too large by a step that was taken with its gradient, which had exploded before.

        What explodes in a layer reaches those before it.
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

    def _is_seen_between(self, one: Seen, time: int) -> bool:
        """Whether its place was recorded after that captured iteration and before the one in which it began."""
        own = self._survey.times[self._survey.sites == one.site]
        return bool(((own > time) & (own < one.time)).any())


_FEW = 4
"""Of the iterations after the first clean one a scaler skips less than one in so many, if its scale settles."""

_NO_LAYER = 1 << 62
"""Larger than the index of any layer."""


def _places_of(survey: Survey, found: Sequence[Seen]) -> Mask:
    mask = np.zeros(len(survey), dtype=bool)
    for one in found:
        mask[list(one.finding.places)] = True
    return mask


def _comes_before(cause: Seen, one: Seen, moment: tuple[int, int, int]) -> bool:
    """Whether the cause was seen in that pass before the other thing."""
    time, rank, microbatch = moment
    if one.is_reduced:
        return any(time == own and (cause.is_lost or rank == on_rank) for own, on_rank, _ in cause.moments)
    known = cause.moments.get((time, rank, 0 if cause.is_weight else microbatch))
    return known is not None and known < one.moments[moment]


def _clean_layers(survey: Survey, mask: Mask) -> Mapping[tuple[object, ...], list[int]]:
    """For each pass the layers of which no tensor is in the mask; weights are in no pass."""
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


def _is_plausible(cause: Seen, one: Seen) -> bool:
    """Whether what was found of the one can come of what was found of the other, wherever they are."""
    if cause.finding.metric.startswith(_HYPOTHETICAL):
        return False
    shrinks = one.is_shrinking or (one.finding.binades or 0) < 0
    if cause.is_shrinking:
        is_worse = one.is_shrinking and one.finding.severity.order < cause.finding.severity.order
        # Both by the part that is lost: what loses far more has a reason of its own.
        is_worse |= cause.kind == one.kind == "gradient_underflow" and one.finding.score > 2 * cause.finding.score
        is_zero = cause.kind == one.kind == "zero" and cause.module == one.module
        return shrinks and not is_worse and ((cause.is_backward and one.is_backward) or is_zero)
    if one.kind == "zero":
        return False
    if one.kind in _LOST:
        return cause.is_lost or (cause.kind in _TOO_LARGE and not cause.is_low)
    # What is merely worth knowing is the cause of what is worse in its own module alone: of its gradients, say.
    return not cause.is_low or one.is_low or (cause.kind in _TOO_LARGE and cause.module == one.module)


def _is_same_thing(cause: Seen, one: Seen) -> bool:
    """Whether two findings at one place, of which the first came earlier or says more, are about the same numbers."""
    if (cause.is_low and not one.is_low) or not cause.times & one.times:
        # What is merely worth knowing is not the headline of what is wrong.
        return False
    if cause.is_lost and not one.is_lost and not one.times <= cause.times:
        # Where all is finite it is found, too.
        return False
    if cause.channel is not None and one.channel is not None:
        return bool(cause.channel == one.channel)
    if cause.sample is not None and one.sample is not None:
        return bool(cause.sample == one.sample) and cause.ranks == one.ranks
    if cause.sample is not None:
        return one.kind not in {"nan", "inf", "replica_differs"} and one.moments.keys() <= cause.moments.keys()
    return bool(cause.ranks & one.ranks) and one.sample is None


def _named_as_skipped(survey: Survey, family: Family) -> Family:
    """A family as it is, or as worth knowing where its infinities are those of a loss scale that was too high.

    These begin in a gradient, in iterations whose steps a gradient scaler skipped, and later gradients of the same
    place are finite. Where NaN is all that there is, a smaller scale is no remedy.
    """
    root = family.root
    if not (root.is_lost and root.is_backward and all(survey.skipped_times[time] for time in root.times)):
        return family
    is_infinite = any(one.kind == "inf" and one.site == root.site and one.time == root.time for one in family.members)
    if not is_infinite or not (survey.times[survey.sites == root.site] > max(root.times)).any():
        return family
    for one in family.members:
        one.finding = dataclasses.replace(one.finding, severity=Severity.LOW)
    root.finding = dataclasses.replace(root.finding, title=f"{root.finding.title}, as the loss scale was too high")
    return family


def _once(survey: Survey, families: Sequence[Family]) -> Iterator[Family]:
    """Families of numbers that were lost at the same place, after clean iterations, as one that says so."""
    groups: dict[tuple[object, ...], list[Family]] = defaultdict(list)
    for number, family in enumerate(families):
        root = family.root
        key = (root.site, root.kind, root.finding.severity) if root.is_lost else (number,)
        groups[key].append(family)
    for first, *again in groups.values():
        if again:
            finding, later = first.root.finding, [place for one in again for place in one.root.finding.places]
            iterations = named_numbers("iteration", survey.fields["iteration"][later].tolist())
            severity, more = finding.severity, ""
            num_after = survey.skipped_times.size - 1 - max(first.root.times)
            if severity is Severity.LOW and len(again) > 1 and np.unique(survey.times[later]).size * _FEW >= num_after:
                severity = Severity.MEDIUM
                more = "; a scaler that works skips a step once in thousands"
            first.root.finding = dataclasses.replace(
                finding,
                places=(*finding.places, *later),
                severity=severity,
                evidence=f"{finding.evidence}; again in {iterations}, after clean iterations{more}",
            )
            known = {one.finding.title for one in first.members}
            following = {one.finding.title: one for family in again for one in family.following}
            first.following.extend(one for title, one in following.items() if title not in known)
        yield first


def _alike(families: Iterator[Family]) -> list[Family]:
    """Families of which many are alike as one: the same kind on the same ranks, which began at the same time.

    The worst of them stands for all; of numbers that are lost the first.
    """
    groups: dict[tuple[object, ...], list[Family]] = defaultdict(list)
    for family in families:
        root = family.root
        about: tuple[object, ...] = (root.ranks, root.time, root.is_weight, root.sample, root.channel)
        # What is merely worth knowing is one finding for each kind, and each metric that it is about.
        is_low = root.finding.severity is Severity.LOW
        about = (root.finding.metric,) if is_low else (root.finding.severity, *about)
        groups[(root.kind, is_low, *about)].append(family)
    found: list[Family] = []
    for members in groups.values():
        if len(members) < limit.SAME_CAUSE_SITES:
            found.extend(members)
            continue
        ordered = sorted(members, key=lambda family: family.root.order)
        if not ordered[0].root.is_lost:
            ordered.sort(key=lambda family: -family.root.finding.score)
        first, *others = ordered
        alike = [family.root for family in others]
        following = [one for family in ordered for one in family.following]
        found.append(Family(first.root, following, alike))
    return found
