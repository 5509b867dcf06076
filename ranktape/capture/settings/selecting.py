"""Does the capture take this tensor now, and what is kept of it?

The answer follows from the rules by the same code that selects records when a run is read, on columns of one row. It is
found once for tensors that the rules cannot tell apart, and looked up from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.capture.settings.cadence import cadence_of
from ranktape.capture.settings.rules import TEXT_FIELDS, read_selection
from ranktape.capture.settings.unmatched import OF_SITES, Sightings
from ranktape.storage.selection.columns import StringColumn

if TYPE_CHECKING:
    from ranktape.capture.passes.tracker import Call
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.settings.rules import Numbers, Rule
    from ranktape.capture.source import Source, TensorRole
    from ranktape.storage.selection.columns import Column

MAX_ANSWERS = 1 << 17
"""Answers that are kept: shapes and calls without end must not fill the memory."""

_ALWAYS_KNOWN = frozenset({*OF_SITES, "rank", "iteration"})
"""What is known before a tensor is seen."""

_SUFFIXES = ("", "_codes", "_scales")
"""What may follow the name of a tensor: quantised operands are recorded as codes and scales."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What is kept of a tensor that is taken; there is one for each rule."""

    keep: str
    """`values`, `histogram` or `statistics`."""
    samples: Numbers | None
    """The samples that are kept; None for all."""
    _places: dict[int, list[int]] = field(default_factory=dict, compare=False, repr=False)

    def places(self, num_samples: int) -> list[int]:
        """The places in the batch of the samples that are kept."""
        found = self._places.get(num_samples)
        if found is None:
            found = list(range(num_samples)) if self.samples is None else self.samples.below(num_samples)
            self._places[num_samples] = found
        return found


class Selecting:
    """The rules of a capture on one rank, in the iteration that is running."""

    def __init__(self, options: CaptureOptions, *, rank: int) -> None:
        """Read the rules.

        Raises:
            UsageError: they are none.
        """
        self._general, self._rules = read_selection(options)
        self._rank = rank
        self._decisions = [Decision(keep=rule.keep, samples=rule.samples) for rule in self._rules]
        self.cadence = cadence_of(options)
        names = self._general.names.union(*(rule.names for rule in self._rules))
        self._is_general = not names
        self._getters = [_GETTERS[name] for name in sorted(names & _GETTERS.keys())]
        self._call_getters = [_OF_CALL[name] for name in sorted(names & _OF_CALL.keys())]
        self.asks_for_calls = bool(self._call_getters)
        """Whether it is in the call whether a tensor is taken: its microbatch, dtype, batch or mode."""
        self._is_by_iteration = "iteration" in names
        self._is_by_name = "tensor_name" in names
        self.first = next(iter(self.cadence.following(count=1)), options.start)
        """The first iteration in which a rule is due."""
        self.sightings: Sightings | None = None if self._is_general else Sightings(rank)
        """What there was to choose from so far; None once nobody will ask."""
        self._answers: dict[Any, int] = {}
        self._possible: dict[Any, bool] = {}
        self.begin(options.start)

    def begin(self, iteration: int) -> None:
        """An iteration begins."""
        self._iteration = iteration
        self._due = self.cadence.due(iteration)
        self._possible.clear()
        self.of_all = self._decisions[0] if self._is_general and self._due[0] else None
        """What is kept of every tensor of the iteration, where no rule tells one from another."""
        if self._is_by_iteration:
            self._answers.clear()

    def decide(
        self,
        source: Source,
        role: TensorRole,
        call: Call,
        *,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        quant_type: str,
        suffix: str = "",
    ) -> Decision | None:
        """What is kept of a tensor, whose name may have a suffix; None where it is not taken in this iteration."""
        if self._is_general:
            return self._decisions[0] if self._due[0] else None
        seen = _Seen(call, dtype, shape, nbytes, quant_type)
        key = (source, role, suffix, *[get(seen) for get in self._getters])
        number = self._answers.get(key)
        if number is None:
            number = self._find(source, role, seen, suffix=suffix)
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            self._answers[key] = number
        return self._decisions[number] if number >= 0 and self._due[number] else None

    def may_take(self, source: Source, role: TensorRole, call: Call | None = None) -> bool:
        """Whether a tensor of that source and role, and of that call, can be taken in this iteration.

        Asked before the tensor is seen: what is not known of it may be anything.
        """
        if self._is_general:
            return self._due[0]
        key = (source, role, None if call is None else tuple(get(call) for get in self._call_getters))
        found = self._possible.get(key)
        if found is None:
            found = self._possible[key] = self._can_take(source, role, call)
        return found

    def _find(self, source: Source, role: TensorRole, seen: _Seen, *, suffix: str) -> int:
        values = self._values(source, role, suffix=suffix)
        for name, get in _GETTERS.items():
            values[name] = get(seen)
        if self.sightings is not None:
            self.sightings.sites[source, role, suffix] = None
            for name, texts in self.sightings.values.items():
                texts.add(values[name])
        values["shape"] = "[" + ",".join(map(str, seen.shape)) + "]"
        column = _source_of(values)
        if not _holds(self._general, column):
            return -1
        return next((number for number, rule in enumerate(self._rules) if _holds(rule, column)), -1)

    def _can_take(self, source: Source, role: TensorRole, call: Call | None) -> bool:
        if self.sightings is not None:
            self.sightings.sites[source, role, ""] = None
        known = _ALWAYS_KNOWN if call is None else _ALWAYS_KNOWN | _OF_CALL.keys()
        for suffix in _SUFFIXES if self._is_by_name else ("",):
            values = self._values(source, role, suffix=suffix)
            if call is not None:
                values |= {name: get(call) for name, get in _OF_CALL.items()}
            if self._can_take_part(_source_of(values), known=known):
                return True
        return False

    def _can_take_part(self, column: Callable[[str], Column], *, known: frozenset[str]) -> bool:
        if not _can_hold(self._general, column, known=known):
            return False
        for rule, is_due in zip(self._rules, self._due, strict=True):
            if is_due and _can_hold(rule, column, known=known):
                return True
            if rule.names <= known and _holds(rule, column):
                return False  # it decides, and is not due
        return False

    def _values(self, source: Source, role: TensorRole, *, suffix: str) -> dict[str, Any]:
        return {
            "module": source.module,
            "layer_type": source.layer_type,
            "layer_idx": source.layer_idx,
            "layer_stack": source.layer_stack,
            "component": source.component,
            "operation": str(role.operation),
            "phase": role.phase,
            "tensor_name": role.tensor_name + suffix,
            "rank": self._rank,
            "iteration": self._iteration,
        }


