"""Does a run hold the iterations of one training, when two are started for it at the same time?"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.errors import RunExistsError
from ranktape.storage import open_run
from tests.capture.light import SMALL, LightTrainer
from tests.exhaustive import exhaustive
from tests.s3 import S3Server
from tests.waiting import until

pytestmark = pytest.mark.slow

IN_A_STORE = exhaustive("in a folder it is in make test")


def record(url: str, seed: int, *, first: int, barrier: threading.Barrier, **options: Any) -> str | None:
    """Train and record with values that tell the seed; why it was refused."""
    barrier.wait()
    try:
        trainer = LightTrainer(url, min_iterations=3, start_at=first, **options)
    except RunExistsError as error:
        barrier.wait()
        return str(error)
    barrier.wait()
    for iteration in range(first, first + 3):
        trainer.stage(iteration, {"layers.0": np.full(SMALL, seed, np.float32)})
    assert trainer.close()["state"] == "closed"
    return None


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("local", "overwrite"),
        pytest.param("s3", "resume", marks=[pytest.mark.s3, IN_A_STORE]),
    ],
)
def test_one_of_two_launches_has_the_run(
    request: pytest.FixtureRequest, tmp_path: Path, place: str, option: str
) -> None:
    url, options = str(tmp_path / "run"), {}
    if place == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        url, options = server.new_url(), {"storage_options": server.storage_options}
    assert record(url, 0, first=0, barrier=threading.Barrier(1), **options) is None
    barrier = threading.Barrier(2)
    refused: dict[int, str | None] = {}

    def launch(seed: int) -> None:
        refused[seed] = record(url, seed, first=3 * seed, barrier=barrier, **options, **{option: True})

    threads = [threading.Thread(target=launch, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [seed for seed, reason in refused.items() if reason is None]
    assert "another launch records into the run" in str(refused[3 - winner])
    run = open_run(url, storage_options=options.get("storage_options"))
    seeds = {record.iteration: float(record.read().flat[0]) for record in run.select()}
    new = dict.fromkeys(range(3 * winner, 3 * winner + 3), float(winner))
    assert seeds == (new if option == "overwrite" else {**dict.fromkeys(range(3), 0.0), **new})
    assert run.verdict().met
    # Nothing of the two is in the way of a third.
    assert record(url, 3, first=9, barrier=threading.Barrier(1), **options, resume=True) is None


@pytest.mark.parametrize(("required", "is_met"), [(3, False), (1, True)])
@exhaustive("make test has tokens in the names of attempts")
def test_a_launch_that_was_replaced_says_so_and_judges_by_what_it_stored_itself(
    tmp_path: Path, required: int, *, is_met: bool
) -> None:
    url = tmp_path / "run"
    stopped = LightTrainer(url, min_iterations=required, max_iterations=3)
    stopped.stage(0, {"layers.0": np.full(SMALL, 1, np.float32)})
    until(lambda: open_run(url).iterations == [0], seconds=60)
    stopped.stop_writer()
    assert record(str(url), 2, first=10, barrier=threading.Barrier(1), resume=True) is None
    stopped.continue_writer()
    words = stopped.close()
    verdict = words["verdict"]
    assert (verdict["met"], verdict["complete"], verdict["required"]) == (is_met, [0], required)
    assert any("this launch was replaced: another launch continues the run" in one for one in words["notices"])
    assert is_met or any(one.startswith("launch: this launch was replaced") for one in verdict["missing"])
    run = open_run(url)
    assert run.iterations == [0, 10, 11, 12]
    assert run.verdict().met
