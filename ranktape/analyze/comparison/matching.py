"""Pairs the records of two sides, and lists those without a counterpart."""

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
"""The fields in which the records of a pair agree, except paired fields and those of `_FOLLOWS`. Ranks are separate."""

_BUT_RANK = (*MATCHED, "attempt")
PAIRED = (*MATCHED, "rank", "attempt")
"""The fields in which two sides can differ."""

ANY = "*"
"""The filter of a side that accepts any value of a field, including numbers."""

_SAME_TENSOR = frozenset({"iteration", "microbatch", "call", "mode", "quant_type", "rank", "attempt"})
"""Fields that do not identify a tensor of the model. Only sides that differ in nothing else can diverge."""

_FOLLOWS = {
    "operation": {"phase"},
    "module": {"layer_type", "component"},
    "layer_type": {"component"},
    "component": {"layer_type"},
}
"""Fields that are not matched if another one is paired."""

_KIND = frozenset({"layer_type", "component"})
"""Fields that give the kind of a layer."""

_ENTERING = frozenset({"query", "key", "value"})
_PARAMETERS = frozenset({"weight", "wide_weight", "bias"})

WHOLE = "null"
"""The placement, as stored in the catalogue, of a tensor that is not part of another."""

Key = tuple[Any, ...]


class PairedField(NamedTuple):
    """A field in which the two sides differ."""

    field: str
    left: str
    """The filter for the first side: a value, a glob, or a range; `*` for any value."""
    right: str
    """The filter for the second side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """How the two sides differ."""

    fields: tuple[PairedField, ...] = ()
    """The fields in which they differ; empty if the sides are two runs."""
    neighbours: bool = False
    """Whether each layer is compared with the next one."""

    @property
    def names(self) -> frozenset[str]:
        """The fields that are paired."""
        return frozenset(paired.field for paired in self.fields) | ({"layer_idx"} if self.neighbours else set())

    @property
    def is_same_tensor(self) -> bool:
        """Whether both sides are the same tensors of a model, so that a difference is a divergence."""
        return self.names <= _SAME_TENSOR

    @property
    def is_of_kinds(self) -> bool:
        """Whether the sides are layers of two kinds, with each layer of one compared with each of the other."""
        return bool(self.names & _KIND)

    @property
    def _has_other_tensors(self) -> bool:
        """Whether the tensor names of the two sides can differ."""
        return bool(self.names & (_KIND | {"module"})) and "tensor_name" not in self.names

    def sides(self, a: Records, b: Records) -> tuple[Records, Records]:
        """The records of both sides."""
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
                matching = chosen.fitting(parse_filter(field, text))
                if not len(matching):
                    raise nothing_matches(chosen, field, text)
                chosen = matching
        if self.neighbours:
            chosen = chosen.where("layer_idx >= 0")
        if not len(chosen):
            raise NoRecordsError("no record belongs to a layer: layer_idx is -1 for all")
        return _without_parameters(chosen) if "phase" in self.names and "tensor_name" not in self.names else chosen

    def keys(self, a: Records, b: Records) -> tuple[list[Key], list[Key]]:
        """For each record of the two sides, the key that both records of a pair have in common."""
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
        """The tensor name to match by. If `is_one_sided`, only one side has queries, keys or values."""
        bare = _bare(name)
        if "phase" in self.names:
            return "output" if bare in {"input", "output", *_ENTERING} else name
        matched = "input" if is_one_sided and bare in _ENTERING else bare
        return matched if "operation" in self.names else name.removesuffix(bare) + matched

    def members(self, records: Records) -> list[Key]:
        """For each record, the fields that distinguish it from others with its key; the rank only if it is paired."""
        fields = (*_BUT_RANK, "rank") if "rank" in self.names else _BUT_RANK
        return list(zip(*(records.column(field).tolist() for field in fields), strict=True))


def parse_pairs(texts: str | Sequence[str]) -> tuple[PairedField, ...]:
    """Parse texts such as `quant_type=hifp8:mxfp8` into paired fields.

    Raises:
        UsageError: a text is not a pair, or two texts name the same field.
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
    """The records of inputs and outputs of modules and their gradients, without parameters."""
    names = sorted(name for name in _different(records, "tensor_name") if not _is_parameter(name))
    if not names:
        raise NoRecordsError("no record is an input or output of a module: all are weights or their gradients")
    return records.select(tensor_name=names)


def _different(records: Records, field: str) -> set[Any]:
    return set(records.column(field).tolist())


