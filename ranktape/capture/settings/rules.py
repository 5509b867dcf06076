"""The rules by which a capture selects tensors.

They are checked once, before the training starts. The filters are those of queries (`ranktape.storage.query`), on the
fields that are known when a tensor is captured. The grammar of a text such as `layer_type=attention where="call > 0"`:

    rules  = rule { ";" rule }
    rule   = item { white-space item }
    item   = name "=" value
    value  = bare | quoted
    bare   = characters other than white-space, quotes and ";"
    quoted = characters in single or double quotes, with a backslash before a quote or a backslash

Names are a record's fields, `where`, `samples` and `keep`; a hyphen in a name is an underscore. The text is parsed by
the regular expression below and never executed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ranktape.capture.settings.setting import is_given, shown
from ranktape.errors import UnknownFieldError, UsageError, nearest
from ranktape.fields import FieldKind, field_names
from ranktape.storage.format.record_info import Keep, Mode, Operation
from ranktape.storage.query.columns import Column, ColumnSource, Mask, NumberRange, StringColumn, glob
from ranktape.storage.query.filters import Filter, parse_filter
from ranktape.storage.query.where import Where, parse_where

_TEXT_KINDS = (FieldKind.TEXT, FieldKind.JSON)
TEXT_FIELDS = field_names(lambda field: field.is_early and field.kind in _TEXT_KINDS)
NUMBER_FIELDS = (
    *field_names(lambda field: field.is_early and field.kind not in _TEXT_KINDS and field.name != "iteration"),
    "numel",
)
FIELDS = (*TEXT_FIELDS, *NUMBER_FIELDS)
"""The fields that are known when a tensor is captured."""

CLOSED = {"operation": tuple(map(str, Operation)), "mode": tuple(map(str, Mode))}
"""The allowed values of the fields that have a fixed set of them."""

KEEPS = tuple(map(str, Keep))

MAX_LENGTH = 100_000
"""Longest text, in characters. The rules of all `--select` share one environment variable; Linux allows 131,072."""

_ITEM = re.compile(
    r"""\s*(?:
      (?P<end>\Z)
    | (?P<next>;)
    | (?P<name>[A-Za-z][\w.-]*)=(?:'(?P<single>(?:[^'\\]|\\.)*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s'";]+))
      (?=[\s;]|\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)

_CONTEXT = 30
"""Number of characters that a message shows from the position of a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A set of whole numbers from 0 on."""

    filter: Filter | None
    """The filter that selects them; None for all numbers."""

    def holds(self, number: int) -> bool:
        """Whether the set contains a number."""
        return self.filter is None or bool(self.filter.mask(lambda _: np.array([number]), 1)[0])

    def below(self, count: int) -> list[int]:
        """The numbers below `count`, ascending."""
        return list(range(count)) if self.filter is None else _below(self.filter, count)


@functools.lru_cache(maxsize=1 << 10)
def _below(chosen: Filter, count: int) -> list[int]:
    numbers = np.arange(count)
    selected: list[int] = numbers[chosen.mask(lambda _: numbers, count)].tolist()
    return selected


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaptureRule:
    """The tensors that a rule selects, and what is kept of them. Rules are compared by identity."""

    number: int
    """Number of the rule in `select`, from 1; 0 for a rule that follows from other settings."""
    filters: tuple[Filter, ...]
    """The filters, all of which a tensor has to match."""
    where: Where | None
    """An expression that has to be true as well; None if the rule has none."""
    samples: Numbers | None
    """The samples that are kept; None for all."""
    keep: str
    """`values`, `histogram` or `statistics`."""

    @property
    def names(self) -> frozenset[str]:
        """The fields by which the rule selects."""
        return frozenset({each.field for each in self.filters} | set(self.where.names if self.where else ()))

    @property
    def modes(self) -> list[str]:
        """The modes of the passes whose tensors the rule can match."""
        modes = CLOSED["mode"]
        column = StringColumn.of(modes)
        matches = self.can_hold(lambda _: column, known={"mode"}, num_rows=len(modes))
        return [mode for mode, is_match in zip(modes, matches, strict=True) if is_match]

    def texts(self, field: str) -> tuple[str, ...]:
        """The comma-separated parts of a field's filters; empty if it has none."""
        return tuple(str(part) for each in self.filters if each.field == field for part in each.parts)

    def can_hold(self, source: ColumnSource, *, num_rows: int, known: Collection[str] | None = None) -> Mask:
        """The rows that the rule can match, given the columns of the known fields, by default all, in `source`."""
        known = self.names if known is None else known
        mask = np.ones(num_rows, dtype=np.bool_)
        for each in self.filters:
            if each.field in known:
                mask &= each.mask(source, num_rows)
        return mask if self.where is None else mask & self.where.can_hold(source, known=known, num_rows=num_rows)


