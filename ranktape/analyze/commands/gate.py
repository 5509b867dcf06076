"""Does a run hold to rules: the command `ranktape analyze gate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say
from ranktape.analyze.options import (
    FORMAT_HELP,
    NamedPath,
    Output,
    Selection,
    by_option,
    engine_options,
    output_options,
    selection_options,
    view_option,
)
from ranktape.errors import CheckFoundError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View


def _show_defaults(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:  # noqa: FBT001 - click's
    if is_wanted and not context.resilient_parsing:
        from ranktape.analyze.rules.defaults import DEFAULT_RULES

        say(DEFAULT_RULES.rstrip("\n"))
        context.exit()


@click.command(name="gate")
@selection_options
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="RULE",
    help="What has to hold: \"overflow.ratio < 1e-4 where layer_type == 'attention'\"; repeatable.",
)
@click.option(
    "--rule-file",
    "rule_files",
    multiple=True,
    type=NamedPath(path_type=Path),
    metavar="FILE",
    help="A YAML list of rules; repeatable.",
)
@click.option(
    "--show-defaults",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_defaults,
    help="Print the rules that hold where none are given, as a file for --rule-file, and exit.",
)
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help=FORMAT_HELP + " For rules about limits that name none; the captured dtype by default.",
)
@click.option(
    "--scaling",
    metavar="KIND",
    help="Scales before values meet the format, for rules that name none: none, tensor or block. Unless given, block "
    "for formats with blocks, none for others.",
)
@view_option
@by_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    rules: tuple[str, ...],
    rule_files: tuple[Path, ...],
    format_name: str | None,
    scaling: str | None,
    view: View | None,
    by: tuple[str, ...],
    engine: Engine,
    output: Output,
) -> None:
    """Check RUN against rules: exit 0 if all hold, and 3 with the offenders if one does not.

    A rule is a condition over figures (those of 'stats', of 'overflow', sqnr.mxfp8 and other losses of 'sweep',
    replicas.differing) and fields, of all records or of those that 'where' selects. A rule that selects nothing is an
    error, and a figure that does not exist fails. Without --rule and --rule-file the default rules hold, for which
    nothing is read. CSV holds the offenders alone.
    """
    from ranktape.analyze.questions.gate import gate
    from ranktape.analyze.rules.output import write_result

    result = gate(
        selection.records(),
        rules=rules,
        rule_file=rule_files,
        by=by,
        format=format_name,
        scaling=scaling,
        view=view,
        engine=engine,
    )
    write_result(result, output)
    if not result.passed:
        raise CheckFoundError(result.message)
