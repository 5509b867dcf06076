"""Compares what layers recorded with what their recorded operands give: the best check of a capture there is."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.identity import SampleName
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS
from ranktape.analyze.replays.calls import is_attention, select_calls
from ranktape.analyze.replays.computable import CALL_FIELDS, Key
from ranktape.analyze.replays.tasks import (
    CallTask,
    CallTasks,
    UnknownFormError,
    output_bias,
    read_attention,
    read_call,
    split_experts,
)
from ranktape.errors import DataError, IncompleteTensorError, ReplicaMismatchError
from ranktape.storage import Records
from tests.analyze.agreement import Agreement

WIDE_TYPES = ("bf16", "fp16", "fp32", "fp64")
"""The words of `quant_type` for layers that quantise nothing."""

NARROW_ERROR = 0.3
"""The relative error that operands of 4 bits may cost, where a layer says that it quantises them inside of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """A recorded product, and whether it is what its operands give."""

    key: Key
    """Of which call: the values of `CALL_FIELDS`."""
    sample: SampleName | None
    """The sample that it is of, where each has records of its own; else None."""
    product: str
    """Its name."""
    agreement: Agreement | None
    """How far off it is, of experts the furthest; None where it cannot be compared."""
    reason: str = ""
    """Why it cannot."""
    is_damaged: bool = False
    """Whether that is because bytes that were committed are lost or wrong."""

    def field(self, name: str) -> Any:
        """One of `CALL_FIELDS`."""
        return self.key[CALL_FIELDS.index(name)]


def recompute(records: Records) -> Iterator[Recomputed]:
    """Each recorded product of linear layers and of attention, computed again in float32 from its recorded operands.

    What cannot be compared comes with the reason: a missing operand, a mask that was not recorded, operands that are
    quantised inside of the layer. So does a product that differs because the training computes it otherwise: gradients
    of gradients, tensors that hooks pack for the backward pass. Memory: the tensors of one call.

    Raises:
        StorageError: the store cannot be read.
        WorkersError: the processes or the cluster cannot be had, or were lost.
    """
    calls = select_calls(records, has_attention=True, is_wide=False)
    recorded = set(zip(*(calls.records.column(name).tolist() for name in (*CALL_FIELDS, "tensor_name")), strict=True))
    for one in calls.left_out:
        if (*one.key, one.product) in recorded:
            yield Recomputed(key=one.key, sample=None, product=one.product, agreement=None, reason=one.reason)
    tasks = CallTasks(calls, ())
    for found in Engine().map(compare_call, tasks, sizes=tasks.sizes):
        yield from found


def compare_call(task: CallTask) -> list[Recomputed]:
    """Of each recorded product of a call how far it is from what its operands give.

    Raises:
        StorageError: the store cannot be read.
    """
    call = task.call
    asked = {product: why for product, why in call.products.items() if why or product in call.rows}
    told = functools.partial(Recomputed, key=call.key, sample=call.sample)
    found = [told(product=product, agreement=None, reason=why) for product, why in asked.items() if why]
    if len(found) == len(asked):
        return found
    try:
        worst = _attention(task) if is_attention(call.key) else _linear(task)
    except (UnknownFormError, DataError) as error:
        is_damaged = isinstance(error, DataError) and not isinstance(
            error, IncompleteTensorError | ReplicaMismatchError
        )
        unknown: dict[str, Any] = {"agreement": None, "reason": str(error), "is_damaged": is_damaged}
        return found + [told(product=product, **unknown) for product, why in asked.items() if not why]
    quant_type = call.field("quant_type")
    for product, agreement in worst.items():
        reason = "" if agreement.is_agreed else call.doubts[product]
        is_inside = not agreement.is_agreed and agreement.relative_error < NARROW_ERROR
        if is_inside and quant_type not in WIDE_TYPES:
            reason = f"its operands are quantised inside of the layer ({quant_type})"
        found.append(told(product=product, agreement=None if reason else agreement, reason=reason))
    return found


def _attention(task: CallTask) -> dict[str, Agreement]:
    from tests.analyze.agreement import attention_agreements

    call = read_attention(task)
    agreements = attention_agreements(call.operands, call.recorded, form=call.form, compute_dtype=call.dtype)
    return {one.product: one for one in agreements}


def _linear(task: CallTask) -> dict[str, Agreement]:
    import torch

    from tests.analyze.agreement import linear_agreements

    call = task.call
    compared = [product for product, why in call.products.items() if not why and product in call.rows]
    worst: dict[str, Agreement] = {}
    for tensors in split_experts(read_call(task)[0]):
        operands = {name: tensors[name] for product in compared for name in PRODUCTS[product]}
        agreements = linear_agreements(
            operands,
            {product: tensors[product] for product in compared},
            compute_dtype=max((one.dtype for one in operands.values()), key=lambda dtype: torch.finfo(dtype).eps),
            bias=output_bias(tensors, is_known=call.is_bias_known) if "output" in compared else None,
            num_parts=max(map(len, call.rows.values())),
        )
        for one in agreements:
            known = worst.get(one.product)
            if known is None or one.deviation > known.deviation:
                worst[one.product] = one
    return worst
