"""Reads what a rule says: which metrics have to be how, of which records, against which limits.

    CONDITION [ where SELECTION ]        overflow.ratio < 1e-4 where layer_type == 'attention'

Both are expressions in the grammar of `ranktape.storage.query.where`. The condition is about metrics, the
selection about what the catalogue knows of records. A file of rules is a YAML list of mappings, each a rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranktape.analyze.findings.finding import Severity
from ranktape.errors import UsageError, nearest
from ranktape.storage.places.failures import printable
from ranktape.storage.query.filters import split_rule
from ranktape.storage.query.where import Where, parse_where
from ranktape.yaml_file import parse_yaml, read_text

MAX_SHOWN = 60
"""Characters of a value in a message."""

DEFAULT_RULES = """\
# The rules of 'ranktape analyze gate' where none are given. Edit them, and give the file with --rule-file.
- name: no NaN
  check: overflow.nan.count == 0
  severity: high

- name: no overflow
  # Against the limits of its own dtype only an infinity is beyond them.
  check: overflow.total == 0
  severity: high

- name: gradients are above the subnormal numbers
  check: overflow.underflow.ratio < 0.001
  where: like(tensor_name, 'grad*')
  severity: medium
  # A run of inference has none.
  allow_empty: true

- name: replicas are equal
  # By their checksums: how many copies of a part hold other bits, where most do not hold the same.
  check: replicas.differing == 0
  where: like(placement, '*"replicate"*')
  severity: high
  # One rank, or shards alone, have no copies; and of some the copies are not recorded, or not selected.
  allow_empty: true
  missing: pass
"""
"""The rules that hold for every run, if nothing else is asked for, as a file: the catalogue answers all of them."""


class Missing(enum.StrEnum):
    """What becomes of a record or group for which the condition cannot be told, as a metric of it does not exist."""

    FAIL = "fail"
    """It is an offender."""
    PASS = "pass"  # noqa: S105 - no password
    """It is let pass, and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """One thing that has to hold.

    Raises:
        UsageError: the condition, or what selects records, is no expression.
    """

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
    """With which scale: `none`, `tensor` or `block`; None is the one that the format is used with."""
    severity: Severity = Severity.HIGH
    """How bad it is where it does not hold."""
    allow_empty: bool = False
    """Whether it holds where it is about no record."""
    missing: Missing = Missing.FAIL
    """What becomes of records without a metric that it asks for."""

    def __post_init__(self) -> None:
        with self.named():
            parse_where(self.check)
        with self.named("where: "):
            parse_where(self.check if self.where is None else self.where)

    @property
    def condition(self) -> Where:
        """What the condition means."""
        return parse_where(self.check)

    @contextlib.contextmanager
    def named(self, part: str = "") -> Iterator[None]:
        """Name the rule, and the part, in what is wrong with it.

        Raises:
            UsageError: the block raised one.
        """
        try:
            yield
        except UsageError as error:
            raise UsageError(f"rule {printable(repr(self.name))}: {part}{error}") from error


def parse_rule(text: str) -> GateRule:
    """The rule that a text means; its name is the text.

    Raises:
        UsageError: it is none; the message says where.
    """
    check, where = split_rule(text)
    return GateRule(name=" ".join(text.split()), check=check, where=where)


def default_rules() -> list[GateRule]:
    """`DEFAULT_RULES` as rules."""
    return parse_rules(DEFAULT_RULES, place="the default rules")


def read_rule_file(path: Path) -> list[GateRule]:
    """The rules of a file, in order.

    Raises:
        UsageError: it cannot be read, or an entry is no rule; the message names the file and the entry.
    """
    text = read_text(path, option="--rule-file", wanted="a .yaml file", holds="rules")
    return parse_rules(text, place=str(path))


def parse_rules(text: str, *, place: str) -> list[GateRule]:
    """The rules that a text in YAML lists; `place` is what messages call it.

    Raises:
        UsageError: it is no such list.
    """
    entries = parse_yaml(text, place=place)
    if not isinstance(entries, list):
        raise UsageError(f"{place} holds {_kind(entries)}, not a list of rules: write '- check: overflow.ratio == 0'")
    if not entries:
        raise UsageError(f"{place} lists no rule: write '- check: overflow.ratio == 0'")
    rules = [_rule(entry, place=f"{place}, entry {number}") for number, entry in enumerate(entries, start=1)]
    names: dict[str, int] = {}
    for number, rule in enumerate(rules, start=1):
        first = names.setdefault(rule.name, number)
        if first != number:
            raise UsageError(f"{place}, entry {number}: the name {_shown(rule.name)} is that of entry {first} already")
    return rules


_CLOSED: dict[str, type[enum.StrEnum]] = {"severity": Severity, "missing": Missing}
_KEYS = tuple(field.name for field in dataclasses.fields(GateRule))


def _parsed(key: str, value: Any) -> Any:
    """What the value of a key of an entry means.

    Raises:
        UsageError: nothing; the message says what it is to be.
    """
    if key == "by":
        several = value.split(",") if isinstance(value, str) else value
        if isinstance(several, list) and all(isinstance(field, str) and field.strip() for field in several):
            return tuple(dict.fromkeys(field.strip().replace("-", "_") for field in several))
        raise UsageError("is to be a field, or a list of fields")
    if key == "allow_empty":
        if isinstance(value, bool):
            return value
        raise UsageError("is to be true or false")
    if key in _CLOSED:
        if isinstance(value, str) and value in set(_CLOSED[key]):
            return _CLOSED[key](value)
        raise UsageError(f"is to be one of {', '.join(_CLOSED[key])}")
    if not isinstance(value, str) or not value.strip():
        raise UsageError("is to be text")
    return " ".join(value.split()) if key == "name" else value.strip()


def _rule(entry: Any, *, place: str) -> GateRule:
    if not isinstance(entry, dict):
        raise UsageError(f"{place} is {_kind(entry)}, not a rule: write '- check: overflow.ratio == 0'")
    named = entry.get("name")
    shown = f"{place} ({_shown(named)})" if isinstance(named, str) else place
    values = {}
    for key, value in entry.items():
        if key not in _KEYS:
            hint = nearest(key, _KEYS, otherwise="use", cutoff=0.6)
            raise UsageError(f"{shown}: unknown key {_shown(key)}: {hint}")
        try:
            values[key] = _parsed(key, value)
        except UsageError as error:
            raise UsageError(f"{shown}: {key} {error}, and is {_shown(value)}") from error
    if "check" not in values:
        raise UsageError(f"{shown}: there is no check: write what has to hold, as 'check: overflow.ratio == 0'")
    where = f" where {values['where']}" if "where" in values else ""
    try:
        return GateRule(**({"name": values["check"] + where} | values))
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _kind(value: Any) -> str:
    kinds = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value", type(None): "nothing"}
    return kinds.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = repr(value)
    return printable(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
