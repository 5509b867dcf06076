"""How do the tools before us get the tensors of a run? As the files that they read."""

from __future__ import annotations

from pathlib import Path

import click

from ranktape.analyze.console import say
from ranktape.analyze.options import NamedPath, Selection, selection_options


@click.command(name="export")
@selection_options
@click.argument("folder", metavar="DIR", type=NamedPath(path_type=Path, file_okay=False))
@click.option(
    "--form",
    type=click.Choice(["seeds", "layers"]),
    default="seeds",
    show_default=True,
    help="One tagged file for each tensor, or embedding_output.pt, layer_N_output.pt and their statistics.",
)
@click.option("--per-sample", is_flag=True, help="One file for each sample, where a tensor has samples.")
@click.option("--overwrite", is_flag=True, help="Replace files that hold something else.")
def command(*, selection: Selection, folder: Path, form: str, per_sample: bool, overwrite: bool) -> None:
    """Write the tensors of RUN as .pt files into DIR.

    Their names and what is embedded in them are those of the tools before us, and `ranktape import` makes the same
    run of them. Files that are there and hold the same are left as they are. Filters are those of the analyze
    commands.
    """
    from ranktape.analyze.engine.progress import progress
    from ranktape.analyze.legacy.export import ExportForm, export_records
    from ranktape.analyze.table import nbytes_text

    records = selection.records()
    with progress(len(records), description="exporting") as on_record:
        report = export_records(
            records,
            folder,
            form=ExportForm(form),
            per_sample=per_sample,
            overwrite=overwrite,
            on_record=on_record,
        )
    kept = f"; {report.num_kept} were there already" if report.num_kept else ""
    say(f"{report.num_written} files written to {folder}, {nbytes_text(report.nbytes)} of values{kept}")
