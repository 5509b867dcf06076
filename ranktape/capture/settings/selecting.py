"""Decides whether each tensor is captured and what is kept of it, and reports what a selection did not match.

The rules are evaluated by the code that selects records when a run is read, on columns of one row. The decision is
cached for all tensors that the rules cannot distinguish.

Most fields of a record are open: a tensor may have any name. A mistyped name is therefore no error. It is reported
after the first iteration, when the existing names are known, with the nearest of them.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.capture.settings.rules import TEXT_FIELDS, CaptureRule
from ranktape.storage.query.columns import Column, StringColumn
from ranktape.storage.query.filters import Filter

if TYPE_CHECKING:
    from ranktape.capture.passes.tracker import Call
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.source import Source, TensorRole


OF_SITES = ("module", "layer_type", "layer_stack", "layer_idx", "component", "operation", "phase", "tensor_name")
"""The fields of a site, which are the same in every iteration."""

_OF_TENSORS = ("dtype", "compute_dtype", "quant_type")
"""The fields of single tensors that are mostly the same in every iteration."""

_MAX_LISTED = 8


@dataclass(slots=True)
class Sightings:
    """The sites and values that a capture has seen on this rank, whether it took them or not."""

    rank: int
    """Global rank."""
    sites: dict[tuple[Source, TensorRole, str], None] = field(default_factory=dict)
    """Sources and roles, with the suffix of the tensor's name."""
    values: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in _OF_TENSORS})
    """The values of the fields of single tensors."""

    def column(self, name: str, /) -> Column:
        """A field of all sites, or the distinct values of a field of single tensors."""
        if name == "rank":
            return np.array([self.rank])
        if name in self.values:
            return StringColumn.of(sorted(self.values[name]))
        values = [_site_values(*site)[name] for site in self.sites]
        return StringColumn.of(map(str, values)) if name in TEXT_FIELDS else np.array(values, dtype=np.int64)


def find_unmatched(options: CaptureOptions, sightings: Sightings, *, paths: Collection[str]) -> Iterator[str]:
    """A message for each alternative of a filter, and each rule, that matched nothing.

    Args:
        options: The settings of the capture.
        sightings: What the capture has seen.
        paths: The paths of the model's modules, for hints.
    """
    if not sightings.sites:
        return  # nothing has run yet, as in a capture of an evaluation that has not started
    for rule in options.rules:
        if not rule.number:
            continue
        messages = [
            f"{each.field} {text}" for each in rule.filters for text in _unmatched_parts(each, sightings, paths=paths)
        ]
        if not messages and not rule.can_hold(sightings.column, known=OF_SITES, num_rows=len(sightings.sites)).any():
            messages = [f"matches nothing{_IN_FIRST}: 'ranktape analyze ls' shows what a capture without it records"]
        yield from (f"--select, rule {rule.number}: {message}" for message in messages)


_IN_FIRST = " of the first iteration"


def _unmatched_parts(selected: Filter, sightings: Sightings, *, paths: Collection[str]) -> Iterator[str]:
    if selected.field not in (*OF_SITES, *_OF_TENSORS, "rank"):
        return
    column = sightings.column(selected.field)
    for part in selected.parts:
        if not Filter(field=selected.field, alternatives=(part,)).mask(lambda _: column, len(column)).any():
            hint = _hint(str(part), column, paths=paths if selected.field == "module" else ())
            yield f"{f'{part!r:.60}' if isinstance(part, str) else part} matches nothing{_IN_FIRST}{hint}"


def _hint(value: str, column: Column, *, paths: Collection[str]) -> str:
    """The part of a message that suggests a value, or lists those seen; empty if there are too many."""
    if not isinstance(column, StringColumn):
        return f" (seen: {column.min()} to {column.max()})" if len(column) > 1 else ""
    names = sorted({*filter(None, column.table), *paths})
    if near := difflib.get_close_matches(value, names, 1, 0.5):
        return f": did you mean {near[0]}?"
    return f" (seen: {', '.join(names)})" if 0 < len(names) <= _MAX_LISTED else ""


def _site_values(source: Source, role: TensorRole, suffix: str) -> dict[str, Any]:
    """The fields of a site, with a suffix added to the tensor's name."""
    tensor_name = role.tensor_name + suffix
    return {**source._asdict(), "operation": str(role.operation), "phase": role.phase, "tensor_name": tensor_name}


MAX_DECISIONS = 1 << 17
"""Largest number of cached decisions, which limits the memory if there are always new shapes and calls."""

_ALWAYS_KNOWN = frozenset({*OF_SITES, "rank"})
"""The fields that are known before a module is called."""

_OF_CALL = ("microbatch", "compute_dtype", "batch_size", "mode")
"""The fields that are known when a module is called. `call` is not: a second backward pass increments it."""

