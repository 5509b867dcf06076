"""Does a capture choose the tensors that the same words choose when a run is read, and when they are due?"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.capture import Capture
from ranktape.capture.passes.tracker import Call
from ranktape.capture.settings.cadence import Cadence
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.settings.rules import CaptureRule
from ranktape.capture.settings.selecting import Selecting
from ranktape.capture.sites import ids_at, keep_samples
from ranktape.capture.source import Source, TensorRole
from ranktape.capture.tensors.parts import PlainPart
from ranktape.storage import Record, Run, open_run
from ranktape.storage.format.catalogue import Catalogue, CatalogueEntry, encode_catalogue
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.record_info import Mode, Operation, RecordInfo
from ranktape.storage.query.filters import parse_filter
from ranktape.storage.records.records import Records
from tests.capture.models import BATCH, WIDTH, Net, Training, train
from tests.runs import describe
from tests.strategies import AWKWARD_TERMS

MODULES = ("layers.0.attn.query", "layers.1.mlp.up", "layers.10.mlp.up", "head", "", *AWKWARD_TERMS[:9])
TENSORS = ("input", "weight", "output", "grad_output", "grad_weight")


@st.composite
def infos(draw: st.DrawFn) -> RecordInfo:
    """Tensors of a small vocabulary, so that filters often fit."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple))
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    return dataclasses.replace(
        describe(np.zeros(1, dtype=np.float32)),
        iteration=draw(st.integers(0, 30)),
        rank=draw(st.integers(0, 3)),
        microbatch=draw(st.integers(0, 3)),
        call=draw(st.integers(0, 2)),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 4))),
        module=draw(st.sampled_from(MODULES)),
        layer_type=draw(st.sampled_from(["linear", "attention", "hidden", "my own"])),
        layer_idx=draw(st.integers(-1, 12)),
        operation=str(draw(st.sampled_from(list(Operation)))),
        phase=draw(st.sampled_from(["pre", "post"])),
        component=draw(st.sampled_from(["FA", "linear"])),
        quant_type=draw(st.sampled_from(["bf16", "mxfp8"])),
        tensor_name=draw(st.sampled_from(TENSORS)),
        dtype=dtype,
        shape=shape,
        compute_dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        mode=str(draw(st.sampled_from(list(Mode)))),
        nbytes=math.prod(shape) * DTYPES[dtype].itemsize,
        checksum="crc32c:00000000",
    )


NUMBERS = ("layer_idx", "rank", "microbatch", "call")
TEXTS = ("module", "layer_type", "phase", "component", "tensor_name", "quant_type", "dtype", "compute_dtype")

numbers = st.one_of(
    st.integers(-1, 12),
    st.lists(st.integers(-1, 12), max_size=3),
    st.sampled_from(["0-3", "1:20:2", ":5", "7:", "0,2,5-7", "-1", "none"]),
    st.builds(range, st.integers(0, 5), st.integers(0, 20), st.integers(1, 3)),
)
texts = st.one_of(
    st.sampled_from([*MODULES, *TENSORS, "linear", "FA", "bf16", "float32"]),
    st.sampled_from(["*", "layers.*", "layers.?.*", "grad_*", "[lm]*", "*a*", "layers.[01]*", "[", "b*6", ""]),
    st.lists(st.sampled_from([*TENSORS, "linear", "h*"]), min_size=1, max_size=3),
)


@st.composite
def expressions(draw: st.DrawFn, *, depth: int = 2) -> str:
    """Expressions over the fields that are known when a tensor is captured."""
    if depth and draw(st.booleans()):
        left, right = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
        return draw(st.sampled_from([f"({left} and {right})", f"({left} or {right})", f"not ({left})"]))
    number = draw(st.sampled_from([*NUMBERS, "nbytes", "numel", "batch_size"]))
    text = draw(st.sampled_from(TEXTS))
    value = draw(st.integers(-1, 12))
    return draw(
        st.sampled_from(
            [
                f"{number} {draw(st.sampled_from(['==', '!=', '<', '<=', '>', '>=']))} {value}",
                f"{number} in [0, {value}]",
                f"{number} is None",
                f"like({text}, '{draw(st.sampled_from(['l*', '*a*', 'grad_*', '?re']))}')",
                f"{text} == '{draw(st.sampled_from(['linear', 'pre', 'input', 'bf16']))}'",
                "dtype == compute_dtype",
                "microbatch <= call",
                "shape == '[2,3]'",
            ]
        )
    )


