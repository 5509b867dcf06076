"""Do questions take several runs, folders of files, and folders of both, as one?"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ranktape.analyze.cli import COMMANDS, cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings.find import find
from ranktape.analyze.identity import quant_types
from ranktape.analyze.legacy import export_records
from ranktape.analyze.questions.compare import compare
from ranktape.analyze.questions.stats import stats
from ranktape.analyze.sources import Sources, open_sources, short_names
from ranktape.analyze.views.report.model import MAX_MODULES, differences_of
from ranktape.analyze.views.report.page import write_report
from ranktape.errors import RunNotFoundError, UsageError
from ranktape.storage import Records, open_run
from ranktape.storage.records.records import unite
from tests.analyze.faulty_runs import Sizes, everywhere, faulty_run
from tests.analyze.runs import model_tensors, store
from tests.analyze.test_report import data_of

ONE_RUN = {"compare"}
"""Commands in which a second run is the other side."""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs and a folder of files, beside other things."""
    folder = tmp_path_factory.mktemp("parent")
    for seed, name in enumerate(("bf16", "mxfp8")):
        store(folder / name, model_tensors(seed=seed))
    export_records(open_run(folder / "bf16").select(rank=0), folder / "deep" / "files")
    (folder / "notes.txt").write_text("nothing")
    (folder / "empty").mkdir()
    return folder


