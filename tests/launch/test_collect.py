"""Does one command train a script in several precisions, keep what it can, and compare?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from ranktape.errors import UsageError
from ranktape.launch.cli import cli
from ranktape.launch.collect import PRODUCTS, TARGET_SQNR, _summary, _tail, split_words
from ranktape.launch.script import Script
from ranktape.storage import open_run
from ranktape.storage.places.urls import open_backend
from tests.analyze.runs import model_tensors, store
from tests.analyze.test_report import data_of
from tests.exhaustive import exhaustive
from tests.launch.processes import CHECKOUT, Ended, python
from tests.s3 import S3Server
from tests.waiting import until

TRAIN = """
    import os, sys, time
    import torch

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    if "ddp" in sys.argv:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(100_000):
        x = torch.randn(16, 32)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if "fail" in sys.argv or ("fail-in-mxfp8" in sys.argv and "mxfp8" in repr(model)):
            raise ValueError("no more data")
        if "wait" in sys.argv and step == 1:
            with open("waiting", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
"""
"""A training of its own, which knows nothing of us, and would take hours."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the script is."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    return tmp_path


def _collect(*words: str, cwd: Path) -> Ended:
    return python("-m", "ranktape.launch.cli", "collect", "--output", "runs", *words, cwd=cwd)


def test_each_precision_is_trained_recorded_and_compared(folder: Path) -> None:
    # A command that has stored nothing, as one with a mistake in it, is in nobody's way.
    (folder / "runs").mkdir()
    (folder / "runs" / "collect.json").write_text('{"command": ["other.py"]}')
    words = ("--min-iterations", "2", "--", "--nproc-per-node", "2", "train.py", "ddp")
    first = _collect("--quant", "bf16", *words, cwd=folder)
    assert first.returncode == 0, first.stderr
    assert "[bf16, 1 of 1] done in" in first.stdout
    ended = _collect("--quant", "bf16,mxfp4", *words, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "[bf16, 1 of 2] is stored already in runs/bf16" in ended.stdout
    for quant_type in ("bf16", "mxfp4"):
        run = open_run(folder / "runs" / quant_type)
        assert len(run.iterations) == 2
        assert {(record.quant_type, record.rank) for record in run.select()} == {(quant_type, 0), (quant_type, 1)}
    assert "[mxfp4, 2 of 2] 2 iterations complete" in ended.stdout
    head = next(line.split() for line in ended.stdout.splitlines() if line.startswith("quant_type"))
    rows = {line.split()[0]: line.split() for line in ended.stdout.splitlines() if line.startswith(("bf16 ", "mxfp4 "))}
    # Both stored two iterations: a constant column is a note.
    assert "iterations" not in head
    assert "iterations of each: 2" in ended.stdout
    column = head.index("SQNR")
    assert rows["bf16"][column] == "-"
    assert 5 < float(rows["mxfp4"][column]) < 25
    assert float(rows["mxfp4"][column + 1]) < float(rows["mxfp4"][column])
    page = (folder / "runs" / "report.html").read_text()
    parts = ("Products in each precision", "<h2>Loss</h2>", "Differences from bf16", 'id="headline"')
    assert sorted(map(page.index, parts)) == [page.index(part) for part in parts]
    assert "2 sources (bf16, mxfp4)" in page
    data = data_of(page)
    matrix, losses = data["recipes"], data["losses"]
    assert matrix["target"] == TARGET_SQNR
    assert matrix["rows"] == ["0", "2"]
    assert {one["product"] for one in matrix["columns"]} == set(PRODUCTS)
    assert {one["recipe"] for one in matrix["columns"]} == {"mxfp4"}
    # The input of the first layer needs no gradient.
    assert [[5 < value < 25 for value in row if value is not None] for row in matrix["sqnr"]] == [
        [True] * 2,
        [True] * 3,
    ]
    assert list(losses) == ["bf16", "mxfp4"]
    printed = (folder / "runs" / "mxfp4.log").read_text().splitlines()
    expected = {int(line.split()[1]): float(line.split()[3]) for line in printed if line.startswith("step ")}
    assert dict(map(tuple, losses["mxfp4"])) == expected

    other = _collect("--quant", "bf16", "--", "train.py", cwd=folder)
    assert other.returncode == 1
    assert "runs has runs of another command (--nproc-per-node 2 train.py ddp)" in other.stderr


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ([(0, 2.5), (10, 2.25)], "loss: at step 10, the last step for which all trainings printed a loss"),
        ([], "no loss: mxfp8 printed no line such as 'step 10 loss 2.345'"),
        ([(5, 2.5)], "no loss: there is no step for which all trainings printed a loss"),
    ],
)
def test_where_no_loss_is_shown_a_note_says_why(losses: list[tuple[int, float]], note: str, tmp_path: Path) -> None:
    records = store(tmp_path / "run", model_tensors()).select()
    runs = {"bf16": records, "mxfp8": records}
    table = _summary(runs, {}, {"bf16": [(0, 2.75), (10, 2.0)], "mxfp8": losses})
    assert [one for one in table.notes if "loss" in one] == [note]


