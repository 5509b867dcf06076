"""Writes a report as one file that loads nothing, runs nothing of a stranger's, and is whole or not there."""

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
from ranktape.analyze.numerics.recipes.words import RecipeWord, parse_recipes
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
"""The formats that are tried on every record: those whose sweeps cost little."""

SCRIPTS = ("data.js", "charts.js", "selection.js", "overview.js", "drill.js", "tables.js", "page.js")
"""The page's own scripts: together one module, in which each may use what the ones before it define."""

COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#999999", "#8C6D1F")
"""Those of the plots, with a lighter grey and brown in the place of black: all can be seen on white and on black."""

CHARTS = {
    "colors": COLORS,
    "diverging": [(place / (len(DIVERGING) - 1), color) for place, color in enumerate(DIVERGING)],
    "marks": [
        ("missing", "no record, or not known", MISSING_COLOR),
        ("zero", "all zero", ZERO_COLOR),
        ("inf", "Inf", INFINITE_COLOR),
        ("nan", "NaN", NAN_COLOR),
    ],
}

NUM_FIRST_FINDINGS = 5
"""Findings that are shown before the rest is asked for: as many as the first screen holds."""


def write_report(
    records: Records,
    *,
    output: Path | str,
    view: View | None = None,
    format: Sequence[str] = FORMATS,  # noqa: A002 - the option's name
    recipe: RecipeWord | Sequence[RecipeWord] = (),
    url: str = "",
    scope: str = "",
    environment: Mapping[str, Any] | None = None,
    comparison: Comparison | None = None,
    engine: Engine | None = None,
) -> Path:
    """Write one HTML file that says what is wrong in a selection and where; returns its path.

    Findings and metrics are of finite values, NaN and infinities counted apart. `format` names those whose scales are
    tried, `recipe` recipes in which products of layers are computed again, which takes the time of these products;
    `url`, `scope` (which records were chosen, in words) and `environment` (that of the run's document) are for
    the line below the title; a `comparison` of trainings comes first on the page. A file that is there is
    replaced, folders are made; the file is whole or not there. The same records give the same bytes.

    Raises:
        AccessDeniedError: the file may not be written.
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: there are no records.
        NoSpaceError: the disk is full.
        StorageError: the store cannot be read, or the file cannot be written.
        UsageError: a format is not known or has no room for a scale; a recipe is not known; `output` is a directory or
            no plain file.
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
    # Half of a surrogate pair, which a name may hold, has no UTF-8.
    write_whole(path, render(model, view=chosen).encode("utf-8", errors="replace"), what="report")
    return path


def model_of(
    records: Records,
    *,
    view: View,
    format: Sequence[str] = FORMATS,  # noqa: A002 - the option's name
    recipe: RecipeWord | Sequence[RecipeWord] = (),
    comparison: Comparison | None = None,
    engine: Engine | None = None,
    **about: Any,
) -> Model:
    """What the page shows, with the arguments of `write_report`."""
    from ranktape.analyze.findings.find import find

    if not len(records):
        raise NoRecordsError("there are no records to report on")
    used = engine or Engine()
    # A format that is not known is refused before hours are spent too.
    parse_jobs(format)
    recipes = parse_recipes(recipe) if recipe else []
    # Findings, distributions, scales of blocks; recipes and the differences of sources, where there are some.
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
    """The script that draws the charts as a page holds it, its hash for the policy of a page, and ids.

    The ids are of style elements that it adds for maps unless they are there: none is drawn here.
    """
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # it has no types

    text = _lines(get_plotlyjs())
    return deflated(text), _hash(text), sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', text)))


def deflated(text: str) -> str:
    """A text as a page holds it: its UTF-8 in zlib's format, as base64."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def render(model: Model, *, view: View = View.COMPUTE) -> str:
    """The page as text: every string of the run is escaped, and the browser may run our scripts alone."""
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
    # plotly makes an empty style element, which it fills with rules of its own, and sets style attributes.
    policy = (
        f"default-src 'none'; script-src {_hash(script)} {plotly_hash}; style-src-elem {_hash(style)} {_hash('')}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    words = {
        View.COMPUTE: "Values are those that the operations computed with: rounded to their compute dtype.",
        View.SEEN: "Values are as they were captured.",
    }
    return environment.get_template("report.html.j2").render(
        model=model,
        title=f"What the numbers do in {model.url}" if model.url else "What the numbers do",
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
    """The text as a browser sees it, whose hash it makes."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _checked(output: Path) -> Path:
    """The path of a file that can be written, before hours are spent on what goes into it."""
    if str(output) == "-":
        raise UsageError("--output - is not a file, and a report needs one: give its name, such as report.html")
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
        raise UsageError(f"--output {named} is not a plain file: give the name of one")
    path = output.resolve()
    with writing(output, what="report"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    return path
