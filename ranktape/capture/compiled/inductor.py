"""Compiles a graph with taps by inductor so that its results have the same bits as without taps.

An additional reader of a value changes how inductor fuses, saves and merges operations, and so changes bits. Therefore
taps are hidden from the passes of inductor and from its code generation:

    joint graph      taps are removed and remembered, so the graph is the same as without a capture
    partition        taps are put into the forward and the backward graph, where compiled autograd preserves them
    either graph     taps are removed again, and put back at the end, after the last pass, without uses of values

If a pass has replaced a value, for example a product that it merged with a sum, or if the value exists only within a
fused operation, it is computed again for the tap alone, rounded to its dtype as in eager code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch import config as aot_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_custom_graph_passes,
    get_hash_for_files,
)
from torch._inductor.fx_passes.reinplace import inplaceable_ops
from torch._inductor.lowering import fallback_handler
from torch._inductor.virtualized import V
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from ranktape.capture.compiled.operator import is_of_gradient, tap_operator


class Tap(NamedTuple):
    """One tap of a graph."""

    value: str
    """Name of the node whose value is recorded."""
    ticket: str
    """Name of the node of the ticket."""
    site: int
    """Number of the site."""


class Origin(NamedTuple):
    """The operation and the arguments that compute a node."""

    target: Callable[..., Any]
    """The operation."""
    args: Any
    """The positional arguments."""
    kwargs: Any
    """The keyword arguments."""
    value: Any
    """The result as a fake tensor."""


Origins = Mapping[str, Origin]
"""The origin of each node, by name."""


class TapError(Exception):
    """A tap that cannot be put into a graph."""


def compile_tapped(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    patches: Mapping[str, Any],
    name: str | None,
) -> Callable[..., Any]:
    """Compile a graph with taps by inductor, with its configuration changed by `patches`, such as those of a mode.

    Raises:
        TapError: a tap cannot be put into the graph.
    """
    taps = _RemovedTaps()

    def inner_compile(module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with (
            config.patch(dict(patches)),
            config.patch(post_grad_custom_post_pass=_with_taps(module.graph, taps)),
        ):
            return compile_fx_inner(module, example_inputs, **kwargs)

    with config.patch(dict(patches)), aot_config.patch(enable_autograd_cache=False):
        before = get_custom_graph_passes(config.joint_custom_pre_pass)
        partitioner = _Partitioner(taps, config.custom_partitioner_fn or min_cut_rematerialization_partition)
        with config.patch(joint_custom_pre_pass=(_RemoveTaps(taps), *before), custom_partitioner_fn=partitioner):
            compiled: Any = compile_fx(graph, inputs, inner_compile=inner_compile, compile_region_name=name)
            return compiled  # type: ignore[no-any-return]  # torch's type names what it never gives here, too


@dataclass(slots=True)
class _RemovedTaps:
    """The taps of a graph while they are removed from it."""

    removed: list[Tap] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    def __deepcopy__(self, _: Any) -> _RemovedTaps:
        """The object itself, because inductor copies its configuration deeply."""
        return self


def _with_taps(graph: fx.Graph, removed_taps: _RemovedTaps) -> tuple[Any, ...]:
    """The last passes of inductor, followed by the one that puts taps back. Removes the taps from the graph.

    If there is no backward graph, they have been removed before.
    """
    removed, origins = remove_taps(graph) if _has_taps(graph) else (removed_taps.removed, _origins_of(graph))
    restore = _RestoreTaps(_RemovedTaps(removed, {**removed_taps.origins, **origins}))
    return (*get_custom_graph_passes(config.post_grad_custom_post_pass), restore)


def remove_taps(graph: fx.Graph) -> tuple[list[Tap], dict[str, Origin]]:
    """Remove all taps and the aliases made for them. Returns the removed taps and the origins of all nodes."""
    nodes = graph.find_nodes(op="call_function", target=tap_operator())
    removed = []
    for node in nodes:
        value, ticket, site = node.args
        graph.erase_node(node)
        removed.append((value, ticket, site))
    aliases = {value for value, _, _ in removed if _is_alias(value)}
    aliases |= {user for value, _, _ in removed for user in value.users if _is_alias(user)}
    inner = {alias: _unaliased(alias, aliases) for alias in aliases}
    for alias, value in inner.items():
        alias.replace_all_uses_with(value)
    taps = [Tap(inner.get(value, value).name, ticket.name, site) for value, ticket, site in removed]
    for alias in sorted(aliases, reverse=True):
        graph.erase_node(alias)
    origins = _origins_of(graph)
    for value in dict.fromkeys(inner.get(value, value) for value, _, _ in removed):
        _erase_unused(graph, value)
    return taps, origins


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Remove nodes that only a tap used, because as users of their operands they would prevent merges."""
    # torch warns if a node is erased twice, and has no public way to ask.
    if node._erased or node.op != "call_function" or node.users or node.is_impure():  # noqa: SLF001
        return
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        _erase_unused(graph, operand)


