"""What are the functions of FlashAttention, versions 2 and 3?

Written from their documentation; tested with functions of the same names and arguments, not with the package itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranktape.capture.roles.table import FunctionRole, Operand, Place

_PACKAGES = ("flash_attn", "flash_attn_interface")
_SEPARATE = {"query": (0, "q"), "key": (1, "k"), "value": (2, "v")}
_PADDED, _RAGGED = "BTHD", "THD"


def _role(name: str, *, operands: Mapping[str, Place], layout: str) -> FunctionRole:
    return FunctionRole(
        functions=tuple(f"{package}.{name}" for package in _PACKAGES),
        layer_type="attention",
        component="FA",
        operands=operands,
        layouts=dict.fromkeys(("query", "key", "value", "output"), layout),
    )


def _packed(position: int, keyword: str, *names: str, dim: int) -> dict[str, Place]:
    return {name: Operand(position=position, keyword=keyword, part=(dim, place)) for place, name in enumerate(names)}


FUNCTIONS = (
    _role("flash_attn_func", operands=_SEPARATE, layout=_PADDED),
    _role("flash_attn_varlen_func", operands=_SEPARATE, layout=_RAGGED),
    _role("flash_attn_qkvpacked_func", operands=_packed(0, "qkv", "query", "key", "value", dim=2), layout=_PADDED),
    _role(
        "flash_attn_varlen_qkvpacked_func",
        operands=_packed(0, "qkv", "query", "key", "value", dim=1),
        layout=_RAGGED,
    ),
    _role(
        "flash_attn_kvpacked_func",
        operands={"query": (0, "q"), **_packed(1, "kv", "key", "value", dim=2)},
        layout=_PADDED,
    ),
    _role(
        "flash_attn_varlen_kvpacked_func",
        operands={"query": (0, "q"), **_packed(1, "kv", "key", "value", dim=1)},
        layout=_RAGGED,
    ),
)
