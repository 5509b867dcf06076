"""Does `compare` match the right tensors, and say of them what numpy says of the raw values?"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from ranktape.analyze import View
from ranktape.analyze.cli import cli
from ranktape.analyze.comparison import tensors
from ranktape.analyze.comparison.pair_metrics import PAIR_METRICS
from ranktape.analyze.comparison.tensors import ComparedTensor as Side
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.questions.compare import compare
from ranktape.analyze.table import Table
from ranktape.capture import Capture
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import IncompleteTensorError, NoRecordsError, UnknownFieldError, UsageError
from ranktape.storage import Records, Run, open_run
from ranktape.storage.format.record_info import RecordInfo
from tests.analyze.compared import Array, changed, normal, relative, rows
from tests.analyze.pt_files import legacy_file
from tests.analyze.runs import Tensor, describe_tensor, model_tensors, store
from tests.capture.parallel_models import OPTIONS, Recipe, train
from tests.capture.test_parallel import torchrun
from tests.exhaustive import exhaustive


def info_with(info: RecordInfo, **fields: Any) -> RecordInfo:
    return dataclasses.replace(info, **fields)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return store(tmp_path_factory.mktemp("run"), model_tensors(num_layers=3, num_ranks=2, iterations=(4, 7)))


@pytest.fixture(scope="module")
def records(run: Run) -> Records:
    return run.select()


def test_a_run_against_itself_is_exactly_zero(records: Records) -> None:
    table = compare(records, records)
    assert table.title == f"no divergence: {len(records)} pairs compared, 0 differ"
    assert len(table.rows) == len(records) == 108
    distances = [name for name, one in PAIR_METRICS.items() if one.is_distance]
    for row in table.records():
        zeros = ("relative_norm", "max_abs", "mean_abs", "max_rel", "mean_rel", "ulp_max", "differing.count")
        assert {row[name] for name in (*zeros, *distances)} == {0}
        assert (row["sqnr"], row["cosine"], row["correlation"], row["diverges"]) == (np.inf, 1.0, 1.0, "no")
    groups = compare(records, records, by=["layer_type", "iteration"]).records()
    assert {(row["layer_type"], row["iteration"]): row["pairs"] for row in groups} == {
        ("linear", 4): 30,
        ("linear", 7): 30,
        ("attention", 4): 24,
        ("attention", 7): 24,
    }
    assert {row["relative_norm.worst"] for row in groups} == {0}


def test_the_first_divergence_names_the_layer_and_the_quant_type_where_there_are_several(tmp_path: Path) -> None:
    plain = [(array, info_with(info, module="")) for array, info in model_tensors(num_layers=2)]
    mixed = [*plain, *((array, info_with(info, quant_type="mxfp8")) for array, info in plain)]
    for number, (before, pattern) in enumerate(((plain, r"\w+ \w+ \w+,"), (mixed, r"\w+ \w+ (bf16|mxfp8) \w+,"))):
        after = [(array + array.dtype.type(1), info) for array, info in before]
        a, b = (store(tmp_path / f"{number}{side}", of).select() for side, of in (("a", before), ("b", after)))
        assert re.search(f": (attention|linear) layer [01] {pattern}", compare(a, b).title)


def test_the_first_divergence_comes_first_in_the_order_of_execution(tmp_path: Path) -> None:
    before = [
        (array, info_with(info, counter=place)) for place, (array, info) in enumerate(model_tensors(num_layers=2))
    ]
    after = list(before)
    for changed_place, factor in ((5, 1.01), (11, 2.0)):
        array, info = after[changed_place]
        after[changed_place] = ((array.astype(np.float32) * factor).astype(array.dtype), info)
    a, b = store(tmp_path / "a", before).select(), store(tmp_path / "b", after).select()
    table = compare(a, b)
    place = "iteration 0 microbatch 0 rank 0: layers.0.attention forward pre query, relative_norm"
    assert table.title.startswith(f"first divergence: {place}")
    assert table.title.endswith("(18 pairs compared, 2 differ, 2 diverge)")
    assert rows(table, "order", "diverges")[:3] == [(12, "yes"), (6, "yes"), (1, "no")]
    assert table.column("relative_norm")[0] == relative(*(side[11][0] for side in (before, after)))
    assert compare(a, b, in_order=True).column("order") == list(range(1, 19))
    tolerant = compare(a, b, tolerance=0.5)
    assert "layers.1.linear forward post output" in tolerant.title
    assert compare(a, b, tolerance=2.0).title == (
        "no divergence: 18 pairs compared, 2 differ, none beyond the tolerance"
    )


def test_noise_of_an_equal_run_is_the_floor(tmp_path: Path) -> None:
    clean = [(array.astype(np.float32), info_with(info, dtype="float32")) for array, info in model_tensors()]
    clean = [(array, info_with(info, nbytes=array.nbytes)) for array, info in clean]
    other = changed(clean, seed=2, by=1e-4)
    other[7] = changed(clean[7:8], seed=3, by=1e-2)[0]
    a, twin, b = (
        store(tmp_path / name, side).select()
        for name, side in (("a", clean), ("twin", changed(clean, seed=1, by=1e-4)), ("b", other))
    )
    table = compare(a, b, noise=twin)
    assert table.column("diverges").count("yes") == 1
    worst = table.records()[0]
    assert worst["diverges"] == "yes"
    assert worst["noise.ratio"] == worst["relative_norm"] / worst["noise.floor"] == pytest.approx(100, rel=0.3)
    assert max(ratio for ratio in table.column("noise.ratio")[1:]) < 2
    assert compare(a, b, noise=twin, margin=1000).title.startswith("no divergence")
    assert compare(a, b, noise=a).column("noise.ratio")[0] == np.inf
    few = twin.select(layer_type="linear")
    notes = compare(a, b, noise=few).notes
    assert notes == ("whether 8 pairs diverge is unknown: they have no noise floor, or no relative_norm",)
    with pytest.raises(NoRecordsError, match="no tensor of the first side is in the run that --noise names"):
        compare(a, b, noise=store(tmp_path / "x", model_tensors(iterations=[9])).select())


def test_two_quant_types_of_one_run(tmp_path: Path) -> None:
    x = normal(4, 32, seed=1)
    mine, theirs = (x.astype(dtype).astype(np.float32) for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
    stored = [
        describe_tensor(mine, quant_type="hifp8", tensor_name="input"),
        describe_tensor(theirs, quant_type="mxfp8", tensor_name="input"),
        describe_tensor(mine, quant_type="hifp8", tensor_name="weight"),
    ]
    records = store(tmp_path, stored).select()
    with pytest.raises(UsageError, match=r"1 of 2 records of the first side have no counterpart: .* weight \(1\)"):
        compare(records, pair=["quant_type=hifp8:mxfp8"])
    table = compare(records, pair=["quant_type=hifp8:mxfp8"], allow_unmatched=True)
    (row,) = table.records()
    assert row["relative_norm"] == relative(mine, theirs)
    assert (row["against"], row["quant_type"], row["b.quant_type"]) == ("quant_type=mxfp8", "hifp8", "mxfp8")
    assert table.notes[0].startswith("1 of 2 records of the first side have no counterpart")
    assert table.title.startswith("first divergence: ")


def matched(table: Table) -> set[tuple[str, ...]]:
    return set(rows(table, "module", "phase", "tensor_name", "b.module", "b.phase", "b.tensor_name"))


def test_forward_against_backward(records: Records) -> None:
    one = records.select(layer_idx=0, rank=0, iteration=4)
    linear, attention = "layers.0.linear", "layers.0.attention"
    table = compare(one, pair=["operation=forward:backward"], allow_unmatched=True)
    assert matched(table) == {
        (linear, "pre", "weight", linear, "post", "grad_weight"),
        (linear, "post", "output", linear, "pre", "grad_output"),
        (attention, "pre", "query", attention, "post", "grad_query"),
        (attention, "post", "output", attention, "pre", "grad_output"),
    }
    assert set(table.column("diverges")) == {None}
    assert table.title == "4 pairs compared, 4 differ"


def test_pre_against_post(records: Records) -> None:
    one = records.select(layer_idx=0, rank=0, iteration=4)
    linear, attention = "layers.0.linear", "layers.0.attention"
    assert matched(compare(one, pair=["phase=pre:post"], allow_unmatched=True)) == {
        (linear, "pre", "input", linear, "post", "output"),
        (attention, "pre", "query", attention, "post", "output"),
        (attention, "pre", "grad_output", attention, "post", "grad_query"),
    }
    with pytest.raises(NoRecordsError, match="all are weights or their gradients"):
        compare(one.select(tensor_name=["weight", "grad_weight"]), pair=["phase=pre:post"])


def test_each_layer_against_the_next(records: Records) -> None:
    table = compare(records.select(rank=0, iteration=4), neighbours=True)
    assert len(table.rows) == 18
    assert {(row["layer_idx"], row["b.layer_idx"]) for row in table.records()} == {(0, 1), (1, 2)}
    assert all(row["b.module"] == row["module"].replace(str(row["layer_idx"]), str(row["b.layer_idx"]))
               for row in table.records())  # fmt: skip
    assert table.notes == ()


def test_what_is_paired(records: Records) -> None:
    cases: list[tuple[str, int | None]] = [
        ("rank=0:1", 54),
        ("rank=0:*", 54),
        ("iteration=4:7", 54),
        ("layer_idx=0:2", 36),
        ("layer_idx=0:1-2", 72),
        ("module=layers.0.linear:layers.1.linear", 20),
        ("module=*.linear:*.attention", 36),
        ("component=linear:linear", None),
        ("layer_type=linear:attention", 36),
        ("tensor_name=input:weight", 12),
    ]
    for pair, num_pairs in cases:
        if num_pairs is None:
            with pytest.raises((UsageError, NoRecordsError), match="first side"):
                compare(records, pair=[pair], distances=False)
            return
        assert len(compare(records, pair=[pair], allow_unmatched=True, distances=False).rows) == num_pairs


def test_a_mistake_is_told(records: Records) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "it is not specified what to compare"),
        ({"pair": ["quant_type"]}, "give FIELD=LEFT:RIGHT"),
        ({"pair": ["quanttype=a:b"]}, "use quant_type"),
        ({"pair": ["iteration=1:2:3"]}, "two colons"),
        ({"pair": ["rank=0:1", "rank=1:0"]}, "paired twice"),
        ({"pair": ["rank=0:1"], "neighbours": True}, "layers of one run"),
        ({"pair": ["rank=0:1"], "metric": "maxabs"}, "use max_abs"),
        ({"pair": ["rank=0:1"], "tolerance": float("nan")}, "tolerance nan is not allowed"),
        ({"pair": ["rank=0:1"], "margin": -1.0}, "margin -1.0 is not allowed"),
        ({"pair": ["iteration=*:*"]}, "they differ in iteration"),
        ({"pair": ["tensor_name=input:output"]}, "give --pair phase=pre:post"),
        ({"pair": ["quant_type=hifp8:bf16"]}, "no records match quant_type hifp8: quant_type is bf16"),
    ]
    for options, message in cases:
        with pytest.raises((UsageError, NoRecordsError), match=message):
            compare(records, **options)


def test_what_is_nearest_is_named(records: Records, tmp_path: Path) -> None:
    renamed = [
        (array, info_with(info, module=info.module.replace("layers", "blocks"))) for array, info in model_tensors()
    ]
    tagged = [(array, info_with(info, quant_type="mxfp8")) for array, info in model_tensors(iterations=[4])]
    with pytest.raises(NoRecordsError, match="give --pair quant_type=bf16:mxfp8"):
        compare(records, store(tmp_path / "tagged", tagged).select())
    with pytest.raises(NoRecordsError, match=r"the nearest to 'layers.0.attention .*' is 'blocks.0.attention"):
        compare(records, store(tmp_path / "renamed", renamed).select())
    with pytest.raises(UnknownFieldError, match="no field 'nonsense'"):
        compare(records, records, by=["nonsense"])
    with pytest.raises(NoRecordsError, match="no record to compare"):
        compare(records, records[:0])


@pytest.mark.parametrize("keep", ["histogram", "statistics"])
def test_what_was_kept_is_compared_by_distribution(tmp_path: Path, keep: str) -> None:
    tensors_of = [describe_tensor(normal(64, 64, seed=seed, dtype=ml_dtypes.bfloat16)) for seed in (1, 2)]
    reduced = reduce_to(keep, tensors_of[1][0], info=tensors_of[1][1])
    assert reduced is not None
    a, b = store(tmp_path / "a", tensors_of[:1]).select(), store(tmp_path / "b", [reduced]).select()
    table = compare(a, b)
    (row,) = table.records()
    assert row["relative_norm"] is None
    assert row["diverges"] == ("yes" if keep == "histogram" else None)
    assert "1 pairs are compared only by their distributions" in table.notes[0]
    whole = store(tmp_path / "c", tensors_of[1:]).select()
    (full,) = compare(a, whole).records()
    expected = full["kolmogorov_smirnov"] if keep == "histogram" else None
    assert row["kolmogorov_smirnov"] == expected


def test_shapes_that_differ_leave_the_distributions(tmp_path: Path) -> None:
    x = normal(4, 6)
    a, b = (store(tmp_path / name, [describe_tensor(array)]).select() for name, array in (("a", x), ("b", x.T)))
    (row,) = compare(a, b).records()
    assert (row["max_abs"], row["total_variation"], row["against"]) == (None, 0, "shape=[6,4]")
    (row,) = compare(a, b, distances=False).records()
    assert row["diverges"] is None


def test_bad_values_diverge_whatever_is_tolerated(tmp_path: Path) -> None:
    x = normal(4, 6)
    spoiled = x.copy()
    spoiled[2, 3] = np.nan
    rest = [
        describe_tensor(np.zeros((0, 3), dtype=np.float32), tensor_name="weight"),
        describe_tensor(np.full((2, 2), np.nan, dtype=np.float32), tensor_name="output"),
    ]
    a, b = (
        store(tmp_path / name, [describe_tensor(array, tensor_name="input"), *rest]).select()
        for name, array in (("a", x), ("b", spoiled))
    )
    table = compare(a, b, tolerance=1e9)
    assert rows(table, "tensor_name", "nan.one", "nan.both", "diverges") == [
        ("input", 1, 0, "yes"),
        ("output", 0, 4, "no"),
        ("weight", 0, 0, "no"),
    ]
    assert "NaN or Inf on one side in 1 elements" in table.title


def test_views_dtypes_and_other_words(tmp_path: Path) -> None:
    x = normal(32, 32)
    y = x.astype(ml_dtypes.bfloat16)
    a = store(tmp_path / "a", [describe_tensor(x, compute_dtype="bfloat16")]).select()
    b = store(tmp_path / "b", [describe_tensor(y)]).select()
    (seen,) = compare(a, b).records()
    assert (seen["dtype"], seen["b.dtype"], seen["ulp_max"]) == ("float32", "bfloat16", None)
    assert seen["relative_norm"] == relative(x, y)
    (computed,) = compare(a, b, view=View.COMPUTE).records()
    assert (computed["relative_norm"], computed["ulp_max"], computed["jensen_shannon"]) == (0, 0, 0)


def test_workers_and_samples_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = []
    for name, seed in (("a", 1), ("b", 2)):
        tensors_of = [
            describe_tensor(normal(*shape, seed=seed), sample_dim=shape.index(3), layer_idx=layer)
            for layer, shape in enumerate([(3, 200, 500), (200, 3, 500), (200, 500, 3), (3, 5, 4)])
        ]
        sides.append(store(tmp_path / name, tensors_of).select())
    plain = compare(*sides, engine=Engine(use_cache=False))
    assert compare(*sides, engine=Engine(workers=2, use_cache=False)) == plain
    read_samples: list[int] = []
    read_sample = Side.read_sample

    def counted(side: Side, sample: int, *, view: View) -> Array:
        read_samples.append(sample)
        return read_sample(side, sample, view=view)

    monkeypatch.setattr(tensors, "WHOLE_NBYTES", 0)
    monkeypatch.setattr(Side, "read_sample", counted)
    assert compare(*sides, engine=Engine(use_cache=False)) == plain
    # Each sample of each of two large tensors.
    assert len(read_samples) == 2 * 3 * 3


def ask(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def test_on_the_command_line(run: Run, tmp_path: Path) -> None:
    url = run.url
    text = ask(url, url, "--limit", "1")
    assert (text.exit_code, text.stderr) == (0, "")
    assert text.stdout.endswith("\nno divergence: 108 pairs compared, 0 differ\n")
    document = json.loads(ask(url, "--pair", "rank=0:1", "--by", "tensor_name", "--json").stdout)
    assert {row["pairs"] for row in document["rows"]} == {6, 12}
    for arguments, code, message in (
        ((url,), 2, "it is not specified what to compare"),
        ((url, tmp_path / "missing"), 1, "there is nothing|no run"),
        ((url, url, "--noise", tmp_path / "missing"), 1, "no run"),
    ):
        failed = ask(*arguments)
        assert (failed.exit_code, failed.stdout) == (code, "")
        assert re.search(message, failed.stderr)


def test_a_folder_of_files(tmp_path: Path) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for quant_type, tensor in (("mxfp8", x), ("hifp8", x.bfloat16().float())):
        for counter in (1, 2):
            legacy_file(tmp_path, tensor * counter, quant_type=quant_type, counter=counter)
    answer = ask(tmp_path, "--pair", "quant_type=mxfp8:hifp8", "--json")
    assert answer.exit_code == 0, answer.stderr
    found = json.loads(answer.stdout)["rows"]
    assert [row["call"] for row in found] == [0, 1]
    assert [row["relative_norm"] for row in found] == [relative(x.numpy(), x.bfloat16().float().numpy())] * 2


def of_kinds(names: Mapping[str, tuple[str, ...]], *, layers: Mapping[str, int], calls: int = 1) -> list[Tensor]:
    """Tensors of attention and of linear layers without modules, as the legacy tools named them."""
    tensors: list[Tensor] = []
    for component, found in names.items():
        for call in range(calls if component == "linear" else 1):
            for name in found:
                tags = {"component": component, "layer_idx": layers[component], "call": call, "module": ""}
                tags["layer_type"] = "attention" if component == "FA" else "linear"
                tags |= {"phase": "post" if name == "output" else "pre", "tensor_name": name}
                tensors.append(describe_tensor(normal(4, 8, seed=len(tensors)), **tags))
    return tensors


FORWARD = {"FA": ("query", "key", "value", "output"), "linear": ("input", "weight", "output")}


@pytest.mark.parametrize(("layers", "calls"), [((0, 1), 1), ((2, 2), 1), ((2, 2), 4)])
def test_attention_is_compared_with_linear_layers(tmp_path: Path, layers: tuple[int, int], calls: int) -> None:
    tensors = of_kinds(FORWARD, layers=dict(zip(FORWARD, layers, strict=True)), calls=calls)
    records = store(tmp_path / "run", tensors).select()
    table = compare(records, pair=["component=FA:linear"])
    found = Counter((row["tensor_name"], row["b.tensor_name"]) for row in table.records())
    assert found == {(name, "output" if name == "output" else "input"): calls for name in FORWARD["FA"]}
    backwards = compare(records, pair=["layer_type=linear:attention"])
    assert Counter((row["b.tensor_name"], row["tensor_name"]) for row in backwards.records()) == found


def test_what_one_kind_of_layers_has_alone_is_counted(tmp_path: Path) -> None:
    tensors = of_kinds(FORWARD, layers={"FA": 0, "linear": 0})
    head = describe_tensor(normal(4, 8), layer_idx=-1, module="head", component="linear", tensor_name="input")
    table = compare(store(tmp_path / "run", [*tensors, head]).select(), pair=["component=FA:linear"])
    assert len(table.rows) == 4
    assert "1 of 3 records of the second side have no counterpart: head" in table.notes[-1]


def test_kinds_with_the_same_tensors_are_matched_by_name(tmp_path: Path) -> None:
    both = {"FA": ("query", "weight"), "linear": ("query", "weight")}
    records = store(tmp_path / "run", of_kinds(both, layers={"FA": 0, "linear": 0})).select()
    table = compare(records, pair=["component=FA:linear"])
    assert {(row["tensor_name"], row["b.tensor_name"]) for row in table.records()} == {
        ("query", "query"),
        ("weight", "weight"),
    }


def part(array: Array, rank: int, word: str, *, whole: Sequence[int], offset: Sequence[int], **fields: Any) -> Tensor:
    """What one of two tensor-parallel ranks holds of a tensor."""
    placement = {
        "mesh": {"axes": ["tp"], "shape": [2], "ranks": [0, 1]},
        "coordinates": [rank],
        "placements": [word],
        "global_shape": list(whole),
        "offset": list(offset),
        "partial": word.startswith("partial"),
    }
    return describe_tensor(array, rank=rank, placement=placement, **fields)


def test_tensor_parallel_shards_are_assembled(tmp_path: Path) -> None:
    weight, hidden, bias = normal(6, 8), normal(3, 4, 6, seed=1), normal(6, seed=2)
    alone = [
        describe_tensor(weight, tensor_name="weight"),
        describe_tensor(hidden, tensor_name="output", sample_dim=0),
        describe_tensor(bias, tensor_name="bias"),
    ]
    noisy = changed(alone, seed=5, by=1e-6)
    shards: list[Tensor] = []
    for rank in (0, 1):
        rows_of, columns_of = slice(3 * rank, 3 * rank + 3), slice(3 * rank, 3 * rank + 3)
        shards += [
            part(noisy[0][0][rows_of], rank, "shard(0)", whole=(6, 8), offset=(3 * rank, 0), tensor_name="weight"),
            part(noisy[1][0][..., columns_of], rank, "shard(2)", whole=(3, 4, 6), offset=(0, 0, 3 * rank),
                 tensor_name="output", sample_dim=0),
            part(noisy[2][0], rank, "replicate", whole=(6,), offset=(0,), tensor_name="bias"),
        ]  # fmt: skip
    one, two = store(tmp_path / "tp1", alone).select(), store(tmp_path / "tp2", shards).select()
    twin = store(tmp_path / "twin", changed(alone, seed=6, by=1e-6)).select()
    table = compare(one, two, noise=twin)
    found = {row["tensor_name"]: row for row in table.records()}
    for (array, _), (other, _), name in zip(alone, noisy, ("weight", "output", "bias"), strict=True):
        assert found[name]["relative_norm"] == relative(array, other)
        assert (found[name]["shape"], found[name]["b.shape"]) == (list(array.shape), list(array.shape))
        assert found[name]["b.ranks"] == [0, 1]
        # Of wide types eight bits are counted.
        assert found[name]["relative_wasserstein"] < 2**-8
    assert table.title.startswith("no divergence: 3 pairs compared, 3 differ")
    # The other way round, and against itself shard by shard: copies that are equal are compared once.
    assert compare(two, one).column("relative_norm") == pytest.approx(table.column("relative_norm"), rel=1e-4)
    own = compare(two, two)
    assert sorted(rows(own, "tensor_name", "rank", "copies")) == [
        ("bias", 0, 2), ("output", 0, 1), ("output", 1, 1), ("weight", 0, 1), ("weight", 1, 1),
    ]  # fmt: skip
    # Parts of one tensor are no copies of each other.
    assert not any("other bits" in note for note in own.notes)
    with pytest.raises(IncompleteTensorError, match="missing"):
        compare(one, two.select(rank=1))


def test_copies_that_differ_are_each_compared_and_told(tmp_path: Path) -> None:
    x = normal(5, 5)
    other = x.copy()
    other[1, 1] = np.nextafter(other[1, 1], np.float32(9))

    def replicas(*copies: Array) -> list[Tensor]:
        return [part(copy, rank, "replicate", whole=(5, 5), offset=(0, 0)) for rank, copy in enumerate(copies)]

    a, b = store(tmp_path / "a", replicas(x, x)), store(tmp_path / "b", replicas(x, other))
    table = compare(a.select(), b.select())
    assert sorted(rows(table, "rank", "differing.count", "ulp_max")) == [(0, 0, 0), (1, 1, 1)]
    assert "in 2 pairs, ranks that should have equal copies recorded different bits" in table.notes[0]
    # Two ranks without a word about placement against one: equal ones stand for each other, others do not.
    plain = [describe_tensor(x, rank=rank) for rank in (0, 1)]
    one = store(tmp_path / "one", plain[:1]).select()
    (row,) = compare(store(tmp_path / "two", plain).select(), one).records()
    assert (row["relative_norm"], row["copies"]) == (0, 1)
    differing = store(tmp_path / "c", [plain[0], describe_tensor(other, rank=1)]).select()
    with pytest.raises(NoRecordsError, match="no record of the first side"):
        compare(differing, one)


@exhaustive("shards that are put together are compared above, those of real ranks in test_parallel.py")
@pytest.mark.distributed
def test_a_tensor_parallel_training_against_one_of_one_process(tmp_path: Path) -> None:
    torchrun(tmp_path / "tp", ("tp",), num_ranks=2)
    train(Recipe(), capture=Capture(tmp_path / "alone", min_iterations=1, **OPTIONS))
    alone = open_run(tmp_path / "alone").select(iteration=0)
    split = open_run(tmp_path / "tp" / "tp.run").select(iteration=0)
    # Masters and reduced gradients are recorded of what is spread over ranks alone.
    table = compare(alone, split, allow_unmatched=True, tolerance=1e-5)
    assert len(table.rows) == len(alone)
    assert table.title.startswith("no divergence: ")
    assert table.notes[0].startswith("80 of 314 records of the second side")
    assert max(table.column("relative_norm")) > 0
    assert min(table.column("cosine")) > 1 - 1e-10
    # The others have no placement, and both ranks recorded the same bits.
    assert sum(ranks == [0, 1] for ranks in table.column("b.ranks")) == 100
