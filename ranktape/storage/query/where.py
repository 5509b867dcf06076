"""Reads expressions such as `layer_type == 'attention' and overflow.ratio > 0`, and evaluates them over columns.

The syntax is a subset of Python's:

    field == 1, field != 'a'        also < <= > >= and chains, 0 <= layer_idx < 4; either side may be a field
    field in [0, 'a', None]         also `not in`
    field is None                   also `is not`
    like(field, 'layers.*.attn')    `*` any text, `?` one character, `[...]` one of these; dots are ordinary characters
    and, or, not, ( )

A field is a dotted name such as `overflow.upper.count`. Strings and numbers are written as in Python; `inf` is a
number. True and False are 1 and 0, and may be written in lower case, as may None. A missing value (None or NaN) is
equal to None only, not equal to everything else, and neither below nor above anything.

An expression is evaluated over columns of equal length: a mapping from names to numpy arrays (of numbers, or of strings
as objects), or a function from a name to a column.

    where = parse_where("absmax > 448 or like(module, '*.mlp')")
    where.names                                                     # ('absmax', 'module')
    where.mask({"absmax": np.array([1.0, 500.0]), "module": np.array(["a.mlp", None], dtype=object)})
    where.truth(columns)                                            # 1, -1, or 0 if the result is unknown

`check_fields(where.names, known=columns)` raises for a column that does not exist, with the nearest names. Expressions
are parsed by `ast.parse` and each node is checked. They are never executed.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ranktape.errors import UsageError
from ranktape.storage.query import columns
from ranktape.storage.query.columns import COMPARISONS, Column, ColumnSource, Mask, Number

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_LENGTH = 10_000
"""The longest expression, in characters."""

MAX_DEPTH = 50
"""The deepest nesting of `and`, `or` and `not`."""

Literal: TypeAlias = "str | Number | None"
"""A constant in an expression."""

Columns: TypeAlias = "ColumnSource | Mapping[str, Column]"
"""The columns over which an expression is evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The value of a column, given by its dotted name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A comparison of a field with a value, another field, a list or a pattern."""

    field: str
    """The first field."""
    sign: str
    """The operator, such as `==`, `in` or `like`."""
    other: Field | Literal | tuple[Literal, ...]
    """The second operand: a tuple for `in`, a string for `like`."""

    @property
    def names(self) -> list[str]:
        """The fields of the comparison."""
        return [self.field, *([self.other.name] if isinstance(self.other, Field) else [])]

    def mask(self, column_of: ColumnSource) -> Mask:
        """The rows for which the comparison is true.

        Raises:
            UsageError: text is compared with a number.
        """
        name, other = self.field, self.other
        column = column_of(name)
        if isinstance(other, tuple):
            return columns.one_of(column, other, name=name)
        if self.sign == "like":
            if not columns.is_text(column):
                raise UsageError(f"{name} holds numbers and 'like' compares text: use == or <")
            return columns.matching(columns.encode(column), columns.glob(str(other)))
        if isinstance(other, Field):
            return columns.compare_columns(column, self.sign, column_of(other.name), names=(name, other.name))
        if other is None:
            is_missing = columns.missing(column)
            return is_missing if self.sign == "==" else ~is_missing
        return columns.compare(column, self.sign, other, name=name)

    def truth(self, column_of: ColumnSource) -> NDArray[np.int8]:
        """1 for each row for which the comparison is true, -1 if it is false, 0 if a missing value decides."""
        truth = _signed(self.mask(column_of))
        if self.other is not None and not (isinstance(self.other, tuple) and None in self.other):
            for name in self.names:
                truth[columns.missing(column_of(name))] = 0
        return truth


Truth: TypeAlias = "Callable[[Test], NDArray[Any]]"
"""A function that gives 1, -1 or 0 for each row if a test is true, false or unknown; or a mask."""

Condition: TypeAlias = Callable[[Truth], "NDArray[Any]"]
"""A function from the truth of tests (or masks) to that of the expression in three-valued logic (Kleene, 1938)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A parsed expression."""

    text: str
    """The text of the expression."""
    names: tuple[str, ...]
    """The names of its fields, without duplicates, in order."""
    condition: Condition
    """The compiled expression."""

    def __reduce__(self) -> tuple[Callable[[str], Where], tuple[str]]:
        return parse_where, (self.text,)

    def mask(self, source: Columns) -> Mask:
        """The rows for which the expression is true.

        Raises:
            UsageError: text is compared with a number.
        """
        column_of = _lookup(source)
        return self.condition(lambda test: test.mask(column_of))

    def truth(self, source: Columns) -> NDArray[np.int8]:
        """1 for each row for which the expression is true, -1 if it is false, 0 if a missing value decides.

        `a < 1 or b < 1` is true if `a` is 0, even if `b` is missing. A comparison with None is never unknown.

        Raises:
            UsageError: text is compared with a number.
        """
        column_of = _lookup(source)
        return self.condition(lambda test: test.truth(column_of))

    def can_hold(self, source: Columns, *, known: Collection[str], num_rows: int) -> Mask:
        """The rows for which the expression may be true, given only the `known` fields and their columns."""
        column_of = _lookup(source)

        def truth(test: Test) -> NDArray[np.int8]:
            is_known = all(name in known for name in test.names)
            return _signed(test.mask(column_of)) if is_known else np.zeros(num_rows, dtype=np.int8)

        return self.condition(truth) >= 0


def _lookup(source: Columns) -> ColumnSource:
    return source.__getitem__ if isinstance(source, Mapping) else source


def _asked(test: Test) -> Condition:
    return lambda truth: truth(test)


def _opposite(condition: Condition) -> Condition:
    def found(truth: Truth) -> NDArray[Any]:
        known = condition(truth)
        return ~known if known.dtype == np.bool_ else -known

    return found


def _joined(parts: Sequence[Condition], *, is_all: bool) -> Condition:
    choose = np.minimum if is_all else np.maximum
    return lambda truth: functools.reduce(choose, (part(truth) for part in parts))


def _signed(mask: Mask) -> NDArray[np.int8]:
    return mask.view(np.int8) * np.int8(2) - np.int8(1)


def parse_where(text: str) -> Where:
    """Parse an expression.

    Raises:
        UsageError: the expression is not valid. The message gives the position and what was expected.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(f"the expression has {len(text)} characters: give at most {MAX_LENGTH}")
    reader = _Reader(text)
    condition = reader.condition(reader.parse(), depth=0)
    return Where(text=text, names=tuple(reader.names), condition=condition)


