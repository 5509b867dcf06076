"""Gives how each layer differs from the next one, at the same site."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.numbers import group_digests
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import Groups, role_of, row_groups
from ranktape.analyze.numerics.digest import Digest
from ranktape.analyze.numerics.distances import distance
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import NoRecordsError
from ranktape.storage import Records
from ranktape.storage.format.statistics import Statistics

_SITE = (
    "source",
    "iteration",
    "attempt",
    "microbatch",
    "call",
    "mode",
    "layer_type",
    "operation",
    "phase",
    "component",
    "quant_type",
    "tensor_name",
)
"""The fields, besides the module's path without its number, that are the same at the same site of another layer."""


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _shift(here: Statistics, there: Statistics) -> float | None:
    return None if here.mean is None or there.mean is None else _ratio(there.mean - here.mean, here.std)


_STATISTICS: tuple[tuple[str, str, bool, Callable[[Statistics, Statistics], float | None]], ...] = (
    ("std", "std", False, lambda here, _: here.std),
    ("next.std", "next std", False, lambda _, there: there.std),
    ("ratio.std", "std ratio", False, lambda here, there: _ratio(there.std, here.std)),
    ("absmax", "absmax", False, lambda here, _: here.absmax),
    ("next.absmax", "next absmax", False, lambda _, there: there.absmax),
    ("ratio.absmax", "absmax ratio", False, lambda here, there: _ratio(there.absmax, here.absmax)),
    ("mean", "mean", True, lambda here, _: here.mean),
    ("next.mean", "next mean", True, lambda _, there: there.mean),
    ("shift.mean", "mean shift in std", False, _shift),
)
"""Name, head and whether it is a detail, of what is made of the statistics of both."""

_DISTANCES = (
    Column(name="distance.kolmogorov_smirnov", kind=Kind.FLOAT, head="KS"),
    Column(name="distance.wasserstein", kind=Kind.FLOAT, head="Wasserstein", is_detail=True),
    Column(name="distance.relative_wasserstein", kind=Kind.FLOAT, head="Wasserstein in std"),
    Column(name="distance.total_variation", kind=Kind.RATIO, head="total variation"),
    Column(name="distance.jensen_shannon", kind=Kind.FLOAT, head="Jensen-Shannon bits"),
)


def beside_next(records: Records, *, by: Sequence[str], view: View, engine: Engine | None) -> Table:
    """Each record beside that of the same site in the next layer; with `by`, each group of one layer beside the next.

    Ratios are the next layer's metric over this one's; the shift of the mean is in standard deviations of this one;
    distances are those of `distributions.distances`. What is not defined is None: the ratio to a constant, or the
    distance where statistics alone were kept. The next layer is the nearest with a larger index that has the site;
    where its ranks are others, as between the stages of a pipeline, each is compared with the one at the same place
    in the order of ranks. What has no index (-1) is left out.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: no record has a neighbour.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
    """
    apart = [field for field in dict.fromkeys(by) if field != "layer_idx"]
    groups = row_groups(records, by=[*apart, "layer_idx"] if by else ())
    if by:
        layers = [key["layer_idx"] for key in groups.keys]
        pairs = _group_pairs(groups)
    else:
        layers = [int(layer) for layer in records.column("layer_idx").tolist()]
        pairs = _record_pairs(records, layers)
    if not pairs:
        raise NoRecordsError(
            "no record has a neighbour: the selection has no site with two values of layer_idx from 0 on"
        )
    heads = list(groups.heads)
    rows = {
        first: (*heads[first], layers[second], *_compare(here, there))
        for first, second, here, there in _together(pairs, group_digests(records, groups, view=view, engine=engine))
    }
    numbers = (Column(name=name, kind=Kind.FLOAT, head=head, is_detail=detail) for name, head, detail, _ in _STATISTICS)
    next_layer = Column(name="next.layer_idx", kind=Kind.INTEGER, head="next layer")
    return Table(
        title="each layer beside the next: ratios are the next one's metric over its own",
        columns=(*groups.columns, next_layer, *numbers, *_DISTANCES),
        rows=tuple(rows[first] for first in sorted(rows)),
    )


def _group_pairs(groups: Groups) -> dict[int, int]:
    """The place of each group's neighbour: equal but for the layer, which is the last field of the key."""
    stacks: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, key in enumerate(groups.keys):
        *rest, layer = key.values()
        if layer >= 0:
            stacks[tuple(rest)].append((layer, number))
    return {here: there for stack in stacks.values() for (_, here), (_, there) in itertools.pairwise(sorted(stack))}


def _record_pairs(records: Records, layers: Sequence[int]) -> dict[int, int]:
    """The place of each record's neighbour."""
    modules = map(role_of, records.column("module").tolist(), layers)
    ranks = records.column("rank").tolist()
    sites = zip(modules, *(records.column(field).tolist() for field in _SITE), strict=True)
    stacks: dict[tuple[Any, ...], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for place, (site, layer, rank) in enumerate(zip(sites, layers, ranks, strict=True)):
        if layer >= 0:
            stacks[site][layer].setdefault(rank, place)
    pairs: dict[int, int] = {}
    for stack in stacks.values():
        for layer, following in itertools.pairwise(sorted(stack)):
            pairs |= _rank_pairs(stack[layer], stack[following])
    return pairs


def _rank_pairs(here: dict[int, int], there: dict[int, int]) -> dict[int, int]:
    if here.keys() & there.keys():
        return {place: there[rank] for rank, place in here.items() if rank in there}
    ours, theirs = ([places[rank] for rank in sorted(places)] for places in (here, there))
    return dict(zip(ours, theirs, strict=False))


def _together(pairs: dict[int, int], found: Iterator[tuple[int, Digest]]) -> Iterator[tuple[int, int, Digest, Digest]]:
    """Both places and both digests of each pair, as soon as they are there; a digest is kept until its last pair."""
    partners: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in pairs.items():
        for place in pair:
            partners[place].append(pair)
    waiting: dict[int, Digest] = {}
    for place, digest in found:
        if place in partners:
            waiting[place] = digest
        for first, second in tuple(partners.get(place, ())):
            if first not in waiting or second not in waiting:
                continue
            yield first, second, waiting[first], waiting[second]
            for end in (first, second):
                partners[end].remove((first, second))
                if not partners[end]:
                    del waiting[end]


def _compare(here: Digest, there: Digest) -> Iterator[float | None]:
    for _, _, _, metric in _STATISTICS:
        yield metric(here.statistics, there.statistics)
    apart = distance(here, there)
    for column in _DISTANCES:
        yield getattr(apart, column.name.removeprefix("distance."))
