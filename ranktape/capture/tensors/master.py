"""Records the weights that the optimizer updates, and the gradients that it gets.

What a module computes with is often not what is trained: under FSDP2 each rank updates its shard of the weight, and
optimizers for mixed precision update a float32 copy. The gradient that they get is the mean over ranks and passes,
unscaled and clipped. Both are seen just before the first optimizer of an iteration steps, so that the weights are still
those that the iteration computed with.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ranktape.capture.source import Source, TensorRole
from ranktape.capture.tensors.placement import Placements, is_dtensor, is_megatron, megatron_placement
from ranktape.capture.torch_private import parameters_of, untraced
from ranktape.storage.format.record_info import Operation

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ranktape.capture.recorder import Recorder


@functools.lru_cache
def _roles(name: str) -> tuple[TensorRole, TensorRole]:
    """What the optimizer updates of a parameter of that name in records, and the gradient that it gets."""
    return (
        TensorRole(Operation.FORWARD, "pre", f"master_{name}", has_samples=False),
        TensorRole(Operation.BACKWARD, "post", f"reduced_grad_{name}", has_samples=False),
    )


SKIPPED = "the gradient scaler skipped the optimizer's step: a gradient was not finite"
"""Why an iteration has no optimizer's view."""

Weights = Iterable[tuple["Source", nn.Module, str, str]]
"""What each weight or bias belongs to, its module, its name there, and its name in records."""

_Place = tuple[nn.Module, str]
"""A module, and its name of a parameter."""

_STATES = ("master_param", "master_weight", "master")
"""Under which names an optimizer's state holds a copy in higher precision."""


class MasterWeights:
    """Records the optimizer's view of the captured weights, once in each captured iteration."""

    def __init__(self, recorder: Recorder, *, placements: Placements, weights: Callable[[], Weights]) -> None:
        """Listen to every optimizer of the process from now on; `weights` gives those whose modules are captured."""
        self._recorder = recorder
        self._tracker = recorder.tracker
        self._placements = placements
        self._weights = weights
        self._owner = os.getpid()
        self._seen_iteration: int | None = None
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def note_skip(self) -> None:
        """Say of the iteration why the optimizer's view is not in it: a gradient scaler has skipped its step."""
        if self._due() is None:
            return
        with self._recorder.guarded():
            for source, roles, _, _ in self._held():
                for role in roles:
                    self._recorder.refuse(source, role, SKIPPED)

    def stop(self) -> None:
        """Listen no more."""
        self._handle.remove()

    @untraced
    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Mapping[str, Any]) -> None:
        # Without a pass it is a step that initialises the optimizer.
        iteration = self._due() if self._tracker.num_passes else None
        if iteration is None:
            return
        self._seen_iteration = iteration
        with self._recorder.guarded():
            for source, roles, parameter, place in self._held():
                with self._recorder.guarded(source, roles[0]):
                    self._record(source, roles, parameter, place, optimizer)

    def _due(self) -> int | None:
        """The iteration that is captured, where its weights were not seen yet."""
        tally = self._recorder.tally
        if tally is None or os.getpid() != self._owner or self._seen_iteration == tally.iteration:
            return None
        return tally.iteration

    def _held(self) -> Iterator[tuple[Source, tuple[TensorRole, TensorRole], nn.Parameter, _Place]]:
        """The weights and biases that there are, with what is recorded of each, and the module and its name of it."""
        for source, module, attribute, name in self._weights():
            parameter = parameters_of(module).get(attribute)
            if parameter is not None:
                yield source, _roles(name), parameter, (module, attribute)

    def _record(
        self,
        source: Source,
        roles: tuple[TensorRole, TensorRole],
        parameter: nn.Parameter,
        place: _Place,
        optimizer: Optimizer,
    ) -> None:
        if getattr(parameter, "main_param_sharded", False):
            reason = "Megatron's distributed optimizer holds a flat piece of it, which is no part of a weight"
            for role in roles:
                self._recorder.refuse(source, role, reason)
            return
        master = find_master(parameter, optimizer)
        gradient = find_gradient(parameter, master)
        self._take(source, roles[0], place, master)
        if gradient is not None:
            self._take(source, roles[1], place, unscaled(gradient, optimizer))

    def _take(self, source: Source, role: TensorRole, place: _Place, tensor: torch.Tensor) -> None:
        free = self._tracker.free_call(index=0, dtype=tensor.dtype, device_type=tensor.device.type)
        call = dataclasses.replace(free, microbatch=0)
        module, attribute = place
        placement = None  # a DTensor knows its own
        if is_megatron(module):
            placement = megatron_placement(module, role.tensor_name, tensor)
        elif not is_dtensor(tensor):  # a replica, where DDP keeps it equal
            placement = self._placements.of_weight(module, attribute, tensor)
        self._recorder.record(source, role, tensor, call=call, placement=placement)


def find_master(parameter: nn.Parameter, optimizer: Optimizer) -> torch.Tensor:
    """What the optimizer updates for that parameter: a copy in higher precision where one is in reach, else itself."""
    copy = getattr(parameter, "main_param", None)  # Megatron-core's name for it
    if isinstance(copy, torch.Tensor):
        return copy
    state = optimizer.state.get(parameter, {})
    return next((state[name] for name in _STATES if isinstance(state.get(name), torch.Tensor)), parameter)


def unscaled(gradient: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
    """The gradient as the optimizer uses it: fused ones divide it by the scale of a gradient scaler in their kernel."""
    scale = getattr(optimizer, "grad_scale", None)
    if not isinstance(scale, torch.Tensor):
        return gradient
    # In float32, as the kernel does: float16 does not hold every scale.
    wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
    return (wide / scale.to(gradient.device, non_blocking=True)).to(gradient.dtype)


def find_gradient(parameter: nn.Parameter, master: torch.Tensor) -> torch.Tensor | None:
    """The gradient that the optimizer gets; None where the parameter got none."""
    found = (master.grad, parameter.grad, getattr(parameter, "main_grad", None))
    return next((gradient for gradient in found if isinstance(gradient, torch.Tensor)), None)
