"""How did a capture end, by its writer's last words and by what the store says?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ranktape.storage.status import Verdict


def find_problem(words: Mapping[str, Any], *, waited_seconds: float, last_line: str) -> str | None:
    """What went wrong on this rank; None where everything was stored.

    Args:
        words: The writer's last.
        waited_seconds: How long it was waited for.
        last_line: What the process wrote last, should it have crashed.
    """
    if words.get("state") == "late":
        return f"not everything was stored within {waited_seconds:g} s; the writer goes on"
    if words.get("state") not in {"closed", "failed"}:
        return f"the writer process ended: {last_line}"
    problem = words.get("error") or words.get("problem")
    return None if problem is None else str(problem)


def judge_from_outside(stored: Verdict | None, *, problem: str | None, rank: int, required: int) -> Verdict:
    """The verdict where the coordinator gave none: what the store says, and what this rank knows.

    Only rank 0 has a coordinator; the others answer for what they stored themselves.
    """
    named = [] if problem is None else [f"rank {rank}: {problem}"]
    if stored is not None:
        return stored if stored.met else dataclasses.replace(stored, missing=[*stored.missing, *named])
    return Verdict(met=rank != 0 and problem is None, required=required, complete=[], missing=named, final=False)