_call_values = operator.attrgetter(*_OF_CALL)

_OF_TENSOR = (*_OF_CALL, "call", "quant_type", "dtype", "shape", "nbytes", "numel")
"""The fields of calls and tensors that are known when a tensor is seen."""

_SUFFIXES = ("", "_codes", "_scales")
"""The possible suffixes of a tensor's name. Quantised operands are recorded as codes and scales."""


class Selecting:
    """The rules of a capture on one rank."""

    def __init__(self, options: CaptureOptions, *, rank: int, is_requested: bool = False) -> None:
        """Take the rules. For an iteration that was requested during the training, no sightings are collected."""
        self._rules = options.rules
        self._rank = rank
        names = frozenset[str]().union(*(rule.names for rule in self._rules))
        self.only_rule = None if names else self._rules[0]
        """The rule for all tensors, if no rule selects by a field; otherwise None."""
        self._indices = [index for index, name in enumerate(_OF_TENSOR) if name in names]
        """The indices of the fields in `_OF_TENSOR` by which a rule selects."""
        of_call = [name for name in _OF_CALL if name in names]
        self._selected_of_call = operator.attrgetter(*of_call) if of_call else None
        self._is_by_name = "tensor_name" in names
        self.sightings: Sightings | None = Sightings(rank) if names and not is_requested else None
        """The sites and values seen so far; None if they are not, or no longer, needed."""
        self._decisions: dict[Any, int] = {}
        self._possible: dict[Any, bool] = {}

    @property
    def depends_on_call(self) -> bool:
        """Whether the decision depends on the call: its microbatch, compute dtype, batch size or mode."""
        return self._selected_of_call is not None

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
    ) -> CaptureRule | None:
        """The rule that decides what is kept of a tensor, given the suffix of its name; None if it is not captured."""
        if self.only_rule is not None:
            return self.only_rule
        values = (*_call_values(call), call.index, quant_type, dtype, shape, nbytes, math.prod(shape))
        key = (source, role, suffix, *[values[index] for index in self._indices])
        number = self._decisions.get(key)
        if number is None:
            number = self._find(source, role, values, suffix=suffix)
            if len(self._decisions) >= MAX_DECISIONS:
                self._decisions.clear()
            self._decisions[key] = number
        return self._rules[number] if number >= 0 else None

    def may_take(self, source: Source, role: TensorRole, call: Call | None = None) -> bool:
        """Whether a tensor of that source, role and call can be captured.

        This is called before the tensor is available, so that its unknown fields may have any value.
        """
        if self.only_rule is not None:
            return True
        # The key has only fields by which a rule selects, so that most decisions are made once for all microbatches.
        selected = self._selected_of_call
        key = (source, role, call is None, None if call is None or selected is None else selected(call))
        is_possible = self._possible.get(key)
        if is_possible is None:
            if len(self._possible) >= MAX_DECISIONS:
                self._possible.clear()
            is_possible = self._possible[key] = self._can_take(source, role, call)
        return is_possible

    def _find(self, source: Source, role: TensorRole, of_tensor: Sequence[Any], *, suffix: str) -> int:
        values = self._values(source, role, suffix) | dict(zip(_OF_TENSOR, of_tensor, strict=True))
        if self.sightings is not None:
            self.sightings.sites[source, role, suffix] = None
            for name, texts in self.sightings.values.items():
                texts.add(values[name])
        values["shape"] = "[" + ",".join(map(str, values["shape"])) + "]"
        column = _row(values)
        return next((number for number, rule in enumerate(self._rules) if rule.can_hold(column, num_rows=1)[0]), -1)

    def _can_take(self, source: Source, role: TensorRole, call: Call | None) -> bool:
        if self.sightings is not None:
            self.sightings.sites[source, role, ""] = None
        of_call = {} if call is None else dict(zip(_OF_CALL, _call_values(call), strict=True))
        known = _ALWAYS_KNOWN.union(of_call)
        suffixes = _SUFFIXES if self._is_by_name else ("",)
        columns = (_row(self._values(source, role, suffix) | of_call) for suffix in suffixes)
        return any(rule.can_hold(column, known=known, num_rows=1)[0] for column in columns for rule in self._rules)

    def _values(self, source: Source, role: TensorRole, suffix: str) -> dict[str, Any]:
        return {**_site_values(source, role, suffix), "rank": self._rank}


def _row(values: Mapping[str, Any]) -> Callable[[str], Column]:
    """The values as columns of one row, with the types of a catalogue's columns."""

    def column(name: str, /) -> Column:
        value = values[name]
        if name in TEXT_FIELDS:
            return StringColumn.of([str(value)])
        if name == "batch_size":
            return np.array([np.nan if value is None else value], dtype=np.float64)
        return np.array([value], dtype=np.int64)

    return column
