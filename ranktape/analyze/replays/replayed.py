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
from ranktape.analyze.replays.calls import LeftOut, RecordedCall, RecordedCalls, select_calls
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

    `select_calls` defines which products are selected. Each recipe applies its exceptions for layers. Published recipes
    leave attention in bfloat16; with `has_attention`, it is nevertheless computed with quantized operands. Each worker
    has the tensors of one call in memory.
    """
    calls = select_calls(records, products=products, has_attention=has_attention)
    return replay_selected(calls, recipes, engine=engine)


def replay_selected(calls: RecordedCalls, recipes: Sequence[Recipe], *, engine: Engine | None = None) -> Replayed:
    """The errors of calls that were selected before, like `replay_calls`."""
    names = tuple(recipe.name for recipe in recipes)
    if RECORDED in names:
        raise UsageError(f"a recipe is called {RECORDED}, the word for what was recorded: give it another name")
    errors = _call_errors(calls, recipes, engine=engine or Engine())
    width = 1 + len(recipes)
    reasons = {item // width: str(rows) for item, rows in enumerate(errors) if isinstance(rows, RanktapeError)}
    rows = [np.zeros((0, _WIDTH)) if isinstance(item, RanktapeError) else item for item in errors]
    parts = np.concatenate([np.zeros((0, _WIDTH)), *rows])
    unknown = [
        LeftOut(key=calls.calls[call_index].key, product=product, reason=reason)
        for call_index, reason in reasons.items()
        for product in calls.calls[call_index].products
    ]
    call_indices, recipe_indices = np.divmod(np.repeat(np.arange(len(rows)), list(map(len, rows))), width)
    product_indices, sample_indices = parts[:, :2].T.astype(np.int64)
    order = np.lexsort((sample_indices, recipe_indices, product_indices, call_indices))
    row_keys = [
        (calls.calls[call_index], *indices_of_row)
        for call_index, *indices_of_row in zip(
            *(indices[order].tolist() for indices in (call_indices, product_indices, recipe_indices, sample_indices)),
            strict=True,
        )
    ]
    samples = [(call.samples or (call.sample,))[sample] for call, _, _, sample in row_keys]
    exact, recorded = np.split(parts[order, 2:], 2, axis=1)
    return Replayed(
        calls=replace(calls, left_out=(*calls.left_out, *unknown)),
        recipes=names,
        places=call_indices[order],
        products=np.array([list(call.products)[product] for call, product, _, _ in row_keys], dtype=object),
        names=np.array([(RECORDED, *names)[recipe] for _, _, recipe, _ in row_keys], dtype=object),
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
        row_columns = {"product": self.products, "recipe": self.names, SAMPLE: self.samples}
        if field in row_columns:
            return list(row_columns[field])
        if field not in GROUP_FIELDS:
            raise UnknownFieldError(f"products of calls have no field {field!r:.60}: {nearest(field, GROUP_FIELDS)}")
        values = [call.field(field) for call in self.calls.calls]
        return [values[index] for index in self.places.tolist()]

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
        first_values = {"product": (*PRODUCTS,), "recipe": (RECORDED, *self.recipes)}.get(field, ())
        return {value: index for index, value in enumerate(dict.fromkeys((*first_values, *column)))}

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


def _call_errors(
    calls: RecordedCalls, recipes: Sequence[Recipe], *, engine: Engine
) -> list[NDArray[np.float64] | RanktapeError]:
    """The errors of each call by each recipe, from the cache if possible."""
    names = RECORDED, *(recipe.name for recipe in recipes)

    def make(items: Sequence[int]) -> Iterator[NDArray[np.float64] | RanktapeError]:
        names_by_call: defaultdict[int, list[str]] = defaultdict(list)
        for item in items:
            names_by_call[item // len(names)].append(names[item % len(names)])
        tasks = CallTasks(calls, recipes, subset=names_by_call)
        results = engine.map(replay_any, tasks, sizes=tasks.sizes)
        for (call_index, call_names), result in zip(names_by_call.items(), results, strict=True):
            for name in call_names:
                if isinstance(result, str):
                    yield RanktapeError(result)
                else:
                    yield _row(result, calls.calls[call_index], name=name)

    if not engine.use_cache or are_files(calls.records) or not calls.calls:
        return list(make(range(len(calls.calls) * len(names))))
    paths = {row: path for path, rows in calls.records.groups() for row in range(rows.start, rows.stop)}
    groups, start = [], 0
    call_paths = (paths[min(row for rows in call.rows.values() for row in rows)] for call in calls.calls)
    for path, group in itertools.groupby(call_paths):
        stop = start + len(names) * len(list(group))
        groups.append((path, slice(start, stop)))
        start = stop
    keys = _keys(calls, recipes)
    name = f"replay_v{VERSION}"
    return cached_values(calls.records.reader, groups, keys, make, name=name, max_rows=_MAX_ROWS)


def _keys(calls: RecordedCalls, recipes: Sequence[Recipe]) -> Keys:
    """The key of the errors of each call by each recipe."""
    records = [key.tobytes().hex() for key in record_keys([calls.records.stored(name) for name in _COLUMNS])]
    texts: dict[tuple[str, bool], str] = {}
    keys: list[tuple[str, str]] = []
    for call in calls.calls:
        tensor_texts = [f"{name} {[records[row] for row in rows]}" for name, rows in sorted(call.rows.items())]
        call_text = f"{tensor_texts} {dict(call.products)} {call.is_bias_known} {call.sample_dim} {call.samples}"
        recipe_texts = [""]
        for recipe in recipes:
            applied = calls.recipe_of(call, recipe)
            key = recipe.name, applied is recipe
            texts[key] = texts.get(key) or repr((applied.products, applied.seed, applied.draws))
            recipe_texts.append(texts[key])
        keys += [(call_text, text) for text in recipe_texts]
    return record_keys([*zip(*keys, strict=True)])


def _row(errors: CallErrors, call: RecordedCall, *, name: str) -> NDArray[np.float64]:
    """The errors of a call by the recipe of that name."""
    product_indices = {product: index for index, product in enumerate(call.products)}
    parts = [
        (product_indices[product], sample, *sums)
        for product, recipe, exact, recorded in errors
        if recipe == name
        for sample, sums in enumerate(np.hstack([np.atleast_2d(exact), np.atleast_2d(recorded)]))
    ]
    return np.array(parts, dtype=np.float64).reshape(-1, _WIDTH)
