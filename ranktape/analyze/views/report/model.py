"""Collects the contents of a report as plain data: facts, findings, tables of differences, and numeric columns."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.engine.engine import Engine, next_step
from ranktape.analyze.engine.numbers import record_metrics
from ranktape.analyze.findings.finding import Finding, headline
from ranktape.analyze.identity import (
    IDENTITY,
    NUMBER_FIELDS,
    natural,
    places_of,
    sample_names,
    source_fields,
    stacks_of,
)
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.questions.compare import compare
from ranktape.analyze.table import Table
from ranktape.analyze.views.report.columns import (
    SHOWN,
    histograms_of,
    matrix_of,
    packed,
    ratios_of,
    recipe_map,
    rows_by_priority,
    sample_columns,
    usual_jobs,
)
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage.places.backend import nbytes_text
from ranktape.storage.places.failures import printable
from ranktape.storage.records.records import SOURCE

if TYPE_CHECKING:
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.formats import Format
    from ranktape.analyze.numerics.recipes.recipe import Recipe
    from ranktape.analyze.replays.replayed import Replayed
    from ranktape.storage import Records
    from ranktape.storage.records.records import SourcePart

FIELDS = (*IDENTITY, "batch_size", "keep")
"""The fields of each record that the page shows and filters by; `kind` is added.

The layer stack is only included if there are several."""

BANDS = ("fp8_e4m3", "fp8_e5m2", "hif8", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "fp16")
"""The formats whose range is shown below a distribution."""

MAX_FINDINGS, MAX_PLACES = 200, 500
"""The largest number of findings on the page, and of records for each finding."""

MAX_NAMED = 6
"""The largest number of iterations, types and so on that the first line lists."""

MAX_REASONS = 5
"""The largest number of reasons for products that cannot be computed, the most frequent first."""

MAX_MODULES, MAX_PAIRS = 10, 8
"""The largest number of modules in a comparison of two sources, and of sources compared with the first one."""

_COMPARED = ("module", "layer_idx", "pairs", "differing", "relative_norm.worst", "relative_norm.median", "cosine.worst")
"""The columns of a comparison that the page shows."""


class ShownTable(NamedTuple):
    """A table above the findings, as texts; `command` prints the complete table."""

    title: str
    explanation: str
    heads: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()
    is_left: Sequence[bool] = ()
    """Whether each column contains text and is aligned to the left."""
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of trainings of one script in several precisions, each of which is a source."""

    table: Table
    """Table with a row for each training."""
    explanation: str
    """Explanation of the differences, below the matrix."""
    sqnr: Mapping[tuple[str, str, str], float]
    """SQNR against the first source for each module, product and source, in dB."""
    target_sqnr: float
    """The SQNR at which the colours change, in dB."""
    losses: Mapping[str, Sequence[tuple[int, float]]]
    """For each source, the steps with a recorded loss, and the losses."""

    def curves(self) -> dict[str, list[tuple[int, float | None]]]:
        """The losses of each source, None for NaN and infinity; empty if no source has more than one point."""
        shown = {
            printable(source): [(step, loss if math.isfinite(loss) else None) for step, loss in points]
            for source, points in self.losses.items()
            if points
        }
        return shown if any(len(points) > 1 for points in shown.values()) else {}

    def matrix(self, records: Records) -> dict[str, Any] | None:
        """The SQNR of each product of each module in each source, in the format of `recipe_map`; None without SQNR."""
        if not self.sqnr:
            return None
        _, products, sources = (list(dict.fromkeys(names)) for names in zip(*self.sqnr, strict=True))
        cells: dict[str, dict[tuple[str, str], tuple[float | None, float]]] = {}
        for (module, *column), sqnr in self.sqnr.items():
            cells.setdefault(module, {})[column[0], column[1]] = sqnr, 0
        rows_of: dict[str, list[int]] = {}
        for row, module in enumerate(records.column("module").tolist()):
            rows_of.setdefault(module, []).append(row)
        columns = [(product, source) for product in products for source in sources]
        own = [rows_of.get(module, [])[:MAX_PLACES] for module in cells]
        return matrix_of(cells, columns, records=own, bits={}) | {"target": self.target_sqnr}