@dataclass(slots=True)
class _Seen:
    """What is known of a tensor only when it is there."""

    call: Call
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    quant_type: str


_OF_CALL: Mapping[str, Callable[[Call], Any]] = {
    "microbatch": lambda call: call.microbatch,
    "compute_dtype": lambda call: call.compute_dtype,
    "batch_size": lambda call: call.batch_size,
    "mode": lambda call: str(call.mode),
}
"""What is known when a module is called; not `call`, which is counted on where two backward passes bring a gradient."""


def _of_seen(get: Callable[[Call], Any]) -> Callable[[_Seen], Any]:
    return lambda seen: get(seen.call)


_GETTERS: Mapping[str, Callable[[_Seen], Any]] = {
    **{name: _of_seen(get) for name, get in _OF_CALL.items()},
    "call": lambda seen: seen.call.index,
    "quant_type": lambda seen: seen.quant_type,
    "dtype": lambda seen: seen.dtype,
    "shape": lambda seen: seen.shape,
    "numel": lambda seen: math.prod(seen.shape),
    "nbytes": lambda seen: seen.nbytes,
}


def _source_of(values: Mapping[str, Any]) -> Callable[[str], Column]:
    """The values as columns of one row, of the types that a catalogue gives."""

    def column(name: str, /) -> Column:
        value = values[name]
        if name in TEXT_FIELDS:
            return StringColumn(codes=np.zeros(1, dtype=np.int64), table=[value])
        if name == "batch_size":
            return np.array([np.nan if value is None else value], dtype=np.float64)
        return np.array([value], dtype=np.int64)

    return column


def _holds(rule: Rule, column: Callable[[str], Column]) -> bool:
    return all(one.mask(column, 1)[0] for one in rule.filters) and (
        rule.where is None or bool(rule.where.mask(column, 1)[0])
    )


def _can_hold(rule: Rule, column: Callable[[str], Column], *, known: frozenset[str]) -> bool:
    return bool(rule.can_hold(column, known=known, num_rows=1)[0])
