"""Looks up what the catalogue knows of recorded tensors, by their places among the records; no value is read."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ranktape.storage.format.dtypes import dtype_row
from ranktape.storage.format.record_info import Keep
from ranktape.storage.records.placement import parse_placement

if TYPE_CHECKING:
    from ranktape.analyze.replays.call_tensors import Rows
    from ranktape.storage import Records
    from ranktape.storage.records.placement import Placement

WHOLE = "null"
"""What the catalogue says of the placement of a tensor that is no shard, and of metadata that is none."""


class RecordedTensors:
    """The tensors of layers of one kind."""

    products: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """What such layers compute by name, and from which operands."""
    companions: ClassVar[tuple[str, ...]] = ()
    """What is read with the operands of every product where it was recorded."""
    standing: ClassVar[Collection[str]] = ()
    """The operands that are recorded once for several calls."""

    def __init__(self, records: Records) -> None:
        """Take all records that places are of."""
        self._records = records
        self._placements: dict[tuple[str, str], Placement] = {}

    @functools.cache  # noqa: B019 - it lives as long as its records are looked at
    def column(self, name: str) -> list[Any]:
        """A field of all records."""
        found: list[Any] = self._records.column(name).tolist()
        return found

    def shape(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Of a record, or of what parts are put together to."""
        row = rows[0]
        if len(rows) > 1 and (placement := self.placement(row)) is not None:
            return placement.global_shape
        return tuple(json.loads(self.column("shape")[row]))

    def placement(self, row: int) -> Placement | None:
        """Which part a record holds of a tensor; None for all of it.

        Raises:
            DataError: it is damaged.
        """
        text = self.column("placement")[row]
        if text == WHOLE:
            return None
        key = text, self.column("shape")[row]
        if key not in self._placements:
            placement = parse_placement(self._records[row].info)
            assert placement is not None
            self._placements[key] = placement
        return self._placements[key]

    def metadata(self, row: int, word: str) -> bool:
        """Whether capture said so of a record."""
        text = self.column("metadata")[row]
        return text != WHOLE and json.loads(text).get(word) is True

    def ranks(self, rows: Rows, product: str) -> tuple[int, ...]:
        """The ranks of the mesh over which the operands are spread; none where that is not known."""
        flowing = [name for name in self.products[product] if name not in self.standing]
        placements = [self.placement(rows[name][0]) for name in flowing]
        return next((one.ranks for one in placements if one is not None), ())

    def why_missing(self, rows: Rows, names: Collection[str]) -> str:
        """Why some tensors cannot be had as numbers; empty where all can."""
        for name in names:
            if name not in rows:
                return f"no {name} was recorded"
            if reason := self.why_no_numbers(rows[name][0], name):
                return reason
        return ""

    def why_no_numbers(self, row: int, name: str) -> str:
        """Why a record gives no numbers to multiply; empty where it does."""
        keep = self.column("keep")[row]
        if keep != Keep.VALUES:
            return f"of {name} the {keep} {'was' if keep == Keep.HISTOGRAM else 'were'} kept, not the values"
        dtype = self.column("dtype")[row]
        if name != "offsets" and not dtype_row(dtype).is_floating:
            return f"{name} holds {dtype}"
        return ""
