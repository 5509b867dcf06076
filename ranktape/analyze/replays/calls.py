"""Selects the calls of layers whose products can be replayed, and gives the reason for each that cannot."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ranktape.analyze.identity import SampleName, sample_names
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, Recipe
from ranktape.analyze.replays.computable import (
    CALL_FIELDS,
    TIE,
    AttentionTensors,
    CallTensors,
    Key,
    LinearTensors,
    RecordedTensors,
    Rows,
)
from ranktape.errors import UsageError
from ranktape.storage import Records
from ranktape.storage.format.record_info import WIDE
from ranktape.storage.places.failures import printable

LINEAR = "linear"
"""Layers with this `layer_type` or `component` compute the three products."""

ATTENTION, ATTENTION_COMPONENT = "attention", "FA"
"""Layers with this `component`, or with this `layer_type` and not the component of linear ones, compute attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call of a layer, with products that can be replayed."""

    key: Key
    """The fields of the call. If its tensors are assembled from several ranks, those of the lowest rank."""
    sample: SampleName | None
    """The sample of the call; None if it has several or none."""
    rows: Rows
    """The rows of its operands, of the results that are compared, and of `bias` and `offsets`."""
    products: Mapping[str, str]
    """For each product, why the recorded result differs from that of the operands; empty if it does not."""
    doubts: Mapping[str, str]
    """For each product, why a difference would not be an error of the capture; empty if it would be."""
    is_assembled: bool
    """Whether its tensors are assembled from those of all ranks of a mesh."""
    is_bias_known: bool
    """Whether the bias in the output, if there is one, is in `rows`."""
    samples: tuple[SampleName, ...] = ()
    """Its samples, if they are distinguished (see `by_sample`)."""
    sample_dim: int | None = None
    """In this case, the dimension of samples in the input and in the gradient of the output."""

    def field(self, name: str) -> Any:
        """The value of one of `CALL_FIELDS`."""
        return self.key[CALL_FIELDS.index(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A product of a call that cannot be replayed."""

    key: Key
    """The fields of the call."""
    product: str
    """Name of the product."""
    reason: str
    """What is missing, in the same text for all calls that lack it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCalls:
    """The calls of a selection."""

    records: Records
    """The records that rows refer to: those of all such layers, including records outside the selection."""
    calls: tuple[RecordedCall, ...]
    """The calls with a product that can be replayed, in the order of the records."""
    left_out: tuple[LeftOut, ...]
    """The products that cannot be replayed."""
    num_layers: Mapping[str, int]
    """For each `layer_stack`, one more than the largest index of a layer."""

    def recipe_of(self, call: RecordedCall, recipe: Recipe) -> Recipe:
        """The recipe for the layer of a call, with the exceptions of the recipe applied."""
        layer_idx, stack = call.field("layer_idx"), call.field("layer_stack")
        # A layer outside the stacks only needs to know whether there are any layers in them.
        num_layers = self.num_layers[stack] if layer_idx >= 0 else max(self.num_layers.values())
        return recipe.of_layer(call.field("module"), layer_idx=layer_idx, num_layers=num_layers)


def calls_of(
    records: Records, *, products: Collection[str] = (), has_attention: bool = False, is_wide: bool = True
) -> RecordedCalls:
    """The calls of linear layers in a selection, and which of their products can be replayed. Reads no value.

    A product is selected if its result is selected. If no layer recorded such a result, or if `products` names it, it
    is also selected if its operands are. Operands may be outside the selection, in the same iterations. If `products`
    is empty, all products count.

    With `has_attention`, calls of attention are included. If a layer recorded its operands both before and after it
    quantized them, those before are used. Without `is_wide`, those that were multiplied are used, which are known for
    outputs only.

    Raises:
        DataError: a placement is damaged.
        StorageError: a catalogue cannot be read.
        UsageError: the records have several sources.
    """
    if len(records.sources) > 1:
        named = ", ".join(map(printable, records.sources))
        raise UsageError(f"products are computed again of one source at a time: choose one with --source ({named})")
    everything, places = records.unfiltered()
    layers, components = (everything.column(name) for name in ("layer_type", "component"))
    is_asked = (layers == LINEAR) | (components == LINEAR)
    if has_attention:
        is_asked |= (layers == ATTENTION) | (components == ATTENTION_COMPONENT)
    rows = np.flatnonzero(is_asked)
    own = everything.take(rows.tolist())
    calls = CallTensors(own, is_wide=is_wide)
    finder = _Finder(own, np.flatnonzero(np.isin(rows, places)).tolist(), calls=calls, tied=_tied_weights(everything))
    for key in finder.keys:
        for product in finder.products(key):
            if (not products or product in products) and finder.is_asked(key, product, is_named=bool(products)):
                finder.look(key, product)
    num_layers: defaultdict[str, int] = defaultdict(int)
    for stack, layer in zip(*(everything.column(name).tolist() for name in ("layer_stack", "layer_idx")), strict=True):
        num_layers[stack] = max(num_layers[stack], layer + 1)
    return RecordedCalls(records=own, calls=finder.calls(), left_out=finder.left_out(), num_layers=dict(num_layers))


def is_attention(key: Key) -> bool:
    """Whether a call is one of attention."""
    layer_type, component = (key[CALL_FIELDS.index(name)] for name in ("layer_type", "component"))
    return bool(component == ATTENTION_COMPONENT or (layer_type == ATTENTION and component != LINEAR))


def _tied_weights(records: Records) -> set[Key]:
    """The weights that several modules share, as values of `TIE`."""
    weights = records.take(np.flatnonzero(records.column("tensor_name") == "weight").tolist())
    modules: defaultdict[Key, set[str]] = defaultdict(set)
    for *key, module in zip(*(weights.column(name).tolist() for name in (*TIE, "module")), strict=True):
        modules[tuple(key)].add(module)
    return {key for key, names in modules.items() if len(names) > 1}


@dataclass(slots=True)
class _Found:
    """The products and tensors of a call that were selected so far. The fields are those of `RecordedCall`."""

    sample: SampleName | None
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    is_bias_known: bool = True


_OF_GRAPH = "a backward pass over gradients (create_graph=True) adds to those of its calls"


class _Finder:
    """Examines the products of calls one by one."""

    def __init__(self, records: Records, selected: list[int], *, calls: CallTensors, tied: set[Key]) -> None:
        self._calls = calls
        self._linear = LinearTensors(records, tied=tied, is_wide=calls.is_wide)
        self._attention = AttentionTensors(records)
        self._recorded = set(records.column("tensor_name").tolist())
        self._selected: defaultdict[Key, set[str]] = defaultdict(set)
        names = self._linear.column("tensor_name")
        for row in selected:
            self._selected[self._calls.key(row)].add(names[row])
        self._found: dict[tuple[Key, bool], _Found] = {}
        self._left_out: dict[tuple[Key, str], str] = {}

    @property
    def keys(self) -> list[Key]:
        """The calls that have a selected tensor."""
        return [key for key in self._calls.names if key in self._selected]

    def products(self, key: Key) -> Collection[str]:
        """The products of the layer of a call."""
        return self._kind(key).products

    def _kind(self, key: Key) -> LinearTensors | AttentionTensors:
        return self._attention if is_attention(key) else self._linear

    def calls(self) -> tuple[RecordedCall, ...]:
        """The calls with a product that can be replayed."""
        return tuple(
            RecordedCall(key=key, is_assembled=is_assembled, **dataclasses.asdict(found))
            for (key, is_assembled), found in self._found.items()
        )

    def left_out(self) -> tuple[LeftOut, ...]:
        """The products that cannot be replayed."""
        found = self._left_out.items()
        return tuple(LeftOut(key=key, product=product, reason=reason) for (key, product), reason in found)

    def is_asked(self, key: Key, product: str, *, is_named: bool) -> bool:
        """Whether a product of a call is selected."""
        selected = self._selected[key]
        if product in self._calls.names[key]:
            return product in selected
        # If other layers recorded this result, this layer did not compute it. If none did, the capture left it out.
        kind = self._kind(key)
        flowing = [name for name in kind.products[product] if name not in kind.standing]
        return (is_named or product not in self._recorded) and all({name, WIDE + name} & selected for name in flowing)

    def look(self, key: Key, product: str) -> None:
        """Add a product of a call, or the reason why it cannot be replayed."""
        kind = self._kind(key)
        own = self._calls.of(key)
        reason = kind.why_not_read(own, product)
        place, rows = key, own
        is_local = bool(reason) or kind.is_local(own, product)
        if not is_local:
            place, rows, reason = self._whole(key, own, product)
        found = self._found.get((place, not is_local)) or _Found(sample=self._calls.sample(key))
        told = [name for name in kind.companions if not kind.why_missing(rows, [name])]
        operands = {name: rows[name] for name in (*kind.products[product], *told) if name in rows}
        reason = reason or kind.why_no_product(found.rows | operands, product)
        if reason:
            self._left_out[place, product] = reason
            return
        counts = (self._calls.num_calls(key, name) for name in ("grad_output", "grad_weight"))
        why = kind.why_not_compared(rows, product, *counts)
        self._found[place, not is_local] = found
        found.products[product] = why
        is_shared = product != "output" and self._calls.is_differentiable(key)
        found.doubts[product] = _OF_GRAPH if is_shared else kind.doubt(rows, product)
        found.rows |= operands
        if product in rows and not why:
            found.rows[product] = rows[product]
        if product == "output" and isinstance(kind, LinearTensors):
            found.is_bias_known = kind.is_bias_known(rows)
            found.rows |= {"bias": rows["bias"]} if kind.has_bias(rows) else {}

    def _whole(self, key: Key, own: Rows, product: str) -> tuple[Key, Rows, str]:
        """The call of a mesh's lowest rank, its tensors of all ranks, and why they are not available, or empty."""
        kind = self._kind(key)
        ranks = sorted(kind.ranks(own, product))
        if not ranks:
            return key, own, "the weight is a shard, and where the other operand lies was not recorded"
        at = CALL_FIELDS.index("rank")
        keys = [(*key[:at], rank, *key[at + 1 :]) for rank in ranks]
        of_ranks = [self._calls.of(one) for one in keys]
        reasons = [reason for rows in of_ranks if (reason := kind.why_not_read(rows, product))]
        if reasons:
            return keys[0], own, f"it takes what all ranks of a mesh have, and of one {reasons[0]}"
        wanted = (*kind.products[product], product, "bias", *(kind.companions if kind is self._attention else ()))
        names = [name for name in wanted if all(name in rows for rows in of_ranks)]
        return keys[0], {name: tuple(row for rows in of_ranks for row in rows[name]) for name in names}, ""


