"""Does every string survive the way into a path and back, without leaving its folder?"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.errors import RunFormatError, UsageError
from ranktape.storage.names import MAX_PATH_LENGTH, Site, parse_site_path, site_path
from tests import strategies

SITE = Site(
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


def sites() -> st.SearchStrategy[Site]:
    term = st.text(max_size=20)
    small = st.integers(0, 10_000)
    return st.builds(
        Site,
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
    assert parse_site_path(site_path(site)) == site
    assert parse_site_path(site_path(SITE)).mode == "train"


@given(sites())
def test_a_site_comes_back_from_its_path(site: Site) -> None:
    try:
        path = site_path(site)
    except UsageError:
        return  # too long for an object store; that is said, not cut
    assert parse_site_path(path) == site


@given(sites())
def test_a_path_stays_in_its_folder_and_fits_every_store(site: Site) -> None:
    try:
        path = site_path(site)
    except UsageError:
        return
    assert path.isascii()
    assert len(path) <= MAX_PATH_LENGTH + 10
    for segment in path.split("/"):
        assert 0 < len(segment) <= 255
        assert not segment.startswith((".", "__"))
        assert set(segment) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~%,+")


@given(sites(), sites())
def test_two_sites_never_share_a_path(left: Site, right: Site) -> None:
    try:
        paths = site_path(left), site_path(right)
    except UsageError:
        return
    assert (paths[0] == paths[1]) == (left == right)


def test_a_name_that_no_store_holds_is_refused() -> None:
    with pytest.raises(UsageError, match="shorten the module path"):
        site_path(Site(**{name: getattr(SITE, name) for name in SITE.__slots__} | {"module": "m" * 1000}))


@pytest.mark.parametrize(
    "path", ["", "zarr.json", "a,b", "a,b,X0,d,e,f,g,h,m0,c0", "a,b,L,d,e,f,g,h,m0,c0", "a,b,Lx,d,e,f,g,h,m0,c0"]
)
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(RunFormatError, match="not the path of a captured tensor"):
        parse_site_path(path)
