"""Says which results the recorded tensors of a call of attention give, and whether they can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ranktape.analyze.replays.recorded_tensors import RecordedTensors
from ranktape.storage.records.placement import AxisKind

if TYPE_CHECKING:
    from ranktape.analyze.replays.call_tensors import Rows

_GIVEN = ("query", "key", "value")
_WITH_GRADIENT = (*_GIVEN, "grad_output")


class AttentionTensors(RecordedTensors):
    """What the catalogue knows of the tensors of attention; no value is read.

    How a call computed its output tells where that was not recorded, so that this is read with its operands.
    """

    products = {  # noqa: RUF012 - a constant of the class, as in its base
        "output": _GIVEN,
        "grad_query": _WITH_GRADIENT,
        "grad_key": _WITH_GRADIENT,
        "grad_value": _WITH_GRADIENT,
    }
    companions = ("output",)

    def why_not_read(self, rows: Rows, product: str) -> str:
        """Why the operands cannot be had; empty where they can."""
        return self.why_missing(rows, self.products[product])

    def is_local(self, rows: Rows, product: str) -> bool:
        """Whether the operands of one rank give what was recorded: all are cut by samples or heads alone, and alike."""
        names = [name for name in (*self.products[product], product) if name in rows]
        cuts = [self._cuts(rows[name][0]) for name in names]
        return all(cut == cuts[0] for cut in cuts) and set(cuts[0].values()) <= {"B", "H"}

    def why_no_product(self, rows: Rows, product: str) -> str:
        """Why operands that can be read give no attention; empty where they do."""
        sizes = [len(self.shape(rows[name])) for name in self.products[product]]
        return "" if min(sizes) > 1 else f"the shapes of {' and '.join(_GIVEN)} are not those of attention"

    def why_not_compared(self, rows: Rows, product: str, *_counts: int) -> str:
        """Why what was recorded of a product is not what its operands give; empty where it is, or nothing was."""
        return self.why_missing(rows, [product]) if product in rows else ""

    def _cuts(self, row: int) -> dict[str, str]:
        """By axis of the mesh the letter of the dimension that it cuts."""
        placement, layout = self.placement(row), self.column("layout")[row]
        axes = () if placement is None else placement.axes
        return {
            one.axis: layout[one.dim] if one.kind is AxisKind.SHARD and 0 <= one.dim < len(layout) else one.kind.value
            for one in axes
            if one.kind is not AxisKind.REPLICATE and one.size > 1
        }