class Model(NamedTuple):
    """The contents of the page."""

    url: str
    facts: tuple[str, ...]
    """Short texts that describe the run."""
    headline: str
    """Summary of the findings, in one sentence."""
    tables: tuple[ShownTable, ...]
    """The table of the comparison, or tables of each other source against the first."""
    explanation: str
    """Explanation of the differences of a comparison; empty without one."""
    findings: tuple[Finding, ...]
    """The findings, the worst first."""
    left_out: tuple[str, ...]
    """Sentences about what the page omits or approximates."""
    data: Mapping[str, Any]
    """JSON data for the page's script."""


def build_model(
    records: Records,
    *,
    findings: Sequence[Finding],
    formats: Sequence[str],
    view: View,
    url: str = "",
    scope: str = "",
    environment: Mapping[str, Any] | None = None,
    recipes: Sequence[Recipe] = (),
    replayed: Replayed | None = None,
    comparison: Comparison | None = None,
    engine: Engine | None = None,
) -> Model:
    """The contents of the page for a selection; `replayed` has its products in the recipes.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: a format is unknown, or cannot use a scale.
    """
    used, jobs = engine or Engine(), usual_jobs(formats)
    listed = findings[:MAX_FINDINGS]
    named = sorted({place for finding in listed for place in finding.places[:MAX_PLACES]})
    known = record_metrics(records, ["elements", *(one.source for one in SHOWN)], view=view, engine=used)
    samples = sample_columns(known, first=set(named))
    columns = {name: known.column(name) for name in ("elements", *(one.source for one in SHOWN))}
    rows = rows_by_priority(records, first=named)
    next_step()
    binades, num_without_values, num_rounded = histograms_of(records, rows, view=view, engine=used)
    next_step()
    ratios, num_not_tried = ratios_of(records, rows, jobs=jobs, view=view, engine=used)
    tables: list[ShownTable] = [] if comparison is None else [_as_text(comparison.table)]
    if len(records.sources) > 1 and comparison is None:
        next_step()
        tables.extend(differences_of(records, engine=used))
    matrix = None if comparison is None else comparison.matrix(records)
    if replayed is not None:
        matrix = recipe_map(records, replayed, recipes)
    num_sampled, num_with_samples = samples["count"], int((known.sample_sizes > 0).sum())
    left_out = [
        (len(findings) > MAX_FINDINGS, f"{len(findings) - MAX_FINDINGS:,} more findings are not listed."),
        (
            len(rows) < len(records),
            f"The page has histograms of {len(rows):,} of {len(records):,} records, first those of findings.",
        ),
        (
            num_without_values,
            f"{num_without_values:,} records store only statistics: they have no histogram, percentiles or SQNR.",
        ),
        (
            num_not_tried,
            f"Formats were not tried on {num_not_tried:,} records, to save time: 'ranktape analyze sweep' tries all.",
        ),
        (num_rounded, f"For {num_rounded:,} records wider than 16 bits, histograms are approximate (within 2^-10)."),
        (
            num_sampled < num_with_samples,
            f"Samples are shown for the {num_sampled:,} of {num_with_samples:,} records whose samples differ most.",
        ),
    ]
    reasons = Counter(() if replayed is None else (one.reason for one in replayed.calls.left_out))
    shown = [*((one, columns[one.source]) for one in SHOWN), *ratios]
    bands = dict.fromkeys((*BANDS, *(job.scheme.element.name for job in jobs)))
    return Model(
        url=printable(url),
        facts=_facts(records, scope=scope, environment=environment or {}),
        headline=headline(findings, num_records=len(records)),
        tables=tuple(tables),
        explanation="" if comparison is None else printable(comparison.explanation),
        findings=tuple(listed),
        left_out=(
            *(text for is_shown, text in left_out if is_shown),
            *(
                f"{count:,} product{'s' if count > 1 else ''} could not be computed again: {printable(why)}."
                for why, count in reasons.most_common(MAX_REASONS)
            ),
        ),
        data={
            "url": printable(url),
            "urls": {part.name: printable(part.records.reader.url) for part in records.by_source()},
            "count": len(records),
            "fields": _fields(records),
            "nbytes": packed(records.column("nbytes")),
            "elements": packed(columns["elements"]),
            "metrics": [one.to_json(column) for one, column in shown],
            "binades": binades,
            "samples": samples,
            "recipes": matrix,
            "losses": None if comparison is None else comparison.curves(),
            "bands": [_band(FORMATS[name]) for name in bands if name != "nvfp4"],
            "findings": [_finding_json(finding, records) for finding in listed],
            "start": _start(findings, columns, records),
        },
    )