class Nowhere:
    """No values; the records are read from a catalogue alone."""

    url = "nowhere"


def queried(records: list[RecordInfo], filters: dict[str, Any], where: str | None) -> list[int]:
    """Which of the records a query selects."""
    entries = [
        CatalogueEntry(site="site", stack="", index=-1, info=dataclasses.replace(info, counter=number))
        for number, info in enumerate(records)
    ]
    catalogue = Catalogue.from_bytes(encode_catalogue(entries), place="here", attempt="attempt_000")
    reader: Any = Nowhere()
    found = Records.of(reader, [catalogue])
    for name, value in filters.items():
        found = found.fitting(parse_filter(name, value))
    return sorted((found if where is None else found.where(where)).column("counter").tolist())


def decided(records: list[RecordInfo], options: CaptureOptions) -> dict[int, CaptureRule]:
    """Which of the records a capture of every iteration takes, and what it keeps of them."""
    found = {}
    by_rank = {rank: Selecting(options, rank=rank) for rank in range(4)}
    for number, info in enumerate(records):
        selecting = by_rank[info.rank]
        decision = decide(selecting, info)
        # Again from what is remembered, and never what was said to be impossible.
        assert decision == decide(selecting, info)
        source, role, call = identity(info)
        assert decision is None or (selecting.may_take(source, role) and selecting.may_take(source, role, call))
        if decision is not None:
            found[number] = decision
    return found


def identity(info: RecordInfo) -> tuple[Source, TensorRole, Call]:
    """What the hooks know of a tensor."""
    source = Source(module=info.module, layer_type=info.layer_type, layer_idx=info.layer_idx, component=info.component)
    role = TensorRole(operation=Operation(info.operation), phase=info.phase, tensor_name=info.tensor_name)
    call = Call(
        iteration=info.iteration,
        microbatch=info.microbatch,
        index=info.call,
        compute_dtype=info.compute_dtype,
        batch_size=info.batch_size,
        mode=Mode(info.mode),
    )
    return source, role, call


def decide(selecting: Selecting, info: RecordInfo) -> CaptureRule | None:
    """The decision for a tensor of that identity."""
    return selecting.decide(
        *identity(info), dtype=info.dtype, shape=info.shape, nbytes=info.nbytes, quant_type=info.quant_type
    )


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_capture_takes_what_a_query_selects(data: st.DataObject) -> None:
    records = data.draw(st.lists(infos(), max_size=12))
    filters: dict[str, Any] = {
        **data.draw(st.dictionaries(st.sampled_from(NUMBERS), numbers, max_size=2)),
        **data.draw(st.dictionaries(st.sampled_from(TEXTS), texts, max_size=2)),
    }
    where = data.draw(st.one_of(st.none(), expressions()))
    rule = filters | ({} if where is None else {"where": where})
    if not rule:
        return
    assert sorted(decided(records, CaptureOptions(select=[rule]))) == queried(records, filters, where)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_the_first_rule_that_fits_decides(data: st.DataObject) -> None:
    records = data.draw(st.lists(infos(), max_size=12))
    given_rules = data.draw(
        st.lists(
            st.fixed_dictionaries({"phase": texts}, optional={"tensor_name": texts, "layer_idx": numbers}), max_size=3
        )
    )
    keeps = ["histogram", "statistics", "values"]
    rules = [{**rule, "keep": keep} for rule, keep in zip(given_rules, keeps, strict=False)]
    left = set(range(len(records)))
    expected: dict[int, str] = dict.fromkeys(left, "values") if not rules else {}
    for rule, keep in zip(given_rules, keeps, strict=False):
        hits = left & set(queried(records, rule, None))
        expected |= dict.fromkeys(hits, keep)
        left -= hits
    found = decided(records, CaptureOptions(select=rules))
    assert {number: decision.keep for number, decision in found.items()} == expected


def test_what_no_rule_names_is_not_asked_again_for_each_microbatch() -> None:
    selecting = Selecting(CaptureOptions(select="mode=train"), rank=0)
    source, role, call = identity(describe(np.zeros(1, dtype=np.float32)))
    for microbatch in range(3):
        assert selecting.may_take(source, role, dataclasses.replace(call, microbatch=microbatch))
    assert len(selecting._possible) == 1


