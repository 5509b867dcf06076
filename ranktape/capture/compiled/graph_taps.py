"""Puts taps into the graph that dynamo has traced, around each function with a role.

Taps are functions that the graph calls. AOTAutograd traces through them, including their tensor hooks. Therefore
gradients are recorded as in eager code: that of an operand on an alias of it, that of the output on the output itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import _disable_current_modes

from ranktape.capture.compiled.marks import mark_call, mark_layer, mark_result
from ranktape.capture.compiled.operator import tap_operator
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.hooks.owners import rows_of
from ranktape.capture.hooks.states import LAYER_PORTS
from ranktape.capture.roles.table import Argument, FunctionRole, Port, Ports
from ranktape.capture.tensors.placement import is_dtensor, shard_of


@dataclass(slots=True, kw_only=True, eq=False)
class GraphSite:
    """One tensor of a call, with its gradient."""

    number: int
    """Number of the tensor, which is even. Its gradient has the next number."""
    call: GraphCall
    """The call."""
    ports: tuple[Port, ...]
    """The ports as which the tensor is recorded."""
    is_parameter: bool
    """Whether the tensor is a graph input without a sample dimension, and so may be a parameter."""
    has_gradient: bool = False
    """Whether a gradient is expected."""
    placement: str | None = None
    """Placement of the shard as JSON; None if the tensor is not a DTensor."""
    grad_placement: str | None = None
    """Placement of the shard of the gradient; None if that is not a DTensor."""


@dataclass(slots=True, kw_only=True, eq=False)
class GraphCall:
    """A call of a function with a role in a graph, or of a layer, of which only the output or the input is recorded."""

    role: FunctionRole | None
    """Role of the function; None for a layer."""
    ports: Ports
    """Ports of the call."""
    path: str
    """Path, in the graph, of the module that calls the function."""
    owner: int | None
    """Index of the graph input that is or contains the operand after which the call is named; None if there is none."""
    rows: tuple[int, int | None] | None
    """If that operand is a part of the input: its first row and the row after it, or its only row and None."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments, with the name of the class in place of a tensor."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Indices of the graph inputs that may be parameters, by the names of their ports."""
    sites: list[GraphSite] = field(default_factory=list)
    """The tensors of the call, operands first."""
    dtype: torch.dtype = torch.float32
    """The dtype in which the call computes."""
    within: tuple[tuple[int, str], ...] = ()
    """Indices of the graph inputs that a layer uses, each with the path, in the graph, of the module that uses it."""
    is_first: bool = False
    """Whether the tensor is the input of the first layer, not the output of a layer."""
    has_bias: bool = True
    """False if the function takes a bias and none is passed."""


@dataclass(slots=True, kw_only=True, eq=False)
class GraphPlan:
    """The calls of a graph that are recorded."""

    calls: list[GraphCall]
    """The calls in the order in which they run."""
    missing: dict[int, str] = field(default_factory=dict)
    """The reason for each site that is not recorded, by number."""

    def mark_missing(self, reason: str) -> None:
        """Record only the parameters among the inputs of the graph."""
        for call in self.calls:
            for site in call.sites:
                if not site.is_parameter:
                    self.missing[site.number] = reason
                if site.has_gradient:
                    self.missing[site.number + 1] = reason


Target = tuple[FunctionRole, Ports, int | None]
"""The role of a function, its ports, and the index of the output in its result, or None if the result is the output."""

SITES: dict[int, GraphSite] = {}
"""The sites of all compiled graphs, by number."""

_numbers = itertools.count(2, 2)


def add_taps(graph: fx.GraphModule, targets: Mapping[Any, Target], plan: GraphPlan) -> fx.GraphModule:
    """A copy of the graph with taps and with the ticket as an additional last input. Adds the calls to the plan."""
    copy = _copy(graph)
    ticket = _with_ticket(copy)
    _tap_graph(copy, ticket, targets, plan, inputs={node: index for index, node in enumerate(_inputs(copy))})
    copy.recompile()
    return copy


def erase_marks(graph: fx.GraphModule) -> None:
    """Remove all marks from a graph and its subgraphs."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for mark in (mark_layer, mark_call, mark_result):
                for node in module.graph.find_nodes(op="call_function", target=mark):
                    module.graph.erase_node(node)
            module.recompile()


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    new = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    new.output(new.graph_copy(graph.graph, nodes))
    for old, node in nodes.items():
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source  # noqa: SLF001  (AOTAutograd needs it)
    copy = fx.GraphModule(graph, new)
    copy.meta = dict(graph.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(graph, name):
            setattr(copy, name, getattr(graph, name))
    for node in new.find_nodes(op="get_attr"):
        inner = getattr(copy, node.target, None)
        if isinstance(inner, fx.GraphModule):
            setattr(copy, node.target, _copy(inner))
    return copy


def _inputs(graph: fx.GraphModule) -> Sequence[fx.Node]:
    return graph.graph.find_nodes(op="placeholder")


def _with_ticket(graph: fx.GraphModule) -> fx.Node:
    inputs = _inputs(graph)
    position = graph.graph.inserting_after(inputs[-1]) if inputs else graph.graph.inserting_before(None)
    with position:
        ticket = graph.graph.placeholder("ranktape_ticket")
    ticket.meta["example_value"] = torch.tensor(0)
    ticket._dynamo_source = None  # noqa: SLF001  (it is not a variable of the program)
    return ticket


def _tap_graph(
    graph: fx.GraphModule,
    ticket: fx.Node,
    targets: Mapping[Any, Target],
    plan: GraphPlan,
    *,
    inputs: Mapping[fx.Node, int],
) -> None:
    within: dict[fx.Node, str] = {}
    for node in (nodes := list(graph.graph.nodes)):
        if node.op not in {"call_function", "call_module"}:
            continue
        if node.target is mark_call:
            span = _span(nodes, node)
            if span and node.args[0] in targets:
                target = targets[node.args[0]]
                within |= dict.fromkeys(span, target[0].layer_type)
                _tap_call(graph.graph, node, ticket, target, plan, inputs=inputs, span=span)
            graph.graph.erase_node(node)
        elif node.target is mark_result:
            graph.graph.erase_node(node)
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            _tap_segment(graph, node, ticket, targets, plan, inputs=inputs)
        elif node.target is mark_layer:
            _tap_layer(graph.graph, node, ticket, plan, inputs=inputs)
        elif node.target in targets and targets[node.target][0].layer_type != within.get(node):
            _tap_call(graph.graph, node, ticket, targets[node.target], plan, inputs=inputs)


def _tap_segment(
    graph: fx.GraphModule,
    node: fx.Node,
    ticket: fx.Node,
    targets: Mapping[Any, Target],
    plan: GraphPlan,
    *,
    inputs: Mapping[fx.Node, int],
) -> None:
    """Put taps into the subgraph that an activation checkpoint runs, and pass it the ticket."""
    body: Any = node.args[0]
    segment = getattr(graph, body.target)
    pairs = zip(_inputs(segment), node.args[1:], strict=True)
    within = {inner: inputs[outer] for inner, outer in pairs if isinstance(outer, fx.Node) and outer in inputs}
    _tap_graph(segment, _with_ticket(segment), targets, plan, inputs=within)
    node.args = (*node.args, ticket)
    segment.recompile()


def _span(nodes: Sequence[fx.Node], mark: fx.Node) -> Sequence[fx.Node]:
    """The nodes of a call after its first mark, up to and including the mark of its result; none if that is missing."""
    rest = itertools.islice(nodes, nodes.index(mark) + 1, None)
    span = list(itertools.takewhile(lambda node: node.target is not mark_call, rest))
    ends = [index for index, node in enumerate(span) if node.target is mark_result and node.args[0] == mark.args[0]]
    return span[: ends[0] + 1] if ends else ()


def _tap_call(
    graph: fx.Graph,
    node: fx.Node,
    ticket: fx.Node,
    target: Target,
    plan: GraphPlan,
    *,
    inputs: Mapping[fx.Node, int],
    span: Sequence[fx.Node] = (),
) -> None:
    """Tap a call: the node itself, or, if it is a mark, the nodes of the span, whose last one is the second mark."""
    role, ports, element = target
    arguments: Any = node.args[1:] if span else (node.args, node.kwargs)
    args, kwargs = arguments
    values = [(argument, argument.find(args, kwargs)) for argument in ports.arguments]
    named = {port.name: value for argument, value in values for port in argument.ports}
    owner, rows = None, None
    if role.owner:
        weight = named[role.owner]
        owner, rows = _owner(_origin(weight) if role.is_grouped else weight, inputs)
    if role.owner and owner is None:
        return  # its weight is computed and not a parameter
    call = GraphCall(
        role=role,
        ports=ports,
        path=_path(node),
        owner=owner,
        rows=rows,
        arguments=fx.node.map_aggregate(arguments, _described),
        has_bias=named.get("bias", ...) is not None,
    )
    plan.calls.append(call)
    shared = {value for _, value in values if [other for _, other in values].count(value) > 1}
    for argument, value in reversed(values):
        if isinstance(value, fx.Node):
            alias = _tap_operand(
                graph, node, ticket, call, argument=argument, value=value, inputs=inputs, is_shared=value in shared
            )
            for user in span or (node,):
                user.replace_input_with(value, alias)
    output: Any = span[-1].args[1] if span else node
    site = _site(call, output, (ports.output,))
    if element is not None and not span:
        with graph.inserting_after(node):
            output = graph.call_function(_element, (node, element))
    with graph.inserting_after(output):
        graph.call_function(_tap_result, (output, ticket, site.number))
    call.sites.reverse()


def _tap_layer(
    graph: fx.Graph, node: fx.Node, ticket: fx.Node, plan: GraphPlan, *, inputs: Mapping[fx.Node, int]
) -> None:
    """Replace the mark of a layer by a tap."""
    value: Any
    value, is_first = node.args
    path, dtype = _path(node), getattr(value.meta.get("example_value"), "dtype", torch.float32)
    used = ((index, _path(user)) for node_of_input, index in inputs.items() for user in node_of_input.users)
    call = GraphCall(
        role=None,
        ports=LAYER_PORTS,
        path=path,
        owner=None,
        rows=None,
        within=tuple((index, inner) for index, inner in used if f"{inner}.".startswith(f"{path}.")),
        arguments=((), {}),
        is_first=bool(is_first),
        dtype=dtype,
    )
    plan.calls.append(call)
    site = _site(call, value, (LAYER_PORTS.output,))
    with graph.inserting_before(node):
        graph.call_function(_tap_result, (value, ticket, site.number))
    graph.erase_node(node)


def _tap_operand(
    graph: fx.Graph,
    node: fx.Node,
    ticket: fx.Node,
    call: GraphCall,
    *,
    argument: Argument,
    value: fx.Node,
    inputs: Mapping[fx.Node, int],
    is_shared: bool,
) -> fx.Node:
    """Put a tap before the node. The result is the node that replaces the operand."""
    is_parameter = value in inputs and not any(port.value.has_samples for port in argument.ports)
    if is_parameter:
        call.parameters.update({port.name: inputs[value] for port in argument.ports})
    site = _site(call, value, argument.ports, is_parameter=is_parameter)
    with graph.inserting_before(node):
        alias = graph.call_function(_tap_operand_value, (value, ticket, site.number, is_shared))
    alias.meta = {name: value.meta[name] for name in ("example_value",) if name in value.meta}
    return alias


def _described(argument: Any) -> Any:
    """The argument of a node, or the class name of a tensor, or None for another computed value."""
    if not isinstance(argument, fx.Node):
        return argument
    return torch.Tensor.__name__ if isinstance(argument.meta.get("example_value"), torch.Tensor) else None


def _site(call: GraphCall, value: fx.Node, ports: tuple[Port, ...], *, is_parameter: bool = False) -> GraphSite:
    needs_gradient = getattr(value.meta.get("example_value"), "requires_grad", False)
    site = GraphSite(
        number=next(_numbers), call=call, ports=ports, is_parameter=is_parameter, has_gradient=needs_gradient
    )
    SITES[site.number] = site
    call.sites.append(site)
    return site


def _owner(weight: Any, inputs: Mapping[fx.Node, int]) -> tuple[int | None, tuple[int, int | None] | None]:
    """The index of the graph input that is, or contains, a weight, and the rows of the input if it is a part."""
    if weight in inputs or not isinstance(weight, fx.Node):
        return inputs.get(weight), None
    part = weight.meta.get("example_value")
    base = part._base if isinstance(part, torch.Tensor) else None  # noqa: SLF001  (torch has no public name for it)
    if part is None or base is None:
        return None, None
    index = next((index for node, index in inputs.items() if node.meta.get("example_value") is base), None)
    rows = None if index is None else rows_of(part, base)
    return (None, None) if rows is None else (index, rows)


_SAME_VALUES = frozenset({"transpose", "permute", "to", "bfloat16", "half", "float", "mT", "t"})
"""Functions and methods whose result has the values of the tensor, in another order or dtype."""


def _origin(weight: Any) -> Any:
    """The node of the weight before it was transposed or cast."""
    node = weight
    while isinstance(node, fx.Node) and node.args and _name_of(node) in _SAME_VALUES:
        node = node.args[0]
    return node


def _name_of(node: fx.Node) -> str:
    is_attribute = node.op == "call_function" and node.target is getattr
    name = node.args[1] if is_attribute else getattr(node.target, "__name__", node.target)
    return str(name)


def _path(node: fx.Node) -> str:
    """The path, in the graph, of the module that a node belongs to; empty for the outermost module."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return str(paths[-1]) if paths else ""


# The graph calls the functions below, and AOTAutograd traces through them.


def _element(result: Sequence[Any], index: int) -> Any:
    return result[index]


def _tap_operand_value(value: torch.Tensor, ticket: torch.Tensor, number: int, is_shared: bool) -> torch.Tensor:  # noqa: FBT001
    """The tensor that replaces the operand: an alias if its gradient is recorded, otherwise the operand itself."""
    site = SITES[number]
    if value.is_floating_point():
        kind = value.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        # The first operand is tapped last, so its dtype remains.
        site.call.dtype = torch.get_autocast_dtype(kind) if is_cast else value.dtype
    site.has_gradient = value.requires_grad and torch.is_grad_enabled() and not is_shared
    if not site.has_gradient:
        _tap_value(value, ticket, site)
        return value
    alias = value.view_as(value)
    _tap_value(alias, ticket, site)
    _tap_gradient(alias, ticket, site)
    return alias


@has_side_effect
def _tap_result(value: torch.Tensor, ticket: torch.Tensor, number: int) -> None:
    site = SITES[number]
    _tap_value(value, ticket, site)
    site.has_gradient = value.requires_grad and torch.is_grad_enabled()
    if site.has_gradient:
        _tap_gradient(value, ticket, site)


def _tap_value(value: torch.Tensor, ticket: torch.Tensor, site: GraphSite) -> None:
    if not site.is_parameter:
        site.placement = _placement(value)
        tap_operator()(_local(value), ticket, site.number)


def _tap_gradient(value: torch.Tensor, ticket: torch.Tensor, site: GraphSite) -> None:
    def hook(grad: torch.Tensor) -> None:
        site.grad_placement = _placement(grad)
        tap_operator()(_local(grad), ticket, site.number + 1)

    value.register_hook(Hook(hook))


def _local(value: Any) -> torch.Tensor:
    """The tensor itself, or this rank's shard if it is a DTensor."""
    return value._local_tensor if is_dtensor(value) else value  # noqa: SLF001


def _placement(value: torch.Tensor) -> str | None:
    if not is_dtensor(value):
        return None
    with _disable_current_modes():  # the coordinates in the mesh are real tensors, not fake ones
        shard = shard_of(value)
    return None if shard is None else shard.text
