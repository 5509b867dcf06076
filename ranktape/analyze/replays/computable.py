"""Determines which products the recorded tensors of a call give, and whether their recorded results can be compared.

Only the catalogue is read, no values.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from ranktape.analyze.identity import SampleName, sample_names
from ranktape.analyze.numerics.products import SIZES
from ranktape.analyze.numerics.recipes.recipe import OPERANDS, PRODUCTS
from ranktape.storage import Records
from ranktape.storage.format.dtypes import dtype_row
from ranktape.storage.format.record_info import WIDE, Keep, Mode, Operation
from ranktape.storage.records.assemble import AxisKind, Placement, parse_placement

CALL_FIELDS = (
    "iteration",
    "rank",
    "attempt",
    "microbatch",
    "call",
    "mode",
    "layer_type",
    "layer_stack",
    "layer_idx",
    "module",
    "component",
    "quant_type",
)
"""The fields of records that identify their call."""

Key = tuple[Any, ...]
"""The values of `CALL_FIELDS`."""

Rows = Mapping[str, tuple[int, ...]]
"""The rows of each tensor by name: one record, or the parts of several ranks."""

STANDING = ("weight", "wide_weight", "bias")
"""The tensors that are recorded once for several calls."""

CREATE_GRAPH = '"create_graph"'
"""The key in the metadata of gradients that are part of a graph themselves, as in JSON."""

OWN_FORWARD = '"own_forward"'
"""The key in the metadata of tensors from which a layer's own forward computes an operand, as in JSON."""

_PER_CALL_FIELDS = frozenset({"iteration", "microbatch", "call", "quant_type"})
"""The fields in which a weight may differ from the calls that use it."""

_PHASES = {"output": "post", "grad_output": "pre", "grad_input": "post", "grad_weight": "post"}
"""The phases that capture records; all other tensors have `pre`."""


class CallTensors:
    """The tensors of all calls among some records. No value is read."""

    def __init__(self, records: Records, *, is_wide: bool = True) -> None:
        """Take records. With `is_wide`, operands are those before a layer quantized them."""
        self.is_wide = is_wide
        self._names: list[str] = records.column("tensor_name").tolist()
        self._keys: list[Key] = list(zip(*(records.column(name).tolist() for name in CALL_FIELDS), strict=True))
        self._counters: list[int] = records.column("counter").tolist()
        self._directions = list(zip(*(records.column(name).tolist() for name in ("operation", "phase")), strict=True))
        self._samples = sample_names(records)
        self._standing: defaultdict[Key, list[int]] = defaultdict(list)
        self._num_calls: Counter[Key] = Counter()
        self._differentiable: set[Key] = set()
        self._tensors: dict[Key, Rows] = {}
        self.names: dict[Key, dict[str, list[int]]] = {}
        """For each call, the rows of its own tensors by name, in the order of the records."""
        self._own_forward: set[int] = set()
        for row, text in enumerate(records.column("metadata").tolist()):
            if CREATE_GRAPH in text:
                self._differentiable.add(_without(self._keys[row], {"call"}))
            if OWN_FORWARD in text:
                self._own_forward.add(row)
        for row, (key, name) in enumerate(zip(self._keys, self._names, strict=True)):
            self.names.setdefault(key, {}).setdefault(name, []).append(row)
            self._num_calls[name, *_without(key, {"call"})] += 1
            if name in STANDING:
                self._standing[name, *_without(key, _PER_CALL_FIELDS)].append(row)

    def key(self, row: int) -> Key:
        """The call of a record."""
        return self._keys[row]

    def num_calls(self, key: Key, name: str) -> int:
        """Number of calls of the same layer and microbatch that have a tensor of this name."""
        return self._num_calls[name, *_without(key, {"call"})]

    def is_differentiable(self, key: Key) -> bool:
        """Whether gradients of this layer and microbatch come from a backward pass that is part of a graph itself."""
        return _without(key, {"call"}) in self._differentiable

    def of(self, key: Key) -> Rows:
        """The tensors of a call by name, including its weight and bias."""
        if key not in self._tensors:
            tensors = {name: (self._preferred(name, rows)[0],) for name, rows in self.names.get(key, {}).items()}
            forward = [self._counters[row] for name, (row,) in tensors.items() if not name.startswith("grad_")]
            for name in STANDING:
                candidates = self._standing.get((name, *_without(key, _PER_CALL_FIELDS)), [])
                row = None if name in tensors else self._before(candidates, key, max(forward, default=math.inf))
                if row is not None:
                    tensors[name] = (row,)
            # The layer's own forward may compute operands from these that are not their quantized form, such as merged
            # adapters.
            computed = {name for name, (row,) in tensors.items() if name.startswith(WIDE) and row in self._own_forward}
            tensors = {name: rows for name, rows in tensors.items() if name not in computed}
            wide = {name.removeprefix(WIDE): rows for name, rows in tensors.items() if name.startswith(WIDE)}
            self._tensors[key] = tensors | (wide if self.is_wide else {})
        return self._tensors[key]

    def sample(self, key: Key) -> SampleName | None:
        """The sample of all of a call's own tensors; None if there are several or none."""
        names = [self._samples[row] for name, rows in self.names[key].items() if name not in STANDING for row in rows]
        samples = {name for record_samples in names for name in record_samples}
        return samples.pop() if len(samples) == 1 else None

    def _preferred(self, name: str, rows: list[int]) -> list[int]:
        """The records that capture made, among several of one name; all of them if there are none."""
        operation = Operation.BACKWARD if name.startswith("grad_") else Operation.FORWARD
        direction = operation.value, _PHASES.get(name, "pre")
        return [row for row in rows if self._directions[row] == direction] or rows

    def _before(self, candidates: Sequence[int], key: Key, last: float) -> int | None:
        """The weight that was last recorded before the call. In training, it has the same iteration."""
        iteration, mode = (key[CALL_FIELDS.index(name)] for name in ("iteration", "mode"))
        same_iteration = [row for row in candidates if self._keys[row][0] == iteration]
        if before := [row for row in same_iteration if self._counters[row] <= last]:
            return before[-1]
        earlier = [] if mode == Mode.TRAIN else [row for row in candidates if self._keys[row][0] < iteration]
        return earlier[-1] if earlier else next(iter(same_iteration), None)


