"""Which roles are known, and which one has this module?"""

from __future__ import annotations

import fnmatch

from ranktape.capture.roles import flash_attention, huggingface, megatron, pytorch, transformer_engine
from ranktape.capture.roles.table import FunctionRole, ModuleRole, operand_of
from ranktape.capture.settings.rules import LAYER_OUTPUTS
from ranktape.errors import UsageError

MODULE_ROLES: tuple[ModuleRole, ...] = (
    *pytorch.MODULES,
    *huggingface.MODULES,
    *megatron.MODULES,
    *transformer_engine.MODULES,
)
"""Our own roles of modules."""

FUNCTION_ROLES: tuple[FunctionRole, ...] = (*pytorch.FUNCTIONS, *huggingface.FUNCTIONS, *flash_attention.FUNCTIONS)
"""Our own roles of functions."""

_registered: list[ModuleRole | FunctionRole] = []
_found: dict[type, ModuleRole | None] = {}


def register_role(role: ModuleRole | FunctionRole) -> None:
    """Capture what the role says, from the next captured iteration on; it comes before our own roles.

    A role that matches no module, or names an operand that is not passed, is told at the end of the first iteration.

    Raises:
        UsageError: it is no role, or one of its operands is no place.
    """
    if not isinstance(role, ModuleRole | FunctionRole):
        raise UsageError(f"{role!r:.80} is no role: give a ModuleRole or a FunctionRole")
    for place in role.operands.values():
        operand_of(place)
    if role not in _registered:
        _registered.insert(0, role)
        _found.clear()


def unregister_role(role: ModuleRole | FunctionRole) -> None:
    """Capture it no more, from the next captured iteration on."""
    if role in _registered:
        _registered.remove(role)
        _found.clear()


def registered_roles() -> tuple[ModuleRole | FunctionRole, ...]:
    """The user's own, the latest first."""
    return tuple(_registered)


def function_roles() -> tuple[FunctionRole, ...]:
    """All roles of functions, the user's own first."""
    return (*(role for role in _registered if isinstance(role, FunctionRole)), *FUNCTION_ROLES)


def role_of(kind: type) -> ModuleRole | None:
    """The role of modules of that class: of the first of its bases that has one; None without any."""
    if kind not in _found:
        roles = (*(role for role in _registered if isinstance(role, ModuleRole)), *MODULE_ROLES)
        hits = (role for base in kind.__mro__ for role in roles if _matches(base, role))
        _found[kind] = next(hits, None)
    return _found[kind]


def known_layer_types() -> tuple[str, ...]:
    """Every kind of layer that can be asked for."""
    roles = (*MODULE_ROLES, *FUNCTION_ROLES, *_registered)
    return tuple(dict.fromkeys((*(role.layer_type for role in roles), *LAYER_OUTPUTS)))


def _matches(base: type, role: ModuleRole) -> bool:
    name = f"{base.__module__}.{base.__qualname__}"
    return any(
        base is one if isinstance(one, type) else name == one or ("*" in one and fnmatch.fnmatchcase(name, one))
        for one in role.classes
    )
