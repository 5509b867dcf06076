"""Gives what became of rules: which hold, of how many records, and what offends those that do not."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ranktape.analyze.identity import IDENTITY, key_column
from ranktape.analyze.options import Output
from ranktape.analyze.rules.rule import GateRule, Missing
from ranktape.analyze.table import Column, Form, Kind, Table, write_table, write_text
from ranktape.storage.records.records import SOURCE

_DETAILS = frozenset(
    {"attempt", "microbatch", "call", "mode", "layer_stack", "component", "compute_dtype", "shape", "file"}
)
"""Fields of offenders that are records which text leaves out unless everything is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offender:
    """One comparison that does not hold of a record, or of a group."""

    metric: str
    """What was compared."""
    value: Any
    """What it is; None where it is missing."""
    limit: str
    """How it should have compared, and with what."""
    records: int
    """How many records it is about."""
    identity: dict[str, Any]
    """The fields that say which: all of a record, those of a group that it was made by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOutcome:
    """What became of one rule."""

    rule: GateRule
    """The rule, with what was said for all rules filled in."""
    num_records: int = 0
    """Records that it is about."""
    num_checked: int = 0
    """Records, or groups of these, that were judged."""
    num_failed: int = 0
    """Those that do not hold to it."""
    num_missing: int = 0
    """Those of which it cannot be told; failed or not, as the rule says."""
    offenders: tuple[Offender, ...] = ()
    """The worst first, one for each comparison to blame."""
    notes: tuple[str, ...] = ()
    """What was left out."""

    @property
    def holds(self) -> bool:
        """Whether the rule does."""
        return not self.num_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What became of all rules."""

    outcomes: tuple[RuleOutcome, ...]
    """One for each rule, in order."""

    @property
    def passed(self) -> bool:
        """Whether every rule holds."""
        return all(outcome.holds for outcome in self.outcomes)

    @property
    def failed(self) -> tuple[RuleOutcome, ...]:
        """The rules that do not hold, the worst severity first."""
        bad = [outcome for outcome in self.outcomes if not outcome.holds]
        return tuple(sorted(bad, key=lambda outcome: outcome.rule.severity.order))

    @property
    def message(self) -> str:
        """One line: how many rules hold."""
        names = ", ".join(outcome.rule.name for outcome in self.failed)
        total = f"{len(self.outcomes)} rule{'s' if len(self.outcomes) > 1 else ''}"
        return f"{len(self.failed)} of {total} failed: {names}" if names else f"{total} passed"

    @property
    def rules(self) -> Table:
        """One row for each rule: whether it holds, and of how many records."""
        return Table(
            title=self.message if self.passed else "",
            columns=tuple(column for column, _ in _RULE_COLUMNS),
            rows=tuple(tuple(of(outcome) for _, of in _RULE_COLUMNS) for outcome in self.outcomes),
            notes=tuple(f"{outcome.rule.name}: {note}" for outcome in self.outcomes for note in outcome.notes),
        )

    @property
    def offenders(self) -> Table:
        """One row for each comparison that does not hold: which record or group, the metric, its value, the limit."""
        fields = _fields(self.failed)
        has_records = "shape" in fields
        return Table(
            title="offenders, of each rule the worst first",
            columns=(
                Column(name="rule", kind=Kind.TEXT, is_key=True),
                Column(name="severity", kind=Kind.TEXT, is_key=True),
                Column(name="metric", kind=Kind.TEXT),
                Column(name="value", kind=Kind.FLOAT),
                Column(name="limit", kind=Kind.TEXT),
                Column(name="records", kind=Kind.INTEGER, is_detail=True),
                *(key_column(field, is_detail=has_records and field in _DETAILS) for field in fields),
            ),
            rows=tuple(
                (
                    outcome.rule.name,
                    outcome.rule.severity.value,
                    one.metric,
                    one.value,
                    one.limit,
                    one.records,
                    *(one.identity.get(field) for field in fields),
                )
                for outcome in self.failed
                for one in outcome.offenders
            ),
            notes=tuple(
                f"{outcome.rule.name}: of {outcome.num_missing} a metric does not exist: leave them out with where, "
                "or let them pass with missing: pass in a file of rules"
                for outcome in self.failed
                if outcome.num_missing and outcome.rule.missing is Missing.FAIL
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Whether the rules hold, the table of rules and that of offenders, as one document for `json.dumps`."""
        return {"passed": self.passed, "rules": self.rules.to_json(), "offenders": self.offenders.to_json()}

    def write(self, output: Output) -> None:
        """Write the offenders, and a line for each rule: as text, as one JSON document, or the offenders as CSV.

        Raises:
            UsageError: there is no such column to sort by, or the file cannot be written.
        """
        form, offenders = output.chosen_form, output.shown(self.offenders)
        tables = [self.rules] if self.passed else [offenders, dataclasses.replace(self.rules, title="")]
        if form is Form.CSV:
            write_table(offenders, form=form, output=output.output)
        elif form is Form.JSON:
            document = self.to_json() | {"offenders": offenders.to_json()}
            write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", output=output.output)
        elif output.output is None and sys.stdout.isatty():
            for table in tables:
                write_table(table, wide=output.wide)
        else:
            write_text("\n".join(table.to_text(wide=output.wide) for table in tables), output=output.output)


_RULE_COLUMNS: tuple[tuple[Column, Callable[[RuleOutcome], Any]], ...] = (
    (Column(name="outcome", kind=Kind.TEXT), lambda one: "passed" if one.holds else "failed"),
    (Column(name="rule", kind=Kind.TEXT), lambda one: one.rule.name),
    (Column(name="checked", kind=Kind.INTEGER), lambda one: one.num_checked),
    (Column(name="failed", kind=Kind.INTEGER), lambda one: one.num_failed),
    (Column(name="missing", kind=Kind.INTEGER), lambda one: one.num_missing),
    (Column(name="records", kind=Kind.INTEGER), lambda one: one.num_records),
    (Column(name="severity", kind=Kind.TEXT), lambda one: one.rule.severity.value),
    (Column(name="check", kind=Kind.TEXT, is_detail=True), lambda one: one.rule.check),
    (Column(name="where", kind=Kind.TEXT, is_detail=True), lambda one: one.rule.where),
    (Column(name="by", kind=Kind.LIST), lambda one: list(one.rule.by) if one.rule.by else None),
    (Column(name="format", kind=Kind.TEXT), lambda one: one.rule.format),
    (Column(name="scaling", kind=Kind.TEXT), lambda one: one.rule.scaling),
)
"""What is said of each rule."""


def _fields(failed: Sequence[RuleOutcome]) -> tuple[str, ...]:
    """The fields that any offender is told by, those of an identity in their order."""
    used = dict.fromkeys(field for outcome in failed for one in outcome.offenders for field in one.identity)
    known = tuple(field for field in (SOURCE, *IDENTITY) if field in used)
    return (*known, *(field for field in used if field not in known))
