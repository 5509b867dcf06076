"""Are the names of the legacy tools read as they meant them, and can every name that we write be read back?"""

from __future__ import annotations

import dataclasses
import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ranktape.analyze.legacy.names import (
    MAX_NAME_NBYTES,
    TENSOR_NAMES,
    TensorFileName,
    format_layer_output_name,
    format_tensor_file_name,
    name_seconds,
    name_timestamp,
    parse_layer_output_name,
    parse_tensor_file_name,
    recorded_tensor_name,
)
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Operation
from tests.strategies import terms

NEW = TensorFileName(
    timestamp="20250908_095220",
    counter=12,
    iteration=3,
    layer_type="linear",
    layer_idx=17,
    operation=Operation.BACKWARD,
    phase="pre",
    component="linear",
    quant_type="mxfp8",
    rank=5,
    sample_idx=2,
    tensor_name="grad_output",
)

OLDER: dict[str, Any] = {"iteration": None, "rank": None, "sample_idx": None}
"""The numbers that the older form has not."""


def linear(counter: int, operation: str, phase: str, tensor_name: str, **changes: Any) -> TensorFileName:
    fields: dict[str, Any] = OLDER | {"operation": Operation(operation), "phase": phase, "layer_idx": 1} | changes
    return dataclasses.replace(NEW, counter=counter, quant_type="hifp8", tensor_name=tensor_name, **fields)


def attention(counter: int, phase: str, tensor_name: str, operation: str = "forward") -> TensorFileName:
    return linear(counter, operation, phase, tensor_name, layer_type="attention", layer_idx=0, component="FA")


FROM_THE_DOCUMENT = {
    "20250908_095220_0001_attention_L0_forward_pre_FA_hifp8_query.pt": attention(1, "pre", "query"),
    "20250908_095220_0002_attention_L0_forward_pre_FA_hifp8_key.pt": attention(2, "pre", "key"),
    "20250908_095220_0003_attention_L0_forward_pre_FA_hifp8_value.pt": attention(3, "pre", "value"),
    "20250908_095220_0004_attention_L0_forward_post_FA_hifp8_output.pt": attention(4, "post", "output"),
    "20250908_095220_0005_linear_L1_forward_pre_linear_hifp8_input.pt": linear(5, "forward", "pre", "input"),
    "20250908_095220_0006_linear_L1_forward_pre_linear_hifp8_weight.pt": linear(6, "forward", "pre", "weight"),
    "20250908_095220_0007_linear_L1_forward_post_linear_hifp8_output.pt": linear(7, "forward", "post", "output"),
    "20250908_095220_0008_linear_L1_backward_pre_linear_hifp8_input.pt": linear(8, "backward", "pre", "input"),
    "20250908_095220_0009_linear_L1_backward_pre_linear_hifp8_weight.pt": linear(9, "backward", "pre", "weight"),
    "20250908_095220_0010_linear_L1_backward_post_linear_hifp8_output.pt": linear(10, "backward", "post", "output"),
}
"""The older form's examples, as its document has them."""


def test_the_documents_examples_are_read_and_written_as_they_stand() -> None:
    for name, seed in FROM_THE_DOCUMENT.items():
        assert parse_tensor_file_name(name) == seed
        assert format_tensor_file_name(seed) == name


def test_the_new_form_is_the_documents() -> None:
    # timestamp_counter_iter{iteration}_layer_type_L{layer_idx}_operation_phase_component_quant_type_rank{rank}
    # _sample{sample_idx}_tensor_name.pt
    name = "20250908_095220_0012_iter3_linear_L17_backward_pre_linear_mxfp8_rank5_sample2_grad_output.pt"
    assert format_tensor_file_name(NEW) == name
    assert parse_tensor_file_name(name) == NEW


