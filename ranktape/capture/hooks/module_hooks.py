"""The hooks that record the tensors of a module with a role, for one iteration.

input, output, their gradients   see `calls.py`
weight, bias                     with the first call of the iteration, read when the call uses it
grad_weight, grad_bias           a tensor hook on an alias of the parameter, if `F.linear` or `F.embedding` takes it,
                                 which sees only this call's share; otherwise on the parameter: the sum over one graph

A subclass of `nn.Linear` that overrides `forward` may multiply other tensors, for example with merged adapters or
rounded operands. For such a module, the calls of `F.linear` inside `forward` are recorded instead of the module. If
there are none, the module is recorded after the call, and in later calls like any other module, with `own_forward` in
the metadata.

With `need_weights`, `nn.MultiheadAttention` calls no attention function. Then query, key and value are the results of
its input projections, and the output is the input of its output projection. All of these are products with parameters
of the module, which `functions.py` sees.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ranktape.capture.hooks.calls import (
    OWN_FORWARD,
    WITHOUT_BIAS,
    HookContext,
    InnerProducts,
    RunningRole,
    SourceRecorder,
    is_cached_by_autocast,
    tags_of,
    tensor_for_hook,
)
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.hooks.owners import Owner
from ranktape.capture.passes.tracker import Arguments, Call
from ranktape.capture.roles.known import MULTIHEAD, PRODUCTS, class_of, quantising
from ranktape.capture.roles.table import ModuleRole, Port, ports_of, resolved
from ranktape.capture.source import NO_TAGS, Source, Tags, TensorRole
from ranktape.capture.tensors.parts import PLAIN
from ranktape.capture.tensors.placement import is_dtensor
from ranktape.capture.torch_private import in_backward, is_traced, parameters_of, version_of
from ranktape.storage.format.record_info import Operation

ACCUMULATED = tags_of("accumulated")
"""The tags of a weight gradient that the layer itself accumulates. It includes earlier microbatches."""

RETURNED = tags_of("returned")
"""The tags of a bias that the layer returns beside its output instead of adding it."""

_INNER_PRODUCTS = "products of a linear layer"
"""The kind of a running module whose products are recorded. It is no layer type, so that they are not part of it."""

_calls_linear: MutableMapping[Callable[..., Any], bool] = weakref.WeakKeyDictionary()
"""Whether the `forward` of a subclass of `nn.Linear` has called `F.linear`, for those that have run."""

_NOT_RUN_YET = "its forward had not run yet, and calls no F.linear: later calls have it"
"""The reason why the first call has no gradient of its input."""

_NO_BIAS = "the forward of the layer gives no bias to F.linear"
"""The reason why the bias of a layer is not recorded."""

_SOMETIMES = "its forward calls F.linear in some calls, and did not in this one"
"""The reason why the gradient of the input is missing for a call of a `forward` that uses `F.linear` only sometimes."""


class ModuleHooks:
    """The hooks on one module for one iteration."""

    def __init__(self, module: nn.Module, role: ModuleRole, source: Source, context: HookContext) -> None:
        """Put hooks on a module with a role."""
        self.source = source
        """The source of the module's tensors."""
        self._role = role
        self._recorder = context.recorder
        self._guard = context.recorder.guarded(source)
        self._running = context.running
        self._ports = resolved(ports_of(role), type(module).forward, num_bound=1)
        placement = None if role.placement is None else functools.partial(role.placement, module)
        base = class_of(type(module), role)
        self._has_own_forward = role.component in PRODUCTS and has_own_forward(module, base)
        self._may_record_products = may_record_products(module, role)
        self._quantising = quantising(module)
        self._on_note = context.on_note
        self._parameter_hooks = context.parameter_hooks
        self._source_recorder = SourceRecorder(
            context=context,
            source=source,
            ports=self._ports,
            is_aliased=role.is_aliased,
            placement=placement or context.placement_finder(module, self._ports),
            quantised_to=None if self._quantising is None else self._quantising.to,
        )
        self._returned = frozenset({"bias"} if role.returned is not None and role.returned(module) else ())
        self.begin(module)
        context.handles += [
            # The last pre-hook and the first hook: they run innermost, inside the hooks of wrappers.
            module.register_forward_pre_hook(Hook(self.before), with_kwargs=True),
            module.register_forward_hook(Hook(self._after), with_kwargs=True, prepend=True, always_call=True),
        ]

    def begin(self, module: nn.Module) -> None:
        """Start an iteration with the hooks attached."""
        self._recorder.attach(self.source, self._certain_roles(module))

    @property
    def parameters(self) -> dict[str, str]:
        """The name in records for each recorded parameter, by its name in the module."""
        return {attribute: port.name for attribute, port in self._ports.parameters}

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Arguments | None:
        """Record the operands of a call. Returns the arguments to continue with; None if they are unchanged."""
        # If the hook was removed during the call of its module, torch calls it without keyword arguments.
        if kwargs is None or is_traced():
            return None
        entry = RunningRole(self._role.layer_type, module, self._source_recorder)
        self._running.entries.append(entry)
        with self._guard:
            if self._recorder.follows(self.source):
                if self._may_record_products and _is_expected_to_call_linear(module):
                    operand = self._ports.arguments[0].find(args, kwargs)
                    tensor = operand if isinstance(operand, torch.Tensor) else None
                    version = 0 if tensor is None else version_of(tensor)
                    entry.layer_type = _INNER_PRODUCTS
                    entry.inner_products = InnerProducts(tensor, version, torch.is_grad_enabled())
                    return None
                self._note_own_forward(entry, module)
                parameters = (_parameter(module, attribute) for attribute, _ in self._ports.parameters)
                new_args, new_kwargs = self._source_recorder.begin(entry, args, kwargs, *parameters)
                for attribute, port in self._ports.parameters if entry.call is not None else ():
                    new_kwargs = self._record_parameter(entry, module, attribute, port, new_kwargs)
                return new_args, new_kwargs
        return args, kwargs

    def _note_own_forward(self, entry: RunningRole, module: nn.Module) -> None:
        """Note that the module overrides `forward` or quantises its operands itself."""
        if self._has_own_forward:
            entry.metadata_keys = (OWN_FORWARD,)
            self._refuse_weight_scales(module)
        quant_type = "" if self._quantising is None else self._quantising.to()
        if self._quantising is not None and quant_type:
            self._on_note(
                f"{self._quantising.kind} quantises operands inside of the product ({quant_type}): "
                f"input and weight are recorded as they were before"
            )
        elif self._has_own_forward:
            self._on_note(
                f"{type(module).__name__} computes in a forward of its own that calls no F.linear: "
                f"input, weight and output of the module are recorded, which may not be what was multiplied"
            )

    def _certain_roles(self, module: nn.Module) -> Iterator[TensorRole]:
        """The roles that every call with gradients has. Not gradients of operands, which may not require any."""
        for argument in self._ports.arguments:
            yield from (port.value for port in argument.ports)
        parameters = [(_parameter(module, attribute), port) for attribute, port in self._ports.parameters]
        yield from (port.value for parameter, port in parameters if parameter is not None)
        yield self._ports.output.value
        trained = [port for parameter, port in parameters if parameter is not None and parameter.requires_grad]
        yield from (port.grad for port in trained if port.name not in self._returned)
        if trained:
            yield self._ports.output.grad

    def _record_parameter(
        self, entry: RunningRole, module: nn.Module, attribute: str, port: Port, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Record a parameter. Returns the keyword arguments to continue with."""
        call = entry.call
        assert call is not None, "only called in a call"
        # Megatron passes the weight that the output layer shares with the embedding.
        passed = kwargs.get(attribute)
        # Read in the call, because FSDP replaces the weight for the time of the call.
        weight = passed if isinstance(passed, torch.Tensor) else _parameter_in_call(module, attribute)
        if weight is None:
            if not port.is_optional:
                self._recorder.refuse(self.source, port.value, f"the module has no tensor {attribute!r}", call=call)
            elif not is_hidden(module, attribute):
                entry.metadata_keys = (*entry.metadata_keys, WITHOUT_BIAS)
            return kwargs
        is_returned = port.name in self._returned
        # An embedding with `max_norm` writes to its weight before it uses it.
        is_written = _attribute_or_none(module, "max_norm") is not None
        if is_written:
            entry.written = weight, port
        elif not in_backward():
            self._source_recorder.record(port, weight, call, tags=RETURNED if is_returned else NO_TAGS)
        # If others add the bias, its gradient comes before those of the layer, and its call cannot be determined.
        if is_returned or not (weight.requires_grad and torch.is_grad_enabled()):
            return kwargs
        if not self._recorder.wants(self.source, port.grad, call):
            return kwargs
        if isinstance(passed, torch.Tensor) and type(passed) in PLAIN and not is_cached_by_autocast(passed):
            return {**kwargs, attribute: self._source_recorder.alias_parameter(port, call, passed)}
        # A sparse gradient cannot pass through an alias, and writing to an alias removes its hooks from the graph.
        can_alias = type(weight) in PLAIN and not _attribute_or_none(module, "sparse") and not is_written
        if can_alias:
            # Replaced by an alias when `F.linear` takes it, if the layer calls that.
            entry.parameters_to_alias.append((weight, port))
        else:
            self._watch_parameter(module, weight, port, call)
        return kwargs

    def _refuse_weight_scales(self, module: nn.Module) -> None:
        """Report that the scales of a quantised weight, which are other tensors of the module, are not recorded."""
        weight = _parameter(module, "weight")
        if weight is None or weight.dtype.itemsize > 1:
            return
        tensors = *dict(module.named_buffers(recurse=False)), *parameters_of(module)
        if names := [name for name in tensors if "scale" in name.lower()]:
            role = TensorRole(Operation.FORWARD, "pre", "weight_scales", has_samples=False)
            reason = f"the module holds them beside the codes ({', '.join(names)}), and only the codes are recorded"
            self._recorder.refuse(self.source, role, reason)

    def _after(self, module: nn.Module, *called: Any) -> None:
        if is_traced():
            return
        output = called[-1]
        entry = self._running.leave(module)
        if entry is None or output is None:
            return
        with self._guard:
            if entry.inner_products is not None and entry.inner_products.num_products:
                note_calls_linear(module)
                self._refuse_bias(entry.inner_products, module)
            elif entry.inner_products is not None:
                self._record_after_call(entry, entry.inner_products, module, called[0], called[1])
            if entry.call is None:
                return
            for weight, port in entry.parameters_to_alias:
                self._watch_parameter(module, weight, port, entry.call)
            if entry.written is not None and not in_backward():
                weight, port = entry.written
                self._source_recorder.record(port, weight, entry.call)
            self._source_recorder.record_result(called[:-1], output, entry, element=self._role.output, name="forward")

    def _refuse_bias(self, inner_products: InnerProducts, module: nn.Module) -> None:
        """Report the bias of a layer as not recorded if none of the layer's products takes it."""
        bias = _parameter(module, "bias")
        port = dict(self._ports.parameters).get("bias")
        if bias is None or port is None or inner_products.has_bias:
            return
        for role in (port.value, port.grad) if bias.requires_grad else (port.value,):
            self._recorder.refuse(self.source, role, _NO_BIAS)

    def _record_after_call(
        self,
        entry: RunningRole,
        inner_products: InnerProducts,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Record the operands of a module after its `forward`, which has not called `F.linear`."""
        reason = _SOMETIMES if _calls_linear.setdefault(type(module).forward, False) else _NOT_RUN_YET
        [port] = self._ports.arguments[0].ports
        if inner_products.is_written:
            self._recorder.refuse(self.source, port.value, "its forward wrote to it before it was recorded")
            return
        self._note_own_forward(entry, module)
        parameters = (_parameter(module, attribute) for attribute, _ in self._ports.parameters)
        self._source_recorder.begin(entry, args, kwargs, *parameters, is_aliased=False)
        if entry.call is None:
            return
        if inner_products.input is not None and inner_products.input.requires_grad and torch.is_grad_enabled():
            self._recorder.refuse(self.source, port.grad, reason, call=entry.call)
        for attribute, parameter_port in self._ports.parameters:
            self._record_parameter(entry, module, attribute, parameter_port, kwargs)

    def _watch_parameter(self, module: nn.Module, weight: torch.Tensor, port: Port, call: Call) -> None:
        """Record the gradient of a weight by a hook on the weight itself."""

        def record_grad(grad: torch.Tensor, call: Call, tags: Tags) -> None:
            own = None if self._role.accumulated is None else self._role.accumulated(module, weight)
            if own is not None:
                self._recorder.record(self.source, port.grad, own, call=call, tags=ACCUMULATED)
            else:
                self._source_recorder.record_computed_grad(port, grad, call, tags)

        self._parameter_hooks.watch(self.source, port, weight, call=call, record_grad=record_grad)


def has_own_forward(module: nn.Module, base: type) -> bool:
    """Whether a module overrides the `forward` of the class that its role is for."""
    return type(module).forward is not base.forward or "forward" in vars(module)  # type: ignore[attr-defined]


def may_record_products(module: nn.Module, role: ModuleRole) -> bool:
    """Whether the products in the `forward` of a module are recorded instead of the module.

    This is so for a linear layer that overrides `forward` or has a parametrized parameter, because it may multiply
    other tensors.
    """
    if class_of(type(module), role) is not nn.Linear:
        return False
    parameters = [_parameter(module, attribute) for attribute in role.parameters.values()]
    if any(parameter is not None and is_lazy(parameter) for parameter in parameters):
        return False
    return has_own_forward(module, nn.Linear) or any(is_hidden(module, name) for name in role.parameters.values())


def note_calls_linear(module: nn.Module) -> None:
    """Note that the `forward` of a linear layer calls `F.linear`, at least in some calls."""
    _calls_linear[type(module).forward] = True


def _is_expected_to_call_linear(module: nn.Module) -> bool:
    """Whether the `forward` of a module has called `F.linear`, or, if it has not run yet, seems to call it."""
    kind = type(module)
    known = _calls_linear.get(kind.forward)
    return known if known is not None else "forward" in vars(module) or _mentions_linear(kind.forward, kind, set())


def _mentions_linear(function: Callable[..., Any], kind: type, seen: set[CodeType]) -> bool:
    """Whether a function uses the name `linear` or `forward`, itself or in a helper of its class or file."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    if code in seen:
        return False
    codes = [code]
    for inner in codes:
        codes += [const for const in inner.co_consts if isinstance(const, CodeType)]
    seen.update(codes)
    names = {name for inner in codes for name in inner.co_names}
    attributes = [getattr(kind, name, None) or function.__globals__.get(name) for name in sorted(names)]
    functions = [value for value in attributes if isinstance(value, FunctionType)]
    helpers = [helper for helper in functions if helper.__module__ == function.__module__]
    return not _LINEAR.isdisjoint(names) or any(_mentions_linear(helper, kind, seen) for helper in helpers)


_LINEAR = frozenset({"linear", "forward"})


def is_recorded_as_product(module: nn.Module, role: ModuleRole) -> bool:
    """Whether the product is recorded instead of the module, whose `forward` converts its operands to DTensors.

    With the `tp_plan` of transformers, the input and the output of the module are plain tensors, which do not tell
    which share a rank has.
    """
    weight = _parameter(module, "weight")
    is_shared_out = weight is not None and is_dtensor(weight)
    return is_shared_out and "forward" in vars(module) and role.component in PRODUCTS


def is_hidden(module: nn.Module, attribute: str) -> bool:
    """Whether a parameter cannot be read because it is parametrized, and so computed when read, or not initialised yet.

    False if the module does not have it, or if it is passed to each call. Outside a call, it is then None or empty.
    """
    parameter = _parameter(module, attribute)
    if parameter is not None:
        return is_lazy(parameter)
    outside_call = {**vars(module), **parameters_of(module)}.get(attribute, False)
    return outside_call is not None and not (isinstance(outside_call, torch.Tensor) and not outside_call.numel())


def _parameter(module: nn.Module, attribute: str) -> torch.Tensor | None:
    """A parameter of a module; None if there is none. `getattr` would compute a parametrized one."""
    return parameters_of(module).get(attribute)


def _attribute_or_none(module: nn.Module, name: str) -> Any:
    """An attribute of a module; None if it does not exist, for which `getattr` alone is slow."""
    return getattr(module, name, None) if name in vars(module) or hasattr(type(module), name) else None


def _parameter_in_call(module: nn.Module, attribute: str) -> torch.Tensor | None:
    """The parameter, or the tensor that replaces it during a call, as under FSDP1."""
    parameter, replacement = _parameter(module, attribute), vars(module).get(attribute)
    is_replaced = parameter is None and isinstance(replacement, torch.Tensor) and replacement.numel()
    return replacement if is_replaced else parameter


_NAMES = ("query", "key", "value")
_SEPARATE = {"q_proj_weight": "query", "k_proj_weight": "key", "v_proj_weight": "value"}
_NEED_WEIGHTS = 4
"""Position of `need_weights` among the arguments."""


class MultiheadHooks:
    """The hooks on all `nn.MultiheadAttention` modules for one iteration."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._running = context.running
        self._recorder = context.recorder
        self._source_recorders: dict[nn.Module, SourceRecorder] = {}

    def attach(self, module: nn.MultiheadAttention, source: Source) -> None:
        """Put hooks on a module."""
        self._source_recorders[module] = SourceRecorder(context=self._context, source=source, ports=ports_of(MULTIHEAD))
        self._context.handles += [
            module.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            module.register_forward_hook(Hook(self._after), prepend=True, always_call=True),
        ]

    def record_product(self, owner: Owner, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Record a product with a parameter as operands or output of the running attention, if it belongs to one."""
        entries = self._running.entries
        entry = entries[-1] if entries else None
        if entry is None or entry.layer_type != MULTIHEAD_CALL or entry.source_recorder is None or entry.call is None:
            return
        module: Any = entry.owner
        source_recorder, heads, embed_dim = entry.source_recorder, module.num_heads, module.embed_dim
        with self._recorder.guarded(source_recorder.source):
            if owner.frame.module is module.out_proj:
                lead = args[0].shape[0] // max(entry.batch_size, 1), entry.batch_size
                part = functools.partial(_heads, lead=lead, heads=heads)
                self._record(source_recorder, entry.call, source_recorder.ports.output, args[0], part)
            elif owner.frame.module is module:
                entry.batch_size = output.shape[1]
                names = _projections(owner, embed_dim=embed_dim)
                ports = {argument.ports[0].name: argument.ports[0] for argument in source_recorder.ports.arguments}
                for index, name in enumerate(names):
                    shape = tuple(output.shape)
                    part = functools.partial(_slice, index=index, count=len(names), shape=shape, heads=heads)
                    rows = None if name == "query" else _appended(module, name, batch_size=entry.batch_size)
                    self._record(source_recorder, entry.call, ports[name], output, part, rows=rows)

    def _record(
        self,
        source_recorder: SourceRecorder,
        call: Call,
        port: Port,
        tensor: torch.Tensor,
        part: Callable[[torch.Tensor], torch.Tensor],
        *,
        rows: list[torch.Tensor] | None = None,
    ) -> None:
        if not in_backward():
            projected = part(tensor)
            if rows:
                projected = torch.cat([projected.detach(), *(row.to(projected) for row in rows)])
            source_recorder.record(port, projected, call)
        if rows and self._recorder.wants(source_recorder.source, port.grad, call):
            self._recorder.refuse(source_recorder.source, port.grad, _APPENDED, call=call)
        elif tensor.requires_grad and self._recorder.wants(source_recorder.source, port.grad, call):
            source_recorder.record_grad(port, tensor_for_hook(tensor, args=None), call, part=part)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced():
            return
        needs_weights = args[_NEED_WEIGHTS] if len(args) > _NEED_WEIGHTS else kwargs.get("need_weights", True)
        query = args[0] if args else kwargs.get("query")
        if not needs_weights or not isinstance(query, torch.Tensor) or not self._context.tracker.is_active:
            return
        source_recorder = self._source_recorders[module]
        if not self._recorder.follows(source_recorder.source, (port.value for port in source_recorder.ports.all)):
            return
        with self._recorder.guarded(source_recorder.source):
            call = self._recorder.begin_call(source_recorder.source, query)
            self._running.entries.append(RunningRole(MULTIHEAD_CALL, module, source_recorder, call))

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not is_traced():
            self._running.leave(module)


MULTIHEAD_CALL = "multihead attention"
"""The kind of a running attention. It is no layer type, so that the products inside are recorded, too."""


_APPENDED = "a row is appended to it (add_bias_kv, add_zero_attn), which no product gave"
"""The reason why the gradients of some keys and values are not recorded."""


def _projections(owner: Owner, *, embed_dim: int) -> tuple[str, ...]:
    """The names of the projections that a product with a parameter of the attention, or a part of one, computes."""
    if owner.attribute in _SEPARATE:
        return (_SEPARATE[owner.attribute],)
    first = (owner.first or 0) // embed_dim
    last = len(_NAMES) if owner.last is None else owner.last // embed_dim
    return _NAMES[first:last]


def _appended(module: Any, name: str, *, batch_size: int) -> list[torch.Tensor]:
    """The rows that the attention appends to its keys or values, each of shape [1, batch, heads, head]."""
    shape = 1, batch_size, module.num_heads, module.head_dim
    bias = {"key": module.bias_k, "value": module.bias_v}[name]
    rows = [] if bias is None else [bias.detach().reshape(1, 1, *shape[2:]).expand(shape)]
    return [*rows, torch.zeros(shape, device=module.out_proj.weight.device)] if module.add_zero_attn else rows


def _heads(tensor: torch.Tensor, *, lead: tuple[int, int], heads: int) -> torch.Tensor:
    """A tensor of shape [tokens * batch, hidden] in the shape [tokens, batch, heads, head]."""
    return tensor.reshape(*lead, heads, -1)


def _slice(tensor: torch.Tensor, *, index: int, count: int, shape: tuple[int, ...], heads: int) -> torch.Tensor:
    """One of `count` concatenated projections, in the shape [tokens, batch, heads, head]."""
    projected = tensor.reshape(shape).chunk(count, dim=-1)[index]
    return projected.reshape(*projected.shape[:-1], heads, -1)
