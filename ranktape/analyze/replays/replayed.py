"""Replays the products of recorded calls with recipes, and collects the errors of each call.

The errors of each call are cached beside the run separately for each recipe, so that only new recipes are computed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Keys, record_keys
from ranktape.analyze.engine.engine import KEY_COLUMNS, Engine, cached_values
from ranktape.analyze.identity import NUMBER_FIELDS, are_files
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, Recipe
from ranktape.analyze.replays.calls import LeftOut, RecordedCall, RecordedCalls, calls_of
from ranktape.analyze.replays.computable import CALL_FIELDS
from ranktape.analyze.replays.tasks import CallErrors, CallTasks, replay_any
from ranktape.errors import RanktapeError, UnknownFieldError, UsageError, nearest
from ranktape.fields import SAMPLE
from ranktape.storage import Records

GROUP_FIELDS = (*CALL_FIELDS, SAMPLE, "product", "recipe")
"""The fields by which replayed products can be grouped."""


def replay_calls(
    records: Records,
    recipes: Sequence[Recipe],
    *,
    products: Collection[str] = (),
    has_attention: bool = False,
    engine: Engine | None = None,
) -> Replayed:
    """The errors of each product of each call of the selected linear layers, by each recipe.

    `calls_of` defines which products are selected. Each recipe applies its exceptions for layers. Published recipes
    leave attention in bfloat16; with `has_attention`, it is nevertheless computed with quantized operands. Each worker
    has the tensors of one call in memory.
    """
    calls = calls_of(records, products=products, has_attention=has_attention)
    return replay_found(calls, recipes, engine=engine)


def replay_found(calls: RecordedCalls, recipes: Sequence[Recipe], *, engine: Engine | None = None) -> Replayed:
    """The errors of calls that were selected before, like `replay_calls`."""
    names = tuple(one.name for one in recipes)
    if RECORDED in names:
        raise UsageError(f"a recipe is called {RECORDED}, the word for what was recorded: give it another name")
    found = _found_of_each(calls, recipes, engine=engine or Engine())
    width = 1 + len(recipes)
    reasons = {item // width: str(one) for item, one in enumerate(found) if isinstance(one, RanktapeError)}
    rows = [np.zeros((0, _WIDTH)) if isinstance(one, RanktapeError) else one for one in found]
    parts = np.concatenate([np.zeros((0, _WIDTH)), *rows])
    unknown = [
        LeftOut(key=calls.calls[place].key, product=product, reason=reason)
        for place, reason in reasons.items()
        for product in calls.calls[place].products
    ]
    places, recipe_places = np.divmod(np.repeat(np.arange(len(rows)), list(map(len, rows))), width)
    product_places, sample_places = parts[:, :2].T.astype(np.int64)
    order = np.lexsort((sample_places, recipe_places, product_places, places))
    of_rows = [
        (calls.calls[place], *rest)
        for place, *rest in zip(
            *(one[order].tolist() for one in (places, product_places, recipe_places, sample_places)), strict=True
        )
    ]
    samples = [(call.samples or (call.sample,))[sample] for call, _, _, sample in of_rows]
    exact, recorded = np.split(parts[order, 2:], 2, axis=1)
    return Replayed(
        calls=replace(calls, left_out=(*calls.left_out, *unknown)),
        recipes=names,
        places=places[order],
        products=np.array([list(call.products)[product] for call, product, _, _ in of_rows], dtype=object),
        names=np.array([(RECORDED, *names)[recipe] for _, _, recipe, _ in of_rows], dtype=object),
        samples=np.array([*samples, None], dtype=object)[:-1],
        exact=exact,
        recorded=recorded,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedGroup:
    """Products that are evaluated together."""

    key: Mapping[str, Any]
    """The values of the fields by which they are grouped."""
    exact: ErrorSums
    """Errors against the products of the recorded operands in float32."""
    recorded: ErrorSums
    """Errors against the recorded results that can be compared; zero if none can."""
    num_calls: int
    """Number of calls."""
    rows: NDArray[np.int64]
    """The rows, with the largest errors first: NaN and Inf, then the smallest SQNR."""

    @property
    def worst(self) -> int:
        """The row with the largest error."""
        return int(self.rows[0])

    @property
    def median(self) -> int:
        """The row with the median error; for an even number of rows, the worse one in the middle."""
        return int(self.rows[(len(self.rows) - 1) // 2])


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """The errors of each product of each call by each recipe, in columns with one row for each."""

    calls: RecordedCalls
    """The calls, and the products that cannot be replayed."""
    recipes: tuple[str, ...]
    """The names of the recipes. In the rows, `recorded` comes before them."""
    places: NDArray[np.int64]
    """The index of the call, by row."""
    products: NDArray[np.object_]
    """The product, by row."""
    names: NDArray[np.object_]
    """The name of the recipe, by row."""
    samples: NDArray[np.object_]
    """The sample, by row; None if the samples of the call are not distinguished."""
    exact: NDArray[np.float64]
    """`ErrorSums.to_array` against the product of the recorded operands in float32, by row."""
    recorded: NDArray[np.float64]
    """`ErrorSums.to_array` against the recorded result, by row; all 0 if it cannot be compared."""

    def sums(self, row: int) -> ErrorSums:
        """The errors of a row against the product of the recorded operands in float32."""
        return ErrorSums.pooled(self.exact[row])

    def column(self, field: str) -> list[Any]:
        """The values of one of `GROUP_FIELDS`, by row.

        Raises:
            UnknownFieldError: there is no such field.
        """
        of_rows = {"product": self.products, "recipe": self.names, SAMPLE: self.samples}
        if field in of_rows:
            return list(of_rows[field])
        if field not in GROUP_FIELDS:
            raise UnknownFieldError(f"products of calls have no field {field!r:.60}: {nearest(field, GROUP_FIELDS)}")
        of_calls = [one.field(field) for one in self.calls.calls]
        return [of_calls[place] for place in self.places.tolist()]

    def groups(self, by: Sequence[str]) -> list[ReplayedGroup]:
        """The products grouped by fields, sorted by these; modules and other names are in the order of the records."""
        rows: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        columns = [self.column(field) for field in by]
        for row, key in enumerate(zip(*columns, strict=True) if columns else [()] * len(self.places)):
            rows[key].append(row)
        orders = [self._order(field, column) for field, column in zip(by, columns, strict=True)]
        keys = sorted(rows, key=lambda key: [order[value] for order, value in zip(orders, key, strict=True)])
        return [self._group(dict(zip(by, key, strict=True)), np.array(rows[key])) for key in keys]

    @functools.cached_property
    def badness(self) -> NDArray[np.float64]:
        """The squared relative error, by row; infinite if finite operands gave NaN or Inf."""
        columns = dict(zip(ErrorSums.__slots__, self.exact.T, strict=True))
        errors, references = columns["error_squared"], columns["reference_squared"]
        ratio = np.full(len(errors), math.inf)
        np.divide(errors, references, out=ratio, where=references > 0)
        ratio[errors == 0] = 0
        ratio[columns["num_lost"] > 0] = math.inf
        return ratio

    def _order(self, field: str, column: Sequence[Any]) -> dict[Any, Any]:
        """The sort key of each value of a field."""
        if field in NUMBER_FIELDS:
            return {value: value for value in column}
        if field == SAMPLE:
            # Names may be numbers and texts, which cannot be compared.
            return {value: (value is not None, isinstance(value, str), value) for value in column}
        known = {"product": (*PRODUCTS,), "recipe": (RECORDED, *self.recipes)}.get(field, ())
        return {value: place for place, value in enumerate(dict.fromkeys((*known, *column)))}

    def _group(self, key: Mapping[str, Any], rows: NDArray[np.int64]) -> ReplayedGroup:
        return ReplayedGroup(
            key=key,
            exact=ErrorSums.pooled(self.exact[rows]),
            recorded=ErrorSums.pooled(self.recorded[rows]),
            num_calls=len(np.unique(self.places[rows])),
            rows=rows[np.argsort(-self.badness[rows], kind="stable")],
        )


VERSION = 2
"""Version of the sums of errors. Increase it if a recipe or a product computes other numbers."""

_WIDTH = 2 + 2 * len(ErrorSums.__slots__)
"""Length of a cached row: the indices of the product and the sample, and the sums against the exact and the recorded
product."""

_MAX_ROWS = 512
"""Maximum number of pairs of call and recipe in one object."""

_COLUMNS = (*KEY_COLUMNS, "iteration", "rank", "layout", "placement", "metadata")
"""The columns that identify a record and its content."""


def _found_of_each(
    calls: RecordedCalls, recipes: Sequence[Recipe], *, engine: Engine
) -> list[NDArray[np.float64] | RanktapeError]:
    """The errors of each call by each recipe, from the cache if possible."""
    names = RECORDED, *(one.name for one in recipes)

    def make(items: Sequence[int]) -> Iterator[NDArray[np.float64] | RanktapeError]:
        asked: defaultdict[int, list[str]] = defaultdict(list)
        for item in items:
            asked[item // len(names)].append(names[item % len(names)])
        tasks = CallTasks(calls, recipes, asked=asked)
        results = engine.map(replay_any, tasks, sizes=tasks.sizes)
        for (place, wanted), found in zip(asked.items(), results, strict=True):
            for name in wanted:
                if isinstance(found, str):
                    yield RanktapeError(found)
                else:
                    yield _row(found, calls.calls[place], name=name)

    if not engine.use_cache or are_files(calls.records) or not calls.calls:
        return list(make(range(len(calls.calls) * len(names))))
    paths = {row: path for path, rows in calls.records.groups() for row in range(rows.start, rows.stop)}
    groups, start = [], 0
    of_calls = (paths[min(row for rows in call.rows.values() for row in rows)] for call in calls.calls)
    for path, several in itertools.groupby(of_calls):
        stop = start + len(names) * len(list(several))
        groups.append((path, slice(start, stop)))
        start = stop
    keys = _keys(calls, recipes)
    name = f"replay_v{VERSION}"
    return cached_values(calls.records.reader, groups, keys, make, name=name, max_rows=_MAX_ROWS)


def _keys(calls: RecordedCalls, recipes: Sequence[Recipe]) -> Keys:
    """The key of the errors of each call by each recipe."""
    records = [key.tobytes().hex() for key in record_keys([calls.records.stored(name) for name in _COLUMNS])]
    texts: dict[tuple[str, bool], str] = {}
    found: list[tuple[str, str]] = []
    for call in calls.calls:
        own = [f"{name} {[records[row] for row in rows]}" for name, rows in sorted(call.rows.items())]
        what = f"{own} {dict(call.products)} {call.is_bias_known} {call.sample_dim} {call.samples}"
        of_recipes = [""]
        for one in recipes:
            applied = calls.recipe_of(call, one)
            key = one.name, applied is one
            texts[key] = texts.get(key) or repr((applied.products, applied.seed, applied.draws))
            of_recipes.append(texts[key])
        found += [(what, one) for one in of_recipes]
    return record_keys([*zip(*found, strict=True)])


def _row(errors: CallErrors, call: RecordedCall, *, name: str) -> NDArray[np.float64]:
    """The errors of a call by the recipe of that name."""
    places = {product: place for place, product in enumerate(call.products)}
    parts = [
        (places[product], sample, *sums)
        for product, recipe, exact, recorded in errors
        if recipe == name
        for sample, sums in enumerate(np.hstack([np.atleast_2d(exact), np.atleast_2d(recorded)]))
    ]
    return np.array(parts, dtype=np.float64).reshape(-1, _WIDTH)
