"""Reads what a rule says: which metrics have to be how, of which records, against which limits.

    CONDITION [ where SELECTION ]        overflow.ratio < 1e-4 where layer_type == 'attention'

Both are expressions in the grammar of `ranktape.storage.query.where`. The condition is about figures, the
selection about what the catalogue knows of records.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from ranktape.analyze.findings.finding import Severity
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage.places.failures import printable
from ranktape.storage.query.where import Where, parse_where


class Missing(enum.StrEnum):
    """What becomes of a record or group for which the condition cannot be told, as a figure of it does not exist."""

    FAIL = "fail"
    """It is an offender."""
    PASS = "pass"  # noqa: S105 - no password
    """It is let pass, and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """One thing that has to hold."""

    name: str
    """What people call it."""
    check: str
    """The condition."""
    where: str | None = None
    """Which records it is about; None for all."""
    by: tuple[str, ...] | None = None
    """The fields of which groups are made, each judged as one; none for single records, None where nothing was said."""
    format: str | None = None
    """Against whose limits is counted; None for those of the dtype."""
    scaling: str | None = None
    """With which scale: `none`, `tensor` or `block`; None is `none`."""
    severity: Severity = Severity.HIGH
    """How bad it is where it does not hold."""
    allow_empty: bool = False
    """Whether it holds where it is about no record."""
    missing: Missing = Missing.FAIL
    """What becomes of records without a figure that it asks for."""

    @property
    def condition(self) -> Where:
        """What the condition means.

        Raises:
            UsageError: it is no expression.
        """
        try:
            return parse_where(self.check)
        except UsageError as error:
            raise self.mistake(error) from error

    def mistake(self, error: RanktapeError | str) -> UsageError:
        """The error that says which rule is wrong, and why."""
        return UsageError(f"rule {printable(repr(self.name))}: {error}")


_WORDS = re.compile(
    r"""'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | (?<![\w.])(?P<where>where)(?![\w.])""", re.VERBOSE | re.IGNORECASE
)


def parse_rule(text: str) -> GateRule:
    """The rule that a text means; its name is the text.

    Raises:
        UsageError: it is none; the message says where.
    """
    places = [found for found in _WORDS.finditer(text) if found["where"]]
    if len(places) > 1:
        raise UsageError(f"rule {printable(repr(text))} has 'where' {len(places)} times: give it once, and 'and'")
    check, where = (text, None) if not places else (text[: places[0].start()], text[places[0].end() :])
    name = " ".join(text.split())
    rule = GateRule(name=name, check=check.strip(), where=None if where is None else where.strip())
    return checked(rule)


def checked(rule: GateRule) -> GateRule:
    """The same rule, if its expressions can be read.

    Raises:
        UsageError: one cannot.
    """
    names = rule.condition.names
    if rule.where is not None:
        try:
            parse_where(rule.where)
        except UsageError as error:
            raise rule.mistake(f"where: {error}") from error
    assert names, "a comparison has a field on one side"
    return rule
