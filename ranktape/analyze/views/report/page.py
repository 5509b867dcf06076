"""Writes a report as a single HTML file that loads nothing and runs only our own scripts."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import stat
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape._version import __version__
from ranktape.analyze.console import write_whole, writing
from ranktape.analyze.engine.engine import Engine, next_step, steps
from ranktape.analyze.engine.values import View
from ranktape.analyze.numerics.recipes.words import RecipeSource, parse_recipes
from ranktape.analyze.questions.sweep import parse_jobs
from ranktape.analyze.replays.replayed import replay_calls
from ranktape.analyze.views import (
    BLUE,
    DIVERGING,
    GREEN,
    INFINITE_COLOR,
    MISSING_COLOR,
    NAN_COLOR,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    ZERO_COLOR,
)
from ranktape.analyze.views.report.model import Comparison, Model, build_model
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.storage import Records

FORMATS = ("mxfp8_e4m3", "mxfp4_e2m1", "fp8_e4m3", "hif8")
"""The formats that are tried by default, whose sweeps are fast."""

SCRIPTS = ("data.js", "charts.js", "selection.js", "overview.js", "drill.js", "tables.js", "page.js")
"""The scripts of the page. They form one module, in which each can use the definitions of those before it."""

COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#999999", "#8C6D1F")
"""The colours of the plots, with a lighter grey and brown instead of black, all visible on white and on black."""

CHARTS = {
    "colors": COLORS,
    "diverging": [(place / (len(DIVERGING) - 1), color) for place, color in enumerate(DIVERGING)],
    "marks": [
        ("missing", "no record, or unknown", MISSING_COLOR),
        ("zero", "all zero", ZERO_COLOR),
        ("inf", "Inf", INFINITE_COLOR),
        ("nan", "NaN", NAN_COLOR),
    ],
}

NUM_FIRST_FINDINGS = 5
"""The number of findings that are shown initially: as many as fit on the first screen."""


def write_report(
    records: Records,
    *,
    output: Path | str,
    view: View | None = None,
    format: Sequence[str] = FORMATS,  # noqa: A002 - the option's name
    recipe: RecipeSource | Sequence[RecipeSource] = (),
    url: str = "",
    scope: str = "",
    environment: Mapping[str, Any] | None = None,
    comparison: Comparison | None = None,
    engine: Engine | None = None,
) -> Path:
    """Write an HTML file that shows what is wrong in a selection and where; returns its path.

    Metrics cover finite values; NaN and infinities are counted separately. `format` lists the formats that are tried,
    and `recipe` the recipes in which products of layers are computed again, which takes as long as the products.
    `url`, `scope` (a text about the selection) and `environment` (from the run's document) appear below the title. A
    `comparison` of trainings comes first on the page. An existing file is replaced, and folders are created; the file
    appears only once it is complete. The same records give the same bytes.

    Raises:
        AccessDeniedError: the permission to write the file is missing.
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: there are no records.
        NoSpaceError: the disk is full.
        StorageError: the store cannot be read, or the file cannot be written.
        UsageError: a format is unknown or cannot use a scale; a recipe is unknown; or `output` is not a regular file.
    """
    path, chosen = _checked(Path(output)), view or View.COMPUTE
    model = model_of(
        records,
        view=chosen,
        format=format,
        recipe=recipe,
        url=url,
        scope=scope,
        environment=environment,
        comparison=comparison,
        engine=engine,
    )
    # Names can contain lone surrogates, which cannot be encoded as UTF-8.
    write_whole(path, render(model, view=chosen).encode("utf-8", errors="replace"), what="report")
    return path


def model_of(
    records: Records,
    *,
    view: View,
    format: Sequence[str] = FORMATS,  # noqa: A002 - the option's name
    recipe: RecipeSource | Sequence[RecipeSource] = (),
    comparison: Comparison | None = None,
    engine: Engine | None = None,
    **about: Any,
) -> Model:
    """The contents of the page; for the arguments and errors, see `write_report`."""
    from ranktape.analyze.findings.find import find

    if not len(records):
        raise NoRecordsError("there are no records to report on")
    used = engine or Engine()
    # Rejects unknown formats before the computation, which can take hours.
    parse_jobs(format)
    recipes = parse_recipes(recipe) if recipe else []
    # The steps are findings, distributions and formats, and optionally recipes and differences of sources.
    with steps(3 + bool(recipes) + (len(records.sources) > 1 and comparison is None)):
        replayed = None
        if recipes:
            next_step()
            replayed = replay_calls(records, recipes, engine=used)
        next_step()
        about |= {"recipes": recipes, "replayed": replayed, "comparison": comparison, "engine": used}
        findings = find(records, view=view, engine=used)
        return build_model(records, findings=findings, formats=format, view=view, **about)


@functools.cache
def _plotly() -> tuple[str, str, list[str]]:
    """The compressed Plotly script, its hash for the content security policy, and IDs of style elements.

    Plotly adds these elements for maps unless they exist; the page does not draw maps.
    """
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # it has no types

    text = _lines(get_plotlyjs())
    return deflated(text), _hash(text), sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', text)))


def deflated(text: str) -> str:
    """A text as base64 of zlib-compressed UTF-8."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def render(model: Model, *, view: View = View.COMPUTE) -> str:
    """The page as HTML. All texts from the run are escaped, and the browser is only allowed to run our scripts."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("ranktape.analyze.views.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = _static("style.css"), "\n".join(map(_static, SCRIPTS))
    plotly, plotly_hash, taken_ids = _plotly()
    # Plotly creates an empty style element, fills it with rules, and sets style attributes.
    policy = (
        f"default-src 'none'; script-src {_hash(script)} {plotly_hash}; style-src-elem {_hash(style)} {_hash('')}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    words = {
        View.COMPUTE: "Values are rounded to the compute dtype of their operation.",
        View.SEEN: "Values are as they were captured.",
    }
    return environment.get_template("report.html.j2").render(
        model=model,
        title=f"Numerical report of {model.url}" if model.url else "Numerical report",
        policy=policy,
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own files
        plotly=plotly,
        data=deflated(json.dumps({**model.data, "charts": CHARTS}, separators=(",", ":"), allow_nan=False)),
        commands=[finding.command_in(model.url) for finding in model.findings],
        num_first=NUM_FIRST_FINDINGS,
        taken_ids=taken_ids,
        version=__version__,
        values=words[view],
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _static(name: str) -> str:
    return _lines((resources.files("ranktape.analyze.views.report") / "static" / name).read_text(encoding="utf-8"))


def _lines(text: str) -> str:
    """The text with line ends as normalized by a browser before it computes the hash."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _checked(output: Path) -> Path:
    """Check that a file can be written before the computation, and create its folder; returns the resolved path.

    Raises:
        UsageError: the path is invalid, or not that of a regular file.
        StorageError: the folder cannot be written.
    """
    if str(output) == "-":
        raise UsageError("--output - is not allowed: a report is written to a file; give its name, such as report.html")
    named = printable(str(output))
    try:
        mode = output.stat().st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        raise UsageError(f"--output {named} is not a path: {error}") from error
    if mode is not None and stat.S_ISDIR(mode):
        raise UsageError(f"--output {named} is a directory: give a file in it, such as report.html")
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"--output {named} is not a regular file: give the name of one")
    path = output.resolve()
    with writing(output, what="report"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    return path
