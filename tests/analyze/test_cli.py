"""Do the commands answer on stdout, complain on stderr, and end with the right code?"""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import ranktape.analyze
import ranktape.analyze.questions.findings
from ranktape.analyze import View
from ranktape.analyze.cli import COMMANDS, cli
from ranktape.analyze.group import RanktapeGroup
from ranktape.analyze.identity import IDENTITY
from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.quantization.schemes import ScaleRule
from ranktape.analyze.numerics.sweeps.options import SweepMode
from ranktape.analyze.options import FILTERS
from ranktape.analyze.questions.advice import DEFAULT_TARGET_SQNR
from ranktape.errors import CheckFoundError, RanktapeError, UsageError
from tests.analyze.runs import model_tensors, store
from tests.terminal import Terminal, answered

SELECTION = {f"--{field.replace('_', '-')}" for field in FILTERS} | {
    "--where",
    "--storage-options",
    "--skip-unreadable",
    "--help-filters",
    "--help",
}
OUTPUT = {"--check", "--json", "--csv", "--wide", "--sort", "--limit", "--output"}
ENGINE = {"--workers", "--scheduler", "--no-cache", "--help-work"}
OPTIONS = {
    "ls": SELECTION | OUTPUT | {"--by"},
    "overflow": SELECTION | OUTPUT | ENGINE | {"--by", "--view", "--format", "--scaling", "--first", "--per-sample"},
    "stats": SELECTION | OUTPUT | ENGINE | {"--by", "--view", "--metric", "--neighbours", "--per-sample"},
    "distribution": SELECTION
    | OUTPUT
    | ENGINE
    | {"--by", "--view", "--kind", "--format", "--bins", "--per-binade", "--points"},
    "sweep": SELECTION
    | OUTPUT
    | ENGINE
    | {"--by", "--format", "--elem-format", "--view", "--sweep-mode", "--scale-rule"}
    | {"--rounding", "--block-size", "--axis", "--scale-bits", "--num-levels", "--max-scale-exp", "--min-scale-exp"}
    | {"--levels", "--target-sqnr", "--output-dir", "--no-plots"},
    "findings": SELECTION | OUTPUT | ENGINE | {"--view", "--severity", "--kind", "--channels"},
    "trend": SELECTION | OUTPUT | ENGINE | {"--by", "--view", "--metric", "--summary"},
    "trace": SELECTION | OUTPUT | ENGINE | {"--view", "--metric", "--sample"},
    "replay": SELECTION
    | OUTPUT
    | ENGINE
    | {"--by", "--recipe", "--product", "--attention", "--show", "--target-sqnr", "--target-bits", "--plan"},
    "compare": SELECTION
    | OUTPUT
    | ENGINE
    | {"--by", "--view", "--pair", "--neighbours", "--noise", "--metric", "--tolerance", "--margin"}
    | {"--allow-unmatched", "--distances", "--in-order"},
    "plot": SELECTION | ENGINE | {"--by", "--view", "--all", "--kind", "--format", "--recipe", "--output"},
    "report": SELECTION | ENGINE | {"--view", "--format", "--recipe", "--output"},
}
"""The names that scripts rely on: adding one is a decision, removing one breaks somebody."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers, two ranks, two iterations."""
    folder = tmp_path_factory.mktemp("runs") / "model"
    store(folder, model_tensors(num_ranks=2, iterations=(10, 20)))
    return str(folder)


