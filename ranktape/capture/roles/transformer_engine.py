"""What are the layers of TransformerEngine, and of Megatron-core's wrappers around them?

Written from their documentation: they need a GPU, and were not run. The input of a layer that normalises first is what
enters the norm, not the operand of its product; what is quantised inside of a layer is seen before that.
"""

from __future__ import annotations

from ranktape.capture.roles.megatron import main_grad, returns_bias
from ranktape.capture.roles.table import ModuleRole

MODULES = (
    ModuleRole(
        classes=("transformer_engine.pytorch.*.Linear", "transformer_engine.pytorch.*.LayerNormLinear"),
        layer_type="linear",
        component="linear",
        operands={"input": (0, "inp")},
        parameters={"weight": "weight", "bias": "bias"},
        output=0,
        layouts={"weight": "OI"},
        accumulated=main_grad,
        returned=returns_bias,
    ),
    ModuleRole(
        classes=("transformer_engine.pytorch.*.DotProductAttention",),
        layer_type="attention",
        component="FA",
        operands={"query": (0, "query_layer"), "key": (1, "key_layer"), "value": (2, "value_layer")},
        layouts={"query": ("TBHD", "THD"), "key": ("TBHD", "THD"), "value": ("TBHD", "THD"), "output": ("TBH", "TH")},
    ),
)