def _as_text(table: Table, *, title: str = "", command: str = "") -> ShownTable:
    heads, cells, is_left = table.text_cells()
    sentences = [table.title, *table.notes] if title else table.notes
    explanation = printable(" ".join(f"{text[:1].upper()}{text[1:]}." for text in sentences))
    title = title or f"{table.title[:1].upper()}{table.title[1:]}"
    return ShownTable(title, explanation, heads, cells, is_left, printable(command))


def differences_of(records: Records, *, engine: Engine) -> Iterator[ShownTable]:
    """A table of each other source against the first; all values that both sides have are read."""
    one, *others = records.by_source()
    for other in others[:MAX_PAIRS]:
        yield _difference(one, other, engine=engine)


def _difference(one: SourcePart, other: SourcePart, *, engine: Engine) -> ShownTable:
    title = printable(f"{other.name} against {one.name}")
    types = [sorted(set(part.records.column("quant_type").tolist())) for part in (one, other)]
    # If each source has one quant type and they differ, pairs records by it.
    is_pair = types[0] != types[1] and [len(names) for names in types] == [1, 1]
    pair = [f"quant_type={types[0][0]}:{types[1][0]}"] if is_pair else []
    urls = [shlex.quote(part.records.reader.url) for part in (one, other)]
    words = ["ranktape analyze compare", *urls, *(f"--pair {shlex.quote(text)}" for text in pair), "--allow-unmatched"]
    by: dict[str, Any] = {"pair": pair, "allow_unmatched": True, "distances": False, "by": ["module", "layer_idx"]}
    try:
        table = compare(one.records, other.records, **by, engine=engine)
    except (NoRecordsError, UsageError) as error:
        return ShownTable(title, f"They cannot be compared: {printable(str(error))}.")
    names = [column.name for column in table.columns]
    kept = [names.index(name) for name in _COMPARED if name in names]
    brief = dataclasses.replace(
        table,
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in table.rows[:MAX_MODULES]),
        notes=(),
    )
    return _as_text(brief, title=title, command=" ".join(words))


def _finding_json(finding: Finding, records: Records) -> dict[str, Any]:
    """A finding as JSON data for the page's script; addresses within the page identify it by its title.

    `samples` has the index of its sample in each of its records; None if it is not about a sample.
    """
    places, sample = finding.places[:MAX_PLACES], finding.where.get("sample")
    names = [] if sample is None else sample_names(records.take(places))
    return {
        "title": printable(finding.title),
        "places": list(places),
        "metric": finding.metric,
        "samples": None if sample is None else [[*map(str, known)].index(str(sample)) for known in names],
    }


def _fields(records: Records) -> list[dict[str, Any]]:
    has_stacks = len(stacks_of(records)) > 1
    made = []
    for name in (*source_fields(records), *FIELDS):
        if name == "layer_idx" and has_stacks:
            # Values are positions for drawing; `words` has the names.
            places = places_of(records)
            known = sorted(set(places))
            words = ["outside" if place < 0 else printable(str(place)) for place in known]
            made.append(_coded(name, places, known, words=words))
        elif name != "layer_stack" or has_stacks:
            made.append(_field(records, name))
    return [*made, _kind(records)]


def _coded(name: str, values: Sequence[Any], known: Sequence[Any], **more: Any) -> dict[str, Any]:
    """A field with values encoded as their indices in `known`."""
    places = {value: code for code, value in enumerate(known)}
    codes = packed([places[value] for value in values])
    return {"name": name, "isNumber": False, "values": list(known), "codes": codes, **more}


def _field(records: Records, name: str) -> dict[str, Any]:
    values = records.column(name).tolist()
    if name in NUMBER_FIELDS:
        values = [None if value != value else int(value) for value in values]  # noqa: PLR0124 - NaN
        known = sorted(set(values), key=lambda value: (value is None, value or 0))
        return _coded(name, values, known, isNumber=True)
    texts = [str(value) for value in values]
    known = list(dict.fromkeys(texts))
    if name != SOURCE:  # sources stay in the order in which they were given
        known.sort(key=lambda text: (natural(text), text))
    shown = _shape_text if name == "shape" else printable
    return _coded(name, texts, known) | {"values": [*map(shown, known)]}


