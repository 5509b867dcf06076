"""What are the layers of Hugging Face's transformers?

Its models ask a registry for the function that computes attention. What that gives is wrapped, whichever it is: `sdpa`,
`eager`, FlashAttention, FlexAttention, or one that was registered. Key and value are seen before they are repeated for
the heads of a group.
"""

from __future__ import annotations

from ranktape.capture.roles.pytorch import grouped
from ranktape.capture.roles.table import FunctionRole, ModuleRole

MODULES = (
    ModuleRole(
        classes=("transformers.pytorch_utils.Conv1D",),
        layer_type="linear",
        component="linear",
        operands={"input": (0, "x")},
        parameters={"weight": "weight", "bias": "bias"},
        layouts={"weight": "IO"},
    ),
)

FUNCTIONS = (
    FunctionRole(
        functions=("transformers.modeling_utils.AttentionInterface.get_interface",),
        layer_type="attention",
        component="FA",
        operands={"query": (1, "query"), "key": (2, "key"), "value": (3, "value")},
        output=0,
        layouts={"query": "BHTD", "key": "BHTD", "value": "BHTD", "output": "BTHD"},
        gives_function=True,
    ),
    # Its experts; without torch's grouped product it has an operator of its own.
    grouped("transformers.integrations.moe._grouped_mm", names=("input", "weight")),
)
