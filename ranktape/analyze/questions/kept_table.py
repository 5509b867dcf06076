"""Keeps a table that took long to make under all that it is about, so that it is made once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from ranktape.analyze.engine.cache import Cache, Columns
from ranktape.analyze.engine.engine import Engine, WorkPlan, warn_once
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import StorageError
from ranktape.storage import Records

_KEYS = np.zeros((1, 2), dtype=np.uint64)


class KeptTable:
    """A table of records: of text, numbers, None and lists of these. How its rows are sorted is not kept."""

    def __init__(self, records: Sequence[Records], about: Sequence[str], *, name: str, engine: Engine) -> None:
        """Take the records, all that was asked, and the name with its version."""
        self._cache: Cache | None = None
        if engine.use_cache and records:
            words = [word for one in records for word in (str(len(one)), WorkPlan(one).keys.tobytes().hex())]
            text = "\0".join([*words, *about])
            self._path = f"together/{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
            self._cache = Cache(records[0].reader, name=name, groups=[self._path], warn=warn_once)

    def find(self) -> Table | None:
        """The table, if it was kept."""
        for found in [] if self._cache is None else self._cache.find(self._path).objects:
            known = json.loads(found.columns["json"].tobytes())
            columns = tuple(Column(**one | {"kind": Kind(one["kind"])}) for one in known.pop("columns"))
            rows, notes = tuple(map(tuple, known.pop("rows"))), tuple(known.pop("notes"))
            return Table(columns=columns, rows=rows, notes=notes, **known)
        return None

    def keep(self, table: Table) -> None:
        """Keep it."""
        shelf = None if self._cache is None else self._cache.shelf(self._path, damaged=())
        if self._cache is None or shelf is None:
            return
        known = {name: getattr(table, name) for name in ("title", "rows", "notes", "is_verdict", "is_whole")}
        known["columns"] = [dataclasses.asdict(column) for column in table.columns]
        text = np.frombuffer(json.dumps(known).encode(), dtype=np.uint8)
        try:
            shelf.put(_KEYS, Columns({"json": text}, sizes={"json": np.array([text.size])}, num_records=1))
        except StorageError as error:
            self._cache.give_up(str(error))
