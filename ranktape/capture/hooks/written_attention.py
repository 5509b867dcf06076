"""Records attention that a program writes out as two products with a softmax between them.

    scores = query @ key.transpose(-2, -1)
    weights = softmax(scores)                 possibly scaled, masked, reshaped or cast before
    output = weights @ value

The steps are matched by the size of the scores. The call is recorded with its second product, under the module that
computes both products. The products may be those of `matmul`, `bmm`, `baddbmm`, `addmm` or `einsum`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ranktape.capture.hooks.calls import CACHED, HookContext, SourceRecorder, is_cached_by_autocast, tags_of
from ranktape.capture.passes.tracker import Call, Frame
from ranktape.capture.roles.known import ATTENTION, EINSUM
from ranktape.capture.roles.table import FunctionRole, Port, Ports, ports_of
from ranktape.capture.source import NO_TAGS, Source
from ranktape.capture.tensors.parts import PLAIN
from ranktape.capture.torch_private import in_backward, is_transformed, version_of

WRITTEN_OUT = "written_out"
"""Key in the metadata of the query: the scale and the mask of the call are not known."""

_MAX_WAITING = 4
"""Maximum number of first products that wait for the second one. Each of them keeps its operands alive."""

_MIN_DIMS = 2

Order = tuple[int, ...]
Orders = tuple[Order, Order, Order]
"""The orders of the dimensions of both operands and of the result of a product, as for `permute`."""

Part = Callable[[torch.Tensor], torch.Tensor]

_WRITTEN_TO = "the program wrote to it before the last product of the attention"


class _Operand(NamedTuple):
    """An operand of a product."""

    tensor: torch.Tensor
    """The tensor that is multiplied."""
    order: Order
    """The order of its dimensions in which its last two are rows and columns."""
    version: int
    """Version counter of the tensor when it was multiplied."""
    has_gradient: bool
    """Whether autograd computes the gradient of the product for it."""
    is_aliased: bool
    """Whether the tensor is an alias, which sees only this product's share of the gradient."""

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The operand, or its gradient, in this order."""
        return tensor.permute(self.order)

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """The operand, or its gradient, in this order with rows and columns exchanged."""
        return tensor.permute(self.order).transpose(-2, -1)


class _Scores(NamedTuple):
    """The scores of an attention whose second product has not been computed."""

    query: _Operand
    key: _Operand
    frame: Frame
    """The module that computed them."""
    size: tuple[int, ...]
    """The size of the scores: number of values, rows and columns."""


class _Steps(threading.local):
    def __init__(self) -> None:
        self.scores: list[_Scores] = []
        """The scores without a softmax, the latest last."""
        self.weights: list[_Scores] = []
        """The scores whose softmax has been computed."""


class WrittenAttention:
    """Matches the steps of attention on each thread in one iteration, and records the calls."""

    def __init__(
        self, context: HookContext, *, current_frame: Callable[[], Frame | None], source: Callable[[], Source | None]
    ) -> None:
        """`current_frame` returns the running module; `source` that of an attention in it, or None if not selected."""
        self._context = context
        self._recorder = context.recorder
        self._current_frame = current_frame
        self._source = source
        self._ports = ports_of(ATTENTION)
        self._thread = _Steps()

    def multiply(
        self,
        role: FunctionRole,
        ports: Ports,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a product, and record the attention if this is its second product."""
        arguments = ports.arguments[-2:]
        left, right = (argument.find(args, kwargs) for argument in arguments)
        orders, frame, source = _orders(role, args, left, right), self._current_frame(), self._source()
        if orders is None or frame is None or source is None or left is right or is_transformed():
            return original(*args, **kwargs)
        scores = first = second = None
        with self._recorder.guarded(source):
            scores = self._weights_like(left, frame) if _is_sorted(orders[0]) else None
            if scores is not None or _is_sorted(orders[2]):
                # The right operand gets its alias first, so that autograd adds gradients in the usual order.
                second = _operand(right, orders[1])
                args, kwargs = arguments[1].replace(second.tensor, args, kwargs)
                if scores is None:
                    first = _operand(left, orders[0])
                    args, kwargs = arguments[0].replace(first.tensor, args, kwargs)
        result = original(*args, **kwargs)
        with self._recorder.guarded(source):
            if scores is not None and second is not None:
                self._record(source, scores, second, result, orders[2])
            elif first is not None and second is not None:
                self._thread.scores.append(_Scores(first, second, frame, _size(result)))
                del self._thread.scores[:-_MAX_WAITING]
        return result

    def softmax(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a softmax. If it is that of scores, they become weights."""
        result = original(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(result, torch.Tensor) and dim in {-1, result.ndim - 1}:
            thread, size = self._thread, _size(result)
            found = next((scores for scores in reversed(thread.scores) if scores.size == size), None)
            if found is not None:
                thread.scores = [scores for scores in thread.scores if scores is not found]
                thread.weights = [*thread.weights, found][-_MAX_WAITING:]
        return result

    def forget(self) -> None:
        """Forget the steps of calls that were not completed, and with them their operands."""
        self._thread = _Steps()

    def _weights_like(self, tensor: torch.Tensor, frame: Frame) -> _Scores | None:
        """The scores whose softmax has the size of a tensor, in the same module; None if there are none or several."""
        thread, size = self._thread, _size(tensor)
        found = [scores for scores in thread.weights if scores.frame is frame and scores.size == size]
        thread.weights = [scores for scores in thread.weights if not any(scores is one for one in found)]
        return found[0] if len(found) == 1 else None

    def _record(self, source: Source, scores: _Scores, value: _Operand, output: torch.Tensor, order: Order) -> None:
        if not self._recorder.follows(source, (port.value for port in self._ports.all)):
            return
        source_recorder = SourceRecorder(
            context=self._context,
            source=source,
            ports=self._ports,
            placement=self._context.placement_finder(scores.frame.module, self._ports),
        )
        operands = scores.query, scores.key, value
        call = source_recorder.begin_call(scores.query.tensor)
        source_recorder.expect_gradients([operand.tensor for operand in operands], call)
        parts = scores.query.rows, scores.key.columns, value.rows
        for argument, operand, part in zip(self._ports.arguments, operands, parts, strict=True):
            self._record_operand(source_recorder, argument.ports[0], operand, part, call)
        tensors = [operand.tensor for operand in operands]
        source_recorder.record_output(output, call, args=tensors, order=None if _is_sorted(order) else order)

    def _record_operand(
        self, source_recorder: SourceRecorder, port: Port, operand: _Operand, part: Part, call: Call
    ) -> None:
        source, recorder = source_recorder.source, self._recorder
        is_changed = version_of(operand.tensor) != operand.version
        if is_changed:
            recorder.refuse(source, port.value, _WRITTEN_TO, call=call)
        elif not in_backward():
            tags = tags_of(WRITTEN_OUT) if port.name == "query" else NO_TAGS
            source_recorder.record(port, part(operand.tensor), call, tags=tags)
        if not operand.has_gradient or not recorder.wants(source, port.grad, call):
            return
        if is_changed or not operand.is_aliased:
            recorder.refuse(source, port.grad, _WRITTEN_TO if is_changed else CACHED, call=call)
        else:
            source_recorder.record_grad(port, operand.tensor, call, part=part)


def _operand(tensor: torch.Tensor, order: Order) -> _Operand:
    has_gradient = tensor.requires_grad and torch.is_grad_enabled()
    # An alias of a tensor whose cast autocast caches would be cast again, and its gradients be added in another dtype.
    is_aliased = has_gradient and not is_cached_by_autocast(tensor)
    return _Operand(
        tensor.view_as(tensor) if is_aliased else tensor, order, version_of(tensor), has_gradient, is_aliased
    )


def _size(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.numel(), *tensor.shape[-2:]


def _is_sorted(order: Sequence[int]) -> bool:
    return list(order) == sorted(order)


def _orders(role: FunctionRole, args: tuple[Any, ...], left: Any, right: Any) -> Orders | None:
    """The orders of dimensions that make a product [..., I, D] times [..., D, J] to [..., I, J]; None if none do."""
    if any(type(one) not in PLAIN or one.layout is not torch.strided or one.ndim < _MIN_DIMS for one in (left, right)):
        return None
    if role is not EINSUM:
        ranks = left.ndim, right.ndim, max(left.ndim, right.ndim)
        return tuple(range(ranks[0])), tuple(range(ranks[1])), tuple(range(ranks[2]))
    return orders_of(args[0]) if args and isinstance(args[0], str) else None


@functools.lru_cache(maxsize=256)
def orders_of(equation: str) -> Orders | None:
    """The orders for an equation of `einsum` with two operands; None if it is not a batched product of matrices."""
    operands, _, result = equation.replace(" ", "").partition("->")
    left, _, right = operands.partition(",")
    letters = left + right + result
    if not letters.isalpha() or any(len(set(one)) < len(one) for one in (left, right, result)):
        return None
    batch = [letter for letter in result if letter in left and letter in right]
    rows = [letter for letter in result if letter not in right]
    columns = [letter for letter in result if letter not in left]
    inner = [letter for letter in left if letter in right and letter not in result]
    if not len(rows) == len(columns) == len(inner) == 1 or not set(left) | set(right) >= set(result):
        return None
    wanted = batch + rows + inner, batch + inner + columns, batch + rows + columns
    if any(set(one) != set(own) for one, own in zip(wanted, (left, right, result), strict=True)):
        return None
    first, second, third = (
        tuple(own.index(letter) for letter in one) for one, own in zip(wanted, (left, right, result), strict=True)
    )
    return first, second, third
