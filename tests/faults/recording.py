"""How is a training recorded while its store fails, and what must be true of the run afterwards?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ranktape.capture.staging.ring_file import Counter
from ranktape.storage import IterationStatus, open_run
from tests.capture import light
from tests.capture.light import LARGE, SMALL, LightTrainer
from tests.faults.truth import values
from tests.waiting import until


def arrays(iteration: int) -> dict[str, np.ndarray[Any, Any]]:
    """What is recorded of an iteration: 6 MiB in objects of their own, and a stack."""
    shapes = {**{f"layers.{number}.up": LARGE for number in range(3)}, **{f"layers.{n}.down": SMALL for n in range(20)}}
    return {
        module: values(shape, np.float32, seed=(5, iteration, 0, number))
        for number, (module, shape) in enumerate(shapes.items())
    }


def stage(trainer: LightTrainer, *iterations: int) -> None:
    for iteration in iterations:
        trainer.stage(iteration, arrays(iteration))


def wait_for_problem(trainer: LightTrainer, *, about: str) -> str:
    """What the writer says of something that went wrong."""

    def said() -> list[str]:
        words = trainer.hear()
        return [text for text in (words.get("problem"), *words.get("notices", ())) if about in str(text)]

    until(lambda: bool(said()), said=trainer.hear)
    return said()[-1]


def wait_until_settled(trainer: LightTrainer, num_iterations: int) -> None:
    """Until the writer has stored so many iterations, or said why not."""
    until(lambda: trainer.process.ring.counter(Counter.SETTLED) >= num_iterations, said=trainer.hear)


def wait_for_commit(url: str, iteration: int, *, options: dict[str, Any] | None = None) -> None:
    """Until an iteration is complete."""
    until(lambda: iteration in open_run(url, storage_options=options).iterations)


def check_whole(url: str, iterations: Iterable[int], *, options: dict[str, Any] | None = None) -> None:
    """That these iterations are complete, no others, all of them bit for bit, and that a check finds no error."""
    light.check_whole(url, {iteration: arrays(iteration) for iteration in iterations}, options=options)


def status_of(url: str, iteration: int, *, options: dict[str, Any] | None = None) -> IterationStatus:
    """What the run says of an iteration."""
    (status,) = (one for one in open_run(url, storage_options=options).status() if one.iteration == iteration)
    return status
