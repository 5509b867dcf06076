"""Records the operands and the result of one call, and their gradients, without changing them.

    forward pre     the operands        as they are passed
    forward post    the output
    backward pre    grad_output         a tensor hook on the output
    backward post   grad_<operand>      a tensor hook on an alias of the operand, which sees only this call's share

This holds for modules and for functions. Module backward hooks are not used because they fail if an output is changed
in place, cost more time than the layer, and change bits.

In an iteration, a weight is recorded with its first call, and again with each call that uses another value: the weight
was written to, or the call gets another tensor, such as the fast weights of `torch.func.functional_call`. If nothing
updates the weights, for example if each token of a generation is an iteration, a stored weight is not stored again.

Autocast casts a parameter once for all its uses, whose gradients are added in the lower precision. An alias of the
parameter would be cast again for each use, and the gradients added in float32, which changes bits. Therefore the
gradient of such a weight is recorded on the weight itself: the sum over one graph, with the last call of the backward
pass.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ranktape.capture.hooks.hook import Hook
from ranktape.capture.hooks.owners import Owners
from ranktape.capture.passes.tracker import Arguments, Call, unwind
from ranktape.capture.roles.table import port_of
from ranktape.capture.source import DIFFERENTIABLE, NO_TAGS, Source, Tags, TensorRole
from ranktape.capture.tensors.parts import PLAIN, is_plain, tensor_in, tensors_in
from ranktape.capture.tensors.placement import Placements, is_megatron, megatron_placement
from ranktape.capture.torch_private import (
    base_of,
    in_backward,
    parameters_of,
    saved_tensors_hooks,
    storage_id,
    version_of,
)
from ranktape.storage.format.record_info import WIDE, Mode

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.recorder import Recorder
    from ranktape.capture.roles.table import Argument, Port, Ports

Placement = Callable[[str, torch.Tensor], str | None]
"""A function from a tensor name and a tensor to the placement of a shard as JSON; None for a whole tensor."""


@functools.lru_cache
def tags_of(*keys: str) -> Tags:
    """Tags whose metadata sets each of these keys to true."""
    return Tags(metadata=json.dumps(dict.fromkeys(keys, True))) if keys else NO_TAGS


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


def has_same_values(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same object, or the same elements of one storage in any shape."""
    if tensor is other:
        return True
    if type(tensor) not in PLAIN or type(other) not in PLAIN or tensor.layout is not torch.strided:
        return False
    if (tensor.dtype, tensor.numel(), tensor.storage_offset()) != (other.dtype, other.numel(), other.storage_offset()):
        return False
    is_alike = (tensor.shape, tensor.stride()) == (other.shape, other.stride())
    if not is_alike and not (tensor.is_contiguous() and other.is_contiguous()):
        return False
    return storage_id(tensor) == storage_id(other)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that identifies the values of a tensor as long as its storage, or the tensor, is alive.

    For a plain tensor, it consists of the storage, the part of it, and the version counter. The storage is not
    identified by its address, because FSDP frees the memory of a weight and allocates it again. The version counter
    alone is not sufficient, because `parameter.data = other` does not increase it.
    """
    if not is_plain(tensor):
        return -id(tensor), version_of(tensor)
    return storage_id(tensor), version_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(slots=True)
class _RecordedWeight:
    """The last recorded weight of a source."""

    identity: tuple[Any, ...]
    """The key that identifies its values."""
    reference: Any
    """A weak reference to the storage or the tensor."""
    is_stored: bool
    """Whether later iterations may rely on the record."""
    is_current: bool = True
    """Whether the weight was used in this iteration."""
    is_due: bool = False
    """Whether to record the weight again even if it has not changed."""

    def is_of(self, tensor: torch.Tensor, identity: tuple[Any, ...]) -> bool:
        """Whether a tensor with this identity has the recorded values."""
        is_alive = not isinstance(self.reference, weakref.ref) or self.reference() is tensor
        return self.identity == identity and is_alive


class Weights:
    """Records each weight and bias of a source unless it is the one that was recorded last.

    If two weights alternate, each is recorded each time, so the last record before a call is always of the weight that
    the call used.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last: dict[tuple[Source, str, str], _RecordedWeight] = {}

    def begin(self, *, keeps: bool) -> None:
        """Start an iteration. `keeps` tells whether it may rely on the records of earlier iterations."""
        self._last = {key: recorded for key, recorded in self._last.items() if keeps or recorded.is_current}
        for recorded in self._last.values():
            recorded.is_current = False
            recorded.is_due = not (keeps and recorded.is_stored)

    def record(
        self,
        source: Source,
        role: TensorRole,
        tensor: torch.Tensor,
        *,
        call: Call,
        placement: str | None,
        tags: Tags = NO_TAGS,
    ) -> None:
        """Record a weight or bias, unless it is the one that was recorded last."""
        key = source, role.tensor_name, call.mode
        identity = *_identity(tensor), role.layouts  # another product may take it transposed
        last = self._last.get(key)
        if last is not None and not last.is_due and last.is_of(tensor, identity):
            if not last.is_current:
                last.is_current = True
                self._recorder.expected.excuse(source, role, call)
            return
        is_known = self._recorder.record(source, role, tensor, call=call, placement=placement, tags=tags)
        is_stored = is_known and type(tensor) in PLAIN and not tensor.is_inference()
        is_reused = last is not None and last.identity[0] == identity[0] > 0
        if last is not None and is_reused:
            reference = last.reference
        else:
            # A reference to the storage keeps its identity from reuse.
            reference = StorageWeakRef(tensor.untyped_storage()) if is_plain(tensor) else weakref.ref(tensor)
        self._last[key] = _RecordedWeight(identity, reference, is_stored)


