"""Do commands, help and errors of the command line say what they should, and is hostile text escaped?"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ranktape import launch
from ranktape._version import __version__
from ranktape.analyze.cli import COMMANDS as QUESTIONS
from ranktape.analyze.cli import cli as questions
from ranktape.analyze.group import RanktapeCommand
from ranktape.analyze.options import FILTERS, flag_of
from ranktape.capture.settings.options import SETTINGS
from ranktape.launch.cli import COMMANDS, cli
from ranktape.storage import open_run
from ranktape.storage.format.layout import Mark
from tests.launch.processes import python
from tests.storage.whole_run import whole_run

HELP_SECONDS = 0.3
"""What `ranktape --help` may take."""

HEAVY = ("torch", "zarr", "numpy", "numba", "matplotlib", "fsspec", "rich")
"""Packages that help must not import."""

CAPTURE = {
    "start_at", "every", "min_iterations", "max_iterations", "first_iteration", "quant_type", "select", "layers",
    "keep", "with_master", "advance_on", "sample_dim", "compiled", "policy", "host_budget_nbytes",
    "block_timeout_seconds", "finish_timeout_seconds", "compression", "keep_last", "stop_when_stored", "record_last",
    "trigger", "spill_dir",
    "strict", "manual", "resume", "overwrite", "storage_options",
}  # fmt: skip
"""The settings of a capture."""

RECORDS = {
    "run", "source", "iteration", "rank", "attempt", "microbatch", "call", "module", "layer_type", "layer_idx",
    "layer_stack", "operation", "phase", "component", "quant_type", "tensor_name", "mode", "dtype", "compute_dtype",
    "batch_size", "where", "storage_options", "skip_unreadable",
}  # fmt: skip
"""The options by which a command chooses records."""

OPTIONS = {
    "demo": {"output", "num_ranks", "steps", "dtype", "quant", "quant_plan", "quant_attention"}
    | (CAPTURE - {"first_iteration", "manual", "advance_on", "record_last", "trigger"}),
    "record": {"url", "quant", "quant_plan", "quant_attention", "capture_config", "words"} | CAPTURE,
    "collect": {"quant", "quant_attention", "output", "timeout", "min_records", "words"}
    | (CAPTURE - {"stop_when_stored", "resume", "quant_type", "first_iteration", "record_last", "trigger"}),
    "status": {"run", "as_json", "follow", "interval", "require_minimum", "storage_options"},
    "trigger": {
        "run", "iterations", "timeout_seconds", "no_wait", "as_json", "storage_options", "keep", "select",
    },
    "runs": {"url", "depth", "as_json", "storage_options"},
    "check": {"run", "deep", "as_json", "storage_options"},
    "repair": {"run", "dry_run", "min_age", "as_json", "storage_options"},
    "push": {"directory", "to", "keep", "as_json", "storage_options"},
    "prune": {"run", "keep_last", "iteration", "yes", "dry_run", "as_json", "storage_options"},
    "rm": {"run", "yes", "dry_run", "storage_options"},
    "cp": RECORDS | {"url", "no_verify", "as_json", "target_storage_options"},
    "export": RECORDS
    | {"target", "to", "metric", "kind", "no_histograms", "form", "per_sample", "overwrite", "view", "by"}
    | {"workers", "scheduler", "no_cache"},
    "import": {"folder", "run", "skip_unreadable", "overwrite", "storage_options"},
    "doctor": {"url", "as_json", "storage_options"},
}  # fmt: skip
"""The parameters of our own commands: users' scripts rely on them, so that a change is made here too."""


def test_every_command_of_ours_is_frozen() -> None:
    assert {*OPTIONS, "analyze"} == set(COMMANDS)


def test_the_settings_of_a_capture_are_frozen() -> None:
    assert {setting.name for setting in SETTINGS} == CAPTURE


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output == f"ranktape {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {name}")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.help
    assert all(option.help for option in command.params if isinstance(option, click.Option))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_parameters_are_frozen(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert {parameter.name for parameter in command.params} == OPTIONS[name]


def test_an_unknown_command_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(cli, ["statsu", "x"])
    assert result.exit_code == 2
    assert "no command 'statsu': use analyze stats or status" in result.output


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_without_analyze_is_answered_with_the_command_that_is_meant(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "runs/x", "--where", "rank == 0"], prog_name="ranktape")
    assert result.exit_code == 2
    assert f"use 'ranktape analyze {name} runs/x --where 'rank == 0''" in result.output


