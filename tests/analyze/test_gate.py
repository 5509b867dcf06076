"""A gate finds what was planted, passes what is whole, and refuses rules that say nothing or the wrong thing."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze import overflow, sweep
from ranktape.analyze.cli import cli
from ranktape.analyze.rules.gate import gate
from ranktape.analyze.rules.rule import (
    DEFAULT_RULES,
    GateRule,
    Missing,
    default_rules,
    parse_rule,
    parse_rules,
    read_rule_file,
)
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Records, Run, open_run
from tests.analyze.runs import Tensor, describe_tensor, model_tensors, store


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers, two ranks, one iteration: nothing is wrong."""
    return store(tmp_path_factory.mktemp("run"), model_tensors(num_ranks=2))


def checked(run: Run | Records, *rules: str | GateRule, **options: Any) -> list[tuple[Any, ...]]:
    """For each rule whether it holds, and how many were checked, failed and could not be told."""
    found = gate(run.select(), rule=rules, **options)
    return [(one.holds, one.num_checked, one.num_failed, one.num_missing) for one in found.outcomes]


def test_figures_are_those_of_the_tensors(run: Run) -> None:
    """Each limit lies between two values that numpy finds: one record more or less would be seen."""
    arrays = [record.read().astype(np.float64) for record in run.select()]
    for name, figure in (
        ("std", np.std),
        ("mean", np.mean),
        ("absmax", lambda array: np.abs(array).max()),
        ("p99", lambda array: np.quantile(array, 0.99, method="inverted_cdf")),
        ("overflow.zero.ratio", lambda array: (array == 0).mean()),
        ("overflow.maximum", np.max),
    ):
        values = sorted(float(figure(array)) for array in arrays)
        middle = len(values) // 2
        limit = (values[middle - 1] + values[middle]) / 2
        num_above = sum(value > limit for value in values)
        assert checked(run, f"{name} <= {limit!r}") == [(num_above == 0, 36, num_above, 0)]