def _without(key: Key, fields: Collection[str]) -> Key:
    return tuple(value for name, value in zip(CALL_FIELDS, key, strict=True) if name not in fields)


WHOLE = "null"
"""The catalogue's text for the placement of an unsharded tensor, and for missing metadata."""


class RecordedTensors:
    """The tensors of layers of one kind."""

    products: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The products of such layers by name, with their operands."""
    companions: ClassVar[tuple[str, ...]] = ()
    """The tensors that are read with the operands of every product, if they were recorded."""
    shared_operands: ClassVar[Collection[str]] = ()
    """The operands that are recorded once for several calls."""

    def __init__(self, records: Records) -> None:
        """Take the records that rows refer to."""
        self._records = records
        self._placements: dict[tuple[str, str], Placement] = {}

    @functools.cache  # noqa: B019 - it lives as long as its records
    def column(self, name: str) -> list[Any]:
        """A field of all records."""
        values: list[Any] = self._records.column(name).tolist()
        return values

    def shape(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a record, or of the tensor that is assembled from parts."""
        row = rows[0]
        if len(rows) > 1 and (placement := self.placement(row)) is not None:
            return placement.global_shape
        return tuple(json.loads(self.column("shape")[row]))

    def placement(self, row: int) -> Placement | None:
        """The placement of a record; None if it is not a shard."""
        text = self.column("placement")[row]
        if text == WHOLE:
            return None
        key = text, self.column("shape")[row]
        if key not in self._placements:
            placement = parse_placement(self._records[row].info)
            assert placement is not None
            self._placements[key] = placement
        return self._placements[key]

    def metadata(self, row: int, key: str) -> bool:
        """Whether the metadata of a record has the value true for a key."""
        text = self.column("metadata")[row]
        return text != WHOLE and json.loads(text).get(key) is True

    def doubt(self, rows: Rows, product: str) -> str:
        """Why a call may have computed a product from other than its recorded operands; empty if it did not."""
        # The output may not be recorded, or not be selected.
        row, *_ = rows.get("output" if product == "output" else "grad_output", (None,))
        if row is None:
            return ""
        if self.metadata(row, "own_forward"):
            return "the class of the layer has its own forward, which may use other operands"
        if self.metadata(row, "saved_tensors_hooks"):
            return "its backward pass uses tensors that saved_tensors_hooks of the training packed and unpacked"
        return ""

    def ranks(self, rows: Rows, product: str) -> tuple[int, ...]:
        """The ranks of the mesh over which the operands are distributed; none if that is unknown."""
        per_call = [name for name in self.products[product] if name not in self.shared_operands]
        placements = [self.placement(rows[name][0]) for name in per_call]
        return next((placement.ranks for placement in placements if placement is not None), ())

    def why_missing(self, rows: Rows, names: Collection[str]) -> str:
        """Why a tensor is not available as numbers; empty if all are."""
        for name in names:
            if name not in rows:
                return f"no {name} was recorded"
            if reason := self.why_no_numbers(rows[name][0], name):
                return reason
        return ""

    def why_no_numbers(self, row: int, name: str) -> str:
        """Why a record has no numbers to multiply; empty if it has."""
        keep = self.column("keep")[row]
        if keep != Keep.VALUES:
            return f"only the {keep} of {name} {'was' if keep == Keep.HISTOGRAM else 'were'} stored, not its values"
        dtype = self.column("dtype")[row]
        if name != "offsets" and not dtype_row(dtype).is_floating:
            return f"{name} has dtype {dtype}"
        return ""


