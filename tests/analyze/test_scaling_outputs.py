"""The files about a tensor are all there, readable, under safe names, and say what the sweep says."""

from __future__ import annotations

import errno
import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.console import writing
from ranktape.analyze.legacy.plots import draw_panels
from ranktape.analyze.legacy.text import (
    Subject,
    analysis_lines,
    cosine_text,
    factor_text,
    level_lines,
    limit_lines,
    results_text,
    share_text,
    statistics_lines,
)
from ranktape.analyze.legacy.write import (
    MAX_NAME_NBYTES,
    FolderNames,
    OutputOptions,
    TensorReport,
    files_of,
    safe_name,
    titles_of,
)
from ranktape.analyze.numerics.quantization.schemes import SCHEMES
from ranktape.analyze.numerics.sweeps.metrics import METRICS
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep, sweep_array
from ranktape.analyze.questions.advice import Recommendation
from ranktape.errors import AccessDeniedError, DataError, NoSpaceError, StorageError

NORMAL = np.random.default_rng(0).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
WHOLE = np.random.default_rng(1).integers(-8, 9, (16, 16)).astype(ml_dtypes.bfloat16)
START = datetime.now().astimezone()
SUBJECT = Subject(name="a.pt", source="folder/a.pt", dtype="bfloat16", judged_as="bfloat16", shape=(64, 128))

SWEEPS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "e4m3": (NORMAL, "fp8_e4m3", {}),
    "e2m1": (NORMAL, "fp4_e2m1", {}),
    "hif8": (NORMAL, "hif8", {}),
    "int8": (NORMAL, "int8", {}),
    "mx": (NORMAL, "mxfp8_e4m3", {}),
    "mx4": (NORMAL, "mxfp4_e2m1", {"block_size": 16}),
    "nvfp4": (NORMAL, "nvfp4", {}),
    "channel": (NORMAL, "fp4_e2m1", {"mode": SweepMode.CHANNEL, "axis": 0}),
    "legacy": (NORMAL, "fp8_e4m3", {"mode": SweepMode.LEGACY}),
    "gradient": ((NORMAL.astype(np.float32) * 1e-6).astype(ml_dtypes.bfloat16), "fp8_e5m2", {}),
    "vanishing": (NORMAL.astype(np.float64) * 1e-200, "fp8_e4m3", {}),
    "one level": (NORMAL, "fp8_e4m3", {"num_levels": 1}),
    "many levels": (NORMAL, "fp8_e4m3", {"num_levels": 101, "max_scale_exp": 15.0, "min_scale_exp": -30.0}),
    "some lossless": (WHOLE, "fp8_e4m3", {}),
    "all lossless": (WHOLE, "fp8_e4m3", {"num_levels": 3, "max_scale_exp": 1.0, "min_scale_exp": -1.0}),
    "flushed": (NORMAL, "fp4_e2m1", {"num_levels": 2, "max_scale_exp": 90.0, "min_scale_exp": 80.0}),
    "specials": (np.array([np.nan, np.inf, -0.0, 1.0, -3.0, 1e-30], np.float32), "fp8_e4m3", {}),
    "zeros": (np.zeros(4, np.float16), "fp8_e4m3", {}),
    "empty": (np.zeros((0, 4), np.float32), "fp8_e4m3", {}),
    "nan": (np.full(4, np.nan, np.float32), "fp8_e4m3", {}),
}
"""What reports and plots are made of: the array, the format, the options."""


def sweep_of(name: str) -> ScaleSweep:
    """One of `SWEEPS`."""
    array, scheme, options = SWEEPS[name]
    return sweep_array(array, format=scheme, options=SweepOptions(**options))


def test_one_is_not_many() -> None:
    sweep = sweep_array(np.ones(1, np.float32), format="fp8_e4m3", options=SweepOptions(num_levels=1))
    assert any(one.get_text().endswith(": 1 element, 1 level") for one in draw_panels(sweep, name="x").texts)
    text = results_text(Recommendation(sweep), subject=SUBJECT)
    assert "Tested 1 scaling level from" in text
    assert "Analyzed 1 scaling level\n" in text


def test_a_ratio_just_below_zero_is_zero() -> None:
    text = results_text(Recommendation(sweep_of("flushed")), subject=SUBJECT)
    assert "SQNR: 0.00 dB" in text
    assert "-0.00 dB" not in text
    assert "All levels lose nearly everything" in text


def test_counts_of_a_legacy_sweep_are_said_to_be_the_original_s() -> None:
    sweep = sweep_of("legacy")
    lines = results_text(Recommendation(sweep), subject=SUBJECT).splitlines()
    assert "Rounding: away" in lines
    assert "  rounding       away" in statistics_lines(sweep)
    for line in [*level_lines(sweep), *lines]:
        assert not re.search(r"(?<!Original )\b(Overflow|Underflow|Flushed|Flush to Zero): ", line) or "Scale" in line
    assert all("Original Underflow: " in line for line in level_lines(sweep))
    assert "Original" not in "".join(level_lines(sweep_of("e4m3")))