def test_counts_against_a_format_are_those_of_overflow(run: Run) -> None:
    for scaling in ("none", "tensor"):
        table = overflow(run.select(), format="fp8_e4m3", scaling=scaling)
        for name in ("overflow.underflow.ratio", "overflow.flushed.count", "overflow.ratio"):
            values = table.column(name)
            limit = sorted(values)[len(values) // 2]
            num_above = sum(value > limit for value in values)
            rule = GateRule(name="a", check=f"{name} <= {limit!r}", format="fp8_e4m3", scaling=scaling)
            assert checked(run, rule)[0][2] == num_above
            assert checked(run, f"{name} <= {limit!r}", format="fp8_e4m3", scaling=scaling)[0][2] == num_above


def test_losses_are_those_of_a_sweep(run: Run) -> None:
    values = sweep(run.select(), format="mxfp4").column("sqnr")
    limit = sorted(values)[10]
    assert checked(run, f"sqnr.mxfp4 > {limit!r}") == [(False, 36, 11, 0)]
    (outcome,) = gate(run.select(), rule=["sqnr.mxfp4 > 100 and cosine.mxfp8 > 0.9"], by=["layer_type"]).outcomes
    assert [one.value for one in outcome.offenders] == sorted(
        min(value for value, record in zip(values, run.select(), strict=True) if record.layer_type == layer_type)
        for layer_type in ("attention", "linear")
    )


def test_groups_are_judged_as_one(run: Run) -> None:
    records = run.select()
    whole = {
        name: np.concatenate([one.read().astype(np.float64).ravel() for one in records if one.layer_type == name])
        for name in ("attention", "linear")
    }
    limit = float(whole["attention"].std() + whole["linear"].std()) / 2
    (outcome,) = gate(records, rule=[f"std < {limit!r}"], by=["layer_type"]).outcomes
    (offender,) = outcome.offenders
    worst = max(whole, key=lambda name: whole[name].std())
    assert (offender.identity, offender.records) == ({"layer_type": worst}, len(records.select(layer_type=worst)))
    assert offender.value == pytest.approx(whole[worst].std(), rel=1e-12)
    assert checked(run, "layer_idx == 1 and elements > 0", by=["layer_idx"]) == [(False, 2, 1, 0)]
    with pytest.raises(UsageError, match="phase may differ within the groups by layer_idx"):
        checked(run, "phase == 'pre'", by=["layer_idx"])


def planted(folder: Path) -> Run:
    """The run of `run`, and of rank 1, layer 1, one output with 12 infinities, and one gradient that underflows."""
    tensors = []
    for given, info in model_tensors(num_ranks=2):
        array = given.copy()
        place = (info.rank, info.layer_idx, info.layer_type, info.tensor_name)
        if place == (1, 1, "linear", "output"):
            array.reshape(-1)[:12] = np.inf
        if place == (1, 1, "attention", "grad_query"):
            array = (array.astype(np.float32) * np.float32(2.0**-108)).astype(ml_dtypes.bfloat16)
        fields = {name: getattr(info, name) for name in ("rank", "layer_idx", "layer_type", "operation", "phase")}
        tensors.append(describe_tensor(array, tensor_name=info.tensor_name, **fields))
    return store(folder, tensors)


def test_the_default_rules_find_what_was_planted(tmp_path: Path, run: Run) -> None:
    assert gate(run.select()).passed
    found = gate(planted(tmp_path).select())
    assert [outcome.rule.name for outcome in found.failed] == [
        "no overflow",
        "gradients are above the subnormal numbers",
    ]
    infinite, small = found.offenders.records()
    place = {"rank": 1, "layer_idx": 1, "module": "layers.1.linear", "tensor_name": "output"}
    assert {name: infinite[name] for name in place} == place
    assert (infinite["metric"], infinite["value"], infinite["limit"]) == ("overflow.total", 12, "== 0")
    assert (small["tensor_name"], small["severity"]) == ("grad_query", "medium")
    assert small["value"] > 0.5


def replicated(num_ranks: int, *, odd: Sequence[int] = ()) -> list[Tensor]:
    """Copies of a weight, of which odd ranks have one with another bit."""
    mesh = {"axes": ["dp"], "shape": [num_ranks], "ranks": list(range(num_ranks))}
    found = []
    for rank in range(num_ranks):
        array = np.ones((4, 4), dtype=np.float32)
        array.view(np.uint32)[2, 2] ^= rank in odd
        placement = {
            "mesh": mesh,
            "coordinates": [rank],
            "placements": ["replicate"],
            "global_shape": [4, 4],
            "offset": [0, 0],
            "partial": False,
        }
        found.append(describe_tensor(array, rank=rank, placement=placement, tensor_name="weight"))
    return found


@pytest.mark.parametrize(("num_ranks", "odd", "named"), [(4, [2], {2: 3}), (2, [1], {0: 1, 1: 1}), (3, [], {})])
def test_a_replica_that_differs_is_named(
    tmp_path: Path, num_ranks: int, odd: Sequence[int], named: dict[int, int]
) -> None:
    records = store(tmp_path, replicated(num_ranks, odd=odd)).select()
    found = gate(records)
    assert {row["rank"]: row["value"] for row in found.offenders.records()} == named
    assert {outcome.rule.name for outcome in found.failed} == ({"replicas are equal"} if named else set())


def test_copies_that_are_not_there_are_missing(tmp_path: Path) -> None:
    records = store(tmp_path, replicated(3)).select(rank=0)
    (outcome,) = gate(records, rule=["replicas.differing == 0"]).outcomes
    assert (outcome.holds, outcome.num_missing) == (False, 1)
    assert gate(records).passed
    assert gate(records).rules.column("missing") == [0, 0, 0, 1]


def test_what_the_catalogue_knows_is_not_read(tmp_path: Path) -> None:
    store(tmp_path / "run", model_tensors())
    for path in sorted((tmp_path / "run").rglob("c*")):
        if "iterations" not in path.parts and (path.name == "c" or path.name.startswith("c.")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    records = open_run(tmp_path / "run").select()
    rules = ["overflow.absmax < 100 and elements == 256 and overflow.zero.ratio < 1", "layer_idx in [0, 1]"]
    assert gate(records, rule=rules).passed
    assert gate(records, by=["layer_type"]).passed


def test_a_figure_that_does_not_exist_fails_unless_it_does_not_matter(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.full(8, np.nan, dtype=np.float32), layer_idx=0),
        describe_tensor(np.full(8, 2.0, dtype=np.float32), layer_idx=1),
        describe_tensor(np.zeros((0, 3), dtype=np.float32), layer_idx=2),
    ]
    run = store(tmp_path, tensors)
    for check, failed, missing in (
        ("mean < 10", 2, 2),
        ("mean > 10", 3, 2),
        ("not mean > 10", 2, 2),
        ("mean != 10", 2, 2),
        ("mean < 10 or elements < 9", 0, 0),
        ("mean < 10 and elements > 100", 3, 0),
        ("mean is None or mean < 10", 0, 0),
        ("mean is not None", 2, 0),
        ("batch_size == 4", 3, 3),
    ):
        assert checked(run, check) == [(failed == 0, 3, failed, missing)], check
    rule = GateRule(name="a", check="mean < 10", missing=Missing.PASS)
    assert checked(run, rule) == [(True, 3, 0, 2)]
    (outcome,) = gate(run.select(), rule=["mean < 1"]).outcomes
    assert [one.value for one in outcome.offenders] == [None, None, 2]


def test_every_comparison_to_blame_is_named_the_worst_first(run: Run) -> None:
    (outcome,) = gate(
        run.select(), rule=["std < 1 and not (absmax > 5 or like(tensor_name, 'q*')) where operation == 'forward'"]
    ).outcomes
    found = [(one.metric, one.limit) for one in outcome.offenders]
    assert set(found) == {("std", "< 1"), ("absmax", "<= 5"), ("tensor_name", "not like 'q*'")}
    deviations = [one.value for one in outcome.offenders if one.metric == "std"]
    assert deviations == sorted(deviations, reverse=True)
    assert min(deviations) >= 1


def test_a_rule_that_checks_nothing_is_an_error(run: Run) -> None:
    with pytest.raises(NoRecordsError, match=r"checks nothing: none of 36 records.*where layer_type == 'attn'"):
        gate(run.select(), rule=["std < 10", "std < 10 where layer_type == 'attn'"])
    rule = GateRule(name="a", check="std < 10", where="layer_type == 'attn'", allow_empty=True)
    assert checked(run, rule) == [(True, 0, 0, 0)]


def test_a_group_of_copies_of_which_some_are_not_there_is_missing(tmp_path: Path) -> None:
    records = store(tmp_path, replicated(3)).select()
    rule = GateRule(name="copies", check="replicas.differing == 0", by=("tensor_name",))
    assert checked(records, rule) == [(True, 1, 0, 0)]
    assert checked(records.select(rank=1), rule) == [(False, 1, 1, 1)]


def test_one_rule_may_be_given_alone(run: Run) -> None:
    for rule in ("std < 1e-9 WHERE rank == 0", GateRule(name="a", check="std < 1e-9", where="rank == 0")):
        (outcome,) = gate(run.select(), rule=rule).outcomes
        assert (outcome.num_records, outcome.holds) == (len(run.select(rank=0)), False)


def test_integers_are_left_out_where_formats_are_sought(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.arange(32), tensor_name="indices"),
        describe_tensor(np.linspace(-1, 1, 64, dtype=np.float32), tensor_name="weight"),
    ]
    run = store(tmp_path, tensors)
    (outcome,) = gate(run.select(), rule=["sqnr.mxfp8 > 10"]).outcomes
    assert (outcome.holds, outcome.num_checked) == (True, 1)
    assert outcome.notes == ("1 records of integers or bool left out: no format is for them",)
    assert checked(run, "elements > 0 and overflow.nan.count == 0") == [(True, 2, 0, 0)]
    in_blocks = GateRule(
        name="b", check="overflow.total == 0 and std < 1", by=("rank",), format="mxfp8", scaling="block"
    )
    assert checked(run, in_blocks) == [(True, 1, 0, 0)]