def test_quantised_operands_are_chosen_by_their_own_names() -> None:
    selecting = Selecting(CaptureOptions(select="tensor_name=weight_codes"), rank=0)
    source, role, call = identity(dataclasses.replace(describe(np.zeros(1, dtype=np.float32)), tensor_name="weight"))
    about: dict[str, Any] = {"dtype": "uint8", "shape": (2,), "nbytes": 2, "quant_type": "fp8"}
    assert selecting.decide(source, role, call, suffix="_codes", **about)
    assert not selecting.decide(source, role, call, suffix="_scales", **about)
    assert not selecting.decide(source, role, call, **about)
    assert selecting.may_take(source, role)


# Which iterations.


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"start_at": 10, "every": 5}, [10, 15, 20, 25, 30]),
        ({"start_at": 3, "every": 2, "first_iteration": 6}, [7, 9, 11, 13, 15]),
    ],
)
def test_every_nth_iteration_is_captured(options: dict[str, Any], iterations: list[int]) -> None:
    cadence = CaptureOptions(**options).cadence
    first = cadence.following(-1, count=5)
    assert list(first) == iterations
    assert pickle.loads(pickle.dumps(cadence)) == cadence  # noqa: S301  (as the writer gets it)
    assert all(map(cadence.due, first))
    assert cadence.following(first[0], count=2, without={first[1]}) == first[2:4]


@given(start=st.integers(0, 50), every=st.integers(1, 12), after=st.integers(-1, 200))
def test_a_cadence_is_what_it_says(start: int, every: int, after: int) -> None:
    wanted = [iteration for iteration in range(max(start, after + 1), 500) if (iteration - start) % every == 0]
    assert list(Cadence(start=start, every=every).following(after, count=10)) == wanted[:10]


def test_a_cadence_ends_where_numbers_do() -> None:
    cadence = Cadence(start=5, every=10**12)
    assert cadence.following(5, count=2) == (5 + 10**12, 5 + 2 * 10**12)
    assert cadence.following(2**62 - 10**12, count=2) == (cadence.following(2**62 - 10**12, count=1) or ())


# Which samples.


def part(*shape: int, placement: str | None = None) -> PlainPart:
    """A part whose values are all different."""
    return PlainPart(tensor=torch.arange(math.prod(shape)).reshape(shape), placement=placement)


def sampled(samples: Any, whole: PlainPart, *, sample_dim: int | None) -> Any:
    """What is left of a part."""
    (decision,) = Selecting(CaptureOptions(select={"samples": samples}), rank=0)._rules
    return keep_samples(whole, decision=decision, sample_dim=sample_dim)


@pytest.mark.parametrize(
    ("samples", "places"),
    [
        (0, [0]),
        ("0-3", [0, 1, 2, 3]),
        ("0:8:3", [0, 3, 6]),
        ("1,2,5", [1, 2, 5]),
        ([6, 0], [0, 6]),
        (range(2, 5), [2, 3, 4]),
        ("5-100", [5, 6, 7]),
    ],
)
@pytest.mark.parametrize("sample_dim", [0, 1])
def test_samples_are_taken_before_the_copy(samples: Any, places: list[int], sample_dim: int) -> None:
    whole = part(8, 8, 2)
    left, kept = sampled(samples, whole, sample_dim=sample_dim)
    assert torch.equal(left.tensor, whole.tensor.index_select(sample_dim, torch.tensor(places)))
    assert list(kept) == places
    assert ids_at(kept, None) == places
    assert ids_at(kept, [f"id{place}" for place in range(8)]) == [f"id{place}" for place in places]
    evenly = len({after - before for before, after in itertools.pairwise(places)}) <= 1
    assert (left.tensor.untyped_storage().data_ptr() == whole.tensor.untyped_storage().data_ptr()) == evenly


def test_what_has_no_samples_stays_whole_and_what_has_not_these_is_left_out() -> None:
    whole = part(4, 2)
    assert sampled("0-1", whole, sample_dim=None)[0] is whole
    assert sampled("0-9", whole, sample_dim=0)[0] is whole
    assert sampled("7", whole, sample_dim=0) is None


