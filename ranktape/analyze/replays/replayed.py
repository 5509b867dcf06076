"""Computes the products of recorded calls again, by recipes, and holds how far off each is of each call."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.identity import NUMBER_FIELDS, SAMPLE
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS
from ranktape.analyze.replays.attention_call import replay_any
from ranktape.analyze.replays.call_tensors import CALL_FIELDS
from ranktape.analyze.replays.calls import LeftOut, calls_of
from ranktape.analyze.replays.kept import found_errors
from ranktape.analyze.replays.tasks import CallTasks
from ranktape.errors import UnknownFieldError, UsageError, nearest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.identity import SampleName
    from ranktape.analyze.numerics.recipes.recipe import Recipe
    from ranktape.analyze.replays.calls import RecordedCalls
    from ranktape.storage import Records

GROUP_FIELDS = (*CALL_FIELDS, SAMPLE, "product", "recipe")
"""What replayed products can be grouped by."""


def replay_calls(
    records: Records,
    recipes: Sequence[Recipe],
    *,
    products: Collection[str] = (),
    has_attention: bool = False,
    engine: Engine | None = None,
) -> Replayed:
    """How far off each product of each call of the selected linear layers is by each recipe.

    Which products are asked for, `calls_of` says. Each recipe computes a layer as its exceptions have it. Published
    recipes leave attention in bfloat16: with `has_attention` it is computed with quantised operands all the same.
    Memory: the tensors of one call for each worker.

    Raises:
        DataError: bytes or parts of a tensor are missing, or damaged.
        StorageError: the store cannot be read.
        UsageError: a recipe is called `recorded`.
        WorkersError: the processes or the cluster cannot be had, or were lost.
    """
    calls = calls_of(records, products=products, has_attention=has_attention)
    return replay_found(calls, recipes, engine=engine)


def replay_found(calls: RecordedCalls, recipes: Sequence[Recipe], *, engine: Engine | None = None) -> Replayed:
    """As `replay_calls`, of calls that were found before."""
    names = tuple(one.name for one in recipes)
    if RECORDED in names:
        raise UsageError(f"a recipe is called {RECORDED}, the word for what was recorded: give it another name")
    tasks = CallTasks(calls, recipes)
    places: list[int] = []
    samples: list[SampleName | None] = []
    rows: list[tuple[Any, ...]] = []
    unknown: list[LeftOut] = []
    for place, found in enumerate(found_errors(tasks, replay_any, engine=engine or Engine())):
        call = calls.calls[place]
        if isinstance(found, str):
            unknown += [LeftOut(key=call.key, product=product, reason=found) for product in call.products]
            continue
        for product, recipe, *sums in found:
            own = call.samples or (call.sample,)
            places += [place] * len(own)
            samples += own
            rows += [(product, recipe, *of_one) for of_one in zip(*map(np.atleast_2d, sums), strict=True)]
    columns = list(zip(*rows, strict=True)) or [()] * 4
    empty = np.zeros((0, len(ErrorSums.__slots__)))
    return Replayed(
        calls=replace(calls, left_out=(*calls.left_out, *unknown)),
        recipes=names,
        places=np.array(places, dtype=np.int64),
        products=np.array(columns[0], dtype=object),
        names=np.array(columns[1], dtype=object),
        samples=np.array([*samples, None], dtype=object)[:-1],
        exact=np.vstack([empty, *columns[2]]),
        recorded=np.vstack([empty, *columns[3]]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedGroup:
    """Products that are taken together."""

    key: Mapping[str, Any]
    """The values of the fields by which they are together."""
    exact: ErrorSums
    """Against the products of the recorded operands in float32."""
    recorded: ErrorSums
    """Against the recorded results, as far as they can be compared: nothing compared where none can."""
    num_calls: int
    """Calls that they are of."""
    rows: NDArray[np.int64]
    """The rows, those that are furthest off first: with NaN and Inf, then with the smallest SQNR."""

    @property
    def worst(self) -> int:
        """The row of the one that is furthest off."""
        return int(self.rows[0])

    @property
    def median(self) -> int:
        """The row of the one in the middle; of two the worse one."""
        return int(self.rows[(len(self.rows) - 1) // 2])


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """How far off each product of each call is by each recipe; a row each, in columns."""

    calls: RecordedCalls
    """The calls, and what cannot be computed."""
    recipes: tuple[str, ...]
    """The recipes that were asked for, by name; `recorded` comes before them in the rows."""
    places: NDArray[np.int64]
    """By row the place of the call."""
    products: NDArray[np.object_]
    """By row the product."""
    names: NDArray[np.object_]
    """By row the recipe."""
    samples: NDArray[np.object_]
    """By row the sample; None where the call is of several that are not told apart."""
    exact: NDArray[np.float64]
    """By row `ErrorSums.to_array` against the product of the recorded operands in float32."""
    recorded: NDArray[np.float64]
    """By row the same against the recorded result; all 0 where that cannot be compared."""

    def sums(self, row: int) -> ErrorSums:
        """Those of a row against the product of the recorded operands in float32."""
        return ErrorSums.pooled(self.exact[row])

    def column(self, field: str) -> list[Any]:
        """One of `GROUP_FIELDS` by row.

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
        """The products in groups of equal values of fields; layers come in the order in which they were recorded.

        Raises:
            UnknownFieldError: there is no such field.
        """
        rows: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        columns = [self.column(field) for field in by]
        for row, key in enumerate(zip(*columns, strict=True) if columns else [()] * len(self.places)):
            rows[key].append(row)
        orders = [self._order(field, column) for field, column in zip(by, columns, strict=True)]
        keys = sorted(rows, key=lambda key: [order[value] for order, value in zip(orders, key, strict=True)])
        return [self._group(dict(zip(by, key, strict=True)), np.array(rows[key])) for key in keys]

    @functools.cached_property
    def badness(self) -> NDArray[np.float64]:
        """By row the squared relative error; infinite where NaN or Inf came of finite operands."""
        columns = dict(zip(ErrorSums.__slots__, self.exact.T, strict=True))
        errors, references = columns["error_squared"], columns["reference_squared"]
        ratio = np.full(len(errors), math.inf)
        np.divide(errors, references, out=ratio, where=references > 0)
        ratio[errors == 0] = 0
        ratio[columns["num_lost"] > 0] = math.inf
        return ratio

    def _order(self, field: str, column: Sequence[Any]) -> dict[Any, Any]:
        """Where each value of a field comes among others."""
        if field in NUMBER_FIELDS:
            return {value: value for value in column}
        if field == SAMPLE:
            # Names may be numbers and texts, between which there is no order.
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
