"""Makes an unmodified training compute in low precision, for `--quant` of the launcher and RANKTAPE_QUANT.

Each model with parameters that need gradients is quantised before its first forward pass, also inside wrappers; its
layers stay the same objects. A training that cannot be quantised is ended, because it would use another precision.
"""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ranktape.errors import RanktapeError, UsageError
from ranktape.launch.worker import report, say

if TYPE_CHECKING:
    from torch import nn

    from ranktape.analyze.numerics.recipes.recipe import Recipe
    from ranktape.launch.options import Quantization
    from ranktape.launch.quantizing_attention import AttentionQuantizer


def arm_quantizer(is_wanted: Callable[[], bool]) -> None:
    """Quantise the models of this process before they run, if the environment requests it.

    `is_wanted` is called when a model runs, and returns whether this process trains. The precision is read from the
    environment then too, so that an error in it does not break `import torch`.
    """
    if not any(os.environ.get(f"RANKTAPE_{name}") for name in ("QUANT", "QUANT_PLAN", "QUANT_ATTENTION")):
        return  # before any import, because this runs with each import of torch
    folder = Path.cwd()

    @functools.cache
    def read() -> Quantization | None:
        from ranktape.launch.options import Quantization

        return Quantization.read(os.environ, folder=folder)

    Quantizer(read, is_wanted=is_wanted)


