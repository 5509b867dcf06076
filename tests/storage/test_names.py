"""Does every string survive the way into a path and back, without leaving its folder?"""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.storage.format.layout import MAX_PATH_LENGTH, TensorSite, site_path
from tests import strategies

SITE = TensorSite(
    module="layers.0.attention.query",
    layer_type="linear",
    layer_idx=0,
    operation="forward",
    phase="pre",
    component="linear",
    quant_type="bf16",
    tensor_name="input",
    microbatch=0,
    call=0,
)


def sites() -> st.SearchStrategy[TensorSite]:
    term = st.text(max_size=20)
    small = st.integers(0, 10_000)
    return st.builds(
        TensorSite,
        module=st.one_of(strategies.modules(), st.text(max_size=30), st.just("\ud800")),
        layer_type=term,
        layer_idx=st.integers(-1, 1000),
        operation=term,
        phase=term,
        component=term,
        quant_type=term,
        tensor_name=term,
        microbatch=small,
        call=small,
        mode=st.sampled_from(["train", "eval"]),
    )


def test_a_usual_name_reads_as_it_is() -> None:
    assert site_path(SITE) == "layers.0.attention.query,linear,L0,forward,pre,linear,bf16,input,m0,c0"


def test_a_pass_without_training_has_a_name_of_its_own() -> None:
    site = dataclasses.replace(SITE, mode="eval")
    assert site_path(site) == f"{site_path(SITE)},eval"


@given(sites())
def test_a_path_stays_in_its_folder_and_fits_every_store(site: TensorSite) -> None:
    path = site_path(site)
    assert path.isascii()
    assert len(path) <= MAX_PATH_LENGTH + 10
    for segment in path.split("/"):
        assert 0 < len(segment) <= 255
        assert not segment.startswith((".", "__"))
        assert set(segment) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~%,+")


@given(sites(), sites())
def test_two_sites_never_share_a_path(left: TensorSite, right: TensorSite) -> None:
    assert (site_path(left) == site_path(right)) == (left == right)


@pytest.mark.parametrize("module", ["m" * 1000, "\u6570" * 300, "a" * 199 + ".b" * 400])
def test_of_a_long_name_the_end_is_a_hash(module: str) -> None:
    site = dataclasses.replace(SITE, module=module)
    others = [dataclasses.replace(site, call=1), dataclasses.replace(site, module=f"{module}x")]
    assert len({site_path(one) for one in (site, *others)}) == 3
    assert re.fullmatch(r".{367}\+[0-9a-f]{32}", site_path(site).replace("+/", ""))
