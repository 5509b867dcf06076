"""Is the writer process light, and unaware of ranks and of what is captured?"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from ranktape.capture import Capture
from ranktape.capture.staging.process import writer_environment
from ranktape.capture.writer import Trainer
from ranktape.storage import open_run
from tests.capture.light import LightTrainer, tensors
from tests.waiting import until


def test_what_the_trainer_tells_the_writer_has_it_load_no_torch(tmp_path: Path) -> None:
    with Capture(tmp_path / "run") as capture:
        model = torch.nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()
        process = capture._process._process
        assert process is not None
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "numpy" in maps
        assert "libtorch" not in maps
        torch.optim.SGD(model.parameters()).step()


def test_the_first_problem_stays_and_the_others_are_counted(tmp_path: Path) -> None:
    trainer = LightTrainer(str(tmp_path / "run"))
    trainer.stage(0, tensors(0))
    until(lambda: open_run(tmp_path / "run").iterations == [0])
    [rank] = (tmp_path / "run").glob("attempt_*/rank_00000")
    rank.rename(tmp_path / "hidden")
    rank.write_text("in the way")
    for iteration in (1, 2):
        trainer.stage(iteration, tensors(iteration))
    words = trainer.close()
    assert words["problem"].startswith("iteration 1 is not stored by rank 0: cannot write")
    later = [notice for notice in words["notices"] if notice.startswith("iteration 2 is not stored by rank 0")]
    assert (len(later), words["num_more_problems"]) == (1, 1)


def test_how_a_trainer_ended_is_known_though_its_threads_take_their_time_and_its_parent_waits() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        trainer = Trainer(process.pid)
        threading.Timer(0.3, process.send_signal, [signal.SIGSEGV]).start()
        threading.Thread(target=process.wait).start()
        assert trainer.ending() == "killed by SIGSEGV"


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGTERM, "killed by SIGTERM"), (signal.SIGRTMIN + 6, "killed by signal 40")]
)
def test_a_signal_without_a_name_is_told_by_its_number(number: int, ending: str) -> None:
    process = subprocess.Popen(["sleep", "60"])
    trainer = Trainer(process.pid)
    process.send_signal(number)
    until(trainer.has_ended)
    assert trainer.ending() == ending
    process.wait()


def test_the_writer_inherits_no_rank_and_no_capture() -> None:
    environment = {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_RUN_ID": "none",
        "RANKTAPE_CAPTURE": "runs/x",
        "RANKTAPE_STORAGE_OPTIONS": '{"secret": "mine"}',
        "RANKTAPE_EVERY": "2",
        "TENSOR_SAVE_ENABLED": "true",
        "OMP_NUM_THREADS": "16",
        "AWS_PROFILE": "mine",
        "PATH": os.environ["PATH"],
    }
    kept = writer_environment(environment)
    assert kept["AWS_PROFILE"] == "mine"
    assert kept["OMP_NUM_THREADS"] == "1"
    assert not any(name.startswith(("RANK", "LOCAL_", "WORLD", "MASTER", "TORCH", "TENSOR_SAVE")) for name in kept)
