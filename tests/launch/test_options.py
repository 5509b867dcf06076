"""Is every setting of a capture an option of the commands, with one name and one meaning?"""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from torch.distributed.run import get_args_parser as torch_parser

from ranktape.capture.options import SETTINGS, CaptureOptions
from ranktape.launch.options import capture_arguments, capture_options, capture_settings

EXAMPLES: dict[type, str] = {int: "2097152", float: "2.5", str: "layers.*"}
"""A word that each kind of setting takes."""


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
    defaults = CaptureOptions()
    assert capture_settings(received) == {setting.name: getattr(defaults, setting.name) for setting in SETTINGS}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_goes_to_words_and_back(setting: Any) -> None:
    value = setting.choices[0] if setting.choices else EXAMPLES.get(setting.kind)
    if setting.name == "storage_options":
        value = '{"anon": true}'
    words = [setting.flag] if setting.kind is bool else [setting.flag, str(value)]
    if setting.multiple:
        words *= 2
    received, result = parse(words)
    assert result.exit_code == 0, result.output
    assert capture_arguments(received) == words
    given = {setting.name: received[setting.name]}
    if setting.name == "max_iterations":
        assert capture_settings(given)["max_iterations"] == 2097152
    assert capture_settings(given) == {**capture_settings({}), setting.name: capture_settings(given)[setting.name]}


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
    assert "--start" not in result.output
    assert "[default: 7]" in " ".join(result.output.split())
    received, _ = parse([], without=("resume",), defaults={"every": 7})
    assert capture_arguments(received) == ["--every", "7"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--evry", "2"], "No such option '--evry'. Did you mean '--every'"),
        (["--every", "two"], "Invalid value for '--every': 'two' is not a valid integer"),
        (["--policy", "wait"], "Invalid value for '--policy': 'wait' is not one of 'block', 'skip'"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(words: list[str], match: str) -> None:
    _, result = parse(words)
    assert result.exit_code == 2
    assert match in result.output
