"""Do names that a stranger gave to modules do anything in a report but stand there?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ranktape.analyze.views.report.page import write_report
from tests.analyze.report_page import HOSTILE, Page
from tests.analyze.runs import describe_tensor, store

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


def test_names_of_strangers_do_nothing(chromium: Chrome, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = [
        describe_tensor(
            (rng.standard_normal((2, 64)) * (1e4 if index == 1 and rank == 1 else 1)).astype(ml_dtypes.bfloat16),
            module=f"{name}.{layer}",
            layer_idx=layer,
            layer_type=name[:60],
            tensor_name=name[:60],
            component=name[:60],
            rank=rank,
            sample_dim=0,
        )
        for index, name in enumerate(HOSTILE)
        for layer in range(2)
        for rank in range(3)
    ]
    path = write_report(
        store(tmp_path / "run", tensors).select(), output=tmp_path / "report.html", url=HOSTILE[0], scope=HOSTILE[1]
    )
    page = Page(chromium, path)
    page.open()
    for menu, column in (("rows", "module"), ("rows", "kind"), ("lines", "component"), ("columns", "kind")):
        page.type(f"#{menu}", column)
    page.click(".filter[data-field=module] summary")
    page.click("tr[data-record='7']")
    page.click("[data-finding='0']")
    assert HOSTILE[0] in page.text("h1")
    assert HOSTILE[1][:20] in page.text("#findings")
    assert page.ask("return window.hurt") is None
    # Nothing of theirs became an element, in the page or in a chart.
    assert page.ask("return document.querySelectorAll('img, a[href^=javascript], a:not([data-finding])').length") == 0
    # And nothing was asked of anybody: what was loaded is this file and what it holds.
    loaded = page.ask("return performance.getEntriesByType('resource').map((one) => one.name.slice(0, 5))")
    assert set(loaded) <= {"data:", "blob:"}
    assert page.log() == []