def test_variants_that_were_written() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("0012_iter003_linear_L17_backward_pre_linear_mxfp8_rank05_sample002_grad_output", {}),
        (
            "0012_iter003_linear_L17_backward_pre_linear_mxfp8_rank05_group002_grad_output",
            {"sample_idx": None, "group_idx": 2},
        ),
        ("0012_iter003_linear_L17_backward_pre_linear_mxfp8_rank05_sample002_group009_grad_output", {"group_idx": 9}),
        (
            "0012_iter003_linear_backward_pre_linear_mxfp8_group002_grad_output",
            OLDER | {"iteration": 3, "layer_idx": None, "group_idx": 2},
        ),
        ("0012_iter003_linear_backward_pre_linear_mxfp8_grad_output", OLDER | {"iteration": 3, "layer_idx": None}),
        ("0012_linear_17_backward_pre_linear_mxfp8_grad_output", OLDER),
        ("0012_linear_L-1_backward_pre_linear_mxfp8_grad_output", OLDER | {"layer_idx": -1}),
        ("123456_iter3_linear_L17_backward_pre_linear_mxfp8_rank5_sample2_grad_output", {"counter": 123456}),
        (
            "0012_iter3_linear_L17_backward_pre_linear_mxfp_fp8_e4m3_rank5_sample2_grad_input_A",
            {"quant_type": "mxfp_fp8_e4m3", "tensor_name": "grad_input_A"},
        ),
        (
            "0012_my_layer_L17_backward_unknown_unknown_mxfp_fp8_e4m3_attention_weights",
            {"layer_type": "my_layer", "phase": "unknown", "component": "unknown", "quant_type": "mxfp_fp8_e4m3"}
            | {"tensor_name": "attention_weights", **OLDER},
        ),
        (
            "0012_linear_L17_backward_pre_linear_bf16_my_own_tensor",
            OLDER | {"quant_type": "bf16", "tensor_name": "my_own_tensor"},
        ),
        (
            "0012_iter3_linear_L17_backward_pre_linear_100%_rank5_sample2_%FF%zz",
            {"quant_type": "100%", "tensor_name": "%FF%zz"},
        ),
    ]
    for name, expected in cases:
        seed = parse_tensor_file_name(f"20250908_095220_{name}.pt")
        assert seed == dataclasses.replace(NEW, **expected)
        assert seed is not None
        assert parse_tensor_file_name(format_tensor_file_name(seed)) == seed


def test_other_names_are_not_taken_for_ours() -> None:
    for name in [
        "",
        "tensor.pt",
        "layer_1_output.pt",
        "statistics.pt",
        "20250908_095220_0001_attention_L0_forward_pre_FA_hifp8_query.pth",
        "20250908_095220_0001_attention_L0_forward_pre_FA_hifp8.pt",
        "20250908_095220_0001_attention_L0_forward_pre_query.pt",
        "20250908_095220_0001_attention_L0_sideways_pre_FA_hifp8_query.pt",
        "20250908_095220_01_attention_L0_forward_pre_FA_hifp8_query.pt",
        "20251308_095220_0001_attention_L0_forward_pre_FA_hifp8_query.pt",
        "20250908_096220_0001_attention_L0_forward_pre_FA_hifp8_query.pt",
        "\u0662\u0660250908_095220_0001_attention_L0_forward_pre_FA_hifp8_query.pt",
        "a/20250908_095220_0001_attention_L0_forward_pre_FA_hifp8_query.pt",
        "20250908_095220_0001_attention_L0_forward_pre_FA_hifp8_que\nry.pt",
        "20250908_095220_0001_attention_L0_forward_pre_FA_hifp8_%00.pt",
        "20250908_095220_0001_attention_L0_forward_pre_FA_hifp8_" + "a" * 65 + ".pt",
        "20250908_095220_0001_attention_L0_forward_pre_FA_hifp8_" + "a_" * 200 + ".pt",
        "20250908_095220_" + "9" * 100 + "_attention_L0_forward_pre_FA_hifp8_query.pt",
    ]:
        assert parse_tensor_file_name(name) is None


@given(st.text(max_size=60) | st.from_regex(r"20250908_095220_[0-9]{4}_[a-zA-Z0-9_%/]{0,80}\.pt", fullmatch=True))
def test_any_text_is_read_or_passed_over(name: str) -> None:
    seed = parse_tensor_file_name(name)
    if seed is not None:
        assert parse_tensor_file_name(format_tensor_file_name(seed)) == seed


# Tags that look like other parts of a name, alone and together with others.
LOOKALIKES = ("iter0", "rank0", "sample1", "group2", "L0", "5", "forward", "a_forward_b", "x_rank0_y", "x_iter2", "_a", "a_", "__", "input", "my_input", "%5F", ".pt", "..", "../../etc/passwd", "/", "\\", ".hidden")  # fmt: skip # noqa: E501
tags = st.one_of(st.sampled_from(LOOKALIKES), st.sampled_from(TENSOR_NAMES), terms().map(lambda tag: tag[:12]))
indices = st.integers(0, 10**9 - 1)