def read_rules(select: Any, *, keep: str, outputs: Sequence[str]) -> tuple[CaptureRule, ...]:
    """The rules; the first that matches a tensor decides. There is at least one.

    Args:
        select: The rules, as texts and mappings.
        keep: What is kept if a rule does not specify it.
        outputs: Layer types that are always captured. If a rule of `select` can match one, it alone decides.

    Raises:
        UsageError: a rule is not valid, or can never apply.
    """
    rules = [_rule(items, keep=keep, number=number) for number, items in enumerate(_rule_items(select), start=1)]
    for rule in rules:
        label = f"--select, rule {rule.number}"
        if not (rule.filters or rule.where) and rule is not rules[-1]:
            raise UsageError(f"{label}, matches every tensor, so that the rules after it have no effect: put it last")
        if "mode" in rule.names and not rule.modes:
            raise UsageError(f"{label}, matches neither {' nor '.join(CLOSED['mode'])} mode: change mode or where")
    column = StringColumn.of(outputs)
    masks = [rule.can_hold(lambda _: column, known={"layer_type"}, num_rows=len(outputs)) for rule in rules]
    if masks and (others := [kind for kind, *named in zip(outputs, *masks, strict=True) if not any(named)]):
        rules.append(_rule({"layer_type": others}, keep=keep, number=0))
    return tuple(rules) or (_rule({}, keep=keep, number=0),)


def parse_rules(text: str) -> list[dict[str, str]]:
    """Parse a text into rules, each a mapping from names to texts."""
    if len(text) > MAX_LENGTH:
        raise UsageError(f"--select has {len(text)} characters: give at most {MAX_LENGTH}")
    rules: list[dict[str, str]] = [{}]
    start = 0
    while True:
        match = _ITEM.match(text, start)
        if match is None:
            rest = text[start:].lstrip()
            raise UsageError(
                f"--select: expected NAME=VALUE at character {len(text) - len(rest) + 1}, found {rest[:_CONTEXT]!r}: "
                f"write a rule such as \"layer_type=attention where='call > 0'\""
            )
        start = match.end()
        if match["end"] is not None:
            break
        if match["next"] is not None:
            rules.append({})
            continue
        name = match["name"].replace("-", "_")
        if name in rules[-1]:
            raise UsageError(f"--select has {name} twice in one rule: separate alternatives with commas")
        quoted = match["single"] if match["single"] is not None else match["double"]
        rules[-1][name] = match["bare"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
    if not all(rules):
        raise UsageError(f"--select {text[:_CONTEXT]!r} has an empty rule: write NAME=VALUE, or leave it out")
    return rules


def _rule_items(select: Any) -> list[dict[str, Any]]:
    """The names and values of each rule."""
    rules: list[dict[str, Any]] = []
    for rule in (select if isinstance(select, list | tuple) else (select,)) if is_given(select) else ():
        if isinstance(rule, str):
            rules += parse_rules(rule)
            continue
        if not isinstance(rule, Mapping):
            raise UsageError(f"select: {shown(rule)} is not a rule: give a mapping of fields, or a text for --select")
        number = len(rules) + 1
        if not rule:
            raise UsageError(f"select: rule {number} is empty: give it a field, samples or keep")
        names = [str(name).replace("-", "_") for name in rule]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"select: rule {number} has {repeated[0]} twice, with - and with _: give it once")
        rules.append(dict(zip(names, rule.values(), strict=True)))
    return rules