@pytest.mark.s3
@exhaustive("make test collects into a folder")
def test_runs_logs_and_page_are_in_an_object_store(folder: Path, s3_server: S3Server) -> None:
    url = s3_server.new_url()
    access = ("--storage-options", json.dumps(s3_server.storage_options))
    words = ("--quant", "mxfp4", "--min-iterations", "1", *access, "--", "train.py")
    ended = python("-m", "ranktape.launch.cli", "collect", "--output", url, *words, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert len(open_run(f"{url}/mxfp4", storage_options=s3_server.storage_options).iterations) == 1
    place = open_backend(url, storage_options=s3_server.storage_options)
    assert b"step 0 loss" in (place.get("mxfp4.log") or b"")
    assert b"mxfp4" in (place.get("report.html") or b"")
    again = python("-m", "ranktape.launch.cli", "collect", "--output", url, *words, cwd=folder)
    assert f"[mxfp4, 1 of 1] is stored already in {url}/mxfp4" in again.stdout
    assert not (folder / "runs").exists()


@exhaustive("make test has a first training that fails")
def test_a_training_that_is_late_or_fails_is_said_and_the_others_go_on(folder: Path) -> None:
    late = _collect(
        *("--quant", "mxfp8", "--min-iterations", "5", "--timeout", "20", "--", "--nproc-per-node", "1"),
        *("train.py", "wait"),
        cwd=folder,
    )
    assert late.returncode == 3, late.stderr
    assert "mxfp8: the training was ended after 20 s; what was stored is kept" in late.stderr
    assert len(open_run(folder / "runs" / "mxfp8").iterations) >= 1
    # mxfp8 fails after its first iteration: the last is trained all the same, and what is stored is compared.
    words = ("--min-iterations", "2", "--overwrite", "--", "--nproc-per-node", "1", "train.py", "fail-in-mxfp8")
    failed = _collect("--quant", "bf16,mxfp8,mxfp4", *words, cwd=folder)
    assert failed.returncode == 1
    assert failed.stderr.endswith("Error: mxfp8: the training ended with exit code 1\n")
    assert "ValueError: no more data" in failed.stdout
    rows = [line.split()[0] for line in failed.stdout.splitlines() if line.startswith(("bf16 ", "mxfp8 ", "mxfp4 "))]
    assert rows == ["bf16", "mxfp8", "mxfp4"]


def test_a_script_whose_first_training_fails_is_not_trained_in_the_other_precisions(folder: Path) -> None:
    failed = _collect("--quant", "bf16,mxfp8,mxfp4", "--", "train.py", "fail", cwd=folder)
    assert failed.returncode == 1
    assert "ValueError: no more data" in failed.stdout
    assert "mxfp8, mxfp4: not trained, because the first training failed" in failed.stdout
    assert failed.stderr.endswith("Error: bf16: the training ended with exit code 1\n")
    assert not (folder / "runs" / "mxfp8.log").exists()


@exhaustive("make test collects by torchrun")
def test_a_script_for_one_process_is_started_without_torchrun(folder: Path) -> None:
    alone = TRAIN.replace('torch.distributed.init_process_group("gloo")', 'assert "RANK" not in os.environ, os.environ')
    (folder / "alone.py").write_text(textwrap.dedent(alone))
    words = ("--min-iterations", "2", "--", "python", "-u", "alone.py", "--lr", "1")
    ended = _collect("--quant", "bf16,mxfp8", *words, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for quant_type in ("bf16", "mxfp8"):
        run = open_run(folder / "runs" / quant_type)
        assert len(run.iterations) == 2
        assert {(record.quant_type, record.rank) for record in run.select()} == {(quant_type, 0)}


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 1, marks=exhaustive("as SIGTERM"))],
)
@exhaustive("make test interrupts other commands")
def test_a_collection_that_is_told_to_end_ends_its_training(number: int, code: int, folder: Path) -> None:
    words = ("collect", "--output", "runs", "--quant", "bf16", "--min-iterations", "5", "--", "train.py", "wait")
    process = subprocess.Popen(
        [sys.executable, "-m", "ranktape.launch.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    with process:
        until((folder / "waiting").exists, seconds=120)
        process.send_signal(number)
        assert process.wait(90) == code
    log = (folder / "runs" / "bf16.log").read_text()
    assert "step 1 loss" in log
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "waiting").read_text()), 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--quant", "bf16,mxpf8"), "recipe 'mxpf8' is not known: did you mean mxfp8?"),
        pytest.param(("--quant", "bf16,"), "has an empty name", marks=exhaustive("as the others")),
        (("--quant", "mxfp8,mxfp8"), "has mxfp8 twice"),
        (("--quant", "bf16", "--timeout", "nan"), "--timeout nan is not allowed: give 1 or more"),
        (("--quant", "bf16", "--", "missing.py"), "no script 'missing.py'"),
        (("--quant", "bf16", "--", "python", "missing.py"), "no script 'missing.py'"),
        (("--quant", "bf16", "--", "python", "-c", "1"), "python -c 1 runs no script"),
        (("--quant", "bf16", "--", "--nproc", "1"), "torchrun does not accept"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_trained(
    words: tuple[str, ...], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    ended = CliRunner().invoke(cli, ["collect", "--output", "runs", *words])
    assert ended.exit_code == 2, ended.output
    assert message in ended.output
    assert not (folder / "runs").exists()


def test_the_end_of_a_log_has_our_errors_whenever_they_came(tmp_path: Path) -> None:
    log = tmp_path / "bf16.log"
    lines = ["ranktape: error: the disk is full", *(f"step {step}" for step in range(40))]
    log.write_text("\n".join([*lines, "E1123 16:32:43 torch/distributed/elastic/x.py failed"]))
    assert _tail(log).split("\n    ") == [f"    {lines[0]}", *lines[-15:]]


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here").mkdir()
    (tmp_path / "only_here" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    Script(name="only_here.train", arguments=(), is_module=True).check()
    with pytest.raises(UsageError, match="no module named 'nowhere'"):
        Script(name="nowhere.train", arguments=(), is_module=True).check()


def test_the_words_of_torchrun_end_at_the_script() -> None:
    ours = ("--nproc-per-node", "2", "--max-restarts=1")
    assert split_words(("torchrun", *ours, "train.py", "-m", "x")) == (ours, ("train.py", "-m", "x"))
    assert split_words((*ours, "-m", "package.train", "--lr", "1")) == (ours, ("-m", "package.train", "--lr", "1"))
    assert split_words(("python3", "train.py", "-m")) == (("python",), ("train.py", "-m"))
    assert split_words(("python", "-u", "-X", "dev", "-m", "a.b")) == (("python", "-u", "-X", "dev"), ("-m", "a.b"))
    with pytest.raises(UsageError, match="--no-python cannot be recorded"):
        split_words(("--no-python", "train.sh"))
