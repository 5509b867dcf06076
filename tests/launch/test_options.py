"""Is every setting of a capture an option of the commands, with one name and one meaning?"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from torch.distributed.run import get_args_parser as torch_parser

from ranktape.capture.settings.config import given_settings, resolve
from ranktape.capture.settings.options import SETTINGS, CaptureOptions, CaptureSettings
from ranktape.launch.autostart import Order
from ranktape.launch.options import capture_arguments, capture_options
from ranktape.launch.runner import main
from ranktape.launch.worker import OWNER

EXAMPLES: dict[type, str] = {int: "2097152", float: "2.5", str: "layers.*"}
"""A word that each kind of setting takes."""

OWN_EXAMPLES = {
    "select": "layer_type=attention where='layer_idx < 4' samples=0-3 keep=histogram",
    "layers": "all",
    "trigger": "absmax > 448",
    "advance_on": "optimizer:1",
    **dict.fromkeys(("min_iterations", "max_iterations"), "1000"),
    "storage_options": '{"anon": true}',
}
"""Those of settings that take not any word."""


def parse(words: list[str], **options: Any) -> tuple[dict[str, Any], Result]:
    """What a command with the options of a capture receives."""
    received: dict[str, Any] = {}

    @click.command()
    @capture_options(**options)
    def command(**values: Any) -> None:
        received.update(values)

    result = CliRunner().invoke(command, words)
    return received, result


def test_what_is_not_given_is_left_to_the_one_table_of_defaults() -> None:
    received, _ = parse([])
    assert list(received) == [setting.name for setting in SETTINGS]
    assert capture_arguments(received) == []
    assert resolve({"capture": "run", **received}, environment={}) == ("run", CaptureOptions())


def test_there_are_few_settings_and_python_completes_their_names() -> None:
    assert len(SETTINGS) <= 28
    fields = dataclasses.fields(CaptureOptions)
    assert list(CaptureSettings.__annotations__) == [one.name for one in fields]
    assert {one.name for one in fields} - {setting.name for setting in SETTINGS} == {"layer_offset", "adds"}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_goes_to_words_and_back(setting: Any) -> None:
    value = setting.choices[0] if setting.choices else OWN_EXAMPLES.get(setting.name, EXAMPLES.get(setting.kind))
    words = [setting.flag] if setting.kind is bool else [setting.flag, str(value)]
    if setting.takes_several:
        words *= 2
    received, result = parse(words)
    assert result.exit_code == 0, result.output
    assert capture_arguments(received) == words
    given = {setting.name: received[setting.name]}
    needed: dict[str, Any] = {"record_last": 2} if setting.name == "trigger" else {}
    settings = CaptureOptions(**given_settings(given), **needed)
    if setting.name == "max_iterations":
        assert settings.max_iterations == 1000
    # What the launcher sets for the ranks that its script starts says the same.
    order = Order.of("run", settings, folder="/here")
    found = Order.from_json(order.to_json())
    assert (found, found.url) == (order, "/here/run")
    assert settings == dataclasses.replace(CaptureOptions(**needed), **{setting.name: getattr(settings, setting.name)})


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_flag_comes_through_torchrun(setting: Any) -> None:
    words = ["ranktape.launch", "--capture", "run", setting.flag, "1", "train.py", "--lr", "1"]
    parsed = torch_parser().parse_args(["--nproc-per-node", "2", "-m", *words])
    assert [parsed.training_script, *parsed.training_script_args] == words


def test_help_shows_every_flag_and_every_default() -> None:
    _, result = parse(["--help"])
    text = " ".join(result.output.split())
    for setting in SETTINGS:
        assert setting.flag in text
        assert " ".join(setting.help.split()) in text
        if setting.default not in (None, False, ()) or (setting.default == 0 and setting.kind is int):
            assert f"[default: {setting.default}]" in text


def test_a_command_may_leave_out_settings_and_have_defaults_of_its_own() -> None:
    received, result = parse(["--help"], without=("resume", "start"), defaults={"every": 7})
    assert "--resume" not in result.output
    assert "--start-at INTEGER" not in result.output
    assert "[default: 7]" in " ".join(result.output.split())
    received, _ = parse([], without=("resume",), defaults={"every": 7})
    assert capture_arguments(received) == ["--every", "7"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--evry", "2"], "No such option '--evry'. Did you mean '--every'?"),
        (["--every", "two"], "Invalid value for '--every': 'two' is not a valid integer"),
        (["--policy", "wait"], "Invalid value for '--policy': 'wait' is not one of 'block', 'skip'"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(words: list[str], match: str) -> None:
    _, result = parse(words)
    assert result.exit_code == 2
    assert match in result.output


@pytest.mark.parametrize(
    ("words", "exit_code", "match"),
    [
        (["--capture", "run", "missing.py"], 2, "no script 'missing.py'"),
        (["--capture", "run", "-m", "nowhere.train"], 2, "no module named 'nowhere'"),
        (["--capture", "run"], 2, "Missing argument 'SCRIPT'"),
        (["train.py"], 2, "Missing option '--capture': give the URL of the run, set RANKTAPE_CAPTURE"),
        (["--capture", "run", "--min-iteratons", "2", "train.py"], 2, "No such option '--min-iteratons'. Did you"),
        (["--capture", "run", "--resume", "--overwrite", "train.py"], 2, "exclude each other"),
        (["--capture", "file.txt/run", "train.py"], 1, "file.txt/run"),
        (["--capture", "/proc/run", "train.py"], 1, "/proc/run"),
        (["--capture", "nosuch://bucket/run", "train.py"], 2, "nosuch"),
        (["--capture-config", "nowhere.yaml", "train.py"], 2, "nowhere.yaml cannot be read"),
        (["--capture-config", "wrong.yaml", "train.py"], 2, "wrong.yaml: there is no setting 'evry': did you mean"),
        (
            ["--capture", "run", "--select", "where='layr_idx < 3'", "train.py"],
            2,
            "no field 'layr_idx': did you mean layer_idx?",
        ),
        (["--capture", "run", "--select", "keep=some", "train.py"], 2, "--select, rule 1: keep 'some' is not allowed"),
        (["--capture", "run", "--select", "layer_type=atention", "train.py"], 2, "did you mean attention?"),
        (["--quant", "mxpf8", "train.py"], 2, "recipe 'mxpf8' is not known: did you mean mxfp8?"),
        (["--quant", "mxfp8", "--quant-plan", "x", "train.py"], 2, "--quant and --quant-plan exclude each other"),
        (["--quant-plan", "missing.yaml", "train.py"], 2, "missing.yaml cannot be read"),
        (["--quant", "", "train.py"], 2, "--quant '' is empty: give a recipe, or leave the option out"),
        (["--quant-plan", "", "train.py"], 2, "--quant-plan '' is empty: give a file, or leave the option out"),
        (
            ["--quant-attention", "train.py"],
            2,
            "--quant-attention needs the recipe of --quant",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_line_of_the_launcher(
    words: list[str],
    exit_code: int,
    match: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError('the script ran')")
    (tmp_path / "file.txt").write_text("a file")
    (tmp_path / "wrong.yaml").write_text("evry: 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ranktape.launch"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    # As the launcher leaves it: no process that this one starts waits for a training.
    monkeypatch.setenv(OWNER, "0")
    assert main(words) == exit_code
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("ranktape: error: ")
    assert match in line
    assert captured.out == ""


def test_the_rules_of_many_options_go_through_one_variable() -> None:
    received, _ = parse(
        [word for layer in range(300) for word in ("--select", f"module=model.layers.{layer}." + "x" * 80)]
    )
    text = Order.of("run", CaptureOptions(**given_settings(received)), folder="/").to_json()
    assert len(text) < 1 << 17, "Linux passes no more in a variable"
    rules = Order.from_json(text).options.rules
    assert [str(rule.texts("module")[0]).split(".")[2] for rule in rules] == [str(one) for one in range(300)]