def test_the_samples_of_a_shard_are_told_to_the_whole() -> None:
    kept = sampled("0,2", part(4, 2, placement='{"global_shape": [4, 8], "offset": [0, 2]}'), sample_dim=0)
    assert kept[0].placement == '{"global_shape": [2, 8], "offset": [0, 2]}'
    split = part(4, 2, placement='{"global_shape": [8, 2], "offset": [4, 0]}')
    assert sampled("0,2", split, sample_dim=0)[0] is split


STEPS = Training(steps=5, microbatches=2, autocast=True)
RULES: list[str | dict[str, Any]] = [
    {"layer_type": "attention", "samples": "0:3:2"},
    {"tensor_name": ["weight", "grad_weight"], "keep": "statistics"},
    "module=layers.1.* operation=forward microbatch=1 keep=histogram",
    {"where": "module == 'embed' and microbatch >= 1", "samples": [1]},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """A run of everything, with its losses."""
    url = tmp_path_factory.mktemp("whole") / "run"
    losses, _ = train(STEPS, capture=Capture(url, min_iterations=5, start_at=0))
    return open_run(url), losses


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """A run of the same training with rules, with its losses."""
    url = tmp_path_factory.mktemp("chosen") / "run"
    losses, _ = train(STEPS, capture=Capture(url, min_iterations=5, select=RULES))
    return open_run(url), losses


def name(record: Record) -> tuple[Any, ...]:
    """What a record is of."""
    info = record.info
    place = (info.iteration, info.microbatch, info.call, info.module, info.layer_type)
    return (*place, info.operation, info.phase, info.tensor_name)


def expected(run: Run) -> dict[tuple[Any, ...], tuple[Record, str]]:
    """By name what the rules take of the whole run, and the word for how."""
    found = {}
    for record in run.select():
        if record.layer_type == "attention":
            found[name(record)] = (record, "samples")
        elif record.tensor_name in {"weight", "grad_weight"}:
            found[name(record)] = (record, "statistics")
        elif record.module.startswith("layers.1.") and record.operation == "forward" and record.microbatch == 1:
            found[name(record)] = (record, "histogram")
        elif record.module == "embed" and record.microbatch >= 1:
            found[name(record)] = (record, "sample 1")
    return found


def test_what_the_rules_say_is_stored_and_nothing_else(
    whole: tuple[Run, list[str]], chosen: tuple[Run, list[str]]
) -> None:
    assert whole[1] == chosen[1]  # the losses, bit for bit
    wanted = expected(whole[0])
    records = {name(record): record for record in chosen[0].select()}
    assert set(records) == set(wanted)
    assert chosen[0].iterations == [0, 1, 2, 3, 4]
    for key, (original, how) in wanted.items():
        record = records[key]
        assert record.batch_size == original.batch_size == BATCH
        if how == "statistics":
            assert record.keep == "statistics"
            assert record.statistics().mean == pytest.approx(float(original.read().mean()), abs=1e-6)
        elif how == "histogram":
            assert record.keep == "histogram"
            assert record.histogram()[:65536].sum() == original.read().size
            assert record.shape == original.shape
        else:
            places = [0, 2] if how == "samples" else [1]
            values = original.read()
            assert record.keep == "values"
            assert record.sample_dim == original.sample_dim == 0
            assert record.sample_ids == places
            assert np.array_equal(record.read(), values[places])
            assert np.array_equal(record.read(sample=0), values[places[0]])
            assert record.nbytes * BATCH == original.nbytes * len(places)


def test_nothing_that_was_left_out_is_called_missing(chosen: tuple[Run, list[str]]) -> None:
    rows = chosen[0].status()
    assert [row.iteration for row in rows] == [0, 1, 2, 3, 4]
    assert [(str(row.state), row.silent_sites) for row in rows] == [("complete", {})] * 5


def test_samples_carry_the_users_ids(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = "module=embed samples=1-2 operation=forward tensor_name=input"
    with Capture(tmp_path / "run", min_iterations=2, every=3, select=rule) as capture:
        for step in range(6):
            capture.set_sample_ids([f"{step}-{index}" for index in range(4)])
            model(torch.randn(4, 2, WIDTH)).square().mean().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    assert [(record.iteration, record.tensor_name) for record in run.select()] == [(0, "input"), (3, "input")]
    record = run.select(iteration=3)[0]
    assert (record.sample_ids, record.shape, record.batch_size) == (["3-1", "3-2"], (2, 2, WIDTH), 4)
