"""Finds tensors that ranks hold copies of and that are not the same bits on all of them.

The catalogue has a checksum of every record, which finds them; values are read only to say by how much they differ.
Where a placement says `replicate`, it says which ranks have copies. Where no placement is known, as under DDP, weights
are copies that are equal bit for bit in most comparable places: at the same place in other iterations, and in other
layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.comparison.tensors import ComparedTensor, compare_tensors
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import Finding, Severity, finding_of, named_numbers, number_text
from ranktape.analyze.findings.survey import SITE, Survey, codes_of, members_of
from ranktape.errors import DataError
from ranktape.storage import Records
from ranktape.storage.records.assemble import AxisKind, Placement, parse_placement

_MAX_MEASURED = 8
"""Places whose copies are read and compared element by element."""

Partition = tuple[int, ...]
"""For each rank of a place, in ascending order, the number of the first one that has the same bits."""

_MIN_MAJORITY = 3
"""Of fewer ranks no majority can be wrong about one."""

_MIN_COMPARABLE = 4
"""So many places that agree say that all weights of a run are copies, where a kind of place has no others."""

_MOMENT = ("attempt", "iteration", "microbatch", "call")


def parse_placements(records: Records) -> dict[str, Placement | None]:
    """What each different document says; None for one that cannot be understood, whose copies are not compared."""
    texts = records.column("placement").tolist()
    firsts = dict(zip(reversed(texts), range(len(texts) - 1, -1, -1), strict=True))
    found: dict[str, Placement | None] = {}
    for text, first in sorted(firsts.items()):
        if text == "null":
            continue
        try:
            found[text] = parse_placement(records[first].info)
        except DataError:
            found[text] = None
    return found


def unread_note(records: Records) -> str:
    """The note that copies of some records are not compared, as their placements cannot be read; "" for none."""
    unread = [text for text, placement in parse_placements(records).items() if placement is None]
    count = int(np.isin(records.column("placement").astype(str), unread).sum()) if unread else 0
    if not count:
        return ""
    of = "1 record" if count == 1 else f"{count:,} records"
    return f"the placement of {of} cannot be read: copies of them are not compared"


def placed_copies(records: Records, parsed: Mapping[str, Placement | None]) -> Iterator[list[int]]:
    """The places of records of one moment that are copies of one part, as their placements say; of some only one."""
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


def differing_replicas(survey: Survey) -> Iterator[Finding]:
    """One for each place, with the ranks whose copy is not that of the others; all where no majority says which."""
    placements = survey.records.column("placement")
    parsed = parse_placements(survey.records)
    bits = list(zip(survey.records.column("checksum").tolist(), survey.fields["shape"].tolist(), strict=True))
    found: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    equal: dict[int, list[int]] = defaultdict(list)
    # Whole tensors alone: a shard of an unknown placement is no copy of anything.
    unplaced = _unplaced_copies(survey, (placements == "null") & survey.is_weight)
    for copies in (*placed_copies(survey.records, parsed), *unplaced):
        counts = Counter(bits[place] for place in copies).most_common()
        if len(counts) > 1:
            # Without a majority any of them may be wrong.
            is_tie = counts[0][1] == counts[1][1]
            odd = copies if is_tie else [place for place in copies if bits[place] != counts[0][0]]
            found[int(survey.sites[copies[0]])].append((odd, copies))
        else:
            equal[int(survey.sites[copies[0]])].append(copies[0])
    for differing in found.values():
        differing.sort(key=lambda one: survey.when(one[0][0]))
    # Values are read of those that a person sees: those that began first.
    ordered = sorted(found.items(), key=lambda item: survey.when(item[1][0][0][0]))
    for number, (site, differing) in enumerate(ordered):
        yield _finding(survey, differing, equal=equal[site], is_measured=number < _MAX_MEASURED)


def _unplaced_copies(survey: Survey, mask: NDArray[np.bool_]) -> Iterator[list[int]]:
    """Weights of one place and moment that should be equal, as others of their kind are."""
    places = np.flatnonzero(mask)
    moments = codes_of(survey.codes(*_MOMENT, "shape", "dtype"), survey.sites)
    # What is one value everywhere is equal on all ranks, shards or not.
    is_telling = survey.metrics["minimum"] != survey.metrics["maximum"]
    parts = (places[part] for part in members_of(moments[places], survey.fields["rank"][places]))
    crcs = survey.records.column("checksum")
    # But not if it is another value on one of them.
    known = [
        (part.tolist(), _partition(crcs[part].tolist()), tuple(survey.fields["rank"][part].tolist()))
        for part in parts
        if part.size > 1 and (is_telling[part].any() or np.unique(crcs[part]).size > 1)
    ]
    kinds: dict[object, Counter[Partition]] = defaultdict(Counter)
    for group, partition, held_by in known:
        kinds[(int(survey.roles[group[0]]), held_by)][partition] += 1
        kinds[held_by][partition] += 1
    for group, partition, held_by in known:
        role = kinds[(int(survey.roles[group[0]]), held_by)]
        usual = _usual(role, minimum=1) or _usual(kinds[held_by], minimum=_MIN_COMPARABLE) or ()
        num_odd = len(partition) - Counter(partition).most_common(1)[0][1]
        if not usual and len(group) >= _MIN_MAJORITY and num_odd <= max(1, limit.MAX_ODD_RATIO * len(group)):
            usual = (0,) * len(group)
        for label in sorted(set(usual)):
            alike = [place for place, one in zip(group, usual, strict=True) if one == label]
            if len(alike) > 1:
                yield alike


def _usual(partitions: Counter[Partition], *, minimum: int) -> Partition | None:
    """The way in which ranks agree at the places of a kind, if some do and most places say the same.

    Where equally many places say so, the one in which more ranks agree is meant: bits are not equal by chance.
    """
    total = sum(partitions.values())
    agreeing = {partition: count for partition, count in partitions.items() if len(set(partition)) < len(partition)}
    if not agreeing:
        return None
    usual = max(agreeing, key=lambda partition: (agreeing[partition], -len(set(partition))))
    is_most = agreeing[usual] >= limit.MIN_ALIKE_RATIO * total and agreeing[usual] >= minimum
    # What is told by itself alone is told by no other place.
    return usual if is_most and (total > 1 or len(set(usual)) == 1) else None


def _partition(values: Sequence[int]) -> Partition:
    firsts: dict[int, int] = {}
    return tuple(firsts.setdefault(value, place) for place, value in enumerate(values))


def _finding(
    survey: Survey, differing: Sequence[tuple[list[int], list[int]]], *, equal: Sequence[int], is_measured: bool
) -> Finding:
    """Of one place all copies that differ, in order; `equal` has one record of each moment at which none does."""
    places = [place for odd, _ in differing for place in odd]
    odd, copies = differing[0]
    alike = [place for place in copies if place not in set(odd)]
    # Of copies among which there is no majority the first two that differ.
    first = alike[0] if alike else odd[0]
    other = odd[0] if alike else _other_bits(survey, odd)
    pair = [int(survey.fields["rank"][place]) for place in (first, other)]
    others = f"the copies of {len(alike)} other ranks" if len(alike) > 1 else "the copy of the other rank"
    unsure = f"differs in bits between ranks {pair[0]} and {pair[1]}"
    since = [
        _since(survey, differing, equal),
        f"{len(places)} of {sum(len(one) for _, one in differing)} copies differ",
    ]
    iteration = int(survey.fields["iteration"][other])
    apart = _apart(survey, first, other) if is_measured else []
    sizes = (f"{_sizes(survey, place)} on rank {rank}" for place, rank in zip((first, other), pair, strict=True))
    by = f"in iteration {iteration}: {'; '.join([*apart, *sizes])}"
    return finding_of(
        survey,
        places=places,
        kind="replica_differs",
        severity=Severity.HIGH,
        score=len(places),
        text=f"differs in bits from {others}" if alike else unsure,
        evidence="; ".join([*since, by]),
        options={"pair": f"rank={pair[0]}:{pair[1]}"},
    )


def _other_bits(survey: Survey, copies: Sequence[int]) -> int:
    crcs = survey.records.column("checksum")
    return next(place for place in copies if crcs[place] != crcs[copies[0]])


def _since(survey: Survey, differing: Sequence[tuple[list[int], list[int]]], equal: Sequence[int]) -> str:
    """In which iteration copies differ first, and in which they were equal before and are again."""
    iterations = survey.fields["iteration"]
    first = differing[0][0][0]
    said = f"since iteration {int(iterations[first])}"
    before = [place for place in equal if survey.times[place] < survey.times[first]]
    if before:
        said += f", equal until iteration {int(iterations[max(before, key=survey.when)])}"
    apart = {int(survey.times[odd[0]]) for odd, _ in differing}
    after = [place for place in equal if survey.times[place] > survey.times[first] and survey.times[place] not in apart]
    if after:
        said += f", equal again in {named_numbers('iteration', iterations[after].tolist())}"
    return said


def _apart(survey: Survey, first: int, other: int) -> list[str]:
    """In how many elements two copies differ, and by how much; nothing where values of one were not kept."""
    a, b = (ComparedTensor(records=(survey.records[place],)) for place in (first, other))
    known = compare_tensors(a, b)
    if known is None:
        return []
    said = [f"{known.num_differing:,} of {known.num_elements:,} elements differ"]
    if known.max_abs is not None:
        said.append(f"by {number_text(known.max_abs)} at most")
    if known.num_apart:
        said.append(f"{known.num_apart:,} are NaN or infinite in one alone")
    return [", ".join(said)]


def _sizes(survey: Survey, place: int) -> str:
    """What a person can compare two copies by; they may agree in it, as copies do that differ in few elements."""
    return ", ".join(f"{name} {survey.metrics[name][place]:.8g}" for name in ("norm", "absmax"))
