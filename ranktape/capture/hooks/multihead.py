"""Sees the attention of `nn.MultiheadAttention` where it is asked for its weights, and calls no function for it.

Its query, key and value are what its input projections give, its output is what enters the output projection. All of
these are bare products with parameters of the module, which `function_hooks.py` sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ranktape.capture.hooks.calls import RunningRole, Taking, Watch, before_views
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.passes.circumstances import in_backward, is_traced
from ranktape.capture.roles.known import MULTIHEAD
from ranktape.capture.roles.table import ports_of
from ranktape.capture.source import Source

if TYPE_CHECKING:
    from ranktape.capture.hooks.weights import Owner
    from ranktape.capture.passes.passes import Call
    from ranktape.capture.roles.table import Port

_NAMES = ("query", "key", "value")
_SEPARATE = {"q_proj_weight": "query", "k_proj_weight": "key", "v_proj_weight": "value"}
_NEED_WEIGHTS = 4
"""Place of `need_weights` among the arguments."""


class MultiheadHooks:
    """The hooks on all modules of that kind for one iteration."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._running = watch.running
        self._recorder = watch.recorder
        self._takings: dict[nn.Module, Taking] = {}

    def attach(self, module: nn.MultiheadAttention, source: Source) -> None:
        """Watch one module."""
        self._takings[module] = Taking(watch=self._watch, source=source, ports=ports_of(MULTIHEAD))
        self._watch.handles += [
            module.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            module.register_forward_hook(Hook(self._after), prepend=True, always_call=True),
        ]

    def see(self, owner: Owner, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Record what the product with a parameter is to the attention that is running, if one is: given or gives."""
        entries = self._running.entries
        entry = entries[-1] if entries else None
        if entry is None or entry.layer_type != _KIND or entry.taking is None or entry.call is None:
            return
        module: Any = entry.owner
        taking, heads, embed_dim = entry.taking, module.num_heads, module.embed_dim
        with self._recorder.guarded(taking.source):
            if owner.frame.module is module.out_proj:
                lead = args[0].shape[0] // max(entry.batch_size, 1), entry.batch_size
                part = functools.partial(_heads, lead=lead, heads=heads)
                self._take(taking, entry.call, taking.ports.output, args[0], part)
            elif owner.frame.module is module:
                entry.batch_size = output.shape[1]
                names = _projections(owner, embed_dim=embed_dim)
                ports = {argument.ports[0].name: argument.ports[0] for argument in taking.ports.arguments}
                for place, name in enumerate(names):
                    part = functools.partial(
                        _slice, place=place, count=len(names), shape=tuple(output.shape), heads=heads
                    )
                    rows = None if name == "query" else _appended(module, name, batch_size=entry.batch_size)
                    self._take(taking, entry.call, ports[name], output, part, rows=rows)

    def _take(
        self,
        taking: Taking,
        call: Call,
        port: Port,
        tensor: torch.Tensor,
        part: Callable[[torch.Tensor], torch.Tensor],
        *,
        rows: list[torch.Tensor] | None = None,
    ) -> None:
        if not in_backward():
            seen = part(tensor)
            taking.record(port, torch.cat([seen.detach(), *(row.to(seen) for row in rows)]) if rows else seen, call)
        if rows and self._recorder.wants(taking.source, port.grad, call):
            self._recorder.refuse(taking.source, port.grad, _APPENDED, call=call)
        elif tensor.requires_grad and self._recorder.wants(taking.source, port.grad, call):
            taking.grad(port, before_views(tensor, given=None), call, part=part)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced():
            return
        asked = args[_NEED_WEIGHTS] if len(args) > _NEED_WEIGHTS else kwargs.get("need_weights", True)
        query = args[0] if args else kwargs.get("query")
        if not asked or not isinstance(query, torch.Tensor) or not self._watch.tracker.is_active:
            return
        taking = self._takings[module]
        if not self._recorder.follows(taking.source, (port.value for port in taking.ports.all)):
            return
        with self._recorder.guarded(taking.source):
            call = self._recorder.begin_call(taking.source, query)
            self._running.entries.append(RunningRole(_KIND, module, taking, call))

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not is_traced():
            self._running.leave(module)


_KIND = "multihead attention"
"""What is running; no kind of layer, so that the products inside of it are recorded."""


_APPENDED = "a row is appended to it (add_bias_kv, add_zero_attn), which no product gave"
"""Why the gradients of some keys and values are not recorded."""


def _projections(owner: Owner, *, embed_dim: int) -> tuple[str, ...]:
    """What the product with a parameter of the attention's module, or with a part of one, gives."""
    if owner.attribute in _SEPARATE:
        return (_SEPARATE[owner.attribute],)
    first = (owner.first or 0) // embed_dim
    last = len(_NAMES) if owner.last is None else owner.last // embed_dim
    return _NAMES[first:last]


def _appended(module: Any, name: str, *, batch_size: int) -> list[torch.Tensor]:
    """What the attention appends to its keys or values, each row as [1, batch, heads, head]."""
    shape = 1, batch_size, module.num_heads, module.head_dim
    bias = {"key": module.bias_k, "value": module.bias_v}[name]
    rows = [] if bias is None else [bias.detach().reshape(1, 1, *shape[2:]).expand(shape)]
    return [*rows, torch.zeros(shape)] if module.add_zero_attn else rows


def _heads(tensor: torch.Tensor, *, lead: tuple[int, int], heads: int) -> torch.Tensor:
    """Joined heads of tokens and samples, [tokens * batch, hidden], as [tokens, batch, heads, head]."""
    return tensor.reshape(*lead, heads, -1)


def _slice(tensor: torch.Tensor, *, place: int, count: int, shape: tuple[int, ...], heads: int) -> torch.Tensor:
    """One of several projections side by side, as [tokens, batch, heads, head]."""
    projected = tensor.reshape(shape).chunk(count, dim=-1)[place]
    return projected.reshape(*projected.shape[:-1], heads, -1)