def test_help_lists_every_command_once_without_cutting_its_description() -> None:
    for group, names, path in ((cli, COMMANDS, []), (questions, QUESTIONS, ["analyze"])):
        listed = [name for section in group.sections.values() for name in section]
        assert sorted(listed) == sorted(names)
        lines = CliRunner().invoke(cli, [*path, "--help"], terminal_width=80).output.splitlines()
        for section in group.sections.values():
            assert [f"  {name:<{max(map(len, section))}}  {text}" in lines for name, text in section.items()] == [
                True
            ] * len(section)


@pytest.mark.parametrize("path", [*([one] for one in OPTIONS), *(["analyze", one] for one in QUESTIONS)], ids=" ".join)
def test_help_has_two_examples_that_parse(path: list[str]) -> None:
    group = questions if path[0] == "analyze" else cli
    command = group.get_command(click.Context(group), path[-1])
    assert isinstance(command, RanktapeCommand)
    assert len(command.examples) == 2
    shown = CliRunner().invoke(cli, [*path, "--help"]).output
    for example in command.examples:
        assert f"  {example}\n" in shown
        words = shlex.split(example)
        assert words[: len(path) + 1] == ["ranktape", *path]
        # Parsed and not run.
        command.make_context("ranktape", words[len(path) + 1 :])


def test_help_of_a_question_begins_with_its_own_options_and_folds_the_filters() -> None:
    shown = CliRunner().invoke(cli, ["analyze", "stats", "--help"]).output
    assert shown.index("--metric") < shown.index("Which records:") < shown.index("Output:") < shown.index("Examples:")
    assert "--skip-unreadable" not in shown
    filters = CliRunner().invoke(cli, ["analyze", "stats", "--help-filters"]).output
    assert [flag for flag in map(flag_of, FILTERS) if f"  {flag} " not in filters] == []
    assert "--metric" not in filters


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("analyze replay runs/x --recpe nvfp4", "--recipe"),
        ("analyze overflow runs/x --formt fp8", "--format"),
        ("analyze stats runs/x --layer-typ linear", "--layer-type"),
        ("analyze compare runs/x runs/y --no-distnces", "--no-distances"),
        ("collect --qant bf16", "--quant"),
        ("check runs/x --deeep", "--deep"),
        ("trigger runs/x --itrations 3", "--iterations"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(words: str, meant: str) -> None:
    result = CliRunner().invoke(cli, shlex.split(words))
    assert result.exit_code == 2
    assert result.output.rstrip().endswith(f"Did you mean '{meant}'?")


@pytest.mark.parametrize("name", QUESTIONS)
def test_help_of_a_question_fits_a_screen(name: str) -> None:
    shown = CliRunner().invoke(cli, ["analyze", name, "--help"], terminal_width=80).output
    assert len(shown.splitlines()) <= 50, shown


def test_a_missing_run_is_answered_with_the_runs_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole_run("runs/one", iterations=(0,))
    whole_run("runs/two", iterations=(0,))
    result = CliRunner().invoke(cli, ["analyze", "findings"])
    assert result.exit_code == 2
    assert "Runs here: runs/one, runs/two." in result.output
    result = CliRunner().invoke(cli, ["analyze", "findings", "runs/demo"])
    assert result.exit_code == 1
    assert "beside it there is one, two" in result.output


def test_record_asks_for_the_words_before_the_script() -> None:
    result = CliRunner().invoke(cli, ["record", "train.py"])
    assert result.exit_code == 2
    assert "no -- before the script" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "no script is given"),
        (["--", "missing.py"], "no script 'missing.py'"),
        (["--nproc-per-node", "two", "--", "train.py"], "Unsupported nproc_per_node value: two"),
        (["--evry", "3", "--", "train.py"], "unrecognized arguments: --evry; did you mean --every?"),
        (["--every", "0", "--", "train.py"], "--every 0 is not allowed: give 1 or more"),
        (["--layers", "x", "--", "train.py"], "--layers 'x' is not allowed: give all, or numbers such as"),
        (["--select", "layer_type=lineer", "--", "train.py"], "did you mean linear"),
        (["--capture-config", "missing.yaml", "--", "train.py"], "missing.yaml cannot be read"),
        (["--capture", "nowhere://x", "--", "train.py"], "nowhere://x cannot be opened"),
    ],
)
def test_record_answers_a_mistake_before_torchrun_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('this must not run')\n")
    monkeypatch.chdir(tmp_path)

    def start(*_: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr("os.execv", start)
    result = CliRunner().invoke(cli, ["record", *words])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.distributed
def test_record_records_a_script_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "assert sys.argv[1:] == ['--every', 'x'], sys.argv\n"
        "for _ in range(4):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    words = ["--nproc-per-node", "2", "--every", "2", "--min-iterations", "2", "--", "train.py", "--every", "x"]
    started: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.execv", lambda path, call: started.append([path, *call[1:]]))
    result = CliRunner().invoke(cli, ["record", *words])
    assert result.exit_code == 0, result.output
    [[program, *call]] = started
    assert program == sys.executable
    done = python(*call, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "runs" / "train")
    assert run.iterations == [0, 2]
    assert set(run.select().column("rank").tolist()) == {0, 1}


@pytest.mark.alone
def test_help_answers_at_once_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ranktape.launch.cli import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        f"print('heavy:', *(name for name in {HEAVY} if name in sys.modules))\n"
    )
    durations: list[float] = []
    # The quickest of some: what the machine does besides is not ours.
    while min(durations, default=HELP_SECONDS) >= HELP_SECONDS:
        assert len(durations) < 20, durations
        started = time.perf_counter()
        ended = python("-c", code, cwd=tmp_path, is_forked=False)
        durations.append(time.perf_counter() - started)
        assert ended.stdout.endswith("heavy:\n"), ended.stdout + ended.stderr


