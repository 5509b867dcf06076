"""Does `ranktape doctor` see what a machine has, and say of what it lacks how to get it?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from ranktape.launch.cli import cli
from ranktape.storage.places.urls import open_backend
from tests.s3 import S3Server


def doctor(*words: str) -> Result:
    """The command in this process; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, ["doctor", *words], catch_exceptions=False)


def findings(*words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """What it says of each thing, by name."""
    result = doctor(*words, "--json")
    assert result.exit_code == code, result.stderr
    document = json.loads(result.stdout)
    assert bool(document["lacking"]) == bool(code)
    return {one["name"]: one for one in document["findings"]}


def test_a_machine_that_has_everything(tmp_path: Path) -> None:
    found = findings(str(tmp_path / "new" / "run"))
    assert found["numpy"]["found"] == np.__version__
    assert found["torch"]["found"] == torch.__version__
    assert sys.executable in found["Python"]["found"]
    assert not found["gloo"]["way_out"]
    assert found["kernels"]["found"].startswith("cached in ")
    assert found["memory"]["found"].endswith(" available")
    assert found[str(tmp_path / "new" / "run")]["found"] == "an object can be written, read and removed"
    assert not any(one["is_lacking"] for one in found.values())
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_lacking(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    result = doctor(str(tmp_path / "file" / "run"))
    assert result.exit_code == 3
    assert result.stdout.endswith("1 item missing\n")
    assert f"Error: {tmp_path / 'file' / 'run'}: see above how to get it" in result.stderr
    found = findings(str(tmp_path / "file" / "run"), code=3)[str(tmp_path / "file" / "run")]
    assert found["found"].startswith("cannot be used: ")
    assert (tmp_path / "file").read_text() == "a file"


@pytest.mark.parametrize(
    ("url", "said"),
    [("memory://run", "inside of one process only"), ("nosuch://bucket/run", "nosuch"), ("s3:/bucket/run", "s3://")],
)
def test_an_url_that_is_none_is_lacking(url: str, said: str) -> None:
    store = findings(url, code=3)[url]
    assert store["found"].startswith("cannot be used: ")
    assert said in store["found"]


@pytest.mark.s3
def test_an_object_store_is_written_to_and_left_as_it_was(s3_server: S3Server) -> None:
    url = s3_server.new_url()
    options = json.dumps(s3_server.storage_options)
    found = findings(url, "--storage-options", options)[url]
    assert not found["is_lacking"]
    assert open_backend(url, storage_options=s3_server.storage_options).list_keys("") == []
    wrong = json.dumps(s3_server.storage_options | {"secret": "wrong-secret-1234"})
    result = doctor(url, "--storage-options", wrong)
    assert result.exit_code in {0, 3}
    assert "wrong-secret-1234" not in result.output


def test_packages_that_are_missing_or_old_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ranktape-9.0.dist-info"
    folder.mkdir()
    needs = ("nowhere-such>=1", "numpy>=99", 'nothing-such>=2; extra == "parquet"', 'ruff>=99; extra == "test"')
    lines = ["Metadata-Version: 2.4", "Name: ranktape", "Version: 9.0", *(f"Requires-Dist: {one}" for one in needs)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = findings(code=3)
    assert "ruff" not in found
    assert (found["nowhere-such"]["is_lacking"], found["nowhere-such"]["way_out"]) == (True, "pip install ranktape")
    assert found["numpy"]["found"] == f"{np.__version__}, but >=99 is required"
    assert found["numpy"]["way_out"] == "pip install --upgrade 'numpy>=99'"
    assert not found["nothing-such"]["is_lacking"]
    assert found["nothing-such"]["way_out"] == "pip install 'ranktape[parquet]'"


def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "nowhere-g++")
    found = findings()["C++ compiler"]
    assert found["found"] == "not available"
    assert not found["is_lacking"]
    assert "install nowhere-g++" in found["way_out"]
