"""How many tensors of each site does a compiled training record, counted against the same one that runs eagerly?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.capture.compiled_matrix import RECORDED, WRAPPINGS, count_tensors, train
from tests.exhaustive import exhaustive
from tests.support import COMPILED, COMPILED_SITES, PAGE, WRITING, YES, compiled_cell, compiled_on

pytestmark = [
    pytest.mark.compiled_support,
    pytest.mark.filterwarnings("ignore"),  # dynamo meets deprecated parts of torch itself
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    # What is recorded is each rank's own: one rank counts as many as each of several.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


_LONG = pytest.mark.exhaustive("as the others, compiled in other ways")
_FEW = ("torch.compile(model)", "FSDP2")
NAMES = [name if name in _FEW else pytest.param(name, marks=_LONG) for name in WRAPPINGS]


@pytest.mark.parametrize("name", NAMES)
@exhaustive("make test has the code behind each row in other tests")
def test_what_is_recorded_in_compiled_code_is_what_the_page_says(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    wrapping = WRAPPINGS[name]
    train(wrapping, tmp_path / "eager", is_compiled=False, **RECORDED)
    losses = train(wrapping, tmp_path / "compiled", is_compiled=True, **RECORDED)
    unchanged = losses == train(wrapping, None, is_compiled=True)
    wanted, found = count_tensors(tmp_path / "eager"), count_tensors(tmp_path / "compiled")
    assert set(wanted) == set(COMPILED_SITES)
    cells = {site: compiled_cell(found[site], wanted[site]) for site in COMPILED_SITES}
    cells["unchanged"] = YES if unchanged else "no"
    record_property(COMPILED, (name, cells))
    if not request.config.pluginmanager.has_plugin(WRITING):
        said = compiled_on(PAGE.read_text(encoding="utf-8"))[name]
        assert said == cells, "run 'make support' again"


def test_the_page_has_a_row_for_each_way() -> None:
    assert list(compiled_on(PAGE.read_text(encoding="utf-8"))) == list(WRAPPINGS)
