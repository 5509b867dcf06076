"""Reads a file of rules: a YAML list of mappings, each a rule."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranktape.analyze.findings.finding import Severity
from ranktape.analyze.rules.rule import GateRule, Missing, checked
from ranktape.errors import UsageError
from ranktape.storage.places.failures import printable
from ranktape.yaml_file import parse_yaml, read_text

MAX_SHOWN = 60
"""Characters of a value in a message."""


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
        if rule.name in names:
            raise UsageError(
                f"{place}, entry {number}: the name {_shown(rule.name)} is that of entry {names[rule.name]} already"
            )
        names[rule.name] = number
    return rules


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError("is to be text")
    return value.strip()


def _line(value: Any) -> str:
    return " ".join(_text(value).split())


def _fields(value: Any) -> tuple[str, ...]:
    several = value.split(",") if isinstance(value, str) else value
    if not isinstance(several, list) or not all(isinstance(field, str) and field.strip() for field in several):
        raise UsageError("is to be a field, or a list of fields")
    return tuple(dict.fromkeys(field.strip().replace("-", "_") for field in several))


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError("is to be true or false")
    return value


def _severity(value: Any) -> Severity:
    if value not in set(Severity):
        raise UsageError(f"is to be one of {', '.join(Severity)}")
    return Severity(value)


def _missing(value: Any) -> Missing:
    if value not in set(Missing):
        raise UsageError(f"is to be one of {', '.join(Missing)}")
    return Missing(value)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "name": _line,
    "check": _text,
    "where": _text,
    "by": _fields,
    "format": _text,
    "scaling": _text,
    "severity": _severity,
    "allow_empty": _truth,
    "missing": _missing,
}
"""The keys of an entry, and what their values are."""


def _rule(entry: Any, *, place: str) -> GateRule:
    if not isinstance(entry, dict):
        raise UsageError(f"{place} is {_kind(entry)}, not a rule: write '- check: overflow.ratio == 0'")
    named = entry.get("name")
    shown = f"{place} ({_shown(named)})" if isinstance(named, str) else place
    values = {}
    for key, value in entry.items():
        if key not in _PARSERS:
            near = difflib.get_close_matches(key, _PARSERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(_PARSERS)}"
            raise UsageError(f"{shown}: unknown key {_shown(key)}: {hint}")
        try:
            values[key] = _PARSERS[key](value)
        except (UsageError, TypeError) as error:
            what = error if isinstance(error, UsageError) else "is of another kind"
            raise UsageError(f"{shown}: {key} {what}, and is {_shown(value)}") from error
    if "check" not in values:
        raise UsageError(f"{shown}: there is no check: write what has to hold, as 'check: overflow.ratio == 0'")
    where = f" where {values['where']}" if "where" in values else ""
    try:
        return checked(GateRule(**({"name": values["check"] + where} | values)))
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _kind(value: Any) -> str:
    kinds = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value", type(None): "nothing"}
    return kinds.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = repr(value)
    return printable(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
