"""Computes the products of one recorded call again: the work of one task, with the tensors of one call in memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ranktape.analyze.comparison.tensors import ComparedTensor
from ranktape.analyze.engine.plan import keep_freed_memory
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS
from ranktape.analyze.replays.computable import TRANSPOSED
from ranktape.storage.format.dtypes import to_torch

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.products import ProductError
    from ranktape.analyze.numerics.recipes.recipe import Recipe
    from ranktape.analyze.replays.calls import RecordedCall, RecordedCalls
    from ranktape.storage import Record
    from ranktape.storage.format.record_info import RecordInfo

CALL_NBYTES = 1 << 30
"""Freed memory that is kept from one product of a call to the next, in blocks of at most half of it."""

Tensors: TypeAlias = "dict[str, torch.Tensor]"

CallErrors: TypeAlias = "list[tuple[str, str, NDArray[np.float64], NDArray[np.float64]]]"
"""Of each product and recipe the rows of `ErrorSums` against the exact product, and against the recorded one: of no
element where that cannot be compared. Where samples are told apart, each of them has a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTask:
    """One call, with the records of its tensors; it can be pickled."""

    call: RecordedCall
    """The call."""
    records: Iterable[Record]
    """The records of its rows, tensor by tensor."""
    recipes: tuple[Recipe, ...]
    """What the layer is to compute with."""


class CallTasks(Sequence[CallTask]):
    """The tasks of calls, made when they are asked for."""

    def __init__(self, calls: RecordedCalls, recipes: Sequence[Recipe]) -> None:
        self.calls, self.recipes = calls, recipes
        """What is computed, and how."""
        nbytes = calls.records.column("nbytes").tolist()
        self.sizes = [sum(nbytes[row] for rows in call.rows.values() for row in rows) for call in calls.calls]
        """Bytes that each reads."""

    def __len__(self) -> int:
        return len(self.calls.calls)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        call = self.calls.calls[index]
        records = self.calls.records.take([row for rows in call.rows.values() for row in rows])
        recipes = tuple(self.calls.recipe_of(call, one) for one in self.recipes)
        # To look at the records of files is to read them.
        return CallTask(call=call, records=records if records.is_costly else tuple(records), recipes=recipes)


def replay_call(task: CallTask) -> CallErrors:
    """How far off each product of a call is by each recipe; first of each product what was recorded.

    Operands are rounded to what the operation computed in. Where torch has a GPU, it computes.

    Raises:
        DataError: bytes or parts are missing, or damaged.
        StorageError: the store cannot be read.
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
    """The tensors of a call by name, rounded to what it computed in, and what is known of each.

    Weights have the layout OI, or EIO.

    Raises:
        DataError: bytes or parts are missing, or damaged.
        StorageError: the store cannot be read.
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
    """The tensors of a layer; of experts that are multiplied in one call those of each, with the rows of its tokens."""
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
    """What was added to the product of a layer: the recorded bias, or what all tokens have beyond their products."""
    if is_known:
        return tensors.get("bias")
    output = tensors["output"].float().flatten(0, -2)
    inputs, weight = tensors["input"].float().flatten(0, -2), tensors["weight"].float()
    is_finite = output.isfinite().all(1) & inputs.isfinite().all(1)
    if not is_finite.any():
        return None
    beyond = output[is_finite].double().mean(0) - weight.double() @ inputs[is_finite].double().mean(0)
    return beyond.float()
