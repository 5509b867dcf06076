"""Follows the calls of compiled graphs and records the tensors from their taps.

Python calls a graph with its inputs, which include the real parameters. If several layers share a graph, the parameters
identify the layer that runs. Each call gets a ticket, which the graph passes to its taps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ranktape.capture.compiled.graph_taps import SITES, GraphCall, GraphPlan
from ranktape.capture.compiled.operator import TICKETS, is_of_gradient
from ranktape.capture.hooks.calls import WITHOUT_BIAS, HookContext, SourceRecorder, tags_of
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.hooks.owners import Owner
from ranktape.capture.hooks.stacks import module_path
from ranktape.capture.hooks.states import LayerHooks
from ranktape.capture.passes.tracker import Call, Frame
from ranktape.capture.roles.known import PRODUCTS, role_of
from ranktape.capture.roles.table import ModuleRole, Ports, ports_of
from ranktape.capture.source import NO_TAGS, Source, Tags
from ranktape.capture.torch_private import in_backward


@dataclass(slots=True, kw_only=True)
class _RunningCall:
    """One call of a function in a graph, from the start of the graph until its backward pass is over."""

    source_recorder: SourceRecorder
    call: Call
    ports: Mapping[str, Any]
    """The ports of the source, by name."""
    is_repeated: bool
    """Whether the call is a recomputation, whose values have already been recorded."""
    tags: Tags = NO_TAGS
    """The tags of the first operand."""


class GraphCalls:
    """Records the calls of compiled graphs in one captured iteration."""

    current: GraphCalls | None = None
    """The instance of the captured iteration; None if no iteration is being captured."""

    def __init__(
        self,
        context: HookContext,
        *,
        frames: Mapping[nn.Module, Frame],
        is_wanted_layer: Callable[[str, str], bool],
        layers: LayerHooks | None,
    ) -> None:
        """`is_wanted_layer` tells from the layer type and the path of a module whether the module is recorded."""
        self._context = context
        self._recorder = context.recorder
        self._tracker = context.tracker
        self._frames = frames
        self._is_wanted_layer = is_wanted_layer
        self._layers = layers
        self.layer_hooks: Mapping[Hook, nn.Module] = {} if layers is None else layers.hooks
        """The hooks on layers, each with its module."""
        self._owners: dict[int, list[tuple[Any, Owner]]] = {}
        self._source_recorders: dict[Source, SourceRecorder] = {}

    def remove(self) -> None:
        """Stop recording."""
        TICKETS.clear()

    @contextlib.contextmanager
    def running(self, plan: GraphPlan, inputs: Sequence[Any]) -> Iterator[int]:
        """Context in which a graph runs with these inputs. Yields the ticket of the call."""
        ticket = next(_tickets)
        entered: nn.Module | None = None
        with self._recorder.guarded():
            entered = self._enter(inputs)
            running_calls = self._begin(plan, inputs)
            if running_calls:
                TICKETS[ticket] = lambda number, value: self._record(running_calls, number, value)
        output: Any = None
        try:
            yield ticket
            output = ()
        finally:
            if entered is not None:
                with self._recorder.guarded():
                    self._tracker.leave(entered, output)

    def _enter(self, inputs: Sequence[Any]) -> nn.Module | None:
        """Begin a pass if the graph is outermost, because hooks on the modules in it do not run."""
        if self._tracker.current() is not None or in_backward() or not self._frames:
            return None
        root = next(iter(self._frames.values()))
        args = tuple(value for value in inputs if not isinstance(value, nn.Parameter))
        self._tracker.enter(root, args, {})
        return root.module

    def _begin(self, plan: GraphPlan, inputs: Sequence[Any]) -> dict[GraphCall, _RunningCall]:
        """Begin the calls in a graph and record their parameters."""
        named = ((call, call.owner) for call in plan.calls)
        owners = {call: self._owner(call, inputs[index], call.path) for call, index in named if index is not None}
        paths = [(call.path, owner.frame.path) for call, owner in owners.items() if owner is not None]
        paths += [pair for call in plan.calls if call.role is None for pair in self._known_paths(call, inputs)]
        running_calls = {}
        if self._layers is not None and any(call.is_first for call in plan.calls) and not in_backward():
            self._layers.begin()
        for call in plan.calls:
            owner = owners.get(call)
            if call.owner is not None and owner is None:
                continue
            frame = owner.frame if owner is not None else self._frame(call.path, paths)
            source, ports = self._source(call, owner, frame)
            if source is None or not self._recorder.follows(source, (port.value for port in ports.all)):
                continue
            with self._recorder.guarded(source):
                running_calls[call] = self._begin_call(plan, call, source, ports, frame, inputs)
                if owner is not None:
                    self._context.owners.recorded.add((owner.frame.module, owner.attribute))
        return running_calls

    def _begin_call(  # noqa: PLR0917  (the local variables of `_begin`)
        self, plan: GraphPlan, call: GraphCall, source: Source, ports: Ports, frame: Frame | None, inputs: Sequence[Any]
    ) -> _RunningCall:
        source_recorder = self._source_recorders.get(source)
        if source_recorder is None:
            placement = None
            if frame is not None and call.role is not None:
                placement = self._context.placement_finder(frame.module, ports)
            source_recorder = self._source_recorders[source] = SourceRecorder(
                context=self._context, source=source, ports=ports, placement=placement
            )
        counted_call = self._recorder.begin_call(source, torch.empty(0, dtype=call.dtype))
        by_name = {port.name: port for port in ports.all}
        tags = Tags(metadata=call.ports.options_json(*call.arguments)) if call.ports.options else NO_TAGS
        running_call = _RunningCall(
            source_recorder=source_recorder, call=counted_call, ports=by_name, is_repeated=in_backward(), tags=tags
        )
        for name, index in call.parameters.items():
            if name in by_name and not running_call.is_repeated:
                value = inputs[index] if isinstance(inputs[index], nn.Parameter) else inputs[index].detach()
                source_recorder.record(by_name[name], value, counted_call)
        for site in call.sites:
            for port in (by_name.get(port.name, port) for port in site.ports):
                if (reason := plan.missing.get(site.number)) is not None:
                    self._recorder.refuse(source, port.value, reason, call=counted_call)
                    self._hold(running_call, call, None)
                if (reason := plan.missing.get(site.number + 1)) is not None:
                    self._recorder.refuse(source, port.grad, reason, call=counted_call)
                elif site.has_gradient:
                    self._recorder.await_grad(source, port.grad, counted_call)
        return running_call

    def _record(self, running_calls: Mapping[GraphCall, _RunningCall], number: int, value: torch.Tensor) -> None:
        """Record the tensor from a tap."""
        site = SITES[number - is_of_gradient(number)]
        running_call = running_calls.get(site.call)
        if running_call is None:
            return
        call, source_recorder = running_call.call, running_call.source_recorder
        for graph_port in site.ports:
            port = running_call.ports.get(graph_port.name, graph_port)
            if is_of_gradient(number):
                placement = site.grad_placement
                if placement is None and source_recorder.placement is not None:
                    placement = source_recorder.placement(port.grad.tensor_name, value)
                part = None if port.part is None else port.part_of
                self._recorder.take_grad(
                    source_recorder.source, port.grad, value, call=call, part=part, placement=placement
                )
            elif not running_call.is_repeated:
                tags = NO_TAGS
                if port is source_recorder.ports.output:
                    tags = NO_TAGS if site.call.has_bias else tags_of(WITHOUT_BIAS)
                elif graph_port is site.call.ports.arguments[0].ports[0]:
                    tags = running_call.tags
                tensor = port.part_of(value)
                self._hold(running_call, site.call, tensor)
                source_recorder.record(port, tensor, call, tags=tags, placement=site.placement)

    def _hold(self, running_call: _RunningCall, call: GraphCall, tensor: torch.Tensor | None) -> None:
        if self._layers is not None and call.role is None and not running_call.is_repeated:
            self._layers.hold(tensor)

    def _source(self, call: GraphCall, owner: Owner | None, frame: Frame | None) -> tuple[Source | None, Ports]:
        """The source of a call, or None if it is not recorded, and its ports."""
        path = owner.path if owner is not None else "" if frame is None else frame.path
        if call.role is None:
            if self._layers is None or frame is None:
                return None, call.ports
            return self._layers.source_in_graph(frame.path, is_first=call.is_first), call.ports
        ports, component = call.ports, call.role.component
        if frame is not None and owner is not None and path == frame.path:
            role = role_of(type(frame.module))
            if isinstance(role, ModuleRole) and role.component in PRODUCTS:
                ports, component = ports_of(role), role.component
        if not self._is_wanted_layer(call.role.layer_type, path):
            return None, ports
        layer_idx, stack = (-1, "") if frame is None else (frame.layer_idx, frame.layer_stack)
        return Source(path, call.role.layer_type, layer_idx, component, stack), ports

    def _owner(self, call: GraphCall, weight: Any, path: str) -> Owner | None:
        """The owner of a weight. If several modules share it, the one that best matches the path in the graph."""
        candidates = self._owners_of(weight)
        graph_path = module_path(path).split(".")[::-1]
        kind = "" if call.role is None else call.role.layer_type

        def rank(candidate: tuple[Any, Owner]) -> tuple[int, bool]:
            frame = candidate[1].frame
            role = role_of(type(frame.module))
            return _num_common(frame.path.split(".")[::-1], graph_path), role is not None and role.layer_type == kind

        if not candidates:
            return None
        first, last = call.rows or (None, None)
        return dataclasses.replace(max(candidates, key=rank)[1], first=first, last=last)

    def _known_paths(self, call: GraphCall, inputs: Sequence[Any]) -> Iterator[tuple[str, str]]:
        """The path of one module inside a layer, in the graph and in the model; nothing if no module is identified."""
        for index, graph_path in call.within:
            owner = self._owner(call, inputs[index], graph_path) if isinstance(inputs[index], nn.Parameter) else None
            if owner is not None:
                yield graph_path, owner.frame.path
                return

    def _owners_of(self, weight: Any) -> Sequence[tuple[Any, Owner]]:
        """The modules that have a parameter, searched for in the running module first, then in all modules.

        Under FSDP2, a layer has other parameters while it runs than outside its forward pass.
        """
        current = self._tracker.current()
        above = "" if current is None or not current.path else f"{current.path}."
        owners = self._owners.get(id(weight), [])
        if any(f"{owner.frame.path}.".startswith(above) for _, owner in owners):
            return owners
        modules = () if current is None else current.module.modules()
        self._owners |= _owners(self._frames[module] for module in modules if module in self._frames)
        if id(weight) not in self._owners:
            self._owners |= _owners(self._frames.values())
        return self._owners.get(id(weight), [])

    def _frame(self, path: str, known_paths: Sequence[tuple[str, str]]) -> Frame | None:
        """The module for a path in the graph. `known_paths`: the paths of other modules in the graph and the model."""
        best, model_path = -1, None
        for graph_path, known_path in known_paths:
            graph_parts = graph_path.split(".")
            parts = path.split(".") if path else graph_parts[:1]
            common = _num_common(parts, graph_parts)
            if common > best and len(graph_parts) - common <= len(known_path.split(".")):
                outer_parts = known_path.split(".")[: len(known_path.split(".")) - (len(graph_parts) - common)]
                best, model_path = common, module_path(".".join([*outer_parts, *parts[common:]]))
        if model_path is not None:
            return next((frame for frame in self._frames.values() if frame.path == model_path), None)
        return self._tracker.current()


def _num_common(parts: Sequence[str], others: Sequence[str]) -> int:
    """Number of parts at the start that two paths have in common."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(parts, others, strict=False)))


def _owners(frames: Iterable[Frame]) -> dict[int, list[tuple[Any, Owner]]]:
    """Each parameter with the modules that have it, by the identity of the parameter."""
    owners: dict[int, list[tuple[Any, Owner]]] = {}
    for frame in frames:
        for name, parameter in frame.module._parameters.items():  # noqa: SLF001  (runs no parametrization)
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((parameter, Owner(frame, name)))
    return owners


_tickets = itertools.count(1)
