"""Keeps a table that took long to make under all that it is about, so that it is made once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from ranktape.analyze.engine.cache_object import Payload
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sheet import KeptAnswer, record_keys_of
from ranktape.analyze.table import Column, Kind, Table
from ranktape.storage import Records
from ranktape.storage.format.validation import parse_json


class KeptTable:
    """A table of records: of text, numbers, None and lists of these. How its rows are sorted is not kept."""

    def __init__(self, records: Sequence[Records], about: Sequence[str], *, name: str, engine: Engine) -> None:
        """Take what it is of, all that was asked, and its name."""
        self._answer: KeptAnswer | None = None
        if engine.use_cache and records:
            keys = [key for one in records for key in (str(len(one)), *record_keys_of(one))]
            self._answer = KeptAnswer(records[0].reader, [*keys, *about], name=name)

    def find(self) -> Table | None:
        """The table, if it was kept."""
        for payload in [] if self._answer is None else self._answer.payloads(_is_one):
            known = json.loads(payload["json"].tobytes())
            columns = tuple(Column(**one | {"kind": Kind(one["kind"])}) for one in known.pop("columns"))
            rows, notes = tuple(map(tuple, known.pop("rows"))), tuple(known.pop("notes"))
            return Table(columns=columns, rows=rows, notes=notes, **known)
        return None

    def keep(self, table: Table) -> None:
        """Keep it."""
        if self._answer is None:
            return
        known = {name: getattr(table, name) for name in ("title", "rows", "notes", "is_verdict", "is_whole")}
        known["columns"] = [dataclasses.asdict(column) for column in table.columns]
        self._answer.keep([{"json": np.frombuffer(json.dumps(known).encode(), dtype=np.uint8)}])


def _is_one(payload: Payload) -> bool:
    """Whether a payload is a table; anybody may have put it into a cache."""
    if set(payload) != {"json"} or payload["json"].dtype != np.uint8:
        return False
    try:
        known = parse_json(payload["json"].tobytes())
        columns = [Column(**one | {"kind": Kind(one["kind"])}) for one in known["columns"]]
        is_table = set(known) == {"title", "rows", "notes", "is_verdict", "is_whole", "columns"}
        return is_table and all(len(row) == len(columns) for row in known["rows"])
    except (ValueError, TypeError, KeyError):
        return False
