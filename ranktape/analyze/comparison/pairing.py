"""Reads what is compared with what: in which field the two sides differ, and what must then be the same.

A side is a selection of records. A pairing names the field in which the sides differ, and what it is on each; a record
of the one side belongs to those of the other that agree with it in every other field of the identity. Some fields
follow from others, and are matched in their own way:

    operation   `grad_weight` is matched with `weight`: a leading `grad_` is left out. The phase follows: what goes
                into a module forward is `pre`, its gradient is `post`.
    phase       what goes in is matched with what comes out: `input`, `query`, `key` and `value` with `output`, and
                `grad_output` with `grad_input`, `grad_query`, `grad_key` and `grad_value`; other tensors with those of
                their own name. Weights, biases and their gradients do not flow, and are left out.
    layer_idx   the number of the layer is left out of the module's path: `layers.3.mlp` is `layers.*.mlp`.
    module      layer_type and component follow; and layer_idx, where each side is of one layer.
    layer_type  component follows; and the module and layer_idx, where the sides have none in common, and the call,
                where they have others. Each of one side is compared with each of the other. So for component.

Kinds of layers have other tensors, too. Where layer_type, component or module are paired and one side alone has a
`query`, `key` or `value`, these are matched with the `input` of the other, and so are their gradients; where one side
alone has weights and biases, they are left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ranktape.analyze.identity import role_of
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Records
from ranktape.storage.query.filters import parse_filter
from ranktape.storage.records.records import nothing_matches

MATCHED = (
    "iteration",
    "microbatch",
    "call",
    "mode",
    "module",
    "layer_type",
    "layer_idx",
    "operation",
    "phase",
    "component",
    "quant_type",
    "tensor_name",
)
"""The fields in which two records of one pair agree, unless they are paired or follow; ranks come after them."""

PAIRED = (*MATCHED, "rank", "attempt")
"""The fields in which two sides may differ."""

ANY = "*"
"""What a side says of a field that may be anything there, a number too."""

_SAME_TENSOR = frozenset({"iteration", "microbatch", "call", "mode", "quant_type", "rank", "attempt"})
"""Fields that do not say which tensor of the model it is: where sides differ in them alone, they can diverge."""

_FOLLOWS = {
    "operation": ("phase",),
    "module": ("layer_type", "component"),
    "layer_type": ("component",),
    "component": ("layer_type",),
}
"""Fields that are not matched where another one is paired."""

_KIND = frozenset({"layer_type", "component"})
"""Fields that say of which kind a layer is."""

_ENTERING = frozenset({"query", "key", "value"})
_FLOWING = frozenset({"input", *_ENTERING, "output"})
_STANDING = frozenset({"weight", "wide_weight", "bias"})

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedField:
    """A field in which the two sides differ."""

    field: str
    """Its name."""
    left: str
    """What it is on the first side, as a filter: a value, a glob, a range; `*` for anything."""
    right: str
    """What it is on the second side."""

    def __str__(self) -> str:
        return f"{self.field}={self.left}:{self.right}"


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

    def sides(self, a: Records, b: Records) -> tuple[Records, Records]:
        """The records of either side."""
        left = self._side(a, [(paired.field, paired.left) for paired in self.fields])
        right = self._side(b, [(paired.field, paired.right) for paired in self.fields])
        if self._has_other_tensors and len({bool(_standing(side)) for side in (left, right)}) > 1:
            return _without_standing(left), _without_standing(right)
        return left, right

    def _side(self, records: Records, filters: Sequence[tuple[str, str]]) -> Records:
        chosen = records
        for field, text in filters:
            if text == ANY:
                continue
            found = chosen.fitting(parse_filter(field, text))
            if not len(found):
                raise nothing_matches(chosen, field, text)
            chosen = found
        if self.neighbours:
            chosen = chosen.where("layer_idx >= 0")
        if not len(chosen):
            raise NoRecordsError("no record is of a layer: each has layer_idx -1")
        return _without_standing(chosen) if "phase" in self.names and "tensor_name" not in self.names else chosen

    def keys(self, a: Records, b: Records) -> tuple[list[Key], list[Key]]:
        """For each record of the two sides what must be the same in both records of a pair."""
        unmatched = self._unmatched(a, b)
        matched = [field for field in MATCHED if field not in unmatched]
        renamed = self._renamed(a, b)
        return self._keys(a, matched, renamed), self._keys(b, matched, renamed)

    def members(self, records: Records) -> list[Key]:
        """For each record what tells it from others with its key: everything else, but for the rank, unless paired."""
        fields = [*(field for field in PAIRED if field != "rank"), *(["rank"] if "rank" in self.names else [])]
        return list(zip(*(records.column(field).tolist() for field in fields), strict=True))

    def _unmatched(self, a: Records, b: Records) -> set[str]:
        unmatched = set(self.names)
        for name in self.names:
            unmatched |= set(_FOLLOWS.get(name, ()))
        if self.is_of_kinds:
            unmatched |= {field for field in ("module", "layer_idx") if not _different(a, field) & _different(b, field)}
            unmatched |= {"call"} if _different(a, "call") != _different(b, "call") else set()
        if "module" in self.names and all(len(set(side.column("layer_idx").tolist())) == 1 for side in (a, b)):
            unmatched.add("layer_idx")
        return unmatched

    def _keys(self, records: Records, matched: Sequence[str], renamed: Callable[[str], str]) -> list[Key]:
        columns = {field: records.column(field).tolist() for field in matched}
        if "module" in columns and "layer_idx" in self.names:
            layers = records.column("layer_idx").tolist()
            columns["module"] = [role_of(*both) for both in zip(columns["module"], layers, strict=True)]
        if "tensor_name" in columns:
            columns["tensor_name"] = [renamed(name) for name in columns["tensor_name"]]
        return list(zip(*columns.values(), strict=True)) if columns else [()] * len(records)

    @property
    def _has_other_tensors(self) -> bool:
        """Whether one side may have tensors of other names than the other."""
        return bool(self.names & (_KIND | {"module"})) and "tensor_name" not in self.names

    def _renamed(self, a: Records, b: Records) -> Callable[[str], str]:
        """The name of a tensor, as it is matched."""
        if "phase" in self.names:
            return lambda name: "output" if _bare(name) in _FLOWING else name
        enter = [{_bare(name) for name in _different(side, "tensor_name")} & _ENTERING for side in (a, b)]
        is_one_sided = self._has_other_tensors and bool(enter[0]) != bool(enter[1])

        def renamed(name: str) -> str:
            bare = _bare(name)
            entering = "input" if is_one_sided and bare in _ENTERING else bare
            return entering if "operation" in self.names else name.removesuffix(bare) + entering

        return renamed


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
    return PairedField(field=name, left=left, right=right)


def _bare(name: str) -> str:
    return name.removeprefix("grad_")


def _standing(records: Records) -> list[str]:
    return [name for name in _different(records, "tensor_name") if _bare(name) in _STANDING]


def _without_standing(records: Records) -> Records:
    """The records of what goes into modules and comes out of them."""
    names = sorted(_different(records, "tensor_name").difference(_standing(records)))
    if not names:
        raise NoRecordsError(
            "no record is of what goes into a module or comes out of it: weights and their gradients do not"
        )
    return records.select(tensor_name=names)


def _different(records: Records, field: str) -> set[Any]:
    return set(records.column(field).tolist())