class Quantizer:
    """Quantises the models of this process before they run; created before the capture waits for the training."""

    def __init__(self, read: Callable[[], Quantization | None], *, is_wanted: Callable[[], bool]) -> None:
        """Start to wait for models.

        Args:
            read: Called when a model runs; returns its precision, or None to leave it unchanged.
            is_wanted: Called when a model runs; returns whether this process trains.
        """
        import torch
        from torch import nn
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._read = read
        self._is_wanted = is_wanted
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._num_layers = self._num_unchanged = 0
        self._is_over = False
        self._attention: AttentionQuantizer | None = None
        register_module_forward_pre_hook(self._on_forward)
        register_optimizer_step_pre_hook(self._on_optimizer_step)
        self._compile: Callable[..., Any] = torch.compile
        torch.compile = self._compiling(torch.compile)
        self._compile_module = nn.Module.compile
        nn.Module.compile = self._compiling_modules(nn.Module.compile)  # type: ignore[method-assign]
        # A compiled module warns about global hooks, which may be called twice; for ours this is harmless.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")

    @property
    def has_quantized(self) -> bool:
        """Whether any model with layers to quantise has run."""
        return self._num_layers + self._num_unchanged > 0

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002  (torch's signature)
        import torch

        if not torch.compiler.is_compiling():
            self._before_call(module)

    def _before_call(self, module: nn.Module) -> None:
        """Quantise a module before it is called, unless it is known, or none of its parameters needs a gradient."""
        self._quantize_new(module)
        if self._attention is not None:
            self._attention.is_wanted = module in self._known

    def _quantize_new(self, module: nn.Module) -> None:
        from ranktape.launch.standby import is_without_values, needs_gradients

        if module in self._known or is_without_values() or not needs_gradients(module) or not self._is_wanted():
            return
        try:
            self._quantize(module)
        except RanktapeError as error:
            _fail(error)

    def _quantize(self, model: nn.Module) -> None:
        from ranktape.analyze.numerics.quantization.quantized_layers import (
            attention_warning,
            is_plain_linear,
            quantize_layers,
        )
        from ranktape.capture.hooks.stacks import module_path

        self._known.update(model.modules())
        quantization = self._read()
        if quantization is None:
            return
        modules = {module_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
        linears = {name: module for name, module in modules.items() if is_plain_linear(module)}
        if is_plain_linear(model):
            raise UsageError(
                "the training calls a linear layer by itself, which --quant cannot quantise: put it into "
                "nn.Sequential, or call ranktape.analyze.fake_quantize in the script, without --quant"
            )
        others = {name: type(module).__name__ for name, module in modules.items() if name not in linears}
        if quantization.is_baseline:
            wide = {name: linear for name, linear in linears.items() if not _computes_in_bf16(linear)}
            if num_unchanged := len(linears) - len(wide):
                self._num_unchanged += num_unchanged
                say(f"bf16: {num_unchanged} linear layers of {_name(modules)} already compute in bf16")
            linears = wide
        recipes = quantization.recipes_of(linears, others)
        if quantization.plan is not None and (inside := quantization.plan.inside_attention(others)):
            say(f"{quantization.tag}: {attention_warning(inside)}")
        num_quantized = len(quantize_layers(linears, recipes, first_stream=self._num_layers))
        self._num_layers += num_quantized
        if num_quantized:
            counts = Counter(
                type(module).__name__ for module in dict.fromkeys(modules.values()) if _is_linear_like(module)
            )
            listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            unchanged = f"; not quantised: {listed}" if listed else ""
            attention = " and attention" if quantization.has_attention else ""
            say(
                f"{quantization.tag}: {num_quantized} linear layers of {_name(modules)}{attention} are quantised"
                f"{unchanged}"
            )
        if quantization.has_attention and quantization.recipe is not None:
            self._quantize_attention(model, quantization.recipe)

    def _quantize_attention(self, model: nn.Module, recipe: Recipe) -> None:
        if self._attention is None:
            from ranktape.launch.quantizing_attention import AttentionQuantizer

            self._attention = AttentionQuantizer(recipe)
        self._attention.quantize(model)

    def _on_optimizer_step(self, *_: Any) -> None:
        """Check at the first step of any optimizer that something was quantised; otherwise, end the training."""
        import torch
        from torch import nn

        if torch.compiler.is_compiling() or self._is_over or not self._is_wanted():
            return
        self._is_over = True
        if getattr(torch.compile, "__wrapped__", None) is self._compile:
            torch.compile = self._compile
        if getattr(nn.Module.compile, "__wrapped__", None) is self._compile_module:
            nn.Module.compile = self._compile_module  # type: ignore[method-assign]
        if not self.has_quantized:
            _fail(
                UsageError(
                    "--quant: no nn.Linear was quantised before the first optimizer step: the layers are of other "
                    "classes, are quantised already, or are not quantised by the recipe; train without --quant"
                )
            )
        if self._attention is not None and not self._attention.num_calls:
            _fail(
                UsageError(
                    "--quant-attention: no attention was quantised before the first optimizer step: the model calls "
                    "neither F.scaled_dot_product_attention nor Hugging Face's interface; train without "
                    "--quant-attention"
                )
            )

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A `torch.compile` whose functions run uncompiled until a model is quantised, so that hooks see the model."""

        @functools.wraps(original)
        def compile_any(model: Any = None, **options: Any) -> Any:
            from torch import nn

            if model is None:
                return functools.partial(compile_any, **options)
            if isinstance(model, nn.Module):
                _check_graph(model, options)
                return original(model, **options)
            compiled = original(model, **options)

            @functools.wraps(compiled)
            def call(*args: Any, **kwargs: Any) -> Any:
                return (compiled if self._is_over or self.has_quantized else model)(*args, **kwargs)

            return call

        return compile_any

    def _compiling_modules(self, original: Callable[..., None]) -> Callable[..., None]:
        """An `nn.Module.compile` that handles modules before calls. Inside compiled code, our hook is inactive."""

        @functools.wraps(original)
        def compile_module(module: nn.Module, *args: Any, **options: Any) -> None:
            import torch

            from ranktape.capture.torch_private import compiled_call_of, set_compiled_call

            _check_graph(module, options)
            original(module, *args, **options)
            compiled: Any = compiled_call_of(module)

            def call(*call_args: Any, **call_options: Any) -> Any:
                if not torch.compiler.is_compiling():
                    self._before_call(module)
                return compiled(*call_args, **call_options)

            set_compiled_call(module, call)

        return compile_module


def _check_graph(module: nn.Module, options: Mapping[str, Any]) -> None:
    """End the training if a model with linear layers is compiled with `fullgraph`, which excludes quantising."""
    from ranktape.analyze.numerics.quantization.quantized_layers import is_plain_linear

    if options.get("fullgraph") and any(is_plain_linear(part) for part in module.modules()):
        _fail(
            UsageError(
                "torch.compile(fullgraph=True) does not allow quantisation, which runs outside of the graph: compile "
                "without fullgraph=True, or train without --quant"
            )
        )


def _is_linear_like(module: nn.Module) -> bool:
    """Whether a module that was not quantised has the role of a linear layer."""
    from ranktape.capture.roles.known import role_of

    kind = type(module)
    role = role_of(kind)
    return role is not None and role.layer_type == "linear" and "Quantized" not in kind.__name__


def _computes_in_bf16(linear: nn.Module) -> bool:
    """Whether a layer computes in bf16, by autocast if it is enabled, otherwise by the dtype of its weight."""
    import torch

    weight: Any = linear.weight
    device = weight.device.type
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return bool((torch.get_autocast_dtype(device) if has_autocast else weight.dtype) == torch.bfloat16)


def _name(modules: Mapping[str, nn.Module]) -> str:
    """The class name of the model inside its wrappers."""
    return type(modules[""]).__name__.removeprefix("FSDP") if "" in modules else "the model"


def _fail(error: RanktapeError) -> NoReturn:
    """End the training with an error."""
    report(str(error))
    raise SystemExit(error.exit_code) from error
