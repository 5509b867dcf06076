"""Finds the records of the one side that belong to those of the other, and those without a counterpart."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ranktape.analyze.identity import role_of
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Records
from ranktape.storage.format.record_info import WIDE
from ranktape.storage.query.filters import parse_filter
from ranktape.storage.records.assemble import AxisKind, assemble_records, parse_placement
from ranktape.storage.records.records import nothing_matches

MATCHED = (
    *("iteration", "microbatch", "call", "mode", "module", "layer_type", "layer_idx", "operation", "phase"),
    *("component", "quant_type", "tensor_name"),
)
"""The fields in which two records of one pair agree, unless they are paired or follow; ranks come after them."""

_BUT_RANK = (*MATCHED, "attempt")
PAIRED = (*MATCHED, "rank", "attempt")
"""The fields in which two sides may differ."""

ANY = "*"
"""What a side says of a field that may be anything there, a number too."""

_SAME_TENSOR = frozenset({"iteration", "microbatch", "call", "mode", "quant_type", "rank", "attempt"})
"""Fields that do not say which tensor of the model it is: where sides differ in them alone, they can diverge."""

_FOLLOWS = {
    "operation": {"phase"},
    "module": {"layer_type", "component"},
    "layer_type": {"component"},
    "component": {"layer_type"},
}
"""Fields that are not matched where another one is paired."""

_KIND = frozenset({"layer_type", "component"})
"""Fields that say of which kind a layer is."""

_ENTERING = frozenset({"query", "key", "value"})
_PARAMETERS = frozenset({"weight", "wide_weight", "bias"})

WHOLE = "null"
"""The placement in the catalogue of a tensor that is no part."""

Key = tuple[Any, ...]


class PairedField(NamedTuple):
    """A field in which the two sides differ."""

    field: str
    left: str
    """What it is on the first side, as a filter: a value, a glob, a range; `*` for anything."""
    right: str
    """What it is on the second side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """In which fields the two sides differ."""

    fields: tuple[PairedField, ...] = ()
    """None where the sides are two runs."""
    neighbours: bool = False
    """Whether each layer is compared with the next."""

    @property
    def names(self) -> frozenset[str]:
        """The fields that are paired."""
        return frozenset(paired.field for paired in self.fields) | ({"layer_idx"} if self.neighbours else set())

    @property
    def is_same_tensor(self) -> bool:
        """Whether both sides are the same tensors of one model, so that a difference is a divergence."""
        return self.names <= _SAME_TENSOR

    @property
    def is_of_kinds(self) -> bool:
        """Whether the sides are layers of two kinds, of which each is compared with each."""
        return bool(self.names & _KIND)

    @property
    def _has_other_tensors(self) -> bool:
        """Whether one side may have tensors of other names than the other."""
        return bool(self.names & (_KIND | {"module"})) and "tensor_name" not in self.names

    def sides(self, a: Records, b: Records) -> tuple[Records, Records]:
        """The records of either side."""
        left = self._side(a, [(paired.field, paired.left) for paired in self.fields])
        right = self._side(b, [(paired.field, paired.right) for paired in self.fields])
        has_parameters = {any(map(_is_parameter, _different(side, "tensor_name"))) for side in (left, right)}
        if self._has_other_tensors and len(has_parameters) > 1:
            return _without_parameters(left), _without_parameters(right)
        return left, right

    def _side(self, records: Records, filters: Sequence[tuple[str, str]]) -> Records:
        chosen = records
        for field, text in filters:
            if text != ANY:
                found = chosen.fitting(parse_filter(field, text))
                if not len(found):
                    raise nothing_matches(chosen, field, text)
                chosen = found
        if self.neighbours:
            chosen = chosen.where("layer_idx >= 0")
        if not len(chosen):
            raise NoRecordsError("no record is of a layer: each has layer_idx -1")
        return _without_parameters(chosen) if "phase" in self.names and "tensor_name" not in self.names else chosen

    def keys(self, a: Records, b: Records) -> tuple[list[Key], list[Key]]:
        """For each record of the two sides what must be the same in both records of a pair."""
        unmatched = set(self.names).union(*(_FOLLOWS.get(name, ()) for name in self.names))
        if self.is_of_kinds:
            unmatched |= {field for field in ("module", "layer_idx") if not _different(a, field) & _different(b, field)}
            unmatched |= {"call"} if _different(a, "call") != _different(b, "call") else set()
        if "module" in self.names and all(len(_different(side, "layer_idx")) == 1 for side in (a, b)):
            unmatched.add("layer_idx")
        enter = [{_bare(name) for name in _different(side, "tensor_name")} & _ENTERING for side in (a, b)]
        is_one_sided = self._has_other_tensors and bool(enter[0]) != bool(enter[1])

        def keys_of(records: Records) -> list[Key]:
            columns = {field: records.column(field).tolist() for field in MATCHED if field not in unmatched}
            if "module" in columns and "layer_idx" in self.names:
                columns["module"] = list(map(role_of, columns["module"], records.column("layer_idx").tolist()))
            if "tensor_name" in columns:
                names = columns["tensor_name"]
                columns["tensor_name"] = [self._renamed(name, is_one_sided=is_one_sided) for name in names]
            return list(zip(*columns.values(), strict=True)) if columns else [()] * len(records)

        return keys_of(a), keys_of(b)

    def _renamed(self, name: str, *, is_one_sided: bool) -> str:
        """The name of a tensor, as it is matched; `is_one_sided`: one side alone has queries, keys or values."""
        bare = _bare(name)
        if "phase" in self.names:
            return "output" if bare in {"input", "output", *_ENTERING} else name
        matched = "input" if is_one_sided and bare in _ENTERING else bare
        return matched if "operation" in self.names else name.removesuffix(bare) + matched

    def members(self, records: Records) -> list[Key]:
        """For each record what tells it from others with its key: everything else, but for the rank, unless paired."""
        fields = (*_BUT_RANK, "rank") if "rank" in self.names else _BUT_RANK
        return list(zip(*(records.column(field).tolist() for field in fields), strict=True))


