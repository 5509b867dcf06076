"""How a capture ended, by its writer's last words and by what the store says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.errors import RanktapeError
from ranktape.storage.progress import read_verdict
from ranktape.storage.status import Verdict

if TYPE_CHECKING:
    from ranktape.capture.console import Console
    from ranktape.storage.backends.backend import Backend


def judge_end(
    words: Mapping[str, Any],
    *,
    waited_seconds: float,
    ending: str,
    backend: Backend,
    console: Console,
    required: int,
    ring: Path | None,
) -> Verdict:
    """The writer's verdict on rank 0; elsewhere, and where there is none, what this rank knows.

    Args:
        words: The writer's last.
        waited_seconds: How long it was waited for.
        ending: How the process ended, should it have crashed.
        backend: Where the run is.
        console: Where trouble is told.
        required: The guaranteed minimum.
        ring: Where the ring lies; None for in memory.
    """
    console.pass_on(words)
    if "verdict" in words:
        return Verdict(**words["verdict"])
    problem = find_problem(words, waited_seconds=waited_seconds, ending=ending)
    if problem is not None:
        console.warn_once(problem)
    if ring is not None and words.get("state") not in {"late", "closed"}:
        console.warn_once(f"what was staged and not stored is in {ring}: 'ranktape recover {ring.parent}' stores it")
    stored = _stored_verdict(backend, console) if console.rank == 0 else None
    return judge_from_outside(stored, problem=problem, rank=console.rank, required=required)


def find_problem(words: Mapping[str, Any], *, waited_seconds: float, ending: str) -> str | None:
    """What went wrong on this rank; None where everything was stored.

    Args:
        words: The writer's last.
        waited_seconds: How long it was waited for.
        ending: How the process ended, should it have crashed.
    """
    if words.get("state") == "late":
        return f"not everything was stored within {waited_seconds:g} s; the writer goes on"
    if words.get("state") not in {"closed", "failed"}:
        return f"the writer process ended: {ending}"
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


def _stored_verdict(backend: Backend, console: Console) -> Verdict | None:
    """What the store says, where the writer could not; None where it cannot be read either."""
    try:
        judged = read_verdict(backend)
    except RanktapeError as error:
        console.warn(str(error))
        return None
    return None if judged is None else judged[0]