MAX_NAMED = 6
"""The largest number of sites that a message names; the rest is counted."""

_NAME = ("module", "layer_type", "layer_idx", "operation", "phase", "quant_type", "tensor_name")
"""The fields that identify a site in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The records of one side that form one tensor."""

    rows: tuple[int, ...]
    """Rows of the selection, by rank."""
    is_assembled: bool = False
    """Whether the tensor is assembled from its parts; otherwise it is a single record."""
    shape: tuple[int, ...] = ()
    """Shape of the whole tensor, if it is assembled."""
    copies: int = 1
    """Number of ranks with records of equal bits that this tensor represents."""
    has_differing_copies: bool = False
    """Whether ranks that should have equal copies recorded different bits."""


Pair = tuple[Parts, Parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Two sides and the pairs of their records."""

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
        """A line for each side with records without a counterpart, which names them."""
        sides = (("first", self.a, self.unmatched_a), ("second", self.b, self.unmatched_b))
        return [
            f"{len(rows)} of {len(records)} records of the {name} side have no counterpart: {_sites(records, rows)}"
            for name, records, rows in sides
            if rows
        ]

    @property
    def is_complete(self) -> bool:
        """Whether every record has a counterpart, except operands recorded in high precision before quantization."""
        sides = ((self.a, self.unmatched_a), (self.b, self.unmatched_b))
        names = (records.column("tensor_name")[list(rows)].tolist() for records, rows in sides)
        return all(name.startswith(WIDE) for of_side in names for name in of_side)


def match(a: Records, b: Records, pairing: Pairing, *, is_one_run: bool) -> Matching:
    """Pair the records of two sides.

    Args:
        a: The records of the first side.
        b: The records of the second side.
        pairing: The fields in which the sides differ.
        is_one_run: Whether both sides are of one run; then no record is compared with itself.

    Raises:
        DataError: a placement is damaged.
        NoRecordsError: no record has a counterpart; the message names the nearest.
        UsageError: several records of each side have the same key, so the pairs are ambiguous.
    """
    sides = _Side(a), _Side(b)
    groups: list[dict[Key, dict[Key, list[int]]]] = [{}, {}]
    for group, keys, records in zip(groups, pairing.keys(a, b), (a, b), strict=True):
        for row, (key, member) in enumerate(zip(keys, pairing.members(records), strict=True)):
            group.setdefault(key, {}).setdefault(member, []).append(row)
    pairs: list[Pair] = []
    matched: tuple[set[int], set[int]] = (set(), set())
    for key, members_a in groups[0].items():
        members_b = groups[1].get(key, {})
        for member_a, member_b in _matched(list(members_a), list(members_b), pairing):
            rows = members_a[member_a], members_b[member_b]
            is_itself = is_one_run and member_a == member_b
            if is_itself:
                rank_pairs = []
            elif "rank" in pairing.names:
                # Pairs single records, even if they are parts of tensors.
                rank_pairs = [(Parts(rows=(row_a,)), Parts(rows=(row_b,))) for row_a, row_b in itertools.product(*rows)]
            else:
                rank_pairs = _match_ranks(*sides, *rows)
            pairs += rank_pairs
            if rank_pairs or is_itself:
                matched[0].update(rows[0])
                matched[1].update(rows[1])
    if not pairs:
        raise NoRecordsError(_nothing_matched(a, b, pairing))
    if pairing.neighbours:
        # The last layer of each kind has no next layer, and the first is not the next layer of any.
        matched = (matched[0] | matched[1],) * 2
    pairs.sort(key=lambda pair: (pair[0].rows, pair[1].rows))
    unmatched = [
        tuple(row for row in range(len(records)) if row not in rows)
        for records, rows in zip((a, b), matched, strict=True)
    ]
    return Matching(a=a, b=b, pairs=tuple(pairs), unmatched_a=unmatched[0], unmatched_b=unmatched[1])


def twins_of(matching: Matching, noise: Records) -> list[tuple[int, ...] | None]:
    """For each pair, the rows of the first side's tensor in a second equal run; None if one is missing.

    Raises:
        NoRecordsError: no tensor of the first side is in that run.
    """
    keys, noise_keys = (
        list(zip(*(records.column(field).tolist() for field in (*MATCHED, "rank")), strict=True))
        for records in (matching.a, noise)
    )
    row_of = {key: row for row, key in enumerate(noise_keys)}
    twin_rows = [tuple(row_of[keys[row]] for row in one.rows if keys[row] in row_of) for one, _ in matching.pairs]
    twins = [
        rows if len(rows) == len(one.rows) else None for rows, (one, _) in zip(twin_rows, matching.pairs, strict=True)
    ]
    if not any(twins):
        raise NoRecordsError("no tensor of the first side is in the run that --noise names: give a second equal run")
    return twins


def _sites(records: Records, rows: Sequence[int]) -> str:
    """The sites of records as a short text, those with the most records first."""
    columns = [records.column(field) for field in _NAME]
    counts = Counter(site_name(*(column[row] for column in columns)) for row in rows)
    named = [f"{name} ({count})" for name, count in counts.most_common(MAX_NAMED)]
    return _few(named, total=len(counts))


def site_name(module: str, layer_type: str, layer_idx: int, *rest: str) -> str:
    """A site as text: its module, or its kind if there is none, with the layer unless the module path contains it."""
    has_layer = layer_idx >= 0 and str(layer_idx) not in module.split(".")
    return " ".join([module or layer_type, *([f"layer {layer_idx}"] if has_layer else []), *rest])


def _matched(members_a: list[Key], members_b: list[Key], pairing: Pairing) -> Iterator[tuple[Key, Key]]:
    """The pairs of members that share a key.

    If one side has a single member, or the sides are two kinds of layers, each member is paired with each.

    Raises:
        UsageError: otherwise, if both sides have several members.
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
                f"{len(left)} records of the first side match {len(right)} of the second, such as "
                f"{site_name(*(known[field] for field in _NAME))}: they differ in {', '.join(several)}; select one "
                f"of them with a filter, or with --pair {several[-1]}=LEFT:RIGHT"
            )
        yield from itertools.product(left, right)


