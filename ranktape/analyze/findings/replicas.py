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
from ranktape.analyze.findings.finding import Finding, Severity, make_finding, number_text
from ranktape.analyze.findings.survey import SITE, Survey, group_members, row_codes
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
    placements: dict[str, Placement | None] = {}
    for text, first in sorted(firsts.items()):
        if text != "null":
            try:
                placements[text] = parse_placement(records[first].info)
            except DataError:
                placements[text] = None
    return placements


def unread_note(records: Records) -> str:
    """A note on the records whose copies are not compared, as their placements cannot be parsed; "" without any."""
    unread = [text for text, placement in parse_placements(records).items() if placement is None]
    count = int(np.isin(records.column("placement").astype(str), unread).sum()) if unread else 0
    count_text = "1 record" if count == 1 else f"{count:,} records"
    return f"the placement of {count_text} cannot be read: copies of them are not compared" if count else ""


def replica_differs(survey: Survey) -> Iterator[Finding]:
    """A finding for each site, with the ranks whose copy differs from the others; all ranks if there is no majority."""
    bits = list(zip(survey.records.column("checksum").tolist(), survey.fields["shape"].tolist(), strict=True))
    differing: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    equal: dict[int, list[int]] = defaultdict(list)
    for copies in (*_placed_copies(survey.records), *_unplaced_copies(survey)):
        counts = Counter(bits[row] for row in copies).most_common()
        if len(counts) == 1:
            equal[int(survey.sites[copies[0]])].append(copies[0])
            continue
        # Without a majority, any of them can be wrong.
        is_tie = counts[0][1] == counts[1][1]
        odd = copies if is_tie else [row for row in copies if bits[row] != counts[0][0]]
        differing[int(survey.sites[copies[0]])].append((odd, copies))
    for groups in differing.values():
        groups.sort(key=lambda group: survey.when(group[0][0]))
    # Reads only the values of the sites that differed first, which are shown first.
    ordered = sorted(differing.items(), key=lambda item: survey.when(item[1][0][0][0]))
    for number, (site, groups) in enumerate(ordered):
        yield _finding(survey, groups, equal=equal[site], is_measured=number < limit.MAX_MEASURED_COPIES)


def _placed_copies(records: Records) -> Iterator[list[int]]:
    """Groups of records of one moment that are copies of one part by their placements; some groups have one record."""
    parsed = parse_placements(records)
    if not any(parsed.values()):
        return
    moments = row_codes(*(records.column(name) for name in (*_MOMENT, *SITE))).tolist()
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, text in enumerate(records.column("placement").tolist()):
        placement = parsed.get(text)
        if placement and any(axis.kind is AxisKind.REPLICATE and axis.size > 1 for axis in placement.axes):
            part = (placement.axes, placement.ranks, placement.global_shape, placement.fixed(AxisKind.REPLICATE))
            groups[(moments[row], *part)].append(row)
    yield from groups.values()


def _unplaced_copies(survey: Survey) -> Iterator[list[int]]:
    """Groups of unplaced weights of one site and moment that should be equal, because others of their kind are."""
    rows = np.flatnonzero((survey.records.column("placement") == "null") & survey.is_weight)
    moments = row_codes(survey.codes(*_MOMENT, "shape", "dtype"), survey.sites)
    # A constant weight is equal on all ranks even if it is sharded, so it says nothing unless the checksums differ.
    is_telling = survey.metrics["minimum"] != survey.metrics["maximum"]
    checksums, ranks = survey.records.column("checksum"), survey.fields["rank"]
    partitions = []
    kinds: dict[object, Counter[Partition]] = defaultdict(Counter)
    for part in (rows[members] for members in group_members(moments[rows], ranks[rows])):
        if part.size > 1 and (is_telling[part].any() or np.unique(checksums[part]).size > 1):
            firsts: dict[int, int] = {}
            partition = tuple(firsts.setdefault(value, number) for number, value in enumerate(checksums[part].tolist()))
            rank_key = tuple(ranks[part].tolist())
            role = int(survey.roles[part[0]]), rank_key
            partitions.append((part.tolist(), partition, role))
            kinds[role][partition] += 1
            kinds[rank_key][partition] += 1
    for group, partition, role in partitions:
        usual = _usual(kinds[role], minimum=1) or _usual(kinds[role[1]], minimum=limit.MIN_COMPARABLE) or ()
        num_odd = len(partition) - Counter(partition).most_common(1)[0][1]
        if not usual and len(group) >= limit.MIN_MAJORITY and num_odd <= max(1, limit.MAX_ODD_RATIO * len(group)):
            usual = (0,) * len(group)
        for label in sorted(set(usual)):
            equal_rows = [row for row, value in zip(group, usual, strict=True) if value == label]
            if len(equal_rows) > 1:
                yield equal_rows


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
    rows = [row for odd, _ in differing for row in odd]
    odd, copies = differing[0]
    equal_copies = [row for row in copies if row not in set(odd)]
    checksums, iterations = survey.records.column("checksum"), survey.fields["iteration"]
    # If there is no majority, takes the first two copies that differ.
    first = equal_copies[0] if equal_copies else odd[0]
    other = next((row for row in odd if checksums[row] != checksums[first]), odd[0])
    pair = [int(survey.fields["rank"][row]) for row in (first, other)]
    peers = f"the copies of {len(equal_copies)} other ranks" if len(equal_copies) > 1 else "the copy of the other rank"
    evidence = f"since iteration {int(iterations[odd[0]])}"
    if before := [row for row in equal if survey.times[row] < survey.times[odd[0]]]:
        evidence += f", equal until iteration {int(iterations[max(before, key=survey.when)])}"
    differing_times = {int(survey.times[group[0]]) for group, _ in differing}
    after = [
        row for row in equal if survey.times[row] > survey.times[odd[0]] and survey.times[row] not in differing_times
    ]
    if after:
        evidence += f", equal again in {survey.numbered('iteration', after)}"
    evidence += f"; {len(rows)} of {sum(len(group) for _, group in differing)} copies differ"
    sizes = [
        ", ".join(f"{name} {survey.metrics[name][row]:.8g}" for name in ("norm", "absmax")) + f" on rank {rank}"
        for row, rank in zip((first, other), pair, strict=True)
    ]
    details = [*(_difference(survey, first, other) if is_measured else ()), *sizes]
    return make_finding(
        survey,
        places=rows,
        kind="replica_differs",
        severity=Severity.HIGH,
        score=len(rows),
        text=f"differs in bits {f'from {peers}' if equal_copies else f'between ranks {pair[0]} and {pair[1]}'}",
        evidence=f"{evidence}; in iteration {int(iterations[other])}: {'; '.join(details)}",
        options={"pair": f"rank={pair[0]}:{pair[1]}"},
    )


def _difference(survey: Survey, first: int, other: int) -> Iterator[str]:
    """In how many elements two copies differ, and by how much; empty if the values of one were not stored."""
    a, b = (ComparedTensor(records=(survey.records[row],)) for row in (first, other))
    differences = compare_tensors(a, b)
    if differences is not None:
        parts = [f"{differences.num_differing:,} of {differences.num_elements:,} elements differ"]
        if differences.max_abs is not None:
            parts.append(f"by {number_text(differences.max_abs)} at most")
        if differences.num_apart:
            parts.append(f"{differences.num_apart:,} are NaN or infinite in only one")
        yield ", ".join(parts)
