"""Exports a selection to one of the programs that people look at all day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.identity import words
from ranktape.analyze.metrics.metric import parse_metric
from ranktape.analyze.views.exports.files import Exported, check_folder
from ranktape.errors import UsageError

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
    """Write a selection for TensorBoard, or as Parquet; `target` is the folder.

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
    from ranktape.analyze.views.exports.event_file import check_tensorboard, write_events
    from ranktape.analyze.views.exports.series import PICTURES, pictures, points

    named = words(kind)
    kinds = [] if named == (NO_PICTURES,) else parse_kinds(named or PICTURES)
    check_tensorboard()
    check_folder(target)
    found = points(records, metrics=metrics, has_histograms=not no_histograms, by=by, view=view, engine=engine)
    drawn = pictures(records, kinds=kinds, must_be_there=bool(named), view=view, engine=engine)
    return write_events(found, drawn, folder=target, overwrite=overwrite)


OWNERS = {
    "metric": ("tensorboard", "parquet"),
    "kind": ("tensorboard",),
    "no_histograms": ("tensorboard",),
    "by": ("tensorboard",),
    "view": ("tensorboard", "parquet"),
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