def test_reports_hold_the_headings_of_the_legacy_tool_in_ascii() -> None:
    for name in SWEEPS:
        sweep = sweep_of(name)
        text = results_text(Recommendation(sweep), subject=SUBJECT)
        assert text.isascii()
        assert not re.search(r"(?<![a-z])nan(?![a-z])", text.replace("original_score", "")) or name == "legacy"
        headings = ["SCALING FACTOR ANALYSIS & RECOMMENDATIONS"]
        if sweep.levels:
            headings += [
                "INDIVIDUAL METRIC OPTIMA:",
                "COMPOSITE RECOMMENDATION:",
                "PERFORMANCE ANALYSIS:",
                "FINAL RECOMMENDATION:",
                "OVERFLOW/UNDERFLOW ANALYSIS SUMMARY",
                "OVERFLOW EXTREMES:",
                "UNDERFLOW EXTREMES:",
                "OVERFLOW/UNDERFLOW RECOMMENDATIONS:",
            ]
        places = [text.index(f"\n{heading}\n") for heading in headings]
        assert places == sorted(places)
        assert len(list(level_lines(sweep))) == len(sweep.levels)


def test_the_table_of_results_gives_every_figure_back() -> None:
    sweep = sweep_of("e2m1")
    lines = results_text(Recommendation(sweep), subject=SUBJECT).split("ALL LEVELS:\n")[1].splitlines()
    names = lines[0].split()
    assert len(lines) > len(sweep.levels) == 21
    for line, level in zip(lines[1:], sweep.levels, strict=False):
        for name, word in zip(names, line.split(), strict=True):
            assert float(word) == pytest.approx(getattr(level, name), rel=1e-8)


def test_the_report_names_the_best_level_of_each_metric() -> None:
    sweep = sweep_of("e2m1")
    found = Recommendation(sweep)
    text = "\n".join(analysis_lines(found))
    for name, label in (("mse", "MSE"), ("cosine", "Cosine Similarity"), ("psnr", "PSNR")):
        level = sweep.best(METRICS[name].goodness)
        assert level is not None
        assert f"Best {label}: Scale Exp = {level.exponent:.2f}, Factor = {level.scale:.6f}" in text
    assert sweep.recommended is not None
    assert f"Composite Score: {sweep.recommended.score:.4f}" in text


def test_the_report_lists_the_levels_that_lose_more_than_a_thousandth() -> None:
    sweep = sweep_of("many levels")
    lines = list(limit_lines(Recommendation(sweep)))
    listed = [line for line in lines if line.startswith("    Overflow: ")]
    assert len(listed) == sum(level.overflow_ratio > 0.001 for level in sweep.levels) > 0
    severities = [line.split()[-1] for line in lines if line.startswith("    Severity: ")]
    ratios = [level.overflow_ratio for level in sweep.levels if level.overflow_ratio > 0.001]
    assert severities[: len(ratios)] == ["HIGH" if ratio > 0.01 else "MEDIUM" for ratio in ratios]


def test_offsets_are_called_offsets() -> None:
    assert next(level_lines(sweep_of("mx"))).startswith("Level  1/21: Scale Offset: 10.00 (Factor: 1024.000000)")
    text = results_text(Recommendation(sweep_of("mx")), subject=SUBJECT)
    assert "Scale Offsets: 10.00 to -10.00, 21 levels" in text
    assert "Block Size: 32, Axis: -1" in text
    assert "Scale Rule: floor, Scale Bits: 8" in text


def test_figures_keep_what_they_would_lose_by_rounding() -> None:
    assert [factor_text(scale) for scale in (0.015625, 2.0**-30)] == ["0.015625", "9.313226e-10"]
    assert [cosine_text(cosine) for cosine in (1.0, 0.9999999)] == ["1.000000", "0.999999900000"]
    assert [share_text(share) for share in (0.0, 0.5, 1e-6)] == ["0.00%", "50.00%", "1.00e-04%"]


def report_on(folder: Path, shown: list[str], **options: Any) -> TensorReport:
    """A report on a tensor called `a`."""
    chosen = OutputOptions(output_dir=folder, **options)
    return TensorReport("fp8_e4m3", subject=SUBJECT, folder_name="a", options=chosen, start=START, show=shown.append)


