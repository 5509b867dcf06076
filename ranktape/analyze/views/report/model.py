"""Gathers what the page shows: facts, findings and columns of numbers, as plain data."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.engine import Engine, next_step
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
from ranktape.analyze.metrics.numbers import numbers_of
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.replays.replayed import Replayed
from ranktape.analyze.views.report.columns import SHOWN, SampleColumns, packed
from ranktape.analyze.views.report.details import Details, bundles_of
from ranktape.analyze.views.report.differences import SourceDifferences, differences_of, summary_of
from ranktape.analyze.views.report.recipes import recipe_columns, recipes_left_out
from ranktape.storage.format.memory import nbytes_text
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.formats import Format
    from ranktape.analyze.table import Table
    from ranktape.storage import Records

FIELDS = (*IDENTITY, "batch_size", "keep")
"""The fields that the page knows of each record, and filters by; `kind` is added.

The stack of layers only where there are several."""

BANDS = ("fp8_e4m3", "fp8_e5m2", "hif8", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "fp16")
"""The formats whose range is shown below a distribution."""

MAX_FINDINGS, MAX_PLACES = 200, 500
"""Findings of the page, and records that one of them opens."""

MAX_NAMED = 6
"""Iterations, types and so on that the first line names one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Everything on the page."""

    url: str
    """Where the run is."""
    facts: tuple[str, ...]
    """What the run is, in a few words each."""
    headline: str
    """What was found, in one sentence."""
    differences: tuple[SourceDifferences, ...]
    """Of several sources each against the first, below the table that was given for all of them."""
    findings: tuple[Finding, ...]
    """The worst first."""
    left_out: tuple[str, ...]
    """What the page does not show or shows together, and of which numbers it speaks; one sentence each."""
    data: Mapping[str, Any]
    """What the page's script reads, as JSON has it."""


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
    summary: Table | None = None,
    engine: Engine | None = None,
) -> Model:
    """What the page shows of a selection, `summary` first; `replayed` is what became of its products in the recipes.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: a format is not known, or has no room for a scale.
    """
    used = engine or Engine()
    named = sorted({place for finding in findings[:MAX_FINDINGS] for place in finding.places[:MAX_PLACES]})
    known = numbers_of(records, view=view, engine=used)
    samples = SampleColumns(known)
    columns = {name: known.column(name) for name in ("elements", *(one.source for one in SHOWN))}
    details = _details(records, named, formats=formats, view=view, engine=used)
    sample_columns, num_sampled = samples.to_json(first=set(named))
    shown = [(one, columns[one.source]) for one in SHOWN]
    swept = [job.scheme.element.name for job in details.targets]
    of_recipes = None if replayed is None else recipe_columns(records, replayed, recipes)
    if len(records.sources) > 1:
        next_step()
    return Model(
        url=printable(url),
        facts=_facts(records, scope=scope, environment=environment or {}),
        headline=headline(findings, num_records=len(records)),
        differences=(*([] if summary is None else [summary_of(summary)]), *differences_of(records, engine=used)),
        findings=tuple(findings[:MAX_FINDINGS]),
        left_out=(
            *_left_out(details, samples, num_findings=len(findings), num_sampled=num_sampled),
            *recipes_left_out(records, replayed, of_recipes),
        ),
        data={
            "url": printable(url),
            "urls": {part.name: printable(part.records.reader.url) for part in records.by_source()},
            "count": len(records),
            "fields": _fields(records),
            "nbytes": packed(records.column("nbytes")),
            "elements": packed(columns["elements"]),
            "metrics": [one.to_json(column) for one, column in (*shown, *details.ratios())],
            "details": details.to_json(),
            "samples": sample_columns,
            "recipes": of_recipes,
            "bands": [_band(FORMATS[name]) for name in dict.fromkeys((*BANDS, *swept)) if name != "nvfp4"],
            "findings": [_shown_on_charts(finding, records) for finding in findings[:MAX_FINDINGS]],
            "start": _start(findings, columns, records),
        },
    )


def _details(records: Records, named: Sequence[int], *, formats: Sequence[str], view: View, engine: Engine) -> Details:
    """What the page shows of a record that is chosen; those that findings name come first."""
    details = Details(bundles_of(records, alone=named), num_records=len(records), formats=formats, view=view)
    next_step()
    details.add_records(records, engine=engine)
    next_step()
    details.add_block_sweeps(records, first=named, engine=engine)
    return details


def _shown_on_charts(finding: Finding, records: Records) -> dict[str, Any]:
    """What the page's script knows of a finding, which an address names by its title.

    `samples` are the numbers of its sample in its records, from 0; None where it is about none.
    """
    places, sample = finding.places[:MAX_PLACES], finding.where.get("sample")
    names = [] if sample is None else sample_names(records.take(places))
    return {
        "title": printable(finding.title),
        "severity": finding.severity.value,
        "places": list(places),
        "metric": finding.metric,
        "samples": None if sample is None else [[*map(str, known)].index(str(sample)) for known in names],
        "followed_by": list(finding.followed_by),
    }