def ask(*words: object) -> Result:
    """A command; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)


def rows(*words: object) -> list[dict[str, Any]]:
    """What it answers."""
    done = ask(*words, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


def test_a_folder_of_sources_is_all_of_them(parent: Path) -> None:
    opened = open_sources(parent)
    assert isinstance(opened, Sources)
    assert list(opened.members) == ["bf16", "deep/files", "mxfp8"]
    counts = {row["source"]: row["records"] for row in rows("ls", parent, "--by", "source")}
    num_files = len(list((parent / "deep" / "files").iterdir()))
    num_records = len(open_run(parent / "bf16").select())
    assert counts == {"bf16": num_records, "deep/files": num_files, "mxfp8": num_records}


def test_several_sources_answer_as_each_of_them_does(parent: Path) -> None:
    places = [parent / "bf16", parent / "mxfp8"]
    for words in (["stats", "--by", "layer_idx"], ["overflow"], ["trend", "--summary"]):
        both = rows(words[0], *places, *words[1:])
        apart = [{"source": place.name} | row for place in places for row in rows(words[0], place, *words[1:])]
        assert sorted(both, key=json.dumps) == sorted(apart, key=json.dumps), words
    named = rows("stats", *places, "--source", "mx*", "--by", "rank")
    assert named == rows("stats", parent / "mxfp8", "--by", "rank")


def test_any_order_of_records_and_any_number_of_workers_give_the_same(parent: Path) -> None:
    parts = {name: open_run(parent / name).select() for name in ("bf16", "mxfp8")}
    both = unite(parts)
    order = np.random.default_rng(0).permutation(len(both)).tolist()
    expected = [row for records in parts.values() for row in stats(records).rows]
    found = stats(both.take(order), engine=Engine(workers=2, use_cache=False))
    assert [row[1:] for row in found.rows] == [expected[place] for place in order]
    again = stats(both.take(order))
    assert again.rows == found.rows


def test_sources_of_files_are_told_apart_too(parent: Path) -> None:
    both = rows("stats", parent / "bf16", parent / "deep", "--rank", "0", "--by", "source")
    first, second = ({name: row[name] for name in ("mean", "std", "absmax")} for row in both)
    assert first == second
    assert [row["source"] for row in both] == ["bf16", "deep/files"]


def test_a_sweep_names_the_sources_and_takes_them_together_or_apart(parent: Path) -> None:
    words = ("sweep", parent / "bf16", parent / "mxfp8", "--format", "fp8_e4m3", "--rank", "0", "--layer-idx", "0")
    single = rows(*words)
    assert {row["source"] for row in single} == {"bf16", "mxfp8"}
    together = rows(*words, "--by", "layer_type")
    apart = rows(*words, "--by", "source,layer_type")
    assert [row["records"] for row in together] == [2 * row["records"] for row in apart if row["source"] == "bf16"]
    assert {row["source"] for row in rows("sweep", parent, *words[3:])} == {"bf16", "deep/files", "mxfp8"}


def test_what_is_found_is_found_in_each_alone(tmp_path: Path) -> None:
    good = faulty_run(tmp_path / "good")
    bad = faulty_run(tmp_path / "bad", everywhere(2, factor=2.0**9), sizes=Sizes(num_layers=6))
    alone = find(bad.select())
    both = find(unite({"good": good.select(), "bad": bad.select()}))
    assert [one.title for one in both] == [f"bad: {one.title}" for one in alone]
    start = len(good.select())
    assert [one.places for one in both] == [tuple(start + place for place in one.places) for one in alone]
    assert both[0].where["source"] == "bad"
    assert bad.url in both[0].command
    found = rows("findings", tmp_path)
    assert [row["source"] for row in found] == ["bad"] * len(alone)
    assert found[0]["where"].startswith("bad: ")


def test_what_several_sources_have_in_common_is_one_finding(tmp_path: Path) -> None:
    runs = {name: faulty_run(tmp_path / name, everywhere(2, factor=2.0**9), sizes=Sizes(num_layers=6)) for name in "ab"}
    alone = find(runs["a"].select())
    both = find(unite({name: run.select() for name, run in runs.items()}))
    assert [one.title for one in both] == [f"a, b: {one.title}" for one in alone]
    size = len(runs["a"].select())
    assert [one.places for one in both] == [(*one.places, *(size + place for place in one.places)) for one in alone]
    assert both[0].where["source"] == "a, b"
    assert runs["a"].url in both[0].command


def test_two_captures_are_drawn_against_each_other(parent: Path, tmp_path: Path) -> None:
    places = (parent / "bf16", parent / "mxfp8")
    done = ask("plot", *places, "--kind", "fp8_distributions,fp8_statistics", "-o", tmp_path / "draw")
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "draw" / "fp8_analysis").glob("*.png"))) == 2
    assert "bf16 and " in (tmp_path / "draw" / "README.txt").read_text()
    types = quant_types(open_sources(places).select())
    assert set(types) == {"bf16", "mxfp8"}


def test_products_are_computed_again_of_each_source(parent: Path) -> None:
    places = (parent / "bf16", parent / "mxfp8")
    together, *alone = (rows("replay", *some, "--by", "layer_idx") for some in (places, places[:1], places[1:]))
    assert [row.pop("source") for row in together] == ["bf16"] * len(alone[0]) + ["mxfp8"] * len(alone[1])
    assert together == [*alone[0], *alone[1]]
    assert rows("replay", parent / "bf16", "--by", "source,layer_idx")[0]["source"] == "bf16"
    done = ask("replay", *places, "--target-sqnr", "20")
    assert done.exit_code == 2
    assert "select one with --source (bf16, mxfp8)" in done.stderr


def test_several_are_compared_with_one_each(parent: Path) -> None:
    reference, other, folder = parent / "bf16", parent / "mxfp8", parent / "deep" / "files"
    alone = rows("compare", reference, other)
    done = ask("compare", reference, other, folder, "--allow-unmatched", "--json")
    together = json.loads(done.stdout)
    assert {row["source"] for row in together["rows"]} == {"mxfp8", "deep/files"}
    of_other = [{key: row[key] for key in alone[0]} for row in together["rows"] if row["source"] == "mxfp8"]
    assert of_other == alone
    text = ask("compare", reference, other, folder, "--allow-unmatched").stdout.splitlines()
    assert text[-2].startswith("mxfp8: first divergence: ")
    assert text[-1].startswith("deep/files: no divergence: ")
    within = rows("compare", reference, "--neighbours")
    both = rows("compare", parent, "--source", "bf16,mxfp8", "--neighbours")
    assert [row for row in both if row.pop("source") == "bf16"] == within
    done = ask("compare", parent, other)
    assert "there are 3: bf16, deep/files, mxfp8" in done.stderr
    store(parent.parent / "shallow", model_tensors(num_layers=1))
    done = ask("compare", reference, other, parent.parent / "shallow")
    assert done.stderr.startswith("Error: ")
    assert "shallow: " in done.stderr


def test_a_folder_is_left_out_for_what_it_holds_and_not_for_its_name(tmp_path: Path) -> None:
    """What was counted of a run that cannot be written lies beside it under such a name, too."""
    for name in ("first", "second.analysis"):
        store(tmp_path / name, model_tensors(num_layers=1))
    stats(open_run(tmp_path / "first").select())
    shutil.copytree(tmp_path / "first" / "analysis", tmp_path / "first.analysis")
    found = rows("ls", tmp_path)
    assert {row["source"] for row in found} == {"first", "second.analysis"}


def test_mistakes_name_what_there_is(parent: Path, tmp_path: Path) -> None:
    done = ask("stats", parent, "--source", "mxpf8")
    assert "source is bf16 (" in done.stderr
    assert ask("stats", tmp_path).exit_code == 1
    with pytest.raises(RunNotFoundError, match="no run at"):
        open_sources([parent / "bf16", parent / "bf61"])
    with pytest.raises(UsageError, match="nothing to open"):
        open_sources([])


def test_every_question_takes_several() -> None:
    for name in COMMANDS:
        text = ask(name, "--help").stdout.split("\n")[0]
        assert ("RUN..." in text or "SOURCE..." in text) is (name not in ONE_RUN), name


def test_a_report_of_two_sources_begins_with_what_sets_them_apart(tmp_path: Path) -> None:
    good = faulty_run(tmp_path / "good").select()
    bad = faulty_run(tmp_path / "bad", everywhere(1, factor=2.0**9)).select()
    path = write_report(unite({"good": good, "<b>bad</b>": bad}), output=tmp_path / "report.html", format=["hif8"])
    page = path.read_text()
    answer = compare(good, bad, distances=False, by=["module", "layer_idx"])
    assert page.index("&lt;b&gt;bad&lt;/b&gt; against good") < page.index('id="findings"')
    assert f"{answer.title[:1].upper()}{answer.title[1:]}." in page
    assert next(iter(data_of(page)["urls"].items())) == ("good", good.reader.url)
    # In the order given, not that of the alphabet.
    assert [field["values"] for field in data_of(page)["fields"] if field["name"] == "source"] == [
        ["good", "<b>bad</b>"]
    ]
    (one,) = differences_of(unite({"good": good, "bad": bad}), engine=Engine())
    assert [row[0] for row in one.cells] == answer.column("module")[:MAX_MODULES]
    assert one.command == f"ranktape analyze compare {good.reader.url} {bad.reader.url} --allow-unmatched"


def test_two_captures_are_compared_over_their_quant_types(tmp_path: Path) -> None:
    def capture(quant_type: str) -> Records:
        tensors = [(array, replace(info, quant_type=quant_type)) for array, info in model_tensors()]
        return store(tmp_path / quant_type, tensors).select()

    (one,) = differences_of(unite({name: capture(name) for name in ("hifp8", "mxfp8")}), engine=Engine())
    assert one.explanation.startswith("No divergence")
    assert "--pair quant_type=hifp8:mxfp8" in one.command


def test_what_cannot_be_compared_is_said(parent: Path) -> None:
    records = open_run(parent / "bf16").select()
    parts = {"one": records.select(layer_idx=0), "two": records.select(layer_idx=1)}
    (one,) = differences_of(unite(parts), engine=Engine())
    assert one.explanation.startswith("They cannot be compared: ")
    assert (one.cells, one.command) == ((), "")
    assert list(differences_of(records, engine=Engine())) == []


def test_names_are_short_and_tell_places_apart() -> None:
    for paths, names in [
        (["runs/bf16"], ["bf16"]),
        (["runs/bf16", "runs/mxfp8"], ["bf16", "mxfp8"]),
        (["/a/run1/draw", "/a/run2/draw"], ["run1", "run2"]),
        (["a/x", "b/x/y"], ["a/x", "b/x/y"]),
        (["runs", "runs/bf16"], ["runs", "runs/bf16"]),
        (["s3://bucket/runs/a/", "s3://bucket/runs/b"], ["a", "b"]),
        (["s3://bucket/a", "local/a"], ["s3/bucket", "local"]),
        (["./a", "a"], ["./a", "a"]),
    ]:
        assert short_names(paths) == names
