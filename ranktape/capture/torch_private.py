"""Private names of torch, and names that only some supported versions have, collected in one module.

`tests/capture/test_torch_private.py` shows what breaks without each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C import _get_function_stack_at as mode_at
from torch._C import _len_torch_function_stack as num_modes
from torch._C import _pop_torch_function_stack as pop_mode
from torch._C import _push_on_torch_function_stack as push_mode
from torch._compile import _disable_dynamo
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["mode_at", "num_modes", "pop_mode", "push_mode", "tree_leaves", "tree_map"]

# Some of these are called for each tensor, so they are looked up once.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Returns the identifier of the backward pass that is running on this thread, or -1, as torch's module tracker uses."""
get_dispatch_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode  # noqa: SLF001
FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001
"""The dispatch mode of fake tensors."""
get_tracing_state: Callable[[], Any] = torch._C._get_tracing_state  # noqa: SLF001
"""Returns the tracing state of `torch.jit.trace`; None if it is not running."""
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level  # noqa: SLF001
"""Returns the number of nested transforms of `torch.func`; None if none is running."""
is_transformed_tensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001
is_batched_tensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor  # noqa: SLF001
untransformed: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped  # noqa: SLF001
"""Returns the tensor inside the wrapper of a transform of `torch.func`."""
is_functional_tensor: Callable[[torch.Tensor], bool] = torch._is_functional_tensor  # noqa: SLF001
NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001
"""The `__torch_dispatch__` of tensor classes without one."""
without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001
"""A context in which tensor subclasses do not handle functions."""

untraced = _disable_dynamo
"""Decorator for functions that compiled code must not trace into. torch's public one imports the compiler at once."""

MODULE_CALL = nn.Module._call_impl.__code__  # noqa: SLF001
"""The code that runs the hooks and the `forward` of a module."""
FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
"""The code that runs the `backward` of an `autograd.Function`."""


def is_default_device(mode: Any) -> bool:
    """Whether a mode is that of `torch.set_default_device`, not of `with torch.device(...)`, which must stay on top."""
    return isinstance(mode, DeviceContext) and hasattr(mode, "old_device")  # set when Python enters it


def functional(name: str) -> Any:
    """Torch's own built-in function in `torch.nn.functional`, even if that was replaced; None if it is not built in."""
    return getattr(torch._C._nn, name, None)  # noqa: SLF001


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of a tensor; 0 for inference tensors, which do not have one."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The base of a view; None if the tensor is not a view."""
    return tensor._base  # noqa: SLF001


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage. Not its address, because a storage may free its memory and allocate again."""
    number: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return number


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module itself, which may be None. `getattr` would compute a parametrized one."""
    return module._parameters  # noqa: SLF001


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The submodules of a module itself. A class may have something else under the name of one."""
    return module._modules  # noqa: SLF001


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The forward pre-hooks of a module, by their identifiers."""
    return module._forward_pre_hooks  # noqa: SLF001


def forward_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The forward hooks of a module, by their identifiers."""
    return module._forward_hooks  # noqa: SLF001


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """What `nn.Module.__call__` calls after `nn.Module.compile`; None before."""
    return module._compiled_call_impl  # noqa: SLF001


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Set what `nn.Module.__call__` calls."""
    module._compiled_call_impl = call  # noqa: SLF001


def call_at_backward_end(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running, as torch's own DDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def local_shape_and_offset(shape: torch.Size, *, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's shard of a DTensor, and its offset in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local), tuple(offset)


def keep_in_graphs(operator: Any) -> None:
    """Declare that an operator has an effect, so that a graph keeps its calls, in their order."""
    # It imports a part of the compiler.
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(operator, _EffectType.ORDERED)


def global_forward_pre_hooks() -> dict[int, Callable[..., Any]]:
    """The global forward pre-hooks, by their identifiers."""
    return torch.nn.modules.module._global_forward_pre_hooks  # noqa: SLF001


def saved_tensors_hooks() -> Any:
    """The pair of active saved-tensor hooks; None if there are none, or if this version of torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001
    return None if top is None else top(False)  # noqa: FBT003  (its signature)


def is_accelerator_error(error: BaseException) -> bool:
    """Whether an exception is the failure of a device. torch 2.6 and 2.7 have no class for it, only a text."""
    kind = getattr(torch, "AcceleratorError", None)
    if kind is None:
        return isinstance(error, RuntimeError) and " error: " in str(error)
    return isinstance(error, kind)


def in_backward() -> bool:
    """Whether a backward pass is running on this thread. In a forward hook, this means a recomputation."""
    return current_graph_task_id() != -1


def is_traced() -> bool:
    """Whether the running code is traced or has fake tensors, which have no values and must not be changed."""
    if torch.compiler.is_compiling():
        return True  # dynamo, as in torch.export, would trace the code below
    return get_dispatch_mode(FAKE) is not None or is_jit_traced()


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` is tracing the running code."""
    return get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether the running code is inside a transform of `torch.func`, whose tensors cannot be stored."""
    return transform_level() is not None


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all wrappers of `torch.func` transforms; the tensor itself if there are none."""
    inner = tensor
    while is_transformed_tensor(inner):
        inner = untransformed(inner)
    return inner
