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
from ranktape.capture.hooks.ports import ports_of
from ranktape.capture.passes.circumstances import in_backward, is_traced
from ranktape.capture.roles.known import MULTIHEAD
from ranktape.capture.source import Source

if TYPE_CHECKING:
    from ranktape.capture.hooks.ports import Port
    from ranktape.capture.hooks.weights import Owner

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

    def names_of(self, owner: Owner) -> tuple[str, ...]:
        """What the product with that parameter is to the attention that is running: what it gives, or `output`."""
        entries = self._running.entries
        entry = entries[-1] if entries else None
        if entry is None or entry.layer_type != _KIND or entry.call is None:
            return ()
        module: Any = entry.owner
        if owner.frame.module is module.out_proj:
            return ("output",)
        if owner.frame.module is not entry.owner:
            return ()
        if owner.attribute in _SEPARATE:
            return (_SEPARATE[owner.attribute],)
        first = (owner.first or 0) // module.embed_dim
        last = len(_NAMES) if owner.last is None else owner.last // module.embed_dim
        return _NAMES[first:last]

    def record(self, names: tuple[str, ...], *, given: torch.Tensor, output: torch.Tensor) -> None:
        """Record what a product is to the attention: what was given to it, or what it gives."""
        entry = self._running.entries[-1]
        taking, module = self._takings[entry.owner], entry.owner
        with self._recorder.guarded(taking.source):
            if names == ("output",):
                num_tokens = given.shape[0] // max(entry.batch_size, 1)
                part = functools.partial(_heads, lead=(num_tokens, entry.batch_size), heads=module.num_heads)
                self._take(entry, taking, taking.ports.output, given, part)
                return
            entry.batch_size = output.shape[1]
            ports = {argument.ports[0].name: argument.ports[0] for argument in taking.ports.arguments}
            for place, name in enumerate(names):
                part = functools.partial(
                    _slice, place=place, count=len(names), shape=tuple(output.shape), heads=module.num_heads
                )
                rows = None if name == "query" else _appended(module, name, batch_size=entry.batch_size)
                self._take(entry, taking, ports[name], output, part, rows=rows)

    def _take(
        self,
        entry: RunningRole,
        taking: Taking,
        port: Port,
        tensor: torch.Tensor,
        part: Callable[[torch.Tensor], torch.Tensor],
        *,
        rows: list[torch.Tensor] | None = None,
    ) -> None:
        call = entry.call
        assert call is not None, "only asked for in a call"
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
            entry = RunningRole(_KIND, module, call=self._recorder.begin_call(taking.source, query))
            self._running.entries.append(entry)

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not is_traced():
            self._running.leave(module)


_KIND = "multihead attention"
"""What is running; no kind of layer, so that the products inside of it are recorded."""


_APPENDED = "a row is appended to it (add_bias_kv, add_zero_attn), which no product gave"
"""Why the gradients of some keys and values are not recorded."""


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