def test_all_files_are_written_and_the_log_is_what_was_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    with report_on(tmp_path / "deep" / "down", shown) as report:
        assert report.files.log.read_text().splitlines() == shown
        assert any("Tensor: a.pt" in line for line in shown)
        report.say_swept(sweep_of("e4m3"))
        assert re.search(r"  Swept: 21 levels, \d+\.\d{3} s after the start$", shown[-1])
        report.finish(sweep_of("e4m3"))
    files = report.files
    folder = tmp_path / "deep" / "down" / "a"
    assert {path.name for path in folder.iterdir()} == {
        "mxfp_scaling_results_fp8_e4m3.txt",
        "mxfp_scaling_test_fp8_e4m3.png",
        "mxfp_scaling_summary_fp8_e4m3.png",
        "mxfp_scaling_test_a_fp8_e4m3.log",
    }
    lines = files.log.read_text().splitlines()
    assert lines == shown
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}(  |$)", line) for line in lines)
    said = "\n".join(line[25:] for line in lines)
    for path in (files.results, files.panels, files.summary, files.log):
        assert f"saved to: {path}" in said
    assert re.search(r"^Start: \d{4}-\d\d-\d\dT", said, re.MULTILINE)
    assert re.search(r"^End: \d{4}-\d\d-\d\dT.*, \d+\.\d{3} s after the start$", said, re.MULTILINE)
    assert "Shape: [64, 128], Data Type: bfloat16" in said


def test_pictures_are_left_out_if_asked(tmp_path: Path) -> None:
    shown: list[str] = []
    with report_on(tmp_path, shown, with_plots=False) as report:
        report.finish(sweep_of("zeros"))
    assert sorted(path.suffix for path in (tmp_path / "a").iterdir()) == [".log", ".txt"]
    assert any("no scale to recommend: all zero: exact at any scale" in line for line in shown)


def test_a_sweep_that_fails_is_the_last_line_of_its_log(tmp_path: Path) -> None:
    shown: list[str] = []
    with (
        pytest.raises(DataError, match="cut off"),
        report_on(tmp_path, shown) as report,
    ):
        raise DataError("cut off")
    lines = report.files.log.read_text().splitlines()
    assert lines == shown
    assert lines[-1].endswith("  Failed: cut off")


@pytest.mark.parametrize(
    "text",
    [
        "..",
        ".",
        "",
        "/",
        "a/b",
        "../../etc/passwd",
        "a\0b",
        "\n",
        "-rf",
        ".hidden",
        "a\udcff",
        "x" * 300,
        "л" * 200,
        "...",
    ],
)
def test_no_name_leads_out_of_the_directory(text: str, tmp_path: Path) -> None:
    name = safe_name(text)
    assert name not in {"", ".", ".."}
    assert not name.startswith((".", "-"))
    assert len(name.encode()) <= MAX_NAME_NBYTES
    (tmp_path / name).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_names_that_file_systems_take_stay_as_they_are() -> None:
    assert [safe_name(name) for name in ("layer_0-q.v2", "张量", "Größe=1")] == ["layer_0-q.v2", "张量", "Größe=1"]
    assert safe_name("x" * 300) != safe_name("x" * 301)


def test_no_two_tensors_share_a_directory() -> None:
    names = FolderNames()
    taken = [names.take(text) for text in ("a", "A", "a", "a_2", "a/b", "a:b", "e\u0301", "\u00e9")]
    assert taken == ["a", "A_2", "a_3", "a_2_2", "a_b", "a_b_2", "\u00e9", "\u00e9_2"]
    assert len({name.casefold() for name in taken}) == len(taken)


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    names = ("x/a.pt", "y/a.pt", "b.pt", "/r/1/c.pt", "/r/2/1/c.pt", "/r/3/1/c.pt", "b2/d", "d")
    paths = [Path(name) for name in names]
    titles = ["x/a.pt", "y/a.pt", "b.pt", "r/1/c.pt", "2/1/c.pt", "3/1/c.pt", "b2/d", "d"]
    assert titles_of(paths) == titles
    assert titles_of([Path("a.pt"), Path("a.pt")]) == ["a.pt", "a.pt"]
    assert titles_of([]) == []


def test_a_full_disk_is_named_as_one(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    log = files_of(tmp_path / "a", format="fp8_e4m3").log
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    with pytest.raises(NoSpaceError, match="No space left on device: free space"):
        report_on(tmp_path, [])


def test_failed_writes_say_why_and_the_way_out() -> None:
    for number, kind in [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EACCES, AccessDeniedError),
        (errno.EROFS, AccessDeniedError),
        (errno.ENOTDIR, StorageError),
    ]:
        with pytest.raises(kind) as raised, writing(Path("a\nb"), what="log", option="--output-dir"):
            raise OSError(number, "reason")
        assert type(raised.value) is kind
        assert str(raised.value).startswith(r"the log cannot be written to a\nb: reason: ")
        assert str(raised.value).endswith("give another --output-dir")


def test_every_scheme_has_a_report_and_pictures() -> None:
    for scheme in SCHEMES:
        sweep = sweep_array(
            NORMAL[:8], format=scheme, options=SweepOptions(num_levels=3, max_scale_exp=1, min_scale_exp=-1)
        )
        found = Recommendation(sweep)
        assert f"use offset {sweep.recommended.exponent:.4g}" in results_text(found, subject=SUBJECT)  # type: ignore[union-attr]
        assert math.isfinite(sweep.levels[0].mse)
        assert len(draw_panels(sweep, name=scheme).axes) == 6
