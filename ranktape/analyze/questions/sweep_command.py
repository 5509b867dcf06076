"""Answers `ranktape analyze sweep`: a table of all tensors, files about each of them, or both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

_KINDS: dict[str, Callable[[str], Any]] = {"mode": SweepMode, "scale_rule": ScaleRule, "rounding": Rounding}
"""The options of which a word is one of a closed set."""

_FIELDS = {"sweep_mode": "mode"}
"""Options whose names are longer than those of the fields: `--mode` is a filter."""

MAX_NAMED_FAILURES = 4
"""Reasons that the last message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepQuestion:
    """What the command line asks for."""

    formats: Sequence[str]
    """Names of formats, or several with commas in between."""
    levels: Mapping[str, Any]
    """The fields of `SweepOptions`, as words and numbers; None where the option was not given."""
    view: View | None
    """Which numbers are judged."""
    by: Sequence[str]
    """Fields to group by."""
    with_levels: bool
    """Whether the table has a row for each level."""
    target_sqnr: float
    """In dB: what a format has to keep."""
    output_dir: Path | None
    """Where files are to be written."""
    with_plots: bool
    """Whether plots are among them."""
    output: Output
    """How the table is written."""
    engine: Engine
    """Who counts; what is computed of the counts is computed here."""

    @property
    def asks_for_table(self) -> bool:
        """Whether an option is given that only a table has."""
        return bool(self.by) or self.with_levels or self.output.is_asked_for

    def sweep_options(self) -> SweepOptions:
        """The words as what they mean.

        Raises:
            UsageError: a value is not allowed.
        """
        values = {_FIELDS.get(name, name): value for name, value in self.levels.items() if value is not None}
        words = {name: _KINDS[name](value) if name in _KINDS else value for name, value in values.items()}
        return SweepOptions(**words)


def answer_sweep(selections: Sequence[Selection], asked: SweepQuestion) -> None:
    """Sweep every tensor of the sources, and write the table, the files or both.

    Raises:
        DataError: some tensor could not be swept; the others have been. Of a single one its own error is raised.
        NoRecordsError: nothing matches.
        StorageError: the output directory cannot be made.
        UsageError: an option is not allowed.
    """
    request = parse_request(asked.formats, options=asked.sweep_options(), view=asked.view or View.COMPUTE)
    check_shape(by=asked.by, with_levels=asked.with_levels, target_sqnr=asked.target_sqnr)
    if SAMPLE in asked.by and asked.output_dir is not None:
        raise UsageError("--by sample and --output-dir exclude each other: files are written about whole tensors")
    is_files = all(is_file(selection.run) for selection in selections)
    has_table = asked.asks_for_table or not (is_files or asked.output_dir)
    outputs = None
    if asked.output_dir is not None or not has_table:
        outputs = OutputOptions(output_dir=asked.output_dir or DEFAULT_OUTPUT_DIR, with_plots=asked.with_plots)
    tensors = list_tensors(selections, by=asked.by)
    swept = {id(tensor.records): tensor.records for tensor in tensors if tensor.records is not None}
    question = dataclasses.replace(asked, by=with_stacks(asked.by, *swept.values()))
    request, left_out = answerable(request, keeps={tensor.keep for tensor in tensors})
    if left_out:
        say(left_out, err=True)
    outcome = _sweep(tensors, request, question=question, outputs=outputs, has_table=has_table)
    if outcome.failures and outputs is None and len(tensors) == 1:
        raise outcome.failures[0].error
    if outcome.failures:
        reasons = outcome.reasons()
        named = "; ".join(reasons[:MAX_NAMED_FAILURES])
        rest = len(reasons) - MAX_NAMED_FAILURES
        more = f"; and for {rest} more reasons" if rest > 0 else ""
        raise DataError(f"{len(outcome.failures)} of {len(tensors)} tensors could not be swept: {named}{more}")


def _sweep(
    tensors: Sequence[ListedTensor],
    request: SweepRequest,
    *,
    question: SweepQuestion,
    outputs: OutputOptions | None,
    has_table: bool,
) -> SweepOutcome:
    # What goes to stdout is the answer: with a table, the log is not it.
    show = functools.partial(say, err=has_table)
    if outputs is not None:
        make_folder(outputs.output_dir)
        show(f"Processing {len(tensors)} tensor(s)...")
        show(DOUBLE)
    total = len(tensors) * num_readings(request, by=question.by) if outputs is None else 0
    # One bar is enough.
    engine = dataclasses.replace(question.engine, show_progress=False)
    with progress(total, description="sweeping") as on_record:
        outcome = sweep_tensors(
            tensors, request, outputs=outputs, show=show, on_record=on_record, by=question.by, engine=engine
        )
        table = None
        if has_table and outcome.swept:
            table = table_of(
                outcome.swept,
                request,
                by=question.by,
                with_levels=question.with_levels,
                target_sqnr=question.target_sqnr,
                engine=engine,
                on_record=on_record,
            )
    if outputs is not None:
        for line in summary_lines(outcome):
            show(line)
    if table is not None:
        question.output.write(table)
    return outcome
