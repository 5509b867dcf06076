"""Keeps what was found of each call beside the run, for each recipe apart: a further recipe computes itself alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.cache import Cache, record_keys
from ranktape.analyze.engine.cache_object import DamagedObjectError
from ranktape.analyze.engine.engine import warn_once
from ranktape.analyze.engine.plan import KEY_COLUMNS
from ranktape.analyze.identity import are_files
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.products import RECORDED
from ranktape.errors import StorageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.cache_object import Payload
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.recipes.recipe import Recipe
    from ranktape.analyze.replays.calls import RecordedCall
    from ranktape.analyze.replays.tasks import CallErrors, CallTask, CallTasks

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
