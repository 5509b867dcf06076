"""Gives what the page shows of recipes: for each product of each call the sums of its errors, as columns of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.replays.calls import calls_of, places_in
from ranktape.analyze.replays.replayed import Replayed
from ranktape.analyze.views.plots.plot import DEFAULT_RECIPES
from ranktape.analyze.views.report.columns import packed
from ranktape.analyze.views.report.details import occurrences
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.storage import Records

MAX_REASONS = 5
"""Reasons why products cannot be computed that the page names, the most frequent ones."""

MAX_LOOKED_AT = 2000
"""Records that are looked at first for a call of a layer."""

MAX_PRODUCTS = 200_000
"""Products of calls in recipes that the page holds; of more, those that keep least, of each layer alike."""


def recipe_columns(records: Records, replayed: Replayed, recipes: Sequence[Recipe]) -> dict[str, Any] | None:
    """The products that were computed again, for the page's script; None where there are none."""
    kept = _kept(replayed)
    if not kept.size:
        return None
    names = [*replayed.recipes, RECORDED]
    products = [group.key["product"] for group in replayed.groups(["product"])]
    places = places_in(records, replayed.calls)
    # A call is known by its first record on the page.
    shown = sorted({int(call) for call in replayed.places[kept] if places[call]})
    numbers = {call: number for number, call in enumerate(shown)}
    rows = [row for row in kept.tolist() if int(replayed.places[row]) in numbers]
    against = [ErrorSums.pooled(replayed.recorded[row]).sqnr for row in rows]
    return {
        "names": [*map(printable, names)],
        "bits": [*({one.name: one.bits for one in recipes}[name] for name in replayed.recipes), None],
        "recorded": len(names) - 1,
        "products": products,
        "calls": {
            "count": len(shown),
            "length": packed([len(places[call]) for call in shown]),
            "records": packed([place for call in shown for place in places[call]]),
        },
        "rows": {
            "count": len(rows),
            "call": packed([numbers[int(replayed.places[row])] for row in rows]),
            "product": packed([products.index(replayed.products[row]) for row in rows]),
            "recipe": packed([names.index(replayed.names[row]) for row in rows]),
            "against": packed(against),
            "sums": {
                name: packed(column) for name, column in zip(ErrorSums.__slots__, replayed.exact[rows].T, strict=True)
            },
        },
        "num_left_out": len(replayed.places) - len(rows),
    }


def recipes_left_out(records: Records, replayed: Replayed | None, columns: Mapping[str, Any] | None) -> Iterator[str]:
    """What the page does not know of recipes, a sentence each."""
    if replayed is None:
        # The first ones tell, as a rule.
        if any(
            calls_of(some).calls
            for part in records.by_source()
            for some in (part.records.take(range(min(len(part.records), MAX_LOOKED_AT))), part.records)
        ):
            yield f"Products of layers were not computed again: --recipe {DEFAULT_RECIPES} does, for each recipe."
        return
    if columns and columns["num_left_out"]:
        total = columns["rows"]["count"] + columns["num_left_out"]
        yield f"Of {total:,} products of calls in recipes the {columns['rows']['count']:,} that keep least are shown."
    reasons = Counter(one.reason for one in replayed.calls.left_out)
    for reason, count in reasons.most_common(MAX_REASONS):
        yield f"{count:,} product{'s' if count > 1 else ''} of calls could not be computed again: {printable(reason)}."


def _kept(replayed: Replayed) -> NDArray[np.int64]:
    """The rows that the page holds: the worst of each product of each layer, then the next ones."""
    count = len(replayed.places)
    if count <= MAX_PRODUCTS:
        return np.arange(count)
    worst_first = np.argsort(-replayed.badness, kind="stable")
    fields = (replayed.column(name) for name in ("module", "layer_stack", "layer_idx", "product", "recipe"))
    layers: dict[Any, int] = {}
    codes = np.array([layers.setdefault(key, len(layers)) for key in zip(*fields, strict=True)])
    turns = occurrences(codes[worst_first])
    return np.sort(worst_first[np.argsort(turns, kind="stable")][:MAX_PRODUCTS])
