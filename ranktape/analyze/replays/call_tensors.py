"""Puts the tensors of each call of a layer together: its own records, and the weight that it computed with.

The weight is the last that the rank recorded before the call: capture records a weight with its first call of an
iteration, and in a generation with the first of all. Where a layer records what it was given beside what it quantised
(`wide_input` beside `input`), the former is the operand.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ranktape.analyze.identity import SampleName, sample_names
from ranktape.storage import Records
from ranktape.storage.format.record_info import WIDE, Mode, Operation

CALL_FIELDS = (
    "iteration",
    "rank",
    "attempt",
    "microbatch",
    "call",
    "mode",
    "layer_type",
    "layer_stack",
    "layer_idx",
    "module",
    "component",
    "quant_type",
)
"""The fields of records that say which call they are of."""

Key = tuple[Any, ...]
"""The values of `CALL_FIELDS`."""

Rows = Mapping[str, tuple[int, ...]]
"""By the name of a tensor where its records are: one, or the parts that ranks have."""

STANDING = ("weight", "wide_weight", "bias")
"""What is recorded once for several calls."""

CREATE_GRAPH = '"create_graph"'
"""The word in the metadata of gradients that are part of a graph themselves, as JSON."""

OWN_FORWARD = '"own_forward"'
"""The word in the metadata of what a layer's own forward computes an operand from, as JSON."""

_OF_ONE_CALL = frozenset({"iteration", "microbatch", "call", "quant_type"})
"""The fields in which a weight and a call that it serves may differ."""

_PHASES = {"output": "post", "grad_output": "pre", "grad_input": "post", "grad_weight": "post"}
"""The phases that capture gives; that of others is `pre`."""


class CallTensors:
    """The tensors of all calls among some records; nothing is read."""

    def __init__(self, records: Records, *, is_wide: bool = True) -> None:
        """Take records; with `is_wide`, operands are what a layer was given, not what it quantised them to."""
        self.is_wide = is_wide
        self._names: list[str] = records.column("tensor_name").tolist()
        self._keys: list[Key] = list(zip(*(records.column(name).tolist() for name in CALL_FIELDS), strict=True))
        self._counters: list[int] = records.column("counter").tolist()
        self._directions = list(zip(*(records.column(name).tolist() for name in ("operation", "phase")), strict=True))
        self._samples = sample_names(records)
        self._standing: defaultdict[Key, list[int]] = defaultdict(list)
        self._num_calls: Counter[Key] = Counter()
        self._differentiable: set[Key] = set()
        self._found: dict[Key, Rows] = {}
        self.names: dict[Key, dict[str, list[int]]] = {}
        """Of each call, in the order of the records, the rows of its own tensors by their names."""
        self._own_forward: set[int] = set()
        for row, text in enumerate(records.column("metadata").tolist()):
            if CREATE_GRAPH in text:
                self._differentiable.add(_without(self._keys[row], {"call"}))
            if OWN_FORWARD in text:
                self._own_forward.add(row)
        for row, (key, name) in enumerate(zip(self._keys, self._names, strict=True)):
            self.names.setdefault(key, {}).setdefault(name, []).append(row)
            self._num_calls[name, *_without(key, {"call"})] += 1
            if name in STANDING:
                self._standing[name, *_without(key, _OF_ONE_CALL)].append(row)

    def key(self, row: int) -> Key:
        """The call that a record is of."""
        return self._keys[row]

    def num_calls(self, key: Key, name: str) -> int:
        """How many calls of the layer in that microbatch have such a tensor."""
        return self._num_calls[name, *_without(key, {"call"})]

    def is_differentiable(self, key: Key) -> bool:
        """Whether gradients of the layer in that microbatch came of a backward pass that is part of a graph itself."""
        return _without(key, {"call"}) in self._differentiable

    def of(self, key: Key) -> Rows:
        """The tensors of a call by name, with its weight and bias."""
        if key not in self._found:
            own = {name: (self._usual(name, rows)[0],) for name, rows in self.names.get(key, {}).items()}
            forward = [self._counters[row] for name, (row,) in own.items() if not name.startswith("grad_")]
            for name in STANDING:
                known = self._standing.get((name, *_without(key, _OF_ONE_CALL)), [])
                row = None if name in own else self._before(known, key, max(forward, default=math.inf))
                if row is not None:
                    own[name] = (row,)
            # A forward of its own may compute operands that no quantised form of these are: merged adapters.
            others = {name for name, (row,) in own.items() if name.startswith(WIDE) and row in self._own_forward}
            own = {name: rows for name, rows in own.items() if name not in others}
            wide = {name.removeprefix(WIDE): rows for name, rows in own.items() if name.startswith(WIDE)}
            self._found[key] = own | (wide if self.is_wide else {})
        return self._found[key]

    def sample(self, key: Key) -> SampleName | None:
        """The sample that all of a call's own tensors are of; None where there are several."""
        names = [self._samples[row] for name, rows in self.names[key].items() if name not in STANDING for row in rows]
        found = {name for several in names for name in several}
        return found.pop() if len(found) == 1 else None

    def _usual(self, name: str, rows: list[int]) -> list[int]:
        """Of several records of one name those that capture makes, if there are any."""
        operation = Operation.BACKWARD if name.startswith("grad_") else Operation.FORWARD
        direction = operation.value, _PHASES.get(name, "pre")
        return [row for row in rows if self._directions[row] == direction] or rows

    def _before(self, known: Sequence[int], key: Key, last: float) -> int | None:
        """The last weight that was recorded before; in a training, of the same iteration."""
        iteration, mode = (key[CALL_FIELDS.index(name)] for name in ("iteration", "mode"))
        same = [row for row in known if self._keys[row][0] == iteration]
        if before := [row for row in same if self._counters[row] <= last]:
            return before[-1]
        earlier = [] if mode == Mode.TRAIN else [row for row in known if self._keys[row][0] < iteration]
        return earlier[-1] if earlier else next(iter(same), None)


def _without(key: Key, fields: Collection[str]) -> Key:
    return tuple(value for name, value in zip(CALL_FIELDS, key, strict=True) if name not in fields)
