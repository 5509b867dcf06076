"""Replays one recorded call of a linear layer or of attention: the work of one task.

The tensors of one call are in memory. The form of a call of attention is determined first, from its metadata and, if
these are not sufficient, from its output.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ranktape.analyze.comparison.tensors import ComparedTensor
from ranktape.analyze.engine.engine import keep_freed_memory
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.numerics.attention import (
    AttentionForm,
    attention_products,
    heads_second,
    replay_attention,
    reproduces_output,
)
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, Recipe
from ranktape.analyze.replays.calls import LeftOut, RecordedCall, RecordedCalls, is_attention
from ranktape.analyze.replays.computable import TRANSPOSED, AttentionTensors
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import to_torch

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.products import ProductError
    from ranktape.storage import Record
    from ranktape.storage.format.record_info import RecordInfo

CALL_NBYTES = 1 << 30
"""Amount of freed memory that is retained between the products of a call, in bytes, in blocks of at most half of it."""

Tensors: TypeAlias = "dict[str, torch.Tensor]"

CallErrors: TypeAlias = "list[tuple[str, str, NDArray[np.float64], NDArray[np.float64]]]"
"""For each product and recipe, the rows of `ErrorSums` against the exact product and against the recorded one. The
latter are zero if the recorded one cannot be compared. If samples are distinguished, each has a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTask:
    """One call with the records of its tensors. It can be pickled."""

    call: RecordedCall
    """The call."""
    records: Iterable[Record]
    """The records of its rows, tensor by tensor."""
    recipes: tuple[Recipe, ...]
    """The recipes to compute with."""