def parse_pairs(texts: str | Sequence[str]) -> tuple[PairedField, ...]:
    """The pairs that texts such as `quant_type=hifp8:mxfp8` name.

    Raises:
        UsageError: one of them is none, or two name one field.
    """
    parsed = tuple(map(_parse_pair, [texts] if isinstance(texts, str) else texts))
    names = [paired.field for paired in parsed]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{twice} is paired twice: give each field once")
    return parsed


def _parse_pair(text: str) -> PairedField:
    field, equals, values = text.partition("=")
    left, colon, right = (part.strip() for part in values.partition(":"))
    name = field.strip().replace("-", "_")
    if not (equals and colon and left and right):
        raise UsageError(f"pair {text!r} is not allowed: give FIELD=LEFT:RIGHT, such as quant_type=hifp8:mxfp8")
    if name not in PAIRED:
        nearest = difflib.get_close_matches(name, PAIRED, n=2) or PAIRED
        raise UsageError(f"records cannot be paired by {name!r}: use {' or '.join(nearest)}")
    if ":" in right:
        raise UsageError(f"pair {text!r} has two colons: write ranges of numbers with a dash, as in {name}=0-3:4-7")
    return PairedField(name, left, right)


def _bare(name: str) -> str:
    return name.removeprefix("grad_")


def _is_parameter(name: str) -> bool:
    return _bare(name) in _PARAMETERS


def _without_parameters(records: Records) -> Records:
    """The records of what goes into modules and comes out of them."""
    names = sorted(name for name in _different(records, "tensor_name") if not _is_parameter(name))
    if not names:
        raise NoRecordsError(
            "no record is of what goes into a module or comes out of it: weights and their gradients do not"
        )
    return records.select(tensor_name=names)


def _different(records: Records, field: str) -> set[Any]:
    return set(records.column(field).tolist())


MAX_NAMED = 6
"""Sites that a message names before it counts the rest."""

