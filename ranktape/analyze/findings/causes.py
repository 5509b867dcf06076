"""Which of the things that stand out is the cause, and which merely follow from it.

What is earlier in execution order, and reaches the other place, is taken for its cause. That holds more often than not;
it is an order of reading, not a proof.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.findings.sign import Sign, finding_of, first_of, title_of, when
from ranktape.analyze.findings.thresholds import SAME_CAUSE_SITES

if TYPE_CHECKING:
    from ranktape.analyze.findings.survey import Survey

KINDS = (
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

_LOCAL = frozenset({"replica_differs", "channel_outlier", "constant", "placement_unknown", "trend"})
"""What explains nothing but other signs at its own place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A sign with what decides over causes."""

    sign: Sign
    """What stands out."""
    start: tuple[int, int, int]
    """When it was first seen: attempt, iteration, and order within the rank."""
    site: int
    """The place of the model where that was."""
    module: str
    """Its module."""
    is_weight: bool
    """Whether it is about a parameter."""
    is_backward: bool
    """Whether it is about the backward pass."""
    moments: frozenset[tuple[int, int, int]]
    """Rank, iteration and microbatch of its records."""

    @property
    def kind_order(self) -> int:
        """Where its kind is in `KINDS`."""
        return KINDS.index(self.sign.kind)


def merge_causes(survey: Survey, signs: Sequence[Sign]) -> list[Finding]:
    """One finding for each cause, the worst first; what follows from it is told by its `consequences`."""
    return [_finding(survey, root, following) for root, following in families_of(survey, signs)]


def families_of(survey: Survey, signs: Sequence[Sign]) -> list[tuple[Event, list[Event]]]:
    """Each cause with what follows from it in order of execution; the worst cause first."""
    is_weight = survey.is_weight
    events = sorted(
        (_event(survey, sign, is_weight=bool(is_weight[sign.positions[0]])) for sign in signs),
        key=lambda event: (event.start, event.kind_order),
    )
    roots: list[Event] = []
    followers: dict[int, list[Event]] = defaultdict(list)
    here: dict[int, list[tuple[int, Event]]] = defaultdict(list)
    for event in events:
        # What is said of the same numbers, be they a consequence already, is nearer than all that came before.
        same = (place for place, other in here[event.site] if _is_same_thing(other, event))
        causes = (place for place, root in enumerate(roots) if _explains(root, event))
        cause = next(itertools.chain(same, causes), len(roots))
        if cause == len(roots):
            roots.append(event)
        else:
            followers[cause].append(event)
        here[event.site].append((cause, event))
    families = [
        (root, sorted(following, key=lambda event: (event.start, event.kind_order)))
        for root, following in _alike([(root, followers[place]) for place, root in enumerate(roots)])
    ]
    return sorted(families, key=lambda one: (worst_of(one).order, one[0].kind_order, -one[0].sign.score))


def worst_of(family: tuple[Event, list[Event]]) -> Severity:
    """The severity of a cause: that of the worst that follows from it."""
    return min((event.sign.severity for event in (family[0], *family[1])), key=lambda one: one.order)


def _event(survey: Survey, sign: Sign, *, is_weight: bool) -> Event:
    first = first_of(survey, sign)
    fields = survey.fields
    chosen = list(sign.positions)
    columns = (fields[name][chosen].tolist() for name in ("rank", "iteration", "microbatch"))
    return Event(
        sign=sign,
        start=when(survey, first),
        site=int(survey.sites[first]),
        module=str(fields["module"][first]),
        is_weight=is_weight,
        is_backward=fields["operation"][first] == "backward",
        moments=frozenset(zip(*columns, strict=True)),
    )


def _explains(cause: Event, event: Event) -> bool:
    """Whether an event follows from an earlier one at another place."""
    one, two = cause.sign, event.sign
    if cause.site == event.site or one.kind in _LOCAL or two.kind in _LOCAL - {"trend"}:
        return False
    if _is_mask(one) or _is_mask(two):
        return False
    if event.is_weight and not _spreads_to_weights(cause, event):
        # Within an iteration, no weight is computed from anything.
        return False
    if one.kind in _SHRINKING and not (cause.is_backward and event.is_backward and _shrinks(two)):
        return False
    if two.kind == "zero" and one.kind not in _SHRINKING:
        return False
    return _is_bad_enough(cause, event) and _reaches(cause, event)


def _is_mask(sign: Sign) -> bool:
    """Whether infinities are there on purpose: they spread to nothing, and come from nothing."""
    return sign.kind in _LOST and sign.severity is Severity.LOW


def _shrinks(sign: Sign) -> bool:
    return sign.kind in _SHRINKING or (sign.judgement is not None and (sign.judgement.octaves or 0) < 0)


def _is_same_thing(cause: Event, event: Event) -> bool:
    """Whether two signs at one place, of which the first came earlier or says more, are about the same numbers."""
    one, two = cause.sign, event.sign
    if one.severity is Severity.LOW and two.severity is not Severity.LOW:
        # What is merely worth knowing is not the headline of what is wrong.
        return False
    if "channel" in one.extra and "channel" in two.extra:
        return one.extra == two.extra
    if "sample" in one.extra and "sample" in two.extra:
        return one.extra == two.extra and one.ranks == two.ranks
    if "sample" in one.extra and two.kind != "trend":
        return two.kind not in {"nan", "inf", "replica_differs"} and event.moments <= cause.moments
    return bool(one.ranks & two.ranks) and "sample" not in two.extra


def _spreads_to_weights(cause: Event, event: Event) -> bool:
    return cause.start[:2] < event.start[:2] and cause.sign.kind in _LOST and event.sign.kind in _LOST


def _is_bad_enough(cause: Event, event: Event) -> bool:
    one, two = cause.sign, event.sign
    if two.kind in _LOST:
        return one.kind in _LOST or (one.kind in _TOO_LARGE and one.severity is not Severity.LOW)
    if one.severity is not Severity.LOW or two.severity is Severity.LOW:
        return True
    # What is merely worth knowing is the cause of what is worse in its own module alone: of its gradients, say.
    return one.kind in _TOO_LARGE and cause.module == event.module


def _reaches(cause: Event, event: Event) -> bool:
    """Whether the cause was in what the event was computed from."""
    one, two = cause.sign, event.sign
    if "sample" in one.extra:
        if "sample" in two.extra:
            return one.extra["sample"] == two.extra["sample"] and event.moments <= cause.moments
        return event.moments <= cause.moments
    if "sample" in two.extra and one.kind not in _LOST and not event.is_backward:
        # A weight, or a rank, is the same to all of its samples.
        return False
    if two.ranks <= one.ranks:
        return True
    return one.kind in _LOST and two.kind in _LOST and cause.start[:2] < event.start[:2]


_Family = tuple[Event, list[Event]]


def _alike(families: Sequence[_Family]) -> list[_Family]:
    """Families of which many are alike as one: the same kind on the same ranks, which began at the same time."""
    groups: dict[tuple[object, ...], list[_Family]] = defaultdict(list)
    for root, following in families:
        sign = root.sign
        key = (sign.kind, sign.severity, sign.ranks, root.start[:2], root.is_weight, tuple(sign.extra.items()))
        # What is merely worth knowing is one finding for each kind.
        groups[(sign.kind,) if sign.severity is Severity.LOW else key].append((root, following))
    found: list[_Family] = []
    for members in groups.values():
        if len(members) < SAME_CAUSE_SITES:
            found.extend(members)
            continue
        first = min(members, key=lambda family: family[0].start)
        if members[0][0].sign.severity is Severity.LOW:
            first = max(members, key=lambda family: family[0].sign.score)
        others = [event for root, following in members if root is not first[0] for event in (root, *following)]
        found.append((first[0], [*first[1], *others]))
    return found


def _finding(survey: Survey, root: Event, following: Sequence[Event]) -> Finding:
    here = [event for event in following if event.site == root.site]
    titles = [title_of(survey, event.sign) for event in following]
    finding = finding_of(survey, root.sign, consequences=titles, severity=worst_of((root, list(following))))
    beside = "".join(f"; {event.sign.kind}: {event.sign.evidence}" for event in here[:2])
    return dataclasses.replace(finding, evidence=finding.evidence + beside)
