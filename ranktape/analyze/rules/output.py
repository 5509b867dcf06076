"""How is the result of a gate written: what people, and what programs need to see of it?"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from ranktape.analyze.table import Form, write_table, write_text

if TYPE_CHECKING:
    from ranktape.analyze.options import Output
    from ranktape.analyze.rules.result import GateResult

MAX_OFFENDERS = 50
"""Offenders that text shows where no number is asked for: a log is read by people."""


def write_result(result: GateResult, output: Output) -> None:
    """Write the offenders, and a line for each rule: as text, as one JSON document, or the offenders as CSV.

    Raises:
        UsageError: there is no such column to sort by, or the file cannot be written.
    """
    by_name = {".json": Form.JSON, ".csv": Form.CSV}.get(output.output.suffix.lower()) if output.output else None
    form = by_name if by_name is not None and output.form is Form.TEXT else output.form
    ordered = result.offenders if output.sort is None else result.offenders.sorted_by(output.sort)
    limit = MAX_OFFENDERS if output.limit is None and form is Form.TEXT else output.limit
    offenders = ordered if limit is None else ordered.first(limit)
    if form is Form.CSV:
        write_table(offenders, form=form, output=output.output)
        return
    if form is Form.JSON:
        document = result.to_json() | {"offenders": offenders.to_json()}
        write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", output=output.output)
        return
    tables = [result.rules] if result.passed else [offenders, dataclasses.replace(result.rules, title="")]
    if output.output is None and sys.stdout.isatty():
        for table in tables:
            write_table(table, wide=output.wide)
        return
    write_text("\n".join(table.to_text(wide=output.wide) for table in tables), output=output.output)
