"""Puts taps into the graph that dynamo has made of a model, around each function that has a role.

Taps are functions that the graph calls; the next part of the compiler traces through them, tensor hooks and all. So
gradients are seen as they are in eager code: that of an operand on an alias of it, that of the result on itself.
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

from ranktape.capture.compiled.function_marks import mark_call, mark_result
from ranktape.capture.compiled.layer_marks import mark_layer
from ranktape.capture.compiled.operator import tap_operator
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.hooks.layers import LAYER_PORTS
from ranktape.capture.hooks.weights import rows_of
from ranktape.capture.roles.table import Argument, FunctionRole, Port, Ports
from ranktape.capture.tensors.placement import is_dtensor, shard_of


@dataclass(slots=True, kw_only=True, eq=False)
class GraphSite:
    """One tensor of a call, and its gradient."""

    number: int
    """Of the tensor; that of its gradient is the next."""
    call: GraphCall
    """The call."""
    ports: tuple[Port, ...]
    """What it is recorded as."""
    is_parameter: bool
    """Whether the tensor is an input of the graph that may be a parameter."""
    has_gradient: bool = False
    """Whether its gradient will come."""
    placement: str | None = None
    """Where in a whole it lies, of a shard that says so itself."""
    grad_placement: str | None = None
    """The same of its gradient."""


@dataclass(slots=True, kw_only=True, eq=False)
class GraphCall:
    """A call of a function with a role in a graph, or of a layer, of which only what it gives or is given is seen."""

    role: FunctionRole | None
    """Its role; None of a layer."""
    ports: Ports
    """Its tensors."""
    path: str
    """The module that calls it, as the graph names it."""
    owner: int | None
    """Which input of the graph is the operand that names it, or has it as a part; None where none is."""
    rows: tuple[int, int | None] | None
    """Of a part: its first row and the one after it, or the only one and None; None for the whole input."""
    given: tuple[tuple[Any, ...], dict[str, Any]]
    """Its arguments; of a tensor its class."""
    parameters: dict[str, int] = field(default_factory=dict)
    """By the names of ports: which inputs of the graph they are."""
    sites: list[GraphSite] = field(default_factory=list)
    """Its tensors, operands first."""
    dtype: torch.dtype = torch.float32
    """What it computes in."""
    within: tuple[tuple[int, str], ...] = ()
    """Of a layer: inputs of the graph that are used in it, and the modules that use them, as the graph names them."""
    is_first: bool = False
    """Of a layer: whether this is what the first one is given."""
    has_bias: bool = True
    """Whether it is given a bias, if it could be."""


@dataclass(slots=True, kw_only=True, eq=False)
class GraphPlan:
    """What is recorded of a graph."""

    calls: list[GraphCall]
    """In the order in which they run."""
    missing: dict[int, str] = field(default_factory=dict)
    """The sites that are not recorded, by number, with the reasons."""

    def give_up(self, reason: str) -> None:
        """Nothing of the graph is recorded but the parameters that it is given."""
        for call in self.calls:
            for site in call.sites:
                if not site.is_parameter:
                    self.missing[site.number] = reason
                if site.has_gradient:
                    self.missing[site.number + 1] = reason


Target = tuple[FunctionRole, Ports, int | None]
"""Of a function in a graph: its role, its tensors, and which element of its result is the output."""

SITES: dict[int, GraphSite] = {}
"""All sites of graphs that were compiled, by number."""

_numbers = itertools.count(2, 2)


def put_taps_around(graph: fx.GraphModule, targets: Mapping[Any, Target], plan: GraphPlan) -> fx.GraphModule:
    """A copy of the graph with taps, and one input more, the ticket; what they record is added to the plan."""
    copy = _copied(graph)
    ticket = _with_ticket(copy)
    _tap_graph(copy, ticket, targets, plan, inputs={node: at for at, node in enumerate(_inputs(copy))})
    copy.recompile()
    return copy


def erase_marks(graph: fx.GraphModule) -> None:
    """Take all marks out of a graph, and of those within it."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for mark in (mark_layer, mark_call, mark_result):
                for node in module.graph.find_nodes(op="call_function", target=mark):
                    module.graph.erase_node(node)
            module.recompile()


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    new = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    new.output(new.graph_copy(graph.graph, nodes))
    for old, node in nodes.items():
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source  # noqa: SLF001  (what AOT asks for)
    copy = fx.GraphModule(graph, new)
    copy.meta = dict(graph.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(graph, name):
            setattr(copy, name, getattr(graph, name))
    for node in new.find_nodes(op="get_attr"):
        inner = getattr(copy, node.target, None)
        if isinstance(inner, fx.GraphModule):
            setattr(copy, node.target, _copied(inner))
    return copy


def _inputs(graph: fx.GraphModule) -> Sequence[fx.Node]:
    return graph.graph.find_nodes(op="placeholder")


def _with_ticket(graph: fx.GraphModule) -> fx.Node:
    inputs = _inputs(graph)
    position = graph.graph.inserting_after(inputs[-1]) if inputs else graph.graph.inserting_before(None)
    with position:
        ticket = graph.graph.placeholder("ranktape_ticket")
    ticket.meta["example_value"] = torch.tensor(0)
    ticket._dynamo_source = None  # noqa: SLF001  (of no variable of the program)
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
    """Of a checkpoint: what it runs is a graph of its own, which is given the ticket, too."""
    body: Any = node.args[0]
    segment = getattr(graph, body.target)
    pairs = zip(_inputs(segment), node.args[1:], strict=True)
    within = {inner: inputs[outer] for inner, outer in pairs if isinstance(outer, fx.Node) and outer in inputs}
    _tap_graph(segment, _with_ticket(segment), targets, plan, inputs=within)
    node.args = (*node.args, ticket)
    segment.recompile()


def _span(nodes: Sequence[fx.Node], mark: fx.Node) -> Sequence[fx.Node]:
    """The nodes of a call that begins at a mark, with the mark at its end; none where the graph ends before."""
    rest = itertools.islice(nodes, nodes.index(mark) + 1, None)
    span = list(itertools.takewhile(lambda node: node.target is not mark_call, rest))
    ends = [at for at, node in enumerate(span) if node.target is mark_result and node.args[0] == mark.args[0]]
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
    """Of one node, or of what lies between a mark, the node, and another one, which is the last of the span."""
    role, ports, element = target
    given: Any = node.args[1:] if span else (node.args, node.kwargs)
    args, kwargs = given
    values = [(argument, argument.find(args, kwargs)) for argument in ports.arguments]
    named = {port.name: value for argument, value in values for port in argument.ports}
    owner, rows = None, None
    if role.owner:
        weight = named[role.owner]
        owner, rows = _owner(_origin(weight) if role.is_grouped else weight, inputs)
    if role.owner and owner is None:
        return  # its weight is computed, and no parameter
    call = GraphCall(
        role=role,
        ports=ports,
        path=_path(node),
        owner=owner,
        rows=rows,
        given=fx.node.map_aggregate(given, _said),
        has_bias=named.get("bias", ...) is not None,
    )
    plan.calls.append(call)
    shared = {value for _, value in values if [one for _, one in values].count(value) > 1}
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
    """In the place of a mark."""
    value: Any
    value, is_first = node.args
    path, dtype = _path(node), getattr(value.meta.get("example_value"), "dtype", torch.float32)
    used = ((at, _path(user)) for one, at in inputs.items() for user in one.users)
    call = GraphCall(
        role=None,
        ports=LAYER_PORTS,
        path=path,
        owner=None,
        rows=None,
        within=tuple((at, inner) for at, inner in used if f"{inner}.".startswith(f"{path}.")),
        given=((), {}),
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
    """An alias of an operand, with taps."""
    is_parameter = value in inputs and not any(port.value.has_samples for port in argument.ports)
    if is_parameter:
        call.parameters.update({port.name: inputs[value] for port in argument.ports})
    site = _site(call, value, argument.ports, is_parameter=is_parameter)
    with graph.inserting_before(node):
        alias = graph.call_function(_tap_operand_value, (value, ticket, site.number, is_shared))
    alias.meta = {name: value.meta[name] for name in ("example_value",) if name in value.meta}
    return alias


def _said(given: Any) -> Any:
    """What is said of an argument of a node."""
    if not isinstance(given, fx.Node):
        return given
    return torch.Tensor.__name__ if isinstance(given.meta.get("example_value"), torch.Tensor) else None


def _site(call: GraphCall, value: fx.Node, ports: tuple[Port, ...], *, is_parameter: bool = False) -> GraphSite:
    needs_gradient = getattr(value.meta.get("example_value"), "requires_grad", False)
    site = GraphSite(
        number=next(_numbers), call=call, ports=ports, is_parameter=is_parameter, has_gradient=needs_gradient
    )
    SITES[site.number] = site
    call.sites.append(site)
    return site


def _owner(weight: Any, inputs: Mapping[fx.Node, int]) -> tuple[int | None, tuple[int, int | None] | None]:
    """Which input of a graph a weight is, or is some rows of; and which rows."""
    if weight in inputs or not isinstance(weight, fx.Node):
        return inputs.get(weight), None
    part = weight.meta.get("example_value")
    base = part._base if isinstance(part, torch.Tensor) else None  # noqa: SLF001  (torch has no public name for it)
    at = next((at for node, at in inputs.items() if base is not None and node.meta.get("example_value") is base), None)
    rows = None if base is None or at is None else rows_of(weight.meta["example_value"], base)
    return (None, None) if rows is None else (at, rows)


_SAME_VALUES = frozenset({"transpose", "permute", "to", "bfloat16", "half", "float", "mT", "t"})
"""What is called of a tensor that has the same values then, in another order or dtype."""


def _origin(weight: Any) -> Any:
    """What a weight is, transposed or in another dtype."""
    node = weight
    while isinstance(node, fx.Node) and node.args and _name_of(node) in _SAME_VALUES:
        node = node.args[0]
    return node


def _name_of(node: fx.Node) -> str:
    is_attribute = node.op == "call_function" and node.target is getattr
    name = node.args[1] if is_attribute else getattr(node.target, "__name__", node.target)
    return str(name)


def _path(node: fx.Node) -> str:
    """The module that runs where a node is, as the graph calls it; empty for the outermost."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return str(paths[-1]) if paths else ""


# What follows is called by the graph, and traced by the next part of the compiler.


def _element(given: Sequence[Any], at: int) -> Any:
    return given[at]


def _tap_operand_value(value: torch.Tensor, ticket: torch.Tensor, number: int, is_shared: bool) -> torch.Tensor:  # noqa: FBT001
    """The operand to go on with: an alias, where its gradient is recorded."""
    site = SITES[number]
    if value.is_floating_point():
        kind = value.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        # The first operand comes last.
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
    """The tensor itself, or this rank's shard."""
    return value._local_tensor if is_dtensor(value) else value  # noqa: SLF001


def _placement(value: torch.Tensor) -> str | None:
    if not is_dtensor(value):
        return None
    with _disable_current_modes():  # the coordinates of its mesh are real
        shard = shard_of(value)
    return None if shard is None else shard.text
