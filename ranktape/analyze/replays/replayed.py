"""Computes the products of recorded calls again, by recipes, and holds how far off each is of each call.

What was found of each call is kept beside the run, for each recipe apart: a further recipe computes itself alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Cache, record_keys
from ranktape.analyze.engine.cache_object import DamagedObjectError, Payload
from ranktape.analyze.engine.engine import Engine, warn_once
from ranktape.analyze.engine.plan import KEY_COLUMNS
from ranktape.analyze.identity import NUMBER_FIELDS, SAMPLE, SampleName, are_files
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, Recipe
from ranktape.analyze.replays.call_tensors import CALL_FIELDS
from ranktape.analyze.replays.calls import LeftOut, RecordedCall, RecordedCalls, calls_of
from ranktape.analyze.replays.tasks import CallErrors, CallTask, CallTasks, replay_any
from ranktape.errors import StorageError, UnknownFieldError, UsageError, nearest
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


VERSION = 2
"""Of the payload and of the numbers in it; one more whenever a recipe gives others."""

_MAX_NEW = 512
"""Sums that are kept together: whoever ends a question early loses no more."""

_COLUMNS = (*KEY_COLUMNS, "iteration", "rank", "layout", "placement", "metadata")
"""What tells a record from every other one, and from what it was before."""

Work = Callable[["CallTask"], "CallErrors | str"]
"""What is found of a call; a text says why nothing is."""


def found_errors(tasks: CallTasks, work: Work, *, engine: Engine) -> Iterator[CallErrors | str]:
    """What is found of each call, in their order; what was found before is not computed again.

    Of calls whose samples are told apart nothing is kept.

    Raises:
        RanktapeError: what the work raises.
    """
    calls = tasks.calls
    if not engine.use_cache or are_files(calls.records) or not len(tasks) or any(call.samples for call in calls.calls):
        yield from engine.map(work, tasks, sizes=tasks.sizes)
        return
    keeper = _Keeper(tasks)
    missing = _Missing(tasks, keeper)
    fresh = engine.map(work, missing, sizes=missing.sizes)
    for group, places in itertools.groupby(range(len(tasks)), key=keeper.groups.__getitem__):
        new: dict[str, Payload] = {}
        for place in places:
            call, known = calls.calls[place], keeper.known[place]
            found = next(fresh) if place in missing.recipes else []
            if isinstance(found, str):
                yield found
                continue
            fresh_names = [one.name for one in missing.recipes.get(place, ())]
            if RECORDED not in known:
                fresh_names.append(RECORDED)
            own = _payloads(found, call, names=fresh_names)
            if len(new) >= _MAX_NEW:
                keeper.put(group, new)
                new = {}
            new |= {keeper.keys[place][name]: payload for name, payload in own.items()}
            yield _rows(known | own, call, names=(RECORDED, *(one.name for one in tasks.recipes)))
        keeper.put(group, new)


class _Keeper:
    """What is known of calls, by the names of recipes, and what each is known by."""

    def __init__(self, tasks: CallTasks) -> None:
        calls = tasks.calls
        records = record_keys([calls.records.column(name).tolist() for name in _COLUMNS])
        paths = {row: path for path, rows in calls.records.groups() for row in range(rows.start, rows.stop)}
        self.groups = [paths[min(row for rows in call.rows.values() for row in rows)] for call in calls.calls]
        """By call the path of the group that its sums are kept beside."""
        self._cache = Cache(calls.records.reader, name=f"replay_v{VERSION}", groups=set(self.groups), warn=warn_once)
        texts: dict[tuple[str, bool], str] = {}
        self.keys: list[dict[str, str]] = []
        """By call, what the sums of each recipe are known by."""
        for call in calls.calls:
            own = [f"{name} {[records[row] for row in rows]}" for name, rows in sorted(call.rows.items())]
            what = f"{own} {dict(call.products)} {call.is_bias_known}"
            of_recipes = {RECORDED: ""}
            for one in tasks.recipes:
                applied = calls.recipe_of(call, one)
                key = one.name, applied is one
                texts[key] = texts.get(key) or repr((applied.products, applied.seed, applied.draws))
                of_recipes[one.name] = texts[key]
            keys = record_keys([[what] * len(of_recipes), list(of_recipes.values())])
            self.keys.append(dict(zip(of_recipes, keys, strict=True)))
        self._found = functools.cache(self._cache.find)
        self.known = [self._known(place) for place in range(len(tasks))]
        """By call, the payloads that were found before."""

    def put(self, group: str, new: dict[str, Payload]) -> None:
        """Keep what was found of calls of a group; where that cannot be, a warning says so once."""
        shelf = self._cache.shelf(group, damaged=self._found(group).damaged) if new else None
        if shelf is not None:
            try:
                shelf.put(list(new), list(new.values()))
            except StorageError as error:
                self._cache.give_up(str(error))

    def _known(self, place: int) -> dict[str, Payload]:
        objects = self._found(self.groups[place]).objects
        found = {}
        for name, key in self.keys[place].items():
            with contextlib.suppress(DamagedObjectError, KeyError):
                payload = objects[key].payload(key)
                # Anybody may have put one there.
                if _is_formed(payload):
                    found[name] = payload
        return found


class _Missing(Sequence["CallTask"]):
    """The tasks of the calls of which not everything is known, with the recipes that are not."""

    def __init__(self, tasks: CallTasks, keeper: _Keeper) -> None:
        self._tasks = tasks
        self.recipes: dict[int, tuple[Recipe, ...]] = {}
        """By the place of a call with anything missing."""
        for place, known in enumerate(keeper.known):
            recipes = tuple(one for one in tasks.recipes if one.name not in known)
            if recipes or RECORDED not in known:
                self.recipes[place] = recipes
        self._places = list(self.recipes)
        self.sizes = [tasks.sizes[place] for place in self._places]
        """Bytes that each reads."""

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        place = self._places[index]
        task = self._tasks[place]
        names = {one.name for one in self.recipes[place]}
        return dataclasses.replace(task, recipes=tuple(one for one in task.recipes if one.name in names))


def _payloads(errors: CallErrors, call: RecordedCall, *, names: Sequence[str]) -> dict[str, Payload]:
    """The sums of a call by the name of the recipe; the products by their places."""
    places = {product: place for place, product in enumerate(call.products)}
    found = {}
    for name in names:
        rows = [(places[product], exact, recorded) for product, recipe, exact, recorded in errors if recipe == name]
        found[name] = {
            "products": np.array([row[0] for row in rows], dtype=np.uint8),
            "exact": np.vstack([_NO_ROWS, *(row[1] for row in rows)]),
            "recorded": np.vstack([_NO_ROWS, *(row[2] for row in rows)]),
        }
    return found


_NO_ROWS = np.zeros((0, len(ErrorSums.__slots__)))


def _rows(payloads: Mapping[str, Payload], call: RecordedCall, *, names: Sequence[str]) -> CallErrors:
    """The rows of a call, product by product."""
    products = list(call.products)
    rows = [
        (int(place), products[place], name, payload["exact"][row], payload["recorded"][row])
        for name in names
        if (payload := payloads.get(name)) is not None
        for row, place in enumerate(payload["products"].tolist())
    ]
    return [row[1:] for row in sorted(rows, key=operator.itemgetter(0))]


def _is_formed(payload: Payload) -> bool:
    """Whether it has the form of those made here."""
    products, *sums = (payload[name] for name in ("products", "exact", "recorded"))
    shape = products.size, len(ErrorSums.__slots__)
    return products.dtype == np.uint8 and all(one.dtype == np.float64 and one.shape == shape for one in sums)