CACHED = "autocast casts it once for all its uses: one gradient for all of them"
"""The reason why the gradient of an operand is not recorded."""


def is_cached_by_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is active and caches its cast of this tensor."""
    if tensor.dtype != torch.float32 or not (tensor.requires_grad and tensor.is_leaf) or base_of(tensor) is not None:
        return False
    kind = tensor.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return is_on and torch.is_autocast_cache_enabled()


SUMMED = Tags(metadata='{"summed": true}')
"""The tags of the gradient of a weight that is the sum over several calls."""

RecordGrad = Callable[[torch.Tensor, Call, Tags], None]
"""A function that records the gradient of a weight for a call."""


class ParameterHooks:
    """The hooks on weights and biases for one iteration."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls: dict[tuple[Source, str], Call] = {}
        self._handles: dict[Source, dict[str, tuple[Port, Any]]] = {}
        self._uses: dict[tuple[Source, str], set[Any]] = {}
        """The calls that contribute to the gradient of each weight, by mode, microbatch and index."""

    def watch(self, source: Source, port: Port, weight: torch.Tensor, *, call: Call, record_grad: RecordGrad) -> None:
        """Call `record_grad` with the gradient of a weight, summed over all calls, and the call to record it for."""
        handles = self._handles.setdefault(source, {})
        uses = self._uses.setdefault((source, port.name), set())
        uses.add(call.key)
        if port.name in handles:
            if handles[port.name][0] != port:  # this call uses the weight in another orientation
                self._recorder.refuse(source, port.grad, CACHED, call=call)
            return

        def hook(grad: torch.Tensor) -> None:
            with self._recorder.guarded(source, port.grad):
                # The hook of a leaf does not know the call. It is that of the output gradient that came just before.
                call = self._calls.pop((source, port.name), None)
                if call is not None:
                    num_uses = sum(key[:2] == call.key[:2] for key in uses)  # of its microbatch
                    record_grad(grad, call, SUMMED if num_uses > 1 else NO_TAGS)
                elif self._recorder.tracker.is_in_recorded_pass:
                    self._recorder.refuse(source, port.grad, "no gradient of the output came before it")

        handles[port.name] = port, weight.register_hook(Hook(hook))

    def on_grad_output(self, source: Source) -> Callable[[Call], None] | None:
        """A function to call when the output gradient of a call is computed; None if the source has no hooks here."""
        names = self._handles.get(source)
        if names is None:
            return None
        return lambda call: self._calls.update({(source, name): call for name in names})

    def remove(self) -> None:
        """Remove all hooks."""
        for handles in self._handles.values():
            for _, handle in handles.values():
                handle.remove()
        self._handles.clear()
        self._calls.clear()
        self._uses.clear()


@dataclass(slots=True)
class InnerProducts:
    """The call of a linear layer that overrides `forward`, whose products are recorded instead of the module."""

    input: torch.Tensor | None
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
        return self.input is not None and version_of(self.input) != self.version


