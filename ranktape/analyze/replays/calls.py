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
    """Its samples, if they are distinguished (see `split_by_sample`)."""
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


def select_calls(
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
        raise UsageError(f"products are computed again for only one source: select one with --source ({named})")
    all_records, selected = records.unfiltered()
    layers, components = (all_records.column(name) for name in ("layer_type", "component"))
    is_replayable = (layers == LINEAR) | (components == LINEAR)
    if has_attention:
        is_replayable |= (layers == ATTENTION) | (components == ATTENTION_COMPONENT)
    rows = np.flatnonzero(is_replayable)
    layer_records = all_records.take(rows.tolist())
    calls = CallTensors(layer_records, is_wide=is_wide)
    finder = _Finder(
        layer_records, np.flatnonzero(np.isin(rows, selected)).tolist(), calls=calls, tied=_tied_weights(all_records)
    )
    for key in finder.keys:
        for product in finder.products(key):
            if (not products or product in products) and finder.is_selected(key, product, is_named=bool(products)):
                finder.add(key, product)
    num_layers: defaultdict[str, int] = defaultdict(int)
    for stack, layer in zip(*(all_records.column(name).tolist() for name in ("layer_stack", "layer_idx")), strict=True):
        num_layers[stack] = max(num_layers[stack], layer + 1)
    return RecordedCalls(
        records=layer_records, calls=finder.calls(), left_out=finder.left_out(), num_layers=dict(num_layers)
    )


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
class _CallSelection:
    """The products and tensors of a call that were selected so far. The fields are those of `RecordedCall`."""

    sample: SampleName | None
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    is_bias_known: bool = True


_GRAPH_DOUBT = "a backward pass over gradients (create_graph=True) adds to those of its calls"


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
        self._selections: dict[tuple[Key, bool], _CallSelection] = {}
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
            RecordedCall(key=key, is_assembled=is_assembled, **dataclasses.asdict(selection))
            for (key, is_assembled), selection in self._selections.items()
        )

    def left_out(self) -> tuple[LeftOut, ...]:
        """The products that cannot be replayed."""
        items = self._left_out.items()
        return tuple(LeftOut(key=key, product=product, reason=reason) for (key, product), reason in items)

    def is_selected(self, key: Key, product: str, *, is_named: bool) -> bool:
        """Whether a product of a call is selected."""
        selected = self._selected[key]
        if product in self._calls.names[key]:
            return product in selected
        # If other layers recorded this result, this layer did not compute it. If none did, the capture left it out.
        kind = self._kind(key)
        per_call = [name for name in kind.products[product] if name not in kind.shared_operands]
        return (is_named or product not in self._recorded) and all({name, WIDE + name} & selected for name in per_call)

    def add(self, key: Key, product: str) -> None:
        """Add a product of a call, or the reason why it cannot be replayed."""
        kind = self._kind(key)
        call_rows = self._calls.of(key)
        reason = kind.why_not_read(call_rows, product)
        call_key, rows = key, call_rows
        is_local = bool(reason) or kind.is_local(call_rows, product)
        if not is_local:
            call_key, rows, reason = self._assembled(key, call_rows, product)
        selection = self._selections.get((call_key, not is_local)) or _CallSelection(sample=self._calls.sample(key))
        companions = [name for name in kind.companions if not kind.why_missing(rows, [name])]
        operands = {name: rows[name] for name in (*kind.products[product], *companions) if name in rows}
        reason = reason or kind.why_no_product(selection.rows | operands, product)
        if reason:
            self._left_out[call_key, product] = reason
            return
        counts = (self._calls.num_calls(key, name) for name in ("grad_output", "grad_weight"))
        difference = kind.why_not_compared(rows, product, *counts)
        self._selections[call_key, not is_local] = selection
        selection.products[product] = difference
        is_shared = product != "output" and self._calls.is_differentiable(key)
        selection.doubts[product] = _GRAPH_DOUBT if is_shared else kind.doubt(rows, product)
        selection.rows |= operands
        if product in rows and not difference:
            selection.rows[product] = rows[product]
        if product == "output" and isinstance(kind, LinearTensors):
            selection.is_bias_known = kind.is_bias_known(rows)
            selection.rows |= {"bias": rows["bias"]} if kind.has_bias(rows) else {}

    def _assembled(self, key: Key, call_rows: Rows, product: str) -> tuple[Key, Rows, str]:
        """The call of a mesh's lowest rank, its tensors of all ranks, and why they are not available, or empty."""
        kind = self._kind(key)
        ranks = sorted(kind.ranks(call_rows, product))
        if not ranks:
            return key, call_rows, "the weight is a shard, and the placement of the other operand was not recorded"
        rank_field = CALL_FIELDS.index("rank")
        keys = [(*key[:rank_field], rank, *key[rank_field + 1 :]) for rank in ranks]
        rows_of_ranks = [self._calls.of(rank_key) for rank_key in keys]
        reasons = [reason for rows in rows_of_ranks if (reason := kind.why_not_read(rows, product))]
        if reasons:
            return keys[0], call_rows, f"it needs the operands of all ranks of a mesh, and for one of them {reasons[0]}"
        needed = (*kind.products[product], product, "bias", *(kind.companions if kind is self._attention else ()))
        names = [name for name in needed if all(name in rows for rows in rows_of_ranks)]
        return keys[0], {name: tuple(row for rows in rows_of_ranks for row in rows[name]) for name in names}, ""


