"""Logs a selection to Weights & Biases as a run of a project: scalars, histograms and pictures over the iterations."""

from __future__ import annotations

import io
import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.analyze.views.exports.files import Exported, amount, missing_package
from ranktape.errors import StorageError, UsageError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    import wandb

    from ranktape.analyze.views.exports.series import Point


def check_wandb(project: str) -> None:
    """See that the library is there and the project has a name, before anything is read.

    Raises:
        UsageError: W&B is not installed, or the name is no `PROJECT` or `ENTITY/PROJECT`.
    """
    words = project.split("/")
    if len(words) > 2 or not all(words):  # noqa: PLR2004 - ENTITY/PROJECT
        raise UsageError(f"{project!r} names no project of W&B: give PROJECT or ENTITY/PROJECT")
    try:
        import wandb  # noqa: F401 - asked whether it is there
    except ImportError as error:
        raise missing_package("Weights & Biases", "wandb", error) from error


def log_run(
    points: Sequence[Point], pictures: Mapping[str, bytes], *, project: str, name: str, config: Mapping[str, Any]
) -> Exported:
    """Log points as a run of a project, the iteration as its step; pictures belong to the last one.

    Where it goes is what W&B's own variables say: `WANDB_MODE=offline` writes a folder of this machine.

    Raises:
        StorageError: W&B cannot be reached or takes nothing.
        UsageError: W&B is not installed, nobody is logged in, or the project has no name.
    """
    check_wandb(project)
    import wandb

    run = _started(project, name=name, config=config)
    try:
        with run:
            for step, members in itertools.groupby(points, key=lambda point: point.iteration):
                run.log(_row(list(members)), step=step)
            if pictures and points:
                images = {f"plots/{kind}": _image(png) for kind, png in pictures.items()}
                run.log(images, step=points[-1].iteration)
    except wandb.errors.Error as error:
        raise StorageError(f"W&B takes no more: {_line(error)}: {_OFFLINE}") from error
    folder = Path(run.dir).parent
    is_offline = run.offline
    return Exported(
        place=str(folder) if is_offline else str(run.url),
        what=amount(points, pictures),
        next_step=f"send it: wandb sync {shlex.quote(str(folder))}" if is_offline else "",
    )


def _started(project: str, *, name: str, config: Mapping[str, Any]) -> wandb.Run:
    import wandb

    entity, _, only = project.rpartition("/")
    # It is a program that exports, and no training: what the console says and the machine does is not logged.
    settings = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True)
    given: dict[str, Any] = {
        "entity": entity or None,
        "project": only,
        "name": name,
        "config": dict(config),
        "job_type": "ranktape",
    }
    try:
        run = wandb.init(**given, settings=settings)
    except wandb.errors.UsageError as error:
        raise UsageError(f"W&B refuses: {_line(error)}: say 'wandb login', or {_OFFLINE}") from error
    except wandb.errors.Error as error:
        raise StorageError(f"W&B cannot be reached: {_line(error)}: {_OFFLINE}") from error
    except ValueError as error:  # a variable of W&B, such as WANDB_MODE, says what is not allowed
        raise UsageError(f"W&B refuses its settings: {_line(error)}: mend its variables (WANDB_...)") from error
    if run.disabled:
        raise UsageError(f"W&B is switched off by WANDB_MODE=disabled: {_OFFLINE}")
    return run


_OFFLINE = "set WANDB_MODE=offline to write a folder"


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def _row(points: Sequence[Point]) -> dict[str, Any]:
    """What is logged of an iteration."""
    import wandb

    row: dict[str, Any] = {}
    for point in points:
        row |= {f"{name}/{point.place}": value for name, value in point.metrics.items()}
        for kind, found in (("values", point.values), ("binades", point.binades)):
            if found is not None:
                row[f"{kind}/{point.place}"] = wandb.Histogram(np_histogram=(found.counts, found.edges))
    return row


def _image(png: bytes) -> Any:
    import wandb
    from PIL import Image

    return wandb.Image(Image.open(io.BytesIO(png)))
