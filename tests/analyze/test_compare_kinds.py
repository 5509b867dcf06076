"""Does `compare` know which tensors of attention and of linear layers stand for each other?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from ranktape.analyze.questions.compare import compare
from tests.analyze.compared import normal
from tests.analyze.runs import Tensor, describe_tensor, store


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