@dataclass(slots=True)
class RunningRole:
    """A running call of a module or function with a role."""

    layer_type: str
    """Kind of the layer. A call of the same kind inside this one is part of it and not recorded separately."""
    owner: Any
    """The module, or the role of the function."""
    source_recorder: SourceRecorder | None = None
    """Records the tensors of the call; None if it has no source."""
    call: Call | None = None
    """The counted call; None if it is not recorded."""
    parameters_to_alias: list[tuple[torch.Tensor, Port]] = field(default_factory=list)
    """Parameters that are replaced by aliases for their gradients, once a function inside the module takes them."""
    batch_size: int = 1
    """Number of samples in a call of `nn.MultiheadAttention`."""
    written: tuple[torch.Tensor, Port] | None = None
    """The parameter that the call itself writes to, with its port. It is recorded after the call."""
    metadata_keys: tuple[str, ...] = ()
    """The keys in the metadata of the output."""
    inner_products: InnerProducts | None = None
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


class HookContext:
    """The state that all hooks of one captured iteration share."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        weights: Weights,
        placements: Placements,
        on_note: Callable[[str], None],
    ) -> None:
        """Attaches nothing. `placements` finds the placement of shards; `on_note` is called with notes for the user."""
        self.recorder = recorder
        self.tracker = recorder.tracker
        self.weights = weights
        self._placements = placements
        self.on_note = on_note
        self.running = Running()
        self.owners = Owners()
        """Finds the modules that own parameters."""
        self.parameter_hooks = ParameterHooks(recorder)
        """The hooks on parameters themselves."""
        self.handles: list[Any] = [self.parameter_hooks]
        """The handles to remove after the iteration, in this order."""

    def begin(self) -> None:
        """Prepare for another iteration with the same hooks."""
        self.parameter_hooks.remove()
        self.owners.recorded.clear()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        # Compiled regions keep a reference to this object, which must not keep the model alive.
        self.owners.forget()

    def placement_finder(self, module: nn.Module, ports: Ports) -> Placement | None:
        """A function that finds the placement of a module's tensors; None without initialized `torch.distributed`."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if is_megatron(module):
            return functools.partial(megatron_placement, module)
        layouts = {port.name: port.value.layouts for port in ports.all}
        attributes = {port.name: attribute for attribute, port in ports.parameters}

        def placement(name: str, tensor: torch.Tensor) -> str | None:
            candidates = layouts.get(name.removeprefix("grad_"), ())
            layout = next((layout for layout in candidates if len(layout) == tensor.ndim), "")
            head_dim = layout.index("H") if "H" in layout and "D" in layout else 1
            return self._placements.of(module, attributes.get(name, name), tensor, head_dim=head_dim)

        return placement


_LAYER_OPERANDS = port_of(f"{WIDE}input", {}), port_of(f"{WIDE}weight", {})
"""The ports of the input and the weight of a layer that multiplies other tensors, which are computed from these."""

_SHARED = "its tensor is another operand, too: one gradient for both"