def add_taps_at_end(graph: fx.Graph, taps: Sequence[Tap], origins: Origins) -> None:
    """Put taps into a graph just before code generation.

    If taps used their values, these would be stored and fused differently. Therefore taps are at the end of the graph
    and refer to values by name. If the memory of a value is changed in place, its tap precedes the change. If a later
    pass may change it in place, the tap uses the value, which prevents that.
    """
    for tap in taps:
        value = _find(graph, tap.value, origins)
        ticket = next(node for node in graph.nodes if node.name == tap.ticket)
        uses = [use for use in _uses_of_memory(value) if isinstance(use.target, torch._ops.OperatorBase)]  # noqa: SLF001
        overloads = [(use, use.target) for use in uses if isinstance(use.target, torch._ops.OpOverload)]  # noqa: SLF001
        changes = [use for use, target in overloads if target._schema.is_mutable and use > value]  # noqa: SLF001
        with graph.inserting_before(min([*changes, graph.output_node()])):
            is_used = not value.users or any(map(_may_change_in_place, uses))
            graph.call_function(_tap_at_end, (value if is_used else value.name, ticket, tap.site)).meta["val"] = None
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(_keep_values, ()).meta["val"] = None


def _uses_of_memory(node: fx.Node) -> set[fx.Node]:
    """The users of a node and of all nodes that share its memory."""
    while _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    known, pending = set[fx.Node](), [node]
    while pending:
        users = set(pending.pop().users) - known
        known |= users
        pending += filter(_is_view, users)
    return known


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in _views() or getattr(node.target, "is_view", False))


def _may_change_in_place(node: fx.Node) -> bool:
    """Whether a later pass may have the node write to an operand in place."""
    return node.target in inplaceable_ops or not isinstance(node.target, torch._ops.OpOverload)  # noqa: SLF001


@has_side_effect
def _keep_values() -> None:
    """Have code generation keep all values until it finishes."""
    V.graph.garbage_collect_values = False


@has_side_effect
def _tap_at_end(value: Any, ticket: Any, site: int) -> None:
    """Generate code for the tap of a value, which may be given by name."""
    if isinstance(value, str):
        value = next(known for node, known in V.graph.env.items() if node.name == value)
    fallback_handler(tap_operator(), add_to_fallback_set=False)(value, ticket, site)


for _lowering in (_keep_values, _tap_at_end):
    vars(_lowering)["_inductor_lowering_function"] = True  # inductor calls such functions to generate code


def restore_taps(graph: fx.Graph, taps: Sequence[Tap], origins: Origins) -> None:
    """Put taps into a graph. A value that the graph no longer computes is computed again."""
    for tap in taps:
        value = _find(graph, tap.value, origins)
        ticket = next(node for node in graph.nodes if node.name == tap.ticket)
        with graph.inserting_after(_last_of(graph, value, ticket)):
            graph.call_function(tap_operator(), (value, ticket, tap.site)).meta["val"] = None


def _has_taps(graph: fx.Graph) -> bool:
    return bool(graph.find_nodes(op="call_function", target=tap_operator()))


class _NodeName(str):
    """The name of a node in the arguments of an origin."""

    __slots__ = ()


def _origins_of(graph: fx.Graph) -> dict[str, Origin]:
    def named(argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda node: _NodeName(node.name))

    return {
        node.name: Origin(node.target, named(node.args), named(node.kwargs), node.meta.get("val"))
        for node in graph.nodes
        if node.op == "call_function"
    }


def _find(graph: fx.Graph, name: str, origins: Origins) -> Any:
    """The node with a name. If it is gone, it is created again from its origin.

    Raises:
        TapError: it cannot be created again.
    """
    origin = origins.get(name)
    for node in graph.nodes:
        if node.name == name and (origin is None or node.op == "placeholder" or node.target is origin.target):
            return node
    if origin is None:
        raise TapError(f"the compiler has left {name} out of the graph")
    if torch.Tag.nondeterministic_seeded in getattr(origin.target, "tags", ()):
        raise TapError(f"the compiler has replaced {name}, which is of random numbers")

    def resolve(argument: Any) -> Any:
        return _find(graph, argument, origins) if isinstance(argument, _NodeName) else argument

    args = fx.node.map_aggregate(origin.args, resolve)
    kwargs = fx.node.map_aggregate(origin.kwargs, resolve)
    operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Node)]
    with graph.inserting_after(_last_of(graph, *operands)):
        created = graph.call_function(origin.target, args, kwargs)
    created.meta["val"] = origin.value
    return created


