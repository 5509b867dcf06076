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
    found: list[int] = numbers[chosen.mask(lambda _: numbers, count)].tolist()
    return found


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
        return frozenset({one.field for one in self.filters} | set(self.where.names if self.where else ()))

    def texts(self, field: str) -> tuple[str, ...]:
        """The comma-separated parts of a field's filters; empty if it has none."""
        return tuple(str(part) for one in self.filters if one.field == field for part in one.parts)

    def can_hold(self, source: ColumnSource, *, num_rows: int, known: Collection[str] | None = None) -> Mask:
        """The rows that the rule can match, given the columns of the known fields, by default all, in `source`."""
        known = self.names if known is None else known
        found = np.ones(num_rows, dtype=np.bool_)
        for one in self.filters:
            if one.field in known:
                found &= one.mask(source, num_rows)
        if self.where is not None:
            found &= self.where.can_hold(source, known=known, num_rows=num_rows)
        return found


def read_rules(select: Any, *, keep: str, outputs: Sequence[str]) -> tuple[CaptureRule, ...]:
    """The rules; the first that matches a tensor decides. There is at least one.

    Args:
        select: The rules, as texts and mappings.
        keep: What is kept if a rule does not specify it.
        outputs: Layer types that are always captured. If a rule of `select` can match one, it alone decides.

    Raises:
        UsageError: a rule is not valid, or can never apply.
    """
    rules = [_rule(words, keep=keep, number=number) for number, words in enumerate(rule_words(select), start=1)]
    for number, rule in enumerate(rules[:-1], start=1):
        if not (rule.filters or rule.where):
            raise UsageError(f"--select, rule {number + 1} is never asked: rule {number} fits everything, put it last")
    if rules and outputs:
        column = StringColumn.of(outputs)
        named = np.zeros(len(outputs), dtype=np.bool_)
        for rule in rules:
            named |= rule.can_hold(lambda _: column, known={"layer_type"}, num_rows=len(outputs))
        if not named.all():
            others = [kind for kind, is_named in zip(outputs, named, strict=True) if not is_named]
            rules.append(_rule({"layer_type": others}, keep=keep, number=0))
    return tuple(rules) or (CaptureRule(number=0, filters=(), where=None, samples=None, keep=keep),)


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
                f"write a rule as in \"layer_type=attention where='call > 0'\""
            )
        start = match.end()
        if match["end"] is not None:
            break
        if match["next"] is not None:
            rules.append({})
            continue
        name = match["name"].replace("-", "_")
        if name in rules[-1]:
            raise UsageError(f"--select says {name} twice in one rule: separate alternatives with commas")
        quoted = match["single"] if match["single"] is not None else match["double"]
        rules[-1][name] = match["bare"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
    if not all(rules):
        raise UsageError(
            f"--select {text[:_CONTEXT]!r} has a rule that says nothing: write NAME=VALUE, or leave it out"
        )
    return rules


def rule_words(given: Any) -> list[dict[str, Any]]:
    """The names and values of each rule."""
    rules: list[dict[str, Any]] = []
    for rule in (given if isinstance(given, list | tuple) else (given,)) if is_given(given) else ():
        if isinstance(rule, str):
            rules += parse_rules(rule)
            continue
        if not isinstance(rule, Mapping):
            raise UsageError(f"select: {shown(rule)} is no rule: give a mapping of fields, or a text for --select")
        number = len(rules) + 1
        if not rule:
            raise UsageError(f"select: rule {number} is empty: give it a field, samples or keep")
        rules.append({})
        for written, value in rule.items():
            name = str(written).replace("-", "_")
            if name in rules[-1]:
                raise UsageError(f"select: rule {number} says {name} twice, by two of its names: give it once")
            rules[-1][name] = value
    return rules


_EXAMPLES = {
    "layers": "all, or numbers such as 0,30,61 or 0-3",
    "samples": "numbers such as 0, 0-3 or 0:8:2",
}


def read_numbers(name: str, value: Any) -> Numbers:
    """The numbers that a value of the setting `layers` or `samples` selects."""
    if value is True or value == "all":
        return Numbers(filter=None)
    if value is False or not is_given(value):
        return Numbers(filter=Filter(field=name, alternatives=()))
    chosen = parse_filter(name, value)
    chosen.mask(lambda _: np.arange(1), 1)  # parses texts, and raises for invalid ones
    if not all(map(_counts_from_zero, chosen.parts)):
        raise UsageError(f"--{name} {shown(value)} is not allowed: give {_EXAMPLES[name]}, counted from 0")
    return Numbers(filter=chosen)


_FROM_ZERO = re.compile(r"\d+|\d+-\d+|\d*:\d*(?::\d*)?")


def _counts_from_zero(alternative: Any) -> bool:
    if isinstance(alternative, NumberRange):
        return min(alternative.first or 0, 0 if alternative.last is None else alternative.last) >= 0
    if isinstance(alternative, str):
        return _FROM_ZERO.fullmatch(alternative) is not None
    return isinstance(alternative, int) and not isinstance(alternative, bool) and alternative >= 0


def _rule(words: Mapping[str, Any], *, keep: str, number: int) -> CaptureRule:
    # For a field, None selects missing values, as in a query. For other names, it means 'not given'.
    given = {name: value for name, value in words.items() if value is not None or name in FIELDS}
    where = given.pop("where", None)
    samples = given.pop("samples", None)
    kept = given.pop("keep", keep)
    try:
        if kept not in KEEPS:
            raise UsageError(f"keep {shown(kept)} is not allowed: give one of {', '.join(KEEPS)}")
        return CaptureRule(
            number=number,
            filters=tuple(_checked_filter(name, value) for name, value in given.items()),
            where=None if where is None else _checked_where(where),
            samples=None if samples is None else read_numbers("samples", samples),
            keep=str(kept),
        )
    except UsageError as error:
        raise type(error)(f"--select, rule {number}: {error}") from error


def _checked_filter(name: str, value: Any) -> Filter:
    _check_names([name], others=("where", "samples", "keep"))
    found = parse_filter(name, value)
    found.mask(_no_rows, 0)
    for text in found.parts if name in CLOSED else ():
        allowed = CLOSED[name]
        if not any(map(glob(str(text)), allowed)):
            hint = nearest(str(text), allowed, otherwise="give one of", cutoff=0.6)
            raise UsageError(f"{name} {text!r:.60} is not allowed: {hint}")
    return found


def _checked_where(text: Any) -> Where:
    if not isinstance(text, str):
        raise UsageError(f"where {shown(text)} is no expression: give a text such as \"layer_type == 'linear'\"")
    found = parse_where(text)
    _check_names(found.names, others=())
    found.mask(_no_rows)
    return found


def _check_names(names: Sequence[str], *, others: Sequence[str]) -> None:
    for name in names:
        if name in {"iteration", "every"}:
            raise UnknownFieldError(f"{name} is the same for all rules: choose iterations by --start-at and --every")
        if name in FIELDS:
            continue
        from ranktape.storage.format.catalogue import COLUMNS

        if name in COLUMNS:
            raise UnknownFieldError(
                f"{name} is not known yet when a tensor is captured: choose by {', '.join(FIELDS)}, "
                f"and by {name} when the run is read"
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
