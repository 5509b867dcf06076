"""Says whether the shards of a product's operands multiply to the shard of its result that was recorded.

On each axis of a mesh an operand is whole, cut along the sum, or cut along another dimension. Two whole operands give a
whole result; one that is cut along another dimension cuts the result there; two that are cut along the sum give
summands of the result (what DTensor calls partial). Anything else takes what other ranks have, and so does a result
that was recorded otherwise: added up, or gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ranktape.analyze.numerics.recipes.recipe import PRODUCTS
from ranktape.storage.records.placement import AxisKind

if TYPE_CHECKING:
    from ranktape.storage.records.placement import Placement

Cut = tuple[str, int]
"""What an axis of a mesh cuts, as a letter, and the parts of a strided cut."""

_SUMMANDS: Cut = ("summands", 1)
_OTHERS: Cut = ("what others have", 1)
_LETTERS = {"input": "I", "weight": "OI", "output": "O", "grad_output": "O", "grad_input": "I", "grad_weight": "OI"}
"""Of the last dimensions of each tensor; those before them are tokens."""

_SUMS = {"output": "I", "grad_input": "O", "grad_weight": "T"}
"""The letter along which each product sums."""


def is_local(product: str, placements: Mapping[str, Placement | None], *, is_transposed: bool) -> bool:
    """Whether a rank's own operands give what was recorded of a product of a linear layer, or would have been.

    `placements` are those of both operands and, where it was recorded, of the result; None for a tensor that is no
    shard. With `is_transposed`, weights have the layout IO.
    """
    axes = {axis.axis for one in placements.values() if one is not None for axis in one.axes}
    for axis in axes:
        cuts = {name: _cut(name, one, axis, is_transposed=is_transposed) for name, one in placements.items()}
        first, second = (cuts[name] for name in PRODUCTS[product])
        expected = _product_cut(first, second, sum_letter=_SUMS[product])
        if expected == _OTHERS:
            return False
        # A result that is no shard of anything says nothing but that nobody added it up.
        is_placed = placements.get(product) is not None
        if (cuts[product] != expected) if is_placed else (expected == _SUMMANDS):
            return False
    return True


def _product_cut(first: Cut | None, second: Cut | None, *, sum_letter: str) -> Cut | None:
    """How a product is cut whose operands are cut so; None where it is whole."""
    is_sum = [cut is not None and cut[0][0] == sum_letter for cut in (first, second)]
    if all(is_sum) and first == second:
        return _SUMMANDS
    if any(is_sum) or (first is not None and second is not None) or _SUMMANDS in (first, second):
        return _OTHERS
    return first or second


def _cut(name: str, placement: Placement | None, axis_name: str, *, is_transposed: bool) -> Cut | None:
    """What an axis cuts of a tensor; None where it is whole along it."""
    axis = None if placement is None else next((one for one in placement.axes if one.axis == axis_name), None)
    if placement is None or axis is None or axis.kind is AxisKind.REPLICATE or axis.size == 1:
        return None
    if axis.kind is AxisKind.PARTIAL:
        return _SUMMANDS
    letters = _LETTERS[name][::-1] if is_transposed else _LETTERS[name]
    num_tokens = len(placement.global_shape) - len(letters)
    return (f"T{axis.dim}" if axis.dim < num_tokens else letters[axis.dim - num_tokens]), axis.factor
