"""Gives what is wrong in a run, and where: the question that the first screen of a report answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings.along import changing, differing_layers, vanishing_gradients
from ranktape.analyze.findings.apart import differing_ranks, outlying_channels, outlying_samples
from ranktape.analyze.findings.causes import families_of
from ranktape.analyze.findings.finding import KINDS, Finding
from ranktape.analyze.findings.lost import spoiled, underflowing
from ranktape.analyze.findings.replicas import differing_replicas
from ranktape.analyze.findings.survey import Survey
from ranktape.analyze.findings.triggered import triggered
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.numerics.recipes.words import RecipeWord, parse_recipes
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.storage import Records


def find(
    records: Records,
    *,
    view: View | None = None,
    engine: Engine | None = None,
    with_channels: bool = False,
    recipe: RecipeWord | Sequence[RecipeWord] = (),
    replayed: Replayed | None = None,
) -> list[Finding]:
    """What is wrong and what stands out, the worst first; one finding for each cause.

    NaN and infinities are findings; all other metrics are of finite values. Records of whole numbers are judged by the
    bits of their copies alone. Where histograms or statistics were kept, nothing is known of single samples and
    channels. No records, no findings.

    Every value is read once, unless it is known from an earlier question; with `with_channels` once more. With recipes
    products of layers are computed again in each, unless `replayed` is what came of that already.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen; or
            a recipe is not known.
    """
    recipes = parse_recipes(recipe) if recipe else []
    options: dict[str, Any] = {"view": view, "engine": engine, "with_channels": with_channels, "recipes": recipes}
    if len(records.sources) <= 1:
        return _find(records, replayed=replayed, **options)
    # What one source recorded is no peer, and no cause, of what another one did.
    parts = records.by_source()
    found = [one.in_source(part) for part in parts for one in _find(part.records, replayed=None, **options)]
    return sorted(found, key=lambda one: (one.severity.order, KINDS.index(one.kind), -one.score))


def _find(
    records: Records,
    *,
    view: View | None,
    engine: Engine | None,
    with_channels: bool,
    recipes: Sequence[Recipe],
    replayed: Replayed | None,
) -> list[Finding]:
    """What stands out in one source."""
    if not len(records):
        return []
    known = Survey(records, view=view, engine=engine)
    found = [*all_findings(known)]
    if with_channels:
        found.extend(outlying_channels(known, view=view, engine=engine))
    if recipes:
        from ranktape.analyze.findings.recipes import recipe_outliers

        found.extend(recipe_outliers(known, replayed or replay_calls(records, recipes, engine=engine), recipes))
    return [*triggered(records), *(family.as_finding() for family in families_of(known, found))]


def all_findings(known: Survey) -> Iterator[Finding]:
    """Everything that stands out in what is known, cause or not; channels apart."""
    yield from spoiled(known)
    yield from underflowing(known)
    yield from vanishing_gradients(known)
    yield from changing(known)
    yield from outlying_samples(known)
    yield from differing_ranks(known)
    yield from differing_replicas(known)
    yield from differing_layers(known)
