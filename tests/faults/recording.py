"""How is a training recorded while its store fails, and what must be true of the run afterwards?"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from ranktape.storage import IterationStatus, open_run
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from tests.capture.light import LARGE, SMALL, LightTrainer
from tests.faults.truth import values
from tests.strategies import raw_bytes

PATIENCE_SECONDS = 60.0


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
    deadline = time.monotonic() + PATIENCE_SECONDS
    while about not in str((words := trainer.hear()).get("problem")):
        assert time.monotonic() < deadline, words
        time.sleep(0.02)
    return str(words["problem"])


def wait_for_commit(url: str, iteration: int, *, options: dict[str, Any] | None = None) -> None:
    """Until an iteration is complete."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while iteration not in open_run(url, storage_options=options).iterations:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_whole(url: str, iterations: Iterable[int], *, options: dict[str, Any] | None = None) -> None:
    """That these iterations are complete, no others, all of them bit for bit, and that a check finds no error."""
    run = open_run(url, storage_options=options)
    assert run.iterations == sorted(iterations)
    for iteration in run.iterations:
        expected = arrays(iteration)
        records = run.select(iteration=iteration)
        assert sorted(record.info.module for record in records) == sorted(expected)
        for record in records:
            assert raw_bytes(record.read()) == raw_bytes(expected[record.info.module]), record
    report = check_run(open_backend(url, storage_options=options), deep=True)
    assert not [finding.text() for finding in report.findings if finding.is_error]


def status_of(url: str, iteration: int, *, options: dict[str, Any] | None = None) -> IterationStatus:
    """What the run says of an iteration."""
    (status,) = (one for one in open_run(url, storage_options=options).status() if one.iteration == iteration)
    return status
