"""Is an unmodified training script run as ever, recorded by every rank, and judged by its exit code?"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ranktape.launch.cli import cli
from ranktape.storage import IterationState, open_run
from tests.exhaustive import exhaustive
from tests.launch.processes import PLAIN, Ended, errors, own_lines, python, torchrun

LAUNCH = ("-m", "ranktape.launch")

ALIKE = exhaustive("the launcher treats it as its neighbours")

TRAIN = """
    import os, sys
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = int(os.environ.get("STEPS", "3"))
    for step in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained", sys.argv, loss.item().hex(), flush=True)
"""
"""The shortest training: one process, two linear layers."""


def write_script(folder: Path, *, after: str = "", before: str = "", name: str = "train.py") -> Path:
    """A training script with lines of its own before and after the training."""
    path = folder / name
    path.write_text("\n".join(textwrap.dedent(part) for part in (before, TRAIN, after)))
    return path


def command(name: str, url: str | Path, *words: str) -> Result:
    """What a command answers about a run, in this process."""
    return CliRunner().invoke(cli, [name, str(url), *words])


def unmet(url: Path) -> bool:
    """Whether a shell is told that the minimum is not there."""
    return command("status", url, "--require-minimum").exit_code == 3


def contents(url: Path) -> list[dict[str, Any]]:
    """Everything that the records of a run say, but for the time at which they were taken."""
    return [record.info.to_json() | {"timestamp": 0} for record in open_run(url).select()]


# One process: what the launcher says and returns.


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write_script(tmp_path / "package")
    plain = python("-m", "package.train", "x", cwd=tmp_path)
    ended = python(*LAUNCH, "--capture=run", "-m", "package.train", "x", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain.stdout
    assert open_run(tmp_path / "run").iterations == [0]


@pytest.mark.parametrize(
    ("after", "exit_code", "last_line"),
    [
        ("import sys; sys.exit(7)", 7, None),
        pytest.param("import sys; sys.exit('no data left')", 1, "no data left", marks=ALIKE),
        ("def fail(): raise ValueError('mine')\nfail()", 1, "ValueError: mine"),
    ],
)
def test_a_scripts_failure_stays_its_own(after: str, exit_code: int, last_line: str | None, tmp_path: Path) -> None:
    write_script(tmp_path, after=after)
    ended = python(*LAUNCH, "--capture", "run", "train.py", cwd=tmp_path)
    assert ended.returncode == exit_code
    assert ended.stdout.startswith("trained")
    assert errors(ended) == []
    assert "/ranktape/launch/" not in ended.stderr
    assert "runpy" not in ended.stderr
    if last_line:
        assert last_line in ended.stderr.splitlines()


def test_a_script_that_exits_with_zero_has_succeeded(tmp_path: Path) -> None:
    # Its forked children have codes of their own, and end no capture.
    fork = """
        import os, sys
        codes = []
        for code in (0, 5):
            if (child := os.fork()) == 0:
                sys.exit(code)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print("children", codes)
        sys.exit(0)
    """
    write_script(tmp_path, after=fork)
    ended = python(*LAUNCH, "--capture", "run", "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "children [0, 5]" in ended.stdout
    assert open_run(tmp_path / "run").iterations == [0]


def test_a_training_that_is_too_short_is_an_error_that_names_what_is_missing(tmp_path: Path) -> None:
    write_script(tmp_path)
    url = tmp_path / "run"
    ended = python(
        *LAUNCH, "--capture", url, "--start-at", "2", "--every", "2", "--min-iterations", "3", PLAIN.name, cwd=tmp_path
    )
    assert ended.returncode == 2  # no such script here
    ended = python(
        *LAUNCH, "--capture", url, "--start-at", "2", "--every", "2", "--min-iterations", "3", "train.py", cwd=tmp_path
    )
    assert ended.returncode == 1
    (error,) = errors(ended)
    assert "1 of 3 guaranteed iterations are stored complete" in error
    assert "Traceback" not in ended.stderr
    demanded = command("status", url, "--require-minimum")
    assert demanded.exit_code == 3
    assert "1 of 3 guaranteed iterations" in demanded.stdout
    assert "Error: minimum not met: 1 of 3" in demanded.stderr
    assert command("status", url).exit_code == 0


def test_a_script_that_ends_before_the_first_captured_iteration_is_an_error(tmp_path: Path) -> None:
    write_script(tmp_path)
    ended = python(*LAUNCH, "--capture", "run", "--start-at", "50", "train.py", cwd=tmp_path)
    assert ended.returncode == 1
    (error,) = errors(ended)
    assert "0 of 1 guaranteed iterations are stored complete" in error
    assert "Traceback" not in ended.stderr
    # Nothing is stored there, and nothing more will be: the place is free.
    again = python(*LAUNCH, "--capture", "run", "train.py", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert open_run(tmp_path / "run").iterations == [0]


ASKED_FOR_HELP = """
    import argparse
    import torch

    argparse.ArgumentParser().parse_args()
