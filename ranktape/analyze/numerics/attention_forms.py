"""Finds out how a recorded call of attention computed: what was said of it, and where that is not all, its output."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ranktape.analyze.numerics.agreement import attention_agreements
from ranktape.analyze.numerics.attention import AttentionForm, attention_products

if TYPE_CHECKING:
    import torch

_FURTHEST = 1 << 40
"""Keys that a window may hold: no sequence is as long."""

_NOT_NUMBERS = ("mask", "bias", "sinks")
"""What the metadata of a query names and does not hold (`CallOption` of the roles of attention)."""


class UnknownFormError(Exception):
    """It cannot be known how a call computed, or not be computed again; the text says why."""


def find_form(
    said: Mapping[str, Any],
    operands: Mapping[str, torch.Tensor],
    *,
    output: torch.Tensor | None,
    compute_dtype: torch.dtype,
) -> AttentionForm:
    """The form of a call of attention; `operands` are its query, key and value, [B, H, T, D], and so is its output.

    `said` is the metadata of its query. A mask that was passed as a tensor is in no record: then causal attention,
    attention to all keys and the window that was said are tried, and it is the one that gives the recorded output
    within rounding.

    Raises:
        UnknownFormError: none of them does, it is not computed again (dropout, capped scores), or what was said leaves
            several and there is no output to tell.
    """
    forms, is_sure = _possible(said, num_queries=operands["query"].shape[2], num_keys=operands["key"].shape[2])
    if is_sure and len(forms) == 1:
        return forms[0]
    if output is None:
        raise UnknownFormError("its mask was not recorded, and neither was its output, which would tell")
    own = {name: operands[name].float() for name in ("query", "key", "value")}
    seen = output.float()

    def distance(form: AttentionForm) -> float:
        off = attention_products(own, form=form)["output"] - seen
        return float(off.nan_to_num(0.0).double().norm())

    best = min(forms, key=distance)
    known = {name: operands[name] for name in own}
    [agreement] = attention_agreements(known, {"output": output}, form=best, compute_dtype=compute_dtype)
    if is_sure or agreement.is_agreed:
        return best
    passed = ", ".join(word for word in _NOT_NUMBERS if word in said) or "a mask, a bias, dropout or another scale"
    raise UnknownFormError(
        f"neither causal attention nor attention to all keys gives its output: {passed} was not recorded"
    )


def _possible(said: Mapping[str, Any], *, num_queries: int, num_keys: int) -> tuple[list[AttentionForm], bool]:
    """The forms that a call may have had, and whether it is sure that it had one of them."""
    if said.get("dropout"):
        raise UnknownFormError(f"it drops out at random (dropout {said['dropout']})")
    if said.get("cap"):
        raise UnknownFormError(f"its scores are capped (cap {said['cap']})")
    scale = said.get("scale")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise UnknownFormError(f"its scale was not recorded as a number, but as {scale!r:.40}")
    is_causal = said.get("is_causal")
    is_sure = isinstance(is_causal, bool) and not any(word in said for word in _NOT_NUMBERS)
    before, after = _window(said.get("window"))
    causal, full = AttentionForm(before=before, after=0), AttentionForm(before=before, after=after)
    tried = [causal, full, AttentionForm(after=0), AttentionForm()]
    forms = tried if not is_sure else [causal] if is_causal else [full]
    shifts = (0, num_keys - num_queries)
    shifted = (
        dataclasses.replace(form, scale=scale, shift=0 if form.before is form.after is None else shift)
        for form, shift in itertools.product(forms, shifts)
    )
    return list(dict.fromkeys(shifted)), is_sure


def _window(said: Any) -> tuple[int | None, int | None]:
    """How many keys before and after its own a query sees, from a pair of FlashAttention or a number of keys."""
    is_pair = isinstance(said, list) and len(said) == len(("before", "after"))
    if is_pair and all(isinstance(one, int) for one in said):
        before, after = (None if one < 0 else min(one, _FURTHEST) for one in said)
        return before, after
    return (min(said - 1, _FURTHEST), None) if isinstance(said, int) and said > 0 else (None, None)
