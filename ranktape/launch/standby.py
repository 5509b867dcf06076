"""Detects when a process starts to train.

That is the first forward pass in training mode of a module with a parameter that needs a gradient or, without one, the
first step of an optimizer. Until then, a global hook checks all calls of modules; after that, it is removed. Compiled
code is not affected, because the hook does nothing while code is traced.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _calls
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ranktape.capture.torch_private import (
    FAKE,
    compiled_call_of,
    get_dispatch_mode,
    is_jit_traced,
    modules_of,
    parameters_of,
    set_compiled_call,
)


class Standby:
    """Waits for the training, and calls `begin` once when it starts."""

    def __init__(self, *, begin: Callable[[], None], is_wanted_in_eval: Callable[[], bool]) -> None:
        """Start to wait.

        Args:
            begin: Starts the capture; an exception in it ends the training.
            is_wanted_in_eval: Returns whether a pass in evaluation mode counts too; called at most once.
        """
        self._begin = begin
        self._is_wanted_in_eval = functools.cache(is_wanted_in_eval)
        self._is_never_in_eval = False
        self._lock = threading.Lock()
        self.is_over = False
        """Whether `begin` was called."""
        self.has_evaluated = False
        """Whether the first module with parameters that ran outside of training was in evaluation mode."""
        self._frozen: Callable[[], nn.Module | None] = lambda: None
        self._below: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # torch's type hint lacks the return value of this hook, which replaces the arguments.
        on_forward = _calls.register_module_forward_pre_hook(self._on_forward)  # type: ignore[arg-type]
        self._handles = [on_forward, register_optimizer_step_pre_hook(self._on_optimizer_step)]
        self._compile = nn.Module.compile
        nn.Module.compile = self._compiling()  # type: ignore[method-assign]
        # A compiled module warns about global hooks, which may be called twice; ours is called once.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The global forward pre-hook, which starts the capture if the training starts with this call."""
        if torch.compiler.is_compiling() or self.is_over or not self._is_training(module):
            return None
        # torch does not call hooks that are registered during the call of a module, so they are called here.
        earlier = set(_calls._global_forward_pre_hooks)  # noqa: SLF001  (torch has no public way to call one)
        if not self.end():
            return None
        current = args
        for number, hook in list(_calls._global_forward_pre_hooks.items()):  # noqa: SLF001  (as above)
            replaced: Any = None if number in earlier else hook(module, current)
            if replaced is not None:
                current = replaced if isinstance(replaced, tuple) else (replaced,)
        return current

    def _on_optimizer_step(self, *_: Any) -> None:
        """Start with an optimizer step, for a training without modules or one that is compiled as a whole."""
        if not torch.compiler.is_compiling():
            self.end()

    def _is_training(self, module: nn.Module) -> bool:
        if is_without_values():
            return False
        # Not only by the mode: transforms of data are modules in training mode too.
        is_training = module.training and torch.is_grad_enabled() and self._is_trainable(module)
        return is_training or self._is_eval(module)

    def _is_trainable(self, module: nn.Module) -> bool:
        """Whether any parameter of a module needs a gradient.

        All modules inside a frozen model are called too. They are only searched if their first parameter needs a
        gradient, because searching each module of a deep tree is slow.
        """
        frozen = self._frozen()
        if module is not frozen and module in self._below:
            first = _first_parameter(module)
            if first is None or not first.requires_grad:
                return False
        if needs_gradients(module):
            return True
        if module is not frozen:
            self._frozen = weakref.ref(module)
            self._below = weakref.WeakSet(module.modules())
        return False

    def _is_eval(self, module: nn.Module) -> bool:
        if self._is_never_in_eval or next(module.parameters(), None) is None:
            return False
        self.has_evaluated = not module.training
        self._is_never_in_eval = not self._is_wanted_in_eval()
        return not self._is_never_in_eval

    @property
    def has_seen_models(self) -> bool:
        """Whether a module with parameters has run, or an optimizer stepped."""
        return self.is_over or self._is_never_in_eval

    def end(self) -> bool:
        """Stop waiting and call `begin`; returns False if another thread has done so before."""
        with self._lock:
            if self.is_over:
                return False
            self.is_over = True
            for handle in self._handles:
                handle.remove()
            if getattr(nn.Module.compile, "__wrapped__", None) is self._compile:
                nn.Module.compile = self._compile  # type: ignore[method-assign]
        self._begin()
        return True

    def _compiling(self) -> Callable[..., None]:
        """An `nn.Module.compile` that checks modules before calls. Inside compiled code, our hook is inactive."""

        @functools.wraps(self._compile)
        def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._compile(module, *args, **kwargs)
            compiled: Any = compiled_call_of(module)

            def call(*call_args: Any, **call_kwargs: Any) -> Any:
                if not torch.compiler.is_compiling():
                    if not self.is_over and self._is_training(module):
                        self.end()
                    if self.is_over and compiled_call_of(module) is call:
                        set_compiled_call(module, compiled)
                return compiled(*call_args, **call_kwargs)

            set_compiled_call(module, call)

        return compile_module


def _first_parameter(module: nn.Module | None) -> nn.Parameter | None:
    """The first parameter of a module or of its first submodules, or None. It is faster than `parameters`."""
    while module is not None and not parameters_of(module):
        module = next(iter(modules_of(module).values()), None)
    return None if module is None else next(iter(parameters_of(module).values()))


def needs_gradients(module: nn.Module) -> bool:
    """Whether any parameter of a module needs a gradient. `parameters` takes ten times as long in a deep tree."""
    seen = {module}
    pending = [module]
    while pending:
        current = pending.pop()
        if any(weight is not None and weight.requires_grad for weight in parameters_of(current).values()):
            return True
        children = [child for child in modules_of(current).values() if child is not None and child not in seen]
        seen.update(children)
        pending += children
    return False


def is_without_values() -> bool:
    """Whether the model is only traced, or runs on fake tensors."""
    return get_dispatch_mode(FAKE) is not None or is_jit_traced()