def test_of_zeros_nothing_is_lost(tmp_path: Path) -> None:
    """A tensor of zeros, as an expert without tokens has, is whole in any format; of NaN alone nothing is known."""
    rules = (
        "sqnr.mxfp8 > 20",
        "psnr.fp8_e4m3 > 20",
        "cosine.nvfp4 > 0.9",
        "mse.hif8 < 1e-9",
        "flushed_ratio.mxfp4 == 0",
    )
    zeros = np.zeros((4, 32), dtype=np.float32)
    run = store(tmp_path / "zeros", [describe_tensor(zeros), describe_tensor(-zeros, layer_idx=1)])
    assert checked(run, *rules) == [(True, 2, 0, 0)] * len(rules)
    table = sweep(run.select(), format="mxfp4,mxfp8", target_sqnr=20)
    assert {(row["best_format"], row["meets_target"], row["sqnr"]) for row in table.records()} == {
        ("mxfp4_e2m1", "yes", np.inf)
    }
    grouped = sweep(run.select(), format="mxfp4,mxfp8", target_sqnr=20, by=["rank"])
    assert set(grouped.column("meets_target")) == {"yes"}
    unknown = store(tmp_path / "nan", [describe_tensor(np.full((4, 32), np.nan, dtype=np.float32))])
    assert checked(unknown, *rules[:1]) == [(False, 1, 1, 1)]
    zeros[0] = np.nan
    mixed = store(tmp_path / "mixed", [describe_tensor(zeros)])
    assert checked(mixed, *rules[:1]) == [(False, 1, 1, 1)]


