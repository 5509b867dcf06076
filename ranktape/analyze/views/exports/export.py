"""Exports a selection to one of the programs that people look at all day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.identity import words
from ranktape.analyze.metrics.metric import parse_metric
from ranktape.analyze.views.exports.files import Exported, check_folder
from ranktape.errors import UsageError
from ranktape.lazy_names import __version__
from ranktape.storage.places.backend import without_credentials

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.storage import Records

NO_PICTURES = "none"
"""What `--kind` says for no picture at all."""


def export_view(
    records: Records,
    target: str,
    *,
    to: str,
    metric: str | Sequence[str] = (),
    kind: str | Sequence[str] = (),
    no_histograms: bool = False,
    overwrite: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Exported:
    """Give a selection to TensorBoard, W&B or readers of Parquet; `target` is the folder or the project.

    What is missing, the library or a name, is said before anything is read.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read, or what is exported cannot be written.
        UnknownFieldError: `by` names no field of a record.
        UsageError: a library is not installed; a metric, a plot or the target is not known.
    """
    metrics = words(metric)
    for name in metrics:
        parse_metric(name)
    if to == "parquet":
        from ranktape.analyze.views.exports.parquet import write_parquet

        return write_parquet(records, folder=target, metrics=metrics, overwrite=overwrite, view=view, engine=engine)
    from ranktape.analyze.commands import parse_kinds
    from ranktape.analyze.views.exports import event_file, wandb_run
    from ranktape.analyze.views.exports.series import PICTURES, pictures, points

    named = words(kind)
    kinds = [] if named == (NO_PICTURES,) else parse_kinds(named or PICTURES)
    if to == "tensorboard":
        event_file.check_tensorboard()
        check_folder(target)
    else:
        wandb_run.check_wandb(target)
    found = points(records, metrics=metrics, has_histograms=not no_histograms, by=by, view=view, engine=engine)
    drawn = pictures(records, kinds=kinds, must_be_there=bool(named), view=view, engine=engine)
    if to == "tensorboard":
        return event_file.write_events(found, drawn, folder=target, overwrite=overwrite)
    place = without_credentials(records.reader.url)
    config = {"ranktape": {"run": place, "version": __version__, "records": len(records)}}
    name = place.rstrip("/").rpartition("/")[2]
    return wandb_run.log_run(found, drawn, project=target, name=name, config=config)


OWNERS = {
    "metric": ("tensorboard", "wandb", "parquet"),
    "kind": ("tensorboard", "wandb"),
    "no_histograms": ("tensorboard", "wandb"),
    "by": ("tensorboard", "wandb"),
    "view": ("tensorboard", "wandb", "parquet"),
    "overwrite": ("pt", "tensorboard", "parquet"),
    "form": ("pt",),
    "per_sample": ("pt",),
}
"""The destinations that each option is for."""


def refuse_strangers(to: str, **given: object) -> None:
    """Refuse options that were given and are for another destination.

    Raises:
        UsageError: one is.
    """
    for name, value in given.items():
        if value not in (None, (), False) and to not in OWNERS[name]:
            allowed = " or ".join(f"--to {one}" for one in OWNERS[name])
            raise UsageError(f"--{name.replace('_', '-')} is for {allowed}, and not for --to {to}")