_NAME = ("module", "layer_type", "layer_idx", "operation", "phase", "quant_type", "tensor_name")
"""The fields by which messages name a site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Records of one side that are one tensor."""

    rows: tuple[int, ...]
    """Rows of the selection, by rank."""
    is_assembled: bool = False
    """Whether they are put together, or a single record is taken as it is."""
    shape: tuple[int, ...] = ()
    """Of the whole tensor, where it is put together."""
    copies: int = 1
    """Ranks whose records are the same bits, and of which this one stands for all."""
    has_differing_copies: bool = False
    """Whether ranks that should hold the same recorded other bits."""


Pair = tuple[Parts, Parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Two sides, and which of their records belong together."""

    a: Records
    """The first side, the reference."""
    b: Records
    """The second side."""
    pairs: tuple[Pair, ...]
    """The tensors that are compared, in the order of the first side."""
    unmatched_a: tuple[int, ...]
    """Records of the first side without a counterpart."""
    unmatched_b: tuple[int, ...]
    """Records of the second side without a counterpart."""

    def unmatched(self) -> list[str]:
        """For each side that has any, in one line which records have no counterpart."""
        sides = (("first", self.a, self.unmatched_a), ("second", self.b, self.unmatched_b))
        return [
            f"{len(rows)} of {len(records)} records of the {name} side have no counterpart: {_sites(records, rows)}"
            for name, records, rows in sides
            if rows
        ]

    @property
    def is_complete(self) -> bool:
        """Whether every record has a counterpart, or holds what another one, of its operand, was made of."""
        sides = ((self.a, self.unmatched_a), (self.b, self.unmatched_b))
        names = (records.column("tensor_name")[list(rows)].tolist() for records, rows in sides)
        return all(name.startswith(WIDE) for of_side in names for name in of_side)


def match(a: Records, b: Records, pairing: Pairing, *, is_one_run: bool) -> Matching:
    """The pairs of two sides.

    Args:
        a: The records of the first side.
        b: Those of the second side.
        pairing: In which fields they differ.
        is_one_run: Whether both are of one run: no record is compared with itself.

    Raises:
        DataError: a placement is damaged.
        NoRecordsError: no record has a counterpart; the message names the nearest.
        UsageError: several records of each side belong together, and nothing says which to which.
    """
    sides = _Side(a), _Side(b)
    groups: list[dict[Key, dict[Key, list[int]]]] = [{}, {}]
    for found, keys, records in zip(groups, pairing.keys(a, b), (a, b), strict=True):
        for row, (key, member) in enumerate(zip(keys, pairing.members(records), strict=True)):
            found.setdefault(key, {}).setdefault(member, []).append(row)
    pairs: list[Pair] = []
    matched: tuple[set[int], set[int]] = (set(), set())
    for key, members_a in groups[0].items():
        members_b = groups[1].get(key, {})
        for member_a, member_b in _matched(list(members_a), list(members_b), pairing):
            rows = members_a[member_a], members_b[member_b]
            is_itself = is_one_run and member_a == member_b
            if is_itself:
                own = []
            elif "rank" in pairing.names:
                # Two records as they are, whatever parts of tensors they hold.
                own = [(Parts(rows=(row_a,)), Parts(rows=(row_b,))) for row_a, row_b in itertools.product(*rows)]
            else:
                own = _match_ranks(*sides, *rows)
            pairs += own
            if own or is_itself:
                matched[0].update(rows[0])
                matched[1].update(rows[1])
    if not pairs:
        raise NoRecordsError(_nothing_matched(a, b, pairing))
    if pairing.neighbours:
        # The last layer of each kind has no next one, and the first is nobody's.
        matched = (matched[0] | matched[1],) * 2
    pairs.sort(key=lambda pair: (pair[0].rows, pair[1].rows))
    unmatched = [
        tuple(row for row in range(len(records)) if row not in rows)
        for records, rows in zip((a, b), matched, strict=True)
    ]
    return Matching(a=a, b=b, pairs=tuple(pairs), unmatched_a=unmatched[0], unmatched_b=unmatched[1])


def twins_of(matching: Matching, noise: Records) -> list[tuple[int, ...] | None]:
    """For each pair the rows of the first side's tensor in an equal run; None where one is missing.

    Raises:
        NoRecordsError: there are none.
    """
    keys, own = (
        list(zip(*(records.column(field).tolist() for field in (*MATCHED, "rank")), strict=True))
        for records in (matching.a, noise)
    )
    row_of = {key: row for row, key in enumerate(own)}
    found = [tuple(row_of[keys[row]] for row in one.rows if keys[row] in row_of) for one, _ in matching.pairs]
    twins = [rows if len(rows) == len(one.rows) else None for rows, (one, _) in zip(found, matching.pairs, strict=True)]
    if not any(twins):
        raise NoRecordsError("no tensor of the first side is in the run that --noise names: give a second equal run")
    return twins


def _sites(records: Records, rows: Sequence[int]) -> str:
    """The sites of records in a few words, those first of which there are most."""
    columns = [records.column(field) for field in _NAME]
    counts = Counter(site_name(*(column[row] for column in columns)) for row in rows)
    named = [f"{name} ({count})" for name, count in counts.most_common(MAX_NAMED)]
    return _few(named, total=len(counts))


def site_name(module: str, layer_type: str, layer_idx: int, *rest: str) -> str:
    """A site in words: its module, or where there is none its kind, with the layer unless the path names it."""
    has_layer = layer_idx >= 0 and str(layer_idx) not in module.split(".")
    return " ".join([module or layer_type, *([f"layer {layer_idx}"] if has_layer else []), *rest])


def _matched(members_a: list[Key], members_b: list[Key], pairing: Pairing) -> Iterator[tuple[Key, Key]]:
    """The members of either side that belong together; those of one key.

    Each with each, where there is but one on either side, or where sides are of two kinds of layers.
    """
    if pairing.neighbours:
        layer = _BUT_RANK.index("layer_idx")
        layers: dict[int, list[Key]] = {}
        for member in sorted(members_a, key=lambda member: member[layer]):
            layers.setdefault(member[layer], []).append(member)
        sides = list(itertools.pairwise(layers.values()))
    else:
        sides = [(members_a, members_b)]
    for left, right in sides:
        if len(left) > 1 and len(right) > 1 and not pairing.is_of_kinds:
            fields = (*_BUT_RANK, "rank")
            columns = zip(*left, *right, strict=True)
            several = [field for field, values in zip(fields, columns, strict=False) if len(set(values)) > 1]
            known = dict(zip(_BUT_RANK, left[0], strict=False))
            raise UsageError(
                f"{len(left)} records of the first side belong to {len(right)} of the second, such as "
                f"{site_name(*(known[field] for field in _NAME))}: they differ in {', '.join(several)}; leave one of "
                f"them on a side, with a filter or with --pair {several[-1]}=LEFT:RIGHT"
            )
        yield from itertools.product(left, right)


def _nothing_matched(a: Records, b: Records, pairing: Pairing) -> str:
    """Why no record of the one side has a counterpart, and what would help."""
    what = f"no record of the first side ({len(a)} records) has a counterpart among the {len(b)} of the second"
    for field in (field for field in MATCHED[::-1] if field not in pairing.names):
        values = [sorted({str(value) for value in side.column(field).tolist()}) for side in (a, b)]
        if not set(values[0]).isdisjoint(values[1]):
            continue
        keys = Pairing(fields=(*pairing.fields, PairedField(field, ANY, ANY))).keys(a, b)
        if not set(keys[0]).isdisjoint(keys[1]):
            return (
                f"{what}: {field} is {_few(values[0])} on the first and {_few(values[1])} on the second; "
                f"give --pair {field}={values[0][0]}:{values[1][0]}"
            )
    names = [sorted(set(map(site_name, *(side.column(field) for field in _NAME)))) for side in (a, b)]
    nearest = difflib.get_close_matches(names[0][0], names[1], n=1, cutoff=0.0)
    return f"{what}: the nearest to {names[0][0]!r} is {nearest[0]!r}; see 'ranktape analyze ls' of both"


def _few(values: Sequence[str], *, total: int = 0) -> str:
    rest = (total or len(values)) - MAX_NAMED
    return ", ".join(values[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class _Side:
    """The records of one side, with the columns that tell their layouts."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.ranks: list[int] = records.column("rank").tolist()
        self.placements: list[str] = records.column("placement").tolist()
        self.shapes: list[str] = records.column("shape").tolist()
        self.bits = list(zip(self.shapes, records.column("checksum").tolist(), strict=True))
        """The same for two records whose values are the same bits."""
        self._parts: dict[tuple[str, int], object] = {}

    def part(self, row: int) -> object:
        """The same for the records of copies; a whole tensor without a placement is of its rank alone."""
        text, rank = self.placements[row], self.ranks[row]
        if text == WHOLE:
            return rank
        if (text, rank) not in self._parts:
            placement = parse_placement(self.records[row].info)
            assert placement is not None
            self._parts[text, rank] = placement.axes, placement.ranks, placement.fixed(AxisKind.REPLICATE)
        return self._parts[text, rank]

    def tensors(self, rows: Sequence[int]) -> list[Parts]:
        """The tensors of which the records are parts, by the lowest of their ranks."""
        records = [self.records[row] for row in rows]
        row_of = {id(record): row for record, row in zip(records, rows, strict=True)}
        return [
            Parts(
                rows=tuple(row_of[id(record)] for record in view.records),
                is_assembled=self.placements[row_of[id(view.records[0])]] != WHOLE,
                shape=view.shape,
                has_differing_copies=bool(view.differing_replicas()),
            )
            for view in assemble_records(records, replicas="ignore")
        ]

    def one_of_equals(self, tensors: list[Parts]) -> list[Parts]:
        """One for all, where every tensor is one record, and all of them are the same bits."""
        is_equal = len({self.bits[parts.rows[0]] for parts in tensors}) == 1
        if len(tensors) > 1 and is_equal and all(len(parts.rows) == 1 and not parts.is_assembled for parts in tensors):
            return [Parts(rows=tensors[0].rows, copies=len(tensors))]
        return tensors


def _match_ranks(a: _Side, b: _Side, rows_a: Sequence[int], rows_b: Sequence[int]) -> list[Pair]:
    """The tensors of both sides, one with the other; empty where they are not as many."""
    if len(rows_a) == len(rows_b) == 1 and a.placements[rows_a[0]] == b.placements[rows_b[0]] == WHOLE:
        return [(Parts(rows=tuple(rows_a)), Parts(rows=tuple(rows_b)))]
    ordered_a, ordered_b = sorted(rows_a, key=a.ranks.__getitem__), sorted(rows_b, key=b.ranks.__getitem__)

    def is_same_part(row_a: int, row_b: int) -> bool:
        texts = a.placements[row_a], b.placements[row_b]
        is_same = texts[0] == texts[1] or (WHOLE in texts and a.shapes[row_a] == b.shapes[row_b])
        return a.ranks[row_a] == b.ranks[row_b] and is_same

    if len(rows_a) == len(rows_b) and all(map(is_same_part, ordered_a, ordered_b)):
        return _rank_by_rank(a, b, list(zip(ordered_a, ordered_b, strict=True)))
    tensors = a.tensors(ordered_a), b.tensors(ordered_b)
    if len(tensors[0]) != len(tensors[1]):
        tensors = a.one_of_equals(tensors[0]), b.one_of_equals(tensors[1])
    return list(zip(*tensors, strict=True)) if len(tensors[0]) == len(tensors[1]) else []


def _rank_by_rank(a: _Side, b: _Side, rows: Sequence[tuple[int, int]]) -> list[Pair]:
    """Each rank's record with its counterpart; of copies that are equal on either side the first."""
    groups: dict[object, list[tuple[int, int]]] = {}
    for row_a, row_b in rows:
        groups.setdefault((a.part(row_a), b.part(row_b)), []).append((row_a, row_b))
    pairs: list[Pair] = []
    for copies in groups.values():
        num_a, num_b = len({a.bits[row] for row, _ in copies}), len({b.bits[row] for _, row in copies})
        kept, num = (copies[:1], len(copies)) if (num_a, num_b) == (1, 1) else (copies, 1)
        pairs += [
            (
                Parts(rows=(row_a,), copies=num, has_differing_copies=num_a > 1),
                Parts(rows=(row_b,), copies=num, has_differing_copies=num_b > 1),
            )
            for row_a, row_b in kept
        ]
    return pairs
