"""Does `ranktape analyze sweep` take every kind of source, write every file, and let nothing bad end the rest?"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from ranktape.analyze.cli import cli
from ranktape.analyze.numerics.sweeps.legacy import LegacyLevel
from ranktape.analyze.numerics.sweeps.options import SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import sweep_array
from ranktape.capture.writing.counting import reduce_to
from tests.analyze.pt_files import legacy_file, save
from tests.analyze.runs import describe_tensor, model_tensors, store

VALUES = torch.from_numpy(np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)).bfloat16()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers, one rank, two iterations."""
    folder = tmp_path_factory.mktemp("runs") / "model"
    store(folder, model_tensors(iterations=(10, 20)))
    return str(folder)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(*words: str | Path) -> Result:
    """The command in this process; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, ["sweep", *map(str, words)], catch_exceptions=False)


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def said(lines: str) -> list[str]:
    """Lines of a console without what the logs say."""
    return [line for line in lines.splitlines() if line and not re.match(r"\d{4}-\d\d-\d\d ", line)]


def test_files_are_answered_with_files_in_the_legacy_tools_place(here: Path) -> None:
    save(here / "a.pt", VALUES)
    save(here / "b.pt", {"tensor": VALUES.float(), "more": 1}, legacy=True)
    result = sweep("a.pt", "b.pt", "--elem-format", "fp8_e4m3", "--num-levels", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    assert names(here / "draw" / "scaling_analysis") == ["a", "b"]
    assert names(here / "draw" / "scaling_analysis" / "a") == [
        "mxfp_scaling_results_fp8_e4m3.txt",
        "mxfp_scaling_summary_fp8_e4m3.png",
        "mxfp_scaling_test_a_fp8_e4m3.log",
        "mxfp_scaling_test_fp8_e4m3.png",
    ]
    assert said(result.stdout) == [
        "Processing 2 tensor(s)...",
        "=" * 80,
        "[1/2] Processing: a.pt",
        "-" * 60,
        "Successfully processed: a.pt",
        "[2/2] Processing: b.pt",
        "-" * 60,
        "Successfully processed: b.pt",
        "=" * 80,
        "FINAL SUMMARY",
        "=" * 80,
        "Total tensors: 2",
        "Successful: 2",
        "Failed: 0",
        "All tests completed successfully!",
    ]
    logs = [
        (here / "draw" / "scaling_analysis" / name / f"mxfp_scaling_test_{name}_fp8_e4m3.log").read_text()
        for name in ("a", "b")
    ]
    assert [line for line in result.stdout.splitlines() if line[:2] == "20"] == "".join(logs).splitlines()


def test_a_broken_file_fails_alone(here: Path) -> None:
    save(here / "good.pt", [VALUES, 3, "more"])
    (here / "broken.pt").write_bytes(b"PK\x03\x04 and no more")
    save(here / "other.pt", {"weights": VALUES})
    (here / "empty.pt").write_bytes(b"")
    result = sweep("broken.pt", "good.pt", "missing.pt", "other.pt", "empty.pt", "--no-plots", "--output-dir", "out")
    assert result.exit_code == 1
    assert names(here / "out") == ["good"]
    assert names(here / "out" / "good") == ["mxfp_scaling_results_fp8_e4m3.txt", "mxfp_scaling_test_good_fp8_e4m3.log"]
    lines = said(result.stdout)
    assert "Successfully processed: good.pt" in lines
    assert "Failed to process: missing.pt: there is no file at missing.pt: check the path" in lines
    assert any(line.startswith("Failed to process: broken.pt: broken.pt is damaged or truncated") for line in lines)
    assert lines[-7:-4] == ["Total tensors: 5", "Successful: 1", "Failed: 4"]
    (error,) = result.stderr.splitlines()
    assert error.startswith("Error: 4 of 5 tensors could not be swept: broken.pt: ")


def test_a_folder_of_files_under_any_name_is_a_source(here: Path) -> None:
    save(here / "files" / "named by me.pt", VALUES)
    save(here / "files" / "张量.pt", VALUES)
    save(here / "files" / "a\n\udcff.pt", VALUES)
    legacy_file(here / "files", VALUES)
    (here / "files" / "cut.pt").write_bytes(b"PK")
    result = sweep("files", "--output-dir", "out", "--no-plots")
    assert result.exit_code == 1
    assert names(here / "out") == [
        "20250908_095220_0001_iter000_linear_L1_forward_pre_linear_mxfp8_rank00_input",
        "a__",
        "named_by_me",
        "张量",
    ]
    assert (
        "Error: 1 of 5 tensors could not be swept: cut.pt: files/cut.pt was not written by torch.save" in result.stderr
    )
    rest = sweep("files", "--output-dir", "out", "--no-plots", "--skip-unreadable")
    assert (rest.exit_code, rest.stderr.startswith("1 .pt files left out, because they cannot be read: ")) == (0, True)


def test_tensors_of_one_name_have_directories_of_their_own(here: Path) -> None:
    save(here / "x" / "a.pt", VALUES)
    save(here / "y" / "a.pt", 2 * VALUES)
    save(here / "A.pt", 4 * VALUES)
    result = sweep("x/a.pt", "y/a.pt", "A.pt", "--output-dir", "out", "--no-plots")
    assert result.exit_code == 0
    assert names(here / "out") == ["A_3", "a", "a_2"]
    found = (here / "out" / "a_2" / "mxfp_scaling_results_fp8_e4m3.txt").read_text()
    assert "Source: y/a.pt" in found
    assert [line for line in said(result.stdout) if "Processing: " in line] == [
        "[1/3] Processing: x/a.pt",
        "[2/3] Processing: y/a.pt",
        "[3/3] Processing: A.pt",
    ]


def test_formats_are_repeated_or_separated_by_commas(here: Path) -> None:
    save(here / "a.pt", VALUES)
    result = sweep(
        "a.pt", "--format", "fp8_e4m3, mxfp4", "--format", "nvfp4", "--elem-format", "fp8_e4m3", "--no-plots"
    )
    assert result.exit_code == 0
    folder = here / "draw" / "scaling_analysis" / "a"
    results = [name for name in names(folder) if name.endswith(".txt")]
    assert results == [f"mxfp_scaling_results_{name}.txt" for name in ("fp8_e4m3", "mxfp4_e2m1", "nvfp4")]


def test_a_table_is_the_answer_if_it_is_asked_for(here: Path) -> None:
    save(here / "a.pt", VALUES)
    save(here / "b.pt", VALUES)
    result = sweep("a.pt", "b.pt", "--json", "--format", "fp8_e4m3,fp4_e2m1")
    assert (result.exit_code, result.stderr, names(here)) == (0, "", ["a.pt", "b.pt"])
    rows = json.loads(result.stdout)["rows"]
    assert [(row["source"], row["format"], row["sweep_mode"]) for row in rows] == [
        (source, name, "tensor") for source in ("a.pt", "b.pt") for name in ("fp8_e4m3", "fp4_e2m1")
    ]
    array = VALUES.float().numpy().astype(ml_dtypes.bfloat16)
    for row in rows:
        level = sweep_array(array, format=row["format"]).recommended
        assert level is not None
        assert (row["exponent"], row["mse"]) == (level.exponent, level.mse)
    assert {row["best_format"] for row in rows} == {"fp8_e4m3"}


def test_files_and_a_table_can_both_be_had(here: Path, run: str) -> None:
    words = (run, "--layer-idx", "0", "--iteration", "10", "--tensor-name", "output", "--no-plots")
    result = sweep(*words, "--output-dir", "out", "--csv")
    assert result.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert len(rows) == len(names(here / "out")) == 2
    assert "[2/2] Processing: " in result.stderr
    assert "FINAL SUMMARY" in result.stderr


def test_records_of_a_run_have_names_that_say_which_they_are(here: Path, run: str) -> None:
    assert sweep(run, "--tensor-name", "weight", "--output-dir", "out", "--no-plots").exit_code == 0
    assert names(here / "out") == [
        f"iter0{iteration}_rank00_layers.{layer}.linear_linear_L{layer}_forward_pre_linear_bf16_weight_m0_c0"
        for iteration in (10, 20)
        for layer in (0, 1)
    ]


def test_a_broken_source_leaves_the_table_of_the_others(here: Path, run: str) -> None:
    (here / "cut.pt").write_bytes(b"PK")
    result = sweep(run, "cut.pt", "nowhere", "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["rows"]) == 36
    lines = result.stderr.splitlines()
    assert lines[0].startswith("Failed to process: cut.pt: cut.pt was not written by torch.save")
    assert lines[1].startswith("Failed to process: nowhere: there is no run at ")
    assert lines[2].startswith("Error: 2 of 38 tensors could not be swept: ")
    alone = sweep("nowhere")
    assert (alone.exit_code, alone.stdout, len(alone.stderr.splitlines())) == (1, "", 1)


def test_groups_have_a_common_scale_its_price_and_the_best_format(run: str) -> None:
    words = ("--by", "operation", "--layer-type", "linear", "--format", "mxfp4,mxfp8,fp8_e4m3", "--json")
    rows = json.loads(sweep(run, *words, "--target-sqnr", "15").stdout)["rows"]
    assert [(row["operation"], row["format"], row["sweep_mode"]) for row in rows] == [
        (operation, name, mode)
        for operation in ("backward", "forward")
        for name, mode in (("mxfp4_e2m1", "mx"), ("mxfp8_e4m3", "mx"), ("fp8_e4m3", "tensor"))
    ]
    assert {(row["best_format"], row["best_format_bits"], row["meets_target"]) for row in rows} == {
        ("mxfp4_e2m1", 4.25, "yes")
    }
    assert all(row["worst_common_price"] >= row["median_common_price"] >= 0 for row in rows)
    assert all(float(row["common_exponent"]).is_integer() for row in rows)
    higher = json.loads(sweep(run, *words, "--target-sqnr", "25").stdout)["rows"]
    assert len(higher) == len(rows)
    assert {row["best_format"] for row in higher} <= {"mxfp8_e4m3", "fp8_e4m3"}
    highest = json.loads(sweep(run, *words, "--target-sqnr", "90").stdout)["rows"]
    assert {row["meets_target"] for row in highest} == {"no"}


def test_sources_in_which_nothing_matches_are_named_and_left_out(here: Path, run: str) -> None:
    save(here / "a.pt", VALUES)
    result = sweep(run, "a.pt", "--layer-idx", "1", "--json")
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["rows"]) == 18
    assert result.stderr == "left out: no records match --layer-idx 1: layer_idx is -1 (1 records)\n"
    nowhere = sweep(run, "a.pt", "--layer-idx", "7")
    assert (nowhere.exit_code, nowhere.stdout) == (1, "")
    assert nowhere.stderr.startswith("Error: no records match --layer-idx 7: layer_idx is ")


def test_the_mode_of_a_sweep_says_what_levels_are(run: str) -> None:
    cases: list[tuple[str, str]] = [
        ("mx", "mxfp8_e4m3"),
        ("tensor", "fp8_e4m3"),
        ("channel", "fp8_e4m3"),
        ("legacy", "fp8_e4m3"),
    ]
    for mode, expected in cases:
        words = (run, "--iteration", "10", "--tensor-name", "query", "--layer-idx", "0", "--json")
        (row,) = json.loads(sweep(*words, "--sweep-mode", mode, "--mode", "train").stdout)["rows"]
        assert (row["sweep_mode"], row["format"], row["mode"]) == (mode, expected, "train")
        assert (LegacyLevel.__dataclass_fields__.keys() <= row.keys()) is (mode == "legacy")
        none = sweep(*words, "--sweep-mode", mode, "--mode", "eval")
        assert none.stderr == "Error: no records match --mode eval: mode is train (18 records)\n"


def test_options_reach_the_sweep(here: Path) -> None:
    array = np.random.default_rng(1).standard_normal((24, 8)).astype(np.float32)
    save(here / "a.pt", torch.from_numpy(array))
    words = ("--sweep-mode", "mx", "--scale-rule", "rceil", "--rounding", "away", "--block-size", "5", "--axis", "0")
    bounds = ("--scale-bits", "6", "--max-scale-exp", "2", "--min-scale-exp", "-2", "--num-levels", "3")
    result = sweep("a.pt", "--levels", "--json", *words, *bounds)
    options = {
        "block_size": 5,
        "axis": 0,
        "scale_bits": 6,
        "max_scale_exp": 2.0,
        "min_scale_exp": -2.0,
        "num_levels": 3,
    }
    from ranktape.analyze.numerics.formats import Rounding
    from ranktape.analyze.numerics.quantization.schemes import ScaleRule
    from ranktape.analyze.numerics.sweeps.options import SweepMode

    expected = sweep_array(
        array,
        format="fp8_e4m3",
        options=SweepOptions(mode=SweepMode.MX, scale_rule=ScaleRule.RCEIL, rounding=Rounding.AWAY, **options),  # type: ignore[arg-type]
    )
    rows = json.loads(result.stdout)["rows"]
    assert [(row["exponent"], row["mse"]) for row in rows] == [(level.exponent, level.mse) for level in expected.levels]
    assert [row["exponent"] for row in rows] == [2, 0, -2]


def test_the_defaults_are_those_that_the_help_names(here: Path) -> None:
    save(here / "a.pt", torch.from_numpy(np.random.default_rng(1).standard_normal((24, 64)).astype(np.float32)))
    words = ("a.pt", "--levels", "--json", "--format", "mxfp4")
    plain, shown = sweep(*words).stdout, " ".join(sweep("--help").stdout.split())
    for flag, default, other in (
        ("--scale-rule", "floor", "ceil"),
        ("--block-size", "32", "16"),
        ("--scale-bits", "8", "3"),
        ("--num-levels", "21", "20"),
    ):
        assert re.search(rf"{flag} [^-].*?\[{default}[;\]]", shown), flag
        assert sweep(*words, flag, default).stdout == plain, flag
        assert sweep(*words, flag, other).stdout != plain, flag


def test_wrong_options_are_one_line_before_anything_is_swept(here: Path) -> None:
    cases: list[tuple[list[str], str]] = [
        (["--format", "fp8-e4m3"], "did you mean fp8_e4m3"),
        (["--format", "mxfp8_e4m4"], "did you mean mxfp8_e4m3"),
        (["--format", "fp8_e4m3,,nvfp4"], "format '' is not known"),
        (["--format", "hif8", "--sweep-mode", "mx"], "'hif8' is not one of blocks"),
        (["--format", "nvfp4", "--sweep-mode", "tensor"], "'nvfp4' has blocks: give --sweep-mode mx"),
        (["--sweep-mode", "tensr"], "'tensr' is not one of 'mx', 'tensor', 'channel', 'legacy'"),
        (["--num-levels", "50", "--sweep-mode", "mx"], "--num-levels 50 is not allowed with offsets"),
        (["--max-scale-exp", "1.5", "--sweep-mode", "mx"], "--max-scale-exp 1.5 is not allowed with blocks"),
        (["--min-scale-exp", "inf"], "--min-scale-exp inf is not allowed"),
        (["--target-sqnr", "nan"], "--target-sqnr nan is not allowed"),
        (["--levels", "--by", "rank"], "--levels and --by exclude each other"),
        (["--by", "layr"], "records have no field 'layr'"),
        (["--where", "layr == 1"], "did you mean"),
    ]
    for words, message in cases:
        save(here / "a.pt", VALUES)
        result = sweep("a.pt", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr.splitlines()[-1]
        assert names(here) == ["a.pt"]


@pytest.mark.parametrize(
    ("tensor", "note"),
    [
        (torch.empty(0, 3), "empty"),
        (torch.full((4,), float("nan")), "no finite number"),
        (torch.zeros(4), "all zero: exact at any scale"),
        (torch.tensor([float("inf"), 0.0]), "no finite number other than zero|NaN or Inf in every block"),
    ],
)
def test_tensors_without_a_scale_have_files_that_say_so(here: Path, tensor: torch.Tensor, note: str) -> None:
    save(here / "a.pt", tensor)
    for name in ("fp8_e4m3", "mxfp8", "nvfp4"):
        assert sweep("a.pt", "--format", name, "--no-plots", "--output-dir", name).exit_code == 0
        (results,) = (here / name / "a").glob("*.txt")
        text = results.read_text()
        assert re.search(f"no scale to recommend: ({note})", text)
        assert "Elements: " in text


def test_scalars_integers_and_specials_are_swept(here: Path) -> None:
    save(here / "scalar.pt", torch.tensor(3.5))
    save(here / "integers.pt", torch.arange(300).to(torch.int16))
    save(here / "specials.pt", torch.tensor([1.0, float("nan"), float("-inf"), -0.0, 2.0**-149]))
    result = sweep("scalar.pt", "integers.pt", "specials.pt", "--json", "--format", "fp8_e4m3")
    assert result.exit_code == 0
    rows = {row["source"]: row for row in json.loads(result.stdout)["rows"]}
    assert (rows["scalar.pt"]["mse"], rows["scalar.pt"]["psnr"]) == (0, "inf")
    assert (rows["specials.pt"]["nan"], rows["specials.pt"]["inf"], rows["specials.pt"]["zero"]) == (1, 1, 1)


def test_a_directory_that_cannot_be_made_is_one_line(here: Path) -> None:
    save(here / "a.pt", VALUES)
    (here / "file").write_text("")
    result = sweep("a.pt", "--output-dir", "file/out")
    assert (result.exit_code, result.stdout) == (1, "")
    (error,) = result.stderr.splitlines()
    assert error.startswith("Error: the folder cannot be written to file/out: Not a directory: move the existing file")


def test_a_place_that_is_taken_fails_its_tensor_alone(here: Path) -> None:
    save(here / "a.pt", VALUES)
    save(here / "b.pt", VALUES)
    (here / "out").mkdir()
    (here / "out" / "a").write_text("in the way")
    result = sweep("a.pt", "b.pt", "--output-dir", "out", "--no-plots")
    assert result.exit_code == 1
    assert (
        "Failed to process: a.pt: the folder cannot be written to out/a: File exists: move the existing file"
        in result.stdout
    )
    assert names(here / "out" / "b") == ["mxfp_scaling_results_fp8_e4m3.txt", "mxfp_scaling_test_b_fp8_e4m3.log"]


def test_a_failure_while_writing_is_in_the_log(here: Path) -> None:
    save(here / "a.pt", VALUES)
    (here / "out" / "a" / "mxfp_scaling_test_fp8_e4m3.png").mkdir(parents=True)
    result = sweep("a.pt", "--output-dir", "out")
    assert result.exit_code == 1
    lines = (here / "out" / "a" / "mxfp_scaling_test_a_fp8_e4m3.log").read_text().splitlines()
    assert re.search(r"  Failed: the plot cannot be written to out/a/\S+: Is a directory", lines[-1])
    assert [line for line in result.stdout.splitlines() if line[:2] == "20"] == lines


@pytest.mark.parametrize("words", [["--sweep-mode", "mx", "--axis", "5"], ["--sweep-mode", "channel", "--axis", "-3"]])
def test_what_does_not_fit_the_only_tensor_is_one_line(here: Path, words: list[str]) -> None:
    save(here / "a.pt", VALUES)
    result = sweep("a.pt", "--json", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: --axis {words[-1]} is not one of a tensor of shape (16, 64)\n"


def test_a_terminal_without_the_letters_gets_escapes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(here / "张量.pt", VALUES)
    for words in (("--no-plots",), ("--csv",)):
        written = io.BytesIO()
        stdout = io.TextIOWrapper(written, encoding="ascii", write_through=True)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", stdout)
            cli.main(["sweep", "张量.pt", *words], standalone_mode=False)
        assert rb"\u5f20\u91cf" in written.getvalue()
    assert capsys.readouterr().err == ""
    assert names(here / "draw" / "scaling_analysis") == ["张量"]


def test_indices_of_a_run_are_left_out_and_named(tmp_path: Path) -> None:
    store(tmp_path / "run", [describe_tensor(np.arange(5), tensor_name="tokens"), *model_tensors(num_layers=1)])
    result = sweep(tmp_path / "run", "--json")
    assert (result.exit_code, len(json.loads(result.stdout)["rows"])) == (0, 9)
    assert result.stderr == "left out: records of integers or bool, which are not swept: 1 of int64\n"
    alone = sweep(tmp_path / "run", "--tensor-name", "tokens")
    assert (alone.exit_code, alone.stdout) == (1, "")
    assert alone.stderr.endswith("has only records of integers or bool, which are not swept: 1 of int64\n")


def test_failures_of_one_reason_are_one_line_with_a_count(tmp_path: Path) -> None:
    reduced = [reduce_to("statistics", array, info=info) for array, info in model_tensors(num_layers=2)]
    store(tmp_path / "run", [tensor for tensor in reduced if tensor is not None])
    result = sweep(tmp_path / "run")
    assert (result.exit_code, result.stdout) == (1, "")
    first, last = result.stderr.splitlines()
    assert first.startswith("Failed to process: iter000_rank00_")
    assert last.startswith("Error: 18 of 18 tensors could not be swept: 18 tensors, the first of which is iter000_")
    assert last.count("the statistics were kept") == 1


def test_formats_that_kept_histograms_do_not_answer_are_named_once(tmp_path: Path) -> None:
    reduced = [reduce_to("histogram", array, info=info) for array, info in model_tensors(num_layers=1)]
    store(tmp_path / "run", [tensor for tensor in reduced if tensor is not None])
    result = sweep(tmp_path / "run", "--format", "mxfp4,nvfp4,fp8_e4m3", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["format"] for row in rows] == ["mxfp4_e2m1", "fp8_e4m3"] * 9
    assert result.stderr.startswith("nvfp4 left out: they need values")
    assert len(result.stderr.splitlines()) == 1
    alone = sweep(tmp_path / "run", "--format", "nvfp4")
    assert (alone.exit_code, alone.stdout) == (1, "")
