"""Reads expressions such as `layer_type == 'attention' and overflow.ratio > 0`.

    expression  = term { "or" term }
    term        = factor { "and" factor }
    factor      = "not" factor | "(" expression ")" | condition
    condition   = value comparison value { comparison value }
                | field [ "not" ] "in" ( "[" [ value { "," value } ] "]" | "(" ... ")" )
                | field [ "not" ] "like" text
                | field "is" [ "not" ] "None"
    comparison  = "==" | "!=" | "<" | "<=" | ">" | ">="
    value       = field | number | text | "true" | "false" | "None" | "inf"

A field is a name with dots, `overflow.upper.count`; a text stands in single or double quotes, with a backslash
before a quote or a backslash; a number is written as in Python, `1e-4`, `-3`. `like` takes `*`, `?` and `[...]`,
and dots are ordinary characters to it. true and false are 1 and 0. A missing value is different from
everything, equal to nothing but None, and neither below nor above anything.

The expression is data: it is read by the parser below, and nothing of it is ever run.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from ranktape.errors import UsageError
from ranktape.storage.query import columns
from ranktape.storage.query.columns import ColumnSource, Comparison, Mask, Number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray


MAX_LENGTH = 10_000
"""Characters of an expression."""

MAX_DEPTH = 50
"""Parentheses and `not`s within one another."""

Literal: TypeAlias = "str | Number | None"
"""A value that stands in the expression itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A value that stands in a column; its name has dots."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """One value against another, of which at least one is a field."""

    left: Field
    """The first field."""
    comparison: Comparison
    """How they must compare."""
    right: Field | Literal
    """The other side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOf:
    """A field against a list."""

    field: Field
    """The field."""
    values: Sequence[Literal]
    """What it may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """A field against a pattern."""

    field: Field
    """The field."""
    pattern: str
    """What it must look like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Not:
    """The opposite of a condition."""

    condition: Condition
    """What must not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """All of several conditions."""

    conditions: Sequence[Condition]
    """What must hold together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Either:
    """Any of several conditions."""

    conditions: Sequence[Condition]
    """What may hold."""


Test: TypeAlias = Compare | OneOf | Like
"""A condition that asks for columns."""

Condition: TypeAlias = Test | Not | Every | Either
"""A node of the expression."""


def fields_of(test: Test) -> list[str]:
    """The names of the fields that are tested."""
    sides = (test.left, test.right) if isinstance(test, Compare) else (test.field,)
    return [side.name for side in sides if isinstance(side, Field)]


def mask_of(test: Test, source: ColumnSource) -> Mask:
    """The rows that pass a test.

    Raises:
        UsageError: a field that holds text meets a number, or the other way round.
    """
    name = fields_of(test)[0]
    column = source(name)
    if isinstance(test, OneOf):
        return columns.one_of(column, test.values, name=name)
    if isinstance(test, Like):
        if not columns.is_text(column):
            raise UsageError(f"{name} holds numbers and 'like' compares text: use == or <")
        return columns.matching(columns.encode(column), columns.glob(test.pattern))
    if isinstance(test.right, Field):
        return columns.compare_columns(column, test.comparison, source(test.right.name), names=(name, test.right.name))
    if test.right is None:
        found = columns.missing(column)
        return found if test.comparison is Comparison.EQUAL else ~found
    return columns.compare(column, test.comparison, test.right, name=name)


def truth_of(test: Test, source: ColumnSource) -> NDArray[np.int8]:
    """For each row 1 where a test is passed, -1 where it is not."""
    return mask_of(test, source).view(np.int8) * np.int8(2) - np.int8(1)