def _nothing_matched(a: Records, b: Records, pairing: Pairing) -> str:
    """Why no record of the first side has a counterpart, and which option would help."""
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
    """The records of one side, with the columns that describe their placement, shape and bits."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.ranks: list[int] = records.column("rank").tolist()
        self.placements: list[str] = records.column("placement").tolist()
        self.shapes: list[str] = records.column("shape").tolist()
        self.bits = list(zip(self.shapes, records.column("checksum").tolist(), strict=True))
        """A value that is equal for records with the same bits."""
        self._parts: dict[tuple[str, int], object] = {}

    def part(self, row: int) -> object:
        """A value that is equal for records of copies; the rank, if a tensor has no placement."""
        text, rank = self.placements[row], self.ranks[row]
        if text == WHOLE:
            return rank
        if (text, rank) not in self._parts:
            placement = parse_placement(self.records[row].info)
            assert placement is not None
            self._parts[text, rank] = placement.axes, placement.ranks, placement.fixed(AxisKind.REPLICATE)
        return self._parts[text, rank]

    def tensors(self, rows: Sequence[int]) -> list[Parts]:
        """The tensors that the records are parts of, ordered by lowest rank."""
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
        """A single tensor for all, if each tensor is one record and all have the same bits; otherwise all tensors."""
        is_equal = len({self.bits[parts.rows[0]] for parts in tensors}) == 1
        if len(tensors) > 1 and is_equal and all(len(parts.rows) == 1 and not parts.is_assembled for parts in tensors):
            return [Parts(rows=tensors[0].rows, copies=len(tensors))]
        return tensors


def _match_ranks(a: _Side, b: _Side, rows_a: Sequence[int], rows_b: Sequence[int]) -> list[Pair]:
    """The tensors of both sides in pairs; empty if the numbers of tensors differ."""
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
    """The record of each rank with its counterpart; only the first, if copies are equal on each side."""
    groups: dict[object, list[tuple[int, int]]] = {}
    for row_a, row_b in rows:
        groups.setdefault((a.part(row_a), b.part(row_b)), []).append((row_a, row_b))
    pairs: list[Pair] = []
    for copies in groups.values():
        num_a, num_b = len({a.bits[row] for row, _ in copies}), len({b.bits[row] for _, row in copies})
        compared, num_copies = (copies[:1], len(copies)) if (num_a, num_b) == (1, 1) else (copies, 1)
        pairs += [
            (
                Parts(rows=(row_a,), copies=num_copies, has_differing_copies=num_a > 1),
                Parts(rows=(row_b,), copies=num_copies, has_differing_copies=num_b > 1),
            )
            for row_a, row_b in compared
        ]
    return pairs