def invoke(*words: str) -> Result:
    """A command in this process; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, list(words), catch_exceptions=False)


def answer(*words: str) -> str:
    """What a command that must succeed wrote to stdout."""
    result = invoke(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_the_set_of_options_is_frozen() -> None:
    context = click.Context(cli)
    assert cli.list_commands(context) == list(OPTIONS)
    for name, expected in OPTIONS.items():
        command = cli.get_command(context, name)
        assert command is not None
        found = {
            option
            for parameter in command.get_params(context)
            if isinstance(parameter, click.Option)
            for option in parameter.opts
            if option.startswith("--")
        }
        assert found == expected
        assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option))
        assert command.help


def test_commands_of_questions_have_the_names_of_their_functions() -> None:
    """One option for each parameter, of the same name, and the function is exported under the name of the command."""
    context = click.Context(cli)
    shared = {"records", "self"}
    for name, place in COMMANDS.items():
        if place.split(":")[0] in {"commands", "questions.sweep_command"}:
            continue
        # Of findings the package has a folder, and what users call is `find`.
        home = ranktape.analyze.questions.findings if name == "findings" else ranktape.analyze
        function = getattr(home, name.replace("-", "_"))
        command = cli.get_command(context, name)
        assert command is not None
        params = command.get_params(context)
        options = {option for one in params for option in (one.opts if isinstance(one, click.Option) else ())}
        arguments = {one.name for one in command.params if isinstance(one, click.Argument)}
        for parameter in set(inspect.signature(function).parameters) - shared:
            if parameter == "engine":
                assert options >= ENGINE - {"--help-work"}
            else:
                assert parameter in arguments or "--" + parameter.replace("_", "-") in options, (name, parameter)


def test_the_words_of_a_sweep_are_those_of_the_library() -> None:
    command = cli.get_command(click.Context(cli), "sweep")
    assert command is not None
    options = {parameter.name: parameter for parameter in command.params}
    for name, words in (("sweep_mode", SweepMode), ("scale_rule", ScaleRule), ("rounding", Rounding)):
        kind = options[name].type
        assert isinstance(kind, click.Choice)
        assert set(kind.choices) == set(words)
    assert options["target_sqnr"].default == DEFAULT_TARGET_SQNR


def test_a_bar_is_drawn_for_a_table_and_not_among_the_lines_about_files(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for words in (
        ["sweep", "--csv"],
        ["sweep", "--output-dir", str(tmp_path), "--no-plots"],
        ["compare", "--neighbours", "--allow-unmatched", "--csv"],
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal := Terminal())
            question, *options = words
            cli.main([question, run, "--rank", "0", "--iteration", "10", *options], standalone_mode=False)
        shown.append(terminal.getvalue())
    assert "counting" in shown[0]
    assert shown[1] == ""
    assert all(f"{number} of 2: " in shown[2] for number in (1, 2))


def test_there_is_a_filter_for_each_field_that_tells_records_apart() -> None:
    assert set(IDENTITY) - {"shape"} <= set(FILTERS)


def test_the_choices_of_as_are_the_views() -> None:
    context = click.Context(cli)
    command = cli.get_command(context, "overflow")
    assert command is not None
    (choice,) = (parameter.type for parameter in command.params if parameter.name == "view")
    assert isinstance(choice, click.Choice)
    assert list(choice.choices) == list(View)


def test_help_imports_nothing_heavy() -> None:
    source = (
        "import sys; from ranktape.analyze.cli import cli; cli(['--help'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert "What is wrong:" in done.stdout
    assert not {"numpy", "numba", "zarr", "rich", "matplotlib", "torch"} & set(done.stdout.split())


def test_ls_lists_records(run: str) -> None:
    document = json.loads(answer("ls", run, "--json"))
    assert len(document["rows"]) == 72
    assert document["rows"][0]["iteration"] == 10
    assert document["rows"][0]["shape"] == [4, 64]
    text = answer("ls", run, "--tensor-name", "weight", "--rank", "0")
    assert text.splitlines()[0].startswith("all rows: rank 0, ")
    assert text.splitlines()[-1] == "4 records, 2.048 kB"
    assert len(text.splitlines()) == 2 + 4 + 1


def test_filters_choose_records(run: str) -> None:
    for filters, count in [
        ([], 72),
        (["--iteration", "10"], 36),
        (["--iteration", "10:20"], 36),
        (["--iteration", "10", "--iteration", "20"], 72),
        (["--rank", "0-1", "--layer-idx", "0,1"], 72),
        (["--layer-type", "attention"], 32),
        (["--layer-type", "attention,linear"], 72),
        (["--layer-type", "attention", "--layer-type", "linear"], 72),
        (["--tensor-name", "grad_*", "--operation", "backward"], 32),
        (["--module", "layers.0.*"], 36),
        (["--where", "overflow.absmax > 1 and phase == 'pre'"], 16),
        (["--attempt", "0"], 72),
    ]:
        assert len(json.loads(answer("ls", run, "--json", *filters))["rows"]) == count


def test_ls_counts_by_fields(run: str) -> None:
    rows = json.loads(answer("ls", run, "--json", "--by", "layer-type", "--by", "operation"))["rows"]
    assert [(row["layer_type"], row["operation"], row["records"], row["nbytes"]) for row in rows] == [
        ("attention", "backward", 16, 8192),
        ("attention", "forward", 16, 8192),
        ("linear", "backward", 16, 8192),
        ("linear", "forward", 24, 12288),
    ]
    assert json.loads(answer("ls", run, "--json", "--by", "layer_type,operation"))["rows"] == rows


def test_answers_are_json_csv_and_text_of_the_same_rows(run: str) -> None:
    words = ("overflow", run, "--by", "layer_type", "--format", "fp8_e4m3", "--scaling", "none")
    rows = json.loads(answer(*words, "--json"))["rows"]
    lines = list(csv.DictReader(io.StringIO(answer(*words, "--csv"))))
    assert [float(line["overflow.underflow.ratio"]) for line in lines] == [
        row["overflow.underflow.ratio"] for row in rows
    ]
    text = answer(*words)
    assert text.startswith("overflow and underflow in fp8_e4m3 without scaling: largest value 448")
    assert text.splitlines()[2].split()[:4] == ["layer_type", "records", "elements", "upper"]


def test_sweep_recommends_a_scale(run: str) -> None:
    rows = json.loads(answer("sweep", run, "--json", "--rank", "0", "--iteration", "10"))["rows"]
    assert len(rows) == 18
    assert all(row["cosine"] > 0.999 for row in rows)
    one = ("--rank", "0", "--iteration", "10", "--layer-idx", "0", "--tensor-name", "query")
    levels = answer(
        "sweep", run, *one, "--levels", "--csv", "--num-levels=3", "--max-scale-exp=-2", "--min-scale-exp=-4"
    )
    assert [line["exponent"] for line in csv.DictReader(io.StringIO(levels))] == ["-2.0", "-3.0", "-4.0"]


def test_rows_are_sorted_and_limited(run: str) -> None:
    words = ("overflow", run, "--format", "fp8_e4m3", "--scaling", "none")
    document = json.loads(answer(*words, "--sort", "overflow.underflow.ratio", "--limit", "3", "--json"))
    assert [row["overflow.underflow.ratio"] for row in document["rows"]] == [1.0, 1.0, 1.0]
    assert document["notes"][0] == "the first 3 of 72 rows"


def test_a_terminal_shows_as_many_rows_as_people_read(run: str, tmp_path: Path) -> None:
    """What is left out is counted; programs, pipes, files and --limit 0 get all."""
    for words in (["ls", run], ["compare", run, "--pair", "iteration=10:20"]):
        num_rows = 36 if words[0] == "compare" else 72
        shown, whole = answered(*words, columns=200), answered(*words, "--limit", "0", columns=200)
        assert f"{num_rows - 20} more rows: --limit 0 shows all" in shown
        assert len(whole) - len(shown) == num_rows - 20 - 1
        assert len(answer(*words).splitlines()) == len(whole)
    assert len(json.loads(answer("overflow", run, "--json"))["rows"]) == 72
    assert len(list(csv.reader(io.StringIO(answer("overflow", run, "--csv"))))) == 73
    assert answer("ls", run, "--output", str(tmp_path / "all.txt")) == ""
    assert len((tmp_path / "all.txt").read_text().splitlines()) == len(answer("ls", run).splitlines())


def test_the_rows_that_a_terminal_shows_are_the_worst(run: str) -> None:
    words = ("overflow", run, "--format", "fp8_e4m3", "--scaling", "none")
    lines = answered(*words, columns=200)
    assert lines[-2] == "52 more rows; the worst are shown: --limit 0 shows all"
    assert lines[-1].startswith("verdict: 32 high, 40 none; worst: ")
    severities = [line.split()[-1] for line in lines[3:-2]]
    assert severities == sorted(severities, key=["high", "medium", "none"].index)
    rows = json.loads(answer(*words, "--json"))["rows"]
    known = [row["severity"] for row in rows]
    assert severities.count("high") == min(20, known.count("high"))
    assert known != sorted(known, key=["high", "medium", "none"].index)


@pytest.mark.parametrize(("name", "start"), [("a.json", "{"), ("a.csv", "iteration,"), ("a.txt", "all rows: ")])
def test_a_file_is_written_in_the_form_of_its_name(run: str, tmp_path: Path, name: str, start: str) -> None:
    assert answer("ls", run, "--output", str(tmp_path / name)) == ""
    assert (tmp_path / name).read_text().startswith(start)


def test_plot_prints_its_path(run: str, tmp_path: Path) -> None:
    path = tmp_path / "draw" / "a.png"
    assert answer("plot", run, "--format", "fp8_e4m3", "-o", str(path)) == f"{path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")
    # fp8_e4m3 is the default: the plot is the same.
    assert answer("plot", run, "-o", str(tmp_path / "default.png")) == f"{tmp_path / 'default.png'}\n"
    assert (tmp_path / "default.png").read_bytes() == path.read_bytes()


def test_mistakes_are_one_line_and_a_code(run: str) -> None:
    for words, code, message in [
        (
            ["--layer-type", "attn"],
            1,
            "no records match --layer-type attn: layer_type is linear (40 records), attention",
        ),
        (["--tensor-name", "ouput"], 1, "; did you mean output?"),
        (["--batch-size", "8"], 1, "no records match --batch-size 8: batch_size is none (72 records)"),
        (["--iteration", "15"], 1, "no records match --iteration 15: readable iterations are 10, 20"),
        (
            ["--where", "overflow.ratio > 0"],
            1,
            "no records match --where 'overflow.ratio > 0': it excludes all 72 records",
        ),
        (["--rank", "x"], 2, "rank holds numbers and 'x' is not one"),
        (["--where", "layr == 1"], 2, "did you mean"),
        (["--where", "rank =="], 2, ""),
        (["--by", "layr_type"], 2, "records have no field 'layr_type': did you mean layer_type"),
        (["--json", "--csv"], 2, "--json and --csv exclude each other"),
        (["--sort", "bogus"], 2, "the table has no column 'bogus'"),
        (["--output", "no/such/folder"], 2, "--output no/such/folder cannot be written"),
        (["--storage-options", "{"], 2, "--storage-options is not JSON"),
        (["--storage-options", "[1]"], 2, "--storage-options is not a JSON object"),
        (["--limit", "-1"], 2, "--limit"),
    ]:
        result = invoke("ls", run, *words)
        assert (result.exit_code, result.stdout) == (code, "")
        error = result.stderr.splitlines()[-1]
        assert error.startswith("Error: ")
        assert message in error


def test_mistakes_of_single_commands(run: str) -> None:
    cases: list[tuple[list[str], int, str]] = [
        (["overflow", "--format", "fp8_e4m4"], 2, "did you mean fp8_e4m3"),
        (["sweep", "--format", "fp64"], 2, "'fp64' holds every captured value"),
        (["sweep", "--max-scale-exp", "nan"], 2, "--max-scale-exp nan is not allowed"),
        (["sweep", "--mode", "train,tensor"], 2, "did you mean --sweep-mode tensor?"),
        (
            ["overflow", "--format", "mxfp4", "--scaling", "none"],
            2,
            "give --format fp4_e2m1 for what they hold without a scale",
        ),
        (["plot", "--format", "mxint8"], 2, "has block scales, which plots do not support: give --format int8"),
        (["plot", "--output", "/dev/null/a.png"], 1, "the plot cannot be written to /dev/null/a.png"),
    ]
    for words, code, message in cases:
        result = invoke(words[0], run, *words[1:])
        assert (result.exit_code, result.stdout) == (code, "")
        assert message in result.stderr.splitlines()[-1]


def test_no_run_and_no_complete_iteration(tmp_path: Path) -> None:
    result = invoke("ls", str(tmp_path / "nothing"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no run at" in result.stderr
    from tests.runs import start

    start(str(tmp_path / "begun"))
    begun = invoke("ls", str(tmp_path / "begun"))
    assert begun.exit_code == 1
    assert "has no complete iteration: see 'ranktape status" in begun.stderr


def test_python_dash_m_is_the_same_thing_and_shows_no_bar_in_a_pipe(run: str) -> None:
    words = ["overflow", run, "--format", "fp4_e2m1", "--by", "layer_idx"]
    done = subprocess.run(
        [sys.executable, "-m", "ranktape.analyze", *words], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (answer(*words), "")


def test_a_pipe_that_closes_early_is_no_traceback(run: str) -> None:
    script = f'"{sys.executable}" -m ranktape.analyze ls "{run}" --json | head -c 10'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={**os.environ})
    assert len(done.stdout) == 10
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "unbuffered"), [(["ls", "--csv"], ""), (["ls"], "1"), (["sweep", "--csv", "--limit", "1"], "")]
)
def test_a_full_disk_is_one_line(run: str, words: list[str], unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ranktape.analyze", words[0], run, *words[1:]],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1:] == ["Error: stdout cannot be written: No space left on device"]
    assert "Traceback" not in done.stderr


LAZY = {"analyze": "ranktape.analyze.cli:cli", "nowhere": "ranktape.analyze.not_there:cli"}


@click.group(cls=RanktapeGroup, lazy=LAZY)
def group() -> None:
    """A group under test."""


@group.command()
@click.argument("name")
def fail(name: str) -> None:
    """Fail as asked."""
    raise {error.__name__: error for error in (RanktapeError, UsageError, CheckFoundError, ZeroDivisionError)}[name](
        "what happened"
    )


def test_an_error_of_ours_is_one_line_and_its_exit_code() -> None:
    cases: list[tuple[str, int]] = [("RanktapeError", 1), ("UsageError", 2), ("CheckFoundError", 3)]
    for name, code in cases:
        result = CliRunner().invoke(group, ["fail", name])
        assert (result.exit_code, result.stdout, result.stderr) == (code, "", "Error: what happened\n")


def test_any_other_exception_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError, match="what happened"):
        CliRunner().invoke(group, ["fail", "ZeroDivisionError"], catch_exceptions=False)


def test_commands_are_listed_in_their_order_and_imported_when_used() -> None:
    context = click.Context(group)
    assert group.list_commands(context) == ["fail", "analyze", "nowhere"]
    assert group.get_command(context, "analyze") is not None
    assert group.list_commands(context) == ["fail", "analyze", "nowhere"]
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        group.get_command(context, "nowhere")


def test_an_unknown_command_names_the_nearest() -> None:
    result = CliRunner().invoke(group, ["analyse"])
    assert result.exit_code == 2
    assert "Error: no command 'analyse': use analyze\n" in result.stderr
    assert "use fail or analyze or nowhere" in CliRunner().invoke(group, ["xyz"]).stderr
