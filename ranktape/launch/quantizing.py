"""Has an unmodified training compute in low precision: what `--quant` of the launcher, and RANKTAPE_QUANT, do.

Every model that has something to learn is quantised before its first forward pass, in whatever wraps it; its layers
stay the same objects. A training that cannot be quantised is ended: it would not be what was asked for.
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
    """Quantise the models of this process before they run, if the environment asks for it.

    `is_wanted` says, when a model runs, whether this process is one that trains. What the environment asks for is read
    then, too: an error in it is no error of `import torch`.
    """
    if not any(os.environ.get(f"RANKTAPE_{name}") for name in ("QUANT", "QUANT_PLAN", "QUANT_ATTENTION")):
        return  # before anything is imported for it: this runs with each import of torch
    folder = Path.cwd()

    @functools.cache
    def ask() -> Quantization | None:
        from ranktape.launch.options import Quantization

        return Quantization.read(os.environ, folder=folder)

    Quantizer(ask, is_wanted=is_wanted)


class Quantizer:
    """Quantises the models of this process before they run; made before the capture waits for them."""

    def __init__(self, ask: Callable[[], Quantization | None], *, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Wait from now on.

        Args:
            ask: Says when a model runs in which precision it is to compute; None for its own.
            is_wanted: Says then whether this process is one that trains.
        """
        import torch
        from torch import nn
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._ask = ask
        self._is_wanted = is_wanted
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._num_layers = self._num_left = 0
        self._is_over = False
        self._attention: AttentionQuantizer | None = None
        register_module_forward_pre_hook(self._on_forward)
        register_optimizer_step_pre_hook(self._on_optimizer_step)
        self._compile: Callable[..., Any] = torch.compile
        torch.compile = self._compiling(torch.compile)
        self._compile_module = nn.Module.compile
        nn.Module.compile = self._compiling_modules(nn.Module.compile)  # type: ignore[method-assign]
        # A compiled module warns of global hooks, which might be called twice; ours does nothing then.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")

    @property
    def has_quantized(self) -> bool:
        """Whether any model was met that has layers to quantise."""
        return self._num_layers + self._num_left > 0

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002  (torch's signature)
        import torch

        if not torch.compiler.is_compiling():
            self._meet(module)

    def _meet(self, module: nn.Module) -> None:
        """A module is about to be called: quantise it, unless it was looked at, or learns nothing."""
        self._look_at(module)
        if self._attention is not None:
            self._attention.is_wanted = module in self._known

    def _look_at(self, module: nn.Module) -> None:
        from ranktape.launch.standby import is_without_values, needs_gradients

        if module in self._known or is_without_values() or not needs_gradients(module) or not self._is_wanted():
            return
        try:
            self._quantize(module)
        except RanktapeError as error:
            _fail(error)

    def _quantize(self, model: nn.Module) -> None:
        from ranktape.analyze.numerics.quantization.quantized_layers import (
            inside_words,
            is_plain_linear,
            quantize_layers,
        )
        from ranktape.capture.hooks.stacks import module_path

        self._known.update(model.modules())
        quantization = self._ask()
        if quantization is None:
            return
        modules = {module_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
        linears = {name: module for name, module in modules.items() if is_plain_linear(module)}
        if is_plain_linear(model):
            raise UsageError(
                "the training calls a linear layer by itself, which cannot be quantised from outside in this call: "
                "put it into nn.Sequential, or have the script call ranktape.analyze.fake_quantize, without --quant"
            )
        others = {name: type(module).__name__ for name, module in modules.items() if name not in linears}
        if quantization.is_baseline:
            wide = {name: linear for name, linear in linears.items() if not _computes_in_bf16(linear)}
            if num_left := len(linears) - len(wide):
                self._num_left += num_left
                say(f"bf16: {num_left} linear layers of {_name(modules)} compute in it as they are")
            linears = wide
        recipes = quantization.recipes_of(linears, others)
        if quantization.plan is not None and (inside := quantization.plan.inside_attention(others)):
            say(f"{quantization.tag}: {inside_words(inside)}")
        done = quantize_layers(linears, recipes, first_stream=self._num_layers)
        self._num_layers += len(done)
        if done:
            left = Counter(
                type(module).__name__ for module in dict.fromkeys(modules.values()) if _is_linear_like(module)
            )
            named = ", ".join(f"{count} {kind}" for kind, count in left.items())
            rest = f"; left as they are: {named}" if named else ""
            what = " are quantised, and attention is" if quantization.has_attention else " are quantised"
            say(f"{quantization.tag}: {len(done)} linear layers of {_name(modules)}{what}{rest}")
        if quantization.has_attention and quantization.recipe is not None:
            self._quantize_attention(model, quantization.recipe)

    def _quantize_attention(self, model: nn.Module, recipe: Recipe) -> None:
        if self._attention is None:
            from ranktape.launch.quantizing_attention import AttentionQuantizer

            self._attention = AttentionQuantizer(recipe)
        self._attention.quantize(model)

    def _on_optimizer_step(self, *_: Any) -> None:
        """The first step of any optimizer: what was not quantised by now would be learnt in another precision."""
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
                    "--quant: the training has come to its first optimizer step, and no nn.Linear "
                    "was quantised: its layers are of other classes, are quantised already, or stay as they are by the "
                    "recipe; train it without --quant"
                )
            )
        if self._attention is not None and not self._attention.num_calls:
            _fail(
                UsageError(
                    "--quant-attention: the training has come to its first optimizer step, and no attention was "
                    "quantised: it calls neither F.scaled_dot_product_attention nor Hugging Face's interface; train it "
                    "without --quant-attention"
                )
            )

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile`, whose functions run as written until a model is quantised: nobody sees it inside."""

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
        """`nn.Module.compile`, whose modules run their hooks inside of what is compiled, where ours is silent."""

        @functools.wraps(original)
        def compile_module(module: nn.Module, *args: Any, **options: Any) -> None:
            import torch

            _check_graph(module, options)
            original(module, *args, **options)
            compiled: Any = module._compiled_call_impl  # noqa: SLF001  (what calling the module calls)

            def call(*call_args: Any, **call_options: Any) -> Any:
                if not torch.compiler.is_compiling():
                    self._meet(module)
                return compiled(*call_args, **call_options)

            module._compiled_call_impl = call  # noqa: SLF001  (as above)

        return compile_module


def _check_graph(module: nn.Module, options: Mapping[str, Any]) -> None:
    """End the training where a model is to be one graph, which what quantises cannot be part of."""
    from ranktape.analyze.numerics.quantization.quantized_layers import is_plain_linear

    if options.get("fullgraph") and any(is_plain_linear(part) for part in module.modules()):
        _fail(
            UsageError(
                "torch.compile(fullgraph=True) leaves no room for what quantises, which is not compiled: compile "
                "without fullgraph=True, or train without --quant"
            )
        )


def _is_linear_like(module: nn.Module) -> bool:
    """Whether a module that was not quantised seems to compute what an `nn.Linear` does."""
    from ranktape.capture.roles.known import role_of

    kind = type(module)
    role = role_of(kind)
    return role is not None and role.layer_type == "linear" and "Quantized" not in kind.__name__


def _computes_in_bf16(linear: nn.Module) -> bool:
    """Whether a layer that is about to be called computes in bf16, by its weight or by autocast around the model."""
    import torch

    weight: Any = linear.weight
    kind, wanted = weight.device.type, torch.bfloat16
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return bool((torch.get_autocast_dtype(kind) if is_on else weight.dtype) == wanted)


def _name(modules: Mapping[str, nn.Module]) -> str:
    """The class of the model inside of what wraps it."""
    return type(modules[""]).__name__.removeprefix("FSDP") if "" in modules else "the model"


def _fail(error: RanktapeError) -> NoReturn:
    """End the training: it would not be what was asked for."""
    report(str(error))
    raise SystemExit(error.exit_code) from error