@st.composite
def file_names(draw: st.DrawFn, *, older: bool | None = None) -> TensorFileName:
    """Names of any tags; the older form has none of the numbers but the layer's, the new one all but the group."""
    optional = {None: st.none() | indices, True: st.none(), False: indices}[older]
    seconds = draw(st.integers(0, 4 * 10**9))
    return TensorFileName(
        timestamp=name_timestamp(seconds),
        counter=draw(st.integers(0, 10**6)),
        iteration=draw(optional),
        layer_type=draw(tags),
        layer_idx=draw((st.none() if older is None else st.nothing()) | st.integers(-1, 9999)),
        operation=draw(st.sampled_from(Operation)),
        phase=draw(tags),
        component=draw(tags),
        quant_type=draw(tags),
        rank=draw(optional),
        sample_idx=draw(optional),
        group_idx=draw(optional) if older is None else None,
        tensor_name=draw(tags),
    )


def check_round_trip(seed: TensorFileName) -> None:
    try:
        name = format_tensor_file_name(seed)
    except UsageError as error:
        assert "file systems allow 255" in str(error)  # noqa: PT017 - one reason is allowed, the name's length
        return
    assert parse_tensor_file_name(name) == seed
    assert len(name.encode()) <= MAX_NAME_NBYTES
    assert PurePosixPath("folder", name).parent == PurePosixPath("folder")
    assert PureWindowsPath("folder", name).parent == PureWindowsPath("folder")
    assert "\0" not in name
    assert re.match(r"[0-9]{8}_", name)


@settings(max_examples=300)
@given(file_names() | file_names(older=True) | file_names(older=False))
@example(dataclasses.replace(NEW, layer_type="iter5", iteration=None))
@example(dataclasses.replace(NEW, layer_type="a_5", layer_idx=None))
@example(dataclasses.replace(NEW, tensor_name="group3_x"))
def test_whatever_is_written_is_read_back(seed: TensorFileName) -> None:
    check_round_trip(seed)


def test_only_the_tag_that_is_misread_is_escaped() -> None:
    name = "20250908_095220_0012_iter3_linear_L17_backward_%6Dy%5Fphase_linear_a_b_rank5_sample2_grad_output.pt"
    assert format_tensor_file_name(dataclasses.replace(NEW, phase="my_phase", quant_type="a_b")) == name


def test_what_no_name_can_hold_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tensor_name": ""}, "tensor_name='' is not allowed"),
        ({"quant_type": "a\0b"}, r"quant_type='a\\x00b' is not allowed"),
        ({"phase": "a\nb"}, "is not allowed"),
        ({"phase": "a" * 65}, "is not allowed"),
        ({"timestamp": "../20250908"}, "timestamp '../20250908' is not a time: write YYYYMMDD_HHMMSS"),
        ({"timestamp": "20250908_95220"}, "is not a time"),
        ({"layer_type": "\u5c42" * 60, "phase": "\u5c42" * 60}, "takes [0-9]+ bytes and file systems allow 255"),
        ({"counter": -1}, "no file name can hold the numbers"),
        ({"rank": -1}, "no file name can hold the numbers"),
        ({"iteration": 10**18}, "no file name can hold the numbers"),
    ]
    for changes, match in cases:
        with pytest.raises(UsageError, match=match):
            format_tensor_file_name(dataclasses.replace(NEW, **changes))


def test_times_are_read_back() -> None:
    assert name_timestamp(name_seconds(NEW)) == NEW.timestamp
    assert name_seconds(dataclasses.replace(NEW, timestamp="19700101_000001")) == 1.0


def test_backward_tensors_of_linear_layers_have_our_names() -> None:
    for seed, expected in [
        (linear(0, "backward", "pre", "input"), "grad_output"),
        (linear(0, "backward", "pre", "weight"), "weight"),
        (linear(0, "backward", "post", "output"), "grad_input"),
        (linear(0, "backward", "unknown", "output"), "grad_input"),
        (linear(0, "backward", "pre", "grad_output"), "grad_output"),
        (linear(0, "backward", "post", "grad_weight"), "grad_weight"),
        (linear(0, "forward", "pre", "input"), "input"),
        (linear(0, "forward", "post", "output"), "output"),
        (attention(0, "pre", "query", "backward"), "query"),
    ]:
        assert recorded_tensor_name(seed) == expected


def test_a_folder_of_layer_outputs() -> None:
    for name, layer_idx in [("embedding_output.pt", -1), ("layer_1_output.pt", 0), ("layer_62_output.pt", 61)]:
        assert parse_layer_output_name(name) == layer_idx
        assert format_layer_output_name(layer_idx) == name
        assert parse_layer_output_name("layer_0_output.pt") == -1


def test_other_names_are_not_layer_outputs() -> None:
    for name in ["", "layer_N_output.pt", "layer_-1_output.pt", "layer_1_output.pth", "metadata.pt"]:
        assert parse_layer_output_name(name) is None
