"""Do a command line, the environment and a file say the same settings, in their order, and is each mistake one line?"""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ranktape.capture import Capture, add_arguments
from ranktape.capture.rendezvous import RankPlace
from ranktape.capture.settings.config import given_arguments, read_config, resolve, stray_variables
from ranktape.capture.settings.options import SETTINGS, CaptureOptions
from ranktape.capture.starting import _writer_config
from ranktape.errors import UsageError

YAML = """\
# what the nightly run records
capture: s3://bucket/run
min-iterations: 3
quant_type: no          # a tag, not a false
resume: true
block_timeout_seconds: 1e1
storage_options: {anon: true, retries: 5}
select:
  - {layer_type: attention, rank: [0, 2], keep: histogram}
  - keep=statistics samples=0-3
max_iterations: ~
"""

TOML = """\
capture = "s3://bucket/run"
min-iterations = 3
quant_type = "no"
resume = true
block_timeout_seconds = 10.0
select = [{layer_type = "attention", rank = [0, 2], keep = "histogram"}, "keep=statistics samples=0-3"]
[storage_options]
anon = true
retries = 5
"""

SAID = {
    "capture": "s3://bucket/run",
    "min_iterations": 3,
    "quant_type": "no",
    "resume": True,
    "block_timeout_seconds": 10.0,
    "storage_options": {"anon": True, "retries": 5},
    "select": (
        {"layer_type": "attention", "rank": [0, 2], "keep": "histogram"},
        "keep=statistics samples=0-3",
    ),
}
"""What both files say."""


