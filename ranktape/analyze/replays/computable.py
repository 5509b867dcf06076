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

_OF_ONE_CALL = frozenset({"iteration", "microbatch", "call", "quant_type"})
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
        self._found: dict[Key, Rows] = {}
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
                self._standing[name, *_without(key, _OF_ONE_CALL)].append(row)

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
        if key not in self._found:
            own = {name: (self._usual(name, rows)[0],) for name, rows in self.names.get(key, {}).items()}
            forward = [self._counters[row] for name, (row,) in own.items() if not name.startswith("grad_")]
            for name in STANDING:
                known = self._standing.get((name, *_without(key, _OF_ONE_CALL)), [])
                row = None if name in own else self._before(known, key, max(forward, default=math.inf))
                if row is not None:
                    own[name] = (row,)
            # The layer's own forward may compute operands from these that are not their quantized form, such as merged
            # adapters.
            others = {name for name, (row,) in own.items() if name.startswith(WIDE) and row in self._own_forward}
            own = {name: rows for name, rows in own.items() if name not in others}
            wide = {name.removeprefix(WIDE): rows for name, rows in own.items() if name.startswith(WIDE)}
            self._found[key] = own | (wide if self.is_wide else {})
        return self._found[key]

    def sample(self, key: Key) -> SampleName | None:
        """The sample of all of a call's own tensors; None if there are several or none."""
        names = [self._samples[row] for name, rows in self.names[key].items() if name not in STANDING for row in rows]
        found = {name for several in names for name in several}
        return found.pop() if len(found) == 1 else None

    def _usual(self, name: str, rows: list[int]) -> list[int]:
        """The records that capture made, among several of one name; all of them if there are none."""
        operation = Operation.BACKWARD if name.startswith("grad_") else Operation.FORWARD
        direction = operation.value, _PHASES.get(name, "pre")
        return [row for row in rows if self._directions[row] == direction] or rows

    def _before(self, known: Sequence[int], key: Key, last: float) -> int | None:
        """The weight that was last recorded before the call. In training, it has the same iteration."""
        iteration, mode = (key[CALL_FIELDS.index(name)] for name in ("iteration", "mode"))
        same = [row for row in known if self._keys[row][0] == iteration]
        if before := [row for row in same if self._counters[row] <= last]:
            return before[-1]
        earlier = [] if mode == Mode.TRAIN else [row for row in known if self._keys[row][0] < iteration]
        return earlier[-1] if earlier else next(iter(same), None)


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
    standing: ClassVar[Collection[str]] = ()
    """The operands that are recorded once for several calls."""

    def __init__(self, records: Records) -> None:
        """Take the records that rows refer to."""
        self._records = records
        self._placements: dict[tuple[str, str], Placement] = {}

    @functools.cache  # noqa: B019 - it lives as long as its records
    def column(self, name: str) -> list[Any]:
        """A field of all records."""
        found: list[Any] = self._records.column(name).tolist()
        return found

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

    def metadata(self, row: int, word: str) -> bool:
        """Whether the metadata of a record has the value true for a key."""
        text = self.column("metadata")[row]
        return text != WHOLE and json.loads(text).get(word) is True

    def doubt(self, rows: Rows, product: str) -> str:
        """Why a call may have computed a product from other than its recorded operands; empty if it did not."""
        # The output may not be recorded, or not be selected.
        told, *_ = rows.get("output" if product == "output" else "grad_output", (None,))
        if told is None:
            return ""
        if self.metadata(told, "own_forward"):
            return "the class of the layer computes in a forward of its own, perhaps with other operands"
        if self.metadata(told, "saved_tensors_hooks"):
            return "its backward pass computes with what saved_tensors_hooks of the training packed and unpacked"
        return ""

    def ranks(self, rows: Rows, product: str) -> tuple[int, ...]:
        """The ranks of the mesh over which the operands are distributed; none if that is unknown."""
        flowing = [name for name in self.products[product] if name not in self.standing]
        placements = [self.placement(rows[name][0]) for name in flowing]
        return next((one.ranks for one in placements if one is not None), ())

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
            return f"of {name} the {keep} {'was' if keep == Keep.HISTOGRAM else 'were'} kept, not the values"
        dtype = self.column("dtype")[row]
        if name != "offsets" and not dtype_row(dtype).is_floating:
            return f"{name} holds {dtype}"
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
    standing = STANDING

    def __init__(self, records: Records, *, tied: set[Key], is_wide: bool = True) -> None:
        """Take records. `tied` are the weights that several modules share, as values of `TIE`.

        Without `is_wide`, operands are those that were multiplied.
        """
        super().__init__(records)
        self._tied, self._is_wide = tied, is_wide

    def layout(self, rows: Rows) -> str:
        """The layout of the weight: IO or EIO if recorded so, otherwise OI."""
        said = self.column("layout")[rows["weight"][0]] if "weight" in rows else ""
        return said if said in {GROUPED, TRANSPOSED} else "OI"

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
            return (
                f"no bias was recorded, and outputs of fewer than {MIN_TOKENS} tokens do not tell whether there is one"
            )
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
            return "grad_weight is that of several calls together"
        # In this case the gradient is recorded at the weight itself; see `capture.hooks.calls`.
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
        """The sizes of an operand by dimension: tokens T, inputs I, outputs O, experts E.

        Empty for an operand without dimensions, or a weight with another number of dimensions than its layout.
        """
        shape = self.shape(rows[name])
        letters = self.layout(rows) if name == "weight" else SIZES[name]
        matrix = shape if name == "weight" else (math.prod(shape[:-1]), *shape[-1:])
        found = dict(zip(letters, matrix, strict=False)) if len(letters) == len(matrix) else {}
        return found | ({"E": math.prod(self.shape(rows["offsets"]))} if "offsets" in rows else {})


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
    axes = {axis.axis for one in placements.values() if one is not None for axis in one.axes}
    for axis in axes:
        cuts = {name: _cut(name, one, axis, is_transposed=is_transposed) for name, one in placements.items()}
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
    axis = None if placement is None else next((one for one in placement.axes if one.axis == axis_name), None)
    if placement is None or axis is None or axis.kind is AxisKind.REPLICATE or axis.size == 1:
        return None
    if axis.kind is AxisKind.PARTIAL:
        return _SUMMANDS
    letters = _LETTERS[name][::-1] if is_transposed else _LETTERS[name]
    num_tokens = len(placement.global_shape) - len(letters)
    return (f"T{axis.dim}" if axis.dim < num_tokens else letters[axis.dim - num_tokens]), axis.factor


