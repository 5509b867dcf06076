"""Says how a capture ended: the verdict of its writer, or what the store and this rank know without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ranktape.capture.console import Console
from ranktape.capture.staging.process import WriterProcess
from ranktape.errors import RanktapeError
from ranktape.storage.format.progress import RunVerdict
from ranktape.storage.places.backend import Backend


def verdict_of(
    words: Mapping[str, Any],
    *,
    rank: int,
    backend: Backend,
    process: WriterProcess,
    console: Console,
    required: int,
    waited_seconds: float,
) -> RunVerdict:
    """The writer's verdict on rank 0; elsewhere, and without one, what the store says and this rank knows.

    `words` are the writer's last ones; what went wrong is said on the console.
    """
    console.pass_on(words)
    if "verdict" in words:
        return RunVerdict(**words["verdict"])
    state = words.get("state")
    problem = words.get("error") or words.get("problem")
    if "error" not in words and (num_more := words.get("num_more_problems")):
        problem = f"{problem}; {num_more} more problem{'s' * (num_more > 1)} came after it"
    if state == "late":
        problem = f"not everything was stored within {waited_seconds:g} s; the writer goes on"
    elif state not in {"closed", "failed"}:
        problem = f"the writer process ended: {process.ending()}"
    if problem is not None:
        console.warn_once(str(problem))
    missing = [] if problem is None else [f"rank {rank}: {problem}"]
    # Only rank 0 has a coordinator; the others answer for what they stored themselves.
    if rank == 0:
        # Not at the top: whoever imports `Capture` does without what reads runs.
        from ranktape.storage.format.progress import read_verdict

        try:
            # Not by the attempt of another launch that has taken the run.
            judged = read_verdict(backend, until=words.get("attempt"))
        except RanktapeError as error:
            judged = None
            console.warn(str(error))
        if judged is not None:
            stored = judged[0]
            return stored if stored.met else dataclasses.replace(stored, missing=[*stored.missing, *missing])
    is_met = (rank != 0 or not required) and problem is None
    return RunVerdict(met=is_met, required=required, complete=[], missing=missing, final=False)