_EXAMPLES = {"layers": "all, or numbers such as 0,30,61 or 0-3", "samples": "numbers such as 0, 0-3 or 0:8:2"}


def read_numbers(name: str, value: Any) -> Numbers:
    """The numbers that a value of the setting `layers` or `samples` selects."""
    if value is True or value == "all":
        return Numbers(filter=None)
    if value is False or not is_given(value):
        return Numbers(filter=Filter(field=name, alternatives=()))
    chosen = parse_filter(name, value)
    if not all(map(_counts_from_zero, chosen.parts)):
        raise UsageError(f"--{name} {shown(value)} is not allowed: give {_EXAMPLES[name]}, counted from 0")
    chosen.mask(lambda _: np.arange(1), 1)  # raises for a range that ends before it begins
    return Numbers(filter=chosen)


_FROM_ZERO = re.compile(r"\d+|\d+-\d+|\d*:\d*(?::\d*)?")


def _counts_from_zero(alternative: Any) -> bool:
    if isinstance(alternative, NumberRange):
        return min(alternative.first or 0, 0 if alternative.last is None else alternative.last) >= 0
    if isinstance(alternative, str):
        return _FROM_ZERO.fullmatch(alternative) is not None
    return isinstance(alternative, int) and not isinstance(alternative, bool) and alternative >= 0


def _rule(items: Mapping[str, Any], *, keep: str, number: int) -> CaptureRule:
    # For a field, None selects missing values, as in a query. For other names, it means 'not given'.
    fields = {name: value for name, value in items.items() if value is not None or name in FIELDS}
    where, samples, form = fields.pop("where", None), fields.pop("samples", None), fields.pop("keep", keep)
    try:
        if form not in KEEPS:
            raise UsageError(f"keep {shown(form)} is not allowed: give one of {', '.join(KEEPS)}")
        return CaptureRule(
            number=number,
            filters=tuple(_checked_filter(name, value) for name, value in fields.items()),
            where=None if where is None else _checked_where(where),
            samples=None if samples is None else read_numbers("samples", samples),
            keep=str(form),
        )
    except UsageError as error:
        raise type(error)(f"--select, rule {number}: {error}") from error


def _checked_filter(name: str, value: Any) -> Filter:
    _check_names([name], others=("where", "samples", "keep"))
    parsed = parse_filter(name, value)
    parsed.mask(_no_rows, 0)
    for text in parsed.parts if name in CLOSED else ():
        if not any(map(glob(str(text)), CLOSED[name])):
            hint = nearest(str(text), CLOSED[name], otherwise="give one of", cutoff=0.6)
            raise UsageError(f"{name} {text!r:.60} is not allowed: {hint}")
    return parsed


def _checked_where(text: Any) -> Where:
    if not isinstance(text, str):
        raise UsageError(f"where {shown(text)} is not an expression: give a text such as \"layer_type == 'linear'\"")
    parsed = parse_where(text)
    _check_names(parsed.names, others=())
    parsed.mask(_no_rows)
    return parsed


def _check_names(names: Sequence[str], *, others: Sequence[str]) -> None:
    for name in names:
        if name in {"iteration", "every"}:
            raise UnknownFieldError(f"{name} is the same for all rules: choose iterations by --start-at and --every")
        if name in FIELDS:
            continue
        from ranktape.storage.format.catalogue import COLUMNS

        if name in COLUMNS:
            raise UnknownFieldError(
                f"{name} is not known yet when a tensor is captured: select by {', '.join(FIELDS)}, and by {name} when "
                f"the run is read"
            )
        raise UnknownFieldError(f"tensors have no field {name!r:.60}: {nearest(name, (*FIELDS, *others))}")


def _no_rows(name: str, /) -> Column:
    if name in TEXT_FIELDS:
        return StringColumn.of([])
    return np.empty(0, dtype=np.float64 if name == "batch_size" else np.int64)


@functools.lru_cache(maxsize=1 << 16)
def fits(patterns: tuple[str, ...], text: str) -> bool:
    """Whether one of the patterns matches a text."""
    return any(glob(pattern)(text) for pattern in patterns)
