"""Names of torch that are private, or that not every supported version has: where they change, this file changes.

What breaks without each is in `tests/capture/test_torch_private.py`.
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

# Each tensor asks some of these: they are looked up once.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Which backward pass runs on this thread; -1 without one. torch's own module tracker asks the same."""
get_dispatch_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode  # noqa: SLF001
FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001
"""The dispatch mode of tensors without values."""
get_tracing_state: Callable[[], Any] = torch._C._get_tracing_state  # noqa: SLF001
"""What `torch.jit.trace` makes; None outside of it."""
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level  # noqa: SLF001
"""How many transforms of `torch.func` are running; None without one."""
is_transformed_tensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001
is_batched_tensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor  # noqa: SLF001
untransformed: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped  # noqa: SLF001
"""What a tensor of a transform stands for."""
is_functional_tensor: Callable[[torch.Tensor], bool] = torch._is_functional_tensor  # noqa: SLF001
NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001
"""The `__torch_dispatch__` of tensors that have none."""
without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001
"""A context in which classes of tensors handle no function."""

untraced = _disable_dynamo
"""Decorates what compiled code must not be traced into: torch's public decorator loads the compiler at once."""

MODULE_CALL = nn.Module._call_impl.__code__  # noqa: SLF001
"""What runs hooks and forward of a module."""
FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
"""What runs the backward of an `autograd.Function`."""


def is_default_device(mode: Any) -> bool:
    """Whether a mode is that of `torch.set_default_device`: `with torch.device(...)` takes away what lies on top."""
    return isinstance(mode, DeviceContext) and hasattr(mode, "old_device")  # set where Python enters it


def functional(name: str) -> Any:
    """Torch's own function of that name in `torch.nn.functional`, whatever is there now; None if it is not built in."""
    return getattr(torch._C._nn, name, None)  # noqa: SLF001


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 for those of `inference_mode`, which do not count it."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of; None where it is none."""
    return tensor._base  # noqa: SLF001


def storage_id(tensor: torch.Tensor) -> int:
    """Which storage a tensor has. Not its address: memory may be freed and allocated again under one storage."""
    number: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return number


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters; None where it does without. `getattr` would compute one that is parametrized."""
    return module._parameters  # noqa: SLF001


def global_forward_pre_hooks() -> dict[int, Callable[..., Any]]:
    """What is called before each module."""
    return torch.nn.modules.module._global_forward_pre_hooks  # noqa: SLF001


def saved_tensors_hooks() -> Any:
    """The hooks that pack what autograd saves, a pair; None without any, or where torch cannot say."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001
    return None if top is None else top(False)  # noqa: FBT003  (its signature)


def is_accelerator_error(error: BaseException) -> bool:
    """Whether a device failed. torch 2.6 and 2.7 have no class for that, and say so in the text."""
    kind = getattr(torch, "AcceleratorError", None)
    if kind is None:
        return isinstance(error, RuntimeError) and " error: " in str(error)
    return isinstance(error, kind)