@pytest.mark.parametrize("name", sorted(dir(launch)))
def test_a_command_and_its_function_take_the_same_words(name: str) -> None:
    # `import` is a word of Python, and its function is `import_files`.
    shown = name.replace("_", "-")
    command = cli.get_command(click.Context(cli), shown if shown in COMMANDS else name.partition("_")[0])
    assert command is not None
    words = {parameter.name for parameter in command.params} - {"as_json", "yes"}
    if "engine" in inspect.signature(getattr(launch, name)).parameters:
        words = words - {"workers", "scheduler", "no_cache"} | {"engine"}
    arguments = set(inspect.signature(getattr(launch, name)).parameters)
    arguments = {one for one in arguments if not one.startswith("on_")}
    if arguments & {"records", "filters"}:
        # The options by which records are chosen.
        words -= {*FILTERS, "skip_unreadable"}
        words -= {"run", "where", "storage_options"} if "records" in arguments else set()
    assert words == arguments - {"records", "filters"}


@pytest.mark.parametrize(
    ("words", "least"),
    [("runs --depth -1", 0), ("repair --min-age -1", 0), ("prune --keep-last -1", 0), ("status --interval nan", 0.05)],
)
def test_a_number_that_is_too_small_is_refused(words: str, least: float, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, [*words.split(), str(tmp_path)])
    assert result.exit_code == 2
    assert f"{words.split()[1]} " in result.output
    assert f"is not allowed: give {least} or more" in result.output


EVIL = "\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a terminal's commands in the names of objects and in what documents say."""
    path = tmp_path_factory.mktemp("printed") / "run"
    _, attempt, writers = whole_run(str(path), iterations=(0,), close=False)
    writers[0].mark(7, mark=Mark.FAILED, attributes={"reason": EVIL})
    writers[0].close(reason=EVIL)
    for place in (path, path / attempt.path, path / attempt.path / "rank_00000" / "iter_00000000"):
        (place / f"{EVIL}.partial").write_text("x")
        (place / EVIL).write_text("x")
    (path.parent / EVIL).mkdir()
    (path.parent / EVIL / "zarr.json").write_text('"ranktape"')
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["check", "RUN"],
        ["check", "RUN", "--deep", "--json"],
        ["repair", "RUN", "--dry-run", "--min-age", "0"],
        ["status", "RUN"],
        ["runs", "PLACE"],
        ["cp", "RUN", "TARGET"],
        ["cp", "RUN", "TARGET", "--json"],
        ["analyze", "ls", "RUN"],
        ["export", "RUN", "FOLDER"],
        ["import", "PLACE", "IMPORTED"],
    ],
    ids=" ".join,
)
def test_what_a_stranger_wrote_does_not_command_the_terminal(hostile: Path, tmp_path: Path, words: list[str]) -> None:
    places = {"RUN": hostile, "PLACE": hostile.parent} | {
        name: tmp_path / name for name in ("TARGET", "FOLDER", "IMPORTED")
    }
    answer = CliRunner().invoke(cli, [str(places.get(word, word)) for word in words])
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    assert not {letter for letter in answer.output if not letter.isprintable()} - {"\n"}, answer.output
    if "--json" in words:
        json.loads(answer.stdout)
    if words[0] in {"check", "repair", "runs", "status"}:
        assert "owned" in answer.output
