"""Answers `ranktape analyze sweep`: a table of all tensors, files about each of them, or both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.analyze.console import say
from ranktape.analyze.engine.progress import progress
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import SAMPLE, with_stacks
from ranktape.analyze.legacy.outputs.text import DOUBLE
from ranktape.analyze.legacy.outputs.write import DEFAULT_OUTPUT_DIR, OutputOptions, make_folder
from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.quantization.schemes import ScaleRule
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.questions.sweep import check_shape, table_of
from ranktape.analyze.questions.sweep_sources import ListedTensor, is_file, list_tensors, summary_lines, sweep_tensors
from ranktape.analyze.questions.swept import answerable, num_readings, parse_request
from ranktape.errors import DataError, UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.options import Output, Selection
    from ranktape.analyze.questions.sweep_sources import SweepOutcome
    from ranktape.analyze.questions.swept import SweepRequest
    from ranktape.analyze.table import Table

_KINDS: dict[str, Callable[[str], Any]] = {"mode": SweepMode, "scale_rule": ScaleRule, "rounding": Rounding}
"""The options of which a word is one of a closed set."""

_FIELDS = {"sweep_mode": "mode"}
"""Options whose names are longer than those of the fields: `--mode` is a filter."""

MAX_NAMED_FAILURES = 4
"""Reasons that the last message names."""


def answer_sweep(
    selections: Sequence[Selection],
    *,
    formats: Sequence[str],
    levels: Mapping[str, Any],
    view: View | None,
    by: Sequence[str],
    with_levels: bool,
    target_sqnr: float,
    output_dir: Path | None,
    with_plots: bool,
    output: Output,
    engine: Engine,
) -> None:
    """Sweep every tensor of the sources, and write the table, the files or both.

    `levels` has the fields of `SweepOptions` as words and numbers; None where an option was not given. The engine
    counts; what is computed of the counts is computed here.

    Raises:
        DataError: some tensor could not be swept; the others have been. Of a single one its own error is raised.
        NoRecordsError: nothing matches.
        StorageError: the output directory cannot be made.
        UsageError: an option is not allowed.
    """
    request = parse_request(formats, options=_sweep_options(levels), view=view or View.COMPUTE)
    check_shape(by=by, with_levels=with_levels, target_sqnr=target_sqnr)
    if SAMPLE in by and output_dir is not None:
        raise UsageError("--by sample and --output-dir exclude each other: files are written about whole tensors")
    asks_for_table = bool(by) or with_levels or output.is_asked_for
    has_table = asks_for_table or not (output_dir or all(is_file(selection.run) for selection in selections))
    outputs = None
    if output_dir is not None or not has_table:
        outputs = OutputOptions(output_dir=output_dir or DEFAULT_OUTPUT_DIR, with_plots=with_plots)
    tensors = list_tensors(selections, by=by)
    swept = {id(tensor.records): tensor.records for tensor in tensors if tensor.records is not None}
    fields = with_stacks(by, *swept.values())
    request, left_out = answerable(request, keeps={tensor.keep for tensor in tensors})
    if left_out:
        say(left_out, err=True)
    shape = {"by": fields, "with_levels": with_levels, "target_sqnr": target_sqnr}
    outcome, table = _swept(
        tensors, request, outputs=outputs, shape=shape if has_table else None, by=fields, engine=engine
    )
    if table is not None:
        output.write(table)
    if outcome.failures and outputs is None and len(tensors) == 1:
        raise outcome.failures[0].error
    if outcome.failures:
        reasons = outcome.reasons()
        named = "; ".join(reasons[:MAX_NAMED_FAILURES])
        rest = len(reasons) - MAX_NAMED_FAILURES
        more = f"; and for {rest} more reasons" if rest > 0 else ""
        raise DataError(f"{len(outcome.failures)} of {len(tensors)} tensors could not be swept: {named}{more}")


def _swept(
    tensors: Sequence[ListedTensor],
    request: SweepRequest,
    *,
    outputs: OutputOptions | None,
    shape: dict[str, Any] | None,
    by: Sequence[str],
    engine: Engine,
) -> tuple[SweepOutcome, Table | None]:
    """What became of all tensors, and the table of that shape; files are written and a log is shown on the way."""
    # What goes to stdout is the answer: with a table, the log is not it.
    show = functools.partial(say, err=shape is not None)
    if outputs is not None:
        make_folder(outputs.output_dir)
        show(f"Processing {len(tensors)} tensor(s)...")
        show(DOUBLE)
    total = len(tensors) * num_readings(request, by=by) if outputs is None else 0
    # One bar is enough.
    quiet = dataclasses.replace(engine, show_progress=False)
    with progress(total, description="sweeping") as on_record:
        outcome = sweep_tensors(tensors, request, outputs=outputs, show=show, on_record=on_record, by=by, engine=quiet)
        table = None
        if shape is not None and outcome.swept:
            table = table_of(outcome.swept, request, **shape, engine=quiet, on_record=on_record)
    for line in summary_lines(outcome) if outputs is not None else ():
        show(line)
    return outcome, table


def _sweep_options(levels: Mapping[str, Any]) -> SweepOptions:
    """The words as what they mean.

    Raises:
        UsageError: a value is not allowed.
    """
    values = {_FIELDS.get(name, name): value for name, value in levels.items() if value is not None}
    return SweepOptions(**{name: _KINDS[name](value) if name in _KINDS else value for name, value in values.items()})
