"""Keeps a table that took long to make under all that it is about, so that it is made once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from ranktape.analyze.engine.cache import Columns
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sheet import KeptAnswer
from ranktape.analyze.table import Column, Kind, Table
from ranktape.storage import Records


class KeptTable:
    """A table of records: of text, numbers, None and lists of these. How its rows are sorted is not kept."""

    def __init__(self, records: Sequence[Records], about: Sequence[str], *, name: str, engine: Engine) -> None:
        """Take the records, all that was asked, and the name with its version."""
        self._kept = KeptAnswer(records, about, name=name) if engine.use_cache and records else None

    def find(self) -> Table | None:
        """The table, if it was kept."""
        found = None if self._kept is None else self._kept.find()
        if found is None:
            return None
        known = json.loads(found["json"].tobytes())
        columns = tuple(Column(**one | {"kind": Kind(one["kind"])}) for one in known.pop("columns"))
        rows, notes = tuple(map(tuple, known.pop("rows"))), tuple(known.pop("notes"))
        return Table(columns=columns, rows=rows, notes=notes, **known)

    def keep(self, table: Table) -> None:
        """Keep it."""
        if self._kept is None:
            return
        known = {name: getattr(table, name) for name in ("title", "notes", "is_verdict", "is_whole")}
        known["rows"] = list(table.rows)
        known["columns"] = [dataclasses.asdict(column) for column in table.columns]
        text = np.frombuffer(json.dumps(known).encode(), dtype=np.uint8)
        self._kept.keep(Columns({"json": text}, sizes={"json": np.array([text.size])}, num_records=1))