"""

GENERATES = """
    import torch

    model = torch.nn.Linear(3, 3).eval()
    with torch.no_grad():
        model(torch.ones(2, 3))
"""


@pytest.mark.parametrize(
    ("script", "exit_code", "match"),
    [
        (ASKED_FOR_HELP, 0, "the process ended before its first training forward"),
        (GENERATES, 1, "models ran, but none in training mode: --select mode=eval records inference"),
        pytest.param(GENERATES + "    raise SystemExit", 1, "models ran, but none in training mode", marks=ALIKE),
        ("import torch", 1, "the process ended before its first training forward"),
    ],
    ids=["help", "inference", "inference that exits", "nothing"],
)
def test_a_script_that_does_not_train_leaves_no_run_and_is_told_why(
    script: str, exit_code: int, match: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    ended = python(*LAUNCH, "--capture", "folder/run", "train.py", "--help", cwd=tmp_path)
    # A script that leaves before any model runs has done what it was asked for.
    assert ended.returncode == exit_code
    (line,) = own_lines(ended)
    assert match in line
    assert len(errors(ended)) == exit_code
    assert "--start-at" not in line
    assert not (tmp_path / "folder").exists()


def test_a_script_that_fails_before_it_trains_leaves_no_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise ValueError('mine')\n")
    ended = python(*LAUNCH, "--capture", "run", "train.py", cwd=tmp_path)
    assert (ended.returncode, own_lines(ended)) == (1, [])
    assert ended.stderr.splitlines()[-1] == "ValueError: mine"
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_refused_resumed_or_replaced(tmp_path: Path) -> None:
    write_script(tmp_path)
    url = tmp_path / "run"
    assert python(*LAUNCH, "--capture", url, "train.py", cwd=tmp_path).returncode == 0
    refused = python(*LAUNCH, "--capture", url, "train.py", cwd=tmp_path)
    assert refused.returncode == 1
    (error,) = errors(refused)
    assert "--resume" in error
    assert "--overwrite" in error
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr

    again = ("--start-at", "1", "--min-iterations", "2")
    resumed = python(*LAUNCH, "--capture", url, "--resume", *again, "train.py", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert open_run(url).iterations == [0, 1] or open_run(url).iterations == [0, 1, 2]
    assert {row.attempt for row in open_run(url).status()} == {0, 1}

    replaced = python(*LAUNCH, "--capture", url, "--overwrite", "--start-at", "2", "train.py", cwd=tmp_path)
    assert replaced.returncode == 0, replaced.stderr
    assert open_run(url).iterations == [2]


@pytest.mark.parametrize(
    ("words", "exit_code", "match"),
    [
        (["--capture", "run", "--every", "0", "train.py"], 2, "--every 0 is not allowed: give 1 or more"),
        (["--capture", "run", "--select", "module=decoder.*", "train.py"], 1, "decoder.*"),
    ],
    ids=["before", "in"],
)
def test_a_mistake_met_before_the_training_or_in_it_is_one_line(
    words: list[str], exit_code: int, match: str, tmp_path: Path
) -> None:
    write_script(tmp_path)
    ended = python(*LAUNCH, *words, cwd=tmp_path)
    assert len(errors(ended)) == 1, ended.stderr
    assert match in errors(ended)[0]
    assert "Traceback" not in ended.stderr
    assert ended.returncode == exit_code
    assert ended.stdout == ""


# Two ranks over gloo.


TRAINING = (PLAIN, "--steps", "6", "--micro-batches", "4")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended, Ended]:
    """A run of two ranks with four microbatches, what its training printed, and what it prints without us."""
    folder = tmp_path_factory.mktemp("captured")
    plain = torchrun(*TRAINING, cwd=folder)
    options = ("--capture", "run", "--start-at", "1", "--every", "2", "--min-iterations", "2")
    return folder / "run", torchrun(*LAUNCH, *options, *TRAINING, cwd=folder), plain


@pytest.mark.distributed
def test_losses_are_equal_bit_for_bit(captured: tuple[Path, Ended, Ended]) -> None:
    _, ended, plain = captured
    assert plain.returncode == 0, plain.stderr
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain.stdout
    assert "final loss 0x1." in ended.stdout


@pytest.mark.distributed
def test_every_rank_is_there_with_four_microbatches_apart(captured: tuple[Path, Ended, Ended]) -> None:
    url, ended, _ = captured
    assert ended.returncode == 0, ended.stderr
    run = open_run(url)
    assert run.iterations == [1, 3]
    for row in run.status():
        assert row.committed_ranks == [0, 1]
        assert row.missing == {}
    inputs = run.select(module="blocks.0.qkv", tensor_name="input", iteration=3)
    assert sorted((record.rank, record.microbatch) for record in inputs) == [
        (rank, microbatch) for rank in (0, 1) for microbatch in range(4)
    ]
    # Every microbatch of every rank has data of its own.
    assert len({record.checksum for record in inputs}) == 8
    assert len({record.read().tobytes() for record in inputs}) == 8


@pytest.mark.distributed
def test_status_tells_people_and_programs_that_the_minimum_is_there(captured: tuple[Path, Ended, Ended]) -> None:
    url, _, _ = captured
    told = command("status", url, "--require-minimum")
    assert told.exit_code == 0, told.stderr
    assert "minimum met: 2 of 2 guaranteed iterations are stored complete (1, 3)" in told.stdout
    document = json.loads(command("status", url, "--json").stdout)
    assert [row["state"] for row in document["iterations"]] == ["complete", "complete"]
    assert document["verdict"]["met"] is True
    assert all(row["num_records"] > 0 and row["nbytes"] > 0 for row in document["iterations"])


@pytest.mark.alone  # torchrun has some seconds to end the other ranks before they say the same
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--capture", "run", "missing.py"], "no script 'missing.py'"),
        (["--capture", "/proc/run", "train.py"], "/proc/run"),
    ],
    ids=["missing script", "unwritable path"],
)
def test_several_ranks_say_a_mistake_once_and_torchrun_repeats_it(words: list[str], match: str, tmp_path: Path) -> None:
    write_script(tmp_path)
    ended = torchrun(*LAUNCH, *words, cwd=tmp_path)
    assert ended.returncode == 1
    assert len(errors(ended)) == 1, ended.stderr
    assert match in errors(ended)[0]
    told = [line for line in ended.stderr.splitlines() if line.startswith("  traceback : ")]
    # Rank 1 was ended by torchrun before it could say the same.
    assert [line for line in told if "Signal 15" not in line] == [f"  traceback : {errors(ended)[0]}"]


@pytest.mark.distributed
@exhaustive("one process that ends too soon is in make test")
def test_two_ranks_that_end_too_soon_are_an_error_of_rank_0(tmp_path: Path) -> None:
    ended = torchrun(*LAUNCH, "--capture", "run", "--start-at", "9", PLAIN, "--steps", "2", cwd=tmp_path)
    assert ended.returncode == 1
    assert "final loss" in ended.stdout
    (error,) = errors(ended)
    assert "0 of 1 guaranteed iterations are stored complete" in error
    assert f"  traceback : {error}" in ended.stderr


def test_the_writer_says_how_the_run_ended_where_a_rank_is_killed_and_torchrun_ends_the_others(tmp_path: Path) -> None:
    after = """
        import signal, time
        model(torch.randn(4, 8)).square().mean()
        if os.environ["RANK"] == "1":
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(120)
    """
    write_script(tmp_path, after=after)
    words = (*LAUNCH, "--capture", "run", "--min-iterations", "9", "train.py")
    ended = torchrun(*words, cwd=tmp_path, env={"STEPS": "2"})
    assert ended.returncode == 1
    told = own_lines(ended)[-1]
    assert told.startswith(
        "ranktape: the training process of rank 0 died (killed by SIGTERM); minimum not met: 2 of 9 "
    )
    assert told.endswith(f": see 'ranktape status {tmp_path / 'run'}'")
    # The coordinator outlives the training, and closes the attempt.
    run = open_run(tmp_path / "run")
    assert [status.state for status in run.status()[:2]] == [IterationState.COMPLETE] * 2
    cut_off = run.status()[2]
    assert cut_off.state is IterationState.PARTIAL
    assert "the training process died" in cut_off.missing[1]
    assert "iteration 2 is partial" in run.verdict().message()
    for record in run.select():
        record.read()  # compares with the checksum that was taken when it was written


FAILING = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("a bad node")
"""
"""A training that fails once, after it was captured."""