_FIELDS = ("attempt", "iteration", "rank", "module", "tensor_name", "counter")
"""The fields that identify a record of a run."""


def places_in(records: Records, calls: RecordedCalls) -> list[list[int]]:
    """For each call, the indices of its tensors in a selection, in the call's order, without tensors outside of it."""
    known = {key: place for place, key in enumerate(_keys(records))}
    keys = _keys(calls.records)
    rows = ([row for several in call.rows.values() for row in several] for call in calls.calls)
    return [list(dict.fromkeys(known[keys[row]] for row in some if keys[row] in known)) for some in rows]


def _keys(records: Records) -> list[tuple[Any, ...]]:
    return list(zip(*(records.column(name).tolist() for name in _FIELDS), strict=True))


SUMMED = "grad_weight adds up all samples, and these are told apart"
"""Why the gradient of a weight is not available by sample."""

_FLOWING = ("input", "grad_output")
"""The operands whose rows belong to samples."""


def by_sample(calls: RecordedCalls) -> RecordedCalls:
    """The calls with `output` and `grad_input` by sample. Calls whose rows cannot be assigned to samples are left out.

    A call of a single sample does not change. No value is read.
    """
    tensors, names = RecordedTensors(calls.records), sample_names(calls.records)
    kept, left_out = [], list(calls.left_out)
    for call in calls.calls:
        found = call if call.sample is not None else _apart(call, tensors, names)
        if isinstance(found, str):
            left_out += [LeftOut(key=call.key, product=product, reason=found) for product in call.products]
            continue
        left_out += [
            LeftOut(key=call.key, product=product, reason=SUMMED)
            for product in call.products
            if product not in found.products
        ]
        kept += [found] if found.products else []
    return dataclasses.replace(calls, calls=tuple(kept), left_out=tuple(left_out))


def _apart(call: RecordedCall, tensors: RecordedTensors, names: list[list[SampleName]]) -> RecordedCall | str:
    """The call with its samples, or the reason why they cannot be distinguished."""
    if is_attention(call.key):
        return "samples of attention are not told apart"
    if "offsets" in call.rows:
        return "its tokens are in the order of experts, not of samples"
    told = {
        (tensors.column("sample_dim")[row], tuple(names[row]), tensors.shape(rows)[:-1])
        for name, rows in call.rows.items()
        if name in _FLOWING
        for row in rows
    }
    dim, own, sizes = next(iter(told))
    # A shard along this dimension has fewer samples than the names given for the whole tensor.
    if len(told) > 1 or math.isnan(dim) or dim >= len(sizes) or sizes[int(dim)] != len(own):
        return "its records do not say which rows are of which sample"
    products = {product: why for product, why in call.products.items() if product != "grad_weight"}
    wanted = {*products, "bias", *(name for product in products for name in PRODUCTS[product])}
    rows = {name: rows for name, rows in call.rows.items() if name in wanted}
    return dataclasses.replace(call, products=products, rows=rows, samples=own, sample_dim=int(dim))
