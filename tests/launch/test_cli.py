"""Does every command answer for itself, quickly, and with the right exit code?"""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ranktape import launch
from ranktape.analyze.options import FILTERS
from ranktape.capture.settings.options import SETTINGS
from ranktape.launch.cli import COMMANDS, cli
from ranktape.lazy_names import __version__
from tests.launch.processes import python

HELP_SECONDS = 0.3
"""What `ranktape --help` may take."""

HEAVY = ("torch", "zarr", "numpy", "numba", "matplotlib", "fsspec", "rich")
"""Packages that help must not import."""

CAPTURE = {
    "start", "every", "min_iterations", "max_iterations", "first_iteration", "quant_type", "select", "layers", "keep",
    "master", "advance_on", "sample_dim", "compiled", "policy", "host_budget_nbytes", "block_timeout_seconds",
    "finish_timeout_seconds", "compression", "keep_last", "stop_when_stored", "record_last", "trigger", "spill_dir",
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
    "demo": {"output", "num_ranks", "steps", "text", "dtype", "micro_batches", "quant", "quant_plan", "quant_attention"}
    | (CAPTURE - {"first_iteration", "manual", "advance_on", "record_last", "trigger"}),
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
    assert "no command 'statsu': use status" in result.output


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