def check_resumed(ended: Ended, url: Path) -> None:
    """A first attempt has failed, a second one has been captured beside it, in the same run."""
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeError: a bad node" in ended.stderr
    assert errors(ended) == []
    run = open_run(url)
    assert {row.attempt for row in run.status()} == {0, 1}
    verdict = run.verdict()
    assert verdict is not None
    assert verdict.met


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("words", "env"),
    [
        ((*LAUNCH, "--capture", "run", "--min-iterations", "3"), {}),
        pytest.param((), {"RANKTAPE_CAPTURE": "run", "RANKTAPE_MIN_ITERATIONS": "3"}, marks=ALIKE),
    ],
    ids=["launcher", "variable"],
)
def test_a_restart_by_torchrun_resumes_by_itself(words: tuple[str, ...], env: dict[str, str], tmp_path: Path) -> None:
    # No process group: the ranks of the capture meet in torchrun's store, which outlives the restart.
    shorter = "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.environ['STEPS'] = '1'"
    write_script(tmp_path, before=shorter, after=FAILING)
    ended = torchrun(*words, "train.py", cwd=tmp_path, options=["--max-restarts=1"], env=env)
    check_resumed(ended, tmp_path / "run")


@exhaustive("it differs from the restart above in torch's store alone")
@pytest.mark.distributed
def test_a_restart_resumes_where_torchruns_store_is_not_shared(tmp_path: Path) -> None:
    # Only so does gloo restart reliably: otherwise it finds the addresses of processes that are gone (pytorch #135712).
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    fails_in_step_2 = f"        if step == 2:{textwrap.indent(textwrap.dedent(FAILING), ' ' * 12)}"
    source = PLAIN.read_text()
    advance = "        optimizer.zero_grad()\n"
    assert source.count(advance) == 1
    (tmp_path / "train.py").write_text(source.replace(advance, advance + fails_in_step_2))
    words = (*LAUNCH, "--capture", "run", "--every", "2", "--min-iterations", "3", "train.py", "--steps", "6")
    ended = torchrun(*words, cwd=tmp_path, options=["--max-restarts=1"], env=environment)
    check_resumed(ended, tmp_path / "run")
    assert "final loss" in ended.stdout


@pytest.mark.distributed
def test_an_unmet_minimum_does_not_make_torchrun_train_again(tmp_path: Path) -> None:
    write_script(tmp_path)
    ended = torchrun(
        *LAUNCH, "--capture", "run", "--start-at", "9", "train.py", cwd=tmp_path, options=["--max-restarts=2"]
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") == 2
    assert errors(ended) == []
    (warning,) = [line for line in own_lines(ended) if "guaranteed iterations" in line]
    assert "ranktape status run --require-minimum" in warning
    assert unmet(tmp_path / "run")


CONFIG = """\
capture: run
min-iterations: 3
every: 2
policy: skip
select:
  - {layer_type: attention, phase: pre, keep: statistics}
  - tensor_name=input rank=1
"""


@pytest.mark.distributed
def test_a_launch_by_a_file_with_the_last_word_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "capture.yaml").write_text(CONFIG)
    words = ("--capture-config", "capture.yaml", "--min-iterations", "4", PLAIN, "--steps", "9")
    ended = torchrun(*LAUNCH, *words, cwd=tmp_path, env={"RANKTAPE_EVERY": "1", "RANKTAPE_MIN_ITERATIONS": "99"})
    assert ended.returncode == 0, ended.stderr
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2, 3]
    found = {(record.iteration, record.rank, record.layer_type, record.keep) for record in run.select()}
    assert found == {
        *((iteration, rank, "attention", "statistics") for iteration in range(4) for rank in (0, 1)),
        *((iteration, 1, "linear", "values") for iteration in range(4)),
    }
    assert {record.tensor_name for record in run.select(layer_type="linear")} == {"input"}
    assert {record.phase for record in run.select(layer_type="attention")} == {"pre"}
    assert all(not row.silent_sites for row in run.status())


def test_a_launch_by_a_script_under_the_launcher_has_the_settings_of_its_user(tmp_path: Path) -> None:
    again = "subprocess.run([sys.executable, '-m', 'ranktape.launch', '--capture', 'inner', 'train.py'], check=True)"
    write_script(tmp_path)
    write_script(tmp_path, name="outer.py", after=f"import subprocess\n{again}")
    words = ("--capture", "outer", "--start-at", "1", "--every", "2", "--select", "tensor_name=input", "outer.py")
    ended = python(*LAUNCH, *words, cwd=tmp_path, env={"RANKTAPE_MIN_ITERATIONS": "2", "STEPS": "4"})
    assert ended.returncode == 0, ended.stderr
    outer, inner = open_run(tmp_path / "outer"), open_run(tmp_path / "inner")
    assert (outer.iterations, inner.iterations) == ([1, 3], [0, 1])
    assert {record.tensor_name for record in outer.select()} == {"input"}
    assert {record.tensor_name for record in inner.select()} > {"input"}