def test_samples_are_checked(tmp_path: Path) -> None:
    values = np.ones((3, 40), dtype=np.float32)
    values[1, :4] = 1000.0
    run = store(tmp_path, [describe_tensor(values, sample_dim=0, sample_ids=["x", "y", "z"])])
    (outcome,) = gate(
        run.select(), rule=["overflow.ratio == 0"], by=["sample"], format="fp8_e4m3", scaling="none"
    ).outcomes
    assert [(one.identity, one.value) for one in outcome.offenders] == [({"sample": "y"}, 0.1)]
    without_ids = store(tmp_path / "plain", [describe_tensor(values, sample_dim=0)])
    (outcome,) = gate(without_ids.select(), rule=["sample in ['0', '2']"], by=["sample"]).outcomes
    assert [one.value for one in outcome.offenders] == ["1"]
    with pytest.raises(UsageError, match="std is known of whole records, not of samples"):
        gate(run.select(), rule=["std < 1"], by=["sample"])


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (
            "overflw.ratio < 1",
            {},
            r"rule 'overflw.ratio < 1': no metric or field 'overflw.ratio': did you mean overflow",
        ),
        ("std <", {}, "invalid syntax at character 6, found the end"),
        ("std < 1 where", {}, "where: invalid syntax"),
        ("std < 1 where layr == 1", {}, "did you mean"),
        ("std < 1 where rank == 0 where rank == 1", {}, "'where' 2 times"),
        ("std < 'a'", {}, "std holds numbers and 'a' is text"),
        ("module < 3", {}, "module holds text and 3 is a number"),
        ("zero.ratio < 0.5", {}, r"did you mean overflow\.zero\.ratio"),
        ("sqnr.mxfp9 > 1", {}, "format 'mxfp9' is not known: did you mean mxfp8"),
        ("sqnt.mxfp8 > 1", {}, "did you mean sqnr.mxfp8"),
        ("overflow.flushed.ratio < 1", {}, "counted against a format: say which"),
        ("std < 1", {"format": "fp8_e4m3"}, "--format fp8_e4m3 has no effect"),
        ("overflow.ratio < 1", {"scaling": "tensor"}, "--scaling tensor has no effect"),
        ("overflow.ratio < 1", {"format": "fp9"}, "format 'fp9' is not known"),
        ("overflow.ratio < 1", {"format": "fp8_e4m3,fp8_e5m2"}, "are more than one"),
        ("overflow.ratio < 1", {"by": ["layr"]}, "did you mean layer_idx|did you mean layer_type"),
        ("", {}, "invalid syntax"),
    ],
)
def test_mistakes_in_rules(run: Run, rule: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gate(run.select(), rule=[rule], **options)


def test_words_in_quotes_are_no_keywords() -> None:
    rule = parse_rule("module != 'no where' and tensor_name == \"where\" where phase == 'pre'")
    assert (rule.check, rule.where) == ("module != 'no where' and tensor_name == \"where\"", "phase == 'pre'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rules.yaml holds nothing, not a list"),
        ("[]", "lists no rule"),
        ("check: a", "holds a mapping, not a list"),
        ("- 3", "rules.yaml, entry 1 is a number, not a rule"),
        ("- name: x", r"entry 1 \('x'\): there is no check"),
        ("- check: std < 1\n  chek: 2", "unknown key 'chek': did you mean check"),
        ("- check: std < 1\n- check: 3", "entry 2: check is to be text, and is 3"),
        ("- check: std <", "entry 1: rule 'std <': invalid syntax"),
        ("- check: std < 1\n  where: layer ==", "entry 1: .*where: invalid syntax"),
        ("- check: std < 1\n  severity: dire", "severity is to be one of high, medium, low, and is 'dire'"),
        ("- check: std < 1\n  severity: [high]", r"severity is to be one of .*, and is \['high'\]"),
        ("- check: std < 1\n  allow_empty: 1", "allow_empty is to be true or false, and is 1"),
        ("- check: std < 1\n  missing: maybe", "missing is to be one of fail, pass"),
        ("- check: std < 1\n  by: 3", "by is to be a field, or a list of fields"),
        ("- check: std < 1\n  check: std < 2", "is not YAML that is read here: line 2: 'check' is given twice"),
        ("- &a {check: std < 1}\n- *a", "aliases"),
        ("- {check: std < 1, name: a}\n- {check: std < 2, name: a}", "entry 2: the name 'a' is that of entry 1"),
        ("- check: !!python/object:os.system x", "the tag .*os.system' is not allowed"),
        ("- check: !!bool x", "the tag .*bool' is not allowed"),
        ("- [", "line 1|line 2"),
        ("- check: " + "[" * 50, "line 1: it is nested too deep"),
        ("- check: \x07", "cannot be read as YAML: unacceptable character"),
    ],
)
def test_mistakes_in_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        parse_rules(text, place="rules.yaml")
    with pytest.raises(UsageError, match=r"rules\.yaml"):
        read_rule_file(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--rule-file .* cannot be read \(No such file.*: give a .yaml file"):
        read_rule_file(tmp_path / "none.yaml")


def invoke(*words: str) -> Any:
    """The command; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, ["gate", *words], catch_exceptions=False)


def test_the_command_passes(run: Run) -> None:
    result = invoke(run.url)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "4 rules passed"
    assert [line.split()[0] for line in lines[2:]] == ["passed"] * 4


def test_the_command_fails_with_3_and_names_the_offenders(run: Run, tmp_path: Path) -> None:
    words = [run.url, "--rule", "std < 1e-3 where operation == 'backward'", "--rule", "elements == 256"]
    result = invoke(*words)
    assert result.exit_code == 3
    assert result.stderr == "Error: 1 of 2 rules failed: std < 1e-3 where operation == 'backward'\n"
    assert result.stdout.startswith("offenders, of each rule the worst first\n")
    document = json.loads(invoke(*words, "--json").stdout)
    assert (document["passed"], set(document)) == (False, {"passed", "rules", "offenders"})
    assert [row["outcome"] for row in document["rules"]["rows"]] == ["failed", "passed"]
    assert {row["tensor_name"] for row in document["offenders"]["rows"]} == {"grad_weight"}
    lines = list(csv.DictReader(io.StringIO(invoke(*words, "--csv", "--limit", "1").stdout)))
    assert [(line["metric"], line["limit"], line["severity"]) for line in lines] == [("std", "< 0.001", "high")]
    for name in ("a.json", "a.csv", "a.txt"):
        assert invoke(*words, "--output", str(tmp_path / name)).stdout == ""
    assert json.loads((tmp_path / "a.json").read_text()) == document
    assert (tmp_path / "a.csv").read_text().startswith("rule,severity,metric,value,limit,")
    assert "passed   elements == 256" in (tmp_path / "a.txt").read_text()


def test_the_default_rules_can_be_edited_and_fed_back(run: Run, tmp_path: Path) -> None:
    shown = invoke("--show-defaults")
    assert (shown.exit_code, shown.stdout) == (0, DEFAULT_RULES)
    path = tmp_path / "rules.yaml"
    path.write_text(shown.stdout + "\n- {name: mine, check: std < 5, by: [rank, layer-type], severity: low}\n")
    assert read_rule_file(path)[:-1] == default_rules()
    result = invoke(run.url, "--rule-file", str(path), "--json")
    rows = json.loads(result.stdout)["rules"]["rows"]
    assert [(row["rule"], row["checked"]) for row in rows[-1:]] == [("mine", 4)]
    assert rows[-1]["by"] == ["rank", "layer_type"]


def test_mistakes_are_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("- chek: std < 1")
    for words, code, message in (
        (["--rule", "stdd < 1"], 2, "did you mean std"),
        (["--rule-file", str(tmp_path / "bad.yaml")], 2, "bad.yaml, entry 1: unknown key 'chek': did you mean check?"),
        (["--rule", "std < 1 where rank == 9"], 1, "checks nothing"),
        (["--rule-file", ""], 2, "an empty path is not allowed"),
        (["--rule", "std < 10", "--sort", "bogus"], 2, "the table has no column 'bogus'"),
    ):
        result = invoke(run.url, *words)
        assert (result.exit_code, result.stdout) == (code, "")
        assert message in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr
