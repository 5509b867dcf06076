"""Does RANKTAPE_CAPTURE=URL record a training whose command line is unchanged, and say how it ended?"""

from __future__ import annotations

import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

import ranktape_autoload
from ranktape.capture.staging.process import writer_environment
from ranktape.storage import open_run
from tests.exhaustive import exhaustive
from tests.launch.processes import CHECKOUT, Ended, errors, own_lines, python, torchrun
from tests.launch.test_runner import LAUNCH, command, contents, unmet, write_script

RUN = {"RANKTAPE_CAPTURE": "run"}
"""What a shell exports: record into the folder `run`."""


def run_script(folder: Path, source: str, *words: str, **environment: str) -> Ended:
    """Run a training script that the environment asks to record."""
    (folder / "train.py").write_text(textwrap.dedent(source))
    return python("train.py", *words, cwd=folder, env={**RUN, **environment})


ALIKE = exhaustive("it takes the way of its neighbours")


def reason_of(url: Path) -> str:
    """Why the run says that its capture ended."""
    verdict = open_run(url).verdict()
    return " ".join([*verdict.missing, verdict.message()])


# `import torch` comes first.


def test_without_a_variable_nothing_of_ours_is_imported(tmp_path: Path) -> None:
    script = "import sys, torch; print(*(name for name in sys.modules if name.startswith('ranktape')))"
    assert python("-c", script, cwd=tmp_path).stdout.split() == ["ranktape_autoload"]
    assert python("-c", script, cwd=tmp_path, env={"RANKTAPE_CAPTURE": ""}).stdout.split() == ["ranktape_autoload"]


@pytest.mark.parametrize(
    "broken",
    [
        "raise SystemExit(3)",
        pytest.param("raise ImportError('numba is not there')", marks=ALIKE),
        pytest.param("def f(:", marks=ALIKE),
        "raise BaseException('odd\\nlines')",
    ],
)
def test_a_broken_installation_does_not_break_import_torch(broken: str, tmp_path: Path) -> None:
    (tmp_path / "ranktape").mkdir()
    (tmp_path / "ranktape" / "__init__.py").write_text(broken + "\n")
    ended = python("-c", "import torch; print('fine')", cwd=tmp_path, env={**RUN, "PYTHONPATH": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (0, "fine\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ranktape: error: ")
    assert line.endswith("; the training goes on without a capture")


def test_a_process_without_stderr_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "ranktape").mkdir()
    (tmp_path / "ranktape" / "__init__.py").write_text("raise SystemExit(3)\n")
    script = "import sys; sys.stderr = None; import torch; print('fine')"
    ended = python("-c", script, cwd=tmp_path, env={**RUN, "PYTHONPATH": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (0, "fine\n")


def test_torchs_own_switch_turns_it_off(tmp_path: Path) -> None:
    write_script(tmp_path)
    ended = python("train.py", cwd=tmp_path, env={**RUN, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert ended.stdout.startswith("trained")
    assert not (tmp_path / "run").exists()


def test_the_writer_inherits_no_settings() -> None:
    settings = ["CAPTURE", "CAPTURE_CONFIG", "EVERY", "OWNER_PID", "STORAGE_OPTIONS", "STRICT"]
    kept = writer_environment({f"RANKTAPE_{name}": "x" for name in settings})
    assert not [name for name in kept if name.startswith("RANKTAPE_")]


SAVES = """
    import torch
    from ranktape.capture import get_tensor_saver, save_tensor

    model = torch.nn.Linear(4, 4)
    output = model(torch.ones(2, 4))
    save_tensor(output, "mine", "forward", "bf16", "output")
    get_tensor_saver().close()
"""


def test_the_variables_of_the_legacy_tools_record_what_hooks_see_and_what_is_saved_by_hand(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVES))
    variables = {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": "logs", "TENSOR_SAVER_ITERATION": "7"}
    for words in (("train.py",), (*LAUNCH, "train.py")):
        ended = python(*words, cwd=tmp_path, env=variables)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("ranktape: capturing ") == 1
    run = open_run(tmp_path / "logs")
    # No optimizer stepped; the second program added to the first.
    assert [(status.iteration, status.attempt, status.state) for status in run.status()] == [
        (7, 0, "complete"),
        (7, 1, "complete"),
    ]
    for attempt in (0, 1):
        records = run.select().select(attempt=attempt)
        assert sorted(records.column("tensor_name")) == ["bias", "input", "output", "output", "weight"]
    off = python(
        "-c", "import sys, torch; print('ranktape' in sys.modules)", cwd=tmp_path, env={"TENSOR_SAVE_ENABLED": "0"}
    )
    assert off.stdout == "False\n"


# One process: what is recorded, and how it ends.

DRAWS = """
    import random
    import numpy
    print(random.random(), numpy.random.rand(), torch.rand(1).item())
"""
"""The states of every generator of random numbers, after the training."""


def test_the_launcher_and_the_variable_record_the_same(tmp_path: Path) -> None:
    seeds = "import random, numpy\nrandom.seed(1)\nnumpy.random.seed(1)"
    write_script(tmp_path, before=seeds, after=DRAWS)
    words = ("train.py", "--help", "--capture", "other", "-m", "--", "--min-iterations=0")
    plain = python(*words, cwd=tmp_path)
    assert str(list(words)) in plain.stdout
    launched = python(*LAUNCH, "--capture", "launched", "--start-at", "1", *words, cwd=tmp_path)
    ended = python(*words, cwd=tmp_path, env={**RUN, "RANKTAPE_START": "1"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain.stdout == launched.stdout
    *lines, last = own_lines(launched)
    assert [line.replace("/run:", "/launched:") for line in own_lines(ended)] == lines
    assert last.startswith("ranktape: launched holds 1 iteration of 1 rank, ")
    assert "ranktape status launched; ranktape analyze report launched -o report.html" in last
    assert open_run(tmp_path / "run").iterations == [1]
    assert contents(tmp_path / "run") == contents(tmp_path / "launched")
    assert not (tmp_path / "other").exists()


@exhaustive("make test records scripts by the variable")
def test_a_module_an_isolated_interpreter_and_a_command_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write_script(tmp_path / "package")
    for url, words in {
        "module": ("-m", "package.train", "x"),
        "isolated": ("-I", "package/train.py"),
        "command": ("-c", (tmp_path / "package" / "train.py").read_text()),
    }.items():
        ended = python(*words, cwd=tmp_path, env={"RANKTAPE_CAPTURE": url})
        assert ended.returncode == 0, ended.stderr
        assert open_run(tmp_path / url).iterations == [0]


@pytest.mark.parametrize(
    ("after", "exit_code", "reason"),
    [
        ("raise ValueError('mine')", 1, "the training failed (ValueError)"),
        # The launcher alone learns of an exit code.
        ("import sys; sys.exit(7)", 7, "the training ended after 3 iterations"),
        pytest.param("import sys; sys.exit('no data left')", 1, "the training ended after 3 iterations", marks=ALIKE),
        ("import sys; sys.exit(0)", 0, "the training ended after 3 iterations"),
        ("import os; os._exit(9)", 9, ""),
        ("import signal; signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_the_exit_code_is_the_trainings_own_and_the_run_says_why_it_ended(
    after: str, exit_code: int, reason: str, tmp_path: Path
) -> None:
    write_script(tmp_path, after=after)
    ended = python("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_MIN_ITERATIONS": "9"})
    assert ended.returncode == exit_code, ended.stderr
    assert ended.stdout.startswith("trained")
    assert errors(ended) == []
    assert "ranktape/launch" not in ended.stderr
    assert command("status", tmp_path / "run", "--require-minimum").exit_code == 3
    assert open_run(tmp_path / "run").iterations == [0, 1, 2]
    assert reason in reason_of(tmp_path / "run")


def test_an_exit_that_the_script_takes_back_is_no_failure(tmp_path: Path) -> None:
    after = """
        try:
            sys.exit(3)
        except SystemExit:
            pass
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    """
    write_script(tmp_path, after=after)
    ended = python("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_START": "9"})
    assert ended.returncode == 0
    assert "the training ended after 4 iterations" in reason_of(tmp_path / "run")


def test_an_unmet_minimum_is_told_with_the_command_that_tells_a_shell(tmp_path: Path) -> None:
    write_script(tmp_path)
    ended = python("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_START": "2", "RANKTAPE_MIN_ITERATIONS": "3"})
    assert ended.returncode == 0
    (line,) = [line for line in own_lines(ended) if "guaranteed iterations" in line]
    assert "1 of 3 guaranteed iterations are stored complete" in line
    assert "'ranktape status run --require-minimum' tells a shell" in line
    assert unmet(tmp_path / "run")


# Users' mistakes.


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints without a capture."""
    folder = tmp_path_factory.mktemp("plain")
    write_script(folder)
    return python("train.py", cwd=folder).stdout


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"RANKTAPE_EVERY": "0"}, "RANKTAPE_EVERY"),
        pytest.param({"RANKTAPE_MIN_ITERATONS": "2"}, "RANKTAPE_MIN_ITERATIONS", marks=ALIKE),
        pytest.param({"RANKTAPE_CAPTURE": "file.txt/run"}, "file.txt/run", marks=ALIKE),
        pytest.param({"RANKTAPE_CAPTURE": "nosuch://bucket/run"}, "nosuch", marks=ALIKE),
        ({"RANKTAPE_CAPTURE": "there"}, "RANKTAPE_OVERWRITE=true"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_and_ends_the_training_only_if_asked(
    environment: dict[str, str], match: str, plain: str, tmp_path: Path
) -> None:
    write_script(tmp_path)
    (tmp_path / "file.txt").write_text("a file")
    if environment.get("RANKTAPE_CAPTURE") == "there":
        assert python("train.py", cwd=tmp_path, env=environment).returncode == 0
    ended = python("train.py", cwd=tmp_path, env={**RUN, **environment})
    assert (ended.returncode, ended.stdout) == (0, plain)
    (line,) = errors(ended)
    assert match in line
    assert line.endswith("; the training goes on without a capture")
    assert "Traceback" not in ended.stderr

    strict = python("train.py", cwd=tmp_path, env={**RUN, **environment, "RANKTAPE_STRICT": "true"})
    assert strict.returncode in {1, 2}
    assert strict.stdout == ""
    assert len(errors(strict)) == 1, strict.stderr
    assert match in errors(strict)[0]
    assert "Traceback" not in strict.stderr


STACK = """
    import os
    import torch
    from torch import nn

    for name in {folders}:
        os.makedirs(name, exist_ok=True)
        os.chdir(name)
    model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]))
    model.forward = lambda tokens: model[1][2](model[1][1](model[1][0](model[0](tokens))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.tensor([[1, 2, 3]])).square().mean().backward()
        optimizer.step()
    print("trained")
"""
"""A stack of three layers."""


@exhaustive("make test has other mistakes that end no training")
def test_a_layer_that_the_model_has_not_ends_no_training_that_did_not_ask_for_it(tmp_path: Path) -> None:
    ended = run_script(tmp_path, STACK.format(folders=()), RANKTAPE_LAYERS="7")
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in own_lines(ended) if "[rank 0] capture disabled itself" in line]
    assert "layers 0 to 2" in line
    strict = run_script(
        tmp_path, STACK.format(folders=()), RANKTAPE_LAYERS="7", RANKTAPE_STRICT="1", RANKTAPE_CAPTURE="s"
    )
    assert (strict.returncode, strict.stdout) == (1, "")
    assert "RANKTAPE_LAYERS 7 is not in the model" in strict.stderr
    launched = python(*LAUNCH, "--capture", "l", "--layers", "7", "train.py", cwd=tmp_path)
    assert (launched.returncode, launched.stdout) == (2, "")
    assert "--layers 7 is not in the model" in errors(launched)[0]


def test_paths_are_meant_from_where_the_program_began(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("min_iterations = 2\nspill_dir = 'spilled'\n")
    settings = {"RANKTAPE_CAPTURE_CONFIG": "settings.toml"}
    ended = run_script(tmp_path, STACK.format(folders=("outputs", "today")), **settings)
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    assert "run" in {path.name for path in tmp_path.iterdir()}
    assert list((tmp_path / "outputs" / "today").iterdir()) == []


RANKS = """
    import os
    import torch
    import torch.distributed as dist

    if os.environ["RANK"] == "1":
        os.environ["RANKTAPE_EVERY"] = "none"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.distributed
@exhaustive("it waits")
def test_a_rank_that_gave_up_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    began = time.monotonic()
    ended = torchrun("train.py", cwd=tmp_path, env=RUN)
    assert time.monotonic() - began < 100, ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert any("[rank 1] RANKTAPE_EVERY='none'" in line for line in errors(ended)), ended.stderr
    assert "RANKTAPE_EVERY='none' is not allowed" in reason_of(tmp_path / "run")


STRICT_DECODER = {"RANKTAPE_SELECT": "module=decoder.*", "RANKTAPE_STRICT": "true"}


@exhaustive("a layer that the model has not is refused in the same place")
def test_a_training_of_which_nothing_is_recorded_goes_on(plain: str, tmp_path: Path) -> None:
    write_script(tmp_path)
    ended = python("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_SELECT": "module=decoder.*"})
    assert (ended.returncode, ended.stdout) == (0, plain), ended.stderr
    assert "decoder.*" in ended.stderr
    assert "Traceback" not in ended.stderr
    strict = python("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_CAPTURE": "strict"} | STRICT_DECODER)
    assert (strict.returncode, strict.stdout) == (1, "")
    assert re.search(r"^ranktape\.[\w.]+Error: .*decoder\.\*", strict.stderr, re.MULTILINE), strict.stderr


def test_the_tests_run_what_is_in_the_checkout() -> None:
    assert Path(str(ranktape_autoload.__file__)).parent == CHECKOUT
    assert sys.version_info >= (3, 11)