GROUPED = "EIO"
"""The layout of the weights of all experts that are multiplied in one call."""

TRANSPOSED = "IO"
"""The layout of a weight whose rows are inputs."""

TIE = ("rank", "attempt", "iteration", "checksum")
"""The fields that are equal for weights that several modules share."""


MIN_TOKENS = 16
"""Minimum number of tokens to estimate a bias. With fewer, the estimate absorbs 1/15 or more of the rounding error."""


class LinearTensors(RecordedTensors):
    """The tensors of linear layers, according to the catalogue. No value is read."""

    products = PRODUCTS
    companions = ("offsets",)
    shared_operands = STANDING

    def __init__(self, records: Records, *, tied: set[Key], is_wide: bool = True) -> None:
        """Take records. `tied` are the weights that several modules share, as values of `TIE`.

        Without `is_wide`, operands are those that were multiplied.
        """
        super().__init__(records)
        self._tied, self._is_wide = tied, is_wide

    def layout(self, rows: Rows) -> str:
        """The layout of the weight: IO or EIO if recorded so, otherwise OI."""
        recorded = self.column("layout")[rows["weight"][0]] if "weight" in rows else ""
        return recorded if recorded in {GROUPED, TRANSPOSED} else "OI"

    def why_not_read(self, rows: Rows, product: str) -> str:
        """Why the operands are not available; empty if they are."""
        is_grouped = "offsets" in rows or self.layout(rows) == GROUPED
        return self.why_missing(rows, [*PRODUCTS[product], *(["offsets"] if is_grouped else [])])

    def is_local(self, rows: Rows, product: str) -> bool:
        """Whether the operands of one rank give the result that this rank recorded, or would have recorded."""
        names = [name for name in (*PRODUCTS[product], product) if name in rows]
        placements = {name: self.placement(rows[name][0]) for name in names}
        if not any(placements.values()):
            return True
        return is_local(product, placements, is_transposed=self.layout(rows) == TRANSPOSED)

    def why_no_product(self, rows: Rows, product: str) -> str:
        """Why readable operands cannot be multiplied, or do not belong to one call; empty if they can."""
        first, second = PRODUCTS[product]
        sizes = {name: self._letters(rows, name) for name in OPERANDS if name in rows}
        if not _agree(sizes[first], sizes[second]):
            return f"the shapes of {first} and {second} do not multiply"
        for name, other in itertools.product((first, second), sizes):
            if not _agree(sizes[name], sizes[other]):
                return f"the shapes of {name} and {other} are not of one call"
        return ""

    def why_not_compared(self, rows: Rows, product: str, num_calls: int, num_gradients: int) -> str:
        """Why the recorded result differs from the product of the operands; empty if it does not, or is not recorded.

        In this microbatch, `num_calls` calls of the layer have a `grad_output`, and `num_gradients` have a
        `grad_weight`.
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
            return f"no bias was recorded, and outputs of fewer than {MIN_TOKENS} tokens are too few to estimate one"
        return ""

    def _why_other_operands(self, rows: Rows, product: str) -> str:
        """Why a product was computed from other operands than those that are used here; empty if it was not."""
        is_quantised = any(name.startswith(WIDE) for name in rows)
        if self._is_wide or not is_quantised or product == "output":
            return ""
        return "the layer quantised the operands of its gradients itself"

    def is_bias_known(self, rows: Rows) -> bool:
        """Whether the bias in the output is known. For a partial sum, it is known only if the call has no bias."""
        if self._is_without_bias(rows):
            return True
        placement = self.placement(rows["output"][0]) if "output" in rows else None
        is_share = placement is not None and placement.is_partial and len(rows["output"]) == 1
        return ("bias" in rows or "offsets" in rows) and not is_share

    def has_bias(self, rows: Rows) -> bool:
        """Whether a known bias is included in the output, and not returned beside it."""
        if "bias" not in rows or self._is_without_bias(rows) or not self.is_bias_known(rows):
            return False
        return not self.metadata(rows["bias"][0], "returned")

    def _is_without_bias(self, rows: Rows) -> bool:
        """Whether capture recorded that the call has no bias."""
        return "output" in rows and self.metadata(rows["output"][0], "without_bias")

    def _why_other_sum(self, rows: Rows, num_calls: int, num_gradients: int) -> str:
        row = rows["grad_weight"][0]
        if self.metadata(row, "accumulated"):
            return "grad_weight is accumulated over microbatches"
        if num_gradients < num_calls or self.metadata(row, "summed"):
            return "grad_weight is summed over several calls"
        # In this case the gradient is recorded at the weight itself; see `capture.hooks.calls`.
        weight = rows["weight"][0] if "weight" in rows else row
        is_cast = self.column("dtype")[weight] != self.column("compute_dtype")[weight]
        if is_cast and tuple(self.column(name)[weight] for name in TIE) in self._tied:
            return "grad_weight is summed over several modules"
        for name in PRODUCTS["grad_weight"]:
            operand_row = rows[name][0]
            size, dim = self.column("batch_size")[operand_row], self.column("sample_dim")[operand_row]
            if not math.isnan(size) and not math.isnan(dim) and self.shape((operand_row,))[int(dim)] < size:
                return "the operands were recorded for some of the samples only"
        return ""

    def _letters(self, rows: Rows, name: str) -> dict[str, int]:
        """The sizes of an operand by dimension: tokens T, inputs I, outputs O, experts E.

        Empty for an operand without dimensions, or a weight with another number of dimensions than its layout.
        """
        shape = self.shape(rows[name])
        letters = self.layout(rows) if name == "weight" else SIZES[name]
        matrix = shape if name == "weight" else (math.prod(shape[:-1]), *shape[-1:])
        sizes = dict(zip(letters, matrix, strict=False)) if len(letters) == len(matrix) else {}
        return sizes | ({"E": math.prod(self.shape(rows["offsets"]))} if "offsets" in rows else {})


def _agree(sizes: dict[str, int], others: dict[str, int]) -> bool:
    """Whether both operands have sizes, and these are equal for all common dimensions."""
    shared = sizes.keys() & others.keys()
    return bool(sizes and others) and all(sizes[letter] == others[letter] for letter in shared)


# Along each axis of a mesh, an operand is whole, cut along the summed dimension, or cut along another dimension. Two
# whole operands give a whole result. One operand that is cut along another dimension cuts the result there. Two that
# are cut along the summed dimension give summands of the result (`Partial` in DTensor). All other combinations need
# the operands of other ranks, and so does a result that was recorded otherwise: summed or gathered.

Cut = tuple[str, int]
"""The dimension that an axis of a mesh cuts, as a letter, and the number of parts of a strided cut."""

_SUMMANDS: Cut = ("summands", 1)
_OTHERS: Cut = ("what others have", 1)
_LETTERS = {"input": "I", "weight": "OI", "output": "O", "grad_output": "O", "grad_input": "I", "grad_weight": "OI"}
"""The last dimensions of each tensor; those before them are tokens."""

_SUMS = {"output": "I", "grad_input": "O", "grad_weight": "T"}
"""The dimension over which each product sums."""


def is_local(product: str, placements: Mapping[str, Placement | None], *, is_transposed: bool) -> bool:
    """Whether a rank's own operands give the result of a linear layer that it recorded, or would have recorded.

    `placements` are those of both operands and, if it was recorded, of the result; None for an unsharded tensor. With
    `is_transposed`, weights have the layout IO.
    """
    axes = {axis.axis for placement in placements.values() if placement is not None for axis in placement.axes}
    for axis in axes:
        cuts = {
            name: _cut(name, placement, axis, is_transposed=is_transposed) for name, placement in placements.items()
        }
        first, second = (cuts[name] for name in PRODUCTS[product])
        expected = _product_cut(first, second, sum_letter=_SUMS[product])
        if expected == _OTHERS:
            return False
        # If the result is not a shard, it is only known that it was not summed.
        is_placed = placements.get(product) is not None
        if (cuts[product] != expected) if is_placed else (expected == _SUMMANDS):
            return False
    return True


def _product_cut(first: Cut | None, second: Cut | None, *, sum_letter: str) -> Cut | None:
    """How the product of two operands is cut; None if it is whole."""
    is_sum = [cut is not None and cut[0][0] == sum_letter for cut in (first, second)]
    if all(is_sum) and first == second:
        return _SUMMANDS
    if any(is_sum) or (first is not None and second is not None) or _SUMMANDS in (first, second):
        return _OTHERS
    return first or second


def _cut(name: str, placement: Placement | None, axis_name: str, *, is_transposed: bool) -> Cut | None:
    """What an axis cuts of a tensor; None if the tensor is whole along it."""
    axis = None if placement is None else next((item for item in placement.axes if item.axis == axis_name), None)
    if placement is None or axis is None or axis.kind is AxisKind.REPLICATE or axis.size == 1:
        return None
    if axis.kind is AxisKind.PARTIAL:
        return _SUMMANDS
    letters = _LETTERS[name][::-1] if is_transposed else _LETTERS[name]
    num_tokens = len(placement.global_shape) - len(letters)
    return (f"T{axis.dim}" if axis.dim < num_tokens else letters[axis.dim - num_tokens]), axis.factor


_FORWARD_OPERANDS = ("query", "key", "value")
_BACKWARD_OPERANDS = (*_FORWARD_OPERANDS, "grad_output")


class AttentionTensors(RecordedTensors):
    """The tensors of attention, according to the catalogue. No value is read.

    The output is read with the operands, because it may determine the form of the call.
    """

    products = {  # noqa: RUF012 - a constant of the class, as in its base
        "output": _FORWARD_OPERANDS,
        "grad_query": _BACKWARD_OPERANDS,
        "grad_key": _BACKWARD_OPERANDS,
        "grad_value": _BACKWARD_OPERANDS,
    }
    companions = ("output",)

    def why_not_read(self, rows: Rows, product: str) -> str:
        """Why the operands are not available; empty if they are."""
        return self.why_missing(rows, self.products[product])

    def is_local(self, rows: Rows, product: str) -> bool:
        """Whether one rank's operands give the recorded result: all are cut equally, only by samples or heads."""
        names = [name for name in (*self.products[product], product) if name in rows]
        cuts = [self._cuts(rows[name][0]) for name in names]
        return all(cut == cuts[0] for cut in cuts) and set(cuts[0].values()) <= {"B", "H"}

    def why_no_product(self, rows: Rows, product: str) -> str:
        """Why readable operands do not give attention; empty if they do."""
        sizes = [len(self.shape(rows[name])) for name in self.products[product]]
        return "" if min(sizes) > 1 else f"the shapes of {' and '.join(_FORWARD_OPERANDS)} are not those of attention"

    def why_not_compared(self, rows: Rows, product: str, *_counts: int) -> str:
        """Why the recorded result cannot be compared; empty if it can, or if it is not recorded."""
        return self.why_missing(rows, [product]) if product in rows else ""

    def _cuts(self, row: int) -> dict[str, str]:
        """For each axis of the mesh that does not replicate, the dimension that it cuts."""
        placement, layout = self.placement(row), self.column("layout")[row]
        axes = () if placement is None else placement.axes
        return {
            axis.axis: layout[axis.dim]
            if axis.kind is AxisKind.SHARD and 0 <= axis.dim < len(layout)
            else axis.kind.value
            for axis in axes
            if axis.kind is not AxisKind.REPLICATE and axis.size > 1
        }
