"""Gives the rules that hold for every run, if nothing else is asked for.

All of them are answered by the catalogue: no value is read.
"""

from __future__ import annotations

from ranktape.analyze.rules.rule import GateRule
from ranktape.analyze.rules.rule_file import parse_rules

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
  where: tensor_name like 'grad*'
  severity: medium
  # A run of inference has none.
  allow_empty: true

- name: replicas are equal
  # By their checksums: how many copies of a part hold other bits, where most do not hold the same.
  check: replicas.differing == 0
  where: placement like '*"replicate"*'
  severity: high
  # One rank, or shards alone, have no copies; and of some the copies are not recorded, or not selected.
  allow_empty: true
  missing: pass
"""
"""As a file of rules."""


def default_rules() -> list[GateRule]:
    """The same as rules."""
    return parse_rules(DEFAULT_RULES, place="the default rules")