def _kind(records: Records) -> dict[str, Any]:
    """The field `kind`: the role of a tensor in its layer, with values in the order of recording."""
    parts = [records.column(name).tolist() for name in ("layer_type", "operation", "phase", "tensor_name")]
    texts = [printable(" ".join(words)) for words in zip(*parts, strict=True)]
    return _coded("kind", texts, list(dict.fromkeys(texts)))


def _shape_text(text: str) -> str:
    return " x ".join(map(str, json.loads(text))) or "scalar"


def _band(row: Format) -> dict[str, Any]:
    """The limits of a format as exponents of binades, the largest one included."""
    smallest, normal, largest = (math.frexp(value)[1] - 1 for value in (row.min_subnormal, row.min_normal, row.maximum))
    return {"name": row.name, "subnormal": smallest, "normal": normal, "largest": largest}


def _facts(records: Records, *, scope: str, environment: Mapping[str, Any]) -> tuple[str, ...]:
    def distinct(name: str) -> list[Any]:
        return list(np.unique(records.column(name)).tolist())

    def counted(count: int, noun: str) -> str:
        return f"{count:,} {noun}{'' if count == 1 else 's'}"

    layers = {place for place in places_of(records) if place >= 0}
    sources = records.sources
    facts = [
        f"{len(sources)} sources ({_listed(sources)})" if len(sources) > 1 else "",
        counted(len(distinct("rank")), "rank"),
        f"{counted(len(distinct('iteration')), 'iteration')} ({_listed(distinct('iteration'))})",
        counted(len(records), "record"),
        nbytes_text(int(records.column("nbytes").sum())),
        _when(records.column("timestamp")),
        f"{counted(len(layers), 'layer')} ({_listed(distinct('layer_type'))})",
        _listed(distinct("dtype")),
        str(environment.get("program") or ""),
        f"torch {environment['torch']}" if environment.get("torch") else "",
        f"compiled code recorded {environment['compiled']}" if environment.get("compiled") else "",
        f"only {scope}" if scope else "",
    ]
    return tuple(printable(fact) for fact in facts if fact)


def _listed(values: Sequence[Any]) -> str:
    if len(values) <= MAX_NAMED:
        return ", ".join(map(str, values))
    if isinstance(values[0], int):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values[:MAX_NAMED])) + f" and {len(values) - MAX_NAMED} more"


def _when(timestamps: Any) -> str:
    """The time span of the records as text; empty if the timestamps are not valid times."""
    known = timestamps[np.isfinite(timestamps)]
    if not known.size:
        return ""
    try:
        first, last = (dt.datetime.fromtimestamp(float(end), dt.UTC) for end in (known.min(), known.max()))
    except (OverflowError, OSError, ValueError):
        return ""
    start, stop = f"{first:%Y-%m-%d %H:%M}", f"{last:%Y-%m-%d %H:%M}"
    if start == stop:
        return f"{start} UTC"
    return f"{start} to {stop.removeprefix(f'{first:%Y-%m-%d} ')} UTC"


_OF_RANKS = ("rank_differs", "replica_differs")
_OF_LAYERS = ("layer_differs",)
"""Kinds of findings that compare a rank with other ranks, or a layer with other layers."""


def _start(findings: Sequence[Finding], columns: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """The initial state of the overview, chosen to show the worst finding."""
    is_magnitude = {one.name: one.is_magnitude for one in SHOWN}
    worst = findings[0] if findings else None
    name = "overflow.ratio" if np.nansum(columns["overflow.total"]) else "absmax"
    if worst is not None and worst.metric in is_magnitude:
        name = worst.metric
    kinds = set() if worst is None else set(_kind(records.take(worst.places))["values"])

    def first(*fields: str, or_else: str) -> str:
        return next((field for field in fields if np.unique(records.column(field)).size > 1), or_else)

    columns_by = first("source", "iteration", "rank", or_else="kind")
    if worst is not None and columns_by == "iteration" and worst.kind in _OF_RANKS:
        columns_by = first("rank", or_else="iteration")
    if worst is not None and "sample" in worst.where:
        columns_by = "sample"
    against = "layers" if worst is not None and worst.kind in _OF_LAYERS else "places"
    return {
        "metric": name,
        "rows": first("layer_idx", or_else="module"),
        "columns": columns_by,
        "against": against if is_magnitude[name] else "",
        "kind": kinds.pop() if len(kinds) == 1 else "",
        "lines": first("source", "operation", "layer_type", or_else="kind"),
    }
