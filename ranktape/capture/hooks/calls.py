"""Records the operands and the result of one call, and their gradients, without changing them.

    forward pre     the operands        as they are passed
    forward post    the output
    backward pre    grad_output         a tensor hook on the output
    backward post   grad_<operand>      a tensor hook on an alias of the operand, which sees only this call's share

This holds for modules and for functions. Module backward hooks are not used because they fail if an output is changed
in place, cost more time than the layer, and change bits.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ranktape.capture.hooks.weights import (
    CACHED,
    Leaves,
    Owners,
    Weights,
    has_same_values,
    is_cached_by_autocast,
)
from ranktape.capture.passes.tracker import Arguments, Call, unwind
from ranktape.capture.roles.table import port_of
from ranktape.capture.source import DIFFERENTIABLE, NO_TAGS, Source, Tags
from ranktape.capture.tensors.placement import Placements, is_megatron, megatron_placement
from ranktape.capture.torch_private import base_of, in_backward, parameters_of, saved_tensors_hooks, version_of
from ranktape.storage.format.record_info import WIDE, Mode

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.recorder import Recorder
    from ranktape.capture.roles.table import Argument, Port, Ports

Placement = Callable[[str, torch.Tensor], str | None]
"""A function from a tensor name and a tensor to the placement of a shard as JSON; None for a whole tensor."""


@functools.lru_cache
def tags_of(*words: str) -> Tags:
    """Tags whose metadata sets each of these keys to true."""
    return Tags(metadata=json.dumps(dict.fromkeys(words, True))) if words else NO_TAGS


WITHOUT_BIAS = "without_bias"
"""Key in the metadata of an output if the function takes a bias and none was passed."""

OWN_FORWARD = "own_forward"
"""Key in the metadata of the output, and its gradient, of a layer whose class overrides `forward` without a visible
product; and of the input or weight of a layer whose own `forward` computes another operand from it."""

PACKED = "saved_tensors_hooks"
"""Key in the metadata of the gradient of an output if saved-tensor hooks of the training pack saved tensors."""


def packs_tensors() -> bool:
    """Whether saved-tensor hooks are active, other than torch's own, which return the same values."""
    hooks = saved_tensors_hooks()
    return hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch.")


@dataclass(slots=True)
class Opened:
    """The call of a linear layer that overrides `forward`, whose products are recorded instead of the module."""

    given: torch.Tensor | None
    """The input of the layer; None if it is not a tensor."""
    version: int
    """Version counter of the input at the start of the call."""
    has_gradients: bool
    """Whether gradients were enabled at the start of the call."""
    num_products: int = 0
    """Number of calls of `F.linear` that were recorded as those of the layer."""
    has_bias: bool = False
    """Whether a bias was passed to one of these calls."""

    @property
    def is_written(self) -> bool:
        """Whether the input has been written to since the start of the call."""
        return self.given is not None and version_of(self.given) != self.version


@dataclass(slots=True)
class RunningRole:
    """A running call of a module or function with a role."""

    layer_type: str
    """Kind of the layer. A call of the same kind inside this one is part of it and not recorded separately."""
    owner: Any
    """The module, or the role of the function."""
    taking: Taking | None = None
    """Records the tensors of the call; None if it has no source."""
    call: Call | None = None
    """The counted call; None if it is not recorded."""
    awaited: list[tuple[torch.Tensor, Port]] = field(default_factory=list)
    """Parameters that are replaced by aliases for their gradients, once a function inside the module takes them."""
    batch_size: int = 1
    """Number of samples in a call of `nn.MultiheadAttention`."""
    written: tuple[torch.Tensor, Port] | None = None
    """The parameter that the call itself writes to, with its port. It is recorded after the call."""
    words: tuple[str, ...] = ()
    """The keys in the metadata of the output."""
    opened: Opened | None = None
    """The state of a module whose products are recorded instead of the module; None for other calls."""


class Running(threading.local):
    """The running calls of modules and functions with a role on this thread, the outermost first."""

    def __init__(self) -> None:
        self.entries: list[RunningRole] = []

    def has(self, layer_type: str) -> bool:
        """Whether a call of this kind is running."""
        return any(entry.layer_type == layer_type for entry in self.entries)

    def leave(self, owner: Any) -> RunningRole | None:
        """Remove and return the innermost call of an owner, and remove the calls inside it that an exception left."""
        return unwind(self.entries, lambda entry: entry.owner is owner)