_CONTEXT = 40
"""The number of characters that a message shows on either side of an error."""

_MAX_SHOWN = 20
"""The number of characters that a message shows of the unexpected text."""

_MAX_NUMBER = 10**40

_WORDS: dict[str, Number | None] = {"true": 1, "false": 0, "none": None, "inf": float("inf")}

_SIGNS: dict[type[ast.cmpop], str] = {
    **dict(zip((ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE), COMPARISONS, strict=True)),
    ast.Is: "==",
    ast.IsNot: "!=",
    ast.In: "in",
    ast.NotIn: "in",
}

_SWAPPED = str.maketrans("<>", "><")

_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)

_CORRECTIONS = {
    r"~|\blike\b(?!\s*\()": "like(field, 'pattern')",
    r"(?<![=!<>])=(?!=)": "==",
    r"&+|\bAND\b": "and",
    r"\|+|\bOR\b": "or",
    r"!(?!=)|\bNOT\b": "not",
    r"\bIN\b": "in",
}
"""Common mistakes, and the right spelling."""


class _Reader:
    """Compiles the supported nodes of Python's syntax tree, and refuses all others."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._bare = _QUOTED.sub(lambda match: "_" * len(match[0]), text)
        # Line breaks outside quotes become spaces.
        self._spaced = "".join(
            " " if bare.isspace() else char for bare, char in zip(self._bare, text, strict=True)
        ).lstrip(" ")
        self._indent = len(text) - len(self._spaced)
        self.names: dict[str, None] = {}

    def parse(self) -> ast.expr:
        """Parse the text into a tree."""
        try:
            with warnings.catch_warnings():
                # Python only warns about an unknown escape in a string.
                warnings.simplefilter("error")
                return ast.parse(self._spaced, mode="eval").body
        except SyntaxError as error:
            # Further sentences and parentheses in Python's message are about programs.
            message = re.split(r"\. | \(", error.msg)[0] or "invalid syntax"
            # Offset 0 means the end of the text.
            start = self._indent + error.offset - 1 if error.offset else len(self._text)
            raise self._error(message, start) from error
        except (ValueError, RecursionError, MemoryError) as error:
            message = "text that is not Unicode" if isinstance(error, ValueError) else "too many levels in one another"
            raise self._error(message, 0) from error

    def condition(self, node: ast.expr, *, depth: int) -> Condition:
        """Compile a node of the expression."""
        if depth > MAX_DEPTH:
            raise self._expected(f"at most {MAX_DEPTH} levels of and, or and not", node)
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(part, depth=depth + 1) for part in node.values]
            return _joined(parts, is_all=isinstance(node.op, ast.And))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _opposite(self.condition(node.operand, depth=depth + 1))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = zip(sides, node.ops, sides[1:], strict=False)
            return _joined([self._comparison(left, sign, right) for left, sign, right in pairs], is_all=True)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "like":
            return self._like(node)
        raise self._expected("a comparison such as rank == 0, or like(field, 'pattern')", node)

    def _comparison(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Condition:
        value, sign = self._value(left), _SIGNS[type(operator)]
        if isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(value, Field):
                raise self._expected("a field, such as layer_type,", left)
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise self._expected("a list, such as [0, 1]", right)
            test = Test(field=value.name, sign="in", other=tuple(map(self._literal, right.elts)))
            return _opposite(_asked(test)) if isinstance(operator, ast.NotIn) else _asked(test)
        other = self._value(right)
        if isinstance(operator, ast.Is | ast.IsNot) and other is not None:
            raise self._expected("None", right)
        if not isinstance(value, Field):
            if not isinstance(other, Field):
                raise self._expected("a field on one side of the comparison", right)
            value, other, sign = other, value, sign.translate(_SWAPPED)
        if other is None and sign not in {"==", "!="}:
            raise self._expected("a number or a text, as only == and != compare with None,", right)
        return _asked(Test(field=value.name, sign=sign, other=other))

    def _like(self, node: ast.Call) -> Condition:
        values = [self._value(value) for value in node.args]
        match values, node.keywords:
            case [[Field(name=name), str(pattern)], []]:
                return _asked(Test(field=name, sign="like", other=pattern))
        raise self._expected("like(field, 'pattern'), such as like(module, 'layers.*.attn'),", node)

    def _literal(self, node: ast.expr) -> Literal:
        value = self._value(node)
        if isinstance(value, Field):
            raise self._expected("a number or a text in quotes", node)
        return value

    def _value(self, node: ast.expr) -> Field | Literal:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
            if isinstance(node.value, int) and node.value >= _MAX_NUMBER:
                raise self._expected("a number of at most 40 digits", node)
            return int(node.value) if isinstance(node.value, bool) else node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant | ast.Name):
            number = self._value(node.operand)
            if isinstance(number, int | float) and isinstance(node.op, ast.USub | ast.UAdd):
                return -number if isinstance(node.op, ast.USub) else number
        parts: list[str] = []
        part = node
        while isinstance(part, ast.Attribute):
            parts.append(part.attr)
            part = part.value
        if not isinstance(part, ast.Name):
            raise self._expected("a field, a number or a text in quotes", node)
        name = ".".join([part.id, *reversed(parts)])
        if name.lower() in _WORDS:
            return _WORDS[name.lower()]
        self.names.setdefault(name)
        return Field(name=name)

    def _expected(self, expected: str, node: ast.expr) -> UsageError:
        # Python counts columns in bytes.
        start = len(self._spaced.encode()[: node.col_offset].decode())
        return self._error(
            f"expected {expected}", start + self._indent, segment=ast.get_source_segment(self._spaced, node)
        )

    def _error(self, message: str, start: int, *, segment: str | None = None) -> UsageError:
        """The error at a position, with the text at that position."""
        segment = segment or re.split(r"(?<=\w)\b|\s", self._text[start:], maxsplit=1)[0]
        shown = repr(segment[:_MAX_SHOWN]) if segment else "the end"
        hints = (text for pattern, text in _CORRECTIONS.items() if re.search(pattern, self._bare))
        hint = next((f" (write {text})" for text in hints), "")
        context = self._text[max(0, start - _CONTEXT) : start + _CONTEXT]
        return UsageError(f"{message} at character {start + 1}, found {shown}{hint}, in {context!r}")
