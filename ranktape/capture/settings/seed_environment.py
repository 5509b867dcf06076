"""The variables by which the older tools were steered.

TENSOR_SAVE_ENABLED      true, or false
TENSOR_SAVE_DIR          where to record; any URL of a run
TENSOR_SAVER_ITERATION   the number of the iteration that is recorded
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranktape.capture.settings.setting import SWITCH_WORDS
from ranktape.errors import UsageError

DEFAULT_SAVE_DIR = "./enhanced_tensor_logs"
"""Where the older tools saved when they were told nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedEnvironment:
    """The variables, read and checked."""

    enabled: bool
    """Whether to record."""
    save_dir: str
    """Where to."""
    iteration: int
    """The number of the first iteration."""


def read_seed_environment(environment: Mapping[str, str] = os.environ) -> SeedEnvironment:
    """What the variables ask for; nothing, where they are not set.

    Raises:
        UsageError: a variable has a value that it cannot have.
    """
    enabled = environment.get("TENSOR_SAVE_ENABLED", "").strip().lower()
    if enabled and enabled not in SWITCH_WORDS:
        raise UsageError(f"TENSOR_SAVE_ENABLED={enabled!r} is not allowed: set it to true or false")
    iteration = environment.get("TENSOR_SAVER_ITERATION", "").strip() or "0"
    if not iteration.isdecimal():
        raise UsageError(f"TENSOR_SAVER_ITERATION={iteration!r} is not allowed: set it to a number from 0 on")
    return SeedEnvironment(
        enabled=SWITCH_WORDS.get(enabled, False),
        save_dir=environment.get("TENSOR_SAVE_DIR") or DEFAULT_SAVE_DIR,
        iteration=int(iteration),
    )


def seed_values(values: Mapping[str, Any], *, iteration: int) -> dict[str, Any]:
    """The settings of a capture in the older tools' place: it begins at once, and adds to what is there.

    Args:
        values: What was set otherwise, which counts for more.
        iteration: The number of the first iteration.
    """
    first = values.get("first_iteration", iteration)
    adds = not (values.get("resume") or values.get("overwrite"))
    return {"start": first, "add": adds, **values, "first_iteration": first}