def _last_of(graph: fx.Graph, *nodes: fx.Node) -> Any:
    """The last one of these nodes and the inputs of the graph, in the order of the graph."""
    *_, last_input = graph.find_nodes(op="placeholder")
    return max((*nodes, last_input))


def _is_alias(node: Any) -> bool:
    """Whether a node is a view of its first argument with the same shape and dtype."""
    if not (isinstance(node, fx.Node) and node.op == "call_function" and node.target in _views()):
        return False
    source = node.args[0]
    before, after = getattr(source, "meta", {}).get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return tuple(before.shape) == tuple(after.shape) and before.dtype == after.dtype


@functools.cache
def _views() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset({aten.view.default, aten.alias.default, aten._unsafe_view.default, aten.reshape.default})  # noqa: SLF001


def _unaliased(node: fx.Node, aliases: set[fx.Node]) -> fx.Node:
    while node in aliases:
        node = node.args[0]  # type: ignore[assignment]  # what is an alias is one of a node
    return node


def _carry_ticket(joint: fx.Graph, removed: Sequence[Tap]) -> None:
    """Pass the ticket to the backward graph, as the last output instead of its own gradient, which is None."""
    if not any(node.name.startswith("tangents") for node in joint.find_nodes(op="placeholder")):
        return
    output = joint.output_node()
    leaves, spec = pytree.tree_flatten(output.args)
    ticket = next(node for node in joint.nodes if node.name == removed[0].ticket)
    if leaves[-1] is not None:
        raise TapError("the ticket is not the last input of the graph")
    leaves[-1] = ticket
    output.args = pytree.tree_unflatten(leaves, spec)


class _RemoveTaps(CustomGraphPass):
    """Removes the taps from a joint graph, or from a forward graph without a backward graph."""

    def __init__(self, taps: _RemovedTaps) -> None:
        self._taps = taps

    def __call__(self, graph: fx.Graph) -> None:
        """Remove the taps in place."""
        if _has_taps(graph):
            self._taps.removed, self._taps.origins = remove_taps(graph)
            _carry_ticket(graph, self._taps.removed)

    def uuid(self) -> Any:
        """The identity of the pass in the caches of inductor."""
        return "ranktape"


class _RestoreTaps(CustomGraphPass):
    """Puts the taps back before code generation."""

    def __init__(self, taps: _RemovedTaps) -> None:
        self._taps = taps

    def __call__(self, graph: fx.Graph) -> None:
        """Put the taps back in place. Subgraphs, such as the mask of an attention, have no ticket and get no taps."""
        inputs = {node.name for node in graph.find_nodes(op="placeholder")}
        if any(tap.ticket in inputs for tap in self._taps.removed):
            add_taps_at_end(graph, self._taps.removed, self._taps.origins)

    def uuid(self) -> Any:
        """The identity of the pass in the caches of inductor, which depends on the taps."""
        items = self._taps.origins.items()
        origins = [(name, str(origin.target), origin.args, origin.kwargs) for name, origin in items]
        return get_hash_for_files((__file__,), str((self._taps.removed, origins)))


class _Partitioner(CustomPartitionerFn):
    """Partitions a joint graph as without a capture, then puts the taps into the two graphs."""

    def __init__(self, taps: _RemovedTaps, partition: Callable[..., Any]) -> None:
        self._taps = taps
        self._partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """The forward graph and the backward graph."""
        origins = {**self._taps.origins, **_origins_of(gm.graph)}
        forward, backward = self._partition(gm, joint_inputs, **kwargs)
        removed, self._taps.removed = self._taps.removed, []
        if removed:
            restore_taps(forward.graph, [tap for tap in removed if not is_of_gradient(tap.site)], origins)
            restore_taps(backward.graph, _gradient_taps(backward.graph, removed), origins)
        return forward, backward

    def uuid(self) -> Any:
        """The identity of the partitioner in the caches of inductor."""
        return "ranktape"

    def __reduce__(self) -> Any:
        """Pickle as the name, because inductor pickles its configuration, and the taps have fake tensors."""
        return str, (self.uuid(),)


def _gradient_taps(backward: fx.Graph, removed: Sequence[Tap]) -> list[Tap]:
    """The taps of gradients, with the ticket's node in the backward graph. Resets the ticket's gradient to None."""
    output = backward.output_node()
    leaves, spec = pytree.tree_flatten(output.args)
    ticket, leaves[-1] = leaves[-1], None
    output.args = pytree.tree_unflatten(leaves, spec)
    return [tap._replace(ticket=ticket.name) for tap in removed if is_of_gradient(tap.site)]
