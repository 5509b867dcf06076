"""Linear layers that compute with quantised operands, so that a capture sees them.

By fake quantisation: linear layers are replaced by ones with the same names and parameters, which quantise what their
three products are computed with, and have a role of their own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ranktape.analyze.numerics.quantization.fake_quant import FakeQuantization, quantized_operands, quantized_product
from ranktape.capture import ModuleRole, register_role

QUANTIZATIONS = {
    # Scales rounded up, so that no largest value is clamped: what pre-training in MXFP8 needs (arXiv 2506.08027).
    "mxfp8": FakeQuantization(forward="mxfp8_e4m3", backward="mxfp8_e5m2", scale_rule="rceil"),
    "mxfp4": FakeQuantization(forward="mxfp4_e2m1", backward="mxfp4_e2m1", scale_rule="even"),
    "hifp8": FakeQuantization(forward="hif8", backward="hif8", scaling="tensor"),
    "nvfp4": FakeQuantization(forward="nvfp4", backward="nvfp4"),
}
"""By the words of `ranktape demo --quant`, which are the `quant_type` of the captured run, too."""


class QuantizedLinear(nn.Module):
    """A linear layer whose three products are computed with quantised operands; called as `nn.Linear` is.

    A hook of its own quantises what goes into `forward`, so that hooks which are put on later, as those of a capture,
    see the operands that are computed with.
    """

    def __init__(self, linear: nn.Linear, *, how: FakeQuantization) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.bias: nn.Parameter | None = linear.bias
        self.how = how
        self.register_forward_pre_hook(_quantize, with_kwargs=True)
        self.train(linear.training)

    def forward(self, x: Tensor, weight: Tensor, wide_x: Tensor, wide_weight: Tensor) -> Tensor:
        """The product of the operands that `_quantize` has made of the input."""
        return quantized_product(x, weight, wide_x, wide_weight, self.bias, how=self.how)

    def extra_repr(self) -> str:
        """What is printed of the layer."""
        return f"{self.in_features}, {self.out_features}, {self.how.forward} forward, {self.how.backward} backward"


def _quantize(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert isinstance(module, QuantizedLinear), "it is put on nothing else"
    x = args[0] if args else kwargs["input"]
    return quantized_operands(x, module.weight, how=module.how), {}


ROLE = ModuleRole(
    classes=(QuantizedLinear,),
    layer_type="linear",
    component="linear",
    operands={"input": (0, "x"), "weight": (1, "weight")},
    parameters={"bias": "bias"},
)
"""What a capture records of such a layer: the operands of its forward product, and the result."""


def quantize_linears(model: nn.Module, *, how: FakeQuantization) -> None:
    """Put a quantised layer in the place of every `nn.Linear` inside of the model, with its name and its parameters.

    A capture knows them from then on. Classes that derive from `nn.Linear` stay: they may compute something else. Hooks
    on the layers that are replaced are lost: quantise before anything else is done to the model, and before DDP or FSDP
    wraps it.
    """
    register_role(ROLE)
    quantized: dict[nn.Module, QuantizedLinear] = {}
    for module in list(model.modules()):
        # Not `named_children`, which names a layer once that has two names.
        for name, child in list(module._modules.items()):  # noqa: SLF001
            if type(child) is nn.Linear:
                setattr(module, name, quantized.setdefault(child, QuantizedLinear(child, how=how)))