@dataclass(slots=True, kw_only=True)
class SourceRecorder:
    """Records the tensors of one source."""

    context: HookContext
    source: Source
    ports: Ports
    is_aliased: bool = True
    """Whether operands may be replaced by views of themselves."""
    placement: Placement | None = None
    """Finds the placement of shards; None if there are none."""
    is_single_node: Callable[[Sequence[Any], Mapping[str, Any]], bool] | None = None
    """Tells from operands and keyword arguments whether the call is one node in autograd; None if it never is."""
    quantised_to: Callable[[], str] | None = None
    """Returns the `quant_type` of a call if the layer quantises its operands itself; None for other layers."""
    recorder: Recorder = field(init=False)
    """The recorder of `context`, stored here for speed."""

    def __post_init__(self) -> None:
        self.recorder = self.context.recorder

    def begin(
        self,
        entry: RunningRole,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *parameters: Any,
        is_aliased: bool = True,
    ) -> Arguments:
        """Record the operands of a call that starts. Returns the arguments to continue with.

        The dtype of the first floating-point operand, or else of the first operand, is the compute dtype. If there is
        no tensor among the operands and `parameters`, the operands are refused and no call is counted. Unless
        `is_aliased`, the arguments are not changed.
        """
        values = [argument.find(args, kwargs) for argument in self.ports.arguments]
        tensors = [value for value in (*values, *parameters) if isinstance(value, torch.Tensor)]
        if tensors:
            sample = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
            entry.call = self.begin_call(sample)
        call, is_repeated = entry.call, in_backward()
        self.expect_gradients(values, call)
        tags = Tags(metadata=self.ports.options_json(args, kwargs)) if self.ports.options else NO_TAGS
        for argument, value in zip(self.ports.arguments, values, strict=True):
            if call is None or not isinstance(value, torch.Tensor):
                self._refuse(argument, value, entry)
            elif not is_repeated:
                for port in argument.ports:
                    self.record(port, port.part_of(value), call, tags=tags)
                    tags = NO_TAGS
        if call is None or not is_aliased:
            return args, kwargs
        repeated = self._repeated_operands(values, kwargs) if len(values) > 1 else ()
        for argument, value in zip(reversed(self.ports.arguments), reversed(values), strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            operand = self._alias_operand(value, argument.ports, call, is_shared=id(value) in repeated)
            if operand is not value:
                args, kwargs = argument.replace(operand, args, kwargs)
        return args, kwargs

    def begin_call(self, sample: torch.Tensor) -> Call:
        """Start a call, whose compute dtype is that of a tensor."""
        call = self.recorder.begin_call(self.source, sample)
        return call if self.quantised_to is None else dataclasses.replace(call, quantised_to=self.quantised_to())

    def expect_gradients(self, values: Sequence[Any], call: Call | None) -> None:
        """Expect the gradients of a call that runs with gradients disabled, so that they are reported if missing.

        In a reentrant checkpoint, they come with the recomputation. An `autograd.Function` computes them unseen.
        """
        if torch.is_grad_enabled() or in_backward():
            return
        pairs = zip(self.ports.arguments, values, strict=True)
        trained = [argument for argument, value in pairs if isinstance(value, torch.Tensor) and value.requires_grad]
        if trained and call is not None and call.mode is Mode.TRAIN:
            ports = (*(port for argument in trained for port in argument.ports), self.ports.output)
            self.recorder.expect(self.source, (port.grad for port in ports))

    def record_layer_operands(self, layer: RunningRole, call: Call, operands: Sequence[Any]) -> None:
        """Record the input and the weight of a linear layer whose own `forward` multiplies other tensors.

        `layer` is the running layer, and `operands` are the input, weight and bias of its product, which is starting.
        """
        inner_products, module = layer.inner_products, layer.owner
        assert inner_products is not None, "only asked of such layers"
        inner_products.num_products += 1
        inner_products.has_bias |= isinstance(operands[-1], torch.Tensor)
        if "weight" not in parameters_of(module):
            # The weight is computed from the parameters of a parametrization.
            parts = ((part, name) for part in module.modules() for name in parameters_of(part))
            self.context.owners.recorded.update(parts)
        originals = inner_products.input, parameters_of(module).get("weight")
        for port, original, operand in zip(_LAYER_OPERANDS, originals, operands, strict=False):
            if original is None or in_backward() or has_same_values(original, operand):
                continue
            if original.dtype.itemsize == 1:
                reason = "the layer multiplies with what it dequantises: its codes and scales are not recorded"
            elif original is inner_products.input and inner_products.is_written:
                reason = "the forward of the layer wrote to it"
            else:
                name = port.name.removeprefix(WIDE)
                placement = None if self.placement is None else self.placement(name, original)
                self.record(port, original, call, tags=tags_of(OWN_FORWARD), placement=placement)
                continue
            self.recorder.refuse(self.source, port.value, reason, call=call)

    def _repeated_operands(self, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Collection[int]:
        """The identities of tensors that are passed as several operands and must not be replaced by aliases.

        Autograd must add their gradients in the same order as without a capture. If the function is one node of the
        graph, it does so if the aliases are created from the last operand to the first.
        """
        counts = Counter(id(value) for value in values if isinstance(value, torch.Tensor))
        repeated = [number for number, count in counts.items() if count > 1]
        # Asked only where it matters: on a device, the question may wait for it.
        is_single_node = bool(repeated) and self.is_single_node is not None and self.is_single_node(values, kwargs)
        return () if is_single_node else repeated

    def _refuse(self, argument: Argument, value: Any, entry: RunningRole) -> None:
        """Report why an argument that is not a tensor is not recorded, or note on the output that there is no bias."""
        if value is None and argument.is_optional:
            if any(port.is_optional for port in argument.ports):
                entry.metadata_keys = (*entry.metadata_keys, WITHOUT_BIAS)
            return
        what = f"its argument {argument.keyword or argument.position!r}"
        reason = f"{what} was not passed" if value is None else f"{what} is a {type(value).__name__} and no tensor"
        for port in argument.ports:
            self.recorder.refuse(self.source, port.value, reason, call=entry.call)

    def _alias_operand(
        self, value: torch.Tensor, ports: Sequence[Port], call: Call, *, is_shared: bool
    ) -> torch.Tensor:
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
                    record_grad = functools.partial(self.record_computed_grad, port)
                    self.context.parameter_hooks.watch(self.source, port, value, call=call, record_grad=record_grad)
            return value
        alias = value.view_as(value)
        for port in wanted:
            self.record_grad(port, alias, call, part=None if port.part is None else port.part_of)
        return alias

    def alias_parameter(self, port: Port, call: Call, weight: torch.Tensor) -> torch.Tensor:
        """A view of a parameter, whose gradient is the share of this call alone."""
        with self.recorder.guarded(self.source, port.grad):
            alias = weight.view_as(weight)
            self.record_grad(port, alias, call)
            return alias
        return weight

    def record_result(
        self, args: Any, result: Any, entry: RunningRole, *, element: int | str | None, name: str
    ) -> None:
        """Record the output of a call with arguments `args`: an element of its result. `name` is used in messages."""
        call = entry.call
        assert call is not None, "only called after a call"
        output = tensor_in(result, element)
        if output is None:
            reason = f"{name} gave a {type(result).__name__} without a tensor at {element!r}"
            self.recorder.refuse(self.source, self.ports.output.value, reason, call=call)
            return
        self.record_output(output, call, args=args, metadata_keys=entry.metadata_keys)

    def record_output(
        self,
        output: torch.Tensor,
        call: Call,
        *,
        args: Any,
        metadata_keys: tuple[str, ...] = (),
        order: tuple[int, ...] | None = None,
    ) -> None:
        """Record the output of a call with arguments `args`, and its gradient when it is computed.

        The gradient also tells the hooks on weights which call they belong to. With `order`, both are recorded with
        their dimensions in this order.
        """
        port = self.ports.output
        on_grad = self.context.parameter_hooks.on_grad_output(self.source)
        if not in_backward():
            ordered = output if order is None else output.permute(order)
            self.record(port, ordered, call, tags=tags_of(*metadata_keys))
        if output.requires_grad and (on_grad is not None or self.recorder.wants(self.source, port.grad, call)):
            hooked = tensor_for_hook(output, args=args)
            part = None if hooked is output and order is None else functools.partial(_part, output.shape, order)
            keys = (OWN_FORWARD,) if OWN_FORWARD in metadata_keys else (PACKED,) if packs_tensors() else ()
            self.record_grad(port, hooked, call, part=part, on_grad=on_grad, tags=tags_of(*keys))

    def record(
        self, port: Port, tensor: torch.Tensor, call: Call, *, tags: Tags = NO_TAGS, placement: str | None = None
    ) -> None:
        """Record a tensor. A weight or bias is not recorded again if it has not changed."""
        if placement is None and self.placement is not None:
            placement = self.placement(port.name, tensor)
        recorder = self.recorder if port.value.has_samples else self.context.weights
        recorder.record(self.source, port.value, tensor, call=call, placement=placement, tags=tags)

    def record_computed_grad(self, port: Port, grad: torch.Tensor, call: Call, tags: Tags) -> None:
        """Record a gradient that has been computed."""
        placement = None if self.placement is None else self.placement(port.grad.tensor_name, grad)
        grad_tags = DIFFERENTIABLE if torch.is_grad_enabled() else tags
        self.recorder.record(self.source, port.grad, grad, call=call, placement=placement, tags=grad_tags)

    def record_grad(
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


def _part(shape: torch.Size, order: tuple[int, ...] | None, grad: torch.Tensor) -> torch.Tensor:
    whole = grad.reshape(shape)
    return whole if order is None else whole.permute(order)


def tensor_for_hook(output: torch.Tensor, *, args: Any) -> torch.Tensor:
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
    return output if any(base is tensor or base is base_of(tensor) for tensor in tensors_in(args)) else base
