"""Finds replicated tensors whose bits differ between ranks.

Copies are compared by the checksums in the catalogue; values are read only to measure the difference. A placement with
`replicate` gives the ranks with copies. If there is no placement, as with DDP, weights count as copies if most
comparable sites, that is the same site in other iterations and other layers, are equal bit for bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ranktape.analyze.comparison.tensors import ComparedTensor, compare_tensors
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import Finding, Severity, finding_of, number_text
from ranktape.analyze.findings.survey import SITE, Survey, codes_of, members_of
from ranktape.errors import DataError
from ranktape.storage import Records
from ranktape.storage.records.assemble import AxisKind, Placement, parse_placement

_MOMENT = ("attempt", "iteration", "microbatch", "call")

Partition = tuple[int, ...]
"""For each rank of a site, in ascending order, the index of the first rank that has the same bits."""


def parse_placements(records: Records) -> dict[str, Placement | None]:
    """The placement of each distinct text; None if it cannot be parsed. Such copies are not compared."""
    texts = records.column("placement").tolist()
    firsts = dict(zip(reversed(texts), range(len(texts) - 1, -1, -1), strict=True))
    found: dict[str, Placement | None] = {}
    for text, first in sorted(firsts.items()):
        if text != "null":
            try:
                found[text] = parse_placement(records[first].info)
            except DataError:
                found[text] = None
    return found


def unread_note(records: Records) -> str:
    """A note on the records whose copies are not compared, as their placements cannot be parsed; "" without any."""
    unread = [text for text, placement in parse_placements(records).items() if placement is None]
    count = int(np.isin(records.column("placement").astype(str), unread).sum()) if unread else 0
    of = "1 record" if count == 1 else f"{count:,} records"
    return f"the placement of {of} cannot be read: copies of them are not compared" if count else ""


def replica_differs(survey: Survey) -> Iterator[Finding]:
    """A finding for each site, with the ranks whose copy differs from the others; all ranks if there is no majority."""
    bits = list(zip(survey.records.column("checksum").tolist(), survey.fields["shape"].tolist(), strict=True))
    differing: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    equal: dict[int, list[int]] = defaultdict(list)
    for copies in (*_placed_copies(survey.records), *_unplaced_copies(survey)):
        counts = Counter(bits[place] for place in copies).most_common()
        if len(counts) == 1:
            equal[int(survey.sites[copies[0]])].append(copies[0])
            continue
        # Without a majority, any of them can be wrong.
        is_tie = counts[0][1] == counts[1][1]
        odd = copies if is_tie else [place for place in copies if bits[place] != counts[0][0]]
        differing[int(survey.sites[copies[0]])].append((odd, copies))
    for groups in differing.values():
        groups.sort(key=lambda one: survey.when(one[0][0]))
    # Reads only the values of the sites that differed first, which are shown first.
    ordered = sorted(differing.items(), key=lambda item: survey.when(item[1][0][0][0]))
    for number, (site, groups) in enumerate(ordered):
        yield _finding(survey, groups, equal=equal[site], is_measured=number < limit.MAX_MEASURED_COPIES)


def _placed_copies(records: Records) -> Iterator[list[int]]:
    """Groups of records of one moment that are copies of one part by their placements; some groups have one record."""
    parsed = parse_placements(records)
    if not any(parsed.values()):
        return
    moments = codes_of(*(records.column(name) for name in (*_MOMENT, *SITE))).tolist()
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, text in enumerate(records.column("placement").tolist()):
        placement = parsed.get(text)
        if placement and any(axis.kind is AxisKind.REPLICATE and axis.size > 1 for axis in placement.axes):
            part = (placement.axes, placement.ranks, placement.global_shape, placement.fixed(AxisKind.REPLICATE))
            groups[(moments[place], *part)].append(place)
    yield from groups.values()


def _unplaced_copies(survey: Survey) -> Iterator[list[int]]:
    """Groups of unplaced weights of one site and moment that should be equal, because others of their kind are."""
    places = np.flatnonzero((survey.records.column("placement") == "null") & survey.is_weight)
    moments = codes_of(survey.codes(*_MOMENT, "shape", "dtype"), survey.sites)
    # A constant weight is equal on all ranks even if it is sharded, so it says nothing unless the checksums differ.
    is_telling = survey.metrics["minimum"] != survey.metrics["maximum"]
    checksums, ranks = survey.records.column("checksum"), survey.fields["rank"]
    known = []
    kinds: dict[object, Counter[Partition]] = defaultdict(Counter)
    for part in (places[one] for one in members_of(moments[places], ranks[places])):
        if part.size > 1 and (is_telling[part].any() or np.unique(checksums[part]).size > 1):
            firsts: dict[int, int] = {}
            own = tuple(firsts.setdefault(value, number) for number, value in enumerate(checksums[part].tolist()))
            held_by = tuple(ranks[part].tolist())
            role = int(survey.roles[part[0]]), held_by
            known.append((part.tolist(), own, role))
            kinds[role][own] += 1
            kinds[held_by][own] += 1
    for group, own, role in known:
        usual = _usual(kinds[role], minimum=1) or _usual(kinds[role[1]], minimum=limit.MIN_COMPARABLE) or ()
        num_odd = len(own) - Counter(own).most_common(1)[0][1]
        if not usual and len(group) >= limit.MIN_MAJORITY and num_odd <= max(1, limit.MAX_ODD_RATIO * len(group)):
            usual = (0,) * len(group)
        for label in sorted(set(usual)):
            alike = [place for place, one in zip(group, usual, strict=True) if one == label]
            if len(alike) > 1:
                yield alike


def _usual(partitions: Counter[Partition], *, minimum: int) -> Partition | None:
    """The most frequent partition of the ranks, if some ranks agree in it and most sites have it; otherwise None.

    If two partitions are equally frequent, the one in which more ranks agree: bits are not equal by chance.
    """
    total = sum(partitions.values())
    agreeing = {partition: count for partition, count in partitions.items() if len(set(partition)) < len(partition)}
    if not agreeing:
        return None
    usual = max(agreeing, key=lambda partition: (agreeing[partition], -len(set(partition))))
    is_most = agreeing[usual] >= max(limit.MIN_ALIKE_RATIO * total, minimum)
    # A single site cannot show which ranks usually differ.
    return usual if is_most and (total > 1 or len(set(usual)) == 1) else None


def _finding(
    survey: Survey, differing: Sequence[tuple[list[int], list[int]]], *, equal: Sequence[int], is_measured: bool
) -> Finding:
    """The finding of one site. `differing` is in order; `equal` has a record of each moment at which all are equal."""
    places = [place for odd, _ in differing for place in odd]
    odd, copies = differing[0]
    alike = [place for place in copies if place not in set(odd)]
    checksums, iterations = survey.records.column("checksum"), survey.fields["iteration"]
    # If there is no majority, takes the first two copies that differ.
    first = alike[0] if alike else odd[0]
    other = next((place for place in odd if checksums[place] != checksums[first]), odd[0])
    pair = [int(survey.fields["rank"][place]) for place in (first, other)]
    others = f"the copies of {len(alike)} other ranks" if len(alike) > 1 else "the copy of the other rank"
    evidence = f"since iteration {int(iterations[odd[0]])}"
    if before := [place for place in equal if survey.times[place] < survey.times[odd[0]]]:
        evidence += f", equal until iteration {int(iterations[max(before, key=survey.when)])}"
    apart = {int(survey.times[one[0]]) for one, _ in differing}
    after = [
        place for place in equal if survey.times[place] > survey.times[odd[0]] and survey.times[place] not in apart
    ]
    if after:
        evidence += f", equal again in {survey.numbered('iteration', after)}"
    evidence += f"; {len(places)} of {sum(len(one) for _, one in differing)} copies differ"
    sizes = [
        ", ".join(f"{name} {survey.metrics[name][place]:.8g}" for name in ("norm", "absmax")) + f" on rank {rank}"
        for place, rank in zip((first, other), pair, strict=True)
    ]
    by = [*(_difference(survey, first, other) if is_measured else ()), *sizes]
    return finding_of(
        survey,
        places=places,
        kind="replica_differs",
        severity=Severity.HIGH,
        score=len(places),
        text=f"differs in bits {f'from {others}' if alike else f'between ranks {pair[0]} and {pair[1]}'}",
        evidence=f"{evidence}; in iteration {int(iterations[other])}: {'; '.join(by)}",
        options={"pair": f"rank={pair[0]}:{pair[1]}"},
    )


def _difference(survey: Survey, first: int, other: int) -> Iterator[str]:
    """In how many elements two copies differ, and by how much; empty if the values of one were not stored."""
    a, b = (ComparedTensor(records=(survey.records[place],)) for place in (first, other))
    known = compare_tensors(a, b)
    if known is not None:
        words = [f"{known.num_differing:,} of {known.num_elements:,} elements differ"]
        if known.max_abs is not None:
            words.append(f"by {number_text(known.max_abs)} at most")
        if known.num_apart:
            words.append(f"{known.num_apart:,} are NaN or infinite in one alone")
        yield ", ".join(words)
