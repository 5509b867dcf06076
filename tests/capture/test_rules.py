"""Is a rule read as it is written, and is one that nothing can follow refused before the training begins?"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.capture.flight.rules import judge
from ranktape.capture.settings.options import CaptureOptions, check_layer_types
from ranktape.capture.settings.rules import parse_rules, read_numbers
from ranktape.errors import UnknownFieldError, UsageError
from tests.runs import describe

KNOWN = ("linear", "attention", "embedding", "hidden")


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("keep=histogram", [{"keep": "histogram"}]),
        ("  layer-type=attention\tcall=100\n", [{"layer_type": "attention", "call": "100"}]),
        ("a=b; c=d", [{"a": "b"}, {"c": "d"}]),
        ("where='call > 0 and phase == \"pre\"'", [{"where": 'call > 0 and phase == "pre"'}]),
        (r"""module="a\"b\\c;d e" call=1""", [{"module": 'a"b\\c;d e', "call": "1"}]),
        ("module=layers.[0-3].*=x,y", [{"module": "layers.[0-3].*=x,y"}]),
        ("module=''", [{"module": ""}]),
    ],
)
def test_a_rule_is_read_as_it_is_written(text: str, rules: list[dict[str, str]]) -> None:
    assert parse_rules(text) == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has an empty rule"),
        ("a=b;", "has an empty rule"),
        (";a=b", "has an empty rule"),
        ("attention", "expected NAME=VALUE at character 1, found 'attention'"),
        ("a=b c", "expected NAME=VALUE at character 5, found 'c'"),
        ("a = b", "expected NAME=VALUE at character 1"),
        ("a=", "expected NAME=VALUE at character 1"),
        ("a='b", "expected NAME=VALUE at character 1"),
        ("a='b'c", "expected NAME=VALUE at character 1"),
        ("a=b'c'", "expected NAME=VALUE at character 1"),
        ("1=2", "expected NAME=VALUE at character 1"),
        ("a=b a=c", "has a twice in one rule"),
        ("a-b=1 a_b=1", "has a_b twice in one rule"),
        ("a=" + "x" * 100_000, "has 100002 characters: give at most 100000"),
    ],
)
def test_a_text_that_is_no_rule_is_refused_where_it_goes_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_rules(text)


@given(
    st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), st.text(max_size=20), min_size=1, max_size=4)
)
def test_any_text_can_stand_in_quotes(rule: dict[str, str]) -> None:
    for quote in "'\"":
        quoted = {name: value.replace("\\", "\\\\").replace(quote, "\\" + quote) for name, value in rule.items()}
        text = " ".join(f"{name}={quote}{value}{quote}" for name, value in quoted.items())
        assert parse_rules(text) == [rule]


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        CaptureOptions(select=text)
    except UsageError:
        return
    assert CaptureOptions(select=text).rules


def test_a_text_and_a_mapping_say_the_same() -> None:
    text = "layer-type=attention,linear layer_idx=0-3 samples=0:8:2 keep=histogram where='call < 2'"
    mapping = {
        "layer-type": ["attention", "linear"],
        "layer_idx": "0-3",
        "samples": "0:8:2",
        "keep": "histogram",
        "where": "call < 2",
    }
    for each in (text, [text], (mapping,), mapping):
        (rule,) = CaptureOptions(select=each).rules
        assert [one.field for one in rule.filters] == ["layer_type", "layer_idx"]
        assert rule.keep == "histogram"
        assert rule.samples is not None
        assert rule.samples.below(10) == [0, 2, 4, 6]


def test_what_a_rule_leaves_out_is_what_holds_for_all() -> None:
    first, second = CaptureOptions(keep="statistics", select="layer_type=linear; keep=values samples=1").rules
    assert (first.keep, first.samples) == ("statistics", None)
    assert second.keep == "values"
    assert second.samples is not None
    assert second.samples.below(5) == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"select": "layertype=a"},
            "--select, rule 1: tensors have no field 'layertype': did you mean layer_type?",
        ),
        ({"select": "call=1; kep=2"}, "--select, rule 2: tensors have no field 'kep': did you mean keep?"),
        ({"select": "checksum=1"}, "checksum is not known yet when a tensor is captured"),
        ({"select": {"where": "overflow.ratio > 0"}}, "overflow.ratio is not known yet when a tensor is captured"),
        ({"select": {"where": "sample_ids == '1'"}}, "sample_ids is not known yet when a tensor is captured"),
        ({"select": {"where": "layer_type == 1"}}, "layer_type holds text and 1 is a number"),
        ({"select": {"where": "layer_idx == 'a'"}}, "layer_idx holds numbers and 'a' is text"),
        ({"select": {"where": "layer_type = 'a'"}}, "write =="),
        ({"select": {"where": "__import__('os').system('x')"}}, "expected"),
        ({"select": {"where": "x" * 20_000}}, "give at most 10000"),
        ({"select": {"where": "not " * 100 + "call == 0"}}, "at most 50 levels"),
        ({"select": "rank=all"}, "rank holds numbers and 'all' is not one"),
        ({"select": "layer_idx=3-0"}, "ends before it begins"),
        ({"select": {"layer_idx": {"a": 1}}}, "is not something a field can hold"),
        ({"select": "operation=foward"}, "operation 'foward' is not allowed: did you mean forward?"),
        ({"select": "operation=x"}, "operation 'x' is not allowed: give one of forward, backward"),
        ({"select": "mode=test"}, "mode 'test' is not allowed: give one of train, eval"),
        ({"start_at": -1}, "--start-at -1 is not allowed: give 0 or more"),
        ({"every": 0}, "--every 0 is not allowed: give 1 or more"),
        ({"min_iterations": 10**15}, "--min-iterations 1000000000000000 is not allowed: give 100000 or less"),
        ({"max_iterations": 100_001}, "--max-iterations 100001 is not allowed: give 100000 or less"),
        ({"min_iterations": 3, "max_iterations": 2}, "--max-iterations 2 is below --min-iterations 3"),
        ({"policy": "skp"}, "--policy skp is not allowed: did you mean skip"),
        ({"keep": "hist"}, "--keep hist is not allowed: did you mean histogram"),
        ({"policy": "drop"}, "--policy drop is not allowed: give one of block, skip"),
        ({"compression": "gzip"}, "--compression gzip is not allowed: give one of none, zstd"),
        ({"min_iterations": 3, "keep_last": 2}, "--keep-last 2 is below --min-iterations 3, which are guaranteed"),
        ({"quant_type": ""}, "quant_type='' is not allowed"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
        ({"record_last": 2, "min_iterations": 3}, "--min-iterations 3 and --record-last 2 exclude each other"),
        ({"record_last": 2, "keep_last": 1}, "--keep-last 1 and --record-last 2 exclude each other"),
        ({"record_last": 2, "stop_when_stored": True}, "--stop-when-stored and --record-last 2 exclude each other"),
        ({"record_last": 2, "manual": True}, "because a flight recorder holds what hooks record: give one"),
        ({"trigger": "absmax > 1"}, "--trigger is for a flight recorder: add --record-last N"),
        ({"host_budget_nbytes": 5}, "--host-budget-nbytes 5 is not allowed: give 1048576 or more"),
        ({"keep": "counts"}, "--keep counts is not allowed: give one of values, histogram, statistics"),
        ({"select": "keep=counts"}, "keep 'counts' is not allowed"),
        ({"select": "every=15"}, "every is the same for all rules: choose iterations by --start-at and --every"),
        ({"select": "iteration=15"}, "iteration is the same for all rules"),
        ({"select": "where='iteration > 3'"}, "iteration is the same for all rules"),
        ({"layer_offset": -1}, "layer_offset -1 is not allowed"),
        ({"select": "samples=-1"}, "counted from 0"),
        ({"select": "samples=0.5"}, "counted from 0"),
        ({"select": "samples=0,-1"}, "counted from 0"),
        ({"select": "samples=none"}, "counted from 0"),
        ({"select": {"samples": [True]}}, "counted from 0"),
        ({"select": {"samples": 1.5}}, "counted from 0"),
        ({"select": [{}]}, "rule 1 is empty"),
        ({"select": [3]}, "3 is not a rule"),
        ({"select": "keep=histogram; call=1"}, "rule 1, matches every tensor"),
        ({"layers": "some"}, "--layers 'some' is not allowed: give all, or numbers such as"),
        ({"layers": "3-1"}, "the range '3-1', which ends before it begins: write 1-3"),
        ({"layers": -1}, "counted from 0"),
        ({"layers": [0, None]}, "counted from 0"),
        ({"advance_on": "optimzer"}, "--advance-on 'optimzer' is not allowed"),
        ({"advance_on": "optimizer:-1"}, "--advance-on 'optimizer:-1' is not allowed"),
        ({"advance_on": None}, "--advance-on None is not allowed"),
        ({"every": 2**60}, "--every 1152921504606846976 is not allowed"),
        ({"min_iterations": "3"}, "give a whole number"),
        ({"strict": "yes"}, "give true or false"),
        ({"finish_timeout_seconds": float("inf")}, "--finish-timeout-seconds inf is not allowed: give a finite number"),
        ({"block_timeout_seconds": 1e300}, "--block-timeout-seconds 1e+300 is not allowed: give a finite number"),
        ({"finish_timeout_seconds": float("-inf")}, "--finish-timeout-seconds -inf is not allowed"),
        ({"select": {"layer-type": "a", "layer_type": "b"}}, "rule 1 has layer_type twice"),
        ({"select": {"operation": None}}, "operation None is not allowed"),
        ({"select": "mode=eval where='mode == \"train\"'"}, "rule 1, matches neither train nor eval mode"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_the_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        CaptureOptions(**options)
    is_about_a_field = any(words in message for words in ("no field", "not known yet", "is the same for all rules"))
    assert isinstance(raised.value, UnknownFieldError) == is_about_a_field


def test_whatever_is_called_by_hostile_names_is_data() -> None:
    hostile = "'; __import__('os').system('x') #{\n../../etc"
    options = CaptureOptions(select=[{"module": hostile, "tensor_name": [hostile]}])
    assert options.wants_module(hostile)
    assert not options.wants_module("a")


# Which kinds of layers.


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({}, ("linear", "attention")),
        ({"select": "layer_type=linear"}, ("linear",)),
        ({"layers": True}, ("embedding", "hidden")),
        ({"layers": "0-3", "select": "layer_type=linear"}, ("linear", "embedding", "hidden")),
        ({"layers": "0-3", "select": "mode=eval"}, ("embedding", "hidden")),
        ({"layers": False}, ("linear", "attention")),
        ({"select": "layer_type=hidden; keep=statistics"}, ("hidden", "linear", "attention")),
        ({"select": "layer_type=hidden", "layers": "all"}, ("hidden", "embedding")),
        ({"select": "layer_idx=0"}, ("linear", "attention")),
    ],
)
def test_layers_are_attached_to_that_something_asks_for(options: dict[str, Any], types: tuple[str, ...]) -> None:
    made = CaptureOptions(**options)
    assert made.wanted_layer_types == types
    assert all(map(made.wants_layer_type, types))
    assert not made.wants_layer_type("other")
    check_layer_types(made, known=KNOWN)


@pytest.mark.parametrize(
    ("select", "kinds"),
    [
        ("layer_type=linear", [["linear"], ["embedding", "hidden"]]),
        ("layer_type=linear; layer_type=hidden layer_idx=3", [["linear"], ["hidden"], ["embedding"]]),
        ("layer_type='*' mode=eval", [["*"]]),
        ("mode=eval", [[]]),
    ],
)
def test_layer_outputs_are_taken_beside_other_layers_unless_a_rule_is_about_them(
    select: str, kinds: list[list[str]]
) -> None:
    rules = CaptureOptions(layers="all", select=select).rules
    found = [[text for one in rule.filters if one.field == "layer_type" for text in one.alternatives] for rule in rules]
    assert found == kinds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"select": "layer_type=atention"},
            "no layer type 'atention' (--select layer_type=...): did you mean attention?",
        ),
        ({"select": "layer_type=linear,hiden"}, "did you mean hidden?"),
        (
            {"select": "layer_type=conv"},
            "no layer type 'conv' (--select layer_type=...): give one of linear, attention",
        ),
    ],
)
def test_a_kind_of_layer_that_nobody_knows_is_named_with_the_nearest(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check_layer_types(CaptureOptions(**options), known=KNOWN)


def test_kinds_that_are_recorded_by_hand_are_nobodys_business() -> None:
    check_layer_types(CaptureOptions(select="layer_type=linear,rotary"), known=KNOWN)
    check_layer_types(CaptureOptions(select="layer_type=rotary", manual=True), known=KNOWN)
    check_layer_types(CaptureOptions(select="layer_type=lin*"), known=KNOWN)


@pytest.mark.parametrize(
    ("given", "is_named"), [(None, False), ((), False), ("layer_type=emb*", True), ("layer_type=linear", False)]
)
def test_layers_alone_name_no_kind(*, given: Any, is_named: bool) -> None:
    options = CaptureOptions(layers="all", select=given)
    assert options.wants_layer_type("embedding")
    assert options.names_layer_type("embedding") == is_named


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [(True, [0, 1, 2, 3]), ("all", [0, 1, 2, 3]), ([0, 3], [0, 3]), ("0,2-3", [0, 2, 3]), (1, [1]), (range(2), [0, 1])],
)
def test_decoder_layers_are_counted_from_0(layers: Any, wanted: list[int]) -> None:
    options = CaptureOptions(layers=layers)
    assert [index for index in range(4) if read_numbers("layers", options.layers).holds(index)] == wanted
    assert options.wants_layers
    assert options.wanted_modes == ("train", "eval")
    assert not CaptureOptions().wants_layers
    assert CaptureOptions(layers="all", select="mode=train").wanted_modes == ("train",)


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        ({}, ("train",)),
        ({"select": "mode=eval"}, ("eval",)),
        ({"select": "mode=eval layer_type=attention; keep=statistics"}, ("train", "eval")),
        ({"select": "mode='*'"}, ("train", "eval")),
        ({"select": "where='mode == \"eval\" and call == 0'"}, ("eval",)),
        ({"select": {"where": "mode != 'train'"}}, ("eval",)),
        ({"select": {"where": "mode == 'eval' or layer_idx == 0"}}, ("train", "eval")),
        ({"select": "layer_idx=0"}, ("train",)),
        ({"layers": "all", "select": "mode=train"}, ("train",)),
    ],
)
def test_the_modes_are_those_that_something_asks_for(options: dict[str, Any], modes: tuple[str, ...]) -> None:
    assert CaptureOptions(**options).wanted_modes == modes


def test_a_field_that_is_none_is_missing_as_in_a_query() -> None:
    (rule,) = CaptureOptions(select=[{"tensor_name": None, "where": None, "keep": None}]).rules
    assert [(one.field, one.alternatives) for one in rule.filters] == [("tensor_name", (None,))]
    assert (rule.where, rule.keep) == (None, "values")


def test_the_documents_of_a_run_hold_what_json_can() -> None:
    class Optimizer:
        def step(self) -> None:
            """What an optimizer can."""

    select = {"layer_idx": range(3), "rank": {2, 1}, "call": slice(0, 2)}
    options = CaptureOptions(select=select, advance_on=Optimizer(), storage_options={"secret": "CANARY"})
    document = options.document()
    assert document["select"] == {"layer_idx": "range(0, 3)", "rank": [1, 2], "call": "slice(0, 2, None)"}
    assert document["advance_on"] == "Optimizer"
    assert "CANARY" not in str(document)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([math.nan], "the layers.0 forward pre input is NaN"),
        ([-math.inf], "the layers.0 forward pre input is infinite"),
        ([math.nan, 1.0, math.nan], "2 of 3 values of layers.0 forward pre input are NaN"),
    ],
)
def test_a_trigger_says_how_many_values_are_not_finite(values: list[float], text: str) -> None:
    array = np.array(values, dtype=np.float32)
    info = describe(array, module="layers.0", layer_type="linear", tensor_name="input")
    [hit] = judge((), info, lambda: pytest.fail("no limit needs statistics"))
    assert hit.text == text