_FIELDS = ("attempt", "iteration", "rank", "module", "tensor_name", "counter")
"""The fields that identify a record of a run."""


def rows_in_selection(records: Records, calls: RecordedCalls) -> list[list[int]]:
    """For each call, the indices of its tensors in a selection, in the call's order, without tensors outside of it."""
    index_of = {key: index for index, key in enumerate(_keys(records))}
    keys = _keys(calls.records)
    rows = ([row for tensor_rows in call.rows.values() for row in tensor_rows] for call in calls.calls)
    return [
        list(dict.fromkeys(index_of[keys[row]] for row in call_rows if keys[row] in index_of)) for call_rows in rows
    ]


def _keys(records: Records) -> list[tuple[Any, ...]]:
    return list(zip(*(records.column(name).tolist() for name in _FIELDS), strict=True))


SUMMED = "grad_weight is a sum over all samples, which are compared one by one"
"""Why the gradient of a weight is not available by sample."""

_FLOWING = ("input", "grad_output")
"""The operands whose rows belong to samples."""


def split_by_sample(calls: RecordedCalls) -> RecordedCalls:
    """The calls with `output` and `grad_input` by sample. Calls whose rows cannot be assigned to samples are left out.

    A call of a single sample does not change. No value is read.
    """
    tensors, names = RecordedTensors(calls.records), sample_names(calls.records)
    split_calls, left_out = [], list(calls.left_out)
    for call in calls.calls:
        split = call if call.sample is not None else _split_call(call, tensors, names)
        if isinstance(split, str):
            left_out += [LeftOut(key=call.key, product=product, reason=split) for product in call.products]
            continue
        left_out += [
            LeftOut(key=call.key, product=product, reason=SUMMED)
            for product in call.products
            if product not in split.products
        ]
        split_calls += [split] if split.products else []
    return dataclasses.replace(calls, calls=tuple(split_calls), left_out=tuple(left_out))


def _split_call(call: RecordedCall, tensors: RecordedTensors, names: list[list[SampleName]]) -> RecordedCall | str:
    """The call with its samples, or the reason why they cannot be distinguished."""
    if is_attention(call.key):
        return "samples of attention are not compared one by one"
    if "offsets" in call.rows:
        return "its tokens are in the order of experts, not of samples"
    layouts = {
        (tensors.column("sample_dim")[row], tuple(names[row]), tensors.shape(rows)[:-1])
        for name, rows in call.rows.items()
        if name in _FLOWING
        for row in rows
    }
    dim, call_samples, sizes = next(iter(layouts))
    # A shard along this dimension has fewer samples than the names given for the whole tensor.
    if len(layouts) > 1 or math.isnan(dim) or dim >= len(sizes) or sizes[int(dim)] != len(call_samples):
        return "its records do not give the sample of each row"
    products = {product: why for product, why in call.products.items() if product != "grad_weight"}
    needed = {*products, "bias", *(name for product in products for name in PRODUCTS[product])}
    rows = {name: rows for name, rows in call.rows.items() if name in needed}
    return dataclasses.replace(call, products=products, rows=rows, samples=call_samples, sample_dim=int(dim))
