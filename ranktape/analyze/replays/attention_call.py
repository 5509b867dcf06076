"""Computes one recorded call of attention again, once it is known how it computed: the work of one task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ranktape.analyze.numerics.attention import heads_second, replay_attention
from ranktape.analyze.numerics.attention_forms import UnknownFormError, find_form
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.replays.attention_tensors import AttentionTensors
from ranktape.analyze.replays.calls import LeftOut, is_attention
from ranktape.analyze.replays.tasks import CallTasks, read_call, replay_call
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.attention import AttentionForm
    from ranktape.analyze.replays.calls import RecordedCalls
    from ranktape.analyze.replays.tasks import CallErrors, CallTask, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What attention was computed from, how, and what it gave; all tensors are [B, H, T, D]."""

    operands: Tensors
    """`query`, `key`, `value`, and where gradients are asked for `grad_output`."""
    recorded: Tensors
    """What was recorded of what it gave, and can be compared."""
    form: AttentionForm
    """Which keys a query sees, and the scale."""
    dtype: torch.dtype
    """What it computed in."""


def read_attention(task: CallTask) -> AttentionCall:
    """The tensors of a call of attention.

    Raises:
        DataError: bytes or parts are missing, or damaged.
        StorageError: the store cannot be read.
        UnknownFormError: how it computed is not known; the text says why.
    """
    call = task.call
    tensors, infos = read_call(task)
    dtype = tensors["query"].dtype
    names = {name for product in call.products for name in AttentionTensors.products[product]}
    try:
        num_heads = heads_second(tensors["query"], infos["query"].layout).shape[1]
        seen = {name: heads_second(one, infos[name].layout, num_heads=num_heads) for name, one in tensors.items()}
        operands = {name: seen[name] for name in names}
        said = infos["query"].metadata or {}
        form = find_form(said, operands, output=seen.get("output"), compute_dtype=dtype)
    except UsageError as error:
        raise UnknownFormError(str(error)) from error
    recorded = {name: seen[name] for name, why in call.products.items() if name in seen and not why}
    return AttentionCall(operands=operands, recorded=recorded, form=form, dtype=dtype)


def without_unknown(calls: RecordedCalls, *, engine: Engine) -> RecordedCalls:
    """The calls, those of attention left out whose values do not tell how they computed; reads all of attention.

    Raises:
        DataError: bytes or parts are missing, or damaged.
        StorageError: the store cannot be read.
        WorkersError: the processes or the cluster cannot be had, or were lost.
    """
    attention = replace(calls, calls=tuple(call for call in calls.calls if is_attention(call.key)))
    tasks = CallTasks(attention, ())
    reasons = dict(
        zip((call.key for call in attention.calls), engine.map(_why_unknown, tasks, sizes=tasks.sizes), strict=True)
    )
    unknown = [
        LeftOut(key=call.key, product=product, reason=reasons[call.key])
        for call in attention.calls
        if reasons[call.key]
        for product in call.products
    ]
    kept = tuple(call for call in calls.calls if not reasons.get(call.key))
    return replace(calls, calls=kept, left_out=(*calls.left_out, *unknown))


def _why_unknown(task: CallTask) -> str:
    try:
        read_attention(task)
    except UnknownFormError as error:
        return str(error)
    return ""


def replay_any(task: CallTask) -> CallErrors | str:
    """What `replay_call` gives of a linear layer, and the same of attention; or why attention is not computed again.

    Raises:
        DataError: bytes or parts are missing, or damaged.
        StorageError: the store cannot be read.
    """
    if not is_attention(task.call.key):
        return replay_call(task)
    try:
        call = read_attention(task)
    except UnknownFormError as error:
        return str(error)
    errors = replay_attention(call.operands, task.recipes, form=call.form, recorded=call.recorded)
    return [
        (one.product, one.recipe, one.exact.to_array(), (one.recorded or ErrorSums()).to_array())
        for one in errors
        if one.product in task.call.products
    ]
