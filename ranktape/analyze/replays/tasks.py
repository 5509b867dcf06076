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
    gives_output,
    heads_second,
    replay_attention,
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
        self, calls: RecordedCalls, recipes: Sequence[Recipe], *, asked: Mapping[int, Collection[str]] | None = None
    ) -> None:
        """Take calls and recipes. `asked` limits them to calls, by index, and the names of recipes for each."""
        self._calls, self._recipes = calls, recipes
        names = [one.name for one in recipes]
        self._asked = list((dict.fromkeys(range(len(calls.calls)), names) if asked is None else asked).items())
        nbytes = calls.records.column("nbytes").tolist()
        self.sizes = [
            sum(nbytes[row] for rows in calls.calls[place].rows.values() for row in rows) for place, _ in self._asked
        ]
        """Number of bytes that each task reads."""

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        place, names = self._asked[index]
        call = self._calls.calls[place]
        records = self._calls.records.take([row for rows in call.rows.values() for row in rows])
        recipes = tuple(self._calls.recipe_of(call, one) for one in self._recipes if one.name in names)
        # The records of files are read when they are accessed, so this is left to the worker.
        return CallTask(call=call, records=records if records.is_costly else tuple(records), recipes=recipes)


def replay_call(task: CallTask) -> CallErrors:
    """The errors of each product of a call by each recipe; for each product, those of the recorded one come first.

    Operands are rounded to the dtype in which the operation computed. A GPU is used if torch has one.
    """
    from ranktape.analyze.numerics.products import replay_products

    keep_freed_memory(CALL_NBYTES)
    call = task.call
    found: defaultdict[tuple[str, str], defaultdict[int | None, list[ProductError]]]
    found = defaultdict(lambda: defaultdict(list))
    for tensors in layers_of(read_call(task)[0]):
        operands = {name: tensors[name] for product in call.products for name in PRODUCTS[product]}
        recorded = {name: tensors[name] for name in call.products if name in tensors}
        if "output" in recorded:
            bias = bias_of(tensors, is_known=call.is_bias_known)
            own = recorded["output"].float().flatten(0, -2)
            recorded["output"] = own if bias is None else own - bias.float()
        for one in replay_products(
            operands, task.recipes, recorded=recorded, products=call.products, sample_dim=call.sample_dim
        ):
            found[one.product, one.recipe][one.sample].append(one)
    return [
        (
            *names,
            np.vstack([_pooled(one.exact for one in parts) for parts in samples.values()]),
            np.vstack(
                [_pooled(one.recorded for one in parts if one.recorded is not None) for parts in samples.values()]
            ),
        )
        for names, samples in found.items()
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
    found, infos = {}, {}
    for name, rows in task.call.rows.items():
        parts = tuple(itertools.islice(records, len(rows)))
        values = ComparedTensor(records=parts, is_assembled=len(parts) > 1).read(view=View.COMPUTE)
        infos[name] = info = parts[0].info
        dtype = viewed_dtype(dtype=info.dtype, compute_dtype=info.compute_dtype, view=View.COMPUTE)
        found[name] = to_torch(values, dtype=dtype, shape=values.shape).to(device)
        if name.endswith("weight") and info.layout == TRANSPOSED:
            found[name] = found[name].T
    return found, infos


def layers_of(tensors: Tensors) -> Iterator[Tensors]:
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


def bias_of(tensors: Tensors, *, is_known: bool) -> torch.Tensor | None:
    """The bias in the output of a layer: the recorded one, or the mean difference of outputs and products."""
    if is_known:
        return tensors.get("bias")
    output = tensors["output"].float().flatten(0, -2)
    inputs, weight = tensors["input"].float().flatten(0, -2), tensors["weight"].float()
    is_finite = output.isfinite().all(1) & inputs.isfinite().all(1)
    if not is_finite.any():
        return None
    beyond = output[is_finite].double().mean(0) - weight.double() @ inputs[is_finite].double().mean(0)
    return beyond.float()


_FURTHEST = 1 << 40
"""Maximum size of a window, in keys. No sequence is as long."""

_NOT_NUMBERS = ("mask", "bias", "sinks")
"""Names in the metadata of a query of arguments that were passed but not recorded (see `CallOption`)."""


class UnknownFormError(Exception):
    """The form of a call is unknown or cannot be replayed. The text gives the reason."""


def find_form(
    said: Mapping[str, Any],
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
    forms, is_sure = _possible(said, num_queries=operands["query"].shape[2], num_keys=operands["key"].shape[2])
    if is_sure and len(forms) == 1:
        return forms[0]
    if output is None:
        raise UnknownFormError("its mask was not recorded, and neither was its output, which would tell")
    own = {name: operands[name].float() for name in ("query", "key", "value")}
    seen = output.float()

    def distance(form: AttentionForm) -> float:
        off = attention_products(own, form=form)["output"] - seen
        return float(off.nan_to_num(0.0).double().norm())

    def gives(form: AttentionForm) -> bool:
        known = {name: operands[name] for name in own}
        return gives_output(known, output, form=form, compute_dtype=compute_dtype)

    best = min(forms, key=distance)
    if is_sure:
        return best
    if gives(best):
        # Outputs that are NaN or Inf agree for every mask.
        if seen.isfinite().all() or not any(gives(form) for form in forms if form != best):
            return best
        raise UnknownFormError("several masks give what is finite of its output, and its mask was not recorded")
    passed = ", ".join(word for word in _NOT_NUMBERS if word in said) or "a mask, a bias, dropout or another scale"
    raise UnknownFormError(
        f"neither causal attention nor attention to all keys gives its output: {passed} was not recorded"
    )


def _possible(said: Mapping[str, Any], *, num_queries: int, num_keys: int) -> tuple[list[AttentionForm], bool]:
    """The possible forms of a call, and whether one of them is certainly the right one."""
    if said.get("dropout"):
        raise UnknownFormError(f"it drops out at random (dropout {said['dropout']})")
    if said.get("cap"):
        raise UnknownFormError(f"its scores are capped (cap {said['cap']})")
    scale = said.get("scale")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise UnknownFormError(f"its scale was not recorded as a number, but as {scale!r:.40}")
    is_causal = said.get("is_causal")
    is_sure = isinstance(is_causal, bool) and not any(word in said for word in _NOT_NUMBERS)
    before, after = _window(said.get("window"))
    causal, full = AttentionForm(before=before, after=0), AttentionForm(before=before, after=after)
    tried = [causal, full, AttentionForm(after=0), AttentionForm()]
    forms = tried if not is_sure else [causal] if is_causal else [full]
    shifts = (0, num_keys - num_queries)
    # Attention that is written out may scale its query before the product.
    scales = (None, 1.0) if said.get("written_out") else (scale,)
    shifted = (
        replace(form, scale=scale, shift=0 if form.before is form.after is None else shift)
        for form, shift, scale in itertools.product(forms, shifts, scales)
    )
    return list(dict.fromkeys(shifted)), is_sure


def _window(said: Any) -> tuple[int | None, int | None]:
    """The numbers of keys that a query sees before and after its own, from FlashAttention's pair or one number."""
    is_pair = isinstance(said, list) and len(said) == len(("before", "after"))
    if is_pair and all(isinstance(one, int) for one in said):
        before, after = (None if one < 0 else min(one, _FURTHEST) for one in said)
        return before, after
    return (min(said - 1, _FURTHEST), None) if isinstance(said, int) and said > 0 else (None, None)


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
        seen = {name: heads_second(one, infos[name].layout, num_heads=num_heads) for name, one in tensors.items()}
        operands = {name: seen[name] for name in names}
        said = infos["query"].metadata or {}
        form = find_form(said, operands, output=seen.get("output"), compute_dtype=dtype)
    except UsageError as error:
        raise UnknownFormError(str(error)) from error
    recorded = {name: seen[name] for name, why in call.products.items() if name in seen and not why}
    return AttentionCall(operands=operands, recorded=recorded, form=form, dtype=dtype)


def without_unknown(calls: RecordedCalls, *, engine: Engine) -> RecordedCalls:
    """The calls without those of attention whose form is unknown. Reads the tensors of all calls of attention."""
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
    """The errors of a call of a linear layer or of attention, or the reason why attention cannot be replayed."""
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
