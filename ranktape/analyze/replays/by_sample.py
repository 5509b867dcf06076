"""Tells the samples of recorded calls apart, so that each has sums of its own rows of the products."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from ranktape.analyze.identity import sample_names
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS
from ranktape.analyze.replays.calls import LeftOut, is_attention
from ranktape.analyze.replays.recorded_tensors import RecordedTensors

if TYPE_CHECKING:
    from ranktape.analyze.identity import SampleName
    from ranktape.analyze.replays.calls import RecordedCall, RecordedCalls

SUMMED = "grad_weight adds up all samples, and these are told apart"
"""Why the gradient of a weight is of no sample."""

_FLOWING = ("input", "grad_output")
"""The operands whose rows are of samples."""


def by_sample(calls: RecordedCalls) -> RecordedCalls:
    """The calls with their samples: `output` and `grad_input` of each that knows where they are; others are left out.

    A call that is of one sample alone stays as it is. No value is read.

    Raises:
        DataError: a placement is damaged.
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
    """The call with its samples; or why they cannot be told apart."""
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
    # Of a shard that is cut along it, the samples are not those of the whole.
    if len(told) > 1 or math.isnan(dim) or dim >= len(sizes) or sizes[int(dim)] != len(own):
        return "its records do not say which rows are of which sample"
    products = {product: why for product, why in call.products.items() if product != "grad_weight"}
    wanted = {*products, "bias", *(name for product in products for name in PRODUCTS[product])}
    rows = {name: rows for name, rows in call.rows.items() if name in wanted}
    return dataclasses.replace(call, products=products, rows=rows, samples=own, sample_dim=int(dim))
