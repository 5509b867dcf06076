"""Is docs/support.md what the tests' markers say, and does no field of the matrix stay unexplained?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import (
    COMPILED_COLUMNS,
    FEATURES,
    FRAMEWORKS,
    PAGE,
    PARALLELISMS,
    compiled_on,
    fields,
    fields_on,
    marked_fields,
    page,
)


def test_the_page_shows_what_the_markers_name() -> None:
    shown = set(fields_on(PAGE.read_text(encoding="utf-8")))
    marked = marked_fields(Path(__file__).parent)
    assert shown == marked, "run 'make support' again"


def test_every_field_without_a_test_has_a_reason() -> None:
    text = page(dict.fromkeys(marked_fields(Path(__file__).parent), 1), ())
    rows = [line for line in text.splitlines() if line.startswith(tuple(f"| {feature} |" for feature in FEATURES))]
    assert len(rows) == len(FRAMEWORKS) * len(FEATURES)
    assert all(line.count("|") == len(PARALLELISMS) + 2 for line in rows)


def test_a_marker_cannot_name_what_is_not_in_the_matrix() -> None:
    with pytest.raises(ValueError, match="'FSDP1' is not in the matrix of support: use one of one process"):
        fields({"framework": "PyTorch", "parallelism": "FSDP1", "features": ("linear",)})


def test_a_field_of_compiled_code_must_be_full() -> None:
    full = dict.fromkeys(COMPILED_COLUMNS, "3 of 3")
    proven = dict.fromkeys(marked_fields(Path(__file__).parent), 1)
    assert compiled_on(page(proven, [("whole", full)])) == {"whole": full}
    with pytest.raises(ValueError, match="whole / linear forward is 2 of 3: compiled code shows less"):
        page(proven, [("whole", full | {"linear forward": "2 of 3"})])
