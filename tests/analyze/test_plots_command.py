"""Are the drawn plots right, what does the command write, and what do plots of recipes show?"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ranktape.analyze.cli import cli
from ranktape.analyze.commands import parse_kinds
from ranktape.analyze.console import write_whole
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.views.plots import heat_maps
from ranktape.analyze.views.plots.data import PlotData
from ranktape.analyze.views.plots.table import FOLDERS, PLOTS, REPLAYED
from ranktape.analyze.views.plots.write import write_plots
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import StorageError, UsageError
from ranktape.storage import open_run
from tests.analyze.linear_runs import hot_channels, linear_run
from tests.analyze.runs import Tensor, describe_tensor, model_tensors, store
from tests.analyze.test_plots import cells, colour_numbers, readable_texts, texts
from tests.exhaustive import exhaustive
from tests.full_disk import file_size_limit
from tests.terminal import Terminal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of a model on one rank."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    store(folder, model_tensors())
    return str(folder)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, ["plot", *words])


def test_one_kind_is_one_file(run: str, tmp_path: Path) -> None:
    for end, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        path = tmp_path / "new" / f"plot{end}"
        result = invoke(run, "--kind", "overflow_histogram", "-o", str(path))
        assert (result.exit_code, result.stdout) == (0, f"{path}\n")
        assert path.read_bytes().startswith(start)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["plot.pdf", "plot.png", "plot.svg"]


def test_several_kinds_go_into_folders_with_an_index(run: str, tmp_path: Path) -> None:
    folder = tmp_path / "draw"
    stale = folder / "rank_analysis" / "rank_deviation.png"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of an earlier run, or of somebody else")
    result = invoke(run, "--kind", "overflow_h*,rank-deviation", "--kind", "fp8_scatter", "-o", str(folder))
    assert result.exit_code == 0
    assert result.stdout == f"{folder}/overflow_analysis/overflow_histogram.png\n"
    assert "1 plots, 2 left out" in result.stderr
    assert stale.read_bytes() == b"of an earlier run, or of somebody else"
    index = json.loads((folder / "index.json").read_text())
    assert [one["path"] for one in index["plots"]] == ["overflow_analysis/overflow_histogram.png"]
    assert {one["kind"]: one["why"] for one in index["left_out"]} == {
        "rank_deviation": "there is only one rank: 0; the existing file of that name shows an earlier selection",
        "fp8_scatter": "there is only one quant type: bf16",
    }
    readme = (folder / "README.txt").read_text()
    assert "overflow_histogram.png\n      Tensors counted by their overflow ratio" in readme
    assert "there is only one rank: 0" in readme


def test_a_plot_that_cannot_be_written_by_a_process_of_its_own_is_said(run: str, tmp_path: Path) -> None:
    taken = tmp_path / "draw" / "overflow_analysis" / "overflow_histogram.png"
    taken.mkdir(parents=True)
    kinds = ("overflow_analysis", "layer_analysis", "neighbouring_layers")  # enough for two processes
    result = invoke(run, *(word for kind in kinds for word in ("--kind", kind)), "-o", str(tmp_path / "draw"))
    assert result.exit_code == 1
    assert f"the plot cannot be written to {taken}: Is a directory" in result.stderr
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".partial", "index.json"))]


@exhaustive("test_plots.py draws each kind, this command some of them")
def test_all_plots_fill_the_folders_of_the_legacy_tool(tmp_path: Path) -> None:
    tensors = model_tensors(num_ranks=2, iterations=(3, 5))
    tensors += model_tensors_of("mxfp8")
    store(tmp_path / "run", tensors)
    folder = tmp_path / "draw"
    result = invoke(str(tmp_path / "run"), "--all", "--format", "fp8_e4m3", "-o", str(folder))
    assert result.exit_code == 0
    assert {path.name for path in folder.iterdir()} == {*FOLDERS, "index.json", "README.txt"}
    drawn = {str(path.relative_to(folder)) for path in folder.rglob("*.png")}
    left_out = {one["path"] for one in json.loads((folder / "index.json").read_text())["left_out"]}
    assert drawn | left_out == {kind.path for kind in PLOTS.values()}
    assert not drawn & left_out
    # No tensor of the model has a dimension of samples, and its components are its layer types.
    assert {path for path in left_out if "sample" not in path} == {
        "distributions/distribution_by_batch_size.png",
        # No recipe is named.
        *(kind.path for kind in PLOTS.values() if kind.folder == REPLAYED),
    }
    assert all(any(path.startswith(f"{name}/") for path in drawn) for name in FOLDERS if name != REPLAYED)


@exhaustive("make test draws each plot by its name")
def test_one_name_is_one_plot(run: str, tmp_path: Path) -> None:
    """Alone, beside others and with --all."""
    assert invoke(run, "--kind", "overflow", "-o", str(tmp_path / "alone.png")).exit_code == 0
    assert invoke(run, "--kind", "overflow,overflow_histogram", "-o", str(tmp_path / "some")).exit_code == 0
    assert invoke(run, "--all", "-o", str(tmp_path / "all")).exit_code == 0
    files = [tmp_path / "alone.png", *(tmp_path / one / PLOTS["overflow"].path for one in ("some", "all"))]
    assert len({path.read_bytes() for path in files}) == 1


def test_groups_by_another_field(run: str, tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    result = invoke(run, "--kind", "distribution_by_phase", "--by", "tensor_name", "-o", str(path))
    assert result.exit_code == 0
    result = invoke(run, "--kind", "layer_rank_absmax", "--by", "iteration", "-o", str(path))
    assert (result.exit_code, "there is only one iteration" in result.stderr) == (2, True)
    for words, message in (
        (["--kind", "overflow_histogram", "--by", "rank"], "overflow_histogram has none"),
        (["--kind", "distribution_by_phase", "--by", "rank"], "not by rank"),
        (["--kind", "layer_rank_absmax", "--by", "phase"], "not by phase"),
        (["--all", "--by", "phase"], "--by and --all exclude each other"),
    ):
        result = invoke(run, *words)
        assert (result.exit_code, message in result.stderr) == (2, True), (words, result.stderr)


def test_without_a_format_one_is_chosen_and_named(run: str, tmp_path: Path) -> None:
    assert invoke(run, "--kind", "overflow_histogram,overflow", "-o", str(tmp_path)).exit_code == 0
    said = "No format was given: overflow and underflow refer to fp8_e4m3 with one scale for each tensor."
    assert json.loads((tmp_path / "index.json").read_text())["notes"] == [said]


def model_tensors_of(quant_type: str) -> list[Tensor]:
    """The model again, under another tag."""
    return [
        (array, dataclasses.replace(info, quant_type=quant_type))
        for array, info in model_tensors(num_ranks=2, iterations=(3, 5))
    ]


def test_mistakes_are_named(run: str, tmp_path: Path) -> None:
    for words, code, message in (
        (["--kind", "overflw"], 2, "did you mean overflow or"),
        (["--all", "--kind", "overflow"], 2, "exclude each other"),
        (["--kind", "rank_deviation"], 2, "there is only one rank: 0"),
        (["-o", str(tmp_path / "a.jpg")], 2, "plots cannot be written as .jpg"),
        (["--kind", "overflow_histogram", "-o", str(tmp_path)], 2, "is a folder"),
        (["--kind", "overflow_histogram", "-o", "-"], 2, "--output - is not a file name"),
        (["--all", "-o", __file__], 2, "is a file: several plots need a folder"),
        (["--kind", "heatmaps", "-o", "/dev/null/draw"], 1, "the plot cannot be written to /dev/null/draw"),
        (["--kind", "overflow_histogram", "--format", "fp9"], 2, "'fp9'"),
        (["--kind", "overflow_histogram", "--recipe", "nvfp4"], 2, "--recipe is only for plots of recipes"),
        (["--kind", "replay_modules", "--recipe", "nvfp5"], 2, "'nvfp5' is not known"),
    ):
        result = invoke(run, *words)
        assert (result.exit_code, message in result.stderr, "Traceback" in result.stderr) == (code, True, False), (
            words,
            result.stderr,
        )


def test_kinds_are_named_by_folder_and_pattern() -> None:
    assert [one.name for one in parse_kinds(["fp8_analysis/"])] == [
        "fp8_distributions",
        "fp8_statistics",
        "fp8_scatter",
        "fp8_normal_fit",
    ]
    assert len(parse_kinds(["layer_*_absmax", "layer-rank-absmax", "heatmaps"])) == 5
    with pytest.raises(UsageError, match="names no plot"):
        parse_kinds([""])


def test_the_help_names_every_kind() -> None:
    text = invoke("--help").stdout
    assert all(name in text for name in PLOTS)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    write_whole(path, b"old")
    with file_size_limit(1000), pytest.raises(StorageError, match="File too large"):
        write_whole(path, bytes(2000))
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["plot.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StorageError, match="change the permissions"):
        write_whole(tmp_path / "plot.png", b"new")


def test_an_interruption_leaves_whole_plots(run: str, tmp_path: Path) -> None:
    """Ctrl-C after the first plot: it is there, nothing half, and no index that promises more."""

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt(path)

    with pytest.raises(KeyboardInterrupt):
        write_plots(open_run(run).select(), folder=tmp_path, kinds=parse_kinds(["overflow_*"]), on_plot=interrupt)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / PLOTS["overflow_by_layer_type"].path in found
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in found)


def test_a_terminal_says_which_plot_of_how_many_is_drawn(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    engine = Engine(show_progress=True)
    kinds = parse_kinds(["overflow", "overflow_histogram"])
    written = write_plots(open_run(run).select(), folder=tmp_path, kinds=kinds, engine=engine)
    assert len(written.drawn) == len(kinds)
    for number, kind in enumerate(written.drawn, 1):
        assert f"{number} of {len(kinds)}: drawing {kind.name}\r" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K\r"), "the line is still there"


def test_what_was_kept_instead_of_values_has_plots(tmp_path: Path) -> None:
    """A histogram has its distribution; of statistics alone the distribution says that nothing is known."""
    values = np.array([[1.0, -4.0]], dtype=np.float16)
    written = {}
    for keep in ("histogram", "statistics"):
        kept = reduce_to(keep, values, info=describe_tensor(values, sample_dim=0)[1])
        assert kept is not None
        written[keep] = write_plots(
            store(tmp_path / keep, [kept]).select(),
            folder=tmp_path / "draw" / keep,
            kinds=parse_kinds(["bf16_raw", "layer_sample_absmax", "sweep_panels"]),
        )
    assert [kind.name for kind in written["histogram"].drawn] == ["sweep_panels", "bf16_raw"]
    assert [kind.name for kind in written["statistics"].drawn] == ["bf16_raw"]
    assert [kind.name for kind, _ in written["statistics"].left_out] == ["layer_sample_absmax", "sweep_panels"]
    assert written["statistics"].notes[1:] == ("1 records store only statistics: they are in no distribution.",)


RECIPES = parse_recipes("mxfp8,mxfp4,nvfp4")
PRODUCTS = ["output", "grad_input", "grad_weight"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PlotData:
    """Twelve layers, one of which loses more; as many make ten come after nine."""
    run = linear_run(tmp_path_factory.mktemp("run"), hot_channels, num_layers=12)
    return PlotData(run.select(), recipes=RECIPES)


def test_a_plot_can_be_read(data: PlotData) -> None:
    assert PLOTS["replay_modules"].missing(data) == ""
    figure = PLOTS["replay_modules"].draw(data)
    readable_texts(figure)
    assert [axes.get_title() for axes in figure.axes[:3]] == PRODUCTS


def ratios(data: PlotData) -> dict[tuple[str, str, str], float]:
    groups = data.replayed.groups(["product", "recipe", "module"])
    return {tuple(group.key.values()): group.exact.sqnr or np.nan for group in groups}


def test_cells_are_ratios_of_modules_in_natural_order(data: PlotData) -> None:
    figure = PLOTS["replay_modules"].draw(data)
    found, columns = ratios(data), ["mxfp8", "mxfp4", "nvfp4", "recorded"]
    for axes, product in zip(figure.axes, PRODUCTS, strict=False):
        expected = [[found[product, recipe, f"layers.{layer}.query"] for recipe in columns] for layer in range(12)]
        best = max(value for (_, recipe, _), value in found.items() if recipe != "recorded")
        np.testing.assert_allclose(cells(axes), np.minimum(expected, best))
        written = [text.get_text() for text in axes.texts]
        assert written == [f"{value:.1f}" for row in expected for value in row]


def test_what_loses_nothing_is_as_good_as_the_best(data: PlotData) -> None:
    found = PlotData(data.records.select(layer_idx=[0, 1, 2]), recipes=parse_recipes("mxfp4,bf16"))
    figure = PLOTS["replay_modules"].draw(found)
    readable_texts(figure)
    assert [text.get_text() for text in figure.axes[0].texts][1::3] == ["inf"] * 3
    assert (cells(figure.axes[0])[:, 1] >= max(cells(axes)[:, 0].max() for axes in figure.axes[:3])).all()
    assert not figure.legends


def test_many_modules_are_layers_and_many_layers_neighbours(data: PlotData, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*, max_layers: int) -> Figure:
        monkeypatch.setattr(heat_maps, "MAX_MODULES", 8)
        monkeypatch.setattr(heat_maps, "MAX_ROWS", max_layers)
        figure = PLOTS["replay_modules"].draw(data)
        readable_texts(figure)
        return figure

    whole = cells(PLOTS["replay_modules"].draw(data).axes[0])
    layers = drawn(max_layers=12)
    np.testing.assert_array_equal(cells(layers.axes[0]), whole)
    assert "Each row is a layer, and shows its worst module." in {text.get_text() for text in texts(layers)}
    pairs = drawn(max_layers=6)
    np.testing.assert_array_equal(cells(pairs.axes[0])[:, :3], np.minimum(whole[::2], whole[1::2])[:, :3])


def test_a_product_that_is_nan_alone_is_marked(data: PlotData, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all calls NaN comes of finite operands: there is no ratio, and the cell is not an empty one."""
    replayed = data.replayed
    is_lost = (replayed.products == "output") & (replayed.names == "mxfp4")
    exact = replayed.exact.copy()
    exact[is_lost] = 0.0
    exact[is_lost, ErrorSums.__slots__.index("num_lost")] = 5.0
    found = PlotData(data.records, recipes=RECIPES)
    monkeypatch.setitem(vars(found), "replayed", dataclasses.replace(replayed, exact=exact))
    figure = PLOTS["replay_modules"].draw(found)
    assert (colour_numbers(figure.axes[0])[:, 1] == 2).all()
    assert (colour_numbers(figure.axes[1]) == -1).all()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" NaN"]


def test_without_recipes_they_are_left_out_of_all_and_usual_ones_are_taken_for_one(tmp_path: Path) -> None:
    linear_run(tmp_path / "run", num_layers=2)
    result = CliRunner().invoke(
        cli, ["plot", str(tmp_path / "run"), "--kind", "replay_modules", "-o", str(tmp_path / "a.png")]
    )
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/a.png\n")
    data = PlotData(store(tmp_path / "model", model_tensors()).select())
    assert PLOTS["replay_modules"].missing(data) == ("no recipe was given: --recipe mxfp8,mxfp4,nvfp4 draws this plot")


def test_what_cannot_be_computed_is_said(tmp_path: Path) -> None:
    store(tmp_path / "run", [one for one in model_tensors() if one[1].layer_type == "attention"])
    folder = tmp_path / "draw"
    words = ["plot", str(tmp_path / "run"), "--kind", "replay_analysis", "-o", str(folder)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    reasons = {one["kind"]: one["why"] for one in json.loads((folder / "index.json").read_text())["left_out"]}
    assert reasons["replay_modules"] == "no product can be computed again: no input was recorded"
