"""Says which products the recorded tensors of a call give, and whether what was recorded of them can be compared."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ranktape.analyze.numerics.products import SIZES
from ranktape.analyze.numerics.recipes.recipe import OPERANDS, PRODUCTS
from ranktape.analyze.replays.call_tensors import STANDING
from ranktape.analyze.replays.recorded_tensors import RecordedTensors
from ranktape.analyze.replays.shards import is_local
from ranktape.storage.format.record_info import WIDE

if TYPE_CHECKING:
    from ranktape.analyze.replays.call_tensors import Key, Rows
    from ranktape.storage import Records

GROUPED = "EIO"
"""The layout of the weights of all experts that are multiplied in one call."""

TRANSPOSED = "IO"
"""The layout of a weight whose rows are inputs."""

TIE = ("rank", "attempt", "iteration", "checksum")
"""The fields in which weights that several modules have agree."""


MIN_TOKENS = 16
"""Of fewer, what all outputs have in common beyond their products is more than a fifteenth of what rounding did."""


class LinearTensors(RecordedTensors):
    """What the catalogue knows of the tensors of linear layers; no value is read."""

    products = PRODUCTS
    companions = ("offsets",)
    standing = STANDING

    def __init__(self, records: Records, *, tied: set[Key], is_wide: bool = True) -> None:
        """Take records; `tied` are the values of `TIE` of weights that several modules have.

        Without `is_wide`, operands are those that were multiplied.
        """
        super().__init__(records)
        self._tied, self._is_wide = tied, is_wide

    def layout(self, rows: Rows) -> str:
        """That of the weight: OI unless it says otherwise."""
        said = self.column("layout")[rows["weight"][0]] if "weight" in rows else ""
        return said if said in {GROUPED, TRANSPOSED} else "OI"

    def why_not_read(self, rows: Rows, product: str) -> str:
        """Why the operands cannot be had; empty where they can."""
        is_grouped = "offsets" in rows or self.layout(rows) == GROUPED
        return self.why_missing(rows, [*PRODUCTS[product], *(["offsets"] if is_grouped else [])])

    def is_local(self, rows: Rows, product: str) -> bool:
        """Whether the operands of one rank give what was recorded, or would have been."""
        names = [name for name in (*PRODUCTS[product], product) if name in rows]
        placements = {name: self.placement(rows[name][0]) for name in names}
        if not any(placements.values()):
            return True
        return is_local(product, placements, is_transposed=self.layout(rows) == TRANSPOSED)

    def why_no_product(self, rows: Rows, product: str) -> str:
        """Why operands that can be read do not multiply, or are not those of one call; empty where they do."""
        first, second = PRODUCTS[product]
        sizes = {name: self._letters(rows, name) for name in OPERANDS if name in rows}
        if not _agree(sizes[first], sizes[second]):
            return f"the shapes of {first} and {second} do not multiply"
        for name, other in itertools.product((first, second), sizes):
            if not _agree(sizes[name], sizes[other]):
                return f"the shapes of {name} and {other} are not of one call"
        return ""

    def why_not_compared(self, rows: Rows, product: str, num_calls: int, num_gradients: int) -> str:
        """Why what was recorded of a product is not what its operands give; empty where it is, or nothing was.

        `num_calls` of the layer in the microbatch have a `grad_output`, and `num_gradients` a `grad_weight`.
        """
        if product not in rows:
            return ""
        if reason := self.why_missing(rows, [product]) or self._why_other_operands(rows, product):
            return reason
        sizes = {letter: size for name in PRODUCTS[product] for letter, size in self._letters(rows, name).items()}
        letters = ("E" if product == "grad_weight" and "E" in sizes else "") + SIZES[product]
        if math.prod(self.shape(rows[product])) != math.prod(sizes[letter] for letter in letters):
            return f"{product} has another shape than the product"
        if product == "grad_weight":
            return self._why_other_sum(rows, num_calls, num_gradients)
        if product == "output" and not self.is_bias_known(rows) and sizes["T"] < MIN_TOKENS:
            return (
                f"no bias was recorded, and outputs of fewer than {MIN_TOKENS} tokens do not tell whether there is one"
            )
        return ""

    def _why_other_operands(self, rows: Rows, product: str) -> str:
        """Why a product has other operands than those that are looked at."""
        is_quantised = any(name.startswith(WIDE) for name in rows)
        if self._is_wide or not is_quantised or product == "output":
            return ""
        return "the layer quantised the operands of its gradients itself"

    def is_bias_known(self, rows: Rows) -> bool:
        """Whether it is known what bias is in the output; of a share of a sum it is only where there is none."""
        if self._is_without_bias(rows):
            return True
        placement = self.placement(rows["output"][0]) if "output" in rows else None
        is_share = placement is not None and placement.is_partial and len(rows["output"]) == 1
        return ("bias" in rows or "offsets" in rows) and not is_share

    def has_bias(self, rows: Rows) -> bool:
        """Whether a known bias is in the output, and not returned beside it."""
        if "bias" not in rows or self._is_without_bias(rows) or not self.is_bias_known(rows):
            return False
        return not self.metadata(rows["bias"][0], "returned")

    def _is_without_bias(self, rows: Rows) -> bool:
        """Whether capture says that the call had none."""
        return "output" in rows and self.metadata(rows["output"][0], "without_bias")

    def _why_other_sum(self, rows: Rows, num_calls: int, num_gradients: int) -> str:
        row = rows["grad_weight"][0]
        if self.metadata(row, "accumulated"):
            return "grad_weight is accumulated over microbatches"
        if num_gradients < num_calls:
            return "grad_weight is that of several calls together"
        # See `capture.hooks.weights`: then the gradient is seen on the weight itself.
        weight = rows["weight"][0] if "weight" in rows else row
        is_cast = self.column("dtype")[weight] != self.column("compute_dtype")[weight]
        if is_cast and tuple(self.column(name)[weight] for name in TIE) in self._tied:
            return "grad_weight is that of several modules together"
        for name in PRODUCTS["grad_weight"]:
            place = rows[name][0]
            size, dim = self.column("batch_size")[place], self.column("sample_dim")[place]
            if not math.isnan(size) and not math.isnan(dim) and self.shape((place,))[int(dim)] < size:
                return "of some samples alone the operands were recorded"
        return ""

    def _letters(self, rows: Rows, name: str) -> dict[str, int]:
        """The sizes of an operand by the letters of its dimensions: tokens T, inputs I, outputs O, experts E.

        None of one without dimensions, or of a weight with others than it has.
        """
        shape = self.shape(rows[name])
        letters = self.layout(rows) if name == "weight" else SIZES[name]
        matrix = shape if name == "weight" else (math.prod(shape[:-1]), *shape[-1:])
        found = dict(zip(letters, matrix, strict=False)) if len(letters) == len(matrix) else {}
        return found | ({"E": math.prod(self.shape(rows["offsets"]))} if "offsets" in rows else {})


def _agree(sizes: dict[str, int], others: dict[str, int]) -> bool:
    """Whether two operands are there, and have the same size where they have a dimension in common."""
    shared = sizes.keys() & others.keys()
    return bool(sizes and others) and all(sizes[letter] == others[letter] for letter in shared)