def write(folder: Path, text: str | bytes, *, name: str = "capture.yaml") -> Path:
    """A file of settings."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("text", "name"), [(YAML, "capture.yaml"), (YAML, "c.YML"), (TOML, "capture.toml")])
def test_a_file_says_what_a_command_line_can(text: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path, text, name=name)
    assert read_config(path) == SAID
    found = resolve({"capture_config": str(path)}, environment={})
    assert found is not None
    assert found[0] == "s3://bucket/run"
    assert found[1].document()["select"] == [
        {"layer_type": "attention", "rank": [0, 2], "keep": "histogram"},
        "keep=statistics samples=0-3",
    ]


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    for name in ("empty.yaml", "empty.toml"):
        assert read_config(write(tmp_path, "# later\n", name=name)) == {}


SOURCES = ("command line", "environment", "file")


@pytest.mark.parametrize("said_by", [0b000, 0b001, 0b010, 0b011, 0b100, 0b101, 0b110, 0b111])
def test_the_command_line_comes_before_the_environment_and_that_before_the_file(said_by: int, tmp_path: Path) -> None:
    speaks = {source: bool(said_by & 1 << index) for index, source in enumerate(SOURCES)}
    given: dict[str, Any] = {"capture_config": str(write(tmp_path, "policy: skip\n"))}
    environment = {}
    if speaks["file"]:
        write(tmp_path, "every: 3\nselect: [call=1]\nmanual: false\ncapture: file\n")
    if speaks["environment"]:
        environment = {
            "RANKTAPE_EVERY": "2",
            "RANKTAPE_SELECT": "call=2",
            "RANKTAPE_MANUAL": "true",
            "RANKTAPE_CAPTURE": "environment",
        }
    if speaks["command line"]:
        given |= {"every": 1, "select": ("call=3",), "capture": "command line"}
    found = resolve(given, environment=environment)
    first = next((source for source in SOURCES if speaks[source]), None)
    if first is None:
        assert found is None
        return
    assert found is not None
    url, options = found
    assert url == first
    every = {"command line": 1, "environment": 2, "file": 3}
    assert options.every == every[first]
    rules = {"command line": ("call=3",), "environment": ("call=2",), "file": ("call=1",)}
    assert options.select == rules[first]
    # A flag is on or not given on a command line: it is never taken back by it.
    assert options.manual is speaks["environment"]


def test_the_environment_can_name_the_file_and_every_setting(tmp_path: Path) -> None:
    path = write(tmp_path, "every: 7\ncapture: here\n")
    variables = {"RANKTAPE_CAPTURE_CONFIG": str(path)}
    assert resolve({"every": None, "select": ()}, environment=variables) == ("here", CaptureOptions(every=7))
    environment = {
        "RANKTAPE_MIN_ITERATIONS": "3",
        "RANKTAPE_BLOCK_TIMEOUT_SECONDS": "0.5",
        "RANKTAPE_START_AT": "4",
        "RANKTAPE_RESUME": "Yes",
        "RANKTAPE_LAYERS": "0,30",
        "RANKTAPE_SELECT": "layer_type=linear,attention rank=1; keep=histogram",
        "RANKTAPE_STORAGE_OPTIONS": '{"anon": true}',
        "RANKTAPE_EVERY": "",
        "RANKTAPE_CAPTURE": "run",
    }
    expected = CaptureOptions(
        min_iterations=3,
        block_timeout_seconds=0.5,
        start_at=4,
        resume=True,
        layers="0,30",
        select=("layer_type=linear,attention rank=1; keep=histogram",),
        storage_options={"anon": True},
    )
    assert resolve({}, environment=environment) == ("run", expected)
    for setting in SETTINGS:
        assert stray_variables({f"RANKTAPE_{setting.name.upper()}": ""}) == []


def test_semicolons_part_limits_but_for_those_in_quotes() -> None:
    text = "absmax > 2 where like(module, 'a;b') ; maximum > 3 where module == \"it's; c\""
    found = resolve({}, environment={"RANKTAPE_CAPTURE": "run", "RANKTAPE_RECORD_LAST": "1", "RANKTAPE_TRIGGER": text})
    assert found is not None
    assert [one.text for one in found[1].triggers] == [part.strip() for part in text.split(" ; ")]
    for wrong in ("absmax > 2 where module == 'a", "absmax > 2;", ";"):
        with pytest.raises(UsageError, match="--trigger"):
            CaptureOptions(record_last=1, trigger=wrong)


def test_variables_that_nobody_reads_are_named_with_the_nearest() -> None:
    environment = {"RANKTAPE_EVRY": "2", "RANKTAPE_CAPTURE": "x", "PATH": ""}
    assert stray_variables(environment) == [
        "the environment has RANKTAPE_EVRY, which is not a setting: did you mean RANKTAPE_EVERY?"
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANKTAPE_EVERY": "two"}, "RANKTAPE_EVERY='two' is not allowed: set it to a number"),
        ({"RANKTAPE_BLOCK_TIMEOUT_SECONDS": "inf"}, "--block-timeout-seconds inf is not allowed: give a finite number"),
        ({"RANKTAPE_EVERY": "0"}, "RANKTAPE_EVERY: --every 0 is not allowed: give 1 or more"),
        ({"RANKTAPE_EVERY": "9" * 5000}, "is not allowed: set it to a number"),
        ({"RANKTAPE_RESUME": "maybe"}, "RANKTAPE_RESUME='maybe' is not allowed: set it to true or false"),
        ({"RANKTAPE_KEEP": "counts"}, "RANKTAPE_KEEP: --keep counts is not allowed: give one of values, histogram"),
        ({"RANKTAPE_SELECT": "where='layer_idx <'"}, "RANKTAPE_SELECT: --select, rule 1: invalid syntax"),
        ({"RANKTAPE_SELECT": "a=b"}, "RANKTAPE_SELECT: --select, rule 1: tensors have no field 'a'"),
        ({"RANKTAPE_STORAGE_OPTIONS": "{"}, "RANKTAPE_STORAGE_OPTIONS: --storage-options is not JSON"),
        ({"RANKTAPE_CAPTURE_CONFIG": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
    ],
)
def test_a_mistake_in_a_variable_names_it(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        resolve({}, environment=variables)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


LAUGHS = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evry: 1", "there is no setting 'evry': did you mean every?"),
        ("Capture: x", "there is no setting 'Capture': did you mean capture?"),
        ("every: [1]", "every: --every [1] is not allowed: give a whole number"),
        ("every: '1'", "give a whole number"),
        ("every: 1.5", "give a whole number"),
        ("every: true", "give a whole number"),
        ("every: 0", "give 1 or more"),
        (f"every: {'9' * 5000}", "cannot be read as YAML"),
        ("resume: 1", "give true or false"),
        ("resume: yes", "give true or false"),
        ("quant_type: 8", "give a text"),
        ("finish_timeout_seconds: .nan", "give a number"),
        ("finish_timeout_seconds: .inf", "--finish-timeout-seconds inf is not allowed: give a finite number"),
        ("capture: 5", "give the URL of a run"),
        ("capture_config: b.yaml", "a file names no other file"),
        ("every: 1\nevery: 2", "line 2: 'every' is given twice"),
        ("start-at: 1\nstart_at: 2", "start_at is given twice, with hyphens and with underscores"),
        ("select: {module: {a: b}}", "is not something a field can hold"),
        ("select: {module: [[a]]}", "is not something a field can hold"),
        ("layers: {a: b}", "is not something a field can hold"),
        ("layers: -3", "counted from 0"),
        ("select: {samples: [x]}", "--samples ['x'] is not allowed: give numbers such as 0, 0-3"),
        ("advance_on: [1]", "give optimizer, forward, step"),
        ("select: {where: overflow.nan.count > 0}", "overflow.nan.count is not known yet when a tensor is captured"),
        ("select: {where: [a]}", "give a text"),
        ("select: [[a]]", "is not a rule"),
        ("select: {layertype: a}", "tensors have no field 'layertype': did you mean layer_type?"),
        ("select: {every: a}", "every is the same for all rules"),
        ("select: {layer_type: {a: b}}", "is not something a field can hold"),
        ("storage_options: [1]", "--storage-options is a list"),
        ("- every", "holds a list, not settings by name"),
        ("every", "holds a str, not settings by name"),
        ("a: 1\n---\nb: 1", "line 2: but found another document"),
        ("every: 'x", "found unexpected end of stream"),
        ("every: !!python/object/apply:os.system ['touch hacked']", "is not allowed"),
        ("every: !!binary aGk=", "the tag 'tag:yaml.org,2002:binary' is not allowed"),
        ("? [a]\n: 1", "is no text"),
        ("1: 2", "the name 1 is no text"),
        ("<<: {every: 2}", "there is no setting '<<'"),
        (LAUGHS, "line 2: aliases (*name) are not allowed"),
        ("every: " + "[" * 30_000, "nested too deep"),
        ("every: " + "[" * 12 + "]" * 12, "nested too deep"),
        ("#" + "x" * 70_000, "has more than 65536 bytes"),
        (b"every: \xff\xfe", "is not text in UTF-8 (byte 7)"),
        (b"every: \x01", "special characters are not allowed"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        read_config(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("every = ", "cannot be read as TOML"),
        ("every = 2020-01-01", "give a whole number"),
        ("every = " + "[" * 20_000 + "]" * 20_000, "nested too deep"),
        (".".join(["a"] * 30_000) + " = 1", "nested too deep"),
        ("every = 1\nevery = 2", "Cannot overwrite a value"),
        (f"every = {'9' * 5000}", "cannot be read as TOML"),
    ],
    ids=lambda value: str(value)[:24],
)
@pytest.mark.timeout(20)
def test_so_is_one_in_toml(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text, name="capture.toml")
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        read_config(path)
    assert str(path) in str(raised.value)


def test_what_is_no_file_of_settings_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name, message in (
        ("nowhere.yaml", "No such file or directory"),
        ("folder.yaml", "is not a file"),
        ("pipe.yaml", "is not a file"),
        ("loop.yaml", "Too many levels of symbolic links"),
        ("capture.json", "is neither .yaml nor .toml"),
        ("zero\0.yaml", "null byte"),
    ):
        with pytest.raises(UsageError, match=message):
            read_config(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "every: 1")
    path.chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        read_config(path)


def test_secrets_in_a_file_are_not_shown(tmp_path: Path) -> None:
    path = write(tmp_path, "storage_options: {secret: CANARY, bad: .nan, when: [CANARY]}\nevery: {a: CANARY}\n")
    with pytest.raises(UsageError) as raised:
        read_config(path)
    assert "CANARY" not in str(raised.value)


def test_the_examples_on_the_page_are_settings(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "selection.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    found = resolve({"capture_config": str(write(tmp_path, text))}, environment={})
    assert found is not None
    assert len(found[1].rules) == 3
    words = [
        word
        for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)
        for word in shlex.split(block.replace("\\\n", " "))
    ]
    given = [word for word in words if not word.startswith("--") and word.strip()]
    assert len(CaptureOptions(select=given).rules) == 3
    variables = dict(re.findall(r"`(RANKTAPE_\w+)=\"?([^`\"]+)\"?`", page))
    assert len(variables) == 4
    resolve({}, environment=variables)


def test_values_of_a_scripts_own_classes_reach_the_writer() -> None:
    class Text(str):
        __slots__ = ()

    class Options(dict[str, Any]):
        pass

    class Many(enum.IntEnum):
        TWO = 2

    class Way(str, enum.Enum):  # noqa: UP042  (whose `str` is its name)
        SKIP = "skip"

    options = CaptureOptions(
        storage_options=Options(client_kwargs=Options(endpoint_url=Text("x"))),
        quant_type=Text("mine"),
        every=Many.TWO,
        policy=Way.SKIP,
    )
    place = RankPlace(rank=0, world_size=1, num_local_ranks=1, restart=0)
    config = _writer_config(options, url="run", place=place, launch_id="one")
    received = pickle.loads(pickle.dumps(config)).options  # noqa: S301  (as the writer does)
    assert received.storage_options == {"client_kwargs": {"endpoint_url": "x"}}
    assert (received.quant_type, received.every, received.policy) == ("mine", 2, "skip")


# The doors.


def test_python_reads_the_file_too_and_has_the_last_word(tmp_path: Path) -> None:
    path = write(tmp_path, "every: 3\nstart_at: 2\ncapture: elsewhere\n")
    capture = Capture(tmp_path / "run", capture_config=path, every=5)
    assert (capture.options.every, capture.options.start_at) == (5, 2)
    with pytest.raises(UsageError, match="'evry' is not an option of a capture: did you mean every"):
        Capture(tmp_path / "run", evry=1)  # type: ignore[call-arg]  # a typing error


def test_a_script_keeps_its_own_options_and_ours_have_a_second_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--resume", action="store_true")
    add_arguments(parser)
    words = ["--dtype", "fp32", "--resume", "--every", "2", "--select", "mode=eval"]
    args = parser.parse_args([*words, "--capture-select", "phase=pre,post", "--capture-resume"])
    assert (args.dtype, args.resume) == ("fp32", True)
    given = {name: value for name, value in given_arguments(args).items() if value is not None}
    assert given == {"every": 2, "select": ["mode=eval", "phase=pre,post"], "resume": True}
    assert not Capture.from_arguments(args).is_recording
    monkeypatch.setenv("RANKTAPE_CAPTURE", str(tmp_path / "run"))
    monkeypatch.setenv("RANKTAPE_KEEP", "histogram")
    capture = Capture.from_arguments(args)
    assert isinstance(capture, Capture)
    assert capture.options == CaptureOptions(
        every=2, select=("mode=eval", "phase=pre,post"), resume=True, keep="histogram"
    )
    assert "--capture-select RULE" in parser.format_help()