class CallTasks(Sequence[CallTask]):
    """The tasks of calls, created when they are accessed."""

    def __init__(
        self, calls: RecordedCalls, recipes: Sequence[Recipe], *, subset: Mapping[int, Collection[str]] | None = None
    ) -> None:
        """Take calls and recipes. `asked` limits them to calls, by index, and the names of recipes for each."""
        self._calls, self._recipes = calls, recipes
        names = [recipe.name for recipe in recipes]
        self._subset = list((dict.fromkeys(range(len(calls.calls)), names) if subset is None else subset).items())
        nbytes = calls.records.column("nbytes").tolist()
        self.sizes = [
            sum(nbytes[row] for rows in calls.calls[index].rows.values() for row in rows) for index, _ in self._subset
        ]
        """Number of bytes that each task reads."""

    def __len__(self) -> int:
        return len(self._subset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        call_index, names = self._subset[index]
        call = self._calls.calls[call_index]
        records = self._calls.records.take([row for rows in call.rows.values() for row in rows])
        recipes = tuple(self._calls.recipe_of(call, recipe) for recipe in self._recipes if recipe.name in names)
        # The records of files are read when they are accessed, so this is left to the worker.
        return CallTask(call=call, records=records if records.is_costly else tuple(records), recipes=recipes)


def replay_call(task: CallTask) -> CallErrors:
    """The errors of each product of a call by each recipe; for each product, those of the recorded one come first.

    Operands are rounded to the dtype in which the operation computed. A GPU is used if torch has one.
    """
    from ranktape.analyze.numerics.products import replay_products

    keep_freed_memory(CALL_NBYTES)
    call = task.call
    errors: defaultdict[tuple[str, str], defaultdict[int | None, list[ProductError]]]
    errors = defaultdict(lambda: defaultdict(list))
    for tensors in split_experts(read_call(task)[0]):
        operands = {name: tensors[name] for product in call.products for name in PRODUCTS[product]}
        recorded = {name: tensors[name] for name in call.products if name in tensors}
        if "output" in recorded:
            bias = output_bias(tensors, is_known=call.is_bias_known)
            output = recorded["output"].float().flatten(0, -2)
            recorded["output"] = output if bias is None else output - bias.float()
        for error in replay_products(
            operands, task.recipes, recorded=recorded, products=call.products, sample_dim=call.sample_dim
        ):
            errors[error.product, error.recipe][error.sample].append(error)
    return [
        (
            *names,
            np.vstack([_pooled(error.exact for error in parts) for parts in samples.values()]),
            np.vstack(
                [_pooled(error.recorded for error in parts if error.recorded is not None) for parts in samples.values()]
            ),
        )
        for names, samples in errors.items()
    ]


def _pooled(parts: Iterable[ErrorSums]) -> NDArray[np.float64]:
    return ErrorSums.pooled([part.to_array() for part in parts]).to_array()


def read_call(task: CallTask) -> tuple[Tensors, dict[str, RecordInfo]]:
    """The tensors of a call by name, rounded to the dtype in which it computed, and the `RecordInfo` of each.

    Weights have the layout OI, or EIO.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    records = iter(task.records)
    tensors, infos = {}, {}
    for name, rows in task.call.rows.items():
        parts = tuple(itertools.islice(records, len(rows)))
        values = ComparedTensor(records=parts, is_assembled=len(parts) > 1).read(view=View.COMPUTE)
        infos[name] = info = parts[0].info
        dtype = viewed_dtype(dtype=info.dtype, compute_dtype=info.compute_dtype, view=View.COMPUTE)
        tensors[name] = to_torch(values, dtype=dtype, shape=values.shape).to(device)
        if name.endswith("weight") and info.layout == TRANSPOSED:
            tensors[name] = tensors[name].T
    return tensors, infos


def split_experts(tensors: Tensors) -> Iterator[Tensors]:
    """The tensors of each layer. Experts that are multiplied in one call are separate layers, with their own tokens."""
    if "offsets" not in tensors:
        yield tensors
        return
    start = 0
    for expert, end in enumerate(tensors["offsets"].tolist()):
        yield {
            name: tensor[expert].T if name.endswith("weight") else tensor[start:end]
            for name, tensor in tensors.items()
            if name != "offsets"
        }
        start = end


def output_bias(tensors: Tensors, *, is_known: bool) -> torch.Tensor | None:
    """The bias in the output of a layer: the recorded one, or the mean difference of outputs and products."""
    if is_known:
        return tensors.get("bias")
    output = tensors["output"].float().flatten(0, -2)
    inputs, weight = tensors["input"].float().flatten(0, -2), tensors["weight"].float()
    is_finite = output.isfinite().all(1) & inputs.isfinite().all(1)
    if not is_finite.any():
        return None
    difference = output[is_finite].double().mean(0) - weight.double() @ inputs[is_finite].double().mean(0)
    return difference.float()


_FURTHEST = 1 << 40
"""Maximum size of a window, in keys. No sequence is as long."""

_UNRECORDED = ("mask", "bias", "sinks")
"""Names in the metadata of a query of arguments that were passed but not recorded (see `CallOption`)."""


class UnknownFormError(Exception):
    """The form of a call is unknown or cannot be replayed. The text gives the reason."""


def find_form(
    metadata: Mapping[str, Any],
    operands: Mapping[str, torch.Tensor],
    *,
    output: torch.Tensor | None,
    compute_dtype: torch.dtype,
) -> AttentionForm:
    """The form of a call of attention. Its operands (query, key and value) and its output have the layout [B, H, T, D].

    `said` is the metadata of the query. A mask that was passed as a tensor is not recorded. In this case, causal
    attention and full attention are tried, with and without the recorded window, and the form that gives the recorded
    output within rounding is returned.

    Raises:
        UnknownFormError: no form gives the output, the call cannot be replayed (dropout, capped scores), or several
            forms are possible and there is no output to decide.
    """
    forms, is_sure = _possible(metadata, num_queries=operands["query"].shape[2], num_keys=operands["key"].shape[2])
    if is_sure and len(forms) == 1:
        return forms[0]
    if output is None:
        raise UnknownFormError("neither its mask nor its output, from which the mask follows, was recorded")
    wide = {name: operands[name].float() for name in ("query", "key", "value")}
    recorded = output.float()

    def distance(form: AttentionForm) -> float:
        difference = attention_products(wide, form=form)["output"] - recorded
        return float(difference.nan_to_num(0.0).double().norm())

    def matches(form: AttentionForm) -> bool:
        narrow = {name: operands[name] for name in wide}
        return reproduces_output(narrow, output, form=form, compute_dtype=compute_dtype)

    best = min(forms, key=distance)
    if is_sure:
        return best
    if matches(best):
        # Outputs that are NaN or Inf agree for every mask.
        if recorded.isfinite().all() or not any(matches(form) for form in forms if form != best):
            return best
        raise UnknownFormError("several masks give the finite part of its output, and its mask was not recorded")
    passed = ", ".join(name for name in _UNRECORDED if name in metadata) or "a mask, a bias, dropout or another scale"
    raise UnknownFormError(
        f"neither causal attention nor attention to all keys gives its output: {passed} was not recorded"
    )


def _possible(metadata: Mapping[str, Any], *, num_queries: int, num_keys: int) -> tuple[list[AttentionForm], bool]:
    """The possible forms of a call, and whether one of them is certainly the right one."""
    if metadata.get("dropout"):
        raise UnknownFormError(f"it uses random dropout ({metadata['dropout']})")
    if metadata.get("cap"):
        raise UnknownFormError(f"its scores are capped (cap {metadata['cap']})")
    scale = metadata.get("scale")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise UnknownFormError(f"its scale was not recorded as a number, but as {scale!r:.40}")
    is_causal = metadata.get("is_causal")
    is_sure = isinstance(is_causal, bool) and not any(name in metadata for name in _UNRECORDED)
    before, after = _window(metadata.get("window"))
    causal, full = AttentionForm(before=before, after=0), AttentionForm(before=before, after=after)
    tried = [causal, full, AttentionForm(after=0), AttentionForm()]
    forms = tried if not is_sure else [causal] if is_causal else [full]
    shifts = (0, num_keys - num_queries)
    # Attention that is written out may scale its query before the product.
    scales = (None, 1.0) if metadata.get("written_out") else (scale,)
    shifted = (
        replace(form, scale=scale, shift=0 if form.before is form.after is None else shift)
        for form, shift, scale in itertools.product(forms, shifts, scales)
    )
    return list(dict.fromkeys(shifted)), is_sure


def _window(window: Any) -> tuple[int | None, int | None]:
    """The numbers of keys that a query sees before and after its own, from FlashAttention's pair or one number."""
    is_pair = isinstance(window, list) and len(window) == len(("before", "after"))
    if is_pair and all(isinstance(size, int) for size in window):
        before, after = (None if size < 0 else min(size, _FURTHEST) for size in window)
        return before, after
    return (min(window - 1, _FURTHEST), None) if isinstance(window, int) and window > 0 else (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The operands, the form and the results of a call of attention. All tensors have the layout [B, H, T, D]."""

    operands: Tensors
    """`query`, `key` and `value`, and `grad_output` if gradients are computed."""
    recorded: Tensors
    """The recorded results that can be compared."""
    form: AttentionForm
    """The keys that a query sees, and the scale."""
    dtype: torch.dtype
    """The dtype in which it computed."""


def read_attention(task: CallTask) -> AttentionCall:
    """Read the tensors of a call of attention.

    Raises:
        DataError: bytes or parts are missing or damaged.
        StorageError: the store cannot be read.
        UnknownFormError: the form is unknown. The text gives the reason.
    """
    call = task.call
    tensors, infos = read_call(task)
    dtype = tensors["query"].dtype
    names = {name for product in call.products for name in AttentionTensors.products[product]}
    try:
        num_heads = heads_second(tensors["query"], infos["query"].layout).shape[1]
        by_head = {
            name: heads_second(tensor, infos[name].layout, num_heads=num_heads) for name, tensor in tensors.items()
        }
        operands = {name: by_head[name] for name in names}
        metadata = infos["query"].metadata or {}
        form = find_form(metadata, operands, output=by_head.get("output"), compute_dtype=dtype)
    except UsageError as error:
        raise UnknownFormError(str(error)) from error
    recorded = {name: by_head[name] for name, why in call.products.items() if name in by_head and not why}
    return AttentionCall(operands=operands, recorded=recorded, form=form, dtype=dtype)


def without_unknown_forms(calls: RecordedCalls, *, engine: Engine) -> RecordedCalls:
    """The calls without those of attention whose form is unknown. Reads the tensors of all calls of attention."""
    attention = replace(calls, calls=tuple(call for call in calls.calls if is_attention(call.key)))
    tasks = CallTasks(attention, ())
    reasons = dict(
        zip((call.key for call in attention.calls), engine.map(_form_error, tasks, sizes=tasks.sizes), strict=True)
    )
    unknown = [
        LeftOut(key=call.key, product=product, reason=reasons[call.key])
        for call in attention.calls
        if reasons[call.key]
        for product in call.products
    ]
    known_calls = tuple(call for call in calls.calls if not reasons.get(call.key))
    return replace(calls, calls=known_calls, left_out=(*calls.left_out, *unknown))


def _form_error(task: CallTask) -> str:
    try:
        read_attention(task)
    except UnknownFormError as error:
        return str(error)
    return ""


def replay_any(task: CallTask) -> CallErrors | str:
    """The errors of a call of a linear layer or of attention, or the reason why attention cannot be replayed."""
    if not is_attention(task.call.key):
        return replay_call(task)
    try:
        call = read_attention(task)
    except UnknownFormError as error:
        return str(error)
    errors = replay_attention(call.operands, task.recipes, form=call.form, recorded=call.recorded)
    return [
        (error.product, error.recipe, error.exact.to_array(), (error.recorded or ErrorSums()).to_array())
        for error in errors
        if error.product in task.call.products
    ]
