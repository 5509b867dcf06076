"""Gives what is wrong in a run, and where: the question that the first screen of a report answers.

Of the things that stand out, what is earlier in execution order, and reaches the other place, is taken for its cause.
That holds more often than not; it is an order of reading, not a proof.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.along import changing, differing_layers, vanishing_gradients
from ranktape.analyze.findings.apart import differing_ranks, outlying_channels, outlying_samples
from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.findings.lost import lost, spoiled, underflowing
from ranktape.analyze.findings.replicas import differing_replicas
from ranktape.analyze.findings.survey import Survey
from ranktape.analyze.findings.triggered import triggered
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.numerics.recipes.words import RecipeWord, parse_recipes
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.storage import Records

KINDS = (
    "triggered",
    "nan",
    "inf",
    "overflow",
    "gradient_underflow",
    "sample_outlier",
    "rank_differs",
    "replica_differs",
    "gradient_exploding",
    "gradient_vanishing",
    "layer_differs",
    "trend",
    "recipe_outlier",
    "channel_outlier",
    "zero",
    "constant",
    "placement_unknown",
)
"""Every kind of finding. Of two at the same place the first says more, and is the title."""

_LOST = frozenset({"nan", "inf", "overflow"})
"""What spreads to everything that is computed from it, and to all ranks with the next step."""

_TOO_LARGE = frozenset({"rank_differs", "sample_outlier", "layer_differs", "gradient_exploding", "trend"})
"""What may end in an overflow."""

_SHRINKING = frozenset({"gradient_underflow", "gradient_vanishing", "zero"})
"""What explains of gradients that later ones are smaller, and nothing else."""

_LOCAL = frozenset({"replica_differs", "recipe_outlier", "channel_outlier", "constant", "placement_unknown", "trend"})
"""What explains nothing but what else is found at its own place."""


def find(
    records: Records,
    *,
    view: View | None = None,
    engine: Engine | None = None,
    with_channels: bool = False,
    recipe: RecipeWord | Sequence[RecipeWord] = (),
    replayed: Replayed | None = None,
) -> list[Finding]:
    """What is wrong and what stands out, the worst first; one finding for each cause.

    NaN and infinities are findings; all other metrics are of finite values. Records of whole numbers are judged by the
    bits of their copies alone. Where histograms or statistics were kept, nothing is known of single samples and
    channels. No records, no findings.

    Every value is read once, unless it is known from an earlier question; with `with_channels` once more. With recipes
    products of layers are computed again in each, unless `replayed` is what came of that already.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen; or
            a recipe is not known.
    """
    recipes = parse_recipes(recipe) if recipe else []
    options: dict[str, Any] = {"view": view, "engine": engine, "with_channels": with_channels, "recipes": recipes}
    if len(records.sources) <= 1:
        return _find(records, replayed=replayed, **options)
    # What one source recorded is no peer, and no cause, of what another one did.
    parts = records.by_source()
    found = [one.in_source(part) for part in parts for one in _find(part.records, replayed=None, **options)]
    return sorted(found, key=lambda one: (one.severity.order, KINDS.index(one.kind), -one.score))


def _find(
    records: Records,
    *,
    view: View | None,
    engine: Engine | None,
    with_channels: bool,
    recipes: Sequence[Recipe],
    replayed: Replayed | None,
) -> list[Finding]:
    """What stands out in one source."""
    if not len(records):
        return []
    known = Survey(records, view=view, engine=engine)
    found = [*all_findings(known)]
    if with_channels:
        found.extend(outlying_channels(known, view=view, engine=engine))
    if recipes:
        from ranktape.analyze.findings.recipes import recipe_outliers

        found.extend(recipe_outliers(known, replayed or replay_calls(records, recipes, engine=engine), recipes))
    return [*triggered(records), *(family.as_finding() for family in families_of(known, found))]


def all_findings(
    known: Survey, *, across: Sequence[str] = (), metrics: Sequence[str] = (), threshold: float = limit.ROBUST_Z
) -> Iterator[Finding]:
    """Everything that stands out in what is known, cause or not; channels apart.

    With `across` or `metrics` what stands out across ranks, layers or samples alone, and what no metric shows. Ranks
    and layers are compared by `metrics`, samples by absmax.
    """
    named = {"metrics": metrics} if metrics else {}
    if across or metrics:
        yield from lost(known)
    else:
        yield from spoiled(known)
        yield from underflowing(known)
        yield from vanishing_gradients(known)
        yield from changing(known)
    if (not across or "sample" in across) and (not metrics or "absmax" in metrics):
        yield from outlying_samples(known, threshold=threshold)
    if not across or "rank" in across:
        yield from differing_ranks(known, threshold=threshold, **named)
        yield from differing_replicas(known)
    if not across or "layer" in across:
        yield from differing_layers(known, threshold=threshold, **named)


class Seen:
    """A finding with what decides over causes."""

    def __init__(self, survey: Survey, finding: Finding) -> None:
        chosen, fields = list(finding.places), survey.fields
        first = min(chosen, key=survey.when)
        self.finding, self.kind = finding, finding.kind
        self.is_low = finding.severity is Severity.LOW
        """Whether it is merely worth knowing."""
        self.ranks: frozenset[int] = frozenset(fields["rank"][chosen].tolist())
        """The ranks of its records: which of them are wrong is not known, where there are several."""
        self.sample, self.channel = (finding.where.get(name) for name in ("sample", "channel"))
        """Which one it is about; None where it is about none."""
        self.start, self.site = survey.when(first), int(survey.sites[first])
        """When and where it was first seen: attempt, iteration, and order within the rank; the place of the model."""
        self.module, self.is_backward = str(fields["module"][first]), fields["operation"][first] == "backward"
        self.is_weight = bool(survey.is_weight[chosen[0]])
        self.layer = int(fields["layer_idx"][first])
        columns = (fields[name][chosen].tolist() for name in ("rank", "iteration", "microbatch"))
        self.moments = frozenset(zip(*columns, strict=True))
        """Rank, iteration and microbatch of its records."""

    @property
    def order(self) -> tuple[tuple[int, int, int], int]:
        """What begins earlier comes first; of what begins together what says more."""
        return self.start, KINDS.index(self.kind)


_OWN_REASON = frozenset({"recipe_outlier"})
"""What says why at each place: of many that are worse than worth knowing none speaks for the others."""


@dataclass(frozen=True, slots=True)
class Family:
    """A cause, and what follows from it in order of execution."""

    root: Seen
    """The cause."""
    following: list[Seen]
    """All else."""

    @property
    def severity(self) -> Severity:
        """That of the worst of all."""
        return min((one.finding.severity for one in (self.root, *self.following)), key=lambda one: one.order)

    def as_finding(self) -> Finding:
        """The cause, with what is beside it in its evidence, and all else as its consequences."""
        finding = self.root.finding
        here = [one.finding for one in self.following if one.site == self.root.site]
        return dataclasses.replace(
            finding,
            severity=self.severity,
            consequences=tuple(one.finding.title for one in self.following),
            followed_by=tuple(one.finding.places[0] for one in self.following),
            evidence=finding.evidence + "".join(f"; {one.kind}: {one.evidence}" for one in here[:2]),
        )


def families_of(survey: Survey, findings: Sequence[Finding]) -> list[Family]:
    """Each cause with what follows from it; the worst cause first."""
    roots: list[Seen] = []
    followers: dict[int, list[Seen]] = defaultdict(list)
    here: dict[int, list[tuple[int, Seen]]] = defaultdict(list)
    spreading: list[tuple[int, Seen]] = []
    for one in sorted((Seen(survey, finding) for finding in findings), key=lambda one: one.order):
        # What is said of the same numbers, be they a consequence already, is nearer than all that came before.
        same = (place for place, other in here[one.site] if _is_same_thing(other, one))
        causes = (place for place, root in enumerate(roots) if _explains(root, one))
        # What follows from a consequence follows from its cause: weights are NaN as gradients were, as a layer grew.
        through = (place for place, other in spreading if _explains(other, one))
        cause = next(itertools.chain(same, causes, through), len(roots))
        if cause == len(roots):
            roots.append(one)
        else:
            followers[cause].append(one)
            if one.kind in _LOST:
                spreading.append((cause, one))
        here[one.site].append((cause, one))
    families = _alike([Family(root, followers[place]) for place, root in enumerate(roots)])
    for family in families:
        family.following.sort(key=lambda one: one.order)
    return sorted(families, key=lambda one: (one.severity.order, one.root.order[1], -one.root.finding.score))


def _explains(cause: Seen, one: Seen) -> bool:
    """Whether something follows from what is earlier and at another place."""
    if cause.site == one.site or cause.kind in _LOCAL or one.kind in _LOCAL - {"trend"}:
        return False
    # Infinities of a mask are there on purpose: they spread to nothing, and come from nothing.
    if any(other.kind in _LOST and other.is_low for other in (cause, one)):
        return False
    is_spread = cause.start[:2] < one.start[:2] and {cause.kind, one.kind} <= _LOST
    if one.is_weight and not is_spread:
        # Within an iteration, no weight is computed from anything.
        return _is_step_with(cause, one)
    shrinks = one.kind in _SHRINKING or (one.finding.binades or 0) < 0
    if cause.kind in _SHRINKING and not (cause.is_backward and one.is_backward and shrinks):
        return False
    if one.kind == "zero" and cause.kind not in _SHRINKING:
        return False
    return _is_bad_enough(cause, one) and (is_spread or _reaches(cause, one))


def _is_step_with(gradient: Seen, weight: Seen) -> bool:
    """Whether a weight became too large by a step that was taken with its gradient, which had exploded before.

    What explodes in a layer reaches those before it. Steady growth has begun before.
    """
    return (
        gradient.kind == "gradient_exploding"
        and (weight.kind == "layer_differs" or weight.finding.is_sudden)
        and (weight.finding.binades or 0) > 0
        and gradient.start[:2] < weight.start[:2]
        and (gradient.module == weight.module or 0 <= weight.layer < gradient.layer)
    )


def _is_bad_enough(cause: Seen, one: Seen) -> bool:
    if one.kind in _LOST:
        return cause.kind in _LOST or (cause.kind in _TOO_LARGE and not cause.is_low)
    # What is merely worth knowing is the cause of what is worse in its own module alone: of its gradients, say.
    return not cause.is_low or one.is_low or (cause.kind in _TOO_LARGE and cause.module == one.module)


def _reaches(cause: Seen, one: Seen) -> bool:
    """Whether the cause was in what the other thing was computed from."""
    if cause.sample is not None:
        return one.sample in {None, cause.sample} and one.moments <= cause.moments
    # A weight, or a rank, is the same to all of its samples.
    is_same = one.sample is not None and cause.kind not in _LOST and not one.is_backward
    return one.ranks <= cause.ranks and not is_same


def _is_same_thing(cause: Seen, one: Seen) -> bool:
    """Whether two findings at one place, of which the first came earlier or says more, are about the same numbers."""
    if cause.is_low and not one.is_low:
        # What is merely worth knowing is not the headline of what is wrong.
        return False
    if cause.channel is not None and one.channel is not None:
        return bool(cause.channel == one.channel)
    if cause.sample is not None and one.sample is not None:
        return bool(cause.sample == one.sample) and cause.ranks == one.ranks
    if cause.sample is not None and one.kind != "trend":
        return one.kind not in {"nan", "inf", "replica_differs"} and one.moments <= cause.moments
    return bool(cause.ranks & one.ranks) and one.sample is None


def _alike(families: Sequence[Family]) -> list[Family]:
    """Families of which many are alike as one: the same kind on the same ranks, which began at the same time."""
    groups: dict[tuple[object, ...], list[Family]] = defaultdict(list)
    for family in families:
        root = family.root
        about: tuple[object, ...] = (root.ranks, root.start[:2], root.is_weight, root.sample, root.channel)
        if root.kind in _OWN_REASON:
            about = (root.finding.title,)
        # What is merely worth knowing is one finding for each kind.
        groups[(root.kind,) if root.is_low else (root.kind, root.finding.severity, *about)].append(family)
    found: list[Family] = []
    for members in groups.values():
        if len(members) < limit.SAME_CAUSE_SITES:
            found.extend(members)
            continue
        first = min(members, key=lambda family: family.root.start)
        if first.root.is_low:
            first = max(members, key=lambda family: family.root.finding.score)
        others = [one for family in members if family is not first for one in (family.root, *family.following)]
        found.append(Family(first.root, [*first.following, *others]))
    return found
