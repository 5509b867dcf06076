"""Keeps what takes long to make, and follows from more than digests: of each record, or of several together.

A value is anything that JSON in Python holds, NaN and infinities among it, or an array.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ranktape.analyze.engine.cache import Cache, Columns, Keys, Payload, name_of_text
from ranktape.analyze.engine.engine import Engine, WorkPlan, warn_once
from ranktape.errors import RanktapeError
from ranktape.storage import Records
from ranktape.storage.records.record import RecordOrigin

MAX_ROWS = 1 << 13
"""Values of one object: who ends a question early loses no more."""


def _payload(value: Any) -> Payload:
    if isinstance(value, np.ndarray):
        return {"array": value}
    return {"json": np.frombuffer(json.dumps(value, default=lambda one: one.item()).encode(), dtype=np.uint8)}


def _value(payload: Payload) -> Any:
    return payload["array"] if "array" in payload else json.loads(payload["json"].tobytes())


def values_of_records(
    records: Records, compute: Callable[[Records], Iterator[Any]], *, name: str, engine: Engine
) -> list[Any]:
    """The value of each record, or the `RanktapeError` that is in its place; those not kept are made, and kept.

    Args:
        records: The records.
        compute: Makes the values of a selection, in its order.
        name: As that of a `Measure`: with every version and every parameter.
        engine: Says whether anything is kept.
    """
    if not engine.use_cache or not len(records):
        return list(compute(records))
    values: list[Any] = [None] * len(records)
    for part in records.by_source():
        plan, own = WorkPlan(part.records), part.records

        def make(places: Sequence[int], own: Records = own) -> Iterator[Any]:
            return compute(own if len(places) == len(own) else own.take(places))

        found = values_of_keys(own.reader, plan.groups, plan.keys, make, name=name)
        for place, value in zip(part.places.tolist(), found, strict=True):
            values[place] = value
    return values


def values_of_keys(  # where, of what, and how
    reader: RecordOrigin,
    groups: Sequence[tuple[str, slice]],
    keys: Keys,
    make: Callable[[Sequence[int]], Iterator[Any]],
    *,
    name: str,
    max_rows: int = MAX_ROWS,
) -> list[Any]:
    """The value of each key; those not kept are made, in their order, and kept, but for errors.

    Args:
        reader: What they are kept with.
        groups: The paths of the groups, and which keys each has.
        keys: The keys.
        make: Makes the values of the keys at some places; a `RanktapeError` in the place of one that fails.
        name: As that of a `Measure`: with every version and every parameter.
        max_rows: Values of one object.
    """
    cache = Cache(reader, name=name, groups={path for path, _ in groups}, warn=warn_once)
    values: dict[int, Any] = {}
    for path, places in groups:
        for one in cache.find(path)[0]:
            looked = one.look_up(keys[places])
            (known,) = np.nonzero(looked >= 0)
            found = map(_value, one.columns.take(looked[known]).payloads())
            values |= zip((int(places.start) + known).tolist(), found, strict=True)
    missing = [place for place in range(len(keys)) if place not in values]
    made = make(missing) if missing else iter(())
    for path, places in groups:
        own = [place for place in range(int(places.start), int(places.stop)) if place not in values]
        for start in range(0, len(own), max_rows):
            chosen = own[start : start + max_rows]
            fresh = dict(zip(chosen, itertools.islice(made, len(chosen)), strict=True))
            values |= fresh
            good = [place for place, value in fresh.items() if not isinstance(value, RanktapeError)]
            if good:
                cache.keep(path, keys[good], Columns.of_payloads([_payload(fresh[place]) for place in good]))
    return [values[place] for place in range(len(keys))]


def value_of_all(records: Sequence[Records], about: Sequence[str], make: Callable[[], Any], *, name: str) -> Any:
    """A value of records together, made unless it was kept under the keys of these and all that was asked.

    A `RanktapeError` is not kept. The name holds the version; the value is kept with the first records.
    """
    words = [word for one in records for word in (str(len(one)), WorkPlan(one).keys.tobytes().hex())]
    path = f"together/{name_of_text(chr(0).join([*words, *about]))}"
    keys = np.zeros((1, 2), dtype=np.uint64)
    (value,) = values_of_keys(records[0].reader, [(path, slice(0, 1))], keys, lambda _: iter([make()]), name=name)
    return value