def judge(condition: Condition, truth: Callable[[Test], NDArray[Any]]) -> NDArray[Any]:
    """For each row 1 where a condition holds, -1 where it does not, 0 where nobody can tell (Kleene, 1938).

    `truth` gives the same for what it asks of columns; where it gives masks, so is what is returned.
    """
    if isinstance(condition, Not):
        found = judge(condition.condition, truth)
        return ~found if found.dtype == np.bool_ else -found
    if not isinstance(condition, Every | Either):
        return truth(condition)
    choose = np.minimum if isinstance(condition, Every) else np.maximum
    return functools.reduce(choose, (judge(one, truth) for one in condition.conditions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """An expression that has been read."""

    text: str
    """As it was written."""
    names: tuple[str, ...]
    """The fields it asks for, each once, in their order."""
    condition: Condition
    """What it means."""

    def mask(self, source: ColumnSource, num_rows: int) -> Mask:
        """The rows for which the expression holds, of columns with that many rows.

        Raises:
            UsageError: a field that holds text meets a number, or the other way round.
        """
        found = judge(self.condition, lambda test: mask_of(test, source))
        assert len(found) == num_rows
        return found

    def can_hold(self, source: ColumnSource, *, known: Collection[str], num_rows: int) -> Mask:
        """The rows for which it can hold, where only these fields are known; `source` has their columns."""

        def truth(test: Test) -> NDArray[np.int8]:
            if all(name in known for name in fields_of(test)):
                return truth_of(test, source)
            return np.zeros(num_rows, dtype=np.int8)

        return judge(self.condition, truth) >= 0


def parse_where(text: str) -> Where:
    """The meaning of an expression in the grammar of this module.

    Raises:
        UsageError: the text is none; says where, and what was expected there.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(f"the expression has {len(text)} characters: give at most {MAX_LENGTH}")
    parser = _Parser(text)
    condition = parser.expression()
    if parser.token.kind != "end":
        parser.fail("'and', 'or' or the end")
    return Where(text=text, names=tuple(parser.names), condition=condition)


_CONTEXT = 40
"""Characters shown on either side of a mistake."""

_MAX_DIGITS = 40
"""Characters of a number; Python refuses to read very long ones."""

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<word>-?inf\b(?!\.)|[^\W\d]\w*(?:\.\w+)*)
    | (?P<sign>==|!=|<=|>=|<|>|\(|\)|\[|\]|,)
    | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)

_WORDS: dict[str, Number | None] = {"true": 1, "false": 0, "none": None, "inf": float("inf"), "-inf": float("-inf")}
_KEYWORDS = frozenset({"and", "or", "not", "in", "like", "is"})
_COMPARISONS = {comparison.value: comparison for comparison in Comparison}
_MENDED = {"=": "==", "&": "and", "|": "or", "!": "not", "~": "like"}
"""What people write, and what the grammar calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    kind: str
    text: str
    start: int


class _Parser:
    """Reads an expression from left to right, one method for each line of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 0
        self.names: dict[str, None] = {}
        self.token = self._next()

    def fail(self, expected: str, *, at: _Token | None = None) -> NoReturn:
        """Say what is where `expected` should be."""
        self.token = at or self.token
        found = repr(self.token.text) if self.token.text else "the end"
        hint = ""
        if self.token.kind == "wrong":
            hint = "".join(f" (write {word!r})" for sign, word in _MENDED.items() if self.token.text[0] == sign)
        start = self.token.start
        around = self._text[max(0, start - _CONTEXT) : start + _CONTEXT]
        raise UsageError(f"expected {expected} at character {start + 1}, found {found}{hint}, in {around!r}")

    def _next(self) -> _Token:
        match = _TOKEN.match(self._text, self._end)
        if match is None:
            rest = self._text[self._end :]
            start = self._end + len(rest) - len(rest.lstrip())
            return _Token(kind="wrong", text=re.split(r"\s", self._text[start:], maxsplit=1)[0][:20], start=start)
        assert match.lastgroup is not None
        self._end = match.end()
        token = _Token(kind=match.lastgroup, text=match[match.lastgroup], start=match.start(match.lastgroup))
        lowered = token.text.lower()
        return _Token(kind=lowered, text=token.text, start=token.start) if lowered in _KEYWORDS else token

    def _take(self, kind: str, *texts: str) -> str | None:
        if self.token.kind != kind or (texts and self.token.text not in texts):
            return None
        taken = self.token.text
        self.token = self._next()
        return taken

    def expression(self, *, depth: int = 0) -> Condition:
        """Terms with `or` between them."""
        terms = [self._term(depth)]
        while self._take("or"):
            terms.append(self._term(depth))
        return terms[0] if len(terms) == 1 else Either(conditions=terms)

    def _term(self, depth: int) -> Condition:
        factors = [self._factor(depth)]
        while self._take("and"):
            factors.append(self._factor(depth))
        return factors[0] if len(factors) == 1 else Every(conditions=factors)

    def _factor(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            self.fail(f"at most {MAX_DEPTH} parentheses and 'not's within one another")
        if self._take("not"):
            return Not(condition=self._factor(depth + 1))
        if self._take("sign", "("):
            condition = self.expression(depth=depth + 1)
            if not self._take("sign", ")"):
                self.fail("')'")
            return condition
        return self._condition()

    def _condition(self) -> Condition:
        first = self._value("a field, such as layer_type")
        if isinstance(first, Field):
            negated = self._take("not") is not None
            listed = self._listed(first)
            if listed is not None:
                return Not(condition=listed) if negated else listed
            if negated:
                self.fail("'in' or 'like'")
            if self._take("is"):
                comparison = Comparison.DIFFERENT if self._take("not") else Comparison.EQUAL
                if self.token.text.lower() != "none":
                    self.fail("None")
                return Compare(left=first, comparison=comparison, right=self._value("None"))
        comparisons: list[Condition] = []
        left = first
        while self.token.kind == "sign" and self.token.text in _COMPARISONS:
            comparison = _COMPARISONS[self._take("sign") or ""]
            start = self.token
            right = self._value("a field, a number or a text in quotes")
            comparisons.append(self._compare(left, comparison, right, start=start))
            left = right
        if not comparisons:
            self.fail("==, !=, <, <=, >, >=, 'in', 'like' or 'is'")
        return comparisons[0] if len(comparisons) == 1 else Every(conditions=comparisons)

    def _compare(
        self, left: Field | Literal, comparison: Comparison, right: Field | Literal, *, start: _Token
    ) -> Compare:
        if not isinstance(left, Field):
            if not isinstance(right, Field):
                self.fail("a field on one side of the comparison", at=start)
            left, comparison, right = right, comparison.swapped(), left
        if right is None and comparison not in {Comparison.EQUAL, Comparison.DIFFERENT}:
            self.fail("a number or a text, as only == and != compare with None", at=start)
        return Compare(left=left, comparison=comparison, right=right)

    def _listed(self, field: Field) -> Condition | None:
        if self._take("like"):
            if self.token.kind != "text":
                self.fail("a pattern in quotes, such as 'layers.*.attn'")
            pattern = self._value("a pattern")
            assert isinstance(pattern, str)
            return Like(field=field, pattern=pattern)
        if not self._take("in"):
            return None
        closing = {"[": "]", "(": ")"}.get(self._take("sign", "[", "(") or "")
        if closing is None:
            self.fail("a list, such as [0, 1]")
        values: list[Literal] = []
        while not self._take("sign", closing):
            if values and not self._take("sign", ","):
                self.fail(f"',' or '{closing}'")
            if values and self._take("sign", closing):
                break
            start = self.token
            value = self._value(f"a number, a text in quotes or '{closing}'")
            if isinstance(value, Field):
                self.fail("a number or a text in quotes", at=start)
            values.append(value)
        return OneOf(field=field, values=values)

    def _value(self, expected: str) -> Field | Literal:
        token = self.token
        if token.kind not in {"word", "number", "text"}:
            self.fail(expected)
        if token.kind == "number" and len(token.text) > _MAX_DIGITS:
            self.fail(f"a number of at most {_MAX_DIGITS} characters")
        self.token = self._next()
        if token.kind == "text":
            return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL)
        if token.kind == "number":
            return float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        if token.text.lower() in _WORDS:
            return _WORDS[token.text.lower()]
        self.names.setdefault(token.text)
        return Field(name=token.text)