class Watch:
    """The state that all hooks of one captured iteration share."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        weights: Weights,
        placements: Placements,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Attaches nothing. `placements` finds the placement of shards; `tell` gets notes, which are printed once."""
        self.recorder = recorder
        self.tracker = recorder.tracker
        self.weights = weights
        self._placements = placements
        self.tell = tell
        self.running = Running()
        self.owners = Owners()
        """Finds the modules that own parameters."""
        self.leaves = Leaves(recorder)
        """The hooks on parameters themselves."""
        self.handles: list[Any] = [self.leaves]
        """The handles to remove after the iteration, in this order."""

    def renew(self) -> None:
        """Prepare for another iteration with the same hooks."""
        self.leaves.remove()
        self.owners.met.clear()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        # Compiled regions keep a reference to this object, which must not keep the model alive.
        self.owners.forget()

    def place(self, module: nn.Module, ports: Ports) -> Placement | None:
        """A function that finds the placement of a module's tensors; None without initialized `torch.distributed`."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if is_megatron(module):
            return functools.partial(megatron_placement, module)
        layouts = {port.name: port.value.layouts for port in ports.all}
        attributes = {port.name: attribute for attribute, port in ports.parameters}

        def placement(name: str, tensor: torch.Tensor) -> str | None:
            letters = next((one for one in layouts.get(name.removeprefix("grad_"), ()) if len(one) == tensor.ndim), "")
            head_dim = letters.index("H") if "H" in letters and "D" in letters else 1
            return self._placements.of(module, attributes.get(name, name), tensor, head_dim=head_dim)

        return placement


_BESIDE = port_of(f"{WIDE}input", {}), port_of(f"{WIDE}weight", {})
"""The ports of the input and the weight of a layer that multiplies other tensors, which are computed from these."""

_SHARED = "its tensor is another operand, too: one gradient for both"


@dataclass(slots=True, kw_only=True)
class Taking:
    """Records the tensors of one source."""

    watch: Watch
    source: Source
    ports: Ports
    is_aliased: bool = True
    """Whether operands may be replaced by views of themselves."""
    placement: Placement | None = None
    """Finds the placement of shards; None if there are none."""
    is_one_node: Callable[[Sequence[Any], Mapping[str, Any]], bool] | None = None
    """Tells from operands and keyword arguments whether the call is one node in autograd; None if it never is."""
    quantised_to: Callable[[], str] | None = None
    """Returns the `quant_type` of a call if the layer quantises its operands itself; None for other layers."""
    recorder: Recorder = field(init=False)
    """The recorder of `watch`, stored here for speed."""

    def __post_init__(self) -> None:
        self.recorder = self.watch.recorder

    def begin(
        self,
        entry: RunningRole,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *more: Any,
        is_aliased: bool = True,
    ) -> Arguments:
        """Record the operands of a call that starts. Returns the arguments to continue with.

        The dtype of the first floating-point operand, or else of the first operand, is the compute dtype. If there is
        no tensor among the operands and `more`, the operands are refused and no call is counted. If `is_aliased` is
        False, the arguments are not changed.
        """
        values = [argument.find(args, kwargs) for argument in self.ports.arguments]
        tensors = [one for one in (*values, *more) if isinstance(one, torch.Tensor)]
        if tensors:
            sample = next((one for one in tensors if one.is_floating_point()), tensors[0])
            entry.call = self._begin_call(sample)
        call, is_repeated = entry.call, in_backward()
        self._expect_gradients(values, call)
        tags = Tags(metadata=self.ports.said(args, kwargs)) if self.ports.options else NO_TAGS
        for argument, value in zip(self.ports.arguments, values, strict=True):
            if call is None or not isinstance(value, torch.Tensor):
                self._refuse(argument, value, entry)
            elif not is_repeated:
                for port in argument.ports:
                    self.record(port, port.take(value), call, tags=tags)
                    tags = NO_TAGS
        if call is None or not is_aliased:
            return args, kwargs
        twice = self._given_twice(values, kwargs) if len(values) > 1 else ()
        for argument, value in zip(reversed(self.ports.arguments), reversed(values), strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            seen = self._watched(value, argument.ports, call, is_shared=id(value) in twice)
            if seen is not value:
                args, kwargs = argument.put(seen, args, kwargs)
        return args, kwargs

    def _begin_call(self, sample: torch.Tensor) -> Call:
        call = self.recorder.begin_call(self.source, sample)
        return call if self.quantised_to is None else dataclasses.replace(call, quantised_to=self.quantised_to())

    def _expect_gradients(self, values: Sequence[Any], call: Call | None) -> None:
        """Expect the gradients of a call that runs with gradients disabled, so that they are reported if missing.

        In a reentrant checkpoint, they come with the recomputation. An `autograd.Function` computes them unseen.
        """
        if torch.is_grad_enabled() or in_backward():
            return
        pairs = zip(self.ports.arguments, values, strict=True)
        given = [one for one, value in pairs if isinstance(value, torch.Tensor) and value.requires_grad]
        if given and call is not None and call.mode is Mode.TRAIN:
            ports = (*(port for argument in given for port in argument.ports), self.ports.output)
            self.recorder.expect(self.source, (port.grad for port in ports))

    def beside(self, layer: RunningRole, call: Call, operands: Sequence[Any]) -> None:
        """Record the input and the weight of a linear layer whose own `forward` multiplies other tensors.

        `layer` is the running layer, and `operands` are the input, weight and bias of its product, which is starting.
        """
        opened, module = layer.opened, layer.owner
        assert opened is not None, "only asked of such layers"
        opened.num_products += 1
        opened.has_bias |= isinstance(operands[-1], torch.Tensor)
        if "weight" not in parameters_of(module):
            # The weight is computed from the parameters of a parametrization.
            parts = ((part, name) for part in module.modules() for name in parameters_of(part))
            self.watch.owners.met.update(parts)
        wide = opened.given, parameters_of(module).get("weight")
        for port, own, operand in zip(_BESIDE, wide, operands, strict=False):
            if own is None or in_backward() or has_same_values(own, operand):
                continue
            if own.dtype.itemsize == 1:
                reason = "the layer multiplies with what it dequantises: its codes and scales are not recorded"
            elif own is opened.given and opened.is_written:
                reason = "the forward of the layer wrote to it"
            else:
                place = None if self.placement is None else self.placement(port.name.removeprefix(WIDE), own)
                self.record(port, own, call, tags=tags_of(OWN_FORWARD), placement=place)
                continue
            self.recorder.refuse(self.source, port.value, reason, call=call)

    def _given_twice(self, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Collection[int]:
        """The identities of tensors that are passed as several operands and must not be replaced by aliases.

        Autograd must add their gradients in the same order as without a capture. If the function is one node of the
        graph, it does so if the aliases are created from the last operand to the first.
        """
        counts = Counter(id(value) for value in values if isinstance(value, torch.Tensor))
        twice = [number for number, count in counts.items() if count > 1]
        is_added_up = not twice or (self.is_one_node is not None and self.is_one_node(values, kwargs))
        return () if is_added_up else twice

    def _refuse(self, argument: Argument, value: Any, entry: RunningRole) -> None:
        """Report why an argument that is not a tensor is not recorded, or note on the output that there is no bias."""
        if value is None and argument.is_optional:
            if any(port.is_optional for port in argument.ports):
                entry.words = (*entry.words, WITHOUT_BIAS)
            return
        what = f"its argument {argument.keyword or argument.position!r}"
        reason = f"{what} was not passed" if value is None else f"{what} is a {type(value).__name__} and no tensor"
        for port in argument.ports:
            self.recorder.refuse(self.source, port.value, reason, call=entry.call)

    def _watched(self, value: torch.Tensor, ports: Sequence[Port], call: Call, *, is_shared: bool) -> torch.Tensor:
        """The operand to continue with: an alias if its gradient will be recorded, otherwise the tensor itself."""
        if not (value.requires_grad and torch.is_grad_enabled() and self.is_aliased):
            return value
        wanted = [port for port in ports if self.recorder.wants(self.source, port.grad, call)]
        if is_shared:
            for port in wanted:
                self.recorder.refuse(self.source, port.grad, _SHARED)
        if is_shared or not wanted:
            return value
        if is_cached_by_autocast(value):
            for port in wanted:
                if port.value.has_samples:
                    self.recorder.refuse(self.source, port.grad, CACHED, call=call)
                else:
                    take = functools.partial(self.record_grad_now, port)
                    self.watch.leaves.watch(self.source, port, value, call=call, take=take)
            return value
        alias = value.view_as(value)
        for port in wanted:
            self.grad(port, alias, call, part=None if port.part is None else port.take)
        return alias

    def alias(self, port: Port, call: Call, weight: torch.Tensor) -> torch.Tensor:
        """A view of a parameter, whose gradient is the share of this call alone."""
        with self.recorder.guarded(self.source, port.grad):
            alias = weight.view_as(weight)
            self.grad(port, alias, call)
            return alias
        return weight

    def result(self, given: Any, gives: Any, entry: RunningRole, *, at: int | str | None, of: str) -> None:
        """Record the output of a call, taken from its result `gives` at the element `at`; `of` names it in messages."""
        call = entry.call
        assert call is not None, "only called after a call"
        found = tensor_in(gives, at)
        if found is None:
            reason = f"{of} gave a {type(gives).__name__} without a tensor at {at!r}"
            self.recorder.refuse(self.source, self.ports.output.value, reason, call=call)
            return
        self.output(found, call, given=given, words=entry.words)

    def output(self, output: torch.Tensor, call: Call, *, given: Any, words: tuple[str, ...] = ()) -> None:
        """Record the output of a call with arguments `given`, and its gradient when it is computed.

        The gradient also tells the hooks on weights which call they belong to.
        """
        port = self.ports.output
        on_grad = self.watch.leaves.on_grad_output(self.source)
        if not in_backward():
            self.record(port, output, call, tags=tags_of(*words))
        if output.requires_grad and (on_grad is not None or self.recorder.wants(self.source, port.grad, call)):
            seen = before_views(output, given=given)
            part = None if seen is output else functools.partial(torch.Tensor.reshape, shape=output.shape)
            about = (OWN_FORWARD,) if OWN_FORWARD in words else (PACKED,) if packs_tensors() else ()
            self.grad(port, seen, call, part=part, on_grad=on_grad, tags=tags_of(*about))

    def record(
        self, port: Port, tensor: torch.Tensor, call: Call, *, tags: Tags = NO_TAGS, placement: str | None = None
    ) -> None:
        """Record a tensor. A weight or bias is not recorded again if it has not changed."""
        place = self.placement(port.name, tensor) if placement is None and self.placement is not None else placement
        if port.value.has_samples:
            self.recorder.record(self.source, port.value, tensor, call=call, placement=place, tags=tags)
        else:
            self.watch.weights.record(
                self.recorder, self.source, port.value, tensor, call=call, placement=place, tags=tags
            )

    def record_grad_now(self, port: Port, grad: torch.Tensor, call: Call, tags: Tags) -> None:
        """Record a gradient that has been computed."""
        placement = None if self.placement is None else self.placement(port.grad.tensor_name, grad)
        own = DIFFERENTIABLE if torch.is_grad_enabled() else tags
        self.recorder.record(self.source, port.grad, grad, call=call, placement=placement, tags=own)

    def grad(
        self,
        port: Port,
        tensor: torch.Tensor,
        call: Call,
        *,
        part: Callable[[torch.Tensor], torch.Tensor] | None = None,
        on_grad: Callable[[Call], None] | None = None,
        tags: Tags = NO_TAGS,
    ) -> None:
        """Record the gradient of a tensor, or the result of `part` for it, when it is computed."""
        placement = None
        if self.placement is not None:
            # The recorded part may have another shape than the tensor with the hook.
            placement = self.placement(port.grad.tensor_name, tensor if part is None else part(tensor.detach()))
        self.recorder.record_grad(
            self.source, port.grad, tensor, call=call, part=part, placement=placement, on_grad=on_grad, tags=tags
        )


def tensor_in(output: Any, element: int | str | None) -> torch.Tensor | None:
    """The result if it is a tensor; otherwise an element of it, by default the first tensor; None if there is none.

    Results may be tuples, lists, mappings or dataclasses.
    """
    if isinstance(output, torch.Tensor):
        return output
    if element is None:
        found = (tensor_in(one, None) for one in _elements(output))
        return next((tensor for tensor in found if tensor is not None), None)
    try:
        one = getattr(output, element) if isinstance(element, str) and hasattr(output, element) else output[element]
    except (LookupError, TypeError):
        return None
    return one if isinstance(one, torch.Tensor) else None


def _elements(output: Any) -> Sequence[Any]:
    if isinstance(output, Mapping):
        return list(output.values())
    if isinstance(output, tuple | list):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, one.name) for one in dataclasses.fields(output)]
    return ()


def before_views(output: torch.Tensor, *, given: Any) -> torch.Tensor:
    """The tensor for the hook on the output's gradient, so that in-place changes of the output do not disable it.

    With a bias and three dimensions, the output is a view of the product. An in-place operation on a view removes the
    view's hooks from the graph, but not those of its base. The base is not used if it is an argument of the call or
    the base of one, because such a tensor has other uses.
    """
    if type(output) is not torch.Tensor:
        return output
    base = base_of(output)
    if base is None or base.is_leaf or base.numel() != output.numel():
        return output
    if not (base.is_contiguous() and output.is_contiguous()):
        return output
    return output if any(base is one or base is base_of(one) for one in _tensors_in(given)) else base


def _tensors_in(value: Any, *, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for element in _elements(value):
            yield from _tensors_in(element, depth=depth - 1)
