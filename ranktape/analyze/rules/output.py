"""The result of a gate as text, as one JSON document, or its offenders as CSV."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from ranktape.analyze.table import Form, write_table, write_text

if TYPE_CHECKING:
    from ranktape.analyze.options import Output
    from ranktape.analyze.rules.result import GateResult


def write_result(result: GateResult, output: Output) -> None:
    """Write the offenders, and a line for each rule: as text, as one JSON document, or the offenders as CSV.

    Raises:
        UsageError: there is no such column to sort by, or the file cannot be written.
    """
    form, offenders = output.chosen_form, output.shown(result.offenders)
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
