"""Are selections of several sources one selection, which says of each record where it is from?"""

from __future__ import annotations

import numpy as np
import pytest

from ranktape.errors import NoRecordsError, UnknownFieldError, UsageError
from ranktape.storage.records.records import Records, unite
from tests.analyze.runs import model_tensors, store


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Records]:
    """Two trainings of the same model with other values."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: store(folder / name, model_tensors(seed=seed)).select() for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def both(parts: dict[str, Records]) -> Records:
    """Both, as one."""
    return unite(parts)


def test_records_come_in_the_order_of_the_sources_and_read_their_own_values(
    parts: dict[str, Records], both: Records
) -> None:
    expected = [record for records in parts.values() for record in records]
    assert len(both) == len(expected)
    assert [record.info for record in both] == [record.info for record in expected]
    for place in (0, len(both) // 2 - 1, len(both) // 2, -1):
        assert np.array_equal(both[place].read(), expected[place].read())
    assert not np.array_equal(both[0].read(), both[len(parts["one"])].read())


@pytest.mark.parametrize("name", ["layer_idx", "module", "shape", "overflow.absmax", "checksum", "sample_ids"])
def test_columns_are_those_of_the_sources(parts: dict[str, Records], both: Records, name: str) -> None:
    expected = np.concatenate([records.column(name) for records in parts.values()])
    assert np.array_equal(both.column(name), expected)
    order = np.random.default_rng(0).permutation(len(both))
    assert np.array_equal(both.take(order.tolist()).column(name), expected[order])
    assert both.take([]).column(name).dtype == expected[:0].dtype


def test_the_source_is_a_field_to_choose_and_group_by(parts: dict[str, Records], both: Records) -> None:
    assert both.column("source").tolist() == ["one"] * len(parts["one"]) + ["two"] * len(parts["two"])
    assert [record.info for record in both.select(source="two")] == [record.info for record in parts["two"]]
    assert len(both.where("source == 'one' and layer_idx == 0")) == len(parts["one"].select(layer_idx=0))
    assert [key for key, _ in both.group_by(["source"])] == [{"source": "one"}, {"source": "two"}]
    assert both.sources == ("one", "two")
    assert both.select(source="t*").sources == ("two",)
    assert parts["one"].sources == ("one",)
    assert len(parts["one"].select(source="one")) == len(parts["one"])
    assert len(parts["one"].where("source == 'two'")) == 0
    with pytest.raises(NoRecordsError, match="no records match source two: source is one"):
        parts["one"].select(source="two")


def test_parts_are_runs_of_one_source(both: Records) -> None:
    mixed = both.take([0, 1, len(both) - 1, 2])
    found = [(part.name, part.places.tolist(), len(part.records)) for part in mixed.parts()]
    assert found == [("one", [0, 1], 2), ("two", [2], 1), ("one", [3], 1)]
    gathered = [(part.name, part.places.tolist()) for part in mixed.by_source()]
    assert gathered == [("one", [0, 1, 3]), ("two", [2])]
    assert [record.info for record in mixed] == [both[place].info for place in (0, 1, len(both) - 1, 2)]


def test_groups_of_one_path_in_two_sources_are_two(parts: dict[str, Records], both: Records) -> None:
    groups = both.groups()
    assert len(groups) == sum(len(records.groups()) for records in parts.values())
    assert [place for _, places in groups for place in range(places.start, places.stop)] == list(range(len(both)))


def test_what_was_left_out_is_found_again(both: Records) -> None:
    chosen = both.select(layer_idx=0, source="two")
    whole, places = chosen.unfiltered()
    assert len(whole) == len(both)
    assert [whole[int(place)].info for place in places] == [record.info for record in chosen]


def test_tensors_are_not_put_together_over_sources(both: Records) -> None:
    assert len(both.assemble()) == len(both)


def test_mistakes_are_told(both: Records) -> None:
    with pytest.raises(UnknownFieldError, match="sourc"):
        both.column("sourc")
    with pytest.raises(UsageError, match="nothing to unite"):
        unite({})
