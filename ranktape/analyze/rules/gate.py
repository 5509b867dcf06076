"""Gives whether a run holds to its rules, and what offends them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import SAMPLE, group_row, identity_fields, identity_rows, with_stacks
from ranktape.analyze.metrics.target import one_target, sweepable
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.rules.result import GateResult, Offender, RuleOutcome
from ranktape.analyze.rules.rule import GateRule, Missing, default_rules, parse_rule, read_rule_file
from ranktape.analyze.rules.values import Judged, RuleOperand, parse_operand, values_of
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Records
from ranktape.storage.query import where
from ranktape.storage.query.columns import Mask
from ranktape.storage.query.where import Condition, Field, Not, Several


class _Asked(NamedTuple):
    """A rule that is ready to be judged: what its names stand for, and the records that it is about."""

    rule: GateRule
    operands: tuple[RuleOperand, ...]
    records: Records
    notes: tuple[str, ...]


def gate(
    records: Records,
    *,
    rule: str | GateRule | Sequence[str | GateRule] = (),
    rule_file: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    format: str | None = None,  # noqa: A002 - the option's name
    scaling: str | None = None,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> GateResult:
    """Check a run against rules: exit 0 if all hold, and 3 with the offenders if one does not.

    A rule is a condition over metrics (those of 'stats', of 'overflow', sqnr.mxfp8 and other losses of 'sweep',
    replicas.differing, findings.high) and fields, of all records or of those that 'where' selects. A rule that selects
    nothing is an error, and a metric that does not exist (the mean of NaN alone) fails, unless the condition holds
    without it, or the rule says 'missing: pass'. Without `rule` and `rule_file` the default rules hold, for which
    nothing is read. `by`, `format` and `scaling` are for the rules that say nothing of them themselves. CSV holds the
    offenders alone.

    Args:
        rule (RULE): What has to hold: "overflow.ratio < 1e-4 where layer_type == 'attention'"; repeatable.
        rule_file (FILE): A YAML list of rules; repeatable.
        format (NAME): Low-precision format: fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, int8, hif8, nvfp4, bf16,
            fp16. For rules about limits that name none; the captured dtype by default.
        scaling (KIND): Scales before values meet the format, for rules that name none: none, tensor or block. Unless
            given, the one that the format is used with: block for formats with blocks, tensor for others up to 8 bits,
            none for wider ones.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: a rule that may not be empty is about no record.
        StorageError: the store cannot be read.
        UsageError: a rule cannot be read, asks for what there is not, or an option is of no use to any.
    """
    files = [rule_file] if isinstance(rule_file, str | os.PathLike) else list(rule_file)
    several = [rule] if isinstance(rule, str | GateRule) else rule
    given = [one if isinstance(one, GateRule) else parse_rule(one) for one in several]
    for file in files:
        given += read_rule_file(Path(file))
    filled = _filled(given or default_rules(), by=by, format_name=format, scaling=scaling)
    # What is wrong with any rule is said before the first is judged.
    asked = [_asked(rule, records) for rule in filled]
    return GateResult(outcomes=tuple(_outcome(one, view=view, engine=engine) for one in asked))


def _filled(
    rules: Sequence[GateRule], *, by: Sequence[str], format_name: str | None, scaling: str | None
) -> list[GateRule]:
    """The rules with what was said for all of them, where they say nothing themselves and it is of use."""
    found, is_used = [], False
    for rule in rules:
        filled = rule if rule.by is not None else dataclasses.replace(rule, by=tuple(by))
        has_limits = any(operand.has_limits for operand in _operands(rule))
        if rule.format is None and has_limits and format_name is not None:
            filled = dataclasses.replace(filled, format=format_name, scaling=rule.scaling or scaling)
            is_used = True
        elif rule.format is not None and rule.scaling is None and has_limits:
            filled = dataclasses.replace(filled, scaling=scaling)
            is_used |= scaling is not None
        found.append(filled)
    option, value = ("--format", format_name) if format_name is not None else ("--scaling", scaling)
    if value is not None and not is_used:
        raise UsageError(
            f"{option} {value} has no effect: no rule counts against limits without saying itself which; "
            "overflow.ratio, overflow.underflow.ratio and overflow.flushed.ratio do"
            + ("" if format_name is not None else ", and --format says which")
        )
    return found


def _operands(rule: GateRule) -> tuple[RuleOperand, ...]:
    with rule.named():
        return tuple(map(parse_operand, rule.condition.names))


def _asked(rule: GateRule, records: Records) -> _Asked:
    operands = _operands(rule)
    with rule.named():
        _check(rule, operands)
        chosen = records if rule.where is None else records.where(rule.where)
        for field in rule.by or ():
            if field != SAMPLE:
                records.column(field)  # refuses what is no field
    notes = []
    target = one_target(rule.format, rule.scaling)
    has_blocks = target is not None and target.scaling is Scaling.BLOCK
    if has_blocks or any(operand.origin == "sweep" for operand in operands):
        floating = sweepable(chosen)
        if len(floating) < len(chosen):
            notes.append(f"{len(chosen) - len(floating)} records of integers or bool left out: no format is for them")
        chosen = floating
    if not len(chosen) and not rule.allow_empty:
        raise NoRecordsError(
            f"rule {rule.name!r} checks nothing: none of {len(records)} records is one that it is about"
            + (f", where {rule.where}" if rule.where else "")
            + "; a rule of a file may say 'allow_empty: true'"
        )
    return _Asked(rule, operands, chosen, tuple(notes))


def _check(rule: GateRule, operands: Sequence[RuleOperand]) -> None:
    target = one_target(rule.format, rule.scaling)
    if target is not None and not any(operand.has_limits for operand in operands):
        names = ", ".join(operand.name for operand in operands)
        raise UsageError(f"format {rule.format} has no effect on {names}: leave it out")
    for operand in operands:
        if operand.needs_format and target is None:
            raise UsageError(f"{operand.name} is counted against a format: say which, as format: fp8_e4m3")


def _outcome(asked: _Asked, *, view: View | None, engine: Engine | None) -> RuleOutcome:
    rule, operands, records, notes = asked
    if not len(records):
        return RuleOutcome(rule=rule, notes=notes)
    target, condition = one_target(rule.format, rule.scaling), rule.condition.condition
    with rule.named():
        by = with_stacks(rule.by or (), records)
        judged = values_of(records, operands, by=by, targets=[target] if target else [], view=view, engine=engine)
        truth = rule.condition.truth(judged.columns)
        is_bad = truth < (1 if rule.missing is Missing.FAIL else 0)
        found = list(_faults(condition, judged.columns, is_bad))
    return RuleOutcome(
        rule=rule,
        num_records=len(records),
        num_checked=truth.size,
        num_failed=int(is_bad.sum()),
        num_missing=int((truth == 0).sum()),
        offenders=tuple(_offenders(found, judged)),
        notes=(*notes, *judged.places.notes, *judged.notes),
    )


def _offenders(found: Sequence[_Fault], judged: Judged) -> Iterator[Offender]:
    has_records = any(fault.rows.any() and not judged.groups[0][0] for fault in found)
    identities = identity_rows(judged.places.records) if has_records else []
    for fault in found:
        values = {row: _plain(judged.columns[fault.metric][row]) for row in np.flatnonzero(fault.rows).tolist()}
        for row in sorted(values, key=lambda row: _badness(values[row], fault), reverse=True):
            key, members = judged.groups[row]
            owners = np.unique(judged.places.owners[members])
            cells = group_row(key, num_records=0) if key else identities[owners[0]]
            yield Offender(
                metric=fault.metric,
                value=values[row],
                limit=fault.limit,
                records=int(owners.size),
                identity=dict(zip(key or identity_fields(judged.places.records), cells, strict=False)),
            )


def _badness(value: Any, fault: _Fault) -> tuple[int, float]:
    """Missing metrics first, then the farther beyond the limit the sooner."""
    if value is None:
        return 2, 0.0
    if isinstance(value, str) or fault.bound is None:
        return 0, 0.0
    if fault.sign in {"<", "<="}:
        return 1, float(value)
    if fault.sign in {">", ">="}:
        return 1, -float(value)
    return 1, abs(float(value) - fault.bound)


def _plain(value: Any) -> Any:
    """A value as tables hold it: whole numbers as int, a missing one as None."""
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float):
        if math.isnan(plain):
            return None
        return int(plain) if plain.is_integer() and abs(plain) < 2**53 else plain
    return plain


class _Fault(NamedTuple):
    """One comparison of a condition, how it should have been, and the rows of which it is to blame."""

    metric: str
    limit: str
    rows: Mask
    sign: str = ""
    bound: float | None = None


def _faults(condition: Condition, source: Columns, rows: Mask, *, is_wanted: bool = True) -> Iterator[_Fault]:
    """For each comparison in a condition that does not hold in `rows`, those of them of which it is to blame.

    In a row that fails are to blame: of `and` all that do not hold, of `or` all of them.
    """
    if isinstance(condition, Not):
        yield from _faults(condition.condition, source, rows, is_wanted=not is_wanted)
    elif isinstance(condition, Several):
        for part in condition.conditions:
            is_wrong = where.judge(part, lambda test: test.truth(source.__getitem__)) != (1 if is_wanted else -1)
            yield from _faults(part, source, rows & is_wrong, is_wanted=is_wanted)
    elif condition.sign in _OPPOSITES:
        other = condition.other
        sign = condition.sign if is_wanted else _OPPOSITES[condition.sign]
        limit = f"{sign} {other.name if isinstance(other, Field) else _literal(other)}"
        bound = float(other) if isinstance(other, int | float) else None
        yield _Fault(condition.field, limit, rows, sign, bound)
    else:
        other = condition.other
        what = f"in [{', '.join(map(_literal, other))}]" if isinstance(other, tuple) else f"like {other!r}"
        yield _Fault(condition.field, f"{'' if is_wanted else 'not '}{what}", rows)


Columns: TypeAlias = Mapping[str, "NDArray[Any]"]
"""A column for each name in the condition: numbers, NaN where there is none, or text as objects."""

_OPPOSITES = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def _literal(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
