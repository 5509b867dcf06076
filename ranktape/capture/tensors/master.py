"""Records the weights that the optimizer updates, and the gradients that it receives.

These often differ from the weights of the forward pass: under FSDP2 each rank updates its shard, and mixed-precision
optimizers update a float32 copy. The gradient is the mean over ranks and passes, unscaled and clipped. Both are
recorded just before the first optimizer step of an iteration, while the weights are still those of the forward pass.
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
    """The roles of the optimizer's copy of a parameter with that name, and of the gradient that it receives."""
    return (
        TensorRole(Operation.FORWARD, "pre", f"master_{name}", has_samples=False),
        TensorRole(Operation.BACKWARD, "post", f"reduced_grad_{name}", has_samples=False),
    )


SKIPPED = "the gradient scaler skipped the optimizer's step: a gradient was not finite"
"""The reason why these records are missing from an iteration."""

Weights = Iterable[tuple["Source", nn.Module, str, str]]
"""The source, the module, the attribute and the name in records of each weight or bias."""

_ParameterName = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""

_STATES = ("master_param", "master_weight", "master")
"""The names of higher-precision copies in the state of an optimizer."""


class MasterWeights:
    """Records the optimizer's copies of captured weights and their gradients, once in each captured iteration."""

    def __init__(self, recorder: Recorder, *, placements: Placements, weights: Callable[[], Weights]) -> None:
        """Attach to all optimizers of the process. `weights` returns the weights of captured modules."""
        self._recorder = recorder
        self._tracker = recorder.tracker
        self._placements = placements
        self._weights = weights
        self._owner = os.getpid()
        self._recorded_iteration: int | None = None
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def note_skip(self) -> None:
        """Note that the records are missing from the iteration because a gradient scaler skipped the step."""
        if self._iteration_to_record() is None:
            return
        with self._recorder.guarded():
            for source, roles, _, _ in self._parameters():
                for role in roles:
                    self._recorder.refuse(source, role, SKIPPED)

    def stop(self) -> None:
        """Detach from the optimizers."""
        self._handle.remove()

    @untraced
    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Mapping[str, Any]) -> None:
        # A step without a pass initialises the optimizer.
        iteration = self._iteration_to_record() if self._tracker.num_passes else None
        if iteration is None:
            return
        self._recorded_iteration = iteration
        with self._recorder.guarded():
            for source, roles, parameter, parameter_name in self._parameters():
                with self._recorder.guarded(source, roles[0]):
                    self._record(source, roles, parameter, parameter_name, optimizer)

    def _iteration_to_record(self) -> int | None:
        """The captured iteration, if its weights have not been recorded yet."""
        tally = self._recorder.tally
        if tally is None or os.getpid() != self._owner or self._recorded_iteration == tally.iteration:
            return None
        return tally.iteration

    def _parameters(self) -> Iterator[tuple[Source, tuple[TensorRole, TensorRole], nn.Parameter, _ParameterName]]:
        """The existing weights and biases, each with its source, its roles, its module and its attribute."""
        for source, module, attribute, name in self._weights():
            parameter = parameters_of(module).get(attribute)
            if parameter is not None:
                yield source, _roles(name), parameter, (module, attribute)

    def _record(
        self,
        source: Source,
        roles: tuple[TensorRole, TensorRole],
        parameter: nn.Parameter,
        parameter_name: _ParameterName,
        optimizer: Optimizer,
    ) -> None:
        if getattr(parameter, "main_param_sharded", False):
            reason = "Megatron's distributed optimizer holds a flat piece of it, which is no part of a weight"
            for role in roles:
                self._recorder.refuse(source, role, reason)
            return
        master = find_master(parameter, optimizer)
        gradient = find_gradient(parameter, master)
        self._record_tensor(source, roles[0], parameter_name, master)
        if gradient is not None:
            self._record_tensor(source, roles[1], parameter_name, unscaled(gradient, optimizer))

    def _record_tensor(
        self, source: Source, role: TensorRole, parameter_name: _ParameterName, tensor: torch.Tensor
    ) -> None:
        free = self._tracker.free_call(index=0, dtype=tensor.dtype, device_type=tensor.device.type)
        call = dataclasses.replace(free, microbatch=0)
        module, attribute = parameter_name
        placement = None  # a DTensor has its own placement
        if is_megatron(module):
            placement = megatron_placement(module, role.tensor_name, tensor)
        elif not is_dtensor(tensor):  # a replica under DDP
            placement = self._placements.of_weight(module, attribute, tensor)
        self._recorder.record(source, role, tensor, call=call, placement=placement)


def find_master(parameter: nn.Parameter, optimizer: Optimizer) -> torch.Tensor:
    """The tensor that the optimizer updates for a parameter: a higher-precision copy if one is found, else itself."""
    copy = getattr(parameter, "main_param", None)  # Megatron-core's name for it
    if isinstance(copy, torch.Tensor):
        return copy
    state = optimizer.state.get(parameter, {})
    return next((state[name] for name in _STATES if isinstance(state.get(name), torch.Tensor)), parameter)


def unscaled(gradient: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
    """The gradient after unscaling, which fused optimizers do in their kernel."""
    scale = getattr(optimizer, "grad_scale", None)
    if not isinstance(scale, torch.Tensor):
        return gradient
    # In float32, as in the kernel, because float16 cannot represent every scale.
    gradient_float32 = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
    return (gradient_float32 / scale.to(gradient.device, non_blocking=True)).to(gradient.dtype)


def find_gradient(parameter: nn.Parameter, master: torch.Tensor) -> torch.Tensor | None:
    """The gradient that the optimizer receives; None if the parameter has none."""
    candidates = (master.grad, parameter.grad, getattr(parameter, "main_grad", None))
    return next((gradient for gradient in candidates if isinstance(gradient, torch.Tensor)), None)