_GIVEN = ("query", "key", "value")
_WITH_GRADIENT = (*_GIVEN, "grad_output")


class AttentionTensors(RecordedTensors):
    """The tensors of attention, according to the catalogue. No value is read.

    The output is read with the operands, because it may determine the form of the call.
    """

    products = {  # noqa: RUF012 - a constant of the class, as in its base
        "output": _GIVEN,
        "grad_query": _WITH_GRADIENT,
        "grad_key": _WITH_GRADIENT,
        "grad_value": _WITH_GRADIENT,
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
        return "" if min(sizes) > 1 else f"the shapes of {' and '.join(_GIVEN)} are not those of attention"

    def why_not_compared(self, rows: Rows, product: str, *_counts: int) -> str:
        """Why the recorded result cannot be compared; empty if it can, or if it is not recorded."""
        return self.why_missing(rows, [product]) if product in rows else ""

    def _cuts(self, row: int) -> dict[str, str]:
        """For each axis of the mesh that does not replicate, the dimension that it cuts."""
        placement, layout = self.placement(row), self.column("layout")[row]
        axes = () if placement is None else placement.axes
        return {
            one.axis: layout[one.dim] if one.kind is AxisKind.SHARD and 0 <= one.dim < len(layout) else one.kind.value
            for one in axes
            if one.kind is not AxisKind.REPLICATE and one.size > 1
        }