def _fields(records: Records) -> list[dict[str, Any]]:
    has_stacks = len(stacks_of(records)) > 1
    wanted = [*source_fields(records), *(name for name in FIELDS if has_stacks or name != "layer_stack")]
    made = [_layers(records) if has_stacks and name == "layer_idx" else _field(records, name) for name in wanted]
    return [*made, _kind(records)]


def _coded(name: str, values: Sequence[Any], known: Sequence[Any], **more: Any) -> dict[str, Any]:
    """A field whose values are numbered as they stand in `known`."""
    places = {value: code for code, value in enumerate(known)}
    codes = packed([places[value] for value in values])
    return {"name": name, "isNumber": False, "values": list(known), "codes": codes, **more}


def _layers(records: Records) -> dict[str, Any]:
    """The layers of several stacks: as numbers where they are drawn, with the words that they are called."""
    places = places_of(records)
    known = sorted(set(places))
    words = ["outside" if place < 0 else printable(str(place)) for place in known]
    return _coded("layer_idx", places, known, words=words)


def _field(records: Records, name: str) -> dict[str, Any]:
    values = records.column(name).tolist()
    if name in NUMBER_FIELDS:
        values = [None if value != value else int(value) for value in values]  # noqa: PLR0124 - NaN
        known = sorted(set(values), key=lambda value: (value is None, value or 0))
        return _coded(name, values, known, isNumber=True)
    texts = [str(value) for value in values]
    known = sorted(set(texts), key=lambda text: (natural(text), text))
    shown = _shape_text if name == "shape" else printable
    return _coded(name, texts, known) | {"values": [*map(shown, known)]}


def _kind(records: Records) -> dict[str, Any]:
    """What a tensor is in its layer: a field of the page's own, in the order in which tensors were recorded."""
    parts = [records.column(name).tolist() for name in ("layer_type", "operation", "phase", "tensor_name")]
    texts = [printable(" ".join(words)) for words in zip(*parts, strict=True)]
    return _coded("kind", texts, list(dict.fromkeys(texts)))


def _shape_text(text: str) -> str:
    return " x ".join(map(str, json.loads(text))) or "scalar"


def _band(row: Format) -> dict[str, Any]:
    """Binades, as exponents of their lower ends: the last is where the largest value is."""
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
    """From the first to the last record; empty where that is no time."""
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


def _left_out(details: Details, samples: SampleColumns, *, num_findings: int, num_sampled: int) -> tuple[str, ...]:
    """What the page does not show or shows together, and of which numbers it speaks."""
    said, bundles = [], details.bundles
    if num_findings > MAX_FINDINGS:
        said.append(f"{num_findings - MAX_FINDINGS:,} findings more than the {MAX_FINDINGS} that the page lists.")
    if bundles.together:
        groups = f"{bundles.num:,} groups of the {len(bundles.of):,} records, which agree in {bundles.together}"
        said.append(f"Distributions and sweeps are of {groups}; those that a finding names have their own.")
    if details.num_without_values:
        kept = f"Of {details.num_without_values:,} records the statistics alone were kept"
        said.append(f"{kept}: they have no distribution, no percentile and no sweep.")
    if details.num_not_read:
        untried = f"Formats with scales of blocks were not tried on {details.num_not_read:,} records"
        said.append(f"{untried}, for time: 'ranktape analyze sweep' does.")
    if details.num_rounded:
        wide = f"Of {details.num_rounded:,} records of wide types"
        said.append(f"{wide}, distributions and sweeps with one scale are of summaries.")
    if num_sampled != samples.num_records:
        some = f"{num_sampled:,} of {samples.num_records:,} records that have some"
        said.append(f"Samples are shown of {some}: those that differ most.")
    return tuple(said)


_OF_RANKS = ("rank_differs", "replica_differs")
_OF_LAYERS = ("layer_differs", "gradient_exploding", "gradient_vanishing")
"""Kinds of findings in which a rank is compared with the other ranks, or a layer with the other layers."""


def _start(findings: Sequence[Finding], columns: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """What the overview shows first: where the worst finding is seen best."""
    is_magnitude = {one.name: one.is_magnitude for one in SHOWN}
    worst = findings[0] if findings else None
    name = "overflow.ratio" if np.nansum(columns["overflow.total"]) else "absmax"
    if worst is not None and worst.metric in is_magnitude:
        name = worst.metric
    kinds = set() if worst is None else set(_kind(records.take(worst.places))["values"])

    def first(*fields: str, or_else: str) -> str:
        return next((field for field in fields if np.unique(records.column(field)).size > 1), or_else)

    across = first("source", "rank", "iteration", or_else="kind")
    if worst is not None and across == "rank" and worst.kind not in _OF_RANKS:
        across = first("iteration", "rank", or_else="kind")
    if worst is not None and "sample" in worst.where:
        across = "sample"
    return {
        "metric": name,
        "across": across,
        "down": first("layer_idx", or_else="module"),
        "againstPeers": is_magnitude[name],
        "peersOf": "layers" if worst is not None and worst.kind in _OF_LAYERS else "places",
        "ofKind": kinds.pop() if len(kinds) == 1 else "",
        "colorBy": first("source", "operation", "layer_type", or_else="kind"),
    }
